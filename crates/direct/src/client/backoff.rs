//! Delays between attempts that failed, and the reason that the kernel serves calls until then.
//!
//! Invariants: an attempt costs connections to the mount and the bricks, so calls within the delay
//! make none. The fields are relaxed: a thread that sees an old delay tries once more, or once
//! less.

use crate::shared::op_counters::Why;
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Delay between attempts to join a mount, or to map the legs of a new layout lease.
pub(super) const RETRY: Duration = Duration::from_millis(10);
/// Delay between attempts while the process forks: a fork takes about as long.
pub(super) const FORK_RETRY: Duration = Duration::from_millis(1);
/// Delay between attempts where rows or sessions are lacking. While more processes want one than
/// there are, each attempt costs connections to the mount and the bricks.
pub(super) const FULL_RETRY: Duration = Duration::from_secs(1);

/// When the next attempt is due, in milliseconds of the monotonic clock, and the reason for the
/// delay.
pub(super) struct Backoff {
    retry_at: AtomicU64,
    reason: AtomicReason,
}

impl Backoff {
    /// An attempt is due at once. `why` is the reason until the first delay.
    pub(super) fn new(why: Why) -> Backoff {
        Backoff {
            retry_at: AtomicU64::new(0),
            reason: AtomicReason::new(why),
        }
    }

    /// The reason, if no attempt is due yet.
    pub(super) fn check(&self, now_ms: u64) -> Result<(), Why> {
        if now_ms < self.retry_at.load(Ordering::Relaxed) {
            return Err(self.reason.get());
        }
        Ok(())
    }

    /// No attempt is due before this delay has passed.
    pub(super) fn delay(&self, now_ms: u64, wait: Duration, why: Why) {
        self.reason.set(why);
        let retry_at = now_ms + wait.as_millis() as u64;
        self.retry_at.store(retry_at, Ordering::Relaxed);
    }
}

/// A reason that other threads may replace.
pub(super) struct AtomicReason(AtomicU32);

impl AtomicReason {
    pub(super) fn new(why: Why) -> AtomicReason {
        AtomicReason(AtomicU32::new(why as u32))
    }

    pub(super) fn get(&self) -> Why {
        let number = self.0.load(Ordering::Relaxed) as usize;
        Why::ALL.get(number).copied().unwrap_or(Why::NoMount)
    }

    pub(super) fn set(&self, why: Why) {
        self.0.store(why as u32, Ordering::Relaxed);
    }
}

pub(super) fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}
