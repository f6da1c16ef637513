//! A leg over TCP: one connection, attached to one slice.
//!
//! Sending: a request that finds the leg idle is sent at once; those that
//! follow while others are in flight are gathered and sent by the next `reap`,
//! as one batch, or when they are many. Whoever submits must therefore reap,
//! or look at the deadline, before waiting: it is "now" while something is
//! gathered.
//!
//! A full socket: what could not be sent goes out with the next `reap`. While
//! that is so, `wait_on` also gives a descriptor that becomes readable when
//! the socket has room, and the deadline is close for those who cannot wait on
//! it.
//!
//! Invariants: no call blocks. Once lost, every request in flight and every
//! later one completes with `Lost`; nothing is sent again. The peer's silence
//! is bounded while something is in flight.

use super::connect::connect;
use super::pending::{Pending, Table};
use crate::auth::Purpose;
use crate::inflow::Inflow;
use crate::limits::{FULL_SOCKET_PAUSE, GATHERED_BYTES_MAX, Timeouts};
use crate::message::reply::{self, Attached, Reply};
use crate::message::request::{Request, check_limits};
use crate::message::{Direction, Malformed};
use crate::outflow::Outflow;
use crate::remote::Remote;
use crate::stream::Stream;
use crate::wire::{Received, Wire};
use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::{
    LEG_REQUESTS_MAX, Leg, SliceCompletion, SliceError, SliceReply, SliceRequest,
};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// A connection of one thread to one slice.
pub struct TcpLeg<W = Stream> {
    stream: W,
    inflow: Inflow,
    outflow: Outflow,
    brick: BrickId,
    handle: u32,
    size_bytes: u64,
    in_flight: Table,
    completed: Vec<SliceCompletion>,
    lost: Option<String>,
    /// When something last arrived, or the first request in flight was made.
    progress: Instant,
    timeouts: Timeouts,
    /// Readable when the socket has room; there while it had none.
    room: Option<OwnedFd>,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("{0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("it closed the connection")]
    Closed,
    #[error("no reply came for {0} ms")]
    Silent(u128),
    #[error("{0}")]
    Told(String),
}

impl TcpLeg {
    /// Connects to a brick and attaches a slice as a client of this epoch.
    ///
    /// # Errors
    /// When the brick is not reachable, has another key, has no such slice,
    /// or a newer client has attached it.
    pub fn connect(
        address: SocketAddr,
        key: &Key,
        timeouts: Timeouts,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<TcpLeg, SliceError> {
        let (stream, brick) = connect(address, key, Purpose::Session, &timeouts)?;
        let remote = Remote::new(stream, brick, timeouts.handshake);
        let attached = remote.attach(slice, epoch)?;
        Ok(TcpLeg::over(remote, attached, timeouts))
    }
}

impl<W: Wire> TcpLeg<W> {
    /// A leg over a connection that has attached a slice.
    pub fn over(remote: Remote<W>, attached: Attached, timeouts: Timeouts) -> TcpLeg<W> {
        let brick = remote.brick();
        let stream = remote.into_stream();
        TcpLeg {
            brick,
            progress: stream.now(),
            stream,
            inflow: Inflow::new(Direction::Reply, false),
            outflow: Outflow::default(),
            handle: attached.handle,
            size_bytes: attached.size_bytes,
            in_flight: Table::default(),
            completed: Vec::new(),
            lost: None,
            timeouts,
            room: None,
        }
    }

    /// The brick's identity, which it has proven.
    #[must_use]
    pub fn brick(&self) -> BrickId {
        self.brick
    }

    /// The slice's size when it was attached.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn complete(&mut self, tag: u64, result: Result<SliceReply, SliceError>) {
        self.completed.push(SliceCompletion { tag, result });
    }

    /// Why a request cannot be sent at all.
    fn objection(&self, request: &SliceRequest) -> Option<SliceError> {
        if let Some(reason) = &self.lost {
            return Some(SliceError::Lost(reason.clone()));
        }
        if let Err(cause) = check_limits(request) {
            return Some(cause);
        }
        self.in_flight.is_full().then(|| {
            SliceError::Refused(format!(
                "{LEG_REQUESTS_MAX} requests are in flight; reap some first"
            ))
        })
    }

    fn send(&mut self) -> io::Result<()> {
        self.outflow.flush(&self.stream)?;
        if self.outflow.is_empty() {
            self.room = None;
        } else if self.room.is_none() {
            self.room = Some(self.stream.await_room()?);
        }
        Ok(())
    }

    fn progress(&mut self) -> Result<(), Ended> {
        if !self.outflow.is_empty() {
            self.send()?;
        }
        loop {
            let received = self.inflow.receive(&self.stream)?;
            if let Received::Bytes { .. } = received {
                self.progress = self.stream.now();
                self.take_replies()?;
            }
            match received {
                Received::Bytes { all: false } => {}
                Received::Bytes { all: true } if self.inflow.is_within_large() => {}
                Received::Bytes { all: true } => return Ok(()),
                Received::Nothing => return self.check_silence(),
                Received::End => return Err(Ended::Closed),
            }
        }
    }

    fn check_silence(&self) -> Result<(), Ended> {
        let silence = self.stream.now().saturating_duration_since(self.progress);
        match !self.in_flight.is_empty() && silence > self.silence_max() {
            true => Err(Ended::Silent(self.silence_max().as_millis())),
            false => Ok(()),
        }
    }

    /// How long the brick may be silent: what waits for a disk or a barrier
    /// has the time of a call.
    fn silence_max(&self) -> Duration {
        match self.in_flight.has_slow() {
            true => self.timeouts.stall.max(self.timeouts.call),
            false => self.timeouts.stall,
        }
    }

    fn take_replies(&mut self) -> Result<(), Ended> {
        while let Some((header, body)) = self.inflow.next()? {
            let pending = self.in_flight.remove(header.tag, header.kind)?;
            let answer = match reply::decode(&header, self.inflow.take(body)) {
                Ok(answer) => answer,
                Err(cause) => {
                    self.abandon(pending.tag, &cause.to_string());
                    return Err(cause.into());
                }
            };
            match answer {
                Ok(Reply::Slice(reply)) if pending.fits(&reply) => {
                    self.complete(pending.tag, Ok(reply));
                }
                Ok(_) => {
                    let cause = Malformed::Unasked(header.tag);
                    self.abandon(pending.tag, &cause.to_string());
                    return Err(cause.into());
                }
                Err(SliceError::Lost(reason)) => {
                    self.abandon(pending.tag, &reason);
                    return Err(Ended::Told(reason));
                }
                Err(error) => self.complete(pending.tag, Err(error)),
            }
        }
        Ok(())
    }

    /// Completes a request whose reply was the connection's last.
    fn abandon(&mut self, tag: u64, reason: &str) {
        let reason = format!("brick {}: {reason}", self.brick);
        self.complete(tag, Err(SliceError::Lost(reason)));
    }

    fn lose(&mut self, cause: &Ended) {
        let reason = format!("brick {}: {cause}", self.brick);
        let error = SliceError::Lost(reason.clone());
        let ended = self.in_flight.drain().map(|pending| SliceCompletion {
            tag: pending.tag,
            result: Err(error.clone()),
        });
        self.completed.extend(ended);
        self.lost = Some(reason);
        self.outflow = Outflow::default();
        self.room = None;
        self.stream.close();
    }
}

impl<W: Wire + Send> Leg for TcpLeg<W> {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        if let Some(error) = self.objection(&request) {
            return self.complete(tag, Err(error));
        }
        let request = Request::Slice {
            handle: self.handle,
            request,
        };
        let idle = self.in_flight.is_empty();
        if idle {
            self.progress = self.stream.now();
        }
        if let Request::Slice { request: asked, .. } = &request {
            let wire = self
                .in_flight
                .insert(Pending::new(tag, request.kind(), asked));
            let (header, body) = request.encode(wire);
            self.outflow.push(&header, body);
        }
        let due = idle || self.outflow.len() >= GATHERED_BYTES_MAX;
        if due
            && self.room.is_none()
            && let Err(cause) = self.send()
        {
            self.lose(&cause.into());
        }
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        if self.lost.is_none()
            && let Err(cause) = self.progress()
        {
            self.lose(&cause);
        }
        into.append(&mut self.completed);
    }

    fn ended(&mut self) -> Option<SliceError> {
        if self.lost.is_none()
            && self.in_flight.is_empty()
            && let Err(cause) = self.progress()
        {
            self.lose(&cause);
        }
        self.lost.clone().map(SliceError::Lost)
    }

    fn wait_on(&self, into: &mut Vec<RawFd>) {
        if self.lost.is_none() {
            into.extend(self.stream.descriptor());
            into.extend(self.room.as_ref().map(AsRawFd::as_raw_fd));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let gathered = !self.outflow.is_empty() && self.room.is_none();
        if gathered || !self.completed.is_empty() {
            return Some(self.stream.now());
        }
        if self.in_flight.is_empty() {
            return None;
        }
        let silent = self.progress + self.silence_max() + Duration::from_millis(1);
        Some(match self.room {
            Some(_) => silent.min(self.stream.now() + FULL_SOCKET_PAUSE),
            None => silent,
        })
    }

    fn now(&self) -> Option<Instant> {
        Some(self.stream.now())
    }
}
