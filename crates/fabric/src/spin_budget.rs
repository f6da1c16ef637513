//! How long to poll for the next request before sleeping.
//!
//! Invariants: pure. The budget is never above the limit, and zero once waits have become long: an
//! idle connection polls once, for at most the limit, and then sleeps.

use std::time::Duration;

/// The shortest useful polling time.
const SPIN_US_MIN: u32 = 4;

/// Adapts to the length of past waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinBudget {
    us_max: u32,
    us: u32,
}

impl SpinBudget {
    /// Starts without polling.
    pub(crate) fn new(us_max: u32) -> SpinBudget {
        SpinBudget { us_max, us: 0 }
    }

    /// How long to poll.
    pub(crate) fn budget(self) -> Duration {
        Duration::from_micros(u64::from(self.us))
    }

    /// A wait has ended, its polling included. The next budget is larger if polling would have been
    /// enough, else smaller.
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
