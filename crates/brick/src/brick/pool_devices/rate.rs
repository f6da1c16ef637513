//! The rate at which a drain moves data.

use std::time::{Duration, Instant};

/// The shortest span that a rate is measured over.
const SPAN: Duration = Duration::from_secs(2);

/// Bytes moved, and their rate over the last seconds.
pub(super) struct MoveRate {
    total: u64,
    /// The start of the present span, and the total at it.
    span: (Instant, u64),
    /// The rate of the span before.
    last_bytes_per_s: Option<u64>,
}

impl MoveRate {
    pub(super) fn new(now: Instant) -> MoveRate {
        MoveRate {
            total: 0,
            span: (now, 0),
            last_bytes_per_s: None,
        }
    }

    pub(super) fn add(&mut self, bytes: u64, now: Instant) {
        self.total += bytes;
        let (began, before) = self.span;
        let elapsed = now.saturating_duration_since(began);
        if elapsed >= SPAN {
            self.last_bytes_per_s = Some(per_second(self.total - before, elapsed));
            self.span = (now, self.total);
        }
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The rate of the present span if it is long, or else of the last one.
    pub(super) fn bytes_per_s(&self, now: Instant) -> u64 {
        let (began, before) = self.span;
        let elapsed = now.saturating_duration_since(began);
        match self.last_bytes_per_s {
            Some(last) if elapsed < SPAN => last,
            _ => per_second(self.total - before, elapsed),
        }
    }
}

fn per_second(bytes: u64, elapsed: Duration) -> u64 {
    let ms = elapsed.as_millis().max(1);
    u64::try_from(u128::from(bytes) * 1000 / ms).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_of_the_last_seconds() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut rate = MoveRate::new(start);
        rate.add(4000, at(1000));
        assert_eq!(rate.bytes_per_s(at(1000)), 4000);
        rate.add(4000, at(2000));
        assert_eq!((rate.total(), rate.bytes_per_s(at(2500))), (8000, 4000));
        // Nothing moves any more.
        rate.add(0, at(4000));
        assert_eq!(rate.bytes_per_s(at(4000)), 0);
    }
}
