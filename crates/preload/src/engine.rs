//! The interface to the direct path: it reaches a file's pages without the kernel.
//!
//! Rules: except [`catches_fault`], the library calls no function here in a signal handler of the
//! program, nor inside another engine call of the same thread. So all of them may allocate, and may
//! take more stack than a handler has. The calling thread is *inside*: no handler of the program
//! runs until the function returns, so it should not wait long. C library calls that the engine
//! makes reach the kernel.
//!
//! Code that needs more than a little stack runs on a stack of this library (`stack`).
//!
//! The caller has touched a buffer's pages just before, but another thread may unmap them.

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

/// Runs once, when the library is loaded.
pub fn begin() {
    mounts::begin();
}

/// The value of an environment variable, or null. It runs only when the library is loaded.
pub fn env_string(name: &CStr) -> *mut c_char {
    // SAFETY: a string; the environment is only read, before the program runs.
    unsafe { libc::getenv(name.as_ptr()) }
}

/// The value of an environment variable as a number.
pub fn env_number(name: &CStr) -> Option<u64> {
    let text = env_string(name);
    if text.is_null() {
        return None;
    }
    // SAFETY: a string of the environment.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().ok()?.parse().ok()
}

/// Whether a fault was the engine's, and is handled. For signal handlers.
///
/// # Safety
/// The information is that of a handler of this signal.
pub unsafe fn catches_fault(signal: c_int, info: *const libc::siginfo_t) -> bool {
    // SAFETY: the caller's.
    unsafe { unreadable::handle_fault(signal, info) }
}

/// None: the file is not under the test engine's directory, or there is no memory for a stack.
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

/// Whether a file system of this kind (`f_type`) may be a pagemesh mount. The caller does not ask
/// again for a device that cannot be one.
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
    /// A count that changes when a descriptor of the file may have been closed without this
    /// library: then callers check their descriptors again. None: the kernel serves all calls of
    /// this file.
    #[inline]
    pub fn change_count(&self) -> Option<u64> {
        match self {
            EngineFile::Mounted(file) => file.change_count(),
            // The test engine sees all closed descriptors.
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(_) => Some(0),
        }
    }

    /// As [`EngineFile::change_count`], before a read or write, for which the engine gets its
    /// resources.
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

    /// Fewer bytes at the end of the file. None: the kernel must do it.
    #[inline]
    pub fn read(&self, into: &mut [u8], offset: u64) -> Option<usize> {
        stack::on_engine_stack(|| match self {
            EngineFile::Mounted(file) => file.read(into, offset),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.read(into, offset),
        })?
    }

    /// Also behind the end. None: the kernel must do it.
    #[inline]
    pub fn write(&self, data: &[u8], offset: u64) -> Option<usize> {
        stack::on_engine_stack(|| match self {
            EngineFile::Mounted(file) => file.write(data, offset),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.write(data, offset),
        })?
    }

    /// Appends at the current end of the file. Returns the end behind the bytes. None: the kernel
    /// must do it.
    #[inline]
    pub fn append(&self, data: &[u8]) -> Option<u64> {
        stack::on_engine_stack(|| match self {
            EngineFile::Mounted(file) => file.append(data),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.append(data),
        })?
    }

    /// Bytes of the file, including appends of other processes. None: ask the kernel.
    #[inline]
    pub fn size(&self) -> Option<u64> {
        match self {
            EngineFile::Mounted(file) => file.size(),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.size(),
        }
    }

    /// Counts an operation that the kernel serves, for this reason.
    #[cold]
    pub fn count_kernel(&self, why: Why) {
        match self {
            EngineFile::Mounted(file) => file.count_kernel(why),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(_) => {}
        }
    }

    /// True: everything acknowledged is durable, and no sync is needed.
    #[inline]
    pub fn sync(&self) -> bool {
        match self {
            EngineFile::Mounted(file) => file.sync(),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.sync(),
        }
    }
}

/// The counts of operations directly and by the kernel.
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

/// Runs before a fork. Waits for threads that create descriptors which a child must know.
pub fn before_fork() {
    mounts::before_fork();
}

/// Runs in the parent, after a fork.
pub fn after_fork() {
    mounts::after_fork();
}

/// Releases all resources of the engine, for good.
pub fn leave_all_mounts() {
    mounts::leave_all_mounts();
}

/// Runs in a child first: forgets the parent's resources, and closes them if `closes`.
pub fn reset_in_child(closes: bool) {
    #[cfg(any(debug_assertions, feature = "probe"))]
    probe::reset_in_child();
    mounts::reset_in_child(closes);
}
