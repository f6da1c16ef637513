//! Maps a request of the protocol to requests of the space. It is a pure function of one header,
//! its payload and the negotiated options.
//!
//! It never passes a range beyond the client's size, never passes a change to a read-only export,
//! and never plans more than one request of the space at a time for one of the client's.

use crate::limits::{PAYLOAD_BYTES_MAX, ZEROES_BYTES};
use crate::negotiation::NegotiatedOptions;
use crate::wire::{Errno, Header, command, command_flag};
use bytes::Bytes;
use pagemesh_base::space::Request;

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
