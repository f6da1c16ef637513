//! How a server tells a connection's thread to end: a level that only rises,
//! and a descriptor that wakes the thread from its wait.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

/// What a thread is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Level {
    /// Go on.
    Run = 0,
    /// Take no more requests, finish those in flight.
    Drain = 1,
    /// End now.
    Abandon = 2,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Signal {
    level: AtomicU8,
    wake: OwnedFd,
}

impl Signal {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            level: AtomicU8::new(Level::Run as u8),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Raises the level and wakes whoever waits.
    pub(crate) fn raise(&self, level: Level) {
        self.level.fetch_max(level as u8, Ordering::Release);
        // The counter cannot reach its limit by two levels, and a full one
        // would be readable all the same.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(crate) fn level(&self) -> Level {
        match self.level.load(Ordering::Acquire) {
            0 => Level::Run,
            1 => Level::Drain,
            _ => Level::Abandon,
        }
    }

    /// Makes the descriptor unreadable until the level rises again.
    pub(crate) fn clear(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
