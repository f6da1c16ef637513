//! The requests of one connection that the space has not completed.
//!
//! A request keeps its slot, and so its token, through all its steps; a token is reused only after
//! its request has ended. Each completion is checked against its request: one of the wrong kind or
//! length fails the request, and never reaches the client.

use crate::plan::{Continuation, Failure, next_zeroes};
use crate::wire::Errno;
use pagemesh_base::space::{Completion, Extent, Reply, Request, SpaceError, Token};

/// The outcome of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    Done,
    Data { offset: u64, data: Vec<u8> },
    Extents(Vec<Extent>),
    Failed(Failure),
}

/// The step after a completion.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CompletionStep {
    /// The request continues with another request of the space.
    Submit(Request),
    /// It has ended.
    End {
        cookie: u64,
        outcome: RequestOutcome,
    },
}

#[derive(Debug)]
struct PendingRequest {
    cookie: u64,
    offset: u64,
    len: u32,
    held_bytes: u64,
    continuation: Continuation,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    slots: Vec<Option<PendingRequest>>,
    free: Vec<usize>,
    held_bytes: u64,
}

impl InFlight {
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Bytes that the requests hold: payloads, and expected data.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Adds a request and returns its token.
    pub(crate) fn begin(
        &mut self,
        cookie: u64,
        offset: u64,
        len: u32,
        held_bytes: u64,
        then: Continuation,
    ) -> Token {
        let pending = PendingRequest {
            cookie,
            offset,
            len,
            held_bytes,
            continuation: then,
        };
        self.held_bytes += held_bytes;
        let place = self.free.pop().unwrap_or(self.slots.len());
        if place == self.slots.len() {
            self.slots.push(Some(pending));
        } else {
            self.slots[place] = Some(pending);
        }
        Token(place as u64)
    }

    /// The step after a completion; none if its token is not in flight.
    pub(crate) fn complete(&mut self, completion: Completion) -> Option<CompletionStep> {
        let place = usize::try_from(completion.token.0).ok()?;
        let pending = self.slots.get_mut(place)?.as_mut()?;
        let outcome = match (completion.result, pending.continuation) {
            (Err(error), _) => RequestOutcome::Failed(failure_of(&error)),
            (Ok(Reply::Done), Continuation::Flush) => {
                pending.continuation = Continuation::Done;
                return Some(CompletionStep::Submit(Request::Flush));
            }
            (Ok(Reply::Done), Continuation::Zeroes { next, end, durable }) => {
                let (request, then) = next_zeroes(next, end, durable);
                pending.continuation = then;
                return Some(CompletionStep::Submit(request));
            }
            (Ok(reply), then) => outcome_of(pending, reply, then),
        };
        let (cookie, held_bytes) = (pending.cookie, pending.held_bytes);
        self.slots[place] = None;
        self.free.push(place);
        self.held_bytes -= held_bytes;
        Some(CompletionStep::End { cookie, outcome })
    }
}

fn outcome_of(pending: &PendingRequest, reply: Reply, then: Continuation) -> RequestOutcome {
    match (then, reply) {
        (Continuation::Done, Reply::Done) => RequestOutcome::Done,
        (Continuation::Data, Reply::Data(data)) if data.len() == pending.len as usize => {
            RequestOutcome::Data {
                offset: pending.offset,
                data,
            }
        }
        (Continuation::Extents { one }, Reply::Extents(extents)) => {
            let mut extents = merge_extents(&extents, u64::from(pending.len));
            if one {
                extents.truncate(1);
            }
            if extents.is_empty() {
                return RequestOutcome::Failed(Failure::new(
                    Errno::Io,
                    "the space returned no extents",
                ));
            }
            RequestOutcome::Extents(extents)
        }
        _ => RequestOutcome::Failed(Failure::new(
            Errno::Io,
            "the space returned an answer of another kind",
        )),
    }
}

/// Merges neighbours of one kind, and cuts at the end of the range.
fn merge_extents(extents: &[Extent], len: u64) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::with_capacity(extents.len());
    let mut left = len;
    for extent in extents {
        let len = extent.len.min(left);
        left -= len;
        match joined.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.mapped == extent.mapped => last.len += len,
            _ => joined.push(Extent { len, ..*extent }),
        }
    }
    joined
}

fn failure_of(error: &SpaceError) -> Failure {
    if matches!(error, SpaceError::Damaged { .. }) {
        // Clients do not report the block: most show only EIO.
        tracing::error!(%error, "a request failed");
    }
    let errno = match error {
        SpaceError::OutOfRange { .. } => Errno::Invalid,
        SpaceError::NoSpace(_) => Errno::NoSpace,
        SpaceError::Fenced => Errno::Shutdown,
        SpaceError::Unsupported(_) => Errno::NotSupported,
        SpaceError::Damaged { .. } | SpaceError::Unavailable(_) | SpaceError::Busy(_) => Errno::Io,
    };
    Failure::new(errno, error.to_string())
}
