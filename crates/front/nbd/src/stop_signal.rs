//! The signal by which a server stops a connection's thread: a level that only rises, and a
//! descriptor that wakes the thread from its wait.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

/// The stop levels of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum StopLevel {
    /// Go on.
    Running = 0,
    /// Take no more requests, finish those in flight.
    Drain = 1,
    /// End now.
    Abandon = 2,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct StopSignal {
    level: AtomicU8,
    wake_fd: OwnedFd,
}

impl StopSignal {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            level: AtomicU8::new(StopLevel::Running as u8),
            wake_fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Raises the level and wakes the waiting thread.
    pub(crate) fn raise(&self, level: StopLevel) {
        self.level.fetch_max(level as u8, Ordering::Release);
        // The counter cannot reach its limit by two levels, and a full one would be readable all
        // the same.
        let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
    }

    pub(crate) fn level(&self) -> StopLevel {
        match self.level.load(Ordering::Acquire) {
            0 => StopLevel::Running,
            1 => StopLevel::Drain,
            _ => StopLevel::Abandon,
        }
    }

    /// Makes the descriptor unreadable until the level rises again.
    pub(crate) fn clear(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake_fd, &mut count);
    }
}

impl AsFd for StopSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake_fd.as_fd()
    }
}
