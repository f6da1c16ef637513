//! OPEN, CLOSE, OPEN_DOWNGRADE and byte-range locks.

use super::{EncodedAttributes, WireStateid};
use crate::limits::OWNER_BYTES_MAX;
use crate::nfs3::names::FileName;
use crate::xdr::{Decode, Reader, XdrError, wire_enum};

/// The owner of opens or locks (`state_owner4`). Its client is the one of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner<'a>(pub &'a [u8]);

impl<'a> Decode<'a> for Owner<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        reader.u64()?;
        reader.opaque("owner of a state", OWNER_BYTES_MAX).map(Self)
    }
}

/// The arguments of CLOSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Close {
    /// The open.
    pub stateid: WireStateid,
}

impl Decode<'_> for Close {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        reader.u32()?;
        let stateid = WireStateid::decode(reader)?;
        Ok(Self { stateid })
    }
}

/// How OPEN treats a name (`openflag4`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenHow<'a> {
    /// The file must exist.
    NoCreate,
    /// An existing file is opened; a size of 0 truncates it.
    Unchecked(EncodedAttributes<'a>),
    /// The name must be new.
    Guarded(EncodedAttributes<'a>),
    /// The name must be new, or made with the same verifier.
    Exclusive(&'a [u8; 8]),
    /// As [`OpenHow::Exclusive`], with attributes.
    ExclusiveWithAttributes(&'a [u8; 8], EncodedAttributes<'a>),
}

impl<'a> Decode<'a> for OpenHow<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let unknown = |what, value| Err(XdrError::Enumeration { what, value });
        match reader.u32()? {
            0 => return Ok(Self::NoCreate),
            1 => {}
            value => return unknown("open type", value),
        }
        Ok(match reader.u32()? {
            0 => Self::Unchecked(EncodedAttributes::decode(reader)?),
            1 => Self::Guarded(EncodedAttributes::decode(reader)?),
            2 => Self::Exclusive(reader.fixed()?),
            3 => {
                let verifier = reader.fixed()?;
                Self::ExclusiveWithAttributes(verifier, EncodedAttributes::decode(reader)?)
            }
            value => return unknown("create mode", value),
        })
    }
}

/// The file that OPEN claims (`open_claim4`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim<'a> {
    /// The file of a name in the current directory.
    Name(FileName<'a>),
    /// The current file, opened before the restart of the server.
    Previous {
        /// The delegation before the restart.
        delegation: u32,
    },
    /// The current file.
    Handle,
    /// A claim with a delegation. There are none.
    Delegation,
}

impl<'a> Decode<'a> for Claim<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(match reader.u32()? {
            0 => Self::Name(FileName::decode(reader)?),
            1 => Self::Previous {
                delegation: reader.u32()?,
            },
            2 => {
                WireStateid::decode(reader)?;
                FileName::decode(reader)?;
                Self::Delegation
            }
            3 => {
                FileName::decode(reader)?;
                Self::Delegation
            }
            4 => Self::Handle,
            5 => {
                WireStateid::decode(reader)?;
                Self::Delegation
            }
            6 => Self::Delegation,
            value => {
                let what = "claim of an open";
                return Err(XdrError::Enumeration { what, value });
            }
        })
    }
}

/// The arguments of OPEN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenArguments<'a> {
    /// The access, and requests about delegations.
    pub access: u32,
    /// The denied access.
    pub deny: u32,
    /// The owner.
    pub owner: Owner<'a>,
    /// How the name is treated.
    pub how: OpenHow<'a>,
    /// The file.
    pub claim: Claim<'a>,
}

impl<'a> Decode<'a> for OpenArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        reader.u32()?;
        Ok(Self {
            access: reader.u32()?,
            deny: reader.u32()?,
            owner: Owner::decode(reader)?,
            how: OpenHow::decode(reader)?,
            claim: Claim::decode(reader)?,
        })
    }
}

/// The arguments of OPEN_DOWNGRADE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenDowngrade {
    /// The open.
    pub stateid: WireStateid,
    /// The remaining access.
    pub access: u32,
    /// The remaining denied access.
    pub deny: u32,
}

impl Decode<'_> for OpenDowngrade {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let stateid = WireStateid::decode(reader)?;
        reader.u32()?;
        Ok(Self {
            stateid,
            access: reader.u32()?,
            deny: reader.u32()?,
        })
    }
}

wire_enum! {
    /// The type of a lock (`nfs_lock_type4`). A waiting lock is asked for again by its client.
    pub enum LockType, "type of a lock" {
        /// Shared.
        Read = 1,
        /// Exclusive.
        Write = 2,
        /// Shared; the client will ask again.
        ReadWaiting = 3,
        /// Exclusive; the client will ask again.
        WriteWaiting = 4,
    }
}

impl LockType {
    /// Whether the lock is exclusive.
    #[must_use]
    pub const fn is_exclusive(self) -> bool {
        matches!(self, Self::Write | Self::WriteWaiting)
    }
}

/// The bytes of a lock. A length of [`u64::MAX`] goes to the end of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockBytes {
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: u64,
}

impl Decode<'_> for LockBytes {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            offset: reader.u64()?,
            length: reader.u64()?,
        })
    }
}

/// The owner of a new lock (`locker4`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locker<'a> {
    /// An owner without locks of the file.
    New {
        /// The open.
        open: WireStateid,
        /// The owner.
        owner: Owner<'a>,
    },
    /// An owner with locks of the file.
    Existing(WireStateid),
}

impl<'a> Decode<'a> for Locker<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        if reader.bool()? {
            reader.u32()?;
            let open = WireStateid::decode(reader)?;
            reader.u32()?;
            let owner = Owner::decode(reader)?;
            return Ok(Self::New { open, owner });
        }
        let stateid = WireStateid::decode(reader)?;
        reader.u32()?;
        Ok(Self::Existing(stateid))
    }
}

/// The arguments of LOCK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock<'a> {
    /// The type.
    pub kind: LockType,
    /// Whether the client had the lock before the restart of the server.
    pub is_reclaim: bool,
    /// The bytes.
    pub bytes: LockBytes,
    /// The owner.
    pub locker: Locker<'a>,
}

impl<'a> Decode<'a> for Lock<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            kind: LockType::decode(reader)?,
            is_reclaim: reader.bool()?,
            bytes: LockBytes::decode(reader)?,
            locker: Locker::decode(reader)?,
        })
    }
}

/// The arguments of LOCKT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestLock<'a> {
    /// The type.
    pub kind: LockType,
    /// The bytes.
    pub bytes: LockBytes,
    /// The owner.
    pub owner: Owner<'a>,
}

impl<'a> Decode<'a> for TestLock<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            kind: LockType::decode(reader)?,
            bytes: LockBytes::decode(reader)?,
            owner: Owner::decode(reader)?,
        })
    }
}

/// The arguments of LOCKU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unlock {
    /// The locks.
    pub stateid: WireStateid,
    /// The bytes.
    pub bytes: LockBytes,
}

impl Decode<'_> for Unlock {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        LockType::decode(reader)?;
        reader.u32()?;
        Ok(Self {
            stateid: WireStateid::decode(reader)?,
            bytes: LockBytes::decode(reader)?,
        })
    }
}
