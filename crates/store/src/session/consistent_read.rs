//! Consistent reads: several pages of one point in time, without locks.
//!
//! A transaction holds the lock words of all its pages from before the first slot swap until after
//! the last. A consistent read loads the slots, checks that no session holds their lock words,
//! copies the pages, and loads the slots again. If they are unchanged, the copies show the pages
//! at one point in time.
//!
//! Invariants: no page is returned unless its checksum matches. The reader delays no other session,
//! and gives up if others change the pages all the time. If a [`ConsistentRead`] is unchanged, it
//! was unchanged all the time: the frame of a page is reused only after a swap of its slot, and the
//! slot's generation counts each swap. Each swap also takes a seq, and a consistent read expires
//! before as many seqs were taken as the generation tells apart.

use crate::defect::{self, Defect};
use crate::format::geometry::frame_at;
use crate::format::slot::Slot;
use crate::session::Session;
use crate::shared::control::LockWords;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::{Handle, PoolMapping};
use crate::shared::wait;
use arrayvec::ArrayVec;
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

/// Pages of one consistent read: as many as a transaction changes as a whole.
pub const CONSISTENT_READ_PAGES_MAX: usize = TRANSACTION_PAGES_MAX as usize;
/// Changes of the pool after which a consistent read expires. A slot's generation tells 4095 swaps
/// apart, and each takes a seq of its own.
pub const CONSISTENT_READ_CHANGES_MAX: u64 = 4000;
/// Attempts to read pages that others are changing: some tens of microseconds. A transaction ends
/// in that time unless its thread loses its processor.
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

/// An offset in an object, and the buffer for the bytes there.
pub type ReadPiece<'b> = (u64, &'b mut [u8]);

/// Pages at one point in time, in the order of the requested ranges.
pub struct ConsistentRead<M> {
    /// A weak reference: the mapping must be dropped when its owner is gone.
    mapping: Weak<PoolMapping<M>>,
    seq: u64,
    slots: PageSlots,
}

impl<M: Media> ConsistentRead<M> {
    /// The first byte of each page in the pool.
    pub fn page_offsets(&self) -> impl Iterator<Item = usize> + '_ {
        self.slots.iter().map(|found| frame_at(found.frame))
    }

    /// Whether the bytes of all pages were unchanged from the time of the read until now.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        // The caller has read the pages: those loads come before these.
        fence(Ordering::Acquire);
        let Some(mapping) = self.mapping.upgrade() else {
            return false;
        };
        are_slots_unchanged(&mapping, self.seq, &self.slots) && !mapping.is_owner_gone()
    }
}

/// Whether the slots are unchanged since they were found after this seq.
fn are_slots_unchanged<M: Media>(mapping: &PoolMapping<M>, seq: u64, found: &PageSlots) -> bool {
    let mut found = found.iter();
    let is_same = found.all(|found| mapping.meta.load(found.at) == found.bits)
        || defect::is(Defect::SlotNotRechecked);
    // This load comes last: a slot that was swapped as often as its generation counts looks
    // unchanged.
    fence(Ordering::Acquire);
    let changes = mapping.control.seq().load(Ordering::Acquire) - seq;
    is_same && changes <= CONSISTENT_READ_CHANGES_MAX
}

/// Pages that a range touches.
fn touched_pages(offset: u64, len: u64) -> std::ops::Range<u64> {
    offset / PAGE..(offset + len).div_ceil(PAGE)
}

impl<M: Media> Session<M> {
    /// Reads several ranges at one point in time, and checks each page against its checksum. False,
    /// with arbitrary bytes in the buffers, if there are too many pages, if one is a hole, or if
    /// others change them all the time.
    ///
    /// # Errors
    /// As [`Session::read`].
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
        self.copy_consistent(handle, &ranges, epoch, &mut found, |mapping, found| {
            let mut found = found.iter();
            for (offset, into) in &mut *pieces {
                copy_piece(mapping, &mut found, *offset, into)?;
            }
            Ok(())
        })
    }

    /// Finds whole pages at one point in time, and checks them. None where
    /// [`Session::read_consistent`] returns false.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub fn map_consistent(
        &mut self,
        handle: &Handle,
        ranges: &[(u64, u64)],
        epoch: Epoch,
    ) -> Result<Option<Box<ConsistentRead<M>>>, StoreError> {
        let mut whole = [0; PAGE_BYTES];
        let mut read = Box::new(ConsistentRead {
            mapping: Arc::downgrade(&self.mapping),
            // The seq is loaded before any slot.
            seq: self.mapping.control.seq().load(Ordering::Acquire),
            slots: PageSlots::new(),
        });
        let is_found =
            self.copy_consistent(handle, ranges, epoch, &mut read.slots, |mapping, found| {
                let mut found = found.iter();
                found.try_for_each(|it| mapping.copy_frame(it.frame, it.page, &mut whole).map(drop))
            })?;
        Ok(is_found.then_some(read))
    }

    /// Copies pages until the copies show them at one point in time. False if there is no such time.
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
                // This check follows the loads of the slots. A session that changes a page in place
                // holds its lock word, but it may have released the word since the slot was loaded.
                let is_changing = found.iter().any(|found| found.is_changing);
                if is_changing || !session.are_unlocked(handle, ranges) {
                    wait::pause();
                    continue;
                }
                let copied = copy(&session.mapping, found);
                // The slots must not be loaded again before the copy.
                fence(Ordering::Acquire);
                if are_slots_unchanged(&session.mapping, seq, found) {
                    let control = &session.mapping.control;
                    let hint = session.hint;
                    found
                        .iter()
                        .for_each(|it| control.warm_frame(it.frame, hint));
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

    /// Whether no session holds a lock word of these pages.
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
    mapping: &PoolMapping<M>,
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
            Ok(whole) => drop(mapping.copy_frame(found.frame, found.page, whole)?),
            Err(_) => {
                let mut whole = [0; PAGE_BYTES];
                mapping.copy_frame(found.frame, found.page, &mut whole)?;
                part.copy_from_slice(&whole[within..within + count]);
            }
        }
        (within, rest) = (0, after);
    }
    Ok(())
}
