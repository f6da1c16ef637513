//! Redo logs that a crash left.

use crate::error::{FsError, Result};
use crate::file::{free, redo_log};
use crate::format::inode::Ino;
use crate::txn::manager::TxManager;
use rustix::io::Errno;

/// Applies the logs that a crash left; `files` has each file with its log. The mount is not in
/// use yet. A file without a name is freed with its log.
pub(crate) fn replay_redo_logs(txs: &TxManager, files: &[(Ino, Ino)]) -> Result<()> {
    if files.is_empty() {
        return Ok(());
    }
    let mut channel = txs.channels.borrow()?;
    txs.lock_core()
        .redo_logs
        .extend(files.iter().map(|&(_, log)| log));
    for &(ino, _) in files {
        let is_named = txs
            .inspect(|core| core.inode(ino))
            .is_ok_and(|inode| inode.links > 0);
        if !is_named {
            continue;
        }
        match redo_log::apply(txs, &mut channel, ino) {
            // The log stays with its file. Reads fail until a retry succeeds.
            Err(cause) if cause.errno() == Errno::NOSPC => {
                tracing::error!(ino = ino.0, %cause, "a file cannot be used before there is room");
            }
            Err(FsError::Damaged { .. } | FsError::ReadOnly(_)) => {
                txs.lock_core().untrusted.insert(ino);
            }
            done => done?,
        }
        free::release_if_unused_with(txs, ino, Some(&mut channel));
    }
    Ok(())
}
