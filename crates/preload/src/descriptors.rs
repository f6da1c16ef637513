//! Opens, closes and duplicates of descriptors.
//!
//! A descriptor that the C library itself closes or replaces never gets here: that of a stream. So
//! the kernel serves a descriptor from the moment that a stream gets it, and closing a stream
//! removes its descriptor from the table.

use crate::data::{BY_KERNEL, DirectCall};
use crate::open_description::{IoMode, OpenAttributes};
use crate::process::ForkStamp;
use crate::thread::{self, ChangeGuard};
use crate::{buffer, engine, messages, process, report, signals, stack, sys, table, withdraw};
use libc::{c_int, c_long, c_uint, c_void};
use pagemesh_base::proc_maps::PRELOAD_OPEN_FLAG;
use pagemesh_direct::op_counters::{self, Why};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Devices that cannot be pagemesh mounts are remembered here: roughly as many file systems as a
/// program uses at a time. Further ones cost one more system call per file.
const FOREIGN_DEVICES_MAX: usize = 32;
static FOREIGN_DEVICES: [AtomicU64; FOREIGN_DEVICES_MAX] =
    [const { AtomicU64::new(0) }; FOREIGN_DEVICES_MAX];

fn may_be_direct_mount(fd: c_int, dev: u64) -> bool {
    // A device number is never 0, as the kernel counts file systems from 1.
    let place = &FOREIGN_DEVICES[(dev ^ dev >> 8) as usize % FOREIGN_DEVICES_MAX];
    if place.load(Relaxed) == dev {
        return false;
    }
    let Some(fs_type) = sys::fs_type(fd) else {
        // A mount that has ended; the next mount may get its device number.
        return false;
    };
    let may_be = engine::may_be_direct_mount(fs_type);
    if !may_be {
        place.store(dev, Relaxed);
    }
    may_be
}

pub fn is_file(stat: &libc::stat64) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// The rights that opening with these flags leaves to the engine. None: the kernel serves the
/// descriptor.
fn attributes_of(flags: c_int) -> Option<OpenAttributes> {
    let access = flags & libc::O_ACCMODE;
    let is_writable = access != libc::O_RDONLY;
    // `O_TMPFILE` has the bit of `O_DIRECTORY`, and makes a regular file.
    let is_directory = flags & libc::O_TMPFILE == libc::O_DIRECTORY;
    if access == libc::O_ACCMODE || flags & libc::O_PATH != 0 || is_directory {
        return None;
    }
    let is_readable = access != libc::O_WRONLY;
    let is_durable = flags & libc::O_DSYNC != 0;
    Some(OpenAttributes {
        dev: 0,
        ino: 0,
        is_readable,
        is_writable,
        appends: is_writable && flags & libc::O_APPEND != 0,
        is_durable,
    })
}

/// The flags with which the library opens a file. The added flag asks the mount of a file that may
/// go to the engine to report each closed descriptor. [`file_opened`] removes the flag again.
#[inline]
pub fn with_tracking_flag(flags: c_int) -> c_int {
    match attributes_of(flags) {
        Some(_) if !withdraw::is_withdrawn() => flags | TRACKING_FLAG,
        _ => flags,
    }
}

/// [`PRELOAD_OPEN_FLAG`]
const TRACKING_FLAG: c_int = PRELOAD_OPEN_FLAG as c_int;

/// The I/O signal that marks descriptions which were opened with that flag: the mount reports their
/// closed descriptors. Without those reports the library would not notice when a number leads
/// elsewhere. It is the signal that the kernel sends by default.
const TRACKING_SIGNAL: c_int = libc::SIGIO;

/// Handles a file that was opened with [`with_tracking_flag`] flags; returns its descriptor.
#[inline(never)]
pub extern "C" fn file_opened(fd: c_int, flags: c_int, since: &ForkStamp) -> c_int {
    fd_created(fd);
    if fd >= 0
        && let Some(attributes) = attributes_of(flags)
    {
        // A filter of system calls may have come in between. Then regular files keep the flag,
        // which has no effect there.
        if flags & TRACKING_FLAG == 0 && !withdraw::is_withdrawn() {
            sys::set_flags(fd, flags);
        }
        try_track(fd, attributes, since);
    }
    fd
}

/// The flags of an open description that the program is to see.
#[inline(never)]
pub extern "C" fn visible_flags(fd: c_int, flags: c_int) -> c_int {
    let may_be_hidden = flags >= 0 && flags & TRACKING_FLAG != 0 && !withdraw::is_withdrawn();
    match may_be_hidden && sys::fstat(fd).is_some_and(|stat| is_file(&stat)) {
        true => flags & !TRACKING_FLAG,
        false => flags,
    }
}

/// Whether a number leads to a description of this file, opened in the same way, and the mount
/// reports closed descriptors of it.
pub fn refers_to(fd: c_int, attributes: &OpenAttributes) -> bool {
    let opened = sys::flags_of(fd).and_then(attributes_of);
    let is_alike = opened.is_some_and(|opened| opened.has_same_access(attributes));
    is_alike
        && sys::file_of(fd) == Some((attributes.dev, attributes.ino))
        && sys::signal_of(fd) == TRACKING_SIGNAL as isize
}

fn try_track(fd: c_int, attributes: OpenAttributes, since: &ForkStamp) -> Option<()> {
    let thread = thread::this();
    let _inside = thread.enter()?;
    if thread.is_in_handler() || !process::is_ours() || process::is_kernel_only() {
        return None;
    }
    let stat = sys::fstat(fd)?;
    if !is_file(&stat) || !may_be_direct_mount(fd, stat.st_dev) || !process::may_change() {
        return None;
    }
    if !stack::on_engine_stack(withdraw::may_use_direct_path)? {
        op_counters::count_kernel(
            op_counters::index_of(stat.st_dev, stat.st_ino),
            Why::Confined,
        );
        return None;
    }
    if !sys::set_signal(fd, TRACKING_SIGNAL) {
        return None;
    }
    table::free_deferred();
    let attributes = OpenAttributes {
        dev: stat.st_dev,
        ino: stat.st_ino,
        ..attributes
    };
    let file = engine::open(
        fd,
        attributes.dev,
        attributes.ino,
        attributes.is_readable,
        attributes.is_writable,
    )?;
    stack::on_engine_stack(|| {
        signals::guard_faults();
        report::record_name(fd, &attributes);
    })?;
    let entry = table::add(fd, attributes, file)?;
    if since.may_have_forked_since() {
        entry.set_shared();
    }
    if process::is_kernel_only() {
        table::remove(fd);
    }
    Some(())
}

/// Enters, if this process may change the table. None: the caller is a child in the same memory,
/// and must change nothing.
fn begin_change() -> Option<ChangeGuard> {
    thread::this()
        .enter_to_change()
        .filter(|_| process::may_change())
}

/// Handles a new descriptor, and returns it. If it is in the table, its old file was closed by an
/// unseen call (`io_uring`, a bare system call).
#[inline(never)]
pub extern "C" fn fd_created(fd: c_int) -> c_int {
    forget(fd);
    fd
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

/// Runs before all descriptors of a range are closed.
#[inline(never)]
pub extern "C" fn forget_range(first: c_uint, last: c_uint) {
    if let Some(_inside) = begin_change() {
        table::ours_in(first, last).for_each(table::remove);
    }
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

/// Runs before a file is mapped: the kernel's cached pages must stay right. The request goes to the
/// file's mount through the file itself. So it works in a handler, for unknown mounts, and for a
/// process that the mount does not admit.
pub extern "C" fn before_mmap(fd: c_int, flags: c_int) {
    if fd < 0 || flags & libc::MAP_ANONYMOUS != 0 || withdraw::is_withdrawn() {
        return;
    }
    // If `fstatfs` fails, the mount may be one of pagemesh.
    if sys::fstat(fd).is_some_and(|stat| is_file(&stat))
        && sys::fs_type(fd).is_none_or(engine::may_be_direct_mount)
    {
        sys::announce_mapping(fd);
    }
}

/// Runs before the kernel copies from a file: it copies up to the file size that it was given last,
/// and direct clients may have moved the end since.
#[inline(never)]
pub extern "C" fn before_copy_from(from: c_int) {
    if table::is_ours(from) {
        sys::fstat(from);
    }
}

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

/// Handles two new descriptors that the kernel has written to `ends`, if the call succeeded.
#[inline(never)]
pub extern "C" fn fd_pair_created(ends: *const c_int, result: isize) {
    if result == 0 && !table::is_untouched() {
        for end in [ends, ends.wrapping_add(1)] {
            fd_created(buffer::read_checked(end).unwrap_or(-1));
        }
    }
}

/// Runs before a system call by number: those that copy descriptors, map a file, or send
/// descriptors.
#[inline(never)]
pub extern "C" fn before_syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
) {
    match number {
        libc::SYS_mmap => before_mmap(e as c_int, d as c_int),
        // The child is unknown to this library, so offsets go to the kernel.
        libc::SYS_fork | libc::SYS_vfork | libc::SYS_clone | libc::SYS_clone3 => {
            process::before_clone_syscall(number, a);
        }
        libc::SYS_sendmsg => messages::before_sendmsg(b as *const _),
        libc::SYS_sendmmsg => messages::before_sendmmsg(b as *const _, c as c_uint),
        _ => {}
    }
}

/// Runs after a system call by number: those that create a descriptor.
#[inline(never)]
pub extern "C" fn after_syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    d: c_long,
    result: c_long,
) -> c_long {
    match number {
        libc::SYS_open
        | libc::SYS_openat
        | libc::SYS_openat2
        | libc::SYS_creat
        | libc::SYS_socket
        | libc::SYS_accept
        | libc::SYS_accept4
        | libc::SYS_eventfd
        | libc::SYS_eventfd2
        | libc::SYS_epoll_create
        | libc::SYS_epoll_create1
        | libc::SYS_memfd_create
        | libc::SYS_timerfd_create
        | libc::SYS_signalfd
        | libc::SYS_signalfd4
        | libc::SYS_inotify_init
        | libc::SYS_inotify_init1
        | libc::SYS_pidfd_open
        | libc::SYS_pidfd_getfd => {
            fd_created(result as c_int);
        }
        libc::SYS_pipe | libc::SYS_pipe2 => fd_pair_created(a as *const _, result as isize),
        libc::SYS_socketpair => fd_pair_created(d as *const _, result as isize),
        libc::SYS_io_uring_setup => withdraw::io_uring_created(result),
        libc::SYS_recvmsg => messages::after_recvmsg(b as *const _, result as isize),
        libc::SYS_recvmmsg => messages::after_recvmmsg(b as *const _, result as isize),
        _ => {}
    }
    result
}
