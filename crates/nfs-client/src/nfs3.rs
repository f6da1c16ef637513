//! NFS version 3 (RFC 1813): the 22 procedures, with the names and fields of the RFC.

mod attributes;
mod data;
mod filesystem;
mod listing;
mod names;
mod status;

pub use attributes::{
    Access, Attributes, FileType, GetAttributes, PreAttributes, SetAttributes, SetAttributesCall,
    SetTime, Time, WccData, access,
};
pub use data::{
    Commit, Committed, Read, ReadData, ReadLink, ReadLinkData, StableHow, Write, Written,
};
pub use filesystem::{FsInfo, FsInfoData, FsStat, FsStatData, PathConf, PathConfData, properties};
pub use listing::{Entry, Listing, PlusEntry, ReadDir, ReadDirPlus};
pub use names::{
    Create, CreateHow, Created, Link, Linked, LookedUp, Lookup, MakeDirectory, MakeNode, Node,
    Remove, RemoveDirectory, Rename, Renamed, Symlink,
};
pub use status::Status;

use crate::rpc::Procedure;
use crate::xdr::{DecodeError, Decoder, Encoder};
use std::fmt;

/// The program.
pub const PROGRAM: u32 = 100_003;
/// The version.
pub const VERSION: u32 = 3;
/// Bytes of a handle (NFS3_FHSIZE).
pub const HANDLE_BYTES_MAX: u32 = 64;

/// The handle of a file.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(pub Vec<u8>);

impl fmt::Debug for Handle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Handle(")?;
        for byte in &self.0 {
            write!(formatter, "{byte:02x}")?;
        }
        formatter.write_str(")")
    }
}

impl Handle {
    pub(crate) fn encode(&self, out: &mut Encoder) {
        out.opaque(&self.0);
    }

    pub(crate) fn decode(fields: &mut Decoder<'_>) -> Result<Self, DecodeError> {
        let bytes = fields.opaque("handle", HANDLE_BYTES_MAX)?;
        Ok(Self(bytes.to_vec()))
    }
}

/// A status beside NFS3_OK, with the attributes that follow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure<F> {
    /// The status.
    pub status: Status,
    /// The attributes.
    pub attributes: F,
}

/// The result of a procedure.
pub type Nfs3Result<T, F> = Result<T, Failure<F>>;

/// Takes the status, and then the fields of a success or failure.
fn result<T, F>(
    fields: &mut Decoder<'_>,
    success: impl FnOnce(&mut Decoder<'_>) -> Result<T, DecodeError>,
    failure: impl FnOnce(&mut Decoder<'_>) -> Result<F, DecodeError>,
) -> Result<Nfs3Result<T, F>, DecodeError> {
    match Status::decode(fields)? {
        Status::OK => success(fields).map(Ok),
        status => Ok(Err(Failure {
            status,
            attributes: failure(fields)?,
        })),
    }
}

/// NULL.
#[derive(Clone, Copy, Debug)]
pub struct Null;

impl Procedure for Null {
    type Result = ();
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 0;

    fn encode(&self, _: &mut Encoder) {}

    fn decode(_: &mut Decoder<'_>) -> Result<(), DecodeError> {
        Ok(())
    }
}
