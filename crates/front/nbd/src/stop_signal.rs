//! The signal by which a server stops a connection's thread: a level that only rises, and a
//! descriptor that wakes the thread from its wait.

use pagemesh_base::event_fd::EventFd;
use rustix::fd::{AsFd, BorrowedFd};
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

/// The stop levels of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum StopLevel {
    /// Go on.
    Running = 0,
    /// Take no more requests, finish those in flight.
    Drain = 1,
    /// End now.
    Abandon = 2,
}

/// See the module.
#[derive(Debug)]
pub struct StopSignal {
    level: AtomicU8,
    wake: EventFd,
}

impl StopSignal {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            level: AtomicU8::new(StopLevel::Running as u8),
            wake: EventFd::new()?,
        })
    }

    /// Raises the level and wakes the waiting thread.
    pub fn raise(&self, level: StopLevel) {
        self.level.fetch_max(level as u8, Ordering::Release);
        self.wake.signal();
    }

    pub fn level(&self) -> StopLevel {
        match self.level.load(Ordering::Acquire) {
            0 => StopLevel::Running,
            1 => StopLevel::Drain,
            _ => StopLevel::Abandon,
        }
    }

    /// Makes the descriptor unreadable until the level rises again.
    pub fn clear(&self) {
        self.wake.drain();
    }
}

impl AsFd for StopSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
