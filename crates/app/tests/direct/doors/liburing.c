// The functions of liburing that make a ring, with their own system calls.
#include <linux/io_uring.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>

int io_uring_setup(unsigned entries, struct io_uring_params *params)
{
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(SYS_io_uring_setup), "D"(entries), "S"(params)
                     : "rcx", "r11", "memory");
    return (int)result;
}

int io_uring_queue_init_params(unsigned entries, void *ring, struct io_uring_params *params)
{
    (void)ring;
    return io_uring_setup(entries, params) < 0 ? -1 : 0;
}

int io_uring_queue_init(unsigned entries, void *ring, unsigned flags)
{
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    params.flags = flags;
    return io_uring_queue_init_params(entries, ring, &params);
}

int io_uring_queue_init_mem(unsigned entries, void *ring, struct io_uring_params *params, void *memory, size_t bytes)
{
    (void)memory;
    (void)bytes;
    return io_uring_queue_init_params(entries, ring, params);
}
