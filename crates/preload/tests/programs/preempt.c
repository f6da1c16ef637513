// A program that defines functions of the C library itself, and calls the C library's other names
// for them.
#include "say.h"

#include <stdarg.h>

static int calls;

int __sigaction(int, const struct sigaction *, struct sigaction *);
int __close(int);
int __dup2(int, int);
int __fcntl(int, int, ...);
__sighandler_t __sysv_signal(int, __sighandler_t);
__sighandler_t bsd_signal(int, __sighandler_t);

int sigaction(int kind, const struct sigaction *new, struct sigaction *old)
{
    calls++;
    return __sigaction(kind, new, old);
}

__sighandler_t signal(int kind, __sighandler_t handler)
{
    calls++;
    return bsd_signal(kind, handler);
}

__sighandler_t sysv_signal(int kind, __sighandler_t handler)
{
    calls++;
    return __sysv_signal(kind, handler);
}

int close(int fd)
{
    calls++;
    return __close(fd);
}

int dup2(int from, int to)
{
    calls++;
    return __dup2(from, to);
}

int fcntl(int fd, int command, ...)
{
    va_list rest;
    va_start(rest, command);
    long argument = va_arg(rest, long);
    va_end(rest);
    calls++;
    return __fcntl(fd, command, argument);
}

static long passed(long number, long a, long b, long c)
{
    return syscall(number, a, b, c);
}

static volatile int heard;

static void hear(int kind)
{
    heard = kind;
}

int main(void)
{
    struct sigaction new = {.sa_handler = hear}, old;
    int kinds[] = {SIGUSR1, SIGSEGV, SIGBUS};
    for (int i = 0; i < 3; i++) {
        SAY(sigaction(kinds[i], &new, &old));
        SAY(raise(kinds[i]));
        SAY(heard == kinds[i]);
        SAY(sigaction(kinds[i], 0, &old));
        SAY(old.sa_handler == hear);
    }
    SAY(signal(SIGUSR2, hear) == SIG_DFL);
    SAY(sysv_signal(SIGUSR2, hear) == hear);
    SAY(raise(SIGUSR2));
    SAY(signal(SIGUSR2, hear) == SIG_DFL);
    char bytes[4096], seen[4096];
    fill(bytes, sizeof bytes, 1);
    int fd = must_open("file", O_RDWR | O_CREAT);
    SAY(pwrite(fd, bytes, sizeof bytes, 0));
    SAY(dup2(fd, 100));
    SAY(pread(100, seen, sizeof seen, 0));
    SAY(sum_of(seen, sizeof seen));
    SAY(fcntl(fd, F_DUPFD, 101));
    SAY(close(100));
    SAY(passed(SYS_dup2, 101, 100, 0));
    SAY(passed(SYS_fcntl, 100, F_DUPFD, 102));
    SAY(passed(SYS_close, 100, 0, 0));
    SAY(write(102, bytes, 100));
    SAY(lseek(101, 0, SEEK_CUR));
    SAY(close(101));
    SAY(close(102));
    SAY(close(fd));
    SAY(close(fd));
    SAY(calls);
    return 0;
}
