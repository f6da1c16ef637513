//! The time by which tokens expire.
//!
//! A wall clock may jump: an operator or NTP sets it back, or a machine starts without one. If tokens
//! expired by the wall clock alone, a jump back would make an expired token valid again. So:
//!
//! 1. Token time is the later of two times: the wall clock, and the last mark plus the time that the
//!    monotonic clock has counted since. It never goes back while the manager runs.
//! 2. The store keeps a mark of token time: with each change of a token, and every
//!    [`MARK_INTERVAL_S`] while a token can expire. A restarted manager continues from the mark.
//! 3. The sweep writes into the record of an expired token that it has expired. Then no clock can
//!    make it valid again.
//!
//! If the wall clock is set back while the manager is down, a token lives longer by the time that the
//! manager was down, and at most [`MARK_INTERVAL_S`] more. If the wall clock jumps forward, tokens
//! expire early and stay expired.

use std::time::Duration;

/// Seconds between two marks in the store, if no token changes. Short for a token's life, long for a
/// disk.
pub const MARK_INTERVAL_S: u64 = 3600;

/// Token time: seconds since 1970 that never go back.
#[derive(Clone, Debug)]
pub struct TokenTime {
    /// A time, and the monotonic clock at that time.
    known_unix_s: u64,
    known_at: Duration,
}

impl TokenTime {
    /// Token time from a stored mark on.
    #[must_use]
    pub fn from_mark(mark_unix_s: u64, elapsed: Duration) -> TokenTime {
        TokenTime {
            known_unix_s: mark_unix_s,
            known_at: elapsed,
        }
    }

    /// The time now, by the monotonic clock and the wall clock.
    pub fn now(&mut self, elapsed: Duration, wall_unix_s: u64) -> u64 {
        let ran_s = elapsed.saturating_sub(self.known_at).as_secs();
        let counted = self.known_unix_s.saturating_add(ran_s);
        if wall_unix_s > counted {
            *self = TokenTime::from_mark(wall_unix_s, elapsed);
        }
        wall_unix_s.max(counted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_time_follows_later_clock() {
        let s = Duration::from_secs;
        let mut time = TokenTime::from_mark(0, s(5));
        assert_eq!(time.now(s(5), 1000), 1000);
        assert_eq!(time.now(s(15), 1010), 1010);
        // The wall clock jumps back; the monotonic clock counts on.
        assert_eq!(time.now(s(25), 3), 1020);
        // It jumps forward, and back again.
        assert_eq!(time.now(s(26), 5000), 5000);
        assert_eq!(time.now(s(36), 1031), 5010);
    }

    #[test]
    fn mark_holds_token_time_over_restart() {
        let mut time = TokenTime::from_mark(1000, Duration::ZERO);
        assert_eq!(time.now(Duration::from_secs(7), 0), 1007);
        let mut late = TokenTime::from_mark(u64::MAX, Duration::ZERO);
        assert_eq!(late.now(Duration::from_secs(7), 0), u64::MAX);
    }
}
