//! A wake-up between threads: a flag that costs nothing while no thread sleeps, and a
//! descriptor for threads that do.

use crate::steps::step;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::event_fd::EventFd;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub struct Wake {
    fd: EventFd,
    raised: AtomicBool,
    /// The number of raises that were taken before they reached the descriptor. If they stayed
    /// there, the descriptor would stay readable, and its poller awake. Only takers use this.
    uncounted_raises: AtomicU64,
}

impl Wake {
    /// Creates a wake-up that is not raised.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn new() -> std::io::Result<Wake> {
        Ok(Wake {
            fd: EventFd::new()?,
            raised: AtomicBool::new(false),
            uncounted_raises: AtomicU64::new(0),
        })
    }

    pub fn raise(&self) {
        step("flag");
        if !self.raised.swap(true, Ordering::AcqRel) {
            step("descriptor");
            self.fd.signal();
        }
    }

    /// Takes the wake-up: true once for one or many raises.
    pub fn take(&self) -> bool {
        let owed = self.uncounted_raises.load(Ordering::Relaxed);
        step("flag");
        if owed == 0 && !self.raised.load(Ordering::Acquire) {
            return false;
        }
        let clear = || {
            step("flag");
            self.raised.swap(false, Ordering::AcqRel)
        };
        let cleared = defect::is(Defect::WakeClearedFirst).then(clear);
        // The descriptor is read first. A raise that was read there set the flag before the
        // flag is cleared here, and the caller looks for its work next.
        step("descriptor");
        let count = self.fd.drain();
        let was_raised = cleared.unwrap_or_else(clear);
        let left = owed + u64::from(was_raised) - count;
        self.uncounted_raises.store(left, Ordering::Relaxed);
        was_raised
    }

    #[cfg(any(test, feature = "test-api"))]
    pub fn is_readable(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut polled = [PollFd::new(&self.fd, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).is_ok_and(|count| count > 0)
    }

    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    #[test]
    fn early_taken_raise_leaves_descriptor_clear() {
        let wake = Wake::new().unwrap();
        wake.raise();
        assert!(wake.is_readable() && wake.take());
        // Does the two steps of `raise`, with the taker in between.
        assert!(!wake.raised.swap(true, Ordering::AcqRel));
        assert!(wake.take());
        wake.fd.signal();
        assert!(wake.is_readable());
        assert!(!wake.take());
        assert!(!wake.is_readable());
        wake.raise();
        assert!(wake.is_readable() && wake.take() && !wake.is_readable());
    }

    #[test]
    fn no_raise_is_lost_among_threads() {
        const EACH: u64 = 20_000;
        let (wake, count) = (Wake::new().unwrap(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        count.fetch_add(1, Ordering::Relaxed);
                        wake.raise();
                    }
                });
            }
            let mut seen = 0;
            while seen < 3 * EACH {
                let mut polled = [PollFd::new(&wake.fd, PollFlags::IN)];
                let limit = Timespec {
                    tv_sec: 10,
                    tv_nsec: 0,
                };
                assert_ne!(poll(&mut polled, Some(&limit)), Ok(0), "slept on a raise");
                if wake.take() {
                    seen = count.load(Ordering::Relaxed);
                }
            }
        });
        wake.take();
        assert!(!wake.is_readable());
    }
}
