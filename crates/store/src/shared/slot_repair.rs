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
//!
//! A damaged slot of a data page is an error that names the page. A write of the whole page, as a
//! repair from another leg makes it, treats the slot as empty and swaps in a new one. The old frame
//! stays in use until `pool check --repair` finds it leaked. Until the slot is replaced, extents
//! report the page as mapped, lists of dirty pages name it, and a clear replaces it as a write does.

use crate::defect::{self, Defect};
use crate::format::bitmap;
use crate::format::node_verifier::NodeVerifier;
use crate::format::slot::{DamagedSlot, Slot};
use crate::format::table::{BadTable, SlotLocation};
use crate::shared::pool_mapping::PoolMapping;
use pagemesh_base::ids::{ObjectId, PageNo};
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;

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
        let is_used = |frame| bitmap::is_used_on(&*self.data, self.geometry(), self.pool, frame);
        // The overlay has the nodes that are not in the file yet.
        let verifier = NodeVerifier {
            nodes: &*self.meta,
            pages: &*self.data,
            geometry: self.geometry(),
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
