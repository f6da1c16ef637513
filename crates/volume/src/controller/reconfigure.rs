//! Brings the authority's layout, the legs and the channels' snapshot into agreement after any
//! change.
//!
//! The order makes it safe: first the authority's answer, then the barrier on every remaining
//! leg, then connections for every channel, then the snapshot.
//!
//! # Loss of a leg
//!
//! 1. When the engine of a channel gets [`SliceError::Lost`], it holds the column and reads from
//!    another leg. It reports the loss to the controller. A leg without room, while another leg took the write,
//!    is lost in the same way.
//! 2. [`send_leg_changes`] asks the manager until it answers. Reads and other columns proceed.
//! 3. [`raise_epoch_on_all`] fences the survivors: they admit no request of an earlier epoch, and list the operations that the
//!    lost leg may lack although their pages are older than the loss. [`connect_channels`] connects the channels that lack
//!    a connection.
//! 4. [`verify_incarnations`] checks over the controller's older connections that no brick has
//!    restarted in between: it may have lost unflushed writes. Then the snapshot is published.
//! 5. The channels wait for the answers to their old messages, and send every incomplete change
//!    again under the new epoch, with its old number.
//!
//! The controller does not wait until a channel's thread runs: a brick cannot restart while its
//! pool is mapped, and that thread may wait for something else. It ends the connections in between
//! two calls of the channel ([`ControllerState::end_links`]).
//!
//! **No session left.** A brick that has none for a channel is as sound as before
//! ([`handle_no_session`]). A channel that has not served yet is refused, and its requests fail
//! with `SpaceError::Busy`. A channel that has served may have changes in flight on other legs and
//! cannot end. For it, the resync of a returning leg is postponed. For an in-sync leg of a column
//! that reopens, all channels wait, [`DOWN_LIMIT`] at most.

use super::call::{BlockingCall, CallOutcome};
use super::layout_query::fetch_layout;
use super::leg_errors::handle_leg_error;
use super::model::{ColumnEntry, LegEntry};
use super::state::ControllerState;
use super::{lifecycle, recover_in_flight, resync};
use crate::direct_access::{self, DirectDisabledReason, LayoutLease};
use crate::engine::locks::CONTROLLER;
use crate::limits::{DOWN_LIMIT, MANAGER_RETRY_MAX, MANAGER_RETRY_MIN, SESSION_RETRY};
use crate::shared::{LegLink, Member, MemberMessage};
use crate::snapshot::{ColumnGate, LayoutSnapshot, LegSnapshot};
use crate::status::Count;
use pagemesh_base::authority::{AuthorityError, BrickAddress};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{BrickId, LegState};
use pagemesh_base::poison;
use pagemesh_base::slice::{SliceError, SliceRequest};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// The maximum of concurrent connects.
pub(super) const CONNECTS_MAX: usize = 16;

pub(super) async fn run_reconfigurations(state: Rc<ControllerState>) {
    state.spawn(Box::pin(send_leg_changes(Rc::clone(&state))));
    while !state.is_closing() {
        let due = || state.is_closing() || is_due(&state) || !unsupervised(&state).is_empty();
        state.wait_until(due).await;
        supervise(&state);
        if !state.is_closing() && is_due(&state) {
            reconfigure(&state).await;
        }
    }
}

/// Requests leg changes from the authority. It runs concurrently with all other tasks, so
/// columns that do not need the answer do not wait for it.
async fn send_leg_changes(state: Rc<ControllerState>) {
    while !state.is_closing() {
        state
            .wait_until(|| {
                let model = state.model();
                let waits = model.retry_at > state.now();
                if waits {
                    state.wake_at(model.retry_at);
                }
                model.fenced || state.closing.get() || !waits && model.needs_authority()
            })
            .await;
        change_legs(&state).await;
    }
}

/// The legs, or columns without a leg number, that need a task of their own.
fn unsupervised(state: &ControllerState) -> Vec<(usize, Option<usize>)> {
    let model = state.model();
    let mut all = vec![];
    for (number, column) in model.columns.iter().enumerate() {
        if !column.has_source() && !column.has_task {
            all.push((number, None));
        }
        for (leg, keep) in column.legs.iter().enumerate() {
            let resumes = keep.leg.state == LegState::Syncing
                && keep.control.is_some()
                && column.gate == ColumnGate::Open;
            if !keep.has_task && (keep.leg.state == LegState::Stale || resumes) {
                all.push((number, Some(leg)));
            }
        }
    }
    all
}

fn supervise(state: &Rc<ControllerState>) {
    for (column, leg) in unsupervised(state) {
        let mut model = state.model_mut();
        let own = Rc::clone(state);
        if let Some(leg) = leg {
            model.columns[column].legs[leg].has_task = true;
            drop(model);
            state.spawn(Box::pin(resync::resync(own, column, leg)));
        } else {
            model.columns[column].has_task = true;
            drop(model);
            state.spawn(Box::pin(lifecycle::reconnect(own, column)));
        }
    }
}

fn is_due(state: &ControllerState) -> bool {
    let model = state.model();
    for column in &model.columns {
        if let (ColumnGate::Down, Some(since)) = (column.gate, column.down_since) {
            state.wake_at(since + DOWN_LIMIT);
            if state.now() >= since + DOWN_LIMIT {
                return true;
            }
        }
        if can_recover(column) || column.needs_barrier(model.epoch()) {
            return true;
        }
    }
    state.channels_opened.get() || model.snapshot() != *state.shared.snapshot().1
}

/// The operations in flight on a leg are known only after the barrier. A leg that was connected
/// after the others heard of the epoch has its barrier still to come.
fn is_ready_to_recover(state: &ControllerState, number: usize) -> bool {
    let model = state.model();
    let column = &model.columns[number];
    can_recover(column) && !column.needs_barrier(model.epoch())
}

fn can_recover(column: &ColumnEntry) -> bool {
    let is_awaited = |leg: &LegEntry| leg.is_written() && leg.is_lost();
    column.needs_recovery && column.has_source() && !column.legs.iter().any(is_awaited)
}

/// Makes one pass. Failures are recorded in the model, and are due again.
pub(super) async fn reconfigure(state: &ControllerState) {
    if state.is_closing() || !raise_epoch_on_all(state).await {
        return;
    }
    let columns = state.model().columns.len();
    for number in 0..columns {
        if is_ready_to_recover(state, number)
            && recover_in_flight::recover_in_flight(state, number)
                .await
                .is_err()
        {
            return;
        }
    }
    fail_expired_columns(state);
    if connect_channels(state).await {
        publish(state);
    } else {
        state.channels_opened.set(true);
    }
}

fn fail_expired_columns(state: &ControllerState) {
    let now = state.now();
    for column in &mut state.model_mut().columns {
        let waited = column
            .down_since
            .is_some_and(|since| now >= since + DOWN_LIMIT);
        if column.gate == ColumnGate::Down && waited {
            column.gate = ColumnGate::Failed;
        }
    }
}

pub(super) async fn change_legs(state: &ControllerState) {
    let (changes, uncertain) = {
        let model = state.model();
        if !model.needs_authority() || model.retry_at > state.now() {
            return;
        }
        (model.wanted_changes(), model.is_layout_uncertain)
    };
    if uncertain {
        match fetch_layout(state).await {
            Ok(attached) => {
                state.adopt(attached);
                state.model_mut().is_layout_uncertain = false;
            }
            Err(error) => schedule_retry(state, &error),
        }
        return;
    }
    let (attachment, expected) = {
        let model = state.model();
        (model.attachment, model.epoch())
    };
    let call = BlockingCall::ChangeLegs {
        attachment,
        expected,
        changes: changes.clone(),
    };
    match state.call(call).await {
        CallOutcome::LegsChanged(Ok(layout)) => {
            let now = state.now();
            let mut model = state.model_mut();
            model.retry_wait = Duration::ZERO;
            model.record_changes(&changes);
            model.adopt(layout, now);
        }
        CallOutcome::LegsChanged(Err(AuthorityError::Conflict { .. })) => {
            state.model_mut().is_layout_uncertain = true
        }
        CallOutcome::LegsChanged(Err(error)) => schedule_retry(state, &error),
        _ => {}
    }
}

/// Schedules the next request after the manager refused one or did not answer; the change may have
/// been made. Losses are requested again. A task that requested another state for its leg requests it
/// again itself.
fn schedule_retry(state: &ControllerState, error: &AuthorityError) {
    if *error == AuthorityError::Fenced {
        return state.fence();
    }
    tracing::warn!(volume = %state.name, %error, "the manager did not change the legs");
    let now = state.now();
    let mut model = state.model_mut();
    model.is_layout_uncertain = true;
    model.retry_wait = (model.retry_wait * 2).clamp(MANAGER_RETRY_MIN, MANAGER_RETRY_MAX);
    model.retry_at = now + model.retry_wait;
}

/// Raises the barrier: announces the epoch to every written leg.
async fn raise_epoch_on_all(state: &ControllerState) -> bool {
    let mut asked = vec![];
    {
        let model = state.model();
        let epoch = model.epoch();
        state.shared.hold_epoch(epoch);
        for (number, column) in model.columns.iter().enumerate() {
            for (leg, keep) in column.legs.iter().enumerate() {
                let Some(control) = keep.control.as_ref().filter(|_| keep.is_written()) else {
                    continue;
                };
                if keep.last_barrier != Some(epoch) && !defect::is(Defect::NoBarrier) {
                    let tag = control.submit(state, model.barrier(number));
                    asked.push((number, leg, epoch, Rc::clone(control), tag));
                }
            }
        }
    }
    if !asked.is_empty() {
        state.shared.counters.add(Count::EpochsRaised, 1);
    }
    let mut all = true;
    for (number, leg, told, control, tag) in asked {
        match control.answer(state, tag).await {
            Ok(_) => state.model_mut().columns[number].legs[leg].last_barrier = Some(told),
            Err(error) => {
                all = false;
                handle_leg_error(state, number, leg, &error);
            }
        }
    }
    all
}

/// The connections of a snapshot, by column and leg. A member is ready for the snapshot when it
/// has exactly these.
fn snapshot_links(view: &LayoutSnapshot) -> BTreeMap<(usize, usize), u64> {
    let columns = view.columns.iter().enumerate();
    let legs = columns.flat_map(|(column, picture)| {
        let legs = picture.legs.iter().enumerate();
        legs.map(move |(leg, wanted)| ((column, leg), wanted.serial))
    });
    legs.filter(|(_, serial)| *serial != 0).collect()
}

/// Grants direct clients a lease for the published snapshot, if they can do the same as
/// channels: every written leg is in-sync and mapped, and no write needs a flush. They put
/// changes for a replica into the ring.
pub(super) fn grant_lease(state: &ControllerState) {
    let Some(guests) = state.shared.direct_access.get() else {
        return;
    };
    let model = state.model();
    let (generation, view) = state.shared.snapshot();
    match lease_legs(&view, &model.bricks) {
        Ok(seats) => {
            let picture = LayoutLease {
                generation,
                epoch: view.epoch,
                legs: seats,
            };
            state.shared.pass_stamp_epoch();
            guests.grant_lease(picture, view.replica_serial() != 0);
        }
        Err(hindrance) => guests.segment.set_disabled_reason(Some(hindrance)),
    }
}

fn lease_legs(
    view: &LayoutSnapshot,
    bricks: &BTreeMap<BrickId, BrickAddress>,
) -> Result<Vec<direct_access::LeaseLeg>, DirectDisabledReason> {
    let [column] = view.columns.as_slice() else {
        return Err(DirectDisabledReason::MultipleColumns);
    };
    if column.gate != ColumnGate::Open || view.fenced {
        return Err(DirectDisabledReason::Reconfiguring);
    }
    if column.written() != column.in_sync() {
        return Err(DirectDisabledReason::LegNotInSync);
    }
    if view.buffers() {
        return Err(DirectDisabledReason::BufferedPool);
    }
    let legs = column.written().legs().map(|leg| column.legs[leg]);
    let seat = |leg: LegSnapshot| {
        let socket = bricks.get(&leg.brick)?.map_socket.as_deref()?;
        Some(direct_access::LeaseLeg {
            brick: leg.brick,
            slice: leg.slice,
            socket: socket.into(),
        })
    };
    legs.map(|leg| seat(leg).ok_or(DirectDisabledReason::TcpLeg))
        .collect()
}

/// The column, leg and serial of a connection.
type LinkKey = (usize, usize, u64);

type MissingLink = (u32, Arc<Member>, LinkKey);

/// A connection for a member that was not handed over yet.
struct PendingLink {
    number: u32,
    member: Arc<Member>,
    link: LegLink,
}

/// The handling of a channel for which a brick has no session.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NoSessionAction {
    /// The channel ends.
    RejectChannel,
    /// The channel gets a session later, and all channels wait for that.
    RetryLater,
    /// All channels go on without the leg.
    LoseLeg,
}

/// Gives every channel the connections that the next snapshot needs; false if not all have
/// them.
async fn connect_channels(state: &ControllerState) -> bool {
    state.channels_opened.set(false);
    let seats = snapshot_links(&state.model().snapshot());
    // The oldest come first: they have served, while newer ones can be rejected.
    let members: Vec<(u32, Arc<Member>)> = {
        let members = poison::lock(&state.shared.members);
        let channels = members.iter().filter(|(number, _)| **number != CONTROLLER);
        channels
            .map(|(number, it)| (*number, Arc::clone(it)))
            .collect()
    };
    let mut wanted: Vec<MissingLink> = vec![];
    for (number, member) in members {
        let missing = end_obsolete_links(state, &seats, &member).into_iter();
        wanted.extend(missing.map(|place| (number, Arc::clone(&member), place)));
    }
    state.end_links();
    let mut have_all = true;
    for batch in wanted.chunks(CONNECTS_MAX) {
        let Some((fresh, have)) = connect_batch(state, batch).await else {
            return false;
        };
        have_all &= have;
        if !verify_incarnations(state, &fresh).await {
            return false;
        }
        for PendingLink { member, link, .. } in fresh {
            let place = (link.column, link.leg);
            poison::lock(&member.links).insert(place, link.serial);
            member.send(MemberMessage::NewLink(link));
        }
    }
    match have_all {
        true => state.no_session_since.set(None),
        false => state.sleep(SESSION_RETRY).await,
    }
    have_all
}

/// Ends a member's connections that the snapshot does not have, and returns those that it
/// lacks. A lost brick cannot come back before the last connection that maps its pool is gone,
/// even one that no snapshot ever used. Two sessions for one leg may also be more than its
/// brick has. Then no new snapshot would come that ends the old session.
fn end_obsolete_links(
    state: &ControllerState,
    seats: &BTreeMap<(usize, usize), u64>,
    member: &Arc<Member>,
) -> Vec<LinkKey> {
    if member.end_links(|place, serial| seats.get(place) != Some(&serial)) {
        state.add_ending_member(member);
    }
    let links = poison::lock(&member.links);
    let missing = seats.iter().filter(|(place, _)| !links.contains_key(place));
    missing
        .map(|(&(column, leg), &serial)| (column, leg, serial))
        .collect()
}

/// Connects a batch. Returns the connections, and whether they are all; none if a leg is lost.
async fn connect_batch(
    state: &ControllerState,
    batch: &[MissingLink],
) -> Option<(Vec<PendingLink>, bool)> {
    let places = batch.iter().map(|(_, _, place)| place);
    let calls: Vec<u64> = places
        .map(|&(column, leg, _)| state.start_connect(column, leg))
        .collect();
    let mut fresh = Some(vec![]);
    let (mut turned_away, mut have_all) = (vec![], true);
    for (wanted, call) in batch.iter().zip(calls) {
        let &(number, ref member, (column, leg, serial)) = wanted;
        match state.connect_outcome(call).await {
            Ok(connection) => {
                let link = LegLink {
                    column,
                    leg,
                    serial,
                    connection,
                };
                let member = Arc::clone(member);
                if let Some(fresh) = &mut fresh {
                    fresh.push(PendingLink {
                        number,
                        member,
                        link,
                    });
                }
            }
            Err(SliceError::NoSession(why)) => match handle_no_session(state, wanted, &why) {
                NoSessionAction::RejectChannel => turned_away.push(number),
                NoSessionAction::RetryLater => have_all = false,
                NoSessionAction::LoseLeg => fresh = None,
            },
            Err(error) => {
                fresh = None;
                if state.serial(column, leg) == serial {
                    handle_leg_error(state, column, leg, &error);
                }
            }
        }
    }
    let mut fresh = fresh?;
    fresh.retain(|fresh| !turned_away.contains(&fresh.number));
    Some((fresh, have_all))
}

/// Decides for a channel that a brick has no session for. The brick itself is sound.
///
/// - A channel that has not served yet is rejected.
/// - A channel that has served cannot just end, because it may have changes in flight on
///   other legs. For an in-sync leg all channels wait, as for a leg that is not connected, up
///   to [`DOWN_LIMIT`].
/// - After that, or if the leg is not in-sync, the leg is lost, and comes back later.
///
/// The missing sessions belong to idle channels, which their owners may close, or to other
/// clients.
fn handle_no_session(state: &ControllerState, wanted: &MissingLink, why: &str) -> NoSessionAction {
    let &(number, ref member, (column, leg, serial)) = wanted;
    if !member.has_served() {
        state.reject_channel(number, member, why);
        return NoSessionAction::RejectChannel;
    }
    let since = state.no_session_since.get().unwrap_or(state.now());
    let is_in_sync = state.model().columns[column].legs[leg].leg.state == LegState::InSync;
    if is_in_sync && state.now() < since + DOWN_LIMIT {
        state.no_session_since.set(Some(since));
        return NoSessionAction::RetryLater;
    }
    state.no_session_since.set(None);
    if state.serial(column, leg) == serial {
        state.lose_leg(column, leg, why);
    }
    NoSessionAction::LoseLeg
}

/// Checks that no brick was restarted. A restarted brick accepts connections, but may have lost
/// unflushed changes. The controller's own connection is older: if it still answers, the brick
/// is the same process.
async fn verify_incarnations(state: &ControllerState, fresh: &[PendingLink]) -> bool {
    let mut places: Vec<LinkKey> = fresh
        .iter()
        .map(|fresh| (fresh.link.column, fresh.link.leg, fresh.link.serial))
        .collect();
    places.sort_unstable();
    places.dedup();
    for (column, leg, serial) in places {
        let control = {
            let model = state.model();
            let keep = &model.columns[column].legs[leg];
            keep.control.clone().filter(|_| keep.serial == serial)
        };
        let Some(control) = control else {
            return false;
        };
        let len = PAGE_BYTES as u64;
        let request = SliceRequest::Extents { offset: 0, len };
        if let Err(error) = control.call(state, request).await {
            if state.serial(column, leg) == serial {
                handle_leg_error(state, column, leg, &error);
            }
            return false;
        }
    }
    true
}

/// Publishes the snapshot, if nothing has changed since the channels were connected for it.
fn publish(state: &ControllerState) {
    let view = {
        let model = state.model();
        let epoch = model.epoch();
        if model
            .columns
            .iter()
            .any(|column| column.needs_barrier(epoch))
        {
            return;
        }
        model.snapshot()
    };
    let seats = snapshot_links(&view);
    let ready = |members: &BTreeMap<u32, Arc<Member>>| {
        let mut channels = members.iter().filter(|(number, _)| **number != CONTROLLER);
        channels.all(|(_, member)| *poison::lock(&member.links) == seats)
    };
    match state.shared.publish_if(view.clone(), ready) {
        true => grant_lease(state),
        false => state.channels_opened.set(true),
    }
    state.record_activity();
    state.status_changed.set(true);
}
