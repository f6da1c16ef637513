//! Changes of attributes.

use crate::error::Result;
use crate::file::attr;
use crate::file::attr::Attr;
use crate::file::privileges::{SetIdCaller, without_setid};
use crate::format::inode::{Ino, Inode, SET_ID, Time, check_ino};
use crate::live::file_lock::FileLock;
use crate::tree::acl_xattrs;
use crate::tree::xattr_list::remove_capabilities;
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use std::sync::Arc;

/// Attributes to change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttrChanges {
    /// Permissions, and the set-id and sticky bits.
    pub mode: Option<u16>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last read.
    pub atime: Option<Time>,
    /// Last change of the content.
    pub mtime: Option<Time>,
}

/// See [`crate::Fs::clear_setid`].
pub(crate) fn clear_setid(
    txs: &TxManager,
    ino: Ino,
    caller: impl FnOnce(u32) -> SetIdCaller,
) -> Result<()> {
    check_ino(ino)?;
    let inode = txs.inspect(|core| core.inode(ino))?;
    if inode.is_directory() || inode.mode & SET_ID == 0 {
        return Ok(());
    }
    let cleared = match caller(inode.gid) {
        SetIdCaller::Privileged => 0,
        caller => inode.mode & !without_setid(inode.mode, caller),
    };
    if cleared == 0 {
        return Ok(());
    }
    let now = txs.now();
    txs.change_deferrable(|tx| {
        let mut inode = tx.inode(ino)?;
        inode.mode &= !cleared;
        inode.touch(now);
        tx.put_inode(ino, &inode)
    })
}

/// See [`crate::Fs::set_attr`].
pub(crate) fn set_attr(txs: &TxManager, ino: Ino, changes: AttrChanges) -> Result<Attr> {
    check_ino(ino)?;
    let now = txs.now();
    let armed = lock_to_arm(txs, ino, changes.mode)?;
    let _alone = armed.as_ref().map(|data| data.write());
    txs.change_deferrable(|tx| {
        let mut inode = tx.inode(ino)?;
        apply_changes(tx, ino, &mut inode, changes)?;
        inode.touch(now);
        tx.put_inode(ino, &inode)?;
        attr::attr(tx.core, ino, &inode)
    })
}

/// The lock of a file that gets set-id bits: direct clients do not clear them, and must leave the file.
pub(crate) fn lock_to_arm(
    txs: &TxManager,
    ino: Ino,
    mode: Option<u16>,
) -> Result<Option<Arc<FileLock>>> {
    let arms = mode.is_some_and(|mode| mode & SET_ID != 0);
    arms.then(|| txs.file_lock(ino)).transpose()
}

/// Changes the fields of an inode, its access ACL with the mode, and removes its privileges if its owner or group changes. The caller sets the ctime and
/// stores the inode.
pub(crate) fn apply_changes(
    tx: &mut Tx<'_>,
    ino: Ino,
    inode: &mut Inode,
    changes: AttrChanges,
) -> Result<()> {
    if let Some(mode) = changes.mode {
        inode.mode = inode.kind().bits() | mode & 0o7777;
        acl_xattrs::apply_mode(tx, ino, inode)?;
    }
    let is_given = changes.uid.is_some() || changes.gid.is_some();
    if is_given && changes.mode.is_none() && !inode.is_directory() {
        inode.mode = without_setid(inode.mode, SetIdCaller::Member);
    }
    if is_given && !inode.is_directory() {
        remove_capabilities(tx, ino, inode)?;
    }
    inode.uid = changes.uid.unwrap_or(inode.uid);
    inode.gid = changes.gid.unwrap_or(inode.gid);
    inode.atime = changes.atime.unwrap_or(inode.atime);
    inode.mtime = changes.mtime.unwrap_or(inode.mtime);
    Ok(())
}
