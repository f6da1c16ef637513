// Ends the threads of a process one by one. The arguments are a file on a mount, and the order of
// the ends.
#include "must_join.h"

#include <pthread.h>
#include <sys/syscall.h>

static pthread_t first;

static void at_exit(void)
{
    printf("at exit\n");
}

static void end_raw(int code)
{
    __asm__ volatile("syscall" ::"a"(SYS_exit), "D"(code));
    __builtin_unreachable();
}

static void await_first(void)
{
    char path[64], text[512];
    sprintf(path, "/proc/self/task/%d/stat", getpid());
    for (;;) {
        int fd = open(path, O_RDONLY);
        ssize_t len = read(fd, text, sizeof text - 1);
        close(fd);
        if (len <= 0)
            return;
        text[len] = 0;
        if (strstr(text, ") Z "))
            return;
        usleep(1000);
    }
}

static void *ends(void *argument)
{
    await_first();
    return argument;
}

static void *ends_raw(void *argument)
{
    await_first();
    end_raw(0);
    return argument;
}

int main(int argc, char **argv)
{
    MUST(argc == 3);
    joined(argv[1]);
    atexit(at_exit);
    printf("not flushed, ");
    pthread_t worker;
    first = pthread_self();
    const char *how = argv[2];
    if (strstr(how, "worker"))
        MUST(pthread_create(&worker, 0, strstr(how, "raw-worker") ? ends_raw : ends, 0) == 0);
    if (strstr(how, "raw-main"))
        end_raw(7);
    pthread_exit(0);
}
