//! One flipped bit anywhere in a pool, closed in good order or left by a dead
//! brick: it is mended, found by the check, or lies where nothing is stored.
//! What is read afterwards is what was written, or an error; what the check
//! says it can mend, it mends.
//!
//! `PAGEMESH_FLIPS` is the number of flips per pool, `PAGEMESH_SEED` the first
//! pool's seed and `PAGEMESH_POOLS` how many follow it.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{Part, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Media, Recorder};
use pagemesh_store::check::{Finding, Options, Plan, Remedy, Report, What, check};
use pagemesh_store::geometry::{Geometry, OBJECT_BYTES};
use pagemesh_store::lane::Lane;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::record::Place;
use pagemesh_store::session::{Failure, Member, Session, clear, write};
use pagemesh_store::table::{Location, Table};
use pagemesh_store::transaction::transact;
use pagemesh_store::view::StoreError;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

const POOL_BYTES: usize = 2 << 20;
const PAGE: u64 = PAGE_BYTES as u64;
const PAGES: u64 = 25;
/// Operations of one life of a pool.
const OPS: u64 = 14;

type Model = BTreeMap<SliceId, Vec<u8>>;

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }
}

fn slice(number: u64) -> SliceId {
    SliceId(Uuid::from_u128(u128::from(number) + 1))
}

fn media(image: &Image) -> Arc<Recorder> {
    Arc::new(Recorder::from_image(image.clone()))
}

fn session(pool: &mut Pool<Recorder>) -> Session<Recorder> {
    let number = pool.open_session(1, 1).expect("a session");
    // The owner is this thread: there is nobody to wait for.
    Session::new(pool.view().clone(), number).with_owner_wait(Duration::ZERO)
}

/// Does it, and once more after the owner has made room in the lane.
fn with_room(pool: &mut Pool<Recorder>, mut act: impl FnMut() -> Result<(), Failure>) {
    match act() {
        Err(failure) if failure.cause == StoreError::Stalled => {
            pool.tend().expect("sound");
            act().expect("room");
        }
        done => done.expect("room"),
    }
}

/// Some parts of a transaction, in turn by their pages.
fn parts(random: &mut Random, fill: u8) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut page = random.below(6);
    while page + 3 <= PAGES {
        let (offset, len) = (page * PAGE, (1 + random.below(3)) * PAGE);
        parts.push(match random.below(4) {
            0 => Part::Clear { offset, len },
            _ => Part::Write {
                offset,
                data: vec![fill; len as usize].into(),
            },
        });
        page += len / PAGE + random.below(9);
    }
    parts
}

/// How a life of a pool ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Closed in good order.
    Closed,
    /// A crash behind the last operation.
    Crashed,
    /// A crash at some fence of the last operation: each of its pages, and
    /// what else it changes, may be as it was before.
    CrashedInside,
}

/// Some operations on a pool, and how it ends; what it held before the last one,
/// if that may be all there is.
fn live(image: &Image, model: &mut Model, random: &mut Random, end: End) -> (Image, Option<Model>) {
    let media = media(image);
    let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("a sound pool");
    let mut sessions = [session(&mut pool), session(&mut pool)];
    let mut before = Model::new();
    for op in 1..=OPS {
        if op % 4 == 0 {
            // A lane of so small a pool holds few records.
            pool.tend().expect("sound");
        }
        let name = slice(random.below(3));
        let is_only = model.keys().all(|&other| other == name);
        let is_new = !model.contains_key(&name);
        if is_new {
            pool.create(name, PAGES * PAGE).expect("room");
            model.insert(name, vec![0; (PAGES * PAGE) as usize]);
            // It may have the number of one that is gone.
            sessions.iter_mut().for_each(Session::forget_leaves);
        }
        let handle = pool.handle(name).expect("the slice");
        let start = random.below(PAGES * PAGE - 1);
        let (offset, len) = match random.below(2) {
            0 => (start, 1 + random.below(9000).min(PAGES * PAGE - start - 1)),
            _ => (start / PAGE * PAGE, PAGE),
        };
        let range = offset as usize..(offset + len) as usize;
        let epoch = Epoch(5);
        let stamp = Stamp {
            epoch,
            op,
            open: random.below(2).min(op - 1) as u32,
        };
        let session = &mut sessions[random.below(2) as usize];
        let mut members = [Member { session, handle }];
        media.take_crash_points();
        before.clone_from(model);
        let bytes = model.get_mut(&name).expect("it is there");
        match random.below(12) {
            0 => {
                with_room(&mut pool, || clear(&mut members, offset, len, stamp));
                bytes[range].fill(0);
            }
            1 | 4 => {
                let fill = random.next() as u8;
                let parts = parts(random, fill);
                with_room(&mut pool, || transact(&mut members, &parts, stamp));
                for part in &parts {
                    let fill = match part {
                        Part::Write { .. } => fill,
                        Part::Clear { .. } => 0,
                    };
                    let (offset, len) = (part.offset() as usize, part.len() as usize);
                    bytes[offset..][..len].fill(fill);
                }
            }
            2 if !is_only => {
                pool.delete(name).expect("the slice");
                model.remove(&name);
            }
            3 => {
                let _old = pool.raise_epoch(name, Epoch(random.below(5) as u32), 2);
            }
            _ => {
                let byte = random.next() as u8;
                let data: Vec<u8> = (0..len).map(|i| byte.wrapping_add(i as u8)).collect();
                with_room(&mut pool, || write(&mut members, offset, &data, stamp));
                bytes[range].copy_from_slice(&data);
            }
        }
    }
    if end == End::Closed {
        for number in [1, 2] {
            pool.close_session(number).expect("sound");
        }
        while pool.tend().expect("sound") {}
        pool.close().expect("sound");
        return (media.crash_point().everything(), None);
    }
    let points = media.take_crash_points();
    match (end, points.split_last()) {
        (End::CrashedInside, Some((_, inside))) if !inside.is_empty() => {
            let point = &inside[random.below(inside.len() as u64) as usize];
            (point.sample(random.next()), Some(before))
        }
        _ => (media.crash_point().sample(random.next()), None),
    }
}

fn checked(image: &Image) -> Result<(Report, Plan), String> {
    let mut options = Options {
        is_ordered: true,
        reads_data: true,
        progress: &mut |_, _| {},
    };
    check(&*media(image), &mut options).map_err(|error| error.to_string())
}

/// Opens, and reads every page of every slice. Gives the image right after
/// opening, and the pages that could not be read.
fn read_all(image: &Image, model: &Model, before: Option<&Model>) -> Result<(Image, u64), String> {
    let media = media(image);
    let opened = Pool::open(media.clone(), media.clone());
    let (mut pool, _) = opened.map_err(|error| error.to_string())?;
    let image = media.crash_point().image(0);
    assert_eq!(
        image,
        media.crash_point().everything(),
        "opening is durable"
    );
    let listed: Vec<SliceId> = pool.list().map(|object| object.slice).collect();
    let holds = |model: &Model| {
        listed.len() == model.len() && listed.iter().all(|name| model.contains_key(name))
    };
    assert!(holds(model) || before.is_some_and(holds), "slices");
    let mut reader = session(&mut pool);
    let mut damaged = 0;
    for name in listed {
        let of = |model: &Model| model.get(&name).cloned();
        let old = before.and_then(of);
        let bytes = of(model).or(old.clone()).expect("one of them has it");
        let handle = pool.handle(name).expect("the slice is there");
        for (page, expected) in (0..).zip(bytes.chunks(PAGE_BYTES)) {
            let mut found = [0xee; PAGE_BYTES];
            match reader.read(&handle, page * PAGE, &mut found, Epoch(9)) {
                Ok(()) => {
                    let at = page as usize * PAGE_BYTES;
                    let was = old
                        .as_ref()
                        .is_some_and(|old| found == old[at..][..PAGE_BYTES]);
                    assert!(found == expected || was, "page {page} of {name} is wrong");
                }
                Err(StoreError::Damaged { offset }) => {
                    assert_eq!(offset / PAGE, page, "the error names the page");
                    damaged += 1;
                }
                Err(other) => panic!("page {page} of {name}: {other}"),
            }
        }
    }
    pool.close_session(reader.number()).expect("sound");
    pool.close().expect("sound");
    Ok((image, damaged))
}

/// Bytes of the bitmap's lines, each of 448 frames.
fn bitmap_bytes(geometry: &Geometry) -> u64 {
    geometry.frame_numbers().end.div_ceil(448) * 64
}

fn bitmap_of(image: &Image) -> Vec<u64> {
    let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
    let start = geometry.bitmap.start as usize;
    let words = (start..start + bitmap_bytes(&geometry) as usize).step_by(8);
    words.map(|at| image.word(at)).collect()
}

fn with_bitmap(image: &Image, words: &[u64]) -> Image {
    let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
    let mut image = image.clone();
    for (at, &word) in (geometry.bitmap.start as usize..).step_by(8).zip(words) {
        image.set_word(at, word);
    }
    image
}

/// The bytes of an opened pool in which something is stored.
fn used_bytes(image: &Image, objects_end: u32) -> Vec<bool> {
    let media = Recorder::from_image(image.clone());
    let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
    let mut used = vec![false; POOL_BYTES];
    let mut add = |at: u64, len: u64| used[at as usize..(at + len) as usize].fill(true);
    add(0, 2 * PAGE);
    let numbers = geometry.frame_numbers();
    add(geometry.bitmap.start, bitmap_bytes(&geometry));
    for object in 0..u64::from(objects_end) {
        let at = geometry.objects.start + object * OBJECT_BYTES;
        add(at, 112);
        let table = Table::new(&media, at as usize + 64, 4, numbers.clone());
        for page in (0..PAGES).map(PageNo) {
            for level in 0..4 {
                let located = table.locate(level, page).expect("a sound table");
                if let Location::At(slot_at) = located {
                    add(slot_at as u64 / PAGE * PAGE, PAGE);
                }
            }
            if let Some(frame) = table.lookup(page).expect("a sound table").frame() {
                add(frame.0 * PAGE, PAGE);
                add(geometry.frame_table.start + frame.0 * 8, 4);
            }
        }
    }
    for at in (geometry.in_flight.start..geometry.in_flight.end()).step_by(32) {
        // Forgotten entries are zeroed from the front.
        if image.word(at as usize) != 0 && image.word(at as usize + 24) != 0 {
            add(at, 32);
        }
    }
    used
}

/// A bit to flip: every region as often, and what is not zero more often.
fn choose(image: &Image, random: &mut Random) -> u64 {
    let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
    let regions = [
        0..2 * PAGE,
        geometry.lane_region.start..geometry.lane_region.end(),
        geometry.bitmap.start..geometry.bitmap.end(),
        geometry.frame_table.start..geometry.frame_table.end(),
        geometry.objects.start..geometry.objects.end(),
        geometry.in_flight.start..geometry.in_flight.end(),
        geometry.frames.start..geometry.frames.end(),
        geometry.frames.start..geometry.frames.end(),
    ];
    let region = &regions[random.below(regions.len() as u64) as usize];
    let mut byte = random.within(region.clone());
    if random.below(4) > 0 {
        let word = |byte: u64| image.word(byte as usize / 8 * 8) != 0;
        let behind = (byte..region.end).find(|&at| word(at));
        let found = behind.or_else(|| (region.start..byte).find(|&at| word(at)));
        byte = found.map_or(byte, |at| (at / 8 * 8) + random.below(8));
    }
    byte * 8 + random.below(8)
}

/// The bytes at which live lines of lanes start.
fn live_lines(image: &Image) -> Vec<u64> {
    let media = Recorder::from_image(image.clone());
    let block = Pool::peek(&media).expect("a superblock");
    let geometry = block.geometry;
    let mut lines = Vec::new();
    for number in 0..block.lanes_end {
        let (start, head) = (geometry.lane_at(number), block.heads[number as usize]);
        let place = Place::new(block.pool, block.incarnation, number, head);
        let mut lane = Lane::new(start, geometry.lane_lines(), place);
        let end = lane.recover(&media).expect("sound").end;
        lines.extend((head..end).map(|line| start as u64 + line % geometry.lane_lines() * 64));
    }
    lines
}

struct Case {
    end: End,
    /// What it may hold instead.
    before: Option<Model>,
    lines: Vec<u64>,
    image: Image,
    model: Model,
    opened: Image,
    used: Vec<bool>,
}

impl Case {
    /// A pool with a past.
    fn new(seed: u64, end: End) -> Case {
        let mut random = Random(seed);
        let fresh = Recorder::new(POOL_BYTES);
        format(&fresh, Uuid::from_u128(7)).expect("a pool");
        let (mut image, mut model) = (fresh.crash_point().everything(), Model::new());
        for _ in 0..random.below(3) {
            let end = match random.below(2) {
                0 => End::Closed,
                _ => End::Crashed,
            };
            (image, _) = live(&image, &mut model, &mut random, end);
        }
        let (image, before) = live(&image, &mut model, &mut random, end);
        Case::of(image, model, before, end)
    }

    fn of(image: Image, model: Model, before: Option<Model>, end: End) -> Case {
        let (report, _) = checked(&image).expect("a pool");
        assert!(report.is_sound(), "nothing is flipped: {report:?}");
        let (opened, damaged) = read_all(&image, &model, before.as_ref()).expect("a sound pool");
        assert_eq!(damaged, 0);
        let block = Pool::peek(&*media(&opened)).expect("a superblock");
        let used = used_bytes(&opened, block.objects_end);
        Case {
            end,
            before,
            lines: live_lines(&image),
            image,
            model,
            opened,
            used,
        }
    }

    fn read(&self, image: &Image) -> Result<(Image, u64), String> {
        read_all(image, &self.model, self.before.as_ref())
    }

    fn flip(&self, bit: u64) -> Found {
        let mut image = self.image.clone();
        let at = bit as usize / 64 * 8;
        image.set_word(at, image.word(at) ^ 1 << (bit % 64));
        let report = checked(&image);
        let is_silent = matches!(&report, Ok((report, _)) if report.is_sound());
        let found = match self.read(&image) {
            Ok((opened, damaged)) => {
                assert!(!is_silent || damaged == 0, "an error that the check missed");
                let differs = |byte: usize| {
                    let shift = byte % 8 * 8;
                    (opened.word(byte / 8 * 8) ^ self.opened.word(byte / 8 * 8)) >> shift & 0xff
                        != 0
                };
                let lost = (0..POOL_BYTES).find(|&byte| self.used[byte] && differs(byte));
                // What nobody had heard of may go with its record.
                let may_go = self.before.is_some();
                assert!(
                    !is_silent || may_go || lost.is_none(),
                    "silently lost: byte {lost:?}"
                );
                match (is_silent, damaged) {
                    (true, _) => Found::Unused,
                    (false, 0) => Found::Repaired,
                    (false, _) => Found::ReadError,
                }
            }
            Err(error) => {
                assert!(!is_silent, "refused, and the check is content: {error}");
                Found::Refused(error)
            }
        };
        let Ok((report, plan)) = report else {
            return found;
        };
        if report.findings.iter().all(|it| it.remedy == Remedy::Pool) {
            let media = media(&image);
            plan.apply(&*media).expect("it can be mended");
            let mended = media.crash_point().image(0);
            let (again, _) = checked(&mended).expect("a pool");
            assert!(again.is_sound(), "not mended: {report:?}, then {again:?}");
            let (_, damaged) = self.read(&mended).expect("a mended pool");
            assert_eq!(damaged, 0, "mended: {report:?}");
        }
        found
    }
}

/// What became of a flipped bit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    /// Opening the pool mends it, and the check names it.
    Repaired,
    /// Nothing is stored there.
    Unused,
    /// Reading the page is an error that names it.
    ReadError,
    /// The pool is not opened.
    Refused(String),
}

impl Case {
    /// Damages lines of the bitmap: the check names them, and opening makes
    /// them what they were, whether it or `Plan::apply` does it.
    fn damage_bitmap(&self, damage: impl Fn(&mut [u64])) {
        let sound = bitmap_of(&self.image);
        let mut words = sound.clone();
        damage(&mut words);
        let differ = |line: &usize| words[line * 8..][..8] != sound[line * 8..][..8];
        let expected = (0..words.len() / 8).filter(differ).map(|it| it as u32);
        let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
        let at = |line| geometry.bitmap.start + u64::from(line) * 64;
        let expected: Vec<_> = expected
            .map(|line| (line, Some(at(line)), Remedy::Pool))
            .collect();
        let image = with_bitmap(&self.image, &words);
        let (report, plan) = checked(&image).expect("a pool");
        let named = |it: &Finding| match it.what {
            What::Bitmap { line, .. } => Some((line, it.place.byte, it.remedy)),
            _ => None,
        };
        let named: Vec<_> = report.findings.iter().filter_map(named).collect();
        // Frames that records name may have been in motion: which bits they
        // have is no damage.
        match self.end {
            End::Closed => assert_eq!(named, expected, "{report:?}"),
            _ => assert!(named.iter().all(|it| expected.contains(it)), "{report:?}"),
        }
        for mends in [false, true] {
            let media = media(&image);
            if mends {
                plan.apply(&*media).expect("it can be mended");
            }
            let image = media.crash_point().image(0);
            let (opened, damaged) = self.read(&image).expect("a pool that opens");
            assert_eq!(damaged, 0);
            assert_eq!(bitmap_of(&opened), bitmap_of(&self.opened));
        }
    }
}

#[test]
fn damage_in_the_bitmap_is_named_and_undone() {
    for (seed, end) in [
        (1, End::Closed),
        (2, End::Closed),
        (3, End::Crashed),
        (4, End::Crashed),
        (5, End::Crashed),
    ] {
        let case = Case::new(seed, end);
        let mut random = Random(seed);
        for bit in 0..1024 {
            if bit % 3 == seed % 3 {
                case.damage_bitmap(|words| words[bit as usize / 64] ^= 1 << (bit % 64));
            }
        }
        let garbage: Vec<u64> = (0..16).map(|_| random.next()).collect();
        case.damage_bitmap(|words| words[..8].copy_from_slice(&garbage[..8]));
        case.damage_bitmap(|words| words[8..].copy_from_slice(&garbage[..8]));
        case.damage_bitmap(|words| words.copy_from_slice(&garbage));
        case.damage_bitmap(|words| words.fill(0));
        case.damage_bitmap(|words| words.fill(u64::MAX));
        // Each line sound, and in the other's place.
        case.damage_bitmap(|words| words.rotate_left(8));
        for word in 0..16 {
            case.damage_bitmap(|words| words[word] = garbage[word]);
        }
    }
}

/// A medium that lost the last write of a line leaves one that checks.
#[test]
fn a_line_of_the_bitmap_that_is_too_old_is_told_by_the_count() {
    for seed in 1..6 {
        let case = Case::new(seed, End::Closed);
        let fresh = Recorder::new(POOL_BYTES);
        format(&fresh, Uuid::from_u128(7)).expect("a pool");
        let empty = bitmap_of(&fresh.crash_point().everything());
        let image = with_bitmap(&case.image, &empty);
        let (report, _) = checked(&image).expect("a pool");
        let counts = |it: &Finding| matches!(it.what, What::Count { .. });
        assert!(report.findings.iter().all(counts), "{report:?}");
        assert_eq!(
            report.is_sound(),
            bitmap_of(&case.image) == empty,
            "{report:?}"
        );
        let (opened, damaged) = case.read(&image).expect("a pool that opens");
        assert_eq!(damaged, 0);
        assert_eq!(bitmap_of(&opened), bitmap_of(&case.opened));
    }
}

fn number(name: &str, default: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.map_or(default, |text| text.parse().expect("a number"))
}

fn flips(ends: &[End]) {
    let (first, count) = (number("PAGEMESH_SEED", 1), number("PAGEMESH_POOLS", 12));
    let mut tally: BTreeMap<Found, u64> = BTreeMap::new();
    for seed in first..first + count {
        let end = ends[seed as usize % ends.len()];
        let case = Case::new(seed, end);
        let mut random = Random(seed ^ 0xf11b);
        for _ in 0..number("PAGEMESH_FLIPS", 100) {
            let live = case.lines.len() as u64;
            let bit = match random.below(6) {
                0 if live > 0 => {
                    let line = case.lines[random.below(live) as usize];
                    line * 8 + random.below(512)
                }
                _ => choose(&case.image, &mut random),
            };
            let run = std::panic::AssertUnwindSafe(|| case.flip(bit));
            let found = std::panic::catch_unwind(run);
            if let Ok(found) = found {
                *tally.entry(found).or_default() += 1;
            } else if let Err(panic) = found {
                eprintln!(
                    "bit {} of byte {} flipped; rerun with PAGEMESH_SEED={seed} PAGEMESH_POOLS=1",
                    bit % 8,
                    bit / 8
                );
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{ends:?}: {tally:?}");
    let flips: u64 = tally.values().sum();
    let of = |found| tally.get(&found).copied().unwrap_or_default();
    assert!(of(Found::Repaired) > flips / 5, "{tally:?}");
    assert!(of(Found::Unused) < flips * 2 / 3, "{tally:?}");
    let refused = |found: &&Found| matches!(found, Found::Refused(_));
    assert_eq!(tally.keys().find(refused), None, "{tally:?}");
}

/// A brick that dies after `before` writes, a checkpoint, and `after` more, by
/// a session of a lane that was used before, or never was.
fn superblocks(before: u64, after: u64, new_lane: bool) {
    let fresh = Arc::new(Recorder::new(POOL_BYTES));
    format(&*fresh, Uuid::from_u128(7)).expect("a pool");
    let open = |media: &Arc<Recorder>| Pool::open(media.clone(), media.clone()).expect("sound").0;
    let mut pool = open(&fresh);
    pool.create(slice(0), PAGES * PAGE).expect("room");
    let _first = session(&mut pool);
    pool.close().expect("sound");
    let media = media(&fresh.crash_point().everything());
    let mut pool = open(&media);
    let handle = pool.handle(slice(0)).expect("the slice");
    // Opening the session of a new lane writes a superblock.
    let count = 1 + usize::from(new_lane);
    let mut sessions: Vec<_> = (0..count).map(|_| session(&mut pool)).collect();
    let mut bytes = vec![0; (PAGES * PAGE) as usize];
    for op in 1..=before + after {
        let session = &mut sessions[usize::from(new_lane)];
        let (page, byte) = (op % PAGES, op as u8);
        let stamp = Stamp {
            epoch: Epoch(5),
            op,
            open: 0,
        };
        let mut members = [Member { session, handle }];
        let range = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
        // Half of them clear a page: a session has more lines than frames.
        if op % 2 == 0 {
            clear(&mut members, page * PAGE, PAGE, stamp).expect("room");
            bytes[range].fill(0);
        } else {
            write(&mut members, page * PAGE, &[byte; PAGE_BYTES], stamp).expect("room");
            bytes[range].fill(byte);
        }
        if op == before {
            pool.tend().expect("sound");
        }
    }
    let case = Case::of(
        media.crash_point().image(0),
        Model::from([(slice(0), bytes)]),
        None,
        End::Crashed,
    );
    for page in 0..2 {
        case.flip(page * PAGE * 8 + 300);
    }
}

#[test]
fn a_damaged_superblock_never_loses_a_write() {
    for (before, after) in [(0, 1), (0, 9), (1, 0), (9, 9), (30, 1), (30, 30), (40, 50)] {
        for new_lane in [false, true] {
            superblocks(before, after, new_lane);
        }
    }
}

#[test]
fn a_flipped_bit_in_a_closed_pool_is_never_silent() {
    flips(&[End::Closed]);
}

#[test]
fn a_flipped_bit_in_a_crashed_pool_is_never_silent() {
    flips(&[End::Crashed, End::CrashedInside, End::CrashedInside]);
}

/// Where the root slots of a pool lie, and the slots of nodes on the way to the
/// first leaf of each object.
fn upper_slots(image: &Image) -> Vec<usize> {
    let media = Recorder::from_image(image.clone());
    let block = Pool::peek(&media).expect("a superblock");
    let geometry = block.geometry;
    let mut found = Vec::new();
    for object in 0..u64::from(block.objects_end) {
        let root_at = (geometry.objects.start + object * OBJECT_BYTES) as usize + 64;
        let table = Table::new(&media, root_at, 4, geometry.frame_numbers());
        let located = (1..=4).map(|level| table.locate(level, PageNo(0)));
        found.extend(located.filter_map(|it| match it.expect("a sound table") {
            Location::At(at) => Some(at),
            Location::Unlinked(_) => None,
        }));
    }
    found
}

/// A record that is replayed needs the slots above its own. One flipped bit of
/// them is mended, and named; with two the pool is refused, unless the record
/// that linked the slot is replayed, too, and makes it anew.
#[test]
fn records_are_replayed_though_a_slot_above_them_lost_a_bit() {
    let (mut mended, mut refused) = (0, 0);
    for seed in 1..9 {
        let case = Case::new(seed, End::Crashed);
        for at in upper_slots(&case.image) {
            for bit in (seed % 9..64).step_by(9) {
                let found = case.flip(at as u64 * 8 + bit);
                assert!(!matches!(found, Found::Refused(_)), "{at}: {found:?}");
                let flipped = |mask: u64| {
                    let mut image = case.image.clone();
                    image.set_word(at, image.word(at) ^ mask);
                    let media = media(&image);
                    Pool::open(media.clone(), media).map(|(_, recovered)| recovered.mended)
                };
                let one = flipped(1 << bit).expect("it opens");
                if one == 0 {
                    continue;
                }
                assert_eq!((one, found), (1, Found::Repaired));
                mended += 1;
                if let Err(cause) = flipped(1 << bit | 1 << ((bit + 9) % 64)) {
                    let text = cause.to_string();
                    assert!(text.contains("the page table is damaged"), "{text}");
                    refused += 1;
                }
            }
        }
    }
    assert!(mended > 200 && refused > mended / 2, "{mended}, {refused}");
}

/// A slot that lost two bits cannot be mended: reading its page names the page,
/// writing a part of it too, and writing it as a whole makes it anew. The frame
/// that it named is lost to use until a check finds it.
#[test]
fn a_page_behind_a_damaged_slot_is_written_anew() {
    let fresh = Arc::new(Recorder::new(POOL_BYTES));
    format(&*fresh, Uuid::from_u128(7)).expect("a pool");
    let (mut pool, _) = Pool::open(fresh.clone(), fresh.clone()).expect("sound");
    pool.create(slice(0), PAGES * PAGE).expect("room");
    let handle = pool.handle(slice(0)).expect("the slice");
    let mut one = session(&mut pool);
    let put = |one: &mut Session<Recorder>, at: u64, data: &[u8], op| {
        let stamp = Stamp {
            epoch: Epoch(5),
            op,
            open: 0,
        };
        let mut members = [Member {
            session: one,
            handle,
        }];
        write(&mut members, at, data, stamp).map_err(|failed| failed.cause)
    };
    put(&mut one, 0, &[1; 3 * PAGE_BYTES], 1).expect("room");
    pool.checkpoint().expect("sound");
    let geometry = *pool.view().geometry();
    let root_at = geometry.objects.start as usize + 64;
    let table = Table::new(&*fresh, root_at, 4, geometry.frame_numbers());
    let Ok(Location::At(slot_at)) = table.locate(0, PageNo(1)) else {
        panic!("the leaf is linked");
    };
    fresh.store(slot_at, fresh.load(slot_at) ^ 0b11);
    let _fenced = fresh.fence(fresh.flush(slot_at, 8));

    let damaged = Err(StoreError::Damaged { offset: PAGE });
    let mut found = [0; 3 * PAGE_BYTES];
    assert_eq!(one.read(&handle, 0, &mut found, Epoch(5)), damaged);
    assert_eq!(put(&mut one, PAGE + 5, &[2; 9], 2), damaged);
    assert_eq!(put(&mut one, PAGE, &[3; PAGE_BYTES], 3), Ok(()));
    let mut model = vec![0; (PAGES * PAGE) as usize];
    model[..3 * PAGE_BYTES].fill(1);
    model[PAGE_BYTES..2 * PAGE_BYTES].fill(3);
    assert_eq!(one.read(&handle, 0, &mut found, Epoch(5)), Ok(()));
    assert!(found == model[..3 * PAGE_BYTES]);

    let model = Model::from([(slice(0), model)]);
    let crashed = fresh.crash_point().image(0);
    pool.close_session(one.number()).expect("sound");
    pool.close().expect("sound");
    for image in [crashed, fresh.crash_point().everything()] {
        let (report, plan) = checked(&image).expect("a pool");
        let whats: Vec<_> = report.findings.iter().map(|it| &it.what).collect();
        assert_eq!(whats, [&What::Leaked(1)]);
        assert_eq!(read_all(&image, &model, None).expect("it opens").1, 0);
        let media = media(&image);
        plan.apply(&*media).expect("it can be mended");
        let mended = media.crash_point().image(0);
        assert!(checked(&mended).expect("a pool").0.is_sound());
        assert_eq!(read_all(&mended, &model, None).expect("it opens").1, 0);
    }
}

/// Line and copy of one object's entry are lost: that slice is refused by its
/// name, no other is, and none of its frames is granted.
#[test]
fn a_lost_object_entry_refuses_its_slice_and_no_other() {
    for seed in 1..6 {
        let case = Case::new(seed, End::Closed);
        if case.model.len() < 2 {
            continue;
        }
        let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
        let block = Pool::peek(&*media(&case.image)).expect("a superblock");
        let name = *case.model.keys().next().expect("a slice");
        let words = name.0.as_bytes().as_chunks::<8>().0;
        let names = |at: usize| {
            let found = [16, 24].map(|word| case.image.word(at + word).to_le_bytes());
            found == *words
        };
        let entries = 0..u64::from(block.objects_end);
        let mut entries = entries.map(|it| (geometry.objects.start + it * OBJECT_BYTES) as usize);
        let at = entries.find(|&at| names(at)).expect("the entry");
        let mut image = case.image.clone();
        for at in [at + 32, at + 72 + 32] {
            image.set_word(at, image.word(at) ^ 0x3000);
        }
        let (report, _) = checked(&image).expect("a pool");
        let whats: Vec<_> = report.findings.iter().map(|it| &it.what).collect();
        assert_eq!(whats, [&What::Object]);
        assert_eq!(report.findings[0].place.slice, Some(name));

        let media = media(&image);
        let (mut pool, recovered) = Pool::open(media.clone(), media.clone()).expect("it opens");
        assert_eq!(recovered.objects_lost, 1);
        let refused = pool.find(name).expect_err("its entry is lost").to_string();
        assert!(refused.contains(&name.to_string()), "{refused}");
        assert!(refused.contains("pool check"), "{refused}");
        assert!(pool.create(name, PAGE).is_err(), "nobody makes it anew");
        let mut others = case.model.clone();
        others.remove(&name);
        // Everything that can be granted is written over.
        pool.create(slice(99), 4 * PAGES * PAGE).expect("an entry");
        let handle = pool.handle(slice(99)).expect("the slice");
        let mut one = session(&mut pool);
        for op in 1..=4 * PAGES {
            let stamp = Stamp {
                epoch: Epoch(5),
                op,
                open: 0,
            };
            let mut members = [Member {
                session: &mut one,
                handle,
            }];
            let data = [0xdd; PAGE_BYTES];
            let written = write(&mut members, (op - 1) * PAGE, &data, stamp);
            pool.tend().expect("sound");
            if written.is_err() {
                break;
            }
        }
        pool.delete(slice(99)).expect("the slice");
        pool.close_session(one.number()).expect("sound");
        while pool.tend().expect("sound") {}
        pool.close().expect("sound");
        // With its entry as it was, the slice is what it was.
        let mut after = media.crash_point().everything();
        for word in (0..OBJECT_BYTES as usize).step_by(8).filter(|&it| it != 64) {
            after.set_word(at + word, case.image.word(at + word));
        }
        assert_eq!(case.read(&after).expect("it opens").1, 0);
    }
}
