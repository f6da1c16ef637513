//! What a request of the protocol means for the space: a pure judgement of
//! one header and its payload under what was agreed on.
//!
//! It never lets a range beyond the size told to the client through, never
//! lets a change through to a read-only export, and never plans more than one
//! request of the space at a time for one of the client's.

use crate::limits::{PAYLOAD_BYTES_MAX, ZEROES_BYTES};
use crate::negotiation::Session;
use crate::wire::{Errno, Header, command, command_flag};
use bytes::Bytes;
use pagemesh_base::space::Request;

/// A request's failure: its number, and why in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) errno: Errno,
    pub(crate) why: String,
}

impl Failure {
    pub(crate) fn new(errno: Errno, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { errno, why }
    }
}

/// What follows when the space has completed a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
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

/// What to do with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    Submit(Request, Then),
    Fail(Failure),
    Disconnect,
}

/// Judges a request. Writes bring their payload, others none.
pub(crate) fn plan(session: &Session, header: &Header, payload: Bytes) -> Plan {
    if header.command == command::DISCONNECT {
        return Plan::Disconnect;
    }
    match judge(session, header, payload) {
        Ok((request, then)) => Plan::Submit(request, then),
        Err(failure) => Plan::Fail(failure),
    }
}

fn judge(session: &Session, header: &Header, payload: Bytes) -> Result<(Request, Then), Failure> {
    let durable = header.flags & command_flag::FUA != 0;
    let Header { offset, len, .. } = *header;
    check_flags(session, header)?;
    match header.command {
        command::READ => {
            check_range(session, header, Errno::Invalid)?;
            if len > PAYLOAD_BYTES_MAX {
                let why = format!("a read of {len} bytes; at most {PAYLOAD_BYTES_MAX} are taken");
                return Err(Failure::new(Errno::Invalid, why));
            }
            Ok((Request::Read { offset, len }, Then::Data))
        }
        command::WRITE => {
            check_writable(session)?;
            check_range(session, header, Errno::NoSpace)?;
            let data = payload;
            Ok((
                Request::Write {
                    offset,
                    data,
                    durable,
                },
                Then::Done,
            ))
        }
        command::FLUSH if offset != 0 || len != 0 => Err(Failure::new(
            Errno::Invalid,
            "a flush has neither offset nor length",
        )),
        command::FLUSH => Ok((Request::Flush, Then::Done)),
        command::TRIM => {
            check_writable(session)?;
            check_range(session, header, Errno::Invalid)?;
            let then = if durable { Then::Flush } else { Then::Done };
            let len = u64::from(len);
            Ok((Request::Discard { offset, len }, then))
        }
        command::WRITE_ZEROES => {
            check_writable(session)?;
            check_range(session, header, Errno::NoSpace)?;
            write_zeroes(header, durable)
        }
        command::BLOCK_STATUS => {
            if !session.allocation {
                let why = "no metadata context was negotiated";
                return Err(Failure::new(Errno::Invalid, why));
            }
            check_range(session, header, Errno::Invalid)?;
            let one = header.flags & command_flag::REQ_ONE != 0;
            let len = u64::from(len);
            Ok((Request::Extents { offset, len }, Then::Extents { one }))
        }
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

fn write_zeroes(header: &Header, durable: bool) -> Result<(Request, Then), Failure> {
    let Header { offset, len, .. } = *header;
    let len = u64::from(len);
    if header.flags & command_flag::NO_HOLE == 0 {
        let request = Request::WriteZeroes {
            offset,
            len,
            durable,
        };
        return Ok((request, Then::Done));
    }
    if header.flags & command_flag::FAST_ZERO != 0 {
        let why = "zeroes without holes are written like data, which is not fast";
        return Err(Failure::new(Errno::NotSupported, why));
    }
    Ok(next_zeroes(offset, offset + len, durable))
}

/// The next piece of a range to fill with zeroes, and what follows it.
pub(crate) fn next_zeroes(next: u64, end: u64, durable: bool) -> (Request, Then) {
    static ZEROES: [u8; ZEROES_BYTES] = [0; ZEROES_BYTES];
    let len = (end - next).min(ZEROES_BYTES as u64);
    let request = Request::Write {
        offset: next,
        data: Bytes::from_static(&ZEROES[..len as usize]),
        durable,
    };
    let next = next + len;
    if next == end {
        return (request, Then::Done);
    }
    (request, Then::Zeroes { next, end, durable })
}

fn check_flags(session: &Session, header: &Header) -> Result<(), Failure> {
    let allowed = command_flag::FUA
        | match header.command {
            command::READ if session.structured => command_flag::DONT_FRAGMENT,
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

fn check_writable(session: &Session) -> Result<(), Failure> {
    if session.read_only {
        return Err(Failure::new(Errno::Permission, "the export is read-only"));
    }
    Ok(())
}

fn check_range(session: &Session, header: &Header, beyond: Errno) -> Result<(), Failure> {
    if header.len == 0 {
        return Err(Failure::new(Errno::Invalid, "a range of no bytes"));
    }
    pagemesh_base::space::check_range(session.size_bytes, header.offset, u64::from(header.len))
        .map_err(|error| Failure::new(beyond, error.to_string()))
}
