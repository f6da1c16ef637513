//! The list of operations that may be missing on other legs. Their pages may be born before the loss
//! of another leg, so a leg that returns gets them by this list.

use super::error::ObjectError;
use super::pool::{OWNER_SESSION, Pool};
use crate::defect::{self, Defect};
use crate::format::in_flight::{InFlightTableFull, JournaledOp, in_flight_of};
use crate::format::journal::{JournalChunk, NextEntry};
use crate::format::record::Record;
use pagemesh_base::ids::ObjectId;
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
}
