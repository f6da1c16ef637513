//! System calls without the C library.
//!
//! They are no cancellation points, leave `errno` alone, and reach the kernel in spite of any
//! interposed function. Results are the kernel's: a negative result is an error number.

use libc::{c_int, c_long, c_void, iovec, off64_t};
use pagemesh_base::proc_maps::WILL_MAP_IOCTL;
use std::arch::asm;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// # Safety
/// The kernel may read and write all memory that the arguments point to.
unsafe fn call(number: c_long, args: [usize; 6]) -> isize {
    let result;
    // SAFETY: the instruction clobbers the listed registers; the caller answers for the memory that
    // the kernel accesses.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// `fcntl` (Linux, `include/uapi/asm-generic/fcntl.h`)
const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;

/// Every signal that can be deferred.
pub const ALL_SIGNALS: u64 = u64::MAX;
/// The signals of the C library itself, for cancelling a thread and for changing the user of all
/// threads (nptl(7)). A thread that changes the user waits until all threads have handled the
/// signal, so no thread keeps it blocked.
const C_LIBRARY_SIGNALS: u64 = 1 << 31 | 1 << 32;
/// Every signal that a thread may block for good.
pub const MASKABLE_SIGNALS: u64 = ALL_SIGNALS & !C_LIBRARY_SIGNALS;

fn int(value: c_int) -> usize {
    value as isize as usize
}

/// Sets `errno` and returns -1 for an error, as the C library returns a result.
pub fn returned(result: isize) -> isize {
    if (-4095..0).contains(&result) {
        // SAFETY: the address of this thread's `errno`, always valid.
        unsafe { *libc::__errno_location() = (-result) as c_int };
        return -1;
    }
    result
}

pub fn lseek(fd: c_int, offset: off64_t, whence: c_int) -> isize {
    let args = [int(fd), offset as usize, int(whence), 0, 0, 0];
    // SAFETY: it touches no memory.
    unsafe { call(libc::SYS_lseek, args) }
}

/// # Safety
/// As for the kernel: it checks the pointer, but writes wherever that points.
pub unsafe fn read(fd: c_int, into: *mut c_void, len: usize) -> isize {
    // SAFETY: the caller's.
    unsafe { call(libc::SYS_read, [int(fd), into as usize, len, 0, 0, 0]) }
}

/// # Safety
/// The kernel checks the pointer.
pub unsafe fn write(fd: c_int, from: *const c_void, len: usize) -> isize {
    // SAFETY: the caller's.
    unsafe { call(libc::SYS_write, [int(fd), from as usize, len, 0, 0, 0]) }
}

/// # Safety
/// As `read`.
#[cfg(any(debug_assertions, feature = "probe"))]
pub unsafe fn pread(fd: c_int, into: *mut c_void, len: usize, offset: u64) -> isize {
    let args = [int(fd), into as usize, len, offset as usize, 0, 0];
    // SAFETY: the caller's.
    unsafe { call(libc::SYS_pread64, args) }
}

/// # Safety
/// As `write`.
pub unsafe fn pwrite(fd: c_int, from: *const c_void, len: usize, offset: u64) -> isize {
    let args = [int(fd), from as usize, len, offset as usize, 0, 0];
    // SAFETY: the caller's.
    unsafe { call(libc::SYS_pwrite64, args) }
}

/// `preadv2` or `pwritev2`, by number, at the description's own offset.
///
/// # Safety
/// As `read` and `write`.
pub unsafe fn vector_at_offset(
    number: c_long,
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    flags: c_int,
) -> isize {
    let here = usize::MAX; // -1, in both halves
    let args = [int(fd), parts as usize, int(count), here, here, int(flags)];
    // SAFETY: the caller's.
    unsafe { call(number, args) }
}

pub fn close(fd: c_int) -> isize {
    // SAFETY: it touches no memory.
    unsafe { call(libc::SYS_close, [int(fd), 0, 0, 0, 0, 0]) }
}

pub fn dup2(fd: c_int, to: c_int) -> isize {
    // SAFETY: it touches no memory.
    unsafe { call(libc::SYS_dup2, [int(fd), int(to), 0, 0, 0, 0]) }
}

pub fn dup3(fd: c_int, to: c_int, flags: c_int) -> isize {
    // SAFETY: it touches no memory.
    unsafe { call(libc::SYS_dup3, [int(fd), int(to), int(flags), 0, 0, 0]) }
}

pub fn fdatasync(fd: c_int) -> isize {
    // SAFETY: it touches no memory.
    unsafe { call(libc::SYS_fdatasync, [int(fd), 0, 0, 0, 0, 0]) }
}

pub fn fstat(fd: c_int) -> Option<libc::stat64> {
    let mut stat = MaybeUninit::<libc::stat64>::uninit();
    let args = [int(fd), stat.as_mut_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: the kernel fills a `struct stat`, the same as `stat64` on x86-64.
    if unsafe { call(libc::SYS_fstat, args) } != 0 {
        return None;
    }
    // SAFETY: the kernel filled it.
    Some(unsafe { stat.assume_init() })
}

/// Whether it is a regular file.
pub fn is_file(stat: &libc::stat64) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// The kind of file system of a descriptor.
pub fn fs_type(fd: c_int) -> Option<i64> {
    let mut stat = MaybeUninit::<libc::statfs64>::uninit();
    let args = [int(fd), stat.as_mut_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: the kernel fills a `struct statfs`, the same as `statfs64` on x86-64.
    if unsafe { call(libc::SYS_fstatfs, args) } != 0 {
        return None;
    }
    // SAFETY: the kernel filled it.
    Some(unsafe { stat.assume_init() }.f_type)
}

/// Device and inode of a descriptor, as the kernel knows them, without asking the file system.
pub fn file_of(fd: c_int) -> Option<(u64, u64)> {
    let mut stat = MaybeUninit::<libc::statx>::uninit();
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    let (empty, into) = (c"".as_ptr() as usize, stat.as_mut_ptr() as usize);
    let mask = libc::STATX_INO as usize;
    // SAFETY: an empty string, and a structure that the kernel fills.
    if unsafe { call(libc::SYS_statx, [int(fd), empty, int(flags), mask, into, 0]) } != 0 {
        return None;
    }
    // SAFETY: the kernel filled it.
    let stat = unsafe { stat.assume_init() };
    let dev = libc::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    Some((dev, stat.stx_ino))
}

/// Access mode and flags of an open description.
pub fn flags_of(fd: c_int) -> Option<c_int> {
    c_int::try_from(control(fd, libc::F_GETFL, 0))
        .ok()
        .filter(|flags| *flags >= 0)
}

/// Sets the changeable flags of an open description. The others stay.
pub fn set_flags(fd: c_int, flags: c_int) {
    control(fd, libc::F_SETFL, flags);
}

/// The I/O signal of an open description, or 0.
pub fn signal_of(fd: c_int) -> isize {
    control(fd, F_GETSIG, 0)
}

/// Sets the I/O signal. False: the kernel refuses.
pub fn set_signal(fd: c_int, signal: c_int) -> bool {
    control(fd, F_SETSIG, signal) == 0
}

fn control(fd: c_int, command: c_int, argument: c_int) -> isize {
    // SAFETY: these commands touch no memory.
    unsafe {
        call(
            libc::SYS_fcntl,
            [int(fd), int(command), int(argument), 0, 0, 0],
        )
    }
}

/// Announces to the mount of a file that the kernel will cache its pages. Other file systems do not
/// know the request.
pub fn announce_mapping(fd: c_int) {
    let args = [int(fd), WILL_MAP_IOCTL as usize, 0, 0, 0, 0];
    // SAFETY: it has no argument, and touches no memory.
    while unsafe { call(libc::SYS_ioctl, args) } == -(libc::EINTR as isize) {}
}

/// Changes the protection of this library's pages. False: the system refuses it.
pub fn protect(pages: &Range<usize>, protection: c_int) -> bool {
    let args = [pages.start, pages.len(), int(protection), 0, 0, 0];
    // SAFETY: whole pages that nothing else uses, or that stay readable.
    unsafe { call(libc::SYS_mprotect, args) == 0 }
}

/// Reads the path of an open file; returns its length.
pub fn path_of(fd: c_int, into: &mut [u8]) -> Option<usize> {
    let link = std::ffi::CString::new(format!("/proc/self/fd/{fd}")).ok()?;
    let (path, room) = (into.as_mut_ptr() as usize, into.len());
    let args = [link.as_ptr() as usize, path, room, 0, 0, 0];
    // SAFETY: the kernel reads a string, and writes no more than there is room for.
    let len = unsafe { call(libc::SYS_readlink, args) };
    usize::try_from(len).ok().filter(|&len| len < room)
}

/// Opens a file of unknown kind, only to inspect it. Returns the kernel's result.
pub fn open_for_inspection(directory: c_int, path: *const libc::c_char) -> isize {
    // It must not wait for a device or pipe, nor make one the controlling terminal.
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
    let args = [int(directory), path as usize, int(flags), 0, 0, 0];
    // SAFETY: the kernel checks the pointer, and reads a string.
    unsafe { call(libc::SYS_openat, args) }
}

/// Whether the access rights allow to execute it.
pub fn is_executable(path: *const libc::c_char) -> bool {
    let args = [int(libc::AT_FDCWD), path as usize, int(libc::X_OK), 0, 0, 0];
    // SAFETY: the kernel checks the pointer, and reads a string.
    unsafe { call(libc::SYS_faccessat, args) == 0 }
}

/// Reads bytes of a file from an offset on; fewer at its end, or if the call fails.
pub fn read_at(fd: c_int, into: &mut [u8], offset: u64) -> usize {
    let place = into.as_mut_ptr() as usize;
    let args = [int(fd), place, into.len(), offset as usize, 0, 0];
    // SAFETY: a buffer with its length.
    usize::try_from(unsafe { call(libc::SYS_pread64, args) }).unwrap_or(0)
}

/// Maps zeroes. None: no memory.
pub fn map(bytes: usize) -> Option<*mut c_void> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let args = [0, bytes, int(protection), int(flags), usize::MAX, 0];
    // SAFETY: a new mapping wherever there is room.
    let start = unsafe { call(libc::SYS_mmap, args) };
    (start > 0).then_some(start as *mut c_void)
}

/// Opens a file for appending; creates it if it does not exist.
pub fn open_to_append(path: &std::ffi::CStr) -> Option<c_int> {
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT | libc::O_CLOEXEC;
    let args = [path.as_ptr() as usize, int(flags), 0o644, 0, 0, 0];
    // SAFETY: the kernel reads a string.
    let fd = unsafe { call(libc::SYS_open, args) };
    c_int::try_from(fd).ok().filter(|&fd| fd >= 0)
}

/// Writes all of it, or as much as the kernel takes.
pub fn write_all(fd: c_int, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: the slice can be read.
        match unsafe { write(fd, bytes.as_ptr().cast(), bytes.len()) } {
            done @ 1.. => bytes = &bytes[done as usize..],
            error if error == -(libc::EINTR as isize) => {}
            _ => return,
        }
    }
}

/// Maps a stack above a guard area. None: no memory.
pub fn map_stack(bytes: usize, guard: usize) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
    let args = [
        0,
        guard + bytes,
        int(libc::PROT_NONE),
        int(flags),
        usize::MAX,
        0,
    ];
    // SAFETY: a new mapping wherever there is room.
    let start = usize::try_from(unsafe { call(libc::SYS_mmap, args) }).ok()?;
    if protect(
        &(start + guard..start + guard + bytes),
        libc::PROT_READ | libc::PROT_WRITE,
    ) {
        return Some(start);
    }
    unmap(start, guard + bytes);
    None
}

/// Unmaps a range that `map` or `map_stack` gave, when it is no longer used.
pub fn unmap(start: usize, bytes: usize) {
    // SAFETY: a mapping of this library that is no longer used.
    unsafe { call(libc::SYS_munmap, [start, bytes, 0, 0, 0, 0]) };
}

pub fn getpid() -> c_int {
    // SAFETY: it touches no memory.
    unsafe { call(libc::SYS_getpid, [0; 6]) as c_int }
}

pub fn gettid() -> c_int {
    // SAFETY: it touches no memory.
    unsafe { call(libc::SYS_gettid, [0; 6]) as c_int }
}

/// Whether this process has a thread with this id, which may be ending.
pub fn has_thread(thread: c_int) -> bool {
    let args = [int(getpid()), int(thread), 0, 0, 0, 0];
    // SAFETY: it touches no memory; signal 0 is a check.
    unsafe { call(libc::SYS_tgkill, args) != -(libc::ESRCH as isize) }
}

/// Sends a signal to this thread again, with its information. False: no room in its queue.
///
/// # Safety
/// The kernel gave `info` to a handler.
pub unsafe fn requeue_signal(signal: c_int, info: *const libc::siginfo_t) -> bool {
    let args = [
        int(getpid()),
        int(gettid()),
        int(signal),
        info as usize,
        0,
        0,
    ];
    // SAFETY: the kernel copies a `siginfo_t`. A thread may send itself any.
    unsafe { call(libc::SYS_rt_tgsigqueueinfo, args) == 0 }
}

/// Sends a bare signal to this thread.
pub fn raise(signal: c_int) {
    let args = [int(getpid()), int(gettid()), int(signal), 0, 0, 0];
    // SAFETY: it touches no memory.
    unsafe { call(libc::SYS_tgkill, args) };
}

/// Changes this thread's mask (`SIG_BLOCK`, …) and returns the old one.
pub fn mask(how: c_int, signals: u64) -> u64 {
    let mut old = 0u64;
    let new = &raw const signals as usize;
    let args = [int(how), new, &raw mut old as usize, size_of::<u64>(), 0, 0];
    // SAFETY: the kernel reads one set of 8 bytes and writes one.
    unsafe { call(libc::SYS_rt_sigprocmask, args) };
    old
}

/// Sleeps while `word` is `seen`.
pub fn futex_wait(word: &AtomicU32, seen: u32) {
    let op = int(libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG);
    let args = [word.as_ptr() as usize, op, seen as usize, 0, 0, 0];
    // SAFETY: the word lives through the call; no time limit is given.
    unsafe { call(libc::SYS_futex, args) };
}

pub fn futex_wake_one(word: &AtomicU32) {
    futex_wake(word, 1);
}

pub fn futex_wake_all(word: &AtomicU32) {
    futex_wake(word, c_int::MAX);
}

fn futex_wake(word: &AtomicU32, sleepers: c_int) {
    let op = int(libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG);
    let args = [word.as_ptr() as usize, op, int(sleepers), 0, 0, 0];
    // SAFETY: the kernel only wakes threads that sleep at the address.
    unsafe { call(libc::SYS_futex, args) };
}

/// Whether the process has a file size limit: the kernel sends a signal for a write beyond it.
pub fn is_file_size_limited() -> bool {
    is_limited(libc::RLIMIT_FSIZE)
}

/// Whether a resource (`RLIMIT_AS`, …) is limited.
pub fn is_limited(what: u32) -> bool {
    let mut limit = [0u64; 2];
    let args = [0, what as usize, 0, limit.as_mut_ptr() as usize, 0, 0];
    // SAFETY: the kernel fills a `struct rlimit64` of two words.
    let result = unsafe { call(libc::SYS_prlimit64, args) };
    result != 0 || limit[0] != libc::RLIM64_INFINITY
}

/// 0: this thread is under no filter of system calls.
pub fn seccomp_mode() -> isize {
    let args = [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0];
    // SAFETY: it touches no memory.
    unsafe { call(libc::SYS_prctl, args) }
}

/// Reads a file's first bytes. Returns their number.
pub fn read_file(path: &CStr, into: &mut [u8]) -> usize {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let path = path.as_ptr() as usize;
    let args = [int(libc::AT_FDCWD), path, int(flags), 0, 0, 0];
    // SAFETY: a string.
    let fd = unsafe { call(libc::SYS_openat, args) } as c_int;
    let mut done = 0;
    while fd >= 0 && done < into.len() {
        let rest = &mut into[done..];
        // SAFETY: a buffer with its length.
        match unsafe { read(fd, rest.as_mut_ptr().cast(), rest.len()) } {
            more @ 1.. => done += more as usize,
            _ => break,
        }
    }
    if fd >= 0 {
        close(fd);
    }
    done
}

pub fn sleep_ns(nanoseconds: c_long) {
    let time = [0, nanoseconds];
    // SAFETY: a `struct timespec` of two words.
    unsafe { call(libc::SYS_nanosleep, [time.as_ptr() as usize, 0, 0, 0, 0, 0]) };
}

/// A descriptor that becomes readable when a thread of this process has ended, or an error of a
/// kernel that has none (before Linux 6.9).
pub fn open_thread(thread: c_int) -> isize {
    /// `PIDFD_THREAD`
    const OF_THREAD: c_int = libc::O_EXCL;
    // SAFETY: it touches no memory.
    unsafe {
        call(
            libc::SYS_pidfd_open,
            [int(thread), int(OF_THREAD), 0, 0, 0, 0],
        )
    }
}

/// The address that the kernel clears when this thread ends, or 0: it is unknown.
pub fn exit_clear_address() -> usize {
    let mut address = 0usize;
    let args = [
        libc::PR_GET_TID_ADDRESS as usize,
        &raw mut address as usize,
        0,
        0,
        0,
        0,
    ];
    // SAFETY: the kernel writes one address.
    match unsafe { call(libc::SYS_prctl, args) } {
        0 => address,
        _ => 0,
    }
}

/// Sleeps while `word` is `seen`, on a shared futex, as the kernel wakes it at a thread's end.
pub fn futex_wait_shared(word: &AtomicU32, seen: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| [limit.as_secs(), u64::from(limit.subsec_nanos())]);
    let limit = limit.as_ref().map_or(0, |limit| limit.as_ptr() as usize);
    let args = [
        word.as_ptr() as usize,
        int(libc::FUTEX_WAIT),
        seen as usize,
        limit,
        0,
        0,
    ];
    // SAFETY: the word and the limit live through the call.
    unsafe { call(libc::SYS_futex, args) };
}

pub fn futex_wake_shared(word: &AtomicU32) {
    let args = [
        word.as_ptr() as usize,
        int(libc::FUTEX_WAKE),
        int(c_int::MAX),
        0,
        0,
        0,
    ];
    // SAFETY: the kernel only wakes threads that sleep at the address.
    unsafe { call(libc::SYS_futex, args) };
}

/// Ends this thread without the C library.
pub fn end_thread() {
    // SAFETY: nothing of this thread is used any more.
    unsafe { call(libc::SYS_exit, [0; 6]) };
}

/// Ends the process without the C library.
pub fn end_process(code: c_int) {
    // SAFETY: no code runs after it.
    unsafe { call(libc::SYS_exit_group, [int(code), 0, 0, 0, 0, 0]) };
}

/// Entries of a directory, as `getdents64` has them.
#[repr(align(8))]
pub struct DirectoryEntries(pub [u8; ENTRIES_BYTES]);

/// Bytes per call; the caller asks again for more.
pub const ENTRIES_BYTES: usize = 1024;

pub fn open_directory(path: &CStr) -> Option<c_int> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let path = path.as_ptr() as usize;
    let args = [int(libc::AT_FDCWD), path, int(flags), 0, 0, 0];
    // SAFETY: a string.
    let fd = unsafe { call(libc::SYS_openat, args) };
    c_int::try_from(fd).ok().filter(|fd| *fd >= 0)
}

/// Reads the next entries; returns their bytes. None: no more.
pub fn read_entries(directory: c_int, into: &mut DirectoryEntries) -> Option<usize> {
    let args = [
        int(directory),
        into.0.as_mut_ptr() as usize,
        ENTRIES_BYTES,
        0,
        0,
        0,
    ];
    // SAFETY: a buffer with its length.
    let len = unsafe { call(libc::SYS_getdents64, args) };
    usize::try_from(len).ok().filter(|len| *len != 0)
}

/// The entries' names that are numbers.
pub fn numeric_names(entries: &[u8]) -> impl Iterator<Item = c_int> {
    // `struct linux_dirent64`: two words, the entry's length, its kind, its name.
    const LEN_AT: usize = 16;
    const NAME_AT: usize = 19;
    let mut rest = entries;
    std::iter::from_fn(move || {
        let len = u16::from_ne_bytes(rest.get(LEN_AT..)?.first_chunk().copied()?);
        let (entry, later) = rest.split_at_checked(usize::from(len).max(NAME_AT))?;
        rest = later;
        Some(CStr::from_bytes_until_nul(&entry[NAME_AT..]))
    })
    .filter_map(|name| name.ok()?.to_str().ok()?.parse().ok())
}
