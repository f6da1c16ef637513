//! The controller: one per volume. It attaches the volume, leaves lost legs out, resyncs them,
//! and publishes snapshots to the channels.
//!
//! Invariants:
//! - Only [`VolumeController::poll`] polls its tasks. They have no clock, thread or
//!   randomness. They wait only for answers of legs, calls, range locks and the time that the
//!   caller passes.
//! - Blocking calls go through a [`CallRunner`].
//! - A leg is left out, taken in or declared in-sync only after the authority has said so.
//!   Channels hear of it only after every remaining leg has raised its epoch.

mod call;
mod check;
mod compare;
mod control;
mod copy;
mod cut;
mod cut_steps;
mod layout_query;
mod leg_errors;
mod lifecycle;
mod model;
mod pending_snapshots;
mod reconcile;
mod reconfigure;
mod recover_in_flight;
mod replica_snapshots;
mod replication_sender;
mod report;
mod resync;
mod runs;
mod scrub;
mod scrub_schedule;
mod state;

use crate::client::channel::ChannelCore;
use crate::direct_access::TornOp;
use crate::limits::REPLICATION_AGE_MAX;
use crate::shared::{Member, MemberMessage, VolumeShared};
use crate::status::VolumeStatus;
pub use call::{BlockingCall, CallOutcome, CallRunner, perform};
pub use check::CheckJob;
pub use cut::CutError;
use cut_steps::StepCut;
pub use cut_steps::{CutStep, StepOrder, StepResult};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::poison;
pub use scrub_schedule::ScrubOrder;
pub use scrub_schedule::ScrubPlan;
pub(crate) use state::AttachFailure;
use state::ControllerState;
use std::future::Future;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// The rounds of polling in one call of `poll`. After that the events of other threads get
/// their turn.
const POLL_PASSES_MAX: usize = 64;

/// An event for the controller.
pub enum ControllerEvent {
    /// A channel lost a leg.
    LegLost {
        column: usize,
        leg: usize,
        serial: u64,
        why: String,
    },
    /// A channel was opened, and needs connections.
    ChannelOpened,
    /// A leg has a higher epoch than this client holds.
    Fenced,
    /// A channel was dropped, maybe with changes in flight.
    ChannelDropped(Box<ChannelCore>),
    /// A call has ended.
    CallCompleted(u64, CallOutcome),
    /// The layout may have grown.
    Refresh(Sender<Result<(), String>>),
    /// A check was requested.
    Check(Arc<CheckJob>),
    /// The scrub schedule or state is to change.
    Scrub(ScrubOrder),
    /// Direct access was enabled.
    DirectAccessEnabled,
    /// The direct client of this row died during an operation. The sender gets a message when
    /// all legs are equal there.
    Reconcile(usize, TornOp, Sender<()>),
    /// A snapshot is to be cut.
    Cut(Epoch, Sender<Result<(), CutError>>),
    /// A step of a cut is to be carried out.
    CutStep(StepOrder),
    /// The volume is to be detached.
    Detach,
}

/// The last status report, and its time.
struct StatusReport {
    at: Instant,
    /// The time by the controller's own clock.
    now: Duration,
    status: VolumeStatus,
}

/// The queue of events for the controller.
pub struct Mailbox {
    /// None once the controller is dropped.
    events: Mutex<Option<Vec<ControllerEvent>>>,
    member: Arc<Member>,
    status: Mutex<Option<StatusReport>>,
}

impl Mailbox {
    pub fn new(member: Arc<Member>) -> Mailbox {
        Mailbox {
            events: Mutex::new(Some(vec![])),
            member,
            status: Mutex::default(),
        }
    }

    pub fn post(&self, event: ControllerEvent) {
        // The event is dropped outside the lock: it may hold a channel, and the channel holds
        // this mailbox.
        let unread = match &mut *poison::lock(&self.events) {
            Some(events) => {
                events.push(event);
                None
            }
            None => Some(event),
        };
        drop(unread);
        self.member.wake.raise();
    }

    /// The last status report, with lag, counters and channels as of now. `since` returns the
    /// time since the report.
    pub fn status(
        &self,
        hub: &VolumeShared,
        since: impl FnOnce(Instant) -> Duration,
    ) -> Option<VolumeStatus> {
        let told = poison::lock(&self.status);
        let told = told.as_ref()?;
        let elapsed = since(told.at);
        let mut status = told.status.clone();
        status.age(elapsed);
        let legs = status
            .columns
            .iter_mut()
            .flat_map(|column| &mut column.legs);
        for leg in legs.filter(|leg| leg.lag.is_some()) {
            leg.lag = hub.replication.lag(told.now + elapsed);
        }
        status.counters = hub.counters.sums();
        status.channels = poison::lock(&hub.members).len().saturating_sub(1);
        Some(status)
    }

    fn take(&self) -> Vec<ControllerEvent> {
        let mut events = poison::lock(&self.events);
        events.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl Drop for VolumeController {
    /// Drops the events that are left. Later events are dropped where they are posted.
    fn drop(&mut self) {
        let unread = poison::lock(&self.mailbox.events).take();
        drop(unread);
    }
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

pub struct VolumeController {
    state: Rc<ControllerState>,
    tasks: Vec<Task>,
    /// Channels without a thread. The controller drives them until their changes are complete.
    dropped_channels: Vec<ChannelCore>,
    member: Arc<Member>,
    mailbox: Arc<Mailbox>,
    /// The last cut in steps.
    step_cut: Option<Rc<StepCut>>,
}

impl VolumeController {
    /// A controller that attaches the volume in its first polls.
    pub fn new(
        name: VolumeName,
        hub: Arc<VolumeShared>,
        member: Arc<Member>,
        mailbox: Arc<Mailbox>,
        caller: Box<dyn CallRunner>,
    ) -> VolumeController {
        let state = Rc::new(ControllerState::new(name, hub, caller));
        let task: Task = Box::pin(lifecycle::attach_and_run(Rc::clone(&state)));
        VolumeController {
            state,
            tasks: vec![task],
            dropped_channels: vec![],
            member,
            mailbox,
            step_cut: None,
        }
    }

    /// Takes the result of the attach. It is there once.
    pub fn take_attach_result(&self) -> Option<Result<(), AttachFailure>> {
        self.state.attach_result.take()
    }

    /// Whether a resync is running.
    pub fn has_resyncs(&self) -> bool {
        let model = self.state.model();
        let mut legs = model.columns.iter().flat_map(|column| &column.legs);
        legs.any(|leg| leg.resync.is_some())
    }

    /// Whether the controller has ended for good.
    pub fn is_ended(&self) -> bool {
        self.state.ended.get() && self.dropped_channels.is_empty()
    }

    /// Makes all progress that is possible now. Returns the time of the next poll if no event
    /// comes before.
    pub fn poll(&mut self, now: Duration) -> Option<Duration> {
        self.state.begin_turn(now);
        for _ in 0..POLL_PASSES_MAX {
            let before = self.state.activity.get();
            self.take_events();
            self.drive_dropped_channels();
            self.state.deadline.set(None);
            self.poll_tasks();
            self.state.end_links();
            if self.state.activity.get() == before {
                // Acknowledgements that wait for the replica need a decision when it takes too
                // long, even if the replica is lost.
                if self.state.shared.replication.is_behind() {
                    self.state.wake_at(now + REPLICATION_AGE_MAX / 4);
                }
                self.report();
                return self.state.deadline.get();
            }
        }
        self.report();
        Some(now)
    }

    /// Collects the descriptors that become readable when there is work. Returns the time at
    /// which a leg must be checked in any case.
    pub fn wait_on(&self, into: &mut Vec<RawFd>) -> Option<Instant> {
        into.push(self.member.wake.fd());
        self.dropped_channels
            .iter()
            .for_each(|core| core.wait_on(into));
        let abandoned = self
            .dropped_channels
            .iter()
            .filter_map(ChannelCore::deadline);
        abandoned.chain(self.state.wait_on(into)).min()
    }

    fn take_events(&mut self) {
        if !self.member.wake.take() {
            return;
        }
        for note in self.member.take_messages() {
            if let MemberMessage::LockGranted(key) = note {
                self.state.granted.borrow_mut().insert(key);
                self.state.record_activity();
            }
        }
        for event in self.mailbox.take() {
            self.state.record_activity();
            match event {
                ControllerEvent::ChannelDropped(core) => self.dropped_channels.push(*core),
                ControllerEvent::Check(job) => {
                    let task = check::check(Rc::clone(&self.state), job);
                    self.tasks.push(Box::pin(task));
                }
                ControllerEvent::Scrub(order) => {
                    if self.state.order_scrub(order) {
                        let task = scrub::run_scrubs(Rc::clone(&self.state));
                        self.tasks.push(Box::pin(task));
                    }
                }
                ControllerEvent::Refresh(answer) => {
                    let task = lifecycle::refresh_layout(Rc::clone(&self.state), answer);
                    self.tasks.push(Box::pin(task));
                }
                ControllerEvent::Reconcile(row, wound, done) => {
                    let task = reconcile::reconcile(Rc::clone(&self.state), row, wound, done);
                    self.tasks.push(Box::pin(task));
                }
                ControllerEvent::Cut(snapshot, answer) => {
                    let before = self.step_cut.take();
                    let task = cut::cut(Rc::clone(&self.state), snapshot, before, answer);
                    self.tasks.push(Box::pin(task));
                }
                ControllerEvent::CutStep(order) => {
                    let task = cut_steps::take(&self.state, &mut self.step_cut, order);
                    self.tasks.extend(task);
                }
                ControllerEvent::Detach => {
                    let task = lifecycle::detach(Rc::clone(&self.state));
                    self.tasks.push(Box::pin(task));
                }
                ControllerEvent::DirectAccessEnabled => reconfigure::grant_lease(&self.state),
                other => self.state.take_event(other),
            }
        }
    }

    fn drive_dropped_channels(&mut self) {
        let hub = &self.state.shared;
        let mut nobody = vec![];
        self.dropped_channels.retain_mut(|core| {
            core.reap(&mut nobody);
            let busy = !self.state.ended.get() && core.drain();
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
        if self.state.status_changed.replace(false) {
            let status = report::status(&self.state);
            *poison::lock(&self.mailbox.status) = Some(StatusReport {
                at: Instant::now(),
                now: self.state.now(),
                status,
            });
        }
    }
}
