// All calls that read and write, and all of their errors.
#include "say.h"

static char big[3 << 20], back[3 << 20];
static const char constant[4096] = {1};

static void whole(int fd)
{
    off_t end = lseek(fd, 0, SEEK_END);
    memset(back, 0, sizeof back);
    SAY(end);
    SAY(pread(fd, back, sizeof back, 0));
    SAY(sum_of(back, end));
}

static void places(int fd)
{
    SAY(pwrite(fd, big, 10000, 0));
    SAY(pwrite(fd, big + 5, 777, 4000));
    SAY(pwrite64(fd, big, 1, 20000));
    SAY(pread(fd, back, 300, 3900));
    SAY(sum_of(back, 300));
    SAY(pread64(fd, back, 5000, 19000));
    SAY(pread(fd, back, 10, 20001));
    SAY(pread(fd, back, 10, 1 << 30));
    SAY(pread(fd, back, 10, -1));
    SAY(pwrite(fd, big, 10, -5));
    SAY(pwrite(fd, big, 10, LLONG_MAX));
    SAY(pread(fd, back, 10, LLONG_MAX));
    SAY(pread(fd, back, 0, 0));
    SAY(pwrite(fd, big, 0, 50000));
    SAY(pwrite(fd, big, (1 << 20), 100));
    SAY(pwrite(fd, big, (1 << 20) + 1, 7));
    SAY(pread(fd, back, (2 << 20), 3));
    SAY(sum_of(back, 1 << 20));
    SAY(at(fd));
    whole(fd);
}

static void offsets(int fd)
{
    SAY(ftruncate(fd, 0));
    SAY(lseek(fd, 0, SEEK_SET));
    SAY(write(fd, big, 5000));
    SAY(at(fd));
    SAY(lseek(fd, 100, SEEK_SET));
    SAY(read(fd, back, 4000));
    SAY(sum_of(back, 4000));
    SAY(read(fd, back, 4000));
    SAY(at(fd));
    SAY(read(fd, back, 4000));
    SAY(read(fd, back, 0));
    SAY(write(fd, big, 0));
    SAY(at(fd));
    SAY(lseek(fd, 1000, SEEK_END));
    SAY(read(fd, back, 4000));
    SAY(at(fd));
    SAY(write(fd, big, 3));
    SAY(write(fd, big, sizeof big));
    SAY(at(fd));
    SAY(lseek(fd, -1, SEEK_SET));
    SAY(lseek(fd, -5, SEEK_CUR));
    SAY(lseek(fd, 0, 99));
    SAY(at(fd));
    whole(fd);
}

static void pointers(int fd)
{
    // A mapped page between two that cannot be accessed.
    char *page = mmap(0, 3 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(mprotect(page + 4096, 4096, PROT_READ | PROT_WRITE) == 0);
    char *good = page + 4096;
    memset(good, 'g', 4096);
    lseek(fd, 0, SEEK_SET);
    SAY(pwrite(fd, 0, 10, 0));
    SAY(pread(fd, 0, 10, 0));
    SAY(pread(fd, (char *)-1, 10, 0));
    SAY(pread(fd, (char *)(1ul << 60), 10, 0));
    SAY(pread(fd, (char *)-4096, 8192, 0));
    SAY(pread(fd, page, 10, 0));
    SAY(pwrite(fd, page, 10, 0));
    SAY(pwrite(fd, good, 4096, 0));
    SAY(pread(fd, good, 4096, 0));
    SAY(pwrite(fd, good + 4096, 1, 0));
    SAY(write(fd, page, 10));
    SAY(read(fd, page, 10));
    SAY(at(fd));
    // Only a part of the buffer is mapped.
    SAY(pread(fd, good + 4000, 200, 0) < 200);
    SAY(pwrite(fd, good + 4000, 200, 0) < 200);
    SAY(pread(fd, (char *)constant, 4096, 0));
    SAY(pwrite(fd, constant, 4096, 64));
    mprotect(good, 4096, PROT_READ);
    SAY(pread(fd, good, 10, 0));
    SAY(pwrite(fd, good, 10, 0));
    struct iovec bad[2] = {{back, 10}, {page, 10}};
    SAY(preadv(fd, bad, 2, 0) <= 10);
    SAY(pwritev(fd, bad + 1, 1, 0));
    SAY(pwritev(fd, (struct iovec *)page, 1, 0));
    SAY(readv(fd, 0, 1));
    // Past the end of a mapped file: an access raises SIGBUS.
    int empty = must_open("empty", O_RDWR | O_CREAT);
    char *past = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, empty, 0);
    SAY(pwrite(fd, past, 10, 0));
    SAY(pread(fd, past, 10, 0));
    whole(fd);
}

static void vectors(int fd)
{
    struct iovec parts[1025], three[3] = {{big, 100}, {0, 0}, {big + 9, 33}};
    struct iovec into[3] = {{back, 7}, {back + 7, 5000}, {back + 5007, 9}};
    struct iovec long_one[2] = {{big, 9000}, {big, 30000}}, huge[2] = {{big, SSIZE_MAX}, {big, 9}};
    for (int i = 0; i < 1025; i++)
        parts[i] = (struct iovec){big + i, 2};
    SAY(ftruncate(fd, 0));
    SAY(lseek(fd, 0, SEEK_SET));
    SAY(writev(fd, three, 3));
    SAY(writev(fd, parts, 1024));
    SAY(writev(fd, parts, 1025));
    SAY(writev(fd, parts, 0));
    SAY(writev(fd, parts, -1));
    SAY(writev(fd, long_one, 2));
    SAY(writev(fd, huge, 2));
    SAY(pwritev(fd, long_one, 2, 5));
    SAY(at(fd));
    SAY(lseek(fd, 50, SEEK_SET));
    SAY(readv(fd, into, 3));
    SAY(sum_of(back, 5016));
    SAY(at(fd));
    SAY(lseek(fd, -3000, SEEK_END));
    SAY(readv(fd, into, 3));
    SAY(preadv64(fd, into, 3, 11));
    SAY(preadv(fd, into, 3, -1));
    SAY(pwritev64(fd, three, 3, 1 << 20));
    SAY(pwritev2(fd, three, 3, 17, 0));
    SAY(pwritev2(fd, three, 1, 18, RWF_DSYNC));
    SAY(pwritev2(fd, three, 3, -1, RWF_SYNC));
    SAY(at(fd));
    SAY(pwritev2(fd, three, 3, 0, RWF_APPEND));
    SAY(pwritev2(fd, three, 3, -1, RWF_APPEND));
    SAY(at(fd));
    SAY(preadv2(fd, into, 3, 40, 0));
    SAY(preadv2(fd, into, 2, -1, RWF_HIPRI));
    SAY(preadv2(fd, into, 2, 0, 0x4000));
    SAY(preadv2(fd, into, 2, -2, 0));
    SAY(at(fd));
    whole(fd);
}

static void rights(void)
{
    int reads = must_open("a", O_RDONLY), writes = must_open("a", O_WRONLY);
    SAY(pwrite(reads, big, 10, 0));
    SAY(write(reads, big, 10));
    SAY(at(reads));
    SAY(pread(writes, back, 10, 0));
    SAY(read(writes, back, 10));
    SAY(at(writes));
    SAY(writev(reads, &(struct iovec){big, 9}, 1));
    SAY(fsync(reads));
    SAY(fdatasync(writes));
    int path = must_open("a", O_PATH), directory = must_open(".", O_RDONLY | O_DIRECTORY);
    SAY(pread(path, back, 10, 0));
    SAY(read(directory, back, 10));
    SAY(pread(-1, back, 10, 0));
    SAY(pread(70000, back, 10, 0));
    SAY(fsync(-5));
}

static void appending(void)
{
    int fd = must_open("appended", O_RDWR | O_CREAT | O_APPEND);
    SAY(write(fd, big, 100));
    SAY(at(fd));
    SAY(pwrite(fd, big, 50, 0));
    SAY(at(fd));
    struct iovec two[] = {{big, 30}, {big + 7, 60}};
    SAY(writev(fd, two, 2));
    SAY(pwritev(fd, two, 2, 5));
    SAY(at(fd));
    // Another description extends and truncates it.
    int other = must_open("appended", O_RDWR);
    SAY(pwrite(other, big, 70, 400));
    SAY(write(fd, big + 3, 40));
    SAY(at(fd));
    SAY(ftruncate(other, 130));
    SAY(lseek(fd, 10, SEEK_SET));
    SAY(read(fd, back, 20));
    SAY(write(fd, big + 5, 40));
    SAY(at(fd));
    int alike = dup(fd);
    SAY(write(alike, big, 15));
    SAY(at(fd));
    whole(fd);
    // It appends no more.
    SAY(fcntl(alike, F_SETFL, 0));
    SAY(lseek(fd, 3, SEEK_SET));
    SAY(write(fd, big, 5));
    SAY(at(fd));
    whole(fd);
    // Appends from now on.
    int later = must_open("later", O_RDWR | O_CREAT), same = dup(later);
    SAY(pwrite(later, big, 1000, 0));
    SAY(fcntl(later, F_SETFL, O_APPEND));
    SAY(pwrite(same, big, 50, 0));
    SAY(write(later, big, 50));
    SAY(at(same));
    SAY(fcntl(later, F_SETFL, 0));
    SAY(pwrite(same, big, 50, 0));
    whole(later);
}

static void limited(void)
{
    int fd = must_open("limited", O_RDWR | O_CREAT);
    struct rlimit limit = {3000, RLIM_INFINITY};
    signal(SIGXFSZ, SIG_IGN);
    SAY(setrlimit(RLIMIT_FSIZE, &limit));
    SAY(pwrite(fd, big, 1000, 2500));
    SAY(pwrite(fd, big, 1000, 3000));
    limit.rlim_cur = RLIM_INFINITY;
    SAY(setrlimit(RLIMIT_FSIZE, &limit));
    SAY(pwrite(fd, big, 1000, 3000));
    whole(fd);
}

ssize_t __pread_chk(int, void *, size_t, off_t, size_t);
ssize_t __read_chk(int, void *, size_t, size_t);

static void others(void)
{
    int fd = open64("others", O_RDWR | O_CREAT | O_DSYNC, 0600);
    SAY(pwrite(fd, big, 5000, 3));
    SAY(write(fd, big, 10));
    SAY(__pread_chk(fd, back, 100, 40, sizeof back));
    SAY(__read_chk(fd, back, 100, 100));
    SAY(fallocate(fd, 0, 0, 100000));
    SAY(sync_file_range(fd, 0, 100, SYNC_FILE_RANGE_WRITE));
    whole(fd);
    int made = creat("made", 0600);
    SAY(write(made, big, 77));
    int below = openat(AT_FDCWD, "made", O_RDWR);
    SAY(pread(below, back, 100, 0));
    int unnamed = open(".", O_TMPFILE | O_RDWR, 0600);
    SAY(pwrite(unnamed, big, 100, 0));
    SAY(pread(unnamed, back, 200, 50));
    struct stat stat;
    SAY(fstat(made, &stat));
    SAY(stat.st_mode);
}

int main(void)
{
    fill(big, sizeof big, 1);
    int fd = must_open("a", O_RDWR | O_CREAT);
    places(fd);
    offsets(fd);
    pointers(fd);
    vectors(fd);
    rights();
    appending();
    limited();
    others();
    return 0;
}
