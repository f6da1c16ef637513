//! All direct clients of a history, and the bricks' knowledge of them.
//!
//! Invariants: a brick retires its dead clients before it does other work, because it might wait
//! for them. Other bricks' dead clients are retired when a waiter needs their locks.

use super::client_thread::{
    ActionResult, ClientCommand, ClientReply, ClientThread, ExposedFile, FileAction, SessionLeg,
};
use crate::brick_host::{RunningBrick, catch_crash};
use crate::cluster::{Cluster, tell};
use pagemesh_base::poison::lock;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::SliceError;
use pagemesh_store::session::Session;
use pagemesh_volume::direct_access::{DirectSegment, LayoutLease};
use std::sync::{Arc, Weak};

/// Maxima of a client's accesses in a turn: a few of an operation, or most of it.
const ACCESSES_PER_TURN: [u64; 2] = [4, 60];
/// Steps of other clients during one wait, after which the wait counts as endless.
const WAIT_STEPS_MAX: u32 = 200_000;
/// Steps of a wait after which the dead clients of other bricks are retired.
const RETIRE_EVERY_STEPS: u32 = 40;
/// Client sessions carry an absent process id, so that no brick kills a process.
const ABSENT_PID: u32 = 0x7fff_fff0;

/// A session of a brick.
struct ClientSession {
    host: usize,
    running: Weak<RunningBrick>,
    session: u32,
}

/// The checker's name of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CheckedOp {
    /// A sector operation, by its number.
    Sectors(usize),
    /// An append, by its value.
    Append(u64),
    /// A read of the append file, by its beginning.
    LogRead(u64),
}

/// An operation in progress in a direct client.
#[derive(Clone)]
pub(crate) struct ClientOp {
    /// The operation in the checker, or in the append log.
    pub(crate) checked: CheckedOp,
    pub(crate) file: usize,
    /// Sectors of the file.
    pub(crate) sectors: std::ops::Range<u64>,
    pub(crate) action: FileAction,
    pub(crate) ino: u64,
}

pub(crate) struct DirectClient {
    pub(crate) number: u32,
    pub(crate) row: usize,
    /// The client with the mount that admitted it.
    pub(crate) client: u32,
    pub(crate) segment: Arc<DirectSegment>,
    thread: ClientThread,
    sessions: Vec<ClientSession>,
    pub(crate) lease: Option<LayoutLease>,
    pub(crate) op: Option<ClientOp>,
    result: Option<(ActionResult, bool)>,
    /// Whether its client is gone or superseded: it finishes its operation and starts no other.
    pub(crate) is_orphan: bool,
}

impl DirectClient {
    fn is_in_progress(&self) -> bool {
        self.op.is_some() && self.result.is_none()
    }
}

/// A direct client that died inside an operation.
pub(crate) struct DeadClient {
    pub(crate) number: u32,
    pub(crate) row: usize,
    pub(crate) client: u32,
    pub(crate) segment: Arc<DirectSegment>,
    pub(crate) op: ClientOp,
}

pub(crate) struct DirectClientSet {
    pub(crate) clients: Vec<DirectClient>,
    /// Sessions of dead clients that their bricks have not noticed yet.
    unretired_sessions: Vec<ClientSession>,
    pub(crate) dead_clients: Vec<DeadClient>,
    pub(crate) rng: SplitMix64,
    /// The brick that works at present.
    working_host: Option<usize>,
    wait_steps: u32,
}

impl DirectClientSet {
    pub(crate) fn new(seed: u64) -> DirectClientSet {
        DirectClientSet {
            clients: Vec::new(),
            unretired_sessions: Vec::new(),
            dead_clients: Vec::new(),
            rng: SplitMix64::new(seed),
            working_host: None,
            wait_steps: 0,
        }
    }

    pub(crate) fn admit(
        &mut self,
        number: u32,
        client: u32,
        row: usize,
        segment: Arc<DirectSegment>,
    ) {
        self.clients.push(DirectClient {
            number,
            row,
            client,
            thread: ClientThread::start(Arc::clone(&segment), row),
            segment,
            sessions: Vec::new(),
            lease: None,
            op: None,
            result: None,
            is_orphan: false,
        });
    }

    fn handle_reply(&mut self, at: usize, word: ClientReply) {
        let guest = &mut self.clients[at];
        match word {
            ClientReply::LegsSet | ClientReply::InProgress => {}
            ClientReply::Ended(end, must_call) => guest.result = Some((end, must_call)),
            ClientReply::Panicked(text) => panic!("direct client {}: {text}", guest.number),
        }
    }

    pub(crate) fn begin(&mut self, at: usize, shown: ExposedFile, work: ClientOp) {
        let deed = work.action.clone();
        self.clients[at].op = Some(work);
        let word = self.clients[at]
            .thread
            .send(ClientCommand::Begin(shown, deed));
        self.handle_reply(at, word);
    }

    /// Lets a client continue its operation.
    pub(crate) fn continue_client(&mut self, at: usize) {
        let most = ACCESSES_PER_TURN[self.rng.below(2) as usize];
        let accesses = self.rng.below(most) as u32;
        let word = self.clients[at]
            .thread
            .send(ClientCommand::Continue(accesses));
        self.handle_reply(at, word);
    }

    /// Indexes of the clients with an operation in progress.
    pub(crate) fn in_progress(&self) -> Vec<usize> {
        let all = self.clients.iter().enumerate();
        let inside = all.filter(|(_, guest)| guest.is_in_progress());
        inside.map(|(at, _)| at).collect()
    }

    /// The result of an operation that has ended.
    pub(crate) fn take_result(&mut self, at: usize) -> Option<(ClientOp, ActionResult, bool)> {
        let guest = &mut self.clients[at];
        let (end, must_call) = guest.result.take()?;
        let work = guest.op.take().expect("an operation in progress");
        Some((work, end, must_call))
    }

    /// Kills a client at its current access; bricks notice later. Returns the hosts of its sessions
    /// if it was inside an operation.
    pub(crate) fn kill(&mut self, at: usize) -> Vec<usize> {
        let mut guest = self.clients.remove(at);
        let mut bricks: Vec<usize> = guest.sessions.iter().map(|held| held.host).collect();
        self.unretired_sessions.append(&mut guest.sessions);
        let was_inside = guest.is_in_progress();
        let DirectClient {
            number,
            row,
            client,
            segment,
            thread,
            op: work,
            ..
        } = guest;
        drop(thread);
        if let Some(work) = work {
            self.dead_clients.push(DeadClient {
                number,
                row,
                client,
                segment,
                op: work,
            });
        }
        bricks.retain(|_| was_inside);
        bricks
    }

    fn take_sessions_of(&mut self, is_its: impl Fn(usize) -> bool) -> Vec<ClientSession> {
        let (its, others) = std::mem::take(&mut self.unretired_sessions)
            .into_iter()
            .partition(|held| is_its(held.host));
        self.unretired_sessions = others;
        its
    }
}

impl Cluster {
    /// A restarting brick kills the clients that have its pool mapped and are inside an operation.
    pub(crate) fn end_clients_mapping(&self, host: usize) {
        let mut client_set = lock(&self.direct_clients);
        let has_it = |guest: &DirectClient| {
            let mut held = guest.sessions.iter();
            held.any(|held| held.host == host)
        };
        for at in (0..client_set.clients.len()).rev() {
            if !has_it(&client_set.clients[at]) {
                continue;
            }
            client_set.clients[at].lease = None;
            if client_set.clients[at].is_in_progress() {
                let number = client_set.clients[at].number;
                client_set.kill(at);
                drop(client_set);
                tell!(self, "direct client {number} is killed by brick {host}");
                client_set = lock(&self.direct_clients);
            }
        }
    }

    /// A brick begins work; its dead clients are retired first.
    pub(crate) fn begin_brick_work(&self, host: usize) {
        let dead = {
            let mut client_set = lock(&self.direct_clients);
            client_set.working_host = Some(host);
            client_set.wait_steps = 0;
            client_set.take_sessions_of(|its| its == host)
        };
        self.retire_sessions(dead);
    }

    /// The brick ends its work.
    pub(crate) fn end_brick_work(&self) {
        lock(&self.direct_clients).working_host = None;
    }

    fn retire_sessions(&self, dead: Vec<ClientSession>) {
        for held in dead {
            self.close_client_session(&held);
        }
    }

    fn close_client_session(&self, held: &ClientSession) {
        let Some(running) = held.running.upgrade() else {
            return;
        };
        let is_its = |now: &Arc<RunningBrick>| Arc::ptr_eq(now, &running);
        if !self.running_brick(held.host).as_ref().is_some_and(is_its) {
            return;
        }
        let closed = catch_crash(|| running.brick.close_session(held.session));
        drop(running);
        if closed.is_err() {
            self.crash_brick(held.host);
        }
    }

    /// Lets some client continue because a waiter needs it. False if none can.
    pub(crate) fn continue_any_client(&self) -> bool {
        let mut client_set = lock(&self.direct_clients);
        client_set.wait_steps += 1;
        assert!(
            client_set.wait_steps < WAIT_STEPS_MAX,
            "a direct client does not end its operation"
        );
        let inside = client_set.in_progress();
        let picked = client_set.rng.pick(&inside);
        if let Some(at) = picked {
            client_set.continue_client(at);
        }
        let (at_work, is_late) = (
            client_set.working_host,
            client_set.wait_steps.is_multiple_of(RETIRE_EVERY_STEPS),
        );
        let dead = match picked.is_none() || is_late {
            true => client_set.take_sessions_of(|host| Some(host) != at_work),
            false => Vec::new(),
        };
        drop(client_set);
        let is_any = picked.is_some() || !dead.is_empty();
        self.retire_sessions(dead);
        is_any
    }

    /// Closes a client's sessions, and removes the client if `removes` is set.
    pub(crate) fn release_sessions(&self, at: usize, removes: bool) {
        let (held, guest) = {
            let mut client_set = lock(&self.direct_clients);
            client_set.clients[at].lease = None;
            let held = std::mem::take(&mut client_set.clients[at].sessions);
            (held, removes.then(|| client_set.clients.remove(at)))
        };
        drop(guest);
        for held in held {
            self.begin_brick_work(held.host);
            self.close_client_session(&held);
            self.end_brick_work();
        }
    }

    /// Opens sessions of all legs of a layout lease for a client.
    pub(crate) fn open_sessions(&self, at: usize, lease: LayoutLease) -> Result<(), SliceError> {
        self.release_sessions(at, false);
        let lost = |why: &str| SliceError::Lost(why.into());
        let (mut legs, mut all) = (Vec::new(), Ok(()));
        for seat in &lease.legs {
            let host = self.host_of(seat.brick).ok_or_else(|| lost("no brick"))?;
            let Some(running) = self.running_brick(host) else {
                all = Err(lost("it is down"));
                break;
            };
            self.begin_brick_work(host);
            let opened = catch_crash(|| {
                let number = running.brick.open_session(ABSENT_PID, 1)?;
                lock(&self.direct_clients).clients[at]
                    .sessions
                    .push(ClientSession {
                        host,
                        running: Arc::downgrade(&running),
                        session: number,
                    });
                let (object, _) = running.brick.attach(seat.slice, lease.epoch)?;
                let view = Arc::clone(running.brick.mapping());
                let handle = view.handle(object, seat.slice)?;
                let session = Session::new(view, number);
                Ok::<_, SliceError>(SessionLeg { session, handle })
            });
            self.end_brick_work();
            match opened {
                Ok(Ok(leg)) => legs.push(leg),
                Ok(Err(cause)) => all = Err(cause),
                Err(_) => {
                    self.crash_brick(host);
                    all = Err(lost("it died"));
                }
            }
            if all.is_err() {
                break;
            }
        }
        if let Err(cause) = all {
            self.release_sessions(at, false);
            return Err(cause);
        }
        let mut client_set = lock(&self.direct_clients);
        client_set.clients[at].lease = Some(lease.clone());
        let word = client_set.clients[at]
            .thread
            .send(ClientCommand::SetLegs(lease, legs));
        client_set.handle_reply(at, word);
        Ok(())
    }
}
