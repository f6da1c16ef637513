//! The number of workers of one export: a pure state machine.
//!
//! It grows by one worker at a time, while a call has waited longer than a limit and another worker
//! would help: a processor is idle, or each worker is blocked. It shrinks by workers without work.
//! A worker that waits for the volume costs no processor, so growth does not depend on the load of
//! other programs once all workers are blocked.
//!
//! For measurements, the number can be fixed: workers start as soon as a call waits, and never end.
//!
//! Invariant: 0 ≤ workers ≤ the share of the export.

use crate::limits::{QUEUE_WAIT_LIMIT, WORKER_IDLE_LIMIT};
use std::time::Duration;

/// The reason for a change of the number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizingReason {
    /// A call came to an export without workers.
    FirstCall,
    /// A call waited, and a processor was idle.
    ProcessorIdle,
    /// A call waited, and each worker waited for the volume.
    AllBlocked,
    /// A worker had no work for a long time.
    NoWork,
}

impl SizingReason {
    /// All reasons.
    pub const ALL: [Self; 4] = [
        Self::FirstCall,
        Self::ProcessorIdle,
        Self::AllBlocked,
        Self::NoWork,
    ];

    /// The reason as a word of a label or log.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FirstCall => "first-call",
            Self::ProcessorIdle => "processor-idle",
            Self::AllBlocked => "all-blocked",
            Self::NoWork => "no-work",
        }
    }
}

/// The present load of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    /// The wait of the oldest queued call.
    pub(crate) oldest_wait: Option<Duration>,
    /// Workers in a call.
    pub(crate) running: usize,
    /// Those among them that wait for the volume or a lock.
    pub(crate) blocked: usize,
    /// Processors without work.
    pub(crate) idle_processors: usize,
}

/// See the module. Times are since the start of the server.
#[derive(Clone, Debug)]
pub(crate) struct Sizing {
    workers_max: usize,
    is_fixed: bool,
    workers: usize,
    most: usize,
    last_start: Option<Duration>,
    last_change: Option<SizingReason>,
}

impl Sizing {
    pub(crate) fn new(workers_max: usize) -> Self {
        Self {
            workers_max,
            is_fixed: false,
            workers: 0,
            most: 0,
            last_start: None,
            last_change: None,
        }
    }

    /// A fixed number of workers.
    pub(crate) fn fixed(workers: usize) -> Self {
        Self {
            is_fixed: true,
            ..Self::new(workers)
        }
    }

    pub(crate) fn workers(&self) -> usize {
        self.workers
    }

    /// The most workers so far.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    pub(crate) fn last_change(&self) -> Option<SizingReason> {
        self.last_change
    }

    /// Whether a worker must be started now. It counts as started.
    pub(crate) fn grow(&mut self, now: Duration, load: Load) -> Option<SizingReason> {
        let wait = load.oldest_wait?;
        if self.workers >= self.workers_max {
            return None;
        }
        let reason = if self.workers == 0 || self.is_fixed {
            SizingReason::FirstCall
        } else {
            let is_early = self
                .last_start
                .is_some_and(|start| now.saturating_sub(start) < QUEUE_WAIT_LIMIT);
            // A worker without a call takes the oldest one soon.
            if wait < QUEUE_WAIT_LIMIT || is_early || load.running < self.workers {
                return None;
            }
            match (load.idle_processors, load.blocked >= self.workers) {
                (_, true) => SizingReason::AllBlocked,
                (0, false) => return None,
                (_, false) => SizingReason::ProcessorIdle,
            }
        };
        self.workers += 1;
        self.most = self.most.max(self.workers);
        self.last_start = Some(now);
        self.last_change = Some(reason);
        Some(reason)
    }

    /// The system had no thread for the worker that was counted last.
    pub(crate) fn record_failed_start(&mut self) {
        self.workers = self.workers.saturating_sub(1);
    }

    /// Whether a worker that has been without a call for this time ends. It counts as ended.
    pub(crate) fn shrink(&mut self, idle: Duration) -> bool {
        let is_over = idle >= WORKER_IDLE_LIMIT && self.workers > 0 && !self.is_fixed;
        if is_over {
            self.workers -= 1;
            self.last_change = Some(SizingReason::NoWork);
        }
        is_over
    }

    /// A worker ended for another reason: the server stops, or a call panicked.
    pub(crate) fn record_end(&mut self) {
        self.workers = self.workers.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAX: usize = 5;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    fn waiting(wait: u64, workers: usize) -> Load {
        Load {
            oldest_wait: Some(ms(wait)),
            running: workers,
            blocked: workers,
            idle_processors: 0,
        }
    }

    /// A machine with this many workers at time 0.
    fn with_workers(count: usize) -> Sizing {
        let mut sizing = Sizing::new(MAX);
        for number in 0..count {
            let now = ms(number as u64 * 10);
            assert!(sizing.grow(now, waiting(10, number)).is_some());
        }
        sizing
    }

    #[test]
    fn first_call_starts_a_worker_at_once() {
        let mut sizing = Sizing::new(MAX);
        let load = waiting(0, 0);
        assert_eq!(sizing.grow(ms(0), load), Some(SizingReason::FirstCall));
        assert_eq!(sizing.grow(ms(9), Load::default()), None);
        assert_eq!((sizing.workers(), sizing.most()), (1, 1));
    }

    #[test]
    fn short_wait_starts_no_worker() {
        let mut sizing = with_workers(1);
        assert_eq!(sizing.grow(ms(100), waiting(0, 1)), None);
        let reason = sizing.grow(ms(100), waiting(1, 1));
        assert_eq!(reason, Some(SizingReason::AllBlocked));
    }

    #[test]
    fn busy_processors_stop_growth_of_running_workers() {
        let mut sizing = with_workers(2);
        let mut load = waiting(50, 2);
        load.blocked = 1;
        assert_eq!(sizing.grow(ms(100), load), None);
        load.idle_processors = 1;
        let reason = sizing.grow(ms(100), load);
        assert_eq!(reason, Some(SizingReason::ProcessorIdle));
    }

    #[test]
    fn idle_worker_stops_growth() {
        let mut sizing = with_workers(2);
        let mut load = waiting(50, 1);
        load.idle_processors = 8;
        assert_eq!(sizing.grow(ms(100), load), None);
    }

    #[test]
    fn worker_ends_only_after_the_idle_limit() {
        let mut sizing = with_workers(2);
        assert!(!sizing.shrink(WORKER_IDLE_LIMIT - ms(1)));
        assert!(sizing.shrink(WORKER_IDLE_LIMIT));
        assert!(sizing.shrink(WORKER_IDLE_LIMIT));
        assert!(!sizing.shrink(WORKER_IDLE_LIMIT), "no worker is left");
        assert_eq!((sizing.workers(), sizing.most()), (0, 2));
        assert_eq!(sizing.last_change(), Some(SizingReason::NoWork));
    }

    #[test]
    fn fixed_workers_start_at_once_and_stay() {
        let mut sizing = Sizing::fixed(3);
        assert_eq!(sizing.grow(ms(0), Load::default()), None, "no call waits");
        let load = waiting(0, 0);
        (0..3).for_each(|_| assert!(sizing.grow(ms(0), load).is_some()));
        assert_eq!(sizing.grow(ms(100), waiting(100, 3)), None);
        assert!(!sizing.shrink(10 * WORKER_IDLE_LIMIT));
        assert_eq!(sizing.workers(), 3);
    }

    proptest! {
        #[test]
        fn blocked_workers_let_the_export_grow_to_its_share(
            idle_processors in 0usize..4, pause in 1u64..5,
        ) {
            let mut sizing = Sizing::new(MAX);
            for step in 0..MAX as u64 {
                let mut load = waiting(1 + step, sizing.workers());
                load.idle_processors = idle_processors;
                prop_assert!(sizing.grow(ms(step * pause), load).is_some());
            }
            prop_assert_eq!(sizing.workers(), MAX);
            prop_assert_eq!(sizing.grow(ms(1000), waiting(1000, MAX)), None);
        }

        #[test]
        fn workers_follow_the_rules_for_any_load(
            steps in prop::collection::vec(
                (0u64..3, prop::option::of(0u64..4), 0usize..8, 0usize..8, 0usize..3, any::<bool>()),
                0..200),
        ) {
            let mut sizing = Sizing::new(MAX);
            let mut now = ms(0);
            let mut last_start = None;
            for (pause, wait, running, blocked, idle_processors, ends) in steps {
                now += ms(pause);
                let before = sizing.workers();
                let running = running.min(before);
                let load = Load {
                    oldest_wait: wait.map(ms),
                    running,
                    blocked: blocked.min(running),
                    idle_processors,
                };
                if ends && running < before {
                    prop_assert!(sizing.shrink(WORKER_IDLE_LIMIT));
                    prop_assert_eq!(sizing.workers(), before - 1);
                    continue;
                }
                match sizing.grow(now, load) {
                    None => prop_assert_eq!(sizing.workers(), before),
                    Some(reason) => {
                        prop_assert_eq!(sizing.workers(), before + 1);
                        prop_assert!(load.oldest_wait.is_some(), "no call waits");
                        prop_assert_eq!(running, before, "a worker is idle");
                        if reason != SizingReason::FirstCall {
                            prop_assert!(load.oldest_wait >= Some(QUEUE_WAIT_LIMIT));
                            prop_assert!(idle_processors > 0 || load.blocked == before);
                            let since = last_start.map(|start| now.saturating_sub(start));
                            prop_assert!(since >= Some(QUEUE_WAIT_LIMIT), "too early");
                        }
                        last_start = Some(now);
                    }
                }
                prop_assert!(sizing.workers() <= MAX);
                prop_assert!(sizing.most() >= sizing.workers());
            }
        }
    }
}
