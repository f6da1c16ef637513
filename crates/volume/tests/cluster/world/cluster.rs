//! A cluster and one client that become idle between the steps of a scenario.

use crate::world::bricks::Fabric;
use crate::world::client::Client;
use crate::world::manager::{Manager, ManagerMode, brick, segment};
use crate::world::oracle::fill;
use bytes::Bytes;
use pagemesh_base::layout::{BrickId, LegState, STRIPE_BYTES, Segment, SliceId};
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::TransactionPart;
use pagemesh_base::space::{Channel, Reply, Request, SpaceError, Token};
use pagemesh_volume::test_api::{ControllerEvent, VolumeChannel};
use pagemesh_volume::{Counters, LegStatus, VolumeState};
use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::Duration;
use uuid::Uuid;

pub(crate) const PAGE: u64 = 4096;
/// The slice of an asynchronous replica.
pub(crate) const REPLICA_SLICE: SliceId = SliceId(Uuid::from_u128(77));
/// The number of passes without any progress after which a cluster is idle.
const IDLE_PASSES: u32 = 4;

pub(crate) type RequestResult = Result<Reply, SpaceError>;

/// A cluster and one client that become idle between the steps of a scenario.
pub(crate) struct TestCluster {
    pub fabric: Fabric,
    pub manager: Manager,
    pub client: Client,
    pub channels: Vec<VolumeChannel>,
    pub results: BTreeMap<u64, RequestResult>,
    next: u64,
    pub rng: SplitMix64,
}

impl TestCluster {
    /// Creates bricks for the segments, and a client that has attached and opened a channel.
    pub(crate) fn new(segments: Vec<Segment>) -> TestCluster {
        TestCluster::of_class(segments, "process")
    }

    pub(crate) fn of_class(segments: Vec<Segment>, durability: &str) -> TestCluster {
        let fabric = Fabric::default();
        for leg in segments
            .iter()
            .flat_map(|s| &s.columns)
            .flat_map(|c| &c.legs)
        {
            let mut bricks = poison::lock(&fabric.0);
            if !bricks.bricks.contains_key(&leg.brick) {
                bricks.add(leg.brick, durability == "file-sync");
            }
        }
        create_slices(&fabric, &segments);
        let manager = Manager::new(segments, durability);
        let client = Client::new(&fabric, &manager);
        let mut world = TestCluster {
            fabric,
            manager,
            client,
            channels: vec![],
            results: BTreeMap::new(),
            next: 0,
            rng: SplitMix64::new(1),
        };
        world.attach();
        world.open();
        world
    }

    pub(crate) fn mirror(copies: usize) -> TestCluster {
        TestCluster::new(vec![segment(0, 1, copies, STRIPE_BYTES)])
    }

    pub(crate) fn attach(&mut self) {
        for _ in 0..1000 {
            self.run_until_idle();
            if let Some(result) = self.client.take_attach_result() {
                return result.expect("attached");
            }
            self.client.now += Duration::from_millis(10);
        }
        panic!("an attach does not end");
    }

    /// The client dies, along with its requests in the network. Another one begins to attach,
    /// and makes `steps` steps, one message at a time.
    pub(crate) fn attach_partially(&mut self, steps: usize) {
        poison::lock(&self.fabric.0).take_messages();
        self.channels.clear();
        self.client = Client::new(&self.fabric, &self.manager);
        let orphans = poison::lock(&self.fabric.0).orphans();
        for number in orphans {
            poison::lock(&self.fabric.0).break_connection(number);
        }
        self.run_steps(steps);
    }

    /// Makes one message or call at a time.
    pub(crate) fn run_steps(&mut self, steps: usize) {
        for _ in 0..steps {
            let busy = poison::lock(&self.fabric.0).busy();
            match busy.first() {
                Some(&connection) => {
                    poison::lock(&self.fabric.0).step(connection, &mut self.rng);
                    self.client.poll();
                }
                None => {
                    self.client.now += Duration::from_millis(10);
                    self.client.poll();
                    self.client.run_call();
                }
            }
        }
    }

    /// An operator adds a copy to the only column.
    pub(crate) fn add_copy(&mut self, brick: BrickId, slice: SliceId) {
        self.add_copy_of(brick, slice, false);
    }

    /// An operator adds an asynchronous replica.
    pub(crate) fn add_replica(&mut self, brick: BrickId, slice: SliceId) {
        self.add_copy_of(brick, slice, true);
    }

    fn add_copy_of(&mut self, brick: BrickId, slice: SliceId, asynchronous: bool) {
        let bytes = self.manager.layout().segments[0].slice_bytes();
        let mut bricks = poison::lock(&self.fabric.0);
        bricks.add(brick, false);
        bricks.create(brick, slice, bytes);
        drop(bricks);
        self.manager.add_copy(brick, slice, asynchronous);
    }

    /// Tells the client that its layout may have changed.
    pub(crate) fn request_refresh(&mut self) {
        let (answer, _) = mpsc::channel();
        self.client.mailbox.post(ControllerEvent::Refresh(answer));
    }

    pub(crate) fn refresh_layout(&mut self) {
        self.request_refresh();
        self.run_until_idle();
    }

    pub(crate) fn open(&mut self) -> usize {
        self.channels.push(self.client.open());
        self.run_until_idle();
        self.channels.len() - 1
    }

    /// Makes all progress that is possible without time passing.
    pub(crate) fn run_until_idle(&mut self) {
        let mut idle = 0;
        while idle < IDLE_PASSES {
            idle += 1;
            let busy = poison::lock(&self.fabric.0).busy();
            for connection in busy {
                if poison::lock(&self.fabric.0).step(connection, &mut self.rng) {
                    idle = 0;
                }
            }
            self.client.poll();
            if self.client.run_call() || self.reap() {
                idle = 0;
            }
        }
    }

    pub(crate) fn reap(&mut self) -> bool {
        let mut completions = vec![];
        for channel in &mut self.channels {
            channel.reap(&mut completions);
        }
        let any = !completions.is_empty();
        for completion in completions {
            let before = self.results.insert(completion.token.0, completion.result);
            assert_eq!(before, None, "answered once");
        }
        any
    }

    pub(crate) fn advance_time(&mut self, time: Duration) {
        let end = self.client.now + time;
        while self.client.now < end {
            self.client.now += Duration::from_millis(10).min(end - self.client.now);
            self.run_until_idle();
        }
    }

    /// Runs until the volume is in this state, for at most a minute.
    #[track_caller]
    pub(crate) fn run_until_state(&mut self, state: VolumeState) {
        for _ in 0..6000 {
            self.run_until_idle();
            if self.client.status().state == state {
                return;
            }
            self.client.now += Duration::from_millis(10);
        }
        panic!("never {state:?}: {:#?}", self.client.status());
    }

    /// Runs until channels write to a syncing leg of the first column.
    #[track_caller]
    pub(crate) fn run_until_syncing(&mut self, leg: usize) {
        for _ in 0..1000 {
            self.client.poll();
            self.client.run_call();
            self.reap();
            let (_, view) = self.client.shared.snapshot();
            if view.columns[0].legs[leg].state == LegState::Syncing {
                return;
            }
            let busy = poison::lock(&self.fabric.0).busy();
            for connection in busy {
                poison::lock(&self.fabric.0).step(connection, &mut self.rng);
            }
            self.client.now += Duration::from_millis(10);
        }
        panic!("{:?}", self.client.status());
    }

    pub(crate) fn submit(&mut self, channel: usize, request: Request) -> u64 {
        self.next += 1;
        self.channels[channel].submit(Token(self.next), request);
        self.next
    }

    /// Returns the result of a request after all progress without time passing.
    pub(crate) fn result_of(&mut self, token: u64) -> Option<RequestResult> {
        self.run_until_idle();
        self.results.remove(&token)
    }

    #[track_caller]
    pub(crate) fn complete(&mut self, request: Request) -> Reply {
        let token = self.submit(0, request);
        let ending = self.result_of(token);
        ending.expect("an answer").expect("done")
    }

    pub(crate) fn write(&mut self, offset: u64, len: u64, value: u64) {
        assert_eq!(self.complete(write(offset, len, value)), Reply::Done);
    }

    pub(crate) fn discard(&mut self, offset: u64, len: u64) {
        assert_eq!(self.complete(Request::Discard { offset, len }), Reply::Done);
    }

    /// Returns the value of each sector of a range.
    pub(crate) fn read(&mut self, offset: u64, len: u64) -> Vec<u64> {
        let len = len as u32;
        let Reply::Data(data) = self.complete(Request::Read { offset, len }) else {
            panic!("no data");
        };
        let sectors = data.chunks(512);
        let value = |sector: &[u8]| crate::world::oracle::value_of(sector).expect("not torn");
        sectors.map(value).collect()
    }

    #[track_caller]
    pub(crate) fn assert_holds(&mut self, offset: u64, len: u64, value: u64) {
        // Legs take turns, so three reads ask each leg.
        for _ in 0..3 {
            let found = self.read(offset, len);
            assert!(found.iter().all(|v| *v == value), "{found:?}, not {value}");
        }
    }

    pub(crate) fn kill(&mut self, number: u128) {
        poison::lock(&self.fabric.0).kill(brick(number));
    }

    pub(crate) fn restart(&mut self, number: u128) {
        poison::lock(&self.fabric.0).restart(brick(number));
    }

    pub(crate) fn counters(&self) -> Counters {
        self.client.shared.counters.sums()
    }

    /// The number of reads that the slice of a leg in column 0 has served.
    pub(crate) fn leg_reads(&self, leg: usize) -> u64 {
        let leg = self.manager.layout().segments[0].columns[0].legs[leg].clone();
        poison::lock(&self.fabric.0)
            .slice(leg.brick, leg.slice)
            .reads
    }

    pub(crate) fn set_frozen(&mut self, number: u128, frozen: bool) {
        let mut bricks = poison::lock(&self.fabric.0);
        bricks.bricks.get_mut(&brick(number)).expect("brick").frozen = frozen;
    }

    /// Sets the maximum of connections of a brick.
    pub(crate) fn set_sessions_max(&mut self, number: u128, most: usize) {
        let mut bricks = poison::lock(&self.fabric.0);
        let brick = bricks.bricks.get_mut(&brick(number)).expect("brick");
        brick.sessions_max = most;
    }

    pub(crate) fn connections(&self, number: u128) -> usize {
        poison::lock(&self.fabric.0)
            .connections_of(brick(number))
            .len()
    }

    pub(crate) fn set_room(&mut self, number: u128, pages: u64) {
        let mut bricks = poison::lock(&self.fabric.0);
        bricks.bricks.get_mut(&brick(number)).expect("brick").room = pages;
    }

    /// The client dies, along with its messages. Another one attaches.
    pub(crate) fn crash(&mut self) {
        self.channels.clear();
        self.client = Client::new(&self.fabric, &self.manager);
        let mut bricks = poison::lock(&self.fabric.0);
        let orphans = bricks.orphans();
        orphans
            .into_iter()
            .for_each(|number| bricks.break_connection(number));
        drop(bricks);
        self.attach();
        self.open();
    }

    pub(crate) fn leg_status(&self, leg: usize) -> LegStatus {
        self.client.status().columns[0].legs[leg].clone()
    }

    pub(crate) fn page_bytes(&self, column: usize, leg: usize, page: usize) -> Vec<u8> {
        let layout = self.manager.layout();
        let mut columns = layout.segments.iter().flat_map(|s| &s.columns);
        let leg = &columns.nth(column).expect("column").legs[leg];
        let bricks = poison::lock(&self.fabric.0);
        let bytes = &bricks.slice(leg.brick, leg.slice).pages()[page];
        bytes.as_ref().map_or(vec![], |bytes| bytes.to_vec())
    }

    /// Asserts that in-sync legs hold the same data. Holes count as zeroes.
    #[track_caller]
    pub(crate) fn assert_legs_equal(&self) {
        let layout = self.manager.layout();
        let bricks = poison::lock(&self.fabric.0);
        let zero = [0; 4096];
        for column in layout.segments.iter().flat_map(|s| &s.columns) {
            let legs = column.legs.iter();
            let legs = legs.filter(|leg| leg.state == LegState::InSync);
            let slices: Vec<_> = legs
                .map(|leg| bricks.slice(leg.brick, leg.slice).pages())
                .collect();
            for page in 0..slices[0].len() {
                let bytes = |of: usize| *slices[of][page].as_deref().unwrap_or(&zero);
                for other in 1..slices.len() {
                    assert!(bytes(0) == bytes(other), "page {page} of leg {other}");
                }
            }
        }
    }

    /// Restores all bricks and the manager. Asserts that all legs are in-sync and equal.
    #[track_caller]
    pub(crate) fn restore_and_compare(&mut self) {
        self.manager.set_mode(ManagerMode::Up);
        let all: Vec<BrickId> = poison::lock(&self.fabric.0)
            .bricks
            .keys()
            .copied()
            .collect();
        for id in all {
            let mut bricks = poison::lock(&self.fabric.0);
            bricks.restart(id);
            let brick = bricks.bricks.get_mut(&id).expect("brick");
            (brick.frozen, brick.room) = (false, u64::MAX);
        }
        self.run_until_state(VolumeState::Healthy);
        self.assert_legs_equal();
    }
}

pub(crate) fn create_slices(fabric: &Fabric, segments: &[Segment]) {
    let mut bricks = poison::lock(&fabric.0);
    for segment in segments {
        for leg in segment.columns.iter().flat_map(|c| &c.legs) {
            bricks.create(leg.brick, leg.slice, segment.slice_bytes());
        }
    }
}

pub(crate) fn write(offset: u64, len: u64, value: u64) -> Request {
    Request::Write {
        offset,
        data: Bytes::from(fill(value, len / 512)),
        durable: false,
    }
}

/// A part of a transaction: one page with this value.
pub(crate) fn part(page: u64, value: u64) -> TransactionPart {
    TransactionPart::Write {
        offset: page * PAGE,
        data: Bytes::from(fill(value, PAGE / 512)),
    }
}

pub(crate) fn transact(parts: Vec<TransactionPart>) -> Request {
    let durable = false;
    Request::Transact { parts, durable }
}

/// Brick 0 is the source, and brick 1 its asynchronous replica.
pub(crate) fn replicated_cluster() -> TestCluster {
    let mut world = TestCluster::mirror(1);
    world.write(0, 4096, 1);
    world.add_replica(brick(1), REPLICA_SLICE);
    world.request_refresh();
    world.advance_time(Duration::from_secs(1));
    assert_eq!(world.leg_status(1).state, LegState::AsyncReplica);
    world
}
