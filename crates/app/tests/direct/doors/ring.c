// io_uring by its system calls: one operation at a time.
#include "doors.h"
#include <linux/io_uring.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
} state = {.fd = -1};

int aside(int fd)
{
    long high = raw(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 600, 0, 0);
    if (high < 0)
        return fd;
    raw(SYS_close, fd, 0, 0, 0, 0);
    return (int)high;
}

static int begin(int by_c_library)
{
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    long fd = by_c_library ? syscall(SYS_io_uring_setup, 4, &params)
                           : raw(SYS_io_uring_setup, 4, (long)&params, 0, 0, 0);
    if (fd < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP))
        return -1;
    state.fd = aside((int)fd);
    size_t sq = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t cq = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    int both = PROT_READ | PROT_WRITE;
    char *ring = mmap(0, sq > cq ? sq : cq, both, MAP_SHARED | MAP_POPULATE, state.fd,
                      IORING_OFF_SQ_RING);
    size_t bytes = params.sq_entries * sizeof(struct io_uring_sqe);
    state.sqes = mmap(0, bytes, both, MAP_SHARED | MAP_POPULATE, state.fd, IORING_OFF_SQES);
    if (ring == MAP_FAILED || state.sqes == MAP_FAILED)
        return -1;
    state.sq_tail = (unsigned *)(ring + params.sq_off.tail);
    state.sq_mask = (unsigned *)(ring + params.sq_off.ring_mask);
    state.sq_array = (unsigned *)(ring + params.sq_off.array);
    state.cq_head = (unsigned *)(ring + params.cq_off.head);
    state.cq_tail = (unsigned *)(ring + params.cq_off.tail);
    state.cq_mask = (unsigned *)(ring + params.cq_off.ring_mask);
    state.cqes = (struct io_uring_cqe *)(ring + params.cq_off.cqes);
    return 0;
}

int ring_is_there(int by_c_library)
{
    return state.fd >= 0 || begin(by_c_library) == 0;
}

void ring_forget(void)
{
    if (state.fd >= 0)
        raw(SYS_close, state.fd, 0, 0, 0, 0);
    state.fd = -1;
}

long ring(int operation, int fd, const void *address, unsigned len, uint64_t offset, int flags)
{
    if (!ring_is_there(0))
        return -ENOSYS;
    unsigned tail = *state.sq_tail, at = tail & *state.sq_mask;
    struct io_uring_sqe *sqe = &state.sqes[at];
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = (uint8_t)operation;
    sqe->fd = fd;
    sqe->addr = (uint64_t)(uintptr_t)address;
    sqe->len = len;
    sqe->off = offset;
    sqe->open_flags = (unsigned)flags;
    state.sq_array[at] = at;
    __atomic_store_n(state.sq_tail, tail + 1, __ATOMIC_RELEASE);
    long entered = raw(SYS_io_uring_enter, state.fd, 1, 1, IORING_ENTER_GETEVENTS, 0);
    if (entered < 0 && entered != -EINTR)
        return entered;
    unsigned head = *state.cq_head;
    while (__atomic_load_n(state.cq_tail, __ATOMIC_ACQUIRE) == head)
        raw(SYS_io_uring_enter, state.fd, 0, 1, IORING_ENTER_GETEVENTS, 0);
    long result = state.cqes[head & *state.cq_mask].res;
    __atomic_store_n(state.cq_head, head + 1, __ATOMIC_RELEASE);
    return result;
}
