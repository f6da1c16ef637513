//! A further device of a pool on disks fails while the brick runs: the brick opens the pool again.
//!
//! A device without a request in flight is tried once more. That is the ordinary opening after a crash, with all devices. At
//! another failure within a day, and at a request that does not end, the pool is opened without the device.
//!
//! That is the ordinary opening with a failed device. The failure ends all answers of the brick before, and its sessions.
//! The recovery then names the device as failed in both superblocks, before anything is served. A crash before that leaves
//! the pool as any crash does, with the device.
//!
//! Invariants: the sound devices and the pool's own lock stay open, so no other brick takes the pool meanwhile. Threads of
//! the brick before may be stuck at the failed device: nothing here waits for them, or for their locks.

use super::{Brick, OpenedBrick, open_on_disk};
use crate::disk_file::{self, OpenOptions};
use crate::file::FileError;
use pagemesh_pmem::{Disk, DiskMedia};
use pagemesh_store::devices::Device;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// A second failure of a device within this time of the first one is for ever.
const SECOND_CHANCE_TIME: Duration = Duration::from_hours(24);

/// The failures of each device of a pool. Only this process knows them: the format has no place for their times.
#[derive(Debug, Default)]
pub struct DeviceFailures(HashMap<Uuid, FailureRecord>);

#[derive(Clone, Copy, Debug)]
struct FailureRecord {
    /// The failure that the second chance was given for.
    first: Instant,
    errors: DeviceErrors,
}

/// The errors of a device that a brick has survived by opening its pool again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceErrors {
    /// Their number, since the start of the process.
    pub count: u64,
    /// The time of the last one.
    pub last: Instant,
}

impl DeviceFailures {
    /// Notes a failure of a device. False if it is the second one within 24 hours.
    pub fn note(&mut self, device: Uuid, now: Instant) -> bool {
        let errors = DeviceErrors {
            count: 1,
            last: now,
        };
        let record = match self.0.entry(device) {
            Entry::Vacant(free) => {
                free.insert(FailureRecord { first: now, errors });
                return true;
            }
            Entry::Occupied(known) => known.into_mut(),
        };
        record.errors.count += 1;
        record.errors.last = now;
        let is_second = now.saturating_duration_since(record.first) < SECOND_CHANCE_TIME;
        if !is_second {
            record.first = now;
        }
        !is_second
    }

    fn errors(&self) -> HashMap<Uuid, DeviceErrors> {
        let errors = self.0.iter().map(|(device, it)| (*device, it.errors));
        errors.collect()
    }
}

impl Brick<DiskMedia> {
    /// Whether the brick has failed, and only by further devices of its pool: [`Brick::reopen`] can go on without them.
    #[must_use]
    pub fn can_reopen(&self) -> bool {
        self.disk().can_hand_over()
    }

    fn disk(&self) -> &Arc<Disk> {
        self.mapping.media().disk()
    }

    /// Opens the pool of this failed brick again: with its failed devices, if all their requests have ended and `failures` has
    /// no earlier failure of them, and else without them, for ever. The caller has ended the connections, or ends them
    /// afterwards: no request of them is executed any more.
    ///
    /// **Data loss:** the pages on devices that are left out are damaged from then on.
    ///
    /// # Errors
    /// When the first device has failed, a request to a sound device does not end, or the pool cannot be recovered.
    pub fn reopen(
        &self,
        path: &Path,
        options: &OpenOptions,
        failures: &mut DeviceFailures,
    ) -> Result<OpenedBrick<DiskMedia>, FileError> {
        let mut disk = self.disk().clone();
        let mut failed: Vec<Uuid> = Vec::new();
        loop {
            let claim = self.share_owner_lock(path)?;
            let mut noted = Vec::new();
            let handed = disk.hand_over(options.request_limits.fail, |first_byte| {
                noted.push(first_byte);
                self.tries_again(first_byte, failures)
            });
            let handed = handed.map_err(|cause| FileError::Map {
                path: path.into(),
                cause,
            })?;
            for first_byte in &handed.failed {
                // A device that hangs gets no second chance.
                if let Some(device) = self
                    .device_at(*first_byte)
                    .filter(|_| !noted.contains(first_byte))
                {
                    failures.note(device.id, Instant::now());
                }
            }
            let known = |device| self.pool_devices.path_of(device);
            let tries_again = !handed.again.is_empty();
            let started = match disk_file::restart(path, handed, &mut failed, known, options) {
                // No device is tried twice.
                Err(cause) if tries_again => {
                    tracing::error!(%cause, "a device that has failed cannot be used again");
                    continue;
                }
                started => started?,
            };
            let opened = open_on_disk(path, &started, |failed| {
                let views = [started.disk.data(), started.disk.overlay()].map(Arc::new);
                Brick::recover(path, views, self.durability, claim, failed)
            });
            match opened {
                // Each turn loses a device, or tries one for the last time.
                Err(FileError::DiskFailed { cause, .. }) if started.disk.can_hand_over() => {
                    tracing::error!(%cause, "another device has failed meanwhile");
                    disk = started.disk;
                }
                Ok(opened) => {
                    opened.0.pool_devices.set_errors(failures.errors());
                    return Ok(opened);
                }
                Err(cause) => return Err(cause),
            }
        }
    }

    fn device_at(&self, first_byte: usize) -> Option<Device> {
        let devices = self.mapping.geometry().devices;
        let mut devices = devices.iter().copied();
        devices.find(|device| device.bytes().start == first_byte)
    }

    /// Whether a failed device is used once more.
    fn tries_again(&self, first_byte: usize, failures: &mut DeviceFailures) -> bool {
        let Some(device) = self.device_at(first_byte) else {
            return false;
        };
        let is_first = failures.note(device.id, Instant::now());
        let path = self.pool_devices.path_of(device.id);
        if is_first {
            tracing::warn!(
                device = %device.id, ?path,
                "a device has failed, and is used once more; check it: after another failure within 24 hours the pool goes on \
                 without it, for ever"
            );
        }
        is_first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_failure_within_a_day_is_for_ever() {
        let (mut failures, start) = (DeviceFailures::default(), Instant::now());
        let [one, other] = [1, 2].map(Uuid::from_u128);
        let day = Duration::from_hours(24);
        assert!(failures.note(one, start));
        assert!(!failures.note(one, start));
        assert!(failures.note(other, start));
        // The day begins with the first one of two.
        assert!(!failures.note(one, start + day / 2));
        assert!(!failures.note(one, start + day - Duration::from_secs(1)));
        assert!(failures.note(one, start + day));
        assert!(!failures.note(one, start + day + day / 2));
    }
}
