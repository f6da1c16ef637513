//! Descriptors of this process that belong to the direct path and not to the program.
//!
//! A program may close any descriptor that it finds open, or replace it; and a child of fork has
//! copies of all of them. Code that intercepts the program's calls therefore checks this list.
//!
//! Invariants: a listed descriptor is open; it is taken off the list before it is closed. A lookup
//! takes no lock, so that a child can do it in any state of its parent's threads. Descriptors that
//! a child inherits are listed before `fork` goes on.

use crate::shared::op_counters;
use pagemesh_base::spin_lock::SpinLock;
use pagemesh_pmem::unreadable;
use rustix::process::{Pid, test_kill_process};
use rustix::thread::{gettid, nanosleep};
use rustix::time::Timespec;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a forking thread waits for threads that create descriptors, which takes a millisecond
/// or two unless one of them hangs.
const FORK_WAIT_MAX: Duration = Duration::from_secs(1);
/// How long a thread that must close or create descriptors waits for forks. Most forks end much
/// earlier, and bricks wait two seconds until all 16 slots have let go.
const CREATE_WAIT_MAX: Duration = Duration::from_millis(50);
/// Delay between two looks.
const POLL_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000,
};
/// Threads that fork, and threads that create descriptors which are not listed yet.
static FORKS_IN_PROGRESS: AtomicU32 = AtomicU32::new(0);
static FD_CREATIONS: AtomicU32 = AtomicU32::new(0);

/// Forking threads that are tracked: in most programs more than wait for commands at once.
const FORKING_THREADS_MAX: usize = 64;
/// The threads that fork. A thread that is cancelled while it waits for a command never reports
/// that its fork ended.
static FORKING_THREADS: [AtomicI32; FORKING_THREADS_MAX] =
    [const { AtomicI32::new(EMPTY) }; FORKING_THREADS_MAX];

/// Replaces a thread's entry by another one, if there is an entry.
fn replace_forking_thread(from: i32, to: i32) -> bool {
    let order = Ordering::SeqCst;
    let replace = |place: &AtomicI32| place.compare_exchange(from, to, order, order).is_ok();
    FORKING_THREADS.iter().any(replace)
}

fn current_thread_id() -> i32 {
    gettid().as_raw_nonzero().get()
}

/// Forgets forks of threads that have ended. Returns whether no fork is left.
#[cold]
fn forget_ended_forks() -> bool {
    let is_there = |thread: i32| {
        let thread = Pid::from_raw(thread).expect("no thread has the number 0");
        test_kill_process(thread) != Err(rustix::io::Errno::SRCH)
    };
    for place in &FORKING_THREADS {
        let thread = place.load(Ordering::SeqCst);
        if thread != EMPTY && !is_there(thread) && replace_forking_thread(thread, EMPTY) {
            FORKS_IN_PROGRESS.fetch_sub(1, Ordering::SeqCst);
        }
    }
    FORKS_IN_PROGRESS.load(Ordering::SeqCst) == 0
}

/// Guards a change: descriptors are created, and listed before this is dropped; or they are taken
/// off the list, and closed.
pub(crate) struct FdCreation;

impl FdCreation {
    /// None: a fork is in progress.
    pub(crate) fn begin() -> Option<FdCreation> {
        FD_CREATIONS.fetch_add(1, Ordering::SeqCst);
        let creation = FdCreation;
        // One of the two threads sees the other.
        let is_copied = FORKS_IN_PROGRESS.load(Ordering::SeqCst) != 0 && !forget_ended_forks();
        (!is_copied).then_some(creation)
    }

    /// Waits briefly for forks in progress, but not as long as for a command; then it begins in any
    /// case.
    pub(crate) fn begin_regardless() -> FdCreation {
        let began = Instant::now();
        while began.elapsed() < CREATE_WAIT_MAX {
            if let Some(creation) = FdCreation::begin() {
                return creation;
            }
            sleep_briefly();
        }
        FD_CREATIONS.fetch_add(1, Ordering::SeqCst);
        FdCreation
    }
}

fn sleep_briefly() {
    // A cancellation could interrupt the sleep of the C library.
    let _ = nanosleep(&POLL_INTERVAL);
}

impl Drop for FdCreation {
    fn drop(&mut self) {
        FD_CREATIONS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs before `fork`. When it returns, all descriptors are listed, and no thread creates any,
/// unless one took longer than `FORK_WAIT_MAX`. It is no cancellation point.
pub fn before_fork() {
    replace_forking_thread(EMPTY, current_thread_id());
    FORKS_IN_PROGRESS.fetch_add(1, Ordering::SeqCst);
    let began = Instant::now();
    while FD_CREATIONS.load(Ordering::SeqCst) != 0 && began.elapsed() < FORK_WAIT_MAX {
        sleep_briefly();
    }
}

/// Runs in the parent, in the same thread.
pub fn after_fork() {
    replace_forking_thread(current_thread_id(), EMPTY);
    FORKS_IN_PROGRESS.fetch_sub(1, Ordering::SeqCst);
}

/// Descriptors that can be listed: of 16 mounts with 16 slots of two legs.
const INTERNAL_FDS_MAX: usize = 2048;
const EMPTY: RawFd = -1;

static INTERNAL_FDS: [AtomicI32; INTERNAL_FDS_MAX] =
    [const { AtomicI32::new(EMPTY) }; INTERNAL_FDS_MAX];
/// No entry from here on was ever used.
static USED_END: AtomicUsize = AtomicUsize::new(0);
/// How often each is listed.
static LIST_COUNTS: [AtomicU32; INTERNAL_FDS_MAX] = [const { AtomicU32::new(0) }; INTERNAL_FDS_MAX];
/// Held while the list changes, for a moment.
static LIST_LOCK: SpinLock = SpinLock::new();

fn used_entries() -> &'static [AtomicI32] {
    &INTERNAL_FDS[..USED_END.load(Ordering::Acquire)]
}

/// Whether a descriptor is listed.
#[inline]
#[must_use]
pub fn contains(fd: RawFd) -> bool {
    fd >= 0 && all().any(|listed| listed == fd)
}

/// All listed descriptors.
pub fn all() -> impl Iterator<Item = RawFd> {
    let listed = used_entries()
        .iter()
        .map(|place| place.load(Ordering::Acquire));
    listed.filter(|&fd| fd != EMPTY)
}

fn index_of(fd: RawFd) -> Option<usize> {
    INTERNAL_FDS
        .iter()
        .position(|place| place.load(Ordering::Relaxed) == fd)
}

/// Lists a descriptor, once more. Beyond the limit it is not protected.
pub fn add(fd: RawFd) {
    let _changing = LIST_LOCK.lock();
    if let Some(place) = index_of(fd).or_else(|| index_of(EMPTY)) {
        LIST_COUNTS[place].fetch_add(1, Ordering::Relaxed);
        INTERNAL_FDS[place].store(fd, Ordering::Release);
        USED_END.fetch_max(place + 1, Ordering::AcqRel);
    }
}

/// Takes a descriptor off the list, once: it will be closed.
pub fn remove(fd: RawFd) {
    let _changing = LIST_LOCK.lock();
    if let Some(place) = index_of(fd)
        && LIST_COUNTS[place].fetch_sub(1, Ordering::Relaxed) == 1
    {
        INTERNAL_FDS[place].store(EMPTY, Ordering::Release);
    }
}

/// Closes the parent's descriptors in a child of fork, which has one thread. The child has none of
/// the parent's mappings; the descriptors would hide the parent's end from bricks and mounts.
pub fn close_in_child(close: impl Fn(RawFd)) {
    all().for_each(close);
    reset();
    op_counters::reset();
    unreadable::reset_after_fork();
}

/// Empties the list, and resets all locks and counts.
fn reset() {
    for (place, count) in INTERNAL_FDS.iter().zip(&LIST_COUNTS) {
        place.store(EMPTY, Ordering::Relaxed);
        count.store(0, Ordering::Relaxed);
    }
    USED_END.store(0, Ordering::Release);
    for copier in &FORKING_THREADS {
        copier.store(EMPTY, Ordering::Relaxed);
    }
    FORKS_IN_PROGRESS.store(0, Ordering::Relaxed);
    FD_CREATIONS.store(0, Ordering::Relaxed);
    LIST_LOCK.reset();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fd_listed_twice_stays_until_removed_twice() {
        // Numbers that no test process uses.
        let (one, other) = (1_000_001, 1_000_002);
        add(one);
        add(other);
        add(one);
        assert!(contains(one) && contains(other) && !contains(EMPTY));
        remove(one);
        assert!(contains(one));
        remove(one);
        remove(other);
        assert!(!contains(one) && !contains(other));
    }

    #[test]
    fn fd_change_waits_for_forks_but_not_for_ended_threads() {
        before_fork();
        assert!(FdCreation::begin().is_none());
        let began = Instant::now();
        drop(FdCreation::begin_regardless());
        assert!(began.elapsed() >= CREATE_WAIT_MAX);
        after_fork();
        assert!(FdCreation::begin().is_some());
        std::thread::spawn(before_fork).join().expect("it ends");
        let began = Instant::now();
        // A thread is joined a moment before it is gone.
        while FdCreation::begin().is_none() {
            assert!(began.elapsed() < FORK_WAIT_MAX, "it counts for ever");
            sleep_briefly();
        }
    }
}
