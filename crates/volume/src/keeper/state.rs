//! What the keeper's tasks share, and what they can wait for.

use super::call::{Call, Caller, Outcome};
use super::control::Control;
use super::model::Model;
use super::scrub::{Order, Scrub};
use super::{AttachFailure, Event, Task, reform, report};
use crate::authority::{Attached, AuthorityError, BrickAddress};
use crate::guests::Guests;
use crate::hub::{Hub, KEEPER, Member, Note};
use crate::limits::{END_RETRY, GUESTS_LOOK};
use crate::locks::{Holder, LockRange};
use crate::status::Count;
use pagemesh_base::layout::{BrickId, LegState, Name};
use pagemesh_base::slice::{Leg, SliceError};
use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::os::fd::RawFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

pub(super) struct State {
    pub name: Name,
    pub hub: Arc<Hub>,
    caller: Box<dyn Caller>,
    now: Cell<Duration>,
    /// The earliest time that a task waits for.
    pub deadline: Cell<Option<Duration>>,
    /// Rises with everything that may let a task go on.
    pub activity: Cell<u64>,
    /// Operations that this began itself.
    own_ops: Cell<u64>,
    /// The status is to be reported anew.
    pub touched: Cell<bool>,
    /// Channels have come that lack connections.
    pub joined: Cell<bool>,
    model: RefCell<Model>,
    scrub: RefCell<Scrub>,
    calls: RefCell<BTreeMap<u64, Option<Outcome>>>,
    next_id: Cell<u64>,
    pub granted: RefCell<BTreeSet<u32>>,
    controls: RefCell<Vec<Weak<Control>>>,
    /// Channels that were told to end connections, and may not have looked.
    ending: RefCell<Vec<Arc<Member>>>,
    /// Since when a channel that has served lacks a session for the next view.
    pub unseated: Cell<Option<Duration>>,
    pub spawned: RefCell<Vec<Task>>,
    pub attached: Cell<Option<Result<(), AttachFailure>>>,
    pub closing: Cell<bool>,
    pub ended: Cell<bool>,
}

impl State {
    pub(super) fn new(name: Name, hub: Arc<Hub>, caller: Box<dyn Caller>) -> State {
        State {
            name,
            hub,
            caller,
            now: Cell::default(),
            deadline: Cell::default(),
            activity: Cell::default(),
            own_ops: Cell::default(),
            touched: Cell::new(true),
            joined: Cell::default(),
            model: RefCell::default(),
            scrub: RefCell::default(),
            calls: RefCell::default(),
            next_id: Cell::default(),
            granted: RefCell::default(),
            controls: RefCell::default(),
            ending: RefCell::default(),
            unseated: Cell::default(),
            spawned: RefCell::default(),
            attached: Cell::default(),
            closing: Cell::default(),
            ended: Cell::default(),
        }
    }

    pub(super) fn model(&self) -> Ref<'_, Model> {
        self.model.borrow()
    }

    pub(super) fn edit(&self) -> RefMut<'_, Model> {
        self.touched.set(true);
        self.act();
        self.model.borrow_mut()
    }

    pub(super) fn scrub(&self) -> Ref<'_, Scrub> {
        self.scrub.borrow()
    }

    pub(super) fn scrub_mut(&self) -> RefMut<'_, Scrub> {
        self.scrub.borrow_mut()
    }

    /// Takes an order; true if there is no task yet that follows it.
    pub(super) fn order_scrub(&self, order: Order) -> bool {
        self.touched.set(true);
        self.act();
        let mut scrub = self.scrub_mut();
        scrub.obey(order, self.now());
        !std::mem::replace(&mut scrub.has_task, true)
    }

    pub(super) fn act(&self) {
        self.activity.set(self.activity.get() + 1);
    }

    /// The number of a new operation.
    pub(super) fn next_op(&self) -> u64 {
        self.own_ops.set(self.own_ops.get() + 1);
        self.hub.next_op()
    }

    /// How many operations channels began: tells whether others are at work.
    pub(super) fn ops_of_others(&self) -> u64 {
        self.hub.ops() - self.own_ops.get()
    }

    pub(super) fn begin_turn(&self, now: Duration) {
        self.now.set(now);
        self.hub.ship.look(now);
        self.look_at_connections();
    }

    pub(super) fn now(&self) -> Duration {
        self.now.get()
    }

    pub(super) fn is_over(&self) -> bool {
        self.closing.get() || self.model().fenced
    }

    pub(super) fn wait_on(&self, into: &mut Vec<RawFd>) -> Option<Instant> {
        let mut controls = self.controls.borrow_mut();
        controls.retain(|control| control.strong_count() > 0);
        let controls = controls.iter().filter_map(Weak::upgrade);
        controls.filter_map(|control| control.wait_on(into)).min()
    }

    pub(super) fn take_event(&self, event: Event) {
        match event {
            Event::Lost {
                column,
                leg,
                serial,
                why,
            } => self.lose_if(column, leg, serial, &why),
            Event::Fenced => self.fence(),
            Event::Joined => self.joined.set(true),
            Event::Guests => reform::offer(self),
            Event::Called(id, outcome) => {
                if let Some(slot) = self.calls.borrow_mut().get_mut(&id) {
                    *slot = Some(outcome);
                }
            }
            Event::Abandoned(_)
            | Event::Check(_)
            | Event::Scrub(_)
            | Event::Refresh(_)
            | Event::Heal(..)
            | Event::Detach => {}
        }
    }

    pub(super) fn spawn(&self, task: Task) {
        self.spawned.borrow_mut().push(task);
        self.act();
    }

    // What a task can wait for.

    /// Waits until something is so.
    pub(super) async fn until(&self, mut is_so: impl FnMut() -> bool) {
        poll_fn(|_| {
            if is_so() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    /// Has the turn come back at this time at the latest.
    pub(super) fn wake_at(&self, at: Duration) {
        let earliest = self.deadline.get().map_or(at, |other| other.min(at));
        self.deadline.set(Some(earliest));
    }

    pub(super) async fn sleep(&self, time: Duration) {
        let at = self.now() + time;
        self.until(|| {
            self.wake_at(at);
            self.now() >= at
        })
        .await;
    }

    pub(super) fn start_call(&self, call: Call) -> u64 {
        let id = self.next_id.get() + 1;
        self.next_id.set(id);
        self.calls.borrow_mut().insert(id, None);
        self.caller.start(id, call);
        id
    }

    pub(super) async fn called(&self, id: u64) -> Outcome {
        poll_fn(|_| {
            let mut calls = self.calls.borrow_mut();
            match calls.get_mut(&id).and_then(Option::take) {
                Some(outcome) => {
                    calls.remove(&id);
                    self.act();
                    Poll::Ready(outcome)
                }
                None => Poll::Pending,
            }
        })
        .await
    }

    pub(super) async fn call(&self, call: Call) -> Outcome {
        let id = self.start_call(call);
        self.called(id).await
    }

    /// The layout as the authority has it, if the volume is still this
    /// client's.
    pub(super) async fn ask_layout(&self) -> Result<Attached, AuthorityError> {
        let attachment = self.model().attachment;
        let told = report::copies(self);
        match self.call(Call::Layout { attachment, told }).await {
            Outcome::Attached(Err(AuthorityError::Fenced)) => {
                self.fence();
                Err(AuthorityError::Fenced)
            }
            Outcome::Attached(result) => result,
            _ => Err(AuthorityError::Unreachable("it gave no layout".into())),
        }
    }

    /// Starts to connect to a leg.
    pub(super) fn start_connect(&self, column: usize, leg: usize) -> u64 {
        let model = self.model();
        let keep = &model.columns[column].legs[leg].leg;
        let call = Call::Connect {
            brick: keep.brick,
            address: model.bricks.get(&keep.brick).cloned().unwrap_or_default(),
            slice: keep.slice,
            epoch: model.epoch(),
        };
        drop(model);
        self.start_call(call)
    }

    pub(super) async fn connected(&self, id: u64) -> Result<Box<dyn Leg>, SliceError> {
        match self.called(id).await {
            Outcome::Connected(result) => result,
            _ => Err(SliceError::Lost("no connection was made".into())),
        }
    }

    /// Takes over where bricks are.
    pub(super) fn adopt_addresses(&self, bricks: BTreeMap<BrickId, BrickAddress>) {
        self.edit().bricks = bricks;
    }

    /// Takes over what the authority says.
    pub(super) fn adopt(&self, attached: Attached) {
        let now = self.now();
        self.adopt_addresses(attached.bricks);
        self.edit().adopt(attached.layout, now);
    }

    pub(super) fn control(&self, leg: Box<dyn Leg>) -> Rc<Control> {
        let control = Control::new(leg, self.model().epoch());
        self.controls.borrow_mut().push(Rc::downgrade(&control));
        control
    }

    /// Takes a range lock for as long as the guard lives.
    pub(super) async fn lock(&self, column: usize, offset: u64, len: u64) -> RangeGuard<'_> {
        let key = self.next_id.get() as u32 + 1;
        self.next_id.set(self.next_id.get() + 1);
        let range = LockRange::new(column, offset, len);
        let guard = RangeGuard {
            state: self,
            range,
            key,
            _guests: GuestGuard::new(self.hub.guests.get()),
        };
        if !self.hub.locks.acquire(range, guard.holder()) {
            self.until(|| self.granted.borrow_mut().remove(&key)).await;
            self.act();
        }
        self.await_guests().await;
        guard
    }

    /// Keeps guests away for as long as the guard lives, once all are out, and what the dead left
    /// is alike.
    pub(super) async fn keep_guests_out(&self) -> GuestGuard<'_> {
        let guard = GuestGuard::new(self.hub.guests.get());
        self.await_guests().await;
        guard
    }

    /// The same, once those are out that were inside of files that are meant, and live. The
    /// dead are out when their pages are alike, which waits for the column: whoever makes
    /// it serve may not wait for that.
    pub(super) async fn keep_living_guests_out(
        &self,
        is_meant: impl Fn(u64) -> bool,
    ) -> GuestGuard<'_> {
        let guard = GuestGuard::new(self.hub.guests.get());
        self.await_quiet(|guests| guests.are_quiet(&is_meant)).await;
        guard
    }

    /// Their operations take microseconds, unless one stands still: its mount sees to that.
    async fn await_guests(&self) {
        self.await_quiet(|guests| guests.segment.is_quiet()).await;
    }

    async fn await_quiet(&self, are_quiet: impl Fn(&Guests) -> bool) {
        let Some(guests) = self.hub.guests.get() else {
            return;
        };
        self.until(|| {
            let is_quiet = are_quiet(guests);
            if !is_quiet {
                self.wake_at(self.now() + GUESTS_LOOK);
            }
            is_quiet || self.is_over()
        })
        .await;
    }

    // What happens to legs.

    /// Looks at all connections, also at those of no leg yet, whose ends would be
    /// waited for in vain; loses the legs whose connections have ended.
    fn look_at_connections(&self) {
        let controls = self.controls.borrow();
        let controls = controls.iter().filter_map(Weak::upgrade);
        controls.for_each(|control| control.look());
        let mut lost = vec![];
        for (column, keep) in self.model().columns.iter().enumerate() {
            for (leg, keep) in keep.legs.iter().enumerate() {
                let why = keep.control.as_ref().and_then(|control| control.lost());
                lost.extend(why.map(|why| (column, leg, why)));
            }
        }
        for (column, leg, why) in lost {
            self.lose(column, leg, &why);
        }
    }

    fn lose_if(&self, column: usize, leg: usize, serial: u64, why: &str) {
        if self.serial(column, leg) == serial {
            self.lose(column, leg, why);
        }
    }

    /// The serial of a leg's connections, 0 if it has none.
    pub(super) fn serial(&self, column: usize, leg: usize) -> u64 {
        let model = self.model();
        let keep = model.columns.get(column).and_then(|c| c.legs.get(leg));
        keep.filter(|keep| keep.control.is_some())
            .map_or(0, |keep| keep.serial)
    }

    /// A leg cannot be reached, or cannot go on.
    pub(super) fn lose(&self, number: usize, leg: usize, why: &str) {
        let now = self.now();
        let mut model = self.edit();
        let column = &mut model.columns[number];
        let keep = &mut column.legs[leg];
        if let Some(control) = keep.control.take() {
            control.give_up(why);
            tracing::warn!(volume = %self.name, brick = %keep.leg.brick, why, "lost a leg");
            self.hub.tally.add(Count::LegsLost, 1);
            // Not only with the next view: that may have to wait for others.
            let seat = (number, leg);
            for member in crate::hub::guard(&self.hub.members).values() {
                if member.end_links(|&place, _| place == seat) {
                    self.note_ending(member);
                }
            }
        }
        keep.promotion = None;
        keep.raised = None;
        keep.resync = None;
        keep.shipping = false;
        keep.trouble = Some(why.to_owned());
        if !column.has_source() && !column.settle {
            column.settle = true;
            column.gate = crate::view::Gate::Down;
            column.down_since = Some(now);
        }
        if column.settle && !column.has_source() {
            // What is being brought up to date has nothing to follow.
            for keep in &mut column.legs {
                if keep.leg.state == LegState::Syncing {
                    if let Some(control) = keep.control.take() {
                        control.give_up("its source is lost");
                    }
                    keep.resync = None;
                }
            }
        }
    }

    /// A channel was told to end connections.
    pub(super) fn note_ending(&self, member: &Arc<Member>) {
        self.ending.borrow_mut().push(Arc::clone(member));
    }

    /// A brick has no session for a channel that has not served yet: that channel fails,
    /// and nothing else.
    pub(super) fn turn_away(&self, number: u32, member: &Arc<Member>, why: &str) {
        tracing::warn!(volume = %self.name, why, "a channel was turned away");
        self.hub.leave(number);
        let why = format!("no further channel of {} can be had: {why}", self.name);
        member.tell(Note::TurnedAway(why));
        self.note_ending(member);
    }

    /// Ends the connections that channels were told to end, whether or not their threads
    /// look: they may wait for something else, while the pool of a brick that is gone stays
    /// mapped, or a session is kept that the next connection needs. A channel whose thread
    /// is inside of a call is tried again soon.
    pub(super) fn end_links(&self) {
        let mut ending = self.ending.borrow_mut();
        ending.retain(|member| !member.heed());
        if !ending.is_empty() {
            self.wake_at(self.now() + END_RETRY);
        }
    }

    pub(super) fn fence(&self) {
        if !self.model().fenced {
            tracing::warn!(volume = %self.name, "another client attached");
            self.edit().fenced = true;
            let view = self.model().view();
            self.hub.publish(view);
        }
    }
}

impl State {
    /// Ends what channels still do: the volume is given back.
    pub(super) fn fence_channels(&self) {
        let mut view = self.model().view();
        view.fenced = true;
        self.hub.publish(view);
    }
}

/// Keeps guests away.
pub(super) struct GuestGuard<'a>(Option<&'a Guests>);

impl<'a> GuestGuard<'a> {
    fn new(guests: Option<&'a Guests>) -> GuestGuard<'a> {
        if let Some(guests) = guests {
            guests.segment.close();
        }
        GuestGuard(guests)
    }
}

impl Drop for GuestGuard<'_> {
    fn drop(&mut self) {
        if let Some(guests) = self.0 {
            guests.segment.reopen();
        }
    }
}

/// A range lock of the keeper. Guests do not know range locks, and are kept out of all.
pub(super) struct RangeGuard<'a> {
    state: &'a State,
    range: LockRange,
    key: u32,
    _guests: GuestGuard<'a>,
}

impl RangeGuard<'_> {
    fn holder(&self) -> Holder {
        Holder {
            member: KEEPER,
            key: self.key,
        }
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut turns = vec![];
        self.state
            .hub
            .locks
            .release(self.range, self.holder(), &mut turns);
        let mut mine = vec![];
        self.state.hub.pass_turns(&mut turns, KEEPER, &mut mine);
        self.state.granted.borrow_mut().extend(mine);
        self.state.act();
    }
}
