//! Writing, also behind the end of a file (RFD 016).
//!
//! Invariants: what may have a footer, or be copied in the board, is written under the
//! append lock, as whole pages in one record. The lock is taken inside of the row's operation,
//! and given back before that ends.

use super::{File, Inside, Intent, Station};
use crate::board::Board;
use pagemesh_base::slice::SliceError;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::Composed;
use rustix::time::{ClockId, clock_gettime};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_BYTES as u64;

/// What came of a try, but for a failure.
enum Tried {
    /// It is there, up to this byte of the file.
    Done(u64),
    ByKernel,
    /// The mount may lend room for it.
    NoRoom,
}

/// What a leg said.
type Answer = Result<Tried, SliceError>;

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
    /// Overwrites bytes that the file has, or goes on at its end; none: the kernel does it, all of it.
    /// See [`File::read`].
    #[must_use]
    pub fn write(&self, data: &[u8], offset: u64, may_prepare: bool) -> Option<usize> {
        // It ends somewhere.
        offset.checked_add(data.len() as u64)?;
        self.write_to(data, Some(offset), may_prepare)?;
        Some(data.len())
    }

    /// Writes bytes to the end, wherever that is by then; none: the kernel does it.
    /// Returns the end behind them. See [`File::read`].
    #[must_use]
    pub fn append(&self, data: &[u8], may_prepare: bool) -> Option<u64> {
        self.write_to(data, None, may_prepare)
    }

    fn write_to(&self, data: &[u8], offset: Option<u64>, may_prepare: bool) -> Option<u64> {
        for is_last in [false, true] {
            let end = || self.board.get().map_or(0, |board| board.size());
            let place = offset.unwrap_or_else(end);
            let (mut station, inside) =
                self.enter(place, data.len(), Intent::Write, may_prepare)?;
            match self.try_write(&mut station, &inside, data, offset)? {
                Err(error) => return self.fail(station, inside, &error),
                Ok(Tried::Done(end)) => {
                    self.note_written();
                    return Some(end);
                }
                Ok(Tried::ByKernel) => return None,
                Ok(Tried::NoRoom) if is_last || !may_prepare => return None,
                Ok(Tried::NoRoom) => {}
            }
            // Whoever lends waits for the row.
            drop(inside);
            drop(station);
            self.grows.store(true, Ordering::Relaxed);
            if !self.renew() {
                return None;
            }
        }
        None
    }

    fn try_write(
        &self,
        station: &mut MutexGuard<'_, Station>,
        inside: &Inside<'_>,
        data: &[u8],
        offset: Option<u64>,
    ) -> Option<Answer> {
        let board = self.board.get()?;
        let size = board.size();
        let is_lent = board.growth().is_some();
        match offset {
            Some(offset) if offset + data.len() as u64 <= kept(board) => {
                let written = self.overwrite(station, inside, data, offset)?;
                Some(written.map(|()| Tried::Done(offset + data.len() as u64)))
            }
            Some(offset) if offset > size => Some(Ok(Tried::ByKernel)),
            _ if !is_lent => Some(Ok(Tried::NoRoom)),
            _ => self.write_last(station, inside, data, offset),
        }
    }

    /// Writes to the last page, or behind the end.
    fn write_last(
        &self,
        station: &mut Station,
        inside: &Inside<'_>,
        data: &[u8],
        offset: Option<u64>,
    ) -> Option<Answer> {
        let board = self.board.get()?;
        let held = board.hold(station.row)?;
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
            && let Err(error) = self.overwrite(station, inside, before, offset)?
        {
            return Some(Err(error));
        }
        let Some(composed) = planned else {
            return done;
        };
        let len = composed.count * PAGE_BYTES;
        let run = board.run(composed.first * PAGE, len as u64)?;
        let is_one = |leg: &pagemesh_volume::MappedLeg| leg.atomic_pages() >= composed.count as u64;
        if run.len < len as u64 || !station.legs.iter().all(is_one) {
            return Some(Ok(Tried::ByKernel));
        }
        let mut pages = std::mem::take(&mut station.pages);
        // Whoever wrote last has it already.
        if station.tail.take() != Some((growth, held.turns())) {
            held.copy_tail(end, &mut pages);
        }
        composed.fill(growth, &mut pages, end, at, rest);
        let put = self.put(station, inside, &pages[..len], run.offset);
        if let Some(Ok(())) = put {
            held.publish(composed, &pages, (at - first_byte) as usize);
            let last = (composed.end / PAGE - composed.first) as usize * PAGE_BYTES;
            if last > 0 {
                pages.copy_within(last..last + (composed.end % PAGE) as usize, 0);
            }
            station.tail = Some((growth, held.turns()));
        }
        station.pages = pages;
        match put? {
            Ok(()) => done,
            Err(error) => Some(Err(error)),
        }
    }

    #[inline]
    pub(super) fn note_written(&self) {
        if let Some(board) = self.board.get() {
            let now = clock_gettime(ClockId::RealtimeCoarse);
            let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
            board.note_written(now_ns);
        }
    }
}
