//! The file or block device below a disk.

#[cfg(feature = "test-api")]
mod simulated;

use super::watch::WatchedRequests;
use crate::map_error::MapError;
use crate::mapped_media::system;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    Read,
    Write,
}

/// The write cache of a device, by its own report (`queue/write_cache`, Documentation/ABI/stable/sysfs-block).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCache {
    /// It has none, or one that survives power loss.
    None,
    /// It loses acknowledged writes with its power until a FLUSH.
    Volatile,
    /// It does not say.
    Unknown,
}

/// The properties that a device reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Bytes.
    pub len: u64,
    /// Its write cache; for a plain file, of the device below its file system.
    pub write_cache: WriteCache,
    /// Whether a sync needs fdatasync. A file system needs it also above a device without write cache: for its metadata.
    pub needs_flush: bool,
    /// Whether its file system sends no FLUSH to the device (mount options `nobarrier`, `barrier=0`).
    pub has_no_barrier: bool,
    /// Whether requests go past the kernel's page cache.
    pub is_direct: bool,
}

/// A file or block device, open for requests of whole pages.
pub(super) struct Device {
    file: File,
    /// For messages.
    name: String,
    facts: DeviceFacts,
    /// The requests to all devices of the disk.
    watched: Arc<WatchedRequests>,
    /// Its first byte in the disk.
    first_byte: u64,
    has_warned: AtomicBool,
    #[cfg(feature = "test-api")]
    log: Option<super::device_log::LoggedDevice>,
    #[cfg(feature = "test-api")]
    plan: Option<Arc<super::device_plan::DevicePlan>>,
    #[cfg(feature = "test-api")]
    simulated: Option<simulated::SimulatedUser>,
}

impl Device {
    /// Takes an open file, and has its requests go past the page cache where its file system can. The lock of its open file
    /// description (flock(2)) then lasts as long as requests of a process that has ended.
    ///
    /// # Errors
    /// When the system refuses.
    pub(super) fn open(file: &File) -> Result<Device, MapError> {
        let link = format!("/proc/self/fd/{}", file.as_raw_fd());
        let name = std::fs::read_link(&link).unwrap_or_else(|_| link.into());
        let file = file.try_clone().map_err(system("share the medium"))?;
        let is_direct = match set_direct(&file) {
            Ok(()) => true,
            // The file systems without direct requests refuse the flag (fcntl(2)).
            Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => false,
            Err(cause) => return Err(system("open the medium for direct requests")(cause)),
        };
        let status = file.metadata().map_err(system("look at the medium"))?;
        let is_device = status.file_type().is_block_device();
        let number = if is_device {
            status.rdev()
        } else {
            status.dev()
        };
        let write_cache = write_cache(number);
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let facts = DeviceFacts {
            len: length(&file)?,
            write_cache,
            needs_flush: !is_device || write_cache != WriteCache::None,
            has_no_barrier: !is_device && has_no_barrier(&mounts, number),
            is_direct,
        };
        let device = Device {
            file,
            name: name.display().to_string(),
            facts,
            watched: Arc::new(WatchedRequests::new()),
            first_byte: 0,
            has_warned: AtomicBool::new(false),
            #[cfg(feature = "test-api")]
            log: super::device_log::LoggedDevice::take_next(),
            #[cfg(feature = "test-api")]
            plan: super::device_plan::DevicePlan::take_next(),
            #[cfg(feature = "test-api")]
            simulated: None,
        };
        device.report_facts();
        Ok(device)
    }

    fn report_facts(&self) {
        let name = &self.name;
        match self.facts.write_cache {
            WriteCache::None => tracing::info!(
                %name,
                "the device reports no volatile write cache, and is trusted: if the report is wrong, a loss of power \
                 loses flushed writes"
            ),
            WriteCache::Volatile => tracing::info!(
                %name, "the device reports a volatile write cache; each sync ends with a FLUSH"
            ),
            WriteCache::Unknown => tracing::info!(
                %name, "the write cache of the device is unknown; each sync ends with a FLUSH"
            ),
        }
        if self.facts.has_no_barrier && self.facts.write_cache != WriteCache::None {
            tracing::warn!(
                %name,
                "the file system below the pool is mounted without barriers, so no FLUSH reaches the device: a loss \
                 of power loses flushed writes; mount it without nobarrier and barrier=0"
            );
        }
    }

    /// The properties that the device reports.
    pub(super) fn facts(&self) -> DeviceFacts {
        self.facts
    }

    /// The name of the file, for messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The same device at a byte of a disk whose requests are watched.
    pub(super) fn placed_at(self, first_byte: usize, watched: &Arc<WatchedRequests>) -> Device {
        Device {
            first_byte: first_byte as u64,
            watched: watched.clone(),
            ..self
        }
    }

    /// The disk's byte of a byte of the device.
    pub(super) fn byte_in_disk(&self, offset: u64) -> u64 {
        self.first_byte + offset
    }

    /// Waits until the writes that have ended survive power loss.
    ///
    /// # Errors
    /// When the device fails.
    pub(super) fn flush(&self) -> Result<(), MapError> {
        #[cfg(feature = "test-api")]
        if let Some(log) = &self.log {
            log.push_flush_start();
        }
        let flushed = self.watched.watch(self.first_byte, || self.fdatasync());
        flushed.map_err(system("flush the medium (fdatasync)"))?;
        #[cfg(feature = "test-api")]
        if let Some(log) = &self.log {
            log.push_flush();
        }
        Ok(())
    }

    fn fdatasync(&self) -> io::Result<()> {
        #[cfg(feature = "test-api")]
        if let Some(result) = self.flush_simulated() {
            return result;
        }
        #[cfg(feature = "test-api")]
        if let Some(result) = self.planned_result(super::PlannedRequest::Flush, 0, 0) {
            return Err(io::Error::from_raw_os_error(-result));
        }
        if !self.facts.needs_flush {
            return Ok(());
        }
        // SAFETY: the descriptor is open as long as `self`.
        match unsafe { libc::fdatasync(self.file.as_raw_fd()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Reads aligned bytes. Blocks.
    ///
    /// # Errors
    /// When the device fails.
    pub(super) fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.watched.watch(self.byte_in_disk(offset), || {
            #[cfg(feature = "test-api")]
            if let Some(result) = self.read_simulated(bytes, offset) {
                return result;
            }
            #[cfg(feature = "test-api")]
            match self.planned_result(super::PlannedRequest::Read, offset, bytes.len()) {
                None => {}
                Some(code @ ..0) => return Err(io::Error::from_raw_os_error(-code)),
                Some(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
            self.file.read_exact_at(bytes, offset)
        })
    }

    /// Whether a simulation plays the device.
    pub(super) fn is_simulated(&self) -> bool {
        #[cfg(feature = "test-api")]
        return self.simulated.is_some();
        #[cfg(not(feature = "test-api"))]
        false
    }

    /// Whether a test plays a system without io_uring.
    pub(super) fn refuses_io_uring(&self) -> bool {
        #[cfg(feature = "test-api")]
        if let Some(plan) = &self.plan {
            return plan.refuses_ring();
        }
        false
    }

    /// Whether a test plays a system without threads to flush it.
    #[cfg(feature = "test-api")]
    pub(super) fn refuses_threads(&self) -> bool {
        let plan = self.plan.as_ref();
        plan.is_some_and(|plan| plan.refuses_flush_threads())
    }

    /// Warns, once, that the system refuses io_uring.
    pub(super) fn warn_of_refusal(&self, cause: &io::Error) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                %cause, name = %self.name,
                "the system refuses io_uring, so the disk gets one request of a connection at a time, which is slower; \
                 `sysctl kernel.io_uring_disabled=0` permits it, in a container a seccomp profile that allows \
                 io_uring_setup, and before Linux 5.12 a higher limit of locked memory (ulimit -l)"
            );
        }
    }

    /// The planned result of a request.
    #[cfg(feature = "test-api")]
    pub(super) fn planned_result(
        &self,
        request: super::PlannedRequest,
        offset: u64,
        len: usize,
    ) -> Option<i32> {
        self.plan.as_ref()?.result_of(request, offset, len)
    }

    /// A descriptor that becomes readable at the end of a request of a ring that hangs by plan.
    #[cfg(feature = "test-api")]
    pub(super) fn planned_hang(
        &self,
        request: super::PlannedRequest,
        offset: u64,
        len: usize,
    ) -> Option<std::os::fd::RawFd> {
        self.plan.as_ref()?.hang_of(request, offset, len)
    }

    /// Notes a write that is about to start.
    #[cfg(feature = "test-api")]
    pub(super) fn note_write(&self, offset: u64, bytes: impl FnOnce() -> Vec<u8>) {
        if let Some(log) = &self.log {
            log.push_write(offset, bytes());
        }
    }

    /// Notes a write that has ended.
    #[cfg(feature = "test-api")]
    pub(super) fn note_write_end(&self, offset: u64, len: usize) {
        if let Some(log) = &self.log {
            log.push_write_end(offset, len);
        }
    }

    /// The open file.
    pub(super) fn file(&self) -> &File {
        &self.file
    }
}

fn set_direct(file: &File) -> io::Result<()> {
    let fd = file.as_raw_fd();
    // SAFETY: the descriptor is open as long as `file`.
    let set = unsafe {
        match libc::fcntl(fd, libc::F_GETFL) {
            -1 => -1,
            flags => libc::fcntl(fd, libc::F_SETFL, flags | libc::O_DIRECT),
        }
    };
    match set {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn length(mut file: &File) -> Result<u64, MapError> {
    use std::io::{Seek, SeekFrom};
    file.seek(SeekFrom::End(0))
        .map_err(system("measure the medium"))
}

/// The write cache of a block device.
fn write_cache(device: u64) -> WriteCache {
    let base = device_dir(device);
    // A partition has the queue of its disk.
    let queue = [base.join("queue"), base.join("../queue")];
    let read = |dir: &PathBuf| std::fs::read_to_string(dir.join("write_cache")).ok();
    match queue.iter().find_map(read).as_deref().map(str::trim) {
        Some("write through") => WriteCache::None,
        Some("write back") => WriteCache::Volatile,
        _ => WriteCache::Unknown,
    }
}

fn device_dir(device: u64) -> PathBuf {
    let (major, minor) = (libc::major(device), libc::minor(device));
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// Whether the mount of a device has an option against barriers, by lines of proc_pid_mountinfo(5).
fn has_no_barrier(mounts: &str, device: u64) -> bool {
    let number = format!("{}:{}", libc::major(device), libc::minor(device));
    let is_it = |line: &&str| line.split(' ').nth(2) == Some(&number);
    let options = |line: &str| {
        let mut words = line.rsplit(' ').next().unwrap_or_default().split(',');
        words.any(|word| word == "nobarrier" || word == "barrier=0")
    };
    mounts.lines().filter(is_it).any(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_without_barriers_is_found() {
        let mounts = "36 35 98:0 / /a rw,noatime shared:1 - ext4 /dev/a rw,errors=continue\n\
                      37 35 98:1 / /b rw - ext4 /dev/b rw,nobarrier\n\
                      38 35 98:2 / /c rw - ext4 /dev/c rw,barrier=0,data=ordered\n";
        let found = [0, 1, 2, 3].map(|minor| has_no_barrier(mounts, libc::makedev(98, minor)));
        assert_eq!(found, [false, true, true, false]);
    }
}
