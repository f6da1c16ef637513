//! Reads of files.

use crate::error::Result;
use crate::file::redo_log;
use crate::file::stored_pages::{read_unlocked, read_with_mmap_dirty};
use crate::format::inode::Ino;
use crate::io::channel::IoChannel;
use crate::txn::manager::TxManager;

/// See [`crate::Fs::read`].
pub(crate) fn read(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    offset: u64,
    len: u32,
) -> Result<Vec<u8>> {
    if let Some(bytes) = read_unlocked(txs, channel, ino, offset, len)? {
        return Ok(bytes);
    }
    let lock = txs.file_lock(ino)?;
    let shared = txs.lock_shared(ino, &lock)?;
    if let Some(bytes) = read_with_mmap_dirty(txs, channel, ino, &lock, offset, len)? {
        return Ok(bytes);
    }
    drop(shared);
    let _alone = txs.lock_exclusive(ino, &lock)?;
    redo_log::apply(txs, channel, ino)?;
    let bytes = read_with_mmap_dirty(txs, channel, ino, &lock, offset, len)?;
    Ok(bytes.unwrap_or_default())
}
