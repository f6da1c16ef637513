//! Names: LOOKUP, CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME and LINK.
//!
//! A decoder accepts a name or target of any length that fits into a record, since it takes no
//! memory. The procedure checks it, so that the reply to a long one is NFS3ERR_NAMETOOLONG instead
//! of GARBAGE_ARGS, which a Linux program sees as an I/O error.

use crate::handle::{EncodedHandle, HandleBytes};
use crate::limits::{NAME_BYTES_MAX, RECORD_BYTES_MAX, SYMLINK_BYTES_MAX};
use crate::nfs3::attributes::{
    Attributes, ChangeAttributes, DeviceNumber, FileType, SetAttributes,
};
use crate::nfs3::status::{Answer, Status};
use crate::xdr::{Decode, Encode, Reader, Writer, XdrError};

/// A name of a client, unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileName<'a>(pub &'a [u8]);

impl<'a> FileName<'a> {
    /// The name, if a directory entry may have it. `.` and `..` are valid names here: each
    /// procedure has its own rule for them.
    ///
    /// # Errors
    /// [`Status::NameTooLong`], or [`Status::Invalid`] for an empty name and for one with a slash
    /// or zero byte.
    pub fn check(self) -> Result<&'a [u8], Status> {
        if self.0.len() > NAME_BYTES_MAX {
            return Err(Status::NameTooLong);
        }
        if self.0.is_empty() || self.0.iter().any(|byte| matches!(byte, 0 | b'/')) {
            return Err(Status::Invalid);
        }
        Ok(self.0)
    }
}

impl<'a> Decode<'a> for FileName<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        reader.opaque("file name", RECORD_BYTES_MAX).map(Self)
    }
}

/// The target of a symbolic link of a client, unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SymlinkTarget<'a>(pub &'a [u8]);

impl<'a> SymlinkTarget<'a> {
    /// The target, if a symbolic link may have it.
    ///
    /// # Errors
    /// [`Status::NameTooLong`], or [`Status::Invalid`] for an empty target and for one with a zero
    /// byte.
    pub fn check(self) -> Result<&'a [u8], Status> {
        if self.0.len() > SYMLINK_BYTES_MAX {
            return Err(Status::NameTooLong);
        }
        if self.0.is_empty() || self.0.contains(&0) {
            return Err(Status::Invalid);
        }
        Ok(self.0)
    }
}

impl<'a> Decode<'a> for SymlinkTarget<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        reader.opaque("symlink target", RECORD_BYTES_MAX).map(Self)
    }
}

/// A name in a directory (`diropargs3`): the arguments of LOOKUP, REMOVE and RMDIR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryName<'a> {
    /// The directory.
    pub directory: HandleBytes<'a>,
    /// The name.
    pub name: FileName<'a>,
}

impl<'a> Decode<'a> for DirectoryName<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            directory: HandleBytes::decode(reader)?,
            name: FileName::decode(reader)?,
        })
    }
}

/// The file of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookedUpFile {
    /// Its handle.
    pub handle: EncodedHandle,
    /// Its attributes.
    pub attributes: Option<Attributes>,
    /// The attributes of the directory.
    pub directory: Option<Attributes>,
}

impl Encode for LookedUpFile {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.handle);
        writer.value(&self.attributes);
        writer.value(&self.directory);
    }
}

/// The result of LOOKUP. A failure has the attributes of the directory.
pub type LookupReply = Answer<LookedUpFile, Option<Attributes>>;

/// The effect of CREATE on an existing name (`createhow3`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateMode<'a> {
    /// Use the existing file, and change its attributes.
    Unchecked(SetAttributes),
    /// Fail with [`Status::Exists`].
    Guarded(SetAttributes),
    /// Fail with [`Status::Exists`], unless an earlier CREATE with this verifier made the file.
    Exclusive(&'a [u8; 8]),
}

impl<'a> Decode<'a> for CreateMode<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let what = "mode of CREATE";
        match reader.u32()? {
            0 => SetAttributes::decode(reader).map(Self::Unchecked),
            1 => SetAttributes::decode(reader).map(Self::Guarded),
            2 => reader.fixed().map(Self::Exclusive),
            value => Err(XdrError::Enumeration { what, value }),
        }
    }
}

/// The arguments of CREATE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateArguments<'a> {
    /// The name.
    pub at: DirectoryName<'a>,
    /// The attributes, and the effect if the name exists.
    pub mode: CreateMode<'a>,
}

impl<'a> Decode<'a> for CreateArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            at: DirectoryName::decode(reader)?,
            mode: CreateMode::decode(reader)?,
        })
    }
}

/// The arguments of MKDIR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MakeDirectoryArguments<'a> {
    /// The name.
    pub at: DirectoryName<'a>,
    /// The attributes.
    pub attributes: SetAttributes,
}

impl<'a> Decode<'a> for MakeDirectoryArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            at: DirectoryName::decode(reader)?,
            attributes: SetAttributes::decode(reader)?,
        })
    }
}

/// The arguments of SYMLINK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SymlinkArguments<'a> {
    /// The name.
    pub at: DirectoryName<'a>,
    /// The attributes.
    pub attributes: SetAttributes,
    /// The target.
    pub target: SymlinkTarget<'a>,
}

impl<'a> Decode<'a> for SymlinkArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            at: DirectoryName::decode(reader)?,
            attributes: SetAttributes::decode(reader)?,
            target: SymlinkTarget::decode(reader)?,
        })
    }
}

/// The file that MKNOD makes (`mknoddata3`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialFile {
    /// A character device.
    CharacterDevice(SetAttributes, DeviceNumber),
    /// A block device.
    BlockDevice(SetAttributes, DeviceNumber),
    /// A socket.
    Socket(SetAttributes),
    /// A named pipe.
    Fifo(SetAttributes),
    /// A type that MKNOD does not make: [`Status::BadType`].
    Unsuitable(FileType),
}

impl Decode<'_> for SpecialFile {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let kind = FileType::decode(reader)?;
        Ok(match kind {
            FileType::CharacterDevice => Self::CharacterDevice(
                SetAttributes::decode(reader)?,
                DeviceNumber::decode(reader)?,
            ),
            FileType::BlockDevice => Self::BlockDevice(
                SetAttributes::decode(reader)?,
                DeviceNumber::decode(reader)?,
            ),
            FileType::Socket => Self::Socket(SetAttributes::decode(reader)?),
            FileType::Fifo => Self::Fifo(SetAttributes::decode(reader)?),
            FileType::Regular | FileType::Directory | FileType::Symlink => Self::Unsuitable(kind),
        })
    }
}

/// The arguments of MKNOD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MakeNodeArguments<'a> {
    /// The name.
    pub at: DirectoryName<'a>,
    /// The file.
    pub file: SpecialFile,
}

impl<'a> Decode<'a> for MakeNodeArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            at: DirectoryName::decode(reader)?,
            file: SpecialFile::decode(reader)?,
        })
    }
}

/// A new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreatedFile {
    /// Its handle.
    pub handle: Option<EncodedHandle>,
    /// Its attributes.
    pub attributes: Option<Attributes>,
    /// The attributes of the directory.
    pub directory: ChangeAttributes,
}

impl Encode for CreatedFile {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.handle);
        writer.value(&self.attributes);
        writer.value(&self.directory);
    }
}

/// The result of CREATE, MKDIR, SYMLINK and MKNOD. A failure has the attributes of the directory.
pub type CreateReply = Answer<CreatedFile, ChangeAttributes>;

/// The result of REMOVE and RMDIR: the attributes of the directory.
pub type RemoveReply = Answer<ChangeAttributes, ChangeAttributes>;

/// The arguments of RENAME.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenameArguments<'a> {
    /// The present name.
    pub from: DirectoryName<'a>,
    /// The new name.
    pub to: DirectoryName<'a>,
}

impl<'a> Decode<'a> for RenameArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            from: DirectoryName::decode(reader)?,
            to: DirectoryName::decode(reader)?,
        })
    }
}

/// The attributes of both directories of a RENAME.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RenamedDirectories {
    /// The directory of the earlier name.
    pub from: ChangeAttributes,
    /// The directory of the new name.
    pub to: ChangeAttributes,
}

impl Encode for RenamedDirectories {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.from);
        writer.value(&self.to);
    }
}

/// The result of RENAME.
pub type RenameReply = Answer<RenamedDirectories, RenamedDirectories>;

/// The arguments of LINK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkArguments<'a> {
    /// The file.
    pub file: HandleBytes<'a>,
    /// Its further name.
    pub at: DirectoryName<'a>,
}

impl<'a> Decode<'a> for LinkArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            file: HandleBytes::decode(reader)?,
            at: DirectoryName::decode(reader)?,
        })
    }
}

/// The attributes of the file and the directory of a LINK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkedFile {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The attributes of the directory.
    pub directory: ChangeAttributes,
}

impl Encode for LinkedFile {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        writer.value(&self.directory);
    }
}

/// The result of LINK.
pub type LinkReply = Answer<LinkedFile, LinkedFile>;

#[cfg(test)]
mod tests;
