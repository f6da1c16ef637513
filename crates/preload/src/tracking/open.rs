//! Files that the program opens: which of them go on the direct path.

use super::close::fd_created;
use crate::descriptors::attributes::{
    OpenAttributes, TRACKING_FLAG, TRACKING_SIGNAL, attributes_of,
};
use crate::descriptors::table;
use crate::engine::{self, Why, stack};
use crate::kernel::sys;
use crate::process::fork::ForkStamp;
use crate::process::{ownership, signals, withdraw};
use crate::report;
use crate::state::{thread, withdrawal};
use libc::c_int;
use pagemesh_direct::op_counters;
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

/// Handles a file that was opened with the flags of `with_tracking_flag`; returns its descriptor.
#[inline(never)]
pub extern "C" fn file_opened(fd: c_int, flags: c_int, since: &ForkStamp) -> c_int {
    fd_created(fd);
    if fd >= 0
        && let Some(attributes) = attributes_of(flags)
    {
        // A filter of system calls may have come in between. Then regular files keep the flag,
        // which has no effect there.
        if flags & TRACKING_FLAG == 0 && !withdrawal::is_withdrawn() {
            sys::set_flags(fd, flags);
        }
        try_track(fd, attributes, since);
    }
    fd
}

/// The flags of an open description that the program is to see.
#[inline(never)]
pub extern "C" fn visible_flags(fd: c_int, flags: c_int) -> c_int {
    let may_be_hidden = flags >= 0 && flags & TRACKING_FLAG != 0 && !withdrawal::is_withdrawn();
    if may_be_hidden && sys::fstat(fd).is_some_and(|stat| sys::is_file(&stat)) {
        flags & !TRACKING_FLAG
    } else {
        flags
    }
}

fn try_track(fd: c_int, attributes: OpenAttributes, since: &ForkStamp) -> Option<()> {
    let thread = thread::this();
    let _inside = thread.enter()?;
    if thread.is_in_handler() || !ownership::is_ours() || ownership::is_kernel_only() {
        return None;
    }
    let stat = sys::fstat(fd)?;
    if !sys::is_file(&stat) || !may_be_direct_mount(fd, stat.st_dev) || !ownership::may_change() {
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
    if ownership::is_kernel_only() {
        table::remove(fd);
    }
    Some(())
}

/// Runs before a file is mapped: the kernel's cached pages must stay right. The request goes to the
/// file's mount through the file itself. So it works in a handler, for unknown mounts, and for a
/// process that the mount does not admit.
pub extern "C" fn before_mmap(fd: c_int, flags: c_int) {
    if fd < 0 || flags & libc::MAP_ANONYMOUS != 0 || withdrawal::is_withdrawn() {
        return;
    }
    // If `fstatfs` fails, the mount may be one of pagemesh.
    if sys::fstat(fd).is_some_and(|stat| sys::is_file(&stat))
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
