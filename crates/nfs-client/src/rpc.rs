//! ONC RPC (RFC 5531): records of calls, credentials, and replies.

use crate::xdr::{DecodeError, Decoder, Encoder};

/// The mark of the last fragment of a record.
pub const LAST_FRAGMENT: u32 = 1 << 31;
/// Bytes of a verifier in a reply.
const AUTH_BODY_BYTES_MAX: u32 = 400;

/// The caller of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// AUTH_NONE.
    None,
    /// AUTH_SYS.
    Sys {
        /// The user.
        uid: u32,
        /// The group.
        gid: u32,
        /// Further groups; the RFC allows 16.
        groups: Vec<u32>,
    },
}

impl Credential {
    /// AUTH_SYS without further groups.
    #[must_use]
    pub fn sys(uid: u32, gid: u32) -> Self {
        let groups = Vec::new();
        Self::Sys { uid, gid, groups }
    }

    fn encode(&self, out: &mut Encoder) {
        match self {
            Self::None => {
                out.u32(0).u32(0);
            }
            Self::Sys { uid, gid, groups } => {
                let mut body = Encoder::new();
                body.u32(0).opaque(b"client").u32(*uid).u32(*gid);
                body.u32(groups.len() as u32);
                for group in groups {
                    body.u32(*group);
                }
                out.u32(1).opaque(&body.into_bytes());
            }
        }
    }
}

/// A procedure of a program: its arguments, and the type of its result.
pub trait Procedure {
    /// The result.
    type Result;
    /// The program.
    const PROGRAM: u32;
    /// The version.
    const VERSION: u32;
    /// The number of the procedure.
    const NUMBER: u32;

    /// Appends the arguments.
    fn encode(&self, out: &mut Encoder);

    /// Takes the result.
    ///
    /// # Errors
    /// If the bytes are no result of this procedure.
    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError>;
}

/// The bytes of the arguments of a call.
#[must_use]
pub fn arguments<P: Procedure>(procedure: &P) -> Vec<u8> {
    let mut out = Encoder::new();
    procedure.encode(&mut out);
    out.into_bytes()
}

/// The result of a call, from the bytes of [`Reply::outcome`].
///
/// # Errors
/// If the bytes are no result of this procedure, or some follow it.
pub fn decode_result<P: Procedure>(bytes: &[u8]) -> Result<P::Result, DecodeError> {
    let mut fields = Decoder::new(bytes);
    let result = P::decode(&mut fields)?;
    fields.end()?;
    Ok(result)
}

/// A call of a program, version and procedure, as one record of one fragment, with its mark.
#[must_use]
pub fn call_record(
    xid: u32,
    credential: &Credential,
    (program, version, procedure): (u32, u32, u32),
    arguments: &[u8],
) -> Vec<u8> {
    let mut out = Encoder::new();
    // The mark follows when the length is known.
    out.u32(0).u32(xid).u32(0).u32(2);
    out.u32(program).u32(version).u32(procedure);
    credential.encode(&mut out);
    out.u32(0).u32(0);
    let mut record = out.into_bytes();
    record.extend(arguments);
    let len = (record.len() - 4) as u32;
    let mark = len | LAST_FRAGMENT;
    if let Some(first) = record.first_chunk_mut() {
        *first = mark.to_be_bytes();
    }
    record
}

/// Why a server did not execute a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// PROG_UNAVAIL.
    #[error("it has no such program")]
    ProgramUnavailable,
    /// PROG_MISMATCH.
    #[error("it has the versions {low} to {high} of the program")]
    ProgramMismatch {
        /// The lowest version.
        low: u32,
        /// The highest version.
        high: u32,
    },
    /// PROC_UNAVAIL.
    #[error("the program has no such procedure")]
    ProcedureUnavailable,
    /// GARBAGE_ARGS.
    #[error("it cannot decode the arguments")]
    GarbageArguments,
    /// SYSTEM_ERR.
    #[error("it has an error of its own")]
    SystemError,
    /// RPC_MISMATCH.
    #[error("it has the versions {low} to {high} of RPC")]
    RpcMismatch {
        /// The lowest version.
        low: u32,
        /// The highest version.
        high: u32,
    },
    /// AUTH_ERROR.
    #[error("it refused the credential with the status {0}")]
    Authentication(u32),
}

/// The reply to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The xid of the call.
    pub xid: u32,
    /// The bytes of the result, or the refusal.
    pub outcome: Result<Vec<u8>, Refusal>,
}

impl Reply {
    /// The reply in a record.
    ///
    /// # Errors
    /// If the record is no reply.
    pub fn decode(record: &[u8]) -> Result<Self, DecodeError> {
        let mut fields = Decoder::new(record);
        let xid = fields.u32("xid")?;
        match fields.u32("message type")? {
            1 => {}
            value => return Err(unknown("message type", value)),
        }
        let outcome = match fields.u32("reply status")? {
            0 => accepted(&mut fields)?,
            1 => {
                let refusal = denied(&mut fields)?;
                fields.end()?;
                Err(refusal)
            }
            value => return Err(unknown("reply status", value)),
        };
        Ok(Self { xid, outcome })
    }
}

fn unknown(field: &'static str, value: u32) -> DecodeError {
    DecodeError::Value { field, value }
}

fn accepted(fields: &mut Decoder<'_>) -> Result<Result<Vec<u8>, Refusal>, DecodeError> {
    let _flavor = fields.u32("verifier flavor")?;
    fields.opaque("verifier", AUTH_BODY_BYTES_MAX)?;
    let refusal = match fields.u32("accept status")? {
        0 => return Ok(Ok(fields.rest().to_vec())),
        1 => Refusal::ProgramUnavailable,
        2 => Refusal::ProgramMismatch {
            low: fields.u32("lowest version")?,
            high: fields.u32("highest version")?,
        },
        3 => Refusal::ProcedureUnavailable,
        4 => Refusal::GarbageArguments,
        5 => Refusal::SystemError,
        value => return Err(unknown("accept status", value)),
    };
    fields.clone().end()?;
    Ok(Err(refusal))
}

fn denied(fields: &mut Decoder<'_>) -> Result<Refusal, DecodeError> {
    match fields.u32("reject status")? {
        0 => Ok(Refusal::RpcMismatch {
            low: fields.u32("lowest version")?,
            high: fields.u32("highest version")?,
        }),
        1 => Ok(Refusal::Authentication(
            fields.u32("authentication status")?,
        )),
        value => Err(unknown("reject status", value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(values: &[u32]) -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_be_bytes())
            .collect()
    }

    #[test]
    fn call_has_the_fields_of_the_rfc() {
        let record = call_record(9, &Credential::None, (1, 2, 3), &[5; 4]);
        let wanted = [
            44 | LAST_FRAGMENT,
            9,
            0,
            2,
            1,
            2,
            3,
            0,
            0,
            0,
            0,
            0x0505_0505,
        ];
        assert_eq!(record, words(&wanted));
        let caller = Credential::Sys {
            uid: 6,
            gid: 7,
            groups: vec![8],
        };
        let record = call_record(9, &caller, (1, 2, 3), &[]);
        let name = u32::from_be_bytes(*b"clie");
        let rest = u32::from_be_bytes(*b"nt\0\0");
        let wanted = [1, 32, 0, 6, name, rest, 6, 7, 1, 8, 0, 0];
        assert_eq!(record[28..], words(&wanted));
    }

    #[test]
    fn replies_are_told_apart() {
        let check = |values: &[u32], outcome| {
            let reply = Reply::decode(&words(values)).expect("a reply");
            assert_eq!(reply, Reply { xid: 4, outcome });
        };
        check(&[4, 1, 0, 0, 0, 0, 6], Ok(words(&[6])));
        check(&[4, 1, 0, 0, 0, 1], Err(Refusal::ProgramUnavailable));
        let (low, high) = (3, 4);
        let mismatch = Refusal::ProgramMismatch { low, high };
        check(&[4, 1, 0, 0, 0, 2, 3, 4], Err(mismatch));
        check(&[4, 1, 0, 0, 0, 3], Err(Refusal::ProcedureUnavailable));
        check(&[4, 1, 0, 0, 0, 4], Err(Refusal::GarbageArguments));
        check(&[4, 1, 0, 0, 0, 5], Err(Refusal::SystemError));
        check(&[4, 1, 1, 0, 3, 4], Err(Refusal::RpcMismatch { low, high }));
        check(&[4, 1, 1, 1, 5], Err(Refusal::Authentication(5)));
        for bad in [
            &[4, 0, 0][..],
            &[4, 1, 2],
            &[4, 1, 0, 0, 0, 9],
            &[4, 1, 1, 1, 5, 0],
        ] {
            assert!(Reply::decode(&words(bad)).is_err(), "{bad:?}");
        }
    }
}
