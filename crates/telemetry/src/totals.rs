//! Sums of counters: of a channel, of a volume, or of a cluster.

use super::histogram::{BUCKETS, OCTAVES, octave_of, quantile_bucket, quantile_ns};
use super::report::{KindReport, Report};
use super::{KINDS, OpKind, STAGES, StageTimes, add_media, add_stages};
use pagemesh_base::media_bytes::MediaBytes;

/// Sums for each kind of operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// By [`OpKind`].
    pub kinds: [KindTotals; KINDS],
    /// Bytes that a brick wrote to its medium. None: no report has them.
    pub media: Option<MediaBytes>,
}

/// The sums of one kind of operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindTotals {
    /// All operations.
    pub ops: u64,
    /// Bytes of all operations.
    pub bytes: u64,
    /// The number of timed operations, by bucket of their latency.
    pub latency: Box<[u64; BUCKETS]>,
    /// The nanoseconds that the timed operations spent, by group of buckets and by stage.
    pub stages: Box<[[u64; STAGES]; OCTAVES]>,
}

impl Default for KindTotals {
    fn default() -> KindTotals {
        KindTotals {
            ops: 0,
            bytes: 0,
            latency: Box::new([0; BUCKETS]),
            stages: Box::new([[0; STAGES]; OCTAVES]),
        }
    }
}

/// The mean stages of the timed operations within a range of latencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageMeans {
    /// The number of operations.
    pub count: u64,
    /// Their mean stages, in nanoseconds.
    pub mean_ns: StageTimes,
}

impl Totals {
    /// The sums of one kind.
    #[must_use]
    pub fn of(&self, kind: OpKind) -> &KindTotals {
        &self.kinds[kind as usize]
    }

    /// Adds other sums.
    pub fn merge(&mut self, other: &Totals) {
        add_media(&mut self.media, other.media);
        for (kind, other) in self.kinds.iter_mut().zip(&other.kinds) {
            kind.merge(other);
        }
    }

    /// Adds a report.
    pub fn add(&mut self, report: &Report) {
        add_media(&mut self.media, report.media);
        for (kind, report) in self.kinds.iter_mut().zip(&report.kinds) {
            kind.add(report);
        }
    }

    /// The difference to earlier sums of the same counters.
    #[must_use]
    pub fn since(&self, earlier: &Totals) -> Report {
        let mut report = Report::default();
        for ((kind, earlier), into) in self.kinds.iter().zip(&earlier.kinds).zip(&mut report.kinds)
        {
            *into = kind.since(earlier);
        }
        let earlier = earlier.media.unwrap_or_default();
        report.media = self.media.map(|media| media.since(earlier));
        report
    }
}

impl KindTotals {
    /// The number of timed operations.
    #[must_use]
    pub fn timed(&self) -> u64 {
        self.latency
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// A latency in nanoseconds that this share of the timed operations does not exceed: the middle
    /// of the bucket. None without a timed operation.
    #[must_use]
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        quantile_ns(&self.latency, share)
    }

    /// The mean stages of the operations around this quantile, with a latency within the same
    /// power of two. None without a timed operation.
    #[must_use]
    pub fn stages_at(&self, share: f64) -> Option<StageMeans> {
        let octave = octave_of(quantile_bucket(&self.latency, share)?);
        let in_octave = |(bucket, _): &(usize, &u64)| octave_of(*bucket) == octave;
        let buckets = self.latency.iter().enumerate().filter(in_octave);
        let count = buckets.fold(0u64, |sum, (_, count)| sum.saturating_add(*count));
        Some(means(&self.stages[octave], count))
    }

    /// The mean stages of all timed operations. None without one.
    #[must_use]
    pub fn mean_stages(&self) -> Option<StageMeans> {
        let mut sums = [0u64; STAGES];
        for octave in &*self.stages {
            add_stages(&mut sums, octave);
        }
        let timed = self.timed();
        (timed > 0).then(|| means(&sums, timed))
    }

    fn merge(&mut self, other: &KindTotals) {
        self.ops = self.ops.saturating_add(other.ops);
        self.bytes = self.bytes.saturating_add(other.bytes);
        for (to, from) in self.latency.iter_mut().zip(&*other.latency) {
            *to = to.saturating_add(*from);
        }
        for (to, from) in self.stages.iter_mut().zip(&*other.stages) {
            add_stages(to, from);
        }
    }

    fn add(&mut self, report: &KindReport) {
        self.ops = self.ops.saturating_add(report.ops);
        self.bytes = self.bytes.saturating_add(report.bytes);
        for (bucket, count) in &report.latency {
            let to = &mut self.latency[usize::from(*bucket)];
            *to = to.saturating_add(*count);
        }
        for (octave, sums) in &report.stages {
            add_stages(&mut self.stages[usize::from(*octave)], sums);
        }
    }

    fn since(&self, earlier: &KindTotals) -> KindReport {
        let latency = self.latency.iter().zip(&*earlier.latency).enumerate();
        let latency = latency.filter(|(_, (now, then))| now > then);
        let stages = self.stages.iter().zip(&*earlier.stages).enumerate();
        let stages = stages.filter(|(_, (now, then))| now != then);
        KindReport {
            ops: self.ops.saturating_sub(earlier.ops),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            latency: latency
                .map(|(bucket, (now, then))| (bucket as u16, now - then))
                .collect(),
            stages: stages
                .map(|(octave, (now, then))| {
                    let difference = |stage: usize| now[stage].saturating_sub(then[stage]);
                    (octave as u8, std::array::from_fn(difference))
                })
                .collect(),
        }
    }
}

fn means(sums: &[u64; STAGES], count: u64) -> StageMeans {
    StageMeans {
        count,
        mean_ns: StageTimes(sums.map(|sum| sum / count.max(1))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChannelMeter, Stage};
    use proptest::prelude::*;

    fn ops() -> impl Strategy<Value = Vec<(usize, u64, [u64; STAGES])>> {
        let times = prop::array::uniform6(0u64..10_000_000);
        prop::collection::vec((0..KINDS, 0u64..1 << 20, times), 0..200)
    }

    fn meter(of: &[(usize, u64, [u64; STAGES])]) -> ChannelMeter {
        let meter = ChannelMeter::default();
        for (kind, bytes, times) in of {
            meter.count(OpKind::ALL[*kind], *bytes);
            meter.record(OpKind::ALL[*kind], &StageTimes(*times));
        }
        meter
    }

    proptest! {
        #[test]
        fn reports_add_up_to_the_totals(ops in ops(), cut in 0usize..200) {
            let cut = cut.min(ops.len());
            let (early, all) = (meter(&ops[..cut]).totals(), meter(&ops).totals());
            let mut sum = Totals::default();
            for report in [early.since(&Totals::default()), all.since(&early)] {
                prop_assert_eq!(report.check(), Ok(()));
                let text = serde_json::to_string(&report).unwrap();
                sum.add(&serde_json::from_str(&text).unwrap());
            }
            prop_assert_eq!(&sum, &all);
            let mut merged = early.clone();
            merged.merge(&meter(&ops[cut..]).totals());
            prop_assert_eq!(merged, all);
        }

        #[test]
        fn mean_stages_add_up_to_the_mean_latency(ops in ops()) {
            let totals = meter(&ops).totals();
            for kind in OpKind::ALL {
                let times = ops.iter().filter(|op| op.0 == kind as usize);
                let times: Vec<u64> = times.map(|op| StageTimes(op.2).total_ns()).collect();
                let Some(means) = totals.of(kind).mean_stages() else {
                    prop_assert!(times.is_empty());
                    continue;
                };
                let mean = times.iter().sum::<u64>() / times.len() as u64;
                prop_assert_eq!(means.count, times.len() as u64);
                // Each stage's mean is rounded down.
                prop_assert!(mean - means.mean_ns.total_ns() <= STAGES as u64);
            }
        }

        #[test]
        fn quantile_is_within_one_bucket_of_the_sorted_latency(ops in ops(), share in 0.0f64..1.0) {
            let totals = meter(&ops).totals();
            for kind in OpKind::ALL {
                let times = ops.iter().filter(|op| op.0 == kind as usize);
                let mut times: Vec<u64> = times.map(|op| StageTimes(op.2).total_ns()).collect();
                times.sort_unstable();
                let Some(found) = totals.of(kind).quantile_ns(share) else {
                    prop_assert!(times.is_empty());
                    continue;
                };
                let rank = ((times.len() as f64 * share).ceil() as usize).max(1);
                let expected = times[rank - 1];
                prop_assert!(found.abs_diff(expected) * 16 <= expected + 16 * 64);
            }
        }
    }

    #[test]
    fn stages_at_a_quantile_are_of_operations_near_it() {
        let meter = ChannelMeter::default();
        for _ in 0..99 {
            meter.record(OpKind::Write, &StageTimes([0, 0, 0, 0, 1_000, 100]));
        }
        meter.record(OpKind::Write, &StageTimes([0, 500_000, 0, 0, 1_000, 100]));
        let totals = meter.totals();
        let slow = totals.of(OpKind::Write).stages_at(0.999).unwrap();
        assert_eq!(slow.count, 1);
        assert_eq!(slow.mean_ns.0[Stage::Lock as usize], 500_000);
        let usual = totals.of(OpKind::Write).stages_at(0.5).unwrap();
        assert_eq!((usual.count, usual.mean_ns.total_ns()), (99, 1_100));
    }
}
