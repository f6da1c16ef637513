//! A cluster in memory: bricks that do what a test tells them, a clock that a
//! test moves, and a manager on a store in a directory of its own.

#![allow(dead_code)]

use pagemesh_base::key::Key;
use pagemesh_base::layout::{BrickId, Layout, Leg, SliceId, VolumeName};
use pagemesh_base::slice::{BrickControl, BrickStatus, SliceError, SliceInfo};
use pagemesh_manage::clock::Clock;
use pagemesh_manage::store::Store;
use pagemesh_manage::wire::{BrickRegistration, Code, Content, CreateVolume};
use pagemesh_manage::{
    Bricks, Client, Config, Durability, Handle, Kind, Manager, ManagerError, Settings, serve,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use uuid::Uuid;

pub const MIB: u64 = 1 << 20;
pub const CAPACITY: u64 = 1 << 30;

/// A clock that stands still until it is moved.
#[derive(Default)]
pub struct HandClock {
    elapsed: Mutex<Duration>,
    wall_jumped_s: Mutex<i64>,
}

impl HandClock {
    pub fn advance(&self, by: Duration) {
        *self.elapsed.lock().expect("no panic") += by;
    }

    /// Sets the wall clock alone, forwards or backwards.
    pub fn jump(&self, by_s: i64) {
        *self.wall_jumped_s.lock().expect("no panic") += by_s;
    }
}

impl Clock for HandClock {
    fn elapsed(&self) -> Duration {
        *self.elapsed.lock().expect("no panic")
    }

    fn unix_s(&self) -> u64 {
        let jumped_s = *self.wall_jumped_s.lock().expect("no panic");
        (1_700_000_000 + self.elapsed().as_secs()).saturating_add_signed(jumped_s)
    }
}

/// How a brick behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Well,
    /// Connections fail.
    Away,
    /// Another brick answers at its address.
    Replaced,
    /// Has no space for new slices.
    Full,
    /// Makes and deletes slices, but its answers get lost.
    Mute,
    /// Requests get lost before it sees them, and arrive when it is told.
    Deaf,
    /// Makes slices, then says that it could not.
    Denies,
    /// Cannot delete.
    Keeps,
}

/// What a fake does when it is asked something, before it answers.
pub type Hook = Box<dyn Fn(&Fake) + Send + Sync>;

pub struct Fake {
    pub id: BrickId,
    pub slices: Mutex<BTreeMap<SliceId, u64>>,
    pub mood: Mutex<Mood>,
    /// Slices that cannot be deleted.
    pub stuck: Mutex<BTreeSet<SliceId>>,
    /// Creates on their way.
    pub late: Mutex<Vec<(SliceId, u64)>>,
    /// How many more slices it makes before it is `Away`.
    pub strength: Mutex<Option<usize>>,
    pub hook: Mutex<Option<Arc<Hook>>>,
    pub deletes: Mutex<Vec<SliceId>>,
}

impl Fake {
    pub fn set(&self, mood: Mood) {
        *self.mood.lock().expect("no panic") = mood;
    }

    pub fn mood(&self) -> Mood {
        *self.mood.lock().expect("no panic")
    }

    pub fn slices(&self) -> BTreeSet<SliceId> {
        self.slices
            .lock()
            .expect("no panic")
            .keys()
            .copied()
            .collect()
    }

    pub fn deliver(&self) {
        let late = std::mem::take(&mut *self.late.lock().expect("no panic"));
        self.slices.lock().expect("no panic").extend(late);
    }

    fn met(&self) {
        let hook = self.hook.lock().expect("no panic").clone();
        if let Some(hook) = hook {
            hook(self);
        }
    }
}

fn lost() -> SliceError {
    SliceError::Lost("as the test wished".into())
}

struct Control(Arc<Fake>);

impl BrickControl for Control {
    fn create(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        let fake = &self.0;
        fake.met();
        if let Some(left) = fake.strength.lock().expect("no panic").as_mut() {
            if *left == 0 {
                fake.set(Mood::Away);
                return Err(lost());
            }
            *left -= 1;
        }
        match fake.mood() {
            Mood::Away => return Err(lost()),
            Mood::Full => return Err(SliceError::NoSpace),
            Mood::Deaf => {
                fake.late
                    .lock()
                    .expect("no panic")
                    .push((slice, size_bytes));
                return Err(lost());
            }
            _ => {}
        }
        let old = fake
            .slices
            .lock()
            .expect("no panic")
            .insert(slice, size_bytes);
        assert_eq!(old, None, "a slice was made twice");
        match fake.mood() {
            Mood::Mute => Err(lost()),
            Mood::Denies => Err(SliceError::Refused("the disk failed".into())),
            _ => Ok(()),
        }
    }

    fn resize(&self, _: SliceId, _: u64) -> Result<(), SliceError> {
        panic!("slices are never resized")
    }

    fn delete(&self, slice: SliceId) -> Result<(), SliceError> {
        let fake = &self.0;
        fake.met();
        fake.deletes.lock().expect("no panic").push(slice);
        match fake.mood() {
            Mood::Away | Mood::Deaf => return Err(lost()),
            Mood::Keeps => return Err(SliceError::Refused("not now".into())),
            _ if fake.stuck.lock().expect("no panic").contains(&slice) => {
                return Err(SliceError::Refused("this one is stuck".into()));
            }
            _ => {}
        }
        let was = fake.slices.lock().expect("no panic").remove(&slice);
        match (fake.mood(), was) {
            (Mood::Mute, _) => Err(lost()),
            (_, None) => Err(SliceError::NoSuchSlice(slice)),
            (_, Some(_)) => Ok(()),
        }
    }

    fn list(&self) -> Result<Vec<SliceInfo>, SliceError> {
        Ok(vec![])
    }

    fn status(&self) -> Result<BrickStatus, SliceError> {
        self.0.met();
        let brick = match self.0.mood() {
            Mood::Away => return Err(lost()),
            Mood::Replaced => BrickId(Uuid::from_u128(0xffff)),
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

/// Bricks by address.
#[derive(Default)]
pub struct Fakes(Mutex<BTreeMap<String, Arc<Fake>>>);

impl Bricks for Fakes {
    fn control(&self, address: &str) -> Result<Box<dyn BrickControl>, SliceError> {
        let fake = self.0.lock().expect("no panic").get(address).cloned();
        let fake = fake.ok_or_else(lost)?;
        fake.met();
        match fake.mood() {
            Mood::Away => Err(lost()),
            _ => Ok(Box::new(Control(fake))),
        }
    }
}

pub fn brick_id(number: usize) -> BrickId {
    BrickId(Uuid::from_u128(number as u128 + 1))
}

/// What a brick registers: number 0 is in domain `d0`, and so on.
pub fn registration(number: usize) -> BrickRegistration {
    BrickRegistration {
        brick: brick_id(number),
        address: format!("127.0.0.1:{}", 10_000 + number),
        map_socket: None,
        domain: format!("d{number}"),
        durability: Durability::Process,
        capacity_bytes: CAPACITY,
        used_bytes: 0,
        incarnation: 1,
        sessions: 0,
        scrub: None,
    }
}

pub fn name(text: &str) -> VolumeName {
    text.parse().expect("a name")
}

pub fn wish(text: &str, kind: Kind, size_bytes: u64) -> CreateVolume {
    CreateVolume {
        name: name(text),
        size_bytes,
        layout: kind,
        columns: None,
        copies: None,
        durability: None,
        content: Content::Blocks,
    }
}

pub fn legs(layout: &Layout) -> impl Iterator<Item = &Leg> {
    let columns = layout.segments.iter().flat_map(|segment| &segment.columns);
    columns.flat_map(|column| &column.legs)
}

/// Everything but the manager.
pub struct Cluster {
    pub clock: Arc<HandClock>,
    pub fakes: Vec<Arc<Fake>>,
    pub bricks: Arc<Fakes>,
    pub dir: TempDir,
    pub key: Key,
}

impl Cluster {
    pub fn new(bricks: usize) -> Cluster {
        let fake = |number| {
            Arc::new(Fake {
                id: brick_id(number),
                slices: Mutex::default(),
                mood: Mutex::new(Mood::Well),
                stuck: Mutex::default(),
                late: Mutex::default(),
                strength: Mutex::new(None),
                hook: Mutex::new(None),
                deletes: Mutex::default(),
            })
        };
        let fakes: Vec<_> = (0..bricks).map(fake).collect();
        let by_address = fakes
            .iter()
            .enumerate()
            .map(|(number, fake)| (registration(number).address, fake.clone()));
        Cluster {
            clock: Arc::default(),
            bricks: Arc::new(Fakes(Mutex::new(by_address.collect()))),
            fakes,
            dir: tempfile::tempdir().expect("a directory"),
            key: Key::from_bytes([7; 32]),
        }
    }

    pub fn store(&self) -> PathBuf {
        self.dir.path().join("manager.redb")
    }

    /// A manager without a server, on the store as it is.
    pub fn manager(&self) -> Manager {
        self.manager_on(&self.store())
    }

    pub fn manager_on(&self, path: &Path) -> Manager {
        self.manager_with(Store::open(path).expect("a store"))
    }

    pub fn manager_with(&self, store: Store) -> Manager {
        let settings = Settings::default();
        Manager::new(store, self.bricks.clone(), self.clock.clone(), settings).expect("a manager")
    }

    /// A manager that has heard of every brick.
    pub fn living(&self) -> Manager {
        let manager = self.manager();
        self.beat(&manager);
        manager
    }

    pub fn beat(&self, manager: &Manager) {
        for number in 0..self.fakes.len() {
            manager.heartbeat(registration(number)).expect("welcome");
        }
    }

    /// What a power failure now would leave of the store of a running
    /// manager, as another manager finds it.
    pub fn crashed(&self) -> Manager {
        let manager = self.crashed_without_beats();
        self.beat(&manager);
        manager
    }

    pub fn crashed_without_beats(&self) -> Manager {
        let image = self.dir.path().join(format!("{}.redb", Uuid::new_v4()));
        std::fs::copy(self.store(), &image).expect("a copy");
        self.manager_on(&image)
    }

    pub fn serve(&self) -> Served {
        let handle = serve(Config {
            listen: "127.0.0.1:0".into(),
            store: self.store(),
            key: self.key.clone(),
            bricks: self.bricks.clone(),
            settings: Settings::default(),
            clock: self.clock.clone(),
        })
        .expect("a server");
        let client = Client::new(&handle.url(), &self.key).expect("a client");
        Served { handle, client }
    }

    /// A server that has heard of every brick.
    pub fn serve_living(&self) -> Served {
        let served = self.serve();
        self.beat(served.handle.manager());
        served
    }

    /// Every slice on every brick.
    pub fn slices(&self) -> BTreeSet<(BrickId, SliceId)> {
        let of = |fake: &Arc<Fake>| {
            let id = fake.id;
            fake.slices().into_iter().map(move |slice| (id, slice))
        };
        self.fakes.iter().flat_map(of).collect()
    }

    pub fn cheer(&self) {
        for fake in &self.fakes {
            fake.set(Mood::Well);
            *fake.strength.lock().expect("no panic") = None;
            fake.stuck.lock().expect("no panic").clear();
        }
    }

    /// Lets a manager sweep until what is uncertain has become certain.
    pub fn sweep_out(&self, manager: &Manager) {
        for _ in 0..3 {
            self.beat(manager);
            manager.sweep();
            self.clock.advance(Duration::from_secs(121));
        }
        self.beat(manager);
    }

    /// Bricks have exactly the slices of volumes, and nothing is owed.
    #[track_caller]
    pub fn assert_no_orphans(&self, manager: &Manager) {
        assert_eq!(self.slices(), named(manager));
        assert_eq!(manager.status().pending_deletions, 0);
    }
}

/// The slices of all volumes.
pub fn named(manager: &Manager) -> BTreeSet<(BrickId, SliceId)> {
    let mut all = BTreeSet::new();
    for info in manager.volumes() {
        let layout = manager.show(&info.name).expect("the volume").layout;
        for leg in legs(&layout) {
            assert!(all.insert((leg.brick, leg.slice)), "a slice is used twice");
        }
    }
    all
}

pub struct Served {
    pub handle: Handle,
    pub client: Client,
}

/// The manager refuses it for this reason, and says these words.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T, ManagerError>, wanted: Code, words: &[&str]) {
    let ManagerError::Refused {
        code,
        error,
        hint,
        status,
    } = result.expect_err("refused")
    else {
        panic!("refused in another way");
    };
    assert_eq!((code, status), (wanted, wanted.status()), "{error}");
    assert!(!hint.is_empty());
    for word in words {
        assert!(error.contains(word), "{error:?} lacks {word:?}");
    }
}
