//! A signal to all threads of a server to end.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A signal that stays set. Its descriptor is readable once the signal is set.
#[derive(Debug)]
pub struct StopSignal {
    signaled: AtomicBool,
    fd: OwnedFd,
}

impl StopSignal {
    /// A signal that is not set yet.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn new() -> io::Result<StopSignal> {
        Ok(StopSignal {
            signaled: AtomicBool::new(false),
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Sets the signal.
    pub fn signal(&self) {
        self.signaled.store(true, Ordering::Release);
        // Fails only when the counter is full: the descriptor is readable then.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Whether the signal is set.
    #[must_use]
    pub fn is_signaled(&self) -> bool {
        self.signaled.load(Ordering::Acquire)
    }
}

impl AsFd for StopSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
