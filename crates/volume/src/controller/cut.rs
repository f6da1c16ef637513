//! The cut of a snapshot: from one moment on, changes belong to the time after it, on all legs alike.
//!
//! 1. [`confirm_layout`] asks the manager for the layout. No layout has an epoch between that one and the
//!    snapshot, so no barrier can come that a stamp of the snapshot would pass under an older layout.
//! 2. [`prepare`]: each written leg keeps the versions that the snapshot sees, durably. An asynchronous replica in step
//!    does, too ([`replica_snapshots`](super::replica_snapshots)).
//! 3. [`VolumeShared::cut`](crate::shared::VolumeShared::cut): from here on changes are stamped with the
//!    snapshot.
//! 4. [`OlderChanges`]: the task waits until each change that was stamped before has ended on all legs.
//! 5. [`flush`]: the legs that buffer flush those changes.
//!
//! Writers never wait. Direct clients keep their lease.
//!
//! The volumes of a group are cut at one moment: step 3 lets changes wait until the stamps of all volumes are raised, on
//! order of the manager (`cut_steps`).
//!
//! Invariants:
//! - All legs have the same births on both sides of the cut. So a change that one leg may have with an
//!   older stamp, and another one will get with a newer stamp, fails the cut or ends before step 3: a
//!   change that is sent again under a new layout, and a torn operation of a dead direct client.
//! - If a leg is lost or the layout changes, the cut fails. The stamp stays, which harms nothing.

use super::control::ControlConnection;
use super::cut_steps::{CutStep, StepCut, supersede};
use super::layout_query::fetch_layout;
use super::leg_errors::lose_leg_if_gone;
use super::lifecycle::is_serving;
use super::replica_snapshots::ReplicaCut;
use super::state::ControllerState;
use crate::limits::{CUT_LIMIT, DIRECT_CLIENT_POLL, HOLD_LIMIT};
use crate::shared::Member;
use pagemesh_base::brick_name::BrickLabel;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::poison;
use pagemesh_base::slice::{SliceError, SliceRequest};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::mpsc::Sender;
use std::sync::{Arc, TryLockError};
use std::time::Duration;

/// The reason for which a snapshot was not cut. The manager drops it on the legs that prepared it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// Another client has attached the volume, or this one detaches it.
    #[error("this client does not hold the volume any more")]
    Detached,
    /// The volume is cut already.
    #[error("another snapshot of the volume is being taken; try again when it is done")]
    Busy,
    /// The layout, or an earlier snapshot, has this epoch or a newer one.
    #[error("epoch {snapshot} is not newer than epoch {present} of the volume; take a new epoch")]
    OldEpoch {
        /// The epoch of the snapshot.
        snapshot: Epoch,
        /// The epoch of the layout or of the stamps.
        present: Epoch,
    },
    /// The manager was not reached.
    #[error("the layout of the volume was not confirmed: {0}")]
    Manager(String),
    /// A part of the volume has no connection to a copy that writes must reach, or got none in time.
    #[error("a copy is lost or returns, and the layout changes; take the snapshot again")]
    LegsChanged,
    /// A direct client died during a write.
    #[error("a client died during a write, and its pages are made equal; take the snapshot again")]
    TornOperation,
    /// A brick refused.
    #[error("brick {brick} did not prepare the snapshot: {cause}")]
    Leg {
        /// The brick.
        brick: BrickLabel,
        /// Its answer.
        cause: SliceError,
    },
    /// Changes waited for the other volumes of the group, and went on before all volumes were cut.
    #[error(
        "the group was not cut within {} ms, so its writes go on; take the snapshot again",
        .0.as_millis()
    )]
    HoldExpired(Duration),
    /// The step does not follow the last one, or the cut has ended.
    #[error("the client has no cut of epoch {0} that waits for this step; take the snapshot again")]
    NoSuchStep(Epoch),
    /// The manager gave up the snapshots of the group.
    #[error("the group of volumes was given up; take the snapshot again")]
    Abandoned,
    /// Changes did not end in time.
    #[error(
        "writes that began before the snapshot did not end within {} s; take it again",
        .0.as_secs()
    )]
    Late(Duration),
}

impl CutError {
    /// Whether another try, with a new epoch, may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            CutError::Detached => false,
            CutError::Leg { cause, .. } => !matches!(cause, SliceError::Refused(_)),
            _ => true,
        }
    }
}

/// Tries to look at a channel between two of its calls: some 100 µs.
const CORE_TRIES: u32 = 4000;

/// Cuts a snapshot, and sends the result. It ends the cut in steps before it.
pub(super) async fn cut(
    state: Rc<ControllerState>,
    snapshot: Epoch,
    before: Option<Rc<StepCut>>,
    answer: Sender<Result<(), CutError>>,
) {
    supersede(&state, before).await;
    let result = run(&state, snapshot, None).await.map(drop);
    // The caller may have stopped waiting.
    let _ = answer.send(result);
    state.record_activity();
}

/// Cuts a snapshot, at once or in the steps of a group. Returns how long changes waited.
pub(super) async fn run(
    state: &Rc<ControllerState>,
    snapshot: Epoch,
    steps: Option<&StepCut>,
) -> Result<Duration, CutError> {
    let result = match state.is_cutting.replace(true) {
        true => Err(CutError::Busy),
        false => {
            let result = try_cut(state, snapshot, steps).await;
            state.is_cutting.set(false);
            result
        }
    };
    match &result {
        Ok(_) => tracing::info!(volume = %state.name, %snapshot, "a snapshot was cut"),
        Err(error) => {
            tracing::info!(volume = %state.name, %snapshot, %error, "a snapshot was not cut");
        }
    }
    result
}

async fn try_cut(
    state: &Rc<ControllerState>,
    snapshot: Epoch,
    steps: Option<&StepCut>,
) -> Result<Duration, CutError> {
    let until = state.now() + CUT_LIMIT;
    confirm_layout(state, until).await?;
    let legs = CutLegs::present(state)?;
    let present = state.shared.newest_stamp(legs.layout);
    if snapshot <= present {
        return Err(CutError::OldEpoch { snapshot, present });
    }
    let began = state.now();
    if defect::is(Defect::StampedBeforePrepared) {
        state.shared.cut(legs.layout, snapshot);
    }
    let replica = ReplicaCut::begin(state, snapshot);
    let has_prepared = prepare(state, &legs, snapshot).await;
    // Its answer is taken also if a leg refused.
    let replica = match replica {
        Some(replica) => replica.prepared(state).await,
        None => None,
    };
    has_prepared?;
    let prepared = state.now();
    let is_settled = || {
        let is_settled = |member: &Arc<Member>| is_settled(member, legs.layout);
        state.reconciling.get() == 0 && members(state).iter().all(|(_, it)| is_settled(it))
    };
    legs.wait_until(state, until, is_settled).await?;
    if let Some(steps) = steps {
        steps.pass(state, &legs, CutStep::Prepare, until).await?;
        legs.wait_until(state, until, is_settled).await?;
    }
    // No task runs between the wait and the following steps, so the layout is the same.
    let reconciled = state.reconciles.get();
    let hold = steps.map(|steps| (steps, Hold::begin(state, legs.layout, snapshot)));
    if hold.is_none() {
        state.shared.cut(legs.layout, snapshot);
    }
    if let Some(replica) = &replica {
        replica.raise_stamp();
    }
    let older = OlderChanges::now(state, snapshot);
    let held = match hold {
        Some((steps, hold)) => hold.until_ordered(&legs, steps).await?,
        None => Duration::ZERO,
    };
    let have_ended = || older.have_ended(state) || defect::is(Defect::OlderChangesNotAwaited);
    legs.wait_until(state, until, have_ended).await?;
    if state.reconciles.get() != reconciled {
        return Err(CutError::TornOperation);
    }
    let ended = state.now();
    flush(state, &legs).await?;
    log_steps(state, snapshot, [began, prepared, ended], held);
    legs.check(state)?;
    if let Some(replica) = replica {
        replica.finish(state);
    }
    Ok(held)
}

/// Logs the times of a cut: its begin, and the ends of its first steps.
fn log_steps(
    state: &ControllerState,
    snapshot: Epoch,
    [began, prepared, ended]: [Duration; 3],
    held: Duration,
) {
    tracing::debug!(
        volume = %state.name,
        %snapshot,
        prepare_us = (prepared - began).as_micros(),
        older_changes_us = (ended - prepared).as_micros(),
        flush_us = (state.now() - ended).as_micros(),
        held_us = held.as_micros(),
        "the steps of a cut"
    );
}

/// Changes wait, until this is dropped.
struct Hold<'a> {
    state: &'a ControllerState,
    began: Duration,
}

impl Hold<'_> {
    fn begin(state: &ControllerState, layout: Epoch, snapshot: Epoch) -> Hold<'_> {
        state.shared.hold_cut(layout, snapshot);
        let began = state.now();
        Hold { state, began }
    }

    /// Holds changes until the manager orders the next step: then all volumes of the group are held. Returns the time.
    async fn until_ordered(self, legs: &CutLegs, steps: &StepCut) -> Result<Duration, CutError> {
        let until = self.began + HOLD_LIMIT;
        match steps.pass(self.state, legs, CutStep::Raise, until).await {
            Err(CutError::Late(_)) => return Err(CutError::HoldExpired(HOLD_LIMIT)),
            passed => passed?,
        }
        // A direct client may have released the stamps at its own limit.
        match self.state.shared.release_cut() {
            true => Ok(self.state.now() - self.began),
            false => Err(CutError::HoldExpired(HOLD_LIMIT)),
        }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.state.shared.release_cut();
    }
}

/// Adopts the newest layout of the manager, and waits until channels use it.
async fn confirm_layout(state: &ControllerState, until: Duration) -> Result<(), CutError> {
    if state.is_closing() {
        return Err(CutError::Detached);
    }
    match fetch_layout(state).await {
        Ok(attached) => state.adopt(attached),
        Err(_) if state.is_closing() => return Err(CutError::Detached),
        Err(cause) => return Err(CutError::Manager(cause.to_string())),
    }
    let is_late = || {
        state.wake_at(until);
        state.is_closing() || state.now() >= until
    };
    state.wait_until(|| is_serving(state) || is_late()).await;
    match is_serving(state) {
        true => Ok(()),
        false if state.is_closing() => Err(CutError::Detached),
        false => Err(CutError::LegsChanged),
    }
}

/// A leg that has a part in the cut.
struct CutLeg {
    column: usize,
    leg: usize,
    serial: u64,
    buffers: bool,
    control: Rc<ControlConnection>,
}

/// The written legs, and the layout that names them.
pub(super) struct CutLegs {
    layout: Epoch,
    legs: Vec<CutLeg>,
}

impl CutLegs {
    /// The written legs now, if channels use all of them.
    fn present(state: &ControllerState) -> Result<CutLegs, CutError> {
        if state.is_closing() {
            return Err(CutError::Detached);
        }
        if !is_serving(state) {
            return Err(CutError::LegsChanged);
        }
        let model = state.model();
        let mut legs = vec![];
        for (column, entry) in model.columns.iter().enumerate() {
            for (leg, keep) in entry.legs.iter().enumerate() {
                if !keep.is_written() {
                    continue;
                }
                let control = keep.control.clone().ok_or(CutError::LegsChanged)?;
                legs.push(CutLeg {
                    column,
                    leg,
                    serial: keep.serial,
                    buffers: model.buffers(column, leg),
                    control,
                });
            }
        }
        let layout = model.epoch();
        Ok(CutLegs { layout, legs })
    }

    /// Checks that the layout and the connections are the same as at the beginning.
    fn check(&self, state: &ControllerState) -> Result<(), CutError> {
        let now = CutLegs::present(state)?;
        let place = |it: &CutLeg| (it.column, it.leg, it.serial);
        let is_same =
            self.layout == now.layout && self.legs.iter().map(place).eq(now.legs.iter().map(place));
        is_same.then_some(()).ok_or(CutError::LegsChanged)
    }

    /// Waits until a condition holds. The layout is the same when this returns.
    pub(super) async fn wait_until(
        &self,
        state: &ControllerState,
        until: Duration,
        condition: impl Fn() -> bool,
    ) -> Result<(), CutError> {
        let result = RefCell::new(None);
        state
            .wait_until(|| {
                let found = match self.check(state) {
                    Err(error) => Err(error),
                    Ok(()) if condition() => Ok(()),
                    Ok(()) if state.now() >= until => Err(CutError::Late(CUT_LIMIT)),
                    Ok(()) => {
                        state.wake_at(state.now() + DIRECT_CLIENT_POLL);
                        return false;
                    }
                };
                *result.borrow_mut() = Some(found);
                true
            })
            .await;
        result.take().unwrap_or(Err(CutError::LegsChanged))
    }

    /// Sends a request to the chosen legs at once, and waits for all answers.
    async fn call(
        &self,
        state: &ControllerState,
        request: &SliceRequest,
        is_meant: impl Fn(&CutLeg) -> bool,
    ) -> Result<(), CutError> {
        let meant = self.legs.iter().filter(|it| is_meant(it));
        let asked = meant.map(|it| (it, it.control.submit(state, request.clone())));
        let asked: Vec<_> = asked.collect();
        let mut result = Ok(());
        for (it, tag) in asked {
            let Err(cause) = it.control.answer(state, tag).await else {
                continue;
            };
            let brick = {
                let model = state.model();
                let keep = &model.columns[it.column].legs[it.leg];
                model.names.label(keep.leg.brick)
            };
            if state.serial(it.column, it.leg) == it.serial {
                lose_leg_if_gone(state, it.column, it.leg, &cause);
            }
            result = result.and(Err(CutError::Leg { brick, cause }));
        }
        result
    }
}

async fn prepare(state: &ControllerState, legs: &CutLegs, snapshot: Epoch) -> Result<(), CutError> {
    let request = SliceRequest::PrepareSnapshot { snapshot };
    legs.call(state, &request, |_| true).await
}

async fn flush(state: &ControllerState, legs: &CutLegs) -> Result<(), CutError> {
    let is_flushed = !defect::is(Defect::CutNotFlushed);
    legs.call(state, &SliceRequest::Flush, |leg| leg.buffers && is_flushed)
        .await
}

fn members(state: &ControllerState) -> Vec<(u32, Arc<Member>)> {
    use crate::engine::locks::CONTROLLER;
    let members = poison::lock(&state.shared.members);
    let channels = members.iter().filter(|(number, _)| **number != CONTROLLER);
    channels
        .map(|(number, it)| (*number, Arc::clone(it)))
        .collect()
}

/// Whether a channel has no change in flight that it first sent under an older layout.
fn is_settled(member: &Member, layout: Epoch) -> bool {
    has(member, |core| !core.has_changes_of_other_layout(layout))
}

/// Whether a channel is between two calls, and has this property. A channel that was dropped has none,
/// until its changes have ended and it is no member any more.
///
/// The thread of a busy channel is almost always inside a call of a few microseconds. So this tries for longer than a
/// call takes; but it does not wait for a call that a lost leg delays, because the controller is needed for that.
fn has(member: &Member, property: impl Fn(&crate::client::channel::ChannelCore) -> bool) -> bool {
    crate::steps::step("core");
    for _ in 0..CORE_TRIES {
        let core = match member.core.try_lock() {
            Ok(core) => core,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                std::hint::spin_loop();
                continue;
            }
        };
        return core.as_deref().is_some_and(property);
    }
    false
}

/// The changes that may have been stamped before the cut.
struct OlderChanges {
    snapshot: Epoch,
    /// Channels. A channel that joins later stamps with the snapshot.
    channels: RefCell<Vec<(u32, Arc<Member>)>>,
    /// Rows of direct clients with an operation in progress, and its number.
    rows: RefCell<Vec<(usize, u64)>>,
    /// Range locks of the controller's own copies.
    guards: BTreeSet<u32>,
}

impl OlderChanges {
    /// The changes that are in flight now, after the stamp was raised. A direct client activates its row
    /// before it loads the stamp, so a row that is idle here stamps with the snapshot.
    fn now(state: &ControllerState, snapshot: Epoch) -> OlderChanges {
        let rows = state.shared.direct_access.get().map(|access| {
            let active = access.segment.active_ops();
            let sequence = |row| access.segment.row(row).op_sequence();
            active.map(|(row, _)| (row, sequence(row))).collect()
        });
        OlderChanges {
            snapshot,
            channels: RefCell::new(members(state)),
            rows: RefCell::new(rows.unwrap_or_default()),
            guards: state.range_guards.borrow().clone(),
        }
    }

    fn have_ended(&self, state: &ControllerState) -> bool {
        if let Some(access) = state.shared.direct_access.get() {
            let is_active = |(row, sequence): &(usize, u64)| {
                access.segment.row(*row).op_sequence() == *sequence
            };
            self.rows.borrow_mut().retain(is_active);
        }
        let left: BTreeSet<u32> = members(state).iter().map(|(number, _)| *number).collect();
        let is_open = |(number, member): &(u32, Arc<Member>)| {
            left.contains(number) && !has(member, |core| !core.has_changes_before(self.snapshot))
        };
        self.channels.borrow_mut().retain(is_open);
        self.rows.borrow().is_empty()
            && self.channels.borrow().is_empty()
            && self.guards.is_disjoint(&state.range_guards.borrow())
    }
}
