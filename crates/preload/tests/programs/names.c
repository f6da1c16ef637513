// Names that the other programs do not call: those for long files, those that check lengths, and
// those of old programs.
#include "say.h"

#include <sys/prctl.h>
#include <ulimit.h>
#include <pty.h>
#include <sys/sendfile.h>
#include <utmp.h>

static char bytes[4096], back[8192];

// Declared as by the headers for programs with checked calls.
int __open_2(const char *, int);
int __open64_2(const char *, int);
int __openat_2(int, const char *, int);
int __openat64_2(int, const char *, int);
ssize_t __read_chk(int, void *, size_t, size_t);
ssize_t __pread_chk(int, void *, size_t, off_t, size_t);
ssize_t __pread64_chk(int, void *, size_t, off64_t, size_t);
int __close(int);
int __sigaction(int, const struct sigaction *, struct sigaction *);
int __dup2(int, int);
int __fcntl(int, int, ...);
int __clone(int (*)(void *), void *, int, void *, ...);
void (*bsd_signal(int, void (*)(int)))(int);
void (*__sysv_signal(int, void (*)(int)))(int);

// The engine did it: the file has the bytes that were read and written.
static void is_direct(int fd)
{
    MUST(fd >= 0);
    SAY(pwrite(fd, bytes, 100, 7));
    SAY(pread(fd, back, 100, 20));
    SAY(sum_of(back, 100));
    close(fd);
}

static void opening(void)
{
    close(must_open("opened", O_RDWR | O_CREAT));
    is_direct(open("opened", O_RDWR));
    is_direct(open64("opened", O_RDWR));
    is_direct(open64("made", O_RDWR | O_CREAT, 0600));
    is_direct(openat(AT_FDCWD, "opened", O_RDWR));
    is_direct(openat64(AT_FDCWD, "opened", O_RDWR));
    is_direct(openat64(AT_FDCWD, "made there", O_RDWR | O_CREAT, 0640));
    is_direct(__open_2("opened", O_RDWR));
    is_direct(__open64_2("opened", O_RDWR));
    is_direct(__openat_2(AT_FDCWD, "opened", O_RDWR));
    is_direct(__openat64_2(AT_FDCWD, "opened", O_RDWR));
    is_direct(creat("created", 0600));
    is_direct(creat64("created long", 0604));
    SAY(open64("nothing", O_RDWR));
    SAY(openat64(-1, "nothing", O_RDWR));
    SAY(__open_2("nothing", O_RDWR));
    SAY(__open64_2("nothing", O_RDWR));
    SAY(__openat_2(AT_FDCWD, "nothing", O_RDWR));
    SAY(__openat64_2(AT_FDCWD, "nothing", O_RDWR));
    SAY(creat64("no/thing", 0600));
    struct stat stat;
    MUST(lstat("made there", &stat) == 0);
    SAY(stat.st_mode);
    MUST(lstat("created long", &stat) == 0);
    SAY(stat.st_mode);
}

static void transfers(void)
{
    int fd = open64("long", O_RDWR | O_CREAT, 0600);
    struct iovec two[] = {{bytes, 100}, {bytes + 7, 300}}, into[] = {{back, 9}, {back + 9, 700}};
    off64_t far = 5ll << 30;
    SAY(pwrite64(fd, bytes, 500, far));
    SAY(pread64(fd, back, 4000, far + 3));
    SAY(sum_of(back, 497));
    SAY(pwritev64(fd, two, 2, far + 4000));
    SAY(preadv64(fd, into, 2, far + 3990));
    SAY(sum_of(back, 410));
    SAY(pwritev64v2(fd, two, 2, far + 10, 0));
    SAY(pwritev64v2(fd, two, 1, far + 11, RWF_DSYNC));
    SAY(preadv64v2(fd, into, 2, far + 5, 0));
    SAY(sum_of(back, 709));
    SAY(lseek64(fd, far + 100, SEEK_SET));
    SAY(pwritev64v2(fd, two, 2, -1, 0));
    SAY(preadv64v2(fd, into, 2, -1, 0));
    SAY(sum_of(back, 709));
    SAY(lseek64(fd, 0, SEEK_CUR));
    SAY(lseek64(fd, -50, SEEK_END));
    SAY(lseek(fd, -60, SEEK_END));
    SAY(__read_chk(fd, back, 20, sizeof back));
    SAY(__pread_chk(fd, back, 60, far, sizeof back));
    SAY(__pread64_chk(fd, back, 60, far + 9, sizeof back));
    SAY(sum_of(back, 60));
    SAY(readv(fd, into, 2));
    SAY(writev(fd, two, 2));
    SAY(fsync(fd));
    SAY(fdatasync(fd));
    // The kernel serves other names, and the exported ones see their effects.
    SAY(ftruncate64(fd, far + 50));
    SAY(pread64(fd, back, 100, far));
    SAY(posix_fallocate64(fd, far, 200));
    SAY(posix_fadvise(fd, 0, 100, POSIX_FADV_WILLNEED));
    SAY(posix_fadvise64(fd, 0, 100, POSIX_FADV_WILLNEED));
    SAY(posix_fadvise64(fd, 0, 100, POSIX_FADV_SEQUENTIAL));
    SAY(posix_fadvise64(fd, 0, -1, POSIX_FADV_WILLNEED));
    SAY(readahead(fd, 0, 100));
    SAY(fallocate64(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, far, 20));
    SAY(pread64(fd, back, 300, far));
    SAY(sum_of(back, 200));
    struct stat64 stat;
    SAY(fstat64(fd, &stat));
    SAY(stat.st_size);
    FILE *stream = fopen64("long", "r+");
    SAY(fseeko64(stream, far + 5, SEEK_SET));
    SAY(fwrite(bytes, 1, 9, stream));
    SAY(fclose(stream));
    SAY(pread64(fd, back, 30, far));
    SAY(sum_of(back, 30));
    SAY(ftruncate64(fd, 0));
    close(fd);
}

static void copied(void)
{
    int from = must_open("from", O_RDWR | O_CREAT), to = must_open("to", O_RDWR | O_CREAT), ends[2];
    off64_t at = 10, to_at = 700;
    MUST(pipe(ends) == 0);
    SAY(pwrite(from, bytes, 500, 0));
    SAY(copy_file_range(from, &at, to, &to_at, 300, 0));
    SAY(sendfile(to, from, &at, 50));
    SAY(sendfile64(to, from, &at, 4000));
    SAY(at);
    at = 20;
    SAY(splice(from, &at, ends[1], 0, 30, 0));
    SAY(read(ends[0], back, 100));
    SAY(pread(to, back, 2000, 0));
    SAY(sum_of(back, 1000));
    close(from), close(to), close(ends[0]), close(ends[1]);
}

static void mapped(void *(*map)(void *, size_t, int, int, int, off64_t))
{
    int fd = must_open("mapped", O_RDWR | O_CREAT);
    SAY(pwrite(fd, bytes, 4096, 0));
    char *page = map(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    MUST(page != MAP_FAILED);
    page[5] = 'x';
    SAY(pread(fd, back, 10, 0));
    SAY(sum_of(back, 10));
    SAY(pwrite(fd, "y", 1, 6));
    SAY(page[6]);
    munmap(page, 4096);
    close(fd);
}

// A duplicate of the number, which is closed with it.
static void controlled(int (*control)(int, int, ...))
{
    int fd = must_open("controlled", O_RDWR | O_CREAT), second = control(fd, F_DUPFD, 30);
    SAY(second);
    close(fd);
    SAY(write(second, bytes, 10));
    int third = control(second, F_DUPFD_CLOEXEC, 40);
    SAY(control(third, F_GETFD));
    SAY(pread(third, back, 20, 0));
    // Appends from now on, so the kernel serves it.
    SAY(control(second, F_SETFL, O_APPEND));
    SAY(pwrite(third, bytes, 10, 0));
    SAY(lseek(third, 0, SEEK_END));
    SAY(control(second, F_GETFL) & O_APPEND);
    SAY(ftruncate(second, 0));
    close(second), close(third);
}

// The number now belongs to the pipe's end.
static void is_pipe(int fd, int other)
{
    SAY(write(fd, "pipe", 4));
    SAY(read(other, back, 100));
    SAY(pwrite(fd, "p", 1, 0));
}

static void ends_well(pid_t child)
{
    int status = -1;
    fflush(stdout);
    MUST(child > 0 && waitpid(child, &status, 0) == child);
    SAY(status);
}

// Another process shares the offset from then on.
static void shared(int (*send)(int, struct msghdr *))
{
    int ends[2], fd = must_open("shared", O_RDWR | O_CREAT), got = -1;
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    char space[CMSG_SPACE(sizeof fd)] = {0}, byte = 0;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    SAY(write(fd, bytes, 10));
    MUST(send(ends[0], &message) == 1);
    MUST(recvmsg(ends[1], &message, 0) == 1);
    memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof got);
    SAY(write(fd, bytes, 10));
    SAY(write(got, bytes, 10));
    SAY(at(fd));
    close(fd), close(got), close(ends[0]), close(ends[1]);
}

static int by_one(int socket, struct msghdr *message)
{
    return sendmsg(socket, message, 0) == 1;
}

static int by_many(int socket, struct msghdr *message)
{
    struct mmsghdr all = {.msg_hdr = *message};
    return sendmmsg(socket, &all, 1, 0);
}

static int run_with(void *argument)
{
    int fd = *(int *)argument;
    _exit(write(fd, "cloned", 6) != 6);
}

static void cloned(int (*clone_)(int (*)(void *), void *, int, void *, ...))
{
    static char stack[65536] __attribute__((aligned(16)));
    int fd = must_open("cloned", O_RDWR | O_CREAT);
    SAY(write(fd, "before", 6));
    fflush(stdout);
    ends_well(clone_(run_with, stack + sizeof stack, SIGCHLD, &fd));
    SAY(write(fd, "behind", 6));
    SAY(at(fd));
    close(fd);
}

extern char **environ;

static void spawned(void)
{
    int fd = must_open("spawned", O_RDWR | O_CREAT);
    char *arguments[] = {"sh", "-c", "echo spawned >&8", 0};
    pid_t child;
    MUST(dup2(fd, 8) == 8);
    MUST(write(fd, "before ", 7) == 7);
    MUST(posix_spawn(&child, "/bin/sh", 0, 0, arguments, environ) == 0);
    ends_well(child);
    MUST(write(fd, "behind", 6) == 6);
    SAY(at(fd));
    close(fd), close(8);
}

static void limited(void)
{
    int fd = must_open("limited", O_RDWR | O_CREAT | O_TRUNC);
    struct rlimit limit = {3000, RLIM_INFINITY}, none = {RLIM_INFINITY, RLIM_INFINITY};
    struct rlimit64 limit64 = {2000, RLIM64_INFINITY}, none64 = {RLIM64_INFINITY, RLIM64_INFINITY};
    signal(SIGXFSZ, SIG_IGN);
    MUST(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    SAY(pwrite(fd, bytes, 1000, 2500));
    MUST(setrlimit(RLIMIT_FSIZE, &none) == 0);
    MUST(setrlimit64(RLIMIT_FSIZE, &limit64) == 0);
    SAY(pwrite(fd, bytes, 1000, 1500));
    MUST(setrlimit64(RLIMIT_FSIZE, &none64) == 0);
    MUST(prlimit(0, RLIMIT_FSIZE, &limit, 0) == 0);
    SAY(pwrite(fd, bytes, 1000, 2500));
    MUST(prlimit(0, RLIMIT_FSIZE, &none, 0) == 0);
    MUST(prlimit64(0, RLIMIT_FSIZE, &limit64, 0) == 0);
    SAY(pwrite(fd, bytes, 1000, 1500));
    MUST(prlimit64(0, RLIMIT_FSIZE, &none64, 0) == 0);
    SAY(pwrite(fd, bytes, 1000, 4000));
    close(fd);
}

int vlimit(int, int);

// Functions by which the C library sets limits without its exported names.
static void limited_for_good(int by_vlimit)
{
    enum { LIM_FSIZE = 2, LIMIT = 2560 };
    pid_t child = fork();
    if (child == 0) {
        int fd = must_open("limited", O_RDWR);
        SAY(by_vlimit ? vlimit(LIM_FSIZE, LIMIT) : ulimit(UL_SETFSIZE, LIMIT / 512));
        SAY(pwrite(fd, bytes, 1000, 2000));
        SAY(ulimit(UL_GETFSIZE));
        _exit(0);
    }
    ends_well(child);
}

static volatile sig_atomic_t handled;

static void plain(int signal)
{
    handled += signal;
}

static void other(int signal)
{
    handled += 1000 * signal;
}

static void (*by_other_name(int signal, void (*handler)(int)))(int)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    return __sigaction(signal, &action, &old) == 0 ? old.sa_handler : SIG_ERR;
}

// Each function that sets a handler returns the previous one, and its handler stays or not.
static void handlers(void)
{
    struct sigaction old;
    void (*(*const ways[])(int, void (*)(int)))(int) = {
        signal, bsd_signal, ssignal, sysv_signal, __sysv_signal, sigset, by_other_name,
    };
    for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++) {
        SAY(i);
        MUST(signal(SIGUSR1, SIG_DFL) != SIG_ERR);
        SAY(ways[i](SIGUSR1, plain) == SIG_DFL);
        SAY(ways[i](SIGUSR1, other) == plain);
        MUST(sigaction(SIGUSR1, 0, &old) == 0);
        SAY(old.sa_handler == other);
        SAY(old.sa_flags & ~0x04000000);
        handled = 0;
        raise(SIGUSR1);
        SAY(handled);
        MUST(sigaction(SIGUSR1, 0, &old) == 0);
        SAY(old.sa_handler == other);
        SAY(siginterrupt(SIGUSR1, i % 2));
    }
}

static void *quiet(void *argument)
{
    int old = -1, fd = *(int *)argument;
    MUST(pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &old) == 0);
    SAY(old);
    SAY(pwrite(fd, bytes, 10, 0));
    MUST(pthread_setcanceltype(old, &old) == 0);
    SAY(old);
    SAY(pwrite(fd, bytes, 10, 0));
    return 0;
}

static void cancelled_anywhere(void)
{
    int fd = must_open("cancelled", O_RDWR | O_CREAT);
    pthread_t thread;
    MUST(pthread_create(&thread, 0, quiet, &fd) == 0 && pthread_join(thread, 0) == 0);
    close(fd);
}

// The first three numbers of the child were files in the table.
static void files_below(const char *path)
{
    int fd = must_open(path, O_RDWR | O_CREAT);
    for (int number = 0; number < 3; number++)
        MUST(dup2(fd, number) == number);
    MUST(pwrite(1, "kept", 4, 0) == 4);
}

// A stream with the number of a file in the table.
static void reopened(FILE *(*again)(const char *, const char *, FILE *))
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        files_below("below");
        if (again("stream", "w", stdout) != stdout)
            _exit(1);
        _exit(pwrite(1, "written", 7, 2) != 7);
    }
    ends_well(child);
}

static void daemons(void)
{
    int ends[2];
    char byte = 0;
    MUST(pipe(ends) == 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        files_below("daemon");
        if (daemon(1, 0) != 0)
            _exit(1);
        // To no file.
        byte = pwrite(1, "lost", 4, 0) == 4;
        MUST(write(ends[1], &byte, 1) == 1);
        _exit(0);
    }
    close(ends[1]);
    ends_well(child);
    SAY(read(ends[0], &byte, 1));
    SAY(byte);
    close(ends[0]);
}

static void terminals(void)
{
    fflush(stdout);
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        files_below("terminal");
        int master = -1;
        pid_t below = forkpty(&master, 0, 0, 0);
        if (below == 0)
            // A terminal has no offsets.
            _exit(write(1, "to it", 5) != 5 || pwrite(1, "lost", 4, 0) != -1);
        char said[5];
        if (read(master, said, 5) != 5 || memcmp(said, "to it", 5) != 0)
            _exit(2);
        _exit(waitpid(below, &status, 0) != below || status != 0);
    }
    ends_well(child);
    child = fork();
    if (child == 0) {
        int master, slave;
        if (openpty(&master, &slave, 0, 0, 0) != 0)
            _exit(3);
        files_below("login");
        if (login_tty(slave) != 0)
            _exit(4);
        _exit(write(1, "to it", 5) != 5 || pwrite(1, "lost", 4, 0) != -1);
    }
    ends_well(child);
}

static void all_ended(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        files_below("all ended");
        _exit(fcloseall() != 0 || pwrite(1, "ended", 5, 3) != 5);
    }
    ends_well(child);
}

static void other_names(void)
{
    int ends[2], fd = must_open("other names", O_RDWR | O_CREAT);
    SAY(pwrite(fd, bytes, 9, 0));
    SAY(__close(fd));
    MUST(pipe(ends) == 0 && ends[0] == fd);
    SAY(pread(fd, back, 20, 0));
    is_pipe(ends[1], ends[0]);
    int other = must_open("other names", O_RDWR);
    SAY(pread(other, back, 20, 0));
    SAY(__dup2(ends[1], other) - other);
    is_pipe(other, ends[0]);
    close(other), close(ends[0]), close(ends[1]);
}

static void ranges(void)
{
    int ends[2], fd = must_open("ranges", O_RDWR | O_CREAT);
    SAY(pwrite(fd, bytes, 9, 0));
    close_range(fd, fd + 1, 0);
    MUST(pipe(ends) == 0 && ends[0] == fd);
    SAY(pread(fd, back, 9, 0));
    close(ends[0]), close(ends[1]);
    MUST(must_open("ranges", O_RDWR) == fd);
    SAY(pread(fd, back, 9, 0));
    closefrom(fd);
    MUST(pipe(ends) == 0 && ends[0] == fd);
    SAY(pread(fd, back, 9, 0));
    close(ends[0]), close(ends[1]);
    fd = must_open("ranges", O_RDWR);
    SAY(dup3(fd, fd + 5, O_CLOEXEC) - fd);
    SAY(pwrite(fd + 5, bytes, 9, 0));
    SAY(syscall(SYS_close, fd + 5));
    SAY(pwrite(fd + 5, bytes, 9, 0));
    close(fd);
}

int main(void)
{
    fill(bytes, sizeof bytes, 5);
    opening();
    transfers();
    copied();
    mapped(mmap);
    mapped(mmap64);
    controlled(fcntl);
    controlled(fcntl64);
    controlled(__fcntl);
    shared(by_one);
    shared(by_many);
    cloned(clone);
    cloned(__clone);
    spawned();
    limited();
    limited_for_good(0);
    limited_for_good(1);
    handlers();
    cancelled_anywhere();
    reopened(freopen);
    reopened(freopen64);
    daemons();
    terminals();
    all_ended();
    other_names();
    ranges();
    // The last call leaves everything to the kernel, whether it fails or not.
    SAY(prctl(PR_GET_DUMPABLE));
    SAY(mlockall(0));
    return 0;
}
