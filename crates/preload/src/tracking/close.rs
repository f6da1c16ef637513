//! Descriptors that are closed, or that may lead elsewhere.
//!
//! A stream's descriptor, which the C library itself closes or replaces, never gets here. So
//! the kernel serves a descriptor from the moment that a stream gets it, and closing a stream
//! removes its descriptor from the table.

use crate::descriptors::table;
use crate::engine;
use crate::io::transfer::BY_KERNEL;
use crate::kernel::{buffer, sys};
use crate::process::ownership::begin_change;
pub use crate::process::ownership::forget_range;
use libc::{c_int, c_uint, c_void};

/// Handles a new descriptor, and returns it. If it is in the table, its old file was closed by an
/// unseen call (`io_uring`, a bare system call).
#[inline(never)]
pub extern "C" fn fd_created(fd: c_int) -> c_int {
    forget(fd);
    fd
}

/// Handles two new descriptors that the kernel has written to `ends`, if the call succeeded.
#[inline(never)]
pub extern "C" fn fd_pair_created(ends: *const c_int, result: isize) {
    if result == 0 && !table::is_untouched() {
        for end in [ends, ends.wrapping_add(1)] {
            fd_created(buffer::read_checked(end).unwrap_or(-1));
        }
    }
}

/// Runs before a descriptor is closed or replaced.
#[inline(never)]
pub extern "C" fn forget(fd: c_int) {
    if table::is_ours(fd)
        && let Some(_inside) = begin_change()
    {
        table::remove(fd);
    }
}

/// Closes a descriptor that is in the table. Returns the kernel's result.
#[inline(never)]
pub extern "C" fn close_tracked(fd: c_int) -> isize {
    if table::is_ours(fd)
        && let Some(_inside) = begin_change()
        && let Some(change) = table::begin_change(fd)
    {
        let result = sys::close(fd);
        change.end();
        table::free_deferred();
        return result;
    }
    BY_KERNEL
}

/// Closes the descriptors of a range that are in the table.
#[inline(never)]
pub extern "C" fn close_range(first: c_uint, last: c_uint) {
    table::ours_in(first, last).for_each(|fd| {
        close_tracked(fd);
    });
}

/// Closes the descriptors of a range, except the engine's. The first error is the result.
pub fn close_between(
    first: c_uint,
    last: c_uint,
    close: impl Fn(c_uint, c_uint) -> c_int,
) -> c_int {
    let mut from = first;
    let mut result = 0;
    if first > last {
        return close(first, last);
    }
    loop {
        let owned = engine::internal_fds().map(|fd| fd as c_uint);
        let next = owned.filter(|fd| (from..=last).contains(fd)).min();
        let Some(kept) = next else {
            let closed = if from <= last { close(from, last) } else { 0 };
            return if result == 0 { closed } else { result };
        };
        if from < kept && result == 0 {
            result = close(from, kept - 1);
        } else if from < kept {
            close(from, kept - 1);
        }
        from = match kept.checked_add(1) {
            Some(from) => from,
            None => return result,
        };
    }
}

/// Closes all descriptors from one on, except the engine's, on a kernel without `close_range`.
/// False: the kernel does not list them.
pub fn close_each_from(first: c_int) -> bool {
    let Some(listed) = sys::open_directory(c"/proc/self/fd") else {
        return false;
    };
    let mut names = sys::DirectoryEntries([0; sys::ENTRIES_BYTES]);
    loop {
        let mut is_any = false;
        // From the beginning again, since the list changes while it is read.
        sys::lseek(listed, 0, libc::SEEK_SET);
        while let Some(len) = sys::read_entries(listed, &mut names) {
            for fd in sys::numeric_names(&names.0[..len]) {
                if fd >= first && fd != listed && !engine::is_internal_fd(fd) {
                    sys::close(fd);
                    is_any = true;
                }
            }
        }
        if !is_any {
            sys::close(listed);
            return true;
        }
    }
}

/// Runs before a stream is closed or reopened.
///
/// # Safety
/// The stream is null or open.
#[inline(never)]
pub unsafe extern "C" fn before_fclose(stream: *mut c_void) {
    if !stream.is_null() {
        // SAFETY: the caller's.
        forget(unsafe { libc::fileno(stream.cast()) });
    }
}
