//! The way of a COMPOUND: the way of its first file. That is the file of its first handle, or the one to which it goes from the
//! directories above the exports.
//!
//! A request about sessions or about directories above the exports alone is answered at once: no file system takes part, so a stalled
//! one stops neither the renewal of a lease nor a mount of another one.

use super::{CallRoute, Route, SEQUENCE};
use crate::export_table::ExportTable;
use crate::limits::{
    HANDLE_BYTES_MAX, LISTING_BYTES_MAX, NAME_BYTES_MAX, OPERATIONS_MAX, TRANSFER_BYTES_MAX,
};
use crate::nfs4::arguments::Arguments;
use crate::nfs4::compound::next_operation;
use crate::pseudo_fs::{PseudoFs, PseudoNo};
use crate::rpc::Call;
use crate::service::Service;
use crate::xdr::Reader;
use uuid::Uuid;

/// Operations of NFSv4 (RFC 8881, section 16.2).
const PUT_HANDLE: u32 = 22;
const PUT_PUBLIC_HANDLE: u32 = 23;
const PUT_ROOT_HANDLE: u32 = 24;
/// Bytes of the arguments of SEQUENCE: a session, and four words.
const SEQUENCE_BYTES: usize = 32;
/// Operations before the first handle of a COMPOUND that are looked at.
const FIRST_OPERATIONS: u32 = 2;
/// READ, and the bytes of its stateid.
const READ_FILE: u32 = 25;
const STATEID_BYTES: usize = 16;
/// BIND_CONN_TO_SESSION to DESTROY_SESSION, DESTROY_CLIENTID and RECLAIM_COMPLETE: no file system takes part.
const SESSION_OPERATIONS: [u32; 6] = [41, 42, 43, 44, 57, 58];

/// The begin of a COMPOUND.
enum CompoundStart<'a> {
    /// Only operations about clients and sessions.
    Session,
    /// The handle of a file comes first. The arguments begin with it.
    File(Reader<'a>),
    /// A directory above the exports comes first.
    Above(AboveStart<'a>),
}

/// See [`CompoundStart::Above`].
struct AboveStart<'a> {
    /// None: the root.
    handle: Option<&'a [u8]>,
    /// The operations after it, and their number.
    rest: Reader<'a>,
    operations: u32,
}

impl<'a> CompoundStart<'a> {
    /// None: it begins in another way.
    fn decode(mut arguments: Reader<'a>) -> Option<Self> {
        arguments.opaque("tag", NAME_BYTES_MAX).ok()?;
        let _minor_version = arguments.u32().ok()?;
        let count = arguments.u32().ok()?;
        for number in 1..=count.min(FIRST_OPERATIONS) {
            let operations = count - number;
            match arguments.u32().ok()? {
                SEQUENCE => {
                    arguments.fixed::<SEQUENCE_BYTES>().ok()?;
                    if count == 1 {
                        return Some(Self::Session);
                    }
                }
                PUT_HANDLE => {
                    let mut rest = arguments.clone();
                    let handle = rest.opaque("file handle", HANDLE_BYTES_MAX).ok()?;
                    let above = AboveStart {
                        handle: Some(handle),
                        rest,
                        operations,
                    };
                    return Some(match PseudoFs::is_handle(handle) {
                        true => Self::Above(above),
                        false => Self::File(arguments),
                    });
                }
                PUT_ROOT_HANDLE | PUT_PUBLIC_HANDLE => {
                    return Some(Self::Above(AboveStart {
                        handle: None,
                        rest: arguments,
                        operations,
                    }));
                }
                operation => {
                    let is_session = SESSION_OPERATIONS.contains(&operation);
                    return (is_session && operations == 0).then_some(Self::Session);
                }
            }
        }
        None
    }
}

/// The end of a walk through the directories above the exports.
#[derive(Debug, PartialEq, Eq)]
enum WalkEnd {
    /// It goes into the export of this volume.
    Export(Uuid),
    /// It stays above the exports, to the last operation.
    Above,
    /// It is not known without a run.
    Unknown,
}

/// Follows operations from a directory above the exports on. A listing there asks the file systems for attributes.
fn walk(table: &ExportTable, start: AboveStart<'_>) -> WalkEnd {
    let root = Some(PseudoNo::ROOT);
    let at = start.handle.map_or(root, |it| table.pseudo.by_handle(it));
    let Some(mut at) = at else {
        return WalkEnd::Above;
    };
    let mut rest = start.rest;
    for _ in 0..start.operations.min(OPERATIONS_MAX) {
        let operation = next_operation(&mut rest);
        let decoded = operation.and_then(|operation| Arguments::decode(operation, &mut rest));
        let next = match decoded {
            Ok(Arguments::Lookup(name)) => table.pseudo.child(at, name.0),
            Ok(Arguments::LookupParent) => table.pseudo.parent(at),
            Ok(Arguments::PutRootHandle | Arguments::PutPublicHandle) => root,
            Ok(
                Arguments::Access(_)
                | Arguments::GetAttributes(_)
                | Arguments::GetHandle
                | Arguments::SaveHandle,
            ) => Some(at),
            _ => return WalkEnd::Unknown,
        };
        // The request ends with an operation that fails.
        let Some(next) = next else {
            return WalkEnd::Above;
        };
        at = next;
        if let Some(volume) = table.volume_at(at) {
            return WalkEnd::Export(volume);
        }
    }
    WalkEnd::Above
}

impl Service {
    pub(super) fn route_compound(&self, call: &Call<'_>, arguments: Reader<'_>) -> Route {
        let listing = LISTING_BYTES_MAX as usize;
        let (export, reply_bytes) = match CompoundStart::decode(arguments) {
            Some(CompoundStart::Session) => return Route::AtOnce,
            Some(CompoundStart::File(mut arguments)) => {
                let export = self.export_of(&mut arguments);
                (export, compound_reply_bytes(arguments))
            }
            Some(CompoundStart::Above(start)) => match walk(&self.exports.table(), start) {
                WalkEnd::Export(volume) => {
                    let mut file_systems = self.exports.file_systems();
                    let export = file_systems.position(|fs| fs.volume == volume);
                    (export, listing)
                }
                WalkEnd::Above => return Route::AtOnce,
                WalkEnd::Unknown => (None, listing),
            },
            None => (None, listing),
        };
        Route::Queue(CallRoute {
            export,
            xid: call.xid,
            procedure: None,
            reply_bytes,
            write: None,
        })
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
