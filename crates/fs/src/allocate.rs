//! What is asked for of ranges of a file: room, holes, and where they are.

use crate::Fs;
use crate::data::{PAGE, PIECE_PAGES_MAX, SPANS_FREED_MAX, discard, pages_of, write_pages};
use crate::error::Result;
use crate::format::{FILE_BYTES_MAX, Ino, RESERVED, TRIM};
use crate::io::Port;
use crate::map::{self, Piece};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ops::Range;

/// What to do to a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocate {
    /// See to room for it, also beyond the end.
    Reserve {
        /// The size stays.
        keep_size: bool,
    },
    /// Free it; it then reads as zeroes. The size stays.
    Punch,
    /// Make it read as zeroes, with room.
    Zero {
        /// The size stays.
        keep_size: bool,
    },
}

/// What to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
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
        port: &mut Port,
        ino: Ino,
        how: Allocate,
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
        let lock = self.data_lock(ino)?;
        let _alone = lock.write();
        self.making_room(|| self.settle_all(port, ino))?;
        self.drop_capabilities(ino)?;
        let inode = self.look(|core| {
            core.check_running()?;
            core.file(ino)
        })?;
        if inode.flags & TRIM != 0 {
            self.finish(port, ino)?;
        }
        if how != Allocate::Punch {
            self.check_room(port, ino, offset / PAGE..pages_of(end))?;
        }
        match how {
            Allocate::Reserve { keep_size } => self.reserve(port, ino, offset..end, keep_size),
            Allocate::Punch => {
                self.making_room(|| self.punch(port, ino, offset..end))?;
                self.clear_held(ino, &lock, offset..end);
                Ok(())
            }
            Allocate::Zero { keep_size } => {
                self.punch(port, ino, offset..end)?;
                self.clear_held(ino, &lock, offset..end);
                self.reserve(port, ino, offset..end, keep_size)
            }
        }
    }

    /// Refuses what the limit leaves no room for before anything of it is done.
    fn check_room(&self, port: &mut Port, ino: Ino, pages: Range<u64>) -> Result<()> {
        let asked = pages.end - pages.start;
        let (inode, room, pieces) = self.look(|core| {
            let inode = core.file(ino)?;
            let room = match core.head.limit_bytes {
                0 => u64::MAX,
                limit => (limit / PAGE).saturating_sub(core.used),
            };
            let mut pieces = Vec::new();
            // Else it fits, or does not, whatever the file has there.
            if asked > room && asked - room <= inode.pages {
                pieces = core.pieces(&inode, pages.start, usize::MAX)?;
                // What others name, too, is no room for this one.
                pieces.retain(|piece| {
                    let is_own = !piece.is_shared || core.shares.count(piece.span.page) <= 1;
                    is_own && piece.at < pages.end
                });
            }
            Ok((inode, room, pieces))
        })?;
        if asked <= room {
            return Ok(());
        }
        let mut missing = asked - room;
        for piece in pieces {
            let first = pages.start.max(piece.at) - piece.at;
            let end = pages.end.min(piece.end()) - piece.at;
            let page = piece.span.page;
            missing = missing.saturating_sub(port.count_mapped(page + first..page + end)?);
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

    fn reserve(&self, port: &mut Port, ino: Ino, bytes: Range<u64>, keep_size: bool) -> Result<()> {
        let mut page = bytes.start / PAGE;
        let end = pages_of(bytes.end);
        self.unshare(port, ino, page..end)?;
        while page < end {
            let next = (page + PIECE_PAGES_MAX).min(end);
            let holes = self.holes(port, ino, page..next)?;
            let now = self.now();
            self.change(|tx| {
                let mut inode = tx.inode(ino)?;
                for &page in &holes {
                    let run = map::ensure(tx, &mut inode, page)?;
                    tx.write_data(run.page, 0, &[0; PAGE_BYTES], true)?;
                    inode.pages += 1;
                }
                let size = match keep_size {
                    true => inode.size,
                    false => inode.size.max((next * PAGE).min(bytes.end)),
                };
                if next > pages_of(size) {
                    inode.flags |= RESERVED;
                }
                if holes.is_empty() && size == inode.size {
                    return Ok(());
                }
                inode.size = size;
                inode.ctime = now;
                tx.put(ino, &inode)
            })?;
            page = next;
        }
        Ok(())
    }

    fn punch(&self, port: &mut Port, ino: Ino, bytes: Range<u64>) -> Result<()> {
        let (first, last) = (pages_of(bytes.start), bytes.end / PAGE);
        let now = self.now();
        // Of spans in between nothing stays.
        for at in [bytes.start, bytes.end - 1] {
            self.unshare(port, ino, at / PAGE..at / PAGE + 1)?;
        }
        // Parts of pages first: they are zeroed where they are mapped.
        let edges = match first > last {
            true => vec![bytes.clone()],
            false => vec![bytes.start..first * PAGE, last * PAGE..bytes.end],
        };
        let mut mapped = Vec::new();
        for edge in edges.into_iter().filter(|edge| !edge.is_empty()) {
            let page = edge.start / PAGE;
            if self.holes(port, ino, page..page + 1)?.is_empty() {
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
                inode.flags |= TRIM;
            }
            inode.mtime = now;
            inode.ctime = now;
            tx.put(ino, &inode)
        })?;
        if first >= last {
            return Ok(());
        }
        let cleared = self.clear(port, ino, first..last);
        self.leave(ino, cleared)?;
        // The hole is there: what is left is to count.
        let counted = self.making_room(|| self.end_trim(port, ino, None));
        let _ = self.leave(ino, counted);
        Ok(())
    }

    /// Frees what is mapped of pages of a file, which keeps their spans.
    fn clear(&self, port: &mut Port, ino: Ino, pages: Range<u64>) -> Result<()> {
        let mut from = pages.start;
        loop {
            let mut pieces = self.look(|core| {
                let inode = core.file(ino)?;
                core.pieces(&inode, from, SPANS_FREED_MAX)
            })?;
            pieces.retain(|piece| piece.at < pages.end);
            let Some(last) = pieces.last() else {
                return Ok(());
            };
            if self.release_shared(port, ino, &pieces, &pages)? > 0 {
                continue;
            }
            port.call_all(pieces.iter().map(|piece| discard(piece, &pages)))?;
            from = last.end();
        }
    }

    /// Where data or a hole begins, from an offset on.
    ///
    /// # Errors
    /// `ENXIO` at or beyond the end, and for data where there is none.
    pub fn seek(&self, port: &mut Port, ino: Ino, offset: u64, what: Seek) -> Result<u64> {
        let lock = self.data_lock(ino)?;
        let _shared = lock.read();
        let (inode, pieces) = self.look(|core| {
            let mut inode = core.file(ino)?;
            inode.size = core.end_of(ino, &inode)?;
            let pieces = core.pieces(&inode, offset / PAGE, usize::MAX)?;
            Ok((inode, pieces))
        })?;
        if offset >= inode.size {
            return Err(Errno::NXIO.into());
        }
        if lock.is_mapped() || lock.has_held() || inode.redo.is_some() {
            // What the kernel keeps, or is held, may lie in holes: all counts as data.
            return Ok(match what {
                Seek::Data => offset,
                Seek::Hole => inode.size,
            });
        }
        let mut data: Vec<Range<u64>> = Vec::new();
        for Piece { at, span, .. } in pieces {
            port.mapped(span.page..span.end(), |run| {
                let first = at + run.start - span.page;
                let end = at + run.end - span.page;
                match data.last_mut() {
                    Some(last) if last.end == first => last.end = end,
                    _ => data.push(first..end),
                }
            })?;
            let is_known = data.last().is_some_and(|run| match what {
                Seek::Data => run.end * PAGE > offset,
                Seek::Hole => run.end < at + (1 << span.order),
            });
            if is_known {
                break;
            }
        }
        let mut runs = data.into_iter().map(|run| run.start * PAGE..run.end * PAGE);
        match what {
            Seek::Data => runs
                .find(|run| run.end > offset)
                .map(|run| run.start.max(offset))
                .filter(|&at| at < inode.size)
                .ok_or(Errno::NXIO.into()),
            Seek::Hole => {
                let within = runs.find(|run| run.contains(&offset));
                Ok(within.map_or(offset, |run| run.end.min(inode.size)))
            }
        }
    }
}
