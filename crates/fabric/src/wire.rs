//! What carries the bytes of a connection, and the clock that its silence is
//! measured by: a socket, or the network of a simulation.

use crate::stream::Stream;
use rustix::event::{PollFlags, epoll};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

/// What a receive gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveResult {
    /// Bytes; `drained` if there was room for more, so that none are left.
    Bytes {
        /// See above.
        drained: bool,
    },
    /// Nothing has arrived.
    WouldBlock,
    /// The peer sends no more.
    End,
}

/// What somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitFor {
    /// Bytes, or the end.
    Readable,
    /// Room to send.
    Writable,
}

/// One end of a connection. No call blocks but [`Wire::wait`].
pub trait Wire {
    /// Receives once into the room that a vector has left.
    ///
    /// # Errors
    /// When the connection is broken.
    fn receive(&self, into: &mut Vec<u8>) -> io::Result<ReceiveResult>;

    /// Sends once; none if there is no room.
    ///
    /// # Errors
    /// When the connection is broken.
    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>>;

    /// Waits until the connection is ready for something.
    ///
    /// # Errors
    /// `TimedOut` when it was not by then, or when the connection is broken.
    fn wait(&self, ready: WaitFor, until: Instant) -> io::Result<()>;

    /// Ends the connection both ways.
    fn close(&self);

    /// Whether the peer has closed its end.
    fn has_hung_up(&self) -> bool;

    /// The time.
    fn now(&self) -> Instant;

    /// A descriptor that is readable when there is something to receive, where
    /// there is one.
    fn readable_fd(&self) -> Option<RawFd>;

    /// A descriptor that becomes readable when there is room. Asked for after
    /// a send that did not take everything.
    ///
    /// # Errors
    /// When there is none.
    fn writable_fd(&self) -> io::Result<OwnedFd>;
}

impl Wire for Stream {
    fn receive(&self, into: &mut Vec<u8>) -> io::Result<ReceiveResult> {
        Stream::receive(self, into)
    }

    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        Stream::send(self, pieces)
    }

    fn wait(&self, ready: WaitFor, until: Instant) -> io::Result<()> {
        let flags = match ready {
            WaitFor::Readable => PollFlags::IN,
            WaitFor::Writable => PollFlags::OUT,
        };
        Stream::wait(self, flags, until)
    }

    fn close(&self) {
        Stream::close(self);
    }

    fn has_hung_up(&self) -> bool {
        Stream::has_hung_up(self)
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn readable_fd(&self) -> Option<RawFd> {
        Some(self.as_fd().as_raw_fd())
    }

    fn writable_fd(&self) -> io::Result<OwnedFd> {
        let room = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&room, self, data, epoll::EventFlags::OUT)?;
        Ok(room)
    }
}
