//! Devices that join an open pool.
//!
//! Invariants: both superblocks name a device before a frame of it is granted, so that a recovery from either knows
//! its frames. A device that no superblock names is free, whatever is on it.

use super::pool::Pool;
use crate::defect::{self, Defect};
use crate::format::bitmap::Bitmap;
use crate::format::devices::{Device, DeviceKind};
use crate::format::geometry::DeviceFrames;
use crate::recovery::PoolError;
use crate::shared::pool_mapping::PoolMapping;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::path::Path;
use uuid::Uuid;

/// A planned device with written and durable tables. No superblock names it yet.
#[derive(Debug)]
pub struct PreparedDevice {
    device: Device,
}

impl PreparedDevice {
    /// Writes the tables of a planned device, where nothing of the pool lies yet. The owner need not be locked, so that the
    /// pool is served meanwhile.
    ///
    /// **Data loss:** everything on the device is lost.
    ///
    /// # Errors
    /// When the plan is no longer valid, the media do not reach there, or the device fails.
    pub fn write<M: Media>(
        mapping: &PoolMapping<M>,
        planned: Device,
    ) -> Result<PreparedDevice, PoolError> {
        let data = &*mapping.data;
        let (wanted, found) = (
            planned.end_page() * PAGE_BYTES as u64,
            data.len_bytes() as u64,
        );
        if found < wanted {
            return Err(PoolError::Truncated { wanted, found });
        }
        let tables = tables_of(mapping, &planned)?;
        Bitmap::format(data, &tables, mapping.pool());
        let header = planned.header(mapping.pool(), mapping.incarnation());
        let first = planned.first_page as usize * PAGE_BYTES;
        let targets = [(data, first), (data, first + PAGE_BYTES)];
        let (_, stores) = M::stream_page(&targets, &header);
        let _fenced = data.fence(stores);
        data.sync()?;
        Ok(PreparedDevice { device: planned })
    }

    /// The same by a function that writes a page at a byte of the device, before the media have it. The caller makes the
    /// pages durable before [`Pool::add_prepared_device`].
    ///
    /// **Data loss:** everything on the device is lost.
    ///
    /// # Errors
    /// When the plan is no longer valid, or the function fails.
    pub fn write_with<M: Media, E: From<PoolError>>(
        mapping: &PoolMapping<M>,
        planned: Device,
        mut write: impl FnMut(u64, &[u8; PAGE_BYTES]) -> Result<(), E>,
    ) -> Result<PreparedDevice, E> {
        let tables = tables_of(mapping, &planned)?;
        let first = planned.first_page * PAGE_BYTES as u64;
        for (at, page) in Bitmap::empty_pages(&tables, mapping.pool()) {
            write(at as u64 - first, &page)?;
        }
        let header = planned.header(mapping.pool(), mapping.incarnation());
        write(0, &header)?;
        write(PAGE_BYTES as u64, &header)?;
        Ok(PreparedDevice { device: planned })
    }
}

/// The places of the tables of a planned device.
fn tables_of<M: Media>(
    mapping: &PoolMapping<M>,
    planned: &Device,
) -> Result<DeviceFrames, PoolError> {
    let mut geometry = *mapping.geometry();
    let bytes = planned.pages * PAGE_BYTES as u64;
    if geometry.add_device(planned.id, bytes, planned.kind)? != *planned {
        return Err(PoolError::DeviceChanged);
    }
    let mut tables = geometry.device_frames();
    let tables = tables.find(|it| it.first_page == planned.first_page);
    Ok(tables.expect("the plan has the device"))
}

impl<M: Media> Pool<M> {
    /// The place that a device of `bytes` would have. The caller makes the media reach there before
    /// [`Pool::add_device`].
    ///
    /// # Errors
    /// When the device is too small, or the pool would have too many or be too large.
    pub fn plan_device(&self, id: Uuid, bytes: u64) -> Result<Device, PoolError> {
        let mut geometry = *self.mapping.geometry();
        Ok(geometry.add_device(id, bytes, self.kind_of_devices())?)
    }

    fn kind_of_devices(&self) -> DeviceKind {
        match self.mapping.data.buffers_from() {
            Some(_) => DeviceKind::Flash,
            None => DeviceKind::LikeFirst,
        }
    }

    /// Writes the tables of a device and adds it, as planned. When it returns, its frames are granted.
    ///
    /// **Data loss:** everything on the device is lost.
    ///
    /// # Errors
    /// As [`Pool::add_prepared_device`] and [`PreparedDevice::write`].
    pub fn add_device(&mut self, planned: Device) -> Result<(), PoolError> {
        if self.has_failed {
            return Err(PoolError::Failed);
        }
        let prepared = PreparedDevice::write(&self.mapping, planned);
        if let Err(PoolError::System(_)) = &prepared {
            self.has_failed = true;
        }
        self.add_prepared_device(&prepared?)
    }

    /// Adds a device whose tables are written. When it returns, its frames are granted.
    ///
    /// # Errors
    /// When the plan is no longer valid, or a device fails. After an error of a device the pool has failed, too.
    pub fn add_prepared_device(&mut self, prepared: &PreparedDevice) -> Result<(), PoolError> {
        if self.has_failed {
            return Err(PoolError::Failed);
        }
        let planned = prepared.device;
        let (wanted, found) = (
            planned.end_page() * PAGE_BYTES as u64,
            self.mapping.data.len_bytes() as u64,
        );
        if found < wanted {
            return Err(PoolError::Truncated { wanted, found });
        }
        let mut geometry = *self.mapping.geometry();
        let bytes = planned.pages * PAGE_BYTES as u64;
        let is_planned = geometry.add_device(planned.id, bytes, planned.kind)? == planned;
        if !is_planned || !self.mapping.set_geometry(geometry) {
            return Err(PoolError::DeviceChanged);
        }
        let added = self.name_devices();
        self.has_failed |= added.is_err();
        added?;
        self.frame_allocator.add_device(&geometry, &planned);
        self.mapping.control.ring_doorbell();
        Ok(())
    }

    /// The path where a further device was last found.
    #[must_use]
    pub fn device_path(&self, id: Uuid) -> Option<&Path> {
        self.superblock.device_paths.of(id)
    }

    /// Whether the superblock has room for the path of a further device beside the paths of the others.
    #[must_use]
    pub fn has_room_for_path(&self, path: &Path) -> bool {
        let devices = &self.mapping.geometry().devices;
        self.superblock.device_paths.has_room_for(path, devices)
    }

    /// Remembers where a device of the pool, or one that will join, was found. The next superblock has it. False if there is
    /// no room for the path: the operator must then name it at each opening.
    pub fn set_device_path(&mut self, id: Uuid, path: &Path) -> bool {
        let devices = self.mapping.geometry().devices;
        self.superblock.device_paths.set(id, path, &devices)
    }

    /// Writes the present devices into both superblocks.
    pub(super) fn name_devices(&mut self) -> Result<(), PoolError> {
        let geometry = *self.mapping.geometry();
        let (ends, before) = (self.superblock.bitmap_ends, self.superblock.geometry);
        self.superblock.bitmap_ends = ends.after_change(&before, &geometry);
        // Unreadable frames of a device that has left were counted.
        let frames = self.superblock.bitmap_ends.frames(&geometry);
        self.superblock.used_frames = self.superblock.used_frames.min(frames);
        self.superblock.geometry = geometry;
        let copies = match () {
            () if defect::is(Defect::DeviceNotNamed) => 0,
            () if defect::is(Defect::DeviceInOneSuperblock) => 1,
            () => 2,
        };
        for _ in 0..copies {
            self.ensure_newer_superblock()?;
            self.superblock.generation += 1;
            self.write_superblock()?;
        }
        Ok(())
    }
}
