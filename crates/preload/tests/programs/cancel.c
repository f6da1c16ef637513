// Threads that are cancelled while they read and write.
#include "say.h"

static int fd, ends[2];
static volatile int cleaned, started;
static char bytes[4096];

static void cleanup(void *argument)
{
    (void)argument;
    cleaned++;
}

static void *writes(void *argument)
{
    pthread_cleanup_push(cleanup, 0);
    int kind = (int)(long)argument;
    MUST(pthread_setcanceltype(kind, 0) == 0);
    started = 1;
    for (;;) {
        MUST(pwrite(fd, bytes, 4096, 0) == 4096);
        MUST(pread(fd, bytes, 4096, 0) == 4096);
        MUST(write(fd, bytes, 1) == 1);
    }
    pthread_cleanup_pop(0);
    return 0;
}

// Blocks in the kernel, on a descriptor that is not in the table.
static void *waits(void *argument)
{
    (void)argument;
    char byte;
    pthread_cleanup_push(cleanup, 0);
    started = 1;
    SAY(read(ends[0], &byte, 1));
    pthread_cleanup_pop(0);
    return 0;
}

static void cancelled(void *(*run)(void *), long argument, int us)
{
    pthread_t thread;
    void *result = 0;
    started = cleaned = 0;
    MUST(pthread_create(&thread, 0, run, (void *)argument) == 0);
    while (!started)
        usleep(100);
    usleep(us);
    MUST(pthread_cancel(thread) == 0);
    MUST(pthread_join(thread, &result) == 0);
    MUST(result == PTHREAD_CANCELED);
    MUST(cleaned == 1);
}

int main(void)
{
    fd = must_open("file", O_RDWR | O_CREAT);
    MUST(pipe(ends) == 0);
    for (int i = 0; i < 200; i++) {
        cancelled(writes, PTHREAD_CANCEL_DEFERRED, i * 7);
        cancelled(writes, PTHREAD_CANCEL_ASYNCHRONOUS, i * 7);
    }
    for (int i = 0; i < 20; i++)
        cancelled(waits, 0, 500);
    SAY(pwrite(fd, bytes, 4096, 0));
    unlink("file");
    return 0;
}
