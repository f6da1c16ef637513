//! Permissions of callers that no kernel has checked: mode bits, ownership, sticky directories. Pure functions of
//! inodes, called inside the transaction or lock of each operation. ACLs are not evaluated: there are none.
//!
//! The rules follow POSIX and Linux (`generic_permission`, `may_delete`, `setattr_prepare`). Two follow NFS
//! servers, whose clients check at an open: the owner of a file always reads and writes it, and a program that may be
//! executed may be read.

use crate::error::Result;
use crate::format::inode::Inode;
use crate::tree::new_inode::{Credentials, SET_GID};
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

/// Rights of one class of callers in the mode.
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
const STICKY: u16 = 0o1000;

/// Whether the mode gives these rights. Root has all, but executes only files with an execute bit.
pub(crate) fn may(inode: &Inode, caller: &Caller, wanted: Rights) -> bool {
    if caller.is_trusted {
        return true;
    }
    let class = if caller.uid == inode.uid {
        6
    } else if caller.is_member(inode.gid) {
        3
    } else {
        0
    };
    let mut granted = inode.mode >> class & 7;
    if caller.is_privileged() {
        granted |= 6;
        granted |= u16::from(inode.is_directory() || inode.mode & ANY_EXECUTE != 0);
    }
    wanted.0 & !granted == 0
}

/// Fails with `EACCES` unless the mode gives these rights.
pub(crate) fn check(inode: &Inode, caller: &Caller, wanted: Rights) -> Result<()> {
    match may(inode, caller, wanted) {
        true => Ok(()),
        false => Err(Errno::ACCESS.into()),
    }
}

/// Checks a read of a file.
pub(crate) fn check_read(inode: &Inode, caller: &Caller) -> Result<()> {
    if caller.owns(inode) || may(inode, caller, Rights::EXECUTE) {
        return Ok(());
    }
    check(inode, caller, Rights::READ)
}

/// Checks a write of a file, and a change of its size.
pub(crate) fn check_write(inode: &Inode, caller: &Caller) -> Result<()> {
    match caller.owns(inode) {
        true => Ok(()),
        false => check(inode, caller, Rights::WRITE),
    }
}

/// The rights among `wanted` that a caller has.
pub(crate) fn access_mask(inode: &Inode, caller: &Caller, wanted: AccessMask) -> AccessMask {
    let rules: &[(AccessMask, Rights)] = match inode.is_directory() {
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
    let granted = rules
        .iter()
        .filter(|(bit, rights)| wanted.contains(*bit) && may(inode, caller, *rights));
    AccessMask(granted.fold(0, |mask, (bit, _)| mask | bit.0))
}

/// Checks that a caller may remove or replace an entry of a directory. In a sticky directory only the owners of the
/// directory and of the inode may.
pub(crate) fn check_delete(directory: &Inode, inode: &Inode, caller: &Caller) -> Result<()> {
    check(directory, caller, Rights::CHANGE_ENTRIES)?;
    let is_sticky = directory.mode & STICKY != 0;
    match is_sticky && !caller.owns(directory) && !caller.owns(inode) {
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

/// The mode that a caller may give an inode of this group: without set-group-id unless it is a member.
pub(crate) fn permitted_mode(mode: u16, gid: u32, caller: &Caller) -> u16 {
    match caller.is_privileged() || caller.is_member(gid) {
        true => mode,
        false => mode & !SET_GID,
    }
}
