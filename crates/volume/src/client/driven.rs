//! A volume without threads. Its caller polls the controller and makes the blocking calls at
//! times of its choice. It is for programs with a loop of their own and for simulations.
//! [`Volume`](crate::Volume) is the same with threads.
//!
//! Invariants: work happens only inside a method's call. The only clock is the time that the
//! caller passes to [`DrivenVolume::poll`].

use crate::client::channel;
use crate::client::volume::AttachError;
use crate::controller::{
    BlockingCall, CallOutcome, CallRunner, ControllerEvent, CutError, CutStep, Mailbox, ScrubOrder,
    ScrubPlan, StepOrder, StepResult, VolumeController, perform,
};
use crate::direct_access::{DirectSegment, LayoutLease, TornOp};
use crate::legs::connector::Connector;
use crate::shared::{Member, VolumeShared};
use crate::snapshot::LayoutSnapshot;
use crate::status::VolumeStatus;
use pagemesh_base::authority::Authority;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::space::{Channel, SpaceError};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

type QueuedCalls = Rc<RefCell<VecDeque<(u64, BlockingCall)>>>;

struct CallQueue(QueuedCalls);

impl CallRunner for CallQueue {
    fn start(&self, id: u64, call: BlockingCall) {
        self.0.borrow_mut().push_back((id, call));
    }
}

/// A volume that its caller drives.
pub struct DrivenVolume {
    name: VolumeName,
    controller: VolumeController,
    pub(crate) shared: Arc<VolumeShared>,
    pub(crate) mailbox: Arc<Mailbox>,
    calls: QueuedCalls,
}

/// See [`DrivenVolume::flush_state`].
#[derive(Clone, Copy, Debug, Default)]
pub struct FlushState {
    /// See [`pagemesh_base::space::Space::has_write_cache`].
    pub has_write_cache: bool,
    /// See [`pagemesh_base::space::Space::needs_flush`].
    pub needs_flush: bool,
    /// See [`pagemesh_base::space::Space::lost_writes`].
    pub lost_writes: u64,
}

/// A blocking call that the driver must make.
pub struct PendingCall {
    id: u64,
    name: VolumeName,
    call: BlockingCall,
}

/// The outcome of a call.
pub struct CallAnswer(u64, CallOutcome);

impl PendingCall {
    /// Makes the call; `client` names this client to people.
    pub fn make(
        self,
        client: &str,
        authority: &dyn Authority,
        connector: &dyn Connector,
    ) -> CallAnswer {
        let outcome = perform(self.call, &self.name, client, authority, connector);
        CallAnswer(self.id, outcome)
    }
}

impl DrivenVolume {
    /// Begins to attach a volume.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn attach(name: VolumeName) -> std::io::Result<DrivenVolume> {
        let member = Arc::new(Member::new()?);
        let hub = Arc::new(VolumeShared::new(
            LayoutSnapshot::empty(),
            Arc::clone(&member),
        ));
        let mailbox = Arc::new(Mailbox::new(Arc::clone(&member)));
        let calls = QueuedCalls::default();
        let caller = Box::new(CallQueue(Rc::clone(&calls)));
        let keeper = VolumeController::new(
            name.clone(),
            Arc::clone(&hub),
            member,
            Arc::clone(&mailbox),
            caller,
        );
        Ok(DrivenVolume {
            name,
            controller: keeper,
            shared: hub,
            mailbox,
            calls,
        })
    }

    /// Makes all progress that is possible at `now`. Returns the time of the next poll if no
    /// event comes before. Times are relative to the first poll.
    pub fn poll(&mut self, now: Duration) -> Option<Duration> {
        self.controller.poll(now)
    }

    /// Takes the oldest call that was not taken yet.
    pub fn take_call(&mut self) -> Option<PendingCall> {
        let (id, call) = self.calls.borrow_mut().pop_front()?;
        let name = self.name.clone();
        Some(PendingCall { id, name, call })
    }

    /// Passes the outcome of a call to the controller.
    pub fn complete_call(&mut self, CallAnswer(id, outcome): CallAnswer) {
        self.mailbox
            .post(ControllerEvent::CallCompleted(id, outcome));
    }

    /// Takes the result of the attach. It is there once.
    pub fn take_attach_result(&mut self) -> Option<Result<(), AttachError>> {
        let result = self.controller.take_attach_result()?;
        Some(result.map_err(|failure| AttachError::new(self.name.clone(), failure)))
    }

    /// Scrubs as [`Volume::plan_scrubs`](crate::Volume::plan_scrubs) does.
    pub fn plan_scrubs(&self, plan: ScrubPlan) {
        self.mailbox
            .post(ControllerEvent::Scrub(ScrubOrder::Plan(plan)));
    }

    /// Detaches the volume once its channels are closed.
    pub fn detach(&mut self) {
        self.mailbox.post(ControllerEvent::Detach);
    }

    /// Whether the volume has ended for good.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.controller.is_ended()
    }

    /// The status as of the last poll.
    #[must_use]
    pub fn status(&self) -> Option<VolumeStatus> {
        self.mailbox.status(&self.shared, |_| Duration::ZERO)
    }

    /// The epoch of the layout that channels use; 0 before the first layout.
    #[must_use]
    pub fn published_epoch(&self) -> u32 {
        self.shared.snapshot().1.epoch.0
    }

    /// The size in bytes. It may grow.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.shared.snapshot().1.size_bytes
    }

    /// Whether changes are durable without a flush, as a [`Space`](pagemesh_base::space::Space) tells it.
    #[must_use]
    pub fn flush_state(&self) -> FlushState {
        FlushState {
            has_write_cache: self.shared.has_write_cache(),
            needs_flush: self.shared.needs_flush(),
            lost_writes: self.shared.lost_writes.total(),
        }
    }

    /// Enables direct access, as
    /// [`Volume::enable_direct_access`](crate::Volume::enable_direct_access) does.
    ///
    /// # Errors
    /// When the system has no memory for the segment.
    pub fn enable_direct_access(&self) -> Result<Arc<DirectSegment>, pagemesh_pmem::MapError> {
        let guests = self.shared.enable_direct_access()?;
        self.mailbox.post(ControllerEvent::DirectAccessEnabled);
        Ok(Arc::clone(&guests.segment))
    }

    /// The lease of direct clients; none if they have no access now.
    #[must_use]
    pub fn layout_lease(&self) -> Option<LayoutLease> {
        self.shared.direct_access.get()?.lease()
    }

    /// Starts a reconciliation, as [`Volume::reconcile`](crate::Volume::reconcile) does,
    /// without waiting for it. The receiver gets a message when it is done.
    #[must_use]
    pub fn reconcile(&self, row: usize, wound: TornOp) -> Receiver<()> {
        let (done, told) = mpsc::channel();
        self.mailbox
            .post(ControllerEvent::Reconcile(row, wound, done));
        told
    }

    /// Starts to cut a snapshot, as [`Volume::cut_snapshot`](crate::Volume::cut_snapshot) does, without
    /// waiting for it. The receiver gets the result.
    #[must_use]
    pub fn cut_snapshot(&self, snapshot: Epoch) -> Receiver<Result<(), CutError>> {
        let (answer, result) = mpsc::channel();
        self.mailbox.post(ControllerEvent::Cut(snapshot, answer));
        result
    }

    /// Starts a step of a cut, as [`Volume::cut_step`](crate::Volume::cut_step) does, without waiting for it. The receiver
    /// gets the result.
    #[must_use]
    pub fn cut_step(&self, snapshot: Epoch, step: CutStep) -> Receiver<StepResult> {
        let (answer, result) = mpsc::channel();
        let order = StepOrder {
            snapshot,
            step,
            answer,
        };
        self.mailbox.post(ControllerEvent::CutStep(order));
        result
    }

    /// Wakes the controller for the replication queue, as
    /// [`Volume::wake_replication`](crate::Volume::wake_replication) does.
    pub fn wake_replication(&self) {
        self.shared.wake_controller();
    }

    /// Opens a channel.
    ///
    /// # Errors
    /// When there are too many already, or another client has attached.
    pub fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let channel = channel::open(&self.shared, &self.mailbox)?;
        Ok(Box::new(channel))
    }
}
