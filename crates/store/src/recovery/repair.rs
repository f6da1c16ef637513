//! The repairs of a recovery: slots above the leaves, pages with a flipped bit, entries of the object
//! table, and lines of the bitmap.

use super::replay::Replay;
use super::scan::DataState;
use super::{Recovery, RecoverySummary};
use crate::format::bitmap::{Bitmap, DamagedLine};
use crate::format::frame_set::FrameSet;
use crate::format::geometry::{Geometry, OBJECT_BYTES, frame_at};
use crate::format::node_verifier::NodeVerifier;
use crate::format::object::{HEIGHT, Object, ROOT_AT, store_entry};
use crate::format::record::{JournalEntry, Record};
use crate::format::slot::Slot;
use crate::format::table::{BadTable, PageTable, SlotLocation};
use pagemesh_base::ids::{FrameNo, ObjectId, PageNo, Seq};
use pagemesh_pmem::{Media, UnfencedStores};
use std::collections::BTreeSet;

/// A slot that was corrected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CorrectedSlot {
    pub(crate) object: ObjectId,
    pub(crate) level: u8,
    /// A page below it.
    pub(crate) page: PageNo,
    /// The byte where it lies.
    pub(crate) at: usize,
    /// The bits before the correction.
    pub(crate) bits: u64,
}

/// A page with one wrong bit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlippedPage {
    /// The seq of the record with the right checksum.
    pub(super) seq: Seq,
    pub(crate) object: ObjectId,
    pub(crate) page: PageNo,
    pub(crate) frame: FrameNo,
    /// The bit's number in the frame.
    pub(super) bit: usize,
}

/// The outcome of the repair of the bitmap.
pub(super) struct BitmapRepair {
    /// Lines that the medium damaged.
    pub(super) damaged_lines: Vec<DamagedLine>,
    /// Frames in use by the bitmap and by the superblock, if the two differ.
    pub(super) count_mismatch: Option<(u64, u64)>,
}

impl<M: Media> Recovery<'_, M> {
    /// Corrects pages in which one bit is wrong.
    pub(super) fn correct_pages(&mut self, records: &[JournalEntry]) {
        self.replay.correct_pages(&mut self.flipped, records);
        self.summary.corrected_pages = self.flipped.len() as u64;
    }

    /// Writes the bits of the frames that the replayed records name, and rebuilds the lines that the
    /// medium damaged. The records were replayed on the medium, or by `trial`.
    pub(super) fn repair_bitmap(&mut self, trial: Option<&Replay<'_, M>>) -> BitmapRepair {
        let applied = trial.unwrap_or(&self.replay);
        let counts = (self.ordered, self.block.used_frames);
        let (bitmap, torn) = (&mut self.bitmap, &mut self.torn_lines);
        rebuild_damaged(applied, bitmap, torn, &mut self.summary, counts)
    }

    /// Rewrites damaged entries of the object table, and marks objects with unknown in-flight
    /// operations.
    pub(super) fn repair_objects(&mut self) -> Vec<(ObjectId, Object)> {
        let corrected = self.replay.repair_objects(&mut self.summary);
        self.replay
            .mark_compare_all(&self.overflowed, self.must_compare);
        corrected
    }
}

/// Writes the bits of the frames that the applied records name. Rebuilds lines that no crash
/// explains, or all of them if the count of frames in use is wrong.
fn rebuild_damaged<M: Media>(
    applied: &Replay<'_, M>,
    bitmap: &mut Bitmap,
    torn_lines: &mut Vec<DamagedLine>,
    summary: &mut RecoverySummary,
    (ordered, used_frames): (bool, u64),
) -> BitmapRepair {
    let torn = std::mem::take(torn_lines).into_iter();
    let damaged = torn.filter(|line| !applied.is_explained_by_crash(bitmap, line));
    let damaged_lines: Vec<DamagedLine> = damaged.collect();
    let expected = applied.write_frame_bits(bitmap, used_frames);
    // On a file a lost record can make the count wrong by one.
    let is_miscounted = ordered && damaged_lines.is_empty() && bitmap.used() != expected;
    let count_mismatch = is_miscounted.then_some((bitmap.used(), expected));
    summary.bitmap_lines = damaged_lines.len() as u64;
    if is_miscounted || !damaged_lines.is_empty() {
        summary.withheld = applied.rebuild_bitmap(bitmap, &damaged_lines);
    }
    BitmapRepair {
        damaged_lines,
        count_mismatch,
    }
}

/// Corrects the slots above those that the records change. The unfenced stores go to `stores`.
pub(crate) fn correct_slots<'e, M: Media>(
    media: &M,
    geometry: &Geometry,
    bitmap: &Bitmap,
    entries: impl Iterator<Item = &'e JournalEntry>,
    stores: &mut Vec<UnfencedStores>,
) -> Vec<CorrectedSlot> {
    let mut all = Vec::new();
    for entry in entries {
        let JournalEntry::Map(record) = entry else {
            continue;
        };
        // Applying the record reports a slot that cannot be corrected.
        while let Some(mended) = correct_first_slot(media, geometry, bitmap, record) {
            stores.push(media.flush(mended.at, size_of::<Slot>()));
            all.push(mended);
        }
    }
    all
}

/// Corrects the first damaged slot above the record's slots.
fn correct_first_slot<M: Media>(
    media: &M,
    geometry: &Geometry,
    bitmap: &Bitmap,
    record: &Record,
) -> Option<CorrectedSlot> {
    let (object, page) = (record.object, record.page);
    if object.0 >= geometry.object_count() {
        return None;
    }
    let root_at = geometry.object_at(object) + ROOT_AT;
    let table = PageTable::new(media, root_at, HEIGHT, geometry.frame_numbers());
    let Err(BadTable::Damaged { level, .. }) = table.locate(record.level, page) else {
        return None;
    };
    let Ok(SlotLocation::At(at)) = table.locate(level, page) else {
        return None;
    };
    if media.is_unreadable(at) {
        return None;
    }
    let bits = media.load(at);
    let verifier = NodeVerifier {
        nodes: media,
        pages: media,
        geometry,
    };
    let is_used = |frame| bitmap.has(frame);
    let slot = Slot::correct(bits).filter(|slot| verifier.confirms(level, *slot, &is_used))?;
    media.store(at, slot.encode());
    Some(CorrectedSlot {
        object,
        level,
        page,
        at,
        bits,
    })
}

impl<'m, M: Media> Replay<'m, M> {
    /// The pages of a record in which one known bit is wrong. None if another page is damaged in
    /// another way.
    pub(super) fn correctable_pages(&self, entry: &JournalEntry) -> Option<Vec<FlippedPage>> {
        let JournalEntry::Map(record) = entry else {
            return Some(Vec::new());
        };
        let mut flipped = Vec::new();
        for (page, change) in (record.page.0..).map(PageNo).zip(&record.changes) {
            match (self.change_data_state(record, change), change.new.frame()) {
                (DataState::Correctable(bit), Some(frame)) => flipped.push(FlippedPage {
                    seq: record.seq,
                    object: record.object,
                    page,
                    frame,
                    bit,
                }),
                (DataState::Intact, _) => {}
                _ => return None,
            }
        }
        Some(flipped)
    }

    /// Corrects these pages, except those in frames with newer users. The applied records, in
    /// order, name the users.
    pub(super) fn correct_pages(
        &mut self,
        flipped: &mut Vec<FlippedPage>,
        records: &[JournalEntry],
    ) {
        let names = |entry: &JournalEntry, frame| match entry {
            JournalEntry::Map(record) => {
                let mut named = record.changes.iter().map(|change| change.new.frame());
                record.level == 0 && named.any(|named| named == Some(frame))
            }
            JournalEntry::Object(_) => false,
        };
        flipped.retain(|flipped| {
            let newest = records.iter().rfind(|entry| names(entry, flipped.frame));
            newest.is_some_and(|entry| entry.seq() == flipped.seq)
        });
        for FlippedPage { frame, bit, .. } in flipped {
            let at = frame_at(*frame) + *bit / 64 * 8;
            self.media.store(at, self.media.load(at) ^ 1 << (*bit % 64));
            self.stores.push(self.media.flush(at, 8));
        }
    }

    /// Rewrites damaged entries of the object table that can still be decoded. Records above the
    /// checkpoint have been applied, so an entry that a crash left is whole by now.
    pub(super) fn repair_objects(
        &mut self,
        summary: &mut RecoverySummary,
    ) -> Vec<(ObjectId, Object)> {
        let mut corrected = Vec::new();
        for object in (0..self.objects_end).map(ObjectId) {
            let at = self.geometry.object_at(object);
            let mut entry = [0; OBJECT_BYTES as usize];
            self.media.read(at, &mut entry);
            match Object::decode_redundant(&entry) {
                Ok((_, true)) => {}
                Ok((found, false)) => {
                    self.stores
                        .push(store_entry(self.media, at, &found.encode()));
                    corrected.push((object, found));
                }
                Err(_) => summary.objects_lost += 1,
            }
        }
        summary.corrected += corrected.len() as u64;
        corrected
    }

    /// Marks objects with unknown in-flight operations.
    pub(super) fn mark_compare_all(&mut self, objects: &[ObjectId], is_all: bool) {
        let all = 0..if is_all { self.objects_end } else { 0 };
        let listed = objects.iter().map(|object| object.0);
        for object in listed.chain(all).collect::<BTreeSet<_>>() {
            self.mark_compare(ObjectId(object));
        }
    }

    fn mark_compare(&mut self, object: ObjectId) {
        let at = self.geometry.object_at(object);
        let mut entry = [0; OBJECT_BYTES as usize];
        self.media.read(at, &mut entry);
        if let Ok((mut found, _)) = Object::decode_redundant(&entry) {
            found.needs_compare = true;
            self.stores
                .push(store_entry(self.media, at, &found.encode()));
        }
    }

    /// Whether a crash explains a damaged line of the bitmap.
    fn is_explained_by_crash(&self, bitmap: &Bitmap, bad: &DamagedLine) -> bool {
        let frames = bad.frames();
        let named = self.in_use.range(frames.clone());
        let before = named.map(|(&frame, &(was, _))| (frame, was));
        let changes = self.changes.iter().flatten().copied();
        let changes: Vec<_> = changes
            .filter(|(frame, _)| frames.contains(frame))
            .collect();
        bitmap.is_torn(bad, before, &changes)
    }

    /// Writes the bits of the frames that records name. Returns the number of frames in use, if
    /// `used` were in use at the checkpoint.
    fn write_frame_bits(&self, bitmap: &mut Bitmap, used: u64) -> u64 {
        let mut used = used;
        for (&frame, &(was, is)) in &self.in_use {
            if bitmap.is_failed(frame) {
                continue;
            }
            bitmap.write(frame, is);
            used = match (was, is) {
                (false, true) => used.saturating_add(1),
                (true, false) => used.saturating_sub(1),
                _ => used,
            };
        }
        used
    }

    /// Rebuilds lines of the bitmap from the page tables: the damaged ones, or all if none is known
    /// to be damaged. Returns the number of frames that may be free and are withheld, because a
    /// page table cannot be read.
    fn rebuild_bitmap(&self, bitmap: &mut Bitmap, bad: &[DamagedLine]) -> u64 {
        let (mut frame_set, is_whole) = FrameSet::from_tables(
            self.media,
            &self.geometry,
            self.objects_end,
            (&self.version_log, self.pool),
        );
        for version in &self.kept {
            frame_set.add(version.frame);
        }
        if bad.is_empty() {
            let all = bitmap.lines();
            bitmap.rebuild_lines(all, |word, found| match is_whole {
                true => frame_set.words()[word],
                false => frame_set.words()[word] | found,
            });
            return 0;
        }
        let bad = || bad.iter().map(|bad| bad.number);
        bitmap.rebuild_lines(bad(), |word, _| frame_set.words()[word]);
        if is_whole {
            return 0;
        }
        let known = bitmap.used();
        bitmap.rebuild_lines(bad(), |_, _| u64::MAX);
        bitmap.used() - known
    }
}
