//! The export that a call addresses, found without decoding all of its arguments.
//!
//! Each procedure of NFSv3 but NULL begins with a file handle. A wrong route costs speed only: the
//! procedure checks the handle again.

use super::Service;
use crate::acl3;
use crate::handle::HandleBytes;
use crate::limits::{
    HANDLE_BYTES_MAX, LISTING_BYTES_MAX, MOUNT_PATH_BYTES_MAX, NAME_BYTES_MAX, TRANSFER_BYTES_MAX,
};
use crate::mount3;
use crate::nfs3::attributes::Attributes;
use crate::nfs3::status::{Answer, Status};
use crate::nfs3::{self, FailedCall, Procedure};
use crate::nfs4;
use crate::rpc::{Call, CallError, Reply};
use crate::workers::write_order::WriteRange;
use crate::xdr::{Encode, Reader, Writer};
use std::hash::{DefaultHasher, Hasher};

/// Bytes of a reply beside data and listings.
const REPLY_BYTES: usize = 512;
/// The same with two ACLs.
const ACL_REPLY_BYTES: usize = 64 << 10;
/// The procedure MNT of MOUNT.
const MOUNT_PATH: u32 = 1;
/// NFSv4: its version, COMPOUND, and two of its operations (RFC 8881, section 16.2).
const VERSION_4: u32 = 4;
const COMPOUND: u32 = 1;
const PUT_HANDLE: u32 = 22;
const SEQUENCE: u32 = 53;
/// Bytes of the arguments of SEQUENCE: a session, and four words.
const SEQUENCE_BYTES: usize = 32;
/// Operations before the first handle of a COMPOUND that are looked at.
const FIRST_OPERATIONS: u32 = 2;
/// READ, and the bytes of its stateid.
const READ_FILE: u32 = 25;
const STATEID_BYTES: usize = 16;
/// BIND_CONN_TO_SESSION to DESTROY_SESSION, DESTROY_CLIENTID and RECLAIM_COMPLETE: no file system takes part.
const SESSION_OPERATIONS: [u32; 6] = [41, 42, 43, 44, 57, 58];

/// The way of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// It is answered at once: no file system takes part.
    AtOnce,
    /// It goes to the workers of this export, or to the workers for calls without an export.
    Queue(CallRoute),
}

/// A call for workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallRoute {
    /// The number of the export; none: the call is not about one.
    pub(crate) export: Option<usize>,
    pub(crate) xid: u32,
    /// The procedure, if it is one of NFSv3.
    pub(crate) procedure: Option<Procedure>,
    /// The most bytes of the reply.
    pub(crate) reply_bytes: usize,
    /// The bytes of a WRITE.
    pub(crate) write: Option<WriteRange>,
}

impl CallRoute {
    /// The reply to the call of `record` that the export cannot take now; none if it has no such status.
    pub(crate) fn try_later(&self, record: &[u8]) -> Option<Reply> {
        let status = Status::Jukebox;
        if let Some(procedure) = self.procedure {
            return Some(Reply::success(self.xid, &FailedCall { procedure, status }));
        }
        let (call, arguments) = Call::decode(record).ok()?;
        if (call.program, call.version) == (acl3::PROGRAM, acl3::VERSION) {
            let failed = Answer::<(), Option<Attributes>>::Failed(status, None);
            return Some(Reply::success(self.xid, &failed));
        }
        let delayed = DelayedSequence::of(&call, arguments)?;
        Some(Reply::success(self.xid, &delayed))
    }
}

impl Service {
    /// The way of the call in a record. An error ends the connection.
    pub(crate) fn route(&self, record: &[u8]) -> Result<Route, CallError> {
        let (call, arguments) = match Call::decode(record) {
            Ok(decoded) => decoded,
            Err(CallError::Denied { .. }) => return Ok(Route::AtOnce),
            Err(error) => return Err(error),
        };
        Ok(match (call.program, call.version) {
            (_, _) if call.procedure == 0 => Route::AtOnce,
            (nfs3::PROGRAM, nfs3::VERSION) => self.route_nfs(&call, arguments),
            (nfs3::PROGRAM, VERSION_4) if call.procedure == COMPOUND => {
                self.route_compound(&call, arguments)
            }
            (mount3::PROGRAM, mount3::VERSION) => self.route_mount(&call, arguments),
            (acl3::PROGRAM, acl3::VERSION) => self.route_acl(&call, arguments),
            _ => Route::AtOnce,
        })
    }

    fn route_nfs(&self, call: &Call<'_>, mut arguments: Reader<'_>) -> Route {
        let Some(procedure) = Procedure::from_number(call.procedure) else {
            return Route::AtOnce;
        };
        let all = arguments.rest();
        let export = self.export_of(&mut arguments);
        let handle = all.len() - arguments.rest().len();
        let handle = all.get(..handle).unwrap_or_default();
        Route::Queue(CallRoute {
            export,
            write: match procedure {
                Procedure::Write => write_range(handle, arguments.clone()),
                _ => None,
            },
            xid: call.xid,
            procedure: Some(procedure),
            reply_bytes: reply_bytes(procedure, arguments),
        })
    }

    /// The export of the handle at the front.
    fn export_of(&self, arguments: &mut Reader<'_>) -> Option<usize> {
        let handle = arguments.opaque("file handle", HANDLE_BYTES_MAX).ok()?;
        let id = HandleBytes(handle).claimed_volume()?;
        let table = self.exports.table();
        let volume = table.by_id(id)?.volume;
        let mut file_systems = self.exports.file_systems();
        file_systems.position(|fs| fs.volume == volume)
    }

    /// Each procedure of the ACL protocol but NULL begins with a file handle, too.
    fn route_acl(&self, call: &Call<'_>, mut arguments: Reader<'_>) -> Route {
        Route::Queue(CallRoute {
            export: self.export_of(&mut arguments),
            xid: call.xid,
            procedure: None,
            reply_bytes: ACL_REPLY_BYTES,
            write: None,
        })
    }

    fn route_mount(&self, call: &Call<'_>, mut arguments: Reader<'_>) -> Route {
        if call.procedure != MOUNT_PATH {
            return Route::AtOnce;
        }
        let Ok(path) = arguments.opaque("mount path", MOUNT_PATH_BYTES_MAX) else {
            return Route::AtOnce;
        };
        let mut names = path.split(|byte| *byte == b'/');
        let name = names.find(|name| !name.is_empty()).unwrap_or_default();
        let mut file_systems = self.exports.file_systems();
        Route::Queue(CallRoute {
            export: file_systems.position(|fs| fs.name.as_bytes() == name),
            xid: call.xid,
            procedure: None,
            reply_bytes: REPLY_BYTES,
            write: None,
        })
    }

    /// The way of a COMPOUND: the way of its first handle, if it comes first or after SEQUENCE. A request about sessions alone is answered
    /// at once, so that a stalled export stops no renewal of a lease.
    fn route_compound(&self, call: &Call<'_>, arguments: Reader<'_>) -> Route {
        match CompoundStart::decode(arguments) {
            Some(CompoundStart::Session) => Route::AtOnce,
            Some(CompoundStart::Handle(mut arguments)) => {
                let export = self.export_of(&mut arguments);
                Route::Queue(CallRoute {
                    export,
                    xid: call.xid,
                    procedure: None,
                    reply_bytes: compound_reply_bytes(arguments),
                    write: None,
                })
            }
            None => Route::Queue(CallRoute {
                export: None,
                xid: call.xid,
                procedure: None,
                reply_bytes: LISTING_BYTES_MAX as usize,
                write: None,
            }),
        }
    }
}

/// The reply to a COMPOUND with a SEQUENCE that is not begun: its slot stays unused (RFC 8881 section 18.46.3).
struct DelayedSequence<'a> {
    tag: &'a [u8],
}

impl<'a> DelayedSequence<'a> {
    /// None: it is another call.
    fn of(call: &Call<'_>, mut arguments: Reader<'a>) -> Option<Self> {
        let is_compound =
            (call.program, call.version, call.procedure) == (nfs3::PROGRAM, VERSION_4, COMPOUND);
        let tag = arguments.opaque("tag", NAME_BYTES_MAX).ok()?;
        let _minor_version = arguments.u32().ok()?;
        let _count = arguments.u32().ok()?;
        let is_sequence = arguments.u32().ok()? == SEQUENCE;
        (is_compound && is_sequence).then_some(Self { tag })
    }
}

impl Encode for DelayedSequence<'_> {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&nfs4::status::Status::Delay);
        writer.opaque(self.tag);
        writer.u32(1);
        writer.u32(SEQUENCE);
        writer.value(&nfs4::status::Status::Delay);
    }
}

/// The begin of a COMPOUND.
enum CompoundStart<'a> {
    /// Only operations about clients and sessions.
    Session,
    /// A file handle comes first. The arguments begin with it.
    Handle(Reader<'a>),
}

impl<'a> CompoundStart<'a> {
    /// None: it begins in another way.
    fn decode(mut arguments: Reader<'a>) -> Option<Self> {
        arguments.opaque("tag", NAME_BYTES_MAX).ok()?;
        let _minor_version = arguments.u32().ok()?;
        let count = arguments.u32().ok()?;
        for number in 0..count.min(FIRST_OPERATIONS) {
            match arguments.u32().ok()? {
                SEQUENCE => {
                    arguments.fixed::<SEQUENCE_BYTES>().ok()?;
                    if count == 1 {
                        return Some(Self::Session);
                    }
                }
                PUT_HANDLE => return Some(Self::Handle(arguments)),
                operation => {
                    let is_session = SESSION_OPERATIONS.contains(&operation);
                    let is_last = number + 1 == count;
                    return (is_session && is_last).then_some(Self::Session);
                }
            }
        }
        None
    }
}

/// The most bytes of the reply to a COMPOUND, by the operation after its first handle.
fn compound_reply_bytes(mut arguments: Reader<'_>) -> usize {
    let mut read_bytes = || {
        let is_read = arguments.u32().ok()? == READ_FILE;
        arguments.fixed::<STATEID_BYTES>().ok()?;
        let _offset = arguments.u64().ok()?;
        let count = arguments.u32().ok()?.min(TRANSFER_BYTES_MAX);
        is_read.then_some(count as usize)
    };
    LISTING_BYTES_MAX as usize + read_bytes().unwrap_or(0)
}

/// The most bytes of a reply, by the arguments after the handle.
fn reply_bytes(procedure: Procedure, mut arguments: Reader<'_>) -> usize {
    let data = match procedure {
        Procedure::Read => {
            let count = arguments.u64().and_then(|_offset| arguments.u32());
            count.unwrap_or(0).min(TRANSFER_BYTES_MAX)
        }
        Procedure::List | Procedure::ListPlus => LISTING_BYTES_MAX,
        Procedure::ReadSymlink => 4096,
        _ => 0,
    };
    REPLY_BYTES + data as usize
}

/// The bytes of a WRITE, by its handle and the arguments after it.
fn write_range(handle: &[u8], mut arguments: Reader<'_>) -> Option<WriteRange> {
    let offset = arguments.u64().ok()?;
    let count = arguments.u32().ok()?;
    let mut hasher = DefaultHasher::new();
    hasher.write(handle);
    Some(WriteRange {
        file: hasher.finish(),
        offset,
        end: offset.checked_add(count.into())?,
    })
}
