//! Overwrites of several byte ranges in one transaction.

use crate::error::Result;
use crate::file::extents::{ATOMIC_PAGES_MAX, write_pages};
use crate::file::{extents, kernel_pages, lifetime, redo_log, share};
use crate::format::inode::Ino;
use crate::format::{PAGE, page_count};
use crate::io::channel::IoChannel;
use crate::live::kernel_hooks::KernelHooks;
use crate::txn::manager::TxManager;
use bytes::Bytes;
use rustix::io::Errno;
use std::ops::Range;

/// See [`crate::Fs::write_atomic`].
pub(crate) fn write_atomic(
    txs: &TxManager,
    hooks: &KernelHooks,
    channel: &mut IoChannel,
    ino: Ino,
    parts: &[(u64, Bytes)],
    is_wanted: impl FnOnce() -> bool,
) -> Result<()> {
    // Keeps the file from being freed meanwhile: the issuer may be killed and its file closed.
    lifetime::open(txs, ino)?;
    let written = write_atomic_open(txs, channel, ino, parts, is_wanted);
    let written = written.and_then(|()| kernel_pages::drop_changed_pages(txs, hooks, ino));
    lifetime::release_with(txs, ino, Some(channel));
    written
}

fn write_atomic_open(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    parts: &[(u64, Bytes)],
    is_wanted: impl FnOnce() -> bool,
) -> Result<()> {
    let lock = txs.file_lock(ino)?;
    let _alone = txs.lock_exclusive(ino, &lock)?;
    if !is_wanted() {
        return Err(Errno::INTR.into());
    }
    redo_log::complete_pending(txs, channel, ino)?;
    let inode = txs.inspect(|core| core.regular_file(ino))?;
    if lock.is_mmapped() || inode.needs_remove_privs() {
        return Err(Errno::OPNOTSUPP.into());
    }
    let ranges = atomic_ranges(parts, inode.size)?;
    let pages = |range: &Range<u64>| range.start / PAGE..page_count(range.end);
    for range in &ranges {
        share::unshare(txs, channel, ino, pages(range))?;
    }
    extents::ensure_spans(txs, ino, ranges.iter().flat_map(pages))?;
    let holes = extents::holes_in_ranges(txs, channel, ino, ranges.iter().map(pages))?;
    let now = txs.now();
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        for (offset, data) in parts {
            write_pages(tx, &mut inode, *offset, data, &holes)?;
        }
        inode.touch_content(now);
        tx.make_durable();
        tx.put_inode(ino, &inode)
    })?;
    for range in ranges {
        lock.kernel_pages().record_change(range);
    }
    txs.lock_core().record_unseen_write(ino);
    Ok(())
}

/// The byte ranges of parts that are written atomically, in order.
fn atomic_ranges(parts: &[(u64, Bytes)], size: u64) -> Result<Vec<Range<u64>>> {
    let range = |(offset, data): &(u64, Bytes)| {
        let end = offset.checked_add(data.len() as u64)?;
        (!data.is_empty() && end <= size).then_some(*offset..end)
    };
    let ranges: Option<Vec<_>> = parts.iter().map(range).collect();
    let mut ranges = ranges.ok_or(Errno::INVAL)?;
    ranges.sort_unstable_by_key(|range| range.start);
    let overlap = ranges.windows(2).any(|pair| pair[0].end > pair[1].start);
    let pages = |range: &Range<u64>| page_count(range.end) - range.start / PAGE;
    // A page with bytes of two parts counts twice.
    let pages: u64 = ranges.iter().map(pages).sum();
    if overlap || pages > ATOMIC_PAGES_MAX {
        Err(Errno::INVAL.into())
    } else {
        Ok(ranges)
    }
}
