//! A word to all threads of a server at once: end.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Once said, it stays said; its descriptor is readable from then on.
#[derive(Debug)]
pub struct StopSignal {
    signaled: AtomicBool,
    fd: OwnedFd,
}

impl StopSignal {
    /// Not said yet.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn new() -> io::Result<StopSignal> {
        Ok(StopSignal {
            signaled: AtomicBool::new(false),
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Says it.
    pub fn signal(&self) {
        self.signaled.store(true, Ordering::Release);
        // Fails only when the counter is full: then it is readable already.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Whether it was said.
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
