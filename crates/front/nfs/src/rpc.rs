//! ONC RPC (RFC 5531): the headers of calls, credentials, and replies.
//!
//! A call is decoded in the order of its fields, so the first wrong one decides the reply. A record
//! without a whole header has no reply: its connection ends.
//!
//! A [`Reply`] has its record mark, so that a connection only sends its parts.

use crate::limits::{AUTH_BODY_BYTES_MAX, GROUPS_MAX, MACHINE_NAME_BYTES_MAX};
use crate::record::{MARK_BYTES, reply_mark};
use crate::xdr::{Decode, Encode, Reader, UNIT_BYTES, Writer, XdrError, padding_bytes, wire_enum};
use bytes::Bytes;

/// The version of RPC.
pub const RPC_VERSION: u32 = 2;
/// The message type of a call.
const CALL: u32 = 0;
/// The message type of a reply.
const REPLY: u32 = 1;
/// Authentication flavors.
const AUTH_NONE: u32 = 0;
const AUTH_SYS: u32 = 1;
/// The status of replies.
const MESSAGE_ACCEPTED: u32 = 0;
const MESSAGE_DENIED: u32 = 1;
/// The status of an accepted call that was executed.
const SUCCESS: u32 = 0;

wire_enum! {
    /// The reason that a call is not authenticated.
    pub enum AuthStatus, "authentication status" {
        /// The credential is malformed.
        BadCredential = 1,
        /// The client must begin a new session: the flavor is not one of this server.
        RejectedCredential = 2,
        /// The verifier is malformed.
        BadVerifier = 3,
        /// The verifier has expired.
        RejectedVerifier = 4,
        /// The export demands a stronger flavor.
        TooWeak = 5,
    }
}

/// The reason that a call is not executed, although its header is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The server has no such program.
    ProgramUnavailable,
    /// The program has other versions.
    ProgramMismatch {
        /// The lowest version.
        low: u32,
        /// The highest version.
        high: u32,
    },
    /// The program has no such procedure.
    ProcedureUnavailable,
    /// The arguments are malformed.
    GarbageArguments,
    /// The server has no memory or another fault of its own.
    SystemError,
}

/// The reason that a call is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// The version of RPC is not [`RPC_VERSION`].
    RpcMismatch,
    /// The client is not authenticated.
    Authentication(AuthStatus),
}

/// The reason that a record is no call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The record has no whole header. Close the connection.
    #[error("a record has no header of a call: {0}")]
    Header(XdrError),
    /// The record is a reply or unknown. Close the connection.
    #[error("a record has the message type {0}; only calls are expected")]
    NotACall(u32),
    /// Send [`Reply::denied`].
    #[error("call {xid:#x} is denied: {denial:?}")]
    Denied {
        /// The call's id.
        xid: u32,
        /// The reason.
        denial: Denial,
    },
}

impl From<XdrError> for CallError {
    fn from(error: XdrError) -> Self {
        Self::Header(error)
    }
}

/// The offset of the result in an accepted reply: mark, xid, type, status, verifier, status.
const RESULT_AT: usize = MARK_BYTES + 6 * UNIT_BYTES;

/// Supplementary groups of a caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    ids: [u32; GROUPS_MAX],
    count: usize,
}

impl Groups {
    /// The group ids, in the order of the credential.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids[..self.count]
    }
}

impl Decode<'_> for Groups {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let count = reader.length("groups of AUTH_SYS", GROUPS_MAX)?;
        let mut ids = [0; GROUPS_MAX];
        for id in &mut ids[..count] {
            *id = reader.u32()?;
        }
        Ok(Self { ids, count })
    }
}

/// The body of an AUTH_SYS credential. Nothing proves it: the client asserts the ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemCredential<'a> {
    /// A number of the client's choice.
    pub stamp: u32,
    /// The client's name, unverified.
    pub machine_name: &'a [u8],
    /// The caller's user id.
    pub uid: u32,
    /// The caller's group id.
    pub gid: u32,
    /// The caller's supplementary groups.
    pub groups: Groups,
}

impl<'a> Decode<'a> for SystemCredential<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            stamp: reader.u32()?,
            machine_name: reader.opaque("machine name", MACHINE_NAME_BYTES_MAX)?,
            uid: reader.u32()?,
            gid: reader.u32()?,
            groups: Groups::decode(reader)?,
        })
    }
}

/// The credential of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credential<'a> {
    /// The caller is anonymous.
    None,
    /// The caller has a user id and groups.
    System(SystemCredential<'a>),
}

impl<'a> Credential<'a> {
    /// The shorthand flavor (AUTH_SHORT) is rejected, too: this server issues none.
    fn decode(flavor: u32, body: &'a [u8]) -> Result<Self, AuthStatus> {
        let mut reader = Reader::new(body);
        match flavor {
            AUTH_NONE => Ok(Self::None),
            AUTH_SYS => SystemCredential::decode(&mut reader)
                .and_then(|credential| {
                    reader.finish("AUTH_SYS")?;
                    Ok(Self::System(credential))
                })
                .map_err(|_| AuthStatus::BadCredential),
            _ => Err(AuthStatus::RejectedCredential),
        }
    }
}

/// The header of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call<'a> {
    /// The call's id, returned with the reply.
    pub xid: u32,
    /// The program.
    pub program: u32,
    /// Its version.
    pub version: u32,
    /// The procedure.
    pub procedure: u32,
    /// The caller.
    pub credential: Credential<'a>,
}

impl<'a> Call<'a> {
    /// The header of the call in this record, and a reader at its arguments.
    ///
    /// # Errors
    /// If the record is no call of RPC version 2 with a known flavor.
    pub fn decode(record: &'a [u8]) -> Result<(Self, Reader<'a>), CallError> {
        let mut reader = Reader::new(record);
        let xid = reader.u32()?;
        match reader.u32()? {
            CALL => {}
            other => return Err(CallError::NotACall(other)),
        }
        let denied = |denial| CallError::Denied { xid, denial };
        if reader.u32()? != RPC_VERSION {
            return Err(denied(Denial::RpcMismatch));
        }
        let (program, version, procedure) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let unauthenticated = |status| denied(Denial::Authentication(status));
        let body = |reader: &mut Reader<'a>, status| {
            let flavor = reader.u32()?;
            match reader.opaque("authentication body", AUTH_BODY_BYTES_MAX) {
                Ok(body) => Ok((flavor, body)),
                Err(XdrError::TooLong { .. }) => Err(unauthenticated(status)),
                Err(error) => Err(error.into()),
            }
        };
        let (flavor, credential) = body(&mut reader, AuthStatus::BadCredential)?;
        let (verifier_flavor, verifier) = body(&mut reader, AuthStatus::BadVerifier)?;
        let credential = Credential::decode(flavor, credential).map_err(unauthenticated)?;
        if verifier_flavor != AUTH_NONE || !verifier.is_empty() {
            return Err(unauthenticated(AuthStatus::BadVerifier));
        }
        let call = Self {
            xid,
            program,
            version,
            procedure,
            credential,
        };
        Ok((call, reader))
    }
}

/// The reason that arguments are not decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgumentsError {
    /// The program has no such procedure.
    #[error("there is no procedure {0}")]
    Procedure(u32),
    /// The arguments are malformed.
    #[error("arguments: {0}")]
    Malformed(#[from] XdrError),
}

impl ArgumentsError {
    /// The refusal to send.
    #[must_use]
    pub fn refusal(self) -> Refusal {
        match self {
            Self::Procedure(_) => Refusal::ProcedureUnavailable,
            Self::Malformed(_) => Refusal::GarbageArguments,
        }
    }
}

/// A reply with its record mark, ready to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    head: Vec<u8>,
    tail: Bytes,
}

impl Reply {
    /// The reply to an executed call.
    #[must_use]
    pub fn success(xid: u32, result: &impl Encode) -> Self {
        let mut writer = accepted(xid, SUCCESS);
        writer.value(result);
        Self::finish(writer, result.tail())
    }

    /// The reply to a call that is not executed.
    #[must_use]
    pub fn refused(xid: u32, refusal: Refusal) -> Self {
        let status = match refusal {
            Refusal::ProgramUnavailable => 1,
            Refusal::ProgramMismatch { .. } => 2,
            Refusal::ProcedureUnavailable => 3,
            Refusal::GarbageArguments => 4,
            Refusal::SystemError => 5,
        };
        let mut writer = accepted(xid, status);
        if let Refusal::ProgramMismatch { low, high } = refusal {
            writer.u32(low);
            writer.u32(high);
        }
        Self::finish(writer, Bytes::new())
    }

    /// The reply to a call with an unusable header.
    #[must_use]
    pub fn denied(xid: u32, denial: Denial) -> Self {
        let mut writer = begin(xid, MESSAGE_DENIED);
        match denial {
            Denial::RpcMismatch => {
                writer.u32(0);
                writer.u32(RPC_VERSION);
                writer.u32(RPC_VERSION);
            }
            Denial::Authentication(status) => {
                writer.u32(1);
                writer.value(&status);
            }
        }
        Self::finish(writer, Bytes::new())
    }

    /// Sets the mark.
    fn finish(writer: Writer, tail: Bytes) -> Self {
        let mut head = writer.into_bytes();
        let len = head.len() - MARK_BYTES + tail.len() + padding_bytes(tail.len());
        let mark = reply_mark(len).expect("limits of results bound a reply below 2 GiB");
        head[..MARK_BYTES].copy_from_slice(&mark);
        Self { head, tail }
    }

    /// The bytes of the reply, with its mark.
    pub(crate) fn len(&self) -> usize {
        self.parts().iter().map(|part| part.len()).sum()
    }

    /// The first word of the result, which is the status of NFS and MOUNT; none without a result.
    pub(crate) fn status(&self) -> Option<u32> {
        let word = self.head.get(RESULT_AT..)?.first_chunk()?;
        Some(u32::from_be_bytes(*word))
    }

    /// The bytes to send, in order: the mark with the fields, the tail, and its padding.
    #[must_use]
    pub fn parts(&self) -> [&[u8]; 3] {
        const PADDING: &[u8; UNIT_BYTES] = &[0; UNIT_BYTES];
        let padding = &PADDING[..padding_bytes(self.tail.len())];
        [&self.head, &self.tail, padding]
    }
}

/// The mark's room and the first fields.
fn begin(xid: u32, status: u32) -> Writer {
    let mut writer = Writer::new();
    writer.fixed(&[0; MARK_BYTES]);
    writer.u32(xid);
    writer.u32(REPLY);
    writer.u32(status);
    writer
}

/// As [`begin`], with a verifier of AUTH_NONE and the status of an accepted call.
fn accepted(xid: u32, status: u32) -> Writer {
    let mut writer = begin(xid, MESSAGE_ACCEPTED);
    writer.u32(AUTH_NONE);
    writer.length(0);
    writer.u32(status);
    writer
}

#[cfg(test)]
mod tests;
