//! Attributes, and GETATTR, SETATTR and ACCESS.

use super::{Handle, Nfs3Result, PROGRAM, VERSION, result};
use crate::rpc::Procedure;
use crate::xdr::{DecodeError, Decoder, Encoder};

/// The type of a file (ftype3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FileType {
    /// NF3REG.
    Regular = 1,
    /// NF3DIR.
    Directory = 2,
    /// NF3BLK.
    BlockDevice = 3,
    /// NF3CHR.
    CharacterDevice = 4,
    /// NF3LNK.
    Symlink = 5,
    /// NF3SOCK.
    Socket = 6,
    /// NF3FIFO.
    Fifo = 7,
}

impl FileType {
    fn decode(fields: &mut Decoder<'_>) -> Result<Self, DecodeError> {
        let field = "file type";
        Ok(match fields.u32(field)? {
            1 => Self::Regular,
            2 => Self::Directory,
            3 => Self::BlockDevice,
            4 => Self::CharacterDevice,
            5 => Self::Symlink,
            6 => Self::Socket,
            7 => Self::Fifo,
            value => return Err(DecodeError::Value { field, value }),
        })
    }
}

/// A time (nfstime3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Time {
    /// Seconds since 1970.
    pub seconds: u32,
    /// Nanoseconds, below a second.
    pub nanoseconds: u32,
}

impl Time {
    fn encode(self, out: &mut Encoder) {
        out.u32(self.seconds).u32(self.nanoseconds);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            seconds: fields.u32("seconds")?,
            nanoseconds: fields.u32("nanoseconds")?,
        })
    }
}

/// The attributes of a file (fattr3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// The type.
    pub kind: FileType,
    /// The mode bits.
    pub mode: u32,
    /// The number of names.
    pub links: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The bytes of storage.
    pub used_bytes: u64,
    /// The major and minor number of a device.
    pub device: (u32, u32),
    /// The file system.
    pub file_system: u64,
    /// The number of the file.
    pub file_id: u64,
    /// The time of the last read.
    pub accessed: Time,
    /// The time of the last change of the data.
    pub modified: Time,
    /// The time of the last change of the data or attributes.
    pub changed: Time,
}

impl Attributes {
    pub(crate) fn decode(fields: &mut Decoder<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            kind: FileType::decode(fields)?,
            mode: fields.u32("mode")?,
            links: fields.u32("links")?,
            uid: fields.u32("uid")?,
            gid: fields.u32("gid")?,
            size_bytes: fields.u64("size")?,
            used_bytes: fields.u64("used")?,
            device: (fields.u32("major")?, fields.u32("minor")?),
            file_system: fields.u64("fsid")?,
            file_id: fields.u64("fileid")?,
            accessed: Time::decode(fields)?,
            modified: Time::decode(fields)?,
            changed: Time::decode(fields)?,
        })
    }

    /// Takes post_op_attr.
    pub(crate) fn decode_after(fields: &mut Decoder<'_>) -> Result<Option<Self>, DecodeError> {
        fields.optional("attributes follow", Self::decode)
    }

    /// The part that [`WccData`] has of the time before a change.
    #[must_use]
    pub fn as_before(&self) -> PreAttributes {
        PreAttributes {
            size_bytes: self.size_bytes,
            modified: self.modified,
            changed: self.changed,
        }
    }
}

/// Attributes before a change (wcc_attr).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreAttributes {
    /// The size in bytes.
    pub size_bytes: u64,
    /// The time of the last change of the data.
    pub modified: Time,
    /// The time of the last change of the data or attributes.
    pub changed: Time,
}

/// Attributes before and after a change (wcc_data).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WccData {
    /// Before.
    pub before: Option<PreAttributes>,
    /// After.
    pub after: Option<Attributes>,
}

impl WccData {
    pub(crate) fn decode(fields: &mut Decoder<'_>) -> Result<Self, DecodeError> {
        let before = fields.optional("attributes before follow", |fields| {
            Ok(PreAttributes {
                size_bytes: fields.u64("size")?,
                modified: Time::decode(fields)?,
                changed: Time::decode(fields)?,
            })
        });
        Ok(Self {
            before: before?,
            after: Attributes::decode_after(fields)?,
        })
    }
}

/// A new time of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SetTime {
    /// DONT_CHANGE.
    #[default]
    Keep,
    /// SET_TO_SERVER_TIME.
    Server,
    /// SET_TO_CLIENT_TIME.
    Client(Time),
}

/// New attributes (sattr3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttributes {
    /// The mode bits.
    pub mode: Option<u32>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// The size in bytes.
    pub size_bytes: Option<u64>,
    /// The time of the last read.
    pub accessed: SetTime,
    /// The time of the last change of the data.
    pub modified: SetTime,
}

impl SetAttributes {
    /// Only the mode.
    #[must_use]
    pub fn mode(mode: u32) -> Self {
        Self {
            mode: Some(mode),
            ..Self::default()
        }
    }

    /// Only the size.
    #[must_use]
    pub fn size(size_bytes: u64) -> Self {
        Self {
            size_bytes: Some(size_bytes),
            ..Self::default()
        }
    }

    pub(crate) fn encode(&self, out: &mut Encoder) {
        for value in [self.mode, self.uid, self.gid] {
            out.optional(value, |out, value| {
                out.u32(value);
            });
        }
        out.optional(self.size_bytes, |out, size| {
            out.u64(size);
        });
        for time in [self.accessed, self.modified] {
            match time {
                SetTime::Keep => {
                    out.u32(0);
                }
                SetTime::Server => {
                    out.u32(1);
                }
                SetTime::Client(time) => {
                    out.u32(2);
                    time.encode(out);
                }
            }
        }
    }
}

/// GETATTR.
#[derive(Clone, Copy, Debug)]
pub struct GetAttributes<'a> {
    /// The file.
    pub file: &'a Handle,
}

impl Procedure for GetAttributes<'_> {
    type Result = Nfs3Result<Attributes, ()>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 1;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        result(fields, Attributes::decode, |_| Ok(()))
    }
}

/// SETATTR.
#[derive(Clone, Copy, Debug)]
pub struct SetAttributesCall<'a> {
    /// The file.
    pub file: &'a Handle,
    /// The new attributes.
    pub attributes: SetAttributes,
    /// The ctime that the file must have.
    pub guard: Option<Time>,
}

impl Procedure for SetAttributesCall<'_> {
    type Result = Nfs3Result<WccData, WccData>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 2;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
        self.attributes.encode(out);
        out.optional(self.guard, |out, time| time.encode(out));
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        result(fields, WccData::decode, WccData::decode)
    }
}

/// The bits of ACCESS.
pub mod access {
    /// ACCESS3_READ.
    pub const READ: u32 = 1;
    /// ACCESS3_LOOKUP.
    pub const LOOKUP: u32 = 2;
    /// ACCESS3_MODIFY.
    pub const MODIFY: u32 = 4;
    /// ACCESS3_EXTEND.
    pub const EXTEND: u32 = 8;
    /// ACCESS3_DELETE.
    pub const DELETE: u32 = 16;
    /// ACCESS3_EXECUTE.
    pub const EXECUTE: u32 = 32;
    /// All bits.
    pub const ALL: u32 = 63;
}

/// ACCESS.
#[derive(Clone, Copy, Debug)]
pub struct Access<'a> {
    /// The file.
    pub file: &'a Handle,
    /// The bits that the client asks for: see [`access`].
    pub wanted: u32,
}

impl Procedure for Access<'_> {
    type Result = Nfs3Result<(Option<Attributes>, u32), Option<Attributes>>;
    const PROGRAM: u32 = PROGRAM;
    const VERSION: u32 = VERSION;
    const NUMBER: u32 = 4;

    fn encode(&self, out: &mut Encoder) {
        self.file.encode(out);
        out.u32(self.wanted);
    }

    fn decode(fields: &mut Decoder<'_>) -> Result<Self::Result, DecodeError> {
        let granted = |fields: &mut Decoder<'_>| {
            Ok((Attributes::decode_after(fields)?, fields.u32("access")?))
        };
        result(fields, granted, Attributes::decode_after)
    }
}
