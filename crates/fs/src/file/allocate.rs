//! Operations on ranges of a file: preallocation, holes, and seeking them.

use crate::Fs;
use crate::error::Result;
use crate::file::write::{
    PAGE, PIECE_PAGES_MAX, SPANS_FREED_MAX, discard_request, page_count, write_pages,
};
use crate::format::inode::{FILE_BYTES_MAX, HAS_RESERVED_PAGES, Ino, NEEDS_TRIM};
use crate::io::channel::IoChannel;
use crate::tree::page_map::{self as map, FileSpan};
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

/// The target of a seek.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekTarget {
    /// The next byte that may be other than zero.
    Data,
    /// The next byte of a hole; the end is one.
    Hole,
}

impl Fs {
    /// Reserves, frees or zeroes a range.
    ///
    /// # Errors
    /// `EFBIG`, `EINVAL` for an empty range, `ENOSPC`.
    pub fn allocate(
        &self,
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
        let lock = self.file_lock(ino)?;
        let _alone = lock.write();
        self.with_reserve_fallback(|| self.complete_pending(channel, ino))?;
        self.drop_capabilities(ino)?;
        let inode = self.inspect(|core| {
            core.check_running()?;
            core.regular_file(ino)
        })?;
        if inode.flags & NEEDS_TRIM != 0 {
            self.free_marked(channel, ino)?;
        }
        if how != AllocateMode::Punch {
            self.check_space(channel, ino, offset / PAGE..page_count(end))?;
        }
        match how {
            AllocateMode::Reserve { keep_size } => {
                self.reserve_range(channel, ino, offset..end, keep_size)
            }
            AllocateMode::Punch => {
                self.with_reserve_fallback(|| self.punch_range(channel, ino, offset..end))?;
                self.discard_mmap_dirty(ino, &lock, offset..end);
                Ok(())
            }
            AllocateMode::Zero { keep_size } => {
                self.punch_range(channel, ino, offset..end)?;
                self.discard_mmap_dirty(ino, &lock, offset..end);
                self.reserve_range(channel, ino, offset..end, keep_size)
            }
        }
    }

    /// Fails early if the limit leaves too little room for the whole range.
    fn check_space(&self, channel: &mut IoChannel, ino: Ino, pages: Range<u64>) -> Result<()> {
        let asked = pages.end - pages.start;
        let (inode, room, pieces) = self.inspect(|core| {
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
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        bytes: Range<u64>,
        keep_size: bool,
    ) -> Result<()> {
        let mut page = bytes.start / PAGE;
        let end = page_count(bytes.end);
        self.unshare(channel, ino, page..end)?;
        while page < end {
            let next = (page + PIECE_PAGES_MAX).min(end);
            let holes = self.holes(channel, ino, page..next)?;
            let now = self.now();
            self.change(|tx| {
                let mut inode = tx.inode(ino)?;
                for &page in &holes {
                    let run = map::find_or_allocate(tx, &mut inode, page)?;
                    tx.write_data(run.page, 0, &[0; PAGE_BYTES], true)?;
                    inode.pages += 1;
                }
                let size = match keep_size {
                    true => inode.size,
                    false => inode.size.max((next * PAGE).min(bytes.end)),
                };
                if next > page_count(size) {
                    inode.flags |= HAS_RESERVED_PAGES;
                }
                if holes.is_empty() && size == inode.size {
                    return Ok(());
                }
                inode.size = size;
                inode.ctime = now;
                tx.put_inode(ino, &inode)
            })?;
            page = next;
        }
        Ok(())
    }

    fn punch_range(&self, channel: &mut IoChannel, ino: Ino, bytes: Range<u64>) -> Result<()> {
        let (first, last) = (page_count(bytes.start), bytes.end / PAGE);
        let now = self.now();
        // Whole spans in between are removed, shared or not.
        for at in [bytes.start, bytes.end - 1] {
            self.unshare(channel, ino, at / PAGE..at / PAGE + 1)?;
        }
        // Partial pages first: they are zeroed if they are mapped.
        let edges = match first > last {
            true => vec![bytes.clone()],
            false => vec![bytes.start..first * PAGE, last * PAGE..bytes.end],
        };
        let mut mapped = Vec::new();
        for edge in edges.into_iter().filter(|edge| !edge.is_empty()) {
            let page = edge.start / PAGE;
            if self.holes(channel, ino, page..page + 1)?.is_empty() {
                mapped.push(edge);
            }
        }
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for edge in &mapped {
                let zeroes = vec![0; (edge.end - edge.start) as usize];
                write_pages(tx, &mut inode, edge.start, &zeroes, &BTreeSet::new())?;
            }
            if first < last {
                inode.flags |= NEEDS_TRIM;
            }
            inode.mtime = now;
            inode.ctime = now;
            tx.put_inode(ino, &inode)
        })?;
        if first >= last {
            return Ok(());
        }
        let cleared = self.discard_range(channel, ino, first..last);
        self.defer_on_error(ino, cleared)?;
        // The hole exists; only the page count is still to be updated.
        let counted = self.with_reserve_fallback(|| self.clear_trim_mark(channel, ino, None));
        let _ = self.defer_on_error(ino, counted);
        Ok(())
    }

    /// Frees the mapped pages of a range of a file, and keeps its own spans.
    fn discard_range(&self, channel: &mut IoChannel, ino: Ino, pages: Range<u64>) -> Result<()> {
        let mut from = pages.start;
        loop {
            let mut pieces = self.inspect(|core| {
                let inode = core.regular_file(ino)?;
                core.pieces(&inode, from, SPANS_FREED_MAX)
            })?;
            pieces.retain(|piece| piece.first_page < pages.end);
            let Some(last) = pieces.last() else {
                return Ok(());
            };
            if self.release_shared(channel, ino, &pieces, &pages)? > 0 {
                continue;
            }
            channel.call_all(pieces.iter().map(|piece| discard_request(piece, &pages)))?;
            from = last.end();
        }
    }

    /// The next offset at which data or a hole begins.
    ///
    /// # Errors
    /// `ENXIO` at or beyond the end, and for data if there is none.
    pub fn seek(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: u64,
        what: SeekTarget,
    ) -> Result<u64> {
        let lock = self.file_lock(ino)?;
        let _shared = lock.read();
        let (inode, pieces) = self.inspect(|core| {
            let mut inode = core.regular_file(ino)?;
            inode.size = core.file_end(ino, &inode)?;
            let pieces = core.pieces(&inode, offset / PAGE, usize::MAX)?;
            Ok((inode, pieces))
        })?;
        if offset >= inode.size {
            return Err(Errno::NXIO.into());
        }
        if lock.is_mmapped() || lock.has_mmap_dirty() || inode.redo_log.is_some() {
            // Pages in the kernel or in the buffer may lie in holes: all bytes count as data.
            return Ok(match what {
                SeekTarget::Data => offset,
                SeekTarget::Hole => inode.size,
            });
        }
        let mut data: Vec<Range<u64>> = Vec::new();
        for FileSpan {
            first_page: at,
            span,
            ..
        } in pieces
        {
            channel.for_each_mapped_run(span.page..span.end(), |run| {
                let first = at + run.start - span.page;
                let end = at + run.end - span.page;
                match data.last_mut() {
                    Some(last) if last.end == first => last.end = end,
                    _ => data.push(first..end),
                }
            })?;
            let is_known = data.last().is_some_and(|run| match what {
                SeekTarget::Data => run.end * PAGE > offset,
                SeekTarget::Hole => run.end < at + (1 << span.order),
            });
            if is_known {
                break;
            }
        }
        let mut runs = data.into_iter().map(|run| run.start * PAGE..run.end * PAGE);
        match what {
            SeekTarget::Data => runs
                .find(|run| run.end > offset)
                .map(|run| run.start.max(offset))
                .filter(|&at| at < inode.size)
                .ok_or(Errno::NXIO.into()),
            SeekTarget::Hole => {
                let within = runs.find(|run| run.contains(&offset));
                Ok(within.map_or(offset, |run| run.end.min(inode.size)))
            }
        }
    }
}
