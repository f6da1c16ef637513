//! Access control lists of inodes: extended attributes that agree with the mode.
//!
//! The mode is the truth about the entries that it stands for: owner, others, and the mask, or the owning group without
//! a mask. An earlier release changes the mode alone, so a list that is loaded takes them from the mode.

use crate::error::Result;
use crate::format::acl::{Acl, AclKind, mode_with_rights};
use crate::format::inode::{Ino, Inode, InodeKind};
use crate::tree::xattr_list::{get_xattr, remove_xattr, set_xattr};
use crate::txn::tx::Tx;
use rustix::io::Errno;

/// A list of an inode.
///
/// # Errors
/// `EIO` if the attribute is no valid list. Its owner and root may still replace it.
pub(crate) fn load_acl(
    tx: &mut Tx<'_>,
    ino: Ino,
    inode: &Inode,
    kind: AclKind,
) -> Result<Option<Acl>> {
    let value = get_xattr(tx, ino, inode, kind.attribute())?;
    value.map_or(Ok(None), |value| decode_acl(&value, inode, kind))
}

fn decode_acl(value: &[u8], inode: &Inode, kind: AclKind) -> Result<Option<Acl>> {
    let mut acl = Acl::decode(value).map_err(|_| Errno::IO)?;
    if let (Some(acl), AclKind::Access) = (&mut acl, kind) {
        acl.set_mode(inode.mode);
    }
    Ok(acl)
}

/// Sets or removes a list. An access list changes the mode, and is not stored if it says no more than that. The caller stores
/// the inode.
///
/// # Errors
/// `EACCES` for a default list of anything but a directory, `EOPNOTSUPP` for a symbolic link; `ENOSPC`.
pub(crate) fn set_acl(
    tx: &mut Tx<'_>,
    ino: Ino,
    inode: &mut Inode,
    kind: AclKind,
    acl: Option<&Acl>,
) -> Result<()> {
    match (inode.kind(), kind) {
        (InodeKind::Symlink, _) => return Err(Errno::OPNOTSUPP.into()),
        (InodeKind::Directory, _) | (_, AclKind::Access) => {}
        (_, AclKind::Default) if acl.is_none() => return Ok(()),
        (_, AclKind::Default) => return Err(Errno::ACCESS.into()),
    }
    let stored = match (kind, acl) {
        (AclKind::Access, Some(acl)) => {
            inode.mode = mode_with_rights(inode.mode, acl);
            Some(acl).filter(|acl| !acl.is_mode())
        }
        _ => acl,
    };
    put_acl(tx, ino, inode, kind, stored)
}

fn put_acl(
    tx: &mut Tx<'_>,
    ino: Ino,
    inode: &mut Inode,
    kind: AclKind,
    acl: Option<&Acl>,
) -> Result<()> {
    match acl {
        Some(acl) => set_xattr(tx, ino, inode, kind.attribute(), &acl.encode()),
        None => remove_xattr(tx, ino, inode, kind.attribute()).map(drop),
    }
}

/// Brings the stored access list to the mode of the inode. The caller stores the inode.
pub(crate) fn apply_mode(tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode) -> Result<()> {
    let Some(old) = get_xattr(tx, ino, inode, AclKind::Access.attribute())? else {
        return Ok(());
    };
    // A list that is not valid stays as it is: it must not keep the owner from a change of the mode.
    match decode_acl(&old, inode, AclKind::Access) {
        Ok(Some(acl)) if acl.encode() != old => {
            put_acl(tx, ino, inode, AclKind::Access, Some(&acl))
        }
        _ => Ok(()),
    }
}

/// Gives a new inode the lists that it inherits from its directory, and the rights in its mode. Without a default list of the
/// directory, the rights in `umask` are removed. POSIX 1003.1e, section 23.3.2. The caller stores the inode.
pub(crate) fn inherit(
    tx: &mut Tx<'_>,
    (parent_ino, parent): (Ino, &Inode),
    (ino, inode): (Ino, &mut Inode),
    umask: u16,
) -> Result<()> {
    if inode.kind() == InodeKind::Symlink {
        return Ok(());
    }
    let Some(default) = load_acl(tx, parent_ino, parent, AclKind::Default)? else {
        inode.mode &= !(umask & 0o777);
        return Ok(());
    };
    let access = default.inherited(inode.mode);
    inode.mode = mode_with_rights(inode.mode, &access);
    if !access.is_mode() {
        put_acl(tx, ino, inode, AclKind::Access, Some(&access))?;
    }
    if inode.is_directory() {
        put_acl(tx, ino, inode, AclKind::Default, Some(&default))?;
    }
    Ok(())
}
