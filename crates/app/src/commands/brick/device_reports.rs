//! The devices of a brick's pool in its heartbeats, and the requests in the answers.

use pagemesh_brick::brick::Brick;
use pagemesh_brick::pool_devices::{DeviceChange, DeviceStatus};
use pagemesh_manage::wire::{
    self, BrickDevice, BrickDevices, DeviceRequest, DeviceResult, DrainProgress,
};
use pagemesh_pmem::Media;
use pagemesh_store::devices::DeviceState;
use std::path::PathBuf;
use std::sync::Arc;

/// The devices and the results of requests. True if a request is not carried out yet.
pub fn report<M: Media + Send + Sync + 'static>(brick: &Arc<Brick<M>>) -> (BrickDevices, bool) {
    // Results before devices: the list then has their effects.
    let (results, is_changing) = brick.device_results();
    let results = results.into_iter().map(|it| {
        let (device, error) = match it.outcome {
            Ok(device) => (Some(device), None),
            Err(cause) => (None, Some(cause)),
        };
        DeviceResult {
            request: it.request,
            device,
            error,
        }
    });
    let results = results.collect();
    let list = brick.devices().into_iter().map(wire_device).collect();
    let devices = BrickDevices { list, results };
    // An earlier manager refuses heartbeats with other texts.
    (devices.cleaned(), is_changing)
}

fn wire_device(device: DeviceStatus) -> BrickDevice {
    let drain = device.drain.map(|drain| DrainProgress {
        left_bytes: device.used_bytes,
        moved_bytes: drain.moved_bytes,
        bytes_per_s: drain.bytes_per_s,
        running_s: drain.running.as_secs(),
        problem: drain.problem,
    });
    BrickDevice {
        device: device.id,
        path: device.path.map(|path| path.display().to_string()),
        is_first: device.is_first,
        size_bytes: device.size_bytes,
        used_bytes: device.used_bytes,
        state: match device.state {
            DeviceState::Active => wire::DeviceState::Active,
            DeviceState::Draining => wire::DeviceState::Draining,
            DeviceState::Failed => wire::DeviceState::Failed,
        },
        errors: device.errors,
        last_error_s: device.last_error_age.map(|age| age.as_secs()),
        drain,
    }
}

/// Has the brick carry out requests. It knows the ones that it has got before.
pub fn apply<M: Media + Send + Sync + 'static>(
    brick: &Arc<Brick<M>>,
    requests: Vec<DeviceRequest>,
) {
    for DeviceRequest { id, change } in requests {
        let change = match change {
            wire::DeviceChange::Add { path, size_bytes } => DeviceChange::Add {
                path: PathBuf::from(path),
                size_bytes,
            },
            wire::DeviceChange::Drain { device } => DeviceChange::Drain(device),
            wire::DeviceChange::CancelDrain { device } => DeviceChange::CancelDrain(device),
            wire::DeviceChange::Other => {
                let cause = "the brick does not know this change; run it with the manager's version of pagemesh";
                brick.refuse_device_change(id, cause.to_owned());
                continue;
            }
        };
        brick.request_device_change(id, change);
    }
}
