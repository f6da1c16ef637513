//! Descriptors that become a second name of a description, in this process or in another one.

use super::close::{fd_created, forget};
use crate::descriptors::open_description::IoMode;
use crate::descriptors::table;
use crate::io::transfer::{BY_KERNEL, DirectCall};
use crate::process::ownership::begin_change;
use libc::{c_int, c_long};

/// Makes a second descriptor of the same description by `kernel`. Returns it.
#[inline(never)]
pub extern "C" fn duplicate(fd: c_int, kernel: impl FnOnce() -> c_int) -> c_int {
    if !table::is_ours(fd) {
        return fd_created(kernel());
    }
    let Some(_inside) = begin_change() else {
        return kernel();
    };
    let source = table::enter(fd);
    let new = kernel();
    match source {
        _ if new < 0 => {}
        Some(source) if source.is_entry_of(fd) => table::add_descriptor(new, &source),
        source => {
            table::remove(new);
            share_both(fd, source);
        }
    }
    new
}

/// Handles a second descriptor of `fd` that may lead to one of two descriptions, since `fd` was
/// replaced meanwhile. The offsets of both go to the kernel.
fn share_both(fd: c_int, before: Option<table::DescriptionUse>) {
    if let Some(before) = before {
        before.share();
    }
    if let Some(now) = table::enter(fd) {
        now.share();
    }
}

/// Makes `new` a descriptor of the same description by `kernel`, which must not call the C library,
/// if one of both is in the table. Returns the kernel's result.
#[inline(never)]
pub extern "C" fn duplicate_onto(fd: c_int, new: c_int, kernel: impl FnOnce() -> isize) -> isize {
    if fd == new || !(table::is_ours(fd) || table::is_ours(new)) {
        return BY_KERNEL;
    }
    let Some(_inside) = begin_change() else {
        return BY_KERNEL;
    };
    let source = table::enter(fd);
    let Some(change) = table::begin_change(new) else {
        share_both(fd, source);
        return BY_KERNEL;
    };
    let result = kernel();
    match source {
        _ if result < 0 => change.undo(),
        Some(source) if source.is_entry_of(fd) => change.end_as(&source),
        source => {
            change.end();
            share_both(fd, source);
        }
    }
    result
}

/// Whether a command of `fcntl` concerns the table.
pub fn is_tracked_command(command: c_int) -> bool {
    matches!(
        command,
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC | libc::F_GETFL | libc::F_SETFL
    )
}

/// Leaves a description to the kernel, under all descriptors, if `O_APPEND` was set or cleared.
/// Returns the result of `fcntl`.
#[inline(never)]
pub extern "C" fn status_flags_set(fd: c_int, flags: c_long, result: c_int) -> c_int {
    if result == 0 && table::is_ours(fd) {
        flags_changed(fd, flags as c_int);
    }
    result
}

fn flags_changed(fd: c_int, flags: c_int) {
    if let Some(call) = DirectCall::begin(fd)
        && call.entry.attributes().is_writable
        && call.entry.attributes().appends != (flags & libc::O_APPEND != 0)
    {
        call.entry.set_mode(IoMode::Kernel);
    }
}

/// Runs before a stream gets a descriptor, which it reads and writes without this library.
#[inline(never)]
pub extern "C" fn before_fdopen(fd: c_int) {
    if table::is_ours(fd) {
        share(fd);
        forget(fd);
    }
}

/// Leaves the offset to the kernel, as other processes may move it from now on.
pub fn share(fd: c_int) {
    if let Some(call) = DirectCall::begin(fd) {
        call.entry.share();
    }
}
