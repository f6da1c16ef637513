//! Latencies, medians and ratios.
//!
//! Latencies are nanoseconds in an HDR histogram of three digits, 1 ns to [`LATENCY_NS_MAX`];
//! longer ones count as that. The median of no values is `None`, never zero.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The longest recorded latency, one minute: a request that stalls longer ends the run.
pub const LATENCY_NS_MAX: u64 = 60_000_000_000;
/// Significant digits: percentiles are right to 0.1 %.
const DIGITS: u8 = 3;

/// Latencies of one workload.
#[derive(Clone, Debug)]
pub struct Latencies {
    histogram: Histogram<u64>,
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

impl Latencies {
    /// An empty histogram.
    pub fn new() -> Latencies {
        let histogram = Histogram::new_with_bounds(1, LATENCY_NS_MAX, DIGITS)
            .expect("the bounds are constants that the histogram takes");
        Latencies { histogram }
    }

    /// Counts one latency.
    #[inline]
    pub fn record_ns(&mut self, ns: u64) {
        self.histogram.saturating_record(ns.max(1));
    }

    /// Counts one latency.
    #[inline]
    pub fn record(&mut self, latency: Duration) {
        self.record_ns(u64::try_from(latency.as_nanos()).unwrap_or(LATENCY_NS_MAX));
    }

    /// Counts one latency for several similar operations.
    #[inline]
    pub fn record_many(&mut self, latency: Duration, count: u64) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(LATENCY_NS_MAX);
        self.histogram.saturating_record_n(ns.max(1), count);
    }

    /// Adds the latencies of another thread or round.
    pub fn merge(&mut self, other: &Latencies) {
        self.histogram
            .add(&other.histogram)
            .expect("all histograms have the same bounds");
    }

    /// Number of latencies.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// The figures for reports.
    pub fn summary(&self) -> LatencySummary {
        let at = |quantile| self.histogram.value_at_quantile(quantile);
        LatencySummary {
            count: self.histogram.len(),
            mean_ns: self.histogram.mean(),
            stddev_ns: self.histogram.stdev(),
            p50_ns: at(0.5),
            p90_ns: at(0.9),
            p99_ns: at(0.99),
            p999_ns: at(0.999),
            max_ns: self.histogram.max(),
        }
    }
}

/// The figures of a histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    /// Operations.
    pub count: u64,
    /// Mean.
    pub mean_ns: f64,
    /// Standard deviation.
    pub stddev_ns: f64,
    /// Median.
    pub p50_ns: u64,
    /// 90 %.
    pub p90_ns: u64,
    /// 99 %.
    pub p99_ns: u64,
    /// 99.9 %.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// The median; for an even number the mean of the middle two. NaN values do not count.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|v| !v.is_nan()).collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The median of each round's value divided by the same round's divisor, so that only values of one
/// round are compared. A round with a zero divisor does not count.
pub fn median_ratio(values: &[f64], divisors: &[f64]) -> Option<f64> {
    let ratios: Vec<f64> = values
        .iter()
        .zip(divisors)
        .filter(|(_, divisor)| **divisor != 0.0)
        .map(|(value, divisor)| value / divisor)
        .collect();
    median(&ratios)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_even_and_nothing() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[f64::NAN, 7.0]), Some(7.0));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn ratios_are_taken_within_rounds() {
        // The machine was ten times slower in the second round: the ratio of
        // the medians would be 2 / 10, the median of ratios is right.
        assert_eq!(
            median_ratio(&[2.0, 20.0, 2.0], &[1.0, 10.0, 1.0]),
            Some(2.0)
        );
        assert_eq!(median_ratio(&[2.0, 5.0], &[1.0, 0.0]), Some(2.0));
        assert_eq!(median_ratio(&[1.0], &[]), None);
    }

    #[test]
    fn percentiles_are_right_to_three_digits() {
        let mut low = Latencies::new();
        let mut high = Latencies::new();
        (1..=500).for_each(|us| low.record_ns(us * 1000));
        (501..=1000).for_each(|us| high.record(Duration::from_micros(us)));
        low.merge(&high);
        let summary = low.summary();
        assert_eq!(summary.count, 1000);
        for (found, wanted) in [
            (summary.p50_ns, 500_000),
            (summary.p90_ns, 900_000),
            (summary.p99_ns, 990_000),
            (summary.p999_ns, 999_000),
            (summary.max_ns, 1_000_000),
        ] {
            let error = (found as f64 - f64::from(wanted)).abs() / f64::from(wanted);
            assert!(error < 0.001, "{found} for {wanted}");
        }
    }

    #[test]
    fn out_of_range_latency_counts_as_the_bound() {
        let mut latencies = Latencies::new();
        latencies.record_ns(0);
        latencies.record(Duration::MAX);
        assert_eq!(latencies.count(), 2);
        assert!(latencies.summary().max_ns >= LATENCY_NS_MAX);
    }
}
