//! This process, and those that are forked from it.
//!
//! Invariants: a child never uses what its parent's threads may have been changing, nor the
//! parent's connections, whose ends it would hide from bricks and mounts; it closes them
//! before anything else. No thread is inside twice.

#![allow(unsafe_code)]

use crate::error::Error;
use pagemesh_direct::client::DirectClient;
use pagemesh_direct::internal_fds;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};

/// Made for the first file on a mount, and never freed.
static DIRECT_CLIENT: AtomicPtr<DirectClient> = AtomicPtr::new(ptr::null_mut());
/// Forks that lead to this process.
static FORKS: AtomicU64 = AtomicU64::new(0);
/// Forks are heard of. No `Once`: a child would wait for the parent's thread that was at it. Two
/// that find it so at once have each fork heard of twice.
static FORK_HANDLERS_SET: AtomicBool = AtomicBool::new(false);

/// The guest that this process is; none where forks cannot be heard of.
pub(crate) fn direct_client() -> Option<&'static DirectClient> {
    if !FORK_HANDLERS_SET.load(Acquire) {
        // SAFETY: the handlers are functions that live as long as the process: a library
        // with threads of its own is not unloaded.
        if unsafe {
            libc::pthread_atfork(
                Some(before_fork),
                Some(after_fork_in_parent),
                Some(after_fork_in_child),
            )
        } != 0
        {
            return None;
        }
        FORK_HANDLERS_SET.store(true, Release);
    }
    let mut found = DIRECT_CLIENT.load(Acquire);
    if found.is_null() {
        let made = Box::into_raw(Box::new(DirectClient::new(run_masked, 0)));
        found = match DIRECT_CLIENT.compare_exchange(ptr::null_mut(), made, AcqRel, Acquire) {
            Ok(_) => made,
            Err(other) => {
                // SAFETY: nobody else has seen it.
                drop(unsafe { Box::from_raw(made) });
                other
            }
        };
    }
    // SAFETY: from a box that is never freed.
    Some(unsafe { &*found })
}

/// How a descriptor was opened, and what of that was set since.
pub(crate) fn status_flags(descriptor: RawFd) -> Option<i32> {
    // SAFETY: it looks at a descriptor, and at no memory.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
    (flags >= 0).then_some(flags)
}

/// The kind of the file system that a file is on (`f_type`).
pub(crate) fn fs_type(descriptor: RawFd) -> Option<i64> {
    // SAFETY: all zeroes is a valid structure.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: it fills a structure of this stack.
    let result = unsafe { libc::fstatfs(descriptor, &mut found) };
    (result == 0).then_some(found.f_type)
}

/// Bytes that files of this process may have, when that was last looked at.
static SIZE_LIMIT: AtomicU64 = AtomicU64::new(0);

/// Looks how long files of this process may be now (`RLIMIT_FSIZE`).
pub(crate) fn refresh_size_limit() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: it fills a structure of this stack. Were it to fail, the kernel would be left
    // with all writes.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    SIZE_LIMIT.store(limit.rlim_cur, Relaxed);
    limit.rlim_cur
}

/// The same as it was at the last look.
pub(crate) fn size_limit() -> u64 {
    SIZE_LIMIT.load(Relaxed)
}

/// Which process it is, of those that share a file.
pub(crate) fn generation() -> u64 {
    FORKS.load(Relaxed)
}

/// The child must know of all that is to be closed there.
extern "C" fn before_fork() {
    internal_fds::before_fork();
}

extern "C" fn after_fork_in_parent() {
    internal_fds::after_fork();
}

/// What the parent's threads may be changing is left as it is, for ever.
extern "C" fn after_fork_in_child() {
    FORKS.fetch_add(1, AcqRel);
    IN_CALL.set(false);
    internal_fds::close_in_child(|descriptor| {
        // SAFETY: it is this library's, which nobody in the child uses.
        unsafe { libc::close(descriptor) };
    });
    DIRECT_CLIENT.store(ptr::null_mut(), Release);
}

/// Threads that are started meanwhile get none of the program's signals.
fn run_masked(run: &mut dyn FnMut()) {
    // SAFETY: all zeroes is a valid set, and both are of this thread's stack.
    let before = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        before
    };
    run();
    // SAFETY: as it was.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut()) };
}

thread_local! {
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
}

/// A thread that is inside of a call.
pub(crate) struct CallGuard(());

impl CallGuard {
    /// Fails where its thread is inside already: this is a signal handler.
    pub(crate) fn enter() -> Result<CallGuard, Error> {
        match IN_CALL.replace(true) {
            // None is made and dropped: whoever was interrupted is still inside.
            true => Err(Error::NestedCall),
            false => Ok(CallGuard(())),
        }
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        IN_CALL.set(false);
    }
}
