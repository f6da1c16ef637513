//! Reads, writes and syncs.
//!
//! The engine does each call here, or else the kernel: then the function returns [`BY_KERNEL`], and
//! the caller calls the real function without holding a lock.
//!
//! **Offsets.** The kernel's offset is the truth, since other descriptors, children and `lseek` use
//! only that one. A call at the offset first moves it by one `lseek`, which returns the old place,
//! and moves it back by the bytes that were not read or written.
//!
//! Meanwhile the call holds the description's lock, as every call in this process that uses the
//! offset does. If the kernel does the call in the end, this library makes a bare system call: a
//! thread that was cancelled in the real function would keep the lock. A call waits for a busy
//! lock: otherwise it would see an intermediate offset.
//!
//! If another process may have the description, the kernel does the whole call. The offset is moved
//! by descriptor number; so the call checks under the lock that the number still leads to the
//! description (`table`).

use crate::engine::{EngineFile, Why};
use crate::lock::LockGuard;
use crate::open_description::IoMode;
use crate::table::{self, DescriptionUse};
use crate::thread::{self, EngineGuard};
use crate::{buffer, descriptors, engine, process, sys};
use libc::{c_int, c_void, off64_t, size_t};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

/// Never a result of a system call.
pub const BY_KERNEL: isize = isize::MIN;

/// The kernel does longer calls: there the system call costs least, and signals and other threads
/// wait for the engine no longer than for this much.
pub const DIRECT_BYTES_MAX: usize = 1 << 20;

/// The process has a limit of file sizes, which the kernel must enforce.
pub static IS_SIZE_LIMITED: AtomicBool = AtomicBool::new(false);

/// The position of a write.
#[derive(Clone, Copy)]
pub enum WritePosition {
    At(u64),
    /// At the end of the file.
    End,
}

/// The result of a read or write.
#[derive(Clone, Copy)]
pub struct TransferResult {
    pub bytes: usize,
    /// The offset behind it, if that is not the old offset plus `bytes`.
    pub end: Option<u64>,
}

impl TransferResult {
    #[inline]
    pub fn at_offset(bytes: usize) -> TransferResult {
        TransferResult { bytes, end: None }
    }
}

/// A call in progress on an entry. The entry is released before the thread leaves.
pub struct DirectCall {
    pub entry: DescriptionUse,
    inside: EngineGuard,
}

impl DirectCall {
    /// None: the kernel must do the call.
    #[inline]
    pub fn begin(fd: c_int) -> Option<DirectCall> {
        let inside = thread::this().enter()?;
        if !process::is_ours() {
            return None;
        }
        let entry = table::enter(fd)?;
        Some(DirectCall { entry, inside })
    }

    /// In a handler of the program the engine does not read or write: it takes more stack than the
    /// handler's may have left.
    #[inline]
    pub fn is_handling(&self) -> bool {
        self.inside.thread().is_in_handler()
    }

    /// The file, if the engine has it and may do this with it, and the number still leads to it.
    #[inline]
    pub fn file(&self, fd: c_int, is_write: bool) -> Option<&EngineFile> {
        if self.entry.mode() != IoMode::Direct {
            return self.by_kernel(Why::Flags);
        }
        if self.is_handling() {
            return self.by_kernel(Why::Handler);
        }
        if is_write && IS_SIZE_LIMITED.load(Relaxed) {
            return self.by_kernel(Why::SizeLimit);
        }
        let attributes = self.entry.attributes();
        let may = match is_write {
            true => attributes.is_writable,
            false => attributes.is_readable,
        };
        if !may {
            return None;
        }
        // SAFETY: it is used, and the mode was looked at.
        let file = unsafe { self.entry.file() };
        let changes = file.prepare()?;
        self.refers_to_file(fd, changes).then_some(file)
    }

    /// The file, for calls that need neither the right to read nor the right to write.
    #[inline]
    fn any_file(&self) -> Option<&EngineFile> {
        let is_direct = self.entry.mode() == IoMode::Direct && !self.is_handling();
        // SAFETY: it is used, and the mode was looked at.
        is_direct.then(|| unsafe { self.entry.file() })
    }

    /// As `any_file`, if the file is on the direct path and the number still leads to it.
    fn any_checked_file(&self, fd: c_int) -> Option<&EngineFile> {
        let file = self.any_file()?;
        let changes = file.change_count()?;
        self.refers_to_file(fd, changes).then_some(file)
    }

    /// Whether the number is known to lead elsewhere: it was closed without this library.
    #[inline]
    fn is_fd_reused(&self, fd: c_int) -> bool {
        let changes = self.any_file().and_then(EngineFile::change_count);
        changes.is_some_and(|changes| !self.refers_to_file(fd, changes))
    }

    /// Whether the number leads to the file: it was checked since the last change, or the kernel
    /// says so.
    #[inline]
    fn refers_to_file(&self, fd: c_int, changes: u64) -> bool {
        self.entry.is_checked(fd, changes) || self.check_fd(fd, changes)
    }

    /// Asks the kernel for the file of a number. The count was read before. From now on the kernel
    /// serves a number that leads elsewhere.
    #[cold]
    fn check_fd(&self, fd: c_int, changes: u64) -> bool {
        let leads = descriptors::refers_to(fd, &self.entry.attributes());
        match leads {
            true => self.entry.record_checked(fd, changes),
            false => self.entry.remove_stale(fd),
        }
        leads
    }

    /// Counts an operation that the kernel serves.
    #[cold]
    pub fn by_kernel<T>(&self, why: Why) -> Option<T> {
        if let Some(file) = self.entry.any_file() {
            file.count_kernel(why);
        }
        None
    }

    /// The position of a write to a given offset. None: the kernel writes to the end instead.
    #[inline]
    pub fn place(&self, at: u64) -> Option<WritePosition> {
        match self.entry.attributes().appends {
            true => self.by_kernel(Why::AppendAt),
            false => Some(WritePosition::At(at)),
        }
    }

    /// The start of a call that is not too long. None: the kernel must do the call.
    #[inline]
    fn start(&self, len: usize, offset: off64_t) -> Option<u64> {
        match is_direct(len) {
            true => start_offset(len, offset),
            false => self.too_long(len),
        }
    }

    #[cold]
    fn too_long<T>(&self, len: usize) -> Option<T> {
        match len {
            0 => None,
            _ => self.by_kernel(Why::Long),
        }
    }

    /// Asks the engine for a file that the parent opened.
    #[inline]
    pub fn reopen_if_inherited(&self, fd: c_int) {
        if self.entry.mode() == IoMode::Inherited {
            self.reopen_inherited(fd);
        }
    }

    #[cold]
    fn reopen_inherited(&self, fd: c_int) {
        if !self.is_handling() && self.entry.begin_reopen() {
            let attributes = self.entry.attributes();
            let (may_read, may_write) = (attributes.is_readable, attributes.is_writable);
            let file = engine::open(fd, attributes.dev, attributes.ino, may_read, may_write);
            self.entry.end_reopen(file);
        }
    }
}

#[inline]
fn is_direct(len: usize) -> bool {
    (1..=DIRECT_BYTES_MAX).contains(&len)
}

/// None if the kernel must report an error: a negative offset, or an end beyond the largest offset.
#[inline]
pub fn start_offset(len: usize, offset: off64_t) -> Option<u64> {
    offset.checked_add(off64_t::try_from(len).ok()?)?;
    u64::try_from(offset).ok()
}

/// Reads into the program's memory. None: the kernel must do it. A frame of its own bounds the
/// stack use of callers.
#[inline(never)]
pub fn read_into(file: &EngineFile, into: *mut c_void, len: usize, at: u64) -> Option<usize> {
    if !buffer::is_writable(into, len) {
        return None;
    }
    // SAFETY: each page was just written to. As with the kernel, the program must keep other uses
    // of the memory away meanwhile.
    let into = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), len) };
    file.read(into, at)
}

/// Writes from the program's memory. None: the kernel must do it.
#[inline]
pub fn write_from(
    call: &DirectCall,
    fd: c_int,
    from: *const c_void,
    len: usize,
    place: WritePosition,
) -> Option<TransferResult> {
    let file = call.file(fd, true)?;
    if !buffer::is_readable(from, len) {
        return None;
    }
    // SAFETY: as in `read_into`, read.
    let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
    write_bytes(file, fd, from, place)
}

/// Writes bytes that are readable. A frame of its own bounds the stack use of callers.
#[inline(never)]
pub fn write_bytes(
    file: &EngineFile,
    fd: c_int,
    from: &[u8],
    place: WritePosition,
) -> Option<TransferResult> {
    let bytes = from.len();
    match place {
        WritePosition::At(at) => {
            let done = file.write(from, at)?;
            let rest = match done < bytes {
                true => write_rest(fd, &from[done..], at + done as u64),
                false => 0,
            };
            Some(TransferResult::at_offset(done + rest))
        }
        WritePosition::End => Some(TransferResult {
            bytes,
            end: Some(file.append(from)?),
        }),
    }
}

/// Writes the rest of a write that the engine did in part: programs take a short write for a full
/// medium.
#[cold]
fn write_rest(fd: c_int, from: &[u8], at: u64) -> usize {
    let mut done = 0;
    while done < from.len() {
        let (rest, at) = (&from[done..], at + done as u64);
        // SAFETY: the slice can be read.
        match unsafe { sys::pwrite(fd, rest.as_ptr().cast(), rest.len(), at) } {
            more @ 1.. => done += more as usize,
            error if error == -(libc::EINTR as isize) => {}
            // The next write reports the error.
            _ => break,
        }
    }
    done
}

/// Makes the bytes just written durable, if that is requested. An error is the result of the call.
pub fn make_durable(call: &DirectCall, fd: c_int, is_durable: bool, written: usize) -> isize {
    if !is_durable && !call.entry.attributes().is_durable {
        return written as isize;
    }
    if call.file(fd, true).is_some_and(is_synced) {
        return written as isize;
    }
    match sys::fdatasync(fd) {
        0 => written as isize,
        error => sys::returned(error),
    }
}

#[inline(never)]
pub extern "C" fn pread(fd: c_int, into: *mut c_void, len: size_t, offset: off64_t) -> isize {
    let read = || {
        let call = DirectCall::begin(fd)?;
        let at = call.start(len, offset)?;
        call.reopen_if_inherited(fd);
        read_into(call.file(fd, false)?, into, len, at)
    };
    read().map_or(BY_KERNEL, |n| n as isize)
}

#[inline(never)]
pub extern "C" fn pwrite(fd: c_int, from: *const c_void, len: size_t, offset: off64_t) -> isize {
    let write = || {
        let call = DirectCall::begin(fd)?;
        let at = call.start(len, offset)?;
        call.reopen_if_inherited(fd);
        let written = write_from(&call, fd, from, len, call.place(at)?)?;
        Some(make_durable(&call, fd, false, written.bytes))
    };
    write().unwrap_or(BY_KERNEL)
}

/// Calls `direct` at the offset and moves it, or else calls `kernel`, which moves the offset
/// itself.
pub fn at_offset(
    fd: c_int,
    len: usize,
    direct: impl FnOnce(&DirectCall, u64) -> Option<TransferResult>,
    kernel: impl FnOnce() -> isize,
) -> isize {
    with_offset_locked(fd, len, direct, |_| kernel())
}

/// A call that holds the offset lock of its entry; meanwhile the number leads to that entry.
struct LockedOffset {
    held: LockGuard<'static>,
    call: DirectCall,
}

impl LockedOffset {
    /// None: the kernel must do the call.
    fn begin(fd: c_int) -> Option<LockedOffset> {
        loop {
            let call = DirectCall::begin(fd)?;
            let held = call.entry.lock_offset();
            if call.entry.is_entry_of(fd) {
                return Some(LockedOffset { held, call });
            }
        }
    }
}

fn with_offset_locked(
    fd: c_int,
    len: usize,
    direct: impl FnOnce(&DirectCall, u64) -> Option<TransferResult>,
    kernel: impl FnOnce(&DirectCall) -> isize,
) -> isize {
    let Some(LockedOffset { call, held }) = LockedOffset::begin(fd) else {
        return BY_KERNEL;
    };
    // Checked under the lock: an earlier call may not have finished with the offset before.
    if call.entry.is_shared() || call.entry.mode() != IoMode::Direct {
        count_kernel_offset(&call, len);
        return BY_KERNEL;
    }
    // Checked before the offset is moved by number.
    if call.is_fd_reused(fd) {
        return BY_KERNEL;
    }
    let done = if is_direct(len) && !call.is_handling() {
        move_offset(fd, len, |at| direct(&call, at))
    } else if is_direct(len) {
        call.by_kernel(Why::Handler)
    } else {
        call.too_long(len)
    };
    let result = done.map_or_else(
        || {
            held.mark_kernel_call();
            kernel(&call)
        },
        |done| done.bytes as isize,
    );
    drop(held);
    sys::returned(result)
}

/// Counts the reason that only the kernel moves the offset.
#[cold]
fn count_kernel_offset(call: &DirectCall, len: usize) {
    let _: Option<()> = match (len, call.entry.is_shared()) {
        // A seek.
        (0, _) => None,
        (_, true) => call.by_kernel(Why::Forked),
        (_, false) => call.by_kernel(Why::Flags),
    };
}

/// Moves the offset by the bytes of `direct`, or behind the bytes that it appended.
fn move_offset(
    fd: c_int,
    len: usize,
    direct: impl FnOnce(u64) -> Option<TransferResult>,
) -> Option<TransferResult> {
    let len = len as off64_t;
    let end = sys::lseek(fd, len, libc::SEEK_CUR) as off64_t;
    if end < 0 {
        return None;
    }
    let done = u64::try_from(end - len).ok().and_then(direct);
    if let Some(end) = done.and_then(|done| done.end) {
        sys::lseek(fd, end as off64_t, libc::SEEK_SET);
        return done;
    }
    let back = len - done.map_or(0, |done| done.bytes as off64_t);
    if back != 0 {
        sys::lseek(fd, -back, libc::SEEK_CUR);
    }
    done
}

#[inline(never)]
pub extern "C" fn read(fd: c_int, into: *mut c_void, len: size_t) -> isize {
    let direct = |call: &DirectCall, at| {
        read_into(call.file(fd, false)?, into, len, at).map(TransferResult::at_offset)
    };
    // SAFETY: the arguments are the caller's.
    at_offset(fd, len, direct, || unsafe { sys::read(fd, into, len) })
}

#[inline(never)]
pub extern "C" fn write(fd: c_int, from: *const c_void, len: size_t) -> isize {
    // SAFETY: the arguments are the caller's.
    let kernel = || unsafe { sys::write(fd, from, len) };
    let direct = |call: &DirectCall, place| write_from(call, fd, from, len, place);
    write_at_offset(fd, len, false, direct, kernel)
}

/// [`at_offset`] for writes.
pub fn write_at_offset(
    fd: c_int,
    len: usize,
    is_durable: bool,
    direct: impl FnOnce(&DirectCall, WritePosition) -> Option<TransferResult>,
    kernel: impl FnOnce() -> isize,
) -> isize {
    let mut settled = 0;
    let direct = |call: &DirectCall, at| {
        let place = match call.entry.attributes().appends {
            true => WritePosition::End,
            false => WritePosition::At(at),
        };
        let written = direct(call, place)?;
        settled = make_durable(call, fd, is_durable, written.bytes);
        Some(written)
    };
    let result = with_offset_locked(fd, len, direct, |call| {
        // The kernel moves the offset by the file size that it knows; direct clients may have moved
        // the end since.
        if call.entry.attributes().appends {
            sys::fstat(fd);
        }
        kernel()
    });
    if settled < 0 { settled } else { result }
}

/// Seeks, ordered with the calls that move the offset.
#[inline(never)]
pub extern "C" fn lseek(fd: c_int, offset: off64_t, whence: c_int) -> isize {
    let from_end = match whence {
        libc::SEEK_END => seek_from_end(fd, offset),
        _ => None,
    };
    match from_end {
        Some(result) => sys::returned(result),
        None => at_offset(fd, 0, |_, _| None, || sys::lseek(fd, offset, whence)),
    }
}

/// Seeks from the end that the engine knows: the kernel uses the file size that it was given last,
/// and other processes may have appended since. One call sets the offset, so that other processes
/// may share it. None: the kernel must do it.
fn seek_from_end(fd: c_int, offset: off64_t) -> Option<isize> {
    let turn = LockedOffset::begin(fd)?;
    let Some(file) = turn.call.any_checked_file(fd) else {
        // Makes the kernel refresh the size.
        sys::fstat(fd);
        return None;
    };
    let end = off64_t::try_from(size_of(file)?).ok()?;
    Some(sys::lseek(fd, end.checked_add(offset)?, libc::SEEK_SET))
}

#[inline(never)]
pub extern "C" fn sync(fd: c_int) -> isize {
    let sync = || Some(is_synced(DirectCall::begin(fd)?.any_checked_file(fd)?));
    if sync() == Some(true) { 0 } else { BY_KERNEL }
}

// Frames of their own bound the stack use of callers.

#[inline(never)]
fn is_synced(file: &EngineFile) -> bool {
    file.sync()
}

#[inline(never)]
fn size_of(file: &EngineFile) -> Option<u64> {
    file.size()
}

/// Reads the limit of file sizes, which may have changed.
#[inline(never)]
pub extern "C" fn refresh_size_limit() {
    IS_SIZE_LIMITED.store(sys::is_file_size_limited(), Relaxed);
}
