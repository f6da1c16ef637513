//! Devices that leave an open pool.
//!
//! 1. [`Pool::start_drain`] names the device as draining in both superblocks. From then on no frame of it is granted.
//! 2. Sessions move its pages ([`Session::move_pages`](crate::session::Session::move_pages)), and
//!    [`Pool::move_nodes`] its page-table nodes.
//! 3. [`Pool::remove_device`] takes it out of both superblocks, once a checkpoint has freed its last frame.
//!
//! A drain continues after a restart, because the superblock says that the device is draining.

use super::error::ObjectError;
use super::maintenance::OP_END_WAIT;
pub use super::node_moves::NodeCursor;
use super::pool::{OWNER_SESSION, Pool};
use crate::defect::{self, Defect};
use crate::format::devices::{Device, DeviceState};
use crate::format::frame_set::FrameSet;
use crate::format::geometry::Geometry;
use crate::recovery::PoolError;
use crate::shared::wait::Deadline;
use pagemesh_base::ids::FrameNo;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;
use uuid::Uuid;

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
        let (named, is_whole) = FrameSet::from_tables(
            &*mapping.meta,
            mapping.geometry(),
            end,
            (&self.superblock.version_log, mapping.pool),
        );
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

    /// Recalls the grants of all sessions, and calls `run` while none of them has an operation in progress. A session
    /// looks up its leaves anew afterwards.
    pub(super) fn while_paused(
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
