//! The devices of a failed disk that go on without the ones that have failed.
//!
//! A request to a failed device may never end, and then the disk keeps its threads, its memory and its open files. The next
//! disk has the sound devices by the same open files, so they stay locked and claimed all the time.
//!
//! Invariant: when a device is handed over, no write and no FLUSH of the failed disk is in flight on it, and none begins
//! later. So no old request changes bytes that the next disk has written.

use super::device_map::DiskDevice;
use super::media::Disk;
use crate::map_error::MapError;
use crate::mapped_media::system;
use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

/// The pause between two looks at the requests in flight.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// A device that goes on.
#[derive(Debug)]
pub struct SoundDevice {
    /// Its first byte in the disk.
    pub first_byte: usize,
    /// Its open file, with its lock. Requests may go past the page cache.
    pub file: File,
}

/// The devices of a failed disk.
#[derive(Debug)]
pub struct HandOver {
    /// Those that go on, with the first device.
    pub sound: Vec<SoundDevice>,
    /// The first bytes of those that have failed, none of them the first device.
    pub failed: Vec<usize>,
}

impl Disk {
    /// Whether the disk has failed, and only by further devices: the others can go on.
    #[must_use]
    pub fn can_hand_over(&self) -> bool {
        !self.failed_devices().is_empty()
    }

    fn failed_devices(&self) -> Vec<usize> {
        let parts = self.parts();
        if !parts.failure.is_of_device() {
            return Vec::new();
        }
        let failed = parts.devices.iter().filter(|device| device.has_failed());
        let failed: Vec<usize> = failed.map(|device| device.bytes.start).collect();
        match failed.contains(&0) {
            true => Vec::new(),
            false => failed,
        }
    }

    /// Gives away the sound devices of a failed disk. Waits at most `limit` for their writes.
    ///
    /// # Errors
    /// When the disk has not failed by further devices alone, or writes of a sound device do not end in time.
    pub fn hand_over(&self, limit: Duration) -> Result<HandOver, MapError> {
        let refused = |cause: io::Error| system("hand over the devices")(cause);
        if !self.can_hand_over() {
            let cause = "the first device has failed, or the disk as a whole";
            return Err(refused(io::Error::other(cause)));
        }
        let parts = self.parts();
        // The listener of the failure may run before the writer knows of it.
        parts.queue.fail();
        let end = Instant::now() + limit;
        let is_changing = |device: &DiskDevice| !device.has_failed() && device.is_changing();
        while parts.devices.iter().any(is_changing) {
            if Instant::now() >= end {
                let cause = "writes of another device have not ended";
                return Err(refused(io::Error::new(io::ErrorKind::TimedOut, cause)));
            }
            std::thread::sleep(LOOK_PAUSE);
        }
        // A write that was waited for may have failed.
        let failed = self.failed_devices();
        if failed.is_empty() {
            return Err(refused(io::Error::other("the first device has failed too")));
        }
        let mut sound = Vec::new();
        for device in parts
            .devices
            .iter()
            .filter(|it| !failed.contains(&it.bytes.start))
        {
            if let Some(file) = device.share_file().map_err(refused)? {
                let first_byte = device.bytes.start;
                sound.push(SoundDevice { first_byte, file });
            }
        }
        Ok(HandOver { sound, failed })
    }
}
