//! Privileges that a change of a file's bytes removes.

use crate::error::Result;
use crate::format::inode::Ino;
use crate::tree::new_inode::SET_GID;
use crate::tree::xattr_list::{has_capabilities, remove_capabilities};
use crate::txn::manager::TxManager;

const SET_UID: u16 = 0o4000;
pub(crate) const GROUP_EXECUTE: u16 = 0o0010;

/// The user of a change, as the rules of set-id bits see it (Linux, `setattr_should_drop_suidgid`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetIdCaller {
    /// Has CAP_FSETID. A change of the content keeps all bits.
    Privileged,
    /// Is in the group of the file.
    Member,
    /// Is not in the group of the file.
    Other,
}

/// The mode without the bits that raise privileges. The set-group-id bit of a file that the group
/// may not execute has another meaning. It stays, but not for a caller outside the group.
pub(crate) fn without_setid(mode: u16, caller: SetIdCaller) -> u16 {
    match mode & GROUP_EXECUTE == 0 && caller != SetIdCaller::Other {
        true => mode & !SET_UID,
        false => mode & !(SET_UID | SET_GID),
    }
}

/// Removes the capabilities of a file, as every change of its bytes does, also by root
/// (capabilities(7)). The caller holds the file exclusively.
pub(crate) fn drop_capabilities(txs: &TxManager, ino: Ino) -> Result<()> {
    let has_some = txs.inspect(|core| {
        let mut tx = core.begin();
        let inode = tx.inode(ino)?;
        has_capabilities(&mut tx, ino, &inode)
    })?;
    if !has_some {
        return Ok(());
    }
    let now = txs.now();
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        remove_capabilities(tx, ino, &mut inode)?;
        inode.touch(now);
        tx.put_inode(ino, &inode)
    })
}
