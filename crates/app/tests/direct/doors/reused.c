// A number is closed past the C library, and then belongs to another file or to none.
//
// usage: reused DIRECTORY ELSEWHERE PLUGIN WAY SECOND
//
// WAY closes the number: raw, dup2, range, ring, plugin.
// SECOND is the new owner of the number: file (on the mount), tmp, pipe, none, readonly, append
// (the same file with other flags).
#include "doors.h"
#include "../must.h"
#include <dlfcn.h>
#include <linux/io_uring.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

enum { ROUNDS = 20, LEN = 64, SIZE = 64 << 10 };

static char first_path[300], second_path[300];
static const struct functions *plugin;
static const char *way, *second;

static int is(const char *word, const char *other) { return strcmp(word, other) == 0; }

// The number of write system calls of this process so far.
static long writes(void)
{
    char text[512] = {0};
    long fd = raw(SYS_openat, AT_FDCWD, (long)"/proc/self/io", O_RDONLY, 0, 0);
    MUST(fd >= 0);
    MUST(raw(SYS_read, fd, (long)text, sizeof text - 1, 0, 0) > 0);
    raw(SYS_close, fd, 0, 0, 0, 0);
    char *at = strstr(text, "syscw: ");
    MUST(at);
    return strtol(at + 7, 0, 10);
}

// Writes until the library writes without the kernel.
static void warm(int fd, const char *bytes)
{
    for (int tries = 0; tries < 1000; tries++) {
        long before = writes();
        for (int at = 0; at < 8; at++)
            MUST(pwrite(fd, bytes, LEN, 4096 * at) == LEN);
        if (writes() == before)
            return;
        usleep(1000);
    }
    MUST(!"the file is on the direct path");
}

static long opened_past(const char *path, int flags)
{
    long fd = raw(SYS_openat, AT_FDCWD, (long)path, flags, 0644, 0);
    MUST(fd >= 0);
    return fd;
}

static void close_past(int fd)
{
    long result = is(way, "raw")      ? raw(SYS_close, fd, 0, 0, 0, 0)
                  : is(way, "range")  ? raw(SYS_close_range, fd, fd, 0, 0, 0)
                  : is(way, "ring")   ? ring(IORING_OP_CLOSE, fd, 0, 0, 0, 0)
                  : is(way, "plugin") ? plugin->close(fd)
                                      : -1;
    MUST(result == 0);
}

// Opens the new owner of the number, and a second descriptor to check it by. Returns -1 for none.
static int open_second(int ends[2])
{
    if (is(second, "none"))
        return -1;
    if (is(second, "pipe")) {
        MUST(raw(SYS_pipe2, (long)ends, 0, 0, 0, 0) == 0);
        return ends[1];
    }
    int flags = is(second, "readonly") ? O_RDONLY : is(second, "append") ? O_WRONLY | O_APPEND
                                                                         : O_RDWR;
    int is_same = is(second, "readonly") || is(second, "append");
    return (int)opened_past(is_same ? first_path : second_path, flags);
}

static void check_is(const char *path, long at, const char *bytes)
{
    char found[LEN];
    long fd = opened_past(path, O_RDONLY);
    MUST(raw(SYS_pread64, fd, (long)found, LEN, at, 0) == LEN);
    raw(SYS_close, fd, 0, 0, 0, 0);
    MUST(memcmp(found, bytes, LEN) == 0);
}

static void expect_no(long result, int error) { MUST(result == -1 && errno == error); }

static void use(int fd, const char *own, const char *new, int reading_end)
{
    char found[LEN] = {0};
    struct iovec parts[2] = {{(char *)new, LEN / 2}, {(char *)new + LEN / 2, LEN / 2}};
    if (is(second, "none")) {
        expect_no(pwrite(fd, new, LEN, 0), EBADF);
        expect_no(pread(fd, found, LEN, 0), EBADF);
        expect_no(write(fd, new, LEN), EBADF);
        expect_no(read(fd, found, LEN), EBADF);
        expect_no(pwritev(fd, parts, 2, 0), EBADF);
        expect_no(lseek(fd, 0, SEEK_END), EBADF);
        expect_no(fsync(fd), EBADF);
        return check_is(first_path, 0, own);
    }
    if (is(second, "pipe")) {
        expect_no(pwrite(fd, new, LEN, 0), ESPIPE);
        expect_no(lseek(fd, 0, SEEK_END), ESPIPE);
        expect_no(fsync(fd), EINVAL);
        MUST(write(fd, new, LEN) == LEN);
        MUST(raw(SYS_read, reading_end, (long)found, LEN, 0, 0) == LEN);
        MUST(memcmp(found, new, LEN) == 0);
        return check_is(first_path, 0, own);
    }
    if (is(second, "readonly")) {
        expect_no(pwrite(fd, new, LEN, 0), EBADF);
        expect_no(write(fd, new, LEN), EBADF);
        MUST(pread(fd, found, LEN, 0) == LEN && memcmp(found, own, LEN) == 0);
        return check_is(first_path, 0, own);
    }
    if (is(second, "append")) {
        struct stat stat;
        MUST(fstat(fd, &stat) == 0);
        expect_no(pread(fd, found, LEN, 0), EBADF);
        MUST(pwrite(fd, new, LEN, 0) == LEN);
        check_is(first_path, 0, own);
        check_is(first_path, stat.st_size, new);
        MUST(truncate(first_path, SIZE) == 0);
        return;
    }
    MUST(pwrite(fd, new, LEN, 0) == LEN);
    MUST(pwritev(fd, parts, 2, 4096) == LEN);
    MUST(lseek(fd, 0, SEEK_END) == SIZE);
    MUST(lseek(fd, 8192, SEEK_SET) == 8192 && write(fd, new, LEN) == LEN);
    MUST(pread(fd, found, LEN, 0) == LEN && memcmp(found, new, LEN) == 0);
    for (long at = 0; at <= 8192; at += 4096) {
        check_is(first_path, at, own);
        check_is(second_path, at, new);
    }
}

static void fill(const char *path, char *bytes)
{
    long fd = opened_past(path, O_RDWR | O_CREAT | O_TRUNC);
    MUST(raw(SYS_ftruncate, fd, SIZE, 0, 0, 0) == 0);
    for (long at = 0; at < SIZE; at += 4096)
        MUST(raw(SYS_pwrite64, fd, (long)bytes, LEN, at, 0) == LEN);
    raw(SYS_close, fd, 0, 0, 0, 0);
}

int main(int count, char **args)
{
    MUST(count == 6);
    way = args[4];
    second = args[5];
    snprintf(first_path, sizeof first_path, "%s/first", args[1]);
    snprintf(second_path, sizeof second_path, "%s/second", args[is(second, "tmp") ? 2 : 1]);
    void *loaded = dlopen(args[3], RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    MUST(loaded);
    plugin = ((const struct functions *(*)(void))dlsym(loaded, "doors_functions"))();
    MUST(!is(way, "ring") || ring_is_there(0));
    char own[LEN], new[LEN];
    memset(own, 'a', LEN);
    fill(first_path, own);
    fill(second_path, own);
    for (int round = 0; round < ROUNDS; round++) {
        memset(own, 'a' + round, LEN);
        memset(new, 'A' + round, LEN);
        int ends[2] = {-1, -1};
        int kept = open(first_path, O_RDWR), fd = open(first_path, O_RDWR);
        MUST(kept >= 0 && fd >= 0);
        warm(fd, own);
        warm(kept, own);
        if (is(way, "dup2")) {
            int other = open_second(ends);
            MUST(other >= 0 && raw(SYS_dup2, other, fd, 0, 0, 0) == fd);
            raw(SYS_close, other, 0, 0, 0, 0);
        } else {
            // A pipe gives the lower number to its read end, and this number must be the write end.
            int low = is(second, "pipe") ? kept : -1;
            close_past(fd);
            if (low >= 0)
                close_past(low);
            int other = open_second(ends);
            MUST(other < 0 || other == fd);
        }
        use(fd, own, new, ends[0]);
        for (int each = 3; each < 40; each++)
            raw(SYS_close, each, 0, 0, 0, 0);
    }
    return 0;
}
