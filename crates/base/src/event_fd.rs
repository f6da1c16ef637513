//! A descriptor that wakes a thread from `poll`, `eventfd(2)`: readable from a signal on until it
//! is drained.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// See the module.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A descriptor that is not readable yet. No program that is executed inherits it.
    ///
    /// # Errors
    /// When the process or the system has no descriptor left.
    pub fn new() -> io::Result<EventFd> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(EventFd(eventfd(0, flags)?))
    }

    /// An event descriptor under another number, from a duplicate of [`EventFd::into_fd`].
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> EventFd {
        EventFd(fd)
    }

    /// The descriptor alone.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Makes the descriptor readable. It is one system call and never blocks.
    pub fn signal(&self) {
        // A write fails only if the counter is full, and then the descriptor is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears the descriptor. Returns the number of signals since it was last clear.
    pub fn drain(&self) -> u64 {
        let mut count = [0u8; 8];
        let read = rustix::io::read(&self.0, &mut count);
        read.map_or(0, |_| u64::from_ne_bytes(count))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::until_readable;
    use std::time::Instant;

    #[test]
    fn event_fd_is_readable_from_signal_to_drain() {
        let event = EventFd::new().unwrap();
        let is_readable = || until_readable(&[event.as_raw_fd()], Some(Instant::now())).unwrap();
        assert!(!is_readable());
        event.signal();
        event.signal();
        assert!(is_readable());
        assert_eq!(event.drain(), 2);
        assert!(!is_readable());
        assert_eq!(event.drain(), 0);
    }
}
