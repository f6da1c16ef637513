//! Freeing pages beyond the size of a file, and files without a name.
//!
//! The flag [`NEEDS_TRIM`] is set before the first page is freed, and cleared after the last one.
//! After a crash, inodes with the flag are finished in pieces ([`crate::file::deferred_free`]).
//!
//! Discards are durable before the transaction that frees their spans, or clears the flag: a power cut could bring their pages back,
//! into holes of the next file of the span.

use crate::error::{FsError, Result};
use crate::file::extents::{SPANS_FREED_MAX, discard_request};
use crate::file::{forget, redo_log, share, times};
use crate::format::inode::{Ino, Inode, InodeKind, NEEDS_TRIM};
use crate::format::page_count;
use crate::format::page_map::FileSpan;
use crate::io::channel::IoChannel;
use crate::live::inode::LiveInode;
use crate::tree::map_update;
use crate::tree::xattr_list::clear_xattrs;
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use pagemesh_base::defect::{self, Defect};
use rustix::io::Errno;
use std::sync::Arc;

/// Most spans that are freed in one transaction with their inode and its attributes.
const SPANS_WITH_INODE_MAX: usize = 8;
/// Most mapped pages that are freed in the transaction of their inode.
const CLEARED_PAGES_MAX: u64 = 16;

/// Frees all pages beyond the size, and clears the flag. `pages` is the number of mapped pages
/// left; `None` counts them. The caller has exclusive access to the file.
pub(crate) fn trim(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pages: Option<u64>,
) -> Result<()> {
    while trim_piece(txs, channel, ino)? {}
    clear_trim_mark(txs, channel, ino, pages)
}

/// Frees some of the pages beyond the size. Returns whether more may be left.
pub(crate) fn trim_piece(txs: &TxManager, channel: &mut IoChannel, ino: Ino) -> Result<bool> {
    let (keep, pieces) = txs.inspect(|core| {
        core.check_running()?;
        let inode = core.inode(ino)?;
        let keep = page_count(inode.size);
        Ok((keep, core.pieces(&inode, keep, SPANS_FREED_MAX)?))
    })?;
    let shared = share::release_shared(txs, channel, ino, &pieces, &(keep..u64::MAX))?;
    if shared > 0 {
        return Ok(true);
    }
    // In a long run, each step updates the page count.
    let is_long = pieces.len() == SPANS_FREED_MAX;
    let whole = || pieces.iter().filter(|piece| piece.first_page >= keep);
    let mut mapped = 0;
    for FileSpan { span, .. } in whole().filter(|_| is_long) {
        mapped += channel.count_mapped_pages(span.page..span.end())?;
    }
    let own = pieces.iter().filter(|piece| !piece.is_shared);
    discard_behind(txs, channel, own, keep)?;
    if whole().next().is_none() {
        return Ok(false);
    }
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        for piece in whole() {
            map_update::remove(tx, &mut inode, piece.first_page)?;
            tx.free_span(piece.span);
        }
        inode.pages = inode.pages.saturating_sub(mapped);
        tx.put_inode(ino, &inode)
    })?;
    Ok(true)
}

/// Discards the pages of these pieces from a page of the file on.
fn discard_behind<'p>(
    txs: &TxManager,
    channel: &mut IoChannel,
    pieces: impl Iterator<Item = &'p FileSpan>,
    first_page: u64,
) -> Result<()> {
    let discards: Vec<_> = pieces
        .map(|piece| discard_request(piece, &(first_page..u64::MAX)))
        .collect();
    if discards.is_empty() {
        return Ok(());
    }
    txs.change_pages_durably(channel, |channel| {
        channel.call_all(discards.iter().cloned())?;
        Ok(())
    })
}

/// Clears the flag of a file with `pages` mapped pages; `None` counts them.
pub(crate) fn clear_trim_mark(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pages: Option<u64>,
) -> Result<()> {
    let pages = match pages {
        Some(pages) => pages,
        None => count_mapped_pages(txs, channel, ino)?,
    };
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        inode.flags &= !NEEDS_TRIM;
        inode.pages = pages;
        tx.put_inode(ino, &inode)
    })
}

/// Mapped pages of a file.
fn count_mapped_pages(txs: &TxManager, channel: &mut IoChannel, ino: Ino) -> Result<u64> {
    let pieces = txs.inspect(|core| {
        let inode = core.inode(ino)?;
        core.pieces(&inode, 0, usize::MAX)
    })?;
    let mut count = 0;
    for FileSpan { span, .. } in pieces {
        count += channel.count_mapped_pages(span.page..span.end())?;
    }
    Ok(count)
}

/// Releases an inode after its last use: frees it if it has no name, else writes its times.
pub(crate) fn release_if_unused(txs: &TxManager, ino: Ino) {
    release_if_unused_with(txs, ino, None);
}

/// As [`crate::file::free::release_if_unused`], with the caller's channel if it has one.
pub(crate) fn release_if_unused_with(
    txs: &TxManager,
    ino: Ino,
    mut channel: Option<&mut IoChannel>,
) {
    wait_for_removal(txs, ino);
    let live = {
        let mut core = txs.lock_core();
        if core.live_inodes.get(&ino).is_some_and(LiveInode::is_used) {
            return;
        }
        let is_orphan = core.is_orphan(ino).unwrap_or(false);
        if is_orphan && !core.freeing.insert(ino) {
            return;
        }
        if !is_orphan {
            drop(core);
            return flush_times_and_forget(txs, ino);
        }
        core.mmap_dirty.set(ino, 0);
        let live = core.live_inodes.remove(&ino);
        if !core.is_running() {
            // The next mount that takes changes frees it.
            core.freeing.remove(&ino);
            return;
        }
        live
    };
    // A thread may write through a descriptor that another thread closes.
    if let Some(live) = live {
        live.file_lock.block_direct_permanently();
    }
    let mut freed = Ok(true);
    while freed == Ok(true) {
        freed = free_orphan_piece(txs, ino, channel.as_deref_mut());
    }
    // The deferred list retries it; the caller gets no error.
    let _ = txs.defer_on_error(ino, freed);
}

/// Waits for the removal of an inode's last name if it is not committed: it may fail, and then the name stays. An
/// acknowledged removal cannot fail.
fn wait_for_removal(txs: &TxManager, ino: Ino) {
    let mut core = txs.lock_core();
    if core.has_unsettled_removal(ino) {
        // After an error the inode is looked at again.
        let _ = txs.commit_pending(core);
    }
}

/// Writes the pending times of an inode into it, and drops its state in memory.
fn flush_times_and_forget(txs: &TxManager, ino: Ino) {
    let data = {
        let core = txs.lock_core();
        core.live_inodes
            .get(&ino)
            .map(|live| Arc::clone(&live.file_lock))
    };
    if let Err(cause) = times::flush_times(txs, ino) {
        tracing::warn!(ino = ino.0, %cause, "the times of a file are lost");
    }
    if let Some(data) = data {
        forget::forget_with_times(txs, ino, &data);
    }
}

/// Releases an inode after its last pin. Frees it if it has no name. Pending times stay pending
/// ([`crate::file::times::flush_all_times`]): no request of a stateless server writes them.
pub(crate) fn release_unpinned(txs: &TxManager, ino: Ino, channel: Option<&mut IoChannel>) {
    let is_orphan = {
        let mut core = txs.lock_core();
        if core.live_inodes.get(&ino).is_none_or(LiveInode::is_used) {
            return;
        }
        core.is_orphan(ino).unwrap_or(false)
    };
    match is_orphan {
        true => release_if_unused_with(txs, ino, channel),
        false => forget::forget_without_times(txs, ino),
    }
}

/// Frees some of an orphan, and with the last piece its inode. A crash in between leaves an
/// orphan. Returns whether more is left. It keeps the inode if its removal has failed meanwhile.
pub(crate) fn free_orphan_piece(
    txs: &TxManager,
    ino: Ino,
    mut channel: Option<&mut IoChannel>,
) -> Result<bool> {
    let freed = txs.with_reserve_fallback(|| try_free_piece(txs, ino, channel.as_deref_mut()));
    if let Err(FsError::Posix(Errno::STALE)) = freed {
        txs.lock_core().freeing.remove(&ino);
        return Ok(false);
    }
    freed
}

fn try_free_piece(txs: &TxManager, ino: Ino, mut channel: Option<&mut IoChannel>) -> Result<bool> {
    txs.settle_unstable(ino)?;
    let (inode, pieces) = txs.inspect(|core| {
        let inode = core.inode(ino)?;
        let pieces = core.pieces(&inode, 0, SPANS_FREED_MAX)?;
        Ok((inode, pieces))
    })?;
    let shares = pieces.iter().any(|piece| piece.is_shared) || inode.spare_span.is_some();
    let goes_at_once = pieces.len() <= SPANS_WITH_INODE_MAX && !shares;
    let is_file = inode.kind() == InodeKind::File;
    let is_small = is_file && inode.is_dense() && inode.pages <= CLEARED_PAGES_MAX;
    if !goes_at_once {
        settle_removal(txs, ino)?;
        mark_for_trim(txs, ino, &inode)?;
        txs.channels.with_channel(channel, |channel| {
            share::free_spare(txs, channel, ino)?;
            trim_piece(txs, channel, ino)
        })?;
        return Ok(true);
    }
    if !is_small {
        settle_removal(txs, ino)?;
        txs.channels
            .with_channel(channel.as_deref_mut(), |channel| {
                discard_behind(txs, channel, pieces.iter(), 0)
            })?;
    }
    let log = inode.redo_log;
    let free = |tx: &mut Tx<'_>| {
        let mut inode = orphan(tx, ino)?;
        for &FileSpan {
            first_page: at,
            span,
            ..
        } in &pieces
        {
            if is_small {
                let mapped = inode.pages.saturating_sub(at).min(1 << span.order);
                (0..mapped).for_each(|page| tx.clear(span.page + page));
            }
            map_update::remove(tx, &mut inode, at)?;
            tx.free_span(span);
        }
        clear_xattrs(tx, &mut inode);
        tx.put_inode(ino, &Inode::free(inode.generation))?;
        tx.free_ino(ino);
        Ok(())
    };
    match is_small {
        true => txs.change_deferrable(free)?,
        false => txs.change(free)?,
    }
    if let Some(log) = log {
        redo_log::drop_log(txs, log, channel);
    }
    Ok(false)
}

/// An inode that is to be freed.
///
/// # Errors
/// ESTALE if it has a name again: its removal has failed meanwhile.
fn orphan(tx: &mut Tx<'_>, ino: Ino) -> Result<Inode> {
    let inode = tx.inode(ino)?;
    match inode.links {
        0 => Ok(inode),
        _ => Err(Errno::STALE.into()),
    }
}

/// Marks an orphan, so that its pieces can be freed one by one.
fn mark_for_trim(txs: &TxManager, ino: Ino, inode: &Inode) -> Result<()> {
    if inode.size == 0 && inode.flags == NEEDS_TRIM && inode.append_extent.is_none() {
        return Ok(());
    }
    txs.change(|tx| {
        let mut inode = orphan(tx, ino)?;
        inode.size = 0;
        inode.flags = NEEDS_TRIM;
        inode.append_extent = None;
        tx.put_inode(ino, &inode)
    })
}

/// Commits the removal of an orphan's last name, before its pages are discarded: a crash could bring the name back.
fn settle_removal(txs: &TxManager, ino: Ino) -> Result<()> {
    match defect::is(Defect::DiscardBeforeRemoval) {
        true => Ok(()),
        false => txs.settle(ino),
    }
}
