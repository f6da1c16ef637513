//! Reads and writes of several parts.
//!
//! One part is done as it is. Several parts are gathered in allocated memory, so that the engine
//! does one read or one write, as atomic as any other. So there is a limit, and the kernel does
//! longer calls. The memory is not on the stack: a thread's stack may have no room for it besides
//! the engine.

use super::offset::{at_offset, write_at_offset};
use super::transfer::{self, BY_KERNEL, DirectCall, TransferResult, WritePosition};
use crate::engine::{Why, stack};
use crate::kernel::{buffer, sys};
use libc::{c_int, c_long, iovec, off64_t};
use std::ptr;

/// Most bytes of several parts: copying more takes longer than the call into the kernel.
const GATHERED_BYTES_MAX: usize = 8192;

/// The length of a call that the kernel must do in any case.
const TOO_LONG: usize = usize::MAX;

/// The kernel's limit (UIO_MAXIOV).
const PARTS_MAX: usize = 1024;

/// Flags that change nothing here, except that a write is to be durable.
const FLAGS: c_int = libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_HIPRI;

/// A buffer of so many bytes for several parts; none: there is no memory.
fn allocate(len: usize) -> Option<Vec<u8>> {
    let mut room = Vec::new();
    room.try_reserve_exact(len).ok()?;
    room.resize(len, 0);
    Some(room)
}

/// The parts of a call; their array is known to be readable.
#[derive(Clone, Copy)]
struct IoParts<'a> {
    parts: &'a [iovec],
    len: usize,
}

impl<'a> IoParts<'a> {
    /// None: the kernel must do it, and reports errors in the parts.
    fn of(parts: *const iovec, count: c_int) -> Option<IoParts<'a>> {
        let count = usize::try_from(count)
            .ok()
            .filter(|count| (1..=PARTS_MAX).contains(count))?;
        if !parts.is_aligned() || !buffer::is_readable(parts.cast(), count * size_of::<iovec>()) {
            return None;
        }
        // SAFETY: readable, as was just seen, and of plain words.
        let parts = unsafe { std::slice::from_raw_parts(parts, count) };
        let len = parts
            .iter()
            .try_fold(0usize, |sum, part| sum.checked_add(part.iov_len))?;
        let max = if count == 1 {
            transfer::DIRECT_BYTES_MAX
        } else {
            GATHERED_BYTES_MAX
        };
        (1..=max).contains(&len).then_some(IoParts { parts, len })
    }

    fn non_empty(self) -> impl Iterator<Item = &'a iovec> {
        self.parts.iter().filter(|part| part.iov_len != 0)
    }

    fn read(self, call: &DirectCall, fd: c_int, at: u64) -> Option<usize> {
        match self.parts {
            [part] => transfer::read_into(call.file(fd, false)?, part.iov_base, part.iov_len, at),
            // The handler may have interrupted an allocation.
            _ if call.is_handling() => None,
            _ => stack::on_engine_stack(|| self.scatter(call, fd, at))?,
        }
    }

    fn scatter(self, call: &DirectCall, fd: c_int, at: u64) -> Option<usize> {
        if !self
            .non_empty()
            .all(|part| buffer::is_writable(part.iov_base, part.iov_len))
        {
            return None;
        }
        let file = call.file(fd, false)?;
        let mut gathered = allocate(self.len)?;
        let read = file.read(&mut gathered, at)?;
        let mut rest = gathered.get(..read)?;
        for part in self.non_empty() {
            let (now, later) = rest.split_at(part.iov_len.min(rest.len()));
            // SAFETY: each page was just written to, and `now` is no longer than the part.
            unsafe { ptr::copy(now.as_ptr(), part.iov_base.cast(), now.len()) };
            rest = later;
        }
        Some(read)
    }

    fn write(self, call: &DirectCall, fd: c_int, place: WritePosition) -> Option<TransferResult> {
        match self.parts {
            [part] => transfer::write_from(call, fd, part.iov_base, part.iov_len, place),
            _ if call.is_handling() => None,
            _ => stack::on_engine_stack(|| self.gather(call, fd, place))?,
        }
    }

    fn gather(self, call: &DirectCall, fd: c_int, place: WritePosition) -> Option<TransferResult> {
        let file = call.file(fd, true)?;
        let mut gathered = allocate(self.len)?;
        let mut end = 0;
        for part in self.non_empty() {
            let into = gathered.get_mut(end..end + part.iov_len)?;
            if !buffer::is_readable(part.iov_base, part.iov_len) {
                return None;
            }
            // SAFETY: readable, as was just seen, and as long as where it goes.
            unsafe { ptr::copy(part.iov_base.cast(), into.as_mut_ptr(), into.len()) };
            end += part.iov_len;
        }
        transfer::write_bytes(file, fd, &gathered[..end], place)
    }
}

#[inline(never)]
pub extern "C" fn preadv2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> isize {
    if flags & !FLAGS != 0 {
        return by_kernel_in_turn(libc::SYS_preadv2, fd, parts, count, offset, flags);
    }
    if offset == -1 {
        return readv(fd, parts, count, flags);
    }
    preadv(fd, parts, count, offset)
}

#[inline(never)]
pub extern "C" fn pwritev2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> isize {
    if flags & !FLAGS != 0 {
        return by_kernel_in_turn(libc::SYS_pwritev2, fd, parts, count, offset, flags);
    }
    if offset == -1 {
        return writev(fd, parts, count, flags);
    }
    write_at(fd, parts, count, offset, flags)
}

/// A call with flags that the engine does not know; ordered with other calls if it moves the
/// offset.
fn by_kernel_in_turn(
    number: c_long,
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> isize {
    if offset != -1 {
        return BY_KERNEL;
    }
    // SAFETY: the arguments are the caller's.
    at_offset(
        fd,
        0,
        |_, _| None,
        || unsafe { sys::vector_at_offset(number, fd, parts, count, flags) },
    )
}

#[inline(never)]
pub extern "C" fn preadv(fd: c_int, parts: *const iovec, count: c_int, offset: off64_t) -> isize {
    let read = || {
        let call = DirectCall::begin(fd)?;
        let parts = IoParts::of(parts, count).or_else(|| call.by_kernel(Why::Long))?;
        let at = transfer::start_offset(parts.len, offset)?;
        call.reopen_if_inherited(fd);
        parts.read(&call, fd, at)
    };
    read().map_or(BY_KERNEL, |n| n as isize)
}

#[inline(never)]
pub extern "C" fn pwritev(fd: c_int, parts: *const iovec, count: c_int, offset: off64_t) -> isize {
    write_at(fd, parts, count, offset, 0)
}

fn write_at(fd: c_int, parts: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> isize {
    let write = || {
        let call = DirectCall::begin(fd)?;
        let parts = IoParts::of(parts, count).or_else(|| call.by_kernel(Why::Long))?;
        let at = transfer::start_offset(parts.len, offset)?;
        call.reopen_if_inherited(fd);
        let written = parts.write(&call, fd, call.place(at)?)?;
        Some(transfer::make_durable(
            &call,
            fd,
            is_durable(flags),
            written.bytes,
        ))
    };
    write().unwrap_or(BY_KERNEL)
}

#[inline(never)]
pub extern "C" fn readv(fd: c_int, parts: *const iovec, count: c_int, flags: c_int) -> isize {
    let some = IoParts::of(parts, count);
    let len = some.map_or(TOO_LONG, |some| some.len);
    let direct = |call: &DirectCall, at| some?.read(call, fd, at).map(TransferResult::at_offset);
    // SAFETY: the arguments are the caller's.
    at_offset(fd, len, direct, || unsafe {
        sys::vector_at_offset(libc::SYS_preadv2, fd, parts, count, flags)
    })
}

#[inline(never)]
pub extern "C" fn writev(fd: c_int, parts: *const iovec, count: c_int, flags: c_int) -> isize {
    let some = IoParts::of(parts, count);
    let len = some.map_or(TOO_LONG, |some| some.len);
    let direct = |call: &DirectCall, place| some?.write(call, fd, place);
    // SAFETY: the arguments are the caller's.
    write_at_offset(fd, len, is_durable(flags), direct, || unsafe {
        sys::vector_at_offset(libc::SYS_pwritev2, fd, parts, count, flags)
    })
}

fn is_durable(flags: c_int) -> bool {
    flags & (libc::RWF_DSYNC | libc::RWF_SYNC) != 0
}
