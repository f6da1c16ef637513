//! Where this crate meets other threads and processes: it says before each
//! access to the control segment what it accesses, and waits nowhere but here.
//!
//! Tests explore the interleavings through it (`models`). Built for anything
//! else, [`step`] is nothing. Threads that take turns, as a simulation has them, wait by
//! [`take_turns`].

use pagemesh_pmem::Shared;
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
type Others = Rc<dyn Fn() -> bool>;

/// How the waits of a thread go that takes turns with others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turns {
    /// It takes none: time passes by itself.
    None,
    /// Somebody goes on meanwhile, so no time is over.
    Others,
    /// Nobody can: to wait longer is in vain.
    InVain,
}

thread_local! {
    static OTHERS: RefCell<Option<Others>> = const { RefCell::new(None) };
    static TURNS: Cell<Turns> = const { Cell::new(Turns::None) };
}

/// For a program whose threads take turns: where this one would wait for another it does
/// this instead, as long as that says that somebody went on. Nothing but waits looks at it.
pub fn take_turns(others: Option<Others>) {
    TURNS.set(match others {
        Some(_) => Turns::Others,
        None => Turns::None,
    });
    OTHERS.set(others);
}

/// Lets others go on who take turns with this thread; false: it takes none.
#[cold]
fn pass_turn() -> bool {
    // Whoever goes on may wait, too.
    let Some(others) = OTHERS.with_borrow(Clone::clone) else {
        return false;
    };
    TURNS.set(match others() {
        true => Turns::Others,
        false => Turns::InVain,
    });
    true
}

/// Sleeps while the half word is `expected`, at most for `limit`. May return
/// early.
pub(crate) fn sleep(shared: &Shared, at: usize, expected: u32, limit: Option<Duration>) {
    #[cfg(test)]
    {
        let load = || shared.half(at).load(std::sync::atomic::Ordering::SeqCst);
        if pagemesh_models::sleep(CONTROL, at, || load() == expected) {
            return;
        }
    }
    if !pass_turn() {
        shared.wait(at, expected, limit);
    }
}

/// Wakes every process that sleeps on the half word.
pub(crate) fn wake(shared: &Shared, at: usize) {
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
    if !pass_turn() {
        std::thread::yield_now();
    }
}

/// Waits for what may last as long as a process does without a processor: the first times by
/// letting others go on, then by sleeping, so that those who are waited for have the
/// processors.
#[derive(Default)]
pub(crate) struct Patience(u32);

impl Patience {
    /// A window lasts a microsecond, and so long do some of these.
    const YIELDS: u32 = 16;
    /// Short beside the time for which a scheduler leaves a process out.
    const SLEEP: Duration = Duration::from_micros(100);

    pub(crate) fn pause(&mut self) {
        #[cfg(test)]
        if pagemesh_models::pause() {
            return;
        }
        if pass_turn() {
            return;
        }
        match self.0 < Patience::YIELDS {
            true => std::thread::yield_now(),
            false => std::thread::sleep(Patience::SLEEP),
        }
        self.0 = self.0.saturating_add(1);
    }
}

/// When a wait is given up.
#[derive(Clone, Copy)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Deadline {
        if TURNS.get() == Turns::InVain {
            TURNS.set(Turns::Others);
        }
        Deadline(Instant::now() + limit)
    }

    pub(crate) fn is_over(self) -> bool {
        #[cfg(test)]
        if let Some(is_over) = pagemesh_models::is_time_over() {
            return is_over;
        }
        match TURNS.get() {
            Turns::None => self.left().is_zero(),
            Turns::Others => false,
            Turns::InVain => true,
        }
    }

    pub(crate) fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}
