//! Access control lists of POSIX 1003.1e draft 17, as Linux has them: entries, the value of their attributes (acl(5),
//! version 2 of `posix_acl_xattr.h`), their evaluation, and their relation to the mode. Pure functions.

use rustix::io::Errno;
use std::result::Result;

/// Most entries of a list. The kernel reads a list of a FUSE mount into one page of 4 KiB.
pub const ACL_ENTRIES_MAX: usize = 511;

/// The version of the value.
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;
/// The id of an entry without one.
const NO_ID: u32 = u32::MAX;
const RIGHTS: u16 = 7;
const MODE_RIGHTS: u16 = 0o777;

/// The kind of an attribute that holds a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AclKind {
    /// Decides about access to the inode.
    Access,
    /// Of a directory: the first list of the inodes that are created in it.
    Default,
}

impl AclKind {
    /// The name of the attribute.
    #[must_use]
    pub fn attribute(self) -> &'static [u8] {
        match self {
            AclKind::Access => b"system.posix_acl_access",
            AclKind::Default => b"system.posix_acl_default",
        }
    }

    /// The kind that an attribute of this name holds.
    #[must_use]
    pub fn of_attribute(name: &[u8]) -> Option<AclKind> {
        let all = [AclKind::Access, AclKind::Default];
        all.into_iter().find(|kind| kind.attribute() == name)
    }
}

/// The callers that an entry is for, in the order of entries in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AclTag {
    /// The owner.
    UserObj,
    /// This user.
    User(u32),
    /// Members of the owning group.
    GroupObj,
    /// Members of this group.
    Group(u32),
    /// All but the owner and others: the most rights that they have.
    Mask,
    /// Callers without another entry.
    Other,
}

impl AclTag {
    /// The number of the tag in a value, and its id.
    #[must_use]
    pub fn to_raw(self) -> (u16, Option<u32>) {
        match self {
            AclTag::UserObj => (0x01, None),
            AclTag::User(uid) => (0x02, Some(uid)),
            AclTag::GroupObj => (0x04, None),
            AclTag::Group(gid) => (0x08, Some(gid)),
            AclTag::Mask => (0x10, None),
            AclTag::Other => (0x20, None),
        }
    }

    /// The tag of these numbers. The id of a tag without one is ignored.
    #[must_use]
    pub fn from_raw(tag: u16, id: u32) -> Option<AclTag> {
        match tag {
            0x01 => Some(AclTag::UserObj),
            0x02 => Some(AclTag::User(id)),
            0x04 => Some(AclTag::GroupObj),
            0x08 => Some(AclTag::Group(id)),
            0x10 => Some(AclTag::Mask),
            0x20 => Some(AclTag::Other),
            _ => None,
        }
    }

    fn is_named(self) -> bool {
        matches!(self, AclTag::User(_) | AclTag::Group(_))
    }

    /// The place of the tag in a list.
    fn rank(self) -> u8 {
        match self {
            AclTag::UserObj => 0,
            AclTag::User(_) => 1,
            AclTag::GroupObj => 2,
            AclTag::Group(_) => 3,
            AclTag::Mask => 4,
            AclTag::Other => 5,
        }
    }
}

/// An entry of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AclEntry {
    /// The callers.
    pub tag: AclTag,
    /// Their rights: 4 read, 2 write, 1 execute.
    pub rights: u16,
}

/// A valid list: one entry for the owner, the owning group and others each, a mask if it names users or groups, in the order
/// of [`AclTag`], and at most [`ACL_ENTRIES_MAX`] entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl {
    entries: Vec<AclEntry>,
}

/// A caller, as a list sees it.
pub(crate) struct AclCaller<'c> {
    pub(crate) uid: u32,
    pub(crate) owner_uid: u32,
    pub(crate) owner_gid: u32,
    pub(crate) is_member: &'c dyn Fn(u32) -> bool,
}

/// Checks entries as `posix_acl_valid` of Linux does. Entries of one tag may have any order, also twice the same id.
fn check(entries: &[AclEntry]) -> Result<(), Errno> {
    if entries.len() > ACL_ENTRIES_MAX {
        return Err(Errno::TOOBIG);
    }
    let is_entry_valid = |entry: &AclEntry| {
        let has_id = entry.tag.to_raw().1 != Some(NO_ID);
        has_id && entry.rights & !RIGHTS == 0
    };
    let is_ordered = |pair: &[AclEntry]| {
        let [before, after] = [pair[0].tag, pair[1].tag];
        before.rank() < after.rank() || before.rank() == after.rank() && after.is_named()
    };
    let has = |tag: AclTag| entries.iter().any(|entry| entry.tag == tag);
    let is_complete = has(AclTag::UserObj) && has(AclTag::GroupObj) && has(AclTag::Other);
    let needs_mask = entries.iter().any(|entry| entry.tag.is_named());
    let is_valid = entries.iter().all(is_entry_valid)
        && entries.windows(2).all(is_ordered)
        && is_complete
        && (!needs_mask || has(AclTag::Mask));
    match is_valid {
        true => Ok(()),
        false => Err(Errno::INVAL),
    }
}

impl Acl {
    /// A list of these entries.
    ///
    /// # Errors
    /// `EINVAL` if they are no valid list, `E2BIG` if there are more than [`ACL_ENTRIES_MAX`].
    pub fn new(entries: Vec<AclEntry>) -> Result<Acl, Errno> {
        check(&entries)?;
        Ok(Acl { entries })
    }

    /// The list that gives the rights of a mode.
    #[must_use]
    pub fn of_mode(mode: u16) -> Acl {
        let entry = |tag, shift: u16| AclEntry {
            tag,
            rights: mode >> shift & RIGHTS,
        };
        Acl {
            entries: vec![
                entry(AclTag::UserObj, 6),
                entry(AclTag::GroupObj, 3),
                entry(AclTag::Other, 0),
            ],
        }
    }

    /// The entries, in order.
    #[must_use]
    pub fn entries(&self) -> &[AclEntry] {
        &self.entries
    }

    /// Decodes the value of an attribute; `None` for a value without entries, which stands for no list.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for another version, `EINVAL` for anything else that is no valid list, `E2BIG`.
    pub fn decode(value: &[u8]) -> Result<Option<Acl>, Errno> {
        let (version, rest) = value.split_first_chunk().ok_or(Errno::INVAL)?;
        if u32::from_le_bytes(*version) != VERSION {
            return Err(Errno::OPNOTSUPP);
        }
        let (entries, rest) = rest.as_chunks::<ENTRY_BYTES>();
        if !rest.is_empty() {
            return Err(Errno::INVAL);
        }
        if entries.len() > ACL_ENTRIES_MAX {
            return Err(Errno::TOOBIG);
        }
        let entries: Option<Vec<AclEntry>> = entries.iter().map(decode_entry).collect();
        match entries.ok_or(Errno::INVAL)? {
            entries if entries.is_empty() => Ok(None),
            entries => Acl::new(entries).map(Some),
        }
    }

    /// The value of an attribute with this list.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut value = Vec::with_capacity(HEADER_BYTES + ENTRY_BYTES * self.entries.len());
        value.extend_from_slice(&VERSION.to_le_bytes());
        for entry in &self.entries {
            let (tag, id) = entry.tag.to_raw();
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&entry.rights.to_le_bytes());
            value.extend_from_slice(&id.unwrap_or(NO_ID).to_le_bytes());
        }
        value
    }

    fn rights_of(&self, tag: AclTag) -> Option<u16> {
        let entry = self.entries.iter().find(|entry| entry.tag == tag);
        entry.map(|entry| entry.rights)
    }

    fn set_rights(&mut self, tag: AclTag, rights: u16) -> bool {
        let entry = self.entries.iter_mut().find(|entry| entry.tag == tag);
        entry.map(|entry| entry.rights = rights).is_some()
    }

    /// The entry that the group bits of the mode stand for.
    fn group_class(&self) -> AclTag {
        match self.rights_of(AclTag::Mask) {
            Some(_) => AclTag::Mask,
            None => AclTag::GroupObj,
        }
    }

    /// The rights in the mode of an inode with this access list.
    #[must_use]
    pub fn mode_rights(&self) -> u16 {
        let rights = |tag| self.rights_of(tag).unwrap_or(0);
        rights(AclTag::UserObj) << 6 | rights(self.group_class()) << 3 | rights(AclTag::Other)
    }

    /// Whether the mode alone gives the same rights.
    #[must_use]
    pub fn is_mode(&self) -> bool {
        let is_more = |entry: &AclEntry| entry.tag.is_named() || entry.tag == AclTag::Mask;
        !self.entries.iter().any(is_more)
    }

    /// Changes the entries that the bits of the mode stand for: owner, others, and mask, or owning group without one.
    pub(crate) fn set_mode(&mut self, mode: u16) {
        let group_class = self.group_class();
        let all = [
            (AclTag::UserObj, 6),
            (group_class, 3),
            (AclTag::Other, 0u16),
        ];
        for (tag, shift) in all {
            self.set_rights(tag, mode >> shift & RIGHTS);
        }
    }

    /// The access list of an inode that is created with `mode` in a directory with this default list: without the rights
    /// that `mode` lacks. `posix_acl_create_masq` of Linux.
    pub(crate) fn inherited(&self, mode: u16) -> Acl {
        let mut acl = self.clone();
        acl.set_mode(mode & self.mode_rights());
        acl
    }

    /// Whether the list gives a caller these rights. POSIX 1003.1e, section 23.1.5: the first class with the caller decides, and of
    /// several groups one that has all the rights.
    pub(crate) fn permits(&self, caller: &AclCaller<'_>, wanted: u16) -> bool {
        if caller.uid == caller.owner_uid {
            return wanted & !self.rights_of(AclTag::UserObj).unwrap_or(0) == 0;
        }
        let mask = self.rights_of(AclTag::Mask).unwrap_or(RIGHTS);
        if let Some(rights) = self.rights_of(AclTag::User(caller.uid)) {
            return wanted & !(rights & mask) == 0;
        }
        let of_groups = self.entries.iter().filter(|entry| match entry.tag {
            AclTag::GroupObj => (caller.is_member)(caller.owner_gid),
            AclTag::Group(gid) => (caller.is_member)(gid),
            _ => false,
        });
        let granted: Vec<bool> = of_groups
            .map(|entry| wanted & !(entry.rights & mask) == 0)
            .collect();
        match granted.is_empty() {
            true => wanted & !self.rights_of(AclTag::Other).unwrap_or(0) == 0,
            false => granted.contains(&true),
        }
    }
}

fn decode_entry(bytes: &[u8; ENTRY_BYTES]) -> Option<AclEntry> {
    let [tag_low, tag_high, low, high, id @ ..] = *bytes;
    let tag = u16::from_le_bytes([tag_low, tag_high]);
    Some(AclEntry {
        tag: AclTag::from_raw(tag, u32::from_le_bytes(id))?,
        rights: u16::from_le_bytes([low, high]),
    })
}

/// The mode with the rights of an access list.
pub(crate) fn mode_with_rights(mode: u16, acl: &Acl) -> u16 {
    mode & !MODE_RIGHTS | acl.mode_rights()
}

#[cfg(test)]
mod tests;
