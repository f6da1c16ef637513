//! The owner's maintenance work: checkpoints, grants, the retirement of dead sessions, and the
//! freeing of deleted objects.
//!
//! A checkpoint at C applies every record with a seq below C: its slots, frame-table words and
//! bitmap bits become persistent. Only then is a superblock with C written, and only after that are
//! journal lines and freed frames used again. C never passes an operation in progress: a session
//! publishes a floor before it takes a seq. `partial_checkpoint` handles an operation that stays in
//! progress.

use crate::defect::{self, Defect};
use crate::format::journal::{Journal, JournalChunk, NextEntry};
use crate::format::object::{HEIGHT, Object, ObjectState, ROOT_AT};
use crate::format::record::{Change, JournalEntry, NO_SUMS, ObjectRecord, PAGES_MAX, Record};
use crate::format::{geometry::OBJECT_BYTES, in_flight::JournaledOp};
use crate::format::{slot::Slot, table::SlotLocation};
use crate::owner::pool::{OWNER_SESSION, ObjectError, Pool};
use crate::recovery::{PoolError, in_flight_of, store_entry, write_superblock};
use crate::shared::control::{LOCK_WAIT_MAX, LockWords};
use crate::shared::pool_mapping::{Handle, NODE_SLOTS, StoreError, frame_at};
use crate::shared::wait::{Backoff, Deadline};
use pagemesh_base::checksum::{PageChecksums, crc32c};
use pagemesh_base::ids::{FrameNo, ObjectId, PageNo, Seq};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Media, UnfencedStores};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// The time for which the owner waits at once for a session to end its operation. An operation
/// takes microseconds, and a few milliseconds if its thread waits for a processor. After that time
/// the session may be dead, or may wait for a lock of a dead session, which only the owner
/// releases.
const OP_END_WAIT: Duration = Duration::from_millis(20);
/// Lines read at once. The longest entry fits into them, and they fit into a first-level cache.
const READ_LINES: u64 = 256;
/// Lines of the longest entry.
const ENTRY_LINES_MAX: u64 = PAGES_MAX as u64 / 3 + 2;
const _: () = assert!(READ_LINES > ENTRY_LINES_MAX);
/// Steps of freeing a deleted object in one call, so that waiting sessions are served in between.
const RECLAIM_STEPS: u32 = 64;

/// The limits of a checkpoint.
#[derive(Clone, Copy)]
pub(crate) struct CheckpointLimits {
    /// Recovery begins there. No operation in progress has a lower seq.
    pub(crate) checkpoint: Seq,
    /// Records below are applied. It is the checkpoint, or beyond it.
    pub(crate) applied: Seq,
    /// A partial checkpoint: it goes beyond the checkpoint. Of an open session other than the
    /// owner's it applies only the journal lines below which the operations were listed in the
    /// in-flight table.
    pub(crate) is_partial: bool,
}

impl CheckpointLimits {
    /// The limits of a full checkpoint.
    pub(crate) fn full(limit: Seq) -> CheckpointLimits {
        CheckpointLimits {
            checkpoint: limit,
            applied: limit,
            is_partial: false,
        }
    }
}

/// The state of a pass over the journals. The pool keeps it to reuse the buffers.
#[derive(Default)]
pub(crate) struct CheckpointPass {
    stores: Option<UnfencedStores>,
    /// Frames that records took into use, and frames that they freed.
    used: Vec<u64>,
    freed: Vec<u64>,
    /// The line of the frame table that was flushed last: consecutive frames share a line.
    frame_line: usize,
    /// On `file-sync` pools, the records to be applied in seq order.
    pub(crate) records: Vec<Record>,
    objects: Vec<ObjectRecord>,
    chunk: JournalChunk,
    /// The most committed lines of one journal that operations in progress kept from being applied.
    pub(crate) unapplied_lines: u64,
}

impl CheckpointPass {
    fn reset(&mut self) {
        self.stores = None;
        self.used.clear();
        self.freed.clear();
        self.records.clear();
        self.objects.clear();
    }

    fn add(&mut self, stores: UnfencedStores) {
        self.stores = Some(stores.after(self.stores.take()));
    }
}

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

/// Whether the journal of a session still holds the operations that the in-flight table lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JournalRetention {
    Retained,
    /// The session ends, or the journal is freed.
    Released,
}

impl<M: Media> Pool<M> {
    /// Does the owner's work before sessions have to wait for it: a checkpoint, grants, freeing
    /// deleted objects. Then answers waiting sessions. True when there is more to do at once.
    ///
    /// # Errors
    /// When the pool failed.
    pub fn maintain(&mut self) -> Result<bool, ObjectError> {
        self.checkpoint()?;
        if self.is_journal_blocked() {
            self.partial_checkpoint()?;
        }
        let more = self.reclaim()?;
        for number in self.sessions.open_numbers() {
            self.refill(number);
        }
        let mut stuck = None;
        for number in self.sessions.open_numbers() {
            match self.answer_request(number) {
                // Other sessions need not wait for the operation that this one waits for.
                Err(cause @ ObjectError::SessionStuck { .. }) => stuck = Some(cause),
                answered => answered?,
            }
        }
        stuck.map_or(Ok(more), Err)
    }

    /// Grants frames to a session.
    pub(crate) fn refill(&mut self, number: u32) {
        if number == OWNER_SESSION {
            // The owner moves no data, and so needs no frames.
            return;
        }
        let session_state = self.sessions.session(number);
        session_state.refill(&self.mapping, number, &mut self.frame_allocator, 0);
    }

    /// Answers a waiting session.
    fn answer_request(&mut self, number: u32) -> Result<(), ObjectError> {
        let cells = self.mapping.control.session_cells(number);
        let asked = cells.asked().load(Ordering::Acquire);
        let (ticket, wanted) = (asked as u32, asked >> 32);
        if ticket == cells.answered().load(Ordering::Acquire) {
            return Ok(());
        }
        self.spill_in_flight_if_full(number)?;
        // A stalled operation keeps records from being applied, and the frames that they freed from
        // being used again.
        if self.frame_allocator.free() < wanted || self.is_journal_full(number) {
            self.partial_checkpoint()?;
        }
        if self.frame_allocator.free() < wanted {
            self.recall_grants(number);
        }
        if self.frame_allocator.free() < wanted || self.is_journal_full(number) {
            // Everything that other sessions could return was recalled. Only operations in progress
            // can still free frames or journal lines: no other wait would end.
            self.wait_for_ops()?;
        }
        let session_state = self.sessions.session(number);
        session_state.refill(&self.mapping, number, &mut self.frame_allocator, wanted);
        self.mapping.control.session_cells(number).answer(ticket);
        Ok(())
    }

    /// Recalls grants from sessions that have no operation in progress.
    fn recall_grants(&mut self, asking: u32) {
        // One deadline for all: operations in progress may wait for the stalled one.
        let end = Deadline::after(OP_END_WAIT);
        for number in self.sessions.open_numbers() {
            if number == asking || number == OWNER_SESSION {
                continue;
            }
            let cells = self.mapping.control.session_cells(number);
            let active = cells.active().load(Ordering::SeqCst);
            if active % 2 == 1 && !self.wait_for_op_end(number, active, end) {
                // The operation takes too long: the session keeps its grants.
                continue;
            }
            // The recall comes first. A session that begins an operation after this sees it and
            // steps back until the recall has ended. If the recall is given up, its mark is undone.
            let before = cells.recalls().fetch_add(1, Ordering::SeqCst);
            let active = cells.active().load(Ordering::SeqCst);
            let is_inside = active % 2 == 1 && !defect::is(Defect::RecallNotAwaited);
            if is_inside && !self.wait_for_op_end(number, active, end) {
                let cells = self.mapping.control.session_cells(number);
                if !defect::is(Defect::GivenUpRecallKept) {
                    cells.recalls().store(before, Ordering::SeqCst);
                }
                continue;
            }
            let session_state = self.sessions.session(number);
            session_state.recall(&self.mapping, number, &mut self.frame_allocator);
            let cells = self.mapping.control.session_cells(number);
            cells.recalls().fetch_add(1, Ordering::SeqCst);
        }
    }

    fn wait_for_op_end(&self, number: u32, active: u64, end: Deadline) -> bool {
        let cells = self.mapping.control.session_cells(number);
        let mut backoff = Backoff::default();
        while cells.active().load(Ordering::SeqCst) == active {
            if end.is_over() {
                return false;
            }
            backoff.pause();
        }
        true
    }

    /// Waits until every operation in progress has ended, for a short time only. The caller tries
    /// again as often as it can wait.
    pub(crate) fn wait_for_ops(&self) -> Result<(), ObjectError> {
        // The caller's stores come before the loads of the operation counts. A session that begins
        // an operation stores its count first, and then loads.
        fence(Ordering::SeqCst);
        for session in self.sessions.open_numbers() {
            let cells = self.mapping.control.session_cells(session);
            let active = cells.active().load(Ordering::SeqCst);
            let end = Deadline::after(OP_END_WAIT);
            if active % 2 == 1 && !self.wait_for_op_end(session, active, end) {
                return Err(self.stuck_error(session, active));
            }
        }
        Ok(())
    }

    fn stuck_error(&self, session: u32, operation: u64) -> ObjectError {
        let pid = self.process_id(session);
        ObjectError::SessionStuck {
            session,
            operation,
            pid,
        }
    }

    /// Applies the committed records and makes the result the new start of recovery.
    ///
    /// # Errors
    /// When the medium fails or a journal holds an impossible record. The pool has then failed.
    pub fn checkpoint(&mut self) -> Result<(), PoolError> {
        self.checkpoint_to(CheckpointLimits::full(self.checkpoint_limit()))
    }

    pub(crate) fn checkpoint_to(&mut self, reach: CheckpointLimits) -> Result<(), PoolError> {
        if self.has_failed {
            return Err(PoolError::Failed);
        }
        let mut pass = std::mem::take(&mut self.checkpoint_pass);
        pass.unapplied_lines = 0;
        let result = self.try_checkpoint(reach, &mut pass);
        pass.reset();
        self.checkpoint_pass = pass;
        self.has_failed |= result.is_err();
        if result.is_err() {
            self.mapping.mark_owner_gone();
        }
        result
    }

    pub(crate) fn checkpoint_limit(&self) -> Seq {
        let next = self.mapping.control.seq().load(Ordering::Acquire);
        let floor = |number| {
            self.mapping
                .control
                .session_cells(number)
                .floor()
                .load(Ordering::SeqCst)
        };
        if defect::is(Defect::CheckpointPassesUnpublished) {
            return Seq(next);
        }
        let floors = (0..self.superblock.journals_end).map(floor);
        let limit = floors.min().map_or(next, |floor| floor.min(next));
        // A floor may be older than the session's later seq: the session read the counter before it
        // published the floor, possibly long before. Recovery never replays a record that a
        // checkpoint has passed.
        match defect::is(Defect::CheckpointGoesBack) {
            true => Seq(limit),
            false => Seq(limit).max(self.superblock.checkpoint),
        }
    }

    fn try_checkpoint(
        &mut self,
        reach: CheckpointLimits,
        pass: &mut CheckpointPass,
    ) -> Result<(), PoolError> {
        #[cfg(test)]
        if defect::is(Defect::FrameReuse) {
            return self.release_early(pass);
        }
        if self.mapping.has_overlay() && !defect::is(Defect::CheckpointNotSynced) {
            // Records and data come first: nothing may be applied that could vanish.
            self.mapping.data.sync()?;
        }
        // Closed sessions too: an operation in progress may have kept their last records from being
        // applied.
        for number in 0..self.superblock.journals_end {
            self.apply_journal(number, reach, pass)?;
        }
        self.apply_to_file(pass)?;
        self.withhold_unreadable();
        for &frame in &pass.used {
            self.frame_allocator.write(frame, true);
        }
        for &frame in &pass.freed {
            // The frame stays in use in the bitmap: the next opening would not know that it is
            // unreadable, and would grant it.
            if !self.frame_allocator.is_withheld(frame) {
                self.frame_allocator.write(frame, false);
            }
        }
        if let Some(stores) = self.frame_allocator.flush(&*self.mapping.data) {
            pass.add(stores);
        }
        let idle = pass.stores.is_none();
        if let Some(stores) = pass.stores.take()
            && !defect::is(Defect::TablesWithSuperblock)
        {
            let _fenced = self.mapping.data.fence(stores);
        }
        let heads = self.journal_heads();
        if idle && heads == self.superblock.journal_heads {
            return Ok(());
        }
        self.mapping.data.sync()?;
        if !defect::is(Defect::JournalReuse) && !defect::is(Defect::NewerSuperblockNotChecked) {
            self.ensure_newer_superblock()?;
        }
        self.superblock.generation += 1;
        self.superblock.checkpoint = reach.checkpoint;
        self.superblock.used_frames = self.frame_allocator.used();
        self.superblock.journal_heads = heads;
        if !defect::is(Defect::JournalReuse) {
            write_superblock(&*self.mapping.data, &self.superblock)?;
        }
        let mut freed_twice = None;
        for &frame in &pass.freed {
            if !self.frame_allocator.release(frame) {
                freed_twice = Some(frame);
            }
        }
        for (number, &head) in (0..self.superblock.journals_end).zip(&self.superblock.journal_heads)
        {
            self.mapping
                .control
                .session_cells(number)
                .head()
                .store(head, Ordering::Release);
        }
        self.recycle_objects(reach.checkpoint);
        freed_twice.map_or(Ok(()), |frame| Err(PoolError::FreedTwice(frame)))
    }

    /// Withholds frames that could not be read from further use. A session that found one and then
    /// changes its page has reported the frame before it commits the change.
    pub(crate) fn withhold_unreadable(&mut self) {
        if defect::is(Defect::UnreadableReused) {
            return;
        }
        let view = &self.mapping;
        let pages = [&view.data, &view.meta].map(|media| media.unreadable_pages());
        let own = pages.iter().flatten().map(|at| (at / PAGE_BYTES) as u64);
        let reported = view.control.take_unreadable().map(|frame| frame.0);
        own.chain(reported)
            .for_each(|frame| self.frame_allocator.withhold(frame));
    }

    /// The first line that each journal must retain: records that are not applied, and records that
    /// may be missing on another leg.
    fn journal_heads(&mut self) -> Vec<u64> {
        let mut heads = self.superblock.journal_heads.clone();
        // Journals beyond were never used.
        for (number, head) in (0..self.superblock.journals_end).zip(&mut heads) {
            let complete = self
                .mapping
                .control
                .session_cells(number)
                .complete()
                .load(Ordering::Acquire);
            let session_state = self.sessions.session(number);
            let applied = session_state.applied_journal.end();
            let needed = match defect::is(Defect::HeadPastOpen) {
                true => applied,
                false if defect::is(Defect::PartialCheckpointKeepsRecords) => complete.min(applied),
                false => complete.max(session_state.recorded_below).min(applied),
            };
            *head = needed.max(*head);
        }
        heads
    }

    pub(crate) fn apply_journal(
        &mut self,
        number: u32,
        reach: CheckpointLimits,
        pass: &mut CheckpointPass,
    ) -> Result<(), PoolError> {
        let mut committed = self.committed_end(number);
        let settled = self.mapping.control.session_cells(number).settled();
        let settled = settled.load(Ordering::Acquire);
        let session_state = self.sessions.session(number);
        if reach.is_partial && session_state.is_open && number != OWNER_SESSION {
            committed = committed.min(session_state.recorded_below);
        }
        let settled = session_state.session_start..settled;
        let mut journal = session_state.applied_journal.clone();
        if journal.end() >= committed {
            return Ok(());
        }
        journal.advance(self.superblock.journal_heads[number as usize]);
        // Another session may have stored to the line after its flush.
        pass.frame_line = 0;
        let (mut chunk, mut record) = (std::mem::take(&mut pass.chunk), Record::empty());
        chunk.clear();
        while journal.end() < committed {
            let before = journal.end();
            let is_settled = settled.contains(&before);
            let found = match is_settled && journal.read_next_head(&*self.mapping.data, &mut record)
            {
                true => NextEntry::Map,
                false => {
                    if !chunk.has(before) {
                        let until = committed.min(before + READ_LINES);
                        journal.read_ahead(&*self.mapping.data, until, &mut chunk);
                    }
                    self.read_next_record(&mut journal, committed, &mut chunk, &mut record)?
                }
            };
            let seq = match &found {
                NextEntry::Map => record.seq,
                NextEntry::Object(object) => object.seq,
                NextEntry::Pad => continue,
            };
            if seq >= reach.applied {
                journal.resume(before);
                pass.unapplied_lines = pass.unapplied_lines.max(committed - before);
                break;
            }
            match found {
                NextEntry::Object(object) => self.apply_object(object, pass),
                _ => self.apply_map(number, &mut record, is_settled, pass)?,
            }
        }
        pass.chunk = chunk;
        self.sessions.session(number).applied_journal = journal;
        Ok(())
    }

    /// The line up to which a session has committed.
    pub(crate) fn committed_end(&self, number: u32) -> u64 {
        let committed = self.mapping.control.session_cells(number).committed();
        committed.load(Ordering::Acquire)
    }

    /// As [`Journal::read_next`], for an entry below a committed line. Corrects an entry with one
    /// flipped bit on the medium. May refill the chunk.
    pub(crate) fn read_next_record(
        &mut self,
        journal: &mut Journal,
        committed: u64,
        chunk: &mut JournalChunk,
        record: &mut Record,
    ) -> Result<NextEntry, PoolError> {
        if let Ok(found) = journal.read_next(chunk, record) {
            return Ok(found);
        }
        let number = journal.next_address().journal;
        let bad = PoolError::Session(number);
        let data = &*self.mapping.data;
        let until = committed.min(journal.end() + READ_LINES);
        journal.read_ahead(data, until, chunk);
        let Some(stores) = journal.correct_next(data, chunk) else {
            return Err(bad);
        };
        let _fenced = data.fence(stores);
        self.corrected_records += 1;
        journal.read_ahead(data, until, chunk);
        journal.read_next(chunk, record).map_err(|_| bad)
    }

    fn apply_object(&mut self, object: ObjectRecord, pass: &mut CheckpointPass) {
        if self.mapping.has_overlay() {
            pass.objects.push(object);
        } else {
            // The owner stored and flushed the entry when it committed the record.
            pass.add(
                self.mapping
                    .data
                    .flush(self.mapping.entry_at(object.object), OBJECT_BYTES as usize),
            );
        }
    }

    /// Applies one record. Frames that it took and freed are collected. Its slots are flushed if
    /// the session has not flushed them; on `file-sync` pools they wait for the pass in seq order.
    fn apply_map(
        &mut self,
        journal: u32,
        record: &mut Record,
        is_settled: bool,
        pass: &mut CheckpointPass,
    ) -> Result<(), PoolError> {
        let numbers = self.mapping.geometry.frame_numbers();
        let bad = |slot: Slot| {
            slot.frame()
                .is_some_and(|frame| !numbers.contains(&frame.0))
        };
        let beyond = record.object.0 >= self.mapping.geometry.object_count();
        if beyond
            || record
                .changes
                .iter()
                .any(|change| bad(change.old) || bad(change.new))
        {
            return Err(PoolError::Session(journal));
        }
        if record.is_patch() {
            self.apply_patch_record(journal, record, is_settled, pass)?;
        }
        for change in &record.changes {
            let (old, new) = (change.old.frame(), change.new.frame());
            if old == new {
                continue;
            }
            if let Some(frame) = new {
                pass.used.push(frame.0);
                if record.level == 0 && !self.mapping.has_overlay() {
                    self.flush_checksum(frame, pass);
                }
            }
            if let Some(frame) = old {
                pass.freed.push(frame.0);
            }
        }
        if self.mapping.has_overlay() {
            pass.records
                .push(std::mem::replace(record, Record::empty()));
            return Ok(());
        }
        if is_settled {
            return Ok(());
        }
        let walk = || {
            let view = &self.mapping;
            match view.locate_on(&view.data, record.object, record.level, record.page)? {
                SlotLocation::At(at) => Ok::<_, PoolError>(Some(at)),
                // The object was deleted since, and this node with it.
                SlotLocation::Unlinked(_) => Ok(None),
            }
        };
        let at = match record.level {
            0 => self.leaf_cache.slot_at(record.object, record.page, walk)?,
            _ => walk()?,
        };
        if let Some(at) = at {
            pass.add(self.mapping.data.flush(at, record.changes.len() * 8));
            // A flush of an unreadable page writes nothing back.
            if self.mapping.data.is_unreadable(at) {
                return Err(PoolError::Unreadable(at));
            }
        }
        Ok(())
    }

    /// Flushes a frame's checksum, and with it the others of its line.
    fn flush_checksum(&self, frame: FrameNo, pass: &mut CheckpointPass) {
        let at = self.mapping.geometry.frame_entry_at(frame);
        if at / LINE_BYTES != pass.frame_line && !defect::is(Defect::FrameTableNotFlushed) {
            pass.frame_line = at / LINE_BYTES;
            pass.add(self.mapping.data.flush(at, 8));
        }
    }

    /// Flushes the page's checksum, and the bytes of a patch if the session has not flushed them.
    /// The page keeps its frame.
    fn apply_patch_record(
        &self,
        journal: u32,
        record: &Record,
        is_settled: bool,
        pass: &mut CheckpointPass,
    ) -> Result<(), PoolError> {
        let frame = record.changes[0].new.frame();
        let frame = frame.filter(|_| !self.mapping.has_overlay());
        let frame = frame.ok_or(PoolError::Session(journal))?;
        if defect::is(Defect::PatchedFrameFreed) {
            pass.freed.push(frame.0);
        }
        self.flush_checksum(frame, pass);
        if !is_settled && !defect::is(Defect::CheckpointPatchNotFlushed) {
            let at = frame_at(frame) + record.patch.within;
            pass.add(self.mapping.data.flush(at, record.patch.len));
        }
        Ok(())
    }

    /// `file-sync` pools: stores the slots and entries of the records to the file, in seq order.
    fn apply_to_file(&mut self, pass: &mut CheckpointPass) -> Result<(), PoolError> {
        let data = &*self.mapping.data;
        let mut records = std::mem::take(&mut pass.records);
        if !defect::is(Defect::AppliedOutOfOrder) {
            records.sort_unstable_by_key(|record| record.seq);
        }
        for record in &records {
            let found = (self.mapping).locate_on(data, record.object, record.level, record.page)?;
            let SlotLocation::At(at) = found else {
                return Err(PoolError::Data(record.seq));
            };
            if !data.can_read(at) {
                return Err(PoolError::Unreadable(at));
            }
            for (i, change) in record.changes.iter().enumerate() {
                data.store(at + i * 8, change.new.encode());
                if let (0, Some(frame)) = (record.level, change.new.frame()) {
                    data.store(
                        self.mapping.geometry.frame_entry_at(frame),
                        u64::from(change.sums.crc),
                    );
                }
            }
            pass.add(data.flush(at, record.changes.len() * 8));
        }
        for object in std::mem::take(&mut pass.objects) {
            let at = self.mapping.entry_at(object.object);
            pass.add(store_entry(data, at, &object.entry));
        }
        Ok(())
    }

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
        let at = self.mapping.geometry.journal_at(number);
        let mut stores = data.flush(at, self.mapping.geometry.journal_bytes as usize);
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
                let at = self.mapping.geometry.frame_entry_at(frame);
                self.mapping.meta.store(at, u64::from(change.sums.crc));
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
        self.mapping.apply_patch(at, record);
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

    pub(crate) fn journal_at(&mut self, number: u32, position: u64) -> Journal {
        let place = self
            .sessions
            .session(number)
            .applied_journal
            .next_address()
            .at(position);
        Journal::new(
            self.mapping.geometry.journal_at(number),
            self.mapping.geometry.journal_lines(),
            place,
        )
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
        let numbers = self.mapping.geometry.frame_numbers();
        if record.is_patch() {
            let frame = record.changes[0].new.frame();
            return frame.is_some_and(|frame| numbers.contains(&frame.0));
        }
        let mut page = [0; PAGE_BYTES];
        record
            .changes
            .iter()
            .all(|change| match change.new.frame() {
                None => true,
                Some(frame) if !numbers.contains(&frame.0) => false,
                Some(frame) => {
                    self.mapping.data.read(frame_at(frame), &mut page);
                    record.level > 0 || crc32c(&page) == change.sums.crc
                }
            })
    }

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
        let view = &self.mapping;
        let over = self.in_flight.remove_complete(&*view.data, &view.control);
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
                    Err(crate::format::in_flight::InFlightTableFull) => {
                        self.mark_compare(record.object)?
                    }
                }
            }
        }
        self.fence(stores);
        Ok(Some(journal.end()))
    }

    /// Whether the last checkpoint had to retain much of a session's journal.
    fn is_journal_full(&self, number: u32) -> bool {
        let retained = self.committed_end(number) - self.superblock.journal_heads[number as usize];
        retained >= self.mapping.geometry.journal_lines() / 4
    }

    /// If a journal is full of operations that are incomplete on other legs, lists them in the
    /// in-flight table and frees the journal.
    fn spill_in_flight_if_full(&mut self, number: u32) -> Result<(), ObjectError> {
        let cells = self.mapping.control.session_cells(number);
        let head = self.superblock.journal_heads[number as usize];
        let complete = cells.complete().load(Ordering::Acquire).max(head);
        let committed = cells.committed().load(Ordering::Acquire);
        if committed - complete < self.mapping.geometry.journal_lines() / 4 {
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
                    .load(self.mapping.geometry.frame_entry_at(frame))
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

    /// Frees frames of deleted objects, some at a time. True when there is more to do.
    fn reclaim(&mut self) -> Result<bool, ObjectError> {
        let Some(&(seq, object)) = self.deleting.first() else {
            return Ok(false);
        };
        // The object's earlier records must be applied first.
        if seq >= self.superblock.checkpoint && seq != Seq(0) {
            return Ok(false);
        }
        assert_eq!(
            self.objects[&object].state,
            ObjectState::Deleting,
            "a deleted object"
        );
        let handle = self.mapping.handle(object, self.objects[&object].slice)?;
        for _ in 0..RECLAIM_STEPS {
            if !self.reclaim_step(&handle)? {
                self.deleting.remove(0);
                self.drop_object(object)?;
                return Ok(!self.deleting.is_empty());
            }
        }
        Ok(true)
    }

    /// Unmaps a run of slots of the first leaf that has mapped slots, or an empty node. False when
    /// nothing is left.
    fn reclaim_step(&mut self, handle: &Handle) -> Result<bool, ObjectError> {
        let root_at = self.mapping.entry_at(handle.object) + ROOT_AT;
        let (mut at, mut level, mut page) = (root_at, HEIGHT, 0u64);
        loop {
            // The subtree of a slot that cannot be corrected is lost. A check of the pool finds its
            // frames.
            let node = self.node_at(handle.object, level, page, at);
            let Some(node) =
                node.filter(|node| self.mapping.geometry.frame_numbers().contains(&node.0))
            else {
                self.clear_root(handle)?;
                return Ok(false);
            };
            if level == 1
                && let Some((first, changes)) = self.unmap_first_run(node, |slot| slot.unmap(0))
            {
                let slots_at = frame_at(node) + first * 8;
                let page = PageNo(page + first as u64);
                self.with_retry(|own| own.commit_changes(handle, 0, page, slots_at, &changes))?;
                return Ok(true);
            }
            let page_of = |i: usize| page + ((i as u64) << (9 * u32::from(level - 1)));
            let below = (0..NODE_SLOTS as usize).find(|&i| {
                let at = frame_at(node) + i * 8;
                level > 1
                    && self
                        .node_at(handle.object, level - 1, page_of(i), at)
                        .is_some()
            });
            match below {
                Some(i) => {
                    page = page_of(i);
                    level -= 1;
                    at = frame_at(node) + i * 8;
                }
                None => {
                    let old = Slot::decode(self.mapping.meta.load(at))
                        .map_err(|_| StoreError::NoSuchObject)?;
                    // The root becomes empty, because a new object needs an empty root.
                    let new = if at == root_at {
                        Slot::EMPTY
                    } else {
                        old.unmap(0)
                    };
                    let change = [Change {
                        old,
                        new,
                        sums: NO_SUMS,
                    }];
                    let page = PageNo(page);
                    self.with_retry(|own| own.commit_changes(handle, level, page, at, &change))?;
                    return Ok(at != root_at);
                }
            }
        }
    }

    /// Empties the root slot of a deleted object if it does not check: a new object needs an empty
    /// root.
    fn clear_root(&mut self, handle: &Handle) -> Result<(), ObjectError> {
        let at = self.mapping.entry_at(handle.object) + ROOT_AT;
        if Slot::decode(self.mapping.meta.load(at)).is_ok() {
            return Ok(());
        }
        let change = [Change {
            old: Slot::EMPTY,
            new: Slot::EMPTY,
            sums: NO_SUMS,
        }];
        self.with_retry(|own| own.commit_changes(handle, HEIGHT, PageNo(0), at, &change))
    }

    /// The node that the slot of `level` above `page` names; the slot lies at byte `at`.
    fn node_at(&self, object: ObjectId, level: u8, page: u64, at: usize) -> Option<FrameNo> {
        let slot = self.mapping.node_slot(object, level, PageNo(page), at);
        slot.ok().and_then(Slot::frame)
    }

    fn is_linked(&self, node: FrameNo, index: usize) -> bool {
        let slot = Slot::decode(self.mapping.meta.load(frame_at(node) + index * 8));
        slot.is_ok_and(|slot| slot.frame().is_some())
    }

    /// The first run of mapped slots of a leaf, as changes that unmap them.
    fn unmap_first_run(
        &self,
        node: FrameNo,
        unmapped: impl Fn(Slot) -> Slot,
    ) -> Option<(usize, Vec<Change>)> {
        let limit = (self.mapping.geometry.journal_lines() as usize / 4 - 1) * 3;
        let first = (0..NODE_SLOTS as usize).find(|&i| self.is_linked(node, i))?;
        let changes = (first..NODE_SLOTS as usize)
            .take_while(|&i| self.is_linked(node, i))
            .take(limit.min(PAGES_MAX / 2))
            .filter_map(|i| Slot::decode(self.mapping.meta.load(frame_at(node) + i * 8)).ok())
            .map(|old| Change {
                old,
                new: unmapped(old),
                sums: NO_SUMS,
            })
            .collect();
        Some((first, changes))
    }

    /// The entry of an object, in the owner's memory.
    #[must_use]
    pub fn object(&self, object: ObjectId) -> Option<&Object> {
        self.objects.get(&object)
    }
}
