//! Sleeping until a descriptor is ready or a time has come. The module needs `unsafe`, because
//! channels and legs name their descriptors by number.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{BorrowedFd, RawFd};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// The sleep after the kernel refused to wait.
const POLL_ERROR_PAUSE: Duration = Duration::from_millis(1);

/// Waits until one of these descriptors is readable, at most until `until`. It may return early, so
/// the caller checks again in any case. Returns whether one is readable. It is one system call for
/// any number of descriptors.
///
/// # Errors
/// When the kernel refuses, for want of memory for example; after a short sleep.
pub fn until_readable(descriptors: &[RawFd], until: Option<Instant>) -> std::io::Result<bool> {
    let open = descriptors.iter().filter(|descriptor| **descriptor >= 0);
    let mut polled: Vec<_> = open
        .map(|&descriptor| PollFd::from_borrowed_fd(borrow(descriptor), PollFlags::IN))
        .collect();
    match until_ready(&mut polled, until) {
        Ok(_) => Ok(polled.iter().any(|polled| !polled.revents().is_empty())),
        Err(cause) => {
            std::thread::sleep(POLL_ERROR_PAUSE);
            Err(cause.into())
        }
    }
}

/// Waits until one of the descriptors is ready for its flags, at most until `until`. Returns false
/// if none is ready in time. A signal may end the wait early with true, so the caller checks the
/// flags of each descriptor. It is one system call.
///
/// # Errors
/// When the kernel refuses, for want of memory for example.
pub fn until_ready(polled: &mut [PollFd<'_>], until: Option<Instant>) -> Result<bool, Errno> {
    match poll(polled, timeout(until).as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(true),
        Err(errno) => Err(errno),
    }
}

#[allow(unsafe_code)]
fn borrow<'a>(descriptor: RawFd) -> BorrowedFd<'a> {
    // SAFETY: the number is not -1, and the borrow lives for one `poll`, which neither reads from
    // the descriptor nor keeps it. If it is closed or reused meanwhile, `poll` reports that or
    // wakes once too often.
    unsafe { BorrowedFd::borrow_raw(descriptor) }
}

/// The time left until `until`, for the kernel.
fn timeout(until: Option<Instant>) -> Option<Timespec> {
    let left = until?.saturating_duration_since(Instant::now());
    // A day is as good as more, and always fits.
    let left = left.min(Duration::from_secs(86_400));
    Timespec::try_from(left).ok()
}
