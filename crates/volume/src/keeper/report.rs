//! What the keeper tells about the volume.

use super::model::{ColumnKeep, LegKeep, Model};
use super::state::State;
use crate::hub::guard;
use crate::status::{ColumnStatus, LegStatus, Resync, VolumeState, VolumeStatus};
use crate::view::{Gate, View};
use pagemesh_base::layout::LegState;

pub(super) fn status(state: &State) -> VolumeStatus {
    let (model, (_, shown)) = (state.model(), state.hub.view());
    let column = |column: &ColumnKeep| ColumnStatus {
        segment: column.segment,
        column: column.number,
        round: column.round,
        legs: column
            .legs
            .iter()
            .map(|leg| leg_status(state, leg))
            .collect(),
    };
    VolumeStatus {
        name: state.name.clone(),
        epoch: model.epoch().0,
        state: overall(&model, &shown),
        size_bytes: shown.size_bytes,
        channels: guard(&state.hub.members).len().saturating_sub(1),
        columns: model.columns.iter().map(column).collect(),
        counters: state.hub.tally.sums(),
        scrub: state.scrub().status(state.now()),
    }
}

/// What was not shown to the channels yet does not help them: they would still
/// fail requests.
fn overall(model: &Model, shown: &View) -> VolumeState {
    let columns = || model.columns.iter();
    let any = |wanted: fn(&LegKeep) -> bool| columns().any(|c| c.legs.iter().any(wanted));
    if model.fenced {
        VolumeState::Fenced
    } else if columns().any(|column| column.gate != Gate::Open)
        || shown.columns.iter().any(|column| column.gate != Gate::Open)
    {
        VolumeState::Unavailable
    } else if any(LegKeep::is_lost) {
        VolumeState::AwaitingManager
    } else if any(|leg| leg.resync.is_some() || leg.leg.state == LegState::Syncing) {
        VolumeState::Resyncing
    } else if any(|leg| leg.leg.state == LegState::Stale) {
        VolumeState::Degraded
    } else {
        VolumeState::Healthy
    }
}

fn leg_status(state: &State, keep: &LegKeep) -> LegStatus {
    let resync = keep.resync.map(|resync| Resync {
        bytes_todo: resync.todo,
        bytes_done: resync.done,
        elapsed_ms: (state.now().saturating_sub(resync.since)).as_millis() as u64,
    });
    let shipped = keep.shipped();
    LegStatus {
        asynchronous: keep.leg.asynchronous,
        lag: shipped.and_then(|_| state.hub.ship.lag(state.now())),
        brick: keep.leg.brick,
        slice: keep.leg.slice,
        state: keep.leg.state,
        trouble: keep.trouble.clone(),
        resync,
    }
}
