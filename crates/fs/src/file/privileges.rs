//! Privileges that a change of a file's bytes removes.

use crate::error::Result;
use crate::format::inode::Ino;
use crate::tree::xattr_list::{has_capabilities, remove_capabilities};
use crate::txn::manager::TxManager;

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
        inode.ctime = now;
        tx.put_inode(ino, &inode)
    })
}
