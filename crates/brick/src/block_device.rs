//! Block devices: claims that keep other users of the kernel away, and partitions.
//!
//! Invariant: a block device of a pool stays claimed (`O_EXCL` of open(2)) for as long as a brick uses it. The kernel then
//! refuses mounts of it, and claims of its partitions or of the disk that it is a part of.

use crate::file::{FileError, LOCK_PAUSE, open_file, system};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Opens a file; a block device with a claim that lasts as long as the file is open. `patience` is the time that an earlier
/// claim has to end.
///
/// # Errors
/// When the kernel or another program uses the device, or the system refuses.
pub(crate) fn open_claimed(path: &Path, patience: Duration) -> Result<File, FileError> {
    let is_device = path
        .metadata()
        .is_ok_and(|found| found.file_type().is_block_device());
    if !is_device {
        return open_file(path);
    }
    open_exclusively(path, path, patience)
}

/// Opens the block device of an open file again, with a claim. Another file stays as it is.
///
/// # Errors
/// As [`open_claimed`].
pub(crate) fn claim(path: &Path, file: File, patience: Duration) -> Result<File, FileError> {
    let found = file.metadata().map_err(system("look at", path))?;
    if !found.file_type().is_block_device() {
        return Ok(file);
    }
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    open_exclusively(Path::new(&link), path, patience)
}

/// `path` is for messages.
fn open_exclusively(link: &Path, path: &Path, patience: Duration) -> Result<File, FileError> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .custom_flags(nix::libc::O_EXCL);
    let began = Instant::now();
    loop {
        match options.open(link) {
            Ok(file) => return Ok(file),
            Err(cause) if cause.kind() != io::ErrorKind::ResourceBusy => {
                return Err(system("open", path)(cause));
            }
            Err(_) if began.elapsed() >= patience => return Err(FileError::Mounted(path.into())),
            Err(_) => std::thread::sleep(LOCK_PAUSE),
        }
    }
}

/// Whether a path is a block device with partitions.
pub(crate) fn has_partitions(path: &Path) -> bool {
    let Some(entries) = sysfs_dir(path).and_then(|dir| dir.read_dir().ok()) else {
        return false;
    };
    let mut entries = entries.flatten();
    entries.any(|entry| entry.path().join("partition").exists())
}

/// The number of the disk that a block device is a partition of.
pub(crate) fn disk_of_partition(path: &Path) -> Option<u64> {
    let dir = sysfs_dir(path)?;
    if !dir.join("partition").exists() {
        return None;
    }
    // The entry is a symbolic link, and the partition lies in the directory of its disk.
    let disk = dir.canonicalize().ok()?;
    let numbers = std::fs::read_to_string(disk.parent()?.join("dev")).ok()?;
    let (major, minor) = numbers.trim().split_once(':')?;
    let (major, minor) = (major.parse().ok()?, minor.parse().ok()?);
    Some(nix::libc::makedev(major, minor))
}

/// The number of a block device.
pub(crate) fn device_number(path: &Path) -> Option<u64> {
    let found = path.metadata().ok()?;
    found.file_type().is_block_device().then(|| found.rdev())
}

fn sysfs_dir(path: &Path) -> Option<PathBuf> {
    let number = device_number(path)?;
    let (major, minor) = (nix::libc::major(number), nix::libc::minor(number));
    Some(format!("/sys/dev/block/{major}:{minor}").into())
}
