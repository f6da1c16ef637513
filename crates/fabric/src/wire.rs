//! The transport of a connection, and its clock: a socket, or the network of a simulation.

use crate::stream::Stream;
use rustix::event::{PollFlags, epoll};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

/// The result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveResult {
    /// Bytes; `drained` if the buffer had room for more, so that no bytes are left in the socket.
    Bytes {
        /// See above.
        drained: bool,
    },
    /// Nothing has arrived.
    WouldBlock,
    /// The peer sends no more.
    End,
}

/// The condition that a wait is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitFor {
    /// Bytes, or the end.
    Readable,
    /// Room to send.
    Writable,
}

/// One end of a connection. Only [`Wire::wait`] blocks.
pub trait Wire {
    /// Receives once into the spare capacity of a vector.
    ///
    /// # Errors
    /// When the connection is broken.
    fn receive(&self, into: &mut Vec<u8>) -> io::Result<ReceiveResult>;

    /// Sends once; none if there is no room.
    ///
    /// # Errors
    /// When the connection is broken.
    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>>;

    /// Waits until the connection is ready.
    ///
    /// # Errors
    /// `TimedOut` when it is not ready by `until`; another error when the connection is broken.
    fn wait(&self, ready: WaitFor, until: Instant) -> io::Result<()>;

    /// Closes the connection in both directions.
    fn close(&self);

    /// Whether the peer has closed its end.
    fn has_hung_up(&self) -> bool;

    /// The current time.
    fn now(&self) -> Instant;

    /// A descriptor that is readable when bytes can be received, if the transport has one.
    fn readable_fd(&self) -> Option<RawFd>;

    /// A descriptor that becomes readable when there is room to send. The caller asks for it after
    /// a send that did not take everything.
    ///
    /// # Errors
    /// When the transport has none.
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
