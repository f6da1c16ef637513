//! A brick in memory behind a server, and helpers that drive clients against it.
//!
//! Nothing here sleeps: threads signal each other, and every wait has a limit after which the test
//! fails.

#![allow(dead_code, reason = "each test file uses a part")]

pub mod raw;

use pagemesh_base::event_fd::EventFd;
use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::*;
use pagemesh_base::wait::until_readable;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::message::reply::AttachReply;
use pagemesh_fabric::service::{FinishedTicket, Handler, Outcome, PeerInfo, Service, Ticket};
use pagemesh_fabric::tcp::{ServerOptions, TcpLeg, TcpServer};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// A limit that no wait of a passing test reaches.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(20);
pub const BRICK: BrickId = BrickId(Uuid::from_u128(0xb));
pub const SLICE: SliceId = SliceId(Uuid::from_u128(0x51));
pub const SLICE_BYTES: u64 = 4 << 20;

pub fn key() -> Key {
    Key::from_bytes([7; 32])
}

pub fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Long limits: only tests that shorten one see it expire.
pub fn timeouts() -> Timeouts {
    Timeouts {
        connect: TEST_TIMEOUT,
        handshake: TEST_TIMEOUT,
        stall: TEST_TIMEOUT,
        call: TEST_TIMEOUT,
    }
}

pub fn stamp(epoch: u32) -> Stamp {
    let (epoch, op, open) = (Epoch(epoch), 1, 0);
    Stamp {
        epoch,
        op,
        open_ops: open,
    }
}

/// How requests of slices complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplyMode {
    #[default]
    Immediate,
    /// With a ticket, until [`MemoryBrick::release`].
    Deferred,
    /// With a ticket that the batch's end finishes.
    AtBatchEnd,
    /// With one ticket for all.
    SameTicket,
}

#[derive(Default)]
pub struct MemoryBrickState {
    pub slices: BTreeMap<SliceId, (Vec<u8>, Epoch)>,
    pub snapshots: BTreeSet<Epoch>,
    pub mode: ReplyMode,
    /// The requests that sessions got.
    pub requests: Vec<SliceRequest>,
    /// Answers to return in place of executing the request.
    pub script: VecDeque<Result<SliceReply, SliceError>>,
    /// The number of requests at the end of each batch.
    pub batches: Vec<usize>,
    pub opened: usize,
    pub dropped: usize,
    /// Open tickets, their maximum, and the maximum of the bytes that they held.
    pub waiting: usize,
    pub waiting_max: usize,
    pub held_bytes_max: usize,
    /// Batches do not end while this is set.
    pub gate_closed: bool,
    pub fail_batches: bool,
    pub peers: Vec<PeerInfo>,
}

/// A brick in memory.
pub struct MemoryBrick {
    state: Mutex<MemoryBrickState>,
    changed: Condvar,
    released: EventFd,
}

impl MemoryBrick {
    pub fn new() -> Arc<MemoryBrick> {
        let mut state = MemoryBrickState::default();
        let content = vec![0; SLICE_BYTES as usize];
        state.slices.insert(SLICE, (content, Epoch(1)));
        Arc::new(MemoryBrick {
            state: Mutex::new(state),
            changed: Condvar::new(),
            released: EventFd::new().expect("a descriptor"),
        })
    }

    pub fn state(&self) -> MutexGuard<'_, MemoryBrickState> {
        self.state.lock().expect("no thread panicked")
    }

    pub fn change(&self, change: impl FnOnce(&mut MemoryBrickState)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    #[track_caller]
    pub fn wait(&self, what: &str, until: impl Fn(&MemoryBrickState) -> bool) {
        let waited = self
            .changed
            .wait_timeout_while(self.state(), TEST_TIMEOUT, |state| !until(state));
        let (state, timed) = waited.expect("no thread panicked");
        drop(state);
        assert!(!timed.timed_out(), "waited in vain for {what}");
    }

    /// Finishes every ticket; later requests complete at once.
    pub fn release(&self) {
        self.change(|state| state.mode = ReplyMode::Immediate);
        self.released.signal();
    }
}

/// The brick's interface to its server.
pub struct MemoryBrickService(pub Arc<MemoryBrick>);

impl Service for MemoryBrickService {
    fn brick(&self) -> BrickId {
        BRICK
    }

    fn open(&self, peer: PeerInfo) -> Result<Box<dyn Handler>, SliceError> {
        self.0.change(|state| {
            state.opened += 1;
            state.peers.push(peer);
        });
        Ok(Box::new(MemorySession {
            memory: self.0.clone(),
            attached: Vec::new(),
            tickets: 0,
            waiting: HashMap::new(),
            held_bytes: 0,
        }))
    }

    fn control(&self) -> &dyn BrickControl {
        self
    }
}

impl BrickControl for MemoryBrickService {
    fn create(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        let mut state = self.0.state();
        if state.slices.contains_key(&slice) {
            return Err(SliceError::SliceExists(slice));
        }
        let content = vec![0; size_bytes as usize];
        state.slices.insert(slice, (content, Epoch(0)));
        Ok(())
    }

    fn resize(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        match self.0.state().slices.get_mut(&slice) {
            Some((content, _)) => content.resize(size_bytes as usize, 0),
            None => return Err(SliceError::NoSuchSlice(slice)),
        }
        Ok(())
    }

    fn delete(&self, slice: SliceId) -> Result<(), SliceError> {
        let gone = self.0.state().slices.remove(&slice);
        gone.map(drop).ok_or(SliceError::NoSuchSlice(slice))
    }

    fn list(&self) -> Result<Vec<SliceInfo>, SliceError> {
        let info = |(&slice, (content, epoch)): (&SliceId, &(Vec<u8>, Epoch))| SliceInfo {
            slice,
            size_bytes: content.len() as u64,
            epoch: epoch.0,
        };
        Ok(self.0.state().slices.iter().map(info).collect())
    }

    fn status(&self) -> Result<BrickStatus, SliceError> {
        Ok(BrickStatus {
            brick: BRICK,
            durability: "process".into(),
            capacity_bytes: 1 << 40,
            used_bytes: 3,
            sessions: 2,
            incarnation: 1,
        })
    }

    fn prepare_snapshot(&self, slice: SliceId, snapshot: Epoch) -> Result<(), SliceError> {
        let mut state = self.0.state();
        if !state.slices.contains_key(&slice) {
            return Err(SliceError::NoSuchSlice(slice));
        }
        state.snapshots.insert(snapshot);
        Ok(())
    }

    fn drop_snapshots(&self, _slice: SliceId, dropped: &[Epoch]) -> Result<(), SliceError> {
        let snapshots = &mut self.0.state().snapshots;
        snapshots.retain(|snapshot| !dropped.contains(snapshot));
        Ok(())
    }

    fn snapshots(&self, _slice: SliceId) -> Result<Vec<Epoch>, SliceError> {
        Ok(self.0.state().snapshots.iter().copied().collect())
    }
}

type SliceResult = Result<SliceReply, SliceError>;

struct MemorySession {
    memory: Arc<MemoryBrick>,
    attached: Vec<SliceId>,
    tickets: u64,
    /// Results held back, and whether the batch's end has released them.
    waiting: HashMap<Ticket, (SliceResult, bool)>,
    held_bytes: usize,
}

impl MemorySession {
    fn perform(
        &self,
        state: &mut MemoryBrickState,
        handle: u32,
        request: &SliceRequest,
    ) -> SliceResult {
        if let Some(answer) = state.script.pop_front() {
            return answer;
        }
        let unknown = || SliceError::OutOfRange(format!("no handle {handle}"));
        let slice = self.attached.get(handle as usize).ok_or_else(unknown)?;
        let gone = SliceError::NoSuchSlice(*slice);
        let (content, epoch) = state.slices.get_mut(slice).ok_or(gone)?;
        let beyond = || SliceError::OutOfRange("beyond the slice".into());
        let range = |offset: u64, len: usize| offset as usize..offset as usize + len;
        match request {
            SliceRequest::Read { offset, len } => {
                let bytes = content.get(range(*offset, *len as usize));
                Ok(SliceReply::Data(bytes.ok_or_else(beyond)?.to_vec()))
            }
            SliceRequest::Write { stamp, .. } if stamp.epoch < *epoch => {
                Err(SliceError::StaleEpoch { current: *epoch })
            }
            SliceRequest::Write { offset, data, .. } => {
                let bytes = content.get_mut(range(*offset, data.len()));
                bytes.ok_or_else(beyond)?.copy_from_slice(data);
                Ok(SliceReply::Done)
            }
            SliceRequest::RaiseEpoch { epoch: raised, .. } => {
                *epoch = *raised;
                Ok(SliceReply::Done)
            }
            _ => Ok(SliceReply::Done),
        }
    }
}

impl Handler for MemorySession {
    fn attach(&mut self, slice: SliceId, epoch: Epoch) -> Result<AttachReply, SliceError> {
        let state = self.memory.state();
        let found = state.slices.get(&slice);
        let (content, current) = found.ok_or(SliceError::NoSuchSlice(slice))?;
        if epoch < *current {
            return Err(SliceError::StaleEpoch { current: *current });
        }
        self.attached.push(slice);
        Ok(AttachReply {
            handle: self.attached.len() as u32 - 1,
            size_bytes: content.len() as u64,
        })
    }

    fn execute(&mut self, handle: u32, request: SliceRequest) -> Outcome {
        let memory = self.memory.clone();
        let mut state = memory.state();
        let result = self.perform(&mut state, handle, &request);
        self.held_bytes += match &request {
            SliceRequest::Write { data, .. } => data.len(),
            _ => 0,
        };
        state.requests.push(request);
        let outcome = match state.mode {
            ReplyMode::Immediate => Outcome::Done(result),
            mode => {
                self.tickets += u64::from(mode != ReplyMode::SameTicket);
                let ticket = Ticket(self.tickets);
                self.waiting.insert(ticket, (result, false));
                Outcome::Deferred(ticket)
            }
        };
        state.waiting = self.waiting.len();
        state.waiting_max = state.waiting_max.max(state.waiting);
        state.held_bytes_max = state.held_bytes_max.max(self.held_bytes);
        memory.changed.notify_all();
        outcome
    }

    fn end_batch(&mut self) -> Result<(), SliceError> {
        let mut state = self.memory.state();
        let asked = state.requests.len();
        state.batches.push(asked);
        self.memory.changed.notify_all();
        let gate = &self.memory.changed;
        let gate = gate.wait_timeout_while(state, TEST_TIMEOUT, |state| state.gate_closed);
        let (state, _) = gate.expect("no thread panicked");
        if state.mode == ReplyMode::AtBatchEnd {
            self.waiting.values_mut().for_each(|(_, free)| *free = true);
        }
        match state.fail_batches {
            true => Err(SliceError::NoSpace),
            false => Ok(()),
        }
    }

    fn poll(&mut self, done: &mut Vec<FinishedTicket>) {
        let released = self.memory.state().mode == ReplyMode::Immediate;
        if released {
            self.memory.released.drain();
        }
        let finished = self.waiting.extract_if(|_, (_, free)| released || *free);
        done.extend(finished.map(|(ticket, (result, _))| (ticket, result)));
        // The last request is answered first: the order must not matter.
        done.sort_by_key(|(ticket, _)| std::cmp::Reverse(*ticket));
        if self.waiting.is_empty() {
            self.held_bytes = 0;
        }
    }

    fn poll_fds<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        fds.push(self.memory.released.as_fd());
    }
}

impl Drop for MemorySession {
    fn drop(&mut self) {
        self.memory.change(|state| state.dropped += 1);
    }
}

pub fn serve(memory: &Arc<MemoryBrick>) -> TcpServer {
    serve_with(memory, ServerOptions::default())
}

pub fn serve_with(memory: &Arc<MemoryBrick>, options: ServerOptions) -> TcpServer {
    let service = Arc::new(MemoryBrickService(memory.clone()));
    TcpServer::bind(loopback(), key(), service, options).expect("a free port")
}

#[track_caller]
pub fn attach(server: &TcpServer) -> TcpLeg {
    TcpLeg::connect(server.address(), &key(), timeouts(), SLICE, Epoch(1)).expect("attached")
}

/// Waits as a volume does, until `count` requests have completed.
#[track_caller]
pub fn reap(leg: &mut TcpLeg, count: usize) -> Vec<SliceCompletion> {
    let until = Instant::now() + TEST_TIMEOUT;
    let mut completions = Vec::new();
    loop {
        leg.reap(&mut completions);
        if completions.len() >= count {
            assert_eq!(completions.len(), count, "more than were asked for");
            return completions;
        }
        assert!(Instant::now() < until, "waited in vain for completions");
        wait_ready(leg, leg.deadline().map_or(until, |at| at.min(until)));
    }
}

fn wait_ready(leg: &TcpLeg, until: Instant) -> bool {
    let mut raw = Vec::new();
    leg.poll_fds(&mut raw);
    until_readable(&raw, Some(until)).expect("waited")
}

/// Whether bytes have arrived that were not reaped.
pub fn has_arrived(leg: &TcpLeg) -> bool {
    wait_ready(leg, Instant::now())
}

#[track_caller]
pub fn execute(leg: &mut TcpLeg, request: SliceRequest) -> SliceResult {
    leg.submit(99, request);
    let mut completions = reap(leg, 1);
    let completion = completions.pop().expect("one");
    assert_eq!(completion.tag, 99);
    completion.result
}

#[track_caller]
pub fn assert_lost(done: &SliceResult, says: &str) {
    match done {
        Err(SliceError::Lost(reason)) => {
            assert!(reason.contains(says), "'{reason}' does not say '{says}'");
        }
        other => panic!("not lost but {other:?}"),
    }
}
