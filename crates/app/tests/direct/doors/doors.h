// The interfaces through which one process reaches a file.
#ifndef DOORS_H
#define DOORS_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

// Functions of a C library.
struct functions {
    int (*open)(const char *, int, ...);
    int (*close)(int);
    int (*dup)(int);
    int (*dup2)(int, int);
    off_t (*lseek)(int, off_t, int);
    ssize_t (*read)(int, void *, size_t);
    ssize_t (*write)(int, const void *, size_t);
    ssize_t (*pread)(int, void *, size_t, off_t);
    ssize_t (*pwrite)(int, const void *, size_t, off_t);
    ssize_t (*preadv)(int, const struct iovec *, int, off_t);
    ssize_t (*pwritev)(int, const struct iovec *, int, off_t);
    int (*ftruncate)(int, off_t);
    int (*fsync)(int);
};

enum door { LIBC, RAW, RING, PLUGIN, DOORS };

// A system call past every library. Returns a negative error number on failure.
static inline long raw(long number, long a, long b, long c, long d, long e)
{
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}

// Submits one operation of io_uring and waits for it. Returns its result, or -ENOSYS without
// io_uring.
long ring(int operation, int fd, const void *address, unsigned len, uint64_t offset, int flags);

// Forgets the ring: a child of fork makes its own.
void ring_forget(void);
int ring_is_there(int by_c_library);

// Moves a descriptor of this program out of the range of tested numbers.
int aside(int fd);

#endif
