//! The handshake over a socket: carries bytes between a client and the
//! [`Negotiation`], and opens the export it chooses.
//!
//! It ends within the handshake limit, whatever the client does or omits, and
//! holds at most one option and its answer.

use crate::connection::{Connection, Ended};
use crate::exports::{Export, Exports, Membership};
use crate::limits::{Limits, READY_LIMIT};
use crate::negotiation::{
    INPUT_BYTES_MAX, Negotiation, Refusal, Session, Step, Violation, refuse_length,
};
use crate::signal::{Level, Signal};
use crate::wait::{Interest, wait};
use pagemesh_base::space::{Channel, SpaceError};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::sync::Arc;
use std::time::Instant;

/// A connection that may be served, and its place in the export.
pub(crate) struct Served {
    pub(crate) connection: Connection,
    pub(crate) export: Arc<Export>,
    pub(crate) membership: Membership,
}

/// See the module.
pub(crate) struct Handshake {
    id: u64,
    socket: OwnedFd,
    signal: Arc<Signal>,
    limits: Limits,
    negotiation: Negotiation,
    input: Vec<u8>,
    out: Vec<u8>,
    until: Instant,
}

type Opened = (Arc<Export>, Membership, Box<dyn Channel>);

impl Handshake {
    pub(crate) fn new(
        id: u64,
        socket: OwnedFd,
        signal: Arc<Signal>,
        exports: Exports,
        limits: Limits,
    ) -> Self {
        Self {
            id,
            socket,
            signal,
            limits,
            negotiation: Negotiation::new(exports),
            input: Vec::new(),
            out: Vec::new(),
            until: Instant::now() + limits.handshake,
        }
    }

    /// Talks until an export is chosen or the connection must end.
    pub(crate) fn run(mut self) -> Result<Served, Ended> {
        self.negotiation.greet(&mut self.out);
        loop {
            let step = self.negotiation.step(&mut self.input, &mut self.out);
            if let Err(Violation::OptionLength(option, _)) = step {
                refuse_length(&mut self.out, option);
                self.send()?;
            }
            match step? {
                Step::Again => self.send()?,
                Step::More => {
                    self.send()?;
                    self.receive()?;
                }
                Step::Close => {
                    self.send()?;
                    return Err(Ended::Disconnected);
                }
                Step::Open(export) => {
                    if let Some((session, opened)) = self.open(export)? {
                        return Ok(self.finish(session, opened));
                    }
                }
            }
        }
    }

    fn open(&mut self, export: Arc<Export>) -> Result<Option<(Session, Opened)>, Ended> {
        let opened = self.enter(&export);
        let (result, opened) = match opened {
            Ok((membership, channel)) => (
                Ok(export.space.size_bytes()),
                Some((export, membership, channel)),
            ),
            Err(refusal) => {
                tracing::warn!(export = export.name, ?refusal, "connection refused");
                (Err(refusal), None)
            }
        };
        let session = self.negotiation.opened(result, &mut self.out)?;
        self.send()?;
        Ok(session.zip(opened))
    }

    fn enter(&self, export: &Arc<Export>) -> Result<(Membership, Box<dyn Channel>), Refusal> {
        let membership = export
            .join(self.id, &self.signal, self.limits.export_connections_max)
            .map_err(Refusal::Policy)?;
        let mut channel = export.space.open().map_err(refusal)?;
        self.await_ready(&mut *channel)?;
        Ok((membership, channel))
    }

    /// Waits until the space says that the channel will serve. A space that does not know
    /// within the limit is taken for one that will: its requests then wait as long as the
    /// space lets them, and a channel that turns out to be of no use ends the connection.
    fn await_ready(&self, channel: &mut dyn Channel) -> Result<(), Refusal> {
        let until = self.until.min(Instant::now() + READY_LIMIT);
        let mut descriptors = Vec::new();
        while !channel.ready().map_err(refusal)? {
            if self.signal.level() != Level::Run || Instant::now() >= until {
                return Ok(());
            }
            descriptors.clear();
            channel.wait_on(&mut descriptors);
            let next = channel.deadline().map_or(until, |next| next.min(until));
            let socket = self.socket.as_fd();
            let nothing = Interest {
                readable: false,
                writable: false,
            };
            let waited = wait(&self.signal, socket, nothing, &descriptors, Some(next));
            waited.map_err(|errno| Refusal::Unavailable(format!("cannot wait: {errno}")))?;
        }
        Ok(())
    }

    fn finish(self, session: Session, (export, membership, channel): Opened) -> Served {
        Served {
            connection: Connection::new(
                self.socket,
                self.signal,
                channel,
                session,
                self.limits,
                &self.input,
            ),
            export,
            membership,
        }
    }

    fn send(&mut self) -> Result<(), Ended> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut sent = 0;
        while sent < self.out.len() {
            match send(&self.socket, &self.out[sent..], flags) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(Interest {
                    readable: false,
                    writable: true,
                })?,
                Err(errno) => return Err(closed(errno)),
            }
        }
        self.out.clear();
        Ok(())
    }

    fn receive(&mut self) -> Result<(), Ended> {
        let mut received = [0; 4096];
        // An option that is longer is refused before this is full.
        let room = received.len().min(INPUT_BYTES_MAX - self.input.len());
        loop {
            match recv(&self.socket, &mut received[..room], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Ended::Closed),
                Ok((count, _)) => {
                    self.input.extend_from_slice(&received[..count]);
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(Interest {
                    readable: true,
                    writable: false,
                })?,
                Err(errno) => return Err(closed(errno)),
            }
        }
    }

    fn wait(&self, interest: Interest) -> Result<(), Ended> {
        if self.signal.level() != Level::Run {
            return Err(Ended::Stopped);
        }
        if Instant::now() >= self.until {
            return Err(Ended::HandshakeTimeout);
        }
        let socket = self.socket.as_fd();
        wait(&self.signal, socket, interest, &[], Some(self.until))?;
        Ok(())
    }
}

fn refusal(error: SpaceError) -> Refusal {
    match error {
        SpaceError::Busy(why) => Refusal::Policy(why),
        SpaceError::Fenced => Refusal::Ended(error.to_string()),
        other => Refusal::Unavailable(other.to_string()),
    }
}

fn closed(errno: Errno) -> Ended {
    match errno {
        Errno::PIPE | Errno::CONNRESET => Ended::Closed,
        errno => Ended::Socket(errno),
    }
}
