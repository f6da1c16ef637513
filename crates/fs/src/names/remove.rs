//! Removal of names.

use crate::error::Result;
use crate::file::free;
use crate::format::inode::{Ino, Inode, Time};
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
    remove_name(txs, parent, name, Removal::Name)
}

/// See [`crate::Fs::rmdir`].
pub(crate) fn rmdir(txs: &TxManager, parent: Ino, name: &[u8]) -> Result<()> {
    check_directory_name(name)?;
    remove_name(txs, parent, name, Removal::EmptyDirectory)
}

/// Checks the name of a directory to be removed.
pub(crate) fn check_directory_name(name: &[u8]) -> Result<()> {
    match name {
        b"." => Err(Errno::INVAL.into()),
        b".." => Err(Errno::NOTEMPTY.into()),
        name => check_name(name),
    }
}

/// The inodes that a removal accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    /// All but directories.
    Name,
    EmptyDirectory,
}

impl Removal {
    fn check(self, tx: &mut Tx<'_>, inode: &mut Inode) -> Result<()> {
        match (self, inode.is_directory()) {
            (Removal::Name, true) => Err(Errno::ISDIR.into()),
            (Removal::Name, false) => Ok(()),
            (Removal::EmptyDirectory, false) => Err(Errno::NOTDIR.into()),
            (Removal::EmptyDirectory, true) => match Tree::new(tx, inode).is_empty()? {
                true => Ok(()),
                false => Err(Errno::NOTEMPTY.into()),
            },
        }
    }
}

/// Removes a name.
fn remove_name(txs: &TxManager, parent: Ino, name: &[u8], removal: Removal) -> Result<()> {
    let now = txs.now();
    let mut take = |tx: &mut Tx<'_>| {
        let mut parent_inode = directory(tx, parent)?;
        let all = |_: &mut Tx<'_>, _: (Ino, &Inode), _: &Inode| Ok(());
        let (ino, _) = remove_in(tx, (parent, &mut parent_inode), name, removal, now, all)?;
        Ok(ino)
    };
    let ino = txs.with_reserve_fallback(|| txs.change_deferrable(&mut take))?;
    free::release_if_unused(txs, ino);
    Ok(())
}

/// Removes a name from a directory if `may_remove` permits it for directory and inode. Returns the inode.
pub(crate) fn remove_in(
    tx: &mut Tx<'_>,
    (parent, parent_inode): (Ino, &mut Inode),
    name: &[u8],
    removal: Removal,
    now: Time,
    may_remove: impl Fn(&mut Tx<'_>, (Ino, &Inode), &Inode) -> Result<()>,
) -> Result<(Ino, Inode)> {
    let entry = find(tx, parent_inode, name)?;
    let mut inode = named_inode(tx, parent, &entry)?;
    may_remove(tx, (parent, parent_inode), &inode)?;
    removal.check(tx, &mut inode)?;
    Tree::new(tx, parent_inode).remove(entry.key)?;
    if inode.is_directory() {
        parent_inode.links = decremented_links(parent, parent_inode)?;
    }
    put_changed_directory(tx, parent, parent_inode, now)?;
    unlink_inode(tx, entry.ino, &mut inode, now)?;
    Ok((entry.ino, inode))
}
