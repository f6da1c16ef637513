//! The schedule of scrubs, and the state of the present pass.

use crate::limits::{SCRUB_BYTES_PER_S, SCRUB_DELAY};
use crate::status::{CheckReport, ScrubPass, ScrubState, ScrubStatus};
use std::time::Duration;

/// The schedule of scrubs, and their rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubPlan {
    /// The interval between the starts of two passes; none: only on request.
    pub every: Option<Duration>,
    /// Bytes of the volume per second, each read on all copies. The rate is a quarter of it
    /// while there are writes.
    pub bytes_per_s: u64,
}

/// An order to the controller about scrubs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubOrder {
    Plan(ScrubPlan),
    /// Start a pass now, or resume the one that was stopped.
    Start,
    /// Stop the pass where it is.
    Stop,
}

/// The position of a pass. Bytes are numbered through all columns.
pub(super) struct ScrubProgress {
    pub columns: usize,
    pub start: u64,
    pub total: u64,
    pub done: u64,
    pub begun: Duration,
    pub report: CheckReport,
    pub skipped: u64,
}

/// The state of scrubs since the attach.
#[derive(Default)]
pub(super) struct Scrubber {
    pub plan: Option<ScrubPlan>,
    pub next_at: Option<Duration>,
    pub is_stopped: bool,
    pub pass: Option<ScrubProgress>,
    pub passes: u64,
    /// The last completed pass, and its end.
    pub last: Option<(ScrubPass, Duration)>,
    /// Whether a task runs a pass or waits for the next one.
    pub has_task: bool,
}

impl Scrubber {
    pub(super) fn apply_order(&mut self, order: ScrubOrder, now: Duration) {
        match order {
            ScrubOrder::Plan(plan) => {
                self.plan = Some(plan);
                self.next_at = plan.every.map(|every| now + every.min(SCRUB_DELAY));
            }
            ScrubOrder::Start => {
                self.is_stopped = false;
                if self.pass.is_none() {
                    self.next_at = Some(now);
                }
            }
            ScrubOrder::Stop => self.is_stopped = self.pass.is_some(),
        }
    }

    pub(super) fn every(&self) -> Option<Duration> {
        self.plan.and_then(|plan| plan.every)
    }

    pub(super) fn bytes_per_s(&self) -> u64 {
        let plan = self.plan.map(|plan| plan.bytes_per_s);
        plan.unwrap_or(SCRUB_BYTES_PER_S).max(1)
    }

    pub(super) fn status(&self, now: Duration) -> ScrubStatus {
        let told = |pass: &ScrubProgress| ScrubPass {
            bytes_todo: pass.total,
            bytes_done: pass.done,
            bytes_skipped: pass.skipped,
            elapsed_ms: now.saturating_sub(pass.begun).as_millis() as u64,
            ended_ms_ago: 0,
            found: pass.report.clone(),
        };
        ScrubStatus {
            state: match (&self.pass, self.is_stopped, self.next_at) {
                (Some(_), true, _) => ScrubState::Stopped,
                (Some(_), false, _) => ScrubState::Running,
                (None, _, Some(_)) => ScrubState::Waiting,
                (None, _, None) => ScrubState::Off,
            },
            passes: self.passes,
            next_in_ms: self.next_at.filter(|_| self.pass.is_none()).map(|at| {
                // Milliseconds of the controller's clock fit.
                at.saturating_sub(now).as_millis() as u64
            }),
            pass: self.pass.as_ref().map(told),
            last: self.last.as_ref().map(|(pass, ended)| ScrubPass {
                ended_ms_ago: now.saturating_sub(*ended).as_millis() as u64,
                ..pass.clone()
            }),
        }
    }
}
