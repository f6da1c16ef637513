//! A client: a driven volume, its channels, and its pending calls.

use crate::cluster::{Cluster, tell};
use crate::direct_clients::MountClients;
use crate::files::MountProgram;
use crate::manager_host::{ManagerConnection, ManagerHost};
use crate::network::Peer;
use crate::read_oracle::ReadOracle;
use crate::rng::SimRng;
use crate::snapshots::ClientCut;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId, VolumeName};
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{Leg, SliceError};
use pagemesh_base::space::Channel;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::tcp::TcpLeg;
use pagemesh_manage::ManagerAuthority;
use pagemesh_volume::limits::SCRUB_BYTES_PER_S;
use pagemesh_volume::{
    AttachError, BrickAddress, CallAnswer, Connector, DrivenVolume, PendingCall, ScrubPlan,
    VolumeState,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Connects a client to bricks over the network.
struct BrickConnector {
    cluster: Arc<Cluster>,
    client: u32,
    oracle: ReadOracle,
}

impl Connector for BrickConnector {
    fn connect(
        &self,
        brick: BrickId,
        address: &BrickAddress,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<Box<dyn Leg>, SliceError> {
        let timeouts = Timeouts::default();
        let peer = Peer::Client(self.client);
        let (remote, connection) = self.cluster.connect(peer, &address.tcp, timeouts)?;
        let host = self.cluster.host_of(brick);
        if remote.brick() != brick {
            return Err(SliceError::Refused("another brick answers".into()));
        }
        let attached = remote.attach(slice, epoch);
        let word = attached
            .as_ref()
            .map_or_else(ToString::to_string, |_| "done".into());
        let host = host.unwrap_or_default();
        tell!(
            self.cluster,
            "client {} connects to brick {host} as {connection}, epoch {epoch}: {word}",
            self.client
        );
        let attached = attached?;
        self.cluster.net().end_blocking_call(connection);
        let leg = TcpLeg::from_connection(remote, attached, timeouts);
        Ok(self.oracle.observe(slice, leg))
    }
}

/// A thread of the client's front end.
pub(crate) struct FrontThread {
    pub(crate) number: u32,
    pub(crate) channel: Box<dyn Channel>,
    /// Requests without an answer, by token.
    pub(crate) pending: BTreeMap<u64, PendingRequest>,
    /// The thread takes no answers until then.
    pub(crate) stalled_until: Duration,
    /// A brick had no session for the thread: the thread ends.
    pub(crate) is_refused: bool,
}

/// A request without an answer.
#[derive(Clone, Copy)]
pub(crate) struct PendingRequest {
    /// The number of its operation.
    pub(crate) operation: usize,
    /// The first byte of a read.
    pub(crate) offset: u64,
    /// The request must succeed.
    pub(crate) must_succeed: bool,
    /// The read oracle's time of submission.
    pub(crate) oracle_time: u64,
    /// The checker's event index of the submission.
    pub(crate) checker_time: usize,
}

pub(crate) struct VolumeClient {
    pub(crate) number: u32,
    pub(crate) driven: DrivenVolume,
    cluster: Arc<Cluster>,
    connector: BrickConnector,
    pub(crate) oracle: ReadOracle,
    manager: ManagerAuthority<ManagerConnection>,
    /// Calls and answers in progress, by the time of their arrival.
    calls: VecDeque<(Duration, PendingCall)>,
    answers: VecDeque<(Duration, CallAnswer)>,
    pub(crate) threads: Vec<FrontThread>,
    /// The program on the file system, if the volume holds one.
    pub(crate) program: Option<MountProgram>,
    /// The mount's knowledge of its direct clients, if it has some.
    pub(crate) mount_clients: Option<MountClients>,
    /// The epoch of its attachment; 0 before.
    pub(crate) attachment: u32,
    /// The cut of a snapshot that the client carries out.
    pub(crate) cut: Option<ClientCut>,
    /// The client's process is stopped until then.
    pub(crate) stopped_until: Duration,
    /// When its volume controller wants its next turn.
    pub(crate) next_turn_at: Option<Duration>,
    rng: SplitMix64,
}

impl VolumeClient {
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        manager_host: &Arc<ManagerHost>,
        number: u32,
        name: &VolumeName,
        first_value: u64,
        rng: SplitMix64,
        unreachable: bool,
    ) -> VolumeClient {
        tell!(cluster, "client {number} begins to attach");
        let oracle = ReadOracle::new(first_value);
        VolumeClient {
            number,
            driven: DrivenVolume::attach(name.clone()).expect("descriptors"),
            cluster: Arc::clone(cluster),
            connector: BrickConnector {
                cluster: Arc::clone(cluster),
                client: number,
                oracle: oracle.clone(),
            },
            oracle,
            manager: ManagerAuthority {
                process: None,
                replaces: None,
                receive: false,
                connection: ManagerConnection {
                    manager_host: Arc::clone(manager_host),
                    client: number,
                },
                unreachable,
            },
            calls: VecDeque::new(),
            answers: VecDeque::new(),
            threads: Vec::new(),
            program: None,
            mount_clients: None,
            attachment: 0,
            cut: None,
            stopped_until: Duration::ZERO,
            next_turn_at: None,
            rng,
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped_until > self.cluster.now()
    }

    /// A turn of the volume controller; returns the result of an attach that has ended.
    pub(crate) fn run_turn(&mut self) -> Option<Result<(), AttachError>> {
        let now = self.cluster.now();
        self.next_turn_at = self.driven.poll(now);
        let epoch = self.driven.published_epoch();
        if epoch > 0 && !self.oracle.has_layout(epoch) {
            self.oracle
                .set_layout(epoch, self.manager.connection.manager_host.layout_of(epoch));
        }
        while let Some(call) = self.driven.take_call() {
            let at = now + self.rng.micros_below(500);
            self.calls.push_back((at, call));
        }
        let attached = self.driven.take_attach_result();
        if let (Some(Ok(())), Some(status)) = (&attached, self.driven.status()) {
            self.attachment = status.epoch;
        }
        attached
    }

    /// Makes a call that is due, or takes its answer.
    pub(crate) fn run_due_call(&mut self) -> bool {
        let now = self.cluster.now();
        let due = |at: Duration| at <= now;
        let places: Vec<usize> = (0..self.answers.len())
            .filter(|at| due(self.answers[*at].0))
            .collect();
        if let Some(at) = self.rng.pick(&places) {
            let (_, answer) = self.answers.remove(at).expect("an answer");
            self.driven.complete_call(answer);
            return true;
        }
        let places: Vec<usize> = (0..self.calls.len())
            .filter(|at| due(self.calls[*at].0))
            .collect();
        let Some(at) = self.rng.pick(&places) else {
            return false;
        };
        let (_, call) = self.calls.remove(at).expect("a call");
        let label = format!("client-{}", self.number);
        let answer = call.make(&label, &self.manager, &self.connector);
        let slow = if self.rng.one_in(20) { 100_000 } else { 500 };
        let at = self.cluster.now() + self.rng.micros_below(slow);
        self.answers.push_back((at, answer));
        true
    }

    /// When the next event of this client is due.
    pub(crate) fn next_due(&self) -> Option<Duration> {
        let calls = self.calls.iter().map(|(at, _)| *at);
        let answers = self.answers.iter().map(|(at, _)| *at);
        let threads = self.threads.iter().map(|thread| thread.stalled_until);
        let threads = threads.filter(|at| *at > self.cluster.now());
        let first = calls
            .chain(answers)
            .chain(threads)
            .chain(self.next_turn_at)
            .min();
        first.map(|at| at.max(self.stopped_until))
    }

    /// Scrubs the volume from now on, at a pace that needs no throttling.
    pub(crate) fn plan_scrubs(&self, every: Duration) {
        self.driven.plan_scrubs(ScrubPlan {
            every: Some(every),
            bytes_per_s: SCRUB_BYTES_PER_S,
        });
    }

    pub(crate) fn open_thread(&mut self, number: u32) {
        match self.driven.open() {
            Ok(channel) => self.threads.push(FrontThread {
                number,
                channel,
                pending: BTreeMap::new(),
                stalled_until: Duration::ZERO,
                is_refused: false,
            }),
            Err(cause) => tell!(
                self.cluster,
                "client {} opens nothing: {cause}",
                self.number
            ),
        }
    }

    /// The attachment, and whether all legs are in-sync.
    pub(crate) fn attachment_state(&self) -> (u32, bool) {
        let status = self.driven.status();
        let is_whole = status.is_some_and(|status| status.state == VolumeState::Healthy);
        (self.attachment, is_whole)
    }

    /// Whether every request has its answer.
    pub(crate) fn is_idle(&self) -> bool {
        let program = self.program.as_ref();
        self.threads.iter().all(|thread| thread.pending.is_empty())
            && program.is_none_or(MountProgram::is_idle)
    }

    /// Whether this client knows that another client has taken the volume.
    pub(crate) fn is_fenced(&self) -> bool {
        self.has_state(VolumeState::Fenced)
    }

    fn has_state(&self, state: VolumeState) -> bool {
        let status = self.driven.status();
        status.is_some_and(|status| status.state == state)
    }

    /// Whether the client lost a leg and waits for the manager to confirm that.
    pub(crate) fn is_awaiting_manager(&self) -> bool {
        self.has_state(VolumeState::AwaitingManager)
    }

    /// Whether the client is attached with every leg in use.
    pub(crate) fn is_healthy(&self) -> bool {
        self.attachment > 0 && self.has_state(VolumeState::Healthy)
    }

    /// Whether no request is in progress, every leg is in use, and each asynchronous replica has
    /// all data.
    pub(crate) fn is_quiescent(&self) -> bool {
        let status = self.driven.status();
        let program = self.program.as_ref();
        let channels = self.threads.len() + program.map_or(0, |it| it.handle.channel_count());
        self.is_idle()
            && status.is_some_and(|status| {
                status.channels == channels
                    && status.state == VolumeState::Healthy
                    && status
                        .columns
                        .iter()
                        .flat_map(|column| &column.legs)
                        .all(|leg| leg.lag.is_none_or(|lag| lag.changes == 0))
            })
    }
}
