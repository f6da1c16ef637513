//! The application of records in a checkpoint: their slots, checksums and entries are flushed, or
//! on `file-sync` pools stored to the file.

use super::checkpoint::{CheckpointLimits, CheckpointPass};
use super::pool::{OWNER_SESSION, Pool};
use super::versions::may_be_seen;
use crate::defect::{self, Defect};
use crate::format::geometry::{OBJECT_BYTES, frame_at};
use crate::format::journal::{Journal, JournalChunk, NextEntry};
use crate::format::object::store_entry;
use crate::format::record::{ObjectRecord, PAGES_MAX, Record};
use crate::format::slot::Slot;
use crate::format::table::SlotLocation;
use crate::recovery::{PAGES_AHEAD, PoolError};
use pagemesh_base::ids::FrameNo;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::Media;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

/// Lines read at once. The longest entry fits into them, and they fit into a first-level cache.
const READ_LINES: u64 = 256;
/// Lines of the longest entry.
const ENTRY_LINES_MAX: u64 = PAGES_MAX as u64 / 3 + 2;
const _: () = assert!(READ_LINES > ENTRY_LINES_MAX);

impl<M: Media> Pool<M> {
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
        pass.written.begin_journal();
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

    pub(crate) fn journal_at(&mut self, number: u32, position: u64) -> Journal {
        let place = self
            .sessions
            .session(number)
            .applied_journal
            .next_address()
            .at(position);
        Journal::new(
            self.mapping.geometry().journal_at(number),
            self.mapping.geometry().journal_lines(),
            place,
        )
    }

    fn apply_object(&mut self, object: ObjectRecord, pass: &mut CheckpointPass) {
        if self.mapping.has_overlay() {
            pass.objects.push(object);
        } else {
            pass.written.add_object();
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
        let numbers = self.mapping.geometry().frame_numbers();
        let bad = |slot: Slot| slot.frame().is_some_and(|frame| !numbers.contains(frame));
        let beyond = record.object.0 >= self.mapping.geometry().object_count();
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
        self.collect_frames(record, pass);
        if self.mapping.has_overlay() {
            pass.records
                .push(std::mem::replace(record, Record::empty()));
            return Ok(());
        }
        pass.written.add_slots(record);
        if is_settled {
            return Ok(());
        }
        self.flush_slots(record, pass)
    }

    /// Collects the frames that a record took and freed, and flushes the checksums of its pages.
    fn collect_frames(&self, record: &Record, pass: &mut CheckpointPass) {
        let entry = self.entry_of_pages(record);
        for (change, page) in record.changes_by_page() {
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
            let kept = entry.and_then(|entry| self.kept_version(entry, record, change, page));
            let is_of_origin =
                |frame| entry.is_some_and(|it| self.is_frame_kept(it, record, frame));
            match (old, kept) {
                (_, Some(version)) => pass.kept.push(version),
                (Some(frame), None) if is_of_origin(frame) => {}
                (Some(frame), None) => {
                    if entry.is_some_and(|entry| may_be_seen(entry, record)) {
                        self.mapping.end_version_generation();
                    }
                    pass.freed.push(frame.0);
                }
                (None, None) => {}
            }
        }
    }

    /// Flushes the slots that a record swapped.
    fn flush_slots(&mut self, record: &Record, pass: &mut CheckpointPass) -> Result<(), PoolError> {
        let walk = || {
            let mapping = &self.mapping;
            match mapping.locate_on(&mapping.data, record.object, record.level, record.page)? {
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
        let at = self.mapping.geometry().frame_entry_at(frame);
        if at / LINE_BYTES != pass.frame_line && !defect::is(Defect::FrameTableNotFlushed) {
            pass.frame_line = at / LINE_BYTES;
            pass.written.add_table_lines(1);
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
        pass.written.add_patch(&record.patch);
        if !is_settled && !defect::is(Defect::CheckpointPatchNotFlushed) {
            let at = frame_at(frame) + record.patch.within;
            pass.add(self.mapping.data.flush(at, record.patch.len));
        }
        Ok(())
    }

    /// The first of some records that change at most [`PAGES_AHEAD`] pages of the frame table, or one record; with these
    /// pages.
    fn next_to_apply<'r>(&self, records: &'r [Record]) -> (&'r [Record], Vec<usize>) {
        let geometry = self.mapping.geometry();
        let mut pages = BTreeSet::new();
        let mut count = 0;
        for record in records {
            if count > 0 && pages.len() + record.changes.len() > PAGES_AHEAD {
                break;
            }
            count += 1;
            if record.level == 0 {
                let frames = record.changes.iter().filter_map(|it| it.new.frame());
                pages
                    .extend(frames.map(|it| geometry.frame_entry_at(it) / PAGE_BYTES * PAGE_BYTES));
            }
        }
        (
            &records[..count],
            pages.into_iter().take(PAGES_AHEAD).collect(),
        )
    }

    /// `file-sync` pools: stores the slots and entries of the records to the file, in seq order.
    pub(super) fn apply_to_file(&mut self, pass: &mut CheckpointPass) -> Result<(), PoolError> {
        let data = &*self.mapping.data;
        let mut records = std::mem::take(&mut pass.records);
        if !defect::is(Defect::AppliedOutOfOrder) {
            records.sort_unstable_by_key(|record| record.seq);
        }
        let mut rest = &records[..];
        while !rest.is_empty() {
            let (next, pages) = self.next_to_apply(rest);
            data.load_ahead(&pages);
            for record in next {
                self.apply_record_to_file(record, pass)?;
            }
            rest = &rest[next.len()..];
        }
        for object in std::mem::take(&mut pass.objects) {
            let at = self.mapping.entry_at(object.object);
            pass.written.add_object();
            pass.add(store_entry(data, at, &object.entry));
        }
        Ok(())
    }

    fn apply_record_to_file(
        &self,
        record: &Record,
        pass: &mut CheckpointPass,
    ) -> Result<(), PoolError> {
        let data = &*self.mapping.data;
        let found = (self.mapping).locate_on(data, record.object, record.level, record.page)?;
        let SlotLocation::At(at) = found else {
            return Err(PoolError::Data(record.seq));
        };
        if !data.can_read(at) {
            return Err(PoolError::Unreadable(at));
        }
        pass.written.add_slots(record);
        for (i, change) in record.changes.iter().enumerate() {
            data.store(at + i * 8, change.new.encode());
            if let (0, false, Some(frame)) = (record.level, record.is_adoption, change.new.frame())
            {
                let at = self.mapping.geometry().frame_entry_at(frame);
                pass.written.add_checksum_at(at);
                data.store(at, record.frame_word(change));
            }
        }
        pass.add(data.flush(at, record.changes.len() * 8));
        Ok(())
    }
}
