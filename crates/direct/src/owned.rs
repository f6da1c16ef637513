//! Descriptors of this process that belong to the direct path and not to the program.
//!
//! A program may close whatever it finds open, or put something else in its place; and a
//! child of fork has copies of them all. So whoever catches the program's calls asks here.
//!
//! Invariants: what is listed is open; it is taken off the list before it is closed. Looking
//! takes no lock, so that a child can, whatever its parent's threads were doing. What a child
//! keeps copies of is listed before `fork` goes on.

use crate::account;
use pagemesh_base::spin::SpinLock;
use pagemesh_pmem::unreadable;
use rustix::process::{Pid, test_kill_process};
use rustix::thread::{gettid, nanosleep};
use rustix::time::Timespec;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long who copies the process waits for those who make descriptors, which takes them a
/// millisecond or two if nobody hangs.
const COPY_WAIT_MAX: Duration = Duration::from_secs(1);
/// How long who must close or make some waits for those who copy the process. Most are done much
/// earlier, and bricks wait two seconds until all 16 stations have let go.
const ANYWAY_WAIT_MAX: Duration = Duration::from_millis(50);
/// Between two looks.
const NAP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000,
};
/// Threads that copy the process, and those that make descriptors which are not listed yet.
static COPYING: AtomicU32 = AtomicU32::new(0);
static MAKING: AtomicU32 = AtomicU32::new(0);

/// Which of those that copy are known: more than wait for commands at once in most programs.
const COPIERS_MAX: usize = 64;
/// The threads that copy the process. Who is cancelled while it waits for a command never says
/// that it ended.
static COPIERS: [AtomicI32; COPIERS_MAX] = [const { AtomicI32::new(NOBODY) }; COPIERS_MAX];

/// Takes a thread's place for another, if there is one.
fn replace_copier(from: i32, to: i32) -> bool {
    let order = Ordering::SeqCst;
    let replace = |place: &AtomicI32| place.compare_exchange(from, to, order, order).is_ok();
    COPIERS.iter().any(replace)
}

fn own_id() -> i32 {
    gettid().as_raw_nonzero().get()
}

/// Whether nobody copies the process but threads that have ended.
#[cold]
fn only_ended_copy() -> bool {
    let is_there = |thread: i32| {
        let thread = Pid::from_raw(thread).expect("no thread has the number 0");
        test_kill_process(thread) != Err(rustix::io::Errno::SRCH)
    };
    for place in &COPIERS {
        let thread = place.load(Ordering::SeqCst);
        if thread != NOBODY && !is_there(thread) && replace_copier(thread, NOBODY) {
            COPYING.fetch_sub(1, Ordering::SeqCst);
        }
    }
    COPYING.load(Ordering::SeqCst) == 0
}

/// Some are made, and listed before this is dropped; or they are off the list, and closed.
pub(crate) struct Making;

impl Making {
    /// None: the process is just being copied.
    pub(crate) fn begin() -> Option<Making> {
        MAKING.fetch_add(1, Ordering::SeqCst);
        let making = Making;
        // One of the two sees the other.
        let is_copied = COPYING.load(Ordering::SeqCst) != 0 && !only_ended_copy();
        (!is_copied).then_some(making)
    }

    /// In any case: who copies the process is waited for, but not as long as for a command.
    pub(crate) fn anyway() -> Making {
        let began = Instant::now();
        while began.elapsed() < ANYWAY_WAIT_MAX {
            if let Some(making) = Making::begin() {
                return making;
            }
            nap();
        }
        MAKING.fetch_add(1, Ordering::SeqCst);
        Making
    }
}

fn nap() {
    // The C library's could be left by a cancellation.
    let _ = nanosleep(&NAP);
}

impl Drop for Making {
    fn drop(&mut self) {
        MAKING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Before `fork`. Everything is listed when it returns, and nobody makes anything. It is no
/// place to be cancelled.
pub fn before_copy() {
    replace_copier(NOBODY, own_id());
    COPYING.fetch_add(1, Ordering::SeqCst);
    let began = Instant::now();
    while MAKING.load(Ordering::SeqCst) != 0 && began.elapsed() < COPY_WAIT_MAX {
        nap();
    }
}

/// In the parent, by the same thread.
pub fn after_copy() {
    replace_copier(own_id(), NOBODY);
    COPYING.fetch_sub(1, Ordering::SeqCst);
}

/// Descriptors that can be listed: of 16 mounts with 16 stations of two legs.
const OWNED_MAX: usize = 2048;
const NOBODY: RawFd = -1;

static OWNED: [AtomicI32; OWNED_MAX] = [const { AtomicI32::new(NOBODY) }; OWNED_MAX];
/// No place from here on was ever used.
static END: AtomicUsize = AtomicUsize::new(0);
/// How often each is listed.
static COUNTS: [AtomicU32; OWNED_MAX] = [const { AtomicU32::new(0) }; OWNED_MAX];
/// Held by who changes the list, for a moment.
static CHANGING: SpinLock = SpinLock::new();

fn places() -> &'static [AtomicI32] {
    &OWNED[..END.load(Ordering::Acquire)]
}

/// Whether a descriptor is one of these.
#[inline]
#[must_use]
pub fn has(fd: RawFd) -> bool {
    fd >= 0 && all().any(|owned| owned == fd)
}

/// All of them.
pub fn all() -> impl Iterator<Item = RawFd> {
    let listed = places().iter().map(|place| place.load(Ordering::Acquire));
    listed.filter(|&fd| fd != NOBODY)
}

fn place_of(fd: RawFd) -> Option<usize> {
    OWNED
        .iter()
        .position(|place| place.load(Ordering::Relaxed) == fd)
}

/// Lists one, once more. Beyond the limit it is not protected.
pub fn add(fd: RawFd) {
    let _changing = CHANGING.hold();
    if let Some(place) = place_of(fd).or_else(|| place_of(NOBODY)) {
        COUNTS[place].fetch_add(1, Ordering::Relaxed);
        OWNED[place].store(fd, Ordering::Release);
        END.fetch_max(place + 1, Ordering::AcqRel);
    }
}

/// Takes one off the list, once: it will be closed.
pub fn remove(fd: RawFd) {
    let _changing = CHANGING.hold();
    if let Some(place) = place_of(fd)
        && COUNTS[place].fetch_sub(1, Ordering::Relaxed) == 1
    {
        OWNED[place].store(NOBODY, Ordering::Release);
    }
}

/// In a child of fork, which has one thread: nothing of the parent's is left. Its mappings are not
/// here; its descriptors would keep bricks and mounts from noticing its end.
pub fn forked(close: impl Fn(RawFd)) {
    all().for_each(close);
    forget();
    account::forget();
    unreadable::forget();
}

/// Nothing is listed, and nobody is at it.
fn forget() {
    for (place, count) in OWNED.iter().zip(&COUNTS) {
        place.store(NOBODY, Ordering::Relaxed);
        count.store(0, Ordering::Relaxed);
    }
    END.store(0, Ordering::Release);
    for copier in &COPIERS {
        copier.store(NOBODY, Ordering::Relaxed);
    }
    COPYING.store(0, Ordering::Relaxed);
    MAKING.store(0, Ordering::Relaxed);
    CHANGING.reset();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_listed_twice_is_there_until_both_are_gone() {
        // Numbers that no test process has.
        let (one, other) = (1_000_001, 1_000_002);
        add(one);
        add(other);
        add(one);
        assert!(has(one) && has(other) && !has(NOBODY));
        remove(one);
        assert!(has(one));
        remove(one);
        remove(other);
        assert!(!has(one) && !has(other));
    }

    #[test]
    fn who_closes_waits_for_forks_and_nobody_for_threads_that_have_ended() {
        before_copy();
        assert!(Making::begin().is_none());
        let began = Instant::now();
        drop(Making::anyway());
        assert!(began.elapsed() >= ANYWAY_WAIT_MAX);
        after_copy();
        assert!(Making::begin().is_some());
        std::thread::spawn(before_copy).join().expect("it ends");
        let began = Instant::now();
        // It is joined a moment before it is gone.
        while Making::begin().is_none() {
            assert!(began.elapsed() < COPY_WAIT_MAX, "it counts for ever");
            nap();
        }
    }
}
