//! The keeper: one per volume. It attaches, leaves lost legs out, brings them
//! back, and tells the channels.
//!
//! Invariants: its tasks are polled by [`Keeper::turn`] and nothing else; they
//! have no clock, thread or randomness, and wait only for answers of legs,
//! calls, range locks and the time they are told. Blocking calls go through a
//! [`Caller`]. A leg is left out, taken in or declared in-sync only after the
//! authority has said so, and channels hear of it only after every leg that
//! stays has raised its epoch.

mod bring_back;
mod call;
mod check;
mod control;
mod copy;
mod follow;
mod heal;
mod model;
mod reform;
mod report;
mod runs;
mod scrub;
mod settle;
mod start;
mod state;

use crate::channel::Core;
use crate::guests::Wound;
use crate::hub::{Hub, Member, Note, guard};
use crate::limits::SHIP_AGE_MAX;
use crate::status::VolumeStatus;
pub(crate) use call::{Call, Caller, Outcome, perform};
pub(crate) use check::CheckJob;
use pagemesh_base::layout::Name;
pub(crate) use scrub::Order as ScrubOrder;
pub use scrub::ScrubPlan;
pub(crate) use start::AttachFailure;
use state::State;
use std::future::Future;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Rounds of polling in one turn; then the events of others are looked at.
const PASSES_MAX: usize = 64;

/// What the keeper is told.
pub(crate) enum Event {
    /// A channel lost a leg.
    Lost {
        column: usize,
        leg: usize,
        serial: u64,
        why: String,
    },
    /// A channel was opened, and needs connections.
    Joined,
    /// A leg has a higher epoch than this client holds.
    Fenced,
    /// A channel was dropped, maybe with changes under way.
    Abandoned(Box<Core>),
    /// A call has ended.
    Called(u64, Outcome),
    /// The layout may have grown.
    Refresh(Sender<Result<(), String>>),
    /// The legs are to be compared.
    Check(Arc<CheckJob>),
    /// The copies are to be scrubbed, or not.
    Scrub(ScrubOrder),
    /// Guests are let in from now on.
    Guests,
    /// The guest of this row died inside of an operation; whoever has this is told when all
    /// legs are alike there.
    Heal(usize, Wound, Sender<()>),
    /// The volume is to be given back.
    Detach,
}

/// What the keeper told of itself, and when.
struct Told {
    at: Instant,
    /// The same by its own time.
    now: Duration,
    status: VolumeStatus,
}

/// The way to the keeper.
pub(crate) struct Mailbox {
    /// None once nobody reads it any more.
    events: Mutex<Option<Vec<Event>>>,
    member: Arc<Member>,
    status: Mutex<Option<Told>>,
}

impl Mailbox {
    pub(crate) fn new(member: Arc<Member>) -> Mailbox {
        Mailbox {
            events: Mutex::new(Some(vec![])),
            member,
            status: Mutex::default(),
        }
    }

    pub(crate) fn post(&self, event: Event) {
        // Outside of the lock: an event may hold a channel, and that this.
        let unread = match &mut *guard(&self.events) {
            Some(events) => {
                events.push(event);
                None
            }
            None => Some(event),
        };
        drop(unread);
        self.member.wake.raise();
    }

    /// What the keeper told last, with what changes all the time as it is now. `since` gives the
    /// time that is gone since it told.
    pub(crate) fn status(
        &self,
        hub: &Hub,
        since: impl FnOnce(Instant) -> Duration,
    ) -> Option<VolumeStatus> {
        let told = guard(&self.status);
        let told = told.as_ref()?;
        let elapsed = since(told.at);
        let mut status = told.status.clone();
        status.age(elapsed);
        let legs = status
            .columns
            .iter_mut()
            .flat_map(|column| &mut column.legs);
        for leg in legs.filter(|leg| leg.lag.is_some()) {
            leg.lag = hub.ship.lag(told.now + elapsed);
        }
        status.counters = hub.tally.sums();
        status.channels = guard(&hub.members).len().saturating_sub(1);
        Some(status)
    }

    fn take(&self) -> Vec<Event> {
        let mut events = guard(&self.events);
        events.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl Drop for Keeper {
    /// What comes later is dropped where it comes from.
    fn drop(&mut self) {
        let unread = guard(&self.mailbox.events).take();
        drop(unread);
    }
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

pub(crate) struct Keeper {
    state: Rc<State>,
    tasks: Vec<Task>,
    /// Channels whose threads are gone, driven until they have ended well.
    abandoned: Vec<Core>,
    member: Arc<Member>,
    mailbox: Arc<Mailbox>,
}

impl Keeper {
    /// A keeper that attaches in its first turns.
    pub(crate) fn new(
        name: Name,
        hub: Arc<Hub>,
        member: Arc<Member>,
        mailbox: Arc<Mailbox>,
        caller: Box<dyn Caller>,
    ) -> Keeper {
        let state = Rc::new(State::new(name, hub, caller));
        let task: Task = Box::pin(start::attach_and_run(Rc::clone(&state)));
        Keeper {
            state,
            tasks: vec![task],
            abandoned: vec![],
            member,
            mailbox,
        }
    }

    /// What came of the attach, once.
    pub(crate) fn take_attached(&self) -> Option<Result<(), AttachFailure>> {
        self.state.attached.take()
    }

    /// Whether a leg is being brought back.
    pub(crate) fn has_returns(&self) -> bool {
        let model = self.state.model();
        let mut legs = model.columns.iter().flat_map(|column| &column.legs);
        legs.any(|leg| leg.resync.is_some())
    }

    /// Whether there is nothing more to do, ever.
    pub(crate) fn is_ended(&self) -> bool {
        self.state.ended.get() && self.abandoned.is_empty()
    }

    /// Makes all progress that can be made now; tells when to come back if
    /// nothing happens before.
    pub(crate) fn turn(&mut self, now: Duration) -> Option<Duration> {
        self.state.begin_turn(now);
        for _ in 0..PASSES_MAX {
            let before = self.state.activity.get();
            self.take_events();
            self.drive_abandoned();
            self.state.deadline.set(None);
            self.poll_tasks();
            self.state.end_links();
            if self.state.activity.get() == before {
                // Who waits for a leg, lost or not, is told when that takes too long.
                if self.state.hub.ship.is_behind() {
                    self.state.wake_at(now + SHIP_AGE_MAX / 4);
                }
                self.report();
                return self.state.deadline.get();
            }
        }
        self.report();
        Some(now)
    }

    /// Descriptors that become readable when there is something to do.
    /// Gives the time at which a leg must be looked at in any case.
    pub(crate) fn wait_on(&self, into: &mut Vec<RawFd>) -> Option<Instant> {
        into.push(self.member.wake.fd());
        self.abandoned.iter().for_each(|core| core.wait_on(into));
        let abandoned = self.abandoned.iter().filter_map(Core::deadline);
        abandoned.chain(self.state.wait_on(into)).min()
    }

    fn take_events(&mut self) {
        if !self.member.wake.take() {
            return;
        }
        for note in self.member.take_notes() {
            if let Note::Granted(key) = note {
                self.state.granted.borrow_mut().insert(key);
                self.state.act();
            }
        }
        for event in self.mailbox.take() {
            self.state.act();
            match event {
                Event::Abandoned(core) => self.abandoned.push(*core),
                Event::Check(job) => {
                    let task = check::check(Rc::clone(&self.state), job);
                    self.tasks.push(Box::pin(task));
                }
                Event::Scrub(order) => {
                    if self.state.order_scrub(order) {
                        let task = scrub::run(Rc::clone(&self.state));
                        self.tasks.push(Box::pin(task));
                    }
                }
                Event::Refresh(answer) => {
                    let task = start::refresh(Rc::clone(&self.state), answer);
                    self.tasks.push(Box::pin(task));
                }
                Event::Heal(row, wound, done) => {
                    let task = heal::heal(Rc::clone(&self.state), row, wound, done);
                    self.tasks.push(Box::pin(task));
                }
                Event::Detach => {
                    let task = start::detach(Rc::clone(&self.state));
                    self.tasks.push(Box::pin(task));
                }
                other => self.state.take_event(other),
            }
        }
    }

    fn drive_abandoned(&mut self) {
        let hub = &self.state.hub;
        let mut nobody = vec![];
        self.abandoned.retain_mut(|core| {
            core.reap(&mut nobody);
            let busy = !self.state.ended.get() && core.wind_up();
            if !busy {
                hub.leave(core.number());
            }
            busy
        });
    }

    fn poll_tasks(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        self.tasks
            .retain_mut(|task| task.as_mut().poll(&mut context) == Poll::Pending);
        self.tasks.append(&mut self.state.spawned.borrow_mut());
    }

    fn report(&self) {
        if self.state.touched.replace(false) {
            let status = report::status(&self.state);
            *guard(&self.mailbox.status) = Some(Told {
                at: Instant::now(),
                now: self.state.now(),
                status,
            });
        }
    }
}
