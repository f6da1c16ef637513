//! Page-table nodes that leave a device of an open pool.
//!
//! A node on a draining device is copied to another frame. A node on a failed device is lost: a new node takes its
//! place. Each slot of the new node names the lost node's frame. So the pages below are damaged, as pages on a failed
//! device are: a read is an error, and a write or a clear replaces the slot. A slot above the leaves names a lost node
//! again, and the walk replaces that, too. The device leaves once no slot names a frame of it.
//!
//! Invariants: a node moves only while no session has an operation in progress. Every session then looks up its
//! leaves anew, because its grants were recalled. On a `file-sync` pool the new node and all records of the old one's
//! slots are durable before the record that names the new one: a replay applies records to a node, and makes none.
//! The replaced slot always names a frame, if need be that of the lost node: a replay zeroes the new node of an empty slot.

use super::error::ObjectError;
use super::pool::Pool;
use crate::defect::{self, Defect};
use crate::format::devices::DeviceState;
use crate::format::geometry::frame_at;
use crate::format::object::{HEIGHT, ObjectState};
use crate::format::record::{Change, NO_SUMS};
use crate::format::slot::Slot;
use crate::format::table::{NODE_SLOTS, SlotLocation, reach};
use crate::recovery::PoolError;
use crate::shared::control::FrameRun;
use crate::shared::error::StoreError;
use pagemesh_base::ids::{FrameNo, ObjectId, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

/// Nodes that move in one pause of the sessions, which takes a sync and a few microseconds for each.
const NODES_MAX: usize = 64;
/// Slots that one call looks at.
const LOOKED_AT_MAX: u64 = 4096;

/// The position of a walk over all page tables; the default is its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCursor {
    object: u32,
    page: u64,
}

/// A slot above the leaves.
#[derive(Clone, Copy)]
struct NodeSlot {
    object: ObjectId,
    level: u8,
    /// The first page below it.
    page: PageNo,
}

/// Nodes of one walk, on devices of one state.
struct LeavingNodes {
    state: DeviceState,
    slots: Vec<NodeSlot>,
}

/// A new node, which takes the place of another one.
struct NewNode {
    slot: NodeSlot,
    /// The byte of its slot.
    at: usize,
    old: Slot,
    to: FrameNo,
}

impl<M: Media> Pool<M> {
    /// Moves nodes from draining devices to other frames. Returns the position of the next call; none at the end of all
    /// tables.
    ///
    /// # Errors
    /// When a session is stuck: the caller calls it again. When the pool lacks room or fails.
    pub fn move_nodes(&mut self, from: NodeCursor) -> Result<Option<NodeCursor>, ObjectError> {
        self.replace_nodes(from, DeviceState::Draining)
    }

    /// Puts new nodes in the place of those on failed devices, as [`Pool::move_nodes`] does. The pages below are then
    /// damaged until each is written or cleared.
    ///
    /// # Errors
    /// As for [`Pool::move_nodes`].
    pub fn replace_lost_nodes(
        &mut self,
        from: NodeCursor,
    ) -> Result<Option<NodeCursor>, ObjectError> {
        self.replace_nodes(from, DeviceState::Failed)
    }

    fn replace_nodes(
        &mut self,
        from: NodeCursor,
        state: DeviceState,
    ) -> Result<Option<NodeCursor>, ObjectError> {
        let (leaving, next) = self.find_leaving_nodes(from, state);
        if leaving.slots.is_empty() {
            return Ok(next);
        }
        self.while_paused(|pool| pool.replace_found_nodes(&leaving))?;
        Ok(next)
    }

    /// Replaces nodes level by level, the upper ones first, because each names the next. No session has an operation in
    /// progress.
    fn replace_found_nodes(&mut self, leaving: &LeavingNodes) -> Result<(), ObjectError> {
        // Also if a later step fails: some nodes have moved then.
        self.leaf_cache.clear();
        self.owner_session.clear_leaf_cache();
        for level in (1..=HEIGHT).rev() {
            let of_level = leaving.slots.iter().filter(|slot| slot.level == level);
            let mut nodes = Vec::new();
            let made = of_level.map(|&slot| self.make_node(slot, leaving.state));
            let made = made.map(|node| node.map(|node| nodes.extend(node)));
            let made: Result<(), ObjectError> = made.collect();
            // Without room for all, those that were made.
            let committed = self.commit_nodes(&mut nodes);
            // Those that no record names.
            for node in nodes {
                let (start, len) = (node.to.0, 1);
                self.frame_allocator.return_unused(FrameRun { start, len });
            }
            committed.and(made)?;
        }
        Ok(())
    }

    /// Commits new nodes, and takes each from the list before its record is written.
    fn commit_nodes(&mut self, nodes: &mut Vec<NewNode>) -> Result<(), ObjectError> {
        if !nodes.is_empty()
            && self.mapping.has_overlay()
            && !defect::is(Defect::NodeMovedBeforeSync)
        {
            // The new nodes, and every record with a slot in an old one.
            self.mapping.data.sync().map_err(PoolError::from)?;
        }
        while let Some(node) = nodes.pop() {
            self.commit_node(&node)?;
        }
        Ok(())
    }

    fn is_on(&self, frame: FrameNo, state: DeviceState) -> bool {
        let device = self.mapping.geometry().devices.device_of(frame.0);
        device.is_some_and(|device| device.state == state)
    }

    /// The pages of a live object.
    fn pages_of(&self, object: ObjectId) -> u64 {
        let live = self.objects.get(&object);
        let live = live.filter(|entry| entry.state == ObjectState::Live);
        live.map_or(0, |entry| entry.size_bytes.div_ceil(PAGE_BYTES as u64))
    }

    /// Slots of nodes on devices of a state, upper ones first, and where the walk ended.
    fn find_leaving_nodes(
        &self,
        from: NodeCursor,
        state: DeviceState,
    ) -> (LeavingNodes, Option<NodeCursor>) {
        let slots = Vec::new();
        let mut found = LeavingNodes { state, slots };
        let mut at = from;
        for _ in 0..LOOKED_AT_MAX {
            if at.object >= self.superblock.objects_end {
                return (found, None);
            }
            let object = ObjectId(at.object);
            if at.page >= self.pages_of(object) {
                at = NodeCursor {
                    object: at.object + 1,
                    page: 0,
                };
                continue;
            }
            if found.slots.len() + usize::from(HEIGHT) > NODES_MAX {
                break;
            }
            match self.find_leaving_path(object, at.page, &mut found) {
                Some(next) => at.page = next,
                // The next call finds the new node, and those below it.
                None => break,
            }
        }
        (found, Some(at))
    }

    /// Adds the leaving nodes above a page that are not above the page before it. Returns the first page below
    /// another leaf; none if nodes below a lost one must be found first.
    fn find_leaving_path(
        &self,
        object: ObjectId,
        page: u64,
        found: &mut LeavingNodes,
    ) -> Option<u64> {
        for level in (1..=HEIGHT).rev() {
            let behind = (page / reach(level) + 1) * reach(level);
            let location = self.mapping.locate(object, level, PageNo(page));
            let Ok(SlotLocation::At(at)) = location else {
                return Some(behind);
            };
            let slot = Slot::decode(self.mapping.meta.load(at));
            let Some(frame) = slot.ok().and_then(Slot::frame) else {
                return Some(behind);
            };
            let is_lost = found.state == DeviceState::Failed;
            // The walk enters a lost node only after its replacement, at any page below it.
            let is_first = is_lost || page.is_multiple_of(reach(level));
            if is_first && self.is_on(frame, found.state) {
                let page = PageNo(behind - reach(level));
                found.slots.push(NodeSlot {
                    object,
                    level,
                    page,
                });
                if is_lost && level > 1 {
                    return None;
                }
            }
        }
        Some((page / NODE_SLOTS + 1) * NODE_SLOTS)
    }

    /// Makes the node that takes the place of another one, if that is still on a device of this state.
    fn make_node(
        &mut self,
        slot: NodeSlot,
        state: DeviceState,
    ) -> Result<Option<NewNode>, ObjectError> {
        let location = self.mapping.locate(slot.object, slot.level, slot.page)?;
        let SlotLocation::At(at) = location else {
            return Ok(None);
        };
        let Ok(old) = Slot::decode(self.mapping.meta.load(at)) else {
            return Ok(None);
        };
        let Some(from) = old.frame().filter(|&frame| self.is_on(frame, state)) else {
            return Ok(None);
        };
        let run = self.frame_allocator.allocate(1);
        let to = FrameNo(run.ok_or(StoreError::NoSpace)?.start);
        let mapping = &self.mapping;
        let mut node = [0; PAGE_BYTES];
        for (word, bytes) in node.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let bits = match state {
                DeviceState::Failed => self.lost_slot(slot, word as u64, from),
                _ => mapping.meta.load(frame_at(from) + word * 8),
            };
            *bytes = bits.to_le_bytes();
        }
        let (_, stores) = M::stream_page(&[(&*mapping.data, frame_at(to))], &node);
        let _fenced = mapping.data.fence(stores);
        if mapping.has_overlay() {
            for (word, bytes) in node.as_chunks::<8>().0.iter().enumerate() {
                let at = frame_at(to) + word * 8;
                mapping.meta.store(at, u64::from_le_bytes(*bytes));
            }
        }
        Ok(Some(NewNode { slot, at, old, to }))
    }

    /// The bits of a slot in the place of a lost one. The object has no page behind its end.
    fn lost_slot(&self, node: NodeSlot, index: u64, lost: FrameNo) -> u64 {
        let first = node.page.0 + index * reach(node.level - 1);
        match first < self.pages_of(node.object) && !defect::is(Defect::LostNodeEmptied) {
            true => Slot::EMPTY.map(lost).encode(),
            false => Slot::EMPTY.encode(),
        }
    }

    /// Commits the record that names a new node.
    fn commit_node(&mut self, node: &NewNode) -> Result<(), ObjectError> {
        let NodeSlot {
            object,
            level,
            page,
        } = node.slot;
        let change = [Change {
            old: node.old,
            new: node.old.map(node.to),
            sums: NO_SUMS,
        }];
        let handle = self.mapping.handle(object, self.objects[&object].slice)?;
        self.with_retry(|own| own.commit_changes(&handle, level, page, node.at, &change))
    }
}
