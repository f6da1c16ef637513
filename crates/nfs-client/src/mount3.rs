//! MOUNT version 3 (RFC 1813, appendix I).

use crate::nfs3::Handle;
use crate::rpc::Procedure;
use crate::xdr::{DecodeError, Decoder, Encoder};
use std::fmt;

/// The program.
pub const PROGRAM: u32 = 100_005;
/// The version.
pub const VERSION: u32 = 3;
/// Bytes of a path (MNTPATHLEN).
pub const PATH_BYTES_MAX: u32 = 1024;
/// Bytes of a name of a client or group (MNTNAMLEN).
pub const NAME_BYTES_MAX: u32 = 255;
/// Flavors in the reply to MNT.
const FLAVORS_MAX: u32 = 64;

/// The status of MNT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountStatus(pub u32);

impl MountStatus {
    /// MNT3ERR_PERM.
    pub const PERM: Self = Self(1);
    /// MNT3ERR_NOENT.
    pub const NOENT: Self = Self(2);
    /// MNT3ERR_ACCES.
    pub const ACCES: Self = Self(13);
    /// MNT3ERR_NOTDIR.
    pub const NOTDIR: Self = Self(20);
    /// MNT3ERR_INVAL.
    pub const INVAL: Self = Self(22);
    /// MNT3ERR_NAMETOOLONG.
    pub const NAMETOOLONG: Self = Self(63);
}

impl fmt::Display for MountStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "MOUNT status {}", self.0)
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

/// MNT.
#[derive(Clone, Copy, Debug)]
pub struct Mount<'a> {
    /// The path of a directory of the server.
    pub path: &'a [u8],
}

/// The root that MNT gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// The handle.
    pub root: Handle,
    /// The flavors of authentication that the server allows.
    pub flavors: Vec<u32>,
}

impl Procedure for Mount<'_> {
    type Result = Result<Mounted, MountStatus>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 1;

    fn encode(&self, out: &mut Encoder) {
        out.opaque(self.path);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        match fields.u32("mount status")? {
            0 => {}
            status => return Ok(Err(MountStatus(status))),
        }
        let root = Handle::decode(fields)?;
        let field = "flavors";
        let count = fields.u32(field)?;
        if count > FLAVORS_MAX {
            let (len, max) = (count, FLAVORS_MAX);
            return Err(DecodeError::TooLong { field, len, max });
        }
        let flavors: Result<_, _> = (0..count).map(|_| fields.u32(field)).collect();
        Ok(Ok(Mounted {
            root,
            flavors: flavors?,
        }))
    }
}

/// DUMP: the client and the path of each mount.
#[derive(Clone, Copy, Debug)]
pub struct Dump;

impl Procedure for Dump {
    type Result = Vec<(Vec<u8>, Vec<u8>)>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 2;

    fn encode(&self, _: &mut Encoder) {}

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let mut mounts = Vec::new();
        while fields.bool("mount follows")? {
            let client = fields.opaque("client", NAME_BYTES_MAX)?.to_vec();
            let path = fields.opaque("path", PATH_BYTES_MAX)?.to_vec();
            mounts.push((client, path));
        }
        Ok(mounts)
    }
}

/// UMNT.
#[derive(Clone, Copy, Debug)]
pub struct Unmount<'a> {
    /// The path.
    pub path: &'a [u8],
}

impl Procedure for Unmount<'_> {
    type Result = ();
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 3;

    fn encode(&self, out: &mut Encoder) {
        out.opaque(self.path);
    }

    fn decode(_: &mut Decoder<'_>) -> Result<(), DecodeError> {
        Ok(())
    }
}

/// UMNTALL.
#[derive(Clone, Copy, Debug)]
pub struct UnmountAll;

impl Procedure for UnmountAll {
    type Result = ();
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 4;

    fn encode(&self, _: &mut Encoder) {}

    fn decode(_: &mut Decoder<'_>) -> Result<(), DecodeError> {
        Ok(())
    }
}

/// EXPORT: the path of each export, and the groups of clients that may mount it.
#[derive(Clone, Copy, Debug)]
pub struct Export;

impl Procedure for Export {
    type Result = Vec<(Vec<u8>, Vec<Vec<u8>>)>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 5;

    fn encode(&self, _: &mut Encoder) {}

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let mut exports = Vec::new();
        while fields.bool("export follows")? {
            let path = fields.opaque("path", PATH_BYTES_MAX)?.to_vec();
            let mut groups = Vec::new();
            while fields.bool("group follows")? {
                groups.push(fields.opaque("group", NAME_BYTES_MAX)?.to_vec());
            }
            exports.push((path, groups));
        }
        Ok(exports)
    }
}
