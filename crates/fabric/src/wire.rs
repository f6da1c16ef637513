//! What carries the bytes of a connection, and the clock that its silence is
//! measured by: a socket, or the network of a simulation.

use crate::stream::Stream;
use rustix::event::{PollFlags, epoll};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

/// What a receive gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Bytes; `all` if there was room for more, so that none are left.
    Bytes {
        /// See above.
        all: bool,
    },
    /// Nothing has arrived.
    Nothing,
    /// The peer sends no more.
    End,
}

/// What somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// Bytes, or the end.
    Bytes,
    /// Room to send.
    Room,
}

/// One end of a connection. No call blocks but [`Wire::wait`].
pub trait Wire {
    /// Receives once into the room that a vector has left.
    ///
    /// # Errors
    /// When the connection is broken.
    fn receive(&self, into: &mut Vec<u8>) -> io::Result<Received>;

    /// Sends once; none if there is no room.
    ///
    /// # Errors
    /// When the connection is broken.
    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>>;

    /// Waits until the connection is ready for something.
    ///
    /// # Errors
    /// `TimedOut` when it was not by then, or when the connection is broken.
    fn wait(&self, ready: Ready, until: Instant) -> io::Result<()>;

    /// Ends the connection both ways.
    fn close(&self);

    /// Whether the peer has closed its end.
    fn has_hung_up(&self) -> bool;

    /// The time.
    fn now(&self) -> Instant;

    /// A descriptor that is readable when there is something to receive, where
    /// there is one.
    fn descriptor(&self) -> Option<RawFd>;

    /// A descriptor that becomes readable when there is room. Asked for after
    /// a send that did not take everything.
    ///
    /// # Errors
    /// When there is none.
    fn await_room(&self) -> io::Result<OwnedFd>;
}

impl Wire for Stream {
    fn receive(&self, into: &mut Vec<u8>) -> io::Result<Received> {
        Stream::receive(self, into)
    }

    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        Stream::send(self, pieces)
    }

    fn wait(&self, ready: Ready, until: Instant) -> io::Result<()> {
        let flags = match ready {
            Ready::Bytes => PollFlags::IN,
            Ready::Room => PollFlags::OUT,
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

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.as_fd().as_raw_fd())
    }

    fn await_room(&self) -> io::Result<OwnedFd> {
        let room = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&room, self, data, epoll::EventFlags::OUT)?;
        Ok(room)
    }
}
