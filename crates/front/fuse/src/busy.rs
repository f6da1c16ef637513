//! Keeps idle processors awake while a mount is busy. Otherwise each request would have to wake a
//! processor: for the program that waits for its answer, and for bricks on this machine.
//!
//! A serving thread reports each request by a load of a shared word, and a store to another word
//! once in [`IDLE_GRACE`]. While there are requests, a thread checks that word as often; otherwise
//! it sleeps.

use pagemesh_base::cpu_latency::{BUSY_REQUESTS_MIN, CpuLatencyRequest, IDLE_GRACE};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::thread::JoinHandle;

/// The thread sleeps; requests are counted.
const IDLE: u8 = 0;
/// The thread checks whether requests go on.
const ACTIVE: u8 = 1;
/// Processors are not kept awake at all.
const DISABLED: u8 = 2;

/// Whether a mount is busy.
#[derive(Debug)]
pub(crate) struct BusyState {
    state: AtomicU8,
    /// Requests since the mount was busy, up to [`BUSY_REQUESTS_MIN`] or a few more.
    count: AtomicU32,
    /// A request has come since the thread's last check.
    has_new_request: AtomicBool,
    is_stopping: AtomicBool,
}

/// The thread that keeps processors awake.
pub(crate) struct CpuAwakeThread {
    busy: Arc<BusyState>,
    thread: Option<JoinHandle<()>>,
}

impl CpuAwakeThread {
    /// Uses this device; none: does nothing.
    pub(crate) fn start(device: Option<PathBuf>) -> io::Result<CpuAwakeThread> {
        let busy = Arc::new(BusyState {
            state: AtomicU8::new(if device.is_some() { IDLE } else { DISABLED }),
            count: AtomicU32::new(0),
            has_new_request: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
        });
        let keep = |device: PathBuf| {
            let busy = Arc::clone(&busy);
            let thread = std::thread::Builder::new().name("fuse-awake".into());
            thread.spawn(move || busy.run(&device))
        };
        let thread = device.map(keep).transpose()?;
        Ok(CpuAwakeThread { busy, thread })
    }

    /// A counter for a serving thread.
    pub(crate) fn request_counter(&self) -> RequestCounter {
        RequestCounter {
            busy: Arc::clone(&self.busy),
            awake_thread: self.thread.as_ref().map(|thread| thread.thread().clone()),
        }
    }
}

impl Drop for CpuAwakeThread {
    fn drop(&mut self) {
        self.busy.is_stopping.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// A serving thread's handle to report requests.
#[derive(Clone, Debug)]
pub(crate) struct RequestCounter {
    busy: Arc<BusyState>,
    awake_thread: Option<std::thread::Thread>,
}

impl RequestCounter {
    /// Reports a request.
    pub(crate) fn count_request(&self) {
        let busy = &*self.busy;
        match busy.state.load(Ordering::Relaxed) {
            IDLE => {
                let before = busy.count.fetch_add(1, Ordering::Relaxed);
                if let (BUSY_REQUESTS_MIN, Some(keeper)) = (before + 1, &self.awake_thread) {
                    keeper.unpark();
                }
            }
            ACTIVE if !busy.has_new_request.load(Ordering::Relaxed) => {
                busy.has_new_request.store(true, Ordering::Relaxed);
            }
            _ => {}
        }
    }
}

impl BusyState {
    fn run(&self, device: &std::path::Path) {
        while !self.is_stopping.load(Ordering::Relaxed) {
            if self.count.load(Ordering::Relaxed) < BUSY_REQUESTS_MIN {
                std::thread::park();
                continue;
            }
            self.state.store(ACTIVE, Ordering::Relaxed);
            let mut awake = None;
            while self.has_more_requests() {
                if awake.is_none() {
                    match CpuLatencyRequest::open(device) {
                        Ok(held) => awake = Some(held),
                        Err(cause) => {
                            tracing::debug!(%cause, ?device, "cannot keep processors awake");
                            self.state.store(DISABLED, Ordering::Relaxed);
                            return;
                        }
                    }
                }
            }
            drop(awake);
            self.count.store(0, Ordering::Relaxed);
            self.state.store(IDLE, Ordering::Relaxed);
        }
    }

    /// Whether a request comes within the grace period.
    fn has_more_requests(&self) -> bool {
        self.has_new_request.store(false, Ordering::Relaxed);
        std::thread::park_timeout(IDLE_GRACE);
        self.has_new_request.load(Ordering::Relaxed) && !self.is_stopping.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count_until(noter: &RequestCounter, is_so: impl Fn() -> bool) {
        while !is_so() {
            noter.count_request();
            std::thread::yield_now();
        }
    }

    #[test]
    fn cpus_stay_awake_while_requests_arrive() {
        let dir = tempfile::tempdir().expect("a directory");
        let device = dir.path().join("device");
        std::fs::write(&device, b"").expect("written");
        let written = || std::fs::read(&device).expect("read") == [0; 4];
        let keeper = CpuAwakeThread::start(Some(device.clone())).expect("a thread");
        let noter = keeper.request_counter();
        (1..BUSY_REQUESTS_MIN).for_each(|_| noter.count_request());
        assert_eq!(
            noter.busy.state.load(Ordering::Relaxed),
            IDLE,
            "that is little"
        );
        for _ in 0..2 {
            count_until(&noter, written);
            while noter.busy.state.load(Ordering::Relaxed) != IDLE {
                std::thread::yield_now();
            }
            std::fs::write(&device, b"").expect("written");
        }
        // It can also end while it keeps processors awake.
        count_until(&noter, written);
        drop(keeper);
    }

    #[test]
    fn unusable_device_disables_cpu_awake_thread() {
        let dir = tempfile::tempdir().expect("a directory");
        let keeper = CpuAwakeThread::start(Some(dir.path().join("none"))).expect("a thread");
        let noter = keeper.request_counter();
        count_until(&noter, || {
            noter.busy.state.load(Ordering::Relaxed) == DISABLED
        });
        noter.count_request();
        let keeper = CpuAwakeThread::start(None).expect("nothing");
        keeper.request_counter().count_request();
    }
}
