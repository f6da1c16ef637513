//! The way to a file's pages without the kernel: the seam to whoever knows it.
//!
//! What it has to keep: nothing here but [`catches_fault`] is called in a signal handler of the program, nor inside
//! another call of the same thread, so that all of it may allocate, and take more stack than
//! a handler has. All are called with the thread *inside*: no handler of the program runs
//! until they return, so that they should not wait long. Calls of the C library that the
//! engine makes reach the kernel.
//!
//! What may take more than a little stack runs on one of this library's (`engine_stack`).
//!
//! A buffer's pages were touched just before, but another thread may unmap them.

use crate::mounts;
#[cfg(any(debug_assertions, feature = "probe"))]
use crate::probe;
use crate::stack;
use libc::{c_char, c_int};
pub use pagemesh_direct::op_counters::{FileCounts, Why};
use pagemesh_pmem::unreadable;
use std::ffi::CStr;
use std::os::fd::RawFd;

/// An open description that is on the direct path.
pub enum EngineFile {
    Mounted(mounts::MountedFile),
    #[cfg(any(debug_assertions, feature = "probe"))]
    Probed(probe::ProbeFile),
}

/// Once, when the library is loaded.
pub fn begin() {
    mounts::begin();
}

/// What the environment says, or null. When the library is loaded, and only then.
pub fn env_string(name: &CStr) -> *mut c_char {
    // SAFETY: a string; the environment is only read, before the program runs.
    unsafe { libc::getenv(name.as_ptr()) }
}

/// The same, of a number.
pub fn env_number(name: &CStr) -> Option<u64> {
    let text = env_string(name);
    if text.is_null() {
        return None;
    }
    // SAFETY: a string of the environment.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().ok()?.parse().ok()
}

/// Whether a fault was the engine's, and is mended. For handlers.
///
/// # Safety
/// The information is that of a handler of this signal.
pub unsafe fn catches_fault(signal: c_int, info: *const libc::siginfo_t) -> bool {
    // SAFETY: the caller's.
    unsafe { unreadable::handle_fault(signal, info) }
}

/// None: not one of the tests' engine.
#[cfg_attr(not(any(debug_assertions, feature = "probe")), allow(unused_variables))]
pub fn open(
    fd: RawFd,
    dev: u64,
    ino: u64,
    is_readable: bool,
    is_writable: bool,
) -> Option<EngineFile> {
    stack::on_engine_stack(|| {
        #[cfg(any(debug_assertions, feature = "probe"))]
        if probe::is_on_all() {
            return probe::open(fd, dev, ino, is_readable, is_writable).map(EngineFile::Probed);
        }
        Some(EngineFile::Mounted(mounts::open(dev, ino, fd)))
    })?
}

/// Whether a file system of this kind (`f_type`) may be such a mount. What is not is not
/// asked about again.
pub fn may_be_direct_mount(fs_type: i64) -> bool {
    /// `FUSE_SUPER_MAGIC`
    const FUSE: i64 = 0x6573_5546;
    #[cfg(any(debug_assertions, feature = "probe"))]
    if probe::is_on_all() {
        return true;
    }
    fs_type == FUSE
}

impl EngineFile {
    /// A count that changes when a descriptor of the file may have been closed past this library:
    /// then descriptors are looked at again. None: the kernel does everything of this file.
    #[inline]
    pub fn change_count(&self) -> Option<u64> {
        match self {
            EngineFile::Mounted(file) => file.change_count(),
            // The tests' engine sees all that is closed.
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(_) => Some(0),
        }
    }

    /// The same before reading or writing, for which the engine gets what it needs.
    #[inline]
    pub fn prepare(&self) -> Option<u64> {
        match self {
            EngineFile::Mounted(file) => file
                .ready_change_count()
                .or_else(|| stack::on_engine_stack(|| file.prepare())?),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(_) => Some(0),
        }
    }

    /// Short at the end of the file. None: by the kernel.
    #[inline]
    pub fn read(&self, into: &mut [u8], offset: u64) -> Option<usize> {
        stack::on_engine_stack(|| match self {
            EngineFile::Mounted(file) => file.read(into, offset),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.read(into, offset),
        })?
    }

    /// Also behind the end. None: by the kernel.
    #[inline]
    pub fn write(&self, data: &[u8], offset: u64) -> Option<usize> {
        stack::on_engine_stack(|| match self {
            EngineFile::Mounted(file) => file.write(data, offset),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.write(data, offset),
        })?
    }

    /// To the end of the file, wherever that is. Gives the end behind it. None: by the kernel.
    #[inline]
    pub fn append(&self, data: &[u8]) -> Option<u64> {
        stack::on_engine_stack(|| match self {
            EngineFile::Mounted(file) => file.append(data),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.append(data),
        })?
    }

    /// Bytes of the file, with all that others have made it longer by. None: by the kernel.
    #[inline]
    pub fn size(&self) -> Option<u64> {
        match self {
            EngineFile::Mounted(file) => file.size(),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.size(),
        }
    }

    /// The kernel gets an operation, for this reason.
    #[cold]
    pub fn count_kernel(&self, why: Why) {
        match self {
            EngineFile::Mounted(file) => file.count_kernel(why),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(_) => {}
        }
    }

    /// True: nothing is to be done, everything acknowledged is durable.
    #[inline]
    pub fn sync(&self) -> bool {
        match self {
            EngineFile::Mounted(file) => file.sync(),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.sync(),
        }
    }
}

/// What this process did directly, and by the kernel.
pub fn file_counts() -> Vec<FileCounts> {
    mounts::file_counts()
}

/// Whether a descriptor is the engine's own, which the program must not close or replace.
#[inline]
pub fn is_internal_fd(fd: RawFd) -> bool {
    mounts::is_internal_fd(fd)
}

/// The engine's own descriptors, in no order.
pub fn internal_fds() -> impl Iterator<Item = RawFd> {
    mounts::internal_fds()
}

/// Before the process is copied. Waits for those who are at what a child must know of.
pub fn before_fork() {
    mounts::before_fork();
}

/// In the parent, behind it.
pub fn after_fork() {
    mounts::after_fork();
}

/// Lets go of all that the engine has, for good.
pub fn leave_all_mounts() {
    mounts::leave_all_mounts();
}

/// In the child, before anything else: forget everything of the parent, and close it.
pub fn reset_in_child(closes: bool) {
    #[cfg(any(debug_assertions, feature = "probe"))]
    probe::reset_in_child();
    mounts::reset_in_child(closes);
}
