// Reads and writes pages of a file in one of several ways. All processes of the test share one
// model in memory.
//
// Every 8 bytes of a page hold the page number and the write number. Each page has a single writer.
// The shared model holds the acknowledged write of each page, and the longest time between two
// acknowledgements of each writer.
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 60, WORDS = PAGE / 8, READS = 3, AHEAD = 4 };

// The layout is that of the test: the last acknowledged write of each page; per writer the number
// of writes, the longest time between two acknowledgements, and the time of the last one, in
// nanoseconds.
struct model {
    uint64_t acknowledged[PAGES];
    struct {
        uint64_t writes, longest, since;
    } own[8];
};

static struct model *model;
static uint64_t seen[PAGES], written[PAGES];
static uint64_t random_state;
static const char *way;

static void fail(const char *what, uint64_t page, uint64_t one, uint64_t other)
{
    fprintf(stderr, "%s: %s: page %lu: %#lx, %#lx (%s)\n", way, what, (long)page, (long)one, (long)other,
        strerror(errno));
    exit(1);
}

static uint64_t below(uint64_t end)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % end;
}

static uint64_t load(uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static void store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

// System calls of the program itself, which no library intercepts.
static long raw(long number, long a, long b, long c, long d, long e, long f)
{
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

// A ring of few entries.
static struct {
    int fd;
    unsigned *tail, *mask, *array, *done_head, *done_tail, *done_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *done;
} ring;

static void ring_open(void)
{
    struct io_uring_params params = {0};
    ring.fd = raw(SYS_io_uring_setup, 8, (long)&params, 0, 0, 0, 0);
    if (ring.fd < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP))
        fail("no ring", 0, ring.fd, params.features);
    size_t queues = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t results = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    size_t len = queues > results ? queues : results;
    char *base = mmap(0, len, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, IORING_OFF_SQ_RING);
    ring.entries = mmap(0, params.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE, MAP_SHARED,
        ring.fd, IORING_OFF_SQES);
    if (base == MAP_FAILED || (void *)ring.entries == MAP_FAILED)
        fail("no memory of a ring", 0, 0, 0);
    ring.tail = (unsigned *)(base + params.sq_off.tail);
    ring.mask = (unsigned *)(base + params.sq_off.ring_mask);
    ring.array = (unsigned *)(base + params.sq_off.array);
    ring.done_head = (unsigned *)(base + params.cq_off.head);
    ring.done_tail = (unsigned *)(base + params.cq_off.tail);
    ring.done_mask = (unsigned *)(base + params.cq_off.ring_mask);
    ring.done = (struct io_uring_cqe *)(base + params.cq_off.cqes);
}

static void ring_put(int operation, int file, void *bytes, uint64_t page, uint64_t what)
{
    unsigned tail = *ring.tail, at = tail & *ring.mask;
    ring.entries[at] = (struct io_uring_sqe){
        .opcode = operation,
        // Some operations run on a kernel thread.
        .flags = below(2) ? IOSQE_ASYNC : 0,
        .fd = file,
        .off = page * PAGE,
        .addr = (uintptr_t)bytes,
        .len = PAGE,
        .user_data = what,
    };
    ring.array[at] = at;
    __atomic_store_n(ring.tail, tail + 1, __ATOMIC_RELEASE);
}

// Waits for one result, and returns the user data of its operation.
static uint64_t ring_take(void)
{
    unsigned head = *ring.done_head;
    while (head == __atomic_load_n(ring.done_tail, __ATOMIC_ACQUIRE))
        raw(SYS_io_uring_enter, ring.fd, 0, 1, IORING_ENTER_GETEVENTS, 0, 0);
    struct io_uring_cqe done = ring.done[head & *ring.done_mask];
    __atomic_store_n(ring.done_head, head + 1, __ATOMIC_RELEASE);
    if (done.res != PAGE)
        fail("a result of the ring", done.user_data, done.res, 0);
    return done.user_data;
}

static int is_way(const char *name)
{
    return strcmp(way, name) == 0;
}

// Opens files as the preload library does: the kernel then does not cache them.
static int open_by(const char *path)
{
    int flags = O_RDWR | O_ASYNC;
    if (is_way("libc"))
        return open(path, flags);
    return raw(SYS_openat, AT_FDCWD, (long)path, flags, 0, 0, 0);
}

static void get(int file, void *bytes, uint64_t page)
{
    long got = is_way("libc") ? pread(file, bytes, PAGE, page * PAGE)
                              : raw(SYS_pread64, file, (long)bytes, PAGE, page * PAGE, 0, 0);
    if (got != PAGE)
        fail("reading", page, got, 0);
}

static void put(int file, const void *bytes, uint64_t page)
{
    long put = is_way("libc") ? pwrite(file, bytes, PAGE, page * PAGE)
                              : raw(SYS_pwrite64, file, (long)bytes, PAGE, page * PAGE, 0, 0);
    if (put != PAGE)
        fail("writing", page, put, 0);
}

static uint64_t seq_of(const uint64_t *words, uint64_t page)
{
    for (int i = 1; i < WORDS; i++)
        if (words[i] != words[0])
            fail("torn", page, words[0], words[i]);
    if (words[0] != 0 && words[0] >> 48 != page)
        fail("another's", page, words[0], 0);
    return words[0] & ((1ull << 48) - 1);
}

// The oldest write that a read may find: known before the read begins.
static uint64_t least(uint64_t page)
{
    uint64_t acknowledged = load(&model->acknowledged[page]);
    return acknowledged > seen[page] ? acknowledged : seen[page];
}

static void check(const uint64_t *words, uint64_t page, uint64_t least)
{
    uint64_t seq = seq_of(words, page);
    if (seq < least)
        fail("lost", page, seq, least);
    uint64_t most = load(&model->acknowledged[page]) + 1;
    if (seq > most)
        fail("never written", page, seq, most);
    // The results of simultaneous reads arrive in any order, so an older one may come last.
    if (seq > seen[page])
        seen[page] = seq;
}

static void fill(uint64_t *words, uint64_t page)
{
    for (int i = 0; i < WORDS; i++)
        words[i] = page << 48 | (written[page] + 1);
}

static void acknowledge(uint64_t own, uint64_t page)
{
    seen[page] = ++written[page];
    store(&model->acknowledged[page], written[page]);
    uint64_t at = now(), since = model->own[own].since;
    if (since && at - since > model->own[own].longest)
        store(&model->own[own].longest, at - since);
    store(&model->own[own].since, at);
    store(&model->own[own].writes, model->own[own].writes + 1);
}

static void one_by_one(int file, uint64_t own, uint64_t page)
{
    static uint64_t bytes[WORDS];
    fill(bytes, page);
    put(file, bytes, page);
    acknowledge(own, page);
    for (int i = 0; i < READS; i++) {
        uint64_t other = below(PAGES), from = least(other);
        get(file, bytes, other);
        check(bytes, other, from);
    }
}

// Submits several operations at once: writes one page while it reads others.
static void at_once(int file, uint64_t own, uint64_t page)
{
    static uint64_t bytes[AHEAD][WORDS];
    uint64_t others[AHEAD], from[AHEAD];
    fill(bytes[0], page);
    ring_put(IORING_OP_WRITE, file, bytes[0], page, 0);
    for (int i = 1; i < AHEAD; i++) {
        do
            others[i] = below(PAGES);
        while (others[i] == page);
        from[i] = least(others[i]);
        ring_put(IORING_OP_READ, file, bytes[i], others[i], i);
    }
    long submitted = raw(SYS_io_uring_enter, ring.fd, AHEAD, AHEAD, IORING_ENTER_GETEVENTS, 0, 0);
    if (submitted != AHEAD)
        fail("submitting", page, submitted, 0);
    for (int i = 0; i < AHEAD; i++) {
        uint64_t done = ring_take();
        if (done == 0)
            acknowledge(own, page);
        else
            check(bytes[done], others[done], from[done]);
    }
}

int main(int count, char **arguments)
{
    if (count != 7)
        return 2;
    way = arguments[1];
    // The writer's number, its first page, and the distance between its pages.
    uint64_t own = atoi(arguments[4]), first = atoi(arguments[5]), step = atoi(arguments[6]);
    static uint64_t bytes[WORDS];
    random_state = getpid() * 0x9e3779b97f4a7c15ull | 1;
    int told = open(arguments[3], O_RDWR), file = open_by(arguments[2]);
    model = mmap(0, sizeof *model, PROT_READ | PROT_WRITE, MAP_SHARED, told, 0);
    if (model == MAP_FAILED || file < 0)
        fail("opening", 0, told, file);
    if (is_way("io_uring"))
        ring_open();
    // A killed writer may have written a page without acknowledging it.
    for (uint64_t page = first; page < PAGES; page += step) {
        uint64_t from = least(page);
        get(file, bytes, page);
        check(bytes, page, from);
        written[page] = seen[page];
        store(&model->acknowledged[page], written[page]);
    }
    store(&model->own[own].since, 0);
    const char *pause = getenv("PAUSE_US");
    for (;;) {
        if (pause)
            usleep(atoi(pause));
        uint64_t page = first + step * below((PAGES - first + step - 1) / step);
        if (is_way("io_uring"))
            at_once(file, own, page);
        else
            one_by_one(file, own, page);
    }
}
