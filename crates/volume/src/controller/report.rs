//! The controller's reports about the volume.

use super::model::{ColumnEntry, LegEntry, VolumeModel};
use super::state::ControllerState;
use crate::snapshot::{ColumnGate, LayoutSnapshot};
use crate::status::{ColumnStatus, LegStatus, VolumeState, VolumeStatus};
use pagemesh_base::authority::{CopyReport, Resync};
use pagemesh_base::layout::LegState;
use pagemesh_base::poison;
use std::collections::BTreeMap;

pub(super) fn status(state: &ControllerState) -> VolumeStatus {
    let (model, (_, shown)) = (state.model(), state.shared.snapshot());
    let column = |column: &ColumnEntry| ColumnStatus {
        segment: column.segment,
        column: column.number,
        lost_since: column.lost_since.0,
        legs: column
            .legs
            .iter()
            .map(|leg| leg_status(state, leg))
            .collect(),
    };
    VolumeStatus {
        name: state.name.clone(),
        epoch: model.epoch().0,
        state: overall_state(&model, &shown),
        size_bytes: shown.size_bytes,
        channels: poison::lock(&state.shared.members).len().saturating_sub(1),
        columns: model.columns.iter().map(column).collect(),
        counters: state.shared.counters.sums(),
        scrub: state.scrub().status(state.now()),
    }
}

/// The state of the volume. A recovery counts only once its snapshot is published: until then
/// channels still fail requests.
fn overall_state(model: &VolumeModel, shown: &LayoutSnapshot) -> VolumeState {
    let columns = || model.columns.iter();
    let any = |wanted: fn(&LegEntry) -> bool| columns().any(|c| c.legs.iter().any(wanted));
    if model.fenced {
        VolumeState::Fenced
    } else if columns().any(|column| column.gate != ColumnGate::Open)
        || shown
            .columns
            .iter()
            .any(|column| column.gate != ColumnGate::Open)
    {
        VolumeState::Unavailable
    } else if any(LegEntry::is_lost) {
        VolumeState::AwaitingManager
    } else if any(|leg| leg.resync.is_some() || leg.leg.state == LegState::Syncing) {
        VolumeState::Resyncing
    } else if any(|leg| leg.leg.state == LegState::Stale) {
        VolumeState::Degraded
    } else {
        VolumeState::Healthy
    }
}

/// The lag of the replica, the progress of copies in resync, and the snapshots that the replica has got.
pub(super) fn copy_report(state: &ControllerState) -> CopyReport {
    let mut returns = BTreeMap::<usize, Resync>::new();
    for column in &state.model().columns {
        for (copy, keep) in column.legs.iter().enumerate() {
            let Some(resync) = resync(state, keep) else {
                continue;
            };
            let sum = returns.entry(copy).or_default();
            sum.bytes_todo += resync.bytes_todo;
            sum.bytes_done += resync.bytes_done;
            sum.elapsed_ms = sum.elapsed_ms.max(resync.elapsed_ms);
        }
    }
    let lag = state.shared.replication.lag(state.now());
    CopyReport {
        lag,
        resyncs: returns,
        replica_snapshots: state.replica_snapshots.borrow().complete().to_vec(),
    }
}

fn resync(state: &ControllerState, keep: &LegEntry) -> Option<Resync> {
    keep.resync.map(|resync| Resync {
        bytes_todo: resync.todo,
        bytes_done: resync.done,
        elapsed_ms: (state.now().saturating_sub(resync.since)).as_millis() as u64,
    })
}

fn leg_status(state: &ControllerState, keep: &LegEntry) -> LegStatus {
    let shipped = keep.replication_serial();
    LegStatus {
        asynchronous: keep.leg.asynchronous,
        lag: shipped.and_then(|_| state.shared.replication.lag(state.now())),
        brick: keep.leg.brick,
        name: state.model().names.label(keep.leg.brick).name,
        slice: keep.leg.slice,
        state: keep.leg.state,
        last_error: keep.last_error.clone(),
        resync: resync(state, keep),
    }
}
