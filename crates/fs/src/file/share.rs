//! Spans that several files name. A copy of whole spans copies no bytes; a file gets a span of its
//! own before a shared one is changed.
//!
//! - A span is not changed or freed while a place that names it marks it as shared. The last place
//!   that names it may clear the mark.
//! - [`ShareCounts`] holds the number of places per span in memory, from the mount on.
//! - A file gets a span of its own in three steps. Its inode names a **spare** span; the pages are
//!   copied; the spare replaces the shared span. The last step is durable, because other files may
//!   change the shared span in place from then on. A crash leaves a spare, which is freed later
//!   ([`crate::file::deferred_free`]).
//! - Pages of a shared span count once for the file system, and once for each file in its inode.

use crate::Fs;
use crate::alloc::spans::Span;
use crate::direct::shared_file_map::FileLock;
use crate::error::Result;
use crate::format::inode::{HAS_RESERVED_PAGES, Ino, Inode, NEEDS_TRIM, SMALL_PAGES, SpanRef};
use crate::hash::NumberMap;
use crate::io::channel::{IoChannel, unexpected_reply};
use crate::tree::page_map::{self as map, FileSpan};
use crate::txn::core::Core;
use bytes::Bytes;
use pagemesh_base::space::{Reply, Request};
use pagemesh_base::units::PAGE_BYTES;
use std::ops::Range;
use std::sync::Arc;

const PAGE: u64 = PAGE_BYTES as u64;
/// Spans that become shared in one transaction: each may have its entry in a map page of its own in
/// both files.
const SHARED_SPANS_MAX: usize = 16;
/// Pages of a span that are copied with one request.
const COPIED_PAGES_MAX: usize = 256;
const CHUNK_BYTES: u64 = SMALL_PAGES * PAGE;

/// Number of places that name a span as shared, by its first page.
#[derive(Debug, Default)]
pub(crate) struct ShareCounts(NumberMap<u64, i64>);

impl ShareCounts {
    pub(crate) fn new(shares: impl Iterator<Item = (u64, i64)>) -> ShareCounts {
        ShareCounts(shares.collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Additions and their undoing may come in any order.
    pub(crate) fn add(&mut self, page: u64, places: i64) {
        let count = self.0.entry(page).or_default();
        *count += places;
        if *count == 0 {
            self.0.remove(&page);
        }
    }

    pub(crate) fn count(&self, page: u64) -> i64 {
        self.0.get(&page).copied().unwrap_or(0)
    }
}

/// Spans of a file that another file can share.
struct ShareableSpans {
    /// Spans of the source, their first page in the target, and their mapped pages.
    spans: Vec<(FileSpan, u64, u64)>,
    bytes: u64,
}

/// Whether spans that begin at these pages of two files have one length.
fn are_same_length(one: u64, other: u64) -> bool {
    map::is_span_start(one)
        && map::is_span_start(other)
        && map::pages_to_next_span(one) == map::pages_to_next_span(other)
}

/// Bytes to the next offset from which two files may share spans; `None` if their alignment
/// differs.
pub(crate) fn bytes_to_shareable(source: u64, target: u64) -> Option<u64> {
    if source == target {
        let page = source.checked_next_multiple_of(PAGE)? / PAGE;
        let start = match map::is_span_start(page) {
            true => page,
            false => page + map::pages_to_next_span(page),
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

/// Copies the mapped pages of a span and makes the copy durable. Returns the number of pages.
fn copy_span(channel: &mut IoChannel, from: Span, to: Span) -> Result<u64> {
    let mut runs = Vec::new();
    channel.for_each_mapped_run(from.page..from.end(), |run| {
        let pages = run.end - run.start;
        for at in (0..pages).step_by(COPIED_PAGES_MAX) {
            let len = (pages - at).min(COPIED_PAGES_MAX as u64);
            runs.push((run.start + at, len));
        }
    })?;
    let reads = runs.iter().map(|&(page, len)| Request::Read {
        offset: page * PAGE,
        len: (len * PAGE) as u32,
    });
    let replies = channel.call_all(reads)?;
    let mut writes = Vec::new();
    for ((page, len), reply) in runs.iter().zip(replies) {
        match reply {
            Reply::Data(bytes) if bytes.len() as u64 == len * PAGE => writes.push(Request::Write {
                offset: (to.page + page - from.page) * PAGE,
                data: Bytes::from(bytes),
                durable: false,
            }),
            other => return Err(unexpected_reply(&other)),
        }
    }
    channel.call_all(writes)?;
    // Before a durable transaction names it.
    channel.call(Request::Flush)?;
    Ok(runs.iter().map(|&(_, len)| len).sum())
}

/// The page up to which a list of at most `SHARED_SPANS_MAX` spans is complete.
fn complete_up_to(pieces: &[FileSpan]) -> u64 {
    let last = pieces.last().filter(|_| pieces.len() == SHARED_SPANS_MAX);
    last.map_or(u64::MAX, FileSpan::end)
}

impl Core {
    /// The first shared span of a file that holds some of these pages.
    fn first_shared(&mut self, ino: Ino, pages: &Range<u64>) -> Result<Option<FileSpan>> {
        if self.share_counts.is_empty() || pages.is_empty() {
            return Ok(None);
        }
        let inode = self.inode(ino)?;
        let mut found = None;
        map::visit(
            &inode.map,
            pages.start,
            &mut |page| self.page(page),
            &mut |piece| {
                let is_within = piece.first_page < pages.end;
                if is_within && piece.is_shared {
                    found = Some(piece);
                }
                is_within && found.is_none()
            },
            &mut |_| Ok(()),
        )?;
        Ok(found)
    }
}

impl Fs {
    /// Replaces shared spans of a file that hold some of these pages by spans of its own. Holes
    /// without a span stay. The caller holds the file exclusively.
    pub(crate) fn unshare(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        pages: Range<u64>,
    ) -> Result<()> {
        while let Some(piece) = self.inspect(|core| core.first_shared(ino, &pages))? {
            // A spare remains from an earlier call that could not free it.
            self.free_spare(channel, ino)?;
            if let Some(spare) = self.allocate_spare(ino, &piece)? {
                let replaced = copy_span(channel, piece.span, spare)
                    .and_then(|mapped| self.replace_with_spare(ino, &piece, spare, mapped));
                // The old span if no other file names it any more; the spare if the copy failed.
                let freed = self.free_spare(channel, ino);
                replaced.and(self.defer_on_error(ino, freed))?;
            }
        }
        Ok(())
    }

    /// Allocates a spare span for the copy of a shared one. `None` if no other place shares it any
    /// more; then the shared mark is cleared.
    fn allocate_spare(&self, ino: Ino, piece: &FileSpan) -> Result<Option<Span>> {
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            let is_last = tx.sharer_count(piece.span) == 1;
            if is_last {
                map::put(
                    tx,
                    &mut inode,
                    piece.first_page,
                    SpanRef::exclusive(piece.span.page),
                )?;
                tx.add_sharers(piece.span, -1);
                tx.make_durable();
            } else {
                inode.spare_span = Some(tx.allocate_span(piece.span.order)?);
            }
            tx.put_inode(ino, &inode)?;
            Ok(inode.spare_span)
        })
    }

    /// Replaces a shared span by the spare, which has `mapped` mapped pages.
    fn replace_with_spare(
        &self,
        ino: Ino,
        piece: &FileSpan,
        spare: Span,
        mapped: u64,
    ) -> Result<()> {
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            // Other places may have dropped the span meanwhile.
            let is_last = tx.sharer_count(piece.span) == 1;
            map::put(
                tx,
                &mut inode,
                piece.first_page,
                SpanRef::exclusive(spare.page),
            )?;
            inode.spare_span = is_last.then_some(piece.span);
            tx.add_sharers(piece.span, -1);
            if !is_last {
                tx.count_pages(mapped.cast_signed());
            }
            tx.make_durable();
            tx.put_inode(ino, &inode)
        })
    }

    /// Frees the spare span of a file. The caller has exclusive access to the file.
    pub(crate) fn free_spare(&self, channel: &mut IoChannel, ino: Ino) -> Result<()> {
        let Some(spare) = self.inspect(|core| core.inode(ino))?.spare_span else {
            return Ok(());
        };
        channel.call(Request::Discard {
            offset: spare.page * PAGE,
            len: PAGE << spare.order,
        })?;
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            inode.spare_span = None;
            tx.free_span(spare);
            tx.put_inode(ino, &inode)
        })
    }

    /// Removes the shared spans that lie within `pages` as a whole from a file. A span that no
    /// other place names stays, as the file's own. Returns the number of shared spans.
    pub(crate) fn release_shared(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        pieces: &[FileSpan],
        pages: &Range<u64>,
    ) -> Result<usize> {
        let is_whole =
            |piece: &FileSpan| pages.start <= piece.first_page && piece.end() <= pages.end;
        let mut shared = pieces.to_vec();
        shared.retain(|piece| piece.is_shared && is_whole(piece));
        if !shared.is_empty() {
            self.remove_shared(channel, ino, &shared)?;
        }
        Ok(shared.len())
    }

    /// Removes shared spans from a file. A span that no other place names stays, as the file's own.
    /// The caller has exclusive access to the file.
    fn remove_shared(&self, channel: &mut IoChannel, ino: Ino, pieces: &[FileSpan]) -> Result<()> {
        let inode = self.inspect(|core| core.inode(ino))?;
        let mapped = pieces
            .iter()
            .map(|piece| self.mapped_pages_of(channel, &inode, piece))
            .collect::<Result<Vec<u64>>>()?;
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for (piece, mapped) in pieces.iter().zip(&mapped) {
                if tx.sharer_count(piece.span) == 1 {
                    map::put(
                        tx,
                        &mut inode,
                        piece.first_page,
                        SpanRef::exclusive(piece.span.page),
                    )?;
                } else {
                    map::remove(tx, &mut inode, piece.first_page)?;
                    // The pages leave the file and stay in use.
                    inode.pages = inode.pages.saturating_sub(*mapped);
                    tx.count_pages(mapped.cast_signed());
                }
                tx.add_sharers(piece.span, -1);
            }
            tx.put_inode(ino, &inode)
        })
    }

    /// Number of mapped pages of a span of a file that does not change meanwhile.
    fn mapped_pages_of(
        &self,
        channel: &mut IoChannel,
        inode: &Inode,
        piece: &FileSpan,
    ) -> Result<u64> {
        match inode.mapped_pages_in(piece) {
            Some(pages) => Ok(pages),
            None => channel.count_mapped_pages(piece.span.page..piece.span.end()),
        }
    }

    /// Shares whole spans of one file with another, from these offsets on. Returns the number of
    /// bytes shared: 0 if the first spans differ in alignment, are needed only in part, or the
    /// target has a span there.
    pub(crate) fn share_spans(
        &self,
        channel: &mut IoChannel,
        (from, source): (Ino, u64),
        (to, target): (Ino, u64),
        len: u64,
    ) -> Result<u64> {
        let (first, second) = (from.min(to), from.max(to));
        let first_lock = self.file_lock(first)?;
        let _first = first_lock.write();
        let second_lock = (first != second).then(|| self.file_lock(second));
        let second_lock = second_lock.transpose()?;
        let _second = second_lock.as_ref().map(|lock| lock.write());
        self.complete_pending(channel, first)?;
        self.complete_pending(channel, second)?;
        let has_held = |lock: &Arc<FileLock>| lock.has_mmap_dirty();
        if has_held(&first_lock) || second_lock.as_ref().is_some_and(has_held) {
            return Ok(0);
        }
        let alike = self.shareable_spans(channel, (from, source), (to, target), len)?;
        let now = self.now();
        if alike.bytes == 0 {
            return Ok(0);
        }
        self.change(|tx| {
            let mut inode = tx.inode(from)?;
            for (
                FileSpan {
                    first_page: at,
                    span,
                    is_shared,
                },
                ..,
            ) in &alike.spans
            {
                if !is_shared {
                    map::put(tx, &mut inode, *at, SpanRef::shared(span.page))?;
                    tx.add_sharers(*span, 1);
                }
            }
            tx.put_inode(from, &inode)?;
            let mut inode = tx.inode(to)?;
            for (FileSpan { span, .. }, at, mapped) in &alike.spans {
                map::put(tx, &mut inode, *at, SpanRef::shared(span.page))?;
                tx.add_sharers(*span, 1);
                inode.pages += mapped;
                tx.count_pages(-mapped.cast_signed());
            }
            inode.size = inode.size.max(target + alike.bytes);
            inode.mtime = now;
            inode.ctime = now;
            tx.put_inode(to, &inode)
        })?;
        Ok(alike.bytes)
    }

    fn shareable_spans(
        &self,
        channel: &mut IoChannel,
        (from, source): (Ino, u64),
        (to, target): (Ino, u64),
        len: u64,
    ) -> Result<ShareableSpans> {
        let now = self.now();
        let (source_inode, target_inode, of_source, of_target) = self.inspect(|core| {
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
            let span_end = (at + map::pages_to_next_span(at)) * PAGE;
            let is_known = at < complete_up_to(&of_source) && to_at < complete_up_to(&of_target);
            let is_taken = of_target.iter().any(|piece| piece.first_page == to_at);
            let is_whole = span_end <= end || is_end;
            if !are_same_length(at, to_at) || !is_known || is_taken || !is_whole {
                break;
            }
            let piece = of_source.iter().find(|piece| piece.first_page == at);
            if let Some(piece) = piece {
                let mapped = self.mapped_pages_of(channel, &source_inode, piece)?;
                alike.spans.push((*piece, to_at, mapped));
            }
            alike.bytes = span_end.min(end) - source;
        }
        Ok(alike)
    }
}
