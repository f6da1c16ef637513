//! The file or block device below a disk.

use crate::map_error::MapError;
use crate::mapped_media::system;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What a device says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Bytes.
    pub len: u64,
    /// Whether it may lose writes that it has acknowledged, until a FLUSH. True if that is unknown.
    pub has_write_cache: bool,
    /// Whether requests go past the kernel's page cache.
    pub is_direct: bool,
}

/// A file or block device, open for requests of whole pages.
pub struct Device {
    file: File,
    facts: DeviceFacts,
    #[cfg(feature = "test-api")]
    log: Option<std::sync::Arc<super::device_log::DeviceLog>>,
}

impl Device {
    /// Opens another description of an open file, past the page cache where its file system can.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn open(file: &File) -> Result<Device, MapError> {
        let own = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let (file, is_direct) = match open_direct(&own) {
            Ok(direct) => (direct, true),
            // The file systems without direct requests refuse the flag (open(2)).
            Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => {
                let mut options = OpenOptions::new();
                let buffered = options.read(true).write(true).open(&own);
                (buffered.map_err(system("open the medium"))?, false)
            }
            Err(cause) => return Err(system("open the medium for direct requests")(cause)),
        };
        let facts = DeviceFacts {
            len: length(&file)?,
            has_write_cache: has_write_cache(&file),
            is_direct,
        };
        Ok(Device {
            file,
            facts,
            #[cfg(feature = "test-api")]
            log: super::device_log::DeviceLog::take_next(),
        })
    }

    /// What the device says of itself.
    #[must_use]
    pub fn facts(&self) -> DeviceFacts {
        self.facts
    }

    /// Waits until the writes that have ended survive power loss.
    ///
    /// # Errors
    /// When the device fails.
    pub(super) fn flush(&self) -> Result<(), MapError> {
        if self.facts.has_write_cache {
            // SAFETY: the descriptor is open as long as `self`.
            if unsafe { libc::fdatasync(self.file.as_raw_fd()) } != 0 {
                let cause = io::Error::last_os_error();
                return Err(system("flush the medium (fdatasync)")(cause));
            }
        }
        #[cfg(feature = "test-api")]
        if let Some(log) = &self.log {
            log.push(super::device_log::DeviceEvent::Flush);
        }
        Ok(())
    }

    /// Notes a write that is about to start.
    #[cfg(feature = "test-api")]
    pub(super) fn note_write(&self, offset: u64, bytes: impl FnOnce() -> Vec<u8>) {
        if let Some(log) = &self.log {
            let bytes = bytes();
            log.push(super::device_log::DeviceEvent::Write { offset, bytes });
        }
    }

    /// The open file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }
}

fn open_direct(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    options.custom_flags(libc::O_DIRECT).open(path)
}

fn length(mut file: &File) -> Result<u64, MapError> {
    use std::io::{Seek, SeekFrom};
    file.seek(SeekFrom::End(0))
        .map_err(system("measure the medium"))
}

/// Whether the device below a file keeps acknowledged writes in a volatile cache, by the kernel's
/// `queue/write_cache` (Documentation/ABI/stable/sysfs-block).
fn has_write_cache(file: &File) -> bool {
    let Ok(found) = file.metadata() else {
        return true;
    };
    // A file's own file system also needs the sync: for its metadata, until the file's blocks are allocated and
    // written.
    if !found.file_type().is_block_device() {
        return true;
    }
    let (major, minor) = (libc::major(found.rdev()), libc::minor(found.rdev()));
    let base = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition has the queue of its disk.
    let queue = [base.join("queue"), base.join("../queue")];
    let read = |dir: &PathBuf| std::fs::read_to_string(dir.join("write_cache")).ok();
    queue.iter().find_map(read).as_deref().map(str::trim) != Some("write through")
}
