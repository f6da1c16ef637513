//! The interface between this crate and other threads and processes. The crate announces each
//! access to the control segment here, and waits nowhere else.
//!
//! Model tests (`models`) explore the interleavings through [`step`]. In other builds [`step`] does
//! nothing. A simulation with threads that take turns replaces the waits with [`set_yield_fn`].

use pagemesh_pmem::SharedSegment;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Announces an access to the control segment's word at this byte.
#[cfg(test)]
pub(crate) fn step(at: usize) {
    let access = pagemesh_models::Access::Change;
    pagemesh_models::step(CONTROL, at..at + 1, access);
}

/// Announces an access to the control segment's word at this byte.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn step(_at: usize) {}

#[cfg(test)]
const CONTROL: &str = "control segment";

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
    #[cfg(test)]
    {
        let load = || {
            shared
                .half_word(at)
                .load(std::sync::atomic::Ordering::SeqCst)
        };
        if pagemesh_models::sleep(CONTROL, at, || load() == expected) {
            return;
        }
    }
    if !yield_to_others() {
        shared.wait(at, expected, limit);
    }
}

/// Wakes every process that sleeps on the half word.
pub(crate) fn wake(shared: &SharedSegment, at: usize) {
    #[cfg(test)]
    pagemesh_models::wake(CONTROL, at);
    shared.wake(at);
}

/// Lets other threads run, one of which does the awaited work.
pub(crate) fn pause() {
    #[cfg(test)]
    if pagemesh_models::pause() {
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
        #[cfg(test)]
        if pagemesh_models::pause() {
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
        #[cfg(test)]
        if let Some(is_over) = pagemesh_models::is_time_over() {
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
