//! The devices of a failed disk that go on: those that have not failed, and those that the caller tries once more.
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
    /// The first bytes of the failed devices among them, which the caller tries once more.
    pub again: Vec<usize>,
    /// The first bytes of the other ones that have failed, none of them the first device.
    pub failed: Vec<usize>,
}

/// Failed devices, and whether each is tried once more.
struct FailedDevices<'k> {
    /// The caller's decision about a device that has failed and has no request in flight.
    tries_again: &'k mut dyn FnMut(usize) -> bool,
    decided: Vec<usize>,
    again: Vec<usize>,
}

impl FailedDevices<'_> {
    /// Decides about devices that have failed since the last call. False if there is none.
    fn decide(&mut self, disk: &Disk) -> bool {
        let mut failed = disk.failed_devices();
        failed.retain(|first| !self.decided.contains(first));
        for &first in &failed {
            let device = disk.parts().devices.device_of(first);
            if device.is_some_and(|it| !it.is_hung()) && (self.tries_again)(first) {
                self.again.push(first);
            }
        }
        self.decided.extend(&failed);
        !failed.is_empty()
    }

    fn is_again(&self, device: &DiskDevice) -> bool {
        self.again.contains(&device.bytes.start) && !device.is_hung()
    }
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

    /// Gives away the sound devices of a failed disk, and those failed ones that `tries_again` chooses by their first bytes. It
    /// is asked once about each device without a request that hangs. Waits at most `limit` for their writes.
    ///
    /// # Errors
    /// When the disk has not failed by further devices alone, or writes of a sound device do not end in time.
    pub fn hand_over(
        &self,
        limit: Duration,
        mut tries_again: impl FnMut(usize) -> bool,
    ) -> Result<HandOver, MapError> {
        let refused = |cause: io::Error| system("hand over the devices")(cause);
        if !self.can_hand_over() {
            let cause = "the first device has failed, or the disk as a whole";
            return Err(refused(io::Error::other(cause)));
        }
        let parts = self.parts();
        // The listener of the failure may run before the writer knows of it.
        parts.queue.fail();
        let mut chosen = FailedDevices {
            tries_again: &mut tries_again,
            decided: Vec::new(),
            again: Vec::new(),
        };
        let end = Instant::now() + limit;
        let is_changing = |device: &DiskDevice| !device.has_failed() && device.is_changing();
        // A write that is waited for may fail.
        while chosen.decide(self)
            || parts.devices.iter().any(is_changing)
            || (parts.devices.iter()).any(|it| chosen.is_again(it) && it.is_changing())
        {
            if Instant::now() >= end {
                break;
            }
            std::thread::sleep(LOOK_PAUSE);
        }
        if parts.devices.iter().any(is_changing) {
            let cause = "writes of another device have not ended";
            return Err(refused(io::Error::new(io::ErrorKind::TimedOut, cause)));
        }
        let mut failed = self.failed_devices();
        if failed.is_empty() {
            return Err(refused(io::Error::other("the first device has failed too")));
        }
        let (mut sound, mut again) = (Vec::new(), Vec::new());
        for device in parts.devices.iter() {
            let first_byte = device.bytes.start;
            if failed.contains(&first_byte) {
                if !chosen.is_again(device) || device.is_changing() {
                    continue;
                }
                again.push(first_byte);
            }
            if let Some(file) = device.share_file().map_err(refused)? {
                sound.push(SoundDevice { first_byte, file });
            }
        }
        failed.retain(|first| !again.contains(first));
        Ok(HandOver {
            sound,
            again,
            failed,
        })
    }
}
