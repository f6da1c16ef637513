/* Forks a process while its threads use a mount for the first time, and checks that its
 * children have none of its pools open. The arguments are a file, and the directory of the
 * pools. */
#include "pagemesh.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 12, WRITES = 300 };

#define CHECK(what)                                                        \
    do {                                                                   \
        if (!(what)) {                                                     \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, pm_message()); \
            _exit(1);                                                      \
        }                                                                  \
    } while (0)

static const char *path;
static pthread_barrier_t barrier;
static atomic_int running = THREADS;

static void *writes(void *number) {
    char page[PM_PAGE_BYTES];
    uint64_t at = (uint64_t)(size_t)number * PM_PAGE_BYTES;
    pm_file *file;
    memset(page, (int)(size_t)number, sizeof page);
    pthread_barrier_wait(&barrier);
    CHECK(pm_open(path, O_RDWR, 0, &file) == 0);
    for (int round = 0; round < WRITES; round++)
        CHECK(pm_write(file, page, sizeof page, at) == 0);
    pm_close(file);
    running--;
    return NULL;
}

/* Whether this process has a file of this directory open. */
static int has(const char *directory) {
    char name[64], target[512];
    int found = 0;
    struct dirent *entry;
    DIR *all = opendir("/proc/self/fd");
    CHECK(all != NULL);
    while ((entry = readdir(all)) != NULL) {
        snprintf(name, sizeof name, "/proc/self/fd/%.20s", entry->d_name);
        ssize_t len = readlink(name, target, sizeof target - 1);
        target[len > 0 ? len : 0] = 0;
        found |= strncmp(target, directory, strlen(directory)) == 0;
    }
    closedir(all);
    return found;
}

int main(int argc, char **argv) {
    pthread_t all[THREADS];
    int foreign = 0;
    CHECK(argc == 3);
    path = argv[1];
    CHECK(pthread_barrier_init(&barrier, NULL, THREADS + 1) == 0);
    for (size_t at = 0; at < THREADS; at++)
        CHECK(pthread_create(&all[at], NULL, writes, (void *)at) == 0);
    pthread_barrier_wait(&barrier);
    while (running > 0) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0)
            _exit(has(argv[2]));
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        foreign += status != 0;
    }
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_join(all[at], NULL) == 0);
    if (foreign > 0)
        fprintf(stderr, "%d children have a pool open\n", foreign);
    return foreign > 0;
}
