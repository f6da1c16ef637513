//! Sends changes to the asynchronous replica, in the order of their numbers.
//!
//! The replica's contents are always a state that the volume was in, at some number since the
//! replica was connected last. One connection makes the changes in the order in which they
//! come, and none after a failed one.

use super::control::ControlConnection;
use super::copy::LegConnection;
use super::state::ControllerState;
use crate::limits::{REPLICATION_AGE_MAX, REPLICATION_LINGER, replication_in_flight_max};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest, Stamp};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// The replica's leg and connection.
pub(super) struct ReplicaRoute {
    pub column: usize,
    pub leg: usize,
    pub serial: u64,
    pub control: Rc<ControlConnection>,
    /// Whether changes are durable on the leg only after a flush.
    pub buffers: bool,
}

/// The changes in flight.
#[derive(Default)]
struct InFlightChanges {
    /// The numbers of changes, with the tags of their messages.
    changes: VecDeque<(u64, u64)>,
    /// The number of the last answered change.
    answered: u64,
    /// The number of the last change that is done.
    done: u64,
    /// The last change before a flush in flight, with the flush's tag.
    flush: Option<(u64, u64)>,
    /// The time until which the sender lingers before it sleeps.
    lingers_until: Duration,
}

/// Sends changes until the leg is lost, or the volume detached.
pub(super) async fn run_sender(state: Rc<ControllerState>, route: ReplicaRoute) {
    let mut flight = InFlightChanges::default();
    let ended = poll_fn(|_| {
        if state.ended.get() || state.model().fenced || !is_route_current(&state, &route) {
            return Poll::Ready(Ok(()));
        }
        match flight.advance(&state, &route) {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    });
    let Err(error) = ended.await else {
        return;
    };
    if let SliceError::StaleEpoch { current } = error
        && current > state.shared.held_epoch()
    {
        return state.fence();
    }
    if is_route_current(&state, &route) {
        let is_full = error == SliceError::NoSpace;
        state.model_mut().columns[route.column].legs[route.leg].full |= is_full;
        state.lose_leg(route.column, route.leg, &error.to_string());
    }
}

/// Ends the replication to the leg. It comes back by a resync.
pub(super) fn end_replication(state: &ControllerState, column: usize, why: &str) {
    let legs = state.model().columns[column].legs.len();
    for leg in 0..legs {
        let ships = {
            let keep = &state.model().columns[column].legs[leg];
            keep.is_replicating && keep.control.is_some()
        };
        if ships {
            state.lose_leg(column, leg, why);
        }
    }
}

fn is_route_current(state: &ControllerState, route: &ReplicaRoute) -> bool {
    let model = state.model();
    let keep = &model.columns[route.column].legs[route.leg];
    let is_its = |control: &Rc<ControlConnection>| Rc::ptr_eq(control, &route.control);
    keep.is_replicating && keep.control.as_ref().is_some_and(is_its)
}

impl InFlightChanges {
    fn advance(&mut self, state: &ControllerState, route: &ReplicaRoute) -> Result<(), SliceError> {
        if state.shared.replication.is_incomplete() {
            let why = "the replication ring lacks changes of a direct client";
            return Err(SliceError::Lost(why.into()));
        }
        self.take_answers(state, route)?;
        // A leg that answers at once could keep this loop busy for as long as others make
        // changes. The limit gives the controller time for its other tasks.
        for _ in 0..replication_in_flight_max() {
            if self.changes.len() == replication_in_flight_max() {
                break;
            }
            let lingers = state.now() < self.lingers_until;
            let Some(next) = state.shared.replication.take_change(route.serial, lingers) else {
                if lingers {
                    state.wake_at(self.lingers_until);
                }
                break;
            };
            self.lingers_until = state.now() + REPLICATION_LINGER;
            state.record_activity();
            let op = state.next_op();
            let epoch = replica_epoch(state, route, &next.change);
            // The operation is complete on all other legs.
            let stamp = Stamp {
                epoch,
                op,
                open_ops: 0,
            };
            let tag = route.control.submit(state, with_stamp(next.change, stamp));
            self.changes.push_back((next.number, tag));
            if route.control.is_synchronous() {
                // A leg that answers at once does not keep the order by itself: an error must
                // stop the next change.
                self.take_answers(state, route)?;
            }
        }
        self.flush_if_needed(state, route);
        Ok(())
    }

    fn take_answers(
        &mut self,
        state: &ControllerState,
        route: &ReplicaRoute,
    ) -> Result<(), SliceError> {
        while let Some(&(number, tag)) = self.changes.front() {
            match route.control.try_answer(state, tag) {
                Some(Ok(SliceReply::Done)) => self.answered = number,
                Some(Ok(_)) => return Err(SliceError::Refused("a strange answer".into())),
                Some(Err(error)) => return Err(error),
                None => break,
            }
            self.changes.pop_front();
        }
        let durable = match (route.buffers, self.flush) {
            (false, _) => self.answered,
            (true, Some((covers, tag))) => match route.control.try_answer(state, tag) {
                Some(Ok(_)) => {
                    self.flush = None;
                    covers
                }
                Some(Err(error)) => return Err(error),
                None => self.done,
            },
            (true, None) => self.done,
        };
        if durable > self.done {
            self.done = durable;
            state.shared.replication.record_done(route.serial, durable);
        }
        Ok(())
    }

    /// Flushes if needed. Unflushed changes count as lag, so the replica flushes from time to
    /// time even if no acknowledgement waits.
    fn flush_if_needed(&mut self, state: &ControllerState, route: &ReplicaRoute) {
        if !route.buffers || self.flush.is_some() || self.answered == self.done {
            return;
        }
        let lag = state.shared.replication.lag(state.now());
        let is_old =
            lag.is_some_and(|lag| lag.age_us >= (REPLICATION_AGE_MAX / 4).as_micros() as u64);
        if is_old || state.shared.replication.has_waiters() || self.changes.is_empty() {
            let tag = route.control.submit(state, SliceRequest::Flush);
            self.flush = Some((self.answered, tag));
        }
    }
}

/// The epoch of a change on the replica: that of its stamp on the other legs. So snapshots see the same changes on both.
/// The slice refuses epochs below the one that the connection has announced; no snapshot of the replica is between.
fn replica_epoch(state: &ControllerState, route: &ReplicaRoute, change: &SliceRequest) -> Epoch {
    let stamp = match change {
        SliceRequest::Write { stamp, .. }
        | SliceRequest::Clear { stamp, .. }
        | SliceRequest::Transact { stamp, .. } => stamp,
        _ => return route.control.epoch(state),
    };
    let changes_nothing = matches!(change, SliceRequest::Clear { len: 0, .. });
    if stamp.epoch == Epoch(0) && !changes_nothing {
        state.replica_snapshots.borrow_mut().give_up_pending();
    }
    match stamp.epoch {
        Epoch(0) => route.control.epoch(state),
        epoch => epoch.max(route.control.announced()),
    }
}

fn with_stamp(change: SliceRequest, stamp: Stamp) -> SliceRequest {
    match change {
        SliceRequest::Write { offset, data, .. } => SliceRequest::Write {
            offset,
            data,
            stamp,
        },
        SliceRequest::Clear { offset, len, .. } => SliceRequest::Clear { offset, len, stamp },
        SliceRequest::Transact { parts, .. } => SliceRequest::Transact { parts, stamp },
        other => other,
    }
}

/// The asynchronous replica, if it is in reach.
pub(super) fn replica(state: &ControllerState, column: usize) -> Option<LegConnection> {
    let model = state.model();
    let mut legs = model.columns[column].legs.iter().enumerate();
    legs.find_map(|(leg, keep)| {
        let follows = keep.is_replicating && keep.leg.state == LegState::AsyncReplica;
        let control = keep.control.clone().filter(|_| follows)?;
        Some(LegConnection { leg, control })
    })
}

/// Waits until the replica has all changes so far; false if that takes longer than
/// [`REPLICATION_AGE_MAX`]. In a range that is locked meanwhile, the replica then holds the
/// same data as the other legs.
pub(super) async fn wait_until_caught_up(state: &ControllerState, column: usize) -> bool {
    let last = state.shared.replication.last_number();
    let until = state.now() + REPLICATION_AGE_MAX;
    let has_it = || replica(state, column).is_none() || state.shared.replication.is_done(last);
    let is_late = || {
        state.wake_at(until);
        state.is_closing() || state.now() >= until
    };
    state.wait_until(|| has_it() || is_late()).await;
    has_it()
}

/// Whether the authority has made the leg a replica.
pub(super) fn is_replica(state: &ControllerState, column: usize, leg: usize) -> bool {
    state.model().columns[column].legs[leg].leg.state == LegState::AsyncReplica
}
