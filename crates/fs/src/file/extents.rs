//! The pages of a file as runs of the space: which are mapped, which are holes, and how bytes of them
//! join a transaction.

use crate::error::Result;
use crate::format::inode::{Ino, Inode};
use crate::format::page_map::{FileSpan, Span};
use crate::format::{PAGE, Page, page_count, page_map};
use crate::io::channel::IoChannel;
use crate::tree::map_update;
use crate::txn::manager::TxManager;
use crate::txn::tx::Tx;
use pagemesh_base::space::Request;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Pages of a file in one transaction; inode, map and table need the others.
pub(crate) const PIECE_PAGES_MAX: u64 = 48;
/// Pages of a file that one atomic overwrite may change.
pub const ATOMIC_PAGES_MAX: u64 = PIECE_PAGES_MAX;
/// Spans freed in one transaction: each may have its entry in a map page of its own.
pub(crate) const SPANS_FREED_MAX: usize = 24;
/// Spans allocated in one transaction: each may need a map page of each level.
const SPANS_ALLOCATED_MAX: usize = 8;

/// Pages that are written to a file atomically, in order.
pub(crate) type NumberedPages = [(u64, Arc<Page>)];

/// Runs of the space for a byte range of a file, without holes that have no span: byte of the file,
/// byte of the space, length.
pub(crate) type FileExtents = Vec<(u64, u64, u64)>;

/// The runs, and whether any of them is shared.
pub(crate) fn file_extents(
    inode: &Inode,
    bytes: Range<u64>,
    read: page_map::ReadPage<'_>,
) -> Result<(FileExtents, bool)> {
    let mut runs = FileExtents::new();
    let mut is_shared = false;
    let mut at = bytes.start;
    while at < bytes.end {
        let page = at / PAGE;
        let within = at % PAGE;
        let Some(run) = page_map::find(&inode.map, page, read)? else {
            at = (page + page_map::pages_to_next_span(page)) * PAGE;
            continue;
        };
        let len = (run.len * PAGE - within).min(bytes.end - at);
        let place = run.page * PAGE + within;
        is_shared |= run.is_shared;
        match runs.last_mut() {
            Some((first, last, so_far)) if *first + *so_far == at && *last + *so_far == place => {
                *so_far += len;
            }
            _ => runs.push((at, place, len)),
        }
        at += len;
    }
    Ok((runs, is_shared))
}

/// The unmapped pages among a range of a file's pages. The caller holds the file exclusively.
pub(crate) fn holes(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pages: Range<u64>,
) -> Result<BTreeSet<u64>> {
    let (inode, runs) = txs.inspect(|core| {
        let inode = core.regular_file(ino)?;
        let bytes = pages.start * PAGE..pages.end * PAGE;
        let (runs, _) = file_extents(&inode, bytes, &mut |page| core.page(page))?;
        Ok((inode, runs))
    })?;
    let mut holes: BTreeSet<u64> = pages.collect();
    if inode.is_dense() {
        holes.retain(|&page| page >= page_count(inode.size));
        return Ok(holes);
    }
    for (at, place, len) in runs {
        let first = at / PAGE;
        let of_space = place / PAGE..(place + len) / PAGE;
        channel.for_each_mapped_run(of_space.clone(), |mapped| {
            for page in mapped {
                holes.remove(&(first + page - of_space.start));
            }
        })?;
    }
    Ok(holes)
}

/// As [`crate::file::extents::holes`], for several ranges.
pub(crate) fn holes_in_ranges(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    ranges: impl IntoIterator<Item = Range<u64>>,
) -> Result<BTreeSet<u64>> {
    let mut all = BTreeSet::new();
    for pages in ranges {
        all.append(&mut holes(txs, channel, ino, pages)?);
    }
    Ok(all)
}

/// Allocates missing spans, with holes in them, for these pages of a file. The caller holds the
/// file exclusively.
pub(crate) fn ensure_spans(
    txs: &TxManager,
    ino: Ino,
    pages: impl Iterator<Item = u64>,
) -> Result<()> {
    let mut missing = txs.inspect(|core| {
        let inode = core.regular_file(ino)?;
        let mut missing = Vec::new();
        let mut known = 0;
        for page in pages {
            if page < known {
                continue;
            }
            known = page + page_map::pages_to_next_span(page);
            if page_map::find(&inode.map, page, &mut |page| core.page(page))?.is_none() {
                missing.push(page);
            }
        }
        Ok(missing)
    })?;
    while !missing.is_empty() {
        let left = missing.split_off(missing.len().min(SPANS_ALLOCATED_MAX));
        txs.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for &page in &missing {
                map_update::find_or_allocate(tx, &mut inode, page)?;
            }
            tx.put_inode(ino, &inode)
        })?;
        missing = left;
    }
    Ok(())
}

/// Runs of consecutive pages.
pub(crate) fn page_runs(pages: &NumberedPages) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &(page, _) in pages {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => runs.push(page..page + 1),
        }
    }
    runs
}

/// The request that frees the part of a span within `pages` of the file. The two overlap.
pub(crate) fn discard_request(piece: &FileSpan, pages: &Range<u64>) -> Request {
    let Span { page, order } = piece.span;
    let first = piece.first_page.max(pages.start);
    let end = (piece.first_page + (1 << order)).min(pages.end);
    Request::Discard {
        offset: (page + first - piece.first_page) * PAGE,
        len: (end - first) * PAGE,
    }
}

/// Adds bytes of a file to the transaction.
pub(crate) fn write_pages(
    tx: &mut Tx<'_>,
    inode: &mut Inode,
    offset: u64,
    data: &[u8],
    holes: &BTreeSet<u64>,
) -> Result<()> {
    let mut at = offset;
    let mut rest = data;
    while !rest.is_empty() {
        let page = at / PAGE;
        let within = (at % PAGE) as usize;
        let (part, after) = rest.split_at(rest.len().min(PAGE_BYTES - within));
        let is_new = holes.contains(&page);
        let run = map_update::find_or_allocate(tx, inode, page)?;
        tx.write_data(run.page, within, part, is_new)?;
        inode.pages += u64::from(is_new);
        at += part.len() as u64;
        rest = after;
    }
    Ok(())
}

/// Writes pages into a file in one transaction. The caller holds the file exclusively, and the
/// pages have spans of the file's own.
pub(crate) fn write_pages_atomic(
    txs: &TxManager,
    channel: &mut IoChannel,
    ino: Ino,
    pages: &NumberedPages,
) -> Result<()> {
    let holes = holes_in_ranges(txs, channel, ino, page_runs(pages))?;
    txs.change(|tx| {
        let mut inode = tx.inode(ino)?;
        for (page, bytes) in pages {
            let at = page * PAGE;
            let len = inode.size.saturating_sub(at).min(PAGE) as usize;
            write_pages(tx, &mut inode, at, &bytes[..len], &holes)?;
        }
        tx.make_durable();
        tx.put_inode(ino, &inode)
    })
}
