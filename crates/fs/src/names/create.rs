//! New names.

use crate::error::Result;
use crate::file::attr::Attr;
use crate::file::{attr, creation};
use crate::format::inode::{Ino, LINKS_MAX, check_ino};
use crate::names::entry::{check_name, incremented_links, put_changed_directory};
use crate::tree::directory::{Tree, linked_directory};
use crate::tree::new_inode::{CreateKind, Credentials, new_inode};
use crate::txn::manager::TxManager;
use rustix::io::Errno;

/// As [`crate::Fs::create`], with `opens` opens.
pub(crate) fn create(
    txs: &TxManager,
    opens: u64,
    parent: Ino,
    name: &[u8],
    (make, mode): (CreateKind<'_>, u16),
    caller: Credentials,
) -> Result<Attr> {
    check_name(name)?;
    let now = txs.now();
    creation::create_inode(txs, opens, |tx| {
        let mut parent_inode = linked_directory(tx, parent)?;
        let key = Tree::new(tx, &mut parent_inode).vacant_key(name)?;
        let of = (parent, &parent_inode);
        let (ino, inode) = new_inode(tx, of, &make, mode, caller, now)?;
        Tree::new(tx, &mut parent_inode).insert_at(key, name, ino, make.kind())?;
        if inode.is_directory() {
            parent_inode.links = incremented_links(&parent_inode)?;
        }
        put_changed_directory(tx, parent, &mut parent_inode, now)?;
        tx.put_inode(ino, &inode)?;
        Ok(Attr::of(ino, &inode))
    })
}

/// See [`crate::Fs::link`].
pub(crate) fn link(txs: &TxManager, ino: Ino, parent: Ino, name: &[u8]) -> Result<Attr> {
    check_name(name)?;
    check_ino(ino)?;
    let now = txs.now();
    let attr = txs.change_deferrable(|tx| {
        let mut inode = tx.inode(ino)?;
        if inode.is_directory() {
            return Err(Errno::PERM.into());
        }
        if inode.links >= LINKS_MAX {
            return Err(Errno::MLINK.into());
        }
        let mut parent_inode = linked_directory(tx, parent)?;
        Tree::new(tx, &mut parent_inode).insert(name, ino, inode.kind())?;
        put_changed_directory(tx, parent, &mut parent_inode, now)?;
        inode.links += 1;
        inode.ctime = now;
        tx.put_inode(ino, &inode)?;
        attr::attr(tx.core, ino, &inode)
    })?;
    txs.lock_core().live_inode(ino).lookups += 1;
    Ok(attr)
}
