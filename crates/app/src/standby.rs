//! A process that waits to take a volume over.
//!
//! The wait has no end but the shutdown: a manager that does not answer delays a takeover, and its return must not find the standby
//! gone. The silence is logged and is a metric.

use crate::service;
use pagemesh_base::poison;
use std::fmt::Display;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The time between two log lines about a manager that does not answer.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The state of a standby, for its wait, its log and its metrics.
#[derive(Debug, Default)]
pub struct StandbyState(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_waiting: bool,
    /// The first query without an answer since the last answer.
    silent_since: Option<Instant>,
    logged_at: Option<Instant>,
    /// The process of the holder that the next attach replaces.
    candidate: Option<String>,
    /// The process from which a file system was taken.
    replaced: Option<String>,
}

/// The figures of a standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandbyFigures {
    /// Whether it waits.
    pub is_waiting: bool,
    /// The time for which the manager has not answered; zero if it answers.
    pub manager_silence: Duration,
}

impl StandbyState {
    /// The wait begins, or has ended.
    pub fn set_waiting(&self, is_waiting: bool) {
        poison::lock(&self.0).is_waiting = is_waiting;
    }

    /// An attach begins that ends the attachment of this process, if it is known.
    pub fn begin_takeover(&self, process: Option<&str>) {
        poison::lock(&self.0).candidate = process.map(str::to_owned);
    }

    /// The attach is done.
    pub fn end_takeover(&self) {
        let mut state = poison::lock(&self.0);
        if let Some(process) = state.candidate.take() {
            state.replaced = Some(process);
        }
    }

    /// Whether a file system was taken from the process. The others follow, also if it gives signs of life again: no process serves the first
    /// one until this one has all.
    pub fn has_replaced(&self, process: Option<&str>) -> bool {
        process.is_some() && poison::lock(&self.0).replaced.as_deref() == process
    }

    /// The manager has answered a query.
    pub fn record_answer(&self) {
        let since = poison::lock(&self.0).silent_since.take();
        if let Some(since) = since {
            let seconds = since.elapsed().as_secs();
            tracing::info!(seconds, "the manager answers the standby again");
            service::notify_status("standby: the manager answers again");
        }
    }

    /// The manager has not answered a query.
    pub fn record_no_answer(&self, cause: &dyn Display) {
        if let Some(silence) = self.note_no_answer(Instant::now()) {
            let seconds = silence.as_secs();
            tracing::warn!(
                seconds,
                %cause,
                "the manager does not answer; the standby waits for it, and takes nothing over meanwhile"
            );
            service::notify_status("standby: the manager does not answer");
        }
    }

    /// Returns the time of the silence if it is to be logged now.
    fn note_no_answer(&self, now: Instant) -> Option<Duration> {
        let mut state = poison::lock(&self.0);
        let is_new = state.silent_since.is_none();
        let since = *state.silent_since.get_or_insert(now);
        let is_due = |logged: Instant| now.saturating_duration_since(logged) >= LOG_INTERVAL;
        if !is_new && !state.logged_at.is_none_or(is_due) {
            return None;
        }
        state.logged_at = Some(now);
        Some(now.saturating_duration_since(since))
    }

    pub fn figures(&self, now: Instant) -> StandbyFigures {
        let state = poison::lock(&self.0);
        let silence = state.silent_since.filter(|_| state.is_waiting);
        StandbyFigures {
            is_waiting: state.is_waiting,
            manager_silence: silence
                .map_or(Duration::ZERO, |since| now.saturating_duration_since(since)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_of_a_done_takeover_is_replaced() {
        let standby = StandbyState::default();
        standby.begin_takeover(None);
        standby.end_takeover();
        assert!(!standby.has_replaced(None));
        standby.begin_takeover(Some("first"));
        assert!(!standby.has_replaced(Some("first")));
        standby.end_takeover();
        assert!(standby.has_replaced(Some("first")));
        assert!(!standby.has_replaced(Some("second")) && !standby.has_replaced(None));
    }

    #[test]
    fn silence_of_the_manager_is_logged_once_a_minute() {
        let state = StandbyState::default();
        state.set_waiting(true);
        let start = Instant::now();
        let seconds = (0..=150).map(|second| start + Duration::from_secs(second));
        let logged = seconds.filter_map(|now| state.note_no_answer(now));
        let logged: Vec<u64> = logged.map(|silence| silence.as_secs()).collect();
        assert_eq!(logged, [0, 60, 120]);
        let now = start + Duration::from_secs(150);
        let silence = state.figures(now).manager_silence;
        assert_eq!(silence, Duration::from_secs(150));
        state.record_answer();
        assert_eq!(state.figures(now).manager_silence, Duration::ZERO);
        assert_eq!(state.note_no_answer(now), Some(Duration::ZERO));
    }
}
