//! The check of a corrected slot above the leaves by its target.

use crate::format::geometry::{Geometry, frame_at};
use crate::format::slot::Slot;
use crate::format::table::NodeSlots;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::FrameNo;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

/// Checks whether the target of a corrected slot is a node.
pub(crate) struct NodeVerifier<'w, M> {
    /// Where nodes and the frame table lie.
    pub(crate) nodes: &'w M,
    /// Where pages lie.
    pub(crate) pages: &'w M,
    pub(crate) geometry: &'w Geometry,
}

impl<M: Media> NodeVerifier<'_, M> {
    /// Whether the target of a corrected slot of `level` confirms it: a node with a sound slot in
    /// use, or with a slot that lost a bit and is confirmed in turn. An empty node and a node with
    /// damaged slots only look like a free frame; they count only if `is_used` says that the frame
    /// is in use.
    pub(crate) fn confirms(
        &self,
        level: u8,
        slot: Slot,
        is_used: &impl Fn(FrameNo) -> bool,
    ) -> bool {
        let Some(frame) = slot.frame() else {
            return true;
        };
        let found = NodeSlots::of(self.nodes, frame, self.geometry.frame_numbers());
        let Some(found) = found.filter(|_| !self.is_data_page(frame)) else {
            return false;
        };
        if found.in_use > 0 || is_used(frame) {
            return true;
        }
        let below = found.corrected.filter(|slot| slot.frame().is_some());
        below.is_some_and(|below| level > 1 && self.confirms(level - 1, below, is_used))
    }

    /// Whether the frame's checksum matches its bytes. The checksum of a node's frame matches the
    /// frame's former data.
    fn is_data_page(&self, frame: FrameNo) -> bool {
        let mut page = [0; PAGE_BYTES];
        self.pages.read(frame_at(frame), &mut page);
        let sum = self.nodes.load(self.geometry.frame_entry_at(frame)) as u32;
        crc32c(&page) == sum
    }
}
