//! Copies between files. Whole spans become shared where source and target are aligned alike.

use crate::direct::append;
use crate::error::Result;
use crate::file::stored_pages::ReadTime;
use crate::file::{privileges, read, redo_log, share, write};
use crate::format::inode::{FILE_BYTES_MAX, HAS_RESERVED_PAGES, Ino, NEEDS_TRIM};
use crate::format::page_map::{FileSpan, SMALL_PAGES, SpanRef};
use crate::format::{PAGE, page_map};
use crate::io::channel::IoChannel;
use crate::live::file_lock::FileLock;
use crate::live::kernel_pages::{KernelPages, WritePath};
use crate::tree::map_update;
use crate::txn::manager::TxManager;
use bytes::Bytes;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;

/// Spans that become shared in one transaction: each may have its entry in a map page of its own in
/// both files.
const SHARED_SPANS_MAX: usize = 16;
/// Bytes that are read and written at once.
const STEP: u64 = 1 << 20;
/// Copied bytes are not durable yet, and the kernel's pages do not have them.
const COPY_PATH: (bool, WritePath) = (false, WritePath::Copy);
const CHUNK_BYTES: u64 = SMALL_PAGES * PAGE;

/// Spans of a file that another file can share.
struct ShareableSpans {
    /// Spans of the source, their first page in the target, and their mapped pages.
    spans: Vec<(FileSpan, u64, u64)>,
    bytes: u64,
}

/// Whether spans that begin at these pages of two files have one length.
fn are_same_length(one: u64, other: u64) -> bool {
    page_map::is_span_start(one)
        && page_map::is_span_start(other)
        && page_map::pages_to_next_span(one) == page_map::pages_to_next_span(other)
}

/// Bytes to the next offset from which two files may share spans; `None` if their alignment
/// differs.
fn bytes_to_shareable(source: u64, target: u64) -> Option<u64> {
    if source == target {
        let page = source.checked_next_multiple_of(PAGE)? / PAGE;
        let start = if page_map::is_span_start(page) {
            page
        } else {
            page + page_map::pages_to_next_span(page)
        };
        return Some(start * PAGE - source);
    }
    // Chunks alone are all of one length.
    let lower = source.min(target);
    let is_alike = source.abs_diff(target).is_multiple_of(CHUNK_BYTES);
    let chunk = lower
        .checked_next_multiple_of(CHUNK_BYTES)?
        .max(CHUNK_BYTES);
    is_alike.then(|| chunk - lower)
}

/// The page up to which a list of at most `SHARED_SPANS_MAX` spans is complete.
fn complete_up_to(pieces: &[FileSpan]) -> u64 {
    let last = pieces.last().filter(|_| pieces.len() == SHARED_SPANS_MAX);
    last.map_or(u64::MAX, FileSpan::end)
}

/// See [`crate::Fs::copy`].
pub(crate) fn copy(
    txs: &TxManager,
    channel: &mut IoChannel,
    (from, mut source): (Ino, u64),
    (to, mut target): (Ino, u64),
    len: u64,
) -> Result<u64> {
    let is_apart = from != to || source.abs_diff(target) >= len;
    if !is_apart {
        return Err(Errno::INVAL.into());
    }
    // The size before the copy: bytes copied to the same file do not extend the source.
    let size = txs.inspect(|core| {
        let inode = core.regular_file(from)?;
        append::file_end(core, from, &inode)
    })?;
    let len = len.min(size.saturating_sub(source));
    if len > 0 {
        prepare_target(txs, to, target..target.saturating_add(len))?;
    }
    let fits = target
        .checked_add(len)
        .is_some_and(|end| end <= FILE_BYTES_MAX);
    let mut copied = 0;
    while copied < len {
        let to_alike = bytes_to_shareable(source, target);
        let shared = match to_alike {
            Some(0) if fits => {
                share_spans(txs, channel, (from, source), (to, target), len - copied)
            }
            _ => Ok(0),
        };
        match shared {
            Ok(0) => {}
            Err(_) if copied > 0 => break,
            shared => {
                let step = shared?;
                source += step;
                target += step;
                copied += step;
                continue;
            }
        }
        let apart = to_alike.filter(|&apart| apart > 0).unwrap_or(STEP);
        let step = STEP.min(len - copied).min(apart);
        let bytes = Bytes::from(read::read(
            txs,
            channel,
            from,
            (source, step as u32),
            ReadTime::Recorded,
        )?);
        if bytes.is_empty() {
            break;
        }
        match write::write(txs, channel, to, Some(target), &bytes, COPY_PATH) {
            Err(_) if copied > 0 => break,
            written => written?,
        };
        let step = bytes.len() as u64;
        source += step;
        target += step;
        copied += step;
    }
    Ok(copied)
}

/// Prepares the target of a copy. It refuses a part of a page that the kernel may have: after a copy the kernel
/// drops the whole pages, with the bytes that programs store into the rest of them meanwhile. A
/// refused copy is done by reads and writes.
fn prepare_target(txs: &TxManager, to: Ino, target: Range<u64>) -> Result<()> {
    let lock = txs.file_lock(to)?;
    let _alone = txs.lock_exclusive(to, &lock)?;
    let size = txs.inspect(|core| core.regular_file(to))?.size;
    let is_whole_pages = target.start.is_multiple_of(PAGE)
        && (target.end.is_multiple_of(PAGE) || target.end >= size);
    let pages = lock.used_kernel_pages();
    if pages.is_some_and(KernelPages::has_pages) && !is_whole_pages {
        return Err(Errno::OPNOTSUPP.into());
    }
    privileges::drop_capabilities(txs, to)
}

/// Shares whole spans of one file with another, from these offsets on. Returns the number of
/// bytes shared: 0 if the first spans differ in alignment, are needed only in part, or the
/// target has a span there.
fn share_spans(
    txs: &TxManager,
    channel: &mut IoChannel,
    (from, source): (Ino, u64),
    (to, target): (Ino, u64),
    len: u64,
) -> Result<u64> {
    let (first, second) = (from.min(to), from.max(to));
    let first_lock = txs.file_lock(first)?;
    let _first = txs.lock_exclusive(first, &first_lock)?;
    let second_lock = (first != second).then(|| txs.file_lock(second));
    let second_lock = second_lock.transpose()?;
    let _second = second_lock
        .as_ref()
        .map(|lock| txs.lock_exclusive(second, lock))
        .transpose()?;
    redo_log::complete_pending(txs, channel, first)?;
    redo_log::complete_pending(txs, channel, second)?;
    let has_held = |lock: &Arc<FileLock>| lock.has_mmap_dirty();
    if has_held(&first_lock) || second_lock.as_ref().is_some_and(has_held) {
        return Ok(0);
    }
    let alike = shareable_spans(txs, channel, (from, source), (to, target), len)?;
    let now = txs.now();
    if alike.bytes == 0 {
        return Ok(0);
    }
    txs.change(|tx| {
        let mut inode = tx.inode(from)?;
        let unshared = alike.spans.iter().filter(|(piece, ..)| !piece.is_shared);
        for (piece, ..) in unshared {
            let span = SpanRef::shared(piece.span.page);
            map_update::put(tx, &mut inode, piece.first_page, span)?;
            tx.add_sharers(piece.span, 1);
        }
        tx.put_inode(from, &inode)?;
        let mut inode = tx.inode(to)?;
        for (FileSpan { span, .. }, at, mapped) in &alike.spans {
            map_update::put(tx, &mut inode, *at, SpanRef::shared(span.page))?;
            tx.add_sharers(*span, 1);
            inode.pages += mapped;
            tx.count_pages(-mapped.cast_signed());
        }
        inode.size = inode.size.max(target + alike.bytes);
        inode.touch_content(now);
        tx.put_inode(to, &inode)
    })?;
    let of_second = second_lock.as_ref().filter(|_| to == second);
    let lock = of_second.unwrap_or(&first_lock);
    lock.kernel_pages()
        .record_change(target..target + alike.bytes);
    Ok(alike.bytes)
}

fn shareable_spans(
    txs: &TxManager,
    channel: &mut IoChannel,
    (from, source): (Ino, u64),
    (to, target): (Ino, u64),
    len: u64,
) -> Result<ShareableSpans> {
    let now = txs.now();
    let (source_inode, target_inode, of_source, of_target) = txs.inspect(|core| {
        core.check_running()?;
        let (one, other) = (core.regular_file(from)?, core.regular_file(to)?);
        let of_source = core.pieces(&one, source / PAGE, SHARED_SPANS_MAX)?;
        let of_target = core.pieces(&other, target / PAGE, SHARED_SPANS_MAX)?;
        core.record_read_time(from, &one, now);
        Ok((one, other, of_source, of_target))
    })?;
    let mut alike = ShareableSpans {
        spans: Vec::new(),
        bytes: 0,
    };
    let is_settled =
        (source_inode.flags | target_inode.flags) & (HAS_RESERVED_PAGES | NEEDS_TRIM) == 0;
    let end = source_inode
        .size
        .min(source.saturating_add(len))
        .max(source);
    // Behind the end the span holds no data.
    let is_end = end == source_inode.size;
    while is_settled && source + alike.bytes < end {
        let at = (source + alike.bytes) / PAGE;
        let to_at = (target + alike.bytes) / PAGE;
        let span_end = (at + page_map::pages_to_next_span(at)) * PAGE;
        let is_known = at < complete_up_to(&of_source) && to_at < complete_up_to(&of_target);
        let is_taken = of_target.iter().any(|piece| piece.first_page == to_at);
        let is_whole = span_end <= end || is_end;
        if !are_same_length(at, to_at) || !is_known || is_taken || !is_whole {
            break;
        }
        let piece = of_source.iter().find(|piece| piece.first_page == at);
        if let Some(piece) = piece {
            let mapped = share::mapped_pages_of(channel, &source_inode, piece)?;
            alike.spans.push((*piece, to_at, mapped));
        }
        alike.bytes = span_end.min(end) - source;
    }
    Ok(alike)
}
