//! READLINK, READ, WRITE and COMMIT.

use super::{Attributes, Handle, Nfs3Result, PROGRAM, VERSION, WccData, result};
use crate::connection::REPLY_BYTES_MAX;
use crate::rpc::Procedure;
use crate::xdr::{DecodeError, Decoder, Encoder};

/// Bytes of data that the client takes.
const DATA_BYTES_MAX: u32 = REPLY_BYTES_MAX as u32;

/// READLINK.
#[derive(Clone, Copy, Debug)]
pub struct ReadLink<'a> {
    /// The symbolic link.
    pub file: &'a Handle,
}

/// The result of READLINK.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadLinkData {
    /// The attributes of the link.
    pub attributes: Option<Attributes>,
    /// The target.
    pub target: Vec<u8>,
}

impl Procedure for ReadLink<'_> {
    type Result = Nfs3Result<ReadLinkData, Option<Attributes>>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 5;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let data = |fields: &mut Decoder<'_>| {
            Ok(ReadLinkData {
                attributes: Attributes::decode_after(fields)?,
                target: fields.opaque("target", DATA_BYTES_MAX)?.to_vec(),
            })
        };
        result(fields, data, Attributes::decode_after)
    }
}

/// READ.
#[derive(Clone, Copy, Debug)]
pub struct Read<'a> {
    /// The file.
    pub file: &'a Handle,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub count: u32,
}

/// The result of READ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadData {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The number of bytes.
    pub count: u32,
    /// Whether the file ends behind the data.
    pub is_end: bool,
    /// The data.
    pub data: Vec<u8>,
}

impl Procedure for Read<'_> {
    type Result = Nfs3Result<ReadData, Option<Attributes>>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 6;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
        out.u64(self.offset).u32(self.count);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let data = |fields: &mut Decoder<'_>| {
            Ok(ReadData {
                attributes: Attributes::decode_after(fields)?,
                count: fields.u32("count")?,
                is_end: fields.bool("eof")?,
                data: fields.opaque("data", DATA_BYTES_MAX)?.to_vec(),
            })
        };
        result(fields, data, Attributes::decode_after)
    }
}

/// The durability of a WRITE (stable_how).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StableHow {
    /// UNSTABLE: a COMMIT follows.
    Unstable = 0,
    /// DATA_SYNC: the data is durable.
    DataSync = 1,
    /// FILE_SYNC: the data and the attributes are durable.
    FileSync = 2,
}

/// WRITE.
#[derive(Clone, Copy, Debug)]
pub struct Write<'a> {
    /// The file.
    pub file: &'a Handle,
    /// The first byte.
    pub offset: u64,
    /// The durability.
    pub stable: StableHow,
    /// The data.
    pub data: &'a [u8],
}

/// The result of WRITE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The attributes of the file, before and after.
    pub wcc: WccData,
    /// The number of bytes.
    pub count: u32,
    /// The durability.
    pub committed: StableHow,
    /// Changes when the server may have lost unstable data.
    pub verifier: [u8; 8],
}

impl Procedure for Write<'_> {
    type Result = Nfs3Result<Written, WccData>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 7;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
        out.u64(self.offset).u32(self.data.len() as u32);
        out.u32(self.stable as u32).opaque(self.data);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let written = |fields: &mut Decoder<'_>| {
            Ok(Written {
                wcc: WccData::decode(fields)?,
                count: fields.u32("count")?,
                committed: match fields.u32("committed")? {
                    0 => StableHow::Unstable,
                    1 => StableHow::DataSync,
                    2 => StableHow::FileSync,
                    value => {
                        let field = "committed";
                        return Err(DecodeError::Value { field, value });
                    }
                },
                verifier: fields.fixed("verifier")?,
            })
        };
        result(fields, written, WccData::decode)
    }
}

/// COMMIT.
#[derive(Clone, Copy, Debug)]
pub struct Commit<'a> {
    /// The file.
    pub file: &'a Handle,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes; 0: up to the end.
    pub count: u32,
}

/// The result of COMMIT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The attributes of the file, before and after.
    pub wcc: WccData,
    /// As in [`Written`].
    pub verifier: [u8; 8],
}

impl Procedure for Commit<'_> {
    type Result = Nfs3Result<Committed, WccData>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 21;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
        out.u64(self.offset).u32(self.count);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let committed = |fields: &mut Decoder<'_>| {
            Ok(Committed {
                wcc: WccData::decode(fields)?,
                verifier: fields.fixed("verifier")?,
            })
        };
        result(fields, committed, WccData::decode)
    }
}
