//! The records of an operation, one for each leg: encoded before the data is streamed, committed by
//! one fence, and published in the slots and the control segment.
//!
//! Invariants:
//! - nothing fails between the taking of a seq and the publication of its record;
//! - the slots and patches of a record are flushed for the fence of the next one. The session
//!   remembers one range of unflushed slots, all in one line or of one record.

use super::operation::{FirstSlots, unlock_and_end};
use super::{LegFailure, LegSession, Page, Session, defects};
use crate::defect::{self, Defect};
use crate::format::geometry::frame_at;
use crate::format::record::{add_checksum, set_sums};
use crate::format::slot::Slot;
use crate::shared::control::FrameRun;
use crate::shared::error::{StoreError, damaged_page_error};
use crate::shared::pool_mapping::Handle;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::ids::{Epoch, FrameNo, PageNo, Seq};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Media, UnfencedStores};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// Frames in a row from which on their memory is mapped before the stores: the call costs less than a fault or two.
const PREPARED_FRAMES_MIN: u64 = 32;

/// The order of a record, and the birth of its pages.
#[derive(Clone, Copy)]
pub(crate) struct RecordStamp {
    pub(crate) stamp: Stamp,
    /// None if the record is their birth.
    pub(crate) kept_birth: Option<Epoch>,
}

impl From<Stamp> for RecordStamp {
    fn from(stamp: Stamp) -> RecordStamp {
        let kept_birth = None;
        RecordStamp { stamp, kept_birth }
    }
}

/// Takes frames, journal room and a seq on every leg, and encodes the records.
pub(super) fn encode_all<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    count: usize,
    stamp: impl Into<RecordStamp>,
    slots: &FirstSlots,
) {
    let stamp = stamp.into();
    for leg in legs.iter_mut() {
        let session = &mut *leg.session;
        session.assign_frames(count);
        session.encode_record(&leg.handle, 0, page, stamp, true);
    }
    flush_pending_slots_all(legs, slots);
}

impl<M: Media> Session<M> {
    /// Assigns a granted frame to each change.
    pub(super) fn assign_frames(&mut self, count: usize) {
        self.take_frames(count as u64);
        for (change, &frame) in self.record.changes.iter_mut().zip(&self.frames) {
            change.new = change.old.map(frame);
            let control = &self.mapping.control;
            control.warm_replaced(change.old.frame(), frame, self.hint);
            // Without the prefetch the swap of the slot would wait for the store to that entry.
            self.mapping
                .meta
                .prefetch(self.mapping.geometry().frame_entry_at(frame));
        }
    }

    /// Takes `count` granted frames. `ensure_resources` has ensured them.
    pub(crate) fn take_frames(&mut self, count: u64) {
        self.frames.clear();
        while (self.frames.len() as u64) < count {
            if self.grants.run.len == 0 {
                let cells = self.mapping.control.session_cells(self.number);
                let end = cells.ring_end().load(Ordering::Acquire);
                assert!(
                    self.grants.next < end,
                    "ensure_resources granted the frames"
                );
                self.grants.run = cells.run(self.grants.next);
                self.grants.next += 1;
                let numbers = self.mapping.geometry().frame_numbers();
                let FrameRun { start, len } = self.grants.run;
                let ends = [start, start + len - 1].map(FrameNo);
                assert!(
                    ends.iter().all(|&it| numbers.contains(it)),
                    "granted frames"
                );
            }
            let taken = self.grants.run.len.min(count - self.frames.len() as u64);
            let start = self.grants.run.start;
            self.frames.extend((start..start + taken).map(FrameNo));
            if taken >= PREPARED_FRAMES_MIN {
                let bytes = taken as usize * PAGE_BYTES;
                self.mapping
                    .data
                    .prepare_stores(frame_at(FrameNo(start)), bytes);
            }
            self.grants.run.start += taken;
            self.grants.run.len -= taken;
        }
        self.grants.consumed += count;
    }

    /// Reserves room in the journal, takes a seq and encodes the record of `self.record.changes`,
    /// without the sums of its data. All of that comes before the data is streamed. A load that
    /// spans several recent stores would wait until every streamed byte has left the core.
    pub(super) fn encode_record(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        stamp: impl Into<RecordStamp>,
        is_summed: bool,
    ) {
        self.begin_record(handle, level, page, stamp, is_summed);
        self.record.encode(&mut self.encoded);
    }

    /// As `encode_record`, without the encoding.
    pub(crate) fn begin_record(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        stamp: impl Into<RecordStamp>,
        is_summed: bool,
    ) {
        let RecordStamp { stamp, kept_birth } = stamp.into();
        self.reserve_journal(self.record.lines());
        self.take_seq();
        let record = &mut self.record;
        record.object = handle.object;
        record.epoch = stamp.epoch;
        record.level = level;
        record.page = page;
        record.op = stamp.op;
        record.open = stamp.open_ops;
        record.kept_birth = kept_birth.filter(|_| !defect::is(Defect::CopyBornNow));
        record.is_adoption = false;
        record.has_second_sum = is_summed;
        self.encoded.clear();
    }

    /// Reserves room for an entry of `entry_lines` lines in the journal.
    pub(crate) fn reserve_journal(&mut self, entry_lines: usize) {
        let room = self.journal.reserve(&*self.mapping.data, entry_lines);
        room.expect("ensure_resources made room in the journal");
    }

    /// Takes a seq. Nothing may fail between this and `publish_record`.
    pub(crate) fn take_seq(&mut self) {
        let control = &self.mapping.control;
        // The floor comes first: a checkpoint that finds the seq taken must find the floor. The
        // counter's release here and its acquire there order the two.
        let cells = control.session_cells(self.number);
        if !defects::delays_floor() {
            let next = control.seq().load(Ordering::Acquire);
            cells.floor().store(next, Ordering::Relaxed);
        }
        self.record.seq = Seq(control.seq().fetch_add(1, Ordering::AcqRel));
        defects::store_delayed_floor(cells, self.record.seq);
    }
}

/// Flushes the slots of each leg's previous record.
pub(super) fn flush_pending_slots_all<M: Media>(
    legs: &mut [LegSession<'_, M>],
    slots: &FirstSlots,
) {
    for (leg, &at) in legs.iter_mut().zip(slots) {
        leg.session.flush_pending_slots(at);
    }
}

impl<M: Media> Session<M> {
    /// Flushes the slots of the previous record for the fence of the present one; `at` is the byte
    /// of the present record's first slot. The flushed slots are in this core's cache now, and will
    /// not be when a checkpoint needs them persistent. Slots in the same line wait for each other,
    /// because a flush may evict the line.
    pub(super) fn flush_pending_slots(&mut self, at: usize) {
        self.flush_patch();
        if let Some((first, end)) = self.unflushed_slots
            && !(first / LINE_BYTES == at / LINE_BYTES && (end - 1) / LINE_BYTES == at / LINE_BYTES)
        {
            self.flush_slots(first, end);
        }
    }

    /// Flushes all slots that were swapped so far, for the next fence. Slots of several places
    /// cannot wait: the session remembers one range, and the flush of a range over both places
    /// flushes all lines in between. A crash does not reveal such a range, as it holds every slot;
    /// `record_unflushed_slots` asserts against it.
    pub(crate) fn flush_all_slots(&mut self) {
        self.flush_patch();
        if let Some((first, end)) = self.unflushed_slots {
            self.flush_slots(first, end);
        }
    }

    /// Flushes the bytes that the previous record wrote in place. They are not flushed at once,
    /// because the unlock would wait for the flush.
    fn flush_patch(&mut self) {
        if let Some((first, end)) = self.unflushed_patch.take()
            && !defects::skips_patch_flush()
        {
            let flushed = self.mapping.data.flush(first, end - first);
            self.pending_patch = Some(flushed.after(self.pending_patch.take()));
        }
    }

    fn flush_slots(&mut self, first: usize, end: usize) {
        let end = defects::flushed_slots_end(first, end);
        self.pending_slots = Some(self.mapping.data.flush(first, end - first));
        self.has_lost_flush |= self.mapping.data.is_unreadable(first);
        self.unflushed_slots = None;
    }
}

/// Streams a page into frame number `number` of each leg.
pub(super) fn stream_page<M: Media>(
    legs: &mut [LegSession<'_, M>],
    number: usize,
    bytes: &Page,
) -> UnfencedStores {
    let target = |index: usize| {
        let session = &legs[index.min(legs.len() - 1)].session;
        (&*session.mapping.data, frame_at(session.frames[number]))
    };
    let targets = [target(0), target(1), target(2)];
    let (sums, streamed) = M::stream_page(&targets[..legs.len()], bytes);
    for leg in legs.iter_mut() {
        leg.session.set_sums(number, sums);
    }
    streamed
}

/// Streams the records, fences, swaps and publishes. The caller holds the locks and has taken the
/// seqs. Releases the locks and ends the operation on all legs.
pub(super) fn commit<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    slots: FirstSlots,
    stamp: Stamp,
    stores: Option<UnfencedStores>,
) -> Result<(), LegFailure> {
    let records = stream_records(legs, stores);
    defects::before_fence(legs);
    let withheld = if defects::withholds_fence() {
        Some(records)
    } else {
        fence_all(legs, records);
        None
    };
    defects::after_fence(legs);
    let published = publish_slots_all(legs, page, &slots);
    if let Some(records) = defects::late_fence(withheld) {
        fence_all(legs, records);
    }
    // Locked instructions wait for the stores above, so the stores of all legs come first.
    for leg in legs.iter_mut() {
        leg.session.publish_record(Some(stamp));
        unlock_and_end(leg);
    }
    published
}

/// Streams the records, to the legs in their order. If the session dies in between, a record on the
/// last leg is on all legs before it, too. Direct clients read the last leg.
fn stream_records<M: Media>(
    legs: &mut [LegSession<'_, M>],
    mut stores: Option<UnfencedStores>,
) -> UnfencedStores {
    let count = legs.len();
    for at in 0..count {
        let leg = &mut legs[defects::leg_in_order(at, count)];
        let streamed = leg.session.stream_record();
        stores = Some(streamed.after(stores.take()));
    }
    stores.expect("a record")
}

/// Fences the pools of all legs once.
pub(super) fn fence_all<M: Media>(legs: &[LegSession<'_, M>], stores: UnfencedStores) {
    let media = |index: usize| &*legs[index.min(legs.len() - 1)].session.mapping.data;
    let all = [media(0), media(1), media(2)];
    let _committed = M::fence_each(&all[..legs.len()], stores);
}

/// Publishes the pages of the committed record on all legs.
fn publish_slots_all<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    slots: &FirstSlots,
) -> Result<(), LegFailure> {
    let mut result = Ok(());
    for (index, leg) in legs.iter_mut().enumerate() {
        if let Err(cause) = leg.session.publish_slots(slots[index], page) {
            result = Err(LegFailure { leg: index, cause });
        }
    }
    result
}

impl<M: Media> Session<M> {
    /// Sets the sums of the data of change number `index`.
    pub(super) fn set_sums(&mut self, index: usize, sums: PageChecksums) {
        self.record.changes[index].sums = sums;
        set_sums(&mut self.encoded, index, sums);
    }

    /// Streams the record that `encode_record` encoded.
    pub(super) fn stream_record(&mut self) -> UnfencedStores {
        let summed = if self.record.is_patch() {
            // The other lines have their sum already.
            &mut self.encoded[..1]
        } else {
            &mut self.encoded[..]
        };
        add_checksum(summed, self.journal.next_address());
        self.append()
    }

    /// Streams the encoded entry into the journal.
    pub(crate) fn append(&mut self) -> UnfencedStores {
        self.flushes_slots = self.pending_slots.is_some() && !self.has_lost_flush;
        let stores = self.journal.append(&*self.mapping.data, &self.encoded);
        let flushed = [self.pending_slots.take(), self.pending_patch.take()];
        flushed.into_iter().fold(stores, UnfencedStores::after)
    }

    /// Publishes the pages of the committed record; its first slot lies at byte `at`. Stores their
    /// checksums first.
    pub(crate) fn publish_slots(&mut self, at: usize, page: PageNo) -> Result<(), StoreError> {
        if self.record.is_patch() {
            self.record_unflushed_slots(at, 1);
            return if self.publish_patch(at) {
                Ok(())
            } else {
                Err(damaged_page_error(page))
            };
        }
        for change in &self.record.changes {
            if let Some(frame) = change.new.frame() {
                let at = self.mapping.geometry().frame_entry_at(frame);
                let word = defects::frame_word(&self.mapping, &self.record, change);
                self.mapping.meta.store(at, word);
            }
        }
        self.swap_slots(at, page)
    }

    /// Swaps the slots of the committed record, the first at byte `at`.
    pub(super) fn swap_slots(&mut self, at: usize, page: PageNo) -> Result<(), StoreError> {
        self.record_unflushed_slots(at, self.record.changes.len());
        let mut result = Ok(());
        let meta = &*self.mapping.meta;
        for (i, change) in self.record.changes.iter().enumerate() {
            // The session holds the lock, so it needs no locked instruction: only damage can have
            // changed the slot. A slot that does not check is damaged.
            let at = at + i * 8;
            let found = meta.load(at);
            if found == change.old.encode() || Slot::decode(found).is_err() {
                meta.store(at, change.new.encode());
            } else {
                result = Err(damaged_page_error(PageNo(page.0 + i as u64)));
            }
        }
        result
    }

    /// Records that `slots` slots, the first at byte `at`, are about to be swapped.
    pub(super) fn record_unflushed_slots(&mut self, at: usize, slots: usize) {
        if self.mapping.has_overlay() {
            return;
        }
        let (first, end) = self.unflushed_slots.unwrap_or((at, at));
        // The session remembers one range. If the range grew from one place to another, no slot
        // would be lost. But its flush would cover all lines in between, possibly most of the pool.
        let line = |byte: usize| byte / LINE_BYTES;
        debug_assert!(
            line(first) == line(at) && line(end.max(at + 1) - 1) == line(at),
            "slots at {first} and {at} are unflushed at once"
        );
        self.unflushed_slots = Some((first.min(at), end.max(at + slots * 8)));
    }

    /// Records that bytes were written in place. They are flushed for the next record, together
    /// with the slot.
    pub(crate) fn record_unflushed_patch(&mut self, first: usize, len: usize) {
        debug_assert!(
            self.unflushed_patch.is_none(),
            "a record flushes the bytes of the one before"
        );
        self.unflushed_patch = Some((first, first + len));
    }

    /// Publishes the committed record.
    pub(crate) fn publish_record(&mut self, op: Option<Stamp>) {
        let cells = self.mapping.control.session_cells(self.number);
        let start = self.journal.end() - self.encoded.len() as u64;
        if let Some(stamp) = op {
            remove_complete(&mut self.open_ops, stamp);
            self.open_ops.push_back((stamp.op, start));
            let complete = self
                .open_ops
                .front()
                .map_or(start, |&(_, position)| position);
            cells.complete().store(complete, Ordering::Relaxed);
        } else if self.open_ops.is_empty() {
            cells
                .complete()
                .store(self.journal.end(), Ordering::Relaxed);
        }
        cells
            .consumed()
            .store(self.grants.consumed, Ordering::Relaxed);
        if self.flushes_slots {
            let settled = defects::settled_line(start, self.journal.end());
            cells.settled().store(settled, Ordering::Release);
        }
        cells
            .committed()
            .store(self.journal.end(), Ordering::Release);
        cells.floor().store(u64::MAX, Ordering::Release);
    }

    /// Records which of the session's operations are complete on all legs. Without this the last
    /// one counts as incomplete until there is another, or for ever.
    pub(crate) fn record_complete(&mut self, stamp: Stamp) {
        remove_complete(&mut self.open_ops, stamp);
        let oldest = self.open_ops.front().map(|&(_, position)| position);
        let complete = oldest.unwrap_or(self.journal.end());
        let cells = self.mapping.control.session_cells(self.number);
        cells.complete().store(complete, Ordering::Release);
        // Only a checkpoint makes the completion durable. Otherwise the operation counts as
        // incomplete again after the owner's death.
        if !self.is_owner {
            self.mapping.control.ring_doorbell();
        }
    }
}

/// Removes operations that are complete on all legs by the stamp.
fn remove_complete(open: &mut VecDeque<(u64, u64)>, stamp: Stamp) {
    let oldest = stamp.op.saturating_sub(u64::from(stamp.open_ops));
    while open.front().is_some_and(|&(op, _)| op < oldest) {
        open.pop_front();
    }
}
