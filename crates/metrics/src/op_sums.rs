//! Sums of operations that never go back, in less memory than [`Totals`].

use pagemesh_telemetry::{KINDS, OCTAVES, OpKind, Report, STAGES, Totals, octave_of, octave_range};

/// The first and last power of two that has a bucket of its own: bounds from 256 ns to 17 s. Faster and
/// slower operations are in the first bucket and in `+Inf`.
const FIRST_OCTAVE: usize = 2;
const LAST_OCTAVE: usize = 28;

/// The sums of each kind of operation: counts, bytes, latencies by power of two, time by stage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpSums {
    kinds: [KindSums; KINDS],
}

/// The sums of one kind of operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KindSums {
    pub ops: u64,
    pub bytes: u64,
    /// The number of timed operations, by power of two of their latency.
    latency: [u64; OCTAVES],
    /// The nanoseconds that the timed operations spent, by stage.
    pub stages_ns: [u64; STAGES],
}

impl OpSums {
    /// Adds a report that was checked.
    pub fn add(&mut self, report: &Report) {
        for (kind, report) in self.kinds.iter_mut().zip(&report.kinds) {
            kind.ops = kind.ops.saturating_add(report.ops);
            kind.bytes = kind.bytes.saturating_add(report.bytes);
            for (bucket, count) in &report.latency {
                let sum = &mut kind.latency[octave_of(usize::from(*bucket))];
                *sum = sum.saturating_add(*count);
            }
            for (_, times) in &report.stages {
                for (sum, time) in kind.stages_ns.iter_mut().zip(times) {
                    *sum = sum.saturating_add(*time);
                }
            }
        }
    }

    /// Adds other sums.
    pub(crate) fn merge(&mut self, other: &OpSums) {
        let add = |to: &mut u64, from: &u64| *to = to.saturating_add(*from);
        for (kind, other) in self.kinds.iter_mut().zip(&other.kinds) {
            add(&mut kind.ops, &other.ops);
            add(&mut kind.bytes, &other.bytes);
            kind.latency
                .iter_mut()
                .zip(&other.latency)
                .for_each(|(to, from)| add(to, from));
            kind.stages_ns
                .iter_mut()
                .zip(&other.stages_ns)
                .for_each(|(to, from)| add(to, from));
        }
    }

    pub(crate) fn of(&self, kind: OpKind) -> &KindSums {
        &self.kinds[kind as usize]
    }
}

impl From<&Totals> for OpSums {
    fn from(totals: &Totals) -> OpSums {
        let mut sums = OpSums::default();
        sums.add(&totals.since(&Totals::default()));
        sums
    }
}

impl KindSums {
    /// The number of timed operations.
    pub fn timed(&self) -> u64 {
        let sum = |sum: u64, count: &u64| sum.saturating_add(*count);
        self.latency.iter().fold(0, sum)
    }

    /// The time of all timed operations, in nanoseconds.
    pub fn time_ns(&self) -> u64 {
        let sum = |sum: u64, time: &u64| sum.saturating_add(*time);
        self.stages_ns.iter().fold(0, sum)
    }

    /// Upper bounds in seconds with the number of operations between each and the one before.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bound = |octave: usize| seconds(octave_range(octave).end);
        let count = |octave: usize| match octave {
            FIRST_OCTAVE => self.latency[..=FIRST_OCTAVE].iter().sum(),
            _ => self.latency[octave],
        };
        (FIRST_OCTAVE..=LAST_OCTAVE)
            .map(|octave| (bound(octave), count(octave)))
            .collect()
    }
}

/// Nanoseconds in the base unit.
pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_telemetry::{ChannelMeter, StageTimes};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn reports_add_up_to_the_sums_of_totals(times in prop::collection::vec(0u64..1 << 40, 0..50)) {
            let (meter, mut sums, mut before) = (ChannelMeter::default(), OpSums::default(), Totals::default());
            for ns in &times {
                meter.count(OpKind::Write, 7);
                meter.record(OpKind::Write, &StageTimes([1, 0, 0, 0, *ns, 0]));
                let now = meter.totals();
                sums.add(&now.since(&before));
                before = now;
            }
            prop_assert_eq!(&sums, &OpSums::from(&before));
            let writes = sums.of(OpKind::Write);
            prop_assert_eq!(writes.timed(), times.len() as u64);
            prop_assert_eq!(writes.time_ns(), times.iter().map(|ns| ns + 1).sum::<u64>());
            for (bound, _) in writes.buckets() {
                let within = times.iter().filter(|ns| seconds(**ns + 1) < bound).count() as u64;
                let counted = writes.buckets().iter().filter(|it| it.0 <= bound).map(|it| it.1).sum::<u64>();
                prop_assert_eq!(within, counted);
            }
        }
    }

    #[test]
    fn bounds_rise_from_256_ns_to_17_s() {
        let buckets = KindSums::default().buckets();
        let bounds: Vec<f64> = buckets.iter().map(|it| it.0).collect();
        assert_eq!((bounds.len(), bounds[0]), (27, 256e-9));
        assert!((17.0..18.0).contains(&bounds[26]), "{bounds:?}");
        assert!(bounds.is_sorted());
    }
}
