//! A pool's file or device as a disk, reached by requests.

use crate::file::{Allocation, FileError, read_superblock_of, system};
use pagemesh_pmem::{Disk, DiskMedia, DiskOptions, MappedMedia, Media, NewDevice, RequestLimits};
use std::path::Path;
use std::sync::Arc;

/// The least memory for the data pages of a pool on a disk.
pub const MEMORY_BUDGET_MIN: usize = 16 << 20;

/// How to open a pool.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Whether a plain file keeps its holes; for measurements.
    pub is_sparse: bool,
    /// Bytes of memory for the data pages of a pool of class `file-sync`.
    pub memory_budget: usize,
    /// The ages at which a request to the disk is reported, and fails the pool.
    pub request_limits: RequestLimits,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            is_sparse: false,
            memory_budget: MEMORY_BUDGET_MIN,
            request_limits: RequestLimits::default(),
        }
    }
}

impl OpenOptions {
    pub(crate) fn allocation(self) -> Allocation {
        match self.is_sparse {
            true => Allocation::Sparse,
            false => Allocation::Allocated,
        }
    }
}

/// Starts the disk of a locked pool in place of its mapping. Returns its data view and its overlay.
pub(crate) fn start(
    path: &Path,
    mapped: MappedMedia,
    options: OpenOptions,
) -> Result<[DiskMedia; 2], FileError> {
    let file = mapped.file().try_clone().map_err(system("open", path))?;
    let len = mapped.len_bytes();
    // A mapping would hold pages of the kernel's cache that requests to the disk change below it.
    drop(mapped);
    let block = read_superblock_of(path, &file)?;
    let first = NewDevice {
        file,
        bytes: 0..len,
        head_len: block.geometry.frames.start as usize,
    };
    let options = DiskOptions {
        cache_bytes: options.memory_budget,
        limits: options.request_limits,
    };
    let started = Disk::start(Some(first), options).map(Arc::new);
    let disk = started.map_err(|cause| FileError::Map {
        path: path.into(),
        cause,
    })?;
    Ok([disk.data(), disk.overlay()])
}
