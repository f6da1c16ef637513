// A thread with a small stack that joins a mount, reads and writes, in one part and in two. The
// arguments are a file, the stack in KiB, and the length of each part.
#include "must.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PAGE = 4096 };

static const char *path;
static char page[PAGE], parts[2 * PAGE];
static int part;

static void *calls(void *argument)
{
    struct iovec two[2] = {{parts, part}, {parts + part, part}};
    int fd = open(path, O_RDWR);
    MUST(fd >= 0);
    for (int i = 0; i < 100; i++) {
        MUST(pread(fd, page, PAGE, i % 8 * PAGE) == PAGE);
        MUST(preadv(fd, two, 2, 0) == 2 * part);
        MUST(pwrite(fd, page, PAGE, i % 8 * PAGE) == PAGE);
        MUST(pwritev(fd, two, 2, 0) == 2 * part);
    }
    MUST(close(fd) == 0);
    return argument;
}

int main(int argc, char **argv)
{
    MUST(argc == 4);
    path = argv[1];
    part = atoi(argv[3]);
    pthread_attr_t attributes;
    pthread_t thread;
    MUST(pthread_attr_init(&attributes) == 0);
    MUST(pthread_attr_setstacksize(&attributes, atoi(argv[2]) * 1024) == 0);
    MUST(pthread_create(&thread, &attributes, calls, 0) == 0);
    MUST(pthread_join(thread, 0) == 0);
    char line[512];
    int is_guest = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    MUST(maps);
    while (fgets(line, sizeof line, maps))
        is_guest |= strstr(line, ".pool") != 0;
    MUST(is_guest);
    return 0;
}
