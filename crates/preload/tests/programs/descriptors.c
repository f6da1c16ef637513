// Descriptors that are duplicated, closed, and reused for other files.
#include "say.h"

static char bytes[4096], back[8192];

static int fresh(const char *path)
{
    int fd = must_open(path, O_RDWR | O_CREAT);
    MUST(pwrite(fd, bytes, sizeof bytes, 0) == sizeof bytes);
    return fd;
}

// The number now belongs to a pipe: bytes written to it come out there.
static void is_pipe(int fd, int other)
{
    SAY(write(fd, "pipe", 4));
    SAY(read(other, back, 100));
    SAY(pwrite(fd, "p", 1, 0));
}

static void pipe_at(int number)
{
    int ends[2];
    MUST(syscall(SYS_pipe2, ends, 0) == 0);
    MUST(ends[0] == number || ends[1] == number);
    if (ends[1] == number)
        is_pipe(ends[1], ends[0]);
    else
        SAY(pread(ends[0], back, 10, 0));
    syscall(SYS_close, ends[0]);
    close(ends[1]);
}

static void names(void)
{
    int fd = fresh("names"), second = dup(fd), third = fcntl(fd, F_DUPFD, 50);
    int fourth = fcntl(fd, F_DUPFD_CLOEXEC, 60), fifth = dup2(fd, 70), sixth = dup3(fd, 71, O_CLOEXEC);
    SAY(third);
    SAY(fourth);
    SAY(fifth);
    SAY(sixth);
    SAY(write(fd, "one", 3));
    SAY(write(second, "two", 3));
    SAY(read(third, back, 10));
    SAY(lseek(fourth, 5, SEEK_CUR));
    SAY(write(fifth, "six", 3));
    SAY(at(sixth));
    SAY(close(fd));
    SAY(pread(fd, back, 10, 0));
    SAY(pread(second, back, 10, 0));
    SAY(write(sixth, "end", 3));
    SAY(at(second));
    SAY(dup2(second, second));
    SAY(dup2(fd, fd));
    SAY(dup3(second, second, 0));
    SAY(dup2(9999, second));
    SAY(pread(second, back, 100, 0));
    SAY(fcntl(second, F_GETFL) & O_ACCMODE);
    SAY(dup2(second, -1));
    SAY(dup2(second, 100000000));
    close(second), close(third), close(fourth), close(fifth), close(sixth);
    SAY(pread(third, back, 10, 0));
}

static void replaced(void)
{
    int one = fresh("one"), two = fresh("two"), ends[2];
    MUST(pwrite(two, "TWO", 3, 0) == 3);
    SAY(dup2(two, one));
    SAY(pread(one, back, 3, 0));
    SAY(memcmp(back, "TWO", 3));
    SAY(pwrite(one, "one", 3, 10));
    MUST(pipe(ends) == 0);
    SAY(dup2(ends[1], one));
    is_pipe(one, ends[0]);
    SAY(dup3(ends[1], two, O_CLOEXEC));
    is_pipe(two, ends[0]);
    close(one), close(two), close(ends[0]), close(ends[1]);
}

static void closed(void)
{
    int fd = fresh("closed");
    close(fd);
    pipe_at(fd);
    fd = fresh("closed");
    close_range(fd, fd, 0);
    pipe_at(fd);
    fd = fresh("closed");
    close_range(fd, fd, CLOSE_RANGE_CLOEXEC);
    SAY(pread(fd, back, 10, 0));
    closefrom(fd);
    pipe_at(fd);
    fd = fresh("closed");
    syscall(SYS_close, fd);
    pipe_at(fd);
    fd = fresh("closed");
    syscall(SYS_close_range, fd, fd, 0);
    pipe_at(fd);
}

static void streams(void)
{
    int fd = fresh("streams");
    FILE *stream = fdopen(fd, "r+");
    SAY(fprintf(stream, "printed"));
    SAY(fclose(stream));
    pipe_at(fd);
    // A stream and a duplicate of its descriptor.
    fd = fresh("streams");
    int second = dup(fd);
    stream = fdopen(fd, "r+");
    fprintf(stream, "printed");
    fflush(stream);
    SAY(write(second, "written", 7));
    fprintf(stream, "again");
    fclose(stream);
    SAY(at(second));
    close(second);
    // The program's own standard output.
    int kept = dup(1), out = fresh("out");
    fflush(stdout);
    dup2(out, 1);
    close(out);
    printf("to the file\n");
    fflush(stdout);
    MUST(write(1, "and past it\n", 12) == 12);
    FILE *again = freopen("again", "w", stdout);
    MUST(again == stdout);
    printf("to another\n");
    fflush(stdout);
    MUST(write(1, "and past it\n", 12) == 12);
    fclose(stdin);
    fclose(stdout);
    MUST(dup2(kept, 1) == 1);
    stdout = fdopen(1, "w");
    close(kept);
}

// Numbers above all earlier ones, which only `dup2` gives, are closed with a range.
static void highest(void)
{
    char name[] = "made-XXXXXX";
    int fd = fresh("highest");
    SAY(dup2(fd, 100));
    SAY(dup2(100, 101));
    SAY(close_range(fd, 200, 0));
    for (int next = fd; next <= 100; next++)
        MUST(dup(1) == next);
    SAY(mkstemp(name));
    SAY(pwrite(101, "made", 4, 0));
    SAY(write(101, "more", 4));
    SAY(pread(101, back, 10, 0));
    SAY(sum_of(back, 4));
    unlink(name);
    closefrom(fd);
}

static void many(void)
{
    int fds[900];
    for (int i = 0; i < 900; i++) {
        fds[i] = must_open("many", O_RDWR | O_CREAT);
        MUST(pwrite(fds[i], &i, sizeof i, i * sizeof i) == sizeof i);
    }
    for (int round = 0; round < 20000; round++) {
        int i = round * 7919 % 900, seen;
        close(fds[i]);
        fds[i] = must_open("many", O_RDWR);
        MUST(pread(fds[i], &seen, sizeof seen, i * sizeof i) == sizeof seen && seen == i);
    }
    closefrom(3);
}

int main(void)
{
    fill(bytes, sizeof bytes, 2);
    names();
    replaced();
    closed();
    highest();
    streams();
    many();
    return 0;
}
