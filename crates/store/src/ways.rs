//! The ways down page tables that a replay goes: slots above the leaves that
//! lost a bit are mended before any record is applied, as without them it is
//! not known where a record belongs.
//!
//! A slot is one word, so no crash leaves a part of one: check bits that do not
//! fit are damage. They tell one flipped bit from two. Three may look like one
//! in another place, so what the mended slot names must speak for it: its frame
//! is a node, and one with a slot in use, or the bitmap has the frame in use. An
//! empty node cannot be told from a free frame of zeroes otherwise.
//!
//! Nothing is taken back to an older state: the word is made what it was before
//! it was damaged. So it does not matter when, or whether, it becomes persistent.

use crate::bitmap::Bitmap;
use crate::geometry::Geometry;
use crate::object::{HEIGHT, ROOT_AT};
use crate::record::{Entry, Record};
use crate::slot::Slot;
use crate::table::{BadTable, Location, Table, slots_in_use};
use pagemesh_base::ids::{ObjectId, PageNo};
use pagemesh_pmem::{Media, Unfenced};

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
    let slot = Slot::mend(bits).filter(|slot| is_proven(media, geometry, bitmap, *slot))?;
    media.store(at, slot.encode());
    Some(MendedSlot {
        object,
        level,
        page,
        at,
        bits,
    })
}

/// Whether what a mended slot names speaks for it.
fn is_proven<M: Media>(media: &M, geometry: &Geometry, bitmap: &Bitmap, slot: Slot) -> bool {
    let Some(frame) = slot.frame() else {
        return true;
    };
    geometry.frame_numbers().contains(&frame.0)
        && slots_in_use(media, frame).is_some_and(|slots| slots > 0 || bitmap.has(frame))
}
