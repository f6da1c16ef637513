// A thread that is cancelled in a call, and the calls that other threads can still make. The
// arguments are a file, the process of its mount, and the point at which the thread waits.
#include "must_join.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, LATE_S = 30 };

static int fd;
static pid_t mount;
static char page[PAGE];

static void read_pages(int count)
{
    char own[PAGE];
    for (int i = 0; i < count; i++)
        MUST(pread(fd, own, PAGE, i % 8 * PAGE) == PAGE);
}

static void *reads(void *argument)
{
    for (;;)
        MUST(read(fd, page, 1) >= 0);
    return argument;
}

static void *commands(void *argument)
{
    for (;;)
        system("exec sleep 60");
    return argument;
}

static void is_cancelled(void *(*run)(void *), int stands_still)
{
    pthread_t thread;
    void *result;
    if (stands_still)
        MUST(kill(mount, SIGSTOP) == 0);
    MUST(pthread_create(&thread, 0, run, 0) == 0);
    usleep(300000);
    MUST(pthread_cancel(thread) == 0);
    usleep(100000);
    if (stands_still)
        MUST(kill(mount, SIGCONT) == 0);
    MUST(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
}

int main(int argc, char **argv)
{
    MUST(argc == 4);
    const char *wait = argv[3];
    mount = atoi(argv[2]);
    alarm(LATE_S);
    if (strcmp(wait, "command") == 0)
        is_cancelled(commands, 0);
    fd = open(argv[1], O_RDWR);
    MUST(fd >= 0);
    if (strcmp(wait, "board") == 0) {
        // The fourth read asks the mount.
        read_pages(3);
        is_cancelled(reads, 1);
    }
    if (strcmp(wait, "station") == 0) {
        read_pages(100);
        MUST(has_pools());
        is_cancelled(reads, 1);
    }
    MUST(lseek(fd, 0, SEEK_SET) == 0);
    MUST(read(fd, page, PAGE) == PAGE);
    read_pages(100);
    MUST(has_pools());
    pid_t child = fork();
    if (child == 0) {
        read_pages(100);
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    MUST(system("true") == 0);
    MUST(close(fd) == 0);
    return 0;
}
