//! Clones of snapshots: random histories of a family of slices against a model.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{SliceRequest, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fuzz::Random;
use pagemesh_pmem::MappedMedia;
use pagemesh_store::check::{CheckOptions, check};
use pagemesh_store::clones::CloneSource;
use pagemesh_store::pool::{ObjectError, Pool, format};
use pagemesh_store::pool_mapping::{Handle, StoreError};
use pagemesh_store::requests::{ExecuteOutcome, execute};
use pagemesh_store::session::{LegSession, Session, clear, write};
use pagemesh_store::test_api::PoolInternals;
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
const POOL_BYTES: usize = 64 << 20;
const PAGES: u64 = 1100;
/// Slices that exist at once, at most.
const SLICES_MAX: usize = 5;

type Contents = BTreeMap<u64, u8>;

/// A slice, and its model: the byte that fills each page.
struct Volume {
    handle: Handle,
    epoch: u32,
    live: Contents,
    snapshots: BTreeMap<u32, Contents>,
    /// The origin and the snapshot, of a clone that is not promoted.
    origin: Option<(u128, u32)>,
}

struct Bed {
    media: Arc<MappedMedia>,
    pool: Pool<MappedMedia>,
    session: Session<MappedMedia>,
    volumes: BTreeMap<u128, Volume>,
    next_slice: u128,
    op: u64,
}

fn slice(number: u128) -> SliceId {
    SliceId(Uuid::from_u128(number))
}

fn open_session(pool: &mut Pool<MappedMedia>) -> Session<MappedMedia> {
    let number = pool.open_session(1, 1).expect("a session");
    let session = Session::new(pool.mapping().clone(), number);
    session.with_owner_wait(std::time::Duration::ZERO)
}

impl Bed {
    /// Gives the first slice a page in each of so many leaves. Returns its size, and the source of clones of it.
    fn snapshot_of_leaves(&mut self, leaves: u64) -> (u64, CloneSource) {
        let size = leaves * 512 * PAGE;
        self.pool.resize(slice(1), size).expect("larger");
        for leaf in 0..leaves {
            self.change(1, leaf * 512, 1, Some(7));
        }
        let source = CloneSource {
            origin: slice(1),
            snapshot: Epoch(self.snapshot(1)),
        };
        (size, source)
    }

    fn new() -> Bed {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(POOL_BYTES as u64).expect("room");
        let media = Arc::new(MappedMedia::new(file, POOL_BYTES).expect("memory"));
        format(&*media, Uuid::from_u128(1)).expect("a pool");
        let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
        pool.create(slice(1), PAGES * PAGE).expect("room");
        let session = open_session(&mut pool);
        let volume = Volume {
            handle: pool.handle(slice(1)).expect("the slice"),
            epoch: 1,
            live: Contents::new(),
            snapshots: BTreeMap::new(),
            origin: None,
        };
        Bed {
            media,
            pool,
            session,
            volumes: BTreeMap::from([(1, volume)]),
            next_slice: 10,
            op: 0,
        }
    }

    fn change(&mut self, of: u128, page: u64, count: u64, byte: Option<u8>) {
        self.op += 1;
        let volume = self.volumes.get_mut(&of).expect("a volume");
        let (handle, stamp) = (
            volume.handle,
            Stamp {
                epoch: Epoch(volume.epoch),
                op: self.op,
                open_ops: 0,
            },
        );
        for page in page..page + count {
            match byte {
                Some(byte) => drop(volume.live.insert(page, byte)),
                None => drop(volume.live.remove(&page)),
            }
        }
        let len = (count * PAGE) as usize;
        for _ in 0..100 {
            while self.pool.maintain().expect("sound") {}
            let session = &mut self.session;
            let legs = &mut [LegSession { session, handle }];
            let changed = match byte {
                Some(byte) => write(legs, page * PAGE, &vec![byte; len], stamp),
                None => clear(legs, page * PAGE, len as u64, stamp),
            };
            match changed.map_err(|failure| failure.cause) {
                Err(StoreError::TimedOut) => {}
                result => return result.expect("room"),
            }
        }
        panic!("the owner makes no room");
    }

    /// Changes a part of a page: in place, if no snapshot or clone shares it.
    fn patch(&mut self, of: u128, page: u64) {
        let Some(&byte) = self.volumes[&of].live.get(&page) else {
            return;
        };
        self.op += 1;
        let volume = &self.volumes[&of];
        let stamp = Stamp {
            epoch: Epoch(volume.epoch),
            op: self.op,
            open_ops: 0,
        };
        let handle = volume.handle;
        // The model has one byte for each page: the patch is undone at once.
        for byte in [!byte, byte] {
            while self.pool.maintain().expect("sound") {}
            let session = &mut self.session;
            let legs = &mut [LegSession { session, handle }];
            let written = write(legs, page * PAGE + 64, &[byte; 64], stamp);
            written.map_err(|failure| failure.cause).expect("room");
        }
    }

    fn snapshot(&mut self, of: u128) -> u32 {
        let volume = self.volumes.get_mut(&of).expect("a volume");
        volume.epoch += 1;
        let snapshot = Epoch(volume.epoch);
        self.pool
            .prepare_snapshot(slice(of), snapshot)
            .expect("room");
        volume.snapshots.insert(volume.epoch, volume.live.clone());
        volume.epoch
    }

    fn clone_of(&mut self, of: u128, snapshot: u32) -> u128 {
        let number = self.next_slice;
        self.next_slice += 1;
        let source = CloneSource {
            origin: slice(of),
            snapshot: Epoch(snapshot),
        };
        self.pool
            .create_clone(slice(number), source, PAGES * PAGE)
            .expect("room");
        assert!(matches!(
            self.pool.handle(slice(number)),
            Err(ObjectError::UnfilledClone(_))
        ));
        self.fill(number);
        let live = self.volumes[&of].snapshots[&snapshot].clone();
        let volume = Volume {
            handle: self.pool.handle(slice(number)).expect("filled"),
            epoch: snapshot,
            live,
            snapshots: BTreeMap::new(),
            origin: Some((of, snapshot)),
        };
        self.volumes.insert(number, volume);
        number
    }

    fn fill(&mut self, number: u128) {
        loop {
            let progress = self.pool.fill_clone(slice(number)).expect("room");
            if progress.is_complete() {
                return;
            }
        }
    }

    fn has_clones(&self, of: u128, snapshot: Option<u32>) -> bool {
        let origins = self.volumes.values().filter_map(|volume| volume.origin);
        origins
            .into_iter()
            .any(|(origin, base)| origin == of && snapshot.is_none_or(|it| it == base))
    }

    fn drop_snapshot(&mut self, of: u128, snapshot: u32) {
        let dropped = self.pool.drop_snapshots(slice(of), &[Epoch(snapshot)]);
        if self.has_clones(of, Some(snapshot)) {
            assert!(matches!(dropped, Err(ObjectError::HasClone { .. })));
            return;
        }
        // A clone that is being deleted still counts.
        if dropped.is_ok() {
            let volume = self.volumes.get_mut(&of).expect("a volume");
            volume.snapshots.remove(&snapshot);
        }
    }

    fn promote(&mut self, of: u128) {
        loop {
            match self.pool.promote_clone(slice(of)) {
                Ok(progress) if progress.is_complete() => break,
                Ok(_) => {}
                Err(ObjectError::HasClone { .. }) => return,
                Err(cause) => panic!("{cause}"),
            }
        }
        let volume = &self.volumes[&of];
        assert!(volume.origin.is_none() || !self.has_clones(of, None));
        self.volumes.get_mut(&of).expect("a volume").origin = None;
    }

    /// Deletes a slice, if no clone depends on it. Returns whether it is gone.
    fn delete(&mut self, of: u128) -> bool {
        let deleted = self.pool.delete(slice(of));
        if self.has_clones(of, None) {
            assert!(matches!(deleted, Err(ObjectError::HasClone { .. })));
            return false;
        }
        if deleted.is_ok() {
            self.volumes.remove(&of);
        }
        deleted.is_ok()
    }

    fn reopen(&mut self) {
        let (mut pool, found) = Pool::open(self.media.clone(), self.media.clone()).expect("sound");
        assert!(!found.is_damaged(), "{found:?}");
        self.session = open_session(&mut pool);
        self.pool = pool;
    }

    fn check(&mut self) {
        for (&number, volume) in &self.volumes {
            let mut live = Contents::new();
            for page in 0..PAGES {
                let mut bytes = [0; PAGE_BYTES];
                let read =
                    self.session
                        .read(&volume.handle, page * PAGE, &mut bytes, Epoch(u32::MAX));
                read.expect("sound");
                assert!(bytes.iter().all(|&byte| byte == bytes[0]), "page {page}");
                live.extend((bytes[0] != 0).then_some((page, bytes[0])));
            }
            assert_eq!(live, volume.live, "volume {number}");
            for (&snapshot, expected) in &volume.snapshots {
                let mut found = Contents::new();
                for leaf in 0..PAGES.div_ceil(512) {
                    let frames = self.pool.version_leaf(slice(number), Epoch(snapshot), leaf);
                    let frames = frames.expect("sound");
                    for index in 0..512 {
                        let page = leaf * 512 + index as u64;
                        if let Some(frame) = frames.frame(index) {
                            let mut bytes = [0; PAGE_BYTES];
                            let mapping = self.pool.mapping();
                            let read = mapping.read_version(frame, PageNo(page), &mut bytes);
                            read.expect("sound");
                            found.insert(page, bytes[0]);
                        }
                    }
                }
                assert_eq!(&found, expected, "snapshot {snapshot} of volume {number}");
            }
        }
    }

    fn check_pool(&mut self) {
        self.pool.checkpoint().expect("sound");
        let named = self.pool.mapped_frames().expect("sound");
        let pairs = named.iter().zip(self.pool.used_frames()).enumerate();
        let differing: Vec<(u64, bool)> = pairs
            .flat_map(|(word, (named, used))| {
                let bits = (0..64).filter(move |bit| (named ^ used) >> bit & 1 != 0);
                bits.map(move |bit| (word as u64 * 64 + bit, named >> bit & 1 != 0))
            })
            .collect();
        assert!(
            differing.is_empty(),
            "frames, and whether tables name them: {differing:?}"
        );
        let options = &mut CheckOptions {
            is_ordered: true,
            reads_data: true,
            progress: &mut |_, _| {},
        };
        let copy = self.media.overlay().expect("memory");
        let (report, _) = check(&copy, options).expect("a pool");
        assert!(report.is_sound(), "{report:?}");
    }

    /// Deletes everything. Each frame is free then, but those of the version log.
    fn empty(&mut self) {
        for _ in 0..10_000 {
            self.pool.checkpoint().expect("sound");
            while self.pool.maintain().expect("sound") {}
            let numbers: Vec<u128> = self.volumes.keys().copied().collect();
            for number in numbers {
                self.delete(number);
            }
            if self.volumes.is_empty() {
                break;
            }
        }
        for _ in 0..10 {
            self.pool.checkpoint().expect("sound");
            while self.pool.maintain().expect("sound") {}
        }
        assert!(self.volumes.is_empty(), "{} are left", self.volumes.len());
        self.check_pool();
    }
}

fn pick<T: Copy>(random: &mut Random, items: impl Iterator<Item = T>) -> Option<T> {
    let items: Vec<T> = items.collect();
    (!items.is_empty()).then(|| items[random.below(items.len())])
}

fn run_history(seed: u64, steps: u64) {
    let mut bed = Bed::new();
    let mut random = Random::new(seed);
    for step in 0..steps {
        let of = pick(&mut random, bed.volumes.keys().copied()).expect("the first stays");
        let page = random.draw() % (PAGES - 8);
        let snapshot = pick(&mut random, bed.volumes[&of].snapshots.keys().copied());
        match random.below(48) {
            0..=19 => bed.change(of, page, 1 + random.draw() % 7, Some(1 + step as u8 % 250)),
            20..=25 => bed.patch(of, page),
            26..=28 => bed.change(of, page, 1 + random.draw() % 7, None),
            29..=32 => drop(bed.snapshot(of)),
            33..=38 if bed.volumes.len() < SLICES_MAX => {
                snapshot.map(|snapshot| bed.clone_of(of, snapshot));
            }
            39..=40 => drop(snapshot.map(|snapshot| bed.drop_snapshot(of, snapshot))),
            41 => bed.promote(of),
            42 if bed.volumes.len() > 1 => drop(bed.delete(of)),
            43 => bed.reopen(),
            44..=45 => bed.pool.merge_versions_soon(),
            _ => drop(bed.pool.maintain().expect("sound")),
        }
        if step % 100 == 0 {
            bed.check();
        }
    }
    bed.check();
    bed.check_pool();
    bed.empty();
}

#[test]
fn clones_and_origins_change_apart() {
    for seed in 0..8 {
        run_history(seed, 500);
    }
}

#[test]
fn unfilled_clone_continues_after_restart() {
    let mut bed = Bed::new();
    for page in 0..PAGES {
        bed.change(1, page, 1, Some(page as u8 | 1));
    }
    let snapshot = bed.snapshot(1);
    let source = CloneSource {
        origin: slice(1),
        snapshot: Epoch(snapshot),
    };
    let created = bed.pool.create_clone(slice(2), source, PAGES * PAGE);
    created.expect("room");
    bed.reopen();
    assert!(matches!(
        bed.pool.handle(slice(2)),
        Err(ObjectError::UnfilledClone(_))
    ));
    let again = bed.pool.create_clone(slice(2), source, PAGES * PAGE);
    again.expect("it is the same");
    bed.fill(2);
    let count = |bed: &Bed| -> u32 {
        let words = bed.pool.used_frames().iter();
        words.map(|word| word.count_ones()).sum()
    };
    bed.pool.checkpoint().expect("sound");
    let used = count(&bed);
    let copy = bed.clone_of(1, snapshot);
    bed.pool.checkpoint().expect("sound");
    // Three nodes above, and three leaves.
    assert!(count(&bed) <= used + 6, "a clone copies no page");
    bed.change(copy, 3, 1, Some(77));
    bed.check();
    bed.pool.delete(slice(2)).expect("nothing depends on it");
    bed.empty();
}

#[test]
fn clone_is_filled_from_its_start_after_another_was_given_up() {
    const LEAVES: u64 = 40;
    let mut bed = Bed::new();
    let (size, source) = bed.snapshot_of_leaves(LEAVES);
    bed.pool.create_clone(slice(2), source, size).expect("room");
    let progress = bed.pool.fill_clone(slice(2)).expect("room");
    assert!(!progress.is_complete(), "{progress:?}");
    bed.pool.delete(slice(2)).expect("it is there");
    for _ in 0..10 {
        bed.pool.checkpoint().expect("sound");
        while bed.pool.maintain().expect("sound") {}
    }
    // It gets the number of the other one.
    bed.pool.create_clone(slice(3), source, size).expect("room");
    bed.fill(3);
    let handle = bed.pool.handle(slice(3)).expect("filled");
    for leaf in 0..LEAVES {
        let mut bytes = [0; PAGE_BYTES];
        let read = bed
            .session
            .read(&handle, leaf * 512 * PAGE, &mut bytes, Epoch(u32::MAX));
        read.expect("sound");
        assert_eq!(bytes, [7; PAGE_BYTES], "leaf {leaf}");
    }
}

#[test]
fn promoted_clone_lets_its_origin_go() {
    let mut bed = Bed::new();
    for page in (0..600).step_by(8) {
        bed.change(1, page, 8, Some(5));
    }
    let snapshot = bed.snapshot(1);
    let copy = bed.clone_of(1, snapshot);
    bed.change(copy, 10, 5, Some(6));
    let own = bed.snapshot(copy);
    bed.change(copy, 12, 5, Some(7));
    let second = bed.clone_of(copy, own);
    bed.promote(copy);
    assert!(bed.volumes[&copy].origin.is_some(), "a clone depends on it");
    bed.promote(second);
    bed.promote(copy);
    assert!(bed.volumes[&copy].origin.is_none());
    assert!(bed.delete(1), "nothing depends on it");
    bed.reopen();
    bed.check();
    bed.check_pool();
    bed.empty();
}

/// A repair copies a page that the other leg's clone still shares with its origin.
#[test]
fn copied_page_of_a_clone_is_freed_with_it() {
    let mut bed = Bed::new();
    bed.change(1, 0, 8, Some(5));
    let snapshot = bed.snapshot(1);
    let copy = bed.clone_of(1, snapshot);
    bed.op += 1;
    let handle = bed.volumes[&copy].handle;
    let shared = SliceRequest::Copy {
        page: PageNo(3),
        births: vec![Epoch(1)],
        data: vec![5; PAGE_BYTES].into(),
        stamp: Stamp {
            epoch: Epoch(snapshot),
            op: bed.op,
            open_ops: 0,
        },
    };
    let copied = execute(&mut bed.session, handle, Epoch(snapshot), shared);
    assert!(matches!(copied, ExecuteOutcome::Done(Ok(_))), "{copied:?}");
    bed.check();
    bed.change(copy, 3, 1, Some(6));
    bed.check();
    bed.empty();
}

#[test]
fn clone_of_unknown_snapshot_is_refused() {
    let mut bed = Bed::new();
    let snapshot = bed.snapshot(1);
    let source = |origin, snapshot| CloneSource {
        origin: slice(origin),
        snapshot: Epoch(snapshot),
    };
    let size = PAGES * PAGE;
    let unknown = bed.pool.create_clone(slice(2), source(1, 99), size);
    assert!(matches!(unknown, Err(ObjectError::UnknownSnapshot { .. })));
    let missing = bed.pool.create_clone(slice(2), source(9, 1), size);
    assert!(matches!(missing, Err(ObjectError::Unknown(_))));
    let smaller = bed.pool.create_clone(slice(2), source(1, snapshot), PAGE);
    assert!(matches!(smaller, Err(ObjectError::Shrinks { .. })));
    let taken = bed.pool.create_clone(slice(1), source(1, snapshot), size);
    assert!(matches!(taken, Err(ObjectError::Exists(_))));
}

/// Writes to a slice until the pool is full.
fn fill_pool(bed: &mut Bed, number: u128) {
    const CHUNK: usize = 32 * PAGE_BYTES;
    bed.pool
        .create(slice(number), POOL_BYTES as u64)
        .expect("room");
    let handle = bed.pool.handle(slice(number)).expect("the slice");
    for offset in (0..POOL_BYTES as u64).step_by(CHUNK) {
        bed.op += 1;
        let stamp = Stamp {
            epoch: Epoch(1),
            op: bed.op,
            open_ops: 0,
        };
        for attempt in 0.. {
            while bed.pool.maintain().expect("sound") {}
            let session = &mut bed.session;
            let legs = &mut [LegSession { session, handle }];
            let written = write(legs, offset, &[9; CHUNK], stamp);
            match written.map_err(|failure| failure.cause) {
                Ok(()) => break,
                Err(StoreError::TimedOut) if attempt < 10 => {}
                Err(StoreError::NoSpace | StoreError::TimedOut) => return,
                Err(cause) => panic!("{cause}"),
            }
        }
    }
    panic!("the pool is not full");
}

#[test]
fn clone_that_a_full_pool_refuses_is_deleted() {
    // The owner has frames of its own for fewer leaves.
    const LEAVES: u64 = 600;
    let mut bed = Bed::new();
    let (size, source) = bed.snapshot_of_leaves(LEAVES);
    fill_pool(&mut bed, 5);
    let created = bed.pool.create_clone(slice(2), source, size);
    let refused = created.and_then(|()| {
        while !bed.pool.fill_clone(slice(2))?.is_complete() {}
        Ok(())
    });
    assert!(
        matches!(refused, Err(ObjectError::Store(StoreError::NoSpace))),
        "{refused:?}"
    );
    bed.reopen();
    bed.pool.delete(slice(2)).expect("it is there");
    bed.pool.delete(slice(5)).expect("it is there");
    for _ in 0..200 {
        bed.pool.checkpoint().expect("sound");
        while bed.pool.maintain().expect("sound") {}
    }
    bed.pool.create_clone(slice(3), source, size).expect("room");
    bed.fill(3);
    for number in [1, 3] {
        let handle = bed.pool.handle(slice(number)).expect("filled");
        for leaf in 0..LEAVES {
            let mut bytes = [0; PAGE_BYTES];
            let offset = leaf * 512 * PAGE;
            let read = bed
                .session
                .read(&handle, offset, &mut bytes, Epoch(u32::MAX));
            read.expect("sound");
            assert_eq!(bytes, [7; PAGE_BYTES], "leaf {leaf} of {number}");
        }
    }
    bed.check_pool();
}
