// The test compares the output of programs by the kernel and on the direct path: results, error
// numbers, and sums of the bytes read.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static inline unsigned sum_of(const void *bytes, size_t len)
{
    unsigned sum = 2166136261u;
    for (size_t i = 0; i < len; i++)
        sum = (sum ^ ((const unsigned char *)bytes)[i]) * 16777619u;
    return sum;
}

static inline void fill(void *bytes, size_t len, unsigned seed)
{
    for (size_t i = 0; i < len; i++)
        ((unsigned char *)bytes)[i] = (seed = seed * 1103515245u + 12345u) >> 16;
}

// A result, and the error number if there is one.
#define SAY(call)                                                                             \
    do {                                                                                      \
        errno = 0;                                                                            \
        long long result_ = (long long)(call);                                                \
        int error_ = errno;                                                                   \
        printf("%d: %s = %lld", __LINE__, #call, result_);                                    \
        if (result_ == -1)                                                                    \
            printf(" (%s)", strerror(error_));                                                \
        printf("\n");                                                                         \
        fflush(stdout);                                                                       \
    } while (0)

// A condition that must hold with and without the library.
#define MUST(condition)                                                                       \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            printf("%d: not so: %s (%s)\n", __LINE__, #condition, strerror(errno));           \
            fflush(stdout);                                                                   \
            _exit(1);                                                                         \
        }                                                                                     \
    } while (0)

static inline off_t at(int fd)
{
    return lseek(fd, 0, SEEK_CUR);
}

static inline int must_open(const char *path, int flags)
{
    int fd = open(path, flags, 0644);
    MUST(fd >= 0);
    return fd;
}

// The counts of the test engine, or nothing without it.
enum { OPENS = 0, WRITES = 2, ENDS = 4 };

static inline long counted(int which)
{
    static int file = -1;
    long counts[10] = {0};
    const char *path = getenv("PAGEMESH_PROBE_COUNTS");
    // Opened once, as `open` frees deferred entries.
    if (path && file < 0)
        file = must_open(path, O_RDONLY);
    MUST(!path || pread(file, counts, sizeof counts, 0) == sizeof counts);
    return counts[which];
}
