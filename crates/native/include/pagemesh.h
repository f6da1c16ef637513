/* libpagemesh: files of a pagemesh mount for programs that use the direct path.
 *
 * A pm_file is opened on a mount as any other file. On the direct path, reads and overwrites
 * go straight to the pools and take about a microsecond. Otherwise they use the file's
 * descriptor, with the same result.
 *
 * ERRORS. Functions that return int or int64_t return a negative number of errno.h when they
 * fail. pm_message() then tells this thread the cause and the way out. NULL where it is not
 * permitted, and arguments out of range, give -EINVAL, and nothing was done.
 *
 * ORDER. A call that has returned comes before every call that begins afterwards, in any
 * process, by this library or by the kernel. A page (4096 bytes of the file, from a multiple
 * of that) changes as a whole. Concurrent calls have some order, page by page.
 *
 * DURABILITY. Bytes of pm_write are on all copies, and as durable as the pools, when
 * pm_persist has returned. Bytes of pm_write_atomic are so when that call has returned.
 * `pagemesh status` shows the durability class of the pools.
 *
 * THREADS. Several threads may call all functions concurrently. A pm_file or pm_guard is
 * closed once, when no thread uses it any more.
 *
 * FORK. A child of fork() uses the files of its parent by their descriptors. It must not use
 * the parent's guards except to end them. Files that it opens itself are on the direct path
 * again. Children of vfork() must not call any function of this library.
 *
 * SIGNALS. A handler that interrupts a call must return from it soon. It must not use files
 * of a mount, neither by this library (-EDEADLK; pm_close cannot report it, and must not be
 * called) nor by system calls. A process that stays in a call blocks other processes, and is
 * killed after some seconds. Threads must not be cancelled or killed in a call; the process
 * may be, at any instruction.
 *
 * THE PROCESS gets handlers of SIGSEGV and SIGBUS when the first pool is mapped, for pages
 * that cannot be read. They pass other signals on to the previous handler; a handler that is
 * set later must do the same. The process gets threads, with all signals blocked: one for
 * each mount, and one for each session of a pool. Each I/O slot (16 for a mount) has one
 * session in each copy. So the library must not be unloaded by dlclose().
 *
 * LIMITS of the size of files (RLIMIT_FSIZE) hold as usual for writes that extend a file.
 * Overwrites check the limit as of the last time that this process opened or extended a
 * file: an overwrite behind a limit that was set since may succeed.
 *
 * BUFFERS should not be mappings of files of the same mount: a call may have to read them
 * from there.
 */
#ifndef PAGEMESH_H
#define PAGEMESH_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. The library does not check it; compare it with
 * pm_abi_version(). */
#define PM_ABI_VERSION 1
#define PM_PAGE_BYTES 4096
/* Most pages of one pm_write_atomic, and of one read that is atomic with respect to it. */
#define PM_ATOMIC_PAGES_MAX 48
/* Most pages of a guard, and guards of a process. */
#define PM_GUARD_PAGES_MAX 48
#define PM_GUARDS_MAX 1024

typedef struct pm_file pm_file;
typedef struct pm_guard pm_guard;

/* One range of an atomic write. */
typedef struct pm_part {
    uint64_t offset;
    const void *data;
    size_t len;
} pm_part;

/* Contiguous bytes of a guard. */
typedef struct pm_slice {
    const void *data;
    size_t len;
} pm_slice;

/* The version of the library. It rises when functions or structures change. */
int pm_abi_version(void);

/* The error message of the last call of this thread that failed, until the next one fails.
 * Never NULL. */
const char *pm_message(void);

/* Opens a regular file, on a mount or not. Flags are those of open(2): one of O_RDONLY,
 * O_WRONLY and O_RDWR, and any of O_CREAT, O_EXCL, O_TRUNC, O_NOFOLLOW and O_CLOEXEC, which
 * is always set. The mode applies to a file that is created. */
int pm_open(const char *path, int flags, mode_t mode, pm_file **file);

/* Closes a file; its guards must have ended before. NULL is permitted. Does not persist. */
void pm_close(pm_file *file);

/* The descriptor of the file, for other calls such as fstat or flock. pm_close closes it. */
int pm_descriptor(const pm_file *file);

/* 1 if the file is on the direct path now, else 0. Single calls may use the descriptor
 * nevertheless. */
int pm_is_direct(const pm_file *file);

/* Size of the file in bytes. */
int64_t pm_size(const pm_file *file);

/* Truncates the file, or extends it by a hole. */
int pm_set_size(pm_file *file, uint64_t bytes);

/* Reads bytes; returns their number, fewer only at the end of the file. A read of up to
 * PM_ATOMIC_PAGES_MAX pages is atomic with respect to pm_write_atomic.
 * -EIO: every copy of a page is damaged. */
int64_t pm_read(const pm_file *file, void *into, size_t len, uint64_t offset);

/* Writes all bytes, and extends the file if necessary. Returns 0. After an error, bytes
 * before the page that failed may be written. */
int pm_write(pm_file *file, const void *data, size_t len, uint64_t offset);

/* Overwrites parts atomically, all of them or none. That holds for readers of at most
 * PM_ATOMIC_PAGES_MAX pages in one call, by this library or the kernel. It holds after the
 * failure of this process, of bricks, of the mount, or of all of them. (Readers of mappings
 * may see some parts before others.) The parts lie within the file and in at most
 * PM_ATOMIC_PAGES_MAX pages, and do not overlap. Whole pages go directly to the pools. The
 * mount writes other parts, and all parts if the direct path is closed.
 *   -EINVAL      the parts break a rule above; nothing has changed
 *   -EOPNOTSUPP  this file has no atomic writes; nothing has changed
 *   -EAGAIN      the mount does not answer; nothing has changed; try again later
 *   -EIO         the mount or its volume failed; all parts have changed, or none
 * Other errors are those of a write, and nothing has changed. */
int pm_write_atomic(pm_file *file, const pm_part *parts, size_t count);

/* Returns when all bytes written through this file are as durable as the pools, and an
 * asynchronous replica has them, too. */
int pm_persist(pm_file *file);

/* Maps a consistent snapshot of bytes of the file, fewer at its end, in the pool's memory.
 * If that is impossible, the guard holds a copy. Each page was checked against its checksum.
 *
 * A guard blocks no writer, and so it may become INVALID: when one of its pages is
 * overwritten, when 4000 other pages of the pool are, or when the direct path closes. Bytes
 * that are read from an invalid guard are arbitrary. The memory stays readable, but if the
 * machine finds it broken, a read through the guard gets SIGBUS.
 * So: read, and use the bytes only after pm_guard_valid() or pm_guard_end() has confirmed
 * them.
 * The memory cannot be written to. */
int pm_guard_begin(const pm_file *file, uint64_t offset, size_t len, pm_guard **guard);

/* Returns the number of slices of a guard, and their array, in file order. The array stays
 * valid until the guard ends. */
size_t pm_guard_slices(const pm_guard *guard, const pm_slice **slices);

/* 1 if all bytes read until now are those that the file had when the guard began, else 0. */
int pm_guard_valid(const pm_guard *guard);

/* Ends a guard. Returns 0, or -ESTALE if it was invalid: discard all bytes read through it.
 * NULL is permitted. */
int pm_guard_end(pm_guard *guard);

#ifdef __cplusplus
}
#endif

#endif
