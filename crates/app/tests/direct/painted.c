// Measures the stack of each call on a coroutine, in excess of the same call through the kernel.
// The arguments are a file and the bytes that a call may take.
#include "must.h"

#include <fcntl.h>
#include <string.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

enum { STACK = 64 << 10, PAINT = 0xa5, LARGE = 64 << 10 };

static unsigned char stack[STACK] __attribute__((aligned(4096)));
static char bytes[LARGE];
static ucontext_t home, there;
static const char *path;
static int fd, appending;
static size_t len;
static int failed, limit;

typedef void work(void);
static work *volatile now;

static void enter(void)
{
    now();
}

// Runs a call on a painted stack and returns the depth to which the paint is overwritten.
static int depth(work *of)
{
    memset(stack, PAINT, sizeof stack);
    MUST(getcontext(&there) == 0);
    there.uc_stack.ss_sp = stack;
    there.uc_stack.ss_size = sizeof stack;
    there.uc_link = &home;
    now = of;
    makecontext(&there, enter, 0);
    MUST(swapcontext(&home, &there) == 0);
    size_t at = 0;
    while (at < sizeof stack && stack[at] == PAINT)
        at++;
    return sizeof stack - at;
}

static void check(const char *name, work *of)
{
    for (int round = 0; round < 3; round++) {
        int taken = depth(of);
        if (taken > limit) {
            printf("%s of %zu bytes takes %d bytes of stack, round %d\n", name, len, taken, round);
            failed = 1;
        }
    }
}

static void opens(void) { fd = open(path, O_RDWR); MUST(fd >= 0); }
static void closes(void) { MUST(close(fd) == 0); }
static void preads(void) { MUST(pread(fd, bytes, len, 0) == (ssize_t)len); }
static void pwrites(void) { MUST(pwrite(fd, bytes, len, 0) == (ssize_t)len); }
static void reads(void) { MUST(read(fd, bytes, len) == (ssize_t)len); }
static void writes(void) { MUST(write(fd, bytes, len) == (ssize_t)len); }
static void rewinds(void) { MUST(lseek(fd, 0, SEEK_SET) == 0); }
static void ends(void) { MUST(lseek(fd, 0, SEEK_END) >= 0); }
static void syncs(void) { MUST(fsync(fd) == 0); }
static void appends(void) { MUST(write(appending, bytes, len) == (ssize_t)len); }
static void preadvs(void)
{
    struct iovec two[2] = {{bytes, len / 2}, {bytes + len / 2, len - len / 2}};
    MUST(preadv(fd, two, 2, 0) == (ssize_t)len);
}
static void pwritevs(void)
{
    struct iovec two[2] = {{bytes, len / 2}, {bytes + len / 2, len - len / 2}};
    MUST(pwritev(fd, two, 2, 0) == (ssize_t)len);
}

int main(int argc, char **argv)
{
    MUST(argc == 3);
    path = argv[1];
    limit = atoi(argv[2]);
    len = 4096;
    // The first calls join the mount.
    check("open", opens);
    for (int i = 0; i < 10; i++)
        check("the first pread", preads);
    for (int i = 0; i < 10; i++)
        check("the first pwrite", pwrites);
    appending = open(path, O_WRONLY | O_APPEND);
    MUST(appending >= 0);
    size_t lens[] = {1, 512, 4096, 8192, LARGE};
    for (size_t i = 0; i < sizeof lens / sizeof *lens; i++) {
        len = lens[i];
        check("pread", preads);
        check("pwrite", pwrites);
        check("lseek", rewinds);
        check("read", reads);
        check("lseek", rewinds);
        check("write", writes);
        check("lseek to the end", ends);
        check("preadv", preadvs);
        check("pwritev", pwritevs);
        check("fsync", syncs);
        check("append", appends);
    }
    char line[512];
    int is_client = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    MUST(maps);
    while (fgets(line, sizeof line, maps))
        is_client |= strstr(line, ".pool") != 0;
    MUST(is_client);
    for (int i = 0; i < 1; i++)
        closes();
    return failed;
}
