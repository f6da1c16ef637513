//! Explores the interleavings of a few threads. A model is a test that runs production code again
//! and again, each time with another order of the threads' accesses to shared memory ([RFD
//! 008][rfd]).
//!
//! The threads are shuttle coroutines, so one runs at a time. Code under test calls [`step`] before
//! each access to shared memory, and [`pause`] when it waits for another thread. Only there may
//! another thread continue. The search is exhaustive up to a bound: it runs every order with at
//! most that many switches that no thread asked for. Memory is sequentially consistent.
//!
//! Outside of a model each of these functions does nothing. Only tests depend on this crate.
//!
//! [rfd]: ../../../docs/rfd/008-concurrency-models.md

#![forbid(unsafe_code)]

mod search;

pub use search::{Access, ExecutionFailure, Exploration, Model};

#[cfg(debug_assertions)]
use pagemesh_base::defect::{self, Defect};
use search::{STATE, SearchState, StepAction, ThreadDeath, switch};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The work of one thread of a model.
pub type Thread<'w> = Box<dyn FnOnce() + Send + 'w>;

/// Asserts that a model finds each of these deliberate defects, which exist in builds with debug
/// assertions only.
#[cfg(debug_assertions)]
#[track_caller]
pub fn assert_finds(
    defects: &[Defect],
    model: Model,
    run: impl Fn() + Clone + Send + Sync + 'static,
) {
    for &defect in defects {
        defect::set(Some(defect));
        let outcome = model.explore(run.clone());
        defect::set(None);
        match outcome {
            Err(failed) => println!("{defect:?}: {failed}"),
            Ok(explored) => panic!("{defect:?} is not found: {explored:?}"),
        }
    }
}

fn with_state<T>(look: impl FnOnce(&mut SearchState) -> T) -> Option<T> {
    STATE.with_borrow_mut(|state| {
        state
            .as_mut()
            .filter(|state| state.are_threads_running())
            .map(look)
    })
}

/// Whether the caller is a thread of a model.
#[must_use]
pub fn is_in_model() -> bool {
    with_state(|_| ()).is_some()
}

/// Called before an access to units of shared memory, which `space` and numbers name. Another
/// thread may run first, or the calling thread may die.
#[inline]
pub fn step(space: &'static str, units: Range<usize>, access: Access) {
    match with_state(|state| state.step(space, units, access)) {
        None | Some(StepAction::Continue) => {}
        Some(StepAction::Switch) => switch(),
        Some(StepAction::Die) => resume_unwind(Box::new(ThreadDeath)),
    }
}

/// Lets other threads run instead of waiting for them. False outside of a model.
pub fn pause() -> bool {
    match with_state(SearchState::pause) {
        None => false,
        Some(StepAction::Switch) => {
            switch();
            true
        }
        Some(_) => true,
    }
}

/// Waits until `has_come` is true, as for an event for which the kernel wakes a thread.
pub fn pause_until(has_come: impl Fn() -> bool) {
    while !has_come() && pause() {}
}

/// Waits until a mutex can be locked; called before it is locked.
pub fn pause_while_locked<T>(mutex: &std::sync::Mutex<T>) {
    use std::sync::TryLockError::WouldBlock;
    pause_until(|| !matches!(mutex.try_lock(), Err(WouldBlock)));
}

/// Sleeps on the futex of this name, if `is_expected`; false outside of a model. The sleep has no
/// time limit, so that a lost wake-up is noticed. Exceptions: after a thread died, which may have
/// been about to wake the sleeper, and for the last thread of a model with time.
pub fn sleep(space: &'static str, at: usize, is_expected: impl Fn() -> bool) -> bool {
    step(space, at..at + 1, Access::Load);
    let Some(wakes) = with_state(|state| state.wake_count((space, at))) else {
        return false;
    };
    if is_expected() {
        let ends = |state: &mut SearchState| {
            state.may_wake_unprompted() || state.wake_count((space, at)) != wakes
        };
        let _ = pause();
        pause_until(|| with_state(ends) != Some(false));
    }
    true
}

/// Wakes the threads that sleep on the futex of this name.
pub fn wake(space: &'static str, at: usize) {
    step(space, at..at + 1, Access::Load);
    let _ = with_state(|state| state.wake((space, at)));
}

/// Whether the time limit of a wait is over. Without time in the model it never is; with time it is
/// once, by choice, and always for the last thread. None outside of a model.
#[must_use]
pub fn is_time_over() -> Option<bool> {
    with_state(SearchState::is_time_over)
}

/// Whether a thread has ended or died.
#[must_use]
pub fn has_ended(thread: usize) -> bool {
    with_state(|state| state.has_ended(thread)) == Some(true)
}

/// The number of the calling thread.
#[must_use]
pub fn this_thread() -> Option<usize> {
    with_state(|state| state.this_thread())
}

/// Runs the threads of a model to their ends; once in each execution.
pub fn run_threads(threads: Vec<Thread<'_>>) {
    let count = threads.len();
    shuttle::thread::scope(|scope| {
        for thread in threads {
            scope.spawn(move || {
                let outcome = catch_unwind(AssertUnwindSafe(thread));
                if let Err(panic) = outcome
                    && !panic.is::<ThreadDeath>()
                {
                    resume_unwind(panic);
                }
                let _ = with_state(SearchState::end_thread);
            });
        }
        STATE.with_borrow_mut(|state| state.as_mut().expect("a model runs").begin_threads(count));
    });
    STATE.with_borrow_mut(|state| state.as_mut().expect("a model runs").finish_threads());
}
