//! Sleeping until a descriptor is readable or a time has come. The only module here with
//! `unsafe`: channels and legs name their descriptors by number.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{BorrowedFd, RawFd};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// After the kernel refused to wait, for so long instead.
const POLL_ERROR_PAUSE: Duration = Duration::from_millis(1);

/// Waits for one of these descriptors until `until` at the latest, and maybe not at all:
/// whoever waits looks again in any case. Tells whether one is. One system call, whatever
/// their number.
///
/// # Errors
/// When the kernel refuses, for want of memory say; after a moment.
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
    // SAFETY: the number is not -1, and the borrow lives for one `poll`, which neither
    // reads from the descriptor nor keeps it. Should it be closed or be another's
    // meanwhile, `poll` reports that or wakes once too often.
    unsafe { BorrowedFd::borrow_raw(descriptor) }
}

/// What is left until then, for the kernel.
#[must_use]
pub fn timeout(until: Option<Instant>) -> Option<Timespec> {
    let left = until?.saturating_duration_since(Instant::now());
    // More than a day makes no difference, and always fits.
    let left = left.min(Duration::from_secs(86_400));
    Timespec::try_from(left).ok()
}
