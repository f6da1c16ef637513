//! A wake-up between threads: a flag that costs nothing while nobody sleeps,
//! and a descriptor for those who do.

use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) struct Wake {
    fd: OwnedFd,
    raised: AtomicBool,
}

impl Wake {
    /// # Errors
    /// When the process has no descriptor left.
    pub(crate) fn new() -> std::io::Result<Wake> {
        Ok(Wake {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            raised: AtomicBool::new(false),
        })
    }

    pub(crate) fn raise(&self) {
        if !self.raised.swap(true, Ordering::AcqRel) {
            // Only a full counter can refuse, and then it is readable anyway.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// True once for one or many raises.
    pub(crate) fn take(&self) -> bool {
        if !self.raised.load(Ordering::Acquire) {
            return false;
        }
        // The descriptor first: a raise in between leaves it readable, and the
        // flag that is cleared after it was for what the caller looks at next.
        let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        self.raised.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
