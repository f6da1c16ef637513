//! How a file was opened: the rights and flags that the engine and its callers check, and the marks
//! by which a descriptor is known to lead to a tracked description.

use crate::kernel::sys;
use crate::state::withdrawal;
use libc::c_int;
use pagemesh_base::proc_maps::PRELOAD_OPEN_FLAG;

/// The attributes by which the engine opens a file, and callers check rights.
#[derive(Clone, Copy)]
pub struct OpenAttributes {
    pub dev: u64,
    pub ino: u64,
    pub is_readable: bool,
    pub is_writable: bool,
    /// Each write goes to the end.
    pub appends: bool,
    /// Every write is to be durable when it returns.
    pub is_durable: bool,
}

impl OpenAttributes {
    /// Whether both have the same access rights and flags, apart from the file.
    pub fn has_same_access(&self, other: &OpenAttributes) -> bool {
        let rights = |attributes: &OpenAttributes| (attributes.is_readable, attributes.is_writable);
        rights(self) == rights(other)
            && self.appends == other.appends
            && self.is_durable == other.is_durable
    }
}

/// The rights that opening with these flags leaves to the engine. None: the kernel serves the
/// descriptor.
pub fn attributes_of(flags: c_int) -> Option<OpenAttributes> {
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
/// go to the engine to report each closed descriptor. `tracking::file_opened` removes the flag
/// again.
#[inline]
pub fn with_tracking_flag(flags: c_int) -> c_int {
    match attributes_of(flags) {
        Some(_) if !withdrawal::is_withdrawn() => flags | TRACKING_FLAG,
        _ => flags,
    }
}

/// [`PRELOAD_OPEN_FLAG`]
pub const TRACKING_FLAG: c_int = PRELOAD_OPEN_FLAG as c_int;

/// The I/O signal that marks descriptions which were opened with that flag: the mount reports their
/// closed descriptors. Without those reports the library would not notice when a number leads
/// elsewhere. It is the signal that the kernel sends by default.
pub const TRACKING_SIGNAL: c_int = libc::SIGIO;

/// Whether a number leads to a description of this file, opened in the same way, and the mount
/// reports closed descriptors of it.
pub fn refers_to(fd: c_int, attributes: &OpenAttributes) -> bool {
    let opened = sys::flags_of(fd).and_then(attributes_of);
    let is_alike = opened.is_some_and(|opened| opened.has_same_access(attributes));
    is_alike
        && sys::file_of(fd) == Some((attributes.dev, attributes.ino))
        && sys::signal_of(fd) == TRACKING_SIGNAL as isize
}
