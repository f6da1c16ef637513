//! A leg over TCP: one connection, attached to one slice.
//!
//! Sending: a request on an idle leg is sent at once. Requests that follow while others are in
//! flight are gathered. The next `reap` sends them as one batch; a full gather buffer sends them
//! earlier. A submitter must therefore reap, or look at the deadline, before it waits: the deadline
//! is "now" while requests are gathered.
//!
//! A full socket: the next `reap` sends the rest. Until then `poll_fds` also returns a descriptor
//! that becomes readable when the socket has room. The deadline is close meanwhile, for callers
//! that cannot wait on the descriptor.
//!
//! Invariants: no call blocks. Once the leg is lost, every request in flight and every later one
//! completes with [`SliceError::Lost`]; nothing is sent again. The peer's silence is bounded while
//! a request is in flight.

use super::connect::{Endpoint, connect};
use super::pending::{InFlightRequest, PendingTable};
use crate::auth::Purpose;
use crate::brick_client::BrickClient;
use crate::limits::{FULL_SOCKET_PAUSE, GATHERED_BYTES_MAX, Timeouts};
use crate::message::reply::{self, AttachReply, Reply};
use crate::message::request::{Request, check_limits};
use crate::message::{Direction, MalformedMessage};
use crate::receive_buffer::ReceiveBuffer;
use crate::send_queue::SendQueue;
use crate::stream::Stream;
use crate::wire::{ReceiveResult, Wire};
use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::{
    LEG_REQUESTS_MAX, Leg, ServiceTime, SliceCompletion, SliceError, SliceReply, SliceRequest,
};
use pagemesh_base::tier_hint::TierHint;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// A connection of one thread to one slice.
pub struct TcpLeg<W = Stream> {
    stream: W,
    inflow: ReceiveBuffer,
    outflow: SendQueue,
    brick: BrickId,
    handle: u32,
    size_bytes: u64,
    in_flight: PendingTable,
    completed: Vec<SliceCompletion>,
    lost_reason: Option<String>,
    /// When bytes last arrived, or the first request in flight was submitted.
    last_progress: Instant,
    timeouts: Timeouts,
    /// Readable when the socket has room; present only while the socket is full.
    writable_fd: Option<OwnedFd>,
    /// Whether the brick knows tier hints.
    knows_hints: bool,
    /// Whether the brick knows the messages of snapshots.
    knows_snapshots: bool,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum LegError {
    #[error("{0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Malformed(#[from] MalformedMessage),
    #[error("it closed the connection")]
    Closed,
    #[error("no reply came for {0} ms")]
    Silent(u128),
    #[error("{0}")]
    Reported(String),
}

impl TcpLeg {
    /// Connects to a brick and attaches a slice as a client of this epoch.
    ///
    /// # Errors
    /// When the brick is not reachable, has another key, has no such slice,
    /// or a newer client has attached it.
    pub fn connect<'a>(
        endpoint: impl Into<Endpoint<'a>>,
        key: &Key,
        timeouts: Timeouts,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<TcpLeg, SliceError> {
        let limit = timeouts.handshake;
        let remote = connect(endpoint.into(), key, Purpose::Session, &timeouts, limit)?;
        let attached = remote.attach(slice, epoch)?;
        Ok(TcpLeg::from_connection(remote, attached, timeouts))
    }
}

impl<W: Wire> TcpLeg<W> {
    /// A leg over a connection that has attached a slice.
    pub fn from_connection(
        remote: BrickClient<W>,
        attached: AttachReply,
        timeouts: Timeouts,
    ) -> TcpLeg<W> {
        let (brick, knows_hints) = (remote.brick(), remote.knows_hints());
        let knows_snapshots = remote.knows_snapshots();
        let stream = remote.into_stream();
        TcpLeg {
            brick,
            last_progress: stream.now(),
            stream,
            inflow: ReceiveBuffer::new(Direction::Reply, false),
            outflow: SendQueue::default(),
            handle: attached.handle,
            size_bytes: attached.size_bytes,
            in_flight: PendingTable::default(),
            completed: Vec::new(),
            lost_reason: None,
            timeouts,
            writable_fd: None,
            knows_hints,
            knows_snapshots,
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

    /// Completes a request that the brick did not answer.
    fn complete(&mut self, tag: u64, result: Result<SliceReply, SliceError>) {
        self.completed.push(SliceCompletion::new(tag, result));
    }

    /// Completes a request with its answer.
    fn complete_answered(
        &mut self,
        tag: u64,
        result: Result<SliceReply, SliceError>,
        service: ServiceTime,
    ) {
        self.completed.push(SliceCompletion {
            tag,
            result,
            service,
        });
    }

    /// Why a request cannot be sent at all.
    fn check_submit(&self, request: &SliceRequest) -> Option<SliceError> {
        if let Some(reason) = &self.lost_reason {
            return Some(SliceError::Lost(reason.clone()));
        }
        if let Err(cause) = check_limits(request) {
            return Some(cause);
        }
        if request.is_of_snapshot() && !self.knows_snapshots {
            return Some(SliceError::snapshots_unknown());
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
            self.writable_fd = None;
        } else if self.writable_fd.is_none() {
            self.writable_fd = Some(self.stream.writable_fd()?);
        }
        Ok(())
    }

    fn make_progress(&mut self) -> Result<(), LegError> {
        if !self.outflow.is_empty() {
            self.send()?;
        }
        loop {
            let received = self.inflow.receive(&self.stream)?;
            if let ReceiveResult::Bytes { .. } = received {
                self.last_progress = self.stream.now();
                self.take_replies()?;
            }
            match received {
                ReceiveResult::Bytes { drained: false } => {}
                ReceiveResult::Bytes { drained: true } if self.inflow.is_within_large() => {}
                ReceiveResult::Bytes { drained: true } => return Ok(()),
                ReceiveResult::WouldBlock => return self.check_silence(),
                ReceiveResult::End => return Err(LegError::Closed),
            }
        }
    }

    fn check_silence(&self) -> Result<(), LegError> {
        let silence = self
            .stream
            .now()
            .saturating_duration_since(self.last_progress);
        match !self.in_flight.is_empty() && silence > self.silence_max() {
            true => Err(LegError::Silent(self.silence_max().as_millis())),
            false => Ok(()),
        }
    }

    /// How long the brick may be silent. Requests that wait for a disk or a barrier extend it to
    /// the limit of a call.
    fn silence_max(&self) -> Duration {
        match self.in_flight.has_slow() {
            true => self.timeouts.stall.max(self.timeouts.call),
            false => self.timeouts.stall,
        }
    }

    fn take_replies(&mut self) -> Result<(), LegError> {
        while let Some((header, body)) = self.inflow.next_message()? {
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
                    self.complete_answered(pending.tag, Ok(reply), header.service());
                }
                Ok(_) => {
                    let cause = MalformedMessage::UnexpectedReply(header.tag);
                    self.abandon(pending.tag, &cause.to_string());
                    return Err(cause.into());
                }
                Err(SliceError::Lost(reason)) => {
                    self.abandon(pending.tag, &reason);
                    return Err(LegError::Reported(reason));
                }
                Err(error) => self.complete_answered(pending.tag, Err(error), header.service()),
            }
        }
        Ok(())
    }

    /// Completes a request after its reply ended the connection.
    fn abandon(&mut self, tag: u64, reason: &str) {
        let reason = format!("brick {}: {reason}", self.brick);
        self.complete(tag, Err(SliceError::Lost(reason)));
    }

    fn fail(&mut self, cause: &LegError) {
        let reason = format!("brick {}: {cause}", self.brick);
        let error = SliceError::Lost(reason.clone());
        let ended = self
            .in_flight
            .drain()
            .map(|pending| SliceCompletion::new(pending.tag, Err(error.clone())));
        self.completed.extend(ended);
        self.lost_reason = Some(reason);
        self.outflow = SendQueue::default();
        self.writable_fd = None;
        self.stream.close();
    }
}

impl<W: Wire + Send> Leg for TcpLeg<W> {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        self.submit_hinted(tag, request, TierHint::None);
    }

    fn submit_hinted(&mut self, tag: u64, request: SliceRequest, hint: TierHint) {
        if let Some(error) = self.check_submit(&request) {
            return self.complete(tag, Err(error));
        }
        let request = Request::Slice {
            handle: self.handle,
            request,
        };
        let idle = self.in_flight.is_empty();
        if idle {
            self.last_progress = self.stream.now();
        }
        if let Request::Slice { request: asked, .. } = &request {
            let wire = self
                .in_flight
                .insert(InFlightRequest::new(tag, request.kind(), asked));
            let hint = match self.knows_hints {
                true => hint,
                false => TierHint::None,
            };
            let (header, body) = request.encode_hinted(wire, hint);
            self.outflow.push(&header, body);
        }
        let due = idle || self.outflow.len() >= GATHERED_BYTES_MAX;
        if due
            && self.writable_fd.is_none()
            && let Err(cause) = self.send()
        {
            self.fail(&cause.into());
        }
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        if self.lost_reason.is_none()
            && let Err(cause) = self.make_progress()
        {
            self.fail(&cause);
        }
        into.append(&mut self.completed);
    }

    fn poll_closed(&mut self) -> Option<SliceError> {
        if self.lost_reason.is_none()
            && self.in_flight.is_empty()
            && let Err(cause) = self.make_progress()
        {
            self.fail(&cause);
        }
        self.lost_reason.clone().map(SliceError::Lost)
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        if self.lost_reason.is_none() {
            into.extend(self.stream.readable_fd());
            into.extend(self.writable_fd.as_ref().map(AsRawFd::as_raw_fd));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let gathered = !self.outflow.is_empty() && self.writable_fd.is_none();
        if gathered || !self.completed.is_empty() {
            return Some(self.stream.now());
        }
        if self.in_flight.is_empty() {
            return None;
        }
        let silent = self.last_progress + self.silence_max() + Duration::from_millis(1);
        Some(match self.writable_fd {
            Some(_) => silent.min(self.stream.now() + FULL_SOCKET_PAUSE),
            None => silent,
        })
    }

    fn now(&self) -> Option<Instant> {
        Some(self.stream.now())
    }
}
