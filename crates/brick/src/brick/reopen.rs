//! A further device of a pool on disks fails while the brick runs: the brick opens the pool again without it.
//!
//! It is the ordinary opening with a failed device. The failure ends all answers of the brick before, and its sessions.
//! The recovery then names the device as failed in both superblocks, before anything is served. A crash before that leaves
//! the pool as any crash does, with the device.
//!
//! Invariants: the sound devices and the pool's own lock stay open, so no other brick takes the pool meanwhile. Threads of
//! the brick before may be stuck at the failed device: nothing here waits for them, or for their locks.

use super::{Brick, OpenedBrick, open_on_disk};
use crate::disk_file::{self, OpenOptions};
use crate::file::FileError;
use pagemesh_pmem::{Disk, DiskMedia};
use std::path::Path;
use std::sync::Arc;
use uuid::Uuid;

impl Brick<DiskMedia> {
    /// Whether the brick has failed, and only by further devices of its pool: [`Brick::reopen`] can go on without them.
    #[must_use]
    pub fn can_reopen(&self) -> bool {
        self.disk().can_hand_over()
    }

    fn disk(&self) -> &Arc<Disk> {
        self.mapping.media().disk()
    }

    /// Opens the pool of this failed brick without its failed devices, for ever. The caller has ended the connections, or
    /// ends them afterwards: no request of them is executed any more.
    ///
    /// **Data loss:** the pages on these devices are damaged from then on.
    ///
    /// # Errors
    /// When the first device has failed, a request to a sound device does not end, or the pool cannot be recovered.
    pub fn reopen(
        &self,
        path: &Path,
        options: &OpenOptions,
    ) -> Result<OpenedBrick<DiskMedia>, FileError> {
        let mut disk = self.disk().clone();
        let mut failed: Vec<Uuid> = Vec::new();
        loop {
            let claim = self.share_owner_lock(path)?;
            let handed = disk.hand_over(options.request_limits.fail);
            let handed = handed.map_err(|cause| FileError::Map {
                path: path.into(),
                cause,
            })?;
            let known = |device| self.pool_devices.path_of(device);
            let started = disk_file::restart(path, handed, &mut failed, known, options)?;
            let opened = open_on_disk(path, &started, |failed| {
                let views = [started.disk.data(), started.disk.overlay()].map(Arc::new);
                Brick::recover(path, views, self.durability, claim, failed)
            });
            match opened {
                // Each turn loses a device.
                Err(FileError::DiskFailed { cause, .. }) if started.disk.can_hand_over() => {
                    tracing::error!(%cause, "another device has failed meanwhile");
                    disk = started.disk;
                }
                opened => return opened,
            }
        }
    }
}
