//! Spans that several files name: a copy of whole spans copies nothing, and who changes
//! something in one takes a span of his own first.
//!
//! - Nothing is changed or freed in a span while a place that names it says that it is
//!   shared. Who is the last to name it may say otherwise.
//! - How many places name a span so is known in memory ([`Shares`]), from the mount on.
//! - A file gets a span of its own in three steps: its inode names a **spare** span, the
//!   pages are copied, and the spare takes the place of the shared one, durably, as
//!   others may change that one in place from then on. A crash leaves a spare, which is
//!   freed after it ([`crate::left`]).
//! - Pages of shared spans count once for the file system, and for each file in its
//!   inode.

use crate::Fs;
use crate::board::Data;
use crate::core::Core;
use crate::error::Result;
use crate::format::{Ino, Inode, Place, RESERVED, SMALL_PAGES, TRIM};
use crate::hash::NumberMap;
use crate::io::{Port, strange};
use crate::map::{self, Piece};
use crate::spans::Span;
use bytes::Bytes;
use pagemesh_base::space::{Reply, Request};
use pagemesh_base::units::PAGE_BYTES;
use std::ops::Range;
use std::sync::Arc;

const PAGE: u64 = PAGE_BYTES as u64;
/// Spans that two files begin to share in one transaction: each may lie in a map page of
/// its own in both.
const SHARED_AT_ONCE_MAX: usize = 16;
/// Pages of a span that are copied with one request.
const COPIED_PAGES_MAX: usize = 256;
const CHUNK_BYTES: u64 = SMALL_PAGES * PAGE;

/// Places that name a span as a shared one, by its first page.
#[derive(Debug, Default)]
pub(crate) struct Shares(NumberMap<u64, i64>);

impl Shares {
    pub(crate) fn new(shares: impl Iterator<Item = (u64, i64)>) -> Shares {
        Shares(shares.collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The order of what is added and undone may be any.
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

/// What a file can begin to share of another.
struct Alike {
    /// Spans of the first, where they begin in the second, their mapped pages.
    pieces: Vec<(Piece, u64, u64)>,
    bytes: u64,
}

/// Whether spans of two files that begin there are of one length.
fn are_alike(one: u64, other: u64) -> bool {
    map::is_start(one) && map::is_start(other) && map::to_next_span(one) == map::to_next_span(other)
}

/// Bytes from here to where two files may share spans; none: they lie differently.
pub(crate) fn to_alike(source: u64, target: u64) -> Option<u64> {
    if source == target {
        let page = source.checked_next_multiple_of(PAGE)? / PAGE;
        let start = match map::is_start(page) {
            true => page,
            false => page + map::to_next_span(page),
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

/// Copies what is mapped of a span, and sees to it that it stays. Returns how many pages.
fn copy_span(port: &mut Port, from: Span, to: Span) -> Result<u64> {
    let mut runs = Vec::new();
    port.mapped(from.page..from.end(), |run| {
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
    let replies = port.call_all(reads)?;
    let mut writes = Vec::new();
    for ((page, len), reply) in runs.iter().zip(replies) {
        match reply {
            Reply::Data(bytes) if bytes.len() as u64 == len * PAGE => writes.push(Request::Write {
                offset: (to.page + page - from.page) * PAGE,
                data: Bytes::from(bytes),
                durable: false,
            }),
            other => return Err(strange(&other)),
        }
    }
    port.call_all(writes)?;
    // Before a durable transaction names it.
    port.call(Request::Flush)?;
    Ok(runs.iter().map(|&(_, len)| len).sum())
}

/// Up to where a list of pieces with a limit tells of all.
fn known(pieces: &[Piece]) -> u64 {
    let last = pieces.last().filter(|_| pieces.len() == SHARED_AT_ONCE_MAX);
    last.map_or(u64::MAX, Piece::end)
}

impl Core {
    /// The first shared span of a file that holds some of these pages.
    fn first_shared(&mut self, ino: Ino, pages: &Range<u64>) -> Result<Option<Piece>> {
        if self.shares.is_empty() || pages.is_empty() {
            return Ok(None);
        }
        let inode = self.inode(ino)?;
        let mut found = None;
        map::visit(
            &inode.map,
            pages.start,
            &mut |page| self.page(page),
            &mut |piece| {
                let is_within = piece.at < pages.end;
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
    /// Sees to it that a file has spans of its own for these pages, as far as it has any.
    /// The caller holds the file alone.
    pub(crate) fn unshare(&self, port: &mut Port, ino: Ino, pages: Range<u64>) -> Result<()> {
        while let Some(piece) = self.look(|core| core.first_shared(ino, &pages))? {
            // There is one if it could not be freed before.
            self.free_spare(port, ino)?;
            if let Some(spare) = self.take_spare(ino, &piece)? {
                let replaced = copy_span(port, piece.span, spare)
                    .and_then(|mapped| self.replace(ino, &piece, spare, mapped));
                // The shared one, if nobody else names it any more; the spare, if it failed.
                let freed = self.free_spare(port, ino);
                replaced.and(self.leave(ino, freed))?;
            }
        }
        Ok(())
    }

    /// A span to copy a shared one to; none: nobody shares it any more.
    fn take_spare(&self, ino: Ino, piece: &Piece) -> Result<Option<Span>> {
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            let is_last = tx.sharers(piece.span) == 1;
            if is_last {
                map::put(tx, &mut inode, piece.at, Place::own(piece.span.page))?;
                tx.share(piece.span, -1);
                tx.make_durable();
            } else {
                inode.spare = Some(tx.take_span(piece.span.order)?);
            }
            tx.put(ino, &inode)?;
            Ok(inode.spare)
        })
    }

    /// Puts a spare, with so many mapped pages, into the place of a shared span.
    fn replace(&self, ino: Ino, piece: &Piece, spare: Span, mapped: u64) -> Result<()> {
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            // Others may have gone meanwhile.
            let is_last = tx.sharers(piece.span) == 1;
            map::put(tx, &mut inode, piece.at, Place::own(spare.page))?;
            inode.spare = is_last.then_some(piece.span);
            tx.share(piece.span, -1);
            if !is_last {
                tx.count_pages(mapped.cast_signed());
            }
            tx.make_durable();
            tx.put(ino, &inode)
        })
    }

    /// Frees what is spare of a file. The caller holds it alone, or nobody else can.
    pub(crate) fn free_spare(&self, port: &mut Port, ino: Ino) -> Result<()> {
        let Some(spare) = self.look(|core| core.inode(ino))?.spare else {
            return Ok(());
        };
        port.call(Request::Discard {
            offset: spare.page * PAGE,
            len: PAGE << spare.order,
        })?;
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            inode.spare = None;
            tx.give_span(spare);
            tx.put(ino, &inode)
        })
    }

    /// Takes those of these spans out of a file that are shared and lie within these pages.
    /// What nobody else names stays, as its own. Returns how many there were.
    pub(crate) fn release_shared(
        &self,
        port: &mut Port,
        ino: Ino,
        pieces: &[Piece],
        pages: &Range<u64>,
    ) -> Result<usize> {
        let is_whole = |piece: &Piece| pages.start <= piece.at && piece.end() <= pages.end;
        let mut shared = pieces.to_vec();
        shared.retain(|piece| piece.is_shared && is_whole(piece));
        if !shared.is_empty() {
            self.drop_shared(port, ino, &shared)?;
        }
        Ok(shared.len())
    }

    /// Takes shared spans out of a file. What nobody else names stays, as its own. The
    /// caller holds the file alone, or nobody else can.
    fn drop_shared(&self, port: &mut Port, ino: Ino, pieces: &[Piece]) -> Result<()> {
        let inode = self.look(|core| core.inode(ino))?;
        let mapped = pieces
            .iter()
            .map(|piece| self.mapped_of(port, &inode, piece))
            .collect::<Result<Vec<u64>>>()?;
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for (piece, mapped) in pieces.iter().zip(&mapped) {
                if tx.sharers(piece.span) == 1 {
                    map::put(tx, &mut inode, piece.at, Place::own(piece.span.page))?;
                } else {
                    map::remove(tx, &mut inode, piece.at)?;
                    // It goes from the file and stays in use.
                    inode.pages = inode.pages.saturating_sub(*mapped);
                    tx.count_pages(mapped.cast_signed());
                }
                tx.share(piece.span, -1);
            }
            tx.put(ino, &inode)
        })
    }

    /// Mapped pages of a span of a file that nobody changes meanwhile.
    fn mapped_of(&self, port: &mut Port, inode: &Inode, piece: &Piece) -> Result<u64> {
        match inode.mapped_in(piece) {
            Some(pages) => Ok(pages),
            None => port.count_mapped(piece.span.page..piece.span.end()),
        }
    }

    /// Has one file name spans of another from there on, which must lie alike and be
    /// wanted as a whole. Returns for how many bytes.
    pub(crate) fn share(
        &self,
        port: &mut Port,
        (from, source): (Ino, u64),
        (to, target): (Ino, u64),
        len: u64,
    ) -> Result<u64> {
        let (first, second) = (from.min(to), from.max(to));
        let first_lock = self.data_lock(first)?;
        let _first = first_lock.write();
        let second_lock = (first != second).then(|| self.data_lock(second));
        let second_lock = second_lock.transpose()?;
        let _second = second_lock.as_ref().map(|lock| lock.write());
        self.settle_all(port, first)?;
        self.settle_all(port, second)?;
        let has_held = |lock: &Arc<Data>| lock.has_held();
        if has_held(&first_lock) || second_lock.as_ref().is_some_and(has_held) {
            return Ok(0);
        }
        let alike = self.alike(port, (from, source), (to, target), len)?;
        let now = self.now();
        if alike.bytes == 0 {
            return Ok(0);
        }
        self.change(|tx| {
            let mut inode = tx.inode(from)?;
            for (
                Piece {
                    at,
                    span,
                    is_shared,
                },
                ..,
            ) in &alike.pieces
            {
                if !is_shared {
                    map::put(tx, &mut inode, *at, Place::shared(span.page))?;
                    tx.share(*span, 1);
                }
            }
            tx.put(from, &inode)?;
            let mut inode = tx.inode(to)?;
            for (Piece { span, .. }, at, mapped) in &alike.pieces {
                map::put(tx, &mut inode, *at, Place::shared(span.page))?;
                tx.share(*span, 1);
                inode.pages += mapped;
                tx.count_pages(-mapped.cast_signed());
            }
            inode.size = inode.size.max(target + alike.bytes);
            inode.mtime = now;
            inode.ctime = now;
            tx.put(to, &inode)
        })?;
        Ok(alike.bytes)
    }

    fn alike(
        &self,
        port: &mut Port,
        (from, source): (Ino, u64),
        (to, target): (Ino, u64),
        len: u64,
    ) -> Result<Alike> {
        let now = self.now();
        let (source_inode, target_inode, of_source, of_target) = self.look(|core| {
            core.check_running()?;
            let (one, other) = (core.file(from)?, core.file(to)?);
            let of_source = core.pieces(&one, source / PAGE, SHARED_AT_ONCE_MAX)?;
            let of_target = core.pieces(&other, target / PAGE, SHARED_AT_ONCE_MAX)?;
            core.note_read(from, &one, now);
            Ok((one, other, of_source, of_target))
        })?;
        let mut alike = Alike {
            pieces: Vec::new(),
            bytes: 0,
        };
        let is_settled = (source_inode.flags | target_inode.flags) & (RESERVED | TRIM) == 0;
        let end = source_inode
            .size
            .min(source.saturating_add(len))
            .max(source);
        // Behind it there is nothing in the span.
        let is_end = end == source_inode.size;
        while is_settled && source + alike.bytes < end {
            let at = (source + alike.bytes) / PAGE;
            let to_at = (target + alike.bytes) / PAGE;
            let span_end = (at + map::to_next_span(at)) * PAGE;
            let is_known = at < known(&of_source) && to_at < known(&of_target);
            let is_taken = of_target.iter().any(|piece| piece.at == to_at);
            let is_whole = span_end <= end || is_end;
            if !are_alike(at, to_at) || !is_known || is_taken || !is_whole {
                break;
            }
            let piece = of_source.iter().find(|piece| piece.at == at);
            if let Some(piece) = piece {
                let mapped = self.mapped_of(port, &source_inode, piece)?;
                alike.pieces.push((*piece, to_at, mapped));
            }
            alike.bytes = span_end.min(end) - source;
        }
        Ok(alike)
    }
}
