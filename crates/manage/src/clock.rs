//! Time behind a trait: tests set it by hand.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The manager's source of time.
pub trait Clock: Send + Sync {
    /// Time since a fixed point; never goes back.
    fn elapsed(&self) -> Duration;

    /// Seconds since 1970, for people; may go back.
    fn unix_s(&self) -> u64;

    /// Milliseconds since 1970, for people; may go back.
    fn unix_ms(&self) -> u64 {
        self.unix_s().saturating_mul(1000)
    }
}

/// The system's clock.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl SystemClock {
    /// A clock that starts now.
    #[must_use]
    pub fn new() -> SystemClock {
        SystemClock(Instant::now())
    }
}

impl Default for SystemClock {
    fn default() -> SystemClock {
        SystemClock::new()
    }
}

impl Clock for SystemClock {
    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    fn unix_s(&self) -> u64 {
        self.unix_ms() / 1000
    }

    #[expect(clippy::disallowed_methods, reason = "for people")]
    fn unix_ms(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(0, |since| since.as_millis() as u64)
    }
}
