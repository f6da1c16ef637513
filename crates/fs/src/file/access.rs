//! Permissions of callers that no kernel has checked: mode bits, ACLs, ownership, sticky directories. They are checked inside
//! the transaction or lock of each operation.
//!
//! The rules follow POSIX and Linux (`generic_permission`, `may_delete`, `setattr_prepare`), so that a caller has the same rights
//! here and through the kernel. Two follow NFS servers, since their clients check at an open: the owner of a file always reads
//! and writes it, and a program that may be executed may be read.

use crate::error::Result;
use crate::file::privileges::{SetIdCaller, without_setid};
use crate::format::acl::{Acl, AclCaller, AclKind};
use crate::format::inode::{Ino, Inode};
use crate::tree::acl_xattrs::load_acl;
use crate::tree::new_inode::{Credentials, SET_GID};
use crate::txn::tx::Tx;
use rustix::io::Errno;

/// Most supplementary groups of a caller. AUTH_SYS has 16; a directory service may have more. They take 4 KiB.
pub const CALLER_GROUPS_MAX: usize = 1024;

/// The user of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    uid: u32,
    gid: u32,
    /// Sorted.
    groups: Vec<u32>,
    is_trusted: bool,
}

impl Caller {
    /// A caller with permissions to check. User 0 is root: map it to another user before, if clients may not be root.
    ///
    /// # Errors
    /// `E2BIG` for more than [`CALLER_GROUPS_MAX`] groups.
    pub fn new(uid: u32, gid: u32, groups: &[u32]) -> Result<Caller> {
        if groups.len() > CALLER_GROUPS_MAX {
            return Err(Errno::TOOBIG.into());
        }
        let mut groups = groups.to_vec();
        groups.sort_unstable();
        Ok(Caller {
            uid,
            gid,
            groups,
            is_trusted: false,
        })
    }

    /// A caller that a kernel has checked, or the server itself. It may do everything.
    #[must_use]
    pub fn trusted(uid: u32, gid: u32) -> Caller {
        Caller {
            uid,
            gid,
            groups: Vec::new(),
            is_trusted: true,
        }
    }

    /// The user.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.uid
    }

    pub(crate) fn credentials(&self) -> Credentials {
        Credentials {
            uid: self.uid,
            gid: self.gid,
        }
    }

    /// Whether the rules for root apply.
    pub(crate) fn is_privileged(&self) -> bool {
        self.is_trusted || self.uid == 0
    }

    fn is_member(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.binary_search(&gid).is_ok()
    }

    fn owns(&self, inode: &Inode) -> bool {
        self.is_privileged() || self.uid == inode.uid
    }
}

/// Rights to an inode, as RFC 1813 numbers them (`ACCESS3_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessMask(pub u32);

impl AccessMask {
    /// Read a file, or list a directory.
    pub const READ: AccessMask = AccessMask(0x01);
    /// Look names of a directory up.
    pub const LOOKUP: AccessMask = AccessMask(0x02);
    /// Overwrite a file, or change entries of a directory.
    pub const MODIFY: AccessMask = AccessMask(0x04);
    /// Extend a file, or add entries to a directory.
    pub const EXTEND: AccessMask = AccessMask(0x08);
    /// Remove entries of a directory.
    pub const DELETE: AccessMask = AccessMask(0x10);
    /// Execute a file.
    pub const EXECUTE: AccessMask = AccessMask(0x20);

    fn contains(self, other: AccessMask) -> bool {
        self.0 & other.0 != 0
    }
}

/// Rights of one class of callers in the mode, or of an entry of an ACL.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rights(u16);

impl Rights {
    pub(crate) const READ: Rights = Rights(4);
    pub(crate) const WRITE: Rights = Rights(2);
    /// Execute a file, or look names of a directory up.
    pub(crate) const EXECUTE: Rights = Rights(1);
    /// Change the entries of a directory.
    pub(crate) const CHANGE_ENTRIES: Rights = Rights(3);
}

const ANY_EXECUTE: u16 = 0o111;
const GROUP_RIGHTS: u16 = 0o070;
const STICKY: u16 = 0o1000;

/// The rights of root: all, but it executes only files with an execute bit.
fn root_rights(inode: &Inode) -> u16 {
    let may_execute = inode.is_directory() || inode.mode & ANY_EXECUTE != 0;
    6 | u16::from(may_execute)
}

/// The rights that the mode alone gives.
fn mode_rights(inode: &Inode, caller: &Caller) -> u16 {
    let class = if caller.uid == inode.uid {
        6
    } else if caller.is_member(inode.gid) {
        3
    } else {
        0
    };
    inode.mode >> class & 7
}

/// Whether an inode with this access ACL gives these rights. Linux asks no ACL if the group class of the mode has no right: then
/// a user that the ACL names has the rights of others.
fn is_granted(
    inode: &Inode,
    acl: impl FnOnce() -> Result<Option<Acl>>,
    caller: &Caller,
    wanted: Rights,
) -> Result<bool> {
    if caller.is_trusted || caller.is_privileged() && wanted.0 & !root_rights(inode) == 0 {
        return Ok(true);
    }
    let is_owner = caller.uid == inode.uid;
    let acl = match is_owner || inode.mode & GROUP_RIGHTS == 0 {
        true => None,
        false => acl()?,
    };
    Ok(match acl {
        None => wanted.0 & !mode_rights(inode, caller) == 0,
        Some(acl) => {
            let of_list = AclCaller {
                uid: caller.uid,
                owner_uid: inode.uid,
                owner_gid: inode.gid,
                is_member: &|gid| caller.is_member(gid),
            };
            acl.permits(&of_list, wanted.0)
        }
    })
}

/// Whether an inode gives these rights.
///
/// # Errors
/// `EIO` if its ACL is needed and not valid; errors of the volume.
pub(crate) fn may(
    tx: &mut Tx<'_>,
    (ino, inode): (Ino, &Inode),
    caller: &Caller,
    wanted: Rights,
) -> Result<bool> {
    let acl = || load_acl(tx, ino, inode, AclKind::Access);
    is_granted(inode, acl, caller, wanted)
}

/// Fails with `EACCES` unless an inode gives these rights.
pub(crate) fn check(
    tx: &mut Tx<'_>,
    of: (Ino, &Inode),
    caller: &Caller,
    wanted: Rights,
) -> Result<()> {
    match may(tx, of, caller, wanted)? {
        true => Ok(()),
        false => Err(Errno::ACCESS.into()),
    }
}

/// Checks a read of a file.
pub(crate) fn check_read(tx: &mut Tx<'_>, of: (Ino, &Inode), caller: &Caller) -> Result<()> {
    if caller.owns(of.1) || may(tx, of, caller, Rights::EXECUTE)? {
        return Ok(());
    }
    check(tx, of, caller, Rights::READ)
}

/// Checks a write of a file, and a change of its size.
pub(crate) fn check_write(tx: &mut Tx<'_>, of: (Ino, &Inode), caller: &Caller) -> Result<()> {
    match caller.owns(of.1) {
        true => Ok(()),
        false => check(tx, of, caller, Rights::WRITE),
    }
}

/// The rights among `wanted` that a caller has.
pub(crate) fn access_mask(
    tx: &mut Tx<'_>,
    of: (Ino, &Inode),
    caller: &Caller,
    wanted: AccessMask,
) -> Result<AccessMask> {
    let rules: &[(AccessMask, Rights)] = match of.1.is_directory() {
        true => &[
            (AccessMask::READ, Rights::READ),
            (AccessMask::LOOKUP, Rights::EXECUTE),
            (AccessMask::MODIFY, Rights::CHANGE_ENTRIES),
            (AccessMask::EXTEND, Rights::CHANGE_ENTRIES),
            (AccessMask::DELETE, Rights::CHANGE_ENTRIES),
        ],
        false => &[
            (AccessMask::READ, Rights::READ),
            (AccessMask::MODIFY, Rights::WRITE),
            (AccessMask::EXTEND, Rights::WRITE),
            (AccessMask::EXECUTE, Rights::EXECUTE),
        ],
    };
    let mut granted = AccessMask::default();
    for (bit, rights) in rules {
        if wanted.contains(*bit) && may(tx, of, caller, *rights)? {
            granted.0 |= bit.0;
        }
    }
    Ok(granted)
}

/// Checks that a caller may remove or replace an entry of a directory. In a sticky directory only the owners of the
/// directory and of the inode may.
pub(crate) fn check_delete(
    tx: &mut Tx<'_>,
    directory: (Ino, &Inode),
    inode: &Inode,
    caller: &Caller,
) -> Result<()> {
    check(tx, directory, caller, Rights::CHANGE_ENTRIES)?;
    let is_sticky = directory.1.mode & STICKY != 0;
    match is_sticky && !caller.owns(directory.1) && !caller.owns(inode) {
        true => Err(Errno::PERM.into()),
        false => Ok(()),
    }
}

/// Checks an owner-only change.
pub(crate) fn check_owner(inode: &Inode, caller: &Caller) -> Result<()> {
    match caller.owns(inode) {
        true => Ok(()),
        false => Err(Errno::PERM.into()),
    }
}

/// Checks a new owner: only root gives files away.
pub(crate) fn check_new_uid(inode: &Inode, caller: &Caller, uid: u32) -> Result<()> {
    let is_same = caller.owns(inode) && uid == inode.uid;
    match is_same || caller.is_privileged() {
        true => Ok(()),
        false => Err(Errno::PERM.into()),
    }
}

/// Checks a new group: the owner gives a file to its own groups.
pub(crate) fn check_new_gid(inode: &Inode, caller: &Caller, gid: u32) -> Result<()> {
    let is_own = caller.owns(inode) && (gid == inode.gid || caller.is_member(gid));
    match is_own || caller.is_privileged() {
        true => Ok(()),
        false => Err(Errno::PERM.into()),
    }
}

/// The mode without set-user-id, and without set-group-id if it raises privileges: the group may execute the file, or the caller is
/// not in the group (`setattr_should_drop_suidgid`).
pub(crate) fn mode_without_setid(inode: &Inode, caller: &Caller) -> u16 {
    let is_member = caller.is_privileged() || caller.is_member(inode.gid);
    without_setid(
        inode.mode,
        match is_member {
            true => SetIdCaller::Member,
            false => SetIdCaller::Other,
        },
    )
}

/// The mode of a file after a caller has changed its bytes or its size.
pub(crate) fn mode_after_write(inode: &Inode, caller: &Caller) -> u16 {
    match caller.is_privileged() {
        true => inode.mode,
        false => mode_without_setid(inode, caller),
    }
}

/// The mode that a caller may give an inode of this group: without set-group-id unless it is a member.
pub(crate) fn permitted_mode(mode: u16, gid: u32, caller: &Caller) -> u16 {
    match caller.is_privileged() || caller.is_member(gid) {
        true => mode,
        false => mode & !SET_GID,
    }
}
