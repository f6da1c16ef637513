//! A signal to all threads of a server to end.

use pagemesh_base::event_fd::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A signal that stays set. Its descriptor is readable once the signal is set.
#[derive(Debug)]
pub struct StopSignal {
    signaled: AtomicBool,
    event: EventFd,
}

impl StopSignal {
    /// A signal that is not set yet.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn new() -> io::Result<StopSignal> {
        Ok(StopSignal {
            signaled: AtomicBool::new(false),
            event: EventFd::new()?,
        })
    }

    /// Sets the signal.
    pub fn signal(&self) {
        self.signaled.store(true, Ordering::Release);
        self.event.signal();
    }

    /// Whether the signal is set.
    #[must_use]
    pub fn is_signaled(&self) -> bool {
        self.signaled.load(Ordering::Acquire)
    }
}

impl AsFd for StopSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
