// Makes a ring by the functions of liburing.c, and checks whether files that are opened afterwards
// go through the kernel.
//
// usage: rings FILE NAME, where NAME is the function that makes the ring.
#include "doors.h"
#include "../must.h"
#include <fcntl.h>
#include <linux/io_uring.h>
#include <string.h>
#include <sys/syscall.h>

int io_uring_queue_init(unsigned entries, void *ring, unsigned flags);
int io_uring_queue_init_params(unsigned entries, void *ring, struct io_uring_params *params);
int io_uring_queue_init_mem(unsigned entries, void *ring, struct io_uring_params *params, void *memory, size_t bytes);
int io_uring_setup(unsigned entries, struct io_uring_params *params);

// The library opens its files with a flag that tells the mount.
static int is_by_library(int fd)
{
    return (raw(SYS_fcntl, fd, F_GETFL, 0, 0, 0) & O_ASYNC) != 0;
}

int main(int count, char **args)
{
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    MUST(count == 3);
    int fd = open(args[1], O_RDWR);
    MUST(fd >= 0 && is_by_library(fd));
    MUST(fcntl(fd, F_GETFL) == (O_RDWR | 0100000));
    if (!strcmp(args[2], "io_uring_queue_init"))
        MUST(io_uring_queue_init(4, &params, 0) == 0);
    else if (!strcmp(args[2], "io_uring_queue_init_params"))
        MUST(io_uring_queue_init_params(4, 0, &params) == 0);
    else if (!strcmp(args[2], "io_uring_queue_init_mem"))
        MUST(io_uring_queue_init_mem(4, 0, &params, 0, 0) >= 0);
    else
        MUST(io_uring_setup(4, &params) >= 0);
    int later = open(args[1], O_RDWR);
    MUST(later >= 0 && !is_by_library(later));
    return 0;
}
