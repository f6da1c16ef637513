// Executes or starts a program in each way that the C library offers, and ends with its exit code:
// children WAY PROGRAM [ROOT]
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void execute(const char *way, char *program)
{
    char *argv[] = {program, "word", NULL};
    if (!strcmp(way, "execve"))
        execve(program, argv, environ);
    if (!strcmp(way, "execv"))
        execv(program, argv);
    if (!strcmp(way, "execvp"))
        execvp(program, argv);
    if (!strcmp(way, "execvpe"))
        execvpe(program, argv, environ);
    if (!strcmp(way, "execveat"))
        execveat(AT_FDCWD, program, argv, environ, 0);
    if (!strcmp(way, "fexecve"))
        fexecve(open(program, O_PATH | O_CLOEXEC), argv, environ);
    if (!strcmp(way, "execl"))
        execl(program, program, "1", "2", "3", "4", "5", "word", NULL);
    if (!strcmp(way, "execlp"))
        execlp(program, program, "word", NULL);
    if (!strcmp(way, "execle"))
        execle(program, program, "1", "2", "3", "4", "word", NULL, environ);
    _exit(126);
}

int main(int argc, char **argv)
{
    const char *way = argv[1];
    char *words[] = {argv[2], "word", NULL};
    pid_t child = 0;
    int ended = 0;
    if (argc > 3 && (chroot(argv[3]) != 0 || chdir("/") != 0))
        return 124;
    if (!strcmp(way, "posix_spawn"))
        posix_spawn(&child, argv[2], NULL, NULL, words, environ);
    else if (!strcmp(way, "posix_spawnp"))
        posix_spawnp(&child, argv[2], NULL, NULL, words, environ);
    else if (!strcmp(way, "vfork")) {
        // The child shares the parent's memory; its changes there must not break the parent.
        for (int round = 0; round < 3; round++) {
            child = vfork();
            if (child == 0) {
                execve(argv[2], words, environ);
                _exit(126);
            }
            if (round < 2)
                waitpid(child, &ended, 0);
        }
    } else if (!strcmp(way, "alone"))
        execute("execv", argv[2]);
    else if ((child = fork()) == 0)
        execute(way, argv[2]);
    if (child <= 0 || waitpid(child, &ended, 0) != child)
        return 125;
    return WIFEXITED(ended) ? WEXITSTATUS(ended) : 123;
}
