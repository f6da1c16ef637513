//! Making changes durable, and reporting lost writes.
//!
//! **Data loss:** overwrites that were not flushed are lost if every copy that had them was gone
//! for a while.
//!
//! The volume counts these losses. Each open file gets the error once, from its next sync, as Linux
//! does it (`errseq_t`). A file that is opened afterwards does not get it, unless no sync has
//! reported it yet. It is unknown which files lost writes.

use crate::error::{FsError, Result};
use crate::file::mmap_dirty::FlushMode;
use crate::file::wcc::{Wcc, WccReply};
use crate::file::{mmap_dirty, times};
use crate::format::file_id::FileId;
use crate::format::inode::Ino;
use crate::io::channel::IoChannel;
use crate::txn::manager::TxManager;
use pagemesh_base::space::SpaceError;
use std::sync::atomic::{AtomicU64, Ordering};

/// The losses that were reported through one open file.
#[derive(Debug, Default)]
pub struct LostWriteCursor(AtomicU64);

impl LostWriteCursor {
    /// A cursor for a file that is opened now.
    pub(crate) fn duplicate(&self) -> LostWriteCursor {
        LostWriteCursor(AtomicU64::new(self.0.load(Ordering::Acquire)))
    }
}

/// See [`crate::Fs::sync_open_file`].
pub(crate) fn sync_open_file(
    txs: &TxManager,
    reported: &LostWriteCursor,
    channel: &mut IoChannel,
    ino: Ino,
    seen: &LostWriteCursor,
) -> Result<()> {
    let losses = txs.losses_before_sync(Some(ino));
    // The rest alone would be only a part of the atomic change.
    mmap_dirty::check_lost_pages(txs, ino)?;
    mmap_dirty::flush(txs, channel, ino, FlushMode::Atomic)?;
    let noted = times::flush_times(txs, ino);
    flush_and_report(txs, reported, channel, seen)?;
    txs.check_losses_of_sync(losses)?;
    times::ignore_no_space(noted)
}

/// See [`crate::Fs::has_nothing_to_sync`].
pub(crate) fn has_nothing_to_sync(txs: &TxManager, ino: Ino, seen: &LostWriteCursor) -> bool {
    let is_told = seen.0.load(Ordering::Acquire) == txs.channels.space().lost_writes();
    if !is_told || txs.channels.space().needs_flush() {
        return false;
    }
    let core = txs.lock_core();
    if core.has_acknowledged() || core.lost_changes.is_some() {
        return false;
    }
    let live = core.live_inodes.get(&ino);
    live.is_some_and(|live| live.file_lock.has_nothing_to_sync())
}

/// See [`crate::Fs::sync_data`].
pub(crate) fn sync_data(
    txs: &TxManager,
    reported: &LostWriteCursor,
    channel: &mut IoChannel,
    ino: Ino,
    seen: &LostWriteCursor,
) -> Result<()> {
    let losses = txs.losses_before_sync(Some(ino));
    mmap_dirty::check_lost_pages(txs, ino)?;
    mmap_dirty::flush(txs, channel, ino, FlushMode::Atomic)?;
    flush_and_report(txs, reported, channel, seen)?;
    txs.check_losses_of_sync(losses)
}

/// See [`crate::Fs::sync_all`].
pub(crate) fn sync_all(
    txs: &TxManager,
    reported: &LostWriteCursor,
    channel: &mut IoChannel,
) -> Result<()> {
    let losses = txs.losses_before_sync(None);
    mmap_dirty::flush_all(txs, channel)?;
    let noted = times::flush_all_times(txs);
    flush_and_report(txs, reported, channel, reported)?;
    txs.check_losses_of_sync(losses)?;
    times::ignore_no_space(noted)
}

/// See [`crate::Fs::commit`].
pub(crate) fn commit(txs: &TxManager, channel: &mut IoChannel, id: FileId) -> WccReply<u64> {
    let result = commit_file(txs, channel, id);
    let wcc = Wcc::now(txs, id);
    WccReply { wcc, result }
}

fn commit_file(txs: &TxManager, channel: &mut IoChannel, id: FileId) -> Result<u64> {
    txs.inspect(|core| core.inode_of(id))?;
    mmap_dirty::flush(txs, channel, id.ino, FlushMode::Atomic)?;
    let noted = times::flush_times(txs, id.ino);
    // Lost unstable writes are no error, so that the client writes them again.
    txs.commit_acknowledged()?;
    flush_space(txs, channel)?;
    times::ignore_no_space(noted)?;
    Ok(txs.lost_writes())
}

/// Makes everything durable that is committed. Returns the losses of the space so far.
fn flush_space(txs: &TxManager, channel: &mut IoChannel) -> Result<u64> {
    // The transactions of names and sizes were flushed, each with all changes before it.
    if txs.channels.space().needs_flush() {
        let space = txs.channels.space();
        txs.flushes.flush(|| channel.flush(space))?;
    }
    // Read after the flush: losses from before it are counted by now.
    Ok(txs.channels.space().lost_writes())
}

fn flush_and_report(
    txs: &TxManager,
    reported: &LostWriteCursor,
    channel: &mut IoChannel,
    seen: &LostWriteCursor,
) -> Result<()> {
    txs.commit_acknowledged()?;
    let losses = flush_space(txs, channel)?;
    let before = seen.0.fetch_max(losses, Ordering::AcqRel);
    reported.0.fetch_max(losses, Ordering::AcqRel);
    if before < losses {
        Err(FsError::Space(SpaceError::Unavailable(
            "every copy was gone for a while; earlier writes that were not synced may be \
             lost; write them again"
                .into(),
        )))
    } else {
        Ok(())
    }
}
