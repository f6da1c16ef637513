//! The signal that ends the threads of a server: a flag that is set once, and a descriptor that
//! stays readable from then on. All threads wait for the same one.

use pagemesh_base::event_fd::EventFd;
use pagemesh_base::wait::until_ready;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// See the module.
#[derive(Debug)]
pub(crate) struct StopSignal {
    is_raised: AtomicBool,
    wake: EventFd,
}

impl StopSignal {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            is_raised: AtomicBool::new(false),
            wake: EventFd::new()?,
        })
    }

    pub(crate) fn raise(&self) {
        self.is_raised.store(true, Ordering::Release);
        self.wake.signal();
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.is_raised.load(Ordering::Acquire)
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Waits for the signal or one of the sockets, until `until` at the latest.
    pub(crate) fn wait<'a>(
        &'a self,
        sockets: impl IntoIterator<Item = BorrowedFd<'a>>,
        until: Option<Instant>,
    ) -> Result<(), Errno> {
        let mut polled = vec![PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)];
        let sockets = sockets.into_iter();
        polled.extend(sockets.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)));
        until_ready(&mut polled, until)?;
        Ok(())
    }
}
