//! The owner's scrub compares the metadata on media with the owner's memory, in small steps while
//! the pool is in use.
//!
//! The owner's memory has superblocks, lines of the bitmap, entries of the object table and entries
//! of the in-flight table. The scrub rewrites those that differ on media. Slots above the leaves
//! are only on media: the scrub corrects a flipped bit by the check bits, if the target of the
//! corrected slot is a node. It corrects records of journals by their checksums. The scrub of a
//! volume, which has other legs, checks pages and leaves.
//!
//! Invariants: the scrub writes nothing that is already right. A step is short, and the pool serves
//! its sessions between two steps. In a journal the scrub reads only from the head to the published
//! committed index. The session writes nothing there until the owner moves the head, and the owner
//! is running the scrub.

use crate::defect::{self, Defect};
use crate::format::geometry::OBJECT_BYTES;
use crate::format::journal::{Journal, JournalChunk};
use crate::format::object::{Object, ObjectState, store_entry};
use crate::format::record::Record;
use crate::format::superblock::Superblock;
use crate::format::table::{BadTable, NODE_SLOTS, SlotLocation, reach};
use crate::owner::pool::{ObjectError, Pool};
use crate::recovery::{PoolError, superblock_copies};
use pagemesh_base::ids::{ObjectId, PageNo};
pub use pagemesh_base::scrub::ScrubReport;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;

/// Lines of the bitmap in one step: 256 KiB.
const STEP_LINES: u32 = 4096;
/// Lines of journals after which a step ends: 1 MiB, and at most one journal more.
const STEP_JOURNAL_LINES: u64 = 1 << 14;
/// Entries of the in-flight table in one step: 256 KiB.
const STEP_IN_FLIGHT: u32 = 8192;
/// Entries of the object table in one step.
const STEP_OBJECTS: u32 = 512;
/// Leaves in one step.
const STEP_LEAVES: u64 = 1024;

/// Bytes of an object below one leaf.
const LEAF_BYTES: u64 = NODE_SLOTS * PAGE_BYTES as u64;

/// The position of a scrub; the default is its start.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScrubCursor(ScrubStage);

#[derive(Clone, Copy, Debug, Default)]
enum ScrubStage {
    #[default]
    Superblocks,
    /// From this journal on.
    Journals(u32),
    /// From this entry on.
    InFlight(u32),
    /// From this line on.
    Bitmap(u32),
    /// From this entry on.
    Objects(u32),
    /// From this page of this object on.
    Tables(u32, u64),
}

impl<M: Media> Pool<M> {
    /// Does one step of a scrub. Returns the position of the next step; none at the end.
    ///
    /// # Errors
    /// When the medium fails, or when a checkpoint needs a record that cannot be read. The pool has
    /// then failed.
    pub fn scrub(
        &mut self,
        ScrubCursor(stage): ScrubCursor,
        found: &mut ScrubReport,
    ) -> Result<Option<ScrubCursor>, ObjectError> {
        if self.has_failed {
            return Err(PoolError::Failed.into());
        }
        let stepped = match stage {
            ScrubStage::Superblocks => self.scrub_superblocks(found).map_err(Into::into),
            ScrubStage::Journals(number) => self.scrub_journals(number, found),
            ScrubStage::InFlight(index) => self.scrub_in_flight(index, found).map_err(Into::into),
            ScrubStage::Bitmap(line) => self.scrub_bitmap(line, found).map_err(Into::into),
            ScrubStage::Objects(index) => self.scrub_objects(index, found).map_err(Into::into),
            ScrubStage::Tables(index, page) => {
                let stepped = self.scrub_tables(index, page, found);
                stepped.map_err(Into::into)
            }
        };
        found.records += self.corrected_records - self.reported_records;
        self.reported_records = self.corrected_records;
        let slots = self.corrected_slots();
        // Any process that maps the pool may have written any value there.
        let corrected = slots.saturating_sub(std::mem::replace(&mut self.reported_slots, slots));
        found.slots += corrected;
        let stepped = match corrected {
            0 => stepped,
            _ => stepped.and_then(|next| {
                self.mapping.data.sync().map_err(PoolError::from)?;
                Ok(next)
            }),
        };
        if stepped.is_err() {
            self.has_failed = true;
            self.mapping.mark_owner_gone();
        }
        Ok(stepped?.map(ScrubCursor))
    }

    /// The part of a scrub before this position, in percent of its steps.
    #[must_use]
    pub fn scrub_progress(&self, ScrubCursor(stage): ScrubCursor) -> u8 {
        let leaves_below = |end: u32| {
            let live = self
                .objects
                .iter()
                .filter(|(object, entry)| object.0 < end && entry.state == ObjectState::Live);
            let leaves = live.map(|(_, entry)| entry.size_bytes.div_ceil(LEAF_BYTES));
            leaves.sum::<u64>()
        };
        let steps = |count: u32, of: u32| u64::from(count.div_ceil(of));
        let in_flight = steps(self.in_flight.count(), STEP_IN_FLIGHT);
        let bitmap = steps(self.frame_allocator.bitmap().used_end(), STEP_LINES);
        let objects = steps(self.superblock.objects_end, STEP_OBJECTS);
        let tables = 2 + in_flight + bitmap + objects;
        let total = tables + leaves_below(u32::MAX).div_ceil(STEP_LEAVES);
        let done = match stage {
            ScrubStage::Superblocks => 0,
            ScrubStage::Journals(_) => 1,
            ScrubStage::InFlight(index) => 2 + steps(index, STEP_IN_FLIGHT),
            ScrubStage::Bitmap(line) => 2 + in_flight + steps(line, STEP_LINES),
            ScrubStage::Objects(index) => 2 + in_flight + bitmap + steps(index, STEP_OBJECTS),
            ScrubStage::Tables(index, page) => {
                tables + (leaves_below(index) + page / reach(1)) / STEP_LEAVES
            }
        };
        (done * 100 / total).min(99) as u8
    }

    fn scrub_superblocks(
        &mut self,
        found: &mut ScrubReport,
    ) -> Result<Option<ScrubStage>, PoolError> {
        let older = self.superblock.generation - 1;
        let is_older_sound = self.has_superblock(older);
        self.ensure_newer_superblock()?;
        found.superblocks += std::mem::take(&mut self.rewritten_superblocks);
        if !is_older_sound {
            self.superblock.generation += 1;
            self.write_superblock()?;
            found.superblocks += 1;
        }
        found.checked += 2;
        Ok(Some(ScrubStage::Journals(0)))
    }

    /// Rewrites the newer superblock if it is damaged. It goes into its own place, so that a crash
    /// meanwhile still finds the older one. This must come before the older is overwritten: at no
    /// time are both invalid.
    pub(crate) fn ensure_newer_superblock(&mut self) -> Result<(), PoolError> {
        if self.has_superblock(self.superblock.generation) {
            return Ok(());
        }
        self.rewritten_superblocks += 1;
        if defect::is(Defect::SuperblocksTogether) {
            let page = self.superblock.encode();
            let target = (&*self.mapping.data, self.superblock.offset());
            let (_, _unfenced) = M::stream_page(&[target], &page);
            self.superblock.generation += 1;
        }
        if defect::is(Defect::OlderSuperblockFirst) {
            self.superblock.generation += 1;
        }
        self.write_superblock()
    }

    fn has_superblock(&self, generation: u64) -> bool {
        let copies = superblock_copies(&*self.mapping.data);
        let is_it = |found: &Superblock| {
            found.pool == self.superblock.pool && found.generation == generation
        };
        copies.iter().flatten().any(is_it)
    }

    fn scrub_journals(
        &mut self,
        from: u32,
        found: &mut ScrubReport,
    ) -> Result<Option<ScrubStage>, ObjectError> {
        let mut lines = 0;
        for number in from..self.superblock.journals_end {
            if lines >= STEP_JOURNAL_LINES {
                return Ok(Some(ScrubStage::Journals(number)));
            }
            lines += self.scrub_journal(number, found)?;
        }
        Ok(Some(ScrubStage::InFlight(0)))
    }

    /// Reads the live records of a journal, and returns the number of its lines.
    pub(crate) fn scrub_journal(
        &mut self,
        number: u32,
        found: &mut ScrubReport,
    ) -> Result<u64, ObjectError> {
        let committed = self.mapping.control.session_cells(number).committed();
        let committed = committed.load(Ordering::Acquire);
        let head = self.superblock.journal_heads[number as usize];
        let corrected = self.corrected_records;
        let mut journal = self.journal_at(number, head);
        let (mut chunk, mut record) = (JournalChunk::default(), Record::empty());
        while journal.end() < committed {
            journal.read_ahead(&*self.mapping.data, committed, &mut chunk);
            while journal.end() < chunk.end() {
                found.checked += 1;
                match self.read_next_record(&mut journal, committed, &mut chunk, &mut record) {
                    Ok(_) => {}
                    Err(_) if self.is_applied(&journal) => {
                        self.skip_applied_records(number)?;
                        found.skipped_journals += 1;
                        return Ok(committed - head);
                    }
                    Err(bad) => return Err(bad.into()),
                }
            }
        }
        if self.corrected_records > corrected {
            self.mapping.data.sync().map_err(PoolError::from)?;
        }
        Ok(committed - head)
    }

    /// Whether the checkpoint has passed the record at the position of `journal`.
    pub(crate) fn is_applied(&mut self, journal: &Journal) -> bool {
        journal.end()
            < self
                .sessions
                .session(journal.next_address().journal)
                .applied_journal
                .end()
    }

    /// Lets recovery begin after the applied records of a journal, one of which cannot be read.
    /// They only listed operations that may be missing on other legs. The object of the lost record
    /// is unknown, so all objects are compared as a whole.
    pub(crate) fn skip_applied_records(&mut self, number: u32) -> Result<(), ObjectError> {
        let marks_late = defect::is(Defect::SlicesMarkedAfterHead);
        if !marks_late {
            self.mark_compare_all()?;
        }
        let session_state = self.sessions.session(number);
        session_state.recorded_below = session_state.applied_journal.end();
        self.checkpoint()?;
        match marks_late {
            true => self.mark_compare_all(),
            false => Ok(()),
        }
    }

    fn mark_compare_all(&mut self) -> Result<(), ObjectError> {
        let mut objects = (0..self.superblock.objects_end).map(ObjectId);
        objects.try_for_each(|object| self.mark_compare(object))
    }

    fn scrub_in_flight(
        &mut self,
        from: u32,
        found: &mut ScrubReport,
    ) -> Result<Option<ScrubStage>, PoolError> {
        let end = self.in_flight.count();
        let to = end.min(from + STEP_IN_FLIGHT);
        let (corrected, stores) = self
            .in_flight
            .rewrite_damaged(&*self.mapping.data, from..to);
        if let Some(stores) = stores {
            let _fenced = self.mapping.data.fence(stores);
            self.mapping.data.sync()?;
        }
        found.in_flight += corrected;
        found.checked += u64::from(to - from);
        Ok(Some(match to == end {
            true => ScrubStage::Bitmap(0),
            false => ScrubStage::InFlight(to),
        }))
    }

    fn scrub_bitmap(
        &mut self,
        from: u32,
        found: &mut ScrubReport,
    ) -> Result<Option<ScrubStage>, PoolError> {
        let end = self.frame_allocator.bitmap().used_end();
        let to = end.min(from + STEP_LINES);
        let (corrected, stores) = self
            .frame_allocator
            .bitmap()
            .correct(&*self.mapping.data, from..to);
        if let Some(stores) = stores {
            let _fenced = self.mapping.data.fence(stores);
            self.mapping.data.sync()?;
        }
        self.add_table_lines(corrected);
        found.bitmap_lines += corrected;
        found.checked += u64::from(to - from);
        Ok(Some(match to == end {
            true => ScrubStage::Objects(0),
            false => ScrubStage::Bitmap(to),
        }))
    }

    fn scrub_objects(
        &mut self,
        from: u32,
        found: &mut ScrubReport,
    ) -> Result<Option<ScrubStage>, PoolError> {
        let end = self.superblock.objects_end;
        let to = end.min(from + STEP_OBJECTS);
        for object in (from..to).map(ObjectId) {
            found.checked += 1;
            let Some(entry) = self.objects.get(&object).copied() else {
                // Lost before the pool was opened.
                found.damaged += 1;
                continue;
            };
            let is_right = |media: &M| self.redundant_entry(media, object) == Some(entry);
            let mut is_mended = false;
            if !is_right(&self.mapping.meta) {
                self.rewrite_entry(&self.mapping.meta, object, &entry)?;
                is_mended = true;
            }
            if self.mapping.has_overlay()
                && self.redundant_entry(&self.mapping.data, object).is_none()
            {
                // The file may lag behind as long as its entry is sound.
                self.checkpoint()?;
                self.rewrite_entry(&self.mapping.data, object, &entry)?;
                is_mended = true;
            }
            if is_mended {
                found.objects += 1;
                self.add_table_lines(OBJECT_BYTES / LINE_BYTES as u64);
            }
        }
        Ok(Some(match to == end {
            true => ScrubStage::Tables(0, 0),
            false => ScrubStage::Objects(to),
        }))
    }

    /// The entry, if line and copy are both sound and agree.
    fn redundant_entry(&self, media: &M, object: ObjectId) -> Option<Object> {
        let mut bytes = [0; OBJECT_BYTES as usize];
        media.read(self.mapping.entry_at(object), &mut bytes);
        match Object::decode_redundant(&bytes) {
            Ok((entry, true)) => Some(entry),
            _ => None,
        }
    }

    fn rewrite_entry(&self, media: &M, object: ObjectId, entry: &Object) -> Result<(), PoolError> {
        let stores = store_entry(media, self.mapping.entry_at(object), &entry.encode());
        let _fenced = media.fence(stores);
        Ok(self.mapping.data.sync()?)
    }

    fn scrub_tables(
        &mut self,
        index: u32,
        page: u64,
        found: &mut ScrubReport,
    ) -> Result<Option<ScrubStage>, PoolError> {
        if index >= self.superblock.objects_end {
            return Ok(None);
        }
        let object = ObjectId(index);
        let live = self.objects.get(&object);
        let live = live.filter(|entry| entry.state == ObjectState::Live);
        let pages = live.map_or(0, |entry| entry.size_bytes / PAGE_BYTES as u64);
        let mut page = page;
        for _ in 0..STEP_LEAVES {
            if page >= pages {
                return Ok(Some(ScrubStage::Tables(index + 1, 0)));
            }
            found.checked += 1;
            let way = (self.mapping).locate_on(&self.mapping.meta, object, 0, PageNo(page));
            let level = match way {
                Ok(SlotLocation::At(_)) => 1,
                Ok(SlotLocation::Unlinked(level)) => level,
                Err(BadTable::Damaged { level, .. } | BadTable::NoSuchFrame { level, .. }) => {
                    found.damaged += 1;
                    level
                }
                Err(BadTable::OutOfReach { .. }) => {
                    return Ok(Some(ScrubStage::Tables(index + 1, 0)));
                }
            };
            page = (page / reach(level) + 1) * reach(level);
        }
        Ok(Some(ScrubStage::Tables(index, page)))
    }
}
