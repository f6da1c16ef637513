//! Operations that may be missing on other legs: their list, and the round that is stamped on their
//! pages.

use super::error::ObjectError;
use super::maintenance::OP_END_WAIT;
use super::pool::{OWNER_SESSION, Pool};
use crate::defect::{self, Defect};
use crate::format::in_flight::{InFlightTableFull, JournaledOp, in_flight_of};
use crate::format::journal::{JournalChunk, NextEntry};
use crate::format::object::Object;
use crate::format::record::{Change, Record};
use crate::format::slot::Slot;
use crate::format::table::SlotLocation;
use crate::shared::control::{LOCK_WAIT_MAX, LockWords};
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::Handle;
use crate::shared::wait::Deadline;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::ids::{ObjectId, PageNo};
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;

/// Whether the journal of a session still holds the operations that the in-flight table lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JournalRetention {
    Retained,
    /// The session ends, or the journal is freed.
    Released,
}

impl<M: Media> Pool<M> {
    /// Lists operations that may be missing on other legs, for every open session.
    pub(crate) fn collect_in_flight(
        &mut self,
        object: Option<ObjectId>,
    ) -> Result<(), ObjectError> {
        for number in self.sessions.open_numbers() {
            if number != OWNER_SESSION {
                self.collect_in_flight_of(number, object, JournalRetention::Retained)?;
            }
        }
        Ok(())
    }

    /// Lists operations of one session that may be missing on other legs. Returns the journal line
    /// up to which they are listed. None if an applied record could not be read and the whole
    /// journal was skipped.
    pub(crate) fn collect_in_flight_of(
        &mut self,
        number: u32,
        object: Option<ObjectId>,
        life: JournalRetention,
    ) -> Result<Option<u64>, ObjectError> {
        let mapping = &self.mapping;
        let over =
            (self.in_flight).remove_complete(&*mapping.data, |op| mapping.control.is_complete(op));
        if life == JournalRetention::Released
            && !defect::is(Defect::PartialCheckpointOfDeadForgotten)
        {
            // Their records may be gone from the journal.
            self.in_flight.detach_session(number);
        }
        let cells = self.mapping.control.session_cells(number);
        // Records of operations that are listed already may be gone from the journal.
        let head = self.superblock.journal_heads[number as usize];
        let complete = cells.complete().load(Ordering::Acquire).max(head);
        let committed = cells.committed().load(Ordering::Acquire);
        let mut journal = self.journal_at(number, complete);
        let (mut chunk, mut record) = (JournalChunk::default(), Record::empty());
        let mut stores = over;
        while journal.end() < committed {
            journal.read_ahead(&*self.mapping.data, committed, &mut chunk);
            while journal.end() < chunk.end() {
                let position = journal.end();
                match self.read_next_record(&mut journal, committed, &mut chunk, &mut record) {
                    Ok(NextEntry::Map) => {}
                    Ok(_) => continue,
                    Err(_) if self.is_applied(&journal) => {
                        self.skip_applied_records(number)?;
                        return Ok(None);
                    }
                    Err(bad) => return Err(bad.into()),
                }
                let Some(entry) = in_flight_of(&record) else {
                    continue;
                };
                if object.is_some_and(|object| object != record.object) {
                    continue;
                }
                let noted = (life == JournalRetention::Retained).then_some(JournaledOp {
                    session: number,
                    position,
                });
                let data = &*self.mapping.data;
                match self.in_flight.add(data, record.object, entry, noted) {
                    Ok((_, stored)) => stores = Some(stored.after(stores)),
                    Err(InFlightTableFull) => self.mark_compare(record.object)?,
                }
            }
        }
        self.fence(stores);
        Ok(Some(journal.end()))
    }

    /// Whether the last checkpoint had to retain much of a session's journal.
    pub(super) fn is_journal_full(&self, number: u32) -> bool {
        let retained = self.committed_end(number) - self.superblock.journal_heads[number as usize];
        retained >= self.mapping.geometry().journal_lines() / 4
    }

    /// If a journal is full of operations that are incomplete on other legs, lists them in the
    /// in-flight table and frees the journal.
    pub(super) fn spill_in_flight_if_full(&mut self, number: u32) -> Result<(), ObjectError> {
        let cells = self.mapping.control.session_cells(number);
        let head = self.superblock.journal_heads[number as usize];
        let complete = cells.complete().load(Ordering::Acquire).max(head);
        let committed = cells.committed().load(Ordering::Acquire);
        if committed - complete < self.mapping.geometry().journal_lines() / 4 {
            return Ok(());
        }
        self.collect_in_flight_of(number, None, JournalRetention::Released)?;
        // The session waits for the answer, so only the owner writes this cell now.
        self.mapping
            .control
            .session_cells(number)
            .complete()
            .store(committed, Ordering::Release);
        self.checkpoint()?;
        Ok(())
    }

    /// Stamps the round on the pages of an object's in-flight operations.
    pub(crate) fn stamp_round(&mut self, object: ObjectId, round: u8) -> Result<(), ObjectError> {
        let Object {
            slice, size_bytes, ..
        } = self.objects[&object];
        let found: Vec<_> = self.in_flight_of(object, size_bytes).collect();
        let handle = self.mapping.handle(object, slice)?;
        for entry in found {
            for page in entry.page.0..entry.page.0 + u64::from(entry.count) {
                self.stamp_page(&handle, PageNo(page), round)?;
            }
        }
        Ok(())
    }

    fn stamp_page(&mut self, handle: &Handle, page: PageNo, round: u8) -> Result<(), ObjectError> {
        let range = LockWords::of(handle.object, page, 1);
        let control = &self.mapping.control;
        let end = Deadline::after(LOCK_WAIT_MAX);
        loop {
            let before = control.lock_holder(&range);
            if control
                .lock_within(&range, OWNER_SESSION, OP_END_WAIT)
                .is_ok()
            {
                break;
            }
            // The caller retires dead sessions. It needs the pool for that, and may have to end the
            // holder.
            if let Some((session, operation)) = before
                && before == control.lock_holder(&range)
            {
                return Err(self.stuck_error(session, operation));
            }
            if end.is_over() {
                return Err(StoreError::TimedOut.into());
            }
        }
        let stamped = self.stamp_locked(handle, page, round);
        self.mapping.control.unlock(&range);
        stamped
    }

    fn stamp_locked(
        &mut self,
        handle: &Handle,
        page: PageNo,
        round: u8,
    ) -> Result<(), ObjectError> {
        let SlotLocation::At(at) = self.mapping.locate(handle.object, 0, page)? else {
            return Ok(());
        };
        // Lists of dirty pages include a damaged slot for every round, so it counts as stamped.
        let Ok(old) = self.mapping.slot(at, page) else {
            return Ok(());
        };
        if old.round() == round || old == Slot::EMPTY {
            return Ok(());
        }
        let (new, crc) = match old.frame() {
            Some(frame) => {
                let crc = self
                    .mapping
                    .meta
                    .load(self.mapping.geometry().frame_entry_at(frame))
                    as u32;
                (old.map(frame, round), crc)
            }
            None => (old.unmap(round), 0),
        };
        let change = [Change {
            old,
            new,
            // The commit adds the second sum where it is known.
            sums: PageChecksums { crc, words: 0 },
        }];
        self.with_retry(|own| own.commit_changes(handle, 0, page, at, &change))
    }
}
