//! Sleeping until a descriptor is ready or a time has come. Needs `unsafe`: a channel
//! names its descriptors by number.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{BorrowedFd, RawFd};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// Waits for descriptors until `until` at the latest; a [`pagemesh_fs::Wait`].
pub fn wait(descriptors: &[RawFd], until: Option<Instant>) {
    let open = descriptors.iter().filter(|descriptor| **descriptor >= 0);
    let mut polled: Vec<_> = open
        .map(|&descriptor| PollFd::from_borrowed_fd(borrow(descriptor), PollFlags::IN))
        .collect();
    match poll(&mut polled, timeout(until).as_ref()) {
        // Whoever waits looks again in any case.
        Ok(_) | Err(Errno::INTR) => {}
        Err(cause) => {
            tracing::error!(%cause, "cannot wait for the volume");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[allow(unsafe_code)]
fn borrow<'a>(descriptor: RawFd) -> BorrowedFd<'a> {
    // SAFETY: the number is not -1, and the borrow lives for one `poll` in
    // `wait`, which neither reads from the descriptor nor keeps it. Should it
    // be closed or be another's meanwhile, `poll` reports that or wakes once
    // too often.
    unsafe { BorrowedFd::borrow_raw(descriptor) }
}

fn timeout(until: Option<Instant>) -> Option<Timespec> {
    let left = until?.saturating_duration_since(Instant::now());
    // More than a day makes no difference, and always fits.
    let left = left.min(Duration::from_secs(86_400));
    Timespec::try_from(left).ok()
}
