//! Crash enumeration of one write that goes to two pools at once and is committed by one fence.
//! Both media are recorded. Crash points are before each fence and after the last one. At each,
//! images of both media are built independently and recovered, and every pair of images is
//! compared:
//!
//! - each page is old or new as a whole, and new in both pools once the write was acknowledged;
//! - where the pools differ, their lists of operations in flight say which pool is newer, so that
//!   the volume's recovery can make them equal;
//! - both pools can be written further together.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{InFlightOp, Stamp, TransactionPart};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::test_api::RecordedMedium;
use pagemesh_pmem::{CrashPoint, Image, Recorder};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::session::{LegSession, Session, write, write_numbered};
use pagemesh_store::transaction::transact;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const POOL_BYTES: usize = 2 << 20;
const SLICE: SliceId = SliceId(Uuid::from_u128(1));
const PAGES: usize = 12;
const SIZE: usize = PAGES * PAGE_BYTES;
/// Images of one medium at one crash point; if more are legal, they are sampled.
const IMAGES_MAX: u64 = 40;
/// The base's own operations have lower numbers.
const FIRST_OP: u64 = 100;

/// Two media, and the crash points of both.
struct MediaPair {
    media: [Recorder; 2],
    crash_points: Mutex<Vec<[CrashPoint; 2]>>,
}

impl MediaPair {
    fn crash_point(&self) -> [CrashPoint; 2] {
        [0, 1].map(|at| self.media[at].crash_point())
    }

    fn record_crash_point(&self) {
        let moment = self.crash_point();
        self.crash_points
            .lock()
            .expect("no panic inside")
            .push(moment);
    }

    fn recorded_count(&self) -> usize {
        self.crash_points.lock().expect("no panic inside").len()
    }
}

/// One medium of the pair.
struct PairedMedium {
    pair: Arc<MediaPair>,
    at: usize,
}

impl RecordedMedium for PairedMedium {
    fn recorder(&self) -> &Recorder {
        &self.pair.media[self.at]
    }
    /// One instruction fences both media, so there is one crash point before it.
    fn before_fence(&self) {
        self.pair.record_crash_point();
    }
}

/// Two pools, a session of each, and the slice's contents in each pool after every operation so
/// far.
struct TwoPools {
    media_pair: Arc<MediaPair>,
    pools: [Pool<PairedMedium>; 2],
    sessions: [Session<PairedMedium>; 2],
    contents_after: [Vec<Vec<u8>>; 2],
    op: u64,
    /// Pages that the last operation changes as a whole.
    atomic_pages: Vec<usize>,
}

impl TwoPools {
    fn open(media: [Recorder; 2], held: [Vec<u8>; 2], op: u64) -> TwoPools {
        let moments = Mutex::default();
        let both = Arc::new(MediaPair {
            media,
            crash_points: moments,
        });
        let mut pools = [0, 1].map(|at| {
            let half = Arc::new(PairedMedium {
                pair: both.clone(),
                at,
            });
            let opened = Pool::open(half.clone(), half);
            opened.expect("a crash leaves a sound pool").0
        });
        let sessions = pools.each_mut().map(|pool| {
            let number = pool.open_session(1, 1).expect("a session");
            Session::new(pool.mapping().clone(), number)
        });
        TwoPools {
            media_pair: both,
            pools,
            sessions,
            contents_after: held.map(|bytes| vec![bytes]),
            op,
            atomic_pages: Vec::new(),
        }
    }

    /// Two new pools with a slice; its first `pages` pages are written.
    fn format(pages: usize) -> TwoPools {
        let media = [9, 10].map(|id| {
            let media = Recorder::from_image(Image::filled(POOL_BYTES, 0x5555_aaaa_1234_8765));
            format(&media, Uuid::from_u128(id)).expect("a pool");
            media
        });
        let mut world = TwoPools::open(media, [vec![0; SIZE], vec![0; SIZE]], 0);
        for pool in &mut world.pools {
            pool.create(SLICE, SIZE as u64).expect("an object");
        }
        for page in 0..pages {
            world.write(page * PAGE_BYTES, &[page as u8 + 1; PAGE_BYTES], 0);
            if page == pages / 2 {
                for pool in &mut world.pools {
                    while pool.maintain().expect("a sound pool") {}
                }
            }
        }
        world
    }

    fn stamp(&mut self, open: u32) -> Stamp {
        self.op += 1;
        Stamp {
            epoch: Epoch(0),
            op: self.op,
            open_ops: open,
        }
    }

    /// One write to both pools.
    fn write(&mut self, offset: usize, data: &[u8], open: u32) {
        let stamp = self.stamp(open);
        let [one, other] = &mut self.sessions;
        let handles = [0, 1].map(|at| self.pools[at].handle(SLICE).expect("the slice"));
        let mut members = [(one, handles[0]), (other, handles[1])]
            .map(|(session, handle)| LegSession { session, handle });
        write(&mut members, offset as u64, data, stamp).expect("a write");
        self.record_contents(offset, data, &[true, true]);
    }

    /// The same write as a direct client makes it, which takes its number under the pools' lock
    /// words.
    fn write_with_number(&mut self, offset: usize, data: &[u8]) {
        let stamp = self.stamp(0);
        let [one, other] = &mut self.sessions;
        let handles = [0, 1].map(|at| self.pools[at].handle(SLICE).expect("the slice"));
        let mut members = [(one, handles[0]), (other, handles[1])]
            .map(|(session, handle)| LegSession { session, handle });
        let written = write_numbered(&mut members, offset as u64, data, stamp.epoch, || stamp);
        written.expect("a write");
        self.record_contents(offset, data, &[true, true]);
    }

    /// One transaction in both pools: each run of pages is written with the byte, or cleared.
    fn transact(&mut self, runs: &[(usize, usize, Option<u8>)]) {
        let stamp = self.stamp(0);
        let part = |&(page, pages, byte): &(usize, usize, Option<u8>)| {
            let (offset, len) = ((page * PAGE_BYTES) as u64, pages * PAGE_BYTES);
            match byte {
                Some(byte) => TransactionPart::Write {
                    offset,
                    data: vec![byte; len].into(),
                },
                None => TransactionPart::Clear {
                    offset,
                    len: len as u64,
                },
            }
        };
        let parts: Vec<TransactionPart> = runs.iter().map(part).collect();
        let [one, other] = &mut self.sessions;
        let handles = [0, 1].map(|at| self.pools[at].handle(SLICE).expect("the slice"));
        let mut members = [(one, handles[0]), (other, handles[1])]
            .map(|(session, handle)| LegSession { session, handle });
        transact(&mut members, &parts, stamp).expect("a transaction");
        for held in &mut self.contents_after {
            let mut bytes = held.last().expect("the base").clone();
            for &(page, pages, byte) in runs {
                bytes[page * PAGE_BYTES..][..pages * PAGE_BYTES].fill(byte.unwrap_or(0));
            }
            held.push(bytes);
        }
        let pages = runs.iter().flat_map(|&(page, pages, _)| page..page + pages);
        self.atomic_pages = pages.collect();
    }

    /// A write that reached the first pool only.
    fn write_first(&mut self, offset: usize, data: &[u8]) {
        let stamp = self.stamp(0);
        let handle = self.pools[0].handle(SLICE).expect("the slice");
        let session = &mut self.sessions[0];
        write(
            &mut [LegSession { session, handle }],
            offset as u64,
            data,
            stamp,
        )
        .expect("a write");
        self.record_contents(offset, data, &[true, false]);
    }

    fn record_contents(&mut self, offset: usize, data: &[u8], reached: &[bool; 2]) {
        for (held, reached) in self.contents_after.iter_mut().zip(reached) {
            let mut bytes = held.last().expect("the base").clone();
            if *reached {
                bytes[offset..][..data.len()].copy_from_slice(data);
            }
            held.push(bytes);
        }
    }

    fn read(&mut self, at: usize) -> Vec<u8> {
        let handle = self.pools[at].handle(SLICE).expect("the slice");
        let mut bytes = vec![0; SIZE];
        self.sessions[at]
            .read(&handle, 0, &mut bytes, Epoch(99))
            .expect("nothing is damaged");
        bytes
    }
}

/// The contents of a recovered pool, and its operations in flight.
struct RecoveredPool {
    bytes: Vec<u8>,
    in_flight: Vec<InFlightOp>,
}

fn recover(image: Image) -> RecoveredPool {
    let media = Arc::new(Recorder::unrecorded(image));
    let (mut pool, _) = Pool::open(media.clone(), media).expect("a crash leaves a sound pool");
    let number = pool.open_session(1, 1).expect("a session");
    let mut session = Session::new(pool.mapping().clone(), number);
    let handle = pool.handle(SLICE).expect("the slice");
    let mut bytes = vec![0; SIZE];
    session
        .read(&handle, 0, &mut bytes, Epoch(99))
        .expect("nothing is damaged");
    let listed = pool.in_flight(SLICE).expect("the slice");
    RecoveredPool {
        bytes,
        in_flight: listed.expect("few enough to list"),
    }
}

impl RecoveredPool {
    fn page(&self, page: usize) -> &[u8] {
        &self.bytes[page * PAGE_BYTES..][..PAGE_BYTES]
    }

    /// The newest operation on the page that may be missing in the other pool.
    fn newest(&self, page: usize) -> Option<(u32, u64)> {
        let on_page = |entry: &&InFlightOp| {
            let pages = entry.page.0..entry.page.0 + u64::from(entry.count);
            pages.contains(&(page as u64))
        };
        let entries = self.in_flight.iter().filter(on_page);
        entries.map(|entry| (entry.epoch.0, entry.op)).max()
    }
}

/// Images of one medium: no uncertain write, all of them, and subsets.
fn images(point: &CrashPoint) -> Vec<Image> {
    if point.count() <= IMAGES_MAX {
        return (0..point.count()).map(|index| point.image(index)).collect();
    }
    let sampled = (0..IMAGES_MAX - 2).map(|seed| point.sample(seed));
    [point.image(0), point.all_persisted()]
        .into_iter()
        .chain(sampled)
        .collect()
}

/// Counts of the checks.
#[derive(Default)]
struct PairCounts {
    pairs: u64,
    differing: u64,
}

/// Checks the images of one crash point. `certain` operations were acknowledged.
fn check(
    world: &TwoPools,
    moment: &[CrashPoint; 2],
    certain: usize,
    what: &str,
    tally: &mut PairCounts,
) {
    let images = [0, 1].map(|at| images(&moment[at]));
    let found = images
        .each_ref()
        .map(|images| images.iter().cloned().map(recover).collect::<Vec<_>>());
    let versions = [0, 1].map(|at| {
        let held = &world.contents_after[at];
        let of_image = |(number, found): (usize, &RecoveredPool)| {
            (0..PAGES)
                .map(|page| matching_operation(held, certain, found, page))
                .collect::<Option<Vec<_>>>()
                .unwrap_or_else(|| {
                    panic!("{what}: pool {at}, image {number}: a page is neither old nor new")
                })
        };
        found[at]
            .iter()
            .enumerate()
            .map(of_image)
            .collect::<Vec<_>>()
    });
    for (at, images) in versions.iter().enumerate() {
        for (number, pages) in images.iter().enumerate() {
            let mut whole = world
                .atomic_pages
                .iter()
                .map(|&page| pages[page] < operations(world));
            let first = whole.next();
            assert!(
                whole.all(|is_old| Some(is_old) == first),
                "{what}: pool {at}, image {number}: only a part of a transaction"
            );
        }
    }
    for (i, one) in found[0].iter().enumerate() {
        for (j, other) in found[1].iter().enumerate() {
            let pages = versions[0][i].iter().zip(&versions[1][j]);
            for (page, (a, b)) in pages.enumerate() {
                let order = one.newest(page).cmp(&other.newest(page));
                assert!(
                    a == b || order == a.cmp(b),
                    "{what}: images {i} and {j}: page {page} is of operations {a} and {b}, and the lists say {order:?}"
                );
                tally.differing += u64::from(a != b);
            }
            tally.pairs += 1;
        }
    }
    let last = images[0].len().max(images[1].len());
    for turn in 0..last {
        let at = |which: usize, turn: usize| images[which][turn % images[which].len()].clone();
        write_after_recovery([at(0, turn), at(1, last - 1 - turn)]);
    }
}

/// The number of operations so far.
fn operations(world: &TwoPools) -> usize {
    world.contents_after[0].len() - 1
}

/// The first operation after which the page had the found bytes; none if it never had them, or only
/// before the certain operations.
fn matching_operation(
    held: &[Vec<u8>],
    certain: usize,
    found: &RecoveredPool,
    page: usize,
) -> Option<usize> {
    let of = |bytes: &Vec<u8>| bytes[page * PAGE_BYTES..][..PAGE_BYTES] == *found.page(page);
    held[certain..].iter().any(of).then(|| {
        let first = held.iter().position(of);
        first.expect("it is there")
    })
}

/// Recovers both pools and writes to them together.
fn write_after_recovery(images: [Image; 2]) {
    let media = images.map(Recorder::unrecorded);
    let mut world = TwoPools::open(media, [vec![0; SIZE], vec![0; SIZE]], 1000);
    let fresh: Vec<u8> = (0..SIZE).map(|i| (i / 64) as u8 | 1).collect();
    world.write(0, &fresh, 0);
    world.write(PAGE_BYTES - 8, &[0xab; 16], 0);
    for at in 0..2 {
        let found = world.read(at);
        assert!(
            found == world.contents_after[at][2],
            "pool {at} lacks the writes after recovery"
        );
    }
}

/// Runs `prepare` and then a write on two pools that were equal before, and checks a crash at every
/// crash point of the write.
fn enumerate(
    pages: usize,
    what: &str,
    prepare: impl Fn(&mut TwoPools),
    run: impl Fn(&mut TwoPools),
) -> PairCounts {
    let base = TwoPools::format(pages);
    let images = base.media_pair.crash_point().map(|point| point.image(0));
    let held = base
        .contents_after
        .map(|mut held| held.pop().expect("the base"));
    let mut world = TwoPools::open(images.map(Recorder::from_image), held, FIRST_OP);
    prepare(&mut world);
    let prepared = world.media_pair.recorded_count();
    run(&mut world);
    let mut tally = PairCounts::default();
    let moments = std::mem::take(
        &mut *world
            .media_pair
            .crash_points
            .lock()
            .expect("no panic inside"),
    );
    let during = &moments[prepared..];
    assert!(!during.is_empty(), "{what}: a write has a fence");
    let operations = operations(&world);
    for (number, moment) in during.iter().enumerate() {
        let what = format!("{what}, before fence {number}");
        check(&world, moment, operations - 1, &what, &mut tally);
    }
    let what = format!("{what}, acknowledged");
    check(
        &world,
        &world.media_pair.crash_point(),
        operations,
        &what,
        &mut tally,
    );
    tally
}

/// The pools must have differed in some image pair: otherwise the images were too few.
fn check_write(pages: usize, offset: usize, len: usize) {
    let what = format!("{len} bytes at {offset} over {pages} pages");
    let write = |world: &mut TwoPools| world.write(offset, &vec![0x80; len], 0);
    let tally = enumerate(pages, &what, |_| (), write);
    assert!(tally.pairs >= 1000, "{what}: {} pairs", tally.pairs);
    assert!(tally.differing > 0, "{what}: the pools never differed");
}

#[test]
fn whole_page_is_old_or_new_in_each_pool() {
    check_write(4, PAGE_BYTES, PAGE_BYTES);
}

#[test]
fn first_page_links_nodes_in_each_pool() {
    check_write(0, 2 * PAGE_BYTES, PAGE_BYTES);
}

#[test]
fn partial_page_is_merged_in_each_pool() {
    check_write(4, PAGE_BYTES + 100, 300);
}

#[test]
fn partial_page_is_merged_from_first_pool() {
    let write = |world: &mut TwoPools| world.write_with_number(PAGE_BYTES + 100, &[0x80; 300]);
    let tally = enumerate(4, "a part with a number", |_| (), write);
    assert!(tally.pairs >= 1000 && tally.differing > 0);
}

/// The write also makes the rest of the page equal in both pools.
#[test]
fn next_partial_write_equalizes_lagging_pool() {
    let mut world = TwoPools::format(4);
    world.write_first(PAGE_BYTES, &[0x70; PAGE_BYTES]);
    assert_ne!(world.read(0), world.read(1));
    world.write_with_number(PAGE_BYTES + 100, &[0x80; 300]);
    let found = world.read(0);
    assert_eq!(
        found,
        world.contents_after[0][world.contents_after[0].len() - 1]
    );
    assert!(found == world.read(1), "the pools differ");
}

#[test]
fn multi_page_record_is_atomic_in_each_pool() {
    check_write(4, 2 * PAGE_BYTES, 3 * PAGE_BYTES);
}

#[test]
fn multi_record_write_keeps_pages_atomic() {
    check_write(4, PAGE_BYTES / 2, 3 * PAGE_BYTES);
}

/// As [`check_write`], for a transaction.
fn check_transaction(pages: usize, runs: &[(usize, usize, Option<u8>)]) {
    let what = format!("{runs:?} over {pages} pages");
    let tally = enumerate(pages, &what, |_| (), |world| world.transact(runs));
    assert!(tally.pairs >= 1000, "{what}: {} pairs", tally.pairs);
    assert!(tally.differing > 0, "{what}: the pools never differed");
}

#[test]
fn transaction_is_all_or_nothing_in_each_pool() {
    check_transaction(
        8,
        &[(1, 1, Some(0x80)), (4, 2, Some(0x81)), (7, 1, Some(0x82))],
    );
}

#[test]
fn transaction_clears_and_writes_atomically_in_each_pool() {
    check_transaction(8, &[(6, 2, None), (0, 1, Some(0x80)), (3, 1, None)]);
}

#[test]
fn first_transaction_links_nodes_in_each_pool() {
    check_transaction(0, &[(2, 1, Some(0x80)), (9, 3, Some(0x81))]);
}

/// The data of the first write stays in one pool only. In every outcome of the next write its stamp
/// says that the first one is still open.
#[test]
fn earlier_one_pool_write_stays_in_flight() {
    let missed = |world: &mut TwoPools| world.write_first(PAGE_BYTES, &[0x70; PAGE_BYTES]);
    let next = |world: &mut TwoPools| world.write(3 * PAGE_BYTES, &[0x80; PAGE_BYTES], 1);
    let tally = enumerate(4, "a write after one that was missed", missed, next);
    assert!(
        tally.differing > tally.pairs,
        "page 1 differs in every pair, page 3 in some"
    );
}
