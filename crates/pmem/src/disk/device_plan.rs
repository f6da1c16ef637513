//! Errors of a device by plan, for tests.

use super::device::RequestKind;
use pagemesh_base::event_fd::EventFd;
use pagemesh_base::poison::{lock, recover};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

thread_local! {
    static NEXT: RefCell<VecDeque<Arc<DevicePlan>>> = const { RefCell::new(VecDeque::new()) };
}

/// The kind of a request to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlannedRequest {
    /// It reads.
    Read,
    /// It writes.
    Write,
    /// It flushes the device's write cache.
    Flush,
}

impl From<RequestKind> for PlannedRequest {
    fn from(kind: RequestKind) -> PlannedRequest {
        match kind {
            RequestKind::Read => PlannedRequest::Read,
            RequestKind::Write => PlannedRequest::Write,
        }
    }
}

/// The fault of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFault {
    /// It fails with this error number.
    Error(i32),
    /// It ends after so many bytes, which are not transferred either.
    Short(usize),
    /// It does not end before the plan is cleared.
    Hang,
    /// Its thread panics.
    Panic,
}

struct PlannedFault {
    request: PlannedRequest,
    bytes: Range<u64>,
    /// How many requests it befalls.
    left: u64,
    fault: DeviceFault,
}

/// The faults of a device. A request has the first one that fits.
#[derive(Default)]
pub struct DevicePlan {
    faults: Mutex<Vec<PlannedFault>>,
    cleared: Condvar,
    refuses_io_uring: AtomicBool,
    refuses_threads: AtomicBool,
    befallen: AtomicU64,
    /// Signaled when the plan is cleared: a request in a ring that hangs waits for one.
    hung: Mutex<Vec<EventFd>>,
}

impl DevicePlan {
    /// A plan without faults for the next device that this thread opens and that has none.
    #[must_use]
    pub fn of_next_device() -> Arc<DevicePlan> {
        let plan = Arc::new(DevicePlan::default());
        NEXT.with_borrow_mut(|next| next.push_back(plan.clone()));
        plan
    }

    pub(super) fn take_next() -> Option<Arc<DevicePlan>> {
        NEXT.with_borrow_mut(VecDeque::pop_front)
    }

    /// The next `count` requests of a kind that touch these bytes have a fault. A flush touches all bytes.
    pub fn add(&self, request: PlannedRequest, bytes: Range<u64>, count: u64, fault: DeviceFault) {
        lock(&self.faults).push(PlannedFault {
            request,
            bytes,
            left: count,
            fault,
        });
    }

    /// All requests fail with this error number: the device is gone.
    pub fn fail_all(&self, error: i32) {
        for request in [
            PlannedRequest::Read,
            PlannedRequest::Write,
            PlannedRequest::Flush,
        ] {
            self.add(request, 0..u64::MAX, u64::MAX, DeviceFault::Error(error));
        }
    }

    /// Ends all faults.
    pub fn clear(&self) {
        lock(&self.faults).clear();
        self.cleared.notify_all();
        lock(&self.hung).iter().for_each(EventFd::signal);
    }

    /// The system refuses io_uring from now on.
    pub fn refuse_io_uring(&self) {
        self.refuses_io_uring.store(true, Ordering::Relaxed);
    }

    /// The system refuses threads that flush the device from now on.
    pub fn refuse_threads(&self) {
        self.refuses_threads.store(true, Ordering::Relaxed);
    }

    /// Requests that had a fault so far.
    #[must_use]
    pub fn befallen(&self) -> u64 {
        self.befallen.load(Ordering::Acquire)
    }

    pub(super) fn refuses_ring(&self) -> bool {
        self.refuses_io_uring.load(Ordering::Relaxed)
    }

    pub(super) fn refuses_flush_threads(&self) -> bool {
        self.refuses_threads.load(Ordering::Relaxed)
    }

    /// A descriptor that becomes readable at the end of a request, if the request hangs. A request of a ring does not block its
    /// thread.
    pub(super) fn hang_of(
        &self,
        request: PlannedRequest,
        offset: u64,
        len: usize,
    ) -> Option<RawFd> {
        let mut faults = lock(&self.faults);
        let planned = find_fault(&mut faults, request, offset, len)?;
        if planned.fault != DeviceFault::Hang {
            return None;
        }
        planned.left -= 1;
        self.befallen.fetch_add(1, Ordering::AcqRel);
        let event = EventFd::new().expect("a descriptor");
        let fd = event.as_raw_fd();
        lock(&self.hung).push(event);
        Some(fd)
    }

    /// The result of a request, if a fault befalls it: a number of bytes, or a negated error number. Blocks while it hangs.
    pub(super) fn result_of(
        &self,
        request: PlannedRequest,
        offset: u64,
        len: usize,
    ) -> Option<i32> {
        let mut faults = lock(&self.faults);
        let planned = find_fault(&mut faults, request, offset, len)?;
        planned.left -= 1;
        let fault = planned.fault;
        self.befallen.fetch_add(1, Ordering::AcqRel);
        match fault {
            DeviceFault::Error(code) => Some(-code),
            DeviceFault::Short(done) => Some(done as i32),
            DeviceFault::Panic => panic!("a planned panic"),
            DeviceFault::Hang => {
                while !faults.is_empty() {
                    faults = recover(self.cleared.wait(faults));
                }
                None
            }
        }
    }
}

/// The first fault that befalls a request.
fn find_fault(
    faults: &mut [PlannedFault],
    request: PlannedRequest,
    offset: u64,
    len: usize,
) -> Option<&mut PlannedFault> {
    let end = offset + len as u64;
    let touches = |planned: &PlannedFault| {
        let is_hit = planned.bytes.start < end && offset < planned.bytes.end;
        planned.request == request && (is_hit || request == PlannedRequest::Flush)
    };
    let mut left = faults.iter_mut().filter(|planned| planned.left > 0);
    left.find(|planned| touches(planned))
}
