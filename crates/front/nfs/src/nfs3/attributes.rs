//! Attributes of files: their fields, the changes that clients ask for, and the procedures GETATTR,
//! SETATTR and ACCESS.

use crate::handle::HandleBytes;
use crate::nfs3::status::{Answer, Status};
use crate::xdr::{Decode, Encode, Reader, Writer, XdrError, wire_enum};

/// The mode bits that a client may set: permissions, set-id and sticky. Some clients also send the
/// type of the file, which a change cannot have.
pub const MODE_BITS: u32 = 0o7777;
/// Nanoseconds of a second.
const NANOSECONDS: u32 = 1_000_000_000;

wire_enum! {
    /// The type of a file.
    pub enum FileType, "file type" {
        /// A regular file.
        Regular = 1,
        /// A directory.
        Directory = 2,
        /// A block device.
        BlockDevice = 3,
        /// A character device.
        CharacterDevice = 4,
        /// A symbolic link.
        Symlink = 5,
        /// A socket.
        Socket = 6,
        /// A named pipe.
        Fifo = 7,
    }
}

/// A time since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds.
    pub seconds: u32,
    /// Nanoseconds. A client may send a second or more: see [`SetAttributes::check`].
    pub nanoseconds: u32,
}

impl Time {
    /// The time on the wire that is nearest to this one: the wire has the years 1970 to 2106.
    #[must_use]
    pub fn nearest(seconds: i64, nanoseconds: u32) -> Self {
        match u32::try_from(seconds) {
            Ok(seconds) => Self {
                seconds,
                nanoseconds,
            },
            Err(_) if seconds < 0 => Self::default(),
            Err(_) => Self {
                seconds: u32::MAX,
                nanoseconds: NANOSECONDS - 1,
            },
        }
    }
}

impl Decode<'_> for Time {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            seconds: reader.u32()?,
            nanoseconds: reader.u32()?,
        })
    }
}

impl Encode for Time {
    fn encode(&self, writer: &mut Writer) {
        writer.u32(self.seconds);
        writer.u32(self.nanoseconds);
    }
}

/// The numbers of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceNumber {
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
}

impl Decode<'_> for DeviceNumber {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            major: reader.u32()?,
            minor: reader.u32()?,
        })
    }
}

impl Encode for DeviceNumber {
    fn encode(&self, writer: &mut Writer) {
        writer.u32(self.major);
        writer.u32(self.minor);
    }
}

/// All attributes of a file (`fattr3`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// The type.
    pub kind: FileType,
    /// The permissions, without the type.
    pub mode: u32,
    /// The number of names.
    pub links: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The size.
    pub size_bytes: u64,
    /// The space in use.
    pub used_bytes: u64,
    /// The device that a special file stands for.
    pub device: DeviceNumber,
    /// The file system.
    pub file_system: u64,
    /// The number of the inode.
    pub inode: u64,
    /// The time of the last read.
    pub accessed: Time,
    /// The time of the last change of the content.
    pub modified: Time,
    /// The time of the last change of the content or the attributes.
    pub changed: Time,
}

impl Attributes {
    /// Bytes on the wire.
    pub const BYTES: usize = 84;
}

impl Encode for Attributes {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.kind);
        for number in [self.mode, self.links, self.uid, self.gid] {
            writer.u32(number);
        }
        writer.u64(self.size_bytes);
        writer.u64(self.used_bytes);
        writer.value(&self.device);
        writer.u64(self.file_system);
        writer.u64(self.inode);
        for time in [self.accessed, self.modified, self.changed] {
            writer.value(&time);
        }
    }
}

/// The attributes before a change (`wcc_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlierAttributes {
    /// The size.
    pub size_bytes: u64,
    /// The time of the last change of the content.
    pub modified: Time,
    /// The time of the last change of the content or the attributes.
    pub changed: Time,
}

impl From<&Attributes> for EarlierAttributes {
    fn from(attributes: &Attributes) -> Self {
        Self {
            size_bytes: attributes.size_bytes,
            modified: attributes.modified,
            changed: attributes.changed,
        }
    }
}

impl Encode for EarlierAttributes {
    fn encode(&self, writer: &mut Writer) {
        writer.u64(self.size_bytes);
        writer.value(&self.modified);
        writer.value(&self.changed);
    }
}

/// The attributes before and after a change (`wcc_data`). A client keeps its cached data if it
/// knows the file with the earlier attributes. Leave them out unless the transaction of the change
/// read them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangeAttributes {
    /// Before the change.
    pub before: Option<EarlierAttributes>,
    /// After the change.
    pub after: Option<Attributes>,
}

impl Encode for ChangeAttributes {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.before);
        writer.value(&self.after);
    }
}

/// A change of a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SetTime {
    /// Keep it.
    #[default]
    Keep,
    /// Set it to the server's present time.
    ToServerTime,
    /// Set it to this time.
    To(Time),
}

impl Decode<'_> for SetTime {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        let what = "change of a time";
        match reader.u32()? {
            0 => Ok(Self::Keep),
            1 => Ok(Self::ToServerTime),
            2 => Time::decode(reader).map(Self::To),
            value => Err(XdrError::Enumeration { what, value }),
        }
    }
}

/// A change of attributes (`sattr3`); none keeps a field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttributes {
    /// The permissions; only [`MODE_BITS`].
    pub mode: Option<u32>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// The size.
    pub size_bytes: Option<u64>,
    /// The time of the last read.
    pub accessed: SetTime,
    /// The time of the last change of the content.
    pub modified: SetTime,
}

impl SetAttributes {
    /// Checks the values that a decoder accepts although they have no meaning.
    ///
    /// # Errors
    /// [`Status::Invalid`] if a time has a second or more of nanoseconds.
    pub fn check(&self) -> Result<(), Status> {
        let is_valid = |time: &SetTime| match time {
            SetTime::To(time) => time.nanoseconds < NANOSECONDS,
            SetTime::Keep | SetTime::ToServerTime => true,
        };
        match is_valid(&self.accessed) && is_valid(&self.modified) {
            true => Ok(()),
            false => Err(Status::Invalid),
        }
    }
}

impl Decode<'_> for SetAttributes {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            mode: reader.optional(Reader::u32)?.map(|mode| mode & MODE_BITS),
            uid: reader.optional(Reader::u32)?,
            gid: reader.optional(Reader::u32)?,
            size_bytes: reader.optional(Reader::u64)?,
            accessed: SetTime::decode(reader)?,
            modified: SetTime::decode(reader)?,
        })
    }
}

/// The result of GETATTR.
pub type GetAttributesReply = Answer<Attributes, ()>;

/// The arguments of SETATTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetAttributesArguments<'a> {
    /// The file.
    pub file: HandleBytes<'a>,
    /// The change.
    pub change: SetAttributes,
    /// The change time that the file must have, or else the status is [`Status::NotSynchronized`].
    pub guard: Option<Time>,
}

impl<'a> Decode<'a> for SetAttributesArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            file: HandleBytes::decode(reader)?,
            change: SetAttributes::decode(reader)?,
            guard: reader.optional(Time::decode)?,
        })
    }
}

/// The result of SETATTR.
pub type SetAttributesReply = Answer<ChangeAttributes, ChangeAttributes>;

/// The bits of an access mask.
pub mod access {
    /// Read the data of a file, or list a directory.
    pub const READ: u32 = 0x01;
    /// Look up a name in a directory.
    pub const LOOKUP: u32 = 0x02;
    /// Rewrite data, or change entries of a directory.
    pub const MODIFY: u32 = 0x04;
    /// Append data, or add entries to a directory.
    pub const EXTEND: u32 = 0x08;
    /// Remove an entry of a directory.
    pub const DELETE: u32 = 0x10;
    /// Execute a file.
    pub const EXECUTE: u32 = 0x20;
}

/// The arguments of ACCESS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessArguments<'a> {
    /// The file.
    pub file: HandleBytes<'a>,
    /// The bits of [`access`] that the client asks for. Other bits may be set.
    pub wanted: u32,
}

impl<'a> Decode<'a> for AccessArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            file: HandleBytes::decode(reader)?,
            wanted: reader.u32()?,
        })
    }
}

/// The granted access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantedAccess {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The bits of [`access`], among the wanted ones.
    pub granted: u32,
}

impl Encode for GrantedAccess {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        writer.u32(self.granted);
    }
}

/// The result of ACCESS.
pub type AccessReply = Answer<GrantedAccess, Option<Attributes>>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        ATTRIBUTE_WORDS, SOME_EARLIER, attributes, decode_error, decoded, encoded, some_attributes,
        time, words,
    };

    #[test]
    fn attributes_have_the_layout_of_the_rfc() {
        let bytes = encoded(&attributes());
        assert_eq!(bytes, words(&ATTRIBUTE_WORDS));
        assert_eq!(bytes.len(), Attributes::BYTES);
    }

    #[test]
    fn replies_have_optional_attributes() {
        let reply = GetAttributesReply::Done(attributes());
        assert_eq!(
            encoded(&reply),
            words(&[&[0][..], &ATTRIBUTE_WORDS].concat())
        );
        let failed = GetAttributesReply::Failed(Status::Stale, ());
        assert_eq!(encoded(&failed), words(&[70]));

        let change = ChangeAttributes {
            before: Some(EarlierAttributes::from(&attributes())),
            after: Some(attributes()),
        };
        let wanted = [&[0][..], &SOME_EARLIER, &some_attributes()].concat();
        assert_eq!(encoded(&SetAttributesReply::Done(change)), words(&wanted));
        let without = ChangeAttributes::default();
        let failed = SetAttributesReply::Failed(Status::NotSynchronized, without);
        assert_eq!(encoded(&failed), words(&[10002, 0, 0]));

        let access = AccessReply::Done(GrantedAccess {
            attributes: Some(attributes()),
            granted: access::READ | access::LOOKUP | access::EXECUTE,
        });
        let wanted = [&[0][..], &some_attributes(), &[0x23]].concat();
        assert_eq!(encoded(&access), words(&wanted));
        let failed = AccessReply::Failed(Status::BadHandle, None);
        assert_eq!(encoded(&failed), words(&[10001, 0]));
    }

    /// A handle, a change of all fields, and a guard.
    #[test]
    fn full_change_is_decoded() {
        let change = [1, 0o10_4755, 1, 5, 1, 6, 1, 1, 0, 1, 2, 20, 21];
        let bytes = words(&[&[4, 0x0909_0909][..], &change, &[1, 30, 31]].concat());
        let arguments: SetAttributesArguments<'_> = decoded(&bytes);
        assert_eq!(arguments.file, HandleBytes(&[9; 4]));
        let wanted = SetAttributes {
            mode: Some(0o4755),
            uid: Some(5),
            gid: Some(6),
            size_bytes: Some(1 << 32),
            accessed: SetTime::ToServerTime,
            modified: SetTime::To(time(20)),
        };
        assert_eq!(arguments.change, wanted);
        assert_eq!(arguments.guard, Some(time(30)));
    }

    #[test]
    fn empty_change_is_decoded() {
        let bytes = words(&[0, 0, 0, 0, 0, 0, 0, 0]);
        let arguments: SetAttributesArguments<'_> = decoded(&bytes);
        assert_eq!(arguments.change, SetAttributes::default());
        assert_eq!(arguments.guard, None);
    }

    #[test]
    fn unknown_change_of_a_time_is_refused() {
        let error = decode_error::<SetAttributes>(&words(&[0, 0, 0, 0, 3, 0]));
        let unknown = XdrError::Enumeration {
            what: "change of a time",
            value: 3,
        };
        assert_eq!(error, unknown);
        let error = decode_error::<SetAttributes>(&words(&[0, 2, 0, 0, 0, 0]));
        assert_eq!(error, XdrError::Boolean(2));
    }

    #[test]
    fn time_beyond_a_second_is_invalid() {
        let change = |nanoseconds| SetAttributes {
            modified: SetTime::To(Time {
                seconds: 1,
                nanoseconds,
            }),
            ..SetAttributes::default()
        };
        assert_eq!(change(999_999_999).check(), Ok(()));
        assert_eq!(change(1_000_000_000).check(), Err(Status::Invalid));
        assert_eq!(SetAttributes::default().check(), Ok(()));
    }

    #[test]
    fn time_beyond_the_wire_becomes_the_nearest_one() {
        let check = |seconds, wanted| {
            let time = Time::nearest(seconds, 5);
            assert_eq!((time.seconds, time.nanoseconds), wanted, "{seconds}");
        };
        check(0, (0, 5));
        check(u32::MAX.into(), (u32::MAX, 5));
        check(-1, (0, 0));
        check(i64::MIN, (0, 0));
        check(1 << 32, (u32::MAX, 999_999_999));
        check(i64::MAX, (u32::MAX, 999_999_999));
    }

    #[test]
    fn wanted_access_is_decoded() {
        let bytes = words(&[0, 0x3f]);
        let arguments: AccessArguments<'_> = decoded(&bytes);
        assert_eq!((arguments.file.0.len(), arguments.wanted), (0, 0x3f));
    }

    #[test]
    fn long_handle_is_refused() {
        let bytes = [&words(&[65])[..], &[0; 68]].concat();
        let error = decode_error::<HandleBytes<'_>>(&bytes);
        assert!(matches!(
            error,
            XdrError::TooLong {
                len: 65,
                max: 64,
                ..
            }
        ));
    }
}
