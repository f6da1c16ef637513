//! Dropping the state in memory of inodes that are not in use any more.

use crate::format::inode::Ino;
use crate::live::file_lock::FileLock;
use crate::live::inode::LiveInode;
use crate::txn::manager::TxManager;
use std::sync::Arc;

/// Drops the state of an inode that is not in use, with its pending times.
pub(crate) fn forget_with_times(txs: &TxManager, ino: Ino, data: &FileLock) {
    forget_if(txs, ino, data, |live| !live.is_used());
}

/// Drops the state of an inode that is not in use, unless it has pending times.
pub(crate) fn forget_without_times(txs: &TxManager, ino: Ino) {
    let is_over = |live: &LiveInode| !live.is_used() && live.pending_times().is_empty();
    let data = {
        let core = txs.lock_core();
        let live = core.live_inodes.get(&ino).filter(|live| is_over(live));
        live.map(|live| Arc::clone(&live.file_lock))
    };
    if let Some(data) = data {
        forget_if(txs, ino, &data, is_over);
    }
}

/// Direct clients are blocked without the core's lock, so another thread may use the inode again meanwhile.
fn forget_if(txs: &TxManager, ino: Ino, data: &FileLock, is_over: impl FnOnce(&LiveInode) -> bool) {
    let ended = data.block_direct_permanently();
    let mut core = txs.lock_core();
    if core.live_inodes.get(&ino).is_some_and(is_over) {
        core.live_inodes.remove(&ino);
        core.mmap_dirty.set(ino, 0);
    } else {
        ended.unblock();
    }
}
