//! The touches of the last minute.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The time that recent touches cover, at most.
const WINDOW: Duration = Duration::from_secs(60);
/// The shortest time between two samples. So there are at most 62 of them.
const STEP: Duration = Duration::from_secs(1);

/// Counts of hits and misses at some times of the last minute.
#[derive(Default)]
pub(super) struct RecentTouches {
    samples: VecDeque<(Instant, [u64; 2])>,
}

impl RecentTouches {
    /// Takes the present counts. Returns the touches since the oldest sample of the last minute.
    pub(super) fn since_minute(&mut self, now: Instant, counts: [u64; 2]) -> [u64; 2] {
        let age = |at: Instant| now.saturating_duration_since(at);
        while self.samples.front().is_some_and(|it| age(it.0) > WINDOW) && self.samples.len() > 1 {
            self.samples.pop_front();
        }
        let base = self.samples.front().map_or([0, 0], |it| it.1);
        if self.samples.back().is_none_or(|it| age(it.0) >= STEP) {
            self.samples.push_back((now, counts));
        }
        [0, 1].map(|at: usize| counts[at].saturating_sub(base[at]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touches_older_than_a_minute_do_not_count() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut recent = RecentTouches::default();
        assert_eq!(recent.since_minute(at(0), [7, 1]), [7, 1]);
        for s in 1..=60 {
            recent.since_minute(at(s), [7 + s, 1]);
        }
        assert_eq!(recent.since_minute(at(60), [100, 2]), [93, 1]);
        assert_eq!(recent.since_minute(at(100), [100, 2]), [100 - 47, 1]);
        assert!(recent.samples.len() <= 62);
        // Without a call for an hour the last sample is the base.
        assert_eq!(recent.since_minute(at(4000), [300, 2]), [200, 0]);
        assert_eq!(recent.since_minute(at(4002), [300, 2]), [0, 0]);
    }
}
