//! The ages of requests to a device. A request that takes too long is reported, and then fails the pool.
//!
//! A request to a device cannot be cancelled safely: the kernel may carry it out later. So a pool whose device does not
//! answer fails as a whole, and its process ends.

use pagemesh_base::poison::{lock, recover};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

/// The age of a request to a disk at which the brick reports it.
pub const SLOW_REQUEST: Duration = Duration::from_secs(10);
/// The age of a request to a disk at which the pool fails. The kernel's own limits are 30 s for a command of NVMe and SCSI.
pub const REQUEST_LIMIT: Duration = Duration::from_secs(60);
/// Looks at the requests within the first limit.
const LOOKS: u32 = 4;
/// Looks that must find a request too old before the pool fails.
pub(super) const LOOKS_BEFORE_FAILURE: u32 = 4;
/// Requests that block their callers, and are watched.
const BLOCKING_MAX: usize = 64;

/// The limits of a request's age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// It is reported.
    pub slow: Duration,
    /// The pool fails.
    pub fail: Duration,
}

impl Default for RequestLimits {
    fn default() -> RequestLimits {
        RequestLimits {
            slow: SLOW_REQUEST,
            fail: REQUEST_LIMIT,
        }
    }
}

/// The start times of a user's requests, by the numbers of their buffers.
pub(super) struct RequestClock {
    epoch: Instant,
    slots: Vec<RequestSlot>,
}

#[derive(Default)]
struct RequestSlot {
    /// Milliseconds since the epoch, plus 1; 0 without a request.
    started: AtomicU64,
    offset: AtomicU64,
    /// The start of the request that was reported last.
    reported: AtomicU64,
    /// Looks that found that request old.
    looks: AtomicU32,
}

impl RequestClock {
    fn new(epoch: Instant, count: usize) -> RequestClock {
        RequestClock {
            epoch,
            slots: (0..count).map(|_| RequestSlot::default()).collect(),
        }
    }

    fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64 + 1
    }

    /// A request has started.
    pub(super) fn start(&self, number: usize, offset: u64) {
        let slot = &self.slots[number];
        slot.offset.store(offset, Ordering::Relaxed);
        slot.started.store(self.now(), Ordering::Release);
    }

    /// It has ended.
    pub(super) fn end(&self, number: usize) {
        self.slots[number].started.store(0, Ordering::Release);
    }
}

/// A request that is older than a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OldRequest {
    pub(super) offset: u64,
    pub(super) age: Duration,
    /// Looks that found it old.
    pub(super) looks: u32,
}

/// The requests to the devices of a disk, by their bytes in the disk.
pub(super) struct WatchedRequests {
    epoch: Instant,
    clocks: Mutex<Vec<Weak<RequestClock>>>,
    blocking: RequestClock,
    free: Mutex<Vec<usize>>,
    is_stopping: Mutex<bool>,
    stopped: Condvar,
}

impl WatchedRequests {
    pub(super) fn new() -> WatchedRequests {
        let epoch = Instant::now();
        WatchedRequests {
            epoch,
            clocks: Mutex::default(),
            blocking: RequestClock::new(epoch, BLOCKING_MAX),
            free: Mutex::new((0..BLOCKING_MAX).collect()),
            is_stopping: Mutex::new(false),
            stopped: Condvar::new(),
        }
    }

    /// A clock for a new user.
    pub(super) fn add(&self, count: usize) -> Arc<RequestClock> {
        let clock = Arc::new(RequestClock::new(self.epoch, count));
        let mut clocks = lock(&self.clocks);
        clocks.retain(|clock| clock.strong_count() > 0);
        clocks.push(Arc::downgrade(&clock));
        clock
    }

    /// Runs a request that blocks its caller.
    pub(super) fn watch<T>(&self, offset: u64, request: impl FnOnce() -> T) -> T {
        let slot = lock(&self.free).pop();
        if let Some(slot) = slot {
            self.blocking.start(slot, offset);
        }
        let done = request();
        if let Some(slot) = slot {
            self.blocking.end(slot);
            lock(&self.free).push(slot);
        }
        done
    }

    /// The requests that are older than a limit.
    pub(super) fn old_requests(&self, limit: Duration) -> Vec<OldRequest> {
        let users: Vec<_> = lock(&self.clocks)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let clocks = users.iter().map(|clock| &**clock);
        let now = self.blocking.now();
        let mut old = Vec::new();
        for slot in clocks
            .chain([&self.blocking])
            .flat_map(|clock| &clock.slots)
        {
            let started = slot.started.load(Ordering::Acquire);
            let age = Duration::from_millis(now.saturating_sub(started));
            if started != 0 && age >= limit {
                if slot.reported.swap(started, Ordering::Relaxed) != started {
                    slot.looks.store(0, Ordering::Relaxed);
                }
                old.push(OldRequest {
                    offset: slot.offset.load(Ordering::Relaxed),
                    age,
                    looks: slot.looks.fetch_add(1, Ordering::Relaxed).saturating_add(1),
                });
            }
        }
        old
    }

    /// Waits until it is time for a look. False: the disk ends.
    pub(super) fn wait_for_look(&self, limits: RequestLimits) -> bool {
        let pause = limits.slow / LOOKS;
        let guard = lock(&self.is_stopping);
        let waited = self
            .stopped
            .wait_timeout_while(guard, pause, |is_stopping| !*is_stopping);
        !*recover(waited).0
    }

    /// Ends the watch.
    pub(super) fn stop(&self) {
        *lock(&self.is_stopping) = true;
        self.stopped.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_request_is_new_once() {
        let watched = WatchedRequests::new();
        let clock = watched.add(2);
        assert_eq!(watched.old_requests(Duration::ZERO), []);
        clock.start(1, 4096);
        let looks = [0; 2].map(|_| watched.old_requests(Duration::ZERO));
        assert_eq!(looks.each_ref().map(Vec::len), [1, 1]);
        assert_eq!((looks[0][0].offset, looks[0][0].looks), (4096, 1));
        assert_eq!(looks[1][0].looks, 2);
        assert_eq!(watched.old_requests(Duration::from_secs(3600)), []);
        clock.end(1);
        assert_eq!(watched.old_requests(Duration::ZERO), []);
        watched.watch(8192, || {
            assert_eq!(watched.old_requests(Duration::ZERO)[0].offset, 8192);
        });
        assert_eq!(watched.old_requests(Duration::ZERO), []);
    }
}
