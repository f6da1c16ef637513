//! Changes of slots that name kept versions, and links of filled leaves. The frames hold their pages already, so nothing is copied.
//!
//! Invariant: a frame that is linked is in use and durable, and no other slot names it. The owner alone calls this.

use super::Session;
use crate::format::record::{Change, NO_SUMS, lines};
use crate::format::slot::Slot;
use crate::format::table::SlotLocation;
use crate::shared::error::{StoreError, damaged_page_error};
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::slice::Stamp;
use pagemesh_pmem::Media;

/// The change of one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VersionSlot {
    /// None.
    Keep,
    /// From now on it names this frame.
    Link(FrameNo),
    /// Its frame is freed.
    Free,
}

/// No client fences these changes.
const EPOCH: Epoch = Epoch(u32::MAX);

impl<M: Media> Session<M> {
    /// Changes the slots of consecutive pages of one leaf, in one record.
    pub(crate) fn change_version_slots(
        &mut self,
        handle: &Handle,
        first: PageNo,
        slots: &[VersionSlot],
    ) -> Result<(), StoreError> {
        let at = loop {
            self.ensure_resources(0, lines(slots.len()))?;
            self.begin_op(handle, EPOCH)?;
            match self.slot_at(handle, first) {
                Ok(Some(at)) => break at,
                Ok(None) => {
                    self.end_op();
                    self.link_leaf(handle, first, EPOCH)?;
                }
                Err(cause) => {
                    self.end_op();
                    return Err(cause);
                }
            }
        };
        self.lock_words
            .set(handle.object, first, slots.len() as u64);
        let locked = self.mapping.control.lock(&self.lock_words, self.number);
        let changed = match locked {
            Ok(()) => {
                let changed = self.change_locked_slots(handle, first, at, slots);
                self.mapping.control.unlock(&self.lock_words);
                changed
            }
            Err(_) => Err(StoreError::TimedOut),
        };
        self.end_op();
        changed
    }

    fn change_locked_slots(
        &mut self,
        handle: &Handle,
        first: PageNo,
        at: usize,
        slots: &[VersionSlot],
    ) -> Result<(), StoreError> {
        self.record.changes.clear();
        for (index, slot) in slots.iter().enumerate() {
            let page = PageNo(first.0 + index as u64);
            let old = self.mapping.slot(at + index * 8, page)?;
            let new = match *slot {
                VersionSlot::Keep => old,
                VersionSlot::Link(frame) => old.map(frame),
                VersionSlot::Free => old.unmap(Epoch(0)),
            };
            self.record.changes.push(Change {
                old,
                new,
                sums: NO_SUMS,
            });
        }
        self.commit_adoption(handle, 0, first, at)
    }

    /// Links a leaf with durable slots. The nodes above it are linked, and nothing else changes the object.
    pub(crate) fn link_filled_leaf(
        &mut self,
        handle: &Handle,
        page: PageNo,
        node: FrameNo,
    ) -> Result<(), StoreError> {
        self.ensure_resources(0, 1)?;
        let SlotLocation::At(at) = self.mapping.locate(handle.object, 1, page)? else {
            return Err(damaged_page_error(page));
        };
        let old = Slot::decode(self.mapping.meta.load(at)).map_err(|_| damaged_page_error(page))?;
        self.record.changes.clear();
        self.record.changes.push(Change {
            old,
            new: old.map(node),
            sums: NO_SUMS,
        });
        self.commit_adoption(handle, 1, page, at)
    }

    /// Commits `self.record.changes` as a record that adopts durable pages, or a durable leaf.
    fn commit_adoption(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        at: usize,
    ) -> Result<(), StoreError> {
        let stamp = Stamp {
            epoch: Epoch(0),
            op: 0,
            open_ops: 0,
        };
        self.begin_record(handle, level, page, stamp, false);
        self.record.is_adoption = true;
        self.record.encode(&mut self.encoded);
        self.flush_pending_slots(at);
        let stores = self.stream_record();
        let _committed = self.mapping.data.fence(stores);
        let swapped = self.swap_slots(at, page);
        self.publish_record(None);
        swapped
    }
}
