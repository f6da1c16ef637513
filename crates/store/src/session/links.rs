//! Links the nodes of a page table down to a leaf, one record for each node.
//!
//! Invariant: a node is zeroed durably before the record that links it.

use super::Session;
use crate::defect::{self, Defect};
use crate::format::geometry::frame_at;
use crate::format::record::{Change, NO_SUMS};
use crate::format::slot::Slot;
use crate::format::table::{NODE_SLOTS, SlotLocation};
use crate::shared::control::LockWords;
use crate::shared::error::{StoreError, damaged_page_error};
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

impl<M: Media> Session<M> {
    /// Links the nodes down to the page's leaf. No operation may be in progress.
    #[cold]
    pub(crate) fn link_leaf(
        &mut self,
        handle: &Handle,
        page: PageNo,
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        self.link_nodes(handle, 0, page, epoch)
    }

    /// Links the nodes down to that with the page's slot of a level.
    pub(crate) fn link_nodes(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        loop {
            self.ensure_resources(1, 1)?;
            match self.begin_op(handle, epoch) {
                // The owner recalled the grants in between: begin again.
                Err(StoreError::TimedOut) => continue,
                entered => entered?,
            };
            let linked = self.link_next_node(handle, level, page, epoch);
            self.end_op();
            if linked? {
                return Ok(());
            }
        }
    }

    /// Links the highest missing node; true when none is missing.
    fn link_next_node(
        &mut self,
        handle: &Handle,
        above: u8,
        page: PageNo,
        epoch: Epoch,
    ) -> Result<bool, StoreError> {
        let SlotLocation::Unlinked(level) = self.mapping.locate(handle.object, above, page)? else {
            return Ok(true);
        };
        let range = LockWords::of_node(handle.object, level, page);
        self.mapping
            .control
            .lock(&range, self.number)
            .map_err(|_| StoreError::TimedOut)?;
        let linked = self.link_locked(handle, level, page, epoch);
        self.mapping.control.unlock(&range);
        linked.map(|()| false)
    }

    fn link_locked(
        &mut self,
        handle: &Handle,
        level: u8,
        page: PageNo,
        epoch: Epoch,
    ) -> Result<(), StoreError> {
        let SlotLocation::At(at) = self.mapping.locate(handle.object, level, page)? else {
            return Err(damaged_page_error(page));
        };
        let old = Slot::decode(self.mapping.meta.load(at)).map_err(|_| damaged_page_error(page))?;
        if old.frame().is_some() {
            return Ok(());
        }
        self.take_frames(1);
        let node = self.frames[0];
        self.zero_node(node);
        self.record.changes.clear();
        self.record.changes.push(Change {
            old,
            new: old.map(node),
            sums: NO_SUMS,
        });
        let first = page.0 & !((1 << (9 * u32::from(level))) - 1);
        let linked = self.commit_record(handle, level, PageNo(first), at, epoch);
        linked.map_err(|_| damaged_page_error(page))
    }

    /// Zeroes a frame persistently, before it becomes a node.
    fn zero_node(&self, node: FrameNo) {
        let mapping = &self.mapping;
        if defect::is(Defect::NodeNotZeroed) {
            return;
        }
        let (_, stores) = M::stream_page(&[(&*mapping.data, frame_at(node))], &[0; PAGE_BYTES]);
        let _fenced = mapping.data.fence(stores);
        if mapping.has_overlay() {
            for at in (frame_at(node)..).step_by(8).take(NODE_SLOTS as usize) {
                if mapping.meta.load(at) != 0 {
                    mapping.meta.store(at, 0);
                }
            }
        }
    }
}
