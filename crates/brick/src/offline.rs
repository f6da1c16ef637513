//! A pool without a brick: for checks and repairs.

use crate::file::{
    FileError, OwnerLock, map_pool, needs_sync, open_file, read_superblock_of, system,
    take_owner_lock,
};
use crate::further_devices::{self, FoundDevice};
use pagemesh_pmem::{JoinedMedia, MappedMedia};
use pagemesh_store::check::{CheckOptions, PoolReport, RepairPlan, check};
use pagemesh_store::recovery::PoolError;
use rustix::fs::{Advice, FlockOperation};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A pool that is locked and mapped, and not recovered: for checks.
pub struct OfflinePool {
    path: PathBuf,
    media: JoinedMedia,
    _claim: OwnerLock,
}

/// Locks a pool for a check, with its further devices. `devices` are their paths where they differ from those in the
/// superblock. It waits for no process and kills none.
///
/// # Errors
/// As for a brick; a pool of an earlier boot is no error here.
pub fn open_offline(path: &Path, devices: &[PathBuf]) -> Result<OfflinePool, FileError> {
    let claim = take_owner_lock(path)?;
    let file = open_file(path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(FileError::InUse(path.into())),
        Err(cause) => return Err(system("lock", path)(cause.into())),
    }
    let block = read_superblock_of(path, &file)?;
    let failed = further_devices::failed(path, &file, &[], devices)?;
    let found = further_devices::find(path, &file, devices, &failed, Duration::ZERO)?;
    let media = map_pool(path, file, &block)?;
    if needs_sync(media.durability()) {
        drop_cached(path, media.file())?;
    }
    let mut media = JoinedMedia::new(media);
    for FoundDevice { device, path, file } in found {
        drop_cached(&path, &file)?;
        let mapped = MappedMedia::new(file, device.bytes().len());
        let mapped = mapped.map_err(|cause| FileError::Map {
            path: path.clone(),
            cause,
        })?;
        media.join(device.bytes().start, device.head_len(), mapped);
    }
    Ok(OfflinePool {
        path: path.into(),
        media,
        _claim: claim,
    })
}

impl OfflinePool {
    /// Checks the pool through a private mapping: nothing is written to it.
    ///
    /// # Errors
    /// When the file is no pool, or the system refuses.
    pub fn check(
        &self,
        reads_data: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(PoolReport, RepairPlan), FileError> {
        let scratch = self.media.overlay().map_err(|cause| FileError::Map {
            path: self.path.clone(),
            cause,
        })?;
        let mut options = CheckOptions {
            is_ordered: !needs_sync(self.media.first().durability()),
            reads_data,
            progress,
        };
        check(&scratch, &mut options).map_err(|cause| self.pool_error(cause))
    }

    /// Recovers the pool and writes the repairs of the plan.
    ///
    /// # Errors
    /// When it cannot be recovered, or the medium fails.
    pub fn repair(&self, plan: &RepairPlan) -> Result<(), FileError> {
        plan.apply(&self.media)
            .map_err(|cause| self.pool_error(cause))
    }

    fn pool_error(&self, cause: PoolError) -> FileError {
        FileError::Pool {
            path: self.path.clone(),
            cause,
        }
    }
}

/// Has the kernel read the file or block device again. Its cache may hold pages that the device has lost since.
fn drop_cached(path: &Path, file: &File) -> Result<(), FileError> {
    rustix::fs::fdatasync(file).map_err(|cause| system("sync", path)(cause.into()))?;
    let dropped = rustix::fs::fadvise(file, 0, None, Advice::DontNeed);
    dropped.map_err(|cause| system("read again", path)(cause.into()))
}
