// Random operations on descriptors through four interfaces at once, each compared with a model: the
// C library (preloaded or not), bare system calls, io_uring, and a plug-in that bypasses preloaded
// libraries. Numbers are closed through one interface and reused through another all the time.
//
// usage: doors DIRECTORY ELSEWHERE PLUGIN OPERATIONS SEED [here] [ends] [no-ring]
//
// DIRECTORY is under test; ELSEWHERE is on another file system.
// here: io_uring reads and writes at the current position, too; the C library makes the ring.
// ends: seeks from the end, and appends, without a request for the size before: the kernel may not
//       have heard that the direct path made the file longer.
// no-ring: without io_uring.
#include "doors.h"
#include "../must.h"
#include <dlfcn.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum {
    NUMBER_MIN = 3, // The tested numbers, up to NUMBERS.
    NUMBERS = 40,
    OPEN_MAX_ = 24,
    FILES = 6,
    FILES_ELSEWHERE = 2, // The last ones.
    FILES_OF_LIBC = 2,   // The first ones.
    SIZE_MAX_ = 96 << 10,
    LEN_MAX = 12 << 10,
    DESCRIPTIONS = 512,
    PIPES = 16,
    PIPE_BYTES = 4096,
    LOGGED = 40,
    LOG_BYTES = 120,
    LOOK_AT_ALL_EVERY = 4000,
};

enum kind { NOTHING, REGULAR, PIPE_READ, PIPE_WRITE };

struct file {
    char path[256];
    unsigned size;
    unsigned char bytes[SIZE_MAX_];
};

struct description {
    enum kind kind;
    int file; // The file, or the pipe.
    int flags;
    int names; // Descriptors in all processes.
    long at;
};

struct pipe {
    int is_used, readers, writers;
    unsigned len;
    unsigned char bytes[PIPE_BYTES];
};

// The model, which child processes share.
static struct shared {
    uint64_t random, operation;
    struct file files[FILES];
    struct description all[DESCRIPTIONS];
    struct pipe pipes[PIPES];
    char log[LOGGED][LOG_BYTES];
} *model;

// Of this process: the description of each number, or -1.
static int table[NUMBERS];
static const struct functions *door_functions[DOORS];
static int is_here, is_ends, is_ring = 1, is_child;
static uint64_t seed;
static unsigned char buffer[LEN_MAX], other[SIZE_MAX_ + 1];
static const char *const DOOR_NAMES[DOORS] = {"libc", "raw", "ring", "plugin"};

static uint64_t draw(void)
{
    uint64_t z = (model->random += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static unsigned below(unsigned end) { return (unsigned)(draw() % end); }

__attribute__((format(printf, 1, 2))) static void did(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    char *line = model->log[model->operation % LOGGED];
    int len = snprintf(line, LOG_BYTES, "%lu%s ", model->operation, is_child ? " child" : "");
    vsnprintf(line + len, (size_t)(LOG_BYTES - len), format, args);
    va_end(args);
}

static _Noreturn void fail(const char *why)
{
    uint64_t last = model->operation;
    for (uint64_t at = last < LOGGED ? 0 : last - LOGGED + 1; at <= last; at++)
        fprintf(stderr, "%s\n", model->log[at % LOGGED]);
    fprintf(stderr, "seed %lu, operation %lu: %s\n", seed, last, why);
    fflush(stderr);
    raw(SYS_exit_group, 1, 0, 0, 0, 0);
    __builtin_unreachable();
}

static void expect(long found, long expected)
{
    if (found != expected) {
        char why[100];
        snprintf(why, sizeof why, "the result is %ld, and should be %ld", found, expected);
        fail(why);
    }
}

static void expect_bytes(const unsigned char *found, const unsigned char *expected, unsigned len)
{
    for (unsigned at = 0; at < len; at++)
        if (found[at] != expected[at]) {
            char why[100];
            snprintf(why, sizeof why, "byte %u of %u is %d, and should be %d", at, len, found[at],
                     expected[at]);
            fail(why);
        }
}

// The result in the kernel's form: a negative error number.
static long told(long result) { return result == -1 ? -errno : result; }

// Each call through an interface.

static long by_open(enum door door, const char *path, int flags)
{
    if (door == RAW)
        return raw(SYS_openat, AT_FDCWD, (long)path, flags, 0644, 0);
    if (door == RING)
        return ring(IORING_OP_OPENAT, AT_FDCWD, path, 0644, 0, flags);
    return told(door_functions[door]->open(path, flags, 0644));
}

static long by_close(enum door door, int fd)
{
    if (door == RAW)
        return raw(SYS_close, fd, 0, 0, 0, 0);
    if (door == RING)
        return ring(IORING_OP_CLOSE, fd, 0, 0, 0, 0);
    return told(door_functions[door]->close(fd));
}

static long by_lseek(enum door door, int fd, long offset, int whence)
{
    if (door == RAW || door == RING)
        return raw(SYS_lseek, fd, offset, whence, 0, 0);
    return told(door_functions[door]->lseek(fd, offset, whence));
}

static long by_dup(enum door door, int fd)
{
    if (door == RAW || door == RING)
        return raw(SYS_dup, fd, 0, 0, 0, 0);
    return told(door_functions[door]->dup(fd));
}

static long by_dup2(enum door door, int fd, int to)
{
    if (door == RAW || door == RING)
        return fd == to ? raw(SYS_dup2, fd, to, 0, 0, 0) : raw(SYS_dup3, fd, to, 0, 0, 0);
    return told(door_functions[door]->dup2(fd, to));
}

// At the current position where the offset is negative.
static long by_read(enum door door, int fd, void *into, unsigned len, long at)
{
    if (door == RING)
        return ring(IORING_OP_READ, fd, into, len, (uint64_t)at, 0);
    if (door == RAW && at < 0)
        return raw(SYS_read, fd, (long)into, len, 0, 0);
    if (door == RAW)
        return raw(SYS_pread64, fd, (long)into, len, at, 0);
    const struct functions *functions = door_functions[door];
    if (at < 0)
        return told(functions->read(fd, into, len));
    if (len % 4 != 3)
        return told(functions->pread(fd, into, len, at));
    struct iovec parts[2] = {{into, len / 3}, {(char *)into + len / 3, len - len / 3}};
    return told(functions->preadv(fd, parts, 2, at));
}

static long by_write(enum door door, int fd, void *from, unsigned len, long at)
{
    if (door == RING)
        return ring(IORING_OP_WRITE, fd, from, len, (uint64_t)at, 0);
    if (door == RAW && at < 0)
        return raw(SYS_write, fd, (long)from, len, 0, 0);
    if (door == RAW)
        return raw(SYS_pwrite64, fd, (long)from, len, at, 0);
    const struct functions *functions = door_functions[door];
    if (at < 0)
        return told(functions->write(fd, from, len));
    if (len % 4 != 3)
        return told(functions->pwrite(fd, from, len, at));
    struct iovec parts[2] = {{from, len / 3}, {(char *)from + len / 3, len - len / 3}};
    return told(functions->pwritev(fd, parts, 2, at));
}

static long by_ftruncate(enum door door, int fd, long size)
{
    if (door == RAW || door == RING)
        return raw(SYS_ftruncate, fd, size, 0, 0, 0);
    return told(door_functions[door]->ftruncate(fd, size));
}

static long by_fsync(enum door door, int fd)
{
    if (door == RAW)
        return raw(SYS_fsync, fd, 0, 0, 0, 0);
    if (door == RING)
        return ring(IORING_OP_FSYNC, fd, 0, 0, 0, 0);
    return told(door_functions[door]->fsync(fd));
}

// The model.

static struct description *of(int fd)
{
    return fd < 0 || fd >= NUMBERS || table[fd] < 0 ? NULL : &model->all[table[fd]];
}

static int take(enum kind kind, int file, int flags)
{
    for (int at = 0; at < DESCRIPTIONS; at++)
        if (model->all[at].names == 0) {
            model->all[at] = (struct description){kind, file, flags, 0, 0};
            if (kind == PIPE_READ)
                model->pipes[file].readers = 1;
            if (kind == PIPE_WRITE)
                model->pipes[file].writers = 1;
            return at;
        }
    fail("the model has no description left");
}

static void name(int fd, int description)
{
    if (fd < NUMBER_MIN || fd >= NUMBERS)
        fail("the kernel gave a number that is not tested");
    table[fd] = description;
    model->all[description].names++;
}

static void unname(int fd)
{
    struct description *one = of(fd);
    if (!one)
        return;
    table[fd] = -1;
    if (--one->names > 0)
        return;
    struct pipe *pipe = &model->pipes[one->file];
    if (one->kind == PIPE_READ)
        pipe->readers = 0;
    if (one->kind == PIPE_WRITE)
        pipe->writers = 0;
    if (one->kind != REGULAR && pipe->readers + pipe->writers == 0)
        pipe->is_used = 0;
}

static void came(long fd, int description)
{
    if (fd < 0)
        expect(fd, 0);
    if (of((int)fd))
        fail("the kernel gave a number that is in use");
    name((int)fd, description);
}

static int may_read(const struct description *one)
{
    return one->kind == REGULAR ? (one->flags & O_ACCMODE) != O_WRONLY : one->kind == PIPE_READ;
}

static int may_write(const struct description *one)
{
    return one->kind == REGULAR ? (one->flags & O_ACCMODE) != O_RDONLY : one->kind == PIPE_WRITE;
}

static int open_count(void)
{
    int count = 0;
    for (int fd = NUMBER_MIN; fd < NUMBERS; fd++)
        count += table[fd] >= 0;
    return count;
}

// A random open number, and rarely a closed one.
static int some_number(void)
{
    if (below(40) == 0)
        return NUMBER_MIN + (int)below(NUMBERS - NUMBER_MIN);
    for (int tries = 0; tries < 200; tries++) {
        int fd = NUMBER_MIN + (int)below(NUMBERS - NUMBER_MIN);
        if (table[fd] >= 0)
            return fd;
    }
    return NUMBER_MIN;
}

static enum door some_door(void)
{
    unsigned at = below(100);
    enum door door = at < 58 ? LIBC : at < 72 ? RAW : at < 86 ? PLUGIN : RING;
    return door == RING && !is_ring ? RAW : door;
}

// Operations.

static void do_open(void)
{
    int file = (int)below(FILES);
    static const int MODES[] = {O_RDWR, O_RDWR, O_RDWR, O_WRONLY, O_RDONLY};
    int flags = MODES[below(5)] | O_CREAT;
    if (below(5) == 0)
        flags |= O_APPEND;
    if (below(25) == 0 && (flags & O_ACCMODE) != O_RDONLY)
        flags |= O_TRUNC;
    if (below(3) == 0)
        flags |= O_CLOEXEC;
    // A file that another interface opens has no direct path until it is closed.
    enum door door = file < FILES_OF_LIBC ? LIBC : some_door();
    did("%s open(%d, %#o)", DOOR_NAMES[door], file, flags);
    long fd = by_open(door, model->files[file].path, flags);
    if (flags & O_TRUNC)
        model->files[file].size = 0;
    came(fd, take(REGULAR, file, flags));
    did("%s open(%d, %#o) = %ld", DOOR_NAMES[door], file, flags, fd);
}

static void do_pipe(void)
{
    int at = 0;
    while (at < PIPES && model->pipes[at].is_used)
        at++;
    if (at == PIPES)
        return;
    int ends[2];
    int is_raw = (int)below(2);
    did("%s pipe", is_raw ? "raw" : "libc");
    expect(is_raw ? raw(SYS_pipe2, (long)ends, 0, 0, 0, 0) : told(pipe(ends)), 0);
    model->pipes[at] = (struct pipe){.is_used = 1};
    came(ends[0], take(PIPE_READ, at, O_RDONLY));
    came(ends[1], take(PIPE_WRITE, at, O_WRONLY));
    did("%s pipe = %d, %d", is_raw ? "raw" : "libc", ends[0], ends[1]);
}

static void do_close(int fd)
{
    enum door door = some_door();
    did("%s close(%d)", DOOR_NAMES[door], fd);
    long expected = of(fd) ? 0 : -EBADF;
    unname(fd);
    expect(by_close(door, fd), expected);
}

static void do_close_range(int fd)
{
    int last = fd + (int)below(3), is_raw = (int)below(2);
    if (last >= NUMBERS)
        last = NUMBERS - 1;
    did("%s close_range(%d, %d)", is_raw ? "raw" : "libc", fd, last);
    for (int each = fd; each <= last; each++)
        unname(each);
    expect(is_raw ? raw(SYS_close_range, fd, last, 0, 0, 0)
                  : told(close_range((unsigned)fd, (unsigned)last, 0)),
           0);
}

static void do_dup(int fd)
{
    enum door door = some_door();
    unsigned how = below(4);
    if (how == 0) {
        did("fcntl(%d, F_DUPFD)", fd);
        long new = told(fcntl(fd, F_DUPFD, NUMBER_MIN + (int)below(8)));
        of(fd) ? came(new, table[fd]) : expect(new, -EBADF);
        return;
    }
    if (how == 1) {
        did("%s dup(%d)", DOOR_NAMES[door], fd);
        long new = by_dup(door, fd);
        of(fd) ? came(new, table[fd]) : expect(new, -EBADF);
        did("%s dup(%d) = %ld", DOOR_NAMES[door], fd, new);
        return;
    }
    int to = NUMBER_MIN + (int)below(NUMBERS - NUMBER_MIN);
    did("%s dup2(%d, %d)", DOOR_NAMES[door], fd, to);
    long new = by_dup2(door, fd, to);
    expect(new, of(fd) ? to : -EBADF);
    if (of(fd) && fd != to) {
        int description = table[fd];
        unname(to);
        name(to, description);
    }
}

// The kernel asks the mount for the size.
static void look_at_size(int fd)
{
    struct stat stat;
    if (!is_ends)
        raw(SYS_fstat, fd, (long)&stat, 0, 0, 0);
}

static void do_lseek(int fd)
{
    enum door door = some_door();
    int whence = (int)below(3);
    struct description *one = of(fd);
    if (whence == SEEK_END)
        look_at_size(fd);
    long offset = (long)below(SIZE_MAX_ / 2);
    if (whence != SEEK_SET)
        offset = below(3) ? 0 : offset - SIZE_MAX_ / 4;
    did("%s lseek(%d, %ld, %d)", DOOR_NAMES[door], fd, offset, whence);
    long expected = -EBADF;
    if (one && one->kind != REGULAR)
        expected = -ESPIPE;
    else if (one) {
        long from[] = {0, one->at, model->files[one->file].size};
        expected = from[whence] + offset < 0 ? -EINVAL : from[whence] + offset;
    }
    expect(by_lseek(door, fd, offset, whence), expected);
    if (expected >= 0)
        one->at = expected;
}

static void read_pipe(enum door door, int fd, struct pipe *pipe, unsigned len)
{
    if (pipe->len == 0)
        return;
    if (len > pipe->len)
        len = pipe->len;
    did("%s read(%d, %u), a pipe", DOOR_NAMES[door], fd, len);
    expect(by_read(door, fd, buffer, len, -1), len);
    expect_bytes(buffer, pipe->bytes, len);
    pipe->len -= len;
    memmove(pipe->bytes, pipe->bytes + len, pipe->len);
}

static void write_pipe(enum door door, int fd, struct pipe *pipe, unsigned len)
{
    if (len > PIPE_BYTES - pipe->len)
        len = PIPE_BYTES - pipe->len;
    if (pipe->readers == 0 || len == 0)
        return;
    did("%s write(%d, %u), a pipe", DOOR_NAMES[door], fd, len);
    expect(by_write(door, fd, buffer, len, -1), len);
    memcpy(pipe->bytes + pipe->len, buffer, len);
    pipe->len += len;
}

static unsigned some_len(void)
{
    unsigned how = below(4);
    return how == 0 ? 4096 : 1 + below(how == 1 ? 200 : LEN_MAX - 1);
}

// io_uring is used only with an offset, unless `here` is given.
static enum door door_at(long at)
{
    enum door door = some_door();
    return door == RING && at < 0 && !is_here ? RAW : door;
}

static void do_read(int fd)
{
    unsigned len = some_len();
    long at = below(2) ? -1 : (long)below(SIZE_MAX_);
    enum door door = door_at(at);
    struct description *one = of(fd);
    if (one && one->kind == PIPE_READ && at < 0)
        return read_pipe(door, fd, &model->pipes[one->file], len);
    if (one && one->kind != REGULAR && door == RING)
        return;
    did("%s read(%d, %u, %ld)", DOOR_NAMES[door], fd, len, at);
    memset(buffer, 0xee, sizeof buffer);
    long found = by_read(door, fd, buffer, len, at);
    if (!one)
        return expect(found, -EBADF);
    if (one->kind != REGULAR)
        return expect(found, at < 0 && !may_read(one) ? -EBADF : -ESPIPE);
    if (!may_read(one))
        return expect(found, -EBADF);
    struct file *file = &model->files[one->file];
    long from = at < 0 ? one->at : at;
    long rest = from < file->size ? file->size - from : 0;
    expect(found, rest < len ? rest : len);
    expect_bytes(buffer, file->bytes + from, (unsigned)found);
    if (at < 0)
        one->at += found;
}

static void put(struct file *file, long at, unsigned len)
{
    if (at > file->size)
        memset(file->bytes + file->size, 0, (size_t)(at - file->size));
    memcpy(file->bytes + at, buffer, len);
    if (at + len > file->size)
        file->size = (unsigned)(at + len);
}

static void do_write(int fd)
{
    unsigned len = some_len();
    long at = below(2) ? -1 : (long)below(SIZE_MAX_ - LEN_MAX);
    enum door door = door_at(at);
    struct description *one = of(fd);
    for (unsigned byte = 0; byte < len; byte++)
        buffer[byte] = (unsigned char)(model->operation * 7 + byte * 13 + byte / 256);
    if (one && one->kind == PIPE_WRITE && at < 0)
        return write_pipe(door, fd, &model->pipes[one->file], len);
    if (one && one->kind != REGULAR && door == RING)
        return;
    struct file *file = one ? &model->files[one->file] : NULL;
    int appends = one && one->flags & O_APPEND;
    if (appends && at < 0)
        look_at_size(fd);
    long to = at;
    if (one && one->kind == REGULAR)
        to = appends ? (long)file->size : at < 0 ? one->at : at;
    if (to + len > SIZE_MAX_)
        return;
    did("%s write(%d, %u, %ld)%s", DOOR_NAMES[door], fd, len, at, appends ? " appends" : "");
    long found = by_write(door, fd, buffer, len, at);
    if (!one)
        return expect(found, -EBADF);
    if (one->kind != REGULAR)
        return expect(found, at < 0 && !may_write(one) ? -EBADF : -ESPIPE);
    if (!may_write(one))
        return expect(found, -EBADF);
    expect(found, len);
    put(file, to, len);
    if (at < 0)
        one->at = to + len;
}

static void do_ftruncate(int fd)
{
    enum door door = some_door();
    long size = (long)below(SIZE_MAX_);
    struct description *one = of(fd);
    did("%s ftruncate(%d, %ld)", DOOR_NAMES[door], fd, size);
    long found = by_ftruncate(door, fd, size);
    if (!one || one->kind != REGULAR || !may_write(one))
        return expect(found, one ? -EINVAL : -EBADF);
    expect(found, 0);
    struct file *file = &model->files[one->file];
    if (size > file->size)
        memset(file->bytes + file->size, 0, (size_t)(size - file->size));
    file->size = (unsigned)size;
}

static void do_fsync(int fd)
{
    enum door door = some_door();
    struct description *one = of(fd);
    did("%s fsync(%d)", DOOR_NAMES[door], fd);
    expect(by_fsync(door, fd), one ? one->kind == REGULAR ? 0 : -EINVAL : -EBADF);
}

static void look_at_all(void)
{
    for (int at = 0; at < FILES; at++) {
        struct file *file = &model->files[at];
        long fd = raw(SYS_openat, AT_FDCWD, (long)file->path, O_RDONLY | O_CLOEXEC, 0, 0);
        MUST(fd >= 0);
        did("all of file %d", at);
        expect(raw(SYS_pread64, fd, (long)other, sizeof other, 0, 0), file->size);
        expect_bytes(other, file->bytes, file->size);
        raw(SYS_close, fd, 0, 0, 0, 0);
    }
}

static void operation(int may_fork);

static void do_fork(void)
{
    int is_raw = (int)below(2), status = 0;
    did("%s fork", is_raw ? "raw" : "libc");
    fflush(stderr);
    long child = is_raw ? raw(SYS_fork, 0, 0, 0, 0, 0) : fork();
    if (child == 0) {
        is_child = 1;
        ring_forget();
        for (int fd = NUMBER_MIN; fd < NUMBERS; fd++)
            if (of(fd))
                of(fd)->names++;
        for (unsigned left = 1 + below(40); left > 0; left--)
            operation(0);
        for (int fd = NUMBER_MIN; fd < NUMBERS; fd++)
            unname(fd);
        raw(SYS_exit_group, 0, 0, 0, 0, 0);
    }
    MUST(child > 0);
    MUST(raw(SYS_wait4, child, (long)&status, 0, 0, 0) == child);
    if (status != 0) {
        fprintf(stderr, "a child ended with %#x\n", status);
        raw(SYS_exit_group, 1, 0, 0, 0, 0);
    }
}

static void operation(int may_fork)
{
    static int fd = NUMBER_MIN;
    model->operation++;
    // A number is used for a while, so that it gets on the direct path.
    if (!of(fd) || below(8) == 0)
        fd = some_number();
    int count = open_count();
    if (count < 4)
        return do_open();
    if (count > OPEN_MAX_)
        return do_close(some_number());
    switch (below(64)) {
    case 0 ... 2: return do_open();
    case 3: return below(8) ? do_open() : do_pipe();
    case 4 ... 6: return do_close(below(2) ? fd : some_number());
    case 7: return below(4) ? do_close(fd) : do_close_range(some_number());
    case 8 ... 10: return do_dup(below(2) ? fd : some_number());
    case 11 ... 16: return do_lseek(fd);
    case 17: return below(3) ? do_fsync(fd) : do_ftruncate(fd);
    case 18: return may_fork && below(6) == 0 ? do_fork() : do_fsync(fd);
    case 19 ... 40: return do_read(fd);
    default: return do_write(fd);
    }
}

static void begin(const char *directory, const char *elsewhere)
{
    for (int at = 0; at < FILES; at++) {
        struct file *file = &model->files[at];
        const char *in = at < FILES - FILES_ELSEWHERE ? directory : elsewhere;
        snprintf(file->path, sizeof file->path, "%s/doors-%d", in, at);
        file->size = 32 << 10;
        for (unsigned byte = 0; byte < file->size; byte++)
            file->bytes[byte] = (unsigned char)(byte * 31 + (unsigned)at);
        long fd = raw(SYS_openat, AT_FDCWD, (long)file->path, O_RDWR | O_CREAT | O_TRUNC, 0644, 0);
        MUST(fd >= 0);
        MUST(raw(SYS_pwrite64, fd, (long)file->bytes, file->size, 0, 0) == file->size);
        raw(SYS_close, fd, 0, 0, 0, 0);
    }
}

int main(int count, char **args)
{
    MUST(count >= 6);
    uint64_t operations = strtoull(args[4], 0, 0);
    seed = strtoull(args[5], 0, 0);
    for (int at = 6; at < count; at++) {
        is_here |= !strcmp(args[at], "here");
        is_ends |= !strcmp(args[at], "ends");
        is_ring &= !!strcmp(args[at], "no-ring");
    }
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, 0, _IOLBF, 0);
    raw(SYS_close_range, NUMBER_MIN, NUMBERS, 0, 0, 0);
    model = mmap(0, sizeof *model, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(model != MAP_FAILED);
    model->random = seed;
    memset(table, -1, sizeof table);
    static const struct functions OWN = {
        open, close, dup, dup2, lseek, read, write, pread, pwrite, preadv, pwritev, ftruncate,
        fsync,
    };
    void *plugin = dlopen(args[3], RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!plugin)
        fprintf(stderr, "%s\n", dlerror());
    MUST(plugin);
    const struct functions *(*functions)(void) =
        (const struct functions *(*)(void))dlsym(plugin, "doors_functions");
    MUST(functions);
    door_functions[LIBC] = &OWN;
    door_functions[PLUGIN] = functions();
    if (is_ring && !ring_is_there(is_here)) {
        printf("without io_uring: the system refuses it\n");
        is_ring = 0;
    }
    printf("seed %lu, %lu operations%s%s\n", seed, operations, is_here ? ", here" : "",
           is_ends ? ", ends" : "");
    begin(args[1], args[2]);
    uint64_t said = 0;
    while (model->operation < operations) {
        operation(1);
        if (model->operation / LOOK_AT_ALL_EVERY != said) {
            said = model->operation / LOOK_AT_ALL_EVERY;
            look_at_all();
            if (said % 25 == 0)
                printf("%lu operations\n", model->operation);
        }
    }
    look_at_all();
    printf("no difference in %lu operations\n", model->operation);
    return 0;
}
