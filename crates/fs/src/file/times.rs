//! Times of reads and writes: recorded in memory, and written into the inodes later.

use crate::error::{FsError, Result};
use crate::file::forget;
use crate::format::inode::Ino;
use crate::txn::manager::TxManager;
use rustix::io::Errno;

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
