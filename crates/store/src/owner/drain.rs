//! Devices that leave an open pool.
//!
//! 1. [`Pool::start_drain`] names the device as draining in both superblocks. From then on no frame of it is granted.
//! 2. Sessions move its pages ([`Session::move_pages`](crate::session::Session::move_pages)), and
//!    [`Pool::move_nodes`] its page-table nodes.
//! 3. [`Pool::remove_device`] takes it out of both superblocks, once a checkpoint has freed its last frame.
//!
//! A drain continues after a restart, because the superblock says that the device is draining.
//!
//! Invariants: a node moves only while no session has an operation in progress. Every session then looks up its
//! leaves anew, because its grants were recalled. On a `file-sync` pool a copied node and all records of its slots are
//! durable before the record that names the copy: a replay applies records to a node, and makes none.

use super::error::ObjectError;
use super::maintenance::OP_END_WAIT;
use super::pool::{OWNER_SESSION, Pool};
use crate::defect::{self, Defect};
use crate::format::devices::{Device, DeviceState};
use crate::format::frame_set::FrameSet;
use crate::format::geometry::{Geometry, frame_at};
use crate::format::object::{HEIGHT, ObjectState};
use crate::format::record::{Change, NO_SUMS};
use crate::format::slot::Slot;
use crate::format::table::{NODE_SLOTS, SlotLocation, reach};
use crate::recovery::PoolError;
use crate::shared::control::FrameRun;
use crate::shared::error::StoreError;
use crate::shared::wait::Deadline;
use pagemesh_base::ids::{FrameNo, ObjectId, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;
use uuid::Uuid;

/// Nodes that move in one pause of the sessions, which takes a sync and a few microseconds for each.
const NODES_MAX: usize = 64;
/// Slots that one call of [`Pool::move_nodes`] looks at.
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
    page: PageNo,
}

/// A node that was copied.
struct NodeCopy {
    slot: NodeSlot,
    /// The byte of its slot.
    at: usize,
    old: Slot,
    to: FrameNo,
}

impl<M: Media> Pool<M> {
    /// Keeps a device from being used further. Calling it again is no error.
    ///
    /// # Errors
    /// When the pool has no such device, its other devices lack room, a session is stuck, or the pool fails. After an
    /// error of a session the caller calls it again.
    pub fn start_drain(&mut self, id: Uuid) -> Result<(), ObjectError> {
        let device = self.find_device(id)?;
        if device.state == DeviceState::Failed {
            // Nothing on it can be moved. It leaves once no slot names a frame of it.
            return Ok(());
        }
        if device.state != DeviceState::Draining {
            self.checkpoint()?;
            let wanted = self.frames_in_use(&device);
            let elsewhere =
                self.frame_allocator.free() - self.frame_allocator.free_in(device.frames());
            if wanted > elsewhere {
                return Err(ObjectError::NoRoomToDrain {
                    wanted_bytes: wanted * PAGE_BYTES as u64,
                    free_bytes: elsewhere * PAGE_BYTES as u64,
                });
            }
            self.set_device_state(device, DeviceState::Draining)?;
        }
        self.frame_allocator.close_frames(device.frames());
        // Sessions give their grants back, and with them the device's frames.
        self.while_paused(|_| Ok(()))
    }

    /// Lets a device that is draining be used again.
    ///
    /// # Errors
    /// When the pool has no such device, or fails.
    pub fn cancel_drain(&mut self, id: Uuid) -> Result<(), ObjectError> {
        let device = self.find_device(id)?;
        match device.state {
            DeviceState::Active => return Ok(()),
            DeviceState::Failed => return Err(ObjectError::DeviceFailed(id)),
            DeviceState::Draining => {}
        }
        // Sessions may still have grants of the device, and records that took its frames: none of these is free.
        self.while_paused(|pool| {
            pool.checkpoint()?;
            pool.set_device_state(device, DeviceState::Active)?;
            pool.frame_allocator.open_frames(device.frames());
            Ok(())
        })
    }

    /// Frames of a device that were in use at the last checkpoint, without unreadable ones.
    ///
    /// # Errors
    /// When the pool has no such device.
    pub fn device_frames_in_use(&self, id: Uuid) -> Result<u64, ObjectError> {
        Ok(self.frames_in_use(&self.find_device(id)?))
    }

    /// The same of the first device.
    #[must_use]
    pub fn first_device_frames_in_use(&self) -> u64 {
        let first = self.mapping.geometry().first_frames();
        self.frame_allocator.used_in(first)
    }

    fn frames_in_use(&self, device: &Device) -> u64 {
        self.frame_allocator.used_in(device.frames())
    }

    /// Takes a drained or failed device out of the pool. False if frames of it are still in use.
    ///
    /// # Errors
    /// When the pool has no such device, it is not draining, or the pool fails.
    pub fn remove_device(&mut self, id: Uuid) -> Result<bool, ObjectError> {
        let device = self.find_device(id)?;
        if device.state == DeviceState::Active {
            return Err(ObjectError::NotDraining(id));
        }
        // Without grants, and with every record applied, the tables name each frame in use.
        let mut is_removed = false;
        self.while_paused(|pool| {
            pool.checkpoint()?;
            if defect::is(Defect::DeviceRemovedInUse) || pool.is_unused(&device) {
                let mut geometry = *pool.mapping.geometry();
                geometry.devices.put(id, None);
                pool.replace_geometry(geometry)?;
                pool.frame_allocator.remove_frames(&geometry);
                is_removed = true;
            }
            Ok(())
        })?;
        Ok(is_removed)
    }

    /// Whether neither the bitmap nor a page table names a frame of a device, and the tier has reserved none. A frame
    /// that cannot be read stays in the bitmap, and the bitmap of a failed device is lost: the tables tell whether a page
    /// still lies there.
    fn is_unused(&self, device: &Device) -> bool {
        if self.frame_allocator.has_reserved_in(device.frames()) {
            // The tier writes to reserved frames without the pool's lock.
            return false;
        }
        let next = self.mapping.control.seq().load(Ordering::Acquire);
        if self.checkpoint_limit().0 < next || self.frames_in_use(device) > 0 {
            return false;
        }
        let is_failed = device.state == DeviceState::Failed;
        if !is_failed && !self.frame_allocator.has_withheld_in(device.frames()) {
            return true;
        }
        let mapping = &self.mapping;
        let end = self.superblock.objects_end;
        let (named, is_whole) = FrameSet::from_tables(&*mapping.meta, mapping.geometry(), end);
        is_whole && !device.frames().any(|frame| named.has(FrameNo(frame)))
    }

    fn find_device(&self, id: Uuid) -> Result<Device, ObjectError> {
        let devices = &self.mapping.geometry().devices;
        let found = devices.iter().find(|device| device.id == id);
        found.copied().ok_or(ObjectError::NoSuchDevice(id))
    }

    fn set_device_state(
        &mut self,
        mut device: Device,
        state: DeviceState,
    ) -> Result<(), ObjectError> {
        device.state = state;
        let mut geometry = *self.mapping.geometry();
        geometry.devices.put(device.id, Some(device));
        self.replace_geometry(geometry)
    }

    fn replace_geometry(&mut self, geometry: Geometry) -> Result<(), ObjectError> {
        if self.has_failed {
            return Err(PoolError::Failed.into());
        }
        if !self.mapping.set_geometry(geometry) {
            return Err(PoolError::DeviceChanged.into());
        }
        let named = self.name_devices();
        self.has_failed |= named.is_err();
        Ok(named?)
    }

    /// Moves nodes from draining devices to other frames. Returns the position of the next call; none at the end of all
    /// tables.
    ///
    /// # Errors
    /// When a session is stuck: the caller calls it again. When the pool lacks room or fails.
    pub fn move_nodes(&mut self, from: NodeCursor) -> Result<Option<NodeCursor>, ObjectError> {
        let (leaving, next) = self.find_leaving_nodes(from);
        if leaving.is_empty() {
            return Ok(next);
        }
        self.while_paused(|pool| pool.move_found_nodes(&leaving))?;
        Ok(next)
    }

    /// Moves nodes level by level, the upper ones first, because each names the next. No session has an operation in
    /// progress.
    fn move_found_nodes(&mut self, leaving: &[NodeSlot]) -> Result<(), ObjectError> {
        // Also if a later step fails: some nodes have moved then.
        self.leaf_cache.clear();
        self.owner_session.clear_leaf_cache();
        for level in (1..=HEIGHT).rev() {
            let of_level = leaving.iter().filter(|slot| slot.level == level);
            let mut copies = Vec::new();
            let copied = of_level.map(|&slot| self.copy_node(slot));
            let copied = copied.map(|copy| copy.map(|copy| copies.extend(copy)));
            let copied: Result<(), ObjectError> = copied.collect();
            let moved = copied.and_then(|()| self.commit_copies(&mut copies));
            // Those that no record names.
            for copy in copies {
                let (start, len) = (copy.to.0, 1);
                self.frame_allocator.return_unused(FrameRun { start, len });
            }
            moved?;
        }
        Ok(())
    }

    /// Commits copies of nodes, and takes each from the list before its record is written.
    fn commit_copies(&mut self, copies: &mut Vec<NodeCopy>) -> Result<(), ObjectError> {
        if !copies.is_empty()
            && self.mapping.has_overlay()
            && !defect::is(Defect::NodeMovedBeforeSync)
        {
            // The copies, and every record whose slot is in one.
            self.mapping.data.sync().map_err(PoolError::from)?;
        }
        while let Some(copy) = copies.pop() {
            self.commit_copy(&copy)?;
        }
        Ok(())
    }

    fn is_leaving(&self, frame: FrameNo) -> bool {
        let device = self.mapping.geometry().devices.device_of(frame.0);
        device.is_some_and(|device| device.state == DeviceState::Draining)
    }

    /// Slots of nodes on draining devices, upper ones first, and where the walk ended.
    fn find_leaving_nodes(&self, from: NodeCursor) -> (Vec<NodeSlot>, Option<NodeCursor>) {
        let mut found = Vec::new();
        let mut at = from;
        for _ in 0..LOOKED_AT_MAX {
            if at.object >= self.superblock.objects_end {
                return (found, None);
            }
            let object = ObjectId(at.object);
            let live = self.objects.get(&object);
            let live = live.filter(|entry| entry.state == ObjectState::Live);
            let pages = live.map_or(0, |entry| entry.size_bytes.div_ceil(PAGE_BYTES as u64));
            if at.page >= pages {
                at = NodeCursor {
                    object: at.object + 1,
                    page: 0,
                };
                continue;
            }
            if found.len() + usize::from(HEIGHT) > NODES_MAX {
                break;
            }
            at.page = self.find_leaving_path(object, at.page, &mut found);
        }
        (found, Some(at))
    }

    /// Adds the leaving nodes above a page that are not above the page before it. Returns the first page below
    /// another leaf.
    fn find_leaving_path(&self, object: ObjectId, page: u64, found: &mut Vec<NodeSlot>) -> u64 {
        for level in (1..=HEIGHT).rev() {
            let location = self.mapping.locate(object, level, PageNo(page));
            let Ok(SlotLocation::At(at)) = location else {
                return (page / reach(level) + 1) * reach(level);
            };
            let slot = Slot::decode(self.mapping.meta.load(at));
            let Some(frame) = slot.ok().and_then(Slot::frame) else {
                return (page / reach(level) + 1) * reach(level);
            };
            if self.is_leaving(frame) && page.is_multiple_of(reach(level)) {
                let page = PageNo(page);
                found.push(NodeSlot {
                    object,
                    level,
                    page,
                });
            }
        }
        (page / NODE_SLOTS + 1) * NODE_SLOTS
    }

    /// Copies a node to a new frame, if it is still leaving.
    fn copy_node(&mut self, slot: NodeSlot) -> Result<Option<NodeCopy>, ObjectError> {
        let location = self.mapping.locate(slot.object, slot.level, slot.page)?;
        let SlotLocation::At(at) = location else {
            return Ok(None);
        };
        let Ok(old) = Slot::decode(self.mapping.meta.load(at)) else {
            return Ok(None);
        };
        let Some(from) = old.frame().filter(|&frame| self.is_leaving(frame)) else {
            return Ok(None);
        };
        let run = self.frame_allocator.allocate(1);
        let to = FrameNo(run.ok_or(StoreError::NoSpace)?.start);
        let mapping = &self.mapping;
        let mut node = [0; PAGE_BYTES];
        for (word, bytes) in node.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *bytes = mapping.meta.load(frame_at(from) + word * 8).to_le_bytes();
        }
        let (_, stores) = M::stream_page(&[(&*mapping.data, frame_at(to))], &node);
        let _fenced = mapping.data.fence(stores);
        if mapping.has_overlay() {
            for (word, bytes) in node.as_chunks::<8>().0.iter().enumerate() {
                let at = frame_at(to) + word * 8;
                mapping.meta.store(at, u64::from_le_bytes(*bytes));
            }
        }
        Ok(Some(NodeCopy { slot, at, old, to }))
    }

    /// Commits the record that names a copied node.
    fn commit_copy(&mut self, copy: &NodeCopy) -> Result<(), ObjectError> {
        let NodeSlot {
            object,
            level,
            page,
        } = copy.slot;
        let change = [Change {
            old: copy.old,
            new: copy.old.map(copy.to),
            sums: NO_SUMS,
        }];
        let handle = self.mapping.handle(object, self.objects[&object].slice)?;
        self.with_retry(|own| own.commit_changes(&handle, level, page, copy.at, &change))
    }

    /// Recalls the grants of all sessions, and calls `run` while none of them has an operation in progress. A session
    /// looks up its leaves anew afterwards.
    fn while_paused(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<(), ObjectError>,
    ) -> Result<(), ObjectError> {
        let end = Deadline::after(OP_END_WAIT);
        let (mut paused, mut stuck) = (Vec::new(), None);
        for number in self.sessions.open_numbers() {
            if number == OWNER_SESSION {
                continue;
            }
            let cells = self.mapping.control.session_cells(number);
            paused.push((number, cells.recalls().fetch_add(1, Ordering::SeqCst)));
            let active = cells.active().load(Ordering::SeqCst);
            if active % 2 == 1 && !self.wait_for_op_end(number, active, end) {
                stuck = Some(self.stuck_error(number, active));
                break;
            }
        }
        let is_recalled = stuck.is_none();
        let done = match stuck {
            None => {
                for &(number, _) in &paused {
                    let session_state = self.sessions.session(number);
                    session_state.recall(&self.mapping, number, &mut self.frame_allocator);
                }
                run(self)
            }
            Some(cause) => Err(cause),
        };
        for (number, before) in paused {
            let cells = self.mapping.control.session_cells(number);
            match is_recalled {
                true => drop(cells.recalls().fetch_add(1, Ordering::SeqCst)),
                false => cells.recalls().store(before, Ordering::SeqCst),
            }
        }
        done
    }
}
