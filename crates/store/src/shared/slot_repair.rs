//! Slot repair: the nodes on the way down a page table, where the medium may have damaged them.
//! Each walk corrects a slot above the leaves that lost a bit.
//!
//! A slot is one word, so no crash leaves a part of one: check bits that do not match are damage.
//! They tell one flipped bit from two. Three flipped bits may look like one in another position. So
//! the target of a corrected slot must confirm it: its frame is a node, and not a data page that
//! looks like one. Nothing confirms the slot of a data page, so such a slot is never corrected.
//!
//! A correction never restores an older state: it makes the word equal to its value before the
//! damage. So it does not matter when, or whether, the correction becomes persistent. A pool in use
//! needs no lock for it either: a compare-and-swap replaces the very bits that do not check, so it
//! does not disturb a concurrent store of another value.

use crate::defect::{self, Defect};
use crate::format::bitmap::{self, Bitmap};
use crate::format::geometry::Geometry;
use crate::format::object::{HEIGHT, ROOT_AT};
use crate::format::record::{JournalEntry, Record};
use crate::format::slot::{DamagedSlot, Slot};
use crate::format::table::{BadTable, NodeSlots, PageTable, SlotLocation};
use crate::shared::pool_mapping::{PoolMapping, frame_at};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{FrameNo, ObjectId, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};
use std::sync::atomic::Ordering;

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

/// Checks whether the target of a corrected slot is a node.
struct NodeVerifier<'w, M> {
    /// Where nodes and the frame table lie.
    nodes: &'w M,
    /// Where pages lie.
    pages: &'w M,
    geometry: &'w Geometry,
}

impl<M: Media> NodeVerifier<'_, M> {
    /// Whether the target of a corrected slot of `level` confirms it: a node with a sound slot in
    /// use, or with a slot that lost a bit and is confirmed in turn. An empty node and a node with
    /// damaged slots only look like a free frame; they count only if `is_used` says that the frame
    /// is in use.
    fn confirms(&self, level: u8, slot: Slot, is_used: &impl Fn(FrameNo) -> bool) -> bool {
        let Some(frame) = slot.frame() else {
            return true;
        };
        let found = NodeSlots::of(self.nodes, frame, &self.geometry.frame_numbers());
        let Some(found) = found.filter(|_| !self.is_data_page(frame)) else {
            return false;
        };
        if found.in_use > 0 || is_used(frame) {
            return true;
        }
        let below = found.corrected.filter(|slot| slot.frame().is_some());
        below.is_some_and(|below| level > 1 && self.confirms(level - 1, below, is_used))
    }

    /// Whether the frame's checksum is that of its bytes. The checksum of a node's frame is that of
    /// the frame's former data.
    fn is_data_page(&self, frame: FrameNo) -> bool {
        let mut page = [0; PAGE_BYTES];
        self.pages.read(frame_at(frame), &mut page);
        let sum = self.nodes.load(self.geometry.frame_entry_at(frame)) as u32;
        crc32c(&page) == sum
    }
}

impl<M: Media> PoolMapping<M> {
    /// The location of the slot of `level` above `page` on one of the mapping's media.
    pub(crate) fn locate_on(
        &self,
        media: &M,
        object: ObjectId,
        level: u8,
        page: PageNo,
    ) -> Result<SlotLocation, BadTable> {
        match self.table(media, object).locate(level, page) {
            Err(bad) => self.locate_with_correction(media, object, level, page, bad),
            found => found,
        }
    }

    /// Corrects damaged slots on the way, one by one.
    #[cold]
    fn locate_with_correction(
        &self,
        media: &M,
        object: ObjectId,
        level: u8,
        page: PageNo,
        mut bad: BadTable,
    ) -> Result<SlotLocation, BadTable> {
        while let BadTable::Damaged { level: above, .. } = bad
            && self.correct_slot(media, object, above, page)
        {
            match self.table(media, object).locate(level, page) {
                Err(next) => bad = next,
                found => return found,
            }
        }
        Err(bad)
    }

    /// The slot of `level` above `page`, which lies at byte `at` and names a node.
    pub(crate) fn node_slot(
        &self,
        object: ObjectId,
        level: u8,
        page: PageNo,
        at: usize,
    ) -> Result<Slot, DamagedSlot> {
        let load = || Slot::decode(self.meta.load(at));
        load().or_else(
            |damaged| match self.correct_slot(&self.meta, object, level, page) {
                true => load(),
                false => Err(damaged),
            },
        )
    }

    /// Corrects the slot of `level` above `page` and makes that persistent; false if that is
    /// impossible. The caller is in an operation or is the owner, so the nodes on the way stay in
    /// place.
    #[cold]
    pub(crate) fn correct_slot(
        &self,
        media: &M,
        object: ObjectId,
        level: u8,
        page: PageNo,
    ) -> bool {
        assert!(level > 0, "slots of pages are not corrected");
        let Ok(SlotLocation::At(at)) = self.table(media, object).locate(level, page) else {
            return false;
        };
        let bits = media.load(at);
        if Slot::decode(bits).is_ok() {
            return true;
        }
        let is_used = |frame| bitmap::is_used_on(&*self.data, &self.geometry, self.pool, frame);
        // The overlay has the nodes that are not in the file yet.
        let verifier = NodeVerifier {
            nodes: &*self.meta,
            pages: &*self.data,
            geometry: &self.geometry,
        };
        let slot = Slot::correct(bits).filter(|slot| {
            self.is_plausible(object, *slot) && verifier.confirms(level, *slot, &is_used)
        });
        let Some(slot) = slot.filter(|_| !defect::is(Defect::NodesNotCorrected)) else {
            return false;
        };
        // On `file-sync` pools the overlay may map the bytes of the file.
        let mut is_first = swap_durably(&*self.meta, at, bits, slot);
        if self.has_overlay() {
            is_first |= swap_durably(&*self.data, at, bits, slot);
        }
        let corrected = self.control.corrected_slots();
        corrected.fetch_add(u64::from(is_first), Ordering::Relaxed);
        true
    }

    /// In the table of a live object no slot above the leaves is a hole.
    fn is_plausible(&self, object: ObjectId, slot: Slot) -> bool {
        slot.frame().is_some() || slot == Slot::EMPTY || !self.is_live(object)
    }
}

/// False if another correction came first.
fn swap_durably<M: Media>(media: &M, at: usize, bits: u64, slot: Slot) -> bool {
    if defect::is(Defect::CorrectedBlindly) {
        media.store(at, slot.encode());
    } else if media.compare_exchange(at, bits, slot.encode()).is_err() {
        return false;
    }
    let _fenced = media.fence(media.flush(at, size_of::<Slot>()));
    true
}
