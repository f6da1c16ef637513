//! The arguments of operations (RFC 8881, section 18). They borrow from the record.
//!
//! A decoder checks lengths and enumerations. Values with a meaning of their own, such as names, modes
//! of an open and attributes, are checked by the operation: it has a better status than NFS4ERR_BADXDR.

pub mod open;
pub mod session;

use crate::handle::HandleBytes;
use crate::limits::{ATTRIBUTES_BYTES_MAX, STATEIDS_MAX, TRANSFER_BYTES_MAX};
use crate::nfs3::files::Durability;
use crate::nfs3::names::{FileName, SymlinkTarget};
use crate::nfs4::bitmap::Bitmap;
use crate::nfs4::operation::Operation;
use crate::xdr::{Decode, Reader, XdrError};
use open::{Close, Lock, OpenArguments, OpenDowngrade, TestLock, Unlock};
use session::{
    BackchannelControl, BindConnection, CreateSession, ExchangeId, SequenceArguments, SessionId,
};

/// The id of a state on the wire (`stateid4`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct WireStateid {
    /// The number of the changes of the state.
    pub sequence: u32,
    /// The state.
    pub other: [u8; WireStateid::OTHER_BYTES],
}

impl WireStateid {
    /// Bytes of the part that names the state.
    pub const OTHER_BYTES: usize = 12;
    /// Bytes of the id.
    pub const BYTES: usize = 4 + Self::OTHER_BYTES;
    /// The current stateid (RFC 8881, section 8.2.3).
    pub const CURRENT: Self = Self {
        sequence: 1,
        other: [0; Self::OTHER_BYTES],
    };
}

impl Decode<'_> for WireStateid {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            sequence: reader.u32()?,
            other: *reader.fixed()?,
        })
    }
}

/// Attributes with their values, encoded (`fattr4`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedAttributes<'a> {
    /// The attributes.
    pub attributes: Bitmap,
    /// Their values, in the order of their numbers.
    pub values: &'a [u8],
}

impl<'a> Decode<'a> for EncodedAttributes<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            attributes: Bitmap::decode(reader)?,
            values: reader.opaque("values of attributes", ATTRIBUTES_BYTES_MAX)?,
        })
    }
}

/// The type and the content of a file of CREATE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateType<'a> {
    /// A symbolic link.
    Symlink(SymlinkTarget<'a>),
    /// A device with its numbers.
    Device {
        /// Whether it is a block device.
        is_block: bool,
        /// The major number.
        major: u32,
        /// The minor number.
        minor: u32,
    },
    /// A directory.
    Directory,
    /// A socket.
    Socket,
    /// A named pipe.
    Fifo,
    /// A type that CREATE does not make.
    Unsuitable(u32),
}

impl<'a> Decode<'a> for CreateType<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(match reader.u32()? {
            2 => Self::Directory,
            kind @ (3 | 4) => Self::Device {
                is_block: kind == 3,
                major: reader.u32()?,
                minor: reader.u32()?,
            },
            5 => Self::Symlink(SymlinkTarget::decode(reader)?),
            6 => Self::Socket,
            7 => Self::Fifo,
            other => Self::Unsuitable(other),
        })
    }
}

/// The arguments of CREATE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Create<'a> {
    /// The type.
    pub kind: CreateType<'a>,
    /// The new name.
    pub name: FileName<'a>,
    /// The attributes of the new file.
    pub attributes: EncodedAttributes<'a>,
}

impl<'a> Decode<'a> for Create<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            kind: CreateType::decode(reader)?,
            name: FileName::decode(reader)?,
            attributes: EncodedAttributes::decode(reader)?,
        })
    }
}

/// The arguments of READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The open, the lock or a special value.
    pub stateid: WireStateid,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes, at most [`TRANSFER_BYTES_MAX`].
    pub count: u32,
}

impl Decode<'_> for Read {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            stateid: WireStateid::decode(reader)?,
            offset: reader.u64()?,
            count: reader.u32()?.min(TRANSFER_BYTES_MAX),
        })
    }
}

/// The arguments of WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write<'a> {
    /// The open, the lock or a special value.
    pub stateid: WireStateid,
    /// The first byte.
    pub offset: u64,
    /// The wanted durability.
    pub durability: Durability,
    /// The data.
    pub data: &'a [u8],
}

impl<'a> Decode<'a> for Write<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            stateid: WireStateid::decode(reader)?,
            offset: reader.u64()?,
            durability: Durability::decode(reader)?,
            data: reader.opaque("data of a WRITE", TRANSFER_BYTES_MAX as usize)?,
        })
    }
}

/// The arguments of COMMIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The first byte.
    pub offset: u64,
    /// The number of bytes; 0 for all.
    pub count: u32,
}

impl Decode<'_> for Commit {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            offset: reader.u64()?,
            count: reader.u32()?,
        })
    }
}

/// The arguments of READDIR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadDirectory {
    /// The cookie of the last known entry; 0 for the start.
    pub cookie: u64,
    /// The verifier that came with the cookie.
    pub verifier: [u8; 8],
    /// Bytes of names and cookies: a hint.
    pub name_bytes: u32,
    /// Bytes of the result.
    pub result_bytes: u32,
    /// The wanted attributes.
    pub attributes: Bitmap,
}

impl Decode<'_> for ReadDirectory {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            cookie: reader.u64()?,
            verifier: *reader.fixed()?,
            name_bytes: reader.u32()?,
            result_bytes: reader.u32()?,
            attributes: Bitmap::decode(reader)?,
        })
    }
}

/// The arguments of SETATTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetAttributes<'a> {
    /// The open for a new size, or a special value.
    pub stateid: WireStateid,
    /// The new attributes.
    pub attributes: EncodedAttributes<'a>,
}

impl<'a> Decode<'a> for SetAttributes<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            stateid: WireStateid::decode(reader)?,
            attributes: EncodedAttributes::decode(reader)?,
        })
    }
}

/// The arguments of RENAME.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rename<'a> {
    /// The name in the saved directory.
    pub from: FileName<'a>,
    /// The name in the current directory.
    pub to: FileName<'a>,
}

impl<'a> Decode<'a> for Rename<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            from: FileName::decode(reader)?,
            to: FileName::decode(reader)?,
        })
    }
}

/// The state ids of TEST_STATEID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateidList<'a>(&'a [u8]);

impl StateidList<'_> {
    /// The number of ids, at most [`STATEIDS_MAX`].
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len() / WireStateid::BYTES
    }

    /// Whether there is no id.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ids.
    pub fn iter(&self) -> impl Iterator<Item = WireStateid> + '_ {
        let mut reader = Reader::new(self.0);
        std::iter::from_fn(move || WireStateid::decode(&mut reader).ok())
    }
}

impl<'a> Decode<'a> for StateidList<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let count = reader.length("state ids", STATEIDS_MAX)?;
        reader.bytes(count * WireStateid::BYTES).map(Self)
    }
}

/// An operation with its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Operation has the meanings.
pub enum Arguments<'a> {
    Access(u32),
    Close(Close),
    Commit(Commit),
    Create(Create<'a>),
    DelegationReturn(WireStateid),
    GetAttributes(Bitmap),
    GetHandle,
    Link(FileName<'a>),
    Lock(Lock<'a>),
    TestLock(TestLock<'a>),
    Unlock(Unlock),
    Lookup(FileName<'a>),
    LookupParent,
    VerifyDifferent(EncodedAttributes<'a>),
    Open(OpenArguments<'a>),
    OpenDowngrade(OpenDowngrade),
    PutHandle(HandleBytes<'a>),
    PutPublicHandle,
    PutRootHandle,
    Read(Read),
    ReadDirectory(ReadDirectory),
    ReadSymlink,
    Remove(FileName<'a>),
    Rename(Rename<'a>),
    RestoreHandle,
    SaveHandle,
    SecurityInfo(FileName<'a>),
    SetAttributes(SetAttributes<'a>),
    Verify(EncodedAttributes<'a>),
    Write(Write<'a>),
    BackchannelControl(BackchannelControl),
    BindConnection(BindConnection),
    ExchangeId(ExchangeId<'a>),
    CreateSession(CreateSession),
    DestroySession(SessionId),
    FreeStateid(WireStateid),
    SecurityInfoNoName(u32),
    Sequence(SequenceArguments),
    TestStateid(StateidList<'a>),
    DestroyClientId(u64),
    ReclaimComplete(bool),
    /// The operation is known, and this server does not have it. Its arguments are not decoded.
    Unsupported(Operation),
}

impl<'a> Arguments<'a> {
    /// Decodes the arguments of an operation from the front of a reader.
    ///
    /// # Errors
    /// If they are malformed.
    pub fn decode(operation: Operation, reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(match operation {
            Operation::Access => Self::Access(reader.u32()?),
            Operation::Close => Self::Close(Close::decode(reader)?),
            Operation::Commit => Self::Commit(Commit::decode(reader)?),
            Operation::Create => Self::Create(Create::decode(reader)?),
            Operation::DelegationReturn => Self::DelegationReturn(WireStateid::decode(reader)?),
            Operation::GetAttributes => Self::GetAttributes(Bitmap::decode(reader)?),
            Operation::GetHandle => Self::GetHandle,
            Operation::Link => Self::Link(FileName::decode(reader)?),
            Operation::Lock => Self::Lock(Lock::decode(reader)?),
            Operation::TestLock => Self::TestLock(TestLock::decode(reader)?),
            Operation::Unlock => Self::Unlock(Unlock::decode(reader)?),
            Operation::Lookup => Self::Lookup(FileName::decode(reader)?),
            Operation::LookupParent => Self::LookupParent,
            Operation::VerifyDifferent => Self::VerifyDifferent(EncodedAttributes::decode(reader)?),
            Operation::Open => Self::Open(OpenArguments::decode(reader)?),
            Operation::OpenDowngrade => Self::OpenDowngrade(OpenDowngrade::decode(reader)?),
            Operation::PutHandle => Self::PutHandle(HandleBytes::decode(reader)?),
            Operation::PutPublicHandle => Self::PutPublicHandle,
            Operation::PutRootHandle => Self::PutRootHandle,
            Operation::Read => Self::Read(Read::decode(reader)?),
            Operation::ReadDirectory => Self::ReadDirectory(ReadDirectory::decode(reader)?),
            Operation::ReadSymlink => Self::ReadSymlink,
            Operation::Remove => Self::Remove(FileName::decode(reader)?),
            Operation::Rename => Self::Rename(Rename::decode(reader)?),
            Operation::RestoreHandle => Self::RestoreHandle,
            Operation::SaveHandle => Self::SaveHandle,
            Operation::SecurityInfo => Self::SecurityInfo(FileName::decode(reader)?),
            Operation::SetAttributes => Self::SetAttributes(SetAttributes::decode(reader)?),
            Operation::Verify => Self::Verify(EncodedAttributes::decode(reader)?),
            Operation::Write => Self::Write(Write::decode(reader)?),
            other => return Self::decode_session(other, reader),
        })
    }

    fn decode_session(operation: Operation, reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(match operation {
            Operation::BackchannelControl => {
                Self::BackchannelControl(BackchannelControl::decode(reader)?)
            }
            Operation::BindConnection => Self::BindConnection(BindConnection::decode(reader)?),
            Operation::ExchangeId => Self::ExchangeId(ExchangeId::decode(reader)?),
            Operation::CreateSession => Self::CreateSession(CreateSession::decode(reader)?),
            Operation::DestroySession => Self::DestroySession(SessionId::decode(reader)?),
            Operation::FreeStateid => Self::FreeStateid(WireStateid::decode(reader)?),
            Operation::SecurityInfoNoName => Self::SecurityInfoNoName(reader.u32()?),
            Operation::Sequence => Self::Sequence(SequenceArguments::decode(reader)?),
            Operation::TestStateid => Self::TestStateid(StateidList::decode(reader)?),
            Operation::DestroyClientId => Self::DestroyClientId(reader.u64()?),
            Operation::ReclaimComplete => Self::ReclaimComplete(reader.bool()?),
            other => Self::Unsupported(other),
        })
    }
}
