//! The retirement of sessions. The operation that a dead session had committed but not published is
//! rolled forward; another is discarded.
//!
//! Invariant: the locks of a dead session are released only after that.
//!
//! # Order
//!
//! 1. [`Pool::retire_session`] revokes the session.
//! 2. [`Pool::roll_forward`] completes the operation if its records and data are whole. It removes
//!    all other records from the journal.
//! 3. The floor is cleared, and the session's lock words are released.
//! 4. The in-flight table gets the operations that other legs may lack.
//! 5. After a checkpoint the session's frames return to the owner.

use super::error::ObjectError;
use super::in_flight::JournalRetention;
use super::pool::Pool;
use crate::defect::{self, Defect};
use crate::format::geometry::frame_at;
use crate::format::record::{Change, JournalEntry, Record};
use crate::format::slot::Slot;
use crate::format::table::SlotLocation;
use crate::recovery::PoolError;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;

/// The map records of the first group. At most one group follows the committed index of a session.
fn first_group(entries: Vec<(u64, JournalEntry)>) -> Vec<(u64, Record)> {
    let first = entries.first().map(|(_, entry)| entry.seq());
    let of_it = entries
        .into_iter()
        .map_while(|(position, entry)| match entry {
            JournalEntry::Map(record) if Some(record.seq) == first => Some((position, record)),
            _ => None,
        });
    of_it.collect()
}

impl<M: Media> Pool<M> {
    /// Retires a session: see [`Pool::close_session`].
    pub(crate) fn retire_session(&mut self, number: u32) -> Result<(), ObjectError> {
        let cells = self.mapping.control.session_cells(number);
        cells.revoked().store(1, Ordering::SeqCst);
        // A session takes lock words and writes unpublished records only in an operation.
        let was_inside = self.op_in_progress(number).is_some();
        if was_inside && defect::is(Defect::LocksFreedFirst) {
            self.mapping.control.release_all(number);
        }
        if was_inside && !defect::is(Defect::DeadNotRolledForward) {
            self.roll_forward(number)?;
        }
        let cells = self.mapping.control.session_cells(number);
        if !defect::is(Defect::SeqHoleKept) {
            cells.floor().store(u64::MAX, Ordering::Release);
        }
        let active = cells.active().load(Ordering::Acquire);
        cells
            .active()
            .store(active.next_multiple_of(2), Ordering::Release);
        if was_inside {
            self.mapping.control.release_all(number);
        }
        if !defect::is(Defect::InFlightOfDeadLost) {
            self.collect_in_flight_of(number, None, JournalRetention::Released)?;
        }
        let cells = self.mapping.control.session_cells(number);
        let committed = cells.committed().load(Ordering::Acquire);
        cells.complete().store(committed, Ordering::Release);
        self.checkpoint()?;
        let cells = self.mapping.control.session_cells(number);
        cells.recalls().fetch_add(1, Ordering::SeqCst);
        let session_state = self.sessions.session(number);
        session_state.recall(&self.mapping, number, &mut self.frame_allocator);
        session_state.is_open = false;
        let cells = self.mapping.control.session_cells(number);
        cells.recalls().fetch_add(1, Ordering::SeqCst);
        cells.state().store(0, Ordering::Release);
        Ok(())
    }

    /// Rolls the operation forward that a dead session had committed but not published: one record
    /// or a group. An incomplete group is discarded, and its remains are invalidated. Otherwise
    /// recovery could find parts of it after the records of the journal's next user.
    fn roll_forward(&mut self, number: u32) -> Result<(), ObjectError> {
        let cells = self.mapping.control.session_cells(number);
        let committed = cells.committed().load(Ordering::Acquire);
        let mut journal = self.journal_at(number, committed);
        let found = journal.recover(&*self.mapping.data);
        if found.as_ref().is_ok_and(|scan| scan.is_empty()) {
            return Ok(());
        }
        let group = found.map_or_else(|_| Vec::new(), |scan| first_group(scan.entries));
        if !self.is_group_committed(&group)? {
            let voided = self
                .journal_at(number, committed)
                .invalidate_entries(&*self.mapping.data);
            self.fence(voided);
            return Ok(());
        }
        // The session's stores reached memory, but perhaps not the medium.
        let data = &*self.mapping.data;
        let at = self.mapping.geometry().journal_at(number);
        let mut stores = data.flush(at, self.mapping.geometry().journal_bytes as usize);
        // A patch has its bytes in its record.
        let records = || group.iter().filter(|(_, record)| !record.is_patch());
        let changes = || records().flat_map(|(_, record)| &record.changes);
        for frame in changes().filter_map(|change| change.new.frame()) {
            stores = stores.and(data.flush(frame_at(frame), PAGE_BYTES));
        }
        let _committed = data.fence(stores);
        for (_, record) in &group {
            self.publish_slots(record)?;
        }
        let fresh = |change: &Change| {
            let frame = change.new.frame();
            frame.filter(|_| frame != change.old.frame())
        };
        let session_state = self.sessions.session(number);
        let taken = changes().filter_map(fresh);
        let consumed = taken
            .filter_map(|frame| session_state.consumed_through(frame.0))
            .max();
        let end = group.last().map_or(committed, |(position, record)| {
            position + record.lines() as u64
        });
        let cells = self.mapping.control.session_cells(number);
        // The session may have stored its own count before it died.
        let consumed = consumed.unwrap_or(0);
        cells.consumed().fetch_max(consumed, Ordering::AcqRel);
        cells.committed().store(end, Ordering::Release);
        Ok(())
    }

    /// Publishes the slots of a record that a dead session had committed.
    fn publish_slots(&self, record: &Record) -> Result<(), ObjectError> {
        let found = self
            .mapping
            .locate(record.object, record.level, record.page)?;
        let SlotLocation::At(at) = found else {
            return Ok(());
        };
        if !self.mapping.meta.can_read(at) || self.mapping.data.is_unreadable(at) {
            return Err(PoolError::Unreadable(at).into());
        }
        if record.is_patch() {
            self.publish_patch(at, record);
            return Ok(());
        }
        for (i, change) in record.changes.iter().enumerate() {
            if let (0, Some(frame)) = (record.level, change.new.frame()) {
                let at = self.mapping.geometry().frame_entry_at(frame);
                self.mapping.meta.store(at, record.frame_word(change));
            }
            // If the slot is swapped already, the session did it. A slot that does not check is
            // damaged, and another session may correct it at this time.
            let at = at + i * 8;
            let (old, new) = (change.old.encode(), change.new.encode());
            let meta = &*self.mapping.meta;
            while let Err(found) = meta.compare_exchange(at, old, new)
                && Slot::decode(found).is_err()
                && meta.compare_exchange(at, found, new).is_err()
            {}
        }
        Ok(())
    }

    /// Publishes a patch, unless the session has already done so. A part of the bytes may be in
    /// place, so all of them are copied. If the page can no longer be read, its bytes stay and
    /// readers of the page report the damage. The session still holds the lock word, so the slot is
    /// its own, or damaged.
    fn publish_patch(&self, at: usize, record: &Record) {
        let Change { old, new, .. } = record.changes[0];
        let found = Slot::decode(self.mapping.meta.load(at));
        if found.is_ok_and(|found| ![old, new.changing()].contains(&found)) {
            return;
        }
        let bytes_at = new.frame().map_or(0, frame_at) + record.patch.within;
        let mut bytes = vec![0; record.patch.len];
        self.mapping.data.read(bytes_at, &mut bytes);
        if self.mapping.data.is_unreadable(bytes_at) || defect::is(Defect::DeadPatchNotApplied) {
            self.mapping.meta.store(at, new.encode());
            return;
        }
        // The checkpoint that passes the record flushes the bytes: the session never reported them
        // as flushed.
        self.mapping.apply_patch(at, record, TierHint::None);
    }

    /// Whether the group of a dead session was committed.
    fn is_group_committed(&self, group: &[(u64, Record)]) -> Result<bool, ObjectError> {
        let mut records = group.iter().map(|(_, record)| record);
        if !group.is_empty() && records.all(|record| self.has_data(record)) {
            return Ok(true);
        }
        for (_, record) in group {
            if self.is_swapped(record)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a slot is the one that the record publishes. Then the record was committed, and its
    /// page was damaged since.
    fn is_swapped(&self, record: &Record) -> Result<bool, ObjectError> {
        let found = self
            .mapping
            .locate(record.object, record.level, record.page)?;
        Ok(match found {
            SlotLocation::At(at) => record.is_published_at(&*self.mapping.meta, at),
            SlotLocation::Unlinked(_) => false,
        })
    }

    fn has_data(&self, record: &Record) -> bool {
        let numbers = self.mapping.geometry().frame_numbers();
        if record.is_patch() {
            let frame = record.changes[0].new.frame();
            return frame.is_some_and(|frame| numbers.contains(frame));
        }
        let mut page = [0; PAGE_BYTES];
        record
            .changes
            .iter()
            .all(|change| match change.new.frame() {
                None => true,
                Some(frame) if !numbers.contains(frame) => false,
                Some(frame) => {
                    self.mapping.data.read(frame_at(frame), &mut page);
                    record.level > 0 || crc32c(&page) == change.sums.crc
                }
            })
    }
}
