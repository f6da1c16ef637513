//! The replay of records in seq order, on a pool that is not in use.

use super::ahead::{self, EntriesAhead};
use super::error::PoolError;
use crate::defect::{self, Defect};
use crate::format::frame_word::FrameWord;
use crate::format::geometry::{Geometry, OBJECT_BYTES, frame_at};
use crate::format::object::{CloneBounds, HEIGHT, Object, ROOT_AT, store_entry};
use crate::format::record::{Change, JournalEntry, ObjectRecord, Record};
use crate::format::slot::Slot;
use crate::format::superblock::{COUNT_MAX, Superblock};
use crate::format::table::{BadTable, PageTable, SlotLocation};
use crate::format::version_log::{Version, VersionLogPlace, load_versions};
use pagemesh_base::ids::{Epoch, FrameNo, ObjectId, PageNo, Seq};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};
use std::collections::{BTreeMap, HashMap, HashSet};
use uuid::Uuid;

/// Applies records in seq order to a pool that is not in use.
pub(super) struct Replay<'m, M> {
    pub(super) media: &'m M,
    pub(super) geometry: Geometry,
    pub(super) objects_end: u32,
    /// Frames that records name, with their use at the checkpoint and at the end.
    pub(super) in_use: BTreeMap<u64, (bool, bool)>,
    /// All changes of frames by records, in order; recorded if a line of the bitmap is damaged.
    pub(super) changes: Option<Vec<(u64, bool)>>,
    /// Frames that records change in place, each with the last such record.
    pub(super) patched_frames: BTreeMap<u64, Seq>,
    pub(super) stores: Vec<UnfencedStores>,
    pub(super) pool: Uuid,
    /// The version log of the superblock.
    pub(super) version_log: VersionLogPlace,
    /// Versions that records replaced and that snapshots see.
    pub(super) kept: Vec<Version>,
    /// On a file with a version log: the slots that the records publish.
    new_slots: HashSet<PublishedSlot>,
    /// The epochs of the newest snapshots by the last record of each object's entry.
    last_entries: HashMap<ObjectId, Epoch>,
    /// The epoch of the newest snapshot of an object, as far as records have needed it.
    newest_snapshots: HashMap<ObjectId, Epoch>,
    /// The bounds of objects that take part in clones: those of the medium, and of all records of their entries.
    clone_bounds: HashMap<ObjectId, CloneBounds>,
}

impl<'m, M: Media> Replay<'m, M> {
    pub(super) fn new(media: &'m M, block: &Superblock, keeps_changes: bool) -> Replay<'m, M> {
        let mut replay = Replay {
            media,
            geometry: block.geometry,
            objects_end: block.objects_end,
            in_use: BTreeMap::new(),
            changes: keeps_changes.then(Vec::new),
            patched_frames: BTreeMap::new(),
            stores: Vec::new(),
            pool: block.pool,
            version_log: block.version_log,
            kept: Vec::new(),
            new_slots: HashSet::new(),
            last_entries: HashMap::new(),
            newest_snapshots: HashMap::new(),
            clone_bounds: HashMap::new(),
        };
        if !block.version_log.is_counted {
            // Their bits may be on the medium or not.
            for FrameNo(frame) in block.version_log.frames() {
                replay.in_use.insert(frame, (false, true));
                if let Some(changes) = &mut replay.changes {
                    changes.push((frame, true));
                }
            }
        }
        replay
    }

    pub(super) fn apply_all(
        &mut self,
        entries: &[JournalEntry],
        ordered: bool,
    ) -> Result<(), PoolError> {
        let moved = frame_moves(entries);
        self.last_entries = last_entries(entries);
        self.load_clone_bounds(entries);
        if !ordered && self.version_log.is_present() {
            self.new_slots = new_slots(entries);
        }
        let mut ahead = EntriesAhead::new(entries);
        for group in entries.chunk_by(|one, next| one.seq() == next.seq()) {
            if let Some(next) = ahead.before(group) {
                ahead::load_nodes(self.media, &self.geometry, next);
            }
            let seq = group[0].seq();
            if seq.0 >= COUNT_MAX {
                return Err(PoolError::Record(seq));
            }
            // On a file, another session's record that links a leaf may be lost. Then the group was
            // never promised, and none of it may be applied.
            if !ordered && group.len() > 1 && !self.are_leaves_linked(group)? {
                continue;
            }
            for entry in group {
                self.apply(entry, ordered)?;
                if let JournalEntry::Map(record) = entry
                    && record.is_patch()
                {
                    self.apply_patch(record, &moved);
                }
            }
        }
        if !ordered {
            // The slots that tell which records replaced them may be gone.
            let logged = load_versions(self.media, &self.version_log, self.pool);
            for version in logged.into_iter().flatten() {
                self.record_kept_frame(version.frame);
            }
        }
        Ok(())
    }

    /// Copies the bytes of a patch into the page, unless the frame has another page after the patch. A
    /// replay from the older superblock has patches of frames with other users by now. An
    /// unreadable page stays unreadable.
    fn apply_patch(&mut self, record: &Record, moved: &BTreeMap<u64, Seq>) {
        let Some(frame) = record.changes[0].new.frame() else {
            return;
        };
        let is_moved = moved.get(&frame.0).is_some_and(|&last| last > record.seq);
        if is_moved && !defect::is(Defect::PatchOnMovedFrame) {
            return;
        }
        let at = frame_at(frame) + record.patch.within;
        let mut found = vec![0; record.patch.len];
        self.media.read(at, &mut found);
        if self.media.is_unreadable(at) {
            return;
        }
        self.media.write(at, &record.patch.bytes);
        self.stores.push(self.media.flush(at, found.len()));
    }

    /// Whether every leaf that a group changes is linked.
    fn are_leaves_linked(&self, group: &[JournalEntry]) -> Result<bool, PoolError> {
        if defect::is(Defect::GroupWithoutLeaf) {
            return Ok(true);
        }
        for entry in group {
            if let JournalEntry::Map(record) = entry
                && !self.is_below_failed(record)
                && let SlotLocation::Unlinked(_) = self.locate(record)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The location of a record's first slot.
    pub(super) fn locate(&self, record: &Record) -> Result<SlotLocation, PoolError> {
        if record.object.0 >= self.geometry.object_count() {
            return Err(PoolError::Object(record.object.0));
        }
        let root_at = self.geometry.object_at(record.object) + ROOT_AT;
        let table = PageTable::new(self.media, root_at, HEIGHT, self.geometry.frame_numbers());
        Ok(table.locate(record.level, record.page)?)
    }

    /// Whether a node with the record's slots, or one above, lies on a failed device. Then the pages below are lost.
    fn is_below_failed(&self, record: &Record) -> bool {
        if self.geometry.devices.failed().next().is_none()
            || record.object.0 >= self.geometry.object_count()
        {
            return false;
        }
        let root_at = self.geometry.object_at(record.object) + ROOT_AT;
        let table = PageTable::new(self.media, root_at, HEIGHT, self.geometry.frame_numbers());
        // The walk ends at the first slot that cannot be read.
        let mut places = (record.level..HEIGHT).rev().map_while(|level| {
            match table.locate(level, record.page) {
                Ok(SlotLocation::At(at)) => Some(at),
                _ => None,
            }
        });
        places.any(|at| self.is_on_failed(at))
    }

    fn is_on_failed(&self, at: usize) -> bool {
        let mut failed = self.geometry.devices.failed();
        failed.any(|device| device.bytes().contains(&at))
    }

    fn apply(&mut self, entry: &JournalEntry, ordered: bool) -> Result<(), PoolError> {
        match entry {
            JournalEntry::Map(record) => self.apply_map(record, ordered),
            JournalEntry::Object(record) => {
                if record.object.0 >= self.geometry.object_count() {
                    return Err(PoolError::Object(record.object.0));
                }
                self.objects_end = self.objects_end.max(record.object.0 + 1);
                self.newest_snapshots.remove(&record.object);
                let at = self.geometry.object_at(record.object);
                self.stores.push(store_entry(self.media, at, &record.entry));
                Ok(())
            }
        }
    }

    /// Whether the slot names no frame outside the pool.
    fn is_ours(&self, slot: Slot) -> bool {
        let numbers = self.geometry.frame_numbers();
        slot.frame().is_none_or(|frame| numbers.contains(frame))
    }

    fn apply_map(&mut self, record: &Record, ordered: bool) -> Result<(), PoolError> {
        let mut slots = record.changes.iter().flat_map(|c| [c.old, c.new]);
        if !slots.all(|slot| self.is_ours(slot)) {
            return Err(PoolError::Record(record.seq));
        }
        if self.is_below_failed(record) {
            // Nothing names its new frames. Its old ones stay in use until a check of the pool frees them.
            for change in &record.changes {
                if change.new.frame() != change.old.frame() {
                    self.record_freed_frame(change.new, false, ordered);
                }
            }
            return Ok(());
        }
        let SlotLocation::At(at) = self.locate(record)? else {
            // The object was deleted afterwards, and this node with it. Or, on a file, the record
            // that links the node was lost, and this record was never promised either.
            for change in &record.changes {
                if !self.is_frame_kept(record, change.old) {
                    self.record_freed_frame(change.old, ordered, ordered);
                }
                self.record_freed_frame(change.new, false, ordered);
            }
            return Ok(());
        };
        for (i, change) in record.changes.iter().enumerate() {
            let found = Slot::decode(self.media.load(at + i * 8));
            if found.is_err() && self.media.is_unreadable(at) {
                return Err(PoolError::Unreadable(at));
            }
            if let Some(frame) = found
                .ok()
                .filter(|&slot| !self.is_ours(slot))
                .and_then(Slot::frame)
            {
                let (level, page) = (record.level, record.page);
                return Err(BadTable::NoSuchFrame { level, page, frame }.into());
            }
            let page = PageNo(record.page.0 + i as u64);
            self.apply_change(record, page, at + i * 8, change, ordered);
        }
        self.stores
            .push(self.media.flush(at, record.changes.len() * 8));
        Ok(())
    }

    fn apply_change(
        &mut self,
        record: &Record,
        page: PageNo,
        at: usize,
        change: &Change,
        ordered: bool,
    ) {
        let &Change { old, new, .. } = change;
        let level = record.level;
        // On a file, a record between the two may be lost. Then the frame that the slot really maps
        // is free now, and the frame that this record replaced was never in use.
        let found = Slot::decode(self.media.load(at));
        let follows = ordered || found == Ok(old);
        if !self.is_frame_kept(record, old) {
            self.record_freed_frame(old, follows, ordered);
        }
        if let (false, Ok(found)) = (follows, found)
            && !self.is_frame_kept(record, found)
        {
            self.record_freed_frame(found, true, ordered);
        }
        // Where the slot of some record is stored, the version that it replaced is in the log.
        let is_stored = |slot: &Slot| {
            let slot = PublishedSlot::new(record.object, page, *slot);
            self.new_slots.contains(&slot)
        };
        let replaced = match follows {
            true => Some(old),
            false => found.ok().filter(|slot| !is_stored(slot)),
        };
        if let Some(version) = replaced.and_then(|slot| self.kept_version(record, page, slot, new))
        {
            self.record_kept_frame(version.frame);
            self.kept.push(version);
        }
        self.record_frame_use(new, false, true);
        if let (1.., false, Some(node)) = (level, ordered, new.frame())
            && old.frame().is_none()
            && (!record.is_adoption || defect::is(Defect::CloneLeafZeroed))
            && !defect::is(Defect::LostNodeKept)
        {
            // The zeroes of the new node may be lost although its record is not. Later records map
            // its pages again. A node that moved was durable before its record.
            let zeroes = [0; PAGE_BYTES];
            let (_, stores) = M::stream_page(&[(self.media, frame_at(node))], &zeroes);
            self.stores.push(stores);
        }
        if let (0, false, Some(frame)) = (level, record.is_adoption, new.frame()) {
            let entry = self.geometry.frame_entry_at(frame);
            self.media.store(entry, record.frame_word(change));
            self.stores.push(self.media.flush(entry, 8));
        }
        self.media.store(at, new.encode());
    }

    /// The version with this slot, if a snapshot may see it and the record replaces it. The owner decides alike.
    fn kept_version(
        &mut self,
        record: &Record,
        page: PageNo,
        slot: Slot,
        new: Slot,
    ) -> Option<Version> {
        if record.level > 0 || !self.version_log.is_present() {
            return None;
        }
        let frame = slot.frame().filter(|&frame| new.frame() != Some(frame))?;
        let newest = self.newest_snapshot(record.object);
        if newest == Epoch(0) {
            return None;
        }
        let base = self.clone_bounds.get(&record.object).map(|it| it.base);
        let word = FrameWord::from_bits(self.media.load(self.geometry.frame_entry_at(frame)));
        let version = Version {
            object: record.object,
            page,
            frame,
            birth: word.birth().unwrap_or(Epoch(0)),
            death: record.birth(),
        };
        version
            .is_kept_for(newest, base.unwrap_or(Epoch(0)))
            .then_some(version)
    }

    /// Whether the frame that a record replaces belongs to the origin of a clone, or a clone may name it. The owner decides
    /// alike.
    fn is_frame_kept(&self, record: &Record, slot: Slot) -> bool {
        let bounds = self.clone_bounds.get(&record.object);
        let (Some(bounds), Some(frame), 0) = (bounds, slot.frame(), record.level) else {
            return false;
        };
        let word = FrameWord::from_bits(self.media.load(self.geometry.frame_entry_at(frame)));
        let birth = word.birth().unwrap_or(Epoch(0));
        bounds.keeps_frame(birth, record.kept_birth.is_some())
            && !defect::is(Defect::OriginFrameFreedByReplay)
    }

    fn load_clone_bounds(&mut self, entries: &[JournalEntry]) {
        for entry in entries {
            let (object, bounds) = match entry {
                JournalEntry::Map(record) if self.clone_bounds.contains_key(&record.object) => {
                    continue;
                }
                JournalEntry::Map(record) if record.object.0 < self.geometry.object_count() => {
                    let entry = self.load_entry(record.object);
                    (
                        record.object,
                        entry.map_or(CloneBounds::default(), |it| it.clone_bounds()),
                    )
                }
                JournalEntry::Map(_) => continue,
                JournalEntry::Object(record) => {
                    let entry = Object::decode(&record.entry);
                    (
                        record.object,
                        entry.map_or(CloneBounds::default(), |it| it.clone_bounds()),
                    )
                }
            };
            let present = self.clone_bounds.entry(object).or_default();
            *present = present.or(bounds);
        }
    }

    /// The epoch of the newest snapshot of an object; 0: none.
    fn newest_snapshot(&mut self, object: ObjectId) -> Epoch {
        if let Some(&newest) = self.newest_snapshots.get(&object) {
            return newest;
        }
        let newest = match self.load_entry(object) {
            Some(entry) => entry.newest_snapshot(),
            // The crash came while the entry of the last record was stored.
            None => self.last_entries.get(&object).copied().unwrap_or(Epoch(0)),
        };
        self.newest_snapshots.insert(object, newest);
        newest
    }

    /// The entry of an object on the medium; none: a crash tore it, or it is damaged.
    fn load_entry(&self, object: ObjectId) -> Option<Object> {
        let mut entry = [0; OBJECT_BYTES as usize];
        self.media.read(self.geometry.object_at(object), &mut entry);
        Object::decode_redundant(&entry)
            .ok()
            .map(|(entry, _)| entry)
    }

    /// As [`Replay::record_frame_use`] for a frame that is free now. An unreadable frame stays in
    /// use, because it would be granted. With `looks` the frame is probed; a file is not, because
    /// that would read the disk.
    fn record_freed_frame(&mut self, slot: Slot, was: bool, looks: bool) {
        let is_unreadable = |frame| match looks {
            true => !self.media.can_read(frame_at(frame)),
            false => self.media.is_unreadable(frame_at(frame)),
        };
        let is = slot.frame().is_some_and(is_unreadable);
        self.record_frame_use(slot, was, is);
    }

    /// A frame stays in use although a record replaced its page.
    fn record_kept_frame(&mut self, FrameNo(frame): FrameNo) {
        self.in_use.entry(frame).or_insert((true, true)).1 = true;
        if let Some(changes) = &mut self.changes {
            changes.push((frame, true));
        }
    }

    /// A record names the slot's frame. `was` counts only for the first record of a frame.
    fn record_frame_use(&mut self, slot: Slot, was: bool, is: bool) {
        if let Some(frame) = slot.frame() {
            self.in_use.entry(frame.0).or_insert((was, is)).1 = is;
            if let Some(changes) = &mut self.changes {
                changes.push((frame.0, is));
            }
        }
    }
}

/// Frames that records fill with another page or node, each with the last such record. Empty if no record changes a page in
/// place. A frame that a record replaces is none of them: a snapshot may see its page.
fn frame_moves(entries: &[JournalEntry]) -> BTreeMap<u64, Seq> {
    let records = || {
        entries.iter().filter_map(|entry| match entry {
            JournalEntry::Map(record) => Some(record),
            JournalEntry::Object(_) => None,
        })
    };
    if !records().any(Record::is_patch) {
        return BTreeMap::new();
    }
    let mut moves = BTreeMap::new();
    for record in records() {
        for change in &record.changes {
            let is_filled = !record.is_adoption || record.level > 0;
            let new = change.new.frame().filter(|_| is_filled);
            let taken = new.filter(|_| change.old.frame() != new);
            moves.extend(taken.map(|frame| (frame.0, record.seq)));
        }
    }
    moves
}

/// A slot of a page. Other pages may have slots with the same bits: a clone names the frames of its origin.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct PublishedSlot {
    object: ObjectId,
    page: PageNo,
    bits: u64,
}

impl PublishedSlot {
    fn new(object: ObjectId, page: PageNo, slot: Slot) -> PublishedSlot {
        let bits = slot.encode();
        PublishedSlot { object, page, bits }
    }
}

/// The slots that records publish for pages.
fn new_slots(entries: &[JournalEntry]) -> HashSet<PublishedSlot> {
    let records = entries.iter().filter_map(|entry| match entry {
        JournalEntry::Map(record) if record.level == 0 => Some(record),
        _ => None,
    });
    let slots = records.flat_map(|record| {
        let pages = (record.page.0..).map(PageNo);
        let changes = pages.zip(&record.changes);
        changes.map(move |(page, change)| PublishedSlot::new(record.object, page, change.new))
    });
    slots.collect()
}

/// For each object with a record of its entry, the epoch of its newest snapshot by the last one.
fn last_entries(entries: &[JournalEntry]) -> HashMap<ObjectId, Epoch> {
    let records = entries.iter().filter_map(|entry| match entry {
        JournalEntry::Object(record) => Some(record),
        JournalEntry::Map(_) => None,
    });
    let epoch_of = |record: &ObjectRecord| {
        let entry = Object::decode(&record.entry);
        (
            record.object,
            entry.map_or(Epoch(0), |it| it.newest_snapshot()),
        )
    };
    records.map(epoch_of).collect()
}
