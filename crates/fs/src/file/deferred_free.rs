//! Inodes with pages that are still to be freed, after a crash or because the pool had no room even
//! for that.
//!
//! Mounting only records them. The mounting process frees them in the background, a piece at a
//! time. Until then the pages count as in use.
//!
//! - An orphan on the list belongs to the thread that frees it: no lookup finds it any more.
//! - A file on the list may be used. Pages beyond its size are freed before it grows; other changes
//!   need not wait.

use crate::error::{FsError, Result};
use crate::file::{free, lifetime, redo_log, share};
use crate::format::inode::{Ino, NEEDS_TRIM};
use crate::io::channel::IoChannel;
use crate::txn::manager::TxManager;
use rustix::io::Errno;

/// See [`crate::Fs::free_deferred_piece`].
pub(crate) fn free_deferred_piece(txs: &TxManager) -> bool {
    let Some(ino) = txs.lock_core().take_deferred() else {
        txs.refill_reserve();
        return false;
    };
    let freed = free_deferred_inode(txs, ino);
    let mut core = txs.lock_core();
    match freed {
        Ok(true) => core.deferred_free.defer([ino]),
        Ok(false) | Err(FsError::Posix(Errno::STALE)) => {}
        Err(cause) => {
            core.deferred_free.defer_retry(ino, &cause);
            return cause.errno() == Errno::NOSPC && core.deferred_free.has_ready();
        }
    }
    true
}

fn free_deferred_inode(txs: &TxManager, ino: Ino) -> Result<bool> {
    if txs.lock_core().freeing.contains(&ino) {
        return free::free_orphan_piece(txs, ino, None);
    }
    // Keeps the file from being deleted meanwhile.
    lifetime::hold(txs, ino)?;
    // The channel first: a thread with a channel may wait for the file.
    let finished = txs.channels.borrow().and_then(|mut channel| {
        let lock = txs.file_lock(ino)?;
        let _alone = txs.lock_exclusive(ino, &lock)?;
        txs.with_reserve_fallback(|| free_marked_piece(txs, &mut channel, ino))
    });
    lifetime::release(txs, ino);
    finished
}

/// Frees some of the marked pages of a file. The caller holds it exclusively. Returns whether
/// more is left.
fn free_marked_piece(txs: &TxManager, channel: &mut IoChannel, ino: Ino) -> Result<bool> {
    redo_log::complete_pending(txs, channel, ino)?;
    share::free_spare(txs, channel, ino)?;
    if txs.inspect(|core| core.inode(ino))?.flags & NEEDS_TRIM == 0 {
        return Ok(false);
    }
    if free::trim_piece(txs, channel, ino)? {
        return Ok(true);
    }
    free::clear_trim_mark(txs, channel, ino, None)?;
    Ok(false)
}

/// Frees the marked pages of a file. The caller holds it exclusively.
pub(crate) fn free_marked(txs: &TxManager, channel: &mut IoChannel, ino: Ino) -> Result<()> {
    while free_marked_piece(txs, channel, ino)? {}
    Ok(())
}
