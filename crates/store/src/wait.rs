//! Where this crate meets other threads and processes: it says before each
//! access to the control segment what it accesses, and waits nowhere but here.
//!
//! Tests explore the interleavings through it (`models`). Built for anything
//! else, [`step`] is nothing. Threads that take turns, as a simulation has them, wait by
//! [`set_yield_fn`].

use pagemesh_pmem::SharedSegment;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Before an access to the control segment's word at this byte.
#[cfg(test)]
pub(crate) fn step(at: usize) {
    let access = pagemesh_models::Access::Change;
    pagemesh_models::step(CONTROL, at..at + 1, access);
}

/// Before an access to the control segment's word at this byte.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn step(_at: usize) {}

#[cfg(test)]
const CONTROL: &str = "control segment";

/// What lets others go on in place of a wait; false: nobody can.
type YieldFn = Rc<dyn Fn() -> bool>;

/// How the waits of a thread go that takes turns with others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitMode {
    /// It takes none: time passes by itself.
    Blocking,
    /// Somebody goes on meanwhile, so no time is over.
    Yielding,
    /// Nobody can: to wait longer is in vain.
    NoProgress,
}

thread_local! {
    static OTHERS: RefCell<Option<YieldFn>> = const { RefCell::new(None) };
    static TURNS: Cell<WaitMode> = const { Cell::new(WaitMode::Blocking) };
}

/// For a program whose threads take turns: where this one would wait for another it does
/// this instead, as long as that says that somebody went on. Nothing but waits looks at it.
pub fn set_yield_fn(yield_fn: Option<YieldFn>) {
    TURNS.set(match yield_fn {
        Some(_) => WaitMode::Yielding,
        None => WaitMode::Blocking,
    });
    OTHERS.set(yield_fn);
}

/// Lets others go on who take turns with this thread; false: it takes none.
#[cold]
fn yield_to_others() -> bool {
    // Whoever goes on may wait, too.
    let Some(others) = OTHERS.with_borrow(Clone::clone) else {
        return false;
    };
    TURNS.set(match others() {
        true => WaitMode::Yielding,
        false => WaitMode::NoProgress,
    });
    true
}

/// Sleeps while the half word is `expected`, at most for `checkpoint_limit`. May return
/// early.
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

/// Lets others go on, of which one does what is waited for.
pub(crate) fn pause() {
    #[cfg(test)]
    if pagemesh_models::pause() {
        return;
    }
    if !yield_to_others() {
        std::thread::yield_now();
    }
}

/// Waits for what may last as long as a process does without a processor: the first times by
/// letting others go on, then by sleeping, so that those who are waited for have the
/// processors.
#[derive(Default)]
pub(crate) struct Backoff(u32);

impl Backoff {
    /// A window lasts a microsecond, and so long do some of these.
    const YIELDS: u32 = 16;
    /// Short beside the time for which a scheduler leaves a process out.
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

/// When a wait is given up.
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
