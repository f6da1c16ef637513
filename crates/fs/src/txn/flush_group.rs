//! Flushes of several calls at once: the calls that wait while a flush runs share the next one.
//!
//! Invariant: a call returns after a flush that began after the call did, so all changes of its caller are covered.

use pagemesh_base::poison;
use std::sync::{Condvar, Mutex, MutexGuard};

#[derive(Default)]
struct FlushState {
    /// Flushes begun so far; one runs at a time.
    begun: u64,
    /// The number of the last flush that succeeded.
    done: u64,
    is_running: bool,
    /// Calls that wait for the flush that runs.
    waiters: usize,
}

/// See the module.
#[derive(Default)]
pub(crate) struct FlushGroup {
    state: Mutex<FlushState>,
    ended: Condvar,
}

impl FlushGroup {
    /// Calls `flush`, or waits for the flush of another call. If that fails, calls `flush`, too.
    ///
    /// # Errors
    /// The error of `flush`.
    pub(crate) fn flush<E>(&self, flush: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut state = poison::lock(&self.state);
        // The flush that runs may have begun before the last change of the caller.
        let wanted = state.begun + 1;
        while state.done < wanted {
            if !state.is_running {
                return self.lead(state, flush);
            }
            state.waiters += 1;
            state = poison::recover(self.ended.wait(state));
            state.waiters -= 1;
        }
        Ok(())
    }

    fn lead<E>(
        &self,
        mut state: MutexGuard<'_, FlushState>,
        flush: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        state.begun += 1;
        state.is_running = true;
        let number = state.begun;
        drop(state);
        let mut running = RunningFlush {
            group: self,
            number,
            is_done: false,
        };
        let flushed = flush();
        running.is_done = flushed.is_ok();
        flushed
    }
}

/// The flush that runs. Its drop ends it, also in a panic: others would wait for it for ever.
struct RunningFlush<'a> {
    group: &'a FlushGroup,
    number: u64,
    is_done: bool,
}

impl Drop for RunningFlush<'_> {
    fn drop(&mut self) {
        let mut state = poison::lock(&self.group.state);
        state.is_running = false;
        if self.is_done {
            state.done = self.number;
        }
        if state.waiters > 0 {
            self.group.ended.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const CALLS: usize = 6;

    /// Calls that arrive while a flush runs. Returns the number of flushes of all, and of calls that failed.
    fn flush_while_one_runs(outcomes: &[Result<(), ()>]) -> (usize, usize) {
        let group = FlushGroup::default();
        let flushes = AtomicUsize::new(0);
        let flush = || outcomes[flushes.fetch_add(1, Ordering::SeqCst)];
        let failed = std::thread::scope(|scope| {
            let mut others = Vec::new();
            let first = group.flush(|| {
                for _ in 0..CALLS {
                    others.push(scope.spawn(|| group.flush(flush)));
                }
                while poison::lock(&group.state).waiters < CALLS {
                    std::thread::yield_now();
                }
                flush()
            });
            let results = others
                .into_iter()
                .map(|other| other.join().expect("no panic"));
            results.chain([first]).filter(Result::is_err).count()
        });
        (flushes.into_inner(), failed)
    }

    #[test]
    fn calls_that_wait_share_the_next_flush() {
        assert_eq!(flush_while_one_runs(&[Ok(()); CALLS + 1]), (2, 0));
    }

    #[test]
    fn failed_flush_is_repeated_by_each_call_that_waits() {
        let outcomes = [Err(()), Err(()), Err(()), Ok(()), Ok(()), Ok(()), Ok(())];
        let (flushes, failed) = flush_while_one_runs(&outcomes);
        assert_eq!((flushes, failed), (4, 3));
    }

    #[test]
    fn call_without_company_flushes_each_time() {
        let group = FlushGroup::default();
        let mut flushes = 0;
        for _ in 0..3 {
            let flushed: Result<(), ()> = group.flush(|| {
                flushes += 1;
                Ok(())
            });
            assert_eq!(flushed, Ok(()));
        }
        assert_eq!(flushes, 3);
    }
}
