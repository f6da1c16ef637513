// Writes a file of a mount until this process has mapped the mount's pools.
#include "must.h"

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static inline int has_pools(void)
{
    char line[512];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    MUST(maps);
    while (fgets(line, sizeof line, maps))
        found |= strstr(line, ".pool") != 0;
    fclose(maps);
    return found;
}

static inline int threads(void)
{
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    MUST(tasks);
    for (struct dirent *task; (task = readdir(tasks));)
        count += task->d_name[0] != '.';
    closedir(tasks);
    return count;
}

static inline int joined(const char *path)
{
    char page[4096] = {1};
    int fd = open(path, O_RDWR | O_CREAT, 0644);
    MUST(fd >= 0);
    for (int i = 0; i < 200; i++)
        MUST(pwrite(fd, page, sizeof page, i % 50 * 4096) == sizeof page);
    time_t end = time(0) + 60;
    while (getenv("IS_DIRECT") && !(has_pools() && threads() > 1)) {
        MUST(time(0) < end);
        MUST(pwrite(fd, page, sizeof page, 0) == sizeof page);
    }
    return fd;
}
