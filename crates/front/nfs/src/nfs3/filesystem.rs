//! Properties of a file system: FSSTAT, FSINFO and PATHCONF.

use crate::nfs3::attributes::{Attributes, Time};
use crate::nfs3::status::Answer;
use crate::xdr::{Encode, Writer};

/// The space of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceUsage {
    /// The attributes of the file system's root.
    pub attributes: Option<Attributes>,
    /// The size.
    pub total_bytes: u64,
    /// The free space.
    pub free_bytes: u64,
    /// The free space for the caller.
    pub available_bytes: u64,
    /// The number of files that fit.
    pub total_files: u64,
    /// The number of further files that fit.
    pub free_files: u64,
    /// The number of further files for the caller.
    pub available_files: u64,
    /// Seconds for which the numbers do not change; 0 if they may change at any time.
    pub unchanged_seconds: u32,
}

impl Encode for SpaceUsage {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        let bytes = [self.total_bytes, self.free_bytes, self.available_bytes];
        let files = [self.total_files, self.free_files, self.available_files];
        for number in bytes.into_iter().chain(files) {
            writer.u64(number);
        }
        writer.u32(self.unchanged_seconds);
    }
}

/// The result of FSSTAT.
pub type SpaceUsageReply = Answer<SpaceUsage, Option<Attributes>>;

/// The bits of [`ServerLimits::properties`].
pub mod property {
    /// The file system has hard links.
    pub const LINK: u32 = 0x01;
    /// The file system has symbolic links.
    pub const SYMLINK: u32 = 0x02;
    /// PATHCONF has the same result for all files.
    pub const HOMOGENEOUS: u32 = 0x08;
    /// SETATTR can set times.
    pub const CAN_SET_TIME: u32 = 0x10;
}

/// The sizes that a procedure takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferSizes {
    /// The most bytes.
    pub max_bytes: u32,
    /// The bytes that clients should prefer.
    pub preferred_bytes: u32,
    /// The number of bytes of which a size should be a multiple.
    pub multiple_bytes: u32,
}

impl Encode for TransferSizes {
    fn encode(&self, writer: &mut Writer) {
        let sizes = [self.max_bytes, self.preferred_bytes, self.multiple_bytes];
        for size in sizes {
            writer.u32(size);
        }
    }
}

/// The limits and abilities of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// The attributes of the file system's root.
    pub attributes: Option<Attributes>,
    /// The sizes of READ.
    pub read: TransferSizes,
    /// The sizes of WRITE.
    pub write: TransferSizes,
    /// The bytes of a READDIR that clients should prefer.
    pub listing_bytes: u32,
    /// The size of the largest file.
    pub file_bytes_max: u64,
    /// The resolution of times.
    pub time_delta: Time,
    /// The bits of [`property`].
    pub properties: u32,
}

impl Encode for ServerLimits {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        writer.value(&self.read);
        writer.value(&self.write);
        writer.u32(self.listing_bytes);
        writer.u64(self.file_bytes_max);
        writer.value(&self.time_delta);
        writer.u32(self.properties);
    }
}

/// The result of FSINFO.
pub type ServerLimitsReply = Answer<ServerLimits, Option<Attributes>>;

/// The rules for names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameRules {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// The most names of a file.
    pub links_max: u32,
    /// The most bytes of a name.
    pub name_bytes_max: u32,
    /// Whether a longer name is an error, and not cut.
    pub refuses_long_names: bool,
    /// Whether only a privileged caller may change the owner of a file.
    pub restricts_chown: bool,
    /// Whether `a` and `A` are the same name.
    pub ignores_case: bool,
    /// Whether names keep their case.
    pub preserves_case: bool,
}

impl Encode for NameRules {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        writer.u32(self.links_max);
        writer.u32(self.name_bytes_max);
        let rules = [
            self.refuses_long_names,
            self.restricts_chown,
            self.ignores_case,
            self.preserves_case,
        ];
        for rule in rules {
            writer.bool(rule);
        }
    }
}

/// The result of PATHCONF.
pub type NameRulesReply = Answer<NameRules, Option<Attributes>>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfs3::status::Status;
    use crate::testing::{attributes, encoded, some_attributes, words};

    #[test]
    fn space_is_encoded() {
        let reply = SpaceUsageReply::Done(SpaceUsage {
            attributes: Some(attributes()),
            total_bytes: 1,
            free_bytes: 2,
            available_bytes: 3,
            total_files: 4,
            free_files: 5,
            available_files: 6,
            unchanged_seconds: 7,
        });
        let numbers = [0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 7];
        let wanted = [&[0][..], &some_attributes(), &numbers].concat();
        assert_eq!(encoded(&reply), words(&wanted));
        let failed = SpaceUsageReply::Failed(Status::Jukebox, None);
        assert_eq!(encoded(&failed), words(&[10008, 0]));
    }

    #[test]
    fn limits_are_encoded() {
        let sizes = |max_bytes| TransferSizes {
            max_bytes,
            preferred_bytes: max_bytes + 1,
            multiple_bytes: max_bytes + 2,
        };
        let reply = ServerLimitsReply::Done(ServerLimits {
            attributes: None,
            read: sizes(10),
            write: sizes(20),
            listing_bytes: 30,
            file_bytes_max: 1 << 44,
            time_delta: Time {
                seconds: 0,
                nanoseconds: 1,
            },
            properties: property::LINK
                | property::SYMLINK
                | property::HOMOGENEOUS
                | property::CAN_SET_TIME,
        });
        let wanted = [0, 0, 10, 11, 12, 20, 21, 22, 30, 1 << 12, 0, 0, 1, 0x1b];
        assert_eq!(encoded(&reply), words(&wanted));
    }

    #[test]
    fn name_rules_are_encoded() {
        let reply = NameRulesReply::Done(NameRules {
            attributes: None,
            links_max: 65_000,
            name_bytes_max: 255,
            refuses_long_names: true,
            restricts_chown: true,
            ignores_case: false,
            preserves_case: true,
        });
        assert_eq!(encoded(&reply), words(&[0, 0, 65_000, 255, 1, 1, 0, 1]));
    }
}
