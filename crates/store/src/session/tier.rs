//! Moves of pages between memory and flash.
//!
//! 1. [`Session::copy_pages`] copies pages, each with its slot and the word of its frame, without locks.
//! 2. A demotion writes the copies into reserved flash frames ([`PageMove::write_to_flash`]), and [`Session::sync_moves`]
//!    makes them durable. A promotion has nothing to write yet.
//! 3. [`Session::commit_moves`] takes the lock words, and compares slot and word with the copy's. A page
//!    that changed meanwhile stays. The record that names the new frames keeps the birth of its pages.
//!
//! Invariants: the data of a page is durable on flash before a record names the frame. No lock is held, and no
//! operation is in progress, while a device reads or writes.

use super::operation::{lock_run, unlock_and_end};
use super::{LegSession, Page, Session};
use crate::defect::{self, Defect};
use crate::format::devices::DeviceState;
use crate::format::frame_word::FrameWord;
use crate::format::geometry::frame_at;
use crate::format::record::{Change, NO_SUMS, lines};
use crate::format::slot::Slot;
use crate::format::table::NODE_SLOTS;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::{Handle, PoolMapping};
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MapError, Media, UnfencedStores};
use std::ops::Range;

/// Pages of one record of moves: those of one lock word.
const RUN_PAGES_MAX: u64 = 16;
/// The heat of a promoted page, which was touched twice.
const PROMOTED_HEAT: u8 = 2;

/// A page that moves between memory and flash.
pub struct PageMove {
    page: PageNo,
    /// The slot at the time of the copy.
    old: Slot,
    /// The word of its frame at the time of the copy.
    word: FrameWord,
    bytes: Box<Page>,
    /// The flash frame with the copy, and its sums. None for a promotion.
    flash: Option<(FrameNo, PageChecksums)>,
    is_moved: bool,
    is_pinned: bool,
}

impl PageMove {
    /// The page.
    #[must_use]
    pub fn page(&self) -> PageNo {
        self.page
    }

    /// The flash frame that got the copy.
    #[must_use]
    pub fn flash_frame(&self) -> Option<FrameNo> {
        self.flash.map(|(frame, _)| frame)
    }

    /// Marks the page as pinned once it is promoted.
    pub fn pin(&mut self) {
        self.is_pinned = true;
    }

    /// Whether a record has moved the page.
    #[must_use]
    pub fn is_moved(&self) -> bool {
        self.is_moved
    }

    /// The birth that a move keeps. An unknown one is 0.
    fn birth(&self) -> Epoch {
        self.word.birth().unwrap_or(Epoch(0))
    }

    /// Writes the copy into a reserved flash frame. It is durable after the next sync of the medium.
    pub fn write_to_flash<M: Media>(&mut self, mapping: &PoolMapping<M>, frame: FrameNo) {
        let target = (&*mapping.data, frame_at(frame));
        let (sums, stores) = M::stream_page(&[target], &self.bytes);
        // A fence orders nothing on flash.
        let _synced_later = stores;
        self.flash = Some((frame, sums));
    }
}

/// A page and its slot, found within an operation.
struct FoundPage {
    page: PageNo,
    slot: Slot,
    frame: FrameNo,
    word: FrameWord,
}

impl<M: Media> Session<M> {
    /// Copies the pages of a range whose frames are wanted. Leaves out pages that change meanwhile, and damaged ones. May
    /// wait for a device.
    ///
    /// # Errors
    /// When the object is gone, or the range is beyond its end.
    pub fn copy_pages(
        &mut self,
        handle: &Handle,
        pages: Range<u64>,
        is_wanted: impl Fn(FrameNo) -> bool,
    ) -> Result<Vec<PageMove>, StoreError> {
        let found = self.find_pages(handle, pages, is_wanted)?;
        let mapping = &self.mapping;
        let copy = |found: FoundPage| {
            let mut bytes = Box::new([0; PAGE_BYTES]);
            // The frame may have another page by now: then the checksum differs, or the slot does at the commit.
            let read = mapping.data.read_page(frame_at(found.frame), &mut bytes);
            (read == found.word.crc()).then_some(PageMove {
                page: found.page,
                old: found.slot,
                word: found.word,
                bytes,
                flash: None,
                is_moved: false,
                is_pinned: false,
            })
        };
        Ok(found.into_iter().filter_map(copy).collect())
    }

    fn find_pages(
        &mut self,
        handle: &Handle,
        pages: Range<u64>,
        is_wanted: impl Fn(FrameNo) -> bool,
    ) -> Result<Vec<FoundPage>, StoreError> {
        let mut found = Vec::new();
        let mapping = self.mapping.clone();
        let bounds = mapping.clone_bounds(handle);
        self.visit_slots(handle, pages, Epoch(u32::MAX), |page, _, slot| {
            let slot = slot.filter(|slot| !slot.is_changing());
            let frame = slot.and_then(Slot::frame).filter(|&frame| is_wanted(frame));
            if let (Some(slot), Some(frame)) = (slot, frame) {
                let word = mapping.frame_word(frame);
                if !bounds.is_shared(word.birth().unwrap_or(Epoch(0))) {
                    found.push(FoundPage {
                        page,
                        slot,
                        frame,
                        word,
                    });
                }
            }
            true
        })?;
        Ok(found)
    }

    /// Makes copies on flash durable. The caller holds no lock of the pool.
    ///
    /// # Errors
    /// When the medium fails, for ever.
    pub fn sync_moves(&self) -> Result<(), MapError> {
        match defect::is(Defect::DemotedBeforeSync) {
            true => Ok(()),
            false => self.mapping.data.sync(),
        }
    }

    /// Commits moves of pages in rising order. Those with a flash frame are demotions and the others are promotions,
    /// which take granted frames; all are of one kind. The caller has called [`Session::sync_moves`].
    ///
    /// # Errors
    /// When the object is gone, or the pool lacks room. Moves before it are committed.
    pub fn commit_moves(
        &mut self,
        handle: &Handle,
        moves: &mut [PageMove],
    ) -> Result<(), StoreError> {
        let mut rest = moves;
        while !rest.is_empty() {
            let len = run_len(rest, self.pages_max());
            let done = self.commit_run(handle, &mut rest[..len])?;
            rest = &mut rest[done..];
        }
        Ok(())
    }

    /// Commits the first run of pages that are unchanged. Returns the moves that are done with.
    fn commit_run(&mut self, handle: &Handle, run: &mut [PageMove]) -> Result<usize, StoreError> {
        let (page, count) = (run[0].page, run.len());
        let frames = match run[0].flash {
            Some(_) => 0,
            None => count as u64,
        };
        self.ensure_resources(frames, lines(count))?;
        match self.begin_op(handle, Epoch(u32::MAX)) {
            // The owner recalled the grants in between: the caller begins again.
            Err(StoreError::TimedOut) => return Ok(0),
            entered => entered?,
        };
        let at = match self.slot_at(handle, page) {
            Ok(Some(at)) => at,
            other => {
                self.end_op();
                return other.map(|_| count);
            }
        };
        let mut leg = LegSession {
            session: self,
            handle: *handle,
        };
        lock_run(std::slice::from_mut(&mut leg), page, count as u64)
            .map_err(|failure| failure.cause)?;
        let done = leg.session.commit_locked(handle, at, run);
        unlock_and_end(&mut leg);
        done
    }

    /// Commits the first run of unchanged pages of one birth. The caller holds the locks.
    fn commit_locked(
        &mut self,
        handle: &Handle,
        at: usize,
        run: &mut [PageMove],
    ) -> Result<usize, StoreError> {
        let can_move = |(index, it): (usize, &PageMove)| self.can_move(at + index * 8, it);
        let are_movable: Vec<bool> = run.iter().enumerate().map(can_move).collect();
        let Some(first) = are_movable.iter().position(|&it| it) else {
            return Ok(run.len());
        };
        let birth = run[first].birth();
        let can_join = |&at: &usize| are_movable[at] && run[at].birth() == birth;
        let moved = (first..run.len()).take_while(can_join).count();
        let moving = &mut run[first..first + moved];
        self.commit_unchanged(handle, at + first * 8, moving)?;
        Ok(first + moved)
    }

    /// Whether the page is as it was when it was copied, and the new frame can be used.
    fn can_move(&self, at: usize, copy: &PageMove) -> bool {
        let found = self.mapping.slot(at, copy.page);
        let is_same = match defect::is(Defect::MovedWithoutCompare) {
            true => found.is_ok_and(|found| found.frame() == copy.old.frame()),
            false => found == Ok(copy.old),
        };
        let geometry = self.mapping.geometry();
        let has_device = copy.flash_frame().is_none_or(|frame| {
            let device = geometry.devices.device_of(frame.0);
            device.is_some_and(|device| device.state == DeviceState::Active)
        });
        let has_sum = copy.old.frame().is_some_and(|frame| {
            defect::is(Defect::MovedWithoutCompare) || self.mapping.frame_word(frame) == copy.word
        });
        is_same && has_sum && has_device
    }

    fn commit_unchanged(
        &mut self,
        handle: &Handle,
        at: usize,
        moves: &mut [PageMove],
    ) -> Result<(), StoreError> {
        let is_promotion = moves.iter().all(|it| it.flash.is_none());
        if is_promotion {
            self.take_frames(moves.len() as u64);
            for (&frame, it) in self.frames.iter().zip(&*moves) {
                match it.is_pinned {
                    true => self.mapping.control.pin_frame(frame),
                    false => self.mapping.control.set_heat(frame, PROMOTED_HEAT),
                }
            }
        }
        self.record.changes.clear();
        for (index, it) in moves.iter().enumerate() {
            let to = it.flash_frame().unwrap_or_else(|| self.frames[index]);
            let old = match defect::is(Defect::MovedWithoutCompare) {
                true => self.mapping.slot(at + index * 8, it.page)?,
                false => it.old,
            };
            self.record.changes.push(Change {
                old,
                new: old.map(to),
                sums: NO_SUMS,
            });
        }
        self.encode_move(handle, (moves[0].page, moves[0].birth()), at);
        let mut stores: Option<UnfencedStores> = None;
        for (index, it) in moves.iter_mut().enumerate() {
            // Also if a slot turns out to be damaged below: the record names the frames.
            it.is_moved = true;
            match it.flash {
                Some((_, sums)) => self.set_sums(index, sums),
                None => {
                    let target = (&*self.mapping.data, frame_at(self.frames[index]));
                    let (sums, streamed) = M::stream_page(&[target], &it.bytes);
                    self.set_sums(index, sums);
                    stores = Some(streamed.after(stores.take()));
                }
            }
        }
        self.commit_encoded_move(moves[0].page, at, stores)
    }
}

/// The moves at the start of a list that one record can have: consecutive pages of one lock word.
fn run_len(moves: &[PageMove], pages_max: u64) -> usize {
    let first = moves[0].page.0;
    let in_lock = (first / RUN_PAGES_MAX + 1) * RUN_PAGES_MAX;
    let end = in_lock.min(first + pages_max);
    const { assert!(NODE_SLOTS.is_multiple_of(RUN_PAGES_MAX)) };
    let pages = (first..end).zip(moves);
    pages.take_while(|(page, it)| it.page.0 == *page).count()
}
