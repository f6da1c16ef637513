//! A pool's file or device as a disk, reached by requests.

use crate::file::{
    FileError, OwnerLock, fill_holes, map_pool, needs_sync, open_locked, read_superblock_of, system,
};
use pagemesh_pmem::{Device, Disk, DiskMedia, DiskOptions};
use std::path::Path;
use std::sync::Arc;

/// Locks an existing pool of class `file-sync`, and starts its disk without recovering it. Returns its data view.
///
/// # Errors
/// As [`open`](crate::file::open), and when the pool has another class.
pub(crate) fn open(path: &Path, cache_bytes: usize) -> Result<(DiskMedia, OwnerLock), FileError> {
    let (file, claim) = open_locked(path)?;
    let block = read_superblock_of(path, &file)?;
    let size_bytes = block.geometry.pool_bytes;
    fill_holes(path, &file, size_bytes)?;
    let shared = file.try_clone().map_err(system("open", path))?;
    // A mapping knows the class of the medium.
    let class = map_pool(path, shared, &block)?.durability();
    if !needs_sync(class) {
        let path = path.into();
        return Err(FileError::NoDisk { path, class });
    }
    let options = DiskOptions {
        len: size_bytes as usize,
        head_len: block.geometry.frames.start as usize,
        cache_bytes,
    };
    let started = Device::open(&file).and_then(|device| Disk::start(device, options, file));
    let disk = started.map_err(|cause| FileError::Map {
        path: path.into(),
        cause,
    })?;
    Ok((Arc::new(disk).data(), claim))
}
