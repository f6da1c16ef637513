// A process that gets a system call filter or a memory limit after it has joined a mount. The
// arguments are a file on the mount, and the kind of restriction.
#include "must_join.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

static const char *how;
static volatile int heard;

static void hear(int kind)
{
    heard = kind;
}

// The process ends by SIGSYS at any other call.
#define ALLOW(name)                                                \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1),         \
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
static struct sock_filter rules[] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    ALLOW(read), ALLOW(write), ALLOW(pread64), ALLOW(pwrite64), ALLOW(exit_group), ALLOW(close),
    ALLOW(rt_sigreturn), ALLOW(dup), ALLOW(rt_sigaction), ALLOW(fork), ALLOW(clone), ALLOW(openat),
    ALLOW(set_robust_list), ALLOW(wait4), ALLOW(fsync), ALLOW(tgkill), ALLOW(gettid), ALLOW(getpid),
    ALLOW(readv), ALLOW(pwritev), ALLOW(rt_sigprocmask), ALLOW(execve),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
};
static struct sock_fprog filter = {sizeof rules / sizeof *rules, rules};

static void confine(void)
{
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (!strcmp(how, "strict"))
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
    if (!strcmp(how, "prctl"))
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
    if (!strcmp(how, "seccomp"))
        MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0);
    if (!strcmp(how, "all threads"))
        MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) == 0);
}

static void limit_memory(void)
{
    struct rlimit limit = {96 << 20, RLIM_INFINITY};
    MUST(setrlimit(RLIMIT_AS, &limit) == 0);
    void *memory = malloc(48 << 20);
    MUST(memory);
    free(memory);
}

static void say(const char *text)
{
    MUST(write(1, text, strlen(text)) == (ssize_t)strlen(text));
}

int main(int argc, char **argv)
{
    char page[4096] = {2};
    struct iovec part = {page, sizeof page};
    struct sigaction action = {.sa_handler = hear};
    MUST(argc == 3);
    how = argv[2];
    if (!strcmp(how, "limited"))
        limit_memory();
    int fd = open(argv[1], O_RDWR | O_CREAT, 0644);
    MUST(fd >= 0);
    MUST(sigaction(SIGUSR1, &action, 0) == 0);
    if (strcmp(how, "limited"))
        close(joined(argv[1]));
    else
        for (int i = 0; i < 200; i++)
            MUST(pwrite(fd, page, sizeof page, 0) == sizeof page);
    if (!strcmp(how, "limit"))
        limit_memory();
    else if (!strcmp(how, "locked"))
        MUST(mlockall(MCL_CURRENT) == 0);
    else
        confine();
    if (strstr(how, "limit") || !strcmp(how, "locked"))
        MUST(!has_pools() && threads() == 1);
    // Calls for which the direct path would make further system calls: the offset, the pages, other
    // descriptors.
    MUST(write(fd, page, sizeof page) == sizeof page);
    MUST(read(fd, page, 100) >= 0);
    if (strcmp(how, "strict")) {
        MUST(pwrite(fd, page, sizeof page, 8192) == sizeof page);
        MUST(pread(fd, page, sizeof page, 8192) == sizeof page);
        MUST(pwritev(fd, &part, 1, 0) == sizeof page);
        MUST(readv(fd, &part, 1) >= 0);
        MUST(fsync(fd) == 0);
        int other = dup(fd);
        MUST(other >= 0);
        MUST(close(other) == 0);
        MUST(raise(SIGUSR1) == 0 && heard == SIGUSR1);
        struct sigaction seen;
        MUST(sigaction(SIGUSR1, 0, &seen) == 0 && seen.sa_handler == hear);
        other = open(argv[1], O_RDWR);
        MUST(other >= 0);
        MUST(write(other, page, sizeof page) == sizeof page);
        MUST(close(other) == 0);
        MUST(close(fd) == 0);
        MUST(execlp("no-such-program", "no-such-program", (char *)0) == -1 && errno == ENOENT);
    }
    say("done\n");
    if (!strcmp(how, "strict"))
        syscall(SYS_exit, 3);
    _exit(3);
}
