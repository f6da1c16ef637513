//! How long to look for the next request before sleeping.
//!
//! Invariants: pure; never more than the limit, and nothing once waits have
//! become long: an idle connection looks once, for at most the limit, and
//! then sleeps.

use std::time::Duration;

/// The shortest time worth looking.
const SPIN_US_MIN: u32 = 4;

/// Learns from how long the waits were.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinBudget {
    us_max: u32,
    us: u32,
}

impl SpinBudget {
    /// Starts without looking.
    pub(crate) fn new(us_max: u32) -> SpinBudget {
        SpinBudget { us_max, us: 0 }
    }

    /// How long to look.
    pub(crate) fn budget(self) -> Duration {
        Duration::from_micros(u64::from(self.us))
    }

    /// A wait has ended, looking included. If looking would have been enough,
    /// the next look is longer, else shorter.
    pub(crate) fn record_wait(&mut self, waited: Duration) {
        self.us = match waited <= Duration::from_micros(u64::from(self.us_max)) {
            true => (self.us * 2).max(SPIN_US_MIN).min(self.us_max),
            false => self.us / 2,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_waits_raise_budget_and_long_ones_lower_it() {
        let mut spin = SpinBudget::new(50);
        assert_eq!(spin.budget(), Duration::ZERO);
        for _ in 0..8 {
            spin.record_wait(Duration::from_micros(20));
        }
        assert_eq!(spin.budget(), Duration::from_micros(50));
        for _ in 0..8 {
            spin.record_wait(Duration::from_millis(1));
        }
        assert_eq!(spin.budget(), Duration::ZERO);
    }

    #[test]
    fn zero_limit_gives_zero_budget() {
        let mut spin = SpinBudget::new(0);
        spin.record_wait(Duration::ZERO);
        assert_eq!(spin.budget(), Duration::ZERO);
    }
}
