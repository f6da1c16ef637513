//! Removal of names.

use crate::error::Result;
use crate::file::free;
use crate::format::inode::{Ino, Inode};
use crate::names::entry::{
    check_name, decremented_links, find, named_inode, put_changed_directory, unlink_inode,
};
use crate::tree::directory::{Tree, directory};
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use rustix::io::Errno;

/// See [`crate::Fs::unlink`].
pub(crate) fn unlink(txs: &TxManager, parent: Ino, name: &[u8]) -> Result<()> {
    check_name(name)?;
    remove_name(txs, parent, name, |_, inode| {
        if inode.is_directory() {
            Err(Errno::ISDIR.into())
        } else {
            Ok(())
        }
    })
}

/// See [`crate::Fs::rmdir`].
pub(crate) fn rmdir(txs: &TxManager, parent: Ino, name: &[u8]) -> Result<()> {
    match name {
        b"." => return Err(Errno::INVAL.into()),
        b".." => return Err(Errno::NOTEMPTY.into()),
        name => check_name(name)?,
    }
    remove_name(txs, parent, name, |tx, inode| {
        if !inode.is_directory() {
            return Err(Errno::NOTDIR.into());
        }
        if Tree::new(tx, inode).is_empty()? {
            Ok(())
        } else {
            Err(Errno::NOTEMPTY.into())
        }
    })
}

/// Removes a name if `check` permits it for the inode.
fn remove_name(
    txs: &TxManager,
    parent: Ino,
    name: &[u8],
    check: impl Fn(&mut Tx<'_>, &mut Inode) -> Result<()>,
) -> Result<()> {
    let now = txs.now();
    let mut take = |tx: &mut Tx<'_>| {
        let mut parent_inode = directory(tx, parent)?;
        let entry = find(tx, &mut parent_inode, name)?;
        let mut inode = named_inode(tx, parent, &entry)?;
        check(tx, &mut inode)?;
        Tree::new(tx, &mut parent_inode).remove(entry.key)?;
        if inode.is_directory() {
            parent_inode.links = decremented_links(parent, &parent_inode)?;
        }
        put_changed_directory(tx, parent, &mut parent_inode, now)?;
        unlink_inode(tx, entry.ino, &mut inode, now)?;
        Ok(entry.ino)
    };
    let ino = txs.with_reserve_fallback(|| txs.change_deferrable(&mut take))?;
    free::release_if_unused(txs, ino);
    Ok(())
}
