//! Sleeping until a descriptor is readable or a time has come. The module needs `unsafe`, because
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
    match poll(&mut polled, timeout(until).as_ref()) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(cause) => {
            std::thread::sleep(POLL_ERROR_PAUSE);
            Err(cause.into())
        }
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
#[must_use]
pub fn timeout(until: Option<Instant>) -> Option<Timespec> {
    let left = until?.saturating_duration_since(Instant::now());
    // A day is as good as more, and always fits.
    let left = left.min(Duration::from_secs(86_400));
    Timespec::try_from(left).ok()
}
