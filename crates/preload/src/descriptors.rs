//! Descriptors come, go, and get second names.
//!
//! What the C library closes or replaces by itself never comes here: a stream's descriptor.
//! So a descriptor that is given to a stream is the kernel's from then on, and one whose
//! stream is closed is taken out.

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

/// Devices that cannot be ours are remembered here: as many file systems as a program has
/// open at a time, roughly. More only cost a question more per file.
const FOREIGN_DEVICES_MAX: usize = 32;
static FOREIGN_DEVICES: [AtomicU64; FOREIGN_DEVICES_MAX] =
    [const { AtomicU64::new(0) }; FOREIGN_DEVICES_MAX];

fn may_be_direct_mount(fd: c_int, dev: u64) -> bool {
    // A device number is never 0, as its file systems are counted from 1.
    let place = &FOREIGN_DEVICES[(dev ^ dev >> 8) as usize % FOREIGN_DEVICES_MAX];
    if place.load(Relaxed) == dev {
        return false;
    }
    let Some(fs_type) = sys::fs_type(fd) else {
        // A mount that has ended, whose number the next one gets.
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

/// What opening with these flags leaves to the engine. None: nothing.
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

/// The flags with which the kernel opens a file: the mount of a file that may come to the engine
/// is asked to hear of each descriptor that is closed. What is asked for is undone by [`file_opened`].
#[inline]
pub fn with_tracking_flag(flags: c_int) -> c_int {
    match attributes_of(flags) {
        Some(_) if !withdraw::is_withdrawn() => flags | TRACKING_FLAG,
        _ => flags,
    }
}

/// [`PRELOAD_OPEN_FLAG`]
const TRACKING_FLAG: c_int = PRELOAD_OPEN_FLAG as c_int;

/// The signal of descriptions that were opened so, and whose mount hears of closed descriptors.
/// Of those that were not the library would not know when a number leads elsewhere. It is the
/// signal that the kernel sends in any case where none is set.
const TRACKING_SIGNAL: c_int = libc::SIGIO;

/// A file was opened with [`with_tracking_flag`] flags; gives its descriptor.
#[inline(never)]
pub extern "C" fn file_opened(fd: c_int, flags: c_int, since: &ForkStamp) -> c_int {
    fd_created(fd);
    if fd >= 0
        && let Some(attributes) = attributes_of(flags)
    {
        // A filter of system calls may have come in between. Regular files keep the flag, and it does
        // nothing there.
        if flags & TRACKING_FLAG == 0 && !withdraw::is_withdrawn() {
            sys::set_flags(fd, flags);
        }
        try_track(fd, attributes, since);
    }
    fd
}

/// The flags that a program sees of an open description.
#[inline(never)]
pub extern "C" fn visible_flags(fd: c_int, flags: c_int) -> c_int {
    let may_be_hidden = flags >= 0 && flags & TRACKING_FLAG != 0 && !withdraw::is_withdrawn();
    match may_be_hidden && sys::fstat(fd).is_some_and(|stat| is_file(&stat)) {
        true => flags & !TRACKING_FLAG,
        false => flags,
    }
}

/// Whether a number leads to a description of this file, opened in the same way, of which the
/// mount hears when a descriptor of it is closed.
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

/// Inside, if this process may change the table. Else nothing is to be done: a descriptor of
/// a child in the same memory.
fn begin_change() -> Option<ChangeGuard> {
    thread::this()
        .enter_to_change()
        .filter(|_| process::may_change())
}

/// A descriptor is new. If it is in the table, what it led to was closed by nobody that is
/// known (`io_uring`, a bare system call). Gives it.
#[inline(never)]
pub extern "C" fn fd_created(fd: c_int) -> c_int {
    forget(fd);
    fd
}

/// Before a descriptor goes.
#[inline(never)]
pub extern "C" fn forget(fd: c_int) {
    if table::is_ours(fd)
        && let Some(_inside) = begin_change()
    {
        table::remove(fd);
    }
}

/// Closes one that is ours. Gives the kernel's result.
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

/// Closes those of a range that are ours.
#[inline(never)]
pub extern "C" fn close_range(first: c_uint, last: c_uint) {
    table::ours_in(first, last).for_each(|fd| {
        close_tracked(fd);
    });
}

/// Before all descriptors of a range go.
#[inline(never)]
pub extern "C" fn forget_range(first: c_uint, last: c_uint) {
    if let Some(_inside) = begin_change() {
        table::ours_in(first, last).for_each(table::remove);
    }
}

/// Closes the descriptors of a range, from one to the next of the engine's. The first error
/// counts.
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

/// Closes all from one on, but the engine's, on a kernel that knows no ranges. False: it does not
/// tell which there are.
pub fn close_each_from(first: c_int) -> bool {
    let Some(listed) = sys::open_directory(c"/proc/self/fd") else {
        return false;
    };
    let mut names = sys::DirectoryEntries([0; sys::ENTRIES_BYTES]);
    loop {
        let mut is_any = false;
        // Again from the beginning, since the list changes under who reads it.
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

/// Before a file is mapped: what the kernel keeps of it must stay right. Its mount is asked by
/// the file itself, whatever is known of mounts: also in a handler, and by whom the mount does
/// not let in.
pub extern "C" fn before_mmap(fd: c_int, flags: c_int) {
    if fd < 0 || flags & libc::MAP_ANONYMOUS != 0 || withdraw::is_withdrawn() {
        return;
    }
    // A mount that fails to say what it is may be one.
    if sys::fstat(fd).is_some_and(|stat| is_file(&stat))
        && sys::fs_type(fd).is_none_or(engine::may_be_direct_mount)
    {
        sys::announce_mapping(fd);
    }
}

/// Before the kernel copies from a file: it goes up to the end that it was told last, and guests
/// may have moved that since.
#[inline(never)]
pub extern "C" fn before_copy_from(from: c_int) {
    if table::is_ours(from) {
        sys::fstat(from);
    }
}

/// Makes a second descriptor of the same description by `by_kernel_in_turn`. Gives it.
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

/// A descriptor leads to what `fd` led to, and nobody knows to which: it was replaced meanwhile.
/// All that it may be leave their offsets to the kernel.
fn share_both(fd: c_int, before: Option<table::DescriptionUse>) {
    if let Some(before) = before {
        before.share();
    }
    if let Some(now) = table::enter(fd) {
        now.share();
    }
}

/// Makes `new` a descriptor of the same description by `by_kernel_in_turn`, which asks no C library, if one
/// of both is ours. Gives the kernel's result.
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

/// Whether a command of `fcntl` changes something here.
pub fn is_tracked_command(command: c_int) -> bool {
    matches!(
        command,
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC | libc::F_GETFL | libc::F_SETFL
    )
}

/// Who begins or ends to append is the kernel's from then on, under all names. Gives the
/// result of `fcntl`.
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

/// A stream reads and writes this descriptor now, past us.
#[inline(never)]
pub extern "C" fn before_fdopen(fd: c_int) {
    if table::is_ours(fd) {
        share(fd);
        forget(fd);
    }
}

/// Others may move the offset from now on.
pub fn share(fd: c_int) {
    if let Some(call) = DirectCall::begin(fd) {
        call.entry.share();
    }
}

/// Before a stream is closed or opened again.
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

/// Two are new, if the kernel says so; it has written them there.
#[inline(never)]
pub extern "C" fn fd_pair_created(ends: *const c_int, result: isize) {
    if result == 0 && !table::is_untouched() {
        for end in [ends, ends.wrapping_add(1)] {
            fd_created(buffer::read_checked(end).unwrap_or(-1));
        }
    }
}

/// Before a system call by its number: what copies descriptors, or maps what one leads to, or
/// sends it.
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
        // The child is a stranger; what is left of the offsets is the kernel's.
        libc::SYS_fork | libc::SYS_vfork | libc::SYS_clone | libc::SYS_clone3 => {
            process::before_clone_syscall(number, a);
        }
        libc::SYS_sendmsg => messages::before_sendmsg(b as *const _),
        libc::SYS_sendmmsg => messages::before_sendmmsg(b as *const _, c as c_uint),
        _ => {}
    }
}

/// After a system call by its number: what makes a descriptor.
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
