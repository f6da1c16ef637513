//! Spans that several files name. A copy of whole spans copies no bytes; a file gets a span of its
//! own before a shared one is changed.
//!
//! - A span is not changed or freed while a place that names it marks it as shared. The last place
//!   that names it may clear the mark.
//! - [`ShareCounts`](crate::alloc::share_counts::ShareCounts) holds the number of places per span in memory, from the mount on.
//! - A file gets a span of its own in three steps. Its inode names a **spare** span; the pages are
//!   copied; the spare replaces the shared span. The last step is durable, because other files may
//!   change the shared span in place from then on. A crash leaves a spare, which is freed later
//!   ([`crate::file::deferred_free`]).
//! - Pages of a shared span count once for the file system, and once for each file in its inode.

use crate::error::Result;
use crate::format::inode::{Ino, Inode};
use crate::format::page_map::{FileSpan, Span, SpanRef};
use crate::format::{PAGE, page_map};
use crate::io::channel::{IoChannel, unexpected_reply};
use crate::tree::map_update;
use crate::txn::core::Core;
use crate::txn::manager::TxManager;
use bytes::Bytes;
use pagemesh_base::space::{Reply, Request};
use std::ops::Range;

/// Pages of a span that are copied with one request.
const COPIED_PAGES_MAX: usize = 256;

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

/// The first shared span of a file that holds some of these pages.
fn first_shared(core: &mut Core, ino: Ino, pages: &Range<u64>) -> Result<Option<FileSpan>> {
    if core.share_counts.is_empty() || pages.is_empty() {
        return Ok(None);
    }
    let inode = core.inode(ino)?;
    let mut found = None;
    page_map::visit(
        &inode.map,
        pages.start,
        &mut |page| core.page(page),
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

/// Replaces shared spans of a file that hold some of these pages by spans of its own. Holes
/// without a span stay. The caller holds the file exclusively.
pub(crate) fn unshare(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pages: Range<u64>,
) -> Result<()> {
    while let Some(piece) = txs.inspect(|core| first_shared(core, ino, &pages))? {
        // A spare remains from an earlier call that could not free it.
        free_spare(txs, channel, ino)?;
        if let Some(spare) = allocate_spare(txs, ino, &piece)? {
            let replaced = copy_span(channel, piece.span, spare)
                .and_then(|mapped| replace_with_spare(txs, ino, &piece, spare, mapped));
            // The old span if no other file names it any more; the spare if the copy failed.
            let freed = free_spare(txs, channel, ino);
            replaced.and(txs.defer_on_error(ino, freed))?;
        }
    }
    Ok(())
}

/// Allocates a spare span for the copy of a shared one. `None` if no other place shares it any
/// more; then the shared mark is cleared.
fn allocate_spare(txs: &TxManager, ino: Ino, piece: &FileSpan) -> Result<Option<Span>> {
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        let is_last = tx.sharer_count(piece.span) == 1;
        if is_last {
            map_update::put(
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
    txs: &TxManager,
    ino: Ino,
    piece: &FileSpan,
    spare: Span,
    mapped: u64,
) -> Result<()> {
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        // Other places may have dropped the span meanwhile.
        let is_last = tx.sharer_count(piece.span) == 1;
        map_update::put(
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
pub(crate) fn free_spare(txs: &TxManager, channel: &mut IoChannel, ino: Ino) -> Result<()> {
    let Some(spare) = txs.inspect(|core| core.inode(ino))?.spare_span else {
        return Ok(());
    };
    let discard = Request::Discard {
        offset: spare.page * PAGE,
        len: PAGE << spare.order,
    };
    txs.change_pages_durably(channel, |channel| {
        channel.call(discard.clone())?;
        Ok(())
    })?;
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        inode.spare_span = None;
        tx.free_span(spare);
        tx.put_inode(ino, &inode)
    })
}

/// Removes the shared spans that lie within `pages` as a whole from a file. A span that no
/// other place names stays, as the file's own. Returns the number of shared spans.
pub(crate) fn release_shared(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pieces: &[FileSpan],
    pages: &Range<u64>,
) -> Result<usize> {
    let is_whole = |piece: &FileSpan| pages.start <= piece.first_page && piece.end() <= pages.end;
    let mut shared = pieces.to_vec();
    shared.retain(|piece| piece.is_shared && is_whole(piece));
    if !shared.is_empty() {
        remove_shared(txs, channel, ino, &shared)?;
    }
    Ok(shared.len())
}

/// Removes shared spans from a file. A span that no other place names stays, as the file's own.
/// The caller has exclusive access to the file.
fn remove_shared(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pieces: &[FileSpan],
) -> Result<()> {
    let inode = txs.inspect(|core| core.inode(ino))?;
    let mapped = pieces
        .iter()
        .map(|piece| mapped_pages_of(channel, &inode, piece))
        .collect::<Result<Vec<u64>>>()?;
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        for (piece, mapped) in pieces.iter().zip(&mapped) {
            if tx.sharer_count(piece.span) == 1 {
                map_update::put(
                    tx,
                    &mut inode,
                    piece.first_page,
                    SpanRef::exclusive(piece.span.page),
                )?;
            } else {
                map_update::remove(tx, &mut inode, piece.first_page)?;
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
pub(crate) fn mapped_pages_of(
    channel: &mut IoChannel,
    inode: &Inode,
    piece: &FileSpan,
) -> Result<u64> {
    match inode.mapped_pages_in(piece) {
        Some(pages) => Ok(pages),
        None => channel.count_mapped_pages(piece.span.page..piece.span.end()),
    }
}
