// Makes a ring by liburing, of which liburing.c is a copy of one function, and looks whether a file
// that was opened before is cached by the kernel from then on.
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

static int is_past_the_cache(int fd)
{
    return (raw(SYS_fcntl, fd, F_GETFL, 0, 0, 0) & O_DIRECT) != 0;
}

int main(int count, char **args)
{
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    MUST(count == 3);
    int fd = open(args[1], O_RDWR), own = open(args[1], O_RDWR | O_DIRECT);
    MUST(fd >= 0 && own >= 0);
    MUST(is_past_the_cache(fd) && is_past_the_cache(own));
    MUST(!(fcntl(fd, F_GETFL) & (O_DIRECT | O_ASYNC)) && fcntl(own, F_GETFL) & O_DIRECT);
    // Flags that the program sets leave the library's in place.
    MUST(fcntl(fd, F_SETFL, O_NONBLOCK) == 0 && is_past_the_cache(fd));
    MUST(fcntl(fd, F_GETFL) == (O_RDWR | O_NONBLOCK | 0100000));
    if (!strcmp(args[2], "io_uring_queue_init"))
        MUST(io_uring_queue_init(4, &params, 0) == 0);
    else if (!strcmp(args[2], "io_uring_queue_init_params"))
        MUST(io_uring_queue_init_params(4, 0, &params) == 0);
    else if (!strcmp(args[2], "io_uring_queue_init_mem"))
        MUST(io_uring_queue_init_mem(4, 0, &params, 0, 0) >= 0);
    else
        MUST(io_uring_setup(4, &params) >= 0);
    MUST(!is_past_the_cache(fd) && is_past_the_cache(own));
    int later = open(args[1], O_RDWR);
    MUST(later >= 0 && !is_past_the_cache(later));
    return 0;
}
