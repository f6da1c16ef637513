//! The beginning and the end: attach, columns that come up again, growth,
//! detach.

use super::call::{Call, Outcome};
use super::reform::{self, CONNECTS_MAX};
use super::state::State;
use crate::authority::AuthorityError;
use crate::limits::{
    ATTACH_TRIES_MAX, DETACH_LIMIT, DETACH_TRIES_MAX, MANAGER_RETRY_MAX, MANAGER_RETRY_MIN,
    REVIVE_RETRY_MAX, REVIVE_RETRY_MIN,
};
use crate::view::Gate;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::SliceError;
use std::rc::Rc;
use std::sync::mpsc::Sender;

/// Why a volume was not attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AttachFailure {
    Authority(AuthorityError),
    /// These bricks hold a column's only in-sync copies.
    Unreachable(String),
    Fenced,
}

pub(super) async fn attach_and_run(state: Rc<State>) {
    let result = attach(&state).await;
    let attached = result.is_ok();
    state.attached.set(Some(result));
    state.act();
    if attached {
        reform::run(state).await;
    } else {
        state.ended.set(true);
    }
}

async fn attach(state: &State) -> Result<(), AttachFailure> {
    let attached = ask_to_attach(state)
        .await
        .map_err(AttachFailure::Authority)?;
    {
        let epoch = attached.layout.epoch.into();
        state.adopt(attached);
        state.edit().attachment = epoch;
        state.hub.hold_epoch(epoch);
    }
    let columns = state.model().columns.len();
    for column in 0..columns {
        connect(state, column, LegState::Syncing).await;
    }
    let mut tries = 0;
    loop {
        if state.model().fenced {
            return Err(AttachFailure::Fenced);
        }
        check_sources(state)?;
        reform::change_legs(state).await;
        reform::reform(state).await;
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

async fn ask_to_attach(state: &State) -> Result<crate::authority::Attached, AuthorityError> {
    let mut wait = MANAGER_RETRY_MIN;
    for left in (0..ATTACH_TRIES_MAX).rev() {
        match state.call(Call::Attach).await {
            Outcome::Attached(Err(AuthorityError::Unreachable(_))) if left > 0 => {
                state.sleep(wait).await;
                wait = (wait * 2).min(MANAGER_RETRY_MAX);
            }
            Outcome::Attached(result) => return result,
            _ => {}
        }
    }
    Err(AuthorityError::Unreachable("it does not answer".into()))
}

fn is_serving(state: &State) -> bool {
    let model = state.model();
    let open = model.columns.iter().all(|column| column.gate == Gate::Open);
    open && model.view() == *state.hub.view().1
}

fn check_sources(state: &State) -> Result<(), AttachFailure> {
    let model = state.model();
    for column in &model.columns {
        if !column.has_source() {
            let legs = column.legs.iter().map(|keep| {
                let trouble = keep.trouble.as_deref().unwrap_or("its copy is not in-sync");
                format!("{}: {trouble}", keep.leg.brick)
            });
            return Err(AttachFailure::Unreachable(
                legs.collect::<Vec<_>>().join("; "),
            ));
        }
    }
    Ok(())
}

/// Connects to the legs of a column that are lost, from in-sync ones down to
/// those of this state.
async fn connect(state: &State, column: usize, least: LegState) {
    let wanted: Vec<usize> = {
        let legs = &state.model().columns[column].legs;
        let in_state = |state| {
            let legs = legs.iter().enumerate();
            legs.filter(move |(_, keep)| keep.is_lost() && keep.leg.state == state)
        };
        // One leg comes back at a time: another one starts anew.
        let syncing = in_state(LegState::Syncing).take(usize::from(least == LegState::Syncing));
        let wanted = in_state(LegState::InSync).chain(syncing);
        wanted.map(|(leg, _)| leg).take(CONNECTS_MAX).collect()
    };
    let calls: Vec<u64> = wanted
        .iter()
        .map(|&leg| state.start_connect(column, leg))
        .collect();
    for (leg, call) in wanted.into_iter().zip(calls) {
        match state.connected(call).await {
            Ok(connection) => {
                let control = state.control(connection);
                let mut model = state.edit();
                let serial = model.next_serial();
                let keep = &mut model.columns[column].legs[leg];
                // The authority may have left it out meanwhile.
                if keep.is_lost() {
                    keep.control = Some(control);
                    keep.serial = serial;
                    keep.raised = None;
                    keep.trouble = None;
                }
            }
            Err(SliceError::StaleEpoch { current }) if current > state.hub.held_epoch() => {
                state.fence();
            }
            Err(error) => {
                let keep = &mut state.edit().columns[column].legs[leg];
                keep.trouble = Some(error.to_string());
            }
        }
    }
}

/// Tries to reach the in-sync legs of a column that has lost them all.
pub(super) async fn revive(state: Rc<State>, column: usize) {
    let mut wait = REVIVE_RETRY_MIN;
    // A brick may take the keeper's connection and refuse those of channels.
    let revived = state.model().columns[column].revived;
    if let Some(again) = revived.map(|at| at + REVIVE_RETRY_MAX)
        && again > state.now()
    {
        state.sleep(again - state.now()).await;
    }
    loop {
        if state.is_over() {
            return;
        }
        connect(&state, column, LegState::InSync).await;
        if state.model().columns[column].has_source() {
            let mut model = state.edit();
            let keep = &mut model.columns[column];
            keep.tended = false;
            keep.revived = Some(state.now());
            return;
        }
        state.sleep(wait).await;
        wait = (wait * 2).min(REVIVE_RETRY_MAX);
        if wait == REVIVE_RETRY_MAX {
            look_for_new_addresses(&state).await;
        }
    }
}

/// A brick may be back at another address.
pub(super) async fn look_for_new_addresses(state: &State) {
    if let Ok(attached) = state.ask_layout().await {
        state.adopt_addresses(attached.bricks);
    }
}

/// Takes over a layout that may have grown.
pub(super) async fn refresh(state: Rc<State>, answer: Sender<Result<(), String>>) {
    let result = match state.is_over() {
        true => Err("the volume is not this client's any more".into()),
        false => match state.ask_layout().await {
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
        let serving = || state.is_over() || is_serving(&state);
        let until = state.now() + crate::limits::DOWN_LIMIT;
        state
            .until(|| {
                state.wake_at(until);
                serving() || state.now() >= until
            })
            .await;
    }
    let result = match result {
        Ok(()) if !is_serving(&state) => Err("a new part of the volume cannot be reached".into()),
        other => other,
    };
    // Nobody may be waiting any more.
    let _ = answer.send(result);
}

/// Lets channels end, then gives the volume back.
pub(super) async fn detach(state: Rc<State>) {
    let until = state.now() + DETACH_LIMIT;
    state
        .until(|| {
            state.wake_at(until);
            let members = crate::hub::guard(&state.hub.members).len();
            members <= 1 || state.now() >= until
        })
        .await;
    // A leg that follows has everything, if it can.
    let last = state.hub.ship.last();
    state
        .until(|| {
            state.wake_at(until);
            state.hub.ship.is_done(last) || state.now() >= until
        })
        .await;
    state.closing.set(true);
    let attachment = state.model().attachment;
    state.fence_channels();
    if let Err(error) = give_back(&state, attachment).await {
        tracing::warn!(
            volume = %state.name,
            %error,
            "the manager was not told that the volume is given back: to it, it is attached \
             until another client takes it over, or `pagemesh volume detach`"
        );
    }
    state.ended.set(true);
    state.act();
}

async fn give_back(state: &State, attachment: Epoch) -> Result<(), AuthorityError> {
    let mut tries = 1;
    loop {
        match state.call(Call::Detach { attachment }).await {
            Outcome::Detached(Err(AuthorityError::Unreachable(_))) if tries < DETACH_TRIES_MAX => {
                tries += 1;
                state.sleep(MANAGER_RETRY_MIN).await;
            }
            Outcome::Detached(result) => return result,
            _ => return Err(AuthorityError::Unreachable("it gave no answer".into())),
        }
    }
}
