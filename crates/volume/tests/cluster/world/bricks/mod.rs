//! A model of bricks: slices with pages, stamps, epochs, rounds, sessions and in-flight tables.
//! A connection makes progress only when it is stepped.

mod connector;
mod slice;

use crate::world::mapped_sessions::MappedSession;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{SliceCompletion, SliceError, SliceReply, SliceRequest};
pub(crate) use slice::{Page, Slice};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

pub(crate) const PAGE: u64 = 4096;
pub(crate) struct Brick {
    pub up: bool,
    /// The pages that can still be allocated. Freed pages do not count again.
    pub room: u64,
    /// Whether it accepts requests without doing or answering them.
    pub frozen: bool,
    pub buffers: bool,
    /// The maximum of concurrent connections.
    pub sessions_max: usize,
    pub slices: BTreeMap<SliceId, Slice>,
}

struct Connection {
    brick: BrickId,
    slice: SliceId,
    /// The newest epoch that it used.
    epoch: Epoch,
    /// The client's end is gone. The brick may still do requests that were sent.
    orphan: bool,
    lost: bool,
    /// A later connection announced the same epoch to the slice again.
    superseded: bool,
    /// Whether a failed change fails the changes after it.
    keeps_order: bool,
    /// Whether a change has failed.
    is_broken: bool,
    queue: VecDeque<(u64, SliceRequest)>,
    /// Answers of requests that are done, on their way to the client.
    answers: VecDeque<SliceCompletion>,
    arrived: Vec<SliceCompletion>,
}

#[derive(Default)]
pub(crate) struct Bricks {
    pub bricks: BTreeMap<BrickId, Brick>,
    connections: BTreeMap<u64, Connection>,
    /// Sessions of direct clients.
    pub mapped: BTreeMap<u64, MappedSession>,
    pub next: u64,
    /// Whether barriers are delayed on their way.
    pub hold_barriers: bool,
    /// The table limit of slices that are created from now on.
    pub table_max: Option<usize>,
    /// Whether a brick has refused a change because it was full.
    pub was_full: bool,
    /// Whether requests are done as they come, and answered at once.
    pub is_synchronous: bool,
    /// The time that legs return.
    pub clock: Option<Instant>,
}

#[derive(Clone, Default)]
pub(crate) struct Fabric(pub Arc<Mutex<Bricks>>);

impl Bricks {
    pub(crate) fn add(&mut self, id: BrickId, buffers: bool) {
        let brick = Brick {
            up: true,
            room: u64::MAX,
            frozen: false,
            buffers,
            sessions_max: usize::MAX,
            slices: BTreeMap::new(),
        };
        self.bricks.insert(id, brick);
    }

    pub(crate) fn create(&mut self, brick: BrickId, slice: SliceId, bytes: u64) {
        let slice_model = Slice::new(bytes, self.table_max);
        let slices = &mut self.bricks.get_mut(&brick).expect("brick").slices;
        slices.insert(slice, slice_model);
    }

    pub(crate) fn slice(&self, brick: BrickId, slice: SliceId) -> &Slice {
        &self.bricks[&brick].slices[&slice]
    }

    pub(crate) fn slice_mut(&mut self, brick: BrickId, slice: SliceId) -> &mut Slice {
        let slices = &mut self.bricks.get_mut(&brick).expect("brick").slices;
        slices.get_mut(&slice).expect("slice")
    }

    /// Kills the process. A buffering brick loses unflushed changes.
    pub(crate) fn kill(&mut self, id: BrickId) {
        for number in self.connections_of(id) {
            self.break_connection(number);
        }
        self.lose_mapped(id);
        let brick = self.bricks.get_mut(&id).expect("brick");
        brick.up = false;
        let buffers = brick.buffers;
        for slice in brick.slices.values_mut() {
            slice.crash(buffers);
        }
    }

    /// Restarts a brick. It stays down while direct clients still map the pool of the old
    /// process.
    pub(crate) fn restart(&mut self, id: BrickId) {
        if !self.bricks[&id].up && !self.recover_mapped(id) {
            return;
        }
        self.bricks.get_mut(&id).expect("brick").up = true;
    }

    pub(crate) fn connections_of(&self, id: BrickId) -> Vec<u64> {
        let own = self.connections.iter().filter(|(_, c)| c.brick == id);
        own.map(|(number, _)| *number).collect()
    }

    pub(crate) fn connections(&self) -> Vec<u64> {
        self.connections.keys().copied().collect()
    }

    /// The number of requests that a brick has received and not done.
    pub(crate) fn queued(&self, brick: BrickId) -> usize {
        let connections = self.connections.values();
        let of_it = connections.filter(|connection| connection.brick == brick);
        of_it.map(|connection| connection.queue.len()).sum()
    }

    /// The connections that can make a step.
    pub(crate) fn busy(&self) -> Vec<u64> {
        let busy = self.connections.iter().filter(|(_, c)| {
            let waits = !c.queue.is_empty() || !c.answers.is_empty() || c.orphan;
            waits && !self.bricks[&c.brick].frozen
        });
        busy.map(|(number, _)| *number).collect()
    }

    /// Whether a frozen brick has requests.
    pub(crate) fn has_request_to_frozen(&self) -> bool {
        let mut all = self.connections.values();
        all.any(|c| !c.queue.is_empty() && self.bricks[&c.brick].frozen)
    }

    /// Whether an answer has arrived that was not reaped.
    pub(crate) fn has_unreaped(&self) -> bool {
        self.connections.values().any(|c| !c.arrived.is_empty())
    }

    /// The connections of clients that are gone, with their requests.
    pub(crate) fn orphans(&self) -> Vec<u64> {
        let orphans = self.connections.iter().filter(|(_, c)| c.orphan);
        orphans.map(|(number, _)| *number).collect()
    }

    /// Takes all requests on their way to bricks out of the network.
    pub(crate) fn take_messages(&mut self) -> Vec<(u64, u64, SliceRequest)> {
        let mut all = vec![];
        for (number, connection) in &mut self.connections {
            let queue = connection.queue.drain(..);
            all.extend(queue.map(|(tag, request)| (*number, tag, request)));
        }
        all
    }

    /// Puts requests back into the network.
    pub(crate) fn restore_messages(&mut self, messages: Vec<(u64, u64, SliceRequest)>) {
        for (number, tag, request) in messages {
            if let Some(connection) = self.connections.get_mut(&number) {
                connection.queue.push_back((tag, request));
            }
        }
    }

    /// Whether some client has yet to notice the loss of a connection.
    pub(crate) fn has_lost(&self) -> bool {
        self.connections.values().any(|connection| connection.lost)
    }

    /// Breaks a random connection, if there is any. Its session at the brick ends.
    pub(crate) fn break_any_connection(&mut self, rng: &mut SplitMix64) {
        let connections = self.connections();
        if !connections.is_empty() {
            let at = rng.below(connections.len() as u64) as usize;
            self.break_connection(connections[at]);
        }
    }

    pub(crate) fn break_connection(&mut self, number: u64) {
        let connection = self.connections.get_mut(&number).expect("connection");
        if connection.lost {
            return;
        }
        connection.lost = true;
        let lost = || SliceError::Lost("the connection broke".into());
        let tags = connection.answers.drain(..).map(|answer| answer.tag);
        let tags: Vec<u64> = tags
            .chain(connection.queue.drain(..).map(|(tag, _)| tag))
            .collect();
        let fail = |tag| SliceCompletion::new(tag, Err(lost()));
        connection.arrived.extend(tags.into_iter().map(fail));
        let (brick, slice) = (connection.brick, connection.slice);
        if connection.orphan {
            self.connections.remove(&number);
        }
        self.slice_mut(brick, slice).end_session(number);
    }

    /// Does one request of a connection, or delivers one answer; false if there is neither.
    pub(crate) fn step(&mut self, number: u64, rng: &mut SplitMix64) -> bool {
        let Some(connection) = self.connections.get_mut(&number) else {
            return false;
        };
        let barrier = matches!(
            connection.queue.front(),
            Some((_, SliceRequest::RaiseEpoch { .. }))
        );
        if self.bricks[&connection.brick].frozen || barrier && self.hold_barriers {
            return false;
        }
        if barrier {
            let slice = connection.slice;
            if !self.drain_mapped(slice) {
                return false;
            }
        }
        let connection = self.connections.get_mut(&number).expect("connection");
        let deliver = !connection.answers.is_empty() && rng.one_in(2);
        if !deliver && let Some((tag, request)) = connection.queue.pop_front() {
            let (brick, slice) = (connection.brick, connection.slice);
            let result = self.execute(brick, slice, number, request);
            let connection = self.connections.get_mut(&number).expect("connection");
            connection
                .answers
                .push_back(SliceCompletion::new(tag, result));
        } else if let Some(answer) = connection.answers.pop_front() {
            connection.arrived.push(answer);
        } else if connection.orphan {
            self.break_connection(number);
        } else {
            return false;
        }
        true
    }

    fn execute(
        &mut self,
        brick: BrickId,
        slice: SliceId,
        connection: u64,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        let attached = self.connections.get(&connection);
        if attached.is_some_and(|connection| connection.superseded) {
            return Err(SliceError::Lost("the client has come back".into()));
        }
        if let SliceRequest::RaiseEpoch { epoch, .. } = request
            && epoch.0 == self.slice(brick, slice).epoch()
        {
            let older = self.connections.range_mut(..connection);
            let older = older.filter(|(_, c)| (c.brick, c.slice) == (brick, slice));
            older.for_each(|(_, connection)| connection.superseded = true);
        }
        let brick = self.bricks.get_mut(&brick).expect("brick");
        let slice = brick.slices.get_mut(&slice).expect("slice");
        let number = connection;
        let Some(connection) = self.connections.get_mut(&number) else {
            return slice.execute(number, &mut brick.room, request);
        };
        let is_change = request.is_change();
        if connection.is_broken && is_change {
            return Err(SliceError::Refused("a change before it failed".into()));
        }
        connection.keeps_order |= request == SliceRequest::KeepOrder;
        let admitted = slice.check_connection_epoch(connection, &request);
        let done = admitted.and_then(|()| slice.execute(number, &mut brick.room, request));
        self.was_full |= done == Err(SliceError::NoSpace);
        let breaks = connection.keeps_order && is_change && done.is_err();
        connection.is_broken |= breaks && !defect::is(Defect::OrderNotKept);
        done
    }
}
