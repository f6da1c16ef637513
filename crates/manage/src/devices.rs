//! Devices of bricks' pools: their reports in heartbeats, and requests to change them.
//!
//! Invariants: requests are in memory only, as those of scrubs are. A restarted manager has forgotten them, and the brick
//! carries out each at most once. A repetition of a pending request is the same request.

use crate::call::{RecordTag, etag_text};
use crate::fault::Fault;
use crate::idempotency::{CallStart, CreateAnswer};
use crate::manager::{BrickState, Manager};
use crate::wire::{
    AddDevice, BrickDevice, BrickDevices, DeviceChange, DeviceList, DeviceRequest,
    DeviceRequestInfo, DeviceRequestState, DeviceState, DrainDevice, is_device_path,
};
use pagemesh_base::brick_name::BrickRef;
use std::collections::VecDeque;
use uuid::Uuid;

/// Requests to one brick without a result, at most.
pub(crate) const DEVICE_REQUESTS_MAX: usize = 4;
/// Requests with a result that the manager remembers of each brick.
const ENDED_MAX: usize = 16;
/// Devices in a registration, at most; a pool has 16.
const REPORTED_MAX: usize = 64;
/// The smallest device, as the store's.
const DEVICE_BYTES_MIN: u64 = 2 << 20;

/// The devices of a brick's pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceBook {
    reported: Option<Vec<BrickDevice>>,
    requests: VecDeque<TrackedRequest>,
}

/// A request and its actor.
#[derive(Clone, Debug)]
struct TrackedRequest {
    info: DeviceRequestInfo,
    actor: String,
}

impl DeviceBook {
    /// The devices of the last heartbeat.
    pub(crate) fn list(&self) -> Option<Vec<BrickDevice>> {
        self.reported.clone()
    }

    pub(crate) fn reported(&self) -> Option<&[BrickDevice]> {
        self.reported.as_deref()
    }

    /// The pending requests, for the answer to a heartbeat.
    pub(crate) fn pending(&self) -> Vec<DeviceRequest> {
        let pending = self.requests.iter().filter(|it| it.is_pending());
        let request = |it: &TrackedRequest| DeviceRequest {
            id: it.info.id,
            change: it.info.change.clone(),
        };
        pending.map(request).collect()
    }

    /// The actor of the pending request that a brick reports as carried out or refused.
    pub(crate) fn actor_of(&self, request: Uuid) -> Option<(&DeviceChange, &str)> {
        let mut pending = self.requests.iter().filter(|it| it.is_pending());
        let found = pending.find(|it| it.info.id == request)?;
        Some((&found.info.change, &found.actor))
    }

    /// The actor of a pending request for this change.
    pub(crate) fn actor_of_change(&self, asked: impl Fn(&DeviceChange) -> bool) -> Option<&str> {
        let mut pending = self.requests.iter().filter(|it| it.is_pending());
        let found = pending.find(|it| asked(&it.info.change));
        found.map(|it| it.actor.as_str())
    }

    /// Takes the devices and results of a heartbeat.
    pub(crate) fn note_heartbeat(&mut self, devices: Option<BrickDevices>) {
        let Some(devices) = devices else {
            self.reported = None;
            return;
        };
        for result in devices.results {
            let mut requests = self.requests.iter_mut();
            let asked = requests.find(|it| it.is_pending() && it.info.id == result.request);
            if let Some(asked) = asked {
                asked.info.state = match result.error {
                    None => DeviceRequestState::Done,
                    Some(_) => DeviceRequestState::Failed,
                };
                asked.info.device = result.device.or(asked.info.device);
                asked.info.error = result.error;
            }
        }
        self.reported = Some(devices.list);
        self.forget_ended();
    }

    fn forget_ended(&mut self) {
        let ended = self.requests.iter().filter(|it| !it.is_pending()).count();
        for _ in ENDED_MAX..ended {
            let oldest = self.requests.iter().position(|it| !it.is_pending());
            oldest.map(|at| self.requests.remove(at));
        }
    }

    /// Records a request, or finds the pending one for the same change.
    fn ask(&mut self, id: Uuid, change: DeviceChange, actor: &str) -> Option<DeviceRequestInfo> {
        let mut pending = self.requests.iter().filter(|it| it.is_pending());
        if let Some(same) = pending.clone().find(|it| it.info.change == change) {
            return Some(same.info.clone());
        }
        if pending.nth(DEVICE_REQUESTS_MAX - 1).is_some() {
            return None;
        }
        let device = match &change {
            DeviceChange::Drain { device } | DeviceChange::CancelDrain { device } => Some(*device),
            DeviceChange::Add { .. } | DeviceChange::Other => None,
        };
        let info = DeviceRequestInfo {
            id,
            change,
            state: DeviceRequestState::Pending,
            device,
            error: None,
        };
        self.requests.push_back(TrackedRequest {
            info: info.clone(),
            actor: actor.to_owned(),
        });
        Some(info)
    }

    /// The state of a device after the pending requests.
    fn will_drain(&self, device: &BrickDevice) -> bool {
        let asked = |it: &&TrackedRequest| it.is_pending() && it.info.device == Some(device.device);
        match self.requests.iter().rfind(asked) {
            Some(last) => matches!(last.info.change, DeviceChange::Drain { .. }),
            None => device.state == DeviceState::Draining,
        }
    }
}

impl TrackedRequest {
    fn is_pending(&self) -> bool {
        self.info.state == DeviceRequestState::Pending
    }
}

impl Manager {
    /// The devices of a brick's pool, and the last requests to change them.
    ///
    /// # Errors
    /// When there is no such brick, or it does not report its devices.
    pub fn devices(&self, asked: impl Into<BrickRef>) -> Result<DeviceList, Fault> {
        let book = self.state();
        let brick = book.find_brick(&asked.into())?;
        let devices = brick.devices.list();
        let unknown = || Fault::BrickCannotChangeDevices(brick.record.label());
        let requests = brick.devices.requests.iter();
        Ok(DeviceList {
            alive: self.is_alive(brick),
            devices: devices.ok_or_else(unknown)?,
            requests: requests.map(|it| it.info.clone()).collect(),
        })
    }

    /// Asks a brick to add a file or block device to its pool. The answer to its next heartbeat carries the request.
    ///
    /// # Errors
    /// When there is no such brick, it is dead or of an earlier version, or the request breaks rules.
    pub fn add_device(
        &self,
        asked: impl Into<BrickRef>,
        request: AddDevice,
    ) -> Result<DeviceRequestInfo, Fault> {
        let added = self.add_device_keyed(&asked.into(), request);
        added.map(|answer| answer.reply)
    }

    /// The same, with an entity tag. A repetition of a call with an `Idempotency-Key` gets the first answer again.
    ///
    /// # Errors
    /// The same; also when the key belongs to another call, or the first call still runs.
    pub fn add_device_keyed(
        &self,
        asked: &BrickRef,
        request: AddDevice,
    ) -> Result<CreateAnswer<DeviceRequestInfo>, Fault> {
        check_path(&request)?;
        let running = match self.begin_call(&("devices", asked, &request))? {
            CallStart::Run(running) => running,
            CallStart::Repeated(answer) => return Ok(answer),
        };
        let AddDevice { path, size_bytes } = request;
        let change = DeviceChange::Add { path, size_bytes };
        let (reply, tag) = self.ask_device_change(asked, change, |_| Ok(()))?;
        let etag = etag_text(tag, &reply);
        let mut book = self.state();
        let kept = self.plan_answer(&book, running.as_ref(), &etag, &reply);
        self.commit(&mut book, &kept.writes(), vec![])?;
        self.apply_key_change(&mut book, &kept);
        drop(book);
        Ok(CreateAnswer { reply, etag })
    }

    /// Asks a brick to start or cancel the drain of a device. The answer to its next heartbeat carries the request.
    ///
    /// # Errors
    /// When there is no such brick or device, the brick is dead, the device is the first, or a drain to cancel does not run.
    pub fn drain_device(
        &self,
        asked: impl Into<BrickRef>,
        device: Uuid,
        DrainDevice { cancel }: DrainDevice,
    ) -> Result<DeviceRequestInfo, Fault> {
        let change = match cancel {
            true => DeviceChange::CancelDrain { device },
            false => DeviceChange::Drain { device },
        };
        let check = |brick: &BrickState| {
            let mut devices = brick.devices.reported().into_iter().flatten();
            let label = brick.record.label();
            let Some(found) = devices.find(|it| it.device == device) else {
                return Err(Fault::NoSuchDevice {
                    brick: label,
                    device,
                });
            };
            if found.is_first {
                return Err(Fault::FirstDevice(label));
            }
            if cancel && !brick.devices.will_drain(found) {
                return Err(Fault::NotDraining(device));
            }
            Ok(())
        };
        let asked = self.ask_device_change(&asked.into(), change, check);
        asked.map(|(request, _)| request)
    }

    fn ask_device_change(
        &self,
        asked: &BrickRef,
        change: DeviceChange,
        check: impl FnOnce(&BrickState) -> Result<(), Fault>,
    ) -> Result<(DeviceRequestInfo, RecordTag), Fault> {
        let mut book = self.state();
        let brick = book.find_brick_mut(asked)?;
        let label = brick.record.label();
        self.check_brick_unchanged(&brick.record)?;
        if !self.is_alive(brick) {
            return Err(Fault::BrickDead(label));
        }
        if brick.devices.reported().is_none() {
            return Err(Fault::BrickCannotChangeDevices(label));
        }
        check(brick)?;
        let id = (self.settings.new_id)();
        let request = brick.devices.ask(id, change, &self.call.actor);
        let request = request.ok_or(Fault::TooMany {
            what: "pending requests to change the devices of a brick",
            most: DEVICE_REQUESTS_MAX,
        })?;
        self.feed.mark_brick(brick.record.brick);
        Ok((request, RecordTag::new(&brick.record)))
    }
}

fn check_path(request: &AddDevice) -> Result<(), Fault> {
    if !is_device_path(&request.path) {
        return Err(Fault::invalid_field(
            format!("{:?} is not the path of a device", request.path),
            "write an absolute path on the brick's host, of at most 4095 bytes without control characters",
        ));
    }
    if let Some(bytes) = request.size_bytes.filter(|it| *it < DEVICE_BYTES_MIN) {
        return Err(Fault::invalid_field(
            format!("{bytes} bytes are too small for a device of a pool"),
            "use at least 2 MiB",
        ));
    }
    Ok(())
}

/// Checks the number of devices in a registration.
pub(crate) fn check_devices(devices: &BrickDevices) -> Result<(), Fault> {
    match devices.list.len().max(devices.results.len()) <= REPORTED_MAX {
        true => Ok(()),
        false => Err(Fault::invalid_field(
            "the list of devices is too long",
            "report at most 64 devices and results",
        )),
    }
}
