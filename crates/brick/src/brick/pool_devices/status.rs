//! The devices of a pool, as reported, and the progress of drains.

use super::rate::MoveRate;
use super::{FAILED_PAUSE, FAILED_PAUSE_MAX, RETRY_PAUSE};
use crate::brick::Brick;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use pagemesh_store::devices::{Device, DeviceState};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// A device of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Its id; that of the pool for the first device.
    pub id: Uuid,
    /// Its path, if it is known.
    pub path: Option<PathBuf>,
    /// Whether it is the first device, which stays.
    pub is_first: bool,
    /// Its size.
    pub size_bytes: u64,
    /// Bytes in use at the last checkpoint.
    pub used_bytes: u64,
    /// Its use.
    pub state: DeviceState,
    /// The progress of its drain.
    pub drain: Option<DrainStatus>,
}

/// The progress of a drain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainStatus {
    /// Bytes moved since the drain started or the pool was opened.
    pub moved_bytes: u64,
    /// Bytes moved per second, over the last seconds.
    pub bytes_per_s: u64,
    /// The time since the drain started or the pool was opened.
    pub running: Duration,
    /// Why it does not proceed, if it does not.
    pub problem: Option<String>,
}

/// The progress of a drain, while the brick runs.
pub(super) struct DrainRecord {
    began: Instant,
    pub(super) rate: MoveRate,
    pub(super) problem: Option<String>,
    /// The last pause of a failed device with this problem.
    last_pause: Option<Duration>,
}

impl DrainRecord {
    pub(super) fn new(now: Instant) -> DrainRecord {
        DrainRecord {
            began: now,
            rate: MoveRate::new(now),
            problem: None,
            last_pause: None,
        }
    }

    fn status(&self, now: Instant) -> DrainStatus {
        DrainStatus {
            moved_bytes: self.rate.total(),
            bytes_per_s: self.rate.bytes_per_s(now),
            running: now.saturating_duration_since(self.began),
            problem: self.problem.clone(),
        }
    }

    /// Records why the drain does not proceed. Returns the pause before the next pass. A failed device waits for repairs by
    /// scrubs, and a look at it pauses the sessions: while the reason is the same, the pause doubles.
    pub(super) fn block(&mut self, device: Uuid, state: DeviceState, problem: String) -> Duration {
        if self.problem.as_ref() != Some(&problem) {
            tracing::warn!(%device, %problem, "the drain of a device does not proceed");
            self.reset_pause();
        }
        self.problem = Some(problem);
        if state != DeviceState::Failed {
            return RETRY_PAUSE;
        }
        let doubled = self.last_pause.map(|it| (it * 2).min(FAILED_PAUSE_MAX));
        *self.last_pause.insert(doubled.unwrap_or(FAILED_PAUSE))
    }

    /// The next pause of a failed device is the shortest again.
    pub(super) fn reset_pause(&mut self) {
        self.last_pause = None;
    }
}

impl<M: Media + Send + Sync + 'static> Brick<M> {
    /// The devices of the pool, the first one first.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceStatus> {
        let pool = self.pool();
        let geometry = *self.mapping().geometry();
        let used_bytes = |frames: u64| frames * PAGE_BYTES as u64;
        let first = (self.id().0, used_bytes(pool.first_device_frames_in_use()));
        let others = geometry.devices.iter().map(|device| {
            let used = pool.device_frames_in_use(device.id).unwrap_or(0);
            (*device, used_bytes(used))
        });
        let mut others: Vec<(Device, u64)> = others.collect();
        drop(pool);
        let now = Instant::now();
        let work = self.pool_devices.work();
        let is_listed = |id: Uuid| geometry.devices.iter().any(|it| it.id == id);
        let leaving = work.leaving.filter(|device| !is_listed(device.id));
        others.extend(leaving.map(|device| (device, 0)));
        let mut devices = vec![DeviceStatus {
            id: first.0,
            path: work.paths.get(&first.0).cloned(),
            is_first: true,
            size_bytes: geometry.pool_bytes,
            used_bytes: first.1,
            state: DeviceState::Active,
            drain: None,
        }];
        devices.extend(others.into_iter().map(|(device, used_bytes)| {
            let drain = work.drains.get(&device.id).map(|drain| drain.status(now));
            let drain = match device.state {
                DeviceState::Active => None,
                DeviceState::Draining => Some(drain.unwrap_or_default()),
                // It leaves if the operator wants that.
                DeviceState::Failed => drain,
            };
            DeviceStatus {
                id: device.id,
                path: work.paths.get(&device.id).cloned(),
                is_first: false,
                size_bytes: device.pages * PAGE_BYTES as u64,
                used_bytes,
                state: device.state,
                drain,
            }
        }));
        devices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_of_failed_device_doubles_up_to_a_limit() {
        let now = Instant::now();
        let mut record = DrainRecord::new(now);
        let mut block = |state, problem: &str| record.block(Uuid::nil(), state, problem.into());
        assert_eq!(block(DeviceState::Draining, "draining"), RETRY_PAUSE);
        let mut pauses =
            |problem: &str| [(); 3].map(|()| block(DeviceState::Failed, problem).as_secs());
        assert_eq!(pauses("one"), [10, 20, 40]);
        assert_eq!(pauses("one"), [80, 160, 320]);
        assert_eq!(pauses("one"), [600, 600, 600]);
        assert_eq!(pauses("another"), [10, 20, 40]);
        record.reset_pause();
        let pause = record.block(Uuid::nil(), DeviceState::Failed, "another".into());
        assert_eq!(pause, FAILED_PAUSE);
    }
}
