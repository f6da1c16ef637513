//! Several pages as they were at one moment, without taking locks.
//!
//! A transaction holds the lock words of all its pages from before the first slot is
//! swapped until after the last. So slots whose words nobody held after they were loaded, and
//! that are the same once their pages were copied, are those of one moment in between.
//!
//! Invariants: nothing is shown that its checksum does not match; whoever reads holds up
//! nobody, and gives up where others never pause. A [`Moment`] that is still the same was
//! the same all the time: the frame of a page is used again only behind a swap of its slot,
//! each swap is counted by the slot's generation and takes a seq, and a moment is over
//! before as many seqs were taken as generations are told apart.

use crate::control::LockWords;
use crate::defect::{self, Defect};
use crate::pool_mapping::{Handle, PoolMapping, StoreError, frame_at};
use crate::session::Session;
use crate::slot::Slot;
use crate::wait;
use arrayvec::ArrayVec;
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

/// Pages of one moment: as many as change as a whole.
pub const CONSISTENT_READ_PAGES_MAX: usize = TRANSACTION_PAGES_MAX as usize;
/// Changes of the pool after which a moment is over: a slot's generation tells 4095
/// swaps apart, and each takes a seq of its own.
pub const CONSISTENT_READ_CHANGES_MAX: u64 = 4000;
/// Looks at pages that others are changing: some tens of microseconds, in which a
/// transaction ends unless its thread lost its processor.
const TRIES_MAX: u32 = 300;
const PAGE: u64 = PAGE_BYTES as u64;

/// A page and its slot.
#[derive(Clone, Copy)]
struct PageSlot {
    page: PageNo,
    at: usize,
    bits: u64,
    is_changing: bool,
    frame: FrameNo,
}

type PageSlots = ArrayVec<PageSlot, CONSISTENT_READ_PAGES_MAX>;

/// Bytes of an object, and where they go.
pub type ReadPiece<'b> = (u64, &'b mut [u8]);

/// Pages at one moment, in the order of the ranges that were asked for.
pub struct ConsistentRead<M> {
    /// Not counted: the pool must be let go of when its owner is gone.
    mapping: Weak<PoolMapping<M>>,
    seq: u64,
    slots: PageSlots,
}

impl<M: Media> ConsistentRead<M> {
    /// Where each page lies in the pool, first byte.
    pub fn page_offsets(&self) -> impl Iterator<Item = usize> + '_ {
        self.slots.iter().map(|found| frame_at(found.frame))
    }

    /// Whether all bytes there were the same from the moment on until now.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        // Whoever asks has read them: those loads come before these.
        fence(Ordering::Acquire);
        let Some(view) = self.mapping.upgrade() else {
            return false;
        };
        are_slots_unchanged(&view, self.seq, &self.slots) && !view.is_owner_gone()
    }
}

/// Whether slots are as they were found behind this seq.
fn are_slots_unchanged<M: Media>(view: &PoolMapping<M>, seq: u64, found: &PageSlots) -> bool {
    let mut found = found.iter();
    let is_same = found.all(|found| view.meta.load(found.at) == found.bits)
        || defect::is(Defect::SlotNotRechecked);
    // Only then: one that was swapped as often as it can tell apart is as it was.
    fence(Ordering::Acquire);
    let changes = view.control.seq().load(Ordering::Acquire) - seq;
    is_same && changes <= CONSISTENT_READ_CHANGES_MAX
}

/// Pages that a range touches.
fn touched_pages(offset: u64, len: u64) -> std::ops::Range<u64> {
    offset / PAGE..(offset + len).div_ceil(PAGE)
}

impl<M: Media> Session<M> {
    /// Reads bytes of several places as they were at one moment, each page checked
    /// against its checksum. False, with anything in the buffers: there are too many
    /// pages, or holes among them, or others change them all the time.
    ///
    /// # Errors
    /// As [`SessionAlone::read`].
    pub fn read_consistent(
        &mut self,
        handle: &Handle,
        pieces: &mut [ReadPiece<'_>],
        epoch: Epoch,
    ) -> Result<bool, StoreError> {
        let ranges = pieces.iter().map(|(offset, into)| (*offset, into.len()));
        let ranges: ArrayVec<(u64, u64), CONSISTENT_READ_PAGES_MAX> = ranges
            .take(CONSISTENT_READ_PAGES_MAX)
            .map(|(offset, len)| (offset, len as u64))
            .collect();
        if ranges.len() < pieces.len() {
            return Ok(false);
        }
        let mut found = PageSlots::new();
        self.copy_consistent(handle, &ranges, epoch, &mut found, |view, found| {
            let mut found = found.iter();
            for (offset, into) in &mut *pieces {
                copy_piece(view, &mut found, *offset, into)?;
            }
            Ok(())
        })
    }

    /// Finds whole pages as they are at one moment, and checks them. None: as
    /// [`SessionAlone::read_consistent`].
    ///
    /// # Errors
    /// As [`SessionAlone::read`].
    pub fn map_consistent(
        &mut self,
        handle: &Handle,
        ranges: &[(u64, u64)],
        epoch: Epoch,
    ) -> Result<Option<Box<ConsistentRead<M>>>, StoreError> {
        let mut whole = [0; PAGE_BYTES];
        let mut moment = Box::new(ConsistentRead {
            mapping: Arc::downgrade(&self.mapping),
            // Before any slot is loaded.
            seq: self.mapping.control.seq().load(Ordering::Acquire),
            slots: PageSlots::new(),
        });
        let is_found =
            self.copy_consistent(handle, ranges, epoch, &mut moment.slots, |view, found| {
                let mut found = found.iter();
                found.try_for_each(|it| view.copy_frame(it.frame, it.page, &mut whole).map(drop))
            })?;
        Ok(is_found.then_some(moment))
    }

    /// Copies pages until they are those of one moment. False: there is none.
    fn copy_consistent(
        &mut self,
        handle: &Handle,
        ranges: &[(u64, u64)],
        epoch: Epoch,
        found: &mut PageSlots,
        mut copy: impl FnMut(&PoolMapping<M>, &PageSlots) -> Result<(), StoreError>,
    ) -> Result<bool, StoreError> {
        for &(offset, len) in ranges {
            self.mapping.check_range(handle, offset, len)?;
        }
        let touched = ranges.iter().map(|&(offset, len)| {
            let pages = touched_pages(offset, len);
            pages.end - pages.start
        });
        if touched.sum::<u64>() > CONSISTENT_READ_PAGES_MAX as u64 {
            return Ok(false);
        }
        self.with_op(handle, epoch, |session| {
            for _ in 0..TRIES_MAX {
                let seq = session.mapping.control.seq().load(Ordering::Acquire);
                if !session.find_slots(handle, ranges, found)? {
                    return Ok(false);
                }
                // Behind the loads of the slots. Who changes a page in place holds its word,
                // but may have let go of it since its slot was loaded.
                let is_changing = found.iter().any(|found| found.is_changing);
                if is_changing || !session.are_unlocked(handle, ranges) {
                    wait::pause();
                    continue;
                }
                let copied = copy(&session.mapping, found);
                // The slots must not be loaded again before the copy.
                fence(Ordering::Acquire);
                if are_slots_unchanged(&session.mapping, seq, found) {
                    return copied.map(|()| true);
                }
            }
            Ok(false)
        })
    }

    /// The slots of all pages; false: one is a hole.
    fn find_slots(
        &mut self,
        handle: &Handle,
        ranges: &[(u64, u64)],
        all: &mut PageSlots,
    ) -> Result<bool, StoreError> {
        all.clear();
        for &(offset, len) in ranges {
            for page in touched_pages(offset, len).map(PageNo) {
                let Some(at) = self.slot_at(handle, page)? else {
                    return Ok(false);
                };
                let slot: Slot = self.mapping.slot(at, page)?;
                let Some(frame) = slot.frame() else {
                    return Ok(false);
                };
                let bits = slot.encode();
                all.push(PageSlot {
                    page,
                    at,
                    bits,
                    is_changing: slot.is_changing(),
                    frame,
                });
            }
        }
        Ok(true)
    }

    /// Whether nobody holds a lock word of these pages.
    fn are_unlocked(&self, handle: &Handle, ranges: &[(u64, u64)]) -> bool {
        if defect::is(Defect::LocksNotChecked) {
            return true;
        }
        ranges.iter().all(|&(offset, len)| {
            let pages = touched_pages(offset, len);
            let count = pages.end - pages.start;
            let words = LockWords::of(handle.object, PageNo(pages.start), count.max(1));
            self.mapping.control.is_unlocked(&words)
        })
    }
}

fn copy_piece<'f, M: Media>(
    view: &PoolMapping<M>,
    found: &mut impl Iterator<Item = &'f PageSlot>,
    offset: u64,
    into: &mut [u8],
) -> Result<(), StoreError> {
    let mut within = (offset % PAGE) as usize;
    let mut rest = into;
    while !rest.is_empty() {
        let found = found.next().expect("one for each page");
        let count = rest.len().min(PAGE_BYTES - within);
        let (part, after) = rest.split_at_mut(count);
        match <&mut [u8; PAGE_BYTES]>::try_from(&mut *part) {
            Ok(whole) => drop(view.copy_frame(found.frame, found.page, whole)?),
            Err(_) => {
                let mut whole = [0; PAGE_BYTES];
                view.copy_frame(found.frame, found.page, &mut whole)?;
                part.copy_from_slice(&whole[within..within + count]);
            }
        }
        (within, rest) = (0, after);
    }
    Ok(())
}
