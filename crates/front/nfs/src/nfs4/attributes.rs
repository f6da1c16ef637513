//! Attributes of files (RFC 8881, section 5): those that this server has, their values on the wire, and
//! changes by clients.

use super::aces::{decode_aces, encode_aces};
use super::arguments::EncodedAttributes;
use super::bitmap::{Bitmap, attribute as at};
use super::identity::{Identities, decode_owner, encode_owner};
use super::status::{OK, Status};
use crate::acl4::Ace;
use crate::limits::{NAME_BYTES_MAX, OWNER_NAME_BYTES_MAX, TRANSFER_BYTES_MAX};
use crate::nfs3::attributes::{DeviceNumber, FileType, MODE_BITS};
use crate::nfs3::filesystem::SpaceUsage;
use crate::xdr::{Reader, Writer, XdrError};

/// ACL4_SUPPORT_ALLOW_ACL and ACL4_SUPPORT_DENY_ACL.
const ACL_SUPPORT: u32 = 3;
/// Nanoseconds of a second.
const NANOSECONDS: u32 = 1_000_000_000;

/// The attributes that clients may set, and never read.
pub const WRITE_ONLY: Bitmap = Bitmap::of(&[at::TIME_ACCESS_SET, at::TIME_MODIFY_SET]);

/// The attributes that clients may set.
pub const SETTABLE: Bitmap = Bitmap::of(&[
    at::SIZE,
    at::ACL,
    at::MODE,
    at::OWNER,
    at::OWNER_GROUP,
    at::TIME_ACCESS_SET,
    at::TIME_MODIFY_SET,
]);

/// The attributes that an exclusive create may set. A repeated one is recognized by the size of 0.
pub const SETTABLE_BY_EXCLUSIVE: Bitmap = SETTABLE.without_one(at::SIZE);

/// The attributes that this server has.
pub const SUPPORTED: Bitmap = Bitmap::of(&[
    at::SUPPORTED_ATTRS,
    at::TYPE,
    at::FH_EXPIRE_TYPE,
    at::CHANGE,
    at::SIZE,
    at::LINK_SUPPORT,
    at::SYMLINK_SUPPORT,
    at::NAMED_ATTR,
    at::FSID,
    at::UNIQUE_HANDLES,
    at::LEASE_TIME,
    at::RDATTR_ERROR,
    at::ACL,
    at::ACLSUPPORT,
    at::CANSETTIME,
    at::CASE_INSENSITIVE,
    at::CASE_PRESERVING,
    at::CHOWN_RESTRICTED,
    at::FILEHANDLE,
    at::FILEID,
    at::FILES_AVAIL,
    at::FILES_FREE,
    at::FILES_TOTAL,
    at::HOMOGENEOUS,
    at::MAXFILESIZE,
    at::MAXLINK,
    at::MAXNAME,
    at::MAXREAD,
    at::MAXWRITE,
    at::MODE,
    at::NO_TRUNC,
    at::NUMLINKS,
    at::OWNER,
    at::OWNER_GROUP,
    at::RAWDEV,
    at::SPACE_AVAIL,
    at::SPACE_FREE,
    at::SPACE_TOTAL,
    at::SPACE_USED,
    at::TIME_ACCESS,
    at::TIME_ACCESS_SET,
    at::TIME_CREATE,
    at::TIME_DELTA,
    at::TIME_METADATA,
    at::TIME_MODIFY,
    at::TIME_MODIFY_SET,
    at::MOUNTED_ON_FILEID,
    at::SUPPATTR_EXCLCREAT,
]);

/// The attributes that need the usage of the file system.
pub const OF_SPACE: Bitmap = Bitmap::of(&[
    at::FILES_AVAIL,
    at::FILES_FREE,
    at::FILES_TOTAL,
    at::SPACE_AVAIL,
    at::SPACE_FREE,
    at::SPACE_TOTAL,
]);

/// A time (`nfstime4`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds of the second.
    pub nanoseconds: u32,
}

impl Time {
    fn encode(self, writer: &mut Writer) {
        writer.u64(self.seconds as u64);
        writer.u32(self.nanoseconds);
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            seconds: reader.u64()? as i64,
            nanoseconds: reader.u32()?,
        })
    }
}

/// The attributes of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileAttributes<'a> {
    /// The type.
    pub kind: FileType,
    /// Differs after each change.
    pub change: u64,
    /// The size.
    pub size_bytes: u64,
    /// The bytes that it takes.
    pub used_bytes: u64,
    /// The id of the file system.
    pub file_system: (u64, u64),
    /// The handle.
    pub handle: &'a [u8],
    /// The number of the inode.
    pub inode: u64,
    /// The number of the directory that the file system is mounted on, for its root; else `inode`.
    pub mounted_on: u64,
    /// The ACL, if it is wanted.
    pub acl: &'a [Ace],
    /// The permissions.
    pub mode: u32,
    /// The number of names.
    pub links: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The numbers of a device.
    pub device: DeviceNumber,
    /// The last read.
    pub accessed: Time,
    /// The last change of the content.
    pub modified: Time,
    /// The last change of anything.
    pub changed: Time,
    /// The creation.
    pub created: Time,
}

/// The values that all files of a server or file system share.
#[derive(Clone, Copy)]
pub struct SharedAttributes<'a> {
    /// The time that state lives without a request.
    pub lease_seconds: u32,
    /// The most bytes of a file.
    pub file_bytes_max: u64,
    /// The most names of a file.
    pub links_max: u32,
    /// The names of owners.
    pub identities: &'a dyn Identities,
    /// The usage of the file system, if an attribute of [`OF_SPACE`] is wanted.
    pub space: Option<SpaceUsage>,
}

/// Appends the wanted attributes that this server has (`fattr4`).
///
/// # Errors
/// [`Status::Delay`] while the name of an owner is looked up.
pub fn encode_attributes(
    wanted: Bitmap,
    file: &FileAttributes<'_>,
    shared: &SharedAttributes<'_>,
    writer: &mut Writer,
) -> Result<(), Status> {
    let found = wanted.and(SUPPORTED).without(WRITE_ONLY);
    writer.value(&found);
    let length_at = writer.len();
    writer.length(0);
    encode_values(found, file, shared, writer)?;
    let len = writer.len() - length_at - 4;
    writer.replace_u32(length_at, u32::try_from(len).unwrap_or(u32::MAX));
    Ok(())
}

/// Appends the values of attributes, in the order of their numbers.
fn encode_values(
    found: Bitmap,
    file: &FileAttributes<'_>,
    shared: &SharedAttributes<'_>,
    writer: &mut Writer,
) -> Result<(), Status> {
    for attribute in found.iter() {
        if !encode_file_value(attribute, file, shared, writer)? {
            encode_shared_value(attribute, shared, writer);
        }
    }
    Ok(())
}

/// Appends an attribute of a file. Returns whether it is one.
fn encode_file_value(
    attribute: u32,
    file: &FileAttributes<'_>,
    shared: &SharedAttributes<'_>,
    writer: &mut Writer,
) -> Result<bool, Status> {
    let identities = shared.identities;
    match attribute {
        at::TYPE => writer.value(&file.kind),
        at::CHANGE => writer.u64(file.change),
        at::SIZE => writer.u64(file.size_bytes),
        at::FSID => {
            writer.u64(file.file_system.0);
            writer.u64(file.file_system.1);
        }
        at::FILEHANDLE => writer.opaque(file.handle),
        at::FILEID => writer.u64(file.inode),
        at::MODE => writer.u32(file.mode),
        at::NUMLINKS => writer.u32(file.links),
        at::ACL => encode_aces(file.acl, identities, writer)?,
        at::OWNER => encode_owner(file.uid, identities.user_name(file.uid), writer)?,
        at::OWNER_GROUP => encode_owner(file.gid, identities.group_name(file.gid), writer)?,
        at::RAWDEV => {
            writer.u32(file.device.major);
            writer.u32(file.device.minor);
        }
        at::SPACE_USED => writer.u64(file.used_bytes),
        at::TIME_ACCESS => file.accessed.encode(writer),
        at::TIME_CREATE => file.created.encode(writer),
        at::TIME_METADATA => file.changed.encode(writer),
        at::TIME_MODIFY => file.modified.encode(writer),
        at::MOUNTED_ON_FILEID => writer.u64(file.mounted_on),
        _ => return Ok(false),
    }
    Ok(true)
}

/// Appends an attribute of a server or file system.
fn encode_shared_value(attribute: u32, shared: &SharedAttributes<'_>, writer: &mut Writer) {
    let space = shared.space.unwrap_or_default();
    match attribute {
        at::SUPPORTED_ATTRS => writer.value(&SUPPORTED),
        at::SUPPATTR_EXCLCREAT => writer.value(&SETTABLE_BY_EXCLUSIVE),
        at::LEASE_TIME => writer.u32(shared.lease_seconds),
        at::RDATTR_ERROR => writer.u32(OK),
        // Handles are persistent.
        at::FH_EXPIRE_TYPE => writer.u32(0),
        at::ACLSUPPORT => writer.u32(ACL_SUPPORT),
        at::LINK_SUPPORT
        | at::SYMLINK_SUPPORT
        | at::UNIQUE_HANDLES
        | at::CANSETTIME
        | at::CASE_PRESERVING
        | at::CHOWN_RESTRICTED
        | at::HOMOGENEOUS
        | at::NO_TRUNC => writer.bool(true),
        at::NAMED_ATTR | at::CASE_INSENSITIVE => writer.bool(false),
        at::FILES_AVAIL => writer.u64(space.available_files),
        at::FILES_FREE => writer.u64(space.free_files),
        at::FILES_TOTAL => writer.u64(space.total_files),
        at::SPACE_AVAIL => writer.u64(space.available_bytes),
        at::SPACE_FREE => writer.u64(space.free_bytes),
        at::SPACE_TOTAL => writer.u64(space.total_bytes),
        at::MAXFILESIZE => writer.u64(shared.file_bytes_max),
        at::MAXLINK => writer.u32(shared.links_max),
        at::MAXNAME => writer.length(NAME_BYTES_MAX),
        at::MAXREAD | at::MAXWRITE => writer.u64(TRANSFER_BYTES_MAX.into()),
        at::TIME_DELTA => Time {
            seconds: 0,
            nanoseconds: 1,
        }
        .encode(writer),
        _ => {}
    }
}

/// Checks that GETATTR or READDIR may ask for these attributes. Unknown ones are left out of the reply.
///
/// # Errors
/// [`Status::Invalid`] for attributes that clients only set.
pub fn check_readable(wanted: Bitmap) -> Result<(), Status> {
    match wanted.and(WRITE_ONLY).is_empty() {
        true => Ok(()),
        false => Err(Status::Invalid),
    }
}

/// Whether a file has the values of a client (VERIFY and NVERIFY).
///
/// # Errors
/// [`Status::Invalid`] for attributes that clients only set and for RDATTR_ERROR,
/// [`Status::AttributeNotSupported`], [`Status::Delay`].
pub fn has_values(
    wanted: &EncodedAttributes<'_>,
    file: &FileAttributes<'_>,
    shared: &SharedAttributes<'_>,
) -> Result<bool, Status> {
    check_readable(wanted.attributes)?;
    if wanted.attributes.contains(at::RDATTR_ERROR) {
        return Err(Status::Invalid);
    }
    if !wanted.attributes.without(SUPPORTED).is_empty() {
        return Err(Status::AttributeNotSupported);
    }
    let mut writer = Writer::new();
    encode_values(wanted.attributes, file, shared, &mut writer)?;
    Ok(writer.written(0) == wanted.values)
}

/// A change of a time (`settime4`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The server's present time.
    ToServerTime,
    /// This time.
    To(Time),
}

/// A change of attributes; none keeps a field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttributeChange {
    /// The size.
    pub size_bytes: Option<u64>,
    /// The ACL.
    pub acl: Option<Vec<Ace>>,
    /// The permissions.
    pub mode: Option<u32>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// The last read.
    pub accessed: Option<SetTime>,
    /// The last change of the content.
    pub modified: Option<SetTime>,
}

impl AttributeChange {
    /// The change of a client. `allowed` are the attributes that the operation may set.
    ///
    /// # Errors
    /// [`Status::AttributeNotSupported`], [`Status::Invalid`] for attributes that the operation does
    /// not set and for impossible values, [`Status::BadOwner`], [`Status::Delay`], [`Status::BadXdr`].
    pub fn decode(
        encoded: &EncodedAttributes<'_>,
        allowed: Bitmap,
        identities: &dyn Identities,
    ) -> Result<Self, Status> {
        if !encoded.attributes.without(SUPPORTED).is_empty() {
            return Err(Status::AttributeNotSupported);
        }
        if !encoded.attributes.without(allowed).is_empty() {
            return Err(Status::Invalid);
        }
        let mut change = Self::default();
        let mut reader = Reader::new(encoded.values);
        for attribute in encoded.attributes.iter() {
            change.decode_value(attribute, &mut reader, identities)?;
        }
        reader.finish("values of attributes")?;
        Ok(change)
    }

    fn decode_value(
        &mut self,
        attribute: u32,
        reader: &mut Reader<'_>,
        identities: &dyn Identities,
    ) -> Result<(), Status> {
        match attribute {
            at::SIZE => self.size_bytes = Some(reader.u64()?),
            at::ACL => self.acl = Some(decode_aces(reader, identities)?),
            at::MODE => {
                let mode = reader.u32()?;
                if mode & !MODE_BITS != 0 {
                    return Err(Status::Invalid);
                }
                self.mode = Some(mode);
            }
            at::OWNER => {
                let name = reader.opaque("name of an owner", OWNER_NAME_BYTES_MAX)?;
                self.uid = Some(decode_owner(name, |name| identities.user_id(name))?);
            }
            at::OWNER_GROUP => {
                let name = reader.opaque("name of a group", OWNER_NAME_BYTES_MAX)?;
                self.gid = Some(decode_owner(name, |name| identities.group_id(name))?);
            }
            at::TIME_ACCESS_SET => self.accessed = Some(decode_set_time(reader)?),
            at::TIME_MODIFY_SET => self.modified = Some(decode_set_time(reader)?),
            _ => return Err(Status::Invalid),
        }
        Ok(())
    }
}

fn decode_set_time(reader: &mut Reader<'_>) -> Result<SetTime, Status> {
    match reader.u32()? {
        0 => Ok(SetTime::ToServerTime),
        1 => match Time::decode(reader)? {
            time if time.nanoseconds < NANOSECONDS => Ok(SetTime::To(time)),
            _ => Err(Status::Invalid),
        },
        _ => Err(Status::BadXdr),
    }
}

#[cfg(test)]
mod tests;
