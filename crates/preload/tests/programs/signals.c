// Handlers that come while a thread is inside the engine.
#include "say.h"

enum { SENT = 100 };

static char bytes[4096], back[4096];
static int fd;
static volatile sig_atomic_t handled, wrong;
static sigjmp_buf out;
static volatile int *volatile nowhere = (int *)16;

static int do_io(int place)
{
    char seen[64];
    return pwrite(fd, bytes, 64, place) == 64 && pread(fd, seen, 64, place) == 64
        && memcmp(seen, bytes, 64) == 0 && lseek(fd, 0, SEEK_CUR) >= 0 && write(fd, bytes, 8) == 8
        && fsync(fd) == 0;
}

typedef void handler(int);
int __sigaction(int, const struct sigaction *, struct sigaction *);
handler *bsd_signal(int, handler *);
handler *__sysv_signal(int, handler *);

// Another function that sets a handler; null: `sigaction`.
static handler *(*set)(int, handler *);

static handler *by_other_sigaction(int signal, handler *handler)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    return __sigaction(signal, &action, 0) == 0 ? SIG_DFL : SIG_ERR;
}

// One-shot handlers are set again before the next signal.
static void again_if_once(int signal, handler *handler)
{
    if (set) {
        set(signal, handler);
        setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 1000}}, 0);
    }
}

static void with_io(int signal)
{
    int opened = open("handler", O_RDWR | O_CREAT, 0644);
    wrong += signal != SIGALRM || !do_io(8192) || opened < 0 || write(opened, bytes, 4) != 4;
    close(opened);
    again_if_once(signal, with_io);
    handled++;
}

static void leaves(int signal)
{
    again_if_once(signal, leaves);
    handled++;
    siglongjmp(out, 1);
}

static void ticking(void (*handler)(int), int us)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    struct itimerval timer = {{0, set ? 0 : us}, {0, us}};
    handled = 0;
    MUST(set ? set(SIGALRM, handler) != SIG_ERR : sigaction(SIGALRM, &action, 0) == 0);
    MUST(setitimer(ITIMER_REAL, &timer, 0) == 0);
}

static void quiet(void)
{
    struct itimerval never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &never, 0);
    signal(SIGALRM, SIG_IGN);
}

static void handlers_that_do_io(void)
{
    ticking(with_io, 3000);
    for (int i = 0; i < (set ? 100 : 1000) || handled < 20; i++) {
        MUST(pwrite(fd, bytes, 4096, 0) == 4096);
        MUST(pread(fd, back, 4096, 0) == 4096);
    }
    quiet();
    SAY(wrong);
}

static void handlers_that_leave(void)
{
    volatile int rounds = 0;
    // Before the first signal comes: its handler jumps here.
    if (sigsetjmp(out, 1) == 0)
        ticking(leaves, 700);
    while (rounds++ < (set ? 100 : 1000) || handled < 20) {
        MUST(pwrite(fd, bytes, 4096, 0) == 4096);
        MUST(pread(fd, back, 4096, 0) == 4096);
    }
    quiet();
    // No signal stayed blocked, and the engine is still reached.
    sigset_t mask;
    sigprocmask(SIG_BLOCK, 0, &mask);
    SAY(sigismember(&mask, SIGALRM));
}

// The engine may leave some calls to the kernel.
static int did(int which, long before, int times)
{
    return !getenv("PAGEMESH_PROBE_COUNTS") || counted(which) - before > times / 2;
}

enum { TIMES = 100 };

static __attribute__((noinline)) void deep_down(void)
{
    char room[16384];
    memset(room, 'd', sizeof room);
    long writes = counted(WRITES), ends = counted(ENDS);
    for (int i = 0; i < TIMES; i++) {
        int opened = must_open("handler", O_RDWR | O_CREAT);
        MUST(pwrite(opened, room, 64, 0) == 64);
        close(opened);
    }
    SAY(did(WRITES, writes, TIMES));
    SAY(did(ENDS, ends, TIMES));
}

// A thread that has left a handler by a jump is in no handler any more, also deeper on the stack.
static void behind_a_jump(void)
{
    signal(SIGUSR1, leaves);
    if (sigsetjmp(out, 1) == 0) {
        raise(SIGUSR1);
        MUST(0);
    }
    MUST(pread(fd, back, 10, 0) == 10);
    deep_down();
}

static void jumps_within(int signal)
{
    (void)signal;
    if (sigsetjmp(out, 1) == 0) {
        raise(SIGALRM);
        MUST(0);
    }
    // Still in this handler, which may have interrupted any call.
    long writes = counted(WRITES);
    for (int i = 0; i < TIMES; i++)
        wrong += pwrite(fd, bytes, 64, 0) != 64;
    wrong += counted(WRITES) != writes;
}

static void into_a_handler(void)
{
    signal(SIGUSR1, jumps_within);
    signal(SIGALRM, leaves);
    raise(SIGUSR1);
    SAY(wrong);
    deep_down();
}

static int many[TIMES];

static void closes(int signal)
{
    (void)signal;
    for (int i = 0; i < TIMES; i++)
        close(many[i]);
}

// A file that a handler closed is freed at the next close.
static void closed_by_a_handler(void)
{
    int last = must_open("handler", O_RDWR | O_CREAT);
    for (int i = 0; i < TIMES; i++)
        many[i] = must_open("handler", O_RDWR);
    long ends = counted(ENDS);
    signal(SIGUSR1, closes);
    raise(SIGUSR1);
    MUST(counted(ENDS) == ends);
    close(last);
    SAY(did(ENDS, ends, TIMES));
    signal(SIGUSR1, SIG_DFL);
}

static volatile sig_atomic_t values[SENT], senders;

static void queued(int signal, siginfo_t *info, void *context)
{
    (void)context;
    wrong += signal != SIGRTMIN || info->si_code != SI_QUEUE || info->si_pid != getpid();
    if (handled < SENT)
        values[handled] = info->si_value.sival_int;
    handled++;
}

static void *sends(void *argument)
{
    sigset_t mine;
    (void)argument;
    sigfillset(&mine);
    pthread_sigmask(SIG_BLOCK, &mine, 0);
    for (int i = 0; i < SENT; i++) {
        union sigval value = {.sival_int = i * 3};
        MUST(sigqueue(getpid(), SIGRTMIN, value) == 0);
        if (i % 10 == 0)
            usleep(300);
    }
    senders--;
    return 0;
}

static void all_come_in_order(void)
{
    struct sigaction action = {.sa_sigaction = queued, .sa_flags = SA_SIGINFO};
    pthread_t sender;
    handled = 0, senders = 1;
    MUST(sigaction(SIGRTMIN, &action, 0) == 0);
    MUST(pthread_create(&sender, 0, sends, 0) == 0);
    while (senders || handled < SENT)
        MUST(pwrite(fd, bytes, 4096, 0) == 4096);
    pthread_join(sender, 0);
    for (int i = 0; i < SENT; i++)
        MUST(values[i] == i * 3);
    SAY(handled);
    SAY(wrong);
}

// Signals come one after the other, while buffers are touched for the first time.
static pthread_t reader;
static volatile sig_atomic_t lost;

static void sent(int signal, siginfo_t *info, void *context)
{
    (void)context;
    wrong += (signal != SIGBUS && signal != SIGSEGV) || info->si_code != SI_TKILL;
    handled++;
}

static void *sends_faults(void *argument)
{
    enum { LOOKS = 1000 };
    sigset_t mine;
    (void)argument;
    sigfillset(&mine);
    pthread_sigmask(SIG_BLOCK, &mine, 0);
    for (int i = 0; i < SENT; i++) {
        int before = handled, signal = i % 2 ? SIGBUS : SIGSEGV;
        MUST(pthread_kill(reader, signal) == 0);
        for (int look = 0; handled == before && look < LOOKS; look++)
            usleep(100);
        lost += handled == before;
    }
    senders--;
    return 0;
}

static void sent_while_touched(void)
{
    enum { ROOM = 1 << 20 };
    struct sigaction action = {.sa_sigaction = sent, .sa_flags = SA_SIGINFO | SA_RESTART};
    pthread_t sender;
    reader = pthread_self();
    handled = wrong = lost = 0, senders = 1;
    MUST(sigaction(SIGBUS, &action, 0) == 0 && sigaction(SIGSEGV, &action, 0) == 0);
    MUST(pthread_create(&sender, 0, sends_faults, 0) == 0);
    while (senders) {
        char *fresh = mmap(0, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        MUST(fresh != MAP_FAILED && pread(fd, fresh, ROOM, 0) >= 4096);
        munmap(fresh, ROOM);
    }
    pthread_join(sender, 0);
    SAY(lost);
    SAY(wrong);
    signal(SIGBUS, SIG_DFL), signal(SIGSEGV, SIG_DFL);
}

static void plain(int signal)
{
    handled += signal;
}

static volatile sig_atomic_t depth, deepest, raises;

static void again(int signal)
{
    if (++depth > deepest)
        deepest = depth;
    if (raises-- > 0)
        raise(signal);
    depth--;
}

static void questions(void)
{
    struct sigaction action = {.sa_handler = plain}, old;
    SAY(signal(SIGUSR1, plain) == SIG_DFL);
    SAY(signal(SIGUSR1, again) == plain);
    SAY(sigaction(SIGUSR1, 0, &old));
    SAY(old.sa_handler == again);
    SAY(old.sa_flags & ~0x04000000);
    action.sa_flags = SA_RESETHAND | SA_NODEFER;
    sigaddset(&action.sa_mask, SIGUSR2);
    SAY(sigaction(SIGUSR1, &action, &old));
    SAY(sigaction(SIGUSR1, 0, &old));
    SAY(old.sa_handler == plain);
    SAY(old.sa_flags & ~0x04000000);
    SAY(sigismember(&old.sa_mask, SIGUSR2));
    handled = 0;
    raise(SIGUSR1);
    SAY(handled);
    SAY(signal(SIGUSR1, SIG_IGN) == SIG_DFL);
    SAY(sigset(SIGUSR1, plain) == SIG_IGN);
    SAY(sigset(SIGUSR1, again) == plain);
    SAY(sysv_signal(SIGUSR1, plain) == again);
    SAY(signal(SIGUSR1, SIG_DFL) == plain);
    SAY(siginterrupt(SIGUSR1, 1));
    SAY(signal(SIGUSR1, plain) == SIG_DFL);
    SAY(sigaction(SIGUSR1, 0, &old));
    SAY(old.sa_flags & ~0x04000000);
    SAY(siginterrupt(SIGUSR1, 0));
    SAY(sigaction(SIGUSR1, 0, &old));
    SAY(old.sa_handler == plain);
    SAY(old.sa_flags & ~0x04000000);
    SAY(signal(SIGKILL, plain) == SIG_ERR);
    SAY(signal(1000, plain) == SIG_ERR);
    SAY(sigaction(0, &action, 0));
    SAY(sigaction(SIGSEGV, 0, &old));
    SAY(old.sa_handler == SIG_DFL);
    SAY(old.sa_flags & ~0x04000000);
}

static void nesting(void)
{
    struct sigaction action = {.sa_handler = again, .sa_flags = SA_NODEFER};
    MUST(sigaction(SIGUSR1, &action, 0) == 0);
    depth = deepest = 0;
    raises = 2;
    raise(SIGUSR1);
    SAY(deepest);
    action.sa_flags = 0;
    MUST(sigaction(SIGUSR1, &action, 0) == 0);
    depth = deepest = 0;
    raises = 2;
    raise(SIGUSR1);
    SAY(deepest);
}

static char stack[65536];
static volatile sig_atomic_t was_on_stack;

static void on_stack(int signal)
{
    char here;
    (void)signal;
    was_on_stack = &here >= stack && &here < stack + sizeof stack;
    wrong += !do_io(16384);
}

static void alternate(void)
{
    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = on_stack, .sa_flags = SA_ONSTACK};
    MUST(sigaltstack(&other, 0) == 0 && sigaction(SIGUSR2, &action, 0) == 0);
    raise(SIGUSR2);
    SAY(was_on_stack);
    SAY(wrong);
}

// The smallest stack leaves too little space for the engine.
static char *small;
static size_t small_bytes;

static void on_small_stack(int signal)
{
    char here, seen[100];
    struct iovec two[] = {{seen, 50}, {seen + 50, 50}};
    was_on_stack = &here >= small && &here < small + small_bytes && signal == SIGUSR2;
    memset(seen, 's', sizeof seen);
    wrong += pwritev(fd, two, 2, 20000) != 100 || preadv(fd, two, 2, 19990) != 100 || seen[50] != 's';
    wrong += pwrite(fd, seen, 100, 20000) != 100 || pread(fd, seen, 100, 20000) != 100;
    wrong += lseek(fd, 300, SEEK_SET) != 300 || writev(fd, two, 2) != 100 || readv(fd, two, 2) != 100;
    wrong += read(fd, seen, 50) != 50 || write(fd, seen, 50) != 50 || lseek(fd, 0, SEEK_CUR) != 600;
    wrong += lseek(fd, 0, SEEK_END) < 20100 || fsync(fd) != 0;
    handled++;
}

static volatile uintptr_t lowest;

static void measures(int signal)
{
    char here;
    (void)signal;
    lowest = (uintptr_t)&here;
}

static void on_smallest_stack(void)
{
    // As much as 8 KiB, long the usual size, leave besides the kernel's signal frame. The frame
    // differs between processors, so the program measures it.
    enum { LEFT = 4608, PAGES = 65536 };
    char *pages = mmap(0, PAGES + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(pages != MAP_FAILED && mprotect(pages, 4096, PROT_NONE) == 0);
    stack_t before, other = {.ss_sp = pages + 4096, .ss_size = PAGES};
    struct sigaction action = {.sa_handler = measures, .sa_flags = SA_ONSTACK};
    MUST(sigaltstack(&other, &before) == 0 && sigaction(SIGUSR2, &action, 0) == 0);
    raise(SIGUSR2);
    small = pages + 4096;
    small_bytes = ((uintptr_t)small + PAGES - lowest + LEFT) & -64ul;
    action.sa_handler = on_small_stack;
    MUST(sigaltstack(&(stack_t){.ss_sp = small, .ss_size = small_bytes}, 0) == 0);
    MUST(sigaction(SIGUSR2, &action, 0) == 0 && pwrite(fd, bytes, 4096, 19000) == 4096);
    // First on another stack, since the loader takes much stack to look up a function.
    on_small_stack(SIGUSR2);
    raise(SIGUSR2);
    SAY(was_on_stack);
    SAY(wrong);
    MUST(sigaltstack(&before, 0) == 0);
    munmap(pages, PAGES + 4096);
}

static void faulted(int signal, siginfo_t *info, void *context)
{
    (void)context;
    wrong += signal != SIGSEGV || info->si_code != SEGV_MAPERR || info->si_addr != (void *)nowhere;
    siglongjmp(out, 1);
}

static void faults(void)
{
    struct sigaction action = {.sa_sigaction = faulted, .sa_flags = SA_SIGINFO};
    MUST(sigaction(SIGSEGV, &action, 0) == 0);
    if (!sigsetjmp(out, 1)) {
        *nowhere = 1;
        MUST(0);
    }
    SAY(wrong);
    SAY(pwrite(fd, (char *)nowhere, 10, 0));
    signal(SIGSEGV, SIG_DFL);
    SAY(pwrite(fd, (char *)nowhere, 10, 0));
    for (int sent = 0; sent < 2; sent++) {
        pid_t child = fork();
        if (child == 0) {
            setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
            sent ? raise(SIGSEGV) : (*nowhere = 1);
            _exit(0);
        }
        int status = 0;
        MUST(waitpid(child, &status, 0) == child);
        SAY(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
}

// A fault ends a process that ignores the signal, but a sent signal is ignored, before and after
// the first file.
static void ignored(void)
{
    struct sigaction old;
    char byte;
    SAY(pwrite(fd, (char *)nowhere, 10, 0));
    SAY(pread(fd, (char *)nowhere, 10, 0));
    SAY(sigaction(SIGSEGV, 0, &old));
    SAY(old.sa_handler == SIG_IGN);
    SAY(old.sa_flags & ~0x04000000);
    raise(SIGSEGV);
    raise(SIGBUS);
    int ends[2], status = 0;
    MUST(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        // Its parent reads, and is not interrupted.
        for (int i = 0; i < 1000; i++)
            kill(getppid(), SIGBUS);
        _exit(write(ends[1], "b", 1) != 1);
    }
    SAY(read(ends[0], &byte, 1));
    MUST(waitpid(child, &status, 0) == child && status == 0);
    child = fork();
    if (child == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        *nowhere = 1;
        _exit(0);
    }
    MUST(waitpid(child, &status, 0) == child);
    SAY(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    close(ends[0]), close(ends[1]);
}

int main(void)
{
    fill(bytes, sizeof bytes, 4);
    sigaction(SIGBUS, &(struct sigaction){.sa_handler = SIG_IGN}, 0);
    sigaction(SIGSEGV, &(struct sigaction){.sa_handler = SIG_IGN}, 0);
    fd = must_open("file", O_RDWR | O_CREAT);
    ignored();
    MUST(signal(SIGSEGV, SIG_DFL) == SIG_IGN && signal(SIGBUS, SIG_DFL) == SIG_IGN);
    questions();
    handlers_that_do_io();
    handler *(*const ways[])(int, handler *) = {
        by_other_sigaction, signal, bsd_signal, ssignal, sysv_signal, __sysv_signal, sigset,
    };
    for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++) {
        set = ways[i];
        handlers_that_do_io();
        handlers_that_leave();
    }
    set = 0;
    handlers_that_leave();
    behind_a_jump();
    into_a_handler();
    closed_by_a_handler();
    all_come_in_order();
    sent_while_touched();
    nesting();
    alternate();
    on_smallest_stack();
    faults();
    sigaction(SIGBUS, &(struct sigaction){.sa_handler = SIG_IGN}, 0);
    sigaction(SIGSEGV, &(struct sigaction){.sa_handler = SIG_IGN}, 0);
    ignored();
    unlink("file"), unlink("handler");
    return 0;
}
