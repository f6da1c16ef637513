//! The interface between this crate and other threads and processes. The crate announces each
//! access to the control segment here, and waits nowhere else.
//!
//! Model tests (`tests/models`) explore the interleavings through [`step`]. In builds without the
//! feature `test-api` it does nothing. A program with threads that take turns replaces the waits with
//! [`set_yield_fn`]: the simulation, and the crash enumeration, where the turn is the owner's.

use pagemesh_pmem::SharedSegment;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

pub(crate) use explored::{spins, step};

/// Runs another thread in place of a wait; false: no other thread can run.
type YieldFn = Rc<dyn Fn() -> bool>;

/// How a thread that takes turns with others waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitMode {
    /// The thread takes no turns: time passes by itself.
    Blocking,
    /// Another thread ran meanwhile, so no deadline has passed.
    Yielding,
    /// No other thread can run: a longer wait is in vain.
    NoProgress,
}

thread_local! {
    static OTHERS: RefCell<Option<YieldFn>> = const { RefCell::new(None) };
    static TURNS: Cell<WaitMode> = const { Cell::new(WaitMode::Blocking) };
}

/// Sets the wait function of a program with threads that take turns. Where this thread would wait
/// for another, it calls `yield_fn` instead, as long as that returns true. Only waits use it.
pub fn set_yield_fn(yield_fn: Option<YieldFn>) {
    TURNS.set(match yield_fn {
        Some(_) => WaitMode::Yielding,
        None => WaitMode::Blocking,
    });
    OTHERS.set(yield_fn);
}

/// Runs another thread by the wait function; false: this thread has none.
#[cold]
fn yield_to_others() -> bool {
    // The function is cloned first, because the thread that runs next may wait, too.
    let Some(others) = OTHERS.with_borrow(Clone::clone) else {
        return false;
    };
    TURNS.set(match others() {
        true => WaitMode::Yielding,
        false => WaitMode::NoProgress,
    });
    true
}

/// Sleeps while the half word is `expected`, at most for `limit`. May return early.
pub(crate) fn sleep(shared: &SharedSegment, at: usize, expected: u32, limit: Option<Duration>) {
    if explored::sleep(shared, at, expected) {
        return;
    }
    if !yield_to_others() {
        shared.wait(at, expected, limit);
    }
}

/// Wakes every process that sleeps on the half word.
pub(crate) fn wake(shared: &SharedSegment, at: usize) {
    explored::wake(at);
    shared.wake(at);
}

/// Lets other threads run, one of which does the awaited work.
pub(crate) fn pause() {
    if explored::pause() {
        return;
    }
    if !yield_to_others() {
        std::thread::yield_now();
    }
}

/// Waits for an event that may take as long as a process is off the processor. The first waits
/// yield the processor. Later ones sleep, so that the awaited threads get the processors.
#[derive(Default)]
pub(crate) struct Backoff(u32);

impl Backoff {
    /// An operation takes about a microsecond, and so do some of these waits.
    const YIELDS: u32 = 16;
    /// Short compared with the time that a scheduler keeps a process off the processor.
    const SLEEP: Duration = Duration::from_micros(100);

    pub(crate) fn pause(&mut self) {
        if explored::pause() {
            return;
        }
        if yield_to_others() {
            return;
        }
        match self.0 < Backoff::YIELDS {
            true => std::thread::yield_now(),
            false => std::thread::sleep(Backoff::SLEEP),
        }
        self.0 = self.0.saturating_add(1);
    }
}

/// The end of a wait.
#[derive(Clone, Copy)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Deadline {
        if TURNS.get() == WaitMode::NoProgress {
            TURNS.set(WaitMode::Yielding);
        }
        Deadline(Instant::now() + limit)
    }

    pub(crate) fn is_over(self) -> bool {
        if let Some(is_over) = explored::is_time_over() {
            return is_over;
        }
        match TURNS.get() {
            WaitMode::Blocking => self.remaining().is_zero(),
            WaitMode::Yielding => false,
            WaitMode::NoProgress => true,
        }
    }

    pub(crate) fn remaining(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}

/// No test runs the threads.
#[cfg(not(feature = "test-api"))]
mod explored {
    use pagemesh_pmem::SharedSegment;

    #[inline(always)]
    pub(crate) const fn step(_at: usize) {}

    #[inline(always)]
    pub(crate) const fn spins(polls: u32) -> u32 {
        polls
    }

    #[inline(always)]
    pub(super) const fn sleep(_shared: &SharedSegment, _at: usize, _expected: u32) -> bool {
        false
    }

    #[inline(always)]
    pub(super) const fn wake(_at: usize) {}

    #[inline(always)]
    pub(super) const fn pause() -> bool {
        false
    }

    #[inline(always)]
    pub(super) const fn is_time_over() -> Option<bool> {
        None
    }
}

/// The calls of a test that runs the threads.
#[cfg(feature = "test-api")]
pub(crate) mod explored {
    use pagemesh_pmem::SharedSegment;
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering;

    /// The calls of a model that runs the threads. Outside of a model each does nothing and returns
    /// false or none.
    #[derive(Clone, Copy)]
    pub struct Explorer {
        /// Comes before an access to the control segment's word at this byte.
        pub step: fn(usize),
        /// Sleeps on the half word at this byte while the condition is true.
        pub sleep: fn(usize, &dyn Fn() -> bool) -> bool,
        /// Wakes the threads that sleep on the half word at this byte.
        pub wake: fn(usize),
        /// Lets other threads run instead of waiting for them.
        pub pause: fn() -> bool,
        /// Whether the time limit of a wait is over.
        pub is_time_over: fn() -> Option<bool>,
    }

    static EXPLORER: OnceLock<Explorer> = OnceLock::new();

    /// Explores the interleavings of this process from now on. The first call counts.
    pub fn set_explorer(explorer: Explorer) {
        let _ = EXPLORER.set(explorer);
    }

    /// Announces an access to the control segment's word at this byte.
    pub(crate) fn step(at: usize) {
        if let Some(explorer) = EXPLORER.get() {
            (explorer.step)(at);
        }
    }

    /// The polls of a short wait before the thread yields its processor. In a model a second poll
    /// adds nothing.
    pub(crate) fn spins(polls: u32) -> u32 {
        if EXPLORER.get().is_some() { 1 } else { polls }
    }

    pub(super) fn sleep(shared: &SharedSegment, at: usize, expected: u32) -> bool {
        let is_expected = || shared.half_word(at).load(Ordering::SeqCst) == expected;
        EXPLORER
            .get()
            .is_some_and(|explorer| (explorer.sleep)(at, &is_expected))
    }

    pub(super) fn wake(at: usize) {
        if let Some(explorer) = EXPLORER.get() {
            (explorer.wake)(at);
        }
    }

    pub(super) fn pause() -> bool {
        EXPLORER.get().is_some_and(|explorer| (explorer.pause)())
    }

    pub(super) fn is_time_over() -> Option<bool> {
        EXPLORER
            .get()
            .and_then(|explorer| (explorer.is_time_over)())
    }
}
