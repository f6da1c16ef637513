//! A client: a driven volume, its channels, and the calls it waits for.

use crate::cluster::{Cluster, tell};
use crate::desk::{Counter, Desk};
use crate::dice::Dice;
use crate::files::Program;
use crate::guests::Hosting;
use crate::network::Peer;
use crate::witness::Witness;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, Name, SliceId};
use pagemesh_base::slice::{Leg, SliceError};
use pagemesh_base::space::Channel;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::tcp::TcpLeg;
use pagemesh_volume::limits::SCRUB_BYTES_PER_S;
use pagemesh_volume::{
    Answer, AttachError, BrickAddress, Connector, Driven, Pending, ScrubPlan, VolumeState,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Connects a client to bricks over the network.
struct Connections {
    cluster: Arc<Cluster>,
    client: u32,
    witness: Witness,
}

impl Connector for Connections {
    fn connect(
        &self,
        brick: BrickId,
        address: &BrickAddress,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<Box<dyn Leg>, SliceError> {
        let timeouts = Timeouts::default();
        let peer = Peer::Client(self.client);
        let (remote, line) = self.cluster.connect(peer, &address.tcp, timeouts)?;
        let house = self.cluster.house_of(brick);
        if remote.brick() != brick {
            return Err(SliceError::Refused("another brick answers".into()));
        }
        let attached = remote.attach(slice, epoch);
        let word = attached
            .as_ref()
            .map_or_else(ToString::to_string, |_| "done".into());
        let house = house.unwrap_or_default();
        tell!(
            self.cluster,
            "client {} connects to brick {house} as {line}, epoch {epoch}: {word}",
            self.client
        );
        let attached = attached?;
        self.cluster.net().settle(line);
        let leg = TcpLeg::over(remote, attached, timeouts);
        Ok(self.witness.watch(slice, leg))
    }
}

/// A thread of the client's front.
pub(crate) struct Thread {
    pub(crate) number: u32,
    pub(crate) channel: Box<dyn Channel>,
    /// Requests without an answer, by token.
    pub(crate) pending: BTreeMap<u64, Asked>,
    /// It looks at no answers until then.
    pub(crate) stopped_until: Duration,
    /// A brick had no session for it: it ends.
    pub(crate) is_turned_away: bool,
}

/// A request without an answer.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    /// Which operation it is.
    pub(crate) operation: usize,
    /// The first byte of what is read.
    pub(crate) from: u64,
    /// Nothing but success may be the answer.
    pub(crate) is_certain: bool,
    /// When, as the witness counts.
    pub(crate) begun: u64,
    /// When, as the checker counts.
    pub(crate) began: usize,
}

pub(crate) struct Client {
    pub(crate) number: u32,
    pub(crate) driven: Driven,
    cluster: Arc<Cluster>,
    connections: Connections,
    pub(crate) witness: Witness,
    counter: Counter,
    /// Calls and answers under way, by the time of their arrival.
    calls: VecDeque<(Duration, Pending)>,
    answers: VecDeque<(Duration, Answer)>,
    pub(crate) threads: Vec<Thread>,
    /// What works on the file system, where the volume holds one.
    pub(crate) program: Option<Program>,
    /// What it knows of its guests, where it has some.
    pub(crate) hosting: Option<Hosting>,
    /// The epoch that names its attachment; 0 before.
    pub(crate) attachment: u32,
    /// It does nothing until then: its process is stopped.
    pub(crate) stopped_until: Duration,
    /// When its keeper wants its next turn.
    pub(crate) due: Option<Duration>,
    dice: Dice,
}

impl Client {
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        desk: &Arc<Desk>,
        number: u32,
        name: &Name,
        first_value: u64,
        dice: Dice,
        unreachable: bool,
    ) -> Client {
        tell!(cluster, "client {number} begins to attach");
        let witness = Witness::new(first_value);
        Client {
            number,
            driven: Driven::attach(name.clone()).expect("descriptors"),
            cluster: Arc::clone(cluster),
            connections: Connections {
                cluster: Arc::clone(cluster),
                client: number,
                witness: witness.clone(),
            },
            witness,
            counter: Counter {
                desk: Arc::clone(desk),
                client: number,
                unreachable,
            },
            calls: VecDeque::new(),
            answers: VecDeque::new(),
            threads: Vec::new(),
            program: None,
            hosting: None,
            attachment: 0,
            stopped_until: Duration::ZERO,
            due: None,
            dice,
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped_until > self.cluster.now()
    }

    /// A turn of the keeper; tells what came of an attach.
    pub(crate) fn turn(&mut self) -> Option<Result<(), AttachError>> {
        let now = self.cluster.now();
        self.due = self.driven.turn(now);
        let epoch = self.driven.shown_epoch();
        if epoch > 0 && !self.witness.knows(epoch) {
            self.witness
                .adopt(epoch, self.counter.desk.layout_of(epoch));
        }
        while let Some(call) = self.driven.take_call() {
            let at = now + self.dice.micros(500);
            self.calls.push_back((at, call));
        }
        let attached = self.driven.take_attached();
        if let (Some(Ok(())), Some(status)) = (&attached, self.driven.status()) {
            self.attachment = status.epoch;
        }
        attached
    }

    /// Makes one of the calls that are due, or hears of one.
    pub(crate) fn call(&mut self) -> bool {
        let now = self.cluster.now();
        let due = |at: Duration| at <= now;
        let places: Vec<usize> = (0..self.answers.len())
            .filter(|at| due(self.answers[*at].0))
            .collect();
        if let Some(at) = self.dice.pick(&places) {
            let (_, answer) = self.answers.remove(at).expect("an answer");
            self.driven.answer(answer);
            return true;
        }
        let places: Vec<usize> = (0..self.calls.len())
            .filter(|at| due(self.calls[*at].0))
            .collect();
        let Some(at) = self.dice.pick(&places) else {
            return false;
        };
        let (_, call) = self.calls.remove(at).expect("a call");
        let label = format!("client-{}", self.number);
        let answer = call.make(&label, &self.counter, &self.connections);
        let slow = if self.dice.one_in(20) { 100_000 } else { 500 };
        let at = self.cluster.now() + self.dice.micros(slow);
        self.answers.push_back((at, answer));
        true
    }

    /// When something of this client is due next.
    pub(crate) fn next(&self) -> Option<Duration> {
        let calls = self.calls.iter().map(|(at, _)| *at);
        let answers = self.answers.iter().map(|(at, _)| *at);
        let threads = self.threads.iter().map(|thread| thread.stopped_until);
        let threads = threads.filter(|at| *at > self.cluster.now());
        let first = calls.chain(answers).chain(threads).chain(self.due).min();
        first.map(|at| at.max(self.stopped_until))
    }

    /// Scrubs the volume from now on, at any pace that is not felt.
    pub(crate) fn scrub(&self, every: Duration) {
        self.driven.plan_scrubs(ScrubPlan {
            every: Some(every),
            bytes_per_s: SCRUB_BYTES_PER_S,
        });
    }

    pub(crate) fn open(&mut self, number: u32) {
        match self.driven.open() {
            Ok(channel) => self.threads.push(Thread {
                number,
                channel,
                pending: BTreeMap::new(),
                stopped_until: Duration::ZERO,
                is_turned_away: false,
            }),
            Err(cause) => tell!(
                self.cluster,
                "client {} opens nothing: {cause}",
                self.number
            ),
        }
    }

    /// Its attachment, and whether all legs are in-sync.
    pub(crate) fn attached(&self) -> (u32, bool) {
        let status = self.driven.status();
        let is_whole = status.is_some_and(|status| status.state == VolumeState::Healthy);
        (self.attachment, is_whole)
    }

    /// Whether every request has its answer.
    pub(crate) fn is_idle(&self) -> bool {
        let program = self.program.as_ref();
        self.threads.iter().all(|thread| thread.pending.is_empty())
            && program.is_none_or(Program::is_idle)
    }

    /// Whether another client has taken the volume, as far as this one knows.
    pub(crate) fn is_fenced(&self) -> bool {
        self.is(VolumeState::Fenced)
    }

    fn is(&self, state: VolumeState) -> bool {
        let status = self.driven.status();
        status.is_some_and(|status| status.state == state)
    }

    /// Whether it lost a leg and the manager has not said so yet.
    pub(crate) fn is_awaiting_manager(&self) -> bool {
        self.is(VolumeState::AwaitingManager)
    }

    /// Whether it is attached with every leg in use.
    pub(crate) fn is_healthy(&self) -> bool {
        self.attachment > 0 && self.is(VolumeState::Healthy)
    }

    /// Whether nothing is under way, every leg is in use, and those that follow
    /// have all there is.
    pub(crate) fn is_calm(&self) -> bool {
        let status = self.driven.status();
        let program = self.program.as_ref();
        let channels = self.threads.len() + program.map_or(0, |it| it.mount.channels());
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
