//! The times at which calls are due. The schedule follows from its seed alone, so a slow server does not delay it (open
//! loop). Latencies count from these times.

use pagemesh_base::rng::SplitMix64;
use serde::Serialize;
use std::time::Duration;

/// The gaps between calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrivals {
    /// Exponential gaps: independent clients.
    Poisson,
    /// Equal gaps.
    Fixed,
}

/// Due times in nanoseconds after the start, in order.
#[derive(Clone, Debug)]
pub struct Schedule {
    rng: SplitMix64,
    arrivals: Arrivals,
    gap_ns: f64,
    next_ns: f64,
    end_ns: f64,
}

impl Schedule {
    /// A schedule of `rate_per_s` calls for this time.
    #[must_use]
    pub fn new(arrivals: Arrivals, rate_per_s: f64, length: Duration, seed: u64) -> Schedule {
        let mut schedule = Schedule {
            rng: SplitMix64::new(seed),
            arrivals,
            gap_ns: 1e9 / rate_per_s,
            next_ns: 0.0,
            end_ns: length.as_nanos() as f64,
        };
        schedule.next_ns = schedule.draw_gap();
        schedule
    }

    fn draw_gap(&mut self) -> f64 {
        match self.arrivals {
            Arrivals::Fixed => self.gap_ns,
            Arrivals::Poisson => {
                // Above 0 and up to 1, so that the logarithm is finite.
                let uniform = ((self.rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64;
                -uniform.ln() * self.gap_ns
            }
        }
    }
}

impl Iterator for Schedule {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        if !self.next_ns.is_finite() || self.next_ns >= self.end_ns {
            return None;
        }
        let due = self.next_ns as u64;
        self.next_ns += self.draw_gap();
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: Duration = Duration::from_secs(10);

    fn times(arrivals: Arrivals, seed: u64) -> Vec<u64> {
        Schedule::new(arrivals, 10_000.0, LENGTH, seed).collect()
    }

    #[test]
    fn fixed_schedule_has_equal_gaps() {
        let due = times(Arrivals::Fixed, 1);
        assert_eq!(due.len(), 99_999);
        assert!(due.windows(2).all(|pair| pair[1] - pair[0] == 100_000));
    }

    #[test]
    fn poisson_gaps_have_the_variance_of_their_law() {
        let due = times(Arrivals::Poisson, 1);
        assert!(due.len().abs_diff(100_000) < 1500, "{}", due.len());
        assert!(due.is_sorted());
        let gaps: Vec<f64> = due.windows(2).map(|it| (it[1] - it[0]) as f64).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let square = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>();
        let deviation = (square / gaps.len() as f64).sqrt();
        assert!((deviation / mean - 1.0).abs() < 0.03, "{deviation} {mean}");
    }

    #[test]
    fn schedule_follows_from_its_seed() {
        assert_eq!(times(Arrivals::Poisson, 7), times(Arrivals::Poisson, 7));
        assert_ne!(times(Arrivals::Poisson, 7), times(Arrivals::Poisson, 8));
    }

    #[test]
    fn schedule_without_a_rate_is_empty() {
        let none = Schedule::new(Arrivals::Fixed, 0.0, LENGTH, 1);
        assert_eq!(none.count(), 0);
    }
}
