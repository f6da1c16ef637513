//! The devices of a pool, as reported, and the progress of drains.

use super::rate::MoveRate;
use super::{FAILED_PAUSE, FAILED_PAUSE_MAX, RETRY_PAUSE};
use crate::brick::Brick;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use pagemesh_store::devices::{Device, DeviceState};
use std::collections::HashMap;
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
    /// Errors that the brick has survived since its process started, and opened the pool again for.
    pub errors: u64,
    /// The time since the last one.
    pub last_error_age: Option<Duration>,
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
    /// When the next pass may begin.
    due: Option<Instant>,
}

impl DrainRecord {
    pub(super) fn new(now: Instant) -> DrainRecord {
        DrainRecord {
            began: now,
            rate: MoveRate::new(now),
            problem: None,
            last_pause: None,
            due: None,
        }
    }

    /// The time until the next pass may begin.
    pub(super) fn wait(&self, now: Instant) -> Duration {
        self.due
            .map_or(Duration::ZERO, |due| due.saturating_duration_since(now))
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
        let doubled = self.last_pause.map(|it| (it * 2).min(FAILED_PAUSE_MAX));
        let pause = match state {
            DeviceState::Failed => *self.last_pause.insert(doubled.unwrap_or(FAILED_PAUSE)),
            _ => RETRY_PAUSE,
        };
        self.due = Some(Instant::now() + pause);
        pause
    }

    /// The next pause of a failed device is the shortest again.
    pub(super) fn reset_pause(&mut self) {
        self.last_pause = None;
        self.due = None;
    }
}

/// The device to drain next, and the time until its next pass: the one that may proceed first. One that has failed leaves
/// if the operator wants that, after the others.
pub(super) fn next_to_drain(
    devices: impl Iterator<Item = (Uuid, DeviceState)>,
    drains: &HashMap<Uuid, DrainRecord>,
    now: Instant,
) -> Option<(Uuid, Duration)> {
    let leaving = devices.filter(|(id, state)| match state {
        DeviceState::Active => false,
        DeviceState::Draining => true,
        DeviceState::Failed => drains.contains_key(id),
    });
    let wait_of = |id| drains.get(&id).map_or(Duration::ZERO, |it| it.wait(now));
    let waits = leaving.map(|(id, state)| (id, wait_of(id), state == DeviceState::Failed));
    let next = waits.min_by_key(|(_, wait, has_failed)| (*wait, *has_failed));
    next.map(|(id, wait, _)| (id, wait))
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
            // An error of the first device ends the brick.
            errors: 0,
            last_error_age: None,
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
            let errors = work.errors.get(&device.id);
            DeviceStatus {
                id: device.id,
                path: work.paths.get(&device.id).cloned(),
                is_first: false,
                size_bytes: device.pages * PAGE_BYTES as u64,
                used_bytes,
                state: device.state,
                errors: errors.map_or(0, |it| it.count),
                last_error_age: errors.map(|it| now.saturating_duration_since(it.last)),
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
    #[test]
    fn blocked_drain_holds_back_no_other() {
        let now = Instant::now();
        let ids = [1, 2, 3].map(Uuid::from_u128);
        let states = [
            DeviceState::Failed,
            DeviceState::Draining,
            DeviceState::Draining,
        ];
        let mut drains = HashMap::new();
        let next = |drains: &HashMap<_, _>| {
            let devices = ids.into_iter().zip(states);
            next_to_drain(devices, drains, now).expect("a drain")
        };
        assert_eq!(next(&drains), (ids[1], Duration::ZERO));
        let block = |drains: &mut HashMap<_, DrainRecord>, of: usize| {
            let record = drains.entry(ids[of]);
            let record = record.or_insert_with(|| DrainRecord::new(now));
            record.block(ids[of], states[of], "it is blocked".into());
        };
        block(&mut drains, 1);
        assert_eq!(next(&drains), (ids[2], Duration::ZERO));
        block(&mut drains, 2);
        drains.insert(ids[0], DrainRecord::new(now));
        assert_eq!(next(&drains), (ids[0], Duration::ZERO));
        // All wait, and the first one that was blocked is the next.
        block(&mut drains, 0);
        let (id, wait) = next(&drains);
        assert!(id == ids[1] && wait > Duration::ZERO, "{id} {wait:?}");
        drains.get_mut(&ids[0]).expect("a record").reset_pause();
        assert_eq!(next(&drains), (ids[0], Duration::ZERO));
    }
}
