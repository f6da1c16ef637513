//! An attached volume: the thread of its controller, and the calls of its users and operators.

use crate::client::channel;
use crate::controller::{
    AttachFailure, BlockingCall, CallRunner, CheckJob, ControllerEvent, CutError, CutStep, Mailbox,
    ScrubOrder, ScrubPlan, StepOrder, StepResult, VolumeController, perform,
};
use crate::direct_access::{DirectSegment, LayoutLease, TornOp};
use crate::legs::connector::Connector;
use crate::limits::{DOWN_LIMIT, LAYOUT_POLL, LAYOUT_POLL_RESYNCING};
use crate::shared::{Member, VolumeShared};
use crate::snapshot::LayoutSnapshot;
use crate::status::{CheckReport, VolumeStatus};
use pagemesh_base::authority::{Authority, AuthorityError};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::poison;
use pagemesh_base::space::{Channel, Space, SpaceError};
use pagemesh_base::wait::until_readable;
use pagemesh_telemetry::MeterSet;
use std::os::fd::RawFd;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The reason for which a volume was not attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The manager refused the attach, or did not answer.
    #[error("the volume {name} was not attached: {cause}")]
    Authority {
        /// The volume.
        name: VolumeName,
        /// The manager's answer.
        cause: AuthorityError,
    },
    /// A part of the volume has no usable copy.
    #[error(
        "the volume {name} was not attached: a part of it has no in-sync copy in reach \
         ({cause}); start a brick that has one"
    )]
    Unreachable {
        /// The volume.
        name: VolumeName,
        /// The bricks, and why each is not usable.
        cause: String,
    },
    /// Another client attached the volume first.
    #[error("another client attached the volume {0} meanwhile; try again to take it over")]
    Fenced(VolumeName),
    /// The process has no threads or descriptors left.
    #[error("the volume {name} was not attached: {cause}")]
    System {
        /// The volume.
        name: VolumeName,
        /// The system's error.
        cause: std::io::Error,
    },
}

impl AttachError {
    pub(crate) fn new(name: VolumeName, failure: AttachFailure) -> AttachError {
        match failure {
            AttachFailure::Authority(cause) => AttachError::Authority { name, cause },
            AttachFailure::Unreachable(cause) => AttachError::Unreachable { name, cause },
            AttachFailure::Fenced => AttachError::Fenced(name),
        }
    }
}

/// The reason for which a new layout was not adopted.
#[derive(Debug, thiserror::Error)]
#[error("the layout of {name} was not read again: {cause}")]
pub struct RefreshError {
    /// The volume.
    pub name: VolumeName,
    /// The cause.
    pub cause: String,
}

/// The reason for which a check did not end.
#[derive(Debug, thiserror::Error)]
#[error("the check of {name} did not end: {cause}")]
pub struct CheckError {
    /// The volume.
    pub name: VolumeName,
    /// The cause.
    pub cause: String,
}

/// An attached volume. Dropping it detaches the volume.
pub struct Volume {
    name: VolumeName,
    shared: Arc<VolumeShared>,
    mailbox: Arc<Mailbox>,
    controller: Mutex<Option<JoinHandle<()>>>,
}

/// Runs each call on a thread of its own: calls are few, and may take long.
struct CallThreads {
    name: VolumeName,
    client: String,
    authority: Arc<dyn Authority>,
    connector: Arc<dyn Connector>,
    mailbox: Arc<Mailbox>,
}

impl CallRunner for CallThreads {
    fn start(&self, id: u64, call: BlockingCall) {
        let if_not_made = call.failure_outcome();
        let (name, client) = (self.name.clone(), self.client.clone());
        let (authority, connector) = (Arc::clone(&self.authority), Arc::clone(&self.connector));
        let mailbox = Arc::clone(&self.mailbox);
        let run = move || {
            let outcome = perform(call, &name, &client, &*authority, &*connector);
            mailbox.post(ControllerEvent::CallCompleted(id, outcome));
        };
        let thread = std::thread::Builder::new().name("volume-call".into());
        if let Err(error) = thread.spawn(run) {
            let why = format!("no thread for a call: {error}");
            self.mailbox
                .post(ControllerEvent::CallCompleted(id, if_not_made(why)));
        }
    }
}

impl Volume {
    /// Attaches a volume: fences the previous client, makes the legs equal, and serves.
    /// `client` names this client to people. Blocks until the volume serves.
    ///
    /// # Errors
    /// When the manager refuses or does not answer, or a part of the volume has no in-sync copy
    /// in reach.
    pub fn attach(
        authority: Arc<dyn Authority>,
        connector: Arc<dyn Connector>,
        name: VolumeName,
        client: &str,
    ) -> Result<Volume, AttachError> {
        let system = |cause| AttachError::System {
            name: name.clone(),
            cause,
        };
        let member = Arc::new(Member::new().map_err(system)?);
        let hub = Arc::new(VolumeShared::new(
            LayoutSnapshot::empty(),
            Arc::clone(&member),
        ));
        let mailbox = Arc::new(Mailbox::new(Arc::clone(&member)));
        let threads = CallThreads {
            name: name.clone(),
            client: client.to_owned(),
            authority,
            connector,
            mailbox: Arc::clone(&mailbox),
        };
        let (tell, told) = mpsc::channel();
        let thread = std::thread::Builder::new().name("volume-ctl".into());
        let run = {
            let (name, hub, mailbox) = (name.clone(), Arc::clone(&hub), Arc::clone(&mailbox));
            move || {
                let own = Arc::clone(&mailbox);
                let keeper = VolumeController::new(name, hub, member, mailbox, Box::new(threads));
                run_controller(keeper, &own, &tell);
            }
        };
        let keeper = Mutex::new(Some(thread.spawn(run).map_err(system)?));
        let volume = Volume {
            name: name.clone(),
            shared: hub,
            mailbox,
            controller: keeper,
        };
        let failure = match told.recv() {
            Ok(Ok(())) => return Ok(volume),
            Ok(Err(failure)) => failure,
            Err(_) => AttachFailure::Unreachable("the controller thread ended".into()),
        };
        Err(AttachError::new(name, failure))
    }

    /// The status as of now; none before the first report.
    #[must_use]
    pub fn status(&self) -> Option<VolumeStatus> {
        self.mailbox.status(&self.shared, |told| told.elapsed())
    }

    /// The epoch that names this attachment to the manager.
    pub fn attachment(&self) -> Epoch {
        self.shared.attachment()
    }

    /// The meters of all channels, and of direct clients.
    pub fn meters(&self) -> &Arc<MeterSet> {
        &self.shared.meters
    }

    /// Reads the layout again after the volume has grown. Blocks until channels serve the new
    /// layout.
    ///
    /// # Errors
    /// When the manager does not answer, or a new part is not reachable.
    pub fn refresh(&self) -> Result<(), RefreshError> {
        let (answer, result) = mpsc::channel();
        self.mailbox.post(ControllerEvent::Refresh(answer));
        let result = result.recv_timeout(DOWN_LIMIT * 2);
        let result = result.unwrap_or_else(|_| Err("there was no answer in time".into()));
        result.map_err(|cause| RefreshError {
            name: self.name.clone(),
            cause,
        })
    }

    /// Compares the in-sync legs while the volume is in use. `progress` is called with the
    /// bytes done and the bytes in all. With `repair_from`, the check copies differing pages
    /// from that leg of the column.
    ///
    /// # Errors
    /// When a column has no in-sync leg, or the volume is detached meanwhile.
    pub fn check(
        &self,
        repair_from: Option<usize>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CheckReport, CheckError> {
        let job = Arc::new(CheckJob {
            repair_from,
            progress: Mutex::default(),
            changed: Condvar::new(),
        });
        self.mailbox.post(ControllerEvent::Check(Arc::clone(&job)));
        let mut state = poison::lock(&job.progress);
        loop {
            if let Some(result) = state.result.take() {
                return result.map_err(|cause| self.check_error(cause));
            }
            if poison::lock(&self.controller)
                .as_ref()
                .is_none_or(JoinHandle::is_finished)
            {
                return Err(self.check_error("the volume is detached".into()));
            }
            let (done, total) = (state.done_bytes, state.total_bytes);
            drop(state);
            progress(done, total);
            let look_again = Duration::from_millis(100);
            let waited = job
                .changed
                .wait_timeout(poison::lock(&job.progress), look_again);
            state = waited.map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        }
    }

    /// Schedules scrubs of the copies while the volume is in use: the first one soon, and later
    /// ones as planned. Scrubs run only after a call of this or of [`Volume::start_scrub`]. A
    /// later plan replaces it.
    pub fn plan_scrubs(&self, plan: ScrubPlan) {
        self.mailbox
            .post(ControllerEvent::Scrub(ScrubOrder::Plan(plan)));
    }

    /// Starts a scrub now, or resumes the one that was stopped.
    pub fn start_scrub(&self) {
        self.mailbox.post(ControllerEvent::Scrub(ScrubOrder::Start));
    }

    /// Stops the running scrub where it is.
    pub fn stop_scrub(&self) {
        self.mailbox.post(ControllerEvent::Scrub(ScrubOrder::Stop));
    }

    /// Cuts a snapshot while the volume is in use: it holds every change that completed before this call,
    /// and none that begins after it. The manager has taken `snapshot` from the volume's epochs before.
    /// Writers do not wait. Blocks until the older changes are durable on all written legs, as their
    /// class promises.
    ///
    /// # Errors
    /// When a leg refuses or is lost, or the layout changes meanwhile. The manager then drops the
    /// snapshot, and may try again with a new epoch.
    pub fn cut_snapshot(&self, snapshot: Epoch) -> Result<(), CutError> {
        let (answer, result) = mpsc::channel();
        self.mailbox.post(ControllerEvent::Cut(snapshot, answer));
        // The sender is dropped without a message when the volume has ended.
        result.recv().unwrap_or(Err(CutError::Detached))
    }

    /// Carries out one step of a cut, for volumes that are cut at one moment. The caller orders each step from all of
    /// them before the next one. After [`CutStep::Raise`], changes wait for [`CutStep::Finish`], at most
    /// [`HOLD_LIMIT`](crate::limits::HOLD_LIMIT). Returns how long they waited.
    ///
    /// # Errors
    /// The same as for [`Volume::cut_snapshot`], and when changes went on before the last step.
    pub fn cut_step(&self, snapshot: Epoch, step: CutStep) -> StepResult {
        let (answer, result) = mpsc::channel();
        let order = StepOrder {
            snapshot,
            step,
            answer,
        };
        self.mailbox.post(ControllerEvent::CutStep(order));
        result.recv().unwrap_or(Err(CutError::Detached))
    }

    fn check_error(&self, cause: String) -> CheckError {
        CheckError {
            name: self.name.clone(),
            cause,
        }
    }
}

impl Space for Volume {
    fn size_bytes(&self) -> u64 {
        self.shared.snapshot().1.size_bytes
    }

    fn has_write_cache(&self) -> bool {
        self.shared.has_write_cache()
    }

    fn needs_flush(&self) -> bool {
        self.shared.needs_flush()
    }

    fn lost_writes(&self) -> u64 {
        self.shared.lost_writes.total()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let channel = channel::open(&self.shared, &self.mailbox)?;
        Ok(Box::new(channel))
    }
}

impl Volume {
    /// Detaches the volume from the manager, even if other threads hold a reference to it.
    /// After that the volume is of no use. A process that ends calls this: otherwise the last
    /// thread with a reference would drop the volume, and the process end could kill that
    /// thread meanwhile.
    pub fn detach(&self) {
        let keeper = poison::lock(&self.controller).take();
        if let Some(keeper) = keeper {
            self.mailbox.post(ControllerEvent::Detach);
            // A panic in that thread has been reported there.
            let _ = keeper.join();
        }
    }
}

/// The calls of a mount for its direct clients.
impl Volume {
    /// Enables direct access: from now on processes may work by a [`LayoutLease`], while all
    /// legs qualify. The shared segment lives as long as this volume.
    ///
    /// # Errors
    /// When the system has no memory for the segment.
    pub fn enable_direct_access(&self) -> Result<&DirectSegment, pagemesh_pmem::MapError> {
        if let Some(guests) = self.shared.direct_access.get() {
            return Ok(&guests.segment);
        }
        let guests = self.shared.enable_direct_access()?;
        self.mailbox.post(ControllerEvent::DirectAccessEnabled);
        Ok(&guests.segment)
    }

    /// The lease of direct clients; none if they have no access now.
    pub fn layout_lease(&self) -> Option<LayoutLease> {
        self.shared.direct_access.get()?.lease()
    }

    /// Reconciles an operation that a dead direct client left torn: all legs become equal
    /// there, and the replica gets the change that the client had claimed. Blocks until that is
    /// done, or the volume has ended.
    ///
    /// The caller leaves the row as it is. It must keep requests through the kernel from
    /// reading or changing these bytes meanwhile.
    pub fn reconcile(&self, row: usize, wound: TornOp) {
        let (done, told) = mpsc::channel();
        self.mailbox
            .post(ControllerEvent::Reconcile(row, wound, done));
        // The sender is dropped without a message when the volume has ended.
        let _ = told.recv();
    }

    /// Wakes the sender of the replication queue: a direct client has filled a ring slot while
    /// the sender was asleep.
    pub fn wake_replication(&self) {
        self.shared.wake_controller();
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.detach();
    }
}

/// The body of the controller thread.
fn run_controller(
    mut keeper: VolumeController,
    mailbox: &Mailbox,
    attached: &Sender<Result<(), AttachFailure>>,
) {
    let start = Instant::now();
    // Layouts are polled only after the attach: before, no layout is this client's own.
    let mut look_at = None;
    let mut asked = None::<Receiver<_>>;
    let mut descriptors: Vec<RawFd> = vec![];
    while !keeper.is_ended() {
        if look_at.is_some_and(|at| start.elapsed() >= at) {
            let every = match keeper.has_resyncs() {
                true => LAYOUT_POLL_RESYNCING,
                false => LAYOUT_POLL,
            };
            look_at = Some(start.elapsed() + every);
            // One request at a time: the manager may be away for longer than the interval.
            let is_open = |asked: &Receiver<_>| asked.try_recv() == Err(TryRecvError::Empty);
            if !asked.as_ref().is_some_and(is_open) {
                let (answer, told) = mpsc::channel();
                mailbox.post(ControllerEvent::Refresh(answer));
                asked = Some(told);
            }
        }
        let next = keeper.poll(start.elapsed());
        if let Some(result) = keeper.take_attach_result() {
            look_at = result.is_ok().then(|| start.elapsed() + LAYOUT_POLL);
            // If the caller of the attach is gone, the drop of the volume ends it.
            let _ = attached.send(result);
        }
        let wait = next.into_iter().chain(look_at).min();
        let wait = wait.map(|at| at.saturating_sub(start.elapsed()));
        if keeper.is_ended() || wait == Some(Duration::ZERO) {
            continue;
        }
        descriptors.clear();
        let answers_by = keeper.wait_on(&mut descriptors);
        let until = wait.map(|time| Instant::now() + time);
        let until = until.into_iter().chain(answers_by).min();
        if let Err(error) = until_readable(&descriptors, until) {
            tracing::error!(%error, "the controller cannot wait for its descriptors");
        }
    }
}
