//! ACLs of NFSv4 as POSIX ACLs.
//!
//! The result gives no caller a right that the ACL does not give: it may give fewer rights. A member of a group may be in any other
//! group, may be a named user and may be the owner, so a denial for a group is a denial for all of these, as far as nothing was allowed
//! to them before. An ACL of NFSv4 is refused if it denies a right that a POSIX ACL always gives, or if its inheritance has no counterpart.

use super::{Ace, AceKind, AcePrincipal, EVERYONE, OWNER, flag, mask, mask_of};
use pagemesh_fs::{Acl, AclEntry, AclTag};
use std::collections::BTreeMap;

/// Flags that decide about inheritance.
const INHERIT: u32 = flag::FILE_INHERIT | flag::DIRECTORY_INHERIT;
/// Flags with a counterpart.
const FLAGS: u32 = INHERIT | flag::INHERIT_ONLY | flag::IDENTIFIER_GROUP;
/// The single rights of POSIX.
const RIGHTS: [u16; 3] = [4, 2, 1];

/// The POSIX ACLs of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PosixAcls {
    /// Decides about access.
    pub access: Acl,
    /// Of a directory: new files inherit it.
    pub default: Option<Acl>,
}

/// Why an ACL of NFSv4 has no POSIX ACL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AclMappingError {
    /// NFS4ERR_ATTRNOTSUPP.
    #[error("the ACL {0}; leave that out")]
    Unsupported(&'static str),
    /// NFS4ERR_INVAL.
    #[error("the ACL names more users and groups than a file may have; use a group")]
    TooLong,
}

/// The bits that the entries so far have decided for some callers.
#[derive(Clone, Copy, Debug, Default)]
struct Decided {
    allowed: u32,
    denied: u32,
}

impl Decided {
    fn decide(&mut self, kind: AceKind, mask: u32) {
        match kind {
            AceKind::Allow => self.allowed |= mask & !self.denied,
            AceKind::Deny => self.denied |= mask & !self.allowed,
        }
    }

    /// The rights of POSIX with all of their bits.
    fn rights(self, is_directory: bool) -> u16 {
        let has = |right: &&u16| {
            let needed = mask_of(**right, is_directory);
            self.allowed & needed == needed
        };
        RIGHTS.iter().filter(has).sum()
    }
}

/// The classes of callers that a POSIX ACL tells apart.
#[derive(Default)]
struct Classes {
    owner: Decided,
    users: BTreeMap<u32, Decided>,
    group: Decided,
    groups: BTreeMap<u32, Decided>,
    /// Callers that no entry names.
    others: Decided,
}

impl Classes {
    /// The classes that some entries name.
    fn named(aces: &[Ace]) -> Self {
        let mut classes = Self::default();
        for ace in aces {
            match ace.principal {
                AcePrincipal::User(uid) => drop(classes.users.insert(uid, Decided::default())),
                AcePrincipal::NamedGroup(gid) => {
                    classes.groups.insert(gid, Decided::default());
                }
                AcePrincipal::Owner | AcePrincipal::Group | AcePrincipal::Everyone => {}
            }
        }
        classes
    }

    /// All but the others.
    fn members(&mut self) -> impl Iterator<Item = &mut Decided> {
        let single = [&mut self.owner, &mut self.group].into_iter();
        let named = self.users.values_mut().chain(self.groups.values_mut());
        single.chain(named)
    }

    /// Takes the next entry. `owner`: the owner of the file; none: every user may become the owner.
    fn decide(&mut self, ace: &Ace, owner: Option<u32>) {
        let (kind, mask) = (ace.kind, ace.mask);
        match (ace.principal, kind) {
            (AcePrincipal::Owner, _) => self.owner.decide(kind, mask),
            (AcePrincipal::User(uid), _) => {
                if let Some(user) = self.users.get_mut(&uid) {
                    user.decide(kind, mask);
                }
                if owner == Some(uid) || owner.is_none() && kind == AceKind::Deny {
                    self.owner.decide(kind, mask);
                }
            }
            (AcePrincipal::Group, AceKind::Allow) => self.group.decide(kind, mask),
            (AcePrincipal::NamedGroup(gid), AceKind::Allow) => {
                if let Some(group) = self.groups.get_mut(&gid) {
                    group.decide(kind, mask);
                }
            }
            (AcePrincipal::Group | AcePrincipal::NamedGroup(_), AceKind::Deny) => {
                self.members().for_each(|class| class.decide(kind, mask));
            }
            (AcePrincipal::Everyone, _) => {
                self.members().for_each(|class| class.decide(kind, mask));
                self.others.decide(kind, mask);
            }
        }
    }

    /// Fails if a denial has no effect on a POSIX ACL.
    fn check(&mut self) -> Result<(), AclMappingError> {
        let of_owner = self.owner.denied & (EVERYONE | OWNER | mask::WRITE_OWNER);
        let others = self.others;
        let mut all = self.members().map(|it| *it).chain([others]);
        match of_owner != 0 || all.any(|class| class.denied & EVERYONE != 0) {
            true => Err(AclMappingError::Unsupported(
                "denies a right to attributes or to the ACL that each such caller has",
            )),
            false => Ok(()),
        }
    }

    fn acl(&self, is_directory: bool) -> Result<Acl, AclMappingError> {
        let entry = |tag, class: &Decided| AclEntry {
            tag,
            rights: class.rights(is_directory),
        };
        let users = self.users.iter();
        let groups = self.groups.iter();
        let mut entries = vec![entry(AclTag::UserObj, &self.owner)];
        entries.extend(users.map(|(uid, class)| entry(AclTag::User(*uid), class)));
        entries.push(entry(AclTag::GroupObj, &self.group));
        entries.extend(groups.map(|(gid, class)| entry(AclTag::Group(*gid), class)));
        let others = entry(AclTag::Other, &self.others);
        if entries.len() > 2 {
            let union = entries.iter().skip(1).fold(0, |all, it| all | it.rights);
            // Without rights in the mask, named users would have the rights of others, as in Linux.
            let rights = if union == 0 { others.rights } else { union };
            entries.push(AclEntry {
                tag: AclTag::Mask,
                rights,
            });
        }
        entries.push(others);
        Acl::new(entries).map_err(|_| AclMappingError::TooLong)
    }
}

/// The POSIX ACL of entries that decide about one file.
fn mapped(aces: &[Ace], is_directory: bool, owner: Option<u32>) -> Result<Acl, AclMappingError> {
    let mut classes = Classes::named(aces);
    aces.iter().for_each(|ace| classes.decide(ace, owner));
    classes.check()?;
    classes.acl(is_directory)
}

fn check_flags(ace: &Ace, is_directory: bool) -> Result<(), AclMappingError> {
    let inherit = ace.flags & INHERIT;
    let reason = match ace.flags {
        flags if flags & !FLAGS != 0 => "has flags of audits or of inheritance in one level only",
        flags if inherit == 0 && flags & flag::INHERIT_ONLY != 0 => {
            "has an entry that decides about nothing"
        }
        _ if inherit != 0 && !is_directory => "has inherited entries, and the file is no directory",
        _ if inherit != 0 && inherit != INHERIT => {
            "has entries that only files or only directories inherit"
        }
        _ => return Ok(()),
    };
    Err(AclMappingError::Unsupported(reason))
}

/// The POSIX ACLs of an ACL of NFSv4, for a file of this owner.
///
/// # Errors
/// If the ACL has no counterpart: see the module.
pub fn posix_acls(
    aces: &[Ace],
    is_directory: bool,
    owner: u32,
) -> Result<PosixAcls, AclMappingError> {
    aces.iter()
        .try_for_each(|ace| check_flags(ace, is_directory))?;
    let aces =
        |is_in: fn(&Ace) -> bool| -> Vec<Ace> { aces.iter().copied().filter(is_in).collect() };
    let inherited = aces(|ace| ace.flags & INHERIT != 0);
    let effective = aces(|ace| ace.flags & flag::INHERIT_ONLY == 0);
    let default = match inherited.is_empty() {
        true => None,
        false => Some(mapped(&inherited, is_directory, None)?),
    };
    Ok(PosixAcls {
        access: mapped(&effective, is_directory, Some(owner))?,
        default,
    })
}

#[cfg(test)]
mod tests;
