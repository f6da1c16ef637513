//! The search for the highest rate that a server holds: steps by a factor up or down, and then halves of the interval.
//!
//! The search is pure: its caller measures each rate that [`RateSearch::next_rate`] names.

/// Measurements of one search at most.
pub const STEPS_MAX: u32 = 24;
/// The lowest rate that a search tries.
pub const RATE_MIN: f64 = 10.0;
/// The highest.
pub const RATE_MAX: f64 = 2_000_000.0;

/// A search.
#[derive(Clone, Copy, Debug)]
pub struct RateSearch {
    start: f64,
    /// The factor from one rate to the next, until one is held and one is not.
    factor: f64,
    /// The search ends when the lowest rate that was not held is at most this much above the best one.
    precision: f64,
    held: Option<f64>,
    failed: Option<f64>,
    steps: u32,
}

impl RateSearch {
    /// A search from this rate. A factor of 1.5 and a precision of 0.05 are usual.
    #[must_use]
    pub fn new(start: f64, factor: f64, precision: f64) -> RateSearch {
        RateSearch {
            start: start.clamp(RATE_MIN, RATE_MAX),
            factor: factor.max(1.01),
            precision: precision.max(0.001),
            held: None,
            failed: None,
            steps: 0,
        }
    }

    /// The next rate to measure; none: the search is over.
    #[must_use]
    pub fn next_rate(&self) -> Option<f64> {
        if self.steps >= STEPS_MAX {
            return None;
        }
        match (self.held, self.failed) {
            (None, None) => Some(self.start),
            (Some(held), None) => (held < RATE_MAX).then(|| (held * self.factor).min(RATE_MAX)),
            (None, Some(failed)) => {
                (failed > RATE_MIN).then(|| (failed / self.factor).max(RATE_MIN))
            }
            (Some(held), Some(failed)) => {
                let is_open = failed / held > 1.0 + self.precision;
                is_open.then(|| (held * failed).sqrt())
            }
        }
    }

    /// Notes whether the server held a rate.
    pub fn record(&mut self, rate: f64, is_held: bool) {
        self.steps += 1;
        match is_held {
            true => self.held = Some(self.held.map_or(rate, |held| held.max(rate))),
            false => self.failed = Some(self.failed.map_or(rate, |failed| failed.min(rate))),
        }
    }

    /// The highest rate that was held.
    #[must_use]
    pub fn best(&self) -> Option<f64> {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches for a server that holds `limit`. Returns the best rate and the steps.
    fn search(start: f64, limit: f64) -> (Option<f64>, u32) {
        let mut search = RateSearch::new(start, 1.5, 0.05);
        while let Some(rate) = search.next_rate() {
            search.record(rate, rate <= limit);
        }
        (search.best(), search.steps)
    }

    #[test]
    fn search_finds_the_limit_from_both_sides() {
        for (start, limit) in [(1000.0, 20_000.0), (50_000.0, 3000.0), (1000.0, 1000.0)] {
            let (best, steps) = search(start, limit);
            let best = best.expect("a rate");
            assert!(best <= limit && best * 1.06 > limit, "{best} of {limit}");
            assert!(steps < 20, "{steps}");
        }
    }

    #[test]
    fn search_without_a_limit_ends() {
        assert_eq!(search(1000.0, f64::MAX).0, Some(RATE_MAX));
        assert_eq!(search(1000.0, 0.0).0, None);
    }
}
