//! A pool's file or device as a disk, reached by requests.

use crate::file::{Allocation, FileError, read_superblock_of, superblocks_of, system};
use crate::further_devices::{self, BRICK_PATIENCE, FoundDevice, buffered};
use pagemesh_pmem::{Disk, DiskOptions, HandOver, MappedMedia, Media, NewDevice, RequestLimits};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uuid::Uuid;

/// The least memory for the data pages of a pool on a disk.
pub const MEMORY_BUDGET_MIN: usize = 16 << 20;

/// How to open a pool.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Whether a plain file keeps its holes; for measurements.
    pub is_sparse: bool,
    /// Bytes of memory for the data pages of a pool of class `file-sync`.
    pub memory_budget: usize,
    /// The ages at which a request to the disk is reported, and fails the pool.
    pub request_limits: RequestLimits,
    /// Paths of devices behind the first one, where they differ from those in the superblock.
    pub devices: Vec<PathBuf>,
    /// Devices behind the first one that have failed. The pool is opened without them, for ever.
    ///
    /// **Data loss:** their pages are damaged from then on.
    pub failed_devices: Vec<Uuid>,
    /// Whether a pool in memory that has no disk can get one while it is open.
    pub takes_disks: bool,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            is_sparse: false,
            memory_budget: MEMORY_BUDGET_MIN,
            request_limits: RequestLimits::default(),
            devices: Vec::new(),
            failed_devices: Vec::new(),
            takes_disks: false,
        }
    }
}

impl OpenOptions {
    pub(crate) fn allocation(&self) -> Allocation {
        match self.is_sparse {
            true => Allocation::Sparse,
            false => Allocation::Allocated,
        }
    }
}

/// A disk with its further devices.
pub(crate) struct StartedDisk {
    pub(crate) disk: Arc<Disk>,
    pub(crate) found: Vec<FoundDevice>,
    /// Those that have failed.
    pub(crate) failed: Vec<Uuid>,
}

/// Starts the disk of a locked pool in place of its mapping, with its further devices.
pub(crate) fn start(
    path: &Path,
    mapped: MappedMedia,
    options: &OpenOptions,
) -> Result<StartedDisk, FileError> {
    let file = mapped.file().try_clone().map_err(system("open", path))?;
    let len = mapped.len_bytes();
    // A mapping would hold pages of the kernel's cache that requests to the disk change below it.
    drop(mapped);
    let block = read_superblock_of(path, &file)?;
    let failed = further_devices::failed(path, &file, &options.failed_devices, &options.devices)?;
    let found = further_devices::find(path, &file, &options.devices, &failed, BRICK_PATIENCE)?;
    let first = NewDevice {
        file,
        bytes: 0..len,
        head_len: block.geometry.frames.start as usize,
        frame_table: block.geometry.frame_table.bytes(),
    };
    start_with(path, Some(first), (found, failed), options)
}

/// Starts a disk in place of a failed one, without the devices that are not handed over. Adds them to `retired`. `known` has the paths
/// of devices.
pub(crate) fn restart(
    path: &Path,
    handed: HandOver,
    retired: &mut Vec<Uuid>,
    known: impl Fn(Uuid) -> Option<PathBuf>,
    options: &OpenOptions,
) -> Result<StartedDisk, FileError> {
    let HandOver { sound, failed, .. } = handed;
    let (first, others): (Vec<_>, Vec<_>) = sound.into_iter().partition(|it| it.first_byte == 0);
    let first = first.into_iter().next();
    let file = first.ok_or_else(|| FileError::InUse(path.into()))?.file;
    let reader = buffered(&file, path)?;
    let blocks = superblocks_of(path, &reader)?;
    let block = read_superblock_of(path, &reader)?;
    let failed = further_devices::retire(&blocks, &failed, retired);
    let found = further_devices::take_over(path, blocks, others, &failed, known)?;
    let first = NewDevice {
        file,
        bytes: 0..block.geometry.pool_bytes as usize,
        head_len: block.geometry.frames.start as usize,
        frame_table: block.geometry.frame_table.bytes(),
    };
    start_with(path, Some(first), (found, failed), options)
}

/// Starts the disks behind a pool in memory. None if it has none, and needs none.
pub(crate) fn start_behind(
    path: &Path,
    mapped: &MappedMedia,
    options: &OpenOptions,
) -> Result<Option<StartedDisk>, FileError> {
    let (file, named) = (mapped.file(), &options.devices);
    let failed = further_devices::failed(path, file, &options.failed_devices, named)?;
    let found = further_devices::find(path, file, named, &failed, BRICK_PATIENCE)?;
    if found.is_empty() && failed.is_empty() && !options.takes_disks {
        return Ok(None);
    }
    start_with(path, None, (found, failed), options).map(Some)
}

/// Starts a disk, and attaches the further devices that were found.
fn start_with(
    path: &Path,
    first: Option<NewDevice>,
    (found, failed): (Vec<FoundDevice>, Vec<Uuid>),
    options: &OpenOptions,
) -> Result<StartedDisk, FileError> {
    let disk = start_disk(path, first, options)?;
    for device in &found {
        device.attach(&disk.data())?;
    }
    Ok(StartedDisk {
        disk,
        found,
        failed,
    })
}

fn start_disk(
    path: &Path,
    first: Option<NewDevice>,
    options: &OpenOptions,
) -> Result<Arc<Disk>, FileError> {
    let options = DiskOptions {
        cache_bytes: options.memory_budget,
        limits: options.request_limits,
    };
    let started = Disk::start(first, options).map(Arc::new);
    started.map_err(|cause| FileError::Map {
        path: path.into(),
        cause,
    })
}
