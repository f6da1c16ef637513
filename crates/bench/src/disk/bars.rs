//! The bars: the figures that the disk medium must reach, relative to other targets of the same run.

use super::targets::TargetKind;
use super::{DiskSample, DiskSamples};
use crate::stats::{median, median_ratio};
use TargetKind::{Glusterfs, OneLeg, QemuQuorum, Raw, Rbd, TwoLegs};
use serde::Serialize;

/// The figure of a bar and its limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum BarLimit {
    /// Operations per second, at least this many times those of the other target.
    IopsRatioMin(f64),
    /// Mean latency, at most this many µs above the other target's.
    ExtraMeanUsMax(f64),
    /// The 99th percentile of reads, at most this many times the other target's.
    P99RatioMax(f64),
}

impl BarLimit {
    /// The measured figure: the median of the rounds' own.
    fn measured(self, own: &[DiskSample], other: &[DiskSample]) -> Option<f64> {
        let of = |rounds: &[DiskSample], figure: fn(&DiskSample) -> f64| -> Vec<f64> {
            rounds.iter().map(figure).collect()
        };
        match self {
            BarLimit::IopsRatioMin(_) => median_ratio(&of(own, |s| s.iops), &of(other, |s| s.iops)),
            BarLimit::ExtraMeanUsMax(_) => {
                let pairs = own.iter().zip(other);
                let extra = pairs.map(|(own, other)| (own.mean_ns - other.mean_ns) / 1e3);
                median(&extra.collect::<Vec<_>>())
            }
            BarLimit::P99RatioMax(_) => median_ratio(
                &of(own, |s| s.p99_ns.unwrap_or(f64::NAN)),
                &of(other, |s| s.p99_ns.unwrap_or(f64::NAN)),
            ),
        }
    }

    fn is_met(self, measured: f64) -> bool {
        match self {
            BarLimit::IopsRatioMin(min) => measured >= min,
            BarLimit::ExtraMeanUsMax(max) | BarLimit::P99RatioMax(max) => measured <= max,
        }
    }
}

/// A limit of one target in one row.
#[derive(Clone, Copy, Debug)]
struct Bar {
    row: &'static str,
    target: TargetKind,
    other: TargetKind,
    limit: BarLimit,
}

const fn iops(row: &'static str, target: TargetKind, other: TargetKind, min: f64) -> Bar {
    Bar {
        row,
        target,
        other,
        limit: BarLimit::IopsRatioMin(min),
    }
}

const fn limit(row: &'static str, limit: BarLimit) -> Bar {
    Bar {
        row,
        target: OneLeg,
        other: Raw,
        limit,
    }
}

const BARS: [Bar; 20] = [
    iops("random-read-qd1", OneLeg, Raw, 0.9),
    limit("random-read-qd1", BarLimit::ExtraMeanUsMax(10.0)),
    iops("random-read-qd32", OneLeg, Raw, 0.9),
    iops("random-write-qd32", OneLeg, Raw, 0.8),
    iops("write-flush-qd1", OneLeg, Raw, 0.6),
    iops("fua-16-jobs", OneLeg, Raw, 1.5),
    iops("mixed-qd32", OneLeg, Raw, 0.8),
    limit("mixed-qd32", BarLimit::P99RatioMax(1.5)),
    iops("sequential-read", OneLeg, Raw, 0.9),
    iops("sequential-write", OneLeg, Raw, 0.9),
    iops("scattered-read", OneLeg, Raw, 0.9),
    iops("scattered-write", OneLeg, Raw, 0.9),
    iops("random-write-qd32", TwoLegs, Raw, 0.4),
    iops("write-flush-qd1", TwoLegs, Raw, 0.3),
    iops("write-flush-qd1", TwoLegs, QemuQuorum, 1.5),
    iops("write-flush-qd1", TwoLegs, Glusterfs, 5.0),
    iops("write-flush-qd1", TwoLegs, Rbd, 5.0),
    iops("write-flush-qd16", TwoLegs, QemuQuorum, 1.5),
    iops("write-flush-qd16", TwoLegs, Glusterfs, 5.0),
    iops("write-flush-qd16", TwoLegs, Rbd, 5.0),
];

/// A bar with its measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct BarOutcome {
    row: &'static str,
    target: TargetKind,
    other: TargetKind,
    limit: BarLimit,
    measured: f64,
    is_met: bool,
}

impl BarOutcome {
    /// The bar as text.
    pub(super) fn bar(&self) -> String {
        let other = self.other.title();
        match self.limit {
            BarLimit::IopsRatioMin(min) => format!("≥ {min} × {other}"),
            BarLimit::ExtraMeanUsMax(max) => format!("mean ≤ {other} + {max} µs"),
            BarLimit::P99RatioMax(max) => format!("p99 ≤ {max} × {other}"),
        }
    }

    /// Whether it was met, with the measured figure.
    pub(super) fn verdict(&self) -> String {
        let unit = match self.limit {
            BarLimit::ExtraMeanUsMax(_) => " µs",
            BarLimit::IopsRatioMin(_) | BarLimit::P99RatioMax(_) => "",
        };
        let word = if self.is_met { "yes" } else { "no" };
        format!("{word}: {:.2}{unit}", self.measured)
    }
}

/// The bars of a target in a row, as far as the other targets were measured.
pub(super) fn outcomes(samples: &DiskSamples, row: &str, target: TargetKind) -> Vec<BarOutcome> {
    let bars = BARS.iter();
    let bars = bars.filter(|bar| (bar.row, bar.target) == (row, target));
    bars.filter_map(|bar| {
        let own = samples.rounds(row, bar.target)?;
        let measured = bar.limit.measured(own, samples.rounds(row, bar.other)?)?;
        Some(BarOutcome {
            row: bar.row,
            target: bar.target,
            other: bar.other,
            limit: bar.limit,
            measured,
            is_met: bar.limit.is_met(measured),
        })
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::rows::{ROWS, row_of};

    fn sample(iops: f64, mean_us: f64) -> DiskSample {
        DiskSample {
            iops,
            mean_ns: mean_us * 1e3,
            p99_ns: Some(mean_us * 2e3),
            ..DiskSample::default()
        }
    }

    fn verdicts(row: &str, raw: DiskSample, one_leg: DiskSample) -> Vec<String> {
        let samples = DiskSamples {
            rows: vec![row_of(row).expect("a row")],
            targets: vec![Raw, OneLeg],
            samples: vec![vec![vec![raw; 3], vec![one_leg; 3]]],
        };
        let found = outcomes(&samples, row, OneLeg);
        found.iter().map(BarOutcome::verdict).collect()
    }

    #[test]
    fn every_bar_names_a_row() {
        for bar in &BARS {
            assert!(ROWS.iter().any(|row| row.id == bar.row), "{bar:?}");
        }
    }

    #[test]
    fn bars_compare_rates_and_latencies() {
        let raw = sample(1000.0, 50.0);
        let near = verdicts("random-read-qd1", raw, sample(900.0, 60.0));
        assert_eq!(near, ["yes: 0.90", "yes: 10.00 µs"]);
        let far = verdicts("random-read-qd1", raw, sample(899.0, 61.0));
        assert_eq!(far, ["no: 0.90", "no: 11.00 µs"]);
        let tail = verdicts("mixed-qd32", raw, sample(800.0, 76.0));
        assert_eq!(tail, ["yes: 0.80", "no: 1.52"]);
    }

    #[test]
    fn bar_without_its_other_target_has_no_outcome() {
        let samples = DiskSamples {
            rows: vec![ROWS[0]],
            targets: vec![OneLeg],
            samples: vec![vec![vec![sample(1.0, 1.0)]]],
        };
        assert_eq!(outcomes(&samples, ROWS[0].id, OneLeg), []);
    }
}
