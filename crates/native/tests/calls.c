/* Tests of the header's rules, for a file on a mount ("mount") or elsewhere ("plain"). */
#include <pagemesh.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                          \
    do {                                                                          \
        if (!(condition)) {                                                       \
            fprintf(stderr, "line %d: %s; last: %s\n", __LINE__, #condition, pm_message()); \
            exit(1);                                                              \
        }                                                                         \
    } while (0)

enum { PAGES = 64, THREADS = 4, ROUNDS = 200 };

static unsigned char filled[PAGES * PM_PAGE_BYTES];
static unsigned char seen[PAGES * PM_PAGE_BYTES];
static int is_mount;

static void refusals(const char *path) {
    pm_file *file = NULL;
    pm_guard *guard = NULL;
    const pm_slice *slices = NULL;
    CHECK(pm_open(NULL, O_RDWR, 0, &file) == -EINVAL);
    CHECK(pm_open(path, O_RDWR, 0, NULL) == -EINVAL);
    CHECK(strstr(pm_message(), "NULL") != NULL);
    CHECK(pm_open(path, O_RDWR | O_APPEND, 0, &file) == -EINVAL);
    CHECK(pm_open("/", O_RDONLY, 0, &file) == -EINVAL);
    CHECK(pm_open("/no/such/file", O_RDWR, 0, &file) == -ENOENT);
    CHECK(file == NULL);
    CHECK(pm_read(NULL, seen, 1, 0) == -EINVAL);
    CHECK(pm_write(NULL, filled, 1, 0) == -EINVAL);
    CHECK(pm_write_atomic(NULL, NULL, 0) == -EINVAL);
    CHECK(pm_persist(NULL) == -EINVAL);
    CHECK(pm_size(NULL) == -EINVAL);
    CHECK(pm_set_size(NULL, 0) == -EINVAL);
    CHECK(pm_descriptor(NULL) == -EINVAL);
    CHECK(pm_is_direct(NULL) == -EINVAL);
    CHECK(pm_guard_begin(NULL, 0, 1, &guard) == -EINVAL);
    CHECK(pm_guard_slices(NULL, &slices) == 0);
    CHECK(pm_guard_valid(NULL) == -EINVAL);
    CHECK(pm_guard_end(NULL) == 0);
    pm_close(NULL);
}

static void arguments(pm_file *file) {
    pm_guard *guard = NULL;
    pm_part part = {0, NULL, 1};
    CHECK(pm_read(file, NULL, 1, 0) == -EINVAL);
    CHECK(pm_read(file, NULL, 0, 0) == 0);
    CHECK(pm_read(file, seen, SIZE_MAX, 0) == -EINVAL);
    CHECK(pm_write(file, NULL, 1, 0) == -EINVAL);
    CHECK(pm_write(file, NULL, 0, 0) == 0);
    CHECK(pm_write(file, filled, 1, UINT64_MAX) == -EINVAL);
    CHECK(pm_write_atomic(file, NULL, 1) == -EINVAL);
    CHECK(pm_write_atomic(file, NULL, 0) == 0);
    CHECK(pm_write_atomic(file, &part, 1) == -EINVAL);
    CHECK(pm_write_atomic(file, &part, SIZE_MAX) == -EINVAL);
    pm_part wrapped = {UINT64_MAX, filled, 2};
    CHECK(pm_write_atomic(file, &wrapped, 1) == -EINVAL);
    pm_part many = {0, filled, (PM_ATOMIC_PAGES_MAX + 1) * PM_PAGE_BYTES};
    CHECK(pm_write_atomic(file, &many, 1) == -EINVAL);
    CHECK(strstr(pm_message(), "48 pages") != NULL);
    pm_part overlapping[] = {{0, filled, 4096}, {4095, filled, 1}};
    CHECK(pm_write_atomic(file, overlapping, 2) == -EINVAL);
    CHECK(pm_guard_begin(file, 0, (PM_GUARD_PAGES_MAX + 1) * PM_PAGE_BYTES, &guard) == -EINVAL);
    CHECK(pm_guard_begin(file, 0, 1, NULL) == -EINVAL);
}

static void fill(unsigned char byte) { memset(filled, byte, sizeof filled); }

static void is_all(pm_file *file, unsigned char byte) {
    CHECK(pm_read(file, seen, sizeof seen, 0) == (int64_t)sizeof seen);
    for (size_t at = 0; at < sizeof seen; at++)
        CHECK(seen[at] == byte);
    memset(seen, 0, sizeof seen);
    CHECK(pread(pm_descriptor(file), seen, sizeof seen, 0) == (ssize_t)sizeof seen);
    for (size_t at = 0; at < sizeof seen; at++)
        CHECK(seen[at] == byte);
}

static void content(pm_file *file) {
    fill(1);
    CHECK(pm_write(file, filled, sizeof filled, 0) == 0);
    CHECK(pm_size(file) == (int64_t)sizeof filled);
    CHECK(pm_persist(file) == 0);
    for (unsigned char byte = 2; byte < 20; byte++) {
        fill(byte);
        CHECK(pm_write(file, filled, sizeof filled, 0) == 0);
        is_all(file, byte);
    }
    CHECK(pm_read(file, seen, 100, sizeof filled - 10) == 10);
    CHECK(pm_read(file, seen, 100, sizeof filled) == 0);
    CHECK(pm_persist(file) == 0);
}

static void atomic(pm_file *file) {
    unsigned char page[2 * PM_PAGE_BYTES];
    memset(page, 99, sizeof page);
    /* The last two pages; one in the middle; and partial pages. */
    pm_part whole[] = {{5 * PM_PAGE_BYTES, page, PM_PAGE_BYTES},
                       {62 * PM_PAGE_BYTES, page, sizeof page}};
    pm_part parts[] = {{100, page, 50}, {30 * PM_PAGE_BYTES - 10, page, 20}};
    pm_part beyond = {sizeof filled - 10, page, 11};
    if (!is_mount) {
        CHECK(pm_write_atomic(file, whole, 2) == -EOPNOTSUPP);
        CHECK(pm_read(file, seen, 1, 5 * PM_PAGE_BYTES) == 1 && seen[0] != 99);
        return;
    }
    for (int round = 0; round < 10; round++) {
        CHECK(pm_write_atomic(file, whole, 2) == 0);
        CHECK(pm_write_atomic(file, parts, 2) == 0);
    }
    CHECK(pm_write_atomic(file, &beyond, 1) == -EINVAL);
    fill(19);
    memset(filled + 5 * PM_PAGE_BYTES, 99, PM_PAGE_BYTES);
    memset(filled + 62 * PM_PAGE_BYTES, 99, sizeof page);
    memset(filled + 100, 99, 50);
    memset(filled + 30 * PM_PAGE_BYTES - 10, 99, 20);
    CHECK(pm_read(file, seen, sizeof seen, 0) == (int64_t)sizeof seen);
    CHECK(memcmp(seen, filled, sizeof seen) == 0);
    CHECK(pread(pm_descriptor(file), seen, sizeof seen, 0) == (ssize_t)sizeof seen);
    CHECK(memcmp(seen, filled, sizeof seen) == 0);
}

static void guards(pm_file *file) {
    pm_guard *guard;
    const pm_slice *slices;
    CHECK(pm_read(file, seen, sizeof seen, 0) == (int64_t)sizeof seen);
    CHECK(pm_guard_begin(file, 1000, 20 * PM_PAGE_BYTES, &guard) == 0);
    size_t count = pm_guard_slices(guard, &slices), at = 1000;
    for (size_t number = 0; number < count; number++) {
        CHECK(memcmp(slices[number].data, seen + at, slices[number].len) == 0);
        at += slices[number].len;
    }
    CHECK(at == 1000 + 20 * PM_PAGE_BYTES);
    CHECK(pm_guard_valid(guard) == 1);
    CHECK(pm_guard_end(guard) == 0);
    /* A guard is shorter at the end of the file, and empty behind it. */
    CHECK(pm_guard_begin(file, sizeof filled - 5, 100, &guard) == 0);
    CHECK(pm_guard_slices(guard, &slices) == 1 && slices[0].len == 5);
    CHECK(pm_guard_end(guard) == 0);
    CHECK(pm_guard_begin(file, sizeof filled, 100, &guard) == 0);
    CHECK(pm_guard_slices(guard, &slices) == 0);
    CHECK(pm_guard_end(guard) == 0);
    static pm_guard *all[PM_GUARDS_MAX];
    for (size_t number = 0; number < PM_GUARDS_MAX; number++)
        CHECK(pm_guard_begin(file, 0, 1, &all[number]) == 0);
    CHECK(pm_guard_begin(file, 0, 1, &guard) == -EMFILE);
    for (size_t number = 0; number < PM_GUARDS_MAX; number++)
        CHECK(pm_guard_end(all[number]) == 0);
    if (!is_mount || !pm_is_direct(file))
        return;
    /* A write to a page of the guard makes it invalid. */
    CHECK(pm_guard_begin(file, 0, PM_PAGE_BYTES, &guard) == 0);
    CHECK(pm_write(file, filled, PM_PAGE_BYTES, 4096) == 0);
    CHECK(pm_guard_valid(guard) == 1);
    CHECK(pm_write(file, filled, 1, 0) == 0);
    CHECK(pm_guard_valid(guard) == 0);
    CHECK(pm_guard_end(guard) == -ESTALE);
}

static void *work(void *argument) {
    pm_file *file = argument;
    unsigned char page[PM_PAGE_BYTES];
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t at = (uint64_t)(round % PAGES) * PM_PAGE_BYTES;
        memset(page, round, sizeof page);
        CHECK(pm_write(file, page, sizeof page, at) == 0);
        CHECK(pm_read(file, page, sizeof page, at) == PM_PAGE_BYTES);
        for (size_t byte = 1; byte < sizeof page; byte++)
            CHECK(page[byte] == page[0]);
    }
    return NULL;
}

static void threads(pm_file *file) {
    pthread_t all[THREADS];
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_create(&all[at], NULL, work, file) == 0);
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_join(all[at], NULL) == 0);
}

/* A child uses the descriptor, and files that it opens itself. */
static void children(pm_file *file, const char *path) {
    pm_guard *guard;
    CHECK(pm_guard_begin(file, 0, PM_PAGE_BYTES, &guard) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        pm_file *own;
        CHECK(pm_is_direct(file) == 0);
        fill(77);
        CHECK(pm_write(file, filled, sizeof filled, 0) == 0);
        is_all(file, 77);
        /* A copy belongs to the child; a mapping does not exist here. */
        int ended = pm_guard_end(guard);
        CHECK(ended == 0 || (is_mount && ended == -ESTALE));
        CHECK(pm_open(path, O_RDWR, 0, &own) == 0);
        CHECK(pm_is_direct(own) == is_mount);
        fill(78);
        for (int round = 0; round < 10; round++)
            CHECK(pm_write(own, filled, sizeof filled, 0) == 0);
        is_all(own, 78);
        pm_part part = {0, filled, PM_PAGE_BYTES};
        CHECK(pm_write_atomic(file, &part, 1) == (is_mount ? 0 : -EOPNOTSUPP));
        CHECK(pm_persist(file) == 0);
        pm_close(own);
        pm_close(file);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    pm_guard_end(guard);
    is_all(file, 78);
    CHECK(pm_is_direct(file) == is_mount);
}

static pthread_key_t last;

static void fail(void *argument) {
    pm_file *file = NULL;
    (void)argument;
    CHECK(pm_open("/no/such/file", O_RDWR, 0, &file) == -ENOENT);
    CHECK(strstr(pm_message(), "No such file") != NULL);
}

static void *fail_and_end(void *argument) {
    fail(argument);
    CHECK(pthread_setspecific(last, argument) == 0);
    return NULL;
}

/* Destructors of a thread run after those of the library. */
static void ends_of_threads(void) {
    pthread_t thread;
    CHECK(pthread_key_create(&last, fail) == 0);
    CHECK(pthread_create(&thread, NULL, fail_and_end, &last) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(pthread_key_delete(last) == 0);
}

static void limit(int what, rlim_t most) {
    struct rlimit limits;
    CHECK(getrlimit(what, &limits) == 0);
    limits.rlim_cur = most < limits.rlim_max ? most : limits.rlim_max;
    CHECK(setrlimit(what, &limits) == 0);
}

static rlim_t limit_of(int what) {
    struct rlimit limits;
    CHECK(getrlimit(what, &limits) == 0);
    return limits.rlim_cur;
}

/* A transient failure is reported with its own error. */
static void scarcity(pm_file *file) {
    rlim_t before = limit_of(RLIMIT_NOFILE);
    pm_part part = {1, filled, 1};
    limit(RLIMIT_NOFILE, 0);
    CHECK(pm_write_atomic(file, &part, 1) == -EMFILE);
    limit(RLIMIT_NOFILE, before);
    CHECK(pm_write_atomic(file, &part, 1) == (is_mount ? 0 : -EOPNOTSUPP));
}

/* Files do not exceed the size limit of the process. */
static void size_limits(pm_file *file, const char *path) {
    pm_file *own;
    rlim_t before = limit_of(RLIMIT_FSIZE);
    CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    int64_t end = pm_size(file);
    for (int round = 0; round < 40; round++, end += 1000)
        CHECK(pm_write(file, filled, 1000, (uint64_t)end) == 0);
    limit(RLIMIT_FSIZE, (rlim_t)end + 1500);
    CHECK(pm_write(file, filled, 1000, (uint64_t)end) == 0);
    CHECK(pm_write(file, filled, 1000, (uint64_t)end + 1000) == -EFBIG);
    CHECK(pm_size(file) == end + 1500);
    CHECK(pm_write(file, filled, 1, (uint64_t)end + 1500) == -EFBIG);
    CHECK(pm_write(file, filled, sizeof filled, 0) == 0);
    /* A file that is longer than the limit cannot be written behind it. */
    limit(RLIMIT_FSIZE, PM_PAGE_BYTES);
    CHECK(pm_open(path, O_RDWR, 0, &own) == 0);
    for (int round = 0; round < 10; round++) {
        CHECK(pm_write(own, filled, 1, 0) == 0);
        CHECK(pm_write(own, filled, 1, PM_PAGE_BYTES) == -EFBIG);
    }
    pm_close(own);
    limit(RLIMIT_FSIZE, before);
    CHECK(signal(SIGXFSZ, SIG_DFL) != SIG_ERR);
}

static pm_file *interrupted;
static const char *interrupted_path;
static pm_guard *begun;
static volatile sig_atomic_t handled;

/* Makes every call, twice. */
static void handle(int number) {
    pm_part part = {0, filled, 1};
    (void)number;
    handled++;
    for (int time = 0; time < 2; time++) {
        pm_file *file = NULL;
        pm_guard *guard = NULL;
        CHECK(pm_read(interrupted, seen, 1, 0) == -EDEADLK);
        CHECK(pm_write(interrupted, filled, 1, 0) == -EDEADLK);
        CHECK(pm_write_atomic(interrupted, &part, 1) == -EDEADLK);
        CHECK(pm_persist(interrupted) == -EDEADLK);
        CHECK(pm_open(interrupted_path, O_RDONLY, 0, &file) == -EDEADLK && file == NULL);
        CHECK(pm_size(interrupted) == -EDEADLK);
        CHECK(pm_set_size(interrupted, 0) == -EDEADLK);
        CHECK(pm_guard_begin(interrupted, 0, 1, &guard) == -EDEADLK && guard == NULL);
        CHECK(pm_guard_end(begun) == -EDEADLK);
        CHECK(strstr(pm_message(), "signal handler") != NULL);
    }
}

/* A signal that a call surely gets: the file would exceed its limit. */
static void signals(pm_file *file, const char *path) {
    rlim_t before = limit_of(RLIMIT_FSIZE);
    int64_t end = pm_size(file);
    interrupted = file;
    interrupted_path = path;
    CHECK(pm_guard_begin(file, 0, 1, &begun) == 0);
    CHECK(signal(SIGXFSZ, handle) != SIG_ERR);
    limit(RLIMIT_FSIZE, (rlim_t)end);
    CHECK(pm_write(file, filled, 1, (uint64_t)end) == -EFBIG && handled == 1);
    CHECK(pm_set_size(file, (uint64_t)end + 1) == -EFBIG && handled == 2);
    limit(RLIMIT_FSIZE, before);
    CHECK(signal(SIGXFSZ, SIG_DFL) != SIG_ERR);
    CHECK(pm_guard_end(begun) != -EDEADLK);
    CHECK(pm_write(file, filled, 1, (uint64_t)end) == 0 && pm_size(file) == end + 1);
}

int main(int argc, char **argv) {
    pm_file *file, *reader;
    if (argc != 3)
        return 2;
    is_mount = strcmp(argv[2], "mount") == 0;
    CHECK(pm_abi_version() == PM_ABI_VERSION);
    CHECK(strcmp(pm_message(), "") == 0);
    CHECK(pm_open(argv[1], O_RDWR | O_CREAT | O_EXCL, 0600, &file) == 0);
    refusals(argv[1]);
    arguments(file);
    content(file);
    CHECK(pm_is_direct(file) == is_mount);
    atomic(file);
    guards(file);
    threads(file);
    CHECK(pm_open(argv[1], O_RDONLY, 0, &reader) == 0);
    CHECK(pm_read(reader, seen, 1, 0) == 1);
    CHECK(pm_write(reader, seen, 1, 0) == -EBADF);
    pm_part part = {0, filled, PM_PAGE_BYTES};
    CHECK(pm_write_atomic(reader, &part, 1) == -EBADF);
    pm_close(reader);
    children(file, argv[1]);
    ends_of_threads();
    scarcity(file);
    size_limits(file, argv[1]);
    signals(file, argv[1]);
    CHECK(pm_set_size(file, 100) == 0 && pm_size(file) == 100);
    CHECK(pm_read(file, seen, 200, 0) == 100);
    CHECK(pm_persist(file) == 0);
    pm_close(file);
    return 0;
}
