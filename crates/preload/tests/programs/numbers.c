// Numbers that were closed without the library, and the files that get them next.
#include "say.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>

static char bytes[4096], back[8192];

static long bare(long number, long a, long b, long c)
{
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return result;
}

// A file of the engine that was closed without the library, as `io_uring` does it. Returns its
// number.
static int gone(void)
{
    int fd = must_open("gone", O_RDWR | O_CREAT);
    MUST(pwrite(fd, bytes, sizeof bytes, 0) == sizeof bytes);
    MUST(bare(SYS_close, fd, 0, 0) == 0);
    return fd;
}

// The kernel's results for a number that leads to another file.
static void is_other(int fd)
{
    SAY(pread(fd, back, 10, 0));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(fsync(fd));
}

#define OTHER(make)                                                                           \
    do {                                                                                      \
        int number = gone(), made = (make);                                                   \
        SAY(made - number);                                                                   \
        is_other(made);                                                                       \
        close(made);                                                                          \
    } while (0)

#define OTHERS(make)                                                                          \
    do {                                                                                      \
        int number = gone(), ends[2];                                                         \
        SAY(make);                                                                            \
        SAY(ends[0] - number);                                                                \
        is_other(ends[0]);                                                                    \
        close(ends[0]), close(ends[1]);                                                       \
    } while (0)

static volatile sig_atomic_t in_handler;

static void opens(int signal)
{
    (void)signal;
    in_handler = open("/dev/zero", O_RDONLY);
}

static int opened_in_handler(void)
{
    signal(SIGUSR1, opens);
    raise(SIGUSR1);
    signal(SIGUSR1, SIG_DFL);
    return in_handler;
}

static int replace(int from)
{
    return dup2(from, in_handler);
}

static int accepted(int (*accept_)(int))
{
    static int listener = -1;
    struct sockaddr address = {.sa_family = AF_UNIX};
    int client;
    if (listener < 0) {
        // Out of the range of the numbers under test; the kernel chooses a name.
        int made = socket(AF_UNIX, SOCK_STREAM, 0);
        MUST((listener = fcntl(made, F_DUPFD, 500)) >= 0 && close(made) == 0);
        MUST(bind(listener, &address, sizeof address.sa_family) == 0 && listen(listener, 9) == 0);
    }
    int above = 510, made = bare(SYS_socket, AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_storage name;
    socklen_t len = sizeof name;
    MUST((client = bare(SYS_fcntl, made, F_DUPFD, above)) >= 0 && bare(SYS_close, made, 0, 0) == 0);
    MUST(getsockname(listener, (struct sockaddr *)&name, &len) == 0);
    MUST(connect(client, (struct sockaddr *)&name, len) == 0);
    int fd = accept_(listener);
    close(client);
    return fd;
}

static int by_accept(int listener)
{
    return accept(listener, 0, 0);
}

static int by_accept4(int listener)
{
    return accept4(listener, 0, 0, SOCK_CLOEXEC);
}

static int by_number(int listener)
{
    return syscall(SYS_accept, listener, 0, 0);
}

static int sockets[2] = {-1, -1};

// The receiving end of a message that carries a pipe's end.
static int received(int many)
{
    int got = -1, end = 520;
    char space[CMSG_SPACE(sizeof got)] = {0}, byte = 0;
    struct iovec part = {&byte, 1};
    struct mmsghdr all = {.msg_hdr = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space}};
    struct cmsghdr *header = CMSG_FIRSTHDR(&all.msg_hdr);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof end), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &end, sizeof end);
    MUST(sendmsg(sockets[0], &all.msg_hdr, 0) == 1);
    memset(space, 0, sizeof space);
    MUST((many ? recvmmsg(sockets[1], &all, 1, 0, 0) : recvmsg(sockets[1], &all.msg_hdr, 0)) == 1);
    memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&all.msg_hdr)), sizeof got);
    return got;
}

static void new_ones(void)
{
    sigset_t set;
    int ends[2], zero = open("/dev/zero", O_RDONLY);
    MUST(pipe(ends) == 0 && dup2(ends[1], 520) == 520);
    close(ends[0]), close(ends[1]);
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    sigemptyset(&set);
    close(accepted(by_accept));
    OTHER(open(".", O_RDONLY | O_DIRECTORY));
    OTHER(open("/dev/zero", O_RDONLY));
    OTHER(open("/dev/zero", O_PATH));
    OTHER(opened_in_handler());
    OTHER((in_handler = number, replace(sockets[0])));
    OTHER(dup3(sockets[0], number, O_CLOEXEC));
    OTHER(dup(sockets[0]));
    OTHER(fcntl(sockets[0], F_DUPFD, 3));
    OTHER(fcntl(sockets[0], F_DUPFD_CLOEXEC, 3));
    OTHER(socket(AF_UNIX, SOCK_STREAM, 0));
    OTHER(accepted(by_accept));
    OTHER(accepted(by_accept4));
    OTHER(received(0));
    OTHER(received(1));
    OTHER(eventfd(1, 0));
    OTHER(epoll_create(1));
    OTHER(epoll_create1(0));
    OTHER(memfd_create("memory", 0));
    OTHER(timerfd_create(CLOCK_MONOTONIC, 0));
    OTHER(signalfd(-1, &set, 0));
    OTHER(inotify_init());
    OTHER(inotify_init1(0));
    OTHER(syscall(SYS_openat, AT_FDCWD, "/dev/zero", O_RDONLY));
    OTHER(syscall(SYS_eventfd2, 0, 0));
    OTHER(syscall(SYS_dup, sockets[0]));
    OTHER(syscall(SYS_fcntl, sockets[0], F_DUPFD, 3));
    OTHER(syscall(SYS_dup2, sockets[0], number));
    OTHER(accepted(by_number));
    OTHERS(syscall(SYS_pipe2, ends, 0));
    OTHERS(syscall(SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, ends));
    OTHERS(pipe(ends));
    OTHERS(pipe2(ends, O_CLOEXEC));
    OTHERS(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    close(zero);
}

// The kernel refuses bad messages also if the library looks for descriptors in them.
static void bad_messages(void)
{
    int fd = must_open("bad messages", O_RDWR | O_CREAT);
    char *page = mmap(0, 2 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(page != MAP_FAILED && mprotect(page + 4096, 4096, PROT_NONE) == 0);
    char *past = page + 4096, byte = 0;
    struct iovec part = {&byte, 1};
    struct msghdr good = {.msg_iov = &part, .msg_iovlen = 1}, bad = good;
    struct cmsghdr *header = (struct cmsghdr *)(past - CMSG_SPACE(sizeof fd));
    size_t lens[] = {0, 15, CMSG_LEN(sizeof fd) + 9, 1ul << 30, SIZE_MAX - 20, SIZE_MAX};
    MUST(pwrite(fd, bytes, 9, 0) == 9);
    SAY(sendmsg(sockets[0], 0, 0));
    SAY(sendmsg(sockets[0], (struct msghdr *)16, 0));
    SAY(sendmsg(sockets[0], (struct msghdr *)(past - 20), 0));
    bad.msg_control = (void *)16, bad.msg_controllen = 64;
    SAY(sendmsg(sockets[0], &bad, 0));
    bad.msg_control = past - 16;
    SAY(sendmsg(sockets[0], &bad, 0));
    bad.msg_control = header;
    for (unsigned i = 0; i < sizeof lens / sizeof *lens; i++) {
        *header = (struct cmsghdr){.cmsg_len = lens[i], .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
        bad.msg_controllen = CMSG_SPACE(sizeof fd);
        SAY(sendmsg(sockets[0], &bad, 0));
        bad.msg_controllen = SIZE_MAX;
        SAY(sendmsg(sockets[0], &bad, 0));
    }
    SAY(sendmmsg(sockets[0], (struct mmsghdr *)16, 1, 0));
    SAY(sendmmsg(sockets[0], 0, 9, 0));
    struct mmsghdr *last = (struct mmsghdr *)past - 1;
    *last = (struct mmsghdr){.msg_hdr = good};
    SAY(sendmmsg(sockets[0], last, UINT_MAX, 0));
    SAY(recv(sockets[1], back, 9, MSG_DONTWAIT));
    SAY(recvmsg(sockets[1], (struct msghdr *)16, MSG_DONTWAIT));
    munmap(page, 2 * 4096);
    close(fd);
}

// Each with a write that the engine does, or no longer does: the test counts them.
static void by_numbers(void)
{
    int fd = must_open("by numbers", O_RDWR | O_CREAT), second = syscall(SYS_dup, fd);
    SAY(pwrite(second, bytes, 10, 0));
    SAY(syscall(SYS_dup2, fd, 60));
    SAY(pwrite(60, bytes, 10, 20));
    SAY(syscall(SYS_dup3, fd, 61, O_CLOEXEC));
    SAY(pwrite(61, bytes, 10, 40));
    SAY(syscall(SYS_fcntl, fd, F_DUPFD, 70));
    SAY(pwrite(70, bytes, 10, 60));
    SAY(syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 80));
    SAY(pwrite(80, bytes, 10, 80));
    SAY(syscall(SYS_close, fd));
    SAY(pwrite(fd, bytes, 10, 100));
    SAY(syscall(SYS_close_range, 60, 80, 0));
    SAY(pwrite(70, bytes, 10, 100));
    // A limit, and no limit.
    struct rlimit limit = {3000, RLIM_INFINITY}, none = {RLIM_INFINITY, RLIM_INFINITY};
    signal(SIGXFSZ, SIG_IGN);
    SAY(syscall(SYS_setrlimit, RLIMIT_FSIZE, &limit));
    SAY(pwrite(second, bytes, 1000, 2500));
    SAY(syscall(SYS_setrlimit, RLIMIT_FSIZE, &none));
    SAY(pwrite(second, bytes, 10, 120));
    SAY(syscall(SYS_prlimit64, 0, RLIMIT_FSIZE, &limit, 0));
    SAY(pwrite(second, bytes, 1000, 2500));
    SAY(syscall(SYS_prlimit64, 0, RLIMIT_FSIZE, &none, 0));
    SAY(pwrite(second, bytes, 10, 140));
    // Appends from now on.
    SAY(syscall(SYS_fcntl, second, F_SETFL, O_APPEND));
    SAY(write(second, bytes, 30));
    SAY(at(second));
    SAY(close(second));
}

static void sent_by_number(long number)
{
    int fd = must_open("sent", O_RDWR | O_CREAT);
    char space[CMSG_SPACE(sizeof fd)] = {0}, byte = 0;
    struct iovec part = {&byte, 1};
    struct mmsghdr all = {.msg_hdr = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space}};
    struct cmsghdr *header = CMSG_FIRSTHDR(&all.msg_hdr);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    SAY(write(fd, bytes, 10));
    SAY(syscall(number, sockets[0], &all, 1 - (number == SYS_sendmsg), 0));
    SAY(write(fd, bytes, 10));
    SAY(at(fd));
    SAY(recv(sockets[1], &byte, 1, 0));
    close(fd);
}

static void without_ranges(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_close_range, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof code / sizeof *code, code};
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
}

static void ranges(void)
{
    int fd = must_open("ranges", O_RDWR | O_CREAT), zero = open("/dev/zero", O_RDONLY);
    SAY(pwrite(fd, bytes, 10, 0));
    SAY(close_range(zero, fd, 0));
    SAY(syscall(SYS_close_range, zero, fd, 0));
    SAY(pwrite(fd, bytes, 10, 10));
    for (int i = 0; i < 100; i++)
        MUST(dup2(i % 2 ? fd : zero, 600 + i) == 600 + i);
    fflush(stdout);
    without_ranges();
    closefrom(fd);
    SAY(fcntl(fd, F_GETFD));
    SAY(fcntl(zero, F_GETFD));
    int left = 0;
    for (int i = 0; i < 100; i++)
        left += fcntl(600 + i, F_GETFD) != -1;
    SAY(left);
    SAY(pread(601, back, 10, 0));
}

int main(void)
{
    fill(bytes, sizeof bytes, 6);
    new_ones();
    bad_messages();
    by_numbers();
    sent_by_number(SYS_sendmsg);
    sent_by_number(SYS_sendmmsg);
    ranges();
    return 0;
}
