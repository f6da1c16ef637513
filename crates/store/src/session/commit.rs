//! The record of a session: its seq, its encoding, its lines in the journal, and its publication.
//!
//! Invariant: nothing fails between the taking of a seq and the publication of its record.

use super::{Session, defects};
use crate::defect::{self, Defect};
use crate::format::geometry::frame_at;
use crate::format::record::{Change, add_checksum, lines, set_sums};
use crate::format::slot::Slot;
use crate::shared::error::{StoreError, damaged_page_error};
use crate::shared::pool_mapping::Handle;
use pagemesh_base::checksum::{PageChecksums, crc32c, word_sum};
use pagemesh_base::ids::{Epoch, ObjectId, PageNo, Seq};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

impl<M: Media> Session<M> {
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

    /// Assigns a granted frame to each change.
    pub(super) fn assign_frames(&mut self, count: usize) {
        self.take_frames(count as u64);
        for (change, &frame) in self.record.changes.iter_mut().zip(&self.frames) {
            change.new = change.old.map(frame, self.round);
            // Without the prefetch the swap of the slot would wait for the store to that entry.
            self.mapping
                .meta
                .prefetch(self.mapping.geometry.frame_entry_at(frame));
        }
    }

    pub(crate) fn reserve_journal(&mut self, entry_lines: usize) {
        let room = self.journal.reserve(&*self.mapping.data, entry_lines);
        room.expect("ensure_resources made room in the journal");
    }

    /// Reserves room in the journal, takes a seq and encodes the record of `self.record.changes`,
    /// without the sums of its data. All of that comes before the data is streamed. A load that
    /// spans several recent stores would wait until every streamed byte has left the core.
    pub(super) fn encode_record(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        stamp: Stamp,
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
        stamp: Stamp,
        is_summed: bool,
    ) {
        self.reserve_journal(self.record.lines());
        self.take_seq();
        let record = &mut self.record;
        record.object = handle.object;
        record.epoch = stamp.epoch;
        record.level = level;
        record.page = page;
        record.op = stamp.op;
        record.open = stamp.open_ops;
        record.has_second_sum = is_summed;
        self.encoded.clear();
    }

    /// Sets the sums of the data of change number `index`.
    pub(super) fn set_sums(&mut self, index: usize, sums: PageChecksums) {
        self.record.changes[index].sums = sums;
        set_sums(&mut self.encoded, index, sums);
    }

    /// Streams the record that `encode_record` encoded.
    pub(super) fn stream_record(&mut self) -> UnfencedStores {
        let sealed = if self.record.is_patch() {
            // The other lines have their sum already.
            &mut self.encoded[..1]
        } else {
            &mut self.encoded[..]
        };
        add_checksum(sealed, self.journal.next_address());
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
                let at = self.mapping.geometry.frame_entry_at(frame);
                self.mapping.meta.store(at, u64::from(change.sums.crc));
            }
        }
        self.swap_slots(at, page)
    }

    /// Swaps the slots of the committed record, the first at byte `at`.
    fn swap_slots(&mut self, at: usize, page: PageNo) -> Result<(), StoreError> {
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

    /// Commits an object record. For the owner.
    pub(crate) fn commit_object(
        &mut self,
        object: ObjectId,
        entry: [u8; 128],
    ) -> Result<Seq, StoreError> {
        self.ensure_resources(0, 3)?;
        self.reserve_journal(3);
        self.take_seq();
        let seq = self.record.seq;
        let record = crate::format::record::ObjectRecord { seq, object, entry };
        self.encoded.clear();
        crate::format::record::JournalEntry::Object(record)
            .encode(self.journal.next_address(), &mut self.encoded);
        let stores = self.append();
        if !defect::is(Defect::ObjectNotFenced) {
            let _committed = self.mapping.data.fence(stores);
        }
        self.publish_record(None);
        Ok(seq)
    }

    /// Swaps slots without moving data: unmaps pages, stamps a round, unlinks nodes. `changes` are
    /// consecutive from `page`; its slot lies at byte `at`. For the owner, which takes the locks.
    pub(crate) fn commit_changes(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        at: usize,
        changes: &[Change],
    ) -> Result<(), StoreError> {
        self.ensure_resources(0, lines(changes.len()))?;
        self.record.changes.clear();
        self.record.changes.extend_from_slice(changes);
        self.commit_record(handle, level, page, at, Epoch(0))
    }

    /// Commits the prepared record. Publishes it even if a slot is damaged, because it is on media.
    pub(super) fn commit_record(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        at: usize,
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        let stamp = Stamp {
            epoch,
            op: 0,
            open_ops: 0,
        };
        let is_summed = self.add_second_sums(level);
        self.encode_record(handle, level, page, stamp, is_summed);
        self.flush_pending_slots(at);
        let stores = self.stream_record();
        let _committed = self.mapping.data.fence(stores);
        let swapped = self.swap_slots(at, page);
        self.publish_record(None);
        swapped
    }

    /// Adds the second sums of pages that the prepared record names and that are already in their
    /// frames. So recovery can judge it like the record that wrote the pages. Returns false if a
    /// page is damaged, because its second sum is then unknown.
    fn add_second_sums(&mut self, level: u8) -> bool {
        if level > 0 {
            return true;
        }
        let mut page = [0; PAGE_BYTES];
        for change in &mut self.record.changes {
            if let Some(frame) = change.new.frame() {
                self.mapping.data.read(frame_at(frame), &mut page);
                if crc32c(&page) != change.sums.crc {
                    self.mapping.report_unreadable(frame);
                    return false;
                }
                change.sums.words = word_sum(&page);
            }
        }
        true
    }
}

/// Removes operations that are complete on all legs by the stamp.
fn remove_complete(open: &mut VecDeque<(u64, u64)>, stamp: Stamp) {
    let oldest = stamp.op.saturating_sub(u64::from(stamp.open_ops));
    while open.front().is_some_and(|&(op, _)| op < oldest) {
        open.pop_front();
    }
}
