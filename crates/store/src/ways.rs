//! The ways down page tables, where the medium may have damaged them: a slot above
//! the leaves that lost a bit is mended by whoever meets it on the way.
//!
//! A slot is one word, so no crash leaves a part of one: check bits that do not
//! fit are damage. They tell one flipped bit from two. Three may look like one
//! in another place, so what the mended slot names must speak for it: its frame
//! is a node, and no page of data that looks like one. A slot of a page has nothing
//! that speaks for it, and is never mended.
//!
//! Nothing is taken back to an older state: the word is made what it was before
//! it was damaged. So it does not matter when, or whether, it becomes persistent,
//! and in a pool at work no lock is needed: the very bits that do not check are
//! swapped, and whoever has stored something else there meanwhile is not
//! disturbed.

use crate::bitmap::{self, Bitmap};
use crate::defect::{self, Defect};
use crate::geometry::Geometry;
use crate::object::{HEIGHT, ROOT_AT};
use crate::record::{Entry, Record};
use crate::slot::{DamagedSlot, Slot};
use crate::table::{BadTable, Location, NodeSlots, Table};
use crate::view::{View, frame_at};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{FrameNo, ObjectId, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, Unfenced};
use std::sync::atomic::Ordering;

/// A slot that was mended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MendedSlot {
    pub(crate) object: ObjectId,
    pub(crate) level: u8,
    /// A page below it.
    pub(crate) page: PageNo,
    /// The byte where it lies.
    pub(crate) at: usize,
    /// As found.
    pub(crate) bits: u64,
}

/// Mends the slots on the ways to those that the records change. What must be
/// fenced goes to `stores`.
pub(crate) fn mend<'e, M: Media>(
    media: &M,
    geometry: &Geometry,
    bitmap: &Bitmap,
    entries: impl Iterator<Item = &'e Entry>,
    stores: &mut Vec<Unfenced>,
) -> Vec<MendedSlot> {
    let mut all = Vec::new();
    for entry in entries {
        let Entry::Map(record) = entry else { continue };
        // What cannot be mended is refused when it is applied.
        while let Some(mended) = mend_one(media, geometry, bitmap, record) {
            stores.push(media.flush(mended.at, size_of::<Slot>()));
            all.push(mended);
        }
    }
    all
}

/// Mends the first slot on the way to a record's that does not check.
fn mend_one<M: Media>(
    media: &M,
    geometry: &Geometry,
    bitmap: &Bitmap,
    record: &Record,
) -> Option<MendedSlot> {
    let (object, page) = (record.object, record.page);
    if object.0 >= geometry.object_count() {
        return None;
    }
    let root_at = geometry.object_at(object) + ROOT_AT;
    let table = Table::new(media, root_at, HEIGHT, geometry.frame_numbers());
    let Err(BadTable::Damaged { level, .. }) = table.locate(record.level, page) else {
        return None;
    };
    let Ok(Location::At(at)) = table.locate(level, page) else {
        return None;
    };
    let bits = media.load(at);
    let witness = Witness {
        nodes: media,
        pages: media,
        geometry,
    };
    let is_used = |frame| bitmap.has(frame);
    let slot = Slot::mend(bits).filter(|slot| witness.speaks_for(level, *slot, &is_used))?;
    media.store(at, slot.encode());
    Some(MendedSlot {
        object,
        level,
        page,
        at,
        bits,
    })
}

/// What a mended slot names, asked whether it is a node.
struct Witness<'w, M> {
    /// Where nodes and the frame table lie.
    nodes: &'w M,
    /// Where pages lie.
    pages: &'w M,
    geometry: &'w Geometry,
}

impl<M: Media> Witness<'_, M> {
    /// Whether what a mended slot of `level` names speaks for it: a node with a slot in
    /// use that checks, or with one that lost a bit and is spoken for itself. An empty
    /// node is not told from a free frame, nor one of which every slot is damaged,
    /// unless the frame `is_used`.
    fn speaks_for(&self, level: u8, slot: Slot, is_used: &impl Fn(FrameNo) -> bool) -> bool {
        let Some(frame) = slot.frame() else {
            return true;
        };
        let found = NodeSlots::of(self.nodes, frame, &self.geometry.frame_numbers());
        let Some(found) = found.filter(|_| !self.is_page(frame)) else {
            return false;
        };
        if found.in_use > 0 || is_used(frame) {
            return true;
        }
        let below = found.mended.filter(|slot| slot.frame().is_some());
        below.is_some_and(|below| level > 1 && self.speaks_for(level - 1, below, is_used))
    }

    /// Whether the frame's checksum is that of its bytes. That of a node is of what its
    /// frame held before.
    fn is_page(&self, frame: FrameNo) -> bool {
        let mut page = [0; PAGE_BYTES];
        self.pages.read(frame_at(frame), &mut page);
        let sum = self.nodes.load(self.geometry.frame_entry_at(frame)) as u32;
        crc32c(&page) == sum
    }
}

impl<M: Media> View<M> {
    /// Where the slot of `level` above `page` lies on one of the view's media.
    pub(crate) fn locate_on(
        &self,
        media: &M,
        object: ObjectId,
        level: u8,
        page: PageNo,
    ) -> Result<Location, BadTable> {
        match self.table(media, object).locate(level, page) {
            Err(bad) => self.locate_again(media, object, level, page, bad),
            found => found,
        }
    }

    /// Mends what does not check on the way, slot by slot.
    #[cold]
    fn locate_again(
        &self,
        media: &M,
        object: ObjectId,
        level: u8,
        page: PageNo,
        mut bad: BadTable,
    ) -> Result<Location, BadTable> {
        while let BadTable::Damaged { level: above, .. } = bad
            && self.mend_slot(media, object, above, page)
        {
            match self.table(media, object).locate(level, page) {
                Err(next) => bad = next,
                found => return found,
            }
        }
        Err(bad)
    }

    /// The slot of `level` above `page`, which lies at this byte and names a node.
    pub(crate) fn node_slot(
        &self,
        object: ObjectId,
        level: u8,
        page: PageNo,
        at: usize,
    ) -> Result<Slot, DamagedSlot> {
        let load = || Slot::decode(self.meta.load(at));
        load().or_else(
            |damaged| match self.mend_slot(&self.meta, object, level, page) {
                true => load(),
                false => Err(damaged),
            },
        )
    }

    /// Mends the slot of `level` above `page`, and makes that persistent; false if
    /// it cannot be. Inside a window, or by the owner: what is on the way stays.
    #[cold]
    pub(crate) fn mend_slot(&self, media: &M, object: ObjectId, level: u8, page: PageNo) -> bool {
        assert!(level > 0, "slots of pages are not mended");
        let Ok(Location::At(at)) = self.table(media, object).locate(level, page) else {
            return false;
        };
        let bits = media.load(at);
        if Slot::decode(bits).is_ok() {
            return true;
        }
        let is_used = |frame| bitmap::is_used_on(&*self.data, &self.geometry, self.pool, frame);
        // The overlay has what is not in the file yet.
        let witness = Witness {
            nodes: &*self.meta,
            pages: &*self.data,
            geometry: &self.geometry,
        };
        let slot = Slot::mend(bits).filter(|slot| {
            self.may_be_there(object, *slot) && witness.speaks_for(level, *slot, &is_used)
        });
        let Some(slot) = slot.filter(|_| !defect::is(Defect::NodesNotMended)) else {
            return false;
        };
        // On `file-sync` pools the overlay may show what the file has.
        let mut is_first = swap_durably(&*self.meta, at, bits, slot);
        if self.has_overlay() {
            is_first |= swap_durably(&*self.data, at, bits, slot);
        }
        let mended = self.control.mended_slots();
        mended.fetch_add(u64::from(is_first), Ordering::Relaxed);
        true
    }

    /// In the table of a live object no slot above the leaves is a hole.
    fn may_be_there(&self, object: ObjectId, slot: Slot) -> bool {
        slot.frame().is_some() || slot == Slot::EMPTY || !self.is_live(object)
    }
}

/// False if another one came first.
fn swap_durably<M: Media>(media: &M, at: usize, bits: u64, slot: Slot) -> bool {
    if defect::is(Defect::MendedBlindly) {
        media.store(at, slot.encode());
    } else if media.swap(at, bits, slot.encode()).is_err() {
        return false;
    }
    let _fenced = media.fence(media.flush(at, size_of::<Slot>()));
    true
}
