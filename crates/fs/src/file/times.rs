//! Times of reads and writes: recorded in memory, and written into the inodes later.
//!
//! A crash loses times that are only recorded. A client of NFS that has cached bytes from before an overwrite would then find the
//! attributes of these bytes, and use the bytes for ever. So a file system with such clients stores mtime and ctime *ahead* with the
//! first overwrite after a flush of times: later ones, up to the stored time, need no transaction. After a crash the file has the
//! stored times, which are later than all reported ones. The next flush stores the real times, which were reported all along.

use crate::error::{FsError, Result};
use crate::file::forget;
use crate::format::inode::Ino;
use crate::txn::manager::TxManager;
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// Writes the pending times of a file, also from direct clients, into its inode.
pub(crate) fn flush_times(txs: &TxManager, ino: Ino) -> Result<()> {
    let is_noted = {
        let mut core = txs.lock_core();
        core.collect_direct_write(ino);
        let live = core.live_inodes.get(&ino);
        live.is_some_and(|live| !live.pending_times().is_empty())
    };
    if !is_noted {
        return Ok(());
    }
    txs.with_reserve_fallback(|| {
        txs.change_deferrable(|tx| {
            let inode = tx.inode(ino)?;
            tx.put_inode(ino, &inode)
        })
    })
}

/// Whether an overwrite stores its time, or one ahead, before it returns: if a crash keeps its bytes.
pub(crate) fn keeps_time(txs: &TxManager, durable: bool) -> bool {
    txs.keeps_write_times.load(Ordering::Relaxed)
        && (durable || !txs.channels.space().has_write_cache())
}

/// Stores mtime and ctime of a file ahead, after an overwrite has recorded its time. Without room, the real times stay pending
/// alone: the bytes are there nevertheless.
pub(crate) fn store_ahead(txs: &TxManager, ino: Ino) -> Result<()> {
    let stored = txs.with_reserve_fallback(|| {
        txs.change_or_read(|tx| {
            let inode = tx.inode(ino)?;
            let live = tx.core.live_inodes.get(&ino);
            // Another change may have stored the time meanwhile: this call waits for it.
            match live.is_some_and(|live| live.pending_times().mtime.is_some()) {
                true => tx.put_inode_ahead(ino, &inode),
                false => Ok(()),
            }
        })
    });
    ignore_no_space(stored)
}

/// Without room, the times stay pending; the data is durable nevertheless.
pub(crate) fn ignore_no_space(noted: Result<()>) -> Result<()> {
    match noted {
        Err(error) if error.errno() == Errno::NOSPC => Ok(()),
        noted => noted,
    }
}

/// See [`crate::Fs::flush_all_times`].
pub(crate) fn flush_all_times(txs: &TxManager) -> Result<()> {
    let mut noted = {
        let mut core = txs.lock_core();
        core.collect_all_direct_writes();
        std::mem::take(&mut core.inos_with_pending_times)
    };
    let mut first = Ok(());
    while let Some(ino) = noted.pop_first() {
        let put = match flush_times(txs, ino) {
            Err(FsError::Posix(Errno::STALE)) => Ok(()),
            put => put,
        };
        if put.is_ok() {
            // Files with pending times stay in memory after their last pin.
            forget::forget_without_times(txs, ino);
        }
        if let Err(cause) = &put {
            let mut core = txs.lock_core();
            core.inos_with_pending_times.insert(ino);
            // A failed volume would fail the other inodes too.
            if matches!(cause, FsError::Space(_)) {
                core.inos_with_pending_times.append(&mut noted);
            }
        }
        first = first.and(put);
    }
    first
}
