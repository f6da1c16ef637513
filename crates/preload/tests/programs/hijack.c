// A program that defines all imports of the library (`hijack.h`, which the test writes), and ends
// when any of them is called. It calls the library by names that it does not import, and makes
// system calls without the C library.
#include <fcntl.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static long kernel(long number, long a, long b, long c)
{
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"(number), "D"(a), "S"(b), "d"(c)
                     : "rcx", "r11", "memory");
    return result;
}

static void say(const char *text)
{
    size_t len = 0;
    while (((volatile const char *)text)[len])
        len++;
    kernel(SYS_write, 1, (long)text, len);
}

__attribute__((noreturn, used)) static void hijacked(const char *name)
{
    say("the library calls the program's ");
    say(name);
    say("\n");
    kernel(SYS_exit_group, 9, 0, 0);
    __builtin_unreachable();
}

#define HIJACK(name)                                                                          \
    __asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n"               \
            "lea 1f(%rip), %rdi\nand $-16, %rsp\ncall hijacked\n"                             \
            ".section .rodata\n1: .string \"" #name "\"\n.text\n");
#include "hijack.h"

#define MUST(condition)                                                                       \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            say("not so: " #condition "\n");                                                  \
            kernel(SYS_exit_group, 1, 0, 0);                                                  \
        }                                                                                     \
    } while (0)

int __close(int);

static char bytes[8192];

int main(void)
{
    struct iovec parts[2] = {{bytes, 100}, {bytes + 100, 100}};
    int fd = open("file", O_RDWR | O_CREAT, 0644);
    MUST(fd >= 0);
    for (int i = 0; i < 3; i++) {
        MUST(pwrite(fd, bytes, sizeof bytes, 0) == sizeof bytes);
        MUST(pread(fd, bytes, sizeof bytes, 0) == sizeof bytes);
        MUST(pwritev(fd, parts, 2, 0) == 200);
        MUST(preadv(fd, parts, 2, 0) == 200);
        MUST(lseek(fd, 0, SEEK_SET) == 0);
        MUST(readv(fd, parts, 2) == 200);
        MUST(lseek(fd, 0, SEEK_END) == sizeof bytes);
        MUST(fsync(fd) == 0);
        int other = dup(fd);
        MUST(other >= 0);
        MUST(__close(other) == 0);
    }
    MUST(__close(fd) == 0);
    say("done\n");
    kernel(SYS_exit_group, 0, 0, 0);
}
