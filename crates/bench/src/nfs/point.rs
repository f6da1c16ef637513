//! The figures of one measurement at one offered rate, and the rule that makes a point void.

use super::mix::{OPERATIONS, Operation};
use crate::stats::{Latencies, LatencySummary};
use pagemesh_nfs_client::nfs3::Status;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// A point below this share of the offered rate is void.
pub const ACHIEVED_MIN: f64 = 0.99;
/// A point is void if 1 % of the calls were handed to the socket later than this: a fiftieth of 6 ms would be too strict
/// for a machine on which server and generator share processors.
pub const LATENESS_MAX: Duration = Duration::from_millis(1);

/// The reason that a point is void.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VoidReason {
    /// The schedule had no calls.
    Empty,
    /// The server answered too few calls: this share of the offered rate.
    Behind(f64),
    /// The generator was late: 99 % of its delays in µs.
    GeneratorLate(f64),
}

impl fmt::Display for VoidReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VoidReason::Empty => f.write_str("void: no calls"),
            VoidReason::Behind(share) => write!(f, "void: {:.1} % achieved", share * 100.0),
            VoidReason::GeneratorLate(p99_us) => {
                write!(f, "void: generator late, p99 {p99_us:.0} µs")
            }
        }
    }
}

/// Calls that the server refused, with an unexpected status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedCalls {
    /// The operation.
    pub operation: String,
    /// The status, or `refused`.
    pub status: String,
    /// How often.
    pub count: u64,
}

/// The latencies of one operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperationFigures {
    /// The operation.
    pub operation: String,
    /// Its latencies, from the time at which each call was due.
    pub latencies: LatencySummary,
}

/// The figures of a point.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PointFigures {
    /// The rate that was asked for, in calls per second.
    pub rate_per_s: f64,
    /// Calls of the schedule in the measured time, per second.
    pub offered_per_s: f64,
    /// Expected answers that arrived in the measured time, per second. Some are to calls before it, as some calls of it are
    /// answered after it.
    pub achieved_per_s: f64,
    /// Calls of the schedule in the measured time.
    pub scheduled: u64,
    /// Calls that were answered as expected.
    pub answered: u64,
    /// Calls without an answer in the time limit, and calls that could not even be sent.
    pub timeouts: u64,
    /// Other answers.
    pub failed: Vec<FailedCalls>,
    /// Latencies of all calls, from the time at which each call was due; calls without an answer count with the time that they
    /// waited.
    pub latencies: LatencySummary,
    /// The same for each operation that occurred.
    pub operations: Vec<OperationFigures>,
    /// The delays of the generator itself.
    pub lateness: LatencySummary,
    /// Processor time of the generator without its polls, in % of one processor.
    pub generator_cpu_percent: f64,
    /// Processor time of polls before due calls that found no answer, in % of one processor.
    pub generator_polling_percent: f64,
    /// The scheduling of the generator's thread.
    pub generator_scheduling: String,
    /// Processor time of the server, in % of one processor.
    pub server_cpu_percent: Option<f64>,
    /// Files of the set.
    pub files: u64,
    /// Bytes of records to the server.
    pub sent_bytes: u64,
    /// Bytes of records from the server.
    pub received_bytes: u64,
    /// The reason if the point is void.
    pub void: Option<VoidReason>,
}

impl PointFigures {
    /// The mean latency in ms.
    #[must_use]
    pub fn mean_ms(&self) -> f64 {
        self.latencies.mean_ns / 1e6
    }

    /// Whether the generator itself was late.
    #[must_use]
    pub fn is_generator_late(&self) -> bool {
        matches!(self.void, Some(VoidReason::GeneratorLate(_)))
    }

    /// The number of answers that were not expected.
    #[must_use]
    pub fn failed_count(&self) -> u64 {
        self.failed.iter().map(|it| it.count).sum()
    }
}

/// Whether a point counts. `achieved` is a share of the offered rate.
#[must_use]
pub fn void_reason(scheduled: u64, achieved: f64, lateness_p99: Duration) -> Option<VoidReason> {
    if scheduled == 0 {
        Some(VoidReason::Empty)
    } else if lateness_p99 > LATENESS_MAX {
        Some(VoidReason::GeneratorLate(lateness_p99.as_secs_f64() * 1e6))
    } else if achieved < ACHIEVED_MIN {
        Some(VoidReason::Behind(achieved))
    } else {
        None
    }
}

/// Counts the calls of a point. Times are nanoseconds since the start of the schedule.
pub(crate) struct PointRecorder {
    /// The measured part of the schedule.
    from_ns: u64,
    until_ns: u64,
    by_operation: Vec<Latencies>,
    lateness: Latencies,
    scheduled: u64,
    answered: u64,
    /// Answers that arrived in the measured time.
    arrived: u64,
    timeouts: u64,
    failed: BTreeMap<(usize, Option<u32>), u64>,
}

impl PointRecorder {
    pub(crate) fn new(warmup: Duration, runtime: Duration) -> PointRecorder {
        let from_ns = warmup.as_nanos() as u64;
        PointRecorder {
            from_ns,
            until_ns: from_ns + runtime.as_nanos() as u64,
            by_operation: vec![Latencies::new(); OPERATIONS],
            lateness: Latencies::new(),
            scheduled: 0,
            answered: 0,
            arrived: 0,
            timeouts: 0,
            failed: BTreeMap::new(),
        }
    }

    fn is_measured(&self, time_ns: u64) -> bool {
        (self.from_ns..self.until_ns).contains(&time_ns)
    }

    /// A call is due. Each due call ends with one of the other functions.
    pub(crate) fn due(&mut self, due_ns: u64) {
        self.scheduled += u64::from(self.is_measured(due_ns));
    }

    /// The generator hands a call to its socket. It has not waited for the server before.
    pub(crate) fn sent(&mut self, due_ns: u64, now_ns: u64) {
        if self.is_measured(due_ns) {
            self.lateness.record_ns(now_ns.saturating_sub(due_ns));
        }
    }

    /// An answer with the expected status.
    pub(crate) fn answered(&mut self, operation: Operation, due_ns: u64, now_ns: u64) {
        self.arrived += u64::from(self.is_measured(now_ns));
        if self.is_measured(due_ns) {
            self.answered += 1;
            let latencies = &mut self.by_operation[operation.index()];
            latencies.record_ns(now_ns.saturating_sub(due_ns));
        }
    }

    /// An answer with another status.
    pub(crate) fn failed(&mut self, operation: Operation, due_ns: u64, status: Option<u32>) {
        if self.is_measured(due_ns) {
            *self.failed.entry((operation.index(), status)).or_default() += 1;
        }
    }

    /// No answer in time. The wait counts as a latency, or else the worst calls would vanish.
    pub(crate) fn timed_out(&mut self, operation: Operation, due_ns: u64, now_ns: u64) {
        if self.is_measured(due_ns) {
            self.timeouts += 1;
            let latencies = &mut self.by_operation[operation.index()];
            latencies.record_ns(now_ns.saturating_sub(due_ns));
        }
    }

    pub(crate) fn figures(self, rate_per_s: f64) -> PointFigures {
        let runtime_ns = (self.until_ns - self.from_ns) as f64;
        let mut all = Latencies::new();
        self.by_operation.iter().for_each(|it| all.merge(it));
        let offered_per_s = self.scheduled as f64 * 1e9 / runtime_ns;
        let achieved_per_s = self.arrived as f64 * 1e9 / runtime_ns;
        let lateness = self.lateness.summary();
        let named = Operation::ALL.iter().zip(&self.by_operation);
        PointFigures {
            rate_per_s,
            offered_per_s,
            achieved_per_s,
            scheduled: self.scheduled,
            answered: self.answered,
            timeouts: self.timeouts,
            failed: self.failed.into_iter().map(failed_calls).collect(),
            latencies: all.summary(),
            operations: named
                .filter(|(_, latencies)| latencies.count() > 0)
                .map(|(operation, latencies)| OperationFigures {
                    operation: operation.name().to_owned(),
                    latencies: latencies.summary(),
                })
                .collect(),
            lateness,
            void: void_reason(
                self.scheduled,
                achieved_per_s / offered_per_s,
                Duration::from_nanos(lateness.p99_ns),
            ),
            ..PointFigures::default()
        }
    }
}

fn failed_calls(((operation, status), count): ((usize, Option<u32>), u64)) -> FailedCalls {
    let known = |number: u32| Status::ALL.iter().find(|it| it.number() == number);
    FailedCalls {
        operation: Operation::ALL[operation].name().to_owned(),
        status: match status {
            None => "refused".to_owned(),
            Some(number) => match known(number) {
                Some(status) => status.name().to_owned(),
                None => number.to_string(),
            },
        },
        count,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn recorder() -> PointRecorder {
        PointRecorder::new(Duration::from_millis(100), Duration::from_secs(1))
    }

    /// A fixed load of 1000 calls in a second after the warm-up. Each is answered after `wait_ns`.
    fn figures(wait_ns: impl Fn(u64) -> Option<u64>) -> PointFigures {
        let mut recorder = recorder();
        for due in (0..1200).map(|n| n * MS) {
            recorder.due(due);
            recorder.sent(due, due + 1000);
            match wait_ns(due) {
                Some(wait) => recorder.answered(Operation::Read, due, due + wait),
                None => recorder.timed_out(Operation::Read, due, due + 5000 * MS),
            }
        }
        recorder.figures(1000.0)
    }

    #[test]
    fn only_the_measured_time_counts() {
        let found = figures(|_| Some(MS));
        assert_eq!((found.scheduled, found.answered), (1000, 1000));
        assert_eq!(found.void, None);
        assert!((found.achieved_per_s - 1000.0).abs() < 2.0);
        assert!((found.mean_ms() - 1.0).abs() < 0.01);
        assert_eq!(found.operations.len(), 1);
    }

    #[test]
    fn stall_shows_in_mean_and_percentiles() {
        // The server answers nothing from 500 ms to 800 ms.
        let stalled = |due: u64| (500 * MS..800 * MS).contains(&due);
        let found = figures(|due| {
            let wait = if stalled(due) { 800 * MS - due } else { MS };
            Some(wait)
        });
        assert!(found.latencies.p99_ns > 280 * MS, "{found:?}");
        assert!(found.latencies.p90_ns > 190 * MS, "{found:?}");
        assert!(found.mean_ms() > 40.0, "{found:?}");
        assert_eq!(found.void, None);
    }

    #[test]
    fn timeouts_count_and_lengthen_the_tail() {
        let found = figures(|due| (due % (500 * MS) != 0).then_some(MS));
        assert_eq!(found.timeouts, 2);
        assert!(found.latencies.max_ns >= 4990 * MS, "{found:?}");
        let found = figures(|due| (due % (10 * MS) != 0).then_some(MS));
        assert!(matches!(found.void, Some(VoidReason::Behind(_))));
    }

    #[test]
    fn growing_backlog_makes_a_point_void() {
        // Each call takes 2 ms, one after the other.
        let found = figures(|due| Some(due + 2 * MS));
        assert!(matches!(found.void, Some(VoidReason::Behind(share)) if share < 0.6));
    }

    #[test]
    fn late_last_answer_makes_no_point_void() {
        let found = figures(|due| {
            let wait = if due > 1090 * MS { 30 * MS } else { MS };
            Some(wait)
        });
        assert_eq!(found.void, None, "{found:?}");
    }

    #[test]
    fn void_rule_has_its_limits() {
        let us = Duration::from_micros;
        assert_eq!(void_reason(1, 0.99, us(1000)), None);
        assert_eq!(void_reason(0, 1.0, us(0)), Some(VoidReason::Empty));
        let behind = void_reason(1, 0.9899, us(0));
        assert_eq!(behind, Some(VoidReason::Behind(0.9899)));
        let late = void_reason(1, 1.0, us(2000));
        assert_eq!(late, Some(VoidReason::GeneratorLate(2000.0)));
    }

    #[test]
    fn unexpected_answers_are_listed_by_status() {
        let mut recorder = recorder();
        for due in [150 * MS, 160 * MS] {
            recorder.due(due);
            recorder.failed(Operation::Write, due, Some(28));
        }
        recorder.failed(Operation::Read, 170 * MS, None);
        let found = recorder.figures(2.0);
        assert_eq!(found.failed_count(), 3);
        let named: Vec<_> = found.failed.iter().map(|it| it.status.as_str()).collect();
        assert_eq!(named, ["refused", "NOSPC"]);
        assert_eq!(found.answered, 0);
    }
}
