//! The requests of one connection: a header of the protocol becomes requests of the space, and their
//! completions the outcome for the client. All of it is pure.
//!
//! [`plan`] never passes a range beyond the client's size, never passes a change to a read-only
//! export, and never plans more than one request of the space at a time for one of the client's.
//!
//! A request keeps its slot in [`InFlight`], and so its token, through all its steps; a token is
//! reused only after its request has ended. Each completion is checked against its request: one of
//! the wrong kind or length fails the request, and never reaches the client.

use crate::limits::{PAYLOAD_BYTES_MAX, ZEROES_BYTES};
use crate::negotiation::NegotiatedOptions;
use crate::wire::{Errno, Header, command, command_flag};
use bytes::Bytes;
use pagemesh_base::space::{Completion, Extent, Reply, Request, SpaceError, Token};

/// A request's failure: its number, and the reason in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub errno: Errno,
    pub reason: String,
}

impl Failure {
    pub fn new(errno: Errno, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { errno, reason: why }
    }
}

/// The step after the space has completed a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continuation {
    /// A reply without data.
    Done,
    /// The bytes read.
    Data,
    /// The extents, or only the first.
    Extents { one: bool },
    /// A flush, because the client wants a discard to be durable.
    Flush,
    /// The next piece of a range that must read as zeroes without being freed.
    Zeroes { next: u64, end: u64, durable: bool },
}

/// The plan for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestPlan {
    Submit(Request, Continuation),
    Fail(Failure),
    Disconnect,
}

/// Plans a request. Only writes have a payload.
pub fn plan(session: &NegotiatedOptions, header: &Header, payload: Bytes) -> RequestPlan {
    if header.command == command::DISCONNECT {
        return RequestPlan::Disconnect;
    }
    match check_request(session, header, payload) {
        Ok((request, then)) => RequestPlan::Submit(request, then),
        Err(failure) => RequestPlan::Fail(failure),
    }
}

fn check_request(
    session: &NegotiatedOptions,
    header: &Header,
    payload: Bytes,
) -> Result<(Request, Continuation), Failure> {
    let durable = header.flags & command_flag::FUA != 0;
    check_flags(session, header)?;
    match header.command {
        command::READ => read(session, header),
        command::WRITE => write(session, header, payload, durable),
        command::FLUSH => flush(header),
        command::TRIM => discard(session, header, durable),
        command::WRITE_ZEROES => {
            check_writable(session)?;
            check_range(session, header, Errno::NoSpace)?;
            write_zeroes(header, durable)
        }
        command::BLOCK_STATUS => extents(session, header),
        command::CACHE => Err(Failure::new(
            Errno::Invalid,
            "there is no cache to fill; the server does not offer it",
        )),
        other => Err(Failure::new(
            Errno::Invalid,
            format!("unknown command {other}"),
        )),
    }
}

fn read(session: &NegotiatedOptions, header: &Header) -> Result<(Request, Continuation), Failure> {
    let Header { offset, len, .. } = *header;
    check_range(session, header, Errno::Invalid)?;
    if len > PAYLOAD_BYTES_MAX {
        let why = format!("a read of {len} bytes; at most {PAYLOAD_BYTES_MAX} are allowed");
        return Err(Failure::new(Errno::Invalid, why));
    }
    Ok((Request::Read { offset, len }, Continuation::Data))
}

fn write(
    session: &NegotiatedOptions,
    header: &Header,
    data: Bytes,
    durable: bool,
) -> Result<(Request, Continuation), Failure> {
    check_writable(session)?;
    check_range(session, header, Errno::NoSpace)?;
    let request = Request::Write {
        offset: header.offset,
        data,
        durable,
    };
    Ok((request, Continuation::Done))
}

fn flush(header: &Header) -> Result<(Request, Continuation), Failure> {
    if header.offset != 0 || header.len != 0 {
        let why = "a flush has neither offset nor length";
        return Err(Failure::new(Errno::Invalid, why));
    }
    Ok((Request::Flush, Continuation::Done))
}

fn discard(
    session: &NegotiatedOptions,
    header: &Header,
    durable: bool,
) -> Result<(Request, Continuation), Failure> {
    check_writable(session)?;
    check_range(session, header, Errno::Invalid)?;
    let then = if durable {
        Continuation::Flush
    } else {
        Continuation::Done
    };
    let (offset, len) = (header.offset, u64::from(header.len));
    Ok((Request::Discard { offset, len }, then))
}

fn extents(
    session: &NegotiatedOptions,
    header: &Header,
) -> Result<(Request, Continuation), Failure> {
    if !session.has_allocation_context {
        let why = "no metadata context was negotiated";
        return Err(Failure::new(Errno::Invalid, why));
    }
    check_range(session, header, Errno::Invalid)?;
    let one = header.flags & command_flag::REQ_ONE != 0;
    let (offset, len) = (header.offset, u64::from(header.len));
    Ok((
        Request::Extents { offset, len },
        Continuation::Extents { one },
    ))
}

fn write_zeroes(header: &Header, durable: bool) -> Result<(Request, Continuation), Failure> {
    let Header { offset, len, .. } = *header;
    let len = u64::from(len);
    if header.flags & command_flag::NO_HOLE == 0 {
        let request = Request::WriteZeroes {
            offset,
            len,
            durable,
        };
        return Ok((request, Continuation::Done));
    }
    if header.flags & command_flag::FAST_ZERO != 0 {
        let why = "zeroes without holes are written like data, which is not fast";
        return Err(Failure::new(Errno::NotSupported, why));
    }
    Ok(next_zeroes(offset, offset + len, durable))
}

/// The next piece of a range to fill with zeroes, and the step after it.
pub fn next_zeroes(next: u64, end: u64, durable: bool) -> (Request, Continuation) {
    static ZERO_PAGE: [u8; ZEROES_BYTES] = [0; ZEROES_BYTES];
    let len = (end - next).min(ZEROES_BYTES as u64);
    let request = Request::Write {
        offset: next,
        data: Bytes::from_static(&ZERO_PAGE[..len as usize]),
        durable,
    };
    let next = next + len;
    if next == end {
        return (request, Continuation::Done);
    }
    (request, Continuation::Zeroes { next, end, durable })
}

fn check_flags(session: &NegotiatedOptions, header: &Header) -> Result<(), Failure> {
    let allowed = command_flag::FUA
        | match header.command {
            command::READ if session.has_structured_replies => command_flag::DONT_FRAGMENT,
            command::WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
            command::BLOCK_STATUS => command_flag::REQ_ONE,
            _ => 0,
        };
    let unknown = header.flags & !allowed;
    if unknown == 0 {
        return Ok(());
    }
    let why = format!(
        "flags {unknown:#x} mean nothing with command {}",
        header.command
    );
    Err(Failure::new(Errno::Invalid, why))
}

fn check_writable(session: &NegotiatedOptions) -> Result<(), Failure> {
    if session.read_only {
        return Err(Failure::new(Errno::Permission, "the export is read-only"));
    }
    Ok(())
}

fn check_range(session: &NegotiatedOptions, header: &Header, beyond: Errno) -> Result<(), Failure> {
    if header.len == 0 {
        return Err(Failure::new(Errno::Invalid, "a range of no bytes"));
    }
    pagemesh_base::space::check_range(session.size_bytes, header.offset, u64::from(header.len))
        .map_err(|error| Failure::new(beyond, error.to_string()))
}

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
