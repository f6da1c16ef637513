//! The beginning and the end of a volume: attach, reconnect of columns, growth, detach.
//!
//! # Attach
//!
//! 1. [`attach`]: the manager raises the epoch.
//! 2. Each column connects its in-sync legs, and at most one syncing leg.
//! 3. Unreachable legs become stale, by compare-and-swap at the manager, before anything is served.
//! 4. Each written leg raises its epoch. The brick lets older operations end, and lists those that
//!    another leg may miss. The previous client is fenced from here on.
//! 5. [`recover_in_flight`](super::recover_in_flight) makes the legs equal.
//! 6. Every channel connects, and the controller publishes the snapshot ([`reconfigure`]).
//!
//! # No in-sync leg left
//!
//! If a column loses all its in-sync legs, none may be marked stale. In [`ColumnGate::Down`] requests
//! wait. [`reconnect`] retries, and the in-flight writes are recovered when a leg is back. After
//! [`DOWN_LIMIT`](crate::limits::DOWN_LIMIT) the column is in [`ColumnGate::Failed`]: requests fail until a leg returns.

use super::call::{BlockingCall, CallOutcome};
use super::layout_query::{fetch_layout, refresh_addresses};
use super::reconfigure::{self, CONNECTS_MAX};
use super::state::{AttachFailure, ControllerState};
use super::{recover_in_flight, replica_snapshots};
use crate::limits::{
    ATTACH_TRIES_MAX, DETACH_LIMIT, DETACH_TRIES_MAX, MANAGER_RETRY_MAX, MANAGER_RETRY_MIN,
    RECONNECT_RETRY_MAX, RECONNECT_RETRY_MIN,
};
use crate::snapshot::ColumnGate;
use pagemesh_base::authority::AuthorityError;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::LegState;
use pagemesh_base::poison;
use pagemesh_base::slice::SliceError;
use std::rc::Rc;
use std::sync::mpsc::Sender;

pub(super) async fn attach_and_run(state: Rc<ControllerState>) {
    let result = attach(&state).await;
    let attached = result.is_ok();
    state.attach_result.set(Some(result));
    state.record_activity();
    if attached {
        reconfigure::run_reconfigurations(state).await;
    } else {
        state.ended.set(true);
    }
}

async fn attach(state: &ControllerState) -> Result<(), AttachFailure> {
    let attached = request_attach(state)
        .await
        .map_err(AttachFailure::Authority)?;
    {
        let epoch = attached.layout.epoch.into();
        state.adopt(attached);
        state.model_mut().attachment = epoch;
        state.shared.set_attachment(epoch);
        state.shared.hold_epoch(epoch);
    }
    let columns = state.model().columns.len();
    for column in 0..columns {
        connect_lost_legs(state, column, LegState::Syncing).await;
    }
    let mut tries = 0;
    loop {
        if state.model().fenced {
            return Err(AttachFailure::Fenced);
        }
        check_sources(state)?;
        reconfigure::change_legs(state).await;
        reconfigure::reconfigure(state).await;
        if is_serving(state) {
            return Ok(());
        }
        let retry_at = state.model().retry_at;
        if retry_at > state.now() {
            tries += 1;
            if tries >= ATTACH_TRIES_MAX {
                let why = "a leg is lost, and it could not be marked stale".to_owned();
                return Err(AttachFailure::Authority(AuthorityError::Unreachable(why)));
            }
            state.sleep(retry_at - state.now()).await;
        }
    }
}

async fn request_attach(
    state: &ControllerState,
) -> Result<pagemesh_base::authority::ResolvedLayout, AuthorityError> {
    let mut wait = MANAGER_RETRY_MIN;
    for left in (0..ATTACH_TRIES_MAX).rev() {
        match state.call(BlockingCall::Attach).await {
            CallOutcome::Layout(Err(AuthorityError::Unreachable(_))) if left > 0 => {
                state.sleep(wait).await;
                wait = (wait * 2).min(MANAGER_RETRY_MAX);
            }
            CallOutcome::Layout(result) => return result,
            _ => {}
        }
    }
    Err(AuthorityError::Unreachable("it does not answer".into()))
}

pub(super) fn is_serving(state: &ControllerState) -> bool {
    let model = state.model();
    let open = model
        .columns
        .iter()
        .all(|column| column.gate == ColumnGate::Open);
    open && model.snapshot() == *state.shared.snapshot().1
}

fn check_sources(state: &ControllerState) -> Result<(), AttachFailure> {
    let model = state.model();
    for column in &model.columns {
        if !column.has_source() {
            let legs = column.legs.iter().map(|keep| {
                let trouble = keep
                    .last_error
                    .as_deref()
                    .unwrap_or("its copy is not in-sync");
                format!("{}: {trouble}", model.names.label(keep.leg.brick))
            });
            return Err(AttachFailure::Unreachable(
                legs.collect::<Vec<_>>().join("; "),
            ));
        }
    }
    Ok(())
}

/// Connects to the lost legs of a column: the in-sync ones, and one syncing leg if `least` is
/// syncing.
async fn connect_lost_legs(state: &ControllerState, column: usize, least: LegState) {
    let wanted: Vec<usize> = {
        let legs = &state.model().columns[column].legs;
        let in_state = |state| {
            let legs = legs.iter().enumerate();
            legs.filter(move |(_, keep)| keep.is_lost() && keep.leg.state == state)
        };
        // Only one leg resyncs at a time; another syncing leg starts its resync again later.
        let syncing = in_state(LegState::Syncing).take(usize::from(least == LegState::Syncing));
        let wanted = in_state(LegState::InSync).chain(syncing);
        wanted.map(|(leg, _)| leg).take(CONNECTS_MAX).collect()
    };
    let calls: Vec<u64> = wanted
        .iter()
        .map(|&leg| state.start_connect(column, leg))
        .collect();
    for (leg, call) in wanted.into_iter().zip(calls) {
        match state.connect_outcome(call).await {
            Ok(connection) => {
                let control = state.control(connection);
                let mut model = state.model_mut();
                let serial = model.next_serial();
                let keep = &mut model.columns[column].legs[leg];
                // The authority may have left the leg out meanwhile.
                if keep.is_lost() {
                    keep.control = Some(control);
                    keep.serial = serial;
                    keep.last_barrier = None;
                    keep.last_error = None;
                }
            }
            Err(SliceError::StaleEpoch { current }) if current > state.shared.held_epoch() => {
                state.fence();
            }
            Err(error) => {
                let keep = &mut state.model_mut().columns[column].legs[leg];
                keep.last_error = Some(error.to_string());
            }
        }
    }
}

/// Reconnects the in-sync legs of a column that has lost them all. It retries until one is
/// back.
pub(super) async fn reconnect(state: Rc<ControllerState>, column: usize) {
    let mut wait = RECONNECT_RETRY_MIN;
    // A brick may accept the controller's connection and refuse the channels'. So
    // reconnects have a minimum distance.
    let revived = state.model().columns[column].reconnected_at;
    if let Some(again) = revived.map(|at| at + RECONNECT_RETRY_MAX)
        && again > state.now()
    {
        state.sleep(again - state.now()).await;
    }
    loop {
        if state.is_closing() {
            return;
        }
        connect_lost_legs(&state, column, LegState::InSync).await;
        if state.model().columns[column].has_source() {
            let mut model = state.model_mut();
            let keep = &mut model.columns[column];
            keep.has_task = false;
            keep.reconnected_at = Some(state.now());
            return;
        }
        state.sleep(wait).await;
        wait = (wait * 2).min(RECONNECT_RETRY_MAX);
        if wait == RECONNECT_RETRY_MAX {
            refresh_addresses(&state).await;
        }
    }
}

/// Adopts a layout that may have grown.
pub(super) async fn refresh_layout(state: Rc<ControllerState>, answer: Sender<Result<(), String>>) {
    let result = match state.is_closing() {
        true => Err("this client does not hold the volume any more".into()),
        false => match fetch_layout(&state).await {
            Ok(attached) => {
                state.adopt(attached);
                Ok(())
            }
            Err(error) => {
                tracing::info!(volume = %state.name, %error, "the layout was not read again");
                Err(error.to_string())
            }
        },
    };
    if result.is_ok() {
        let serving = || state.is_closing() || is_serving(&state);
        let until = state.now() + crate::limits::DOWN_LIMIT;
        state
            .wait_until(|| {
                state.wake_at(until);
                serving() || state.now() >= until
            })
            .await;
    }
    let result = match result {
        Ok(()) if !is_serving(&state) => Err("a new part of the volume cannot be reached".into()),
        other => other,
    };
    // The caller may have stopped waiting.
    let _ = answer.send(result);
}

/// Waits for channels to end, then detaches the volume.
pub(super) async fn detach(state: Rc<ControllerState>) {
    let until = state.now() + DETACH_LIMIT;
    state
        .wait_until(|| {
            state.wake_at(until);
            let members = poison::lock(&state.shared.members).len();
            members <= 1 || state.now() >= until
        })
        .await;
    // Also waits until the asynchronous replica has all changes, up to the same deadline.
    let last = state.shared.replication.last_number();
    state
        .wait_until(|| {
            state.wake_at(until);
            state.shared.replication.is_done(last) || state.now() >= until
        })
        .await;
    replica_snapshots::report_complete(&state).await;
    if poison::lock(&state.shared.members).len() <= 1 {
        let columns = state.model().columns.len();
        for column in 0..columns {
            // The next client recovers a column that fails now.
            let _ = recover_in_flight::forget_in_flight(&state, column).await;
        }
    }
    state.closing.set(true);
    let attachment = state.model().attachment;
    state.fence_channels();
    if let Err(error) = send_detach(&state, attachment).await {
        tracing::warn!(
            volume = %state.name,
            %error,
            "the manager did not get the detach: for the manager, the volume stays attached \
             until another client takes it over, or `pagemesh volume detach`"
        );
    }
    state.ended.set(true);
    state.record_activity();
}

async fn send_detach(state: &ControllerState, attachment: Epoch) -> Result<(), AuthorityError> {
    let mut tries = 1;
    loop {
        match state.call(BlockingCall::Detach { attachment }).await {
            CallOutcome::Detached(Err(AuthorityError::Unreachable(_)))
                if tries < DETACH_TRIES_MAX =>
            {
                tries += 1;
                state.sleep(MANAGER_RETRY_MIN).await;
            }
            CallOutcome::Detached(result) => return result,
            _ => return Err(AuthorityError::Unreachable("it gave no answer".into())),
        }
    }
}
