//! The events of devices of bricks' pools, by comparison of a brick's heartbeats.

use super::draft::EventDraft;
use crate::device_book::DeviceBook;
use crate::records::BrickRecord;
use crate::wire::{BrickDevice, BrickDevices, DeviceChange, DeviceState};

/// The events of a heartbeat. Without an earlier list only drains that do not proceed are reported.
pub(crate) fn device_drafts(
    record: &BrickRecord,
    before: &DeviceBook,
    devices: &BrickDevices,
) -> Vec<EventDraft> {
    let mut drafts = Vec::new();
    for result in &devices.results {
        if let (Some(error), Some((change, actor))) =
            (&result.error, before.actor_of(result.request))
        {
            drafts.push(EventDraft::device_refused(record, actor, change, error));
        }
    }
    let actor =
        |asked: &dyn Fn(&DeviceChange) -> bool| before.actor_of_change(asked).unwrap_or("manager");
    let old_list = before.reported();
    for device in &devices.list {
        let id = device.device;
        let old = old_list.and_then(|list| list.iter().find(|it| it.device == id));
        match (old, device.state) {
            (old, DeviceState::Failed) => {
                let was_failed = old.is_some_and(|old| old.state == DeviceState::Failed);
                if old_list.is_some() && !was_failed {
                    drafts.push(EventDraft::device_failed(record, device));
                }
            }
            (None, _) if old_list.is_some() => {
                let added = |change: &DeviceChange| match change {
                    DeviceChange::Add { path, .. } => device.path.as_ref() == Some(path),
                    _ => false,
                };
                drafts.push(EventDraft::device_added(record, actor(&added), device));
            }
            (Some(old), DeviceState::Draining) if old.state == DeviceState::Active => {
                let drained = |change: &DeviceChange| *change == DeviceChange::Drain { device: id };
                let actor = actor(&drained);
                drafts.push(EventDraft::device_drain_started(record, actor, device));
            }
            (Some(old), DeviceState::Active) if old.state == DeviceState::Draining => {
                let cancelled =
                    |change: &DeviceChange| *change == DeviceChange::CancelDrain { device: id };
                let actor = actor(&cancelled);
                drafts.push(EventDraft::device_drain_cancelled(record, actor, device));
            }
            _ => {}
        }
        if device.state != DeviceState::Failed && old.is_some_and(|old| has_new_error(old, device))
        {
            drafts.push(EventDraft::device_error(record, device));
        }
        if let Some(problem) = problem(device).filter(|_| old.and_then(problem).is_none()) {
            drafts.push(EventDraft::device_drain_failed(record, device, problem));
        }
    }
    let has_left = |old: &&BrickDevice| devices.list.iter().all(|it| it.device != old.device);
    let left = old_list.into_iter().flatten().filter(has_left);
    drafts.extend(left.map(|device| EventDraft::device_drained(record, device)));
    drafts
}

/// A restarted brick counts from 0 again. The age tells its first error from the one before the restart.
fn has_new_error(old: &BrickDevice, device: &BrickDevice) -> bool {
    let is_later = old.last_error_s > device.last_error_s && device.last_error_s.is_some();
    device.errors > old.errors || is_later
}

fn problem(device: &BrickDevice) -> Option<&str> {
    device.drain.as_ref()?.problem.as_deref()
}
