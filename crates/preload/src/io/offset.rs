//! Reads, writes and seeks at the current offset.
//!
//! The kernel's offset is the truth, since other descriptors, children and `lseek` use only that
//! one. A call at the offset first moves it by one `lseek`, which returns the old place, and moves
//! it back by the bytes that were not read or written.
//!
//! Meanwhile the call holds the description's lock, as every call in this process that uses the
//! offset does. If the kernel does the call in the end, this library makes a bare system call: a
//! thread that was cancelled in the real function would keep the lock. A call waits for a busy
//! lock: otherwise it would see an intermediate offset.
//!
//! If another process may have the description, the kernel does the whole call. The offset is moved
//! by descriptor number; so the call checks under the lock that the number still leads to the
//! description (`table`).

use super::transfer::{
    BY_KERNEL, DirectCall, TransferResult, WritePosition, is_direct, make_durable, read_into,
    write_from,
};
use crate::descriptors::open_description::IoMode;
use crate::engine::{EngineFile, Why};
use crate::kernel::lock::LockGuard;
use crate::kernel::sys;
use libc::{c_int, c_void, off64_t, size_t};

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
    let mut synced = 0;
    let direct = |call: &DirectCall, at| {
        let place = if call.entry.attributes().appends {
            WritePosition::End
        } else {
            WritePosition::At(at)
        };
        let written = direct(call, place)?;
        synced = make_durable(call, fd, is_durable, written.bytes);
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
    if synced < 0 { synced } else { result }
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
    let locked = LockedOffset::begin(fd)?;
    let Some(file) = locked.call.any_checked_file(fd) else {
        // Makes the kernel refresh the size.
        sys::fstat(fd);
        return None;
    };
    let end = off64_t::try_from(size_of(file)?).ok()?;
    Some(sys::lseek(fd, end.checked_add(offset)?, libc::SEEK_SET))
}

/// A frame of its own bounds the stack use of callers.
#[inline(never)]
fn size_of(file: &EngineFile) -> Option<u64> {
    file.size()
}
