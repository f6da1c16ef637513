//! POSIX ACLs as ACLs of NFSv4 (RFC 8881, section 6), by the rules of draft-ietf-nfsv4-acl-mapping-05: an ACE denies only rights that
//! a later ACE would give, and groups are allowed before they are denied, because a user may be in several.
//!
//! The result gives each caller the same single rights. A caller that has two rights by two groups has both at once, which the
//! POSIX ACL does not give.

pub mod posix;

use pagemesh_fs::{Acl, AclEntry, AclTag, Acls};

/// The bits of an access mask (RFC 8881, section 6.2.1.3).
pub mod mask {
    /// Read a file, or list a directory.
    pub const READ_DATA: u32 = 0x1;
    /// Write a file, or add a file to a directory.
    pub const WRITE_DATA: u32 = 0x2;
    /// Append to a file, or add a directory to a directory.
    pub const APPEND_DATA: u32 = 0x4;
    /// Execute a file, or look names of a directory up.
    pub const EXECUTE: u32 = 0x20;
    /// Remove entries of a directory.
    pub const DELETE_CHILD: u32 = 0x40;
    /// Read the attributes.
    pub const READ_ATTRIBUTES: u32 = 0x80;
    /// Change times.
    pub const WRITE_ATTRIBUTES: u32 = 0x100;
    /// Read the ACL.
    pub const READ_ACL: u32 = 0x2_0000;
    /// Change the ACL and the mode.
    pub const WRITE_ACL: u32 = 0x4_0000;
    /// Change the owner or the group.
    pub const WRITE_OWNER: u32 = 0x8_0000;
    /// Access the file with synchronous reads and writes.
    pub const SYNCHRONIZE: u32 = 0x10_0000;
}

/// The bits of the flags of an ACE (RFC 8881, section 6.2.1.4).
pub mod flag {
    /// New files inherit the ACE.
    pub const FILE_INHERIT: u32 = 0x1;
    /// New directories inherit the ACE.
    pub const DIRECTORY_INHERIT: u32 = 0x2;
    /// The ACE does not decide about the directory itself.
    pub const INHERIT_ONLY: u32 = 0x8;
    /// The principal is a named group.
    pub const IDENTIFIER_GROUP: u32 = 0x40;
}

/// The rights that every caller has to a file that it has found.
const EVERYONE: u32 = mask::READ_ATTRIBUTES | mask::READ_ACL | mask::SYNCHRONIZE;
/// Further rights of the owner.
const OWNER: u32 = mask::WRITE_ATTRIBUTES | mask::WRITE_ACL;
const RIGHTS: u16 = 7;

/// Whether an ACE gives or denies rights. The wire has the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AceKind {
    /// ACE4_ACCESS_ALLOWED_ACE_TYPE.
    Allow = 0,
    /// ACE4_ACCESS_DENIED_ACE_TYPE.
    Deny = 1,
}

/// The callers of an ACE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcePrincipal {
    /// `OWNER@`.
    Owner,
    /// `GROUP@`.
    Group,
    /// `EVERYONE@`.
    Everyone,
    /// This user.
    User(u32),
    /// Members of this group.
    NamedGroup(u32),
}

/// An entry of an ACL of NFSv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ace {
    /// Allow or deny.
    pub kind: AceKind,
    /// See [`flag`].
    pub flags: u32,
    /// See [`mask`].
    pub mask: u32,
    /// The callers.
    pub principal: AcePrincipal,
}

/// The bits of rights, without the bits that all callers have.
fn mask_of(rights: u16, is_directory: bool) -> u32 {
    let delete = if is_directory { mask::DELETE_CHILD } else { 0 };
    let all = [
        (4, mask::READ_DATA),
        (2, mask::WRITE_DATA | mask::APPEND_DATA | delete),
        (1, mask::EXECUTE),
    ];
    let granted = all.iter().filter(|(right, _)| rights & right != 0);
    granted.fold(0, |bits, (_, more)| bits | more)
}

/// Builds the list.
struct AceList {
    aces: Vec<Ace>,
    is_directory: bool,
    flags: u32,
}

impl AceList {
    fn allow(&mut self, principal: AcePrincipal, rights: u16) {
        let own = if principal == AcePrincipal::Owner {
            OWNER
        } else {
            0
        };
        let mask = mask_of(rights, self.is_directory) | EVERYONE | own;
        self.push(AceKind::Allow, principal, mask);
    }

    /// Denies the rights that later ACEs give, without the granted ones.
    fn deny(&mut self, principal: AcePrincipal, granted: u16, later: u16) {
        let denied = !granted & later & RIGHTS;
        if denied != 0 {
            self.push(AceKind::Deny, principal, mask_of(denied, self.is_directory));
        }
    }

    fn push(&mut self, kind: AceKind, principal: AcePrincipal, mask: u32) {
        let of_group = match principal {
            AcePrincipal::NamedGroup(_) => flag::IDENTIFIER_GROUP,
            _ => 0,
        };
        self.aces.push(Ace {
            kind,
            flags: self.flags | of_group,
            mask,
            principal,
        });
    }
}

/// The ACEs of an access ACL, or of the default ACL of a directory. There are at most twice as many as entries.
#[must_use]
pub fn aces(acl: &Acl, is_directory: bool, is_default: bool) -> Vec<Ace> {
    let flags = match is_default {
        true => flag::FILE_INHERIT | flag::DIRECTORY_INHERIT | flag::INHERIT_ONLY,
        false => 0,
    };
    let mut list = AceList {
        aces: Vec::new(),
        is_directory,
        flags,
    };
    let entries = acl.entries();
    let mask = entries.iter().find(|entry| entry.tag == AclTag::Mask);
    let mask = mask.map_or(RIGHTS, |entry| entry.rights);
    let masked = |entry: &AclEntry| match entry.tag {
        AclTag::User(_) | AclTag::GroupObj | AclTag::Group(_) => entry.rights & mask,
        _ => entry.rights,
    };
    // The rights of entries behind this place, by class.
    let union = |is_in: fn(AclTag) -> bool| {
        let of_class = entries.iter().filter(|entry| is_in(entry.tag));
        of_class.fold(0, |all, entry| all | masked(entry))
    };
    let users = union(|tag| matches!(tag, AclTag::User(_)));
    let groups = union(|tag| matches!(tag, AclTag::GroupObj | AclTag::Group(_)));
    let others = union(|tag| tag == AclTag::Other);
    for entry in entries {
        let rights = masked(entry);
        match entry.tag {
            AclTag::UserObj => {
                list.deny(AcePrincipal::Owner, rights, users | groups | others);
                list.allow(AcePrincipal::Owner, rights);
            }
            AclTag::User(uid) => {
                list.deny(AcePrincipal::User(uid), rights, groups | others);
                list.allow(AcePrincipal::User(uid), rights);
            }
            AclTag::GroupObj => list.allow(AcePrincipal::Group, rights),
            AclTag::Group(gid) => list.allow(AcePrincipal::NamedGroup(gid), rights),
            AclTag::Mask | AclTag::Other => {}
        }
    }
    for entry in entries {
        match entry.tag {
            AclTag::GroupObj => list.deny(AcePrincipal::Group, masked(entry), others),
            AclTag::Group(gid) => list.deny(AcePrincipal::NamedGroup(gid), masked(entry), others),
            _ => {}
        }
    }
    list.allow(AcePrincipal::Everyone, others);
    list.aces
}

/// The ACEs of a file, as GETATTR returns them: without an access ACL the ones of its mode, and the default ACL of a directory behind them.
#[must_use]
pub fn aces_of(acls: &Acls, mode: u16, is_directory: bool) -> Vec<Ace> {
    let of_mode;
    let access = match &acls.access {
        Some(acl) => acl,
        None => {
            of_mode = Acl::of_mode(mode);
            &of_mode
        }
    };
    let mut all = aces(access, is_directory, false);
    if let Some(default) = &acls.default {
        all.extend(aces(default, is_directory, true));
    }
    all
}

/// RFC 8881, section 6.2.1: the first ACE of the caller with a bit decides about it.
#[cfg(test)]
fn is_allowed_by(
    aces: &[Ace],
    (owner, group): (u32, u32),
    (uid, groups): (u32, &[u32]),
    bit: u32,
) -> bool {
    let is_for = |ace: &&Ace| match ace.principal {
        AcePrincipal::Owner => uid == owner,
        AcePrincipal::User(named) => uid == named,
        AcePrincipal::Group => groups.contains(&group),
        AcePrincipal::NamedGroup(gid) => groups.contains(&gid),
        AcePrincipal::Everyone => true,
    };
    let mut of_bit = aces.iter().filter(|ace| ace.mask & bit != 0);
    let first = of_bit.find(is_for);
    first.is_some_and(|ace| ace.kind == AceKind::Allow)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Owner and owning group of the file.
    const FILE: (u32, u32) = (1, 1);

    fn acl(mode: u16, named: &[(AclTag, u16)], mask: Option<u16>) -> Acl {
        let mut entries = Acl::of_mode(mode).entries().to_vec();
        let named = named.iter().copied();
        for (tag, rights) in named.chain(mask.map(|rights| (AclTag::Mask, rights))) {
            entries.push(AclEntry { tag, rights });
        }
        entries.sort_by_key(|entry| entry.tag);
        Acl::new(entries).expect("valid")
    }

    /// POSIX 1003.1e, section 23.1.5, for one right.
    fn is_permitted(acl: &Acl, uid: u32, groups: &[u32], right: u16) -> bool {
        let rights = |tag| {
            let found = acl.entries().iter().find(|entry| entry.tag == tag);
            found.map(|entry| entry.rights)
        };
        let mask = rights(AclTag::Mask).unwrap_or(RIGHTS);
        if uid == FILE.0 {
            return rights(AclTag::UserObj).is_some_and(|rights| rights & right != 0);
        }
        if let Some(rights) = rights(AclTag::User(uid)) {
            return rights & mask & right != 0;
        }
        let of_groups = acl.entries().iter().filter(|entry| match entry.tag {
            AclTag::GroupObj => groups.contains(&FILE.1),
            AclTag::Group(gid) => groups.contains(&gid),
            _ => false,
        });
        let of_groups: Vec<u16> = of_groups.map(|entry| entry.rights & mask).collect();
        match of_groups.is_empty() {
            true => rights(AclTag::Other).is_some_and(|rights| rights & right != 0),
            false => of_groups.iter().any(|rights| rights & right != 0),
        }
    }

    #[test]
    fn each_caller_has_the_same_single_rights() {
        let all_groups: [&[u32]; 6] = [&[], &[1], &[2], &[3], &[1, 2], &[2, 3]];
        for bits in (0..1 << 9).step_by(7) {
            for rights in 0..1 << 9 {
                let named = [
                    (AclTag::User(2), rights & 7),
                    (AclTag::Group(2), rights >> 3 & 7),
                ];
                let acl = acl(bits, &named, Some(rights >> 6 & 7));
                let aces = aces(&acl, false, false);
                for (right, bit) in [
                    (4, mask::READ_DATA),
                    (2, mask::WRITE_DATA),
                    (1, mask::EXECUTE),
                ] {
                    for (uid, groups) in (1..4).flat_map(|uid| all_groups.map(|it| (uid, it))) {
                        assert_eq!(
                            is_allowed_by(&aces, FILE, (uid, groups), bit),
                            is_permitted(&acl, uid, groups, right),
                            "{acl:?} {uid} {groups:?} {right}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn mode_has_an_ace_for_each_class() {
        let of_mode = aces(&Acl::of_mode(0o640), false, false);
        let ace = |kind, principal, mask| Ace {
            kind,
            flags: 0,
            mask,
            principal,
        };
        let wanted = [
            ace(AceKind::Allow, AcePrincipal::Owner, 0x16_0187),
            ace(AceKind::Allow, AcePrincipal::Group, 0x12_0081),
            ace(AceKind::Allow, AcePrincipal::Everyone, 0x12_0080),
        ];
        assert_eq!(of_mode, wanted);
        let denied = aces(&Acl::of_mode(0o007), true, true);
        assert_eq!(denied[0].kind, AceKind::Deny);
        assert_eq!(denied[0].mask, 0x67);
        assert!(denied.iter().all(|ace| ace.flags & 0xb == 0xb));
    }
}
