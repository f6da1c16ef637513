//! The sweep after snapshots were dropped: frees the versions of a slice that no snapshot sees.
//!
//! Invariant: a sweep frees nothing while a line of the log, up to the durable head, may name it.

use super::super::error::ObjectError;
use super::super::pool::Pool;
use super::super::version_store::Sweep;
use super::blocks::{Block, EditedVersions};
use crate::defect::{self, Defect};
use crate::format::version_pages::{BLOCK_ENTRIES, BlockEntries};
use crate::session::version_slots::VersionSlot;
use pagemesh_base::ids::{Epoch, ObjectId, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

/// Leaves of one step.
const STEP_LEAVES: u64 = 16;
/// Leaves without versions that one step passes.
const STEP_EMPTY_LEAVES: u64 = 1 << 14;
/// Blocks that one transaction gives back.
const FREED_BLOCKS_MAX: usize = 8;

impl<M: Media> Pool<M> {
    /// Begins a sweep, or begins it again.
    pub(super) fn start_sweep(&mut self, origin: ObjectId) {
        let after = self.superblock.version_log.tail;
        if let Some(slice) = self.versions.slices.get_mut(&origin) {
            slice.sweep = Some(Sweep {
                after,
                next_leaf: 0,
            });
        }
    }

    /// Does a step of the first sweep. True when there is more to do at once.
    pub(super) fn sweep_step(&mut self) -> Result<bool, ObjectError> {
        if let Some(spent) = self.find_spent_versions() {
            self.retire_versions(spent)?;
            return Ok(true);
        }
        let mut slices = self.versions.slices.iter();
        let found = slices.find_map(|(&origin, slice)| Some((origin, slice.sweep?)));
        let Some((origin, sweep)) = found else {
            return Ok(false);
        };
        let is_ready = self.superblock.version_log.head >= sweep.after;
        if !is_ready && !defect::is(Defect::SweptBeforeLogHead) {
            // All lines up to the tail of now, which no later drop has passed.
            self.merge_all_soon();
            return Ok(true);
        }
        let size_bytes = self.objects.get(&origin).map_or(0, |it| it.size_bytes);
        let leaves = size_bytes.div_ceil(super::LEAF_PAGES * PAGE_BYTES as u64);
        let mut leaf = sweep.next_leaf;
        let (mut swept, mut passed) = (0, 0);
        while leaf < leaves && swept < STEP_LEAVES && passed < STEP_EMPTY_LEAVES {
            let outcome = self.sweep_leaf(origin, leaf);
            if self.is_damage(&outcome) {
                self.mark_damaged(origin);
                return Ok(true);
            }
            match outcome? {
                LeafSweep::Empty => passed += 1,
                LeafSweep::Done => swept += 1,
                LeafSweep::Unfinished => {
                    swept += 1;
                    continue;
                }
            }
            leaf += 1;
        }
        if leaf == leaves {
            self.end_sweep(origin)?;
        } else if let Some(slice) = self.versions.slices.get_mut(&origin) {
            slice.sweep = Some(Sweep {
                next_leaf: leaf,
                ..sweep
            });
        }
        Ok(true)
    }

    fn end_sweep(&mut self, origin: ObjectId) -> Result<(), ObjectError> {
        let mut versions = self.edited_versions(origin);
        versions.head.needs_sweep = false;
        self.commit_versions(origin, &mut versions)?;
        if let Some(slice) = self.versions.slices.get_mut(&origin) {
            slice.sweep = None;
        }
        Ok(())
    }

    fn sweep_leaf(&mut self, origin: ObjectId, leaf: u64) -> Result<LeafSweep, ObjectError> {
        let mut versions = self.edited_versions(origin);
        if self.newest_block(&versions, leaf)?.is_none() {
            return Ok(LeafSweep::Empty);
        }
        let mut blocks = self.blocks_of(&versions, leaf)?;
        for block in &mut blocks {
            self.free_unseen(origin, &versions, block)?;
        }
        // An entry is used again only when its slot is durably free.
        self.order_changes()?;
        let is_done = self.unlink_empty(&mut versions, leaf, &blocks)?;
        self.commit_versions(origin, &mut versions)?;
        Ok(match is_done {
            true => LeafSweep::Done,
            false => LeafSweep::Unfinished,
        })
    }

    /// Frees the versions of a block that no snapshot sees.
    fn free_unseen(
        &mut self,
        origin: ObjectId,
        versions: &EditedVersions,
        block: &mut Block,
    ) -> Result<(), ObjectError> {
        let mut slots = vec![VersionSlot::Keep; BLOCK_ENTRIES as usize];
        let slice = &self.versions.slices[&origin];
        for (entry, _, frame, death) in block.versions() {
            let birth = self.mapping.frame_word(frame).birth().unwrap_or(Epoch(0));
            let is_seen = slice.is_seen(birth, death) && !defect::is(Defect::SeenVersionDropped);
            if !is_seen {
                slots[entry] = VersionSlot::Free;
            }
        }
        self.free_version_slots(versions, block, &slots)
    }

    /// Frees the slots of a block that are to be freed.
    pub(super) fn free_version_slots(
        &mut self,
        versions: &EditedVersions,
        block: &mut Block,
        slots: &[VersionSlot],
    ) -> Result<(), ObjectError> {
        let is_freed = |slot: &VersionSlot| *slot == VersionSlot::Free;
        let (Some(first), Some(last)) = (
            slots.iter().position(is_freed),
            slots.iter().rposition(is_freed),
        ) else {
            return Ok(());
        };
        let page = PageNo(versions.head.frames_at(block.number).0 + first as u64);
        self.change_version_slots(versions.object, page, &slots[first..=last])?;
        let first = versions.head.frames_at(block.number);
        block.slots = self.version_slots(versions.object, first, BLOCK_ENTRIES)?;
        Ok(())
    }

    /// Gives some empty blocks of a leaf back. False when some are left.
    fn unlink_empty(
        &mut self,
        versions: &mut EditedVersions,
        leaf: u64,
        blocks: &[Block],
    ) -> Result<bool, ObjectError> {
        let is_empty = |block: &&Block| block.versions().next().is_none();
        let empty: Vec<_> = blocks.iter().filter(is_empty).map(|it| it.number).collect();
        let freed = &empty[..empty.len().min(FREED_BLOCKS_MAX)];
        if freed.is_empty() {
            return Ok(true);
        }
        let kept: Vec<&Block> = blocks
            .iter()
            .filter(|block| !freed.contains(&block.number))
            .collect();
        for (index, block) in kept.iter().enumerate() {
            let before = kept.get(index + 1).map(|block| block.number);
            if block.entries.before != before {
                let mut entries = block.entries.clone();
                entries.before = before;
                self.set_entries(versions, block.number, &entries)?;
            }
        }
        let newest = kept.first().map(|block| block.number);
        self.set_newest_block(versions, leaf, newest)?;
        for &number in freed {
            let entries = BlockEntries::new(None, versions.head.first_free);
            self.set_entries(versions, number, &entries)?;
            versions.head.first_free = Some(number);
        }
        Ok(freed.len() == empty.len())
    }
}

/// The outcome of the sweep of a leaf.
enum LeafSweep {
    /// It has no versions.
    Empty,
    Done,
    /// More blocks can be given back.
    Unfinished,
}
