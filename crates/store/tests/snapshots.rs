//! Snapshots of slices: random histories against a model that keeps each version.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{SEEN_BY_SLICE, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fuzz::Random;
use pagemesh_pmem::MappedMedia;
use pagemesh_store::check::{CheckOptions, check};
use pagemesh_store::pool::{ObjectError, Pool, format};
use pagemesh_store::pool_mapping::{Handle, StoreError};
use pagemesh_store::session::{LegSession, Session, clear, write};
use pagemesh_store::test_api::PoolInternals;
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(7));
const PAGE: u64 = PAGE_BYTES as u64;
const POOL_BYTES: usize = 16 << 20;
const PAGES: u64 = 1100;

type Contents = BTreeMap<u64, Vec<u8>>;

/// A pool with a session, and its model.
struct Bed {
    media: Arc<MappedMedia>,
    pool: Pool<MappedMedia>,
    session: Session<MappedMedia>,
    handle: Handle,
    op: u64,
    /// The epoch of the next change.
    epoch: u32,
    live: Contents,
    snapshots: BTreeMap<Epoch, Contents>,
}

impl Bed {
    fn new() -> Bed {
        let media = {
            let file = tempfile::tempfile().expect("a file");
            file.set_len(POOL_BYTES as u64).expect("room");
            Arc::new(MappedMedia::new(file, POOL_BYTES).expect("memory"))
        };
        format(&*media, Uuid::from_u128(1)).expect("a pool");
        let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
        pool.create(SLICE, PAGES * PAGE).expect("room");
        let (session, handle) = open_session(&mut pool);
        Bed {
            media,
            pool,
            session,
            handle,
            op: 0,
            epoch: 1,
            live: Contents::new(),
            snapshots: BTreeMap::new(),
        }
    }

    fn stamp(&mut self) -> Stamp {
        self.op += 1;
        Stamp {
            epoch: Epoch(self.epoch),
            op: self.op,
            open_ops: 0,
        }
    }

    /// Runs an operation, and lets the owner work when it needs room.
    fn retry(&mut self, mut run: impl FnMut(&mut Bed) -> Result<(), StoreError>) {
        for _ in 0..100 {
            while self.pool.maintain().expect("sound") {}
            match run(self) {
                Err(StoreError::TimedOut) => {}
                result => return result.expect("room"),
            }
        }
        panic!("the owner makes no room");
    }

    fn write(&mut self, at: u64, data: &[u8]) {
        let stamp = self.stamp();
        self.retry(|bed| {
            let (session, handle) = (&mut bed.session, bed.handle);
            let written = write(&mut [LegSession { session, handle }], at, data, stamp);
            written.map_err(|failure| failure.cause)
        });
        let first = at / PAGE;
        for page in first..(at + data.len() as u64).div_ceil(PAGE) {
            let bytes = self.live.entry(page).or_insert_with(|| vec![0; PAGE_BYTES]);
            for (index, byte) in bytes.iter_mut().enumerate() {
                let offset = page * PAGE + index as u64;
                if let Some(new) = offset.checked_sub(at).and_then(|it| data.get(it as usize)) {
                    *byte = *new;
                }
            }
        }
    }

    fn clear(&mut self, page: u64, count: u64) {
        let stamp = self.stamp();
        self.retry(|bed| {
            let (session, handle) = (&mut bed.session, bed.handle);
            let legs = &mut [LegSession { session, handle }];
            let cleared = clear(legs, page * PAGE, count * PAGE, stamp);
            cleared.map_err(|failure| failure.cause)
        });
        self.live.retain(|at, _| !(page..page + count).contains(at));
    }

    fn snapshot(&mut self) -> Epoch {
        self.epoch += 1;
        let snapshot = Epoch(self.epoch);
        self.pool.prepare_snapshot(SLICE, snapshot).expect("room");
        self.snapshots.insert(snapshot, self.live.clone());
        snapshot
    }

    fn drop_snapshot(&mut self, snapshot: Epoch) {
        self.pool.drop_snapshots(SLICE, &[snapshot]).expect("room");
        self.snapshots.remove(&snapshot);
    }

    /// The owner dies, and the pool is opened again.
    fn reopen(&mut self) {
        let (mut pool, found) = Pool::open(self.media.clone(), self.media.clone()).expect("sound");
        assert!(!found.is_damaged(), "{found:?}");
        (self.session, self.handle) = open_session(&mut pool);
        self.pool = pool;
    }

    fn read_snapshot(&mut self, snapshot: Epoch) -> Contents {
        let mut found = Contents::new();
        for leaf in 0..PAGES.div_ceil(512) {
            let frames = self
                .pool
                .version_leaf(SLICE, snapshot, leaf)
                .expect("sound");
            for index in 0..512 {
                let page = leaf * 512 + index as u64;
                if let Some(frame) = frames.frame(index) {
                    let mut bytes = [0; PAGE_BYTES];
                    let mapping = self.pool.mapping();
                    mapping
                        .read_version(frame, PageNo(page), &mut bytes)
                        .expect("sound");
                    found.insert(page, bytes.to_vec());
                }
            }
        }
        found
    }

    fn check(&mut self) {
        let listed = self.pool.snapshots_of(SLICE).expect("the slice");
        assert!(listed.iter().eq(self.snapshots.keys()), "{listed:?}");
        for snapshot in listed {
            let found = self.read_snapshot(snapshot);
            assert_same(&found, &self.snapshots[&snapshot], snapshot);
        }
        self.check_counts();
    }

    /// The pages by the first and last snapshot that see them.
    fn seen_pages(&mut self) -> BTreeMap<(Epoch, Epoch), u64> {
        let mut seen = BTreeMap::new();
        let mut from = Some(PageNo(0));
        while let Some(page) = from {
            let list = self.pool.count_seen_pages(SLICE, page).expect("sound");
            for run in list.runs {
                *seen.entry((run.first, run.last)).or_default() += run.pages;
            }
            from = list.next;
        }
        seen
    }

    /// Compares the counts of pages with the contents of the model.
    fn check_counts(&mut self) {
        let seen = self.seen_pages();
        let sum = |is_meant: &dyn Fn(Epoch, Epoch) -> bool| -> u64 {
            let meant = seen
                .iter()
                .filter(|((first, last), _)| is_meant(*first, *last));
            meant.map(|(_, pages)| pages).sum()
        };
        assert_eq!(
            sum(&|_, last| last == SEEN_BY_SLICE),
            self.live.len() as u64
        );
        for (snapshot, contents) in &self.snapshots {
            let found = sum(&|first, last| first <= *snapshot && *snapshot <= last);
            assert_eq!(found, contents.len() as u64, "pages of snapshot {snapshot}");
        }
    }

    /// Checks the pool on a copy: each frame in use belongs to a table or to the log.
    fn check_pool(&mut self) {
        self.pool.checkpoint().expect("sound");
        let named = self.pool.mapped_frames().expect("sound");
        assert_eq!(named, self.pool.used_frames(), "frames in use");
        let options = &mut CheckOptions {
            is_ordered: true,
            reads_data: true,
            progress: &mut |_, _| {},
        };
        let copy = self.media.overlay().expect("memory");
        let (report, _) = check(&copy, options).expect("a pool");
        assert!(report.is_sound(), "{report:?}");
    }
}

fn assert_same(found: &Contents, expected: &Contents, snapshot: Epoch) {
    let pages: Vec<_> = found.keys().chain(expected.keys()).collect();
    for page in pages {
        assert!(
            found.get(page) == expected.get(page),
            "page {page} of snapshot {snapshot}: found {:?}, expected {:?}",
            found.get(page).map(|bytes| bytes[0]),
            expected.get(page).map(|bytes| bytes[0]),
        );
    }
}

fn open_session(pool: &mut Pool<MappedMedia>) -> (Session<MappedMedia>, Handle) {
    let number = pool.open_session(1, 1).expect("a session");
    let session = Session::new(pool.mapping().clone(), number);
    let session = session.with_owner_wait(std::time::Duration::ZERO);
    (session, pool.handle(SLICE).expect("the slice"))
}

fn run_history(seed: u64, steps: u64) {
    let mut bed = Bed::new();
    let mut random = Random::new(seed);
    for step in 0..steps {
        let page = random.draw() % (PAGES - 8);
        let tag = step as u8;
        match random.below(40) {
            0..=17 => bed.write(page * PAGE, &vec![tag; PAGE_BYTES * (1 + random.below(3))]),
            18..=27 => bed.write(page % 20 * PAGE + 100, &[tag; 77]),
            28..=30 => bed.clear(page, 1 + random.draw() % 7),
            31..=34 => drop(bed.snapshot()),
            35..=37 => {
                let at = random.below(bed.snapshots.len().max(1));
                if let Some(&snapshot) = bed.snapshots.keys().nth(at) {
                    bed.drop_snapshot(snapshot);
                }
            }
            38 => bed.reopen(),
            _ => drop(bed.pool.maintain().expect("sound")),
        }
        if step % 50 == 0 {
            bed.check();
        }
    }
    bed.check();
    bed.check_pool();
    for snapshot in bed.snapshots.keys().copied().collect::<Vec<_>>() {
        bed.drop_snapshot(snapshot);
    }
    while bed.pool.maintain().expect("sound") {}
    bed.check_pool();
    let live = bed.live.len() as u64;
    bed.pool.delete(SLICE).expect("it is there");
    bed.pool.checkpoint().expect("sound");
    while bed.pool.maintain().expect("sound") {}
    bed.check_pool();
    assert!(live > 0, "the history wrote nothing");
}

#[test]
fn snapshots_see_contents_of_their_time() {
    for seed in 0..8 {
        run_history(seed, 400);
    }
}

#[test]
fn drop_frees_pages_that_one_snapshot_sees() {
    let mut bed = Bed::new();
    bed.write(0, &vec![1; PAGE_BYTES * 6]);
    let first = bed.snapshot();
    bed.write(0, &vec![2; PAGE_BYTES * 4]);
    let second = bed.snapshot();
    bed.write(2 * PAGE, &vec![3; PAGE_BYTES * 4]);
    let seen = bed.seen_pages();
    assert_eq!(seen.get(&(first, first)), Some(&4));
    assert_eq!(seen.get(&(second, second)), Some(&2));
    assert_eq!(seen.get(&(first, second)), Some(&2));
    let before = bed.pool.usage().free_bytes;
    bed.drop_snapshot(first);
    while bed.pool.maintain().expect("sound") {}
    bed.pool.checkpoint().expect("sound");
    // The versions moved into blocks meanwhile, which take frames of their own.
    bed.check();
    bed.check_pool();
    let after = bed.pool.usage().free_bytes;
    assert!(
        after + 4 * PAGE > before,
        "{after} bytes free, {before} before"
    );
    assert_eq!(bed.seen_pages().get(&(second, second)), Some(&4));
}

#[test]
fn snapshot_order_and_unknown_snapshot_are_refused() {
    let mut bed = Bed::new();
    let snapshot = bed.snapshot();
    assert!(bed.pool.prepare_snapshot(SLICE, snapshot).is_ok());
    let older = bed.pool.prepare_snapshot(SLICE, Epoch(1));
    assert!(
        matches!(older, Err(ObjectError::BadSnapshot { .. })),
        "{older:?}"
    );
    let unknown = bed.pool.version_leaf(SLICE, Epoch(9), 0);
    assert!(matches!(unknown, Err(ObjectError::UnknownSnapshot { .. })));
    bed.pool.raise_epoch(SLICE, Epoch(10)).expect("newer");
    let fenced = bed.pool.prepare_snapshot(SLICE, Epoch(9));
    assert!(matches!(fenced, Err(ObjectError::StaleEpoch { .. })));
    bed.pool.resize(SLICE, (PAGES + 600) * PAGE).expect("more");
    bed.check();
}

#[test]
fn full_pool_drops_snapshots_and_takes_writes_again() {
    let mut bed = Bed::new();
    let mut snapshots = Vec::new();
    let is_full = 'filling: loop {
        snapshots.push(bed.snapshot());
        for page in 0..PAGES {
            let stamp = bed.stamp();
            let data = vec![snapshots.len() as u8; PAGE_BYTES];
            let mut tries = 0;
            loop {
                while bed.pool.maintain().expect("sound") {}
                let (session, handle) = (&mut bed.session, bed.handle);
                let legs = &mut [LegSession { session, handle }];
                match write(legs, page * PAGE, &data, stamp).map_err(|failure| failure.cause) {
                    Ok(()) => break,
                    Err(StoreError::TimedOut) if tries < 10 => tries += 1,
                    Err(StoreError::NoSpace | StoreError::TimedOut) => break 'filling true,
                    Err(cause) => panic!("{cause}"),
                }
            }
            bed.live.insert(page, data);
        }
    };
    assert!(
        is_full && snapshots.len() > 2,
        "{} snapshots",
        snapshots.len()
    );
    bed.check();
    for snapshot in snapshots {
        bed.drop_snapshot(snapshot);
    }
    for _ in 0..2000 {
        bed.pool.maintain().expect("sound");
    }
    bed.check_pool();
    bed.write(0, &[9; PAGE_BYTES]);
}

#[test]
fn many_versions_of_one_leaf_are_merged_in_steps() {
    let mut bed = Bed::new();
    for round in 0..5 {
        bed.snapshot();
        for page in 0..512 {
            bed.write(page * PAGE, &vec![round; PAGE_BYTES]);
        }
    }
    bed.pool.merge_versions_soon();
    while bed.pool.maintain().expect("sound") {}
    bed.check();
    bed.reopen();
    bed.check();
    bed.check_pool();
}

#[test]
fn ten_thousand_snapshots_of_one_slice_are_kept() {
    const COUNT: u64 = 10_000;
    let mut bed = Bed::new();
    for number in 0..COUNT {
        if number % 40 == 0 {
            let round = number / 40;
            bed.write(round % 8 * PAGE, &[round as u8 + 1; PAGE_BYTES]);
        }
        bed.snapshot();
        while bed.pool.maintain().expect("sound") {}
    }
    bed.reopen();
    let listed = bed.pool.snapshots_of(SLICE).expect("the slice");
    assert_eq!(listed.len() as u64, COUNT);
    assert!(listed.iter().eq(bed.snapshots.keys()));
    for &snapshot in listed.iter().step_by(97) {
        let found = bed.read_snapshot(snapshot);
        assert_same(&found, &bed.snapshots[&snapshot], snapshot);
    }
    for dropped in listed[1..].chunks(1000) {
        bed.pool.drop_snapshots(SLICE, dropped).expect("room");
    }
    bed.snapshots.retain(|snapshot, _| *snapshot == listed[0]);
    while bed.pool.maintain().expect("sound") {}
    bed.check();
    bed.check_pool();
}
