//! Bricks in this process whose pools are mapped, a manager, and clients.

use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, Layout, Leg as Place, LegState, Segment, SliceId, VolumeName,
};
use pagemesh_base::slice::{
    BrickControl, Leg, SliceCompletion, SliceError, SliceReply, SliceRequest,
};
use pagemesh_base::space::{Channel, Completion, Reply, Request, Space, SpaceError, Token};
use pagemesh_base::wait::until_readable;
use pagemesh_brick::brick::{Brick, MaintenanceThread};
use pagemesh_brick::file;
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

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const PAGE: u64 = 4096;
/// The time limit for every expected event.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) const fn slice(leg: usize) -> SliceId {
    SliceId(Uuid::from_u128(leg as u128 + 1))
}

/// A running brick. Its clients' connections end with it.
pub(crate) struct RunningBrick {
    pub brick: Arc<Brick>,
    pub _housekeeper: MaintenanceThread,
    pub client_sockets: Vec<UnixStream>,
}

pub(crate) struct BrickHost {
    pub directory: TempDir,
    pub id: BrickId,
    pub running: Mutex<Option<RunningBrick>>,
}

impl BrickHost {
    pub(crate) fn new(leg: usize, pool_bytes: u64, slice_bytes: u64) -> BrickHost {
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
    pub(crate) fn start(&self) {
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

    pub(crate) fn stop(&self) {
        self.running.lock().expect("whole").take();
    }

    pub(crate) fn with_running<T>(&self, look: impl FnOnce(&mut RunningBrick) -> T) -> T {
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
pub(crate) struct BrickHosts(pub Arc<Vec<BrickHost>>);

/// The connection to the owner, without a network.
pub(crate) struct OwnerConnection {
    pub brick: Arc<Brick>,
    pub slice: SliceId,
    pub session: u32,
    pub done: Vec<SliceCompletion>,
    /// Readable once the brick has ended.
    pub lifeline: OwnedFd,
}

impl Leg for OwnerConnection {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        let epoch = request.epoch().unwrap_or(Epoch(u32::MAX));
        let result = self.brick.execute_as_owner(self.slice, epoch, request);
        self.done.push(SliceCompletion::new(tag, result));
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
pub(crate) struct Manager {
    pub layout: Mutex<(Layout, Epoch)>,
    pub detached: AtomicUsize,
}

impl Manager {
    pub(crate) fn attached(layout: &Layout) -> ResolvedLayout {
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
        layout.epoch.0 += 1;
        let column = &mut layout.segments[0].columns[0];
        column.lost_since = match column.lost_since.0 {
            _ if whole => EpochNumber(0),
            0 => layout.epoch,
            lost_since => EpochNumber(lost_since),
        };
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
pub(crate) fn wait_for<T>(what: impl Fn() -> String, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "never: {}", what());
        std::thread::yield_now();
    }
}

pub(crate) struct MappedCluster {
    pub manager: Arc<Manager>,
    pub hosts: BrickHosts,
}

impl MappedCluster {
    pub(crate) fn new(pools: &[u64], slice_bytes: u64) -> MappedCluster {
        let houses = pools.iter().enumerate();
        let houses = houses.map(|(leg, &bytes)| BrickHost::new(leg, bytes, slice_bytes));
        let houses: Vec<BrickHost> = houses.collect();
        let legs = houses.iter().enumerate().map(|(leg, house)| Place {
            brick: house.id,
            slice: slice(leg),
            state: LegState::InSync,
            needs_full_resync: false,
            asynchronous: false,
            empty: false,
        });
        let column = Column {
            legs: legs.collect(),
            lost_since: EpochNumber(0),
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

    pub(crate) fn attach(&self) -> Client {
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
    pub(crate) fn in_flight(&self, leg: usize) -> Vec<(u64, u32, u32, u64)> {
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

pub(crate) fn name() -> VolumeName {
    "v".parse().expect("a name")
}

pub(crate) struct Client {
    pub volume: Volume,
    pub channel: Box<dyn Channel>,
    pub next: u64,
}

impl Client {
    pub(crate) fn complete(&mut self, request: Request) -> Result<Reply, SpaceError> {
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
    pub(crate) fn wait_for_signal(&self, end: Instant) {
        let mut fds = vec![];
        self.channel.poll_fds(&mut fds);
        let until = self.channel.deadline().map_or(end, |at| at.min(end));
        until_readable(&fds, Some(until)).expect("waited");
    }

    pub(crate) fn write(&mut self, offset: u64, len: u64, value: u8) -> Result<Reply, SpaceError> {
        self.complete(Request::Write {
            offset,
            data: Bytes::from(vec![value; len as usize]),
            durable: false,
        })
    }

    #[track_caller]
    pub(crate) fn assert_holds(&mut self, offset: u64, len: u64, value: u8) {
        for _ in 0..3 {
            let len = len as u32;
            let read = self.complete(Request::Read { offset, len });
            let expected = vec![value; len as usize];
            assert!(read == Ok(Reply::Data(expected)), "not {value} at {offset}");
        }
    }

    pub(crate) fn status(&self) -> VolumeStatus {
        self.volume.status().expect("a status")
    }

    #[track_caller]
    pub(crate) fn wait_for_state(&self, state: VolumeState) {
        wait_for(
            || format!("{state:?}, but {:?}", self.status()),
            || (self.status().state == state).then_some(()),
        );
    }

    /// Waits for the status: it changes soon after the write that found the leg lost is
    /// answered.
    #[track_caller]
    pub(crate) fn wait_until_stale(&self, leg: usize) {
        wait_for(
            || format!("leg {leg} stale, but {:?}", self.status()),
            || (self.status().columns[0].legs[leg].state == LegState::Stale).then_some(()),
        );
    }

    #[track_caller]
    pub(crate) fn assert_legs_equal(&self) {
        let report = self.volume.check(None, &mut |_, _| ()).expect("a check");
        assert_eq!((report.pages_differing, report.pages_damaged), (0, 0));
    }
}
