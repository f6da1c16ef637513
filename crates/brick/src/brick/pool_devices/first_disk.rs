//! The first disk behind a pool in memory, while its brick runs.
//!
//! The medium, the control segment and the mappings of clients of a pool without a disk have no room for one. So the brick
//! ends in order, and the same process opens the pool again on a medium that takes disks. The disk then joins as any further
//! device does, before the pool is served.
//!
//! Invariants: the process keeps the owner lock, so no other brick takes the pool meanwhile. Nothing on the medium changes
//! before the pool is open again: a crash in between equals a crash after the end of a brick. The opening waits until no client
//! maps the pool, as after a restart.

use super::{DeviceChange, DeviceChangeResult};
use crate::brick::{Brick, OpenedBrick, open_mapped, open_tiered};
use crate::device_error::DeviceError;
use crate::device_file::DeviceFile;
use crate::disk_file::OpenOptions;
use crate::file::{self, FileError};
use pagemesh_base::poison::lock;
use pagemesh_pmem::{MappedMedia, Media};
use pagemesh_store::pool::ObjectError;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long threads of an ended brick may keep its mapping.
const ENDED_BRICK_LIMIT: Duration = Duration::from_secs(10);
const LOOK_PAUSE: Duration = Duration::from_millis(2);

/// A checked request to add the first disk, and what the next brick of the process needs besides.
#[derive(Clone, Debug)]
pub struct FirstDisk {
    request: Uuid,
    change: DeviceChange,
    /// Results that the manager may not have received.
    results: Vec<DeviceChangeResult>,
}

impl<M: Media + Send + Sync + 'static> Brick<M> {
    /// Whether a pool in memory has no place for a disk before it is opened again.
    pub(super) fn needs_reopening_for_disks(&self) -> bool {
        self.mapping.media().disk_figures().is_none()
    }

    /// Whether a pool in memory takes disks and has none, after a drain. Clients that map it take it for one without a tier.
    fn has_lost_its_disks(&self) -> bool {
        self.mapping.media().buffers_from().is_some() && !self.pool().is_tiered()
    }

    /// Another handle of the lock that keeps other bricks away, for [`Brick::reopen_for_disk`].
    ///
    /// # Errors
    /// When the system refuses.
    pub fn keep_away(&self, path: &Path) -> Result<file::OwnerLock, FileError> {
        self.share_owner_lock(path)
    }

    /// Lets requests for a first disk reach [`Brick::take_first_disk`]: `hook` is called at each. Without it they are refused.
    pub fn on_first_disk(&self, hook: impl Fn() + Send + Sync + 'static) {
        // The first hook stays.
        let _ = self.pool_devices.first_disk_hook.set(Box::new(hook));
    }

    /// The request for a first disk. The caller ends the brick, and opens the pool with [`Brick::reopen_for_disk`].
    #[must_use]
    pub fn take_first_disk(&self) -> Option<FirstDisk> {
        let mut work = self.pool_devices.work();
        let (request, change) = work.first_disk.take()?;
        Some(FirstDisk {
            request,
            change,
            results: work.results.iter().cloned().collect(),
        })
    }

    /// Leaves a request for a first disk to the owner of the process, which opens the pool again. False if this brick carries
    /// it out.
    pub(super) fn hand_on(
        &self,
        request: Uuid,
        change: &DeviceChange,
    ) -> Result<bool, DeviceError> {
        let DeviceChange::Add { path, size_bytes } = change else {
            return Ok(false);
        };
        let hook = self.pool_devices.first_disk_hook.get();
        let needs_reopening = self.needs_reopening_for_disks() || self.has_lost_its_disks();
        let Some(hook) = hook.filter(|_| needs_reopening) else {
            return Ok(false);
        };
        self.check_first_disk(path, *size_bytes)?;
        // It stays the running request, so that a repetition is none.
        self.pool_devices.work().first_disk = Some((request, change.clone()));
        hook();
        Ok(true)
    }

    /// Checks a file or block device as far as that is possible without a change of the pool. A new file is allocated, and
    /// freed again, so that a refusal costs clients nothing.
    fn check_first_disk(&self, path: &Path, size_bytes: Option<u64>) -> Result<(), DeviceError> {
        let _changing = lock(&self.pool_devices.changing);
        self.check_new_path(path)?;
        let device = DeviceFile::open(path, size_bytes)?;
        let planned = self.pool().plan_device(Uuid::new_v4(), device.bytes);
        planned.map_err(ObjectError::from)?;
        Ok(device.prepare(self.durability())?)
    }
}

impl Brick<MappedMedia> {
    /// Opens the pool of an ended brick again, so that it takes disks, and adds one. `ended` is the brick, and the
    /// caller has dropped its handles.
    ///
    /// # Errors
    /// When threads or clients still map the pool after some seconds, or the pool cannot be recovered.
    pub fn reopen_for_disk<M: Media>(
        path: &Path,
        options: &OpenOptions,
        ended: &Weak<Brick<M>>,
        claim: file::OwnerLock,
        first: FirstDisk,
    ) -> Result<OpenedBrick<pagemesh_pmem::TieredMedia>, FileError> {
        await_end(path, ended)?;
        let options = OpenOptions {
            takes_disks: true,
            ..options.clone()
        };
        let (media, claim) = file::open_claimed_again(path, options.allocation(), claim)?;
        let opened = open_tiered(path, media, claim, &options)?;
        let brick: &Arc<Brick<_>> = &opened.0;
        brick.pool_devices.set_results(first.results);
        // Before clients map the pool: they would take it for one without a disk.
        let outcome = brick.carry_out(first.change);
        let outcome = outcome.map_err(|cause| cause.to_string());
        brick.pool_devices.work().add_result(first.request, outcome);
        Ok(opened)
    }

    /// Opens the pool as before, because [`Brick::reopen_for_disk`] has failed, and refuses the request for that cause. Without
    /// the answer the manager would repeat the request, and each time the brick would end its connections.
    ///
    /// # Errors
    /// As [`Brick::reopen_for_disk`].
    pub fn reopen_without_disk<M: Media>(
        path: &Path,
        options: &OpenOptions,
        ended: &Weak<Brick<M>>,
        claim: file::OwnerLock,
        first: FirstDisk,
        cause: &FileError,
    ) -> Result<OpenedBrick<MappedMedia>, FileError> {
        await_end(path, ended)?;
        let (media, claim) = file::open_claimed_again(path, options.allocation(), claim)?;
        let opened = open_mapped(path, media, claim)?;
        let devices = &opened.0.pool_devices;
        devices.set_results(first.results);
        devices
            .work()
            .add_result(first.request, Err(cause.to_string()));
        Ok(opened)
    }
}

/// Waits until the threads of an ended brick have left its mapping.
fn await_end<M: Media>(path: &Path, ended: &Weak<Brick<M>>) -> Result<(), FileError> {
    let end = Instant::now() + ENDED_BRICK_LIMIT;
    while ended.strong_count() > 0 {
        if Instant::now() >= end {
            return Err(FileError::InUse(path.into()));
        }
        std::thread::sleep(LOOK_PAUSE);
    }
    Ok(())
}
