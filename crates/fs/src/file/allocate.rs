//! Preallocation, holes and zeroes in a range of a file.

use crate::error::Result;
use crate::file::extents::{PIECE_PAGES_MAX, SPANS_FREED_MAX, discard_request, write_pages};
use crate::file::{deferred_free, extents, free, mmap_dirty, privileges, redo_log, share};
use crate::format::inode::{FILE_BYTES_MAX, HAS_RESERVED_PAGES, Ino, NEEDS_TRIM};
use crate::format::{PAGE, page_count};
use crate::io::channel::IoChannel;
use crate::tree::map_update;
use crate::txn::manager::TxManager;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ops::Range;

/// Operation on a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocateMode {
    /// Preallocates the range, also beyond the end.
    Reserve {
        /// The size stays.
        keep_size: bool,
    },
    /// Frees the range; it then reads as zeroes. The size stays.
    Punch,
    /// Makes the range read as zeroes, preallocated.
    Zero {
        /// The size stays.
        keep_size: bool,
    },
}

/// See [`crate::Fs::allocate`].
pub(crate) fn allocate(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    how: AllocateMode,
    offset: u64,
    len: u64,
) -> Result<()> {
    let end = offset.checked_add(len).ok_or(Errno::FBIG)?;
    if len == 0 {
        return Err(Errno::INVAL.into());
    }
    if end > FILE_BYTES_MAX {
        return Err(Errno::FBIG.into());
    }
    let lock = txs.file_lock(ino)?;
    let _alone = txs.lock_exclusive(ino, &lock)?;
    txs.with_reserve_fallback(|| redo_log::complete_pending(txs, channel, ino))?;
    privileges::drop_capabilities(txs, ino)?;
    let inode = txs.inspect(|core| {
        core.check_running()?;
        core.regular_file(ino)
    })?;
    if inode.flags & NEEDS_TRIM != 0 {
        deferred_free::free_marked(txs, channel, ino)?;
    }
    if how != AllocateMode::Punch {
        check_space(txs, channel, ino, offset / PAGE..page_count(end))?;
    }
    match how {
        AllocateMode::Reserve { keep_size } => {
            reserve_range(txs, channel, ino, offset..end, keep_size)
        }
        AllocateMode::Punch => {
            txs.with_reserve_fallback(|| punch_range(txs, channel, ino, offset..end))?;
            mmap_dirty::discard(txs, ino, &lock, offset..end);
            lock.kernel_pages().record_change(offset..end);
            Ok(())
        }
        AllocateMode::Zero { keep_size } => {
            punch_range(txs, channel, ino, offset..end)?;
            mmap_dirty::discard(txs, ino, &lock, offset..end);
            lock.kernel_pages().record_change(offset..end);
            reserve_range(txs, channel, ino, offset..end, keep_size)
        }
    }
}

/// Fails early if the limit leaves too little room for the whole range.
fn check_space(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pages: Range<u64>,
) -> Result<()> {
    let asked = pages.end - pages.start;
    let (inode, room, pieces) = txs.inspect(|core| {
        let inode = core.regular_file(ino)?;
        let room = match core.head.limit_bytes {
            0 => u64::MAX,
            limit => (limit / PAGE).saturating_sub(core.used_pages),
        };
        let mut pieces = Vec::new();
        // Otherwise the result does not depend on the pages that the file has there.
        if asked > room && asked - room <= inode.pages {
            pieces = core.pieces(&inode, pages.start, usize::MAX)?;
            // Shared spans are not reused by this file.
            pieces.retain(|piece| {
                let is_own = !piece.is_shared || core.share_counts.count(piece.span.page) <= 1;
                is_own && piece.first_page < pages.end
            });
        }
        Ok((inode, room, pieces))
    })?;
    if asked <= room {
        return Ok(());
    }
    let mut missing = asked - room;
    for piece in pieces {
        let first = pages.start.max(piece.first_page) - piece.first_page;
        let end = pages.end.min(piece.end()) - piece.first_page;
        let page = piece.span.page;
        missing = missing.saturating_sub(channel.count_mapped_pages(page + first..page + end)?);
        if missing == 0 {
            return Ok(());
        }
    }
    tracing::debug!(
        ino = ino.0,
        pages = inode.pages,
        missing,
        "there is no room"
    );
    Err(Errno::NOSPC.into())
}

fn reserve_range(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    bytes: Range<u64>,
    keep_size: bool,
) -> Result<()> {
    let mut page = bytes.start / PAGE;
    let end = page_count(bytes.end);
    share::unshare(txs, channel, ino, page..end)?;
    while page < end {
        let next = (page + PIECE_PAGES_MAX).min(end);
        let holes = extents::holes(txs, channel, ino, page..next)?;
        let now = txs.now();
        txs.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for &page in &holes {
                let run = map_update::find_or_allocate(tx, &mut inode, page)?;
                tx.write_data(run.page, 0, &[0; PAGE_BYTES], true)?;
                inode.pages += 1;
            }
            let size = if keep_size {
                inode.size
            } else {
                inode.size.max((next * PAGE).min(bytes.end))
            };
            if next > page_count(size) {
                inode.flags |= HAS_RESERVED_PAGES;
            }
            if holes.is_empty() && size == inode.size {
                return Ok(());
            }
            inode.size = size;
            inode.touch(now);
            tx.put_inode(ino, &inode)
        })?;
        page = next;
    }
    Ok(())
}

fn punch_range(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    bytes: Range<u64>,
) -> Result<()> {
    let (first, last) = (page_count(bytes.start), bytes.end / PAGE);
    let now = txs.now();
    // Whole spans in between are removed, shared or not.
    for at in [bytes.start, bytes.end - 1] {
        share::unshare(txs, channel, ino, at / PAGE..at / PAGE + 1)?;
    }
    // Partial pages first: they are zeroed if they are mapped.
    let edges = if first > last {
        vec![bytes.clone()]
    } else {
        vec![bytes.start..first * PAGE, last * PAGE..bytes.end]
    };
    let mut mapped = Vec::new();
    for edge in edges.into_iter().filter(|edge| !edge.is_empty()) {
        let page = edge.start / PAGE;
        if extents::holes(txs, channel, ino, page..page + 1)?.is_empty() {
            mapped.push(edge);
        }
    }
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        for edge in &mapped {
            let zeroes = vec![0; (edge.end - edge.start) as usize];
            write_pages(tx, &mut inode, edge.start, &zeroes, &BTreeSet::new())?;
        }
        if first < last {
            inode.flags |= NEEDS_TRIM;
        }
        inode.touch_content(now);
        tx.put_inode(ino, &inode)
    })?;
    if first >= last {
        return Ok(());
    }
    let cleared = discard_range(txs, channel, ino, first..last);
    txs.defer_on_error(ino, cleared)?;
    // The hole exists; only the page count is still to be updated.
    let counted = txs.with_reserve_fallback(|| free::clear_trim_mark(txs, channel, ino, None));
    let _ = txs.defer_on_error(ino, counted);
    Ok(())
}

/// Frees the mapped pages of a range of a file, and keeps its own spans.
fn discard_range(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pages: Range<u64>,
) -> Result<()> {
    let mut from = pages.start;
    loop {
        let mut pieces = txs.inspect(|core| {
            let inode = core.regular_file(ino)?;
            core.pieces(&inode, from, SPANS_FREED_MAX)
        })?;
        pieces.retain(|piece| piece.first_page < pages.end);
        let Some(last) = pieces.last() else {
            return Ok(());
        };
        if share::release_shared(txs, channel, ino, &pieces, &pages)? > 0 {
            continue;
        }
        txs.change_pages_durably(channel, |channel| {
            channel.call_all(pieces.iter().map(|piece| discard_request(piece, &pages)))?;
            Ok(())
        })?;
        from = last.end();
    }
}
