//! Devices of bricks' pools: their reports in heartbeats, and requests to change them.
//!
//! Invariants: requests are in memory only, as requests for scrubs are. A restarted manager has forgotten them, and the brick
//! carries out each at most once. A repetition of a pending request is the same request.

use crate::call::{RecordTag, etag_text};
use crate::device_book::DEVICE_REQUESTS_MAX;
use crate::fault::Fault;
use crate::idempotency::{CallStart, CreateAnswer};
use crate::manager::{BrickState, Manager};
use crate::wire::{
    AddDevice, BrickDevices, DeviceChange, DeviceList, DeviceRequestInfo, DrainDevice,
    is_device_path,
};
use pagemesh_base::brick_name::BrickRef;
use uuid::Uuid;

/// Devices in a registration, at most; a pool has 16.
const REPORTED_MAX: usize = 64;
/// The smallest device, as the store's.
const DEVICE_BYTES_MIN: u64 = 2 << 20;

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
        Ok(DeviceList {
            alive: self.is_alive(brick),
            devices: devices.ok_or_else(unknown)?,
            requests: brick.devices.requests(),
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
