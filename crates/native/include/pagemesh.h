/* libpagemesh: files of a pagemesh mount for programs that know it.
 *
 * A pm_file is opened on a mount as any other file. What is read and overwritten goes
 * straight to the pools, in about a microsecond, where the direct path is open; where not,
 * by the file's descriptor, with the same result.
 *
 * ERRORS. What returns int or int64_t returns a negative number of errno.h when it fails;
 * pm_message() then tells this thread what failed and what to do. Arguments that are NULL
 * where nothing says they may be are refused with -EINVAL; so is what is out of range, with
 * nothing done.
 *
 * ORDER. A call that has returned comes before every call that begins afterwards, in any
 * process, by this library or by the kernel. A page (4096 bytes of the file, from a multiple
 * of that) changes as a whole. Calls at the same time have some order, page by page.
 *
 * DURABILITY. What pm_write wrote is on all copies and as durable as the pools are (their
 * class is what `pagemesh status` shows) when pm_persist has returned; what pm_write_atomic
 * wrote is so when that has returned.
 *
 * THREADS. Everything may be called by several threads at once. A pm_file or pm_guard is
 * given back once, when nobody uses it any more.
 *
 * FORK. A child of fork() goes on with the files of its parent by their descriptors, and
 * must not touch its guards but to end them; what it opens itself is on the direct path
 * again. Children of vfork() must not call anything here.
 *
 * SIGNALS. A handler that interrupts a call must return from it, soon, and must not touch
 * files of a mount, by this library (-EDEADLK; pm_close cannot say so, and must not be
 * called) or by system calls: whoever stays inside of a call holds up all others, and is
 * ended after some seconds. Threads must not be cancelled
 * or killed inside of one; the process may be, at any instruction.
 *
 * THE PROCESS gets handlers of SIGSEGV and SIGBUS when the first pool is mapped, for pages
 * that cannot be read. They pass on what is not theirs to the handler that was there before;
 * who sets one later must do the same. It gets threads, with all signals blocked: one for
 * each mount, and one for each session of a pool, of which each station (16 for a mount) has
 * one in each copy. So the library must not be unloaded by dlclose().
 *
 * LIMITS of the size of files (RLIMIT_FSIZE) hold as ever for what makes a file longer. What
 * is overwritten behind a limit that was set since this process last opened a file, or made
 * one longer, may be written.
 *
 * BUFFERS should not be mappings of files of the same mount: they may have to be read from
 * there inside of a call.
 */
#ifndef PAGEMESH_H
#define PAGEMESH_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of this header. The library refuses nobody; compare it with pm_abi_version(). */
#define PM_ABI_VERSION 1
#define PM_PAGE_BYTES 4096
/* Pages of one pm_write_atomic, and of one read that shows it whole or not at all. */
#define PM_ATOMIC_PAGES_MAX 48
/* Pages of a guard, and guards of a process. */
#define PM_GUARD_PAGES_MAX 48
#define PM_GUARDS_MAX 1024

typedef struct pm_file pm_file;
typedef struct pm_guard pm_guard;

/* A part of what is written as a whole. */
typedef struct pm_part {
    uint64_t offset;
    const void *data;
    size_t len;
} pm_part;

/* Bytes that a guard shows together. */
typedef struct pm_slice {
    const void *data;
    size_t len;
} pm_slice;

/* Of the library; another one means that functions or structures have changed. */
int pm_abi_version(void);

/* Why the last call of this thread that failed did so. Stays as it is until the next one
 * fails. Never NULL. */
const char *pm_message(void);

/* Opens a regular file, on a mount or not. Flags are those of open(2): one of O_RDONLY,
 * O_WRONLY and O_RDWR, and any of O_CREAT, O_EXCL, O_TRUNC, O_NOFOLLOW and O_CLOEXEC, which
 * is always set. The mode is of a file that is made. */
int pm_open(const char *path, int flags, mode_t mode, pm_file **file);

/* Gives a file back; its guards have ended before. NULL is no error. Does not persist. */
void pm_close(pm_file *file);

/* The descriptor behind it, for what is not here: fstat, flock. It is closed by pm_close. */
int pm_descriptor(const pm_file *file);

/* 1: it is on the direct path now, though single calls may go by the descriptor; 0: not. */
int pm_is_direct(const pm_file *file);

/* Bytes of the file. */
int64_t pm_size(const pm_file *file);

/* Cuts the file, or makes it longer by a hole. */
int pm_set_size(pm_file *file, uint64_t bytes);

/* Reads bytes; returns how many, fewer only at the end of the file. Up to
 * PM_ATOMIC_PAGES_MAX pages are read at one moment, as far as pm_write_atomic goes.
 * -EIO: every copy of a page is damaged. */
int64_t pm_read(const pm_file *file, void *into, size_t len, uint64_t offset);

/* Writes all bytes; the file gets longer if need be. Returns 0. When it fails, what came
 * before the failing page may be there. */
int pm_write(pm_file *file, const void *data, size_t len, uint64_t offset);

/* Overwrites parts, all of them or none: for everybody who reads at most
 * PM_ATOMIC_PAGES_MAX pages in one call, by this library or the kernel, and after the death
 * of this process, of bricks, of the mount, or of everything. (Readers of mappings may see
 * some parts before others.) They lie within the file and in at most PM_ATOMIC_PAGES_MAX
 * pages, and do not overlap. Whole pages go to the pools at once; others, and where the
 * direct path is closed, by the mount.
 *   -EINVAL      something of that is not so; nothing has changed
 *   -EOPNOTSUPP  nobody can promise it for this file; nothing has changed
 *   -EAGAIN      the mount does not answer; nothing has changed, and it may work later
 *   -EIO         the mount or its volume failed; all parts have changed, or none
 * Everything else: as for a write, and nothing has changed. */
int pm_write_atomic(pm_file *file, const pm_part *parts, size_t count);

/* Returns when all that was written through this file is as durable as the pools are, and a
 * copy that follows has it, too. */
int pm_persist(pm_file *file);

/* Shows bytes of the file as they are at one moment, fewer at its end, where they lie in the
 * pool; where that cannot be had, a copy. Each page was checked against its checksum.
 *
 * A guard holds up nobody, so nobody has to wait for its end, and it may be OVER before: when
 * one of its pages is overwritten, when 4000 others of the pool are, or when the direct path
 * closes. What is read of it then may be anything, though reading does no harm (but for
 * memory that the machine finds broken meanwhile: who reads that by a guard gets SIGBUS).
 * So: read, and believe what was read only once pm_guard_valid() or pm_guard_end() has
 * confirmed it.
 * The memory cannot be written to. */
int pm_guard_begin(const pm_file *file, uint64_t offset, size_t len, pm_guard **guard);

/* How many slices it has, and where they are, in the order of their bytes. They stay until
 * the guard ends. */
size_t pm_guard_slices(const pm_guard *guard, const pm_slice **slices);

/* 1: all that was read until now is what the file had when the guard began; 0: not. */
int pm_guard_valid(const pm_guard *guard);

/* Ends it. 0, or -ESTALE: it was over, and what was read is void. NULL is no error. */
int pm_guard_end(pm_guard *guard);

#ifdef __cplusplus
}
#endif

#endif
