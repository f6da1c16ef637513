//! The engine: files on mounts, as a direct client of them.

use crate::engine::env_number;
use crate::{real, sys, threads};
use libc::c_int;
use pagemesh_direct::client::{self, DirectClient};
use pagemesh_direct::internal_fds;
use pagemesh_direct::op_counters::{FileCounts, Why};
use pagemesh_pmem::unreadable;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32};

pub struct MountedFile(client::DirectFile);

/// Calls that the kernel serves before a process joins its first mount. Most processes of a shell
/// script, or compilers, never make so many.
const PATIENCE: u32 = 32;

/// The value of `PAGEMESH_PATIENCE`, if it was set when the library was loaded.
static PATIENCE_SET: AtomicU32 = AtomicU32::new(PATIENCE);

/// Runs once, when the library is loaded.
pub fn begin() {
    unreadable::let_caller_handle_signals();
    let calls = env_number(c"PAGEMESH_PATIENCE").and_then(|calls| u32::try_from(calls).ok());
    if let Some(calls) = calls {
        PATIENCE_SET.store(calls, Release);
    }
}

/// Made for the first file on a FUSE mount, and never freed.
static CLIENT: AtomicPtr<DirectClient> = AtomicPtr::new(ptr::null_mut());

fn client() -> &'static DirectClient {
    let found = CLIENT.load(Acquire);
    let found = match found.is_null() {
        false => found,
        true => {
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
        }
    };
    // SAFETY: it came from a box that is never freed.
    unsafe { &*found }
}

/// The counts of operations on the direct path, and by the kernel.
pub fn file_counts() -> Vec<FileCounts> {
    client().file_counts()
}

/// `PTHREAD_CANCEL_DISABLE`
const CANCEL_DISABLE: c_int = 1;

/// Runs a closure with signals blocked: threads that it starts get none of the program's signals.
/// The calling thread is not cancelled while it waits for them.
fn run_masked(run: &mut dyn FnMut()) {
    let before = sys::mask(libc::SIG_BLOCK, crate::signals::MASKABLE);
    let (mut may_be, mut disabled) = (0, 0);
    // SAFETY: both are of this thread's stack.
    unsafe { real::pthread_setcancelstate(CANCEL_DISABLE, &mut may_be) };
    run();
    // SAFETY: as above.
    unsafe { real::pthread_setcancelstate(may_be, &mut disabled) };
    sys::mask(libc::SIG_SETMASK, before);
}

pub fn open(device: u64, ino: u64, fd: RawFd) -> MountedFile {
    MountedFile(client().open(device, ino, fd))
}

impl MountedFile {
    #[inline]
    pub fn change_count(&self) -> Option<u64> {
        self.0.change_count()
    }

    #[inline]
    pub fn ready_change_count(&self) -> Option<u64> {
        self.0.ready_change_count()
    }

    #[cold]
    pub fn prepare(&self) -> Option<u64> {
        self.0.prepare()
    }

    #[inline]
    pub fn read(&self, into: &mut [u8], offset: u64) -> Option<usize> {
        self.0.read(into, offset)
    }

    #[inline]
    pub fn write(&self, data: &[u8], offset: u64) -> Option<usize> {
        self.0.write(data, offset)
    }

    #[inline]
    pub fn append(&self, data: &[u8]) -> Option<u64> {
        self.0.append(data)
    }

    #[inline]
    pub fn size(&self) -> Option<u64> {
        self.0.size()
    }

    /// Counts an operation that the kernel serves, for this reason.
    pub fn count_kernel(&self, why: Why) {
        self.0.count_kernel(why);
    }

    #[inline]
    pub fn sync(&self) -> bool {
        self.0.is_durable()
    }
}

/// Leaves all mounts, and joins none any more.
pub fn leave_all_mounts() {
    // SAFETY: null, or from a box that is never freed.
    if let Some(client) = unsafe { CLIENT.load(Acquire).as_ref() } {
        client.leave();
    }
}

/// Resets the engine in a child. State that the parent's threads may have been changing is leaked.
pub fn reset_in_child(closes: bool) {
    CLIENT.store(ptr::null_mut(), Release);
    threads::reset_in_child();
    internal_fds::close_in_child(|fd| {
        if closes {
            sys::close(fd);
        }
    });
}

/// Runs before a fork: the child must know all descriptors of the engine.
pub fn before_fork() {
    internal_fds::before_fork();
}

/// Runs in the parent, after a fork.
pub fn after_fork() {
    internal_fds::after_fork();
}

/// All descriptors of the engine.
pub fn internal_fds() -> impl Iterator<Item = RawFd> {
    internal_fds::all()
}

/// Whether a descriptor is the engine's, which the program must not close or replace.
#[inline]
pub fn is_internal_fd(fd: RawFd) -> bool {
    internal_fds::contains(fd)
}
