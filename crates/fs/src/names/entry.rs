//! Names of entries, and the inodes that they name.

use crate::error::{Corruption, FsError, Result};
use crate::format::directory_page::TreeEntry;
use crate::format::inode::{Ino, Inode, NAME_MAX, Time, damaged_inode};
use crate::tree::directory::Tree;
use crate::txn::tx::Tx;
use rustix::io::Errno;

pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    let is_odd = name.is_empty() || name.contains(&0) || name.contains(&b'/');
    if is_odd || name == b"." || name == b".." {
        Err(Errno::INVAL.into())
    } else {
        Ok(())
    }
}

pub(crate) fn find(tx: &mut Tx<'_>, directory: &mut Inode, name: &[u8]) -> Result<TreeEntry> {
    let found = Tree::new(tx, directory).find(name)?;
    found.ok_or(Errno::NOENT.into())
}

/// The inode that an entry of a directory names. Entry and inode must agree on type, names and
/// parent: an operation on inconsistent ones would be wrong.
pub(crate) fn named_inode(tx: &mut Tx<'_>, parent: Ino, entry: &TreeEntry) -> Result<Inode> {
    let ino = entry.ino;
    let refuse = |why: &str| {
        let what = format!("inode {} names inode {}, and {why}", parent.0, ino.0);
        damaged_inode(parent, Corruption(what))
    };
    let inode = match tx.inode(ino) {
        Err(FsError::Posix(Errno::STALE)) => return Err(refuse("there is none")),
        inode => inode?,
    };
    if inode.kind() != entry.kind {
        return Err(refuse("it is something else"));
    }
    if inode.links == 0 {
        return Err(refuse("that has no name"));
    }
    if inode.is_directory() && (inode.parent != parent || ino == Ino::ROOT) {
        return Err(refuse("that lies in another directory"));
    }
    Ok(inode)
}

pub(crate) fn incremented_links(inode: &Inode) -> Result<u32> {
    Ok(inode.links.checked_add(1).ok_or(Errno::MLINK)?)
}

/// The links of a directory that loses one.
pub(crate) fn decremented_links(ino: Ino, inode: &Inode) -> Result<u32> {
    let fewer = inode.links.checked_sub(1).filter(|&links| links >= 2);
    let what = || {
        Corruption(format!(
            "it has {} links, and a directory in it",
            inode.links
        ))
    };
    fewer.ok_or_else(|| damaged_inode(ino, what()))
}

/// Removes one name. Removing the last makes the inode an orphan, which is freed when it is unused.
pub(crate) fn unlink_inode(tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode, now: Time) -> Result<()> {
    inode.links = if inode.is_directory() {
        0
    } else {
        inode.links.saturating_sub(1)
    };
    inode.touch(now);
    tx.put_inode(ino, inode)
}

/// Stores a directory with changed entries.
pub(crate) fn put_changed_directory(
    tx: &mut Tx<'_>,
    ino: Ino,
    directory: &mut Inode,
    now: Time,
) -> Result<()> {
    directory.touch_content(now);
    tx.put_inode(ino, directory)
}
