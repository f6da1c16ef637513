//! The file or block device that becomes a further device of a pool.
//!
//! Invariants: a file is locked before the first byte of it is read or written, and as long as the pool has the device.
//! An existing plain file is never taken: only a new one, or a block device that nothing uses.

use crate::block_device::{self, open_claimed};
use crate::device_error::DeviceError;
use crate::file::{self, FileError, open_file, system};
use crate::further_devices::identify;
use crate::new_file::{NewFile, dir_of};
use crate::resource_limits;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Durability, MappedMedia, Media};
use pagemesh_store::devices::Device;
use pagemesh_store::pool::PreparedDevice;
use pagemesh_store::pool_mapping::PoolMapping;
use rustix::fs::{FallocateFlags, FileType, FlockOperation, Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use uuid::Uuid;

/// Bytes at the start of a device that identify it: its header and the copy.
const HEADER_BYTES: usize = 2 * PAGE_BYTES;

/// Why a file or block device cannot join a pool.
#[derive(Debug, thiserror::Error)]
pub enum DeviceFileError {
    /// The system refused, or the file is in use.
    #[error(transparent)]
    File(#[from] FileError),
    /// The brick's directory is not known to the caller.
    #[error("{0} is not an absolute path; write the whole path on the brick's host")]
    NotAbsolute(PathBuf),
    /// Nothing is at the path, and nothing says how large a new file would be.
    #[error("{0} does not exist; check the path, or give a size to create a file there")]
    Missing(PathBuf),
    /// Neither a plain file nor a block device.
    #[error("{0} is neither a block device nor a plain file; name one of them")]
    WrongKind(PathBuf),
    /// A device shorter than the size that was asked for.
    #[error(
        "{path} has {found} bytes, fewer than {wanted}; choose a smaller size, or give none to use all of it"
    )]
    TooShort {
        /// The block device.
        path: PathBuf,
        /// The size asked for.
        wanted: u64,
        /// Its size.
        found: u64,
    },
    /// The device belongs to this pool already.
    #[error("{0} is a device of this pool already; `pagemesh pool device list` shows its devices")]
    IsMember(PathBuf),
    /// The device belongs to a pool.
    #[error(
        "{path} is a device of the pool {pool}; drain it there, or if nothing on it is needed, clear its first 8 KiB \
         (dd if=/dev/zero of={path} bs=4096 count=2) and try again"
    )]
    HoldsDevice {
        /// The file.
        path: PathBuf,
        /// The pool in its header.
        pool: Uuid,
    },
    /// A disk with partitions, which may hold data.
    #[error(
        "{0} has partitions, and all of them would be overwritten; name one of them, or if nothing on the disk is needed, \
         delete them (wipefs --all {0}) and try again"
    )]
    HasPartitions(PathBuf),
    /// A partition of a disk of this pool.
    #[error("{0} is a partition of a disk that is a device of this pool; name another device")]
    OnMember(PathBuf),
    /// A medium that forgets, for a pool that does not.
    #[error(
        "{path} is in memory and loses its data when the machine restarts, and the pool is of class {class}; name a file or device on a disk"
    )]
    Volatile {
        /// The file.
        path: PathBuf,
        /// The class of the pool.
        class: Durability,
    },
}

/// A locked file or block device.
pub(crate) struct DeviceFile<'p> {
    path: &'p Path,
    pub(crate) file: File,
    /// The size that the pool uses, whole pages.
    pub(crate) bytes: u64,
    new: Option<NewFile<'p>>,
}

impl<'p> DeviceFile<'p> {
    /// Opens and locks a block device, or begins a plain file, which has no name yet.
    pub(crate) fn open(
        path: &'p Path,
        size: Option<u64>,
    ) -> Result<DeviceFile<'p>, DeviceFileError> {
        if !path.is_absolute() {
            return Err(DeviceFileError::NotAbsolute(path.into()));
        }
        let Ok(found) = path.metadata() else {
            let Some(bytes) = size.filter(|_| !is_in_dev(path)) else {
                return Err(DeviceFileError::Missing(path.into()));
            };
            let new = NewFile::create(path)?;
            let file = new.file.try_clone().map_err(system("open", path))?;
            lock(path, &file)?;
            return Ok(DeviceFile {
                path,
                file,
                bytes: whole_pages(bytes),
                new: Some(new),
            });
        };
        let kind = found.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(DeviceFileError::WrongKind(path.into()));
        }
        check_holds_nothing(path, &open_file(path)?)?;
        if kind.is_file() {
            return Err(FileError::Exists(path.into()).into());
        }
        if block_device::has_partitions(path) {
            return Err(DeviceFileError::HasPartitions(path.into()));
        }
        let file = open_claimed(path, Duration::ZERO)?;
        lock(path, &file)?;
        let found = file::length(path, &file)?.unwrap_or(0);
        let wanted = size.unwrap_or(found);
        if found < wanted {
            let path = path.into();
            return Err(DeviceFileError::TooShort {
                path,
                wanted,
                found,
            });
        }
        Ok(DeviceFile {
            path,
            file,
            bytes: whole_pages(wanted),
            new: None,
        })
    }

    /// Allocates a new file, and checks that the medium keeps the promise of the pool's class.
    pub(crate) fn prepare(&self, class: Durability) -> Result<(), DeviceFileError> {
        let (path, bytes) = (self.path, self.bytes);
        if self.new.is_some() {
            let limited = resource_limits::check_file(dir_of(path), bytes);
            limited.map_err(|cause| FileError::NoRoom {
                path: path.into(),
                cause,
            })?;
            rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, bytes)
                .map_err(|cause| system("allocate", path)(cause.into()))?;
        }
        let file = self.file.try_clone().map_err(system("open", path))?;
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let media = MappedMedia::new(file, len).map_err(|cause| FileError::Map {
            path: path.into(),
            cause,
        })?;
        if media.durability() == Durability::Process && class != Durability::Process {
            let path = path.into();
            return Err(DeviceFileError::Volatile { path, class });
        }
        Ok(())
    }

    /// Writes the tables of a device without data. The pool does not use it yet, so an error refuses the device only.
    pub(crate) fn write_tables<M: Media>(
        &self,
        mapping: &PoolMapping<M>,
        planned: Device,
    ) -> Result<PreparedDevice, DeviceError> {
        let failed = |cause| DeviceFileError::from(system("write the tables of", self.path)(cause));
        let prepared = PreparedDevice::write_with(mapping, planned, |at, page| {
            self.file
                .write_all_at(page, at)
                .map_err(failed)
                .map_err(DeviceError::from)
        })?;
        self.file.sync_all().map_err(failed)?;
        Ok(prepared)
    }

    /// Gives a new file its name.
    pub(crate) fn persist(self) -> Result<NamedDevice<'p>, DeviceFileError> {
        let is_new = self.new.is_some();
        if let Some(new) = self.new {
            new.persist()?;
        }
        Ok(NamedDevice {
            path: self.path,
            file: Some(self.file),
            is_new,
            is_kept: false,
        })
    }
}

/// A device with a name. Dropping it removes a new file, unless it was kept.
pub(crate) struct NamedDevice<'p> {
    path: &'p Path,
    file: Option<File>,
    is_new: bool,
    is_kept: bool,
}

impl NamedDevice<'_> {
    /// Removes a new file, because the pool cannot have it.
    pub(crate) fn discard(&mut self) {
        if std::mem::take(&mut self.is_new) {
            // The error to report is the first one.
            let _ = std::fs::remove_file(self.path);
        }
    }

    /// Another handle of the open file, with its lock.
    pub(crate) fn file(&self) -> Result<File, FileError> {
        let file = self.file.as_ref().map(File::try_clone);
        let file = file.unwrap_or_else(|| Err(std::io::ErrorKind::NotFound.into()));
        file.map_err(system("open", self.path))
    }

    /// The pool may have the device.
    pub(crate) fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for NamedDevice<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.discard();
        }
    }
}

fn whole_pages(bytes: u64) -> u64 {
    bytes / PAGE_BYTES as u64 * PAGE_BYTES as u64
}

/// Whether a new plain file would lie among the device nodes. A name there that does not exist is a mistake, but for
/// /dev/shm.
fn is_in_dev(path: &Path) -> bool {
    path.starts_with("/dev") && !path.starts_with("/dev/shm")
}

fn lock(path: &Path, file: &File) -> Result<(), FileError> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(FileError::InUse(path.into())),
        Err(cause) => Err(system("lock", path)(cause.into())),
    }
}

/// Refuses a file that holds a pool or a device of one.
pub(crate) fn check_holds_nothing(path: &Path, file: &File) -> Result<(), DeviceFileError> {
    if file::read_superblock_of(path, file).is_ok() {
        return Err(FileError::HoldsPool(path.into()).into());
    }
    match identify(file) {
        Some(found) => Err(DeviceFileError::HoldsDevice {
            path: path.into(),
            pool: found.pool,
        }),
        None => Ok(()),
    }
}

/// Opens a path that should be a device of a pool. A path may come from a damaged superblock: anything but a plain file or
/// a block device is refused before it is opened, because an open may block or change something (a FIFO, a terminal, a tape).
pub(crate) fn open_device(path: &Path) -> Result<File, FileError> {
    let refused = |cause: rustix::io::Errno| system("open", path)(cause.into());
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let node = rustix::fs::open(path, flags, Mode::empty()).map_err(refused)?;
    let status = rustix::fs::fstat(&node).map_err(refused)?;
    let kind = FileType::from_raw_mode(status.st_mode);
    if kind != FileType::RegularFile && kind != FileType::BlockDevice {
        let cause = "it is neither a block device nor a plain file";
        let cause = io::Error::new(io::ErrorKind::InvalidInput, cause);
        return Err(system("open", path)(cause));
    }
    // The file of that look. The path may name another one by now.
    let link = format!("/proc/self/fd/{}", node.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::open(link, flags, Mode::empty()).map_err(refused)?;
    // Requests wait for the device.
    let flags = rustix::fs::fcntl_getfl(&file).map_err(refused)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(refused)?;
    Ok(file.into())
}

/// Whether a path is a partition of a disk.
pub(crate) fn is_partition_of(path: &Path, disk: &Path) -> bool {
    let disk = block_device::device_number(disk);
    disk.is_some() && block_device::disk_of_partition(path) == disk
}

/// Whether two paths are one file or one device.
pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    let (Ok(one), Ok(other)) = (one.metadata(), other.metadata()) else {
        return false;
    };
    let is_device = one.file_type().is_block_device() && other.file_type().is_block_device();
    match is_device {
        true => one.rdev() == other.rdev(),
        false => (one.dev(), one.ino()) == (other.dev(), other.ino()),
    }
}

/// Clears the header of a device that has left its pool, so that it can join another one.
pub(crate) fn clear_header(path: &Path, pool: Uuid, device: Uuid) -> Result<(), FileError> {
    let file = open_device(path)?;
    lock(path, &file)?;
    if identify(&file).is_none_or(|it| (it.pool, it.device) != (pool, device)) {
        return Ok(());
    }
    file.write_all_at(&[0; HEADER_BYTES], 0)
        .and_then(|()| file.sync_data())
        .map_err(system("clear the header of", path))
}
