//! Inodes are created with their first lookup.

use crate::error::Result;
use crate::file::attr::Attr;
use crate::format::inode::{Ino, Inode};
use crate::tree::acl_xattrs;
use crate::tree::directory::linked_directory;
use crate::tree::new_inode::{CreateKind, Credentials, NewMode, new_inode};
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;

/// Runs an operation that creates an inode, and records its first lookup and `opens` opens.
pub(crate) fn create_inode(
    txs: &TxManager,
    opens: u64,
    mut run: impl FnMut(&mut Tx<'_>) -> Result<Attr>,
) -> Result<Attr> {
    let mut made = None;
    let result = txs.change_deferrable(|tx| {
        // `run` runs again if it did not fit, and may get another number then.
        made.take()
            .into_iter()
            .for_each(|made| tx.core.undo_creation(made));
        let attr = run(tx)?;
        made = Some(tx.core.record_creation(attr.ino, opens));
        Ok(attr)
    });
    if let (Err(_), Some(made)) = (&result, made) {
        txs.lock_core().undo_creation(made);
    }
    result
}

/// See [`crate::Fs::create_unnamed`].
pub(crate) fn create_unnamed(
    txs: &TxManager,
    parent: Ino,
    NewMode { mode, umask }: NewMode,
    caller: Credentials,
) -> Result<Attr> {
    let now = txs.now();
    create_inode(txs, 1, |tx| {
        let parent_inode = linked_directory(tx, parent)?;
        let of = (parent, &parent_inode);
        let (ino, mut inode) = new_inode(tx, of, &CreateKind::File, mode, caller, now)?;
        acl_xattrs::inherit(tx, of, (ino, &mut inode), umask)?;
        put_unnamed(tx, ino, inode)
    })
}

/// Creates a file without a name that no program sees, and opens it.
pub(crate) fn create_internal(txs: &TxManager, mode: u16, caller: Credentials) -> Result<Attr> {
    let now = txs.now();
    create_inode(txs, 1, |tx| {
        let root = linked_directory(tx, Ino::ROOT)?;
        let of = (Ino::ROOT, &root);
        let (ino, inode) = new_inode(tx, of, &CreateKind::File, mode, caller, now)?;
        put_unnamed(tx, ino, inode)
    })
}

fn put_unnamed(tx: &mut Tx<'_>, ino: Ino, mut inode: Inode) -> Result<Attr> {
    inode.links = 0;
    tx.put_inode(ino, &inode)?;
    Ok(Attr::of(ino, &inode))
}
