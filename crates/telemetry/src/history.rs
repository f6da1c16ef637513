//! The recent past of many series in bounded memory: an hour in steps of 10 s, a day in steps of
//! 5 min.
//!
//! Invariants:
//! - time is an argument, and never goes back: an earlier time counts as the latest one;
//! - a step without an operation has no sample;
//! - all series together stay within the budget. If they would not, the series that was silent the
//!   longest loses its hour first, then everything; [`Series::has_forgotten`] says so. The last minute
//!   goes with the rest only.

use super::report::Report;
use super::summary::{KindSummary, RecentSummary};
use super::totals::Totals;
use super::{KINDS, OpKind, add_media};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// The short step and the number of steps: one hour.
pub const SHORT_STEP: Duration = Duration::from_secs(10);
const SHORT_STEPS: u64 = 360;
/// The long step and the number of steps: one day.
pub const LONG_STEP: Duration = Duration::from_secs(300);
const LONG_STEPS: u64 = 288;
/// The short steps that [`History::recent`] sums, the present one included.
const RECENT_STEPS: u64 = 6;

/// Samples that a ring grows by: doubling it would waste a third of the budget.
const GROWTH: usize = 32;
/// The cost of a series without samples, and of an entry of a report, in bytes.
const SERIES_BYTES: usize = 512;
const ENTRY_BYTES: usize = 64;

/// One step of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The number of the step since the beginning of the history.
    pub step: u32,
    /// Operations, by [`OpKind`].
    pub ops: [u32; KINDS],
    /// KiB, by [`OpKind`].
    pub kib: [u32; KINDS],
    /// The median latency in units of 64 ns, by [`OpKind`]; 0 without a timed operation.
    pub p50: [u32; KINDS],
    /// The 99th percentile.
    pub p99: [u32; KINDS],
}

/// The unit of latencies in a [`Sample`], in nanoseconds.
pub const LATENCY_UNIT_NS: u64 = 64;

/// The history of one volume, brick or file system.
#[derive(Debug, Default)]
pub struct Series {
    heard: Duration,
    short: Ring,
    long: Ring,
    /// The last complete short steps, for [`History::recent`].
    recent: VecDeque<(u64, Report)>,
    has_forgotten: bool,
}

/// The complete steps, and the sums of the present one.
#[derive(Debug, Default)]
struct Ring {
    samples: VecDeque<Sample>,
    open_step: u64,
    open: Report,
}

/// The history of all series.
#[derive(Debug)]
pub struct History<K> {
    series: BTreeMap<K, Series>,
    latest: Duration,
    used_bytes: usize,
    bytes_max: usize,
}

impl Ring {
    /// Adds a report at this step. Returns the sums of the step that it completed.
    fn add(&mut self, step: u64, steps_max: u64, report: &Report) -> Option<(u64, Report)> {
        let mut completed = None;
        if step != self.open_step {
            completed = self.complete(step, steps_max);
        }
        self.open.merge(report);
        completed
    }

    /// Completes the present step, and forgets those that are too old.
    fn complete(&mut self, step: u64, steps_max: u64) -> Option<(u64, Report)> {
        let done = (self.open_step, std::mem::take(&mut self.open));
        self.open_step = step;
        let oldest = step.saturating_sub(steps_max);
        self.samples
            .retain(|sample| u64::from(sample.step) >= oldest);
        if done.1.is_empty() {
            return None;
        }
        if done.0 >= oldest && done.1.has_operations() {
            if self.samples.len() == self.samples.capacity() {
                self.samples.reserve_exact(GROWTH);
            }
            self.samples.push_back(Sample::of(done.0, &done.1));
        }
        Some(done)
    }

    /// The samples from this step on, with the present one.
    fn samples(&self, from: u64) -> impl Iterator<Item = Sample> {
        let open = self
            .open
            .has_operations()
            .then(|| Sample::of(self.open_step, &self.open));
        let all = self.samples.iter().copied().chain(open);
        all.filter(move |sample| u64::from(sample.step) >= from)
    }

    fn bytes(&self) -> usize {
        self.samples.capacity() * size_of::<Sample>() + report_bytes(&self.open)
    }
}

impl Sample {
    fn of(step: u64, report: &Report) -> Sample {
        let kinds = OpKind::ALL.map(|kind| KindSummary::of(kind, std::iter::once(report)));
        let clamp = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let units = |ns: Option<u64>| clamp(ns.map_or(0, |ns| (ns / LATENCY_UNIT_NS).max(1)));
        Sample {
            step: clamp(step),
            ops: kinds.map(|kind| clamp(kind.ops)),
            kib: kinds.map(|kind| clamp(kind.bytes / 1024)),
            p50: kinds.map(|kind| units(kind.p50_ns)),
            p99: kinds.map(|kind| units(kind.p99_ns)),
        }
    }

    /// The median and the 99th percentile of a kind in nanoseconds, if one of its operations was
    /// timed.
    #[must_use]
    pub fn latency_ns(&self, kind: OpKind) -> Option<(u64, u64)> {
        let (p50, p99) = (self.p50[kind as usize], self.p99[kind as usize]);
        let ns = |value: u32| u64::from(value) * LATENCY_UNIT_NS;
        (p50 > 0).then(|| (ns(p50), ns(p99)))
    }
}

impl Series {
    /// The time of the last report.
    #[must_use]
    pub fn heard(&self) -> Duration {
        self.heard
    }

    /// Whether samples were dropped before their time, because memory ran out.
    #[must_use]
    pub fn has_forgotten(&self) -> bool {
        self.has_forgotten
    }

    /// The samples of the last hour, or of the part of it since `from`.
    pub fn last_hour(&self, now: Duration, from: Duration) -> impl Iterator<Item = Sample> {
        let oldest = step_of(now, SHORT_STEP).saturating_sub(SHORT_STEPS);
        self.short.samples(oldest.max(step_of(from, SHORT_STEP)))
    }

    /// The samples of the last day, or of the part of it since `from`.
    pub fn last_day(&self, now: Duration, from: Duration) -> impl Iterator<Item = Sample> {
        let oldest = step_of(now, LONG_STEP).saturating_sub(LONG_STEPS);
        self.long.samples(oldest.max(step_of(from, LONG_STEP)))
    }

    fn add(&mut self, now: Duration, report: &Report) {
        self.heard = now;
        let step = step_of(now, SHORT_STEP);
        if let Some(done) = self.short.add(step, SHORT_STEPS, report) {
            self.recent.push_back(done);
        }
        self.recent.retain(|(of, _)| of + RECENT_STEPS > step);
        self.long.add(step_of(now, LONG_STEP), LONG_STEPS, report);
    }

    /// The reports of the last minute.
    fn recent(&self, now: Duration) -> impl Iterator<Item = &Report> + Clone {
        let open = (self.short.open_step, &self.short.open);
        let closed = self.recent.iter().map(|(step, report)| (*step, report));
        let present = step_of(now, SHORT_STEP);
        closed
            .chain([open])
            .filter(move |(step, _)| step + RECENT_STEPS > present)
            .map(|(_, report)| report)
    }

    fn bytes(&self) -> usize {
        let recent = self.recent.iter().map(|(_, report)| report_bytes(report));
        SERIES_BYTES + self.short.bytes() + self.long.bytes() + recent.sum::<usize>()
    }

    /// Drops the hour. False if it is empty already.
    fn forget_hour(&mut self) -> bool {
        let is_empty = self.short.samples.is_empty();
        self.short.samples = VecDeque::new();
        self.has_forgotten = true;
        !is_empty
    }
}

fn step_of(time: Duration, step: Duration) -> u64 {
    time.as_secs() / step.as_secs()
}

fn report_bytes(report: &Report) -> usize {
    let entries = report.kinds.iter();
    let entries: usize = entries
        .map(|kind| kind.latency.len() + kind.stages.len())
        .sum();
    size_of::<Report>() + entries * ENTRY_BYTES
}

impl<K: Ord + Clone> History<K> {
    /// An empty history with a limit of its memory in bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> History<K> {
        History {
            series: BTreeMap::new(),
            latest: Duration::ZERO,
            used_bytes: 0,
            bytes_max,
        }
    }

    /// Adds a report that was [checked](Report::check). `now` is the time since the beginning of the
    /// history.
    pub fn record(&mut self, key: &K, now: Duration, report: &Report) {
        self.latest = self.latest.max(now);
        let before = self.series.get(key).map_or(0, Series::bytes);
        let series = self.series.entry(key.clone()).or_default();
        series.add(self.latest, report);
        self.used_bytes = self.used_bytes - before + series.bytes();
        self.keep_budget();
    }

    /// The history of one series.
    #[must_use]
    pub fn series(&self, key: &K) -> Option<&Series> {
        self.series.get(key)
    }

    /// The sums of the last minute, or of the 50 seconds before this step began at least. They are
    /// empty for a series that is silent or unknown.
    #[must_use]
    pub fn recent(&self, key: &K, now: Duration) -> Totals {
        let mut totals = Totals::default();
        if let Some(series) = self.series.get(key) {
            for report in series.recent(now.max(self.latest)) {
                totals.add(report);
            }
        }
        totals
    }

    /// The sums of [`History::recent`] without their stages.
    #[must_use]
    pub fn recent_summary(&self, key: &K, now: Duration) -> RecentSummary {
        let Some(series) = self.series.get(key) else {
            return RecentSummary::default();
        };
        let reports = series.recent(now.max(self.latest));
        let mut media = None;
        reports
            .clone()
            .for_each(|report| add_media(&mut media, report.media));
        RecentSummary {
            kinds: OpKind::ALL.map(|kind| KindSummary::of(kind, reports.clone())),
            media,
        }
    }

    /// The time that [`History::recent`] covers.
    #[must_use]
    pub fn recent_window(&self, now: Duration) -> Duration {
        let now = now.max(self.latest);
        let steps = SHORT_STEP * (RECENT_STEPS as u32 - 1);
        let open = now.as_nanos() % SHORT_STEP.as_nanos();
        (steps + Duration::from_nanos(open as u64)).min(now)
    }

    /// Drops a series, because its subject was deleted.
    pub fn remove(&mut self, key: &K) {
        if let Some(series) = self.series.remove(key) {
            self.used_bytes -= series.bytes();
        }
    }

    /// Bytes in use, about.
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    fn keep_budget(&mut self) {
        while self.used_bytes > self.bytes_max {
            let silent = self.series.iter().min_by_key(|(_, series)| series.heard);
            let Some(key) = silent.map(|(key, _)| key.clone()) else {
                return;
            };
            let Some(series) = self.series.get_mut(&key) else {
                return;
            };
            self.used_bytes -= series.bytes();
            if series.forget_hour() {
                self.used_bytes += series.bytes();
            } else {
                self.series.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChannelMeter, StageTimes};
    use proptest::prelude::*;

    fn writes(count: u64, ns: u64) -> Report {
        let meter = ChannelMeter::default();
        for _ in 0..count {
            meter.count(OpKind::Write, 4096);
            meter.record(OpKind::Write, &StageTimes([0, 0, 0, 0, ns, 0]));
        }
        meter.totals().since(&Totals::default())
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn steps_have_the_operations_reported_in_them() {
        let mut history = History::new(1 << 20);
        for second in 0..25 {
            history.record(&'a', at(second), &writes(2, 1000));
        }
        let series = history.series(&'a').unwrap();
        let hour: Vec<_> = series.last_hour(at(24), at(0)).collect();
        let counts: Vec<_> = hour
            .iter()
            .map(|it| (it.step, it.ops[1], it.kib[1]))
            .collect();
        assert_eq!(counts, [(0, 20, 80), (1, 20, 80), (2, 10, 40)]);
        let (p50, p99) = hour[0].latency_ns(OpKind::Write).unwrap();
        assert!(
            p50.abs_diff(1000) < 100 && p99.abs_diff(1000) < 100,
            "{p50} {p99}"
        );
        assert_eq!(hour[0].latency_ns(OpKind::Read), None);
        assert_eq!(series.last_hour(at(24), at(10)).count(), 2);
        let day: Vec<_> = series.last_day(at(24), at(0)).map(|it| it.ops[1]).collect();
        assert_eq!(day, [50]);
        let recent = history.recent(&'a', at(24));
        assert_eq!(recent.of(OpKind::Write).ops, 50);
        let summary = history.recent_summary(&'a', at(24));
        for kind in OpKind::ALL {
            let (of, totals) = (summary.kinds[kind as usize], recent.of(kind));
            assert_eq!((of.ops, of.bytes), (totals.ops, totals.bytes));
            assert_eq!(
                (of.p50_ns, of.p99_ns),
                (totals.quantile_ns(0.5), totals.quantile_ns(0.99))
            );
        }
        // A minute later the first step is over, and two minutes later all of them.
        assert_eq!(history.recent(&'a', at(65)).of(OpKind::Write).ops, 30);
        assert_eq!(history.recent(&'a', at(200)), Totals::default());
    }

    #[test]
    fn steps_older_than_hour_and_day_are_forgotten() {
        let mut history = History::new(1 << 20);
        for step in 0..10_000 {
            history.record(&'a', at(step * 10), &writes(1, 100));
        }
        let series = history.series(&'a').unwrap();
        assert_eq!(series.last_hour(at(99_990), at(0)).count(), 361);
        assert_eq!(series.last_day(at(99_990), at(0)).count(), 289);
        assert_eq!(series.last_hour(at(99_990 + 1800), at(0)).count(), 181);
        assert!(!series.has_forgotten());
        assert!(history.used_bytes() < 100 << 10, "{}", history.used_bytes());
    }

    #[test]
    fn earlier_time_counts_as_latest_time() {
        let mut history = History::new(1 << 20);
        history.record(&'a', at(100), &writes(1, 100));
        history.record(&'a', at(5), &writes(1, 100));
        let series = history.series(&'a').unwrap();
        assert_eq!(series.heard(), at(100));
        assert_eq!(series.last_hour(at(100), at(0)).count(), 1);
    }

    #[test]
    fn series_silent_longest_forgets_first() {
        let mut history = History::new(300 << 10);
        for step in 0..300 {
            for key in 0..40u8 {
                if key > 20 || step < 100 {
                    history.record(&key, at(step * 10), &writes(1, 100 << key.min(20)));
                }
            }
            assert!(history.used_bytes() <= 300 << 10);
        }
        let hour = |key| {
            let series: Option<&Series> = history.series(&key);
            series.map(|series| series.last_hour(at(2990), at(0)).count())
        };
        assert!(hour(0).is_none_or(|count| count <= 1), "{:?}", hour(0));
        assert!(hour(39).is_some_and(|count| count > 100), "{:?}", hour(39));
    }

    proptest! {
        #[test]
        fn budget_is_kept_and_counted_right(
            records in prop::collection::vec((0u8..20, 0u64..5000, 0u64..1 << 30), 1..200),
            bytes_max in 0usize..100_000,
        ) {
            let mut history = History::new(bytes_max);
            for (key, time, ns) in &records {
                history.record(key, at(*time), &writes(1, *ns));
                let counted: usize = history.series.values().map(Series::bytes).sum();
                prop_assert_eq!(history.used_bytes(), counted);
                prop_assert!(counted <= bytes_max);
                if ns % 7 == 0 {
                    history.remove(key);
                }
            }
        }
    }
}
