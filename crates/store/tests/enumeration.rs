//! Crash enumeration: for every fence of a workload, legal crash images are
//! built, recovered and compared with an oracle. Acknowledged operations are
//! there, the one in progress is there as a whole or not at all, nothing else
//! changed, no frame is lost, and the pool can be used again.
//!
//! Workloads: every operation, every pair, and two sessions one of which dies
//! at each of its accesses to the medium.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{CrashPoint, Fenced, Media, Recorder, Unfenced};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::session::{Member, Session, clear, write};
use pagemesh_store::view::{Handle, StoreError};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use uuid::Uuid;

const POOL_BYTES: usize = 2 << 20;
const MAIN: SliceId = SliceId(Uuid::from_u128(1));
const OTHER: SliceId = SliceId(Uuid::from_u128(2));
const PAGES: u64 = 40;
const SIZE: u64 = PAGES * PAGE_BYTES as u64;

/// A medium whose user dies at some access.
struct Mortal {
    media: Recorder,
    /// Accesses left; negative: immortal.
    left: AtomicI64,
}

impl Mortal {
    fn new(media: Recorder) -> Mortal {
        Mortal {
            media,
            left: AtomicI64::new(-1),
        }
    }

    fn step(&self) {
        let left = self.left.load(Ordering::Relaxed);
        if left >= 0 {
            self.left.store(left - 1, Ordering::Relaxed);
            if left == 0 {
                std::panic::resume_unwind(Box::new("the session dies here"));
            }
        }
    }
}

impl Media for Mortal {
    fn len_bytes(&self) -> usize {
        self.media.len_bytes()
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.media.read(offset, into);
    }
    fn load(&self, offset: usize) -> u64 {
        self.media.load(offset)
    }
    fn store(&self, offset: usize, word: u64) {
        self.step();
        self.media.store(offset, word);
    }
    fn swap(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        self.step();
        self.media.swap(offset, old, new)
    }
    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> Unfenced {
        self.step();
        self.media.stream_line(offset, line)
    }
    fn stream_page(targets: &[(&Self, usize)], page: &[u8; PAGE_BYTES]) -> (u32, Unfenced) {
        targets[0].0.step();
        let inner: Vec<_> = targets
            .iter()
            .map(|(mortal, at)| (&mortal.media, *at))
            .collect();
        Recorder::stream_page(&inner, page)
    }
    fn flush(&self, offset: usize, len: usize) -> Unfenced {
        self.step();
        self.media.flush(offset, len)
    }
    fn fence(&self, stores: Unfenced) -> Fenced {
        self.step();
        self.media.fence(stores)
    }
}

/// What a pool must hold: the bytes of each object.
type Model = BTreeMap<SliceId, Vec<u8>>;

#[derive(Clone, Copy, Debug)]
enum Op {
    Page,
    Fresh,
    Pages,
    Part,
    Cut,
    CutPart,
    Create,
    /// Links the first nodes of an object, in frames that held other bytes.
    Other,
    Resize,
    Delete,
    Raise,
    Settle,
    Tend,
    Reopen,
}

const OPS: [Op; 14] = [
    Op::Page,
    Op::Fresh,
    Op::Pages,
    Op::Part,
    Op::Cut,
    Op::CutPart,
    Op::Create,
    Op::Other,
    Op::Resize,
    Op::Delete,
    Op::Raise,
    Op::Settle,
    Op::Tend,
    Op::Reopen,
];

struct World {
    media: Arc<Mortal>,
    pool: Pool<Mortal>,
    sessions: Vec<Session<Mortal>>,
    model: Model,
    epoch: u32,
    op: u64,
}

fn image_with_data() -> Vec<u64> {
    let mut world = World::format();
    world.pool.create(MAIN, SIZE).expect("an object");
    world.model.insert(MAIN, vec![0; SIZE as usize]);
    for page in [0, 1, 2, 20] {
        world
            .write(0, page * 4096, vec![page as u8 + 1; PAGE_BYTES])
            .expect("a write");
    }
    world.pool.tend().expect("a sound pool");
    world
        .write(1, 3 * 4096, vec![4; PAGE_BYTES])
        .expect("a write");
    let points = world.media.media.crash_points();
    points.last().expect("a point").image(0)
}

fn base_model() -> Model {
    let mut bytes = vec![0; SIZE as usize];
    for page in [0u64, 1, 2, 3, 20] {
        bytes[page as usize * PAGE_BYTES..][..PAGE_BYTES].fill(page as u8 + 1);
    }
    Model::from([(MAIN, bytes)])
}

impl World {
    fn format() -> World {
        // Frames hold what was there before: nothing may rely on zeroes.
        let media = Recorder::from_image(vec![0x5555_aaaa_1234_8765; POOL_BYTES / 8]);
        format(&media, Uuid::from_u128(9)).expect("a pool");
        World::open(media, Model::new())
    }

    fn open(media: Recorder, model: Model) -> World {
        let media = Arc::new(Mortal::new(media));
        let (pool, sessions) = open(&media);
        World {
            media,
            pool,
            sessions,
            model,
            epoch: 0,
            op: 100,
        }
    }

    fn handle(&self, slice: SliceId) -> Handle {
        self.pool.handle(slice).expect("the object")
    }

    fn stamp(&mut self) -> Stamp {
        self.op += 1;
        Stamp {
            epoch: Epoch(self.epoch),
            op: self.op,
            open: 0,
        }
    }

    fn write(&mut self, session: usize, offset: u64, data: Vec<u8>) -> Result<(), StoreError> {
        let (handle, stamp) = (self.handle(MAIN), self.stamp());
        let session = &mut self.sessions[session];
        write(&mut [Member { session, handle }], offset, &data, stamp).map_err(|f| f.cause)?;
        self.model.get_mut(&MAIN).expect("the object")[offset as usize..][..data.len()]
            .copy_from_slice(&data);
        Ok(())
    }

    fn clear(&mut self, offset: u64, len: u64) {
        let (handle, stamp) = (self.handle(MAIN), self.stamp());
        let session = &mut self.sessions[0];
        clear(&mut [Member { session, handle }], offset, len, stamp).expect("a clear");
        self.model.get_mut(&MAIN).expect("the object")[offset as usize..][..len as usize].fill(0);
    }

    /// Does an operation; the model follows.
    fn run(&mut self, op: Op, byte: u8) {
        if !self.model.contains_key(&MAIN)
            && !matches!(op, Op::Create | Op::Other | Op::Tend | Op::Reopen)
        {
            return;
        }
        match op {
            Op::Page => self
                .write(0, 4096, vec![byte; PAGE_BYTES])
                .expect("a write"),
            Op::Fresh => self
                .write(0, 30 * 4096, vec![byte; PAGE_BYTES])
                .expect("a write"),
            Op::Pages => self
                .write(1, 2 * 4096, vec![byte; 3 * PAGE_BYTES])
                .expect("a write"),
            Op::Part => self.write(0, 4096 + 100, vec![byte; 300]).expect("a write"),
            Op::Cut => self.clear(4096, 2 * 4096),
            Op::CutPart => self.clear(3 * 4096 + 8, 64),
            Op::Create => {
                if self.pool.create(OTHER, 8192).is_ok() {
                    self.model.insert(OTHER, vec![0; 8192]);
                }
            }
            Op::Other => {
                let Some(bytes) = self.model.get_mut(&OTHER) else {
                    return;
                };
                bytes[4096..].fill(byte);
                let data = bytes[4096..].to_vec();
                let (handle, stamp) = (self.handle(OTHER), self.stamp());
                let session = &mut self.sessions[0];
                write(&mut [Member { session, handle }], 4096, &data, stamp).expect("a write");
            }
            Op::Resize => {
                let bytes = self.model.get_mut(&MAIN).expect("the object");
                bytes.resize(bytes.len() + 4096, 0);
                self.pool.resize(MAIN, bytes.len() as u64).expect("larger");
            }
            Op::Delete => {
                self.pool.delete(MAIN).expect("the object");
                self.model.remove(&MAIN);
            }
            Op::Raise => {
                self.epoch += 1;
                self.pool
                    .raise_epoch(MAIN, Epoch(self.epoch), 2)
                    .expect("a barrier");
            }
            Op::Settle => self.pool.settle(MAIN).expect("the object"),
            Op::Tend => while self.pool.tend().expect("a sound pool") {},
            Op::Reopen => {
                let (pool, sessions) = open(&self.media);
                (self.pool, self.sessions) = (pool, sessions);
            }
        }
    }
}

fn open(media: &Arc<Mortal>) -> (Pool<Mortal>, Vec<Session<Mortal>>) {
    let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("a sound pool");
    let mut open = || {
        let number = pool.open_session(1, 1).expect("a session");
        Session::new(pool.view().clone(), number)
    };
    let sessions = vec![open(), open()];
    (pool, sessions)
}

/// Recovers an image and returns what it holds, after using the pool again and
/// counting its frames.
fn recover(image: Vec<u64>) -> Model {
    let media = Arc::new(Recorder::from_image(image));
    let (mut pool, _) = Pool::open(media.clone(), media).expect("a crash leaves a sound pool");
    let number = pool.open_session(1, 1).expect("a session");
    let mut session = Session::new(pool.view().clone(), number);
    let objects: Vec<_> = pool.list().collect();
    let mut model = Model::new();
    for object in &objects {
        let handle = pool.handle(object.slice).expect("the object");
        let mut bytes = vec![0; object.size_bytes as usize];
        session
            .read(&handle, 0, &mut bytes, Epoch(99))
            .expect("nothing is damaged");
        model.insert(object.slice, bytes);
        let stamp = Stamp {
            epoch: Epoch(99),
            op: 1,
            open: 0,
        };
        let fresh = [0xabu8; 2 * PAGE_BYTES];
        write(
            &mut [Member {
                session: &mut session,
                handle,
            }],
            0,
            &fresh,
            stamp,
        )
        .expect("it goes on");
        let mut found = [0; 2 * PAGE_BYTES];
        session
            .read(&handle, 0, &mut found, Epoch(99))
            .expect("it goes on");
        assert!(found == fresh, "what is written after a crash is read");
    }
    pool.close_session(number).expect("a sound pool");
    for object in &objects {
        pool.delete(object.slice).expect("the object");
    }
    for _ in 0..6 {
        while pool.tend().expect("a sound pool") {}
    }
    let usage = pool.usage();
    assert_eq!(usage.free_bytes, usage.capacity_bytes, "frames are lost");
    model
}

/// Checks images of the points; each must hold one of the models.
fn check(points: &[CrashPoint], images: u64, allowed: &[&Model], what: &str) -> u64 {
    let mut checked = 0;
    for (number, point) in points.iter().enumerate() {
        let exhaustive = point.count() <= images;
        for index in 0..point.count().min(images) {
            let image = match exhaustive {
                true => point.image(index),
                false => point.sample(index),
            };
            let found = catch_unwind(AssertUnwindSafe(|| recover(image)));
            let found = found.unwrap_or_else(|_| panic!("{what}: point {number}, image {index}"));
            assert!(
                allowed.iter().any(|model| **model == found),
                "{what}: point {number}, image {index} of {}: none of the allowed states",
                point.count()
            );
            checked += 1;
        }
    }
    checked
}

/// Runs operations from a pool with data and checks a crash at each fence.
fn enumerate(ops: &[Op], images: u64) -> u64 {
    let base = image_with_data();
    let mut world = World::open(Recorder::from_image(base.clone()), base_model());
    let mut checked = 0;
    let opened = world.media.media.crash_points();
    checked += check(
        &opened,
        images,
        &[&base_model()],
        &format!("opening before {ops:?}"),
    );
    for (i, &op) in ops.iter().enumerate() {
        let before = world.model.clone();
        let first = world.media.media.crash_points().len() - 1;
        world.run(op, 0x80 + i as u8);
        let points = world.media.media.crash_points();
        let last = points.len() - 1;
        let what = format!("{ops:?}, in {op:?}");
        checked += check(
            &points[first..last],
            images,
            &[&before, &world.model],
            &what,
        );
        let what = format!("{ops:?}, after {op:?}");
        checked += check(&points[last..], images, &[&world.model], &what);
    }
    checked
}

#[test]
fn every_operation() {
    let checked: u64 = OPS.iter().map(|&op| enumerate(&[op], 40)).sum();
    assert!(checked > 1000, "{checked} images");
}

#[test]
fn every_pair() {
    let pairs = OPS.iter().flat_map(|&a| OPS.iter().map(move |&b| [a, b]));
    let checked: u64 = pairs.map(|pair| enumerate(&pair, 6)).sum();
    assert!(checked > 5000, "{checked} images");
}

/// One session dies at each of its accesses; meanwhile another writes, the
/// owner makes a checkpoint, ends the dead one, and the other goes on.
#[test]
fn a_session_dies_beside_another() {
    let base = image_with_data();
    let (mut checked, mut finished, mut voided) = (0, 0, 0);
    for victim in [Op::Page, Op::Fresh, Op::Pages, Op::Part, Op::Cut] {
        for death in 0.. {
            let mut world = World::open(Recorder::from_image(base.clone()), base_model());
            let before = world.model.clone();
            let first = world.media.media.crash_points().len() - 1;
            world.media.left.store(death, Ordering::Relaxed);
            let died = catch_unwind(AssertUnwindSafe(|| world.run(victim, 0x77))).is_err();
            world.media.left.store(-1, Ordering::Relaxed);
            if !died {
                break;
            }
            let what = format!("{victim:?} dies at access {death}");
            let mut after = World::open(Recorder::from_image(base.clone()), base_model());
            after.run(victim, 0x77);
            let (mut old, mut new) = (before, after.model);
            // The other session writes elsewhere; the owner must not pass the
            // open window.
            let dead = if matches!(victim, Op::Pages) { 1 } else { 0 };
            world.model = old.clone();
            world
                .write(1 - dead, 36 * 4096, vec![0x55; PAGE_BYTES])
                .expect("a write");
            for model in [&mut old, &mut new] {
                model.get_mut(&MAIN).expect("the object")[36 * 4096..37 * 4096].fill(0x55);
            }
            let written = world.media.media.crash_points().len() - 1;
            world.pool.tend().expect("a sound pool");
            let number = world.sessions[dead].number();
            world.pool.close_session(number).expect("a sound pool");
            let mut found = vec![0; SIZE as usize];
            let handle = world.handle(MAIN);
            world.sessions[1 - dead]
                .read(&handle, 0, &mut found, Epoch(9))
                .expect("sound");
            let is_new = found == new[&MAIN];
            assert!(
                is_new || found == old[&MAIN],
                "{what}: a part of the operation happened"
            );
            finished += u64::from(is_new);
            voided += u64::from(!is_new);
            // Readers have seen the outcome: it must stay.
            world.model = if is_new { new.clone() } else { old.clone() };
            let buried = world.media.media.crash_points().len() - 1;
            world
                .write(1 - dead, 4096, vec![0x66; PAGE_BYTES])
                .expect("the lock is free");
            let points = world.media.media.crash_points();
            checked += check(&points[written..buried], 6, &[&old, &new], &what);
            let settled = if is_new { &new } else { &old };
            let last = points.len() - 1;
            checked += check(&points[buried..last], 6, &[settled, &world.model], &what);
            checked += check(&points[last..], 6, &[&world.model], &what);
            assert!(first <= written);
            // No frame is lost, and none is in use twice.
            world
                .pool
                .close_session(world.sessions[1 - dead].number())
                .expect("sound");
            world.pool.delete(MAIN).expect("the object");
            for _ in 0..6 {
                while world.pool.tend().expect("a sound pool") {}
            }
            let usage = world.pool.usage();
            assert_eq!(
                usage.free_bytes, usage.capacity_bytes,
                "{what}: frames are lost"
            );
        }
    }
    assert!(
        finished > 3 && voided > 10,
        "{finished} finished, {voided} voided"
    );
    assert!(checked > 500, "{checked} images");
}
