// Threads that share descriptors and offsets, and that close descriptors in use by others.
#include "say.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>

enum { THREADS = 4, RECORDS = 3000, RECORD = 24 };

static int shared[THREADS], stop;

static void *append(void *argument)
{
    long me = (long)argument;
    for (int i = 0; i < RECORDS; i++) {
        char record[RECORD + 1];
        sprintf(record, "%ld:%-*d\n", me, RECORD - 3, i);
        if (i % 3)
            MUST(write(shared[me], record, RECORD) == RECORD);
        else
            MUST(writev(shared[me], (struct iovec[]){{record, 10}, {record + 10, RECORD - 10}}, 2) == RECORD);
    }
    return 0;
}

// Each record is there once, whole, and the records of each thread are in order.
static void all_there(int fd)
{
    int next[THREADS] = {0};
    MUST(lseek(fd, 0, SEEK_END) == THREADS * RECORDS * RECORD);
    MUST(lseek(fd, 0, SEEK_SET) == 0);
    for (int i = 0; i < THREADS * RECORDS; i++) {
        char record[RECORD + 1] = {0};
        long me;
        int number;
        MUST(read(fd, record, RECORD) == RECORD);
        MUST(sscanf(record, "%ld:%d", &me, &number) == 2 && me < THREADS && record[RECORD - 1] == '\n');
        MUST(number == next[me]++);
    }
    MUST(read(fd, next, 1) == 0);
}

static int taken[THREADS * RECORDS];

// Each record is read once, by one of the threads.
static void *take(void *argument)
{
    char record[RECORD + 1] = {0};
    long me;
    int number;
    while (read(shared[(long)argument], record, RECORD) == RECORD) {
        MUST(sscanf(record, "%ld:%d", &me, &number) == 2);
        __atomic_fetch_add(&taken[me * RECORDS + number], 1, __ATOMIC_RELAXED);
    }
    return 0;
}

static void together(void *(*run)(void *))
{
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++)
        MUST(pthread_create(&threads[i], 0, run, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], 0);
}

static void offsets(void)
{
    int fd = must_open("offsets", O_RDWR | O_CREAT);
    for (int i = 0; i < THREADS; i++)
        shared[i] = i % 2 ? dup(fd) : fd;
    together(append);
    all_there(fd);
    lseek(fd, 0, SEEK_SET);
    together(take);
    for (int i = 0; i < THREADS * RECORDS; i++)
        MUST(taken[i] == 1);
    // Runs differ only in the order of threads.
    ftruncate(fd, 0) == 0 ? (void)0 : abort();
    close(fd);
}

// A number leads to one of two files, or none. A reader gets all bytes from one file. Writes to the
// second file never reach the first, which is only open for reading.
enum { PART = 512 };
static int number;

static void *use(void *argument)
{
    char bytes[PART], mine[PART];
    long rounds = 0;
    memset(mine, 'b', sizeof mine);
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        ssize_t n = pread(number, bytes, PART, 0);
        MUST(n == PART || (n == -1 && errno == EBADF));
        for (int i = 1; n == PART && i < PART; i++)
            MUST(bytes[i] == bytes[0]);
        n = pwrite(number, mine, PART, PART * (1 + (long)argument));
        MUST(n == PART || (n == -1 && errno == EBADF));
        rounds++;
    }
    return (void *)rounds;
}

static void races(void)
{
    char bytes[PART];
    int a = must_open("a", O_RDWR | O_CREAT), b = must_open("b", O_RDWR | O_CREAT);
    memset(bytes, 'a', PART);
    MUST(pwrite(a, bytes, PART, 0) == PART);
    memset(bytes, 'b', PART);
    MUST(pwrite(b, bytes, PART, 0) == PART);
    number = must_open("b", O_RDWR);
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++)
        MUST(pthread_create(&threads[i], 0, use, (void *)i) == 0);
    for (int i = 0; i < 20000; i++) {
        if (i % 4 == 3) {
            MUST(dup2(a, number) == number && dup2(b, number) == number);
            continue;
        }
        close(number);
        int again = must_open(i % 4 ? "b" : "a", i % 4 ? O_RDWR : O_RDONLY);
        MUST(again == number);
        if (i % 4 == 0) {
            close(number);
            MUST(must_open("b", O_RDWR) == number);
        }
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], 0);
    MUST(pread(b, bytes, PART, 0) == PART && bytes[0] == 'b' && bytes[PART - 1] == 'b');
    MUST(pread(a, bytes, PART, 0) == PART && bytes[0] == 'a' && bytes[PART - 1] == 'a');
    for (int fd = 3; fd < 20; fd++)
        close(fd);
    unlink("a"), unlink("b");
}

// Whole records from the beginning, without holes, in every file that a number led to.
enum { ROTATIONS = 300 };

static void *log_lines(void *argument)
{
    char record[RECORD + 1];
    sprintf(record, "%-*ld\n", RECORD - 1, (long)argument);
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED))
        MUST(write(number, record, RECORD) == RECORD);
    return 0;
}

static void has_whole_records(const char *name)
{
    char record[RECORD];
    int fd = must_open(name, O_RDONLY);
    off_t end = lseek(fd, 0, SEEK_END);
    MUST(end % RECORD == 0);
    for (off_t place = 0; place < end; place += RECORD) {
        MUST(pread(fd, record, RECORD, place) == RECORD);
        MUST(record[0] >= '0' && record[0] < '0' + THREADS && record[RECORD - 1] == '\n');
    }
    close(fd);
    unlink(name);
}

static void rotated(void)
{
    char name[30];
    pthread_t threads[THREADS];
    stop = 0;
    number = must_open("first", O_WRONLY | O_CREAT | O_TRUNC);
    for (long i = 0; i < THREADS; i++)
        MUST(pthread_create(&threads[i], 0, log_lines, (void *)i) == 0);
    for (int i = 0; i < ROTATIONS; i++) {
        sprintf(name, "log %d", i);
        int new = must_open(name, O_WRONLY | O_CREAT | O_TRUNC);
        MUST(dup2(new, number) == number);
        MUST(close(new) == 0);
        // All threads write to some of the files before the next one comes.
        while (i % 8 == 0 && lseek(number, 0, SEEK_CUR) < 40 * RECORD)
            ;
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], 0);
    close(number);
    has_whole_records("first");
    for (int i = 0; i < ROTATIONS; i++) {
        sprintf(name, "log %d", i);
        has_whole_records(name);
    }
}

// Forks while other threads write at an offset.
static void *forks(void *argument)
{
    (void)argument;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        waitpid(child, 0, 0);
    }
    return 0;
}

static void forking(void)
{
    pthread_t forker;
    stop = 0;
    MUST(pthread_create(&forker, 0, forks, 0) == 0);
    for (int round = 0; round < 5; round++)
        offsets(), memset(taken, 0, sizeof taken);
    stop = 1;
    pthread_join(forker, 0);
}

// A read of this many bytes blocks in the kernel until it is resumed (seccomp_unotify(2)).
enum { HELD_UP = (1 << 20) + 1 };
static int listener_ends[2], slow;

static int hold_up(void)
{
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_read, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, HELD_UP, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof steps / sizeof *steps, steps};
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
}

static void *read_slowly(void *argument)
{
    static char room[HELD_UP];
    int listener = hold_up();
    sigset_t ends;
    (void)argument;
    // Otherwise a child's end restarts the wait.
    sigemptyset(&ends);
    sigaddset(&ends, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &ends, 0);
    MUST(listener >= 0 && write(listener_ends[1], &listener, sizeof listener) == sizeof listener);
    MUST(read(slow, room, HELD_UP) == RECORD);
    return 0;
}

// The process forks while the kernel has a read at an offset in progress.
static void held_up(void)
{
    enum { SECONDS_MAX = 10 };
    char record[RECORD] = "a record";
    int listener, status;
    pthread_t reader;
    slow = must_open("slow", O_RDWR | O_CREAT);
    MUST(write(slow, record, RECORD) == RECORD && lseek(slow, 0, SEEK_SET) == 0);
    MUST(pipe(listener_ends) == 0 && pthread_create(&reader, 0, read_slowly, 0) == 0);
    MUST(read(listener_ends[0], &listener, sizeof listener) == sizeof listener);
    struct seccomp_notif told = {0};
    MUST(ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &told) == 0);
    // It resumes after all of this, or never.
    alarm(SECONDS_MAX);
    pid_t child = fork();
    if (child == 0)
        _exit(lseek(slow, 0, SEEK_CUR) != 0);
    MUST(waitpid(child, &status, 0) == child && status == 0);
    SAY(system("true"));
    alarm(0);
    struct seccomp_notif_resp answer = {.id = told.id, .flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE};
    MUST(ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer) == 0);
    pthread_join(reader, 0);
    SAY(lseek(slow, 0, SEEK_CUR));
    SAY(write(slow, record, RECORD));
    close(slow), close(listener), close(listener_ends[0]), close(listener_ends[1]);
}

int main(void)
{
    offsets();
    memset(taken, 0, sizeof taken);
    races();
    rotated();
    forking();
    held_up();
    return 0;
}
