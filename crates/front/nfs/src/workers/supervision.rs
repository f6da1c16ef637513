//! The duties of the supervisor for one export: replies and connections that wait, sweeps, and further workers.

use super::sizing::{Load, SizingReason};
use super::{ExportWorkers, WorkerSlot, WorkersState, processors};
use crate::limits::QUEUE_WAIT_LIMIT;
use pagemesh_base::poison;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl ExportWorkers {
    /// Lets a worker drop unused pins, unless one does. Returns whether no worker is free.
    pub(crate) fn request_sweep(&self) -> bool {
        let mut state = poison::lock(&self.state);
        let is_needed = !state.is_stopping && !state.is_sweeping && !state.is_sweep_due;
        if !is_needed {
            return false;
        }
        state.is_sweep_due = true;
        self.is_pending.store(true, Ordering::Release);
        !state.wake_one()
    }

    pub(crate) fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::Acquire)
    }

    /// Looks at waiting calls. Returns the slot of a worker that the caller starts, with the reason.
    pub(crate) fn supervise(&self, start: Instant) -> Option<(usize, SizingReason)> {
        let now = Instant::now();
        self.release_waiting(now);
        let mut state = poison::lock(&self.state);
        let mut load = state.load(now);
        let is_full = state.sizing.workers() >= self.shares.workers_max;
        let is_waiting = load
            .oldest_wait
            .is_some_and(|wait| wait >= QUEUE_WAIT_LIMIT);
        if is_waiting && !is_full && state.sizing.workers() > 0 {
            let threads: Vec<u32> = state.threads_in_calls().collect();
            drop(state);
            let blocked = threads.iter().filter(|id| processors::is_blocked(**id));
            load.blocked = blocked.count();
            load.idle_processors = processors::idle();
            state = poison::lock(&self.state);
        }
        if is_waiting {
            // They may wait behind a slow call of a polling thread.
            state.wake_one();
        }
        let begun = now.saturating_duration_since(start);
        match state.is_stopping {
            true => None,
            false => state.start_worker(begun, load),
        }
    }

    /// Sends replies and resumes connections that wait for the end of a call, which may be slow.
    ///
    /// Invariant: the export stays pending while replies wait. So the batch is taken under the lock under which the export
    /// ceases to be pending: a reply that comes during the sends makes it pending again.
    fn release_waiting(&self, now: Instant) {
        let mut state = poison::lock(&self.state);
        let unsent = std::mem::take(&mut state.unsent);
        let is_stuck = state.is_stalled(now) || state.queue.all().calls == 0;
        let resumed = match is_stuck {
            true => state.waiting.take(),
            false => Vec::new(),
        };
        let is_idle = state.queue.queued() == 0 && !state.is_sweep_due;
        if is_idle && state.waiting.is_empty() {
            self.is_pending.store(false, Ordering::Release);
        }
        drop(state);
        unsent.send();
        resumed.iter().for_each(|connection| connection.resume());
    }

    /// The system has no thread for a worker.
    pub(crate) fn record_failed_start(&self, slot: usize) {
        let mut state = poison::lock(&self.state);
        state.sizing.record_failed_start();
        if let Some(slot) = state.slots.get_mut(slot) {
            *slot = WorkerSlot::default();
        }
    }
}

impl WorkersState {
    /// The load, without the state of processors.
    fn load(&self, now: Instant) -> Load {
        let received = self.queue.fronts().map(|call| call.received).min();
        let wait = received.map(|received| now.saturating_duration_since(received));
        let sweep = self.is_sweep_due.then_some(Duration::ZERO);
        Load {
            oldest_wait: wait.or(sweep),
            running: self.slots.iter().filter(|slot| slot.is_in_call).count(),
            blocked: 0,
            idle_processors: 0,
        }
    }

    pub(super) fn threads_in_calls(&self) -> impl Iterator<Item = u32> {
        let slots = self.slots.iter().filter(|slot| slot.is_in_call);
        slots.map(|slot| slot.thread)
    }

    fn start_worker(&mut self, now: Duration, load: Load) -> Option<(usize, SizingReason)> {
        let free = self.slots.iter().position(|slot| !slot.is_used)?;
        let reason = self.sizing.grow(now, load)?;
        if let Some(slot) = self.slots.get_mut(free) {
            slot.is_used = true;
        }
        Some((free, reason))
    }
}

#[cfg(test)]
mod tests {
    use super::super::unsent_replies::SendTime;
    use super::super::{ExportWorkers, Shares, Work};
    use super::*;
    use crate::testing::connected;
    use std::sync::Arc;

    #[test]
    fn sweep_that_waits_for_its_volume_takes_one_worker() {
        let workers = ExportWorkers::new(None, Shares::of(1, 4), 4);
        let take = |slot| workers.take_work(&mut poison::lock(&workers.state), slot);
        assert!(workers.request_sweep());
        assert!(matches!(take(0), Some(Work::SweepPins)));
        for _ in 0..3 {
            assert!(!workers.request_sweep());
            assert!(take(1).is_none());
        }
        workers.end_sweep();
        workers.leave_call(0);
        assert!(workers.request_sweep());
        assert!(matches!(take(1), Some(Work::SweepPins)));
    }

    /// A short call ends while the supervisor sends the reply to an earlier one, and the call behind it is slow.
    #[test]
    fn reply_during_the_sends_of_others_keeps_the_export_pending() {
        let workers = ExportWorkers::new(None, Shares::of(1, 4), 4);
        let (first, second) = (connected(), connected());
        let reply_to = |of: &Arc<_>| workers.send_reply(SendTime::Later, Some(Arc::clone(of)));
        assert!(reply_to(&first.connection));
        std::thread::scope(|scope| {
            first.connection.while_locked(|| {
                scope.spawn(|| workers.supervise(Instant::now()));
                // It has taken the first reply, and waits for the connection.
                while !poison::lock(&workers.state).unsent.is_empty() {
                    std::thread::yield_now();
                }
                assert!(reply_to(&second.connection));
            });
        });
        assert!(workers.is_pending(), "the second reply waits");
        workers.supervise(Instant::now());
        assert!(!workers.is_pending());
        assert!(poison::lock(&workers.state).unsent.is_empty());
    }
}
