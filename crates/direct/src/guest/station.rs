//! One operation of a guest, from the row that tells of it to the row that is left: no
//! socket, no thread, no clock. [`super::File`] sees to what a station needs; whoever
//! simulates guests has legs of its own.
//!
//! Invariants: nothing is done but inside of the row's operation, after a look that nobody
//! keeps guests away; whatever fails is left to the kernel.

use super::growth;
use crate::board::{Board, Run};
use arrayvec::ArrayVec;
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::PageNo;
use pagemesh_base::layout::COPIES_MAX;
use pagemesh_base::slice::{Part, Run as PageRun, SliceError, check_parts};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{APPEND_PAGES_MAX, Growth};
use pagemesh_store::moment::{MOMENT_PAGES_MAX, Moment};
use pagemesh_volume::guests::{Picture, Place, RUNS_MAX, Row, Segment};
use pagemesh_volume::ring::{RECORD_BYTES_MAX, places_of, record_len};
use pagemesh_volume::{GuestLeg, overwrite_all, overwrite_together};
use std::cell::Cell;

/// A row, and a session of each leg. It belongs to one thread at a time.
pub struct Station<L> {
    row: usize,
    /// So many places of the ring are known to be taken.
    taken: u64,
    /// What the legs are of.
    pub(super) picture: Option<Picture>,
    pub(super) legs: ArrayVec<L, COPIES_MAX>,
    /// What is written where a copy follows: what a program has there may change meanwhile.
    copied: Vec<u8>,
    /// Where pages are composed. They begin with the last page of the file that `tail` tells.
    pub(super) pages: Vec<u8>,
    /// Its growth, and its turn.
    pub(super) tail: Option<(Growth, u64)>,
}

impl<L> Default for Station<L> {
    fn default() -> Station<L> {
        Station {
            row: 0,
            taken: 0,
            picture: None,
            legs: ArrayVec::new(),
            copied: Vec::new(),
            pages: Vec::new(),
            tail: None,
        }
    }
}

/// What an operation will do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// It reads.
    Read,
    /// It writes.
    Write,
}

/// What came of a try to write, but for a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// It is there, up to this byte of the file.
    Done(u64),
    /// The kernel has to do it.
    ByKernel,
    /// The mount may lend room for it.
    NoRoom,
}

/// What a leg said; none: the kernel has to do it.
pub type Worked<T> = Option<Result<T, SliceError>>;

/// Pages as they are at one moment, and what lies where of them.
type Lying<L> = (Box<Moment<<L as GuestLeg>::Media>>, Runs<Run>);

/// Runs of a range of as many pages as change together; the shortest span has eight.
pub(super) type Runs<T> = ArrayVec<T, MOMENT_PAGES_MAX>;

pub(super) fn runs(board: &Board, offset: u64, len: u64) -> Option<Runs<Run>> {
    let (mut at, end) = (offset, offset.checked_add(len)?);
    let mut runs = Runs::new();
    while at < end {
        let run = board.run(at, end - at)?;
        at += run.len;
        runs.try_push(run).ok()?;
    }
    Some(runs)
}

/// Inside of the row's operation, until it is dropped.
struct Inside<'m>(Row<'m>);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        // Who panics inside has done a part of it: that is seen to when this process has
        // ended.
        if !std::thread::panicking() {
            self.0.leave();
        }
    }
}

impl<L: GuestLeg> Station<L> {
    /// Has these legs from now on, and works by this picture.
    pub fn equip(&mut self, picture: Picture, legs: ArrayVec<L, COPIES_MAX>) {
        self.copied.resize(RECORD_BYTES_MAX, 0);
        self.pages.resize(APPEND_PAGES_MAX * PAGE_BYTES, 0);
        self.legs = legs;
        self.picture = Some(picture);
    }

    /// The mount gave it this row.
    pub fn take_row(&mut self, row: usize) {
        self.row = row;
        self.taken = 0;
    }

    /// Its row, once the mount gave one.
    pub fn row(&self) -> usize {
        self.row
    }

    /// Gives the legs back.
    pub fn strip(&mut self) {
        self.picture = None;
        self.legs.clear();
    }

    /// Its legs.
    pub fn legs(&self) -> &[L] {
        &self.legs
    }

    /// The same, to be used.
    pub fn legs_mut(&mut self) -> impl Iterator<Item = &mut L> {
        self.legs.iter_mut()
    }

    /// Whether it may work by what counts now.
    #[inline]
    #[must_use]
    pub fn is_ready(&self, segment: &Segment) -> bool {
        let generation = segment.generation();
        let has = self.picture.as_ref().map(|picture| picture.generation);
        generation != 0 && has == Some(generation)
    }

    /// The leg whose record is written last: were it another one, it might show what a dead
    /// guest left there alone, and nobody would have once that leg is lost.
    #[inline]
    fn read_leg(&self) -> Option<&L> {
        match defect::is(Defect::FirstLegRead) {
            true => self.legs.first(),
            false => self.legs.last(),
        }
    }

    #[inline]
    fn read_leg_mut(&mut self) -> Option<&mut L> {
        match defect::is(Defect::FirstLegRead) {
            true => self.legs.first_mut(),
            false => self.legs.last_mut(),
        }
    }

    /// Begins an operation on a file, if guests may.
    #[inline]
    pub fn begin<'a>(
        &'a mut self,
        segment: &'a Segment,
        board: &'a Board,
        ino: u64,
        (offset, len, intent): (u64, u64, Intent),
    ) -> Option<Operation<'a, L>> {
        let run = board.run(offset, len);
        match (intent, run) {
            (Intent::Write, Some(run)) => {
                // Fetches the lines that other cores had last.
                segment.expect_op();
                self.legs
                    .iter()
                    .for_each(|leg| leg.expect_write(run.offset));
            }
            (Intent::Read, Some(run)) => {
                self.read_leg().inspect(|leg| leg.expect_read(run.offset));
            }
            (_, None) => {}
        }
        let row = segment.row(self.row);
        row.enter(Place {
            file: ino,
            offset: 0,
            len: 0,
        });
        let inside = Inside(row);
        if let (Intent::Read, Some(run)) = (intent, run) {
            self.read_leg().inspect(|leg| leg.expect_page(run.offset));
        }
        // Only now: whoever keeps guests away sees the row, or is seen here.
        let is_closed = segment.is_closed() || board.is_closed();
        let may = self.is_ready(segment)
            && (!is_closed || defect::is(Defect::ClosedUnseen))
            && !board.is_outdated();
        may.then_some(Operation {
            segment,
            board,
            station: self,
            inside,
            must_call: false,
            done: 0,
        })
    }
}

/// An operation that has begun. Dropped, it has ended.
pub struct Operation<'a, L> {
    segment: &'a Segment,
    pub(super) board: &'a Board,
    pub(super) station: &'a mut Station<L>,
    inside: Inside<'a>,
    /// Who sends what is in the ring is to be woken before this ends.
    must_call: bool,
    /// Bytes that were overwritten, from the first on.
    done: usize,
}

impl<L: GuestLeg> Operation<'_, L> {
    /// Whether who sends what is in the ring is to be woken before this ends.
    #[inline]
    #[must_use]
    pub fn must_call(&self) -> bool {
        self.must_call
    }

    /// Reads bytes, fewer at the end. As many pages as change together are read as they
    /// are at one moment.
    #[inline]
    pub fn read(&mut self, into: &mut [u8], offset: u64) -> Worked<usize> {
        let rest = self.board.size().saturating_sub(offset);
        let len = usize::try_from(rest.min(into.len() as u64)).ok()?;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let most = MOMENT_PAGES_MAX * PAGE_BYTES - at as usize % PAGE_BYTES;
            let part = &mut into[done..len.min(done + most)];
            done += part.len();
            match self.read_together(at, part)? {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        Some(Ok(done))
    }

    /// Reads at most as many pages as change together.
    #[inline]
    fn read_together(&mut self, offset: u64, into: &mut [u8]) -> Worked<bool> {
        let epoch = self.station.picture.as_ref()?.epoch;
        let leg = self.station.read_leg_mut()?;
        let runs = runs(self.board, offset, into.len() as u64)?;
        let is_one_page = offset as usize % PAGE_BYTES + into.len() <= PAGE_BYTES;
        if is_one_page && let [run] = runs[..] {
            return Some(leg.read_into(run.offset, into, epoch).map(|()| true));
        }
        let mut pieces = Runs::new();
        let mut rest = into;
        for run in runs {
            let (part, after) = rest.split_at_mut_checked(run.len as usize)?;
            pieces.push((run.offset, part));
            rest = after;
        }
        Some(leg.read_together(&mut pieces, epoch))
    }

    /// Where bytes lie, fewer at the end, as they are at one moment, and what `with` has
    /// of the leg; none inside: it cannot be had.
    pub fn moment<T>(
        &mut self,
        offset: u64,
        len: usize,
        with: impl FnOnce(&L) -> Option<T>,
    ) -> Worked<Option<(Lying<L>, T)>> {
        let len = self.board.size().saturating_sub(offset).min(len as u64);
        let runs = runs(self.board, offset, len)?;
        let ranges: Runs<(u64, u64)> = runs.iter().map(|run| (run.offset, run.len)).collect();
        let epoch = self.station.picture.as_ref()?.epoch;
        let leg = self.station.read_leg_mut()?;
        let with = with(leg)?;
        let moment = leg.moment(&ranges, epoch);
        Some(moment.map(|moment| Some(((moment?, runs), with))))
    }

    /// Overwrites whole pages of several places, all of them or none.
    pub fn write_together(&mut self, parts: &[(u64, &[u8])]) -> Worked<()> {
        // A copy that follows gets records of few pages only. Behind the look that guests may.
        if self.segment.ring().is_followed() {
            return None;
        }
        let (page, kept) = (PAGE_BYTES as u64, growth::kept(self.board));
        let (mut changes, mut pages) = (Vec::new(), Vec::new());
        for (offset, data) in parts {
            let end = offset.checked_add(data.len() as u64)?;
            let is_whole = offset.is_multiple_of(page) && end.is_multiple_of(page);
            if !is_whole || end > kept {
                return None;
            }
            let mut rest = *data;
            for run in runs(self.board, *offset, data.len() as u64)? {
                let (own, after) = rest.split_at_checked(run.len as usize)?;
                rest = after;
                changes.push(Part::Write {
                    offset: run.offset,
                    data: Bytes::copy_from_slice(own),
                });
                pages.push(PageRun {
                    page: PageNo(run.offset / page),
                    count: run.len / page,
                });
            }
        }
        if pages.len() > RUNS_MAX || check_parts(&changes, u64::MAX).is_err() {
            return None;
        }
        self.inside.0.say_runs(&pages);
        let epoch = self.station.picture.as_ref()?.epoch;
        let next = || self.segment.next_op();
        let legs = &mut self.station.legs;
        Some(overwrite_together(legs, &changes, epoch, next))
    }

    /// Bytes of the first write of this operation that are on all legs, from its first on,
    /// however it ended: others may have seen them, and have overwritten them since.
    #[inline]
    #[must_use]
    pub fn done(&self) -> usize {
        self.done
    }

    /// Overwrites bytes that the file has; none: the board does not say where they lie, or there
    /// is no room to tell of all.
    #[inline]
    pub(super) fn overwrite(&mut self, data: &[u8], offset: u64) -> Worked<()> {
        let mut done = 0;
        // Behind the look that guests may: a copy that follows from now on waits for the row.
        let is_followed = self.segment.ring().is_followed();
        while done < data.len() {
            let at = offset + done as u64;
            let mut run = self.board.run(at, (data.len() - done) as u64)?;
            // Of several records some may be done when one fails.
            run.len = match is_followed {
                true => record_len(run.offset, run.len),
                false => {
                    let legs = self.station.legs.iter();
                    let each = legs.map(|leg| leg.record_len(run.offset, run.len));
                    each.min()?
                }
            };
            let part = &data[done..done + run.len as usize];
            if let Err(error) = self.put(part, run.offset)? {
                return Some(Err(error));
            }
            done += part.len();
            self.done = done;
        }
        Some(Ok(()))
    }

    /// Writes bytes to a place of the volume: where a copy follows, one record.
    #[inline]
    pub(super) fn put(&mut self, data: &[u8], offset: u64) -> Worked<()> {
        self.inside.0.say(offset, data.len() as u64);
        let segment = self.segment;
        if segment.ring().is_followed() {
            return self.put_followed(data, offset);
        }
        let epoch = self.station.picture.as_ref()?.epoch;
        let next = || segment.next_op();
        let legs = &mut self.station.legs;
        Some(overwrite_all(legs, offset, data, epoch, next))
    }

    /// Writes one record, and says so in the ring. None: there is no room for it.
    fn put_followed(&mut self, data: &[u8], offset: u64) -> Worked<()> {
        let (segment, row) = (self.segment, self.inside.0);
        let ring = segment.ring();
        let len = data.len() as u64;
        let station = &mut *self.station;
        if !ring.has_room(&mut station.taken) || record_len(offset, len) != len {
            return None;
        }
        let epoch = station.picture.as_ref()?.epoch;
        let copied = station.copied.get_mut(..data.len())?;
        copied.copy_from_slice(data);
        let places = places_of(offset, len);
        let claimed = Cell::new(None);
        let written = overwrite_all(&mut station.legs, offset, copied, epoch, || {
            debug_assert!(claimed.get().is_none(), "one record, one claim");
            let place = ring.claim(row, places);
            ring.expect(place);
            claimed.set(Some(place));
            segment.next_op()
        });
        self.must_call |= match (&written, claimed.get()) {
            (Ok(()), Some(place)) => ring.fill(place, offset, copied),
            (Err(_), Some(place)) => ring.give_up(place, places),
            (_, None) => false,
        };
        Some(written)
    }
}
