//! New names.

use crate::error::Result;
use crate::file::attr::Attr;
use crate::file::{attr, creation};
use crate::format::inode::{Ino, Inode, LINKS_MAX, Time, check_ino};
use crate::names::entry::{check_name, incremented_links, put_changed_directory};
use crate::tree::acl_xattrs;
use crate::tree::directory::{Tree, linked_directory};
use crate::tree::new_inode::{CreateKind, Credentials, NewMode, new_inode};
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use rustix::io::Errno;

/// As [`crate::Fs::create`], with `opens` opens.
pub(crate) fn create(
    txs: &TxManager,
    opens: u64,
    parent: Ino,
    name: &[u8],
    (make, mode): (CreateKind<'_>, NewMode),
    caller: Credentials,
) -> Result<Attr> {
    check_name(name)?;
    let now = txs.now();
    creation::create_inode(txs, opens, |tx| {
        let mut parent_inode = linked_directory(tx, parent)?;
        let of = (parent, &mut parent_inode);
        let (ino, inode) = create_in(tx, of, name, (&make, mode), caller, now)?;
        tx.put_inode(ino, &inode)?;
        Ok(Attr::of(ino, &inode))
    })
}

/// Adds a new inode with its inherited ACLs to a directory. The caller stores the inode.
pub(crate) fn create_in(
    tx: &mut Tx<'_>,
    (parent, parent_inode): (Ino, &mut Inode),
    name: &[u8],
    (make, NewMode { mode, umask }): (&CreateKind<'_>, NewMode),
    caller: Credentials,
    now: Time,
) -> Result<(Ino, Inode)> {
    let key = Tree::new(tx, parent_inode).vacant_key(name)?;
    let of = (parent, &*parent_inode);
    let (ino, mut inode) = new_inode(tx, of, make, mode, caller, now)?;
    acl_xattrs::inherit(tx, of, (ino, &mut inode), umask)?;
    Tree::new(tx, parent_inode).insert_at(key, name, ino, make.kind())?;
    if inode.is_directory() {
        parent_inode.links = incremented_links(parent_inode)?;
    }
    put_changed_directory(tx, parent, parent_inode, now)?;
    Ok((ino, inode))
}

/// See [`crate::Fs::link`].
pub(crate) fn link(txs: &TxManager, ino: Ino, parent: Ino, name: &[u8]) -> Result<Attr> {
    check_name(name)?;
    check_ino(ino)?;
    let now = txs.now();
    let attr = txs.change_deferrable(|tx| {
        let mut inode = tx.inode(ino)?;
        if tx.is_service_file(ino, &inode)? {
            return Err(Errno::STALE.into());
        }
        link_in(tx, (ino, &mut inode), parent, name, now)?;
        attr::attr(tx.core, ino, &inode)
    })?;
    txs.lock_core().live_inode(ino).lookups += 1;
    Ok(attr)
}

/// Adds a name of an inode to a directory.
pub(crate) fn link_in(
    tx: &mut Tx<'_>,
    (ino, inode): (Ino, &mut Inode),
    parent: Ino,
    name: &[u8],
    now: Time,
) -> Result<()> {
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
    inode.touch(now);
    tx.put_inode(ino, inode)
}
