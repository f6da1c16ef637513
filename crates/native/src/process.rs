//! State of this process, and of the processes that are forked from it.
//!
//! Invariants: a child never uses state that its parent's threads may have been changing. It never
//! uses the parent's connections, and closes them before anything else, because an open copy would
//! hide the parent's end from bricks and mounts. A thread is in at most one call.

#![allow(unsafe_code)]

use crate::error::Error;
use pagemesh_direct::client::DirectClient;
use pagemesh_direct::internal_fds;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};

/// Created for the first file on a mount, and never freed.
static DIRECT_CLIENT: AtomicPtr<DirectClient> = AtomicPtr::new(ptr::null_mut());
/// Number of forks that lead to this process.
static FORKS: AtomicU64 = AtomicU64::new(0);
/// Whether the fork handlers are set. This is no `Once`: a child would wait for a parent's thread
/// in it. Two threads may both set the handlers; they then run twice per fork.
static FORK_HANDLERS_SET: AtomicBool = AtomicBool::new(false);

/// The direct client of this process; `None` if the fork handlers cannot be set.
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
                // SAFETY: no other thread has seen it.
                drop(unsafe { Box::from_raw(made) });
                other
            }
        };
    }
    // SAFETY: the pointer comes from a box that is never freed.
    Some(unsafe { &*found })
}

/// The open flags of a descriptor, with later changes (`F_GETFL`).
pub(crate) fn status_flags(descriptor: RawFd) -> Option<i32> {
    // SAFETY: the call reads a descriptor, and no memory.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
    (flags >= 0).then_some(flags)
}

/// The type of the file system of a file (`f_type`).
pub(crate) fn fs_type(descriptor: RawFd) -> Option<i64> {
    // SAFETY: all zeroes is a valid structure.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the call fills a structure of this stack.
    let result = unsafe { libc::fstatfs(descriptor, &mut found) };
    (result == 0).then_some(found.f_type)
}

/// The size limit for files of this process at the last refresh, in bytes.
static SIZE_LIMIT: AtomicU64 = AtomicU64::new(0);

/// Reads the size limit for files of this process (`RLIMIT_FSIZE`).
pub(crate) fn refresh_size_limit() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the call fills a structure of this stack. After an error the limit is 0, and the
    // kernel gets all writes.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    SIZE_LIMIT.store(limit.rlim_cur, Relaxed);
    limit.rlim_cur
}

/// The size limit of the last refresh.
pub(crate) fn size_limit() -> u64 {
    SIZE_LIMIT.load(Relaxed)
}

/// Identifies the process among those that share a file by fork.
pub(crate) fn generation() -> u64 {
    FORKS.load(Relaxed)
}

/// The child must know all descriptors that it has to close.
extern "C" fn before_fork() {
    internal_fds::before_fork();
}

extern "C" fn after_fork_in_parent() {
    internal_fds::after_fork();
}

/// Does not touch state that the parent's threads may have been changing; it is leaked.
extern "C" fn after_fork_in_child() {
    FORKS.fetch_add(1, AcqRel);
    IN_CALL.set(false);
    internal_fds::close_in_child(|descriptor| {
        // SAFETY: the descriptor is this library's, and no thread in the child uses it.
        unsafe { libc::close(descriptor) };
    });
    DIRECT_CLIENT.store(ptr::null_mut(), Release);
}

/// Blocks all signals meanwhile, so that threads started by `run` get none of the program's
/// signals.
fn run_masked(run: &mut dyn FnMut()) {
    // SAFETY: all zeroes is a valid set, and both are of this thread's stack.
    let before = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        before
    };
    run();
    // SAFETY: restores the previous set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut()) };
}

thread_local! {
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
}

/// Exists while its thread is in a call.
pub(crate) struct CallGuard(());

impl CallGuard {
    /// Fails if the thread is in a call already: this is a signal handler.
    pub(crate) fn enter() -> Result<CallGuard, Error> {
        match IN_CALL.replace(true) {
            // No guard is created and dropped: the interrupted call is still running.
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
