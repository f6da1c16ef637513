//! Redo logs: atomic writes of more pages than one transaction can hold.
//!
//! The pages are written to a file without a name first: the log. The transaction by which the
//! inode of their own file names the log commits all of them. Then they are copied into the file,
//! again after each crash, and the log is freed.
//!
//! - A file that names a log is not changed by other operations, and not read without the log's
//!   pages, until the log was applied.
//! - A crash leaves a log that is named, and applied at the next mount, or one that is not named,
//!   and freed like any file without a name.

use crate::direct::append;
use crate::error::{Corruption, FsError, Result};
use crate::file::extents::{ATOMIC_PAGES_MAX, NumberedPages, page_runs};
use crate::file::stored_pages::read_with_mmap_dirty;
use crate::file::{creation, extend, extents, free};
use crate::format::inode::{Ino, Inode, InodeKind, damaged_inode};
use crate::format::redo_log::{PAGES_AT, RedoLogHead, head_bytes};
use crate::format::{PAGE, Page, page_count};
use crate::io::channel::IoChannel;
use crate::live::mmap_dirty::MMAP_DIRTY_PAGES_MAX;
use crate::tree::new_inode::Credentials;
use crate::txn::manager::TxManager;
use bytes::Bytes;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::sync::Arc;

/// Most pages of a log: more than are buffered of one file.
const LOG_PAGES_MAX: u64 = 2 * MMAP_DIRTY_PAGES_MAX;
/// Bytes that are written to a log by one call.
const STEP_BYTES: usize = 1 << 20;

/// Writes pages into a file through a log. The caller holds the file exclusively, and the pages
/// have spans of the file's own.
pub(crate) fn write_through(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pages: &NumberedPages,
) -> Result<()> {
    if pages.len() as u64 > LOG_PAGES_MAX {
        // A named log of this length would count as damaged.
        return Err(Errno::NOSPC.into());
    }
    // Allocates the pages first: applying a named log must need no more room.
    fill_holes(txs, channel, ino, pages)?;
    let log = creation::create_internal(txs, 0o600, Credentials { uid: 0, gid: 0 })?;
    let log = log.ino;
    txs.lock_core().redo_logs.insert(log);
    let named =
        write_log(txs, channel, ino, log, pages).and_then(|()| set_log(txs, ino, Some(log)));
    if let Err(error) = named {
        drop_log(txs, log, Some(channel));
        return Err(error);
    }
    apply(txs, channel, ino)
}

/// Makes a file name this log, or none.
fn set_log(txs: &TxManager, ino: Ino, log: Option<Ino>) -> Result<()> {
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        inode.redo_log = log;
        tx.make_durable();
        tx.put_inode(ino, &inode)
    })
}

/// Maps all of these pages; fills holes with zeroes.
fn fill_holes(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pages: &NumberedPages,
) -> Result<()> {
    let zeroes = Arc::new([0; PAGE_BYTES]);
    for pages in pages.chunks(ATOMIC_PAGES_MAX as usize) {
        let holes = extents::holes_in_ranges(txs, channel, ino, page_runs(pages))?;
        let holes = holes.into_iter().map(|page| (page, Arc::clone(&zeroes)));
        let holes: Vec<(u64, Arc<Page>)> = holes.collect();
        if !holes.is_empty() {
            extents::write_pages_atomic(txs, channel, ino, &holes)?;
        }
    }
    Ok(())
}

fn write_log(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    log: Ino,
    pages: &NumberedPages,
) -> Result<()> {
    let generation = txs.inspect(|core| core.inode(ino))?.generation;
    let head = RedoLogHead {
        ino,
        generation: u64::from(generation),
        count: pages.len() as u64,
    };
    let mut bytes = head.encode(pages.iter().map(|&(page, _)| page));
    let lock = txs.file_lock(log)?;
    let mut at = 0;
    let mut write = |bytes: &mut Vec<u8>| {
        let data = Bytes::from(std::mem::take(bytes));
        let _alone = txs.lock_exclusive(log, &lock)?;
        let written = extend::extend_locked(txs, channel, log, at, &data, false, &mut ())?;
        at += data.len() as u64;
        if written.end == at {
            Ok(())
        } else {
            Err(FsError::Posix(Errno::NOSPC))
        }
    };
    for (_, page) in pages {
        if bytes.len() >= STEP_BYTES {
            write(&mut bytes)?;
        }
        bytes.extend_from_slice(&page[..]);
    }
    // Each write is a transaction, and precedes the one that names the log.
    write(&mut bytes)
}

/// Publishes the size that direct clients left, and applies a redo log, before another change
/// of the file. The caller holds it exclusively.
pub(crate) fn complete_pending(txs: &TxManager, channel: &mut IoChannel, ino: Ino) -> Result<()> {
    append::publish_size(txs, ino)?;
    apply(txs, channel, ino)
}

/// Copies the pages of the log that a file names, if it names one. The caller holds the file
/// exclusively.
pub(crate) fn apply(txs: &TxManager, channel: &mut IoChannel, ino: Ino) -> Result<()> {
    let inode = txs.inspect(|core| core.inode(ino))?;
    let Some(log) = inode.redo_log else {
        return Ok(());
    };
    let copied = copy_log(txs, channel, ino, &inode, log);
    txs.lock_core().stop_if_damaged(&copied);
    copied
}

fn copy_log(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    inode: &Inode,
    log: Ino,
) -> Result<()> {
    let is_log = |inode: &Inode| inode.kind() == InodeKind::File && inode.links == 0;
    let found = txs.inspect(|core| core.inode(log))?;
    if !is_log(&found) || found.redo_log.is_some() {
        return Err(invalid_log(log, "it is none"));
    }
    let numbers = log_pages(txs, channel, log, (ino, inode.generation))?;
    txs.with_reserve_fallback(|| extents::ensure_spans(txs, ino, numbers.iter().copied()))?;
    let mut at = head_bytes(numbers.len() as u64);
    for numbers in numbers.chunks(ATOMIC_PAGES_MAX as usize) {
        let len = numbers.len() * PAGE_BYTES;
        let bytes = read_log(txs, channel, log, at, len as u32)?;
        let (read, _) = bytes.as_chunks::<PAGE_BYTES>();
        if read.len() < numbers.len() {
            return Err(invalid_log(log, "it is cut short"));
        }
        let pages = numbers.iter().copied();
        let pages: Vec<(u64, Arc<Page>)> =
            pages.zip(read.iter().map(|&page| Arc::new(page))).collect();
        txs.with_reserve_fallback(|| extents::write_pages_atomic(txs, channel, ino, &pages))?;
        at += len as u64;
    }
    txs.with_reserve_fallback(|| set_log(txs, ino, None))?;
    drop_log(txs, log, Some(channel));
    Ok(())
}

/// Reads bytes of a log.
fn read_log(
    txs: &TxManager,
    channel: &mut IoChannel,
    log: Ino,
    offset: u64,
    len: u32,
) -> Result<Vec<u8>> {
    let lock = txs.file_lock(log)?;
    let _shared = txs.lock_shared(log, &lock)?;
    let bytes = read_with_mmap_dirty(txs, channel, log, &lock, offset, len)?;
    Ok(bytes.unwrap_or_default())
}

/// The page numbers in a log for a file of this generation.
fn log_pages(
    txs: &TxManager,
    channel: &mut IoChannel,
    log: Ino,
    (ino, generation): (Ino, u32),
) -> Result<Vec<u64>> {
    let head = read_log(txs, channel, log, 0, PAGE_BYTES as u32)?;
    let head = RedoLogHead::decode(&head);
    let head = head.ok_or_else(|| invalid_log(log, "it does not begin like one"))?;
    let is_its = head.ino == ino && head.generation == u64::from(generation);
    let count = head.count;
    let size = txs.inspect(|core| core.inode(log))?.size;
    let is_long = count <= LOG_PAGES_MAX && head_bytes(count) + count * PAGE <= size;
    if !is_its || !is_long {
        return Err(invalid_log(log, "it is of another file, or cut short"));
    }
    let len = (head_bytes(count) - PAGES_AT as u64) as u32;
    let numbers = read_log(txs, channel, log, PAGES_AT as u64, len)?;
    let numbers = numbers.as_chunks().0.iter().take(count as usize);
    let numbers: Vec<u64> = numbers.map(|number| u64::from_le_bytes(*number)).collect();
    let end = page_count(txs.inspect(|core| core.inode(ino))?.size);
    let is_sound = numbers.is_sorted_by(|one, next| one < next)
        && numbers.last().is_none_or(|&last| last < end);
    if is_sound {
        Ok(numbers)
    } else {
        Err(invalid_log(
            log,
            "it names pages that the file does not have",
        ))
    }
}

/// Frees a log that no file names.
pub(crate) fn drop_log(txs: &TxManager, log: Ino, channel: Option<&mut IoChannel>) {
    let mut core = txs.lock_core();
    // A log from before a failed mount is freed as an orphan, and its number may be reused.
    if !core.redo_logs.remove(&log) {
        return;
    }
    // No other caller had it open.
    let live = core.live_inode(log);
    (live.opens, live.lookups) = (0, 0);
    drop(core);
    free::release_if_unused_with(txs, log, channel);
}

fn invalid_log(log: Ino, why: &str) -> FsError {
    damaged_inode(
        log,
        Corruption(format!("it is named as a redo log, and {why}")),
    )
}
