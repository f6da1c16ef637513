//! The export that a call addresses, found without decoding all of its arguments.
//!
//! Each procedure of NFSv3 but NULL begins with a file handle. A wrong route costs speed only: the
//! procedure checks the handle again.

mod compound;

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
/// NFSv4: its version, COMPOUND, and one of its operations (RFC 8881, section 16.2).
const VERSION_4: u32 = 4;
const COMPOUND: u32 = 1;
const SEQUENCE: u32 = 53;

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
