//! The supervisor: a thread that starts workers while calls wait, lets workers drop unused pins, and
//! ends connections that are beyond a deadline.
//!
//! While calls wait for workers it looks at their exports each millisecond, and then less and less
//! often while nothing changes. Else it sleeps until the next search for pins and deadlines, of all
//! connections at once.

use crate::dispatcher::Dispatcher;
use crate::limits::{Limits, PIN_SWEEP_PAUSE, QUEUE_WAIT_LIMIT};
use crate::workers::sizing::SizingReason;
use pagemesh_base::poison;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// The longest pause while calls wait.
const PAUSE_MAX: Duration = Duration::from_millis(32);

/// Wakes the supervisor.
#[derive(Default)]
pub(crate) struct Nudge {
    /// The supervisor looks at the exports soon anyway.
    is_soon: AtomicBool,
    state: Mutex<NudgeState>,
    changed: Condvar,
}

#[derive(Default)]
struct NudgeState {
    is_nudged: bool,
    is_stopping: bool,
}

impl Nudge {
    /// A call waits, and no worker is free.
    pub(crate) fn send(&self) {
        if !self.is_soon.swap(true, Ordering::AcqRel) {
            poison::lock(&self.state).is_nudged = true;
            self.changed.notify_all();
        }
    }

    pub(crate) fn stop(&self) {
        poison::lock(&self.state).is_stopping = true;
        self.changed.notify_all();
    }

    /// Waits for a nudge. A nudge since the last wait shortens this one, and does not end it: a loaded
    /// server nudges all the time. None: the server stops.
    fn wait(&self, pause: Duration) -> Option<bool> {
        let mut state = poison::lock(&self.state);
        let was_nudged = std::mem::take(&mut state.is_nudged);
        let pause = match was_nudged {
            true => pause.min(QUEUE_WAIT_LIMIT),
            false => pause,
        };
        self.is_soon
            .store(pause <= QUEUE_WAIT_LIMIT, Ordering::Release);
        let until = Instant::now() + pause;
        while !state.is_stopping && !state.is_nudged {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = poison::recover(self.changed.wait_timeout(state, left)).0;
        }
        let is_nudged = std::mem::take(&mut state.is_nudged);
        // Calls that come from now on are not seen for sure, so they nudge.
        self.is_soon.store(false, Ordering::Release);
        (!state.is_stopping).then_some(is_nudged || was_nudged)
    }
}

/// Starts a worker of an export in a slot. False: the system has no thread.
pub(crate) type StartWorker<'a> = &'a dyn Fn(usize, usize) -> bool;

/// See the module.
pub(crate) struct Supervisor<'a> {
    pub(crate) dispatcher: &'a Dispatcher,
    pub(crate) start_worker: StartWorker<'a>,
    /// Joins threads that have ended.
    pub(crate) tidy: &'a dyn Fn(),
}

impl Supervisor<'_> {
    /// Supervises until [`Nudge::stop`].
    pub(crate) fn run(&self) {
        let started = Instant::now();
        let sweep_pause = sweep_pause(&self.dispatcher.connections.limits);
        let (mut sweep_at, mut pins_at) = (started + sweep_pause, started + PIN_SWEEP_PAUSE);
        let mut pause = sweep_pause;
        while let Some(is_nudged) = self.dispatcher.nudge.wait(pause) {
            let now = Instant::now();
            if now >= sweep_at {
                self.dispatcher.connections.check_deadlines(now);
                (self.tidy)();
                sweep_at = now + sweep_pause;
            }
            if now >= pins_at {
                self.dispatcher.service.nfs4.tick();
                self.sweep_pins(now);
                pins_at = now + PIN_SWEEP_PAUSE;
            }
            let (is_pending, has_grown) = self.supervise(started);
            let next_sweep = sweep_at.min(pins_at).saturating_duration_since(now);
            pause = match (is_pending, has_grown || is_nudged) {
                (false, _) => next_sweep,
                (true, true) => QUEUE_WAIT_LIMIT,
                (true, false) => (pause * 2).clamp(QUEUE_WAIT_LIMIT, PAUSE_MAX),
            };
            pause = pause.min(next_sweep);
        }
    }

    /// Returns whether calls wait, and whether a worker was started.
    fn supervise(&self, started: Instant) -> (bool, bool) {
        let (mut is_pending, mut has_grown) = (false, false);
        for (number, workers) in self.dispatcher.exports() {
            if !workers.is_pending() {
                continue;
            }
            is_pending = true;
            let Some((slot, reason)) = workers.supervise(started) else {
                continue;
            };
            has_grown = true;
            let export = workers.name.as_deref().unwrap_or_default();
            if reason != SizingReason::FirstCall {
                tracing::debug!(export, reason = reason.name(), "an NFS worker starts");
            }
            if !(self.start_worker)(number, slot) {
                workers.record_failed_start(slot);
            }
        }
        (is_pending, has_grown)
    }

    /// Lets workers drop unused pins, and write records of stable lists: both may wait for the volume.
    fn sweep_pins(&self, now: Instant) {
        let file_systems = self.dispatcher.service.exports.file_systems();
        let nfs4 = &self.dispatcher.service.nfs4;
        for (number, (fs, (_, workers))) in file_systems.zip(self.dispatcher.exports()).enumerate()
        {
            let is_due =
                fs.pins.has_idle(now) || fs.has_unused_pins() || nfs4.has_unwritten_records(number);
            if is_due && workers.request_sweep() {
                self.dispatcher.nudge.send();
            }
        }
    }
}

/// Deadlines may be exceeded by this pause.
fn sweep_pause(limits: &Limits) -> Duration {
    let shortest = limits.idle.min(limits.record).min(limits.reply);
    limits.sweep.min(shortest).max(QUEUE_WAIT_LIMIT)
}
