//! Volumes over pools that are mapped in this process. Fused writes to several legs obey the
//! same rules as separate ones.

use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, Layout, Leg as Place, LegState, Segment, SliceId, VolumeName,
};
use pagemesh_base::slice::{
    BrickControl, Leg, SliceCompletion, SliceError, SliceReply, SliceRequest, Stamp,
    TransactionPart,
};
use pagemesh_base::space::{Channel, Completion, Reply, Request, Space, SpaceError, Token};
use pagemesh_base::wait::until_readable;
use pagemesh_brick::brick::{Brick, MaintenanceThread};
use pagemesh_brick::file;
use pagemesh_pmem::Durability;
use pagemesh_store::pool::Pool;
use pagemesh_store::session::Session;
use pagemesh_volume::{
    Authority, AuthorityError, BrickAddress, Connector, CopyReport, LegChange, MappedLeg,
    ResolvedLayout, Volume, VolumeState, VolumeStatus,
};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use uuid::Uuid;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// The time limit for every expected event.
const LIMIT: Duration = Duration::from_secs(20);

const fn slice(leg: usize) -> SliceId {
    SliceId(Uuid::from_u128(leg as u128 + 1))
}

/// A running brick. Its clients' connections end with it.
struct RunningBrick {
    brick: Arc<Brick>,
    _housekeeper: MaintenanceThread,
    client_sockets: Vec<UnixStream>,
}

struct BrickHost {
    directory: TempDir,
    id: BrickId,
    running: Mutex<Option<RunningBrick>>,
}

impl BrickHost {
    fn new(leg: usize, pool_bytes: u64, slice_bytes: u64) -> BrickHost {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let id = file::create(&directory.path().join("pool"), pool_bytes).expect("a pool");
        let house = BrickHost {
            directory,
            id: BrickId(id),
            running: Mutex::new(None),
        };
        house.start();
        house
            .with_running(|running| running.brick.create(slice(leg), slice_bytes))
            .expect("a slice");
        house
    }

    /// Starts the brick once the last client of the previous process has released the pool.
    fn start(&self) {
        let path = self.directory.path().join("pool");
        let (brick, housekeeper) = wait_for(
            || "the pool is free".into(),
            || {
                let (brick, housekeeper, _) = Brick::open(&path).ok()?;
                Some((brick, housekeeper))
            },
        );
        *self.running.lock().expect("whole") = Some(RunningBrick {
            brick,
            _housekeeper: housekeeper,
            client_sockets: vec![],
        });
    }

    fn stop(&self) {
        self.running.lock().expect("whole").take();
    }

    fn with_running<T>(&self, look: impl FnOnce(&mut RunningBrick) -> T) -> T {
        look(
            self.running
                .lock()
                .expect("whole")
                .as_mut()
                .expect("running"),
        )
    }
}

#[derive(Clone)]
struct BrickHosts(Arc<Vec<BrickHost>>);

/// The connection to the owner, without a network.
struct OwnerConnection {
    brick: Arc<Brick>,
    slice: SliceId,
    session: u32,
    done: Vec<SliceCompletion>,
    /// Readable once the brick has ended.
    lifeline: OwnedFd,
}

impl Leg for OwnerConnection {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        let epoch = request.epoch().unwrap_or(Epoch(u32::MAX));
        let result = self.brick.execute_as_owner(self.slice, epoch, request);
        self.done.push(SliceCompletion { tag, result });
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        into.append(&mut self.done);
    }

    fn poll_closed(&mut self) -> Option<SliceError> {
        let is_gone = self.brick.mapping().is_owner_gone();
        is_gone.then(|| SliceError::Lost("it has ended".into()))
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        into.push(self.lifeline.as_raw_fd());
    }

    fn deadline(&self) -> Option<Instant> {
        (!self.done.is_empty()).then(Instant::now)
    }
}

impl Drop for OwnerConnection {
    fn drop(&mut self) {
        self.brick.close_session(self.session);
    }
}

impl Connector for BrickHosts {
    fn connect(
        &self,
        brick: BrickId,
        _address: &BrickAddress,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<Box<dyn Leg>, SliceError> {
        let house = self.0.iter().find(|house| house.id == brick);
        let mut running = house.expect("known").running.lock().expect("whole");
        let Some(running) = running.as_mut() else {
            return Err(SliceError::Lost("no process listens".into()));
        };
        let own = running.brick.clone();
        let (object, _) = own.attach(slice, epoch)?;
        let handle = own.mapping().handle(object, slice)?;
        let number = own.open_session(1, 1)?;
        let session = Session::new(own.mapping().clone(), number);
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        running.client_sockets.push(theirs);
        let owner = OwnerConnection {
            brick: own,
            slice,
            session: number,
            done: vec![],
            lifeline: ours.try_clone().expect("a descriptor").into(),
        };
        let leg = MappedLeg::new(session, handle, epoch, Box::new(owner), OwnedFd::from(ours));
        Ok(Box::new(leg.expect("a watcher")))
    }
}

/// A manager of one column, with compare-and-swap.
struct Manager {
    layout: Mutex<(Layout, Epoch)>,
    detached: AtomicUsize,
}

impl Manager {
    fn attached(layout: &Layout) -> ResolvedLayout {
        let address = BrickAddress {
            durability: "process".into(),
            ..BrickAddress::default()
        };
        let legs = layout.segments[0].columns[0].legs.iter();
        ResolvedLayout {
            layout: layout.clone(),
            bricks: legs
                .map(|leg| (leg.brick, address.clone()))
                .collect::<BTreeMap<_, _>>(),
        }
    }
}

impl Authority for Manager {
    fn attach(&self, _name: &VolumeName, _client: &str) -> Result<ResolvedLayout, AuthorityError> {
        let (layout, attachment) = &mut *self.layout.lock().expect("whole");
        layout.epoch.0 += 1;
        *attachment = layout.epoch.into();
        Ok(Manager::attached(layout))
    }

    fn change_legs(
        &self,
        _name: &VolumeName,
        attachment: Epoch,
        expected: Epoch,
        changes: &[LegChange],
    ) -> Result<Layout, AuthorityError> {
        let (layout, present) = &mut *self.layout.lock().expect("whole");
        if attachment != *present {
            return Err(AuthorityError::Fenced);
        }
        let current = Epoch::from(layout.epoch);
        if expected != current {
            return Err(AuthorityError::Conflict { current });
        }
        let column = &mut layout.segments[0].columns[0];
        for change in changes {
            column.legs[change.leg].state = change.to;
        }
        let whole = column.legs.iter().all(|leg| leg.state == LegState::InSync);
        column.round = if whole { 0 } else { column.round.max(1) };
        layout.epoch.0 += 1;
        Ok(layout.clone())
    }

    fn layout(
        &self,
        _name: &VolumeName,
        _attachment: Epoch,
        _told: &CopyReport,
    ) -> Result<ResolvedLayout, AuthorityError> {
        Ok(Manager::attached(&self.layout.lock().expect("whole").0))
    }

    /// The first call cannot reach the manager.
    fn detach(&self, _name: &VolumeName, _attachment: Epoch) -> Result<(), AuthorityError> {
        match self.detached.fetch_add(1, Ordering::SeqCst) {
            0 => Err(AuthorityError::Unreachable("out".into())),
            _ => Ok(()),
        }
    }
}

#[track_caller]
fn wait_for<T>(what: impl Fn() -> String, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "never: {}", what());
        std::thread::yield_now();
    }
}

struct MappedCluster {
    manager: Arc<Manager>,
    hosts: BrickHosts,
}

impl MappedCluster {
    fn new(pools: &[u64], slice_bytes: u64) -> MappedCluster {
        let houses = pools.iter().enumerate();
        let houses = houses.map(|(leg, &bytes)| BrickHost::new(leg, bytes, slice_bytes));
        let houses: Vec<BrickHost> = houses.collect();
        let legs = houses.iter().enumerate().map(|(leg, house)| Place {
            brick: house.id,
            slice: slice(leg),
            state: LegState::InSync,
            fresh: false,
            asynchronous: false,
            empty: false,
        });
        let column = Column {
            legs: legs.collect(),
            round: 0,
        };
        let layout = Layout {
            volume: Uuid::nil(),
            name: name(),
            epoch: EpochNumber(1),
            segments: vec![Segment {
                bytes: slice_bytes,
                columns: vec![column],
            }],
        };
        MappedCluster {
            manager: Arc::new(Manager {
                layout: Mutex::new((layout, Epoch(0))),
                detached: AtomicUsize::new(0),
            }),
            hosts: BrickHosts(Arc::new(houses)),
        }
    }

    fn attach(&self) -> Client {
        let connector = Arc::new(self.hosts.clone());
        let volume = Volume::attach(self.manager.clone(), connector, name(), "test");
        let volume = volume.expect("attached");
        let channel = volume.open().expect("a channel");
        Client {
            volume,
            channel,
            next: 0,
        }
    }

    /// The in-flight operations that a brick lists.
    fn in_flight(&self, leg: usize) -> Vec<(u64, u32, u32, u64)> {
        let table = self.hosts.0[leg]
            .with_running(|running| {
                running
                    .brick
                    .execute_as_owner(slice(leg), Epoch(0), SliceRequest::InFlight)
            })
            .expect("a table");
        let SliceReply::InFlight(Some(table)) = table else {
            panic!("no table");
        };
        let entry = |e: pagemesh_base::slice::InFlightOp| (e.page.0, e.count, e.epoch.0, e.op);
        table.into_iter().map(entry).collect()
    }
}

fn name() -> VolumeName {
    "v".parse().expect("a name")
}

struct Client {
    volume: Volume,
    channel: Box<dyn Channel>,
    next: u64,
}

impl Client {
    fn complete(&mut self, request: Request) -> Result<Reply, SpaceError> {
        self.next += 1;
        self.channel.submit(Token(self.next), request);
        let mut done: Vec<Completion> = vec![];
        let end = Instant::now() + LIMIT;
        loop {
            self.channel.reap(&mut done);
            if let Some(completion) = done.pop() {
                assert_eq!(completion.token, Token(self.next));
                return completion.result;
            }
            assert!(
                Instant::now() < end,
                "no answer: {:?}",
                self.volume.status()
            );
            self.wait_for_signal(end);
        }
    }

    /// Waits only for the channel's own descriptors and deadline, as its users do. A missing
    /// signal shows as a request that never ends.
    fn wait_for_signal(&self, end: Instant) {
        let mut fds = vec![];
        self.channel.poll_fds(&mut fds);
        let until = self.channel.deadline().map_or(end, |at| at.min(end));
        until_readable(&fds, Some(until)).expect("waited");
    }

    fn write(&mut self, offset: u64, len: u64, value: u8) -> Result<Reply, SpaceError> {
        self.complete(Request::Write {
            offset,
            data: Bytes::from(vec![value; len as usize]),
            durable: false,
        })
    }

    #[track_caller]
    fn assert_holds(&mut self, offset: u64, len: u64, value: u8) {
        for _ in 0..3 {
            let len = len as u32;
            let read = self.complete(Request::Read { offset, len });
            let expected = vec![value; len as usize];
            assert!(read == Ok(Reply::Data(expected)), "not {value} at {offset}");
        }
    }

    fn status(&self) -> VolumeStatus {
        self.volume.status().expect("a status")
    }

    #[track_caller]
    fn wait_for_state(&self, state: VolumeState) {
        wait_for(
            || format!("{state:?}, but {:?}", self.status()),
            || (self.status().state == state).then_some(()),
        );
    }

    /// Waits for the status: it changes soon after the write that found the leg lost is
    /// answered.
    #[track_caller]
    fn wait_until_stale(&self, leg: usize) {
        wait_for(
            || format!("leg {leg} stale, but {:?}", self.status()),
            || (self.status().columns[0].legs[leg].state == LegState::Stale).then_some(()),
        );
    }

    #[track_caller]
    fn assert_legs_equal(&self) {
        let report = self.volume.check(None, &mut |_, _| ()).expect("a check");
        assert_eq!((report.pages_differing, report.pages_damaged), (0, 0));
    }
}

/// If the owner is stalled, several requests do not wait for it one after the other.
#[test]
fn leg_with_stalled_owner_stays_lost() {
    let house = BrickHost::new(0, 32 * MIB, 8 * MIB);
    house.stop();
    let path = house.directory.path().join("pool");
    let (media, _claim) = wait_for(|| "the pool is free".into(), || file::open(&path).ok());
    let (media, durability) = (Arc::new(media), Durability::Process);
    let (pool, _) = Pool::open(Arc::clone(&media), media).expect("it is whole");
    // No maintenance loop runs; this test maintains the brick.
    let brick = Arc::new(Brick::new(pool, durability));
    let (object, _) = brick.attach(slice(0), Epoch(1)).expect("attached");
    let handle = brick.mapping().handle(object, slice(0)).expect("a handle");
    let number = brick.open_session(1, 1).expect("a session");
    let session = Session::new(brick.mapping().clone(), number).with_owner_wait(Duration::ZERO);
    let (ours, _theirs) = UnixStream::pair().expect("a pair");
    let owner = OwnerConnection {
        brick: Arc::clone(&brick),
        slice: slice(0),
        session: number,
        done: vec![],
        lifeline: ours.try_clone().expect("a descriptor").into(),
    };
    let leg = MappedLeg::new(session, handle, Epoch(1), Box::new(owner), ours.into());
    let mut leg = leg.expect("a watcher");
    let mut write = |op: u64| {
        let stamp = Stamp {
            epoch: Epoch(1),
            op,
            open_ops: 0,
        };
        let data = Bytes::from(vec![1; MIB as usize]);
        let offset = op % 8 * MIB;
        leg.submit(
            op,
            SliceRequest::Write {
                offset,
                data,
                stamp,
            },
        );
        let mut done = vec![];
        leg.reap(&mut done);
        done.pop().expect("it is done at once").result
    };
    let first = (1..1000).find(|&op| write(op).is_err());
    let first = first.expect("what it was granted ends");
    // The owner goes on, and grants the request.
    while brick.maintain() {}
    let answer = write(first + 1);
    assert!(matches!(answer, Err(SliceError::Lost(_))), "{answer:?}");
}

/// Writes have every length and alignment, over two and three legs, and beyond one record.
#[test]
fn legs_written_together_are_equal() {
    for legs in [2, 3] {
        let world = MappedCluster::new(&vec![32 * MIB; legs], 8 * MIB);
        let mut client = world.attach();
        let places = [
            (0, PAGE),
            (512, 512),
            (PAGE + 512, 3 * PAGE),
            (2 * MIB - PAGE, 2 * PAGE),
            (3 * MIB, 2 * MIB),
            (6 * MIB - 512, MIB + 1024),
        ];
        for (round, value) in (1..=3).enumerate() {
            for (offset, len) in places {
                assert_eq!(client.write(offset, len, value), Ok(Reply::Done));
            }
            let (offset, len) = (3 * MIB + 512 * round as u64, MIB);
            assert_eq!(
                client.complete(Request::Discard { offset, len }),
                Ok(Reply::Done)
            );
            client.assert_holds(offset, len, 0);
            client.assert_holds(6 * MIB - 512, MIB + 1024, value);
            client.assert_legs_equal();
        }
        assert_eq!(client.status().counters.legs_lost, 0);
    }
}

/// The stamps of a fused write are those of separate ones. Every leg lists the last writes of a
/// client that is gone, with the same epoch and number.
#[test]
fn all_legs_list_last_writes_of_dead_client() {
    let world = MappedCluster::new(&[16 * MIB, 16 * MIB, 16 * MIB], MIB);
    let mut client = world.attach();
    let epoch = client.status().epoch;
    for page in 0..5 {
        assert_eq!(client.write(page * PAGE, PAGE, 9), Ok(Reply::Done));
    }
    drop(client);
    let first = world.in_flight(0);
    let last = first
        .iter()
        .any(|&(page, count, at, _)| (page, count, at) == (4, 1, epoch));
    assert!(last, "{first:?}");
    // Completed operations are not listed.
    assert!(!first.iter().any(|(page, ..)| *page == 0), "{first:?}");
    assert_eq!(world.in_flight(1), first);
    assert_eq!(world.in_flight(2), first);
    // Recovery clears the tables.
    let client = world.attach();
    client.assert_legs_equal();
    assert_eq!(world.in_flight(0), []);
}

/// The pool of the leg in the middle fills up within a write. The others have all of the write,
/// and the client gets no error.
#[test]
fn leg_filled_by_a_write_becomes_stale() {
    for full in [0, 1] {
        let mut pools = [32 * MIB; 3];
        pools[full] = 4 * MIB;
        let world = MappedCluster::new(&pools, 8 * MIB);
        let mut client = world.attach();
        for piece in 0..8 {
            assert_eq!(client.write(piece * MIB, MIB, 3), Ok(Reply::Done));
        }
        client.wait_until_stale(full);
        client.assert_holds(0, 8 * MIB, 3);
        client.assert_legs_equal();
        // Once there is space again, the leg returns.
        let all = Request::Discard {
            offset: 0,
            len: 8 * MIB,
        };
        assert_eq!(client.complete(all), Ok(Reply::Done));
        assert_eq!(client.write(0, MIB, 4), Ok(Reply::Done));
        client.wait_for_state(VolumeState::Healthy);
        client.assert_legs_equal();
        client.assert_holds(0, MIB, 4);
    }
}

/// All pools are full: the client gets an error, and the legs stay equal.
#[test]
fn full_pools_refuse_writes_and_stay_equal() {
    let world = MappedCluster::new(&[4 * MIB, 4 * MIB], 8 * MIB);
    let mut client = world.attach();
    let mut refused = 0;
    for piece in 0..32 {
        // The range has parts of pages at both ends.
        let (offset, len) = (piece * MIB / 4 + 512, MIB / 4 - 1024);
        match client.write(offset, len, 5) {
            Ok(_) => {}
            Err(SpaceError::NoSpace(_)) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > 0);
    client.assert_legs_equal();
    let all = Request::Discard {
        offset: 0,
        len: 8 * MIB,
    };
    assert_eq!(client.complete(all), Ok(Reply::Done));
    client.wait_for_state(VolumeState::Healthy);
    assert_eq!(client.write(0, MIB, 6), Ok(Reply::Done));
    client.assert_legs_equal();
}

#[test]
fn restarted_brick_is_resynced() {
    for gone in 0..2 {
        let world = MappedCluster::new(&[32 * MIB, 32 * MIB], 4 * MIB);
        let mut client = world.attach();
        assert_eq!(client.write(0, 2 * MIB, 1), Ok(Reply::Done));
        // The last write of a session is in the in-flight tables.
        assert_eq!(client.write(3 * MIB, PAGE, 1), Ok(Reply::Done));
        world.hosts.0[gone].stop();
        assert_eq!(client.write(MIB / 2, MIB, 2), Ok(Reply::Done));
        let trim = Request::Discard {
            offset: 0,
            len: PAGE,
        };
        assert_eq!(client.complete(trim), Ok(Reply::Done));
        client.wait_until_stale(gone);
        world.hosts.0[gone].start();
        client.wait_for_state(VolumeState::Healthy);
        client.assert_legs_equal();
        client.assert_holds(0, PAGE, 0);
        client.assert_holds(MIB / 2, MIB, 2);
        let moved = client.status().counters.bytes_resynced;
        // Writes in flight at the loss are copied twice, later ones once.
        let most = 2 * MIB + 8 * PAGE;
        assert!((MIB..most).contains(&moved), "moved {moved}");
    }
}

/// A channel is not reaped while its thread waits for something else. Its brick comes back
/// nevertheless, which needs a pool that no client maps.
#[test]
fn unreaped_channel_releases_pool() {
    for copies in 1..=2 {
        let world = MappedCluster::new(&[32 * MIB; 2][..copies], 4 * MIB);
        let mut client = world.attach();
        let mut other = client.volume.open().expect("a channel");
        assert_eq!(client.write(0, MIB, 1), Ok(Reply::Done));
        let read = Request::Read {
            offset: 0,
            len: PAGE as u32,
        };
        // Both channels are in use, and one has a request in flight when the brick ends.
        other.submit(Token(1), read.clone());
        wait_for(
            || "the other channel is served".into(),
            || {
                let mut done = vec![];
                other.reap(&mut done);
                done.pop()
            },
        );
        world.hosts.0[0].stop();
        other.submit(Token(2), read);
        world.hosts.0[0].start();
        client.wait_for_state(VolumeState::Healthy);
        client.assert_holds(0, PAGE, 1);
        let mut done = vec![];
        wait_for(
            || "the request in flight ends".into(),
            || {
                other.reap(&mut done);
                done.pop()
            },
        );
    }
}

/// The old client's fused writes are refused by every leg.
#[test]
fn superseded_client_writes_no_leg() {
    let world = MappedCluster::new(&[64 * MIB, 64 * MIB], MIB);
    let mut old = world.attach();
    assert_eq!(old.write(0, PAGE, 1), Ok(Reply::Done));
    let mut new = world.attach();
    assert_eq!(new.write(0, PAGE, 2), Ok(Reply::Done));
    assert_eq!(old.write(0, PAGE, 3), Err(SpaceError::Fenced));
    new.assert_holds(0, PAGE, 2);
    new.assert_legs_equal();
}

fn transact(pages: &[u64], value: u8) -> Request {
    let part = |page: &u64| TransactionPart::Write {
        offset: page * PAGE,
        data: Bytes::from(vec![value; PAGE as usize]),
    };
    let parts = pages.iter().map(part).collect();
    let durable = false;
    Request::Transact { parts, durable }
}

#[test]
fn mapped_transaction_is_one_operation_per_leg() {
    let world = MappedCluster::new(&[32 * MIB, 32 * MIB, 32 * MIB], 8 * MIB);
    let mut client = world.attach();
    // The pages lie in three leaves, in no order.
    let pages = [1500, 3, 700, 4];
    assert_eq!(client.complete(transact(&pages, 7)), Ok(Reply::Done));
    for page in pages {
        client.assert_holds(page * PAGE, PAGE, 7);
    }
    client.assert_holds(5 * PAGE, PAGE, 0);
    drop(client);
    world.attach().assert_legs_equal();
}

#[test]
fn full_mapped_leg_applies_no_part_of_transaction() {
    let world = MappedCluster::new(&[32 * MIB, 16 * MIB], 24 * MIB);
    let mut client = world.attach();
    let mut at = 0;
    while client.status().state == VolumeState::Healthy {
        let pages: Vec<u64> = (0..60).map(|page| at + page + page / 30).collect();
        assert_eq!(client.complete(transact(&pages, 9)), Ok(Reply::Done));
        pages
            .iter()
            .for_each(|page| client.assert_holds(page * PAGE, PAGE, 9));
        at += 61;
    }
    client.wait_for_state(VolumeState::Degraded);
}

/// A process that ends detaches its volumes, even if another thread holds a reference for a
/// short time, and if the manager is not reached at once.
#[test]
fn volume_detaches_while_shared() {
    let world = MappedCluster::new(&[8 << 20], 1 << 20);
    let Client {
        volume, channel, ..
    } = world.attach();
    drop(channel);
    let volume = Arc::new(volume);
    let held = Arc::clone(&volume);
    volume.detach();
    assert_eq!(world.manager.detached.load(Ordering::SeqCst), 2);
    assert!(held.check(None, &mut |_, _| {}).is_err());
    drop((volume, held));
    assert_eq!(world.manager.detached.load(Ordering::SeqCst), 2);
}
