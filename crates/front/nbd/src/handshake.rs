//! The handshake over a socket: it carries bytes between a client and the [`Negotiation`], and
//! opens the export that the client chooses.
//!
//! It ends within the handshake limit in any case, and holds at most one option and its answer.

use crate::connection::{Connection, EndReason};
use crate::exports::{Export, Exports, Membership};
use crate::limits::{CHANNEL_READY_LIMIT, Limits};
use crate::negotiation::{
    INPUT_BYTES_MAX, NegotiatedOptions, Negotiation, NegotiationStep, OpenRefusal,
    ProtocolViolation, put_length_refusal,
};
use crate::stop_signal::{StopLevel, StopSignal};
use crate::wait::{Interest, wait};
use pagemesh_base::space::{Channel, SpaceError};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::sync::Arc;
use std::time::Instant;

/// A connection that may be served, and its membership in the export.
pub struct OpenedConnection {
    pub connection: Connection,
    pub export: Arc<Export>,
    pub membership: Membership,
}

/// See the module.
pub struct Handshake {
    id: u64,
    socket: OwnedFd,
    signal: Arc<StopSignal>,
    limits: Limits,
    negotiation: Negotiation,
    input: Vec<u8>,
    output: Vec<u8>,
    deadline: Instant,
}

type OpenedExport = (Arc<Export>, Membership, Box<dyn Channel>);

impl Handshake {
    pub fn new(
        id: u64,
        socket: OwnedFd,
        signal: Arc<StopSignal>,
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
            output: Vec::new(),
            deadline: Instant::now() + limits.handshake,
        }
    }

    /// Runs until an export is chosen or the connection must end.
    pub fn run(mut self) -> Result<OpenedConnection, EndReason> {
        self.negotiation.greet(&mut self.output);
        loop {
            let step = self.negotiation.step(&mut self.input, &mut self.output);
            if let Err(ProtocolViolation::OptionLength(option, _)) = step {
                put_length_refusal(&mut self.output, option);
                self.send()?;
            }
            match step? {
                NegotiationStep::Again => self.send()?,
                NegotiationStep::More => {
                    self.send()?;
                    self.receive()?;
                }
                NegotiationStep::Close => {
                    self.send()?;
                    return Err(EndReason::Disconnected);
                }
                NegotiationStep::Open(export) => {
                    if let Some((session, opened)) = self.open_export(export)? {
                        return Ok(self.into_opened(session, opened));
                    }
                }
            }
        }
    }

    fn open_export(
        &mut self,
        export: Arc<Export>,
    ) -> Result<Option<(NegotiatedOptions, OpenedExport)>, EndReason> {
        let opened = self.join_export(&export);
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
        let session = self.negotiation.finish_open(result, &mut self.output)?;
        self.send()?;
        Ok(session.zip(opened))
    }

    fn join_export(
        &self,
        export: &Arc<Export>,
    ) -> Result<(Membership, Box<dyn Channel>), OpenRefusal> {
        let membership = export
            .add_connection(self.id, &self.signal, self.limits.export_connections_max)
            .map_err(OpenRefusal::Policy)?;
        let mut channel = export.space.open().map_err(refusal_of)?;
        self.await_ready(&mut *channel)?;
        Ok((membership, channel))
    }

    /// Waits until the channel is ready to serve. If the space does not know within the limit, the
    /// connection goes on: its requests then wait as long as the space lets them, and a channel
    /// that fails ends the connection.
    fn await_ready(&self, channel: &mut dyn Channel) -> Result<(), OpenRefusal> {
        let until = self.deadline.min(Instant::now() + CHANNEL_READY_LIMIT);
        let mut descriptors = Vec::new();
        while !channel.ready().map_err(refusal_of)? {
            if self.signal.level() != StopLevel::Running || Instant::now() >= until {
                return Ok(());
            }
            descriptors.clear();
            channel.poll_fds(&mut descriptors);
            let next = channel.deadline().map_or(until, |next| next.min(until));
            let socket = self.socket.as_fd();
            let nothing = Interest {
                readable: false,
                writable: false,
            };
            let waited = wait(&self.signal, socket, nothing, &descriptors, Some(next));
            waited.map_err(|errno| OpenRefusal::Unavailable(format!("cannot wait: {errno}")))?;
        }
        Ok(())
    }

    fn into_opened(
        self,
        session: NegotiatedOptions,
        (export, membership, channel): OpenedExport,
    ) -> OpenedConnection {
        OpenedConnection {
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

    fn send(&mut self) -> Result<(), EndReason> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut sent = 0;
        while sent < self.output.len() {
            match send(&self.socket, &self.output[sent..], flags) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(Interest {
                    readable: false,
                    writable: true,
                })?,
                Err(errno) => return Err(end_reason(errno)),
            }
        }
        self.output.clear();
        Ok(())
    }

    fn receive(&mut self) -> Result<(), EndReason> {
        let mut received = [0; 4096];
        // A longer option is refused before this is full.
        let room = received.len().min(INPUT_BYTES_MAX - self.input.len());
        loop {
            match recv(&self.socket, &mut received[..room], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(EndReason::Closed),
                Ok((count, _)) => {
                    self.input.extend_from_slice(&received[..count]);
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(Interest {
                    readable: true,
                    writable: false,
                })?,
                Err(errno) => return Err(end_reason(errno)),
            }
        }
    }

    fn wait(&self, interest: Interest) -> Result<(), EndReason> {
        if self.signal.level() != StopLevel::Running {
            return Err(EndReason::Stopped);
        }
        if Instant::now() >= self.deadline {
            return Err(EndReason::HandshakeTimeout);
        }
        let socket = self.socket.as_fd();
        wait(&self.signal, socket, interest, &[], Some(self.deadline))?;
        Ok(())
    }
}

fn refusal_of(error: SpaceError) -> OpenRefusal {
    match error {
        SpaceError::Busy(why) => OpenRefusal::Policy(why),
        SpaceError::Fenced => OpenRefusal::Permanent(error.to_string()),
        other => OpenRefusal::Unavailable(other.to_string()),
    }
}

fn end_reason(errno: Errno) -> EndReason {
    match errno {
        Errno::PIPE | Errno::CONNRESET => EndReason::Closed,
        errno => EndReason::Socket(errno),
    }
}
