//! Crash enumeration of one write that goes to two pools at once and is
//! committed by one fence. Both media are recorded; for every moment before a
//! fence, and for the one after the last, images of each are built
//! independently of the other's and recovered, and every pair of them is
//! compared:
//!
//! - each page is old or new as a whole, and new in both once the write was
//!   acknowledged;
//! - where the pools differ, their lists of operations in flight say which of
//!   them is newer, so that settling can make them equal;
//! - both go on together.

use pagemesh_base::checksum::Sums;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{InFlight, Part, Stamp};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{CrashPoint, Fenced, Image, Media, Recorder, Unfenced};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::session::{Member, Session, write, write_numbered};
use pagemesh_store::transaction::transact;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const POOL_BYTES: usize = 2 << 20;
const SLICE: SliceId = SliceId(Uuid::from_u128(1));
const PAGES: usize = 12;
const SIZE: usize = PAGES * PAGE_BYTES;
/// Images of one medium at one moment; where there are more, they are sampled.
const IMAGES_MAX: u64 = 40;
/// The base's own operations have lower numbers.
const FIRST_OP: u64 = 100;

/// Two media, and what a crash may leave of both at every moment.
struct Both {
    media: [Recorder; 2],
    moments: Mutex<Vec<[CrashPoint; 2]>>,
}

impl Both {
    fn moment(&self) -> [CrashPoint; 2] {
        [0, 1].map(|at| self.media[at].crash_point())
    }

    fn note(&self) {
        let moment = self.moment();
        self.moments.lock().expect("no panic inside").push(moment);
    }

    fn noted(&self) -> usize {
        self.moments.lock().expect("no panic inside").len()
    }
}

/// One of them.
struct Half {
    both: Arc<Both>,
    at: usize,
}

impl Half {
    fn media(&self) -> &Recorder {
        &self.both.media[self.at]
    }
}

impl Media for Half {
    fn len_bytes(&self) -> usize {
        self.media().len_bytes()
    }
    fn read(&self, offset: usize, into: &mut [u8]) {
        self.media().read(offset, into);
    }
    fn load(&self, offset: usize) -> u64 {
        self.media().load(offset)
    }
    fn store(&self, offset: usize, word: u64) {
        self.media().store(offset, word);
    }
    fn swap(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        self.media().swap(offset, old, new)
    }
    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> Unfenced {
        self.media().stream_line(offset, line)
    }
    fn stream_page(targets: &[(&Self, usize)], page: &[u8; PAGE_BYTES]) -> (Sums, Unfenced) {
        let inner: Vec<_> = targets.iter().map(|(h, at)| (h.media(), *at)).collect();
        Recorder::stream_page(&inner, page)
    }
    fn flush(&self, offset: usize, len: usize) -> Unfenced {
        self.media().flush(offset, len)
    }
    fn fence(&self, stores: Unfenced) -> Fenced {
        self.both.note();
        self.media().fence(stores)
    }
    /// One instruction for all, so one moment before it.
    fn fence_each(halves: &[&Self], stores: Unfenced) -> Fenced {
        halves[0].both.note();
        let inner: Vec<_> = halves.iter().map(|half| half.media()).collect();
        Recorder::fence_each(&inner, stores)
    }
}

/// Two pools, a session of each, and what the slice held in each of them after
/// every operation so far.
struct World {
    both: Arc<Both>,
    pools: [Pool<Half>; 2],
    sessions: [Session<Half>; 2],
    held: [Vec<Vec<u8>>; 2],
    op: u64,
    /// Pages that the last operation changes as a whole.
    whole: Vec<usize>,
}

impl World {
    fn open(media: [Recorder; 2], held: [Vec<u8>; 2], op: u64) -> World {
        let moments = Mutex::default();
        let both = Arc::new(Both { media, moments });
        let mut pools = [0, 1].map(|at| {
            let half = Arc::new(Half {
                both: both.clone(),
                at,
            });
            let opened = Pool::open(half.clone(), half);
            opened.expect("a crash leaves a sound pool").0
        });
        let sessions = pools.each_mut().map(|pool| {
            let number = pool.open_session(1, 1).expect("a session");
            Session::new(pool.view().clone(), number)
        });
        World {
            both,
            pools,
            sessions,
            held: held.map(|bytes| vec![bytes]),
            op,
            whole: Vec::new(),
        }
    }

    /// Two new pools with a slice of which the first `pages` were written.
    fn format(pages: usize) -> World {
        let media = [9, 10].map(|id| {
            let media = Recorder::from_image(Image::filled(POOL_BYTES, 0x5555_aaaa_1234_8765));
            format(&media, Uuid::from_u128(id)).expect("a pool");
            media
        });
        let mut world = World::open(media, [vec![0; SIZE], vec![0; SIZE]], 0);
        for pool in &mut world.pools {
            pool.create(SLICE, SIZE as u64).expect("an object");
        }
        for page in 0..pages {
            world.write(page * PAGE_BYTES, &[page as u8 + 1; PAGE_BYTES], 0);
            if page == pages / 2 {
                for pool in &mut world.pools {
                    while pool.tend().expect("a sound pool") {}
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
            open,
        }
    }

    /// One write to both pools.
    fn write(&mut self, offset: usize, data: &[u8], open: u32) {
        let stamp = self.stamp(open);
        let [one, other] = &mut self.sessions;
        let handles = [0, 1].map(|at| self.pools[at].handle(SLICE).expect("the slice"));
        let mut members = [(one, handles[0]), (other, handles[1])]
            .map(|(session, handle)| Member { session, handle });
        write(&mut members, offset as u64, data, stamp).expect("a write");
        self.hold(offset, data, &[true, true]);
    }

    /// The same as one of those who share pages without locks of their own.
    fn write_numbered(&mut self, offset: usize, data: &[u8]) {
        let stamp = self.stamp(0);
        let [one, other] = &mut self.sessions;
        let handles = [0, 1].map(|at| self.pools[at].handle(SLICE).expect("the slice"));
        let mut members = [(one, handles[0]), (other, handles[1])]
            .map(|(session, handle)| Member { session, handle });
        let written = write_numbered(&mut members, offset as u64, data, stamp.epoch, || stamp);
        written.expect("a write");
        self.hold(offset, data, &[true, true]);
    }

    /// One transaction in both pools: these pages are written with the byte, or
    /// cleared.
    fn transact(&mut self, runs: &[(usize, usize, Option<u8>)]) {
        let stamp = self.stamp(0);
        let part = |&(page, pages, byte): &(usize, usize, Option<u8>)| {
            let (offset, len) = ((page * PAGE_BYTES) as u64, pages * PAGE_BYTES);
            match byte {
                Some(byte) => Part::Write {
                    offset,
                    data: vec![byte; len].into(),
                },
                None => Part::Clear {
                    offset,
                    len: len as u64,
                },
            }
        };
        let parts: Vec<Part> = runs.iter().map(part).collect();
        let [one, other] = &mut self.sessions;
        let handles = [0, 1].map(|at| self.pools[at].handle(SLICE).expect("the slice"));
        let mut members = [(one, handles[0]), (other, handles[1])]
            .map(|(session, handle)| Member { session, handle });
        transact(&mut members, &parts, stamp).expect("a transaction");
        for held in &mut self.held {
            let mut bytes = held.last().expect("the base").clone();
            for &(page, pages, byte) in runs {
                bytes[page * PAGE_BYTES..][..pages * PAGE_BYTES].fill(byte.unwrap_or(0));
            }
            held.push(bytes);
        }
        let pages = runs.iter().flat_map(|&(page, pages, _)| page..page + pages);
        self.whole = pages.collect();
    }

    /// A write that reached the first pool only.
    fn write_first(&mut self, offset: usize, data: &[u8]) {
        let stamp = self.stamp(0);
        let handle = self.pools[0].handle(SLICE).expect("the slice");
        let session = &mut self.sessions[0];
        write(
            &mut [Member { session, handle }],
            offset as u64,
            data,
            stamp,
        )
        .expect("a write");
        self.hold(offset, data, &[true, false]);
    }

    fn hold(&mut self, offset: usize, data: &[u8], reached: &[bool; 2]) {
        for (held, reached) in self.held.iter_mut().zip(reached) {
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

/// What a recovered pool holds, and which operations it lists as in flight.
struct Found {
    bytes: Vec<u8>,
    listed: Vec<InFlight>,
}

fn recover(image: Image) -> Found {
    let media = Arc::new(Recorder::unrecorded(image));
    let (mut pool, _) = Pool::open(media.clone(), media).expect("a crash leaves a sound pool");
    let number = pool.open_session(1, 1).expect("a session");
    let mut session = Session::new(pool.view().clone(), number);
    let handle = pool.handle(SLICE).expect("the slice");
    let mut bytes = vec![0; SIZE];
    session
        .read(&handle, 0, &mut bytes, Epoch(99))
        .expect("nothing is damaged");
    let listed = pool.in_flight(SLICE).expect("the slice");
    Found {
        bytes,
        listed: listed.expect("few enough to list"),
    }
}

impl Found {
    fn page(&self, page: usize) -> &[u8] {
        &self.bytes[page * PAGE_BYTES..][..PAGE_BYTES]
    }

    /// The newest operation on the page that may be missing elsewhere.
    fn newest(&self, page: usize) -> Option<(u32, u64)> {
        let on_page = |entry: &&InFlight| {
            let pages = entry.page.0..entry.page.0 + u64::from(entry.count);
            pages.contains(&(page as u64))
        };
        let entries = self.listed.iter().filter(on_page);
        entries.map(|entry| (entry.epoch.0, entry.op)).max()
    }
}

/// Images of one medium: nothing uncertain, everything, and between.
fn images(point: &CrashPoint) -> Vec<Image> {
    if point.count() <= IMAGES_MAX {
        return (0..point.count()).map(|index| point.image(index)).collect();
    }
    let sampled = (0..IMAGES_MAX - 2).map(|seed| point.sample(seed));
    [point.image(0), point.everything()]
        .into_iter()
        .chain(sampled)
        .collect()
}

/// How often something was checked.
#[derive(Default)]
struct Tally {
    pairs: u64,
    differing: u64,
}

/// Checks a crash at one moment. `certain` operations were acknowledged.
fn check(world: &World, moment: &[CrashPoint; 2], certain: usize, what: &str, tally: &mut Tally) {
    let images = [0, 1].map(|at| images(&moment[at]));
    let found = images
        .each_ref()
        .map(|images| images.iter().cloned().map(recover).collect::<Vec<_>>());
    let versions = [0, 1].map(|at| {
        let held = &world.held[at];
        let of_image = |(number, found): (usize, &Found)| {
            (0..PAGES)
                .map(|page| version(held, certain, found, page))
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
                .whole
                .iter()
                .map(|&page| pages[page] < operations(world));
            let first = whole.next();
            assert!(
                whole.all(|is_old| Some(is_old) == first),
                "{what}: pool {at}, image {number}: a part of a transaction"
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
        go_on([at(0, turn), at(1, last - 1 - turn)]);
    }
}

/// How many operations there were.
fn operations(world: &World) -> usize {
    world.held[0].len() - 1
}

/// The first operation after which the page was as it is found; none if it
/// never was, or is older than what is certain.
fn version(held: &[Vec<u8>], certain: usize, found: &Found, page: usize) -> Option<usize> {
    let of = |bytes: &Vec<u8>| bytes[page * PAGE_BYTES..][..PAGE_BYTES] == *found.page(page);
    held[certain..].iter().any(of).then(|| {
        let first = held.iter().position(of);
        first.expect("it is there")
    })
}

/// Both pools are recovered and written together.
fn go_on(images: [Image; 2]) {
    let media = images.map(Recorder::unrecorded);
    let mut world = World::open(media, [vec![0; SIZE], vec![0; SIZE]], 1000);
    let fresh: Vec<u8> = (0..SIZE).map(|i| (i / 64) as u8 | 1).collect();
    world.write(0, &fresh, 0);
    world.write(PAGE_BYTES - 8, &[0xab; 16], 0);
    for at in 0..2 {
        let found = world.read(at);
        assert!(found == world.held[at][2], "pool {at} does not go on");
    }
}

/// Runs a write on two pools that were equal before `prepare`, and checks a
/// crash at every moment of it.
fn enumerate(
    pages: usize,
    what: &str,
    prepare: impl Fn(&mut World),
    run: impl Fn(&mut World),
) -> Tally {
    let base = World::format(pages);
    let images = base.both.moment().map(|point| point.image(0));
    let held = base.held.map(|mut held| held.pop().expect("the base"));
    let mut world = World::open(images.map(Recorder::from_image), held, FIRST_OP);
    prepare(&mut world);
    let prepared = world.both.noted();
    run(&mut world);
    let mut tally = Tally::default();
    let moments = std::mem::take(&mut *world.both.moments.lock().expect("no panic inside"));
    let during = &moments[prepared..];
    assert!(!during.is_empty(), "{what}: a write has a fence");
    let operations = operations(&world);
    for (number, moment) in during.iter().enumerate() {
        let what = format!("{what}, before fence {number}");
        check(&world, moment, operations - 1, &what, &mut tally);
    }
    let what = format!("{what}, acknowledged");
    check(&world, &world.both.moment(), operations, &what, &mut tally);
    tally
}

/// Every page of some write must have been found new in one pool and old in
/// the other: otherwise the images were too few.
fn check_write(pages: usize, offset: usize, len: usize) {
    let what = format!("{len} bytes at {offset} over {pages} pages");
    let write = |world: &mut World| world.write(offset, &vec![0x80; len], 0);
    let tally = enumerate(pages, &what, |_| (), write);
    assert!(tally.pairs >= 1000, "{what}: {} pairs", tally.pairs);
    assert!(tally.differing > 0, "{what}: the pools never differed");
}

#[test]
fn a_whole_page_is_old_or_new_in_each_pool() {
    check_write(4, PAGE_BYTES, PAGE_BYTES);
}

#[test]
fn the_first_page_of_an_object_links_its_nodes_in_each_pool() {
    check_write(0, 2 * PAGE_BYTES, PAGE_BYTES);
}

#[test]
fn a_part_of_a_page_is_merged_in_each_pool() {
    check_write(4, PAGE_BYTES + 100, 300);
}

#[test]
fn a_part_of_a_page_is_merged_from_the_first_pool() {
    let write = |world: &mut World| world.write_numbered(PAGE_BYTES + 100, &[0x80; 300]);
    let tally = enumerate(4, "a part with a number", |_| (), write);
    assert!(tally.pairs >= 1000 && tally.differing > 0);
}

/// The rest of the page, too, is the same in both pools then.
#[test]
fn what_one_pool_missed_comes_with_the_next_part() {
    let mut world = World::format(4);
    world.write_first(PAGE_BYTES, &[0x70; PAGE_BYTES]);
    assert_ne!(world.read(0), world.read(1));
    world.write_numbered(PAGE_BYTES + 100, &[0x80; 300]);
    let found = world.read(0);
    assert_eq!(found, world.held[0][world.held[0].len() - 1]);
    assert!(found == world.read(1), "the pools are alike");
}

#[test]
fn several_pages_of_one_record() {
    check_write(4, 2 * PAGE_BYTES, 3 * PAGE_BYTES);
}

#[test]
fn several_records_of_one_write() {
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
fn a_transaction_is_whole_in_each_pool() {
    check_transaction(
        8,
        &[(1, 1, Some(0x80)), (4, 2, Some(0x81)), (7, 1, Some(0x82))],
    );
}

#[test]
fn a_transaction_clears_and_writes_as_a_whole_in_each_pool() {
    check_transaction(8, &[(6, 2, None), (0, 1, Some(0x80)), (3, 1, None)]);
}

#[test]
fn the_first_transaction_of_an_object_links_its_nodes_in_each_pool() {
    check_transaction(0, &[(2, 1, Some(0x80)), (9, 3, Some(0x81))]);
}

/// Its data is in one pool for good; whatever becomes of the write after it,
/// the stamp of that one says that it is still open.
#[test]
fn an_earlier_write_that_reached_one_pool_stays_named() {
    let missed = |world: &mut World| world.write_first(PAGE_BYTES, &[0x70; PAGE_BYTES]);
    let next = |world: &mut World| world.write(3 * PAGE_BYTES, &[0x80; PAGE_BYTES], 1);
    let tally = enumerate(4, "a write after one that was missed", missed, next);
    assert!(
        tally.differing > tally.pairs,
        "page 1 differs in every pair, page 3 in some"
    );
}
