// Children share descriptors and offsets.
#include "say.h"
#include <sched.h>

extern char **environ;
static char bytes[4096], back[8192];

static void ends_well(pid_t child)
{
    int status = -1;
    MUST(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

// Both write in turn at the shared offset, and each at offsets of its own.
static void turns(int fd, pid_t child, const char *who, int ends[4])
{
    char token;
    for (int round = 0; round < 75; round++) {
        if (child == 0)
            MUST(read(ends[0], &token, 1) == 1);
        MUST(write(fd, who, strlen(who)) == (ssize_t)strlen(who));
        MUST(pwrite(fd, who, 1, 10000 + 2 * round + (child == 0)) == 1);
        MUST(write(ends[child == 0 ? 3 : 1], "t", 1) == 1);
        if (child != 0)
            MUST(read(ends[2], &token, 1) == 1);
    }
}

static void by(const char *path, pid_t (*fork_)(void))
{
    int fd = must_open(path, O_RDWR | O_CREAT), ends[4];
    MUST(pipe(ends) == 0 && pipe(ends + 2) == 0);
    MUST(write(fd, "begin ", 6) == 6);
    fflush(stdout);
    pid_t child = fork_();
    turns(fd, child, child ? "parent " : "child ", ends);
    if (child == 0)
        _exit(0);
    ends_well(child);
    SAY(at(fd));
    SAY(pread(fd, back, sizeof back, 0));
    SAY(sum_of(back, sizeof back));
    for (int i = 0; i < 4; i++)
        close(ends[i]);
    close(fd);
}

enum { RECORDS = 5000, RECORD = 16 };

// All write as fast as they can at the shared offset, and no write is lost.
static void race(int fd)
{
    for (int i = 0; i < RECORDS; i++)
        MUST(write(fd, "a whole record.\n", RECORD) == RECORD);
}

static void all_there(int fd, off_t start, int writers)
{
    char record[RECORD];
    SAY(at(fd) == start + writers * RECORDS * RECORD);
    lseek(fd, start, SEEK_SET);
    for (int i = 0; i < writers * RECORDS; i++)
        MUST(read(fd, record, RECORD) == RECORD && memcmp(record, "a whole record.\n", RECORD) == 0);
}

static void raced(pid_t (*fork_)(void))
{
    int fd = must_open("raced", O_RDWR | O_CREAT | O_TRUNC);
    MUST(write(fd, "begin ", 6) == 6);
    fflush(stdout);
    pid_t child = fork_();
    race(fd);
    if (child == 0)
        _exit(0);
    ends_well(child);
    all_there(fd, 6, 2);
    close(fd);
}

static pid_t raw_fork(void)
{
    return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

// A child opens, closes and writes as it likes; the parent's numbers stay the same.
static void apart(void)
{
    int one = must_open("one", O_RDWR | O_CREAT), two = must_open("two", O_RDWR | O_CREAT);
    pid_t child = fork();
    if (child == 0) {
        MUST(dup2(one, two) == two);
        MUST(pwrite(two, "child", 5, 0) == 5);
        close(one);
        int again = must_open("three", O_RDWR | O_CREAT);
        MUST(again == one && write(again, "three", 5) == 5);
        MUST(pread(again, back, 10, 0) == 5);
        _exit(0);
    }
    ends_well(child);
    SAY(pwrite(two, "parent", 6, 0));
    SAY(pread(one, back, 10, 0));
    close(one), close(two);
}

// A number above all earlier ones, which only `dup2` gave, is inherited as well.
static void above(void)
{
    int fd = must_open("above", O_RDWR | O_CREAT);
    MUST(dup2(fd, 90) == 90);
    close(fd);
    pid_t child = fork();
    if (child == 0) {
        MUST(must_open("below", O_RDWR | O_CREAT) == fd);
        MUST(pwrite(90, "above", 5, 0) == 5);
        _exit(0);
    }
    ends_well(child);
    SAY(pread(90, back, 10, 0));
    close(90);
}

// A copy made without `fork` may be a copy of a program with threads, and must not allocate: the
// kernel serves all its calls.
static void untold(pid_t (*fork_)(void))
{
    int fd = must_open("untold", O_RDWR | O_CREAT);
    MUST(pwrite(fd, "before", 6, 0) == 6);
    fflush(stdout);
    long opens = counted(OPENS), writes = counted(WRITES);
    pid_t child = fork_();
    if (child == 0) {
        int fresh = open("untold", O_RDWR);
        MUST(fresh >= 0 && write(fresh, "fresh", 5) == 5 && pwrite(fd, "old", 3, 9) == 3);
        MUST(counted(OPENS) == opens && counted(WRITES) == writes);
        _exit(0);
    }
    ends_well(child);
    SAY(pread(fd, back, 20, 0));
    SAY(sum_of(back, 12));
    close(fd);
}

static int spoiled;

pid_t __vfork(void) __attribute__((returns_twice));

// A child of the child; its end must not end the first `vfork`.
static __attribute__((noinline)) int vforks(void)
{
    int status = -1;
    pid_t child = vfork();
    if (child == 0)
        _exit(0);
    return waitpid(child, &status, 0) == child && status == 0;
}

static void vforked(int by_other_name)
{
    int one = must_open("one", O_RDWR), two = must_open("two", O_RDWR), ends[2];
    MUST(pipe(ends) == 0);
    MUST(write(one, "o", 1) == 1);
    signal(SIGUSR1, SIG_IGN);
    pid_t child = by_other_name ? __vfork() : vfork();
    if (child == 0) {
        dup2(ends[1], one);
        dup2(one, 40);
        close(two);
        signal(SIGUSR1, SIG_DFL);
        spoiled = !vforks();
        spoiled |= write(one, "pipe", 4) != 4 || write(40, "p40", 3) != 3 || pwrite(one, "p", 1, 0) != -1;
        _exit(spoiled);
    }
    ends_well(child);
    SAY(read(ends[0], back, 100));
    SAY(write(one, "ne", 2));
    SAY(pread(one, back, 3, 0));
    SAY(memcmp(back, "one", 3));
    SAY(pwrite(two, "two", 3, 0));
    SAY(write(40, "x", 1));
    SAY(signal(SIGUSR1, SIG_DFL) == SIG_IGN);
    close(one), close(two), close(ends[0]), close(ends[1]);
}

// A process in the same memory with descriptors of its own.
static int apart_fd, apart_ends[2];

static int run_apart(void *argument)
{
    (void)argument;
    int fd = apart_fd;
    if (dup2(apart_ends[1], fd) != fd || write(fd, "pipe", 4) != 4 || pwrite(fd, "p", 1, 0) != -1)
        _exit(1);
    if (close(fd) != 0 || pread(fd, back, 1, 0) != -1)
        _exit(2);
    _exit(0);
}

static void cloned_apart(int flags)
{
    static char stack[65536] __attribute__((aligned(16)));
    int fd = apart_fd = must_open("apart", O_RDWR | O_CREAT | O_TRUNC);
    MUST(pipe(apart_ends) == 0);
    SAY(write(fd, "before", 6));
    fflush(stdout);
    ends_well(clone(run_apart, stack + sizeof stack, SIGCHLD | CLONE_VM | flags, 0));
    SAY(read(apart_ends[0], back, 100));
    SAY(write(fd, "behind", 6));
    SAY(pread(fd, back, 100, 0));
    SAY(memcmp(back, "beforebehind", 12));
    close(fd), close(apart_ends[0]), close(apart_ends[1]);
    // A file that is opened now.
    fd = must_open("apart", O_RDWR);
    SAY(pwrite(fd, "opened", 6, 3));
    SAY(pread(fd, back, 100, 0));
    close(fd);
}

// A process that shares descriptors, and reuses a number for another file.
static int run_together(void *argument)
{
    (void)argument;
    close(apart_fd);
    _exit(open("other", O_RDWR | O_CREAT, 0644) != apart_fd);
}

static void cloned_together(int flags)
{
    static char stack[65536] __attribute__((aligned(16)));
    // In a process of its own, which leaves everything to the kernel from then on.
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int fd = apart_fd = must_open("together", O_RDWR | O_CREAT);
        MUST(pwrite(fd, "one", 3, 0) == 3);
        ends_well(clone(run_together, stack + sizeof stack, SIGCHLD | CLONE_FILES | flags, 0));
        SAY(pread(fd, back, 10, 0));
        SAY(pwrite(fd, "other", 5, 0));
        unlink("other");
        _exit(0);
    }
    ends_well(child);
}

// The same, by the number of the system call.
static void called_together(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        apart_fd = must_open("together", O_RDWR | O_CREAT);
        MUST(pwrite(apart_fd, "one", 3, 0) == 3);
        pid_t inner = syscall(SYS_clone, SIGCHLD | CLONE_FILES, 0, 0, 0, 0);
        if (inner == 0)
            run_together(0);
        ends_well(inner);
        SAY(pread(apart_fd, back, 10, 0));
        SAY(pwrite(apart_fd, "other", 5, 0));
        unlink("other");
        _exit(0);
    }
    ends_well(child);
}

static void others(void)
{
    int fd = must_open("others", O_RDWR | O_CREAT);
    MUST(dup2(fd, 8) == 8);
    MUST(write(fd, "first ", 6) == 6);
    MUST(system("echo system >&8") == 0);
    MUST(write(fd, "second ", 7) == 7);
    char *arguments[] = {"sh", "-c", "echo spawned >&8", 0};
    pid_t child;
    MUST(posix_spawnp(&child, "sh", 0, 0, arguments, environ) == 0);
    ends_well(child);
    MUST(write(8, "third ", 6) == 6);
    FILE *stream = popen("cat >&8", "w");
    fprintf(stream, "through a pipe\n");
    pclose(stream);
    MUST(write(fd, "fourth", 6) == 6);
    SAY(at(fd));
    // A file that is opened now is shared with no process.
    int later = must_open("later", O_RDWR | O_CREAT);
    MUST(write(later, "later", 5) == 5);
    close(fd), close(8), close(later);
}

static void passed(void)
{
    int ends[2], fd = must_open("passed", O_RDWR | O_CREAT), got = -1;
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    pid_t child = fork();
    char space[CMSG_SPACE(sizeof fd)] = {0}, byte = 0;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    if (child == 0) {
        close(fd);
        MUST(recvmsg(ends[1], &message, 0) == 1);
        memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof got);
        race(got);
        _exit(0);
    }
    // Opened after the fork, so that only the message shares it.
    close(fd);
    fd = must_open("passed", O_RDWR);
    MUST(write(fd, "before ", 7) == 7);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    MUST(sendmsg(ends[0], &message, 0) == 1);
    race(fd);
    ends_well(child);
    all_there(fd, 7, 2);
    close(fd), close(ends[0]), close(ends[1]);
}

static void executes(int way)
{
    char *arguments[] = {"sh", "-c", "echo executed", 0};
    void *volatile bad = (void *)8;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        switch (way) {
        case 0: execve("/bin/sh", arguments, environ); break;
        case 1: execv("/bin/sh", arguments); break;
        case 2: execvp("sh", arguments); break;
        case 3: execvpe("sh", arguments, environ); break;
        case 4: execveat(AT_FDCWD, "/bin/sh", arguments, environ, 0); break;
        case 5: fexecve(open("/bin/sh", O_RDONLY), arguments, environ); break;
        case 6: execlp("sh", "sh", "-c", "echo $3", "1", "2", "executed", "4", (char *)0); break;
        case 7: execle("/bin/sh", "sh", "-c", "echo $3$4", "1", "2", "exe", "cuted", (char *)0, environ); break;
        case 8: SAY(execl("/nowhere", "sh", (char *)0)); break;
        case 9: SAY(execve((char *)bad, arguments, environ)); break;
        case 10: SAY(execve("/bin/sh", arguments, (char **)bad)); break;
        case 11: SAY(execvp("no-such-program", arguments)); break;
        }
        fflush(stdout);
        _exit(way < 8);
    }
    ends_well(child);
}

// The kernel serves descriptors that are inherited over `exec`.
static void executed(char *self)
{
    int fd = must_open("executed", O_RDWR | O_CREAT);
    MUST(write(fd, "before ", 7) == 7);
    char number[20];
    sprintf(number, "%d", fd);
    fflush(stdout);
    execl(self, self, number, (char *)0);
}

int main(int count, char **arguments)
{
    if (count > 1) {
        int fd = atoi(arguments[1]);
        SAY(write(fd, "after", 5));
        SAY(pread(fd, back, 100, 0));
        return 0;
    }
    fill(bytes, sizeof bytes, 3);
    by("fork", fork);
    by("_Fork", _Fork);
    by("raw", raw_fork);
    raced(fork);
    raced(_Fork);
    raced(raw_fork);
    apart();
    above();
    untold(_Fork);
    untold(raw_fork);
    vforked(0);
    vforked(1);
    cloned_apart(CLONE_VFORK);
    cloned_together(0);
    cloned_together(CLONE_VM);
    cloned_together(CLONE_VM | CLONE_VFORK);
    called_together();
    others();
    passed();
    cloned_apart(0);
    for (int way = 0; way < 12; way++)
        executes(way);
    executed(arguments[0]);
    return 1;
}
