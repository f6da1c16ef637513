//! FSSTAT, FSINFO and PATHCONF.

use super::{Attributes, Handle, Nfs3Result, PROGRAM, Time, VERSION, result};
use crate::rpc::Procedure;
use crate::xdr::{DecodeError, Decoder, Encoder};

/// FSSTAT.
#[derive(Clone, Copy, Debug)]
pub struct FsStat<'a> {
    /// A file of the file system.
    pub file: &'a Handle,
}

/// The result of FSSTAT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsStatData {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The size of the file system in bytes.
    pub total_bytes: u64,
    /// The free bytes.
    pub free_bytes: u64,
    /// The free bytes for the caller.
    pub available_bytes: u64,
    /// The files that the file system has room for.
    pub total_files: u64,
    /// The files that may be made.
    pub free_files: u64,
    /// The files that the caller may make.
    pub available_files: u64,
    /// The seconds for which these numbers hold.
    pub invariant_seconds: u32,
}

impl Procedure for FsStat<'_> {
    type Result = Nfs3Result<FsStatData, Option<Attributes>>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 18;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let data = |fields: &mut Decoder<'_>| {
            Ok(FsStatData {
                attributes: Attributes::decode_after(fields)?,
                total_bytes: fields.u64("tbytes")?,
                free_bytes: fields.u64("fbytes")?,
                available_bytes: fields.u64("abytes")?,
                total_files: fields.u64("tfiles")?,
                free_files: fields.u64("ffiles")?,
                available_files: fields.u64("afiles")?,
                invariant_seconds: fields.u32("invarsec")?,
            })
        };
        result(fields, data, Attributes::decode_after)
    }
}

/// The bits of [`FsInfoData::properties`].
pub mod properties {
    /// FSF3_LINK: hard links.
    pub const LINK: u32 = 1;
    /// FSF3_SYMLINK: symbolic links.
    pub const SYMLINK: u32 = 2;
    /// FSF3_HOMOGENEOUS: PATHCONF is the same for all files.
    pub const HOMOGENEOUS: u32 = 8;
    /// FSF3_CANSETTIME: SETATTR sets times.
    pub const CANSETTIME: u32 = 16;
}

/// FSINFO.
#[derive(Clone, Copy, Debug)]
pub struct FsInfo<'a> {
    /// A file of the file system.
    pub file: &'a Handle,
}

/// The result of FSINFO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsInfoData {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// Bytes of a READ, at most.
    pub read_max: u32,
    /// Bytes of a READ, preferred.
    pub read_preferred: u32,
    /// The multiple of a READ.
    pub read_multiple: u32,
    /// Bytes of a WRITE, at most.
    pub write_max: u32,
    /// Bytes of a WRITE, preferred.
    pub write_preferred: u32,
    /// The multiple of a WRITE.
    pub write_multiple: u32,
    /// Bytes of a READDIR, preferred.
    pub listing_preferred: u32,
    /// The size of a file in bytes, at most.
    pub file_bytes_max: u64,
    /// The resolution of times.
    pub time_delta: Time,
    /// See [`properties`].
    pub properties: u32,
}

impl Procedure for FsInfo<'_> {
    type Result = Nfs3Result<FsInfoData, Option<Attributes>>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 19;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let data = |fields: &mut Decoder<'_>| {
            Ok(FsInfoData {
                attributes: Attributes::decode_after(fields)?,
                read_max: fields.u32("rtmax")?,
                read_preferred: fields.u32("rtpref")?,
                read_multiple: fields.u32("rtmult")?,
                write_max: fields.u32("wtmax")?,
                write_preferred: fields.u32("wtpref")?,
                write_multiple: fields.u32("wtmult")?,
                listing_preferred: fields.u32("dtpref")?,
                file_bytes_max: fields.u64("maxfilesize")?,
                time_delta: Time {
                    seconds: fields.u32("time_delta")?,
                    nanoseconds: fields.u32("time_delta")?,
                },
                properties: fields.u32("properties")?,
            })
        };
        result(fields, data, Attributes::decode_after)
    }
}

/// PATHCONF.
#[derive(Clone, Copy, Debug)]
pub struct PathConf<'a> {
    /// A file of the file system.
    pub file: &'a Handle,
}

/// The result of PATHCONF.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathConfData {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// Names of a file, at most.
    pub links_max: u32,
    /// Bytes of a name, at most.
    pub name_max: u32,
    /// Whether longer names are errors.
    pub no_truncation: bool,
    /// Whether only a privileged caller changes owners.
    pub chown_restricted: bool,
    /// Whether upper and lower case are the same.
    pub is_case_insensitive: bool,
    /// Whether the case of names is kept.
    pub is_case_preserving: bool,
}

impl Procedure for PathConf<'_> {
    type Result = Nfs3Result<PathConfData, Option<Attributes>>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 20;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let data = |fields: &mut Decoder<'_>| {
            Ok(PathConfData {
                attributes: Attributes::decode_after(fields)?,
                links_max: fields.u32("linkmax")?,
                name_max: fields.u32("name_max")?,
                no_truncation: fields.bool("no_trunc")?,
                chown_restricted: fields.bool("chown_restricted")?,
                is_case_insensitive: fields.bool("case_insensitive")?,
                is_case_preserving: fields.bool("case_preserving")?,
            })
        };
        result(fields, data, Attributes::decode_after)
    }
}
