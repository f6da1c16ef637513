//! Reads of files.

use crate::error::Result;
use crate::file::access::{self, Caller};
use crate::file::stored_pages::{ReadTime, look_and_read, read_unlocked};
use crate::file::wcc::{Wcc, WccReply};
use crate::file::{kernel_pages, redo_log};
use crate::format::file_id::FileId;
use crate::format::inode::{Ino, Inode};
use crate::io::channel::IoChannel;
use crate::live::kernel_hooks::KernelHooks;
use crate::txn::core::Core;
use crate::txn::manager::TxManager;

/// Most bytes of one [`crate::Fs::read_at`] or [`crate::Fs::write_at`]: more are left out, so that the memory of a
/// request has a bound.
pub const IO_BYTES_MAX: u32 = 1 << 20;

/// Bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadReply {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Whether the file has no byte behind them.
    pub is_eof: bool,
}

/// See [`crate::Fs::read`].
pub(crate) fn read(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    (offset, len): (u64, u32),
    time: ReadTime,
) -> Result<Vec<u8>> {
    let how = (time, &mut |_: &mut Core, _: &Inode| Ok(()));
    let read = read_with(txs, channel, ino, (offset, len), how)?;
    Ok(read.map(|(bytes, ())| bytes).unwrap_or_default())
}

/// As [`read`]. `look` sees the inode in the core lock that plans the read. It may run again; its last result counts, and its error
/// ends the read. `None` if a redo log appears although the caller has the file exclusively; this does not happen.
fn read_with<T>(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    (offset, len): (u64, u32),
    (time, look): (ReadTime, &mut impl FnMut(&mut Core, &Inode) -> Result<T>),
) -> Result<Option<(Vec<u8>, T)>> {
    let read = read_unlocked(txs, channel, ino, (offset, len), (time, look))?;
    if read.is_some() {
        return Ok(read);
    }
    let lock = txs.file_lock(ino)?;
    let shared = txs.lock_shared(ino, &lock)?;
    let read = look_and_read(txs, channel, ino, &lock, (offset, len), (time, look))?;
    if read.is_some() {
        return Ok(read);
    }
    drop(shared);
    let _alone = txs.lock_exclusive(ino, &lock)?;
    redo_log::apply(txs, channel, ino)?;
    look_and_read(txs, channel, ino, &lock, (offset, len), (time, look))
}

/// See [`crate::Fs::read_at`].
pub(crate) fn read_at(
    txs: &TxManager,
    hooks: &KernelHooks,
    id: FileId,
    (offset, len): (u64, u32),
    caller: &Caller,
) -> WccReply<ReadReply> {
    let mut wcc = Wcc::default();
    let len = len.min(IO_BYTES_MAX);
    let bytes = offset..offset.saturating_add(len.into());
    // The kernel may need a channel for this, so none is held.
    kernel_pages::write_back_mappings(txs, hooks, id.ino, bytes);
    let mut channel = match txs.channels.borrow() {
        Ok(channel) => channel,
        Err(error) => return WccReply::failed(txs, id, error),
    };
    let mut look = |core: &mut Core, _: &Inode| {
        let inode = core.inode_of(id)?;
        wcc = Wcc::unchanged(core, id, &inode)?;
        access::check_read(&mut core.begin(), (id.ino, &inode), caller)?;
        Ok(wcc.after.as_ref().map_or(0, |attr| attr.size))
    };
    let how = (ReadTime::Recorded, &mut look);
    let read = read_with(txs, &mut channel, id.ino, (offset, len), how);
    let result = read.map(|read| {
        let (bytes, size) = read.unwrap_or_default();
        let is_eof = offset.saturating_add(bytes.len() as u64) >= size;
        ReadReply { bytes, is_eof }
    });
    if wcc.after.is_none() {
        wcc = Wcc::now(txs, id);
    }
    WccReply { wcc, result }
}
