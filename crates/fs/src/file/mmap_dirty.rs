//! Pages that programs changed through memory mappings, buffered until they are synced (RFD 019).
//!
//! The kernel writes the dirty pages of a mapping back one by one, at times of its own choice. This
//! module buffers them until the file is synced, and then writes them as one change: after a crash
//! all of them are in the file, or none.
//!
//! - A read overlays the buffered pages on the file. A write goes to the file's pages at once, and
//!   into the buffered copies of them. A page that the kernel read before such a write may still come
//!   back afterwards; then it does not change the written bytes ([`crate::file::kernel_pages`]).
//! - All buffered pages of a file are flushed together: by a sync, by the last close, or when they
//!   are too old or too many.
//! - A file with buffered pages has no direct clients, and none of its spans becomes shared.

use crate::direct::publish;
use crate::error::{FsError, Result};
use crate::file::extents::{ATOMIC_PAGES_MAX, page_runs};
use crate::file::stored_pages::read_with_mmap_dirty;
use crate::file::{extents, lifetime, redo_log, share};
use crate::format::inode::{FILE_BYTES_MAX, Ino, Time};
use crate::format::{PAGE, Page, page_count};
use crate::io::channel::IoChannel;
use crate::live::file_lock::FileLock;
use crate::live::kernel_hooks::KernelHooks;
use crate::live::mmap_dirty::{
    MMAP_DIRTY_PAGES_HARD_MAX, MMAP_DIRTY_PAGES_MAX, MMAP_DIRTY_SECONDS_MAX,
};
use crate::txn::manager::TxManager;
use bytes::Bytes;
use pagemesh_base::space::SpaceError;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;

const ATOMIC_PAGES: usize = ATOMIC_PAGES_MAX as usize;

/// Whether a flush must be atomic.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlushMode {
    Atomic,
    /// In pieces if there is no room for all at once.
    Piecewise,
}

/// See [`crate::Fs::buffer_mmap_write`].
pub(crate) fn buffer_write(
    txs: &TxManager,
    hooks: &KernelHooks,
    channel: &mut IoChannel,
    ino: Ino,
    offset: u64,
    data: &Bytes,
) -> Result<()> {
    let lock = txs.file_lock(ino)?;
    let held = buffer_write_locked(txs, hooks, channel, ino, &lock, offset, data);
    if let Err(cause) = &held {
        tracing::error!(ino = ino.0, %cause, "pages of a mapped file are lost");
        lock.lock_mmap_dirty().has_lost_pages = true;
    }
    held
}

fn buffer_write_locked(
    txs: &TxManager,
    hooks: &KernelHooks,
    channel: &mut IoChannel,
    ino: Ino,
    lock: &FileLock,
    offset: u64,
    data: &Bytes,
) -> Result<()> {
    if !lock.is_mmapped() {
        publish::disable_direct_access(txs, ino)?;
    }
    limit_pages(txs, channel, ino, page_count(data.len() as u64) + 1)?;
    let _alone = txs.lock_exclusive(ino, lock)?;
    // The end may be unpublished since direct access was disabled, for lack of room.
    txs.with_reserve_fallback(|| redo_log::complete_pending(txs, channel, ino))?;
    let now = txs.now();
    let size = txs.inspect(|core| {
        core.check_running()?;
        let inode = core.regular_file(ino)?;
        core.record_write_time(ino, inode.change_time(now));
        Ok(inode.size)
    })?;
    let end = (offset + data.len() as u64).min(size);
    let mut at = offset;
    let mut pages = Vec::new();
    while at < end {
        let page = at / PAGE;
        let (first, last) = (page * PAGE, ((page + 1) * PAGE).min(size));
        let to = end.min(last);
        let is_whole = at == first && to == last;
        let mut bytes = if is_whole {
            Box::new([0; PAGE_BYTES])
        } else {
            visible_page(txs, channel, ino, lock, page)?
        };
        let part = &data[(at - offset) as usize..(to - offset) as usize];
        bytes[(at - first) as usize..(to - first) as usize].copy_from_slice(part);
        for kept in lock.kernel_pages().changed_parts(&(at..to)) {
            let present = visible_page(txs, channel, ino, lock, page)?;
            let within = (kept.start - first) as usize..(kept.end - first) as usize;
            bytes[within.clone()].copy_from_slice(&present[within]);
        }
        pages.push((page, Arc::from(bytes)));
        at = last;
    }
    let is_first = !lock.has_mmap_dirty();
    for (page, bytes) in pages {
        lock.lock_mmap_dirty().put(page, bytes, now);
    }
    update_count(txs, ino, lock);
    if is_first && lock.has_mmap_dirty() {
        hooks.notify_uncacheable(ino);
    }
    Ok(())
}

/// Fails if pages stored into mappings of the file were refused.
pub(crate) fn check_lost_pages(txs: &TxManager, ino: Ino) -> Result<()> {
    let core = txs.lock_core();
    let live = core.live_inodes.get(&ino);
    let held = live.and_then(|live| live.file_lock.lock_known_mmap_dirty());
    if held.is_some_and(|held| held.has_lost_pages) {
        Err(Errno::IO.into())
    } else {
        Ok(())
    }
}

/// A page of a file as a reader sees it. The caller holds the file.
fn visible_page(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    data: &FileLock,
    page: u64,
) -> Result<Box<Page>> {
    let mut bytes = Box::new([0; PAGE_BYTES]);
    let read = read_with_mmap_dirty(txs, channel, ino, data, page * PAGE, PAGE_BYTES as u32)?;
    let read = read.unwrap_or_default();
    bytes[..read.len()].copy_from_slice(&read);
    Ok(bytes)
}

fn update_count(txs: &TxManager, ino: Ino, data: &FileLock) {
    let mut core = txs.lock_core();
    let pages = data.lock_mmap_dirty().pages.len() as u64;
    core.mmap_dirty.set(ino, pages);
}

/// Flushes the files with the most buffered pages until `pages` more fit. Pages that cannot be
/// flushed stay buffered up to a hard limit. Beyond that limit only files that cannot be
/// flushed themselves are refused.
fn limit_pages(txs: &TxManager, channel: &mut IoChannel, ino: Ino, pages: u64) -> Result<()> {
    let has_room = |most| txs.lock_core().mmap_dirty.total_pages + pages <= most;
    if has_room(MMAP_DIRTY_PAGES_MAX) {
        return Ok(());
    }
    let files = txs.lock_core().mmap_dirty.by_pages();
    let mut own = Ok(());
    for file in files {
        tracing::debug!(
            ino = file.0,
            "a file is flushed before a sync: too many pages are buffered"
        );
        let put = flush_pinned(txs, channel, file);
        if has_room(MMAP_DIRTY_PAGES_MAX) {
            return Ok(());
        }
        if file == ino {
            own = put;
        }
    }
    if has_room(MMAP_DIRTY_PAGES_HARD_MAX) {
        Ok(())
    } else {
        own
    }
}

/// Flushes a file that may be unused by now. It is opened meanwhile, so that its number is not
/// reused. Without room for all pages at once they go in pieces, because this is not a sync.
fn flush_pinned(txs: &TxManager, channel: &mut IoChannel, ino: Ino) -> Result<()> {
    match lifetime::open(txs, ino) {
        Err(FsError::Posix(Errno::STALE)) => return Ok(()),
        opened => opened?,
    };
    let put = flush(txs, channel, ino, FlushMode::Piecewise);
    lifetime::release_with(txs, ino, Some(channel));
    put
}

/// Drops the buffered bytes of this range. The caller holds the file exclusively.
pub(crate) fn discard(txs: &TxManager, ino: Ino, data: &FileLock, bytes: Range<u64>) {
    if data.has_mmap_dirty() {
        data.lock_mmap_dirty().discard_range(bytes);
        update_count(txs, ino, data);
    }
}

/// Writes all buffered pages of a file into it. With [`FlushMode::Atomic`] a crash leaves all
/// of them or none.
///
/// # Errors
/// Errors of the volume. The pages stay buffered then.
pub(crate) fn flush(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    how: FlushMode,
) -> Result<()> {
    let data = {
        let mut core = txs.lock_core();
        let live = core.live_inodes.get(&ino);
        let data = live.map(|live| Arc::clone(&live.file_lock));
        let Some(data) = data.filter(|data| data.has_mmap_dirty()) else {
            core.mmap_dirty.set(ino, 0);
            return Ok(());
        };
        data
    };
    let _alone = txs.lock_exclusive(ino, &data)?;
    flush_locked(txs, channel, ino, &data, how)
}

fn flush_locked(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    data: &FileLock,
    how: FlushMode,
) -> Result<()> {
    redo_log::complete_pending(txs, channel, ino)?;
    let end = page_count(txs.inspect(|core| core.regular_file(ino))?.size);
    let pages: Vec<(u64, Arc<Page>)> = {
        let held = data.lock_mmap_dirty();
        let within = held.pages.range(..end);
        within
            .map(|(&page, bytes)| (page, Arc::clone(bytes)))
            .collect()
    };
    for run in page_runs(&pages) {
        share::unshare(txs, channel, ino, run)?;
    }
    extents::ensure_spans(txs, ino, pages.iter().map(|&(page, _)| page))?;
    let put = if pages.len() <= ATOMIC_PAGES {
        extents::write_pages_atomic(txs, channel, ino, &pages)
    } else {
        redo_log::write_through(txs, channel, ino, &pages)
    };
    match put {
        Err(error) if how == FlushMode::Piecewise && error.errno() == Errno::NOSPC => {
            // A log that the file names already must be applied before.
            redo_log::apply(txs, channel, ino)?;
            pages
                .chunks(ATOMIC_PAGES)
                .try_for_each(|pages| extents::write_pages_atomic(txs, channel, ino, pages))?;
        }
        put => put?,
    }
    data.lock_mmap_dirty().mark_clean();
    txs.lock_core().mmap_dirty.set(ino, 0);
    Ok(())
}

/// Flushes all files; returns the first error.
pub(crate) fn flush_all(txs: &TxManager, channel: &mut IoChannel) -> Result<()> {
    let all = txs.lock_core().mmap_dirty.by_pages();
    flush_files(txs, channel, all)
}

fn flush_files(txs: &TxManager, channel: &mut IoChannel, files: Vec<Ino>) -> Result<()> {
    let put = files.into_iter().map(|ino| flush_pinned(txs, channel, ino));
    put.fold(Ok(()), Result::and)
}

/// See [`crate::Fs::flush_old_mmap_dirty`].
pub(crate) fn flush_old(txs: &TxManager) -> Result<()> {
    let now = txs.now();
    // A clock may be set back.
    let is_old = |since: Time| now.sec - since.sec >= MMAP_DIRTY_SECONDS_MAX || now.sec < since.sec;
    let (kept, old) = {
        let core = txs.lock_core();
        let kept = core.mmap_dirty.kept_open.clone();
        let since = |ino: &Ino| {
            core.live_inodes
                .get(ino)?
                .file_lock
                .lock_known_mmap_dirty()?
                .dirty_since
        };
        let others = core
            .mmap_dirty
            .pages
            .keys()
            .filter(|ino| !kept.contains(ino));
        let old = others.filter(|ino| since(ino).is_some_and(is_old));
        let old: Vec<Ino> = old.copied().collect();
        (kept, old)
    };
    if kept.is_empty() && old.is_empty() {
        return Ok(());
    }
    let mut channel = txs.channels.borrow()?;
    // Closing may keep the file open again.
    for ino in kept {
        txs.lock_core().mmap_dirty.kept_open.remove(&ino);
        lifetime::release_with(txs, ino, Some(&mut channel));
    }
    flush_files(txs, &mut channel, old)
}

/// Flushes a file before its last close, unless the file has no name. If no copy of the volume
/// is reachable, the file is kept open until one is. Returns whether the caller should check
/// the file again.
pub(crate) fn flush_at_close(txs: &TxManager, ino: Ino, channel: Option<&mut IoChannel>) -> bool {
    let inode = txs.inspect(|core| core.inode(ino));
    if inode.is_ok_and(|inode| inode.links == 0) {
        return false;
    }
    let put = txs.channels.with_channel(channel, |channel| {
        flush(txs, channel, ino, FlushMode::Piecewise)
    });
    let Err(cause) = put else { return true };
    let data = {
        let mut core = txs.lock_core();
        let core = &mut *core;
        let live = core
            .live_inodes
            .get_mut(&ino)
            .filter(|live| live.opens <= 1);
        if let Some(live) = live
            && is_transient(&cause)
        {
            tracing::warn!(ino = ino.0, %cause, "pages of a mapped file wait for the volume");
            live.opens += 1;
            core.mmap_dirty.kept_open.insert(ino);
            return false;
        }
        let live = core.live_inodes.get(&ino).filter(|live| live.opens <= 1);
        live.map(|live| Arc::clone(&live.file_lock))
    };
    if let Some(data) = data {
        tracing::error!(
            ino = ino.0, %cause,
            "unsynced pages of a mapped file are lost"
        );
        let _alone = data.write();
        discard(txs, ino, &data, 0..FILE_BYTES_MAX);
    }
    false
}

/// Whether the operation may succeed later without any action.
fn is_transient(cause: &FsError) -> bool {
    matches!(
        cause,
        FsError::Space(SpaceError::Unavailable(_) | SpaceError::Busy(_))
    )
}
