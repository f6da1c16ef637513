//! Reads, writes and syncs.
//!
//! The engine does each call here, or else the kernel: then the function returns [`BY_KERNEL`], and
//! the caller calls the real function without holding a lock. Calls at the current offset are in
//! `offset`.
//!
//! # One write
//!
//! A program calls `pwrite` with 4 KiB within a file. One load in the function of `interposed` finds
//! that the descriptor is in the table.
//!
//! 1. `io::transfer::pwrite` → `DirectCall::begin` → `table::enter`: the entry is not reused until the
//!    call ends.
//! 2. `transfer::write_from`: `DirectCall::file` checks the entry, and that the number still leads to
//!    its file; then the pages of the buffer are touched.
//! 3. `transfer::write_bytes` → `EngineFile::write` calls `DirectFile::write` on a stack of this
//!    library. The direct client continues there.
//!
//! Every other write calls the real `pwrite`, and its reason is counted.

use crate::descriptors::attributes::refers_to;
use crate::descriptors::open_description::IoMode;
use crate::descriptors::table::{self, DescriptionUse};
use crate::engine::{self, EngineFile, Why};
use crate::kernel::{buffer, sys};
use crate::process::ownership;
use crate::state::thread::{self, EngineGuard};
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
        if !ownership::is_ours() {
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
        let may = if is_write {
            attributes.is_writable
        } else {
            attributes.is_readable
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
    pub fn any_checked_file(&self, fd: c_int) -> Option<&EngineFile> {
        let file = self.any_file()?;
        let changes = file.change_count()?;
        self.refers_to_file(fd, changes).then_some(file)
    }

    /// Whether the number is known to lead elsewhere: it was closed without this library.
    #[inline]
    pub fn is_fd_reused(&self, fd: c_int) -> bool {
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
        let refers = refers_to(fd, &self.entry.attributes());
        if refers {
            self.entry.record_checked(fd, changes);
        } else {
            self.entry.remove_stale(fd);
        }
        refers
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
        if self.entry.attributes().appends {
            self.by_kernel(Why::AppendAt)
        } else {
            Some(WritePosition::At(at))
        }
    }

    /// The start of a call that is not too long. None: the kernel must do the call.
    #[inline]
    fn start(&self, len: usize, offset: off64_t) -> Option<u64> {
        if is_direct(len) {
            start_offset(len, offset)
        } else {
            self.too_long(len)
        }
    }

    #[cold]
    pub fn too_long<T>(&self, len: usize) -> Option<T> {
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
pub fn is_direct(len: usize) -> bool {
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
            let rest = if done < bytes {
                write_rest(fd, &from[done..], at + done as u64)
            } else {
                0
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

#[inline(never)]
pub extern "C" fn sync(fd: c_int) -> isize {
    let sync = || Some(is_synced(DirectCall::begin(fd)?.any_checked_file(fd)?));
    if sync() == Some(true) { 0 } else { BY_KERNEL }
}

/// A frame of its own bounds the stack use of callers.
#[inline(never)]
fn is_synced(file: &EngineFile) -> bool {
    file.sync()
}

/// Reads the limit of file sizes, which may have changed.
#[inline(never)]
pub extern "C" fn refresh_size_limit() {
    IS_SIZE_LIMITED.store(sys::is_file_size_limited(), Relaxed);
}
