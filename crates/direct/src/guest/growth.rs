//! Writing, also behind the end of a file (RFD 016).
//!
//! Invariants: what may have a footer, or be copied in the board, is written under the
//! append lock, as whole pages in one record. The lock is taken inside of the row's operation,
//! and given back before that ends.

use super::File;
use super::station::{Intent, Operation, Tried, Worked};
use crate::account::Why;
use crate::board::Board;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::Composed;
use pagemesh_volume::GuestLeg;
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_BYTES as u64;

/// Up to where bytes are overwritten without the append lock.
pub(super) fn kept(board: &Board) -> u64 {
    let size = board.size();
    match board.growth().is_some() {
        // The end only rises.
        true => size / PAGE * PAGE,
        false => size,
    }
}

impl File {
    /// Overwrites bytes that the file has, or goes on at its end; none: the kernel does it, all of
    /// it. Returns how many were written, from the first on: the kernel does the rest, and
    /// must not repeat what others may have seen. See [`File::read`].
    #[must_use]
    pub fn write(&self, data: &[u8], offset: u64) -> Option<usize> {
        // It ends somewhere.
        offset.checked_add(data.len() as u64)?;
        let (_, written) = self.or_note(self.write_to(data, Some(offset)))?;
        Some(written)
    }

    /// Writes bytes to the end, wherever that is by then; none: the kernel does it.
    /// Returns the end behind them. See [`File::read`].
    #[must_use]
    pub fn append(&self, data: &[u8]) -> Option<u64> {
        let (end, _) = self.or_note(self.write_to(data, None))?;
        Some(end)
    }

    /// Where it ends, and how many bytes were written: fewer only of an overwriting.
    fn write_to(&self, data: &[u8], offset: Option<u64>) -> Result<(u64, usize), Why> {
        for is_last in [false, true] {
            let end = || self.board.get().map_or(0, |board| board.size());
            let place = (offset.unwrap_or_else(end), data.len(), Intent::Write);
            let mut done = 0;
            let is_done = |tried: &Tried| matches!(tried, Tried::Done(_));
            let tried = self.operate(place, is_done, |operation| {
                let tried = operation.write(data, offset);
                done = match tried {
                    Some(Ok(Tried::Done(_))) => data.len(),
                    _ => operation.done(),
                };
                if done > 0 {
                    self.note_written();
                }
                tried
            });
            match (tried, offset) {
                (Ok(Tried::Done(end)), _) => return Ok((end, data.len())),
                (_, Some(offset)) if done > 0 => return Ok((offset + done as u64, done)),
                (Err(why), _) => return Err(why),
                (Ok(Tried::ByKernel), _) => return Err(Why::Growth),
                (Ok(Tried::NoRoom), _) if is_last => return Err(Why::Growth),
                (Ok(Tried::NoRoom), _) => {}
            }
            // Whoever lends waits for the row.
            self.grows.store(true, Ordering::Relaxed);
            self.renew()?;
        }
        Err(Why::Growth)
    }
}

impl<L: GuestLeg> Operation<'_, L> {
    /// Overwrites bytes that the file has, or goes on at its end; without an offset, writes
    /// to the end, wherever that is by then.
    #[inline]
    pub fn write(&mut self, data: &[u8], offset: Option<u64>) -> Worked<Tried> {
        let board = self.board;
        let size = board.size();
        let is_lent = board.growth().is_some();
        match offset {
            Some(offset) if offset + data.len() as u64 <= kept(board) => {
                let written = self.overwrite(data, offset)?;
                Some(written.map(|()| Tried::Done(offset + data.len() as u64)))
            }
            Some(offset) if offset > size => Some(Ok(Tried::ByKernel)),
            _ if !is_lent => Some(Ok(Tried::NoRoom)),
            _ => self.write_last(data, offset),
        }
    }

    /// Writes to the last page, or behind the end.
    fn write_last(&mut self, data: &[u8], offset: Option<u64>) -> Worked<Tried> {
        let board = self.board;
        let held = board.hold(self.station.row())?;
        let growth = board.growth()?;
        let end = board.size();
        let offset = offset.unwrap_or(end);
        let first_byte = end / PAGE * PAGE;
        // What lies below the last page is overwritten first.
        let below = first_byte.saturating_sub(offset).min(data.len() as u64) as usize;
        let (before, rest) = data.split_at(below);
        let at = offset + below as u64;
        let done = Some(Ok(Tried::Done(offset + data.len() as u64)));
        let planned = match rest.is_empty() {
            true => None,
            false => match Composed::plan(growth, end, at, rest.len()) {
                None => return Some(Ok(Tried::NoRoom)),
                planned => planned,
            },
        };
        if !before.is_empty()
            && let Err(error) = self.overwrite(before, offset)?
        {
            return Some(Err(error));
        }
        let Some(composed) = planned else {
            return done;
        };
        let len = composed.count * PAGE_BYTES;
        let run = board.run(composed.first * PAGE, len as u64)?;
        let is_one = |leg: &L| leg.atomic_pages() >= composed.count as u64;
        if run.len < len as u64 || !self.station.legs.iter().all(is_one) {
            return Some(Ok(Tried::ByKernel));
        }
        let mut pages = std::mem::take(&mut self.station.pages);
        // Whoever wrote last has it already.
        if self.station.tail.take() != Some((growth, held.turns())) {
            held.copy_tail(end, &mut pages);
        }
        composed.fill(growth, &mut pages, end, at, rest);
        let put = self.put(&pages[..len], run.offset);
        if let Some(Ok(())) = put {
            held.publish(composed, &pages, (at - first_byte) as usize);
            let last = (composed.end / PAGE - composed.first) as usize * PAGE_BYTES;
            if last > 0 {
                pages.copy_within(last..last + (composed.end % PAGE) as usize, 0);
            }
            self.station.tail = Some((growth, held.turns()));
        }
        self.station.pages = pages;
        match put? {
            Ok(()) => done,
            Err(error) => Some(Err(error)),
        }
    }
}
