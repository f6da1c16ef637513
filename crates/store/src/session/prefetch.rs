//! Hints to the processor before an operation: loads of the lines that it will need, early.
//!
//! Invariant: a hint changes nothing and takes no lock. It uses a slot only if its leaf was used
//! before, and the slot may be changing.

use super::Session;
use crate::format::geometry::frame_at;
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{FrameNo, PageNo};
use pagemesh_base::units::LINE_BYTES;
use pagemesh_pmem::Media;

/// Lines of a page that are prefetched before a read: as many as a core can have in progress at
/// once. The hardware prefetches the others.
const PREFETCHED_LINES: usize = 12;

impl<M: Media> Session<M> {
    /// Prepares a write of this page: prefetches the lines that other cores had last. Slots are
    /// prefetched only if their leaf was used before.
    #[inline]
    pub fn prefetch_write(&self, handle: &Handle, page: PageNo) {
        self.mapping.control.prefetch(handle.object, page);
        if let Some(at) = self.cached_slot(handle, page) {
            self.mapping.meta.prefetch(at);
        }
    }

    /// Prepares a read of this page: prefetches its slot.
    #[inline]
    pub fn prefetch_read(&self, handle: &Handle, page: PageNo) {
        if let Some(at) = self.cached_slot(handle, page) {
            self.mapping.meta.prefetch_load(at);
        }
    }

    /// Prepares a read of this page that comes next: prefetches the first lines of the page, if its
    /// frame is known.
    #[inline]
    pub fn prefetch_page(&self, handle: &Handle, page: PageNo) {
        if let Some(frame) = self.cached_frame(handle, page) {
            let mapping = &*self.mapping;
            mapping
                .meta
                .prefetch_load(mapping.geometry().frame_entry_at(frame));
            let lines = (frame_at(frame)..).step_by(LINE_BYTES);
            lines
                .take(PREFETCHED_LINES)
                .for_each(|at| mapping.data.prefetch_load(at));
        }
    }

    /// Prefetches the lines that a patch of this part of a page will load and store to.
    pub(super) fn prefetch_patch(
        &self,
        handle: &Handle,
        page: PageNo,
        (within, len): (usize, usize),
    ) {
        let Some(frame) = self.cached_frame(handle, page) else {
            return;
        };
        self.mapping
            .data
            .prefetch_all(frame_at(frame) + within, len);
        let entry_at = self.mapping.geometry().frame_entry_at(frame);
        self.mapping.meta.prefetch(entry_at);
    }

    /// The byte of the page's slot, if its leaf was used before: a hint.
    #[inline]
    fn cached_slot(&self, handle: &Handle, page: PageNo) -> Option<usize> {
        self.leaf_cache.cached_slot_at(handle.object, page)
    }

    /// The page's frame, if its leaf was used before: a hint. The caller does not hold the lock
    /// words, so another session may be changing the slot.
    #[inline]
    pub(crate) fn cached_frame(&self, handle: &Handle, page: PageNo) -> Option<FrameNo> {
        let slot = self.mapping.slot(self.cached_slot(handle, page)?, page);
        let frame = slot.ok()?.frame();
        frame.filter(|&frame| self.mapping.reaches(frame))
    }
}
