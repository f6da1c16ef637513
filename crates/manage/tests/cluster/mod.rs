//! A cluster in memory: bricks with scripted behavior, a clock that a test advances, and a manager
//! on a store in a temporary directory.

#![allow(dead_code)]

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::key::Key;
use pagemesh_base::layout::{BrickId, Layout, Leg, SliceId, VolumeName};
use pagemesh_base::slice::{
    BrickControl, BrickStatus, CloneProgress, CloneSource, DROPPED_SNAPSHOTS_MAX, PageVersion,
    SNAPSHOTS_UNKNOWN, SliceError, SliceInfo, VERSION_COPIES_UNKNOWN, VersionEdits, VersionList,
    VersionRange,
};
use pagemesh_manage::AdminTokenOutput;
use pagemesh_manage::clock::Clock;
use pagemesh_manage::store::Store;
use pagemesh_manage::wire::{
    AttachVolume, BrickRegistration, CreateVolume, ErrorCode, VolumeContent,
};
use pagemesh_manage::{
    BrickConnector, ConnectionLimits, Durability, LayoutKind, Manager, ManagerClient,
    ManagerConfig, ManagerError, ManagerHandle, ManagerSettings, TierPolicy, serve,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use uuid::Uuid;

pub const MIB: u64 = 1 << 20;
pub const CAPACITY: u64 = 1 << 30;

/// A clock that advances only by calls.
#[derive(Default)]
pub struct ManualClock {
    elapsed: Mutex<Duration>,
    wall_offset_s: Mutex<i64>,
}

impl ManualClock {
    pub fn advance(&self, by: Duration) {
        *self.elapsed.lock().expect("no panic") += by;
    }

    /// Moves only the wall clock, forwards or backwards.
    pub fn jump_wall_clock(&self, by_s: i64) {
        *self.wall_offset_s.lock().expect("no panic") += by_s;
    }
}

impl Clock for ManualClock {
    fn elapsed(&self) -> Duration {
        *self.elapsed.lock().expect("no panic")
    }

    fn unix_s(&self) -> u64 {
        let jumped_s = *self.wall_offset_s.lock().expect("no panic");
        (1_700_000_000 + self.elapsed().as_secs()).saturating_add_signed(jumped_s)
    }
}

/// The behavior of a brick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrickBehavior {
    Healthy,
    /// Connections fail.
    Unreachable,
    /// Another brick answers at this address.
    Replaced,
    /// The brick has no space for new slices.
    Full,
    /// The brick creates and deletes slices, but its answers get lost.
    LosesAnswers,
    /// The brick receives requests late: when the test delivers them.
    DelaysRequests,
    /// The brick creates slices, then reports a failure.
    FailsAfterCreate,
    /// The brick cannot delete slices, and cannot drop snapshots.
    RefusesDelete,
    /// The brick's release knows no snapshots.
    KnowsNoSnapshots,
}

/// A callback of a fake brick that runs at a request, before the answer.
pub type BrickHook = Box<dyn Fn(&FakeBrick) + Send + Sync>;

pub struct FakeBrick {
    pub id: BrickId,
    pub slices: Mutex<BTreeMap<SliceId, u64>>,
    pub behavior: Mutex<BrickBehavior>,
    /// Slices that cannot be deleted.
    pub undeletable: Mutex<BTreeSet<SliceId>>,
    /// Delayed create requests.
    pub delayed_creates: Mutex<Vec<(SliceId, u64)>>,
    /// Number of further slices that it creates before it becomes `Unreachable`.
    pub creates_left: Mutex<Option<usize>>,
    pub hook: Mutex<Option<Arc<BrickHook>>>,
    pub deletes: Mutex<Vec<SliceId>>,
    pub snapshots: Mutex<BTreeSet<(SliceId, Epoch)>>,
    /// The number of epochs in each call that drops snapshots.
    pub drops: Mutex<Vec<usize>>,
    /// The source of each clone, and the steps that are done of the two of its creation and the two of its promotion.
    pub clones: Mutex<BTreeMap<SliceId, (CloneSource, u64)>>,
    /// The versions of each slice.
    pub versions: Mutex<BTreeMap<SliceId, BTreeSet<PageVersion>>>,
    /// Whether it knows copies of versions.
    pub knows_version_copies: Mutex<bool>,
    /// Lists of versions end there, and say so again when they are asked to go on.
    pub list_end: Mutex<Option<PageNo>>,
    /// Runs once, at a request to list snapshots, before they are listed.
    pub adoption_hook: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl FakeBrick {
    pub fn set(&self, mood: BrickBehavior) {
        *self.behavior.lock().expect("no panic") = mood;
    }

    pub fn behavior(&self) -> BrickBehavior {
        *self.behavior.lock().expect("no panic")
    }

    pub fn slices(&self) -> BTreeSet<SliceId> {
        self.slices
            .lock()
            .expect("no panic")
            .keys()
            .copied()
            .collect()
    }

    pub fn set_adoption_hook(&self, hook: impl FnOnce() + Send + 'static) {
        *self.adoption_hook.lock().expect("no panic") = Some(Box::new(hook));
    }

    /// The epochs of the snapshots of all its slices.
    pub fn snapshot_epochs(&self) -> Vec<u32> {
        let all = self.snapshots.lock().expect("no panic");
        let epochs: BTreeSet<u32> = all.iter().map(|(_, epoch)| epoch.0).collect();
        epochs.into_iter().collect()
    }

    pub fn deliver_delayed(&self) {
        let late = std::mem::take(&mut *self.delayed_creates.lock().expect("no panic"));
        self.slices.lock().expect("no panic").extend(late);
    }

    fn check_snapshot_call(&self, slice: SliceId) -> Result<(), SliceError> {
        match self.behavior() {
            BrickBehavior::Unreachable => Err(lost_answer()),
            BrickBehavior::KnowsNoSnapshots => Err(SliceError::Refused(SNAPSHOTS_UNKNOWN.into())),
            _ if !self.slices().contains(&slice) => Err(SliceError::NoSuchSlice(slice)),
            _ => Ok(()),
        }
    }

    fn run_hook(&self) {
        let hook = self.hook.lock().expect("no panic").clone();
        if let Some(hook) = hook {
            hook(self);
        }
    }
}

fn lost_answer() -> SliceError {
    SliceError::Lost("as the test wished".into())
}

struct FakeControl(Arc<FakeBrick>);

impl BrickControl for FakeControl {
    fn create(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        let fake = &self.0;
        fake.run_hook();
        if let Some(left) = fake.creates_left.lock().expect("no panic").as_mut() {
            if *left == 0 {
                fake.set(BrickBehavior::Unreachable);
                return Err(lost_answer());
            }
            *left -= 1;
        }
        match fake.behavior() {
            BrickBehavior::Unreachable => return Err(lost_answer()),
            BrickBehavior::Full => return Err(SliceError::NoSpace),
            BrickBehavior::DelaysRequests => {
                fake.delayed_creates
                    .lock()
                    .expect("no panic")
                    .push((slice, size_bytes));
                return Err(lost_answer());
            }
            _ => {}
        }
        let old = fake
            .slices
            .lock()
            .expect("no panic")
            .insert(slice, size_bytes);
        assert_eq!(old, None, "a slice was made twice");
        match fake.behavior() {
            BrickBehavior::LosesAnswers => Err(lost_answer()),
            BrickBehavior::FailsAfterCreate => Err(SliceError::Refused("the disk failed".into())),
            _ => Ok(()),
        }
    }

    fn resize(&self, _: SliceId, _: u64) -> Result<(), SliceError> {
        panic!("slices are never resized")
    }

    fn delete(&self, slice: SliceId) -> Result<(), SliceError> {
        let fake = &self.0;
        fake.run_hook();
        fake.deletes.lock().expect("no panic").push(slice);
        match fake.behavior() {
            BrickBehavior::Unreachable | BrickBehavior::DelaysRequests => return Err(lost_answer()),
            BrickBehavior::RefusesDelete => return Err(SliceError::Refused("not now".into())),
            _ if fake.undeletable.lock().expect("no panic").contains(&slice) => {
                return Err(SliceError::Refused("this one is stuck".into()));
            }
            _ => {}
        }
        let was = fake.slices.lock().expect("no panic").remove(&slice);
        let mut snapshots = fake.snapshots.lock().expect("no panic");
        snapshots.retain(|(of, _)| *of != slice);
        drop(snapshots);
        match (fake.behavior(), was) {
            (BrickBehavior::LosesAnswers, _) => Err(lost_answer()),
            (_, None) => Err(SliceError::NoSuchSlice(slice)),
            (_, Some(_)) => Ok(()),
        }
    }

    fn list(&self) -> Result<Vec<SliceInfo>, SliceError> {
        Ok(vec![])
    }

    fn prepare_snapshot(&self, slice: SliceId, snapshot: Epoch) -> Result<(), SliceError> {
        let fake = &self.0;
        fake.run_hook();
        fake.check_snapshot_call(slice)?;
        let mut snapshots = fake.snapshots.lock().expect("no panic");
        snapshots.insert((slice, snapshot));
        match fake.behavior() {
            BrickBehavior::LosesAnswers => Err(lost_answer()),
            _ => Ok(()),
        }
    }

    fn drop_snapshots(&self, slice: SliceId, dropped: &[Epoch]) -> Result<(), SliceError> {
        let fake = &self.0;
        fake.run_hook();
        fake.check_snapshot_call(slice)?;
        if fake.behavior() == BrickBehavior::RefusesDelete {
            return Err(SliceError::Refused("not now".into()));
        }
        assert!((1..=DROPPED_SNAPSHOTS_MAX).contains(&dropped.len()));
        fake.drops.lock().expect("no panic").push(dropped.len());
        let mut snapshots = fake.snapshots.lock().expect("no panic");
        for epoch in dropped {
            snapshots.remove(&(slice, *epoch));
        }
        Ok(())
    }

    fn snapshots(&self, slice: SliceId) -> Result<Vec<Epoch>, SliceError> {
        self.0.check_snapshot_call(slice)?;
        let all = self.0.snapshots.lock().expect("no panic");
        let of_slice = all.iter().filter(|(of, _)| *of == slice);
        Ok(of_slice.map(|(_, epoch)| *epoch).collect())
    }

    fn create_clone(
        &self,
        slice: SliceId,
        source: CloneSource,
        size_bytes: u64,
    ) -> Result<CloneProgress, SliceError> {
        let fake = &self.0;
        fake.run_hook();
        fake.check_snapshot_call(source.origin)?;
        if fake.behavior() == BrickBehavior::Full {
            return Err(SliceError::NoSpace);
        }
        let key = (source.origin, source.snapshot);
        assert!(fake.snapshots.lock().expect("no panic").contains(&key));
        fake.slices
            .lock()
            .expect("no panic")
            .insert(slice, size_bytes);
        let mut clones = fake.clones.lock().expect("no panic");
        let (known, done) = clones.entry(slice).or_insert((source, 0));
        assert_eq!(*known, source);
        *done += 1;
        Ok(CloneProgress {
            done: *done,
            all: 2,
        })
    }

    fn promote_clone(&self, slice: SliceId) -> Result<CloneProgress, SliceError> {
        let fake = &self.0;
        fake.check_snapshot_call(slice)?;
        let mut clones = fake.clones.lock().expect("no panic");
        let Some((_, done)) = clones.get_mut(&slice) else {
            return Ok(CloneProgress { done: 1, all: 1 });
        };
        *done = (*done + 1).min(4);
        Ok(CloneProgress {
            done: *done - 2,
            all: 2,
        })
    }

    fn adopt_snapshots(&self, slice: SliceId, adopted: &[Epoch]) -> Result<(), SliceError> {
        self.0.check_snapshot_call(slice)?;
        if !*self.0.knows_version_copies.lock().expect("no panic") {
            return Err(SliceError::Refused(VERSION_COPIES_UNKNOWN.into()));
        }
        let hook = self.0.adoption_hook.lock().expect("no panic").take();
        if let Some(hook) = hook {
            hook();
        }
        let mut snapshots = self.0.snapshots.lock().expect("no panic");
        snapshots.extend(adopted.iter().map(|&epoch| (slice, epoch)));
        Ok(())
    }

    fn list_versions(
        &self,
        slice: SliceId,
        range: &VersionRange,
    ) -> Result<VersionList, SliceError> {
        self.0.check_snapshot_call(slice)?;
        let all = self.0.versions.lock().expect("no panic");
        let of_slice = all.get(&slice).into_iter().flatten().copied();
        let is_meant = |it: &PageVersion| {
            let mut snapshots = range.snapshots.iter();
            it.page >= range.from && snapshots.any(|&snapshot| it.is_seen_by(snapshot))
        };
        let listed = |it: PageVersion| PageVersion {
            death: it.death.min(range.below),
            ..it
        };
        Ok(VersionList {
            versions: of_slice.filter(is_meant).map(listed).collect(),
            next: *self.0.list_end.lock().expect("no panic"),
        })
    }

    fn edit_versions(&self, slice: SliceId, edits: &VersionEdits) -> Result<(), SliceError> {
        self.0.check_snapshot_call(slice)?;
        let mut all = self.0.versions.lock().expect("no panic");
        let of_slice = all.entry(slice).or_default();
        for edit in &edits.edits {
            let version = |death| PageVersion {
                page: edit.page,
                birth: edit.birth,
                death,
                sum: edit.sum,
            };
            if let Some(from) = edit.from {
                assert!(of_slice.remove(&version(from)), "{edit:?}");
            }
            of_slice.extend(edit.to.map(version));
        }
        Ok(())
    }

    fn read_version(
        &self,
        slice: SliceId,
        _: Epoch,
        (_, len): (u64, u32),
    ) -> Result<Vec<u8>, SliceError> {
        self.0.check_snapshot_call(slice)?;
        Ok(vec![1; len as usize])
    }

    fn status(&self) -> Result<BrickStatus, SliceError> {
        self.0.run_hook();
        let brick = match self.0.behavior() {
            BrickBehavior::Unreachable => return Err(lost_answer()),
            BrickBehavior::Replaced => BrickId(Uuid::from_u128(0xffff)),
            _ => self.0.id,
        };
        Ok(BrickStatus {
            brick,
            durability: "process".into(),
            capacity_bytes: CAPACITY,
            used_bytes: 0,
            sessions: 0,
            incarnation: 1,
        })
    }
}

/// The fake bricks by address.
#[derive(Default)]
pub struct FakeBricks(Mutex<BTreeMap<String, Arc<FakeBrick>>>);

impl BrickConnector for FakeBricks {
    fn control(&self, address: &str) -> Result<Box<dyn BrickControl>, SliceError> {
        let fake = self.0.lock().expect("no panic").get(address).cloned();
        let fake = fake.ok_or_else(lost_answer)?;
        fake.run_hook();
        match fake.behavior() {
            BrickBehavior::Unreachable => Err(lost_answer()),
            _ => Ok(Box::new(FakeControl(fake))),
        }
    }
}

pub fn brick_id(number: usize) -> BrickId {
    BrickId(Uuid::from_u128(number as u128 + 1))
}

/// The registration of a brick: number 0 is in domain `d0`, and so on.
pub fn registration(number: usize) -> BrickRegistration {
    BrickRegistration {
        brick: brick_id(number),
        name: None,
        name_is_default: false,
        address: format!("127.0.0.1:{}", 10_000 + number),
        map_socket: None,
        domain: format!("d{number}"),
        durability: Durability::Process,
        capacity_bytes: CAPACITY,
        used_bytes: 0,
        incarnation: 1,
        sessions: 0,
        scrub: None,
        devices: None,
        tier: None,
        tier_pages: None,
    }
}

/// The registration of a brick with a chosen name.
pub fn named_registration(number: usize, name: &str) -> BrickRegistration {
    BrickRegistration {
        name: Some(name.parse().expect("a name")),
        ..registration(number)
    }
}

pub fn name(text: &str) -> VolumeName {
    text.parse().expect("a name")
}

pub fn create_request(text: &str, kind: LayoutKind, size_bytes: u64) -> CreateVolume {
    CreateVolume {
        name: name(text),
        size_bytes,
        layout: kind,
        columns: None,
        copies: None,
        durability: None,
        content: VolumeContent::Blocks,
        tier: TierPolicy::Auto,
        received: false,
    }
}

pub fn attach_request(client: &str) -> AttachVolume {
    AttachVolume {
        client: client.into(),
        unreachable: false,
        process: None,
        replaces: None,
        receive: false,
    }
}

pub fn legs(layout: &Layout) -> impl Iterator<Item = &Leg> {
    let columns = layout.segments.iter().flat_map(|segment| &segment.columns);
    columns.flat_map(|column| &column.legs)
}

/// The parts of a cluster except the manager.
pub struct Cluster {
    pub clock: Arc<ManualClock>,
    pub fakes: Vec<Arc<FakeBrick>>,
    pub bricks: Arc<FakeBricks>,
    pub dir: TempDir,
    pub key: Key,
}

impl Cluster {
    pub fn new(bricks: usize) -> Cluster {
        let fake = |number| {
            Arc::new(FakeBrick {
                id: brick_id(number),
                slices: Mutex::default(),
                behavior: Mutex::new(BrickBehavior::Healthy),
                undeletable: Mutex::default(),
                delayed_creates: Mutex::default(),
                creates_left: Mutex::new(None),
                hook: Mutex::new(None),
                deletes: Mutex::default(),
                snapshots: Mutex::default(),
                drops: Mutex::default(),
                clones: Mutex::default(),
                versions: Mutex::default(),
                knows_version_copies: Mutex::new(true),
                list_end: Mutex::new(None),
                adoption_hook: Mutex::new(None),
            })
        };
        let fakes: Vec<_> = (0..bricks).map(fake).collect();
        let by_address = fakes
            .iter()
            .enumerate()
            .map(|(number, fake)| (registration(number).address, fake.clone()));
        Cluster {
            clock: Arc::default(),
            bricks: Arc::new(FakeBricks(Mutex::new(by_address.collect()))),
            fakes,
            dir: tempfile::tempdir().expect("a directory"),
            key: Key::from_bytes([7; 32]),
        }
    }

    pub fn store(&self) -> PathBuf {
        self.dir.path().join("manager.redb")
    }

    /// A manager without a server, on the current store.
    pub fn manager(&self) -> Manager {
        self.manager_on(&self.store())
    }

    pub fn manager_on(&self, path: &Path) -> Manager {
        self.manager_with(Store::open(path).expect("a store"))
    }

    pub fn manager_with(&self, store: Store) -> Manager {
        self.manager_with_settings(store, ManagerSettings::default())
    }

    pub fn manager_with_settings(&self, store: Store, settings: ManagerSettings) -> Manager {
        Manager::new(store, self.bricks.clone(), self.clock.clone(), settings).expect("a manager")
    }

    /// A manager with a heartbeat of every brick.
    pub fn manager_with_bricks_alive(&self) -> Manager {
        let manager = self.manager();
        self.send_heartbeats(&manager);
        manager
    }

    pub fn send_heartbeats(&self, manager: &Manager) {
        for number in 0..self.fakes.len() {
            manager.heartbeat(registration(number)).expect("welcome");
        }
    }

    /// A manager on a copy of the running manager's store, as after a power failure.
    pub fn crash_copy(&self) -> Manager {
        let manager = self.crash_copy_without_heartbeats();
        self.send_heartbeats(&manager);
        manager
    }

    pub fn crash_copy_without_heartbeats(&self) -> Manager {
        let image = self.dir.path().join(format!("{}.redb", Uuid::new_v4()));
        std::fs::copy(self.store(), &image).expect("a copy");
        self.manager_on(&image)
    }

    pub fn serve(&self) -> TestServer {
        self.serve_with(ManagerSettings::default())
    }

    pub fn serve_with(&self, settings: ManagerSettings) -> TestServer {
        self.serve_limited(settings, ConnectionLimits::default())
    }

    pub fn serve_limited(&self, settings: ManagerSettings, limits: ConnectionLimits) -> TestServer {
        let handle = serve(ManagerConfig {
            listen: "127.0.0.1:0".into(),
            store: self.store(),
            key: self.key.clone(),
            bricks: self.bricks.clone(),
            allowed_hosts: vec!["store.example".into()],
            admin_token: AdminTokenOutput::File,
            settings,
            clock: self.clock.clone(),
            limits,
            on_end: None,
        })
        .expect("a server");
        let client = ManagerClient::new(&handle.url(), &self.key).expect("a client");
        TestServer { handle, client }
    }

    /// A server with a heartbeat of every brick.
    pub fn serve_with_bricks_alive(&self) -> TestServer {
        let served = self.serve();
        self.send_heartbeats(served.handle.manager());
        served
    }

    /// Every slice on every brick.
    pub fn slices(&self) -> BTreeSet<(BrickId, SliceId)> {
        let of = |fake: &Arc<FakeBrick>| {
            let id = fake.id;
            fake.slices().into_iter().map(move |slice| (id, slice))
        };
        self.fakes.iter().flat_map(of).collect()
    }

    pub fn reset_bricks(&self) {
        for fake in &self.fakes {
            fake.set(BrickBehavior::Healthy);
            *fake.creates_left.lock().expect("no panic") = None;
            fake.undeletable.lock().expect("no panic").clear();
        }
    }

    /// Sweeps until every pending delete has become certain.
    pub fn sweep_until_certain(&self, manager: &Manager) {
        for _ in 0..3 {
            self.send_heartbeats(manager);
            manager.sweep();
            self.clock.advance(Duration::from_secs(121));
        }
        self.send_heartbeats(manager);
    }

    /// Asserts that bricks have exactly the slices of volumes, and that no deletion is pending.
    #[track_caller]
    pub fn assert_no_orphans(&self, manager: &Manager) {
        assert_eq!(self.slices(), slices_of_volumes(manager));
        assert_eq!(manager.status().pending_deletions, 0);
    }
}

/// The slices of all volumes.
pub fn slices_of_volumes(manager: &Manager) -> BTreeSet<(BrickId, SliceId)> {
    let mut all = BTreeSet::new();
    for info in manager.volumes() {
        let layout = manager.show(&info.name).expect("the volume").layout;
        for leg in legs(&layout) {
            assert!(all.insert((leg.brick, leg.slice)), "a slice is used twice");
        }
    }
    all
}

pub struct TestServer {
    pub handle: ManagerHandle,
    pub client: ManagerClient,
}

/// Asserts that the manager refuses with this code, and that its error contains these words.
#[track_caller]
pub fn assert_refused<T: std::fmt::Debug>(
    result: Result<T, ManagerError>,
    wanted: ErrorCode,
    words: &[&str],
) {
    let (code, error, hint, status) = match result.expect_err("refused") {
        ManagerError::Refused {
            code,
            error,
            hint,
            status,
        } => (code, error, hint, status),
        other => panic!("not refused: {other}"),
    };
    assert_eq!((code, status), (wanted, wanted.status()), "{error}");
    assert!(!hint.is_empty());
    for word in words {
        assert!(error.contains(word), "{error:?} lacks {word:?}");
    }
}
