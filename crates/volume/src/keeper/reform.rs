//! Brings what the authority says, what the legs were told and what the
//! channels see into line, whatever changed.
//!
//! The order is what makes it safe: the authority's word, then the barrier on
//! every leg that stays, then connections for every channel, then the view.

use super::call::{Call, Outcome};
use super::model::{ColumnKeep, LegKeep};
use super::state::State;
use super::{bring_back, settle, start};
use crate::authority::{AuthorityError, BrickAddress};
use crate::guests::{self, Hindrance, Picture};
use crate::hub::{KEEPER, Link, Member, Note};
use crate::limits::{DOWN_LIMIT, MANAGER_RETRY_MAX, MANAGER_RETRY_MIN, SESSION_RETRY};
use crate::status::Count;
use crate::view::{Gate, LegView, View};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, LegState};
use pagemesh_base::slice::{SliceError, SliceRequest};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Connections made at once.
pub(super) const CONNECTS_MAX: usize = 16;

pub(super) async fn run(state: Rc<State>) {
    state.spawn(Box::pin(say_changes(Rc::clone(&state))));
    while !state.is_over() {
        let due = || state.is_over() || is_due(&state) || !untended(&state).is_empty();
        state.until(due).await;
        tend(&state);
        if !state.is_over() && is_due(&state) {
            reform(&state).await;
        }
    }
}

/// Has the authority change the legs. Beside everything else: columns that do
/// not need its word do not wait for it.
async fn say_changes(state: Rc<State>) {
    while !state.is_over() {
        state
            .until(|| {
                let model = state.model();
                let waits = model.retry_at > state.now();
                if waits {
                    state.wake_at(model.retry_at);
                }
                model.fenced || state.closing.get() || !waits && model.needs_the_authority()
            })
            .await;
        change_legs(&state).await;
    }
}

/// A leg, or with none a column, that needs a task of its own.
fn untended(state: &State) -> Vec<(usize, Option<usize>)> {
    let model = state.model();
    let mut all = vec![];
    for (number, column) in model.columns.iter().enumerate() {
        if !column.has_source() && !column.tended {
            all.push((number, None));
        }
        for (leg, keep) in column.legs.iter().enumerate() {
            let resumes = keep.leg.state == LegState::Syncing
                && keep.control.is_some()
                && column.gate == Gate::Open;
            if !keep.tended && (keep.leg.state == LegState::Stale || resumes) {
                all.push((number, Some(leg)));
            }
        }
    }
    all
}

fn tend(state: &Rc<State>) {
    for (column, leg) in untended(state) {
        let mut model = state.edit();
        let own = Rc::clone(state);
        if let Some(leg) = leg {
            model.columns[column].legs[leg].tended = true;
            drop(model);
            state.spawn(Box::pin(bring_back::bring_back(own, column, leg)));
        } else {
            model.columns[column].tended = true;
            drop(model);
            state.spawn(Box::pin(start::revive(own, column)));
        }
    }
}

fn is_due(state: &State) -> bool {
    let model = state.model();
    for column in &model.columns {
        if let (Gate::Down, Some(since)) = (column.gate, column.down_since) {
            state.wake_at(since + DOWN_LIMIT);
            if state.now() >= since + DOWN_LIMIT {
                return true;
            }
        }
        if can_settle(column) || is_behind(column, model.epoch()) {
            return true;
        }
    }
    state.joined.get() || model.view() != *state.hub.view().1
}

/// Whether a leg has yet to hear of the present epoch and round.
fn is_behind(column: &ColumnKeep, epoch: Epoch) -> bool {
    let told = (epoch, column.told_round());
    if defect::is(Defect::NoBarrier) {
        return false;
    }
    let written = column.legs.iter().filter(|leg| leg.is_written());
    let mut connected = written.filter(|leg| leg.control.is_some());
    connected.any(|leg| leg.raised != Some(told))
}

/// What a leg has in flight is known behind the barrier only. One that was connected
/// after the others heard of the epoch has that before it.
fn is_ready_to_settle(state: &State, number: usize) -> bool {
    let model = state.model();
    let column = &model.columns[number];
    can_settle(column) && !is_behind(column, model.epoch())
}

fn can_settle(column: &ColumnKeep) -> bool {
    let is_awaited = |leg: &LegKeep| leg.is_written() && leg.is_lost();
    column.settle && column.has_source() && !column.legs.iter().any(is_awaited)
}

/// One pass. What fails is noted in the model, and is due again.
pub(super) async fn reform(state: &State) {
    if state.is_over() || !raise_all(state).await {
        return;
    }
    let columns = state.model().columns.len();
    for number in 0..columns {
        if is_ready_to_settle(state, number) && settle::settle(state, number).await.is_err() {
            return;
        }
    }
    fail_what_waited_too_long(state);
    if equip(state).await {
        publish(state);
    } else {
        state.joined.set(true);
    }
}

fn fail_what_waited_too_long(state: &State) {
    let now = state.now();
    for column in &mut state.edit().columns {
        let waited = column
            .down_since
            .is_some_and(|since| now >= since + DOWN_LIMIT);
        if column.gate == Gate::Down && waited {
            column.gate = Gate::Failed;
        }
    }
}

pub(super) async fn change_legs(state: &State) {
    let (changes, uncertain) = {
        let model = state.model();
        if !model.needs_the_authority() || model.retry_at > state.now() {
            return;
        }
        (model.wanted_changes(), model.uncertain)
    };
    if uncertain {
        match state.ask_layout().await {
            Ok(attached) => {
                state.adopt(attached);
                state.edit().uncertain = false;
            }
            Err(error) => put_off(state, &error),
        }
        return;
    }
    let (attachment, expected) = {
        let model = state.model();
        (model.attachment, model.epoch())
    };
    let call = Call::ChangeLegs {
        attachment,
        expected,
        changes: changes.clone(),
    };
    match state.call(call).await {
        Outcome::Changed(Ok(layout)) => {
            let now = state.now();
            let mut model = state.edit();
            model.retry_wait = Duration::ZERO;
            model.was_changed(&changes);
            model.adopt(layout, now);
        }
        Outcome::Changed(Err(AuthorityError::Conflict { .. })) => state.edit().uncertain = true,
        Outcome::Changed(Err(error)) => put_off(state, &error),
        _ => {}
    }
}

/// The manager did not do it: asks again later. What was lost stays to be
/// said; who wanted a promotion asks again.
fn put_off(state: &State, error: &AuthorityError) {
    if *error == AuthorityError::Fenced {
        return state.fence();
    }
    tracing::warn!(volume = %state.name, %error, "the manager did not change the legs");
    let now = state.now();
    let mut model = state.edit();
    model.uncertain = true;
    model.retry_wait = (model.retry_wait * 2).clamp(MANAGER_RETRY_MIN, MANAGER_RETRY_MAX);
    model.retry_at = now + model.retry_wait;
}

/// The barrier: every leg that is written hears of the epoch and its round.
async fn raise_all(state: &State) -> bool {
    let mut asked = vec![];
    {
        let model = state.model();
        let epoch = model.epoch();
        state.hub.hold_epoch(epoch);
        for (number, column) in model.columns.iter().enumerate() {
            let round = column.told_round();
            for (leg, keep) in column.legs.iter().enumerate() {
                let Some(control) = keep.control.as_ref().filter(|_| keep.is_written()) else {
                    continue;
                };
                if keep.raised != Some((epoch, round)) && !defect::is(Defect::NoBarrier) {
                    let request = SliceRequest::RaiseEpoch { epoch, round };
                    let tag = control.start(state, request);
                    asked.push((number, leg, (epoch, round), Rc::clone(control), tag));
                }
            }
        }
    }
    if !asked.is_empty() {
        state.hub.tally.add(Count::EpochsRaised, 1);
    }
    let mut all = true;
    for (number, leg, told, control, tag) in asked {
        match control.answer(state, tag).await {
            Ok(_) => state.edit().columns[number].legs[leg].raised = Some(told),
            Err(error) => {
                all = false;
                failed(state, number, leg, &error);
            }
        }
    }
    all
}

/// A leg refused what it must do: it is lost, or all is.
pub(super) fn failed(state: &State, column: usize, leg: usize, error: &SliceError) {
    match error {
        SliceError::StaleEpoch { current } if *current > state.hub.held_epoch() => state.fence(),
        other => state.lose(column, leg, &other.to_string()),
    }
}

/// A leg that could not do something that others can live without.
pub(super) fn lost_if_gone(state: &State, column: usize, leg: usize, error: &SliceError) {
    if matches!(error, SliceError::Lost(_) | SliceError::StaleEpoch { .. }) {
        failed(state, column, leg, error);
    }
}

/// Column, leg and serial of a connection.
type Seat = (usize, usize, u64);

/// The connections of a view, by column and leg: what a member has when it is
/// equipped, no more and no less.
fn seats(view: &View) -> BTreeMap<(usize, usize), u64> {
    let columns = view.columns.iter().enumerate();
    let legs = columns.flat_map(|(column, picture)| {
        let legs = picture.legs.iter().enumerate();
        legs.map(move |(leg, wanted)| ((column, leg), wanted.serial))
    });
    legs.filter(|(_, serial)| *serial != 0).collect()
}

/// Lets guests in by the view that is shown, if they can do all that channels do: every
/// leg that is written is in-sync and mapped, and there is nothing to be flushed
/// afterwards. What a copy that follows is to get they put into the ring.
pub(super) fn offer(state: &State) {
    let Some(guests) = state.hub.guests.get() else {
        return;
    };
    let model = state.model();
    let (generation, view) = state.hub.view();
    match guest_seats(&view, &model.bricks) {
        Ok(seats) => {
            let picture = Picture {
                generation,
                epoch: view.epoch,
                seats,
            };
            guests.offer(picture, view.ship() != 0);
        }
        Err(hindrance) => guests.segment.set_hindrance(Some(hindrance)),
    }
}

fn guest_seats(
    view: &View,
    bricks: &BTreeMap<BrickId, BrickAddress>,
) -> Result<Vec<guests::Seat>, Hindrance> {
    let [column] = view.columns.as_slice() else {
        return Err(Hindrance::Columns);
    };
    if column.gate != Gate::Open || view.fenced {
        return Err(Hindrance::Busy);
    }
    if column.written() != column.in_sync() {
        return Err(Hindrance::Legs);
    }
    if view.buffers() {
        return Err(Hindrance::Buffers);
    }
    let legs = column.written().legs().map(|leg| column.legs[leg]);
    let seat = |leg: LegView| {
        let socket = bricks.get(&leg.brick)?.map_socket.as_deref()?;
        Some(guests::Seat {
            brick: leg.brick,
            slice: leg.slice,
            socket: socket.into(),
        })
    };
    legs.map(|leg| seat(leg).ok_or(Hindrance::Tcp)).collect()
}

type Wanted = (u32, Arc<Member>, Seat);

/// A connection for a member, not handed over yet.
struct Fresh {
    number: u32,
    member: Arc<Member>,
    link: Link,
}

/// What a channel does for which a brick has no session.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Without {
    /// It ends.
    TurnedAway,
    /// It gets one later, and all wait for that.
    Waits,
    /// It goes on without the leg, as all do.
    LegLost,
}

/// Gives every channel the connections that the next view needs; false if not all have
/// them.
async fn equip(state: &State) -> bool {
    state.joined.set(false);
    let seats = seats(&state.model().view());
    // The oldest first: they have served, and others can be turned away.
    let members: Vec<(u32, Arc<Member>)> = {
        let members = crate::hub::guard(&state.hub.members);
        let channels = members.iter().filter(|(number, _)| **number != KEEPER);
        channels
            .map(|(number, it)| (*number, Arc::clone(it)))
            .collect()
    };
    let mut wanted: Vec<Wanted> = vec![];
    for (number, member) in members {
        let missing = end_others(state, &seats, &member).into_iter();
        wanted.extend(missing.map(|place| (number, Arc::clone(&member), place)));
    }
    state.end_links();
    let mut have_all = true;
    for batch in wanted.chunks(CONNECTS_MAX) {
        let Some((fresh, have)) = connect(state, batch).await else {
            return false;
        };
        have_all &= have;
        if !vouch(state, &fresh).await {
            return false;
        }
        for Fresh { member, link, .. } in fresh {
            let place = (link.column, link.leg);
            crate::hub::guard(&member.links).insert(place, link.serial);
            member.tell(Note::Link(link));
        }
    }
    match have_all {
        true => state.unseated.set(None),
        false => state.sleep(SESSION_RETRY).await,
    }
    have_all
}

/// Ends a member's connections that the view does not have, and tells those that
/// it lacks. A lost brick cannot come back before the last connection that maps its
/// pool is gone, even one that no view ever used. And two sessions for one seat may
/// be more than its brick has: without a new one there is no new view that would end
/// the old one.
fn end_others(
    state: &State,
    seats: &BTreeMap<(usize, usize), u64>,
    member: &Arc<Member>,
) -> Vec<Seat> {
    if member.end_links(|place, serial| seats.get(place) != Some(&serial)) {
        state.note_ending(member);
    }
    let links = crate::hub::guard(&member.links);
    let missing = seats.iter().filter(|(place, _)| !links.contains_key(place));
    missing
        .map(|(&(column, leg), &serial)| (column, leg, serial))
        .collect()
}

/// What could be had, and whether that is all; none if a leg is lost.
async fn connect(state: &State, batch: &[Wanted]) -> Option<(Vec<Fresh>, bool)> {
    let places = batch.iter().map(|(_, _, place)| place);
    let calls: Vec<u64> = places
        .map(|&(column, leg, _)| state.start_connect(column, leg))
        .collect();
    let mut fresh = Some(vec![]);
    let (mut turned_away, mut have_all) = (vec![], true);
    for (wanted, call) in batch.iter().zip(calls) {
        let &(number, ref member, (column, leg, serial)) = wanted;
        match state.connected(call).await {
            Ok(connection) => {
                let link = Link {
                    column,
                    leg,
                    serial,
                    connection,
                };
                let member = Arc::clone(member);
                if let Some(fresh) = &mut fresh {
                    fresh.push(Fresh {
                        number,
                        member,
                        link,
                    });
                }
            }
            Err(SliceError::NoSession(why)) => match without_session(state, wanted, &why) {
                Without::TurnedAway => turned_away.push(number),
                Without::Waits => have_all = false,
                Without::LegLost => fresh = None,
            },
            Err(error) => {
                fresh = None;
                if state.serial(column, leg) == serial {
                    failed(state, column, leg, &error);
                }
            }
        }
    }
    let mut fresh = fresh?;
    fresh.retain(|fresh| !turned_away.contains(&fresh.number));
    Some((fresh, have_all))
}

/// A brick that has no session left for a channel is as sound as before. A channel that
/// has not served yet is turned away. One that has may have changes under way on other
/// legs, so that it cannot just end. To it, a leg that is on its return comes later, since
/// the volume does without; for an in-sync one all wait, as they do for one that is not
/// there. What keeps sessions meanwhile is idle channels, whose owners close them, or
/// other clients.
fn without_session(state: &State, wanted: &Wanted, why: &str) -> Without {
    let &(number, ref member, (column, leg, serial)) = wanted;
    if !member.has_served() {
        state.turn_away(number, member, why);
        return Without::TurnedAway;
    }
    let since = state.unseated.get().unwrap_or(state.now());
    let is_in_sync = state.model().columns[column].legs[leg].leg.state == LegState::InSync;
    if is_in_sync && state.now() < since + DOWN_LIMIT {
        state.unseated.set(Some(since));
        return Without::Waits;
    }
    state.unseated.set(None);
    if state.serial(column, leg) == serial {
        state.lose(column, leg, why);
    }
    Without::LegLost
}

/// A brick that was restarted may have lost what it had not flushed, and takes
/// connections all the same. That the keeper's own connection, which is older,
/// still answers shows that it is the same life of the brick.
async fn vouch(state: &State, fresh: &[Fresh]) -> bool {
    let mut places: Vec<Seat> = fresh
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
        if let Err(error) = control.ask(state, request).await {
            if state.serial(column, leg) == serial {
                failed(state, column, leg, &error);
            }
            return false;
        }
    }
    true
}

/// Channels see it, if nothing has changed since they were equipped for it.
fn publish(state: &State) {
    let view = {
        let model = state.model();
        let epoch = model.epoch();
        if model.columns.iter().any(|column| is_behind(column, epoch)) {
            return;
        }
        model.view()
    };
    let seats = seats(&view);
    let ready = |members: &BTreeMap<u32, Arc<Member>>| {
        let mut channels = members.iter().filter(|(number, _)| **number != KEEPER);
        channels.all(|(_, member)| *crate::hub::guard(&member.links) == seats)
    };
    match state.hub.publish_if(view.clone(), ready) {
        true => offer(state),
        false => state.joined.set(true),
    }
    state.act();
    state.touched.set(true);
}
