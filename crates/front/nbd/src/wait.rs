//! Sleeps until a descriptor is ready or a deadline has come. It is the only module with `unsafe`:
//! a channel names its descriptors by number.

use crate::stop_signal::StopSignal;
use pagemesh_base::wait::until_ready;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd, RawFd};
use rustix::io::Errno;
use std::time::Instant;

/// The socket events that a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// The events that ended a wait; none, if only time passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WaitResult {
    /// The socket has bytes, its end, or an error.
    pub(crate) readable: bool,
    /// A channel named a descriptor that is not open.
    pub(crate) has_broken_channel: bool,
}

/// Waits for the signal, the socket and a channel's descriptors, until `deadline` at the latest. A
/// socket without interest is left out, so that its end does not end the wait.
pub(crate) fn wait(
    signal: &StopSignal,
    socket: BorrowedFd<'_>,
    interest: Interest,
    channel: &[RawFd],
    until: Option<Instant>,
) -> Result<WaitResult, Errno> {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, interest.readable);
    flags.set(PollFlags::OUT, interest.writable);
    let mut polled = Vec::with_capacity(2 + channel.len());
    polled.push(PollFd::from_borrowed_fd(signal.as_fd(), PollFlags::IN));
    for &descriptor in channel.iter().filter(|descriptor| **descriptor >= 0) {
        polled.push(PollFd::from_borrowed_fd(
            borrow_fd(descriptor),
            PollFlags::IN,
        ));
    }
    if !flags.is_empty() {
        polled.push(PollFd::from_borrowed_fd(socket, flags));
    }
    until_ready(&mut polled, until)?;
    let fired = |index: usize| {
        polled
            .get(index)
            .map_or(PollFlags::empty(), PollFd::revents)
    };
    if !fired(0).is_empty() {
        signal.clear();
    }
    let last = if flags.is_empty() {
        PollFlags::empty()
    } else {
        fired(polled.len() - 1)
    };
    Ok(WaitResult {
        readable: interest.readable && last.intersects(!PollFlags::OUT),
        has_broken_channel: polled
            .iter()
            .any(|polled| polled.revents().contains(PollFlags::NVAL)),
    })
}

#[allow(unsafe_code)]
fn borrow_fd<'a>(descriptor: RawFd) -> BorrowedFd<'a> {
    // SAFETY: the number is not -1, and the borrow lives for one `poll` of `wait`, which neither
    // reads from the descriptor nor keeps it. The calling thread owns the channel that named it. If
    // the descriptor is closed or reused meanwhile, `poll` reports that or wakes once too often.
    unsafe { BorrowedFd::borrow_raw(descriptor) }
}
