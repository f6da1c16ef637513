//! Blocking calls to a brick at the other end of a connection, TCP or unix.
//!
//! Invariants: a call ends within its limit. After a call that failed for
//! anything but a refusal the connection is over: every later call fails at
//! once, and nothing is tried again.

use crate::inflow::Inflow;
use crate::limits::LIST_ANSWERS_MAX;
use crate::message::reply::{self, Answer, Attached, Expected, Reply};
use crate::message::request::{Control, Request, check_limits};
use crate::message::{Direction, Malformed};
use crate::outflow::Outflow;
use crate::stream::Stream;
use crate::wire::{Ready, Received, Wire};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::{
    BrickControl, BrickStatus, SliceError, SliceInfo, SliceReply, SliceRequest,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A connection to a brick for blocking calls, by one thread at a time.
#[derive(Debug)]
pub struct Remote<W = Stream> {
    stream: W,
    calls: Mutex<Calls>,
    brick: BrickId,
    limit: Duration,
}

struct Calls {
    inflow: Inflow,
    outflow: Outflow,
    tag: u64,
    lost: Option<String>,
}

impl std::fmt::Debug for Calls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Calls").field("lost", &self.lost).finish()
    }
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("{0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("it closed the connection")]
    Closed,
}

impl<W: Wire> Remote<W> {
    /// Calls over a connection whose peer is known to be this brick; each has
    /// so long.
    pub fn new(stream: W, brick: BrickId, limit: Duration) -> Remote<W> {
        Remote {
            stream,
            calls: Mutex::new(Calls {
                inflow: Inflow::new(Direction::Reply, false),
                outflow: Outflow::default(),
                tag: 0,
                lost: None,
            }),
            brick,
            limit,
        }
    }

    /// The brick's identity, as it told and, over TCP, proved.
    #[must_use]
    pub fn brick(&self) -> BrickId {
        self.brick
    }

    /// Whether the brick has ended the connection. The descriptor of
    /// [`AsFd`] becomes readable when it does, and also for a moment whenever
    /// another thread's call is answered.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        self.stream.has_hung_up()
    }

    /// Attaches a slice as a client of this epoch.
    ///
    /// # Errors
    /// When there is no such slice, it has a newer epoch, or the brick is
    /// lost.
    pub fn attach(&self, slice: SliceId, epoch: Epoch) -> Result<Attached, SliceError> {
        match self.call(&Request::Attach { slice, epoch })? {
            Reply::Attached(attached) => Ok(attached),
            _ => Err(self.nonsense()),
        }
    }

    /// Asks something of an attached slice and waits for the answer.
    ///
    /// # Errors
    /// What the slice answers, or when the brick is lost.
    pub fn execute(&self, handle: u32, request: SliceRequest) -> Result<SliceReply, SliceError> {
        check_limits(&request)?;
        let expected = Expected::of(&request);
        match self.call(&Request::Slice { handle, request })? {
            Reply::Slice(reply) if expected.fits(&reply) => Ok(reply),
            _ => Err(self.nonsense()),
        }
    }

    fn done(&self, control: Control) -> Result<(), SliceError> {
        match self.call(&Request::Control(control))? {
            Reply::Slice(SliceReply::Done) => Ok(()),
            _ => Err(self.nonsense()),
        }
    }

    /// Ends a connection to a brick whose answers do not fit what was asked.
    fn nonsense(&self) -> SliceError {
        self.lose(&mut self.calls(), "it answers something that was not asked")
    }

    fn lose(&self, calls: &mut Calls, cause: &str) -> SliceError {
        let reason = format!("brick {}: {cause}", self.brick);
        calls.lost = Some(reason.clone());
        self.stream.close();
        SliceError::Lost(reason)
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, request: &Request) -> Answer {
        let mut calls = self.calls();
        if let Some(reason) = &calls.lost {
            return Err(SliceError::Lost(reason.clone()));
        }
        let until = self.stream.now() + self.limit;
        match calls.exchange(&self.stream, request, until) {
            Ok(Err(SliceError::Lost(reason))) => Err(self.lose(&mut calls, &reason)),
            Ok(answer) => answer,
            Err(cause) => Err(self.lose(&mut calls, &told(&cause, self.limit))),
        }
    }

    /// Gives the connection up for other use, if no call has failed.
    pub(crate) fn into_stream(self) -> W {
        self.stream
    }
}

/// Whether these slices are in order and behind what is known already: a
/// listing that does not move on would never end.
fn goes_on(after: Option<SliceId>, slices: &[SliceInfo]) -> bool {
    let ids = slices.iter().map(|info| info.slice);
    after.into_iter().chain(ids).is_sorted_by(|a, b| a < b)
}

/// The cause as people read it.
fn told(cause: &Failed, limit: Duration) -> String {
    match cause {
        Failed::Socket(cause) if cause.kind() == io::ErrorKind::TimedOut => {
            format!("no answer within {} ms", limit.as_millis())
        }
        cause => cause.to_string(),
    }
}

impl Calls {
    fn exchange(
        &mut self,
        stream: &impl Wire,
        request: &Request,
        until: Instant,
    ) -> Result<Answer, Failed> {
        self.tag += 1;
        let (header, body) = request.encode(self.tag);
        self.outflow.push(&header, body);
        loop {
            self.outflow.flush(stream)?;
            if self.outflow.is_empty() {
                break;
            }
            stream.wait(Ready::Room, until)?;
        }
        loop {
            if let Some((found, body)) = self.inflow.next()? {
                if (found.tag, found.kind) != (header.tag, header.kind) {
                    return Err(Malformed::Unasked(found.tag).into());
                }
                return Ok(reply::decode(&found, self.inflow.take(body))?);
            }
            match self.inflow.receive(stream)? {
                Received::Bytes { .. } => {}
                Received::Nothing => stream.wait(Ready::Bytes, until)?,
                Received::End => return Err(Failed::Closed),
            }
        }
    }
}

impl AsFd for Remote {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl<W: Wire + Send + Sync> BrickControl for Remote<W> {
    fn create(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        self.done(Control::Create { slice, size_bytes })
    }

    fn resize(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        self.done(Control::Resize { slice, size_bytes })
    }

    fn delete(&self, slice: SliceId) -> Result<(), SliceError> {
        self.done(Control::Delete { slice })
    }

    fn list(&self) -> Result<Vec<SliceInfo>, SliceError> {
        let mut all: Vec<SliceInfo> = Vec::new();
        for _ in 0..LIST_ANSWERS_MAX {
            let after = all.last().map(|info| info.slice);
            match self.call(&Request::Control(Control::List { after }))? {
                Reply::Listed { slices, more } if goes_on(after, &slices) => {
                    let more = more && !slices.is_empty();
                    all.extend(slices);
                    if !more {
                        return Ok(all);
                    }
                }
                _ => return Err(self.nonsense()),
            }
        }
        let cause = format!("brick {} lists slices without end", self.brick);
        Err(SliceError::Refused(cause))
    }

    fn status(&self) -> Result<BrickStatus, SliceError> {
        match self.call(&Request::Control(Control::Status))? {
            Reply::Status(status) => Ok(status),
            _ => Err(self.nonsense()),
        }
    }
}
