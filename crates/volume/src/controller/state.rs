//! The state that the controller's tasks share, and the conditions that they can wait for.

use super::call::{BlockingCall, CallOutcome, CallRunner};
use super::control::ControlConnection;
use super::model::VolumeModel;
use super::pending_snapshots::ReplicaSnapshots;
use super::scrub_schedule::{ScrubOrder, Scrubber};
use super::{ControllerEvent, Task};
use crate::direct_access::DirectAccess;
use crate::engine::locks::CONTROLLER;
use crate::engine::locks::{LockHolder, LockRange};
use crate::limits::{DIRECT_CLIENT_POLL, LINK_END_RETRY};
use crate::shared::{Member, MemberMessage, VolumeShared};
use crate::status::Count;
use pagemesh_base::authority::{AuthorityError, BrickAddress, ResolvedLayout};
use pagemesh_base::layout::{BrickId, LegState, VolumeName};
use pagemesh_base::poison;
use pagemesh_base::slice::{Leg, SliceError};
use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::os::fd::RawFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// The reason for which a volume was not attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AttachFailure {
    Authority(AuthorityError),
    /// These bricks hold a column's only in-sync copies.
    Unreachable(String),
    Fenced,
}

pub(super) struct ControllerState {
    pub name: VolumeName,
    pub shared: Arc<VolumeShared>,
    caller: Box<dyn CallRunner>,
    now: Cell<Duration>,
    /// The earliest time that a task waits for.
    pub deadline: Cell<Option<Duration>>,
    /// Rises with each event that may let a task go on.
    pub activity: Cell<u64>,
    /// The operations that the controller itself began.
    controller_ops: Cell<u64>,
    /// Whether the status must be reported anew.
    pub status_changed: Cell<bool>,
    /// Whether channels have joined that lack connections.
    pub channels_opened: Cell<bool>,
    model: RefCell<VolumeModel>,
    scrub: RefCell<Scrubber>,
    calls: RefCell<BTreeMap<u64, Option<CallOutcome>>>,
    next_id: Cell<u64>,
    pub granted: RefCell<BTreeSet<u32>>,
    controls: RefCell<Vec<Weak<ControlConnection>>>,
    /// Channels that were told to end connections, and may not have done so.
    ending_members: RefCell<Vec<Arc<Member>>>,
    /// The time since which a channel that has served lacks a session for the next snapshot.
    pub no_session_since: Cell<Option<Duration>>,
    pub spawned: RefCell<Vec<Task>>,
    pub attach_result: Cell<Option<Result<(), AttachFailure>>>,
    /// Whether a snapshot is being cut.
    pub is_cutting: Cell<bool>,
    pub replica_snapshots: RefCell<ReplicaSnapshots>,
    /// Reconciliations that have begun, and those of them that run.
    pub reconciles: Cell<u64>,
    pub reconciling: Cell<u64>,
    /// The keys of the controller's range locks, waiting ones included.
    pub range_guards: RefCell<BTreeSet<u32>>,
    pub closing: Cell<bool>,
    pub ended: Cell<bool>,
}

impl ControllerState {
    pub(super) fn new(
        name: VolumeName,
        hub: Arc<VolumeShared>,
        caller: Box<dyn CallRunner>,
    ) -> ControllerState {
        ControllerState {
            name,
            shared: hub,
            caller,
            now: Cell::default(),
            deadline: Cell::default(),
            activity: Cell::default(),
            controller_ops: Cell::default(),
            status_changed: Cell::new(true),
            channels_opened: Cell::default(),
            model: RefCell::default(),
            scrub: RefCell::default(),
            calls: RefCell::default(),
            next_id: Cell::default(),
            granted: RefCell::default(),
            controls: RefCell::default(),
            ending_members: RefCell::default(),
            no_session_since: Cell::default(),
            spawned: RefCell::default(),
            attach_result: Cell::default(),
            is_cutting: Cell::default(),
            replica_snapshots: RefCell::default(),
            reconciles: Cell::default(),
            reconciling: Cell::default(),
            range_guards: RefCell::default(),
            closing: Cell::default(),
            ended: Cell::default(),
        }
    }

    pub(super) fn model(&self) -> Ref<'_, VolumeModel> {
        self.model.borrow()
    }

    pub(super) fn model_mut(&self) -> RefMut<'_, VolumeModel> {
        self.status_changed.set(true);
        self.record_activity();
        self.model.borrow_mut()
    }

    pub(super) fn scrub(&self) -> Ref<'_, Scrubber> {
        self.scrub.borrow()
    }

    pub(super) fn scrub_mut(&self) -> RefMut<'_, Scrubber> {
        self.scrub.borrow_mut()
    }

    /// Applies an order; true if the caller must start the scrub task.
    pub(super) fn order_scrub(&self, order: ScrubOrder) -> bool {
        self.status_changed.set(true);
        self.record_activity();
        let mut scrub = self.scrub_mut();
        scrub.apply_order(order, self.now());
        !std::mem::replace(&mut scrub.has_task, true)
    }

    pub(super) fn record_activity(&self) {
        self.activity.set(self.activity.get() + 1);
    }

    /// The number of a new operation.
    pub(super) fn next_op(&self) -> u64 {
        self.controller_ops.set(self.controller_ops.get() + 1);
        self.shared.next_op()
    }

    /// The number of operations that channels began. It shows whether they are busy.
    pub(super) fn channel_ops(&self) -> u64 {
        self.shared.last_op() - self.controller_ops.get()
    }

    pub(super) fn begin_turn(&self, now: Duration) {
        self.now.set(now);
        self.shared.replication.update_age(now);
        self.check_connections();
    }

    pub(super) fn now(&self) -> Duration {
        self.now.get()
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.get() || self.model().fenced
    }

    pub(super) fn wait_on(&self, into: &mut Vec<RawFd>) -> Option<Instant> {
        let mut controls = self.controls.borrow_mut();
        controls.retain(|control| control.strong_count() > 0);
        let controls = controls.iter().filter_map(Weak::upgrade);
        controls.filter_map(|control| control.wait_on(into)).min()
    }

    pub(super) fn take_event(&self, event: ControllerEvent) {
        match event {
            ControllerEvent::LegLost {
                column,
                leg,
                serial,
                why,
            } => self.lose_leg_if_current(column, leg, serial, &why),
            ControllerEvent::Fenced => self.fence(),
            ControllerEvent::ChannelOpened => self.channels_opened.set(true),
            ControllerEvent::CallCompleted(id, outcome) => {
                if let Some(slot) = self.calls.borrow_mut().get_mut(&id) {
                    *slot = Some(outcome);
                }
            }
            ControllerEvent::ChannelDropped(_)
            | ControllerEvent::Check(_)
            | ControllerEvent::Scrub(_)
            | ControllerEvent::Refresh(_)
            | ControllerEvent::DirectAccessEnabled
            | ControllerEvent::Reconcile(..)
            | ControllerEvent::CutStep(_)
            | ControllerEvent::Cut(..)
            | ControllerEvent::Detach => {}
        }
    }

    pub(super) fn spawn(&self, task: Task) {
        self.spawned.borrow_mut().push(task);
        self.record_activity();
    }

    // Conditions that a task can wait for.

    /// Waits until a condition holds.
    pub(super) async fn wait_until(&self, mut is_so: impl FnMut() -> bool) {
        poll_fn(|_| {
            if is_so() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    /// Requests the next poll at this time at the latest.
    pub(super) fn wake_at(&self, at: Duration) {
        let earliest = self.deadline.get().map_or(at, |other| other.min(at));
        self.deadline.set(Some(earliest));
    }

    pub(super) async fn sleep(&self, time: Duration) {
        let at = self.now() + time;
        self.wait_until(|| {
            self.wake_at(at);
            self.now() >= at
        })
        .await;
    }

    pub(super) fn start_call(&self, call: BlockingCall) -> u64 {
        let id = self.next_id.get() + 1;
        self.next_id.set(id);
        self.calls.borrow_mut().insert(id, None);
        self.caller.start(id, call);
        id
    }

    pub(super) async fn call_outcome(&self, id: u64) -> CallOutcome {
        poll_fn(|_| {
            let mut calls = self.calls.borrow_mut();
            match calls.get_mut(&id).and_then(Option::take) {
                Some(outcome) => {
                    calls.remove(&id);
                    self.record_activity();
                    Poll::Ready(outcome)
                }
                None => Poll::Pending,
            }
        })
        .await
    }

    pub(super) async fn call(&self, call: BlockingCall) -> CallOutcome {
        let id = self.start_call(call);
        self.call_outcome(id).await
    }

    /// Starts to connect to a leg.
    pub(super) fn start_connect(&self, column: usize, leg: usize) -> u64 {
        let model = self.model();
        let keep = &model.columns[column].legs[leg].leg;
        let call = BlockingCall::Connect {
            brick: keep.brick,
            address: model.bricks.get(&keep.brick).cloned().unwrap_or_default(),
            slice: keep.slice,
            epoch: model.epoch(),
        };
        drop(model);
        self.start_call(call)
    }

    pub(super) async fn connect_outcome(&self, id: u64) -> Result<Box<dyn Leg>, SliceError> {
        match self.call_outcome(id).await {
            CallOutcome::Connected(result) => result,
            _ => Err(SliceError::Lost("no connection was made".into())),
        }
    }

    /// Adopts the addresses and names of bricks.
    pub(super) fn adopt_addresses(&self, bricks: BTreeMap<BrickId, BrickAddress>) {
        let named = bricks.iter();
        let names = named.filter_map(|(id, at)| Some((*id, at.name.clone()?)));
        let names = Arc::new(names.collect());
        let mut model = self.model_mut();
        (model.bricks, model.names) = (bricks, names);
    }

    /// Adopts the layout and the addresses of the authority.
    pub(super) fn adopt(&self, attached: ResolvedLayout) {
        let now = self.now();
        self.adopt_addresses(attached.bricks);
        self.model_mut().adopt(attached.layout, now);
    }

    pub(super) fn control(&self, leg: Box<dyn Leg>) -> Rc<ControlConnection> {
        let control = ControlConnection::new(leg, self.model().epoch());
        self.controls.borrow_mut().push(Rc::downgrade(&control));
        control
    }

    /// Takes a range lock for the life of the guard.
    pub(super) async fn lock(&self, column: usize, offset: u64, len: u64) -> RangeGuard<'_> {
        let key = self.next_id.get() as u32 + 1;
        self.next_id.set(self.next_id.get() + 1);
        let range = LockRange::new(column, offset, len);
        self.range_guards.borrow_mut().insert(key);
        let guard = RangeGuard {
            state: self,
            range,
            key,
            _direct_access: DirectAccessGuard::new(self.shared.direct_access.get()),
        };
        if !self.shared.locks.acquire(range, guard.holder()) {
            self.wait_until(|| self.granted.borrow_mut().remove(&key))
                .await;
            self.record_activity();
        }
        self.wait_for_direct_clients().await;
        guard
    }

    /// Blocks direct clients for the life of the guard. Returns once no direct operation is in
    /// progress and all torn ones are reconciled.
    pub(super) async fn block_direct_clients(&self) -> DirectAccessGuard<'_> {
        let guard = DirectAccessGuard::new(self.shared.direct_access.get());
        self.wait_for_direct_clients().await;
        guard
    }

    /// Blocks direct clients, and returns once no live one has an operation in progress on the
    /// selected files. It does not wait for dead ones: their reconciliation waits until the
    /// column serves. So the code that makes the column serve may not wait for it.
    pub(super) async fn block_live_direct_clients(
        &self,
        is_meant: impl Fn(u64) -> bool,
    ) -> DirectAccessGuard<'_> {
        let guard = DirectAccessGuard::new(self.shared.direct_access.get());
        self.wait_until_idle(|guests| guests.are_files_idle(&is_meant))
            .await;
        guard
    }

    /// Waits until no row is active. Operations take microseconds, unless a client is stalled:
    /// its mount handles that.
    async fn wait_for_direct_clients(&self) {
        self.wait_until_idle(|guests| guests.segment.is_idle())
            .await;
    }

    async fn wait_until_idle(&self, are_quiet: impl Fn(&DirectAccess) -> bool) {
        let Some(guests) = self.shared.direct_access.get() else {
            return;
        };
        self.wait_until(|| {
            let is_quiet = are_quiet(guests);
            if !is_quiet {
                self.wake_at(self.now() + DIRECT_CLIENT_POLL);
            }
            is_quiet || self.is_closing()
        })
        .await;
    }

    // Transitions of legs.

    /// Checks all connections, and loses the legs with ended ones. This includes connections
    /// that belong to no leg yet, since a task would wait for their answers in vain.
    fn check_connections(&self) {
        let controls = self.controls.borrow();
        let controls = controls.iter().filter_map(Weak::upgrade);
        controls.for_each(|control| control.poll());
        let mut lost = vec![];
        for (column, keep) in self.model().columns.iter().enumerate() {
            for (leg, keep) in keep.legs.iter().enumerate() {
                let why = keep
                    .control
                    .as_ref()
                    .and_then(|control| control.loss_cause());
                lost.extend(why.map(|why| (column, leg, why)));
            }
        }
        for (column, leg, why) in lost {
            self.lose_leg(column, leg, &why);
        }
    }

    fn lose_leg_if_current(&self, column: usize, leg: usize, serial: u64, why: &str) {
        if self.serial(column, leg) == serial {
            self.lose_leg(column, leg, why);
        }
    }

    /// The serial of a leg's connections; 0 if it has none.
    pub(super) fn serial(&self, column: usize, leg: usize) -> u64 {
        let model = self.model();
        let keep = model.columns.get(column).and_then(|c| c.legs.get(leg));
        keep.filter(|keep| keep.control.is_some())
            .map_or(0, |keep| keep.serial)
    }

    /// Records that a leg cannot be reached, or cannot go on.
    pub(super) fn lose_leg(&self, number: usize, leg: usize, why: &str) {
        let now = self.now();
        let mut model = self.model_mut();
        let names = Arc::clone(&model.names);
        let column = &mut model.columns[number];
        let keep = &mut column.legs[leg];
        if let Some(control) = keep.control.take() {
            control.fail(why);
            let (volume, brick) = (&self.name, names.label(keep.leg.brick));
            tracing::warn!(%volume, %brick, why, "lost a leg");
            self.shared.counters.add(Count::LegsLost, 1);
            // These connections end now. The next snapshot may have to wait for others.
            let seat = (number, leg);
            for member in poison::lock(&self.shared.members).values() {
                if member.end_links(|&place, _| place == seat) {
                    self.add_ending_member(member);
                }
            }
        }
        keep.requested_state = None;
        keep.last_barrier = None;
        keep.resync = None;
        keep.is_replicating = false;
        keep.last_error = Some(why.to_owned());
        if !column.has_source() && !column.needs_recovery {
            column.needs_recovery = true;
            column.gate = crate::snapshot::ColumnGate::Down;
            column.down_since = Some(now);
        }
        if column.needs_recovery && !column.has_source() {
            // A syncing leg has no source any more.
            for keep in &mut column.legs {
                if keep.leg.state == LegState::Syncing {
                    if let Some(control) = keep.control.take() {
                        control.fail("its source is lost");
                    }
                    keep.resync = None;
                }
            }
        }
    }

    /// Records a channel that was told to end connections.
    pub(super) fn add_ending_member(&self, member: &Arc<Member>) {
        self.ending_members.borrow_mut().push(Arc::clone(member));
    }

    /// Rejects a channel that has not served yet, because a brick has no session for it. Only
    /// that channel fails.
    pub(super) fn reject_channel(&self, number: u32, member: &Arc<Member>, why: &str) {
        tracing::warn!(volume = %self.name, why, "a channel was turned away");
        self.shared.leave(number);
        let why = format!("no further channel of {} can be opened: {why}", self.name);
        member.send(MemberMessage::Rejected(why));
        self.add_ending_member(member);
    }

    /// Makes channels end the connections that they were told to end, even if their threads are
    /// not polling them. Otherwise the pool of a dead brick would stay mapped, or a session
    /// that the next connection needs would stay taken. If a channel's thread is inside a call,
    /// the channel is tried again soon.
    pub(super) fn end_links(&self) {
        let mut ending = self.ending_members.borrow_mut();
        ending.retain(|member| !member.try_process_messages());
        if !ending.is_empty() {
            self.wake_at(self.now() + LINK_END_RETRY);
        }
    }

    pub(super) fn fence(&self) {
        if !self.model().fenced {
            tracing::warn!(volume = %self.name, "another client attached");
            self.model_mut().fenced = true;
            let view = self.model().snapshot();
            self.shared.publish(view);
        }
    }
}

impl ControllerState {
    /// Ends the requests of channels, because the volume is detached.
    pub(super) fn fence_channels(&self) {
        let mut view = self.model().snapshot();
        view.fenced = true;
        self.shared.publish(view);
    }
}

/// Blocks direct clients while it lives.
pub(super) struct DirectAccessGuard<'a>(Option<&'a DirectAccess>);

impl<'a> DirectAccessGuard<'a> {
    pub(super) fn new(guests: Option<&'a DirectAccess>) -> DirectAccessGuard<'a> {
        if let Some(guests) = guests {
            guests.segment.close();
        }
        DirectAccessGuard(guests)
    }
}

impl Drop for DirectAccessGuard<'_> {
    fn drop(&mut self) {
        if let Some(guests) = self.0 {
            guests.segment.reopen();
        }
    }
}

/// A range lock of the controller. It blocks all direct clients, because they do not take range
/// locks.
pub(super) struct RangeGuard<'a> {
    state: &'a ControllerState,
    range: LockRange,
    key: u32,
    _direct_access: DirectAccessGuard<'a>,
}

impl RangeGuard<'_> {
    fn holder(&self) -> LockHolder {
        LockHolder {
            member: CONTROLLER,
            key: self.key,
        }
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        self.state.range_guards.borrow_mut().remove(&self.key);
        let mut turns = vec![];
        self.state
            .shared
            .locks
            .release(self.range, self.holder(), &mut turns);
        let mut mine = vec![];
        self.state
            .shared
            .deliver_grants(&mut turns, CONTROLLER, &mut mine);
        self.state.granted.borrow_mut().extend(mine);
        self.state.record_activity();
    }
}
