//! The freeing of deleted objects, some steps at a time.
//!
//! Invariant: each step is a record of the owner, so that a crash between two steps loses no frame.

use super::error::ObjectError;
use super::pool::Pool;
use crate::format::geometry::frame_at;
use crate::format::object::{HEIGHT, ObjectRole, ObjectState, ROOT_AT};
use crate::format::record::{Change, NO_SUMS, PAGES_MAX};
use crate::format::slot::Slot;
use crate::format::table::NODE_SLOTS;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{Epoch, FrameNo, ObjectId, PageNo, Seq};
use pagemesh_pmem::Media;

/// Steps of freeing a deleted object in one call, so that waiting sessions are served in between.
const RECLAIM_STEPS: u32 = 64;

impl<M: Media> Pool<M> {
    /// Frees frames of deleted objects, some at a time. True when there is more to do.
    pub(super) fn reclaim(&mut self) -> Result<bool, ObjectError> {
        let Some(&(seq, object)) = self.deleting.first() else {
            return Ok(false);
        };
        // The object's earlier records must be applied first.
        if seq >= self.superblock.checkpoint && seq != Seq(0) {
            return Ok(false);
        }
        assert_eq!(
            self.objects[&object].state,
            ObjectState::Deleting,
            "a deleted object"
        );
        if !self.retire_versions(object)? {
            // Others need not wait for its versions.
            self.deleting.rotate_left(1);
            return Ok(self.is_merging());
        }
        let handle = self.mapping.handle(object, self.objects[&object].slice)?;
        for _ in 0..RECLAIM_STEPS {
            if !self.reclaim_step(&handle)? {
                if self.has_versions_object(object) {
                    // It may name frames of the origin, which this entry keeps in use.
                    self.deleting.rotate_left(1);
                    return Ok(self.deleting.len() > 1);
                }
                self.deleting.remove(0);
                self.drop_object(object)?;
                return Ok(!self.deleting.is_empty());
            }
        }
        Ok(true)
    }

    /// Whether the versions of a deleted slice are not freed yet.
    fn has_versions_object(&self, object: ObjectId) -> bool {
        let mut entries = self.objects.values();
        entries.any(|it| it.state != ObjectState::Free && it.role == ObjectRole::VersionsOf(object))
    }

    /// Unmaps a run of slots of the first leaf that has mapped slots, or an empty node. False when
    /// nothing is left.
    fn reclaim_step(&mut self, handle: &Handle) -> Result<bool, ObjectError> {
        let root_at = self.mapping.entry_at(handle.object) + ROOT_AT;
        let (mut at, mut level, mut page) = (root_at, HEIGHT, 0u64);
        loop {
            // The subtree of a slot that cannot be corrected is lost. A check of the pool finds its
            // frames.
            let node = self.node_at(handle.object, level, page, at);
            let Some(node) =
                node.filter(|node| self.mapping.geometry().frame_numbers().contains(*node))
            else {
                self.clear_root(handle)?;
                return Ok(false);
            };
            if level == 1
                && let Some((first, changes)) =
                    self.unmap_first_run(node, |slot| slot.unmap(Epoch(0)))
            {
                let slots_at = frame_at(node) + first * 8;
                let page = PageNo(page + first as u64);
                self.with_retry(|own| own.commit_changes(handle, 0, page, slots_at, &changes))?;
                return Ok(true);
            }
            let page_of = |i: usize| page + ((i as u64) << (9 * u32::from(level - 1)));
            let below = (0..NODE_SLOTS as usize).find(|&i| {
                let at = frame_at(node) + i * 8;
                level > 1
                    && self
                        .node_at(handle.object, level - 1, page_of(i), at)
                        .is_some()
            });
            match below {
                Some(i) => {
                    page = page_of(i);
                    level -= 1;
                    at = frame_at(node) + i * 8;
                }
                None => {
                    let old = Slot::decode(self.mapping.meta.load(at))
                        .map_err(|_| StoreError::NoSuchObject)?;
                    // The root becomes empty, because a new object needs an empty root.
                    let new = if at == root_at {
                        Slot::EMPTY
                    } else {
                        old.unmap(Epoch(0))
                    };
                    let change = [Change {
                        old,
                        new,
                        sums: NO_SUMS,
                    }];
                    let page = PageNo(page);
                    self.with_retry(|own| own.commit_changes(handle, level, page, at, &change))?;
                    return Ok(at != root_at);
                }
            }
        }
    }

    /// Empties the root slot of a deleted object if it does not check: a new object needs an empty
    /// root.
    fn clear_root(&mut self, handle: &Handle) -> Result<(), ObjectError> {
        let at = self.mapping.entry_at(handle.object) + ROOT_AT;
        if Slot::decode(self.mapping.meta.load(at)).is_ok() {
            return Ok(());
        }
        let change = [Change {
            old: Slot::EMPTY,
            new: Slot::EMPTY,
            sums: NO_SUMS,
        }];
        self.with_retry(|own| own.commit_changes(handle, HEIGHT, PageNo(0), at, &change))
    }

    /// The node that the slot of `level` above `page` names; the slot lies at byte `at`.
    fn node_at(&self, object: ObjectId, level: u8, page: u64, at: usize) -> Option<FrameNo> {
        let slot = self.mapping.node_slot(object, level, PageNo(page), at);
        slot.ok().and_then(Slot::frame)
    }

    fn is_linked(&self, node: FrameNo, index: usize) -> bool {
        let slot = Slot::decode(self.mapping.meta.load(frame_at(node) + index * 8));
        slot.is_ok_and(|slot| slot.frame().is_some())
    }

    /// The first run of mapped slots of a leaf, as changes that unmap them.
    fn unmap_first_run(
        &self,
        node: FrameNo,
        unmapped: impl Fn(Slot) -> Slot,
    ) -> Option<(usize, Vec<Change>)> {
        let limit = (self.mapping.geometry().journal_lines() as usize / 4 - 1) * 3;
        let first = (0..NODE_SLOTS as usize).find(|&i| self.is_linked(node, i))?;
        let changes = (first..NODE_SLOTS as usize)
            .take_while(|&i| self.is_linked(node, i))
            .take(limit.min(PAGES_MAX / 2))
            .filter_map(|i| Slot::decode(self.mapping.meta.load(frame_at(node) + i * 8)).ok())
            .map(|old| Change {
                old,
                new: unmapped(old),
                sums: NO_SUMS,
            })
            .collect();
        Some((first, changes))
    }
}
