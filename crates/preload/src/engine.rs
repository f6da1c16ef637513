//! The interface to the direct path: it reaches a file's pages without the kernel.
//!
//! Rules: the library calls no function here in a signal handler of the program, nor inside another
//! engine call of the same thread. So all of them may allocate, and may take more stack than a
//! handler has. The calling thread is *inside*: no handler of the program runs until the function
//! returns, so it should not wait long. C library calls that the engine makes reach the kernel.
//!
//! Code that needs more than a little stack runs on a stack of this library (`stack`).
//!
//! The caller has touched a buffer's pages just before, but another thread may unmap them.
//!
//! The files belong to mounts; this process is their direct client. Builds for tests have another
//! engine (`probe`).

#[cfg(any(debug_assertions, feature = "probe"))]
pub mod probe;
pub mod stack;

use crate::c_library::{engine_threads, environment, real};
use crate::kernel::sys::{self, MASKABLE_SIGNALS};
use libc::c_int;
use pagemesh_direct::client::{DirectClient, DirectFile};
use pagemesh_direct::internal_fds as listed_fds;
pub use pagemesh_direct::op_counters::{FileCounts, Why};
use pagemesh_pmem::unreadable;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32};

/// An open description that is on the direct path.
pub enum EngineFile {
    Mounted(DirectFile),
    #[cfg(any(debug_assertions, feature = "probe"))]
    Probed(probe::ProbeFile),
}

/// Calls that the kernel serves before a process joins its first mount. Most processes of a shell
/// script, or compilers, never make so many.
const PATIENCE: u32 = 32;

/// The value of `PAGEMESH_PATIENCE`, if it was set when the library was loaded.
static PATIENCE_SET: AtomicU32 = AtomicU32::new(PATIENCE);

/// Runs once, when the library is loaded.
pub fn begin() {
    unreadable::let_caller_handle_signals();
    let calls =
        environment::number(c"PAGEMESH_PATIENCE").and_then(|calls| u32::try_from(calls).ok());
    if let Some(calls) = calls {
        PATIENCE_SET.store(calls, Release);
    }
}

/// Made for the first file on a FUSE mount, and never freed.
static CLIENT: AtomicPtr<DirectClient> = AtomicPtr::new(ptr::null_mut());

fn client() -> &'static DirectClient {
    let found = CLIENT.load(Acquire);
    let found = if found.is_null() {
        let made = Box::into_raw(Box::new(DirectClient::new(
            run_masked,
            PATIENCE_SET.load(Acquire),
        )));
        match CLIENT.compare_exchange(ptr::null_mut(), made, AcqRel, Acquire) {
            Ok(_) => made,
            Err(other) => {
                // SAFETY: no other thread has seen it.
                drop(unsafe { Box::from_raw(made) });
                other
            }
        }
    } else {
        found
    };
    // SAFETY: it came from a box that is never freed.
    unsafe { &*found }
}

/// `PTHREAD_CANCEL_DISABLE`
const CANCEL_DISABLE: c_int = 1;

/// Runs a closure with signals blocked: threads that it starts get none of the program's signals.
/// The calling thread is not cancelled while it waits for them.
fn run_masked(run: &mut dyn FnMut()) {
    let before = sys::mask(libc::SIG_BLOCK, MASKABLE_SIGNALS);
    let (mut may_be, mut disabled) = (0, 0);
    // SAFETY: both are of this thread's stack.
    unsafe { real::pthread_setcancelstate(CANCEL_DISABLE, &mut may_be) };
    run();
    // SAFETY: as above.
    unsafe { real::pthread_setcancelstate(may_be, &mut disabled) };
    sys::mask(libc::SIG_SETMASK, before);
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
        Some(EngineFile::Mounted(client().open(dev, ino, fd)))
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
            EngineFile::Mounted(file) => {
                file.ready_change_count().or_else(|| prepare_mounted(file))
            }
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
            EngineFile::Mounted(file) => file.is_durable(),
            #[cfg(any(debug_assertions, feature = "probe"))]
            EngineFile::Probed(file) => file.sync(),
        }
    }
}

/// As [`EngineFile::prepare`], for a file that is not ready yet.
#[cold]
fn prepare_mounted(file: &DirectFile) -> Option<u64> {
    stack::on_engine_stack(|| file.prepare())?
}

/// The counts of operations directly and by the kernel.
pub fn file_counts() -> Vec<FileCounts> {
    client().file_counts()
}

/// Whether a descriptor is the engine's, which the program must not close or replace.
#[inline]
pub fn is_internal_fd(fd: RawFd) -> bool {
    listed_fds::contains(fd)
}

/// All descriptors of the engine.
pub fn internal_fds() -> impl Iterator<Item = RawFd> {
    listed_fds::all()
}

/// Runs before a fork. Waits for threads that create descriptors which a child must know.
pub fn before_fork() {
    listed_fds::before_fork();
}

/// Runs in the parent, after a fork.
pub fn after_fork() {
    listed_fds::after_fork();
}

/// Releases all resources of the engine, for good: leaves all mounts, and joins none any more.
pub fn leave_all_mounts() {
    // SAFETY: null, or from a box that is never freed.
    if let Some(client) = unsafe { CLIENT.load(Acquire).as_ref() } {
        client.leave();
    }
}

/// Runs in a child first: forgets the parent's resources, and closes them if `closes`. State that
/// the parent's threads may have been changing is leaked.
pub fn reset_in_child(closes: bool) {
    #[cfg(any(debug_assertions, feature = "probe"))]
    probe::reset_in_child();
    CLIENT.store(ptr::null_mut(), Release);
    engine_threads::reset_in_child();
    listed_fds::close_in_child(|fd| {
        if closes {
            sys::close(fd);
        }
    });
}
