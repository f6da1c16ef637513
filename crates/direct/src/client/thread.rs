//! The calling thread: the number that selects its slot, and threads that work for it.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Stack for joining a mount (its slots take 80 KiB) and for mapping the legs of a slot, which
/// needs a connection to each brick.
const HELPER_STACK_BYTES: usize = 256 << 10;

/// Runs a closure with all signals blocked in the threads that it starts, and with cancellation of
/// the calling thread disabled.
pub type RunMasked = fn(&mut dyn FnMut());

/// The number of this thread, which selects its slot.
pub(super) fn thread_number() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            number.set(THREADS.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

/// Runs a closure on a thread with a stack large enough: threads of programs may have a small one.
/// None: the system cannot start such a thread.
pub(super) fn run_on_helper_stack<T: Send>(
    run_masked: RunMasked,
    run: impl FnOnce() -> T + Send,
) -> Option<T> {
    let (mut run, mut done) = (Some(run), None);
    run_masked(&mut || {
        done = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(HELPER_STACK_BYTES);
            let made = thread.spawn_scoped(scope, run.take()?);
            made.ok()?.join().ok()
        });
    });
    done
}
