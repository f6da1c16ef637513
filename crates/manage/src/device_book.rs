//! The devices that a brick reports, and the requests to change them.

use crate::wire::{
    BrickDevice, BrickDevices, DeviceChange, DeviceRequest, DeviceRequestInfo, DeviceRequestState,
    DeviceState,
};
use std::collections::VecDeque;
use uuid::Uuid;

/// Requests to one brick without a result, at most.
pub(crate) const DEVICE_REQUESTS_MAX: usize = 4;
/// Requests with a result that the manager remembers of each brick.
const ENDED_MAX: usize = 16;

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

    /// The last requests, with their results.
    pub(crate) fn requests(&self) -> Vec<DeviceRequestInfo> {
        self.requests.iter().map(|it| it.info.clone()).collect()
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
    pub(crate) fn ask(
        &mut self,
        id: Uuid,
        change: DeviceChange,
        actor: &str,
    ) -> Option<DeviceRequestInfo> {
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
    pub(crate) fn will_drain(&self, device: &BrickDevice) -> bool {
        let asked = |it: &&TrackedRequest| it.is_pending() && it.info.device == Some(device.device);
        match self.requests.iter().rfind(asked) {
            Some(last) => matches!(last.info.change, DeviceChange::Drain { .. }),
            None => device.state == DeviceState::Draining || device.drain.is_some(),
        }
    }
}

impl TrackedRequest {
    fn is_pending(&self) -> bool {
        self.info.state == DeviceRequestState::Pending
    }
}
