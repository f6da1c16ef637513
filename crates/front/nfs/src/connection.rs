//! One client: a thread that owns a socket, and answers one call after the other.
//!
//! Invariants: a connection holds one record and one reply. It reads no call while a reply is
//! unsent. The thread blocks only in `poll`, up to a deadline, and in the file system.

use crate::limits::{Limits, RECEIVE_BYTES};
use crate::record::{RecordAssembler, RecordError};
use crate::rpc::{CallError, Reply};
use crate::service::{NoReply, Service};
use crate::stop_signal::{StopSignal, wait_writable};
use bytes::Bytes;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::{self, IoSlice, Read};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EndReason {
    #[error("the client closed it")]
    Closed,
    #[error("the server stopped")]
    Stopped,
    #[error("no call came for a long time")]
    Idle,
    #[error("the client stopped in the middle of a call")]
    CallStalled,
    #[error("the client did not take a reply")]
    ReplyStalled,
    #[error("the client broke the protocol: {0}")]
    BrokenRecord(#[from] RecordError),
    #[error("the client broke the protocol: {0}")]
    NotACall(CallError),
    #[error("the client repeated a call that still runs")]
    RepeatedCall,
    #[error("another host has the volume of the export")]
    Fenced,
    #[error("the socket failed: {0}")]
    Socket(io::Error),
}

impl EndReason {
    /// Whether the client is at fault.
    pub(crate) fn is_violation(&self) -> bool {
        match self {
            Self::CallStalled | Self::ReplyStalled | Self::BrokenRecord(_) | Self::NotACall(_) => {
                true
            }
            Self::Closed
            | Self::Stopped
            | Self::Idle
            | Self::RepeatedCall
            | Self::Fenced
            | Self::Socket(_) => false,
        }
    }

    fn of_socket(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Socket(error),
        }
    }
}

impl From<Errno> for EndReason {
    fn from(errno: Errno) -> Self {
        Self::of_socket(errno.into())
    }
}

impl From<NoReply> for EndReason {
    fn from(reason: NoReply) -> Self {
        match reason {
            NoReply::Fenced => Self::Fenced,
            NoReply::NotACall(error) => Self::NotACall(error),
            NoReply::Running => Self::RepeatedCall,
        }
    }
}

/// See the module.
pub(crate) struct Connection<'a> {
    socket: &'a TcpStream,
    /// The address of the client.
    client: SocketAddr,
    signal: &'a StopSignal,
    service: &'a Service,
    limits: Limits,
    assembler: RecordAssembler,
    buffer: Box<[u8]>,
    /// The bytes of the buffer that no record has yet.
    unused: std::ops::Range<usize>,
    /// The deadline of the record, or of the next call.
    until: Instant,
}

impl<'a> Connection<'a> {
    pub(crate) fn new(
        (socket, client): (&'a TcpStream, SocketAddr),
        signal: &'a StopSignal,
        service: &'a Service,
        limits: Limits,
    ) -> Self {
        Self {
            socket,
            client,
            signal,
            service,
            limits,
            assembler: RecordAssembler::new(),
            buffer: vec![0; RECEIVE_BYTES].into(),
            unused: 0..0,
            until: Instant::now() + limits.idle,
        }
    }

    /// Serves the client until it or the server ends the connection.
    pub(crate) fn serve(mut self) -> EndReason {
        let Err(reason) = self.serve_calls();
        // A client gets the last reply before the end.
        let _ = self.socket.shutdown(Shutdown::Write);
        reason
    }

    fn serve_calls(&mut self) -> Result<std::convert::Infallible, EndReason> {
        loop {
            let record = self.next_record()?;
            let reply = self.service.answer(self.client, record)?;
            self.send(&reply)?;
        }
    }

    /// The next call. It has the deadline of its record, once a byte of it has arrived.
    fn next_record(&mut self) -> Result<Bytes, EndReason> {
        self.until = Instant::now() + self.limits.idle;
        let mut has_begun = false;
        loop {
            if self.signal.is_raised() {
                return Err(EndReason::Stopped);
            }
            if let Some(record) = self.take_buffered()? {
                return Ok(record.into());
            }
            if self.assembler.is_within_record() && !has_begun {
                has_begun = true;
                self.until = Instant::now() + self.limits.record;
            }
            if let Some(record) = self.receive()? {
                return Ok(record.into());
            }
        }
    }

    fn take_buffered(&mut self) -> Result<Option<Vec<u8>>, RecordError> {
        let bytes = self.buffer.get(self.unused.clone()).unwrap_or_default();
        if bytes.is_empty() {
            return Ok(None);
        }
        let pushed = self.assembler.push(bytes)?;
        self.unused.start += pushed.consumed;
        Ok(pushed.record)
    }

    /// Receives bytes, or waits for some. The buffer is used up.
    fn receive(&mut self) -> Result<Option<Vec<u8>>, EndReason> {
        let mut socket = self.socket;
        let received = if self.assembler.fragment_left() >= self.buffer.len() {
            let pushed = self.assembler.receive(&mut socket);
            pushed.map(|pushed| (pushed.consumed, pushed.record))
        } else {
            let received = socket.read(&mut self.buffer);
            received.map(|count| {
                self.unused = 0..count;
                (count, None)
            })
        };
        match received {
            Ok((0, _)) => Err(EndReason::Closed),
            Ok((_, record)) => Ok(record),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.wait_for_bytes()?;
                Ok(None)
            }
            Err(error) => Err(EndReason::of_socket(error)),
        }
    }

    fn wait_for_bytes(&self) -> Result<(), EndReason> {
        if Instant::now() >= self.until {
            return Err(match self.assembler.is_within_record() {
                true => EndReason::CallStalled,
                false => EndReason::Idle,
            });
        }
        self.signal.wait([self.socket.as_fd()], Some(self.until))?;
        Ok(())
    }

    /// Sends a reply. The server shuts the socket down if this takes too long when it stops.
    fn send(&self, reply: &Reply) -> Result<(), EndReason> {
        let until = Instant::now() + self.limits.reply;
        let mut sent = 0;
        let len: usize = reply.parts().iter().map(|part| part.len()).sum();
        while sent < len {
            match self.send_rest(reply, sent) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if Instant::now() >= until => {
                    return Err(EndReason::ReplyStalled);
                }
                Err(Errno::AGAIN) => wait_writable(self.socket.as_fd(), until)?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Sends bytes after the first `skipped`, without a wait.
    fn send_rest(&self, reply: &Reply, mut skipped: usize) -> Result<usize, Errno> {
        let rest = reply.parts().map(|part| {
            let skip = skipped.min(part.len());
            skipped -= skip;
            IoSlice::new(&part[skip..])
        });
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(
            self.socket,
            &rest,
            &mut SendAncillaryBuffer::default(),
            flags,
        )
    }
}

/// The socket of a client, ready for a connection.
pub(crate) fn prepare(socket: TcpStream) -> io::Result<Arc<TcpStream>> {
    socket.set_nonblocking(true)?;
    // A failure of these is no reason to lose the client.
    let _ = socket.set_nodelay(true);
    let _ = rustix::net::sockopt::set_socket_keepalive(&socket, true);
    Ok(Arc::new(socket))
}
