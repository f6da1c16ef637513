//! Pools with a history, and the outcome of bit flips in them.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{Stamp, TransactionPart};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Recorder};
use pagemesh_store::check::{CheckOptions, PoolReport, Remedy, RepairPlan, check};
use pagemesh_store::geometry::{Geometry, OBJECT_BYTES};
use pagemesh_store::journal::Journal;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::{Handle, StoreError};
use pagemesh_store::record::RecordAddress;
use pagemesh_store::recovery::{PoolError, RecoverySummary, read_superblock};
use pagemesh_store::session::{LegFailure, LegSession, Session, clear, write};
use pagemesh_store::table::{PageTable, SlotLocation};
use pagemesh_store::test_api::ROOT_AT;
use pagemesh_store::transaction::transact;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

pub(crate) const POOL_BYTES: usize = 2 << 20;
pub(crate) const PAGE: u64 = PAGE_BYTES as u64;
pub(crate) const PAGES: u64 = 25;
/// Operations between two openings of a pool.
pub(crate) const OPS_PER_LIFE: u64 = 14;

pub(crate) type SliceModel = BTreeMap<SliceId, Vec<u8>>;

/// SplitMix64 (Steele et al. 2014).
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }
}

pub(crate) fn slice(number: u64) -> SliceId {
    SliceId(Uuid::from_u128(u128::from(number) + 1))
}

/// The kind of medium under a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MediumKind {
    /// Class `pmem`.
    Memory,
    /// Class `file-sync`: its tables are in an overlay.
    File,
}

impl MediumKind {
    pub(crate) fn media(self, image: &Image) -> Arc<Recorder> {
        Arc::new(match self {
            MediumKind::Memory => Recorder::from_image(image.clone()),
            MediumKind::File => Recorder::for_file(image.clone()),
        })
    }

    pub(crate) fn open(
        self,
        media: &Arc<Recorder>,
    ) -> Result<(Pool<Recorder>, RecoverySummary), PoolError> {
        let overlay = match self {
            MediumKind::Memory => media.clone(),
            MediumKind::File => Arc::new(media.overlay()),
        };
        Pool::open(media.clone(), overlay)
    }
}

pub(crate) fn session(pool: &mut Pool<Recorder>) -> Session<Recorder> {
    let number = pool.open_session(1, 1).expect("a session");
    // The owner is this thread, so a session must not wait for it.
    Session::new(pool.mapping().clone(), number).with_owner_wait(Duration::ZERO)
}

/// The stamp of an operation without open ones before it.
pub(crate) fn stamp(op: u64) -> Stamp {
    Stamp {
        epoch: Epoch(5),
        op,
        open_ops: 0,
    }
}

/// Writes bytes of one slice.
pub(crate) fn put(
    session: &mut Session<Recorder>,
    handle: Handle,
    at: u64,
    data: &[u8],
    op: u64,
) -> Result<(), StoreError> {
    let mut members = [LegSession { session, handle }];
    write(&mut members, at, data, stamp(op)).map_err(|failed| failed.cause)
}

/// Runs an operation; repeats it once after the owner has made room in the journal.
pub(crate) fn with_journal_room(
    pool: &mut Pool<Recorder>,
    mut act: impl FnMut() -> Result<(), LegFailure>,
) {
    match act() {
        Err(failure) if failure.cause == StoreError::TimedOut => {
            pool.maintain().expect("sound");
            act().expect("room");
        }
        done => done.expect("room"),
    }
}

/// Random parts of a transaction, in the order of their pages.
pub(crate) fn random_parts(random: &mut Rng, fill: u8) -> Vec<TransactionPart> {
    let mut parts = Vec::new();
    let mut page = random.below(6);
    while page + 3 <= PAGES {
        let (offset, len) = (page * PAGE, (1 + random.below(3)) * PAGE);
        parts.push(match random.below(4) {
            0 => TransactionPart::Clear { offset, len },
            _ => TransactionPart::Write {
                offset,
                data: vec![fill; len as usize].into(),
            },
        });
        page += len / PAGE + random.below(9);
    }
    parts
}

/// How the operations on an open pool end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LifeEnd {
    /// The pool is closed cleanly.
    Close,
    /// A crash after the last operation.
    Crash,
    /// A crash at some fence of the last operation: each of its pages, and each other change, may
    /// have its old state.
    CrashInOp,
}

/// The contents of a pool before its last operation.
#[derive(Clone, Default)]
pub(crate) struct PriorState {
    model: SliceModel,
    /// Whether the operation was a transaction: it is present as a whole or not at all.
    is_whole: bool,
}

/// Opens a pool, runs some operations and ends as `end` says. Returns the contents before the last
/// operation, if they may be left.
pub(crate) fn run_life(
    kind: MediumKind,
    image: &Image,
    model: &mut SliceModel,
    random: &mut Rng,
    end: LifeEnd,
) -> (Image, Option<PriorState>) {
    let media = kind.media(image);
    let (mut pool, _) = kind.open(&media).expect("a sound pool");
    let mut sessions = [session(&mut pool), session(&mut pool)];
    let mut before = PriorState::default();
    for op in 1..=OPS_PER_LIFE {
        if op % 4 == 0 {
            // A journal of so small a pool holds few records.
            pool.maintain().expect("sound");
        }
        let name = slice(random.below(3));
        let is_only = model.keys().all(|&other| other == name);
        let is_new = !model.contains_key(&name);
        if is_new {
            pool.create(name, PAGES * PAGE).expect("room");
            model.insert(name, vec![0; (PAGES * PAGE) as usize]);
            // The new object may have the number of a deleted one.
            sessions.iter_mut().for_each(Session::clear_leaf_cache);
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
            open_ops: random.below(2).min(op - 1) as u32,
        };
        if kind == MediumKind::File && op == OPS_PER_LIFE {
            pool.flush().expect("sound");
        }
        let session = &mut sessions[random.below(2) as usize];
        let mut members = [LegSession { session, handle }];
        media.take_crash_points();
        before.model.clone_from(model);
        before.is_whole = false;
        let bytes = model.get_mut(&name).expect("it is there");
        match random.below(12) {
            0 => {
                with_journal_room(&mut pool, || clear(&mut members, offset, len, stamp));
                bytes[range].fill(0);
            }
            1 | 4 => {
                before.is_whole = true;
                let fill = random.next() as u8;
                let parts = random_parts(random, fill);
                with_journal_room(&mut pool, || transact(&mut members, &parts, stamp));
                for part in &parts {
                    let fill = match part {
                        TransactionPart::Write { .. } => fill,
                        TransactionPart::Clear { .. } => 0,
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
                let _old = pool.raise_epoch(name, Epoch(random.below(5) as u32));
            }
            _ => {
                let byte = random.next() as u8;
                let data: Vec<u8> = (0..len).map(|i| byte.wrapping_add(i as u8)).collect();
                with_journal_room(&mut pool, || write(&mut members, offset, &data, stamp));
                bytes[range].copy_from_slice(&data);
            }
        }
    }
    if end == LifeEnd::Close {
        for number in [1, 2] {
            pool.close_session(number).expect("sound");
        }
        while pool.maintain().expect("sound") {}
        pool.close().expect("sound");
        return (media.crash_point().all_persisted(), None);
    }
    let points = media.take_crash_points();
    // A file may lose all writes since the last sync, even if their operations have ended.
    let inside = match kind {
        MediumKind::Memory => &points[..points.len() - 1],
        MediumKind::File => &points[..],
    };
    if end == LifeEnd::CrashInOp && !inside.is_empty() {
        let point = &inside[random.below(inside.len() as u64) as usize];
        return (point.sample(random.next()), Some(before));
    }
    if kind == MediumKind::File {
        pool.flush().expect("sound");
    }
    (media.crash_point().sample(random.next()), None)
}

pub(crate) fn check_image(
    kind: MediumKind,
    image: &Image,
) -> Result<(PoolReport, RepairPlan), String> {
    let mut options = CheckOptions {
        is_ordered: kind == MediumKind::Memory,
        reads_data: true,
        progress: &mut |_, _| {},
    };
    check(&*kind.media(image), &mut options).map_err(|error| error.to_string())
}

/// Opens a pool and reads every page of every slice. Returns the image right after opening, and the
/// number of pages that could not be read.
pub(crate) fn read_all(
    kind: MediumKind,
    image: &Image,
    model: &SliceModel,
    before: Option<&PriorState>,
) -> Result<(Image, u64), String> {
    let media = kind.media(image);
    let opened = kind.open(&media);
    let (mut pool, _) = opened.map_err(|error| error.to_string())?;
    let image = media.crash_point().image(0);
    assert_eq!(
        image,
        media.crash_point().all_persisted(),
        "opening is durable"
    );
    let listed: Vec<SliceId> = pool.list().map(|object| object.slice).collect();
    let holds = |model: &SliceModel| {
        listed.len() == model.len() && listed.iter().all(|name| model.contains_key(name))
    };
    let was_there = before.is_some_and(|before| holds(&before.model));
    assert!(holds(model) || was_there, "slices");
    let (mut pages_old, mut pages_new) = (0, 0);
    let mut reader = session(&mut pool);
    let mut damaged = 0;
    for name in listed {
        let of = |model: &SliceModel| model.get(&name).cloned();
        let old = before.and_then(|before| of(&before.model));
        let bytes = of(model).or(old.clone()).expect("the slice is in a model");
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
                    match (old.is_some(), was, found == expected) {
                        (true, true, false) => pages_old += 1,
                        (true, false, true) => pages_new += 1,
                        _ => {}
                    }
                }
                Err(StoreError::Damaged { offset }) => {
                    assert_eq!(offset / PAGE, page, "the error names the page");
                    damaged += 1;
                }
                Err(other) => panic!("page {page} of {name}: {other}"),
            }
        }
    }
    let is_whole = pages_old == 0 || pages_new == 0;
    let may_be_half = before.is_some_and(|before| !before.is_whole);
    assert!(
        is_whole || may_be_half,
        "{pages_old} pages of a transaction are old, {pages_new} new"
    );
    pool.close_session(reader.number()).expect("sound");
    pool.close().expect("sound");
    Ok((image, damaged))
}

/// Bytes of the bitmap's lines, each of 448 frames.
pub(crate) fn bitmap_bytes(geometry: &Geometry) -> u64 {
    geometry.first_frames().end.div_ceil(448) * 64
}

pub(crate) fn bitmap_of(image: &Image) -> Vec<u64> {
    let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
    let start = geometry.bitmap.start as usize;
    let words = (start..start + bitmap_bytes(&geometry) as usize).step_by(8);
    words.map(|at| image.word(at)).collect()
}

/// The used lines of a pool's bitmap. Bytes of the others mean nothing.
pub(crate) fn used_bitmap_of(image: &Image) -> Vec<u64> {
    let mut words = bitmap_of(image);
    let media = Recorder::from_image(image.clone());
    let block = read_superblock(&media).expect("a superblock");
    words.truncate(block.bitmap_ends.lines_of_first() as usize * 8);
    words
}

pub(crate) fn with_bitmap(image: &Image, words: &[u64]) -> Image {
    let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
    let mut image = image.clone();
    for (at, &word) in (geometry.bitmap.start as usize..).step_by(8).zip(words) {
        image.set_word(at, word);
    }
    image
}

/// The bytes of an opened pool that store something.
pub(crate) fn used_bytes(image: &Image, objects_end: u32) -> Vec<bool> {
    let media = Recorder::from_image(image.clone());
    let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
    let mut used = vec![false; POOL_BYTES];
    let mut add = |at: u64, len: u64| used[at as usize..(at + len) as usize].fill(true);
    add(0, 2 * PAGE);
    let numbers = geometry.first_frames();
    add(geometry.bitmap.start, bitmap_bytes(&geometry));
    for object in 0..u64::from(objects_end) {
        let at = geometry.objects.start + object * OBJECT_BYTES;
        add(at, 112);
        let table = PageTable::new(&media, at as usize + ROOT_AT, 4, numbers.clone());
        for page in (0..PAGES).map(PageNo) {
            for level in 0..4 {
                let located = table.locate(level, page).expect("a sound table");
                if let SlotLocation::At(slot_at) = located {
                    add(slot_at as u64 / PAGE * PAGE, PAGE);
                }
            }
            if let Some(frame) = table.lookup(page).expect("a sound table").frame() {
                add(frame.0 * PAGE, PAGE);
                add(geometry.frame_table.start + frame.0 * 8, 8);
            }
        }
    }
    for at in (geometry.in_flight.start..geometry.in_flight.end()).step_by(32) {
        // Deleted entries are zeroed from the front.
        if image.word(at as usize) != 0 && image.word(at as usize + 24) != 0 {
            add(at, 32);
        }
    }
    used
}

/// Chooses a bit to flip: each region equally often, nonzero words more often.
pub(crate) fn choose_bit(image: &Image, random: &mut Rng) -> u64 {
    let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
    let regions = [
        0..2 * PAGE,
        geometry.journal_region.start..geometry.journal_region.end(),
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

/// The bytes at which live lines of journals start.
pub(crate) fn live_lines(kind: MediumKind, image: &Image) -> Vec<u64> {
    let media = Recorder::from_image(image.clone());
    let block = Pool::peek(&media).expect("a superblock");
    let geometry = block.geometry;
    let mut lines = Vec::new();
    for number in 0..block.journals_end {
        let (start, head) = (
            geometry.journal_at(number),
            block.journal_heads[number as usize],
        );
        let place = RecordAddress::new(block.pool, block.incarnation, number, head);
        let mut journal = Journal::new(start, geometry.journal_lines(), place);
        let end = match kind {
            MediumKind::Memory => journal.recover(&media).expect("sound").end,
            MediumKind::File => journal.recover_unordered(&media).end,
        };
        lines.extend((head..end).map(|line| start as u64 + line % geometry.journal_lines() * 64));
    }
    lines
}

pub(crate) struct DamageCase {
    pub(crate) kind: MediumKind,
    pub(crate) end: LifeEnd,
    /// The contents that the pool may have instead.
    pub(crate) prior: Option<PriorState>,
    pub(crate) lines: Vec<u64>,
    pub(crate) image: Image,
    pub(crate) model: SliceModel,
    pub(crate) opened: Image,
    pub(crate) used: Vec<bool>,
}

impl DamageCase {
    /// A pool with a history.
    pub(crate) fn new(kind: MediumKind, seed: u64, end: LifeEnd) -> DamageCase {
        let mut random = Rng(seed);
        let fresh = Recorder::new(POOL_BYTES);
        format(&fresh, Uuid::from_u128(7)).expect("a pool");
        let (mut image, mut model) = (fresh.crash_point().all_persisted(), SliceModel::new());
        for _ in 0..random.below(3) {
            let end = match random.below(2) {
                0 => LifeEnd::Close,
                _ => LifeEnd::Crash,
            };
            (image, _) = run_life(kind, &image, &mut model, &mut random, end);
        }
        let (image, before) = run_life(kind, &image, &mut model, &mut random, end);
        DamageCase::of(kind, image, model, before, end)
    }

    pub(crate) fn of(
        kind: MediumKind,
        image: Image,
        model: SliceModel,
        before: Option<PriorState>,
        end: LifeEnd,
    ) -> DamageCase {
        let (report, _) = check_image(kind, &image).expect("a pool");
        assert!(report.is_sound(), "findings before the flip: {report:?}");
        let (opened, damaged) =
            read_all(kind, &image, &model, before.as_ref()).expect("a sound pool");
        assert_eq!(damaged, 0);
        let block = Pool::peek(&*kind.media(&opened)).expect("a superblock");
        let used = used_bytes(&opened, block.objects_end);
        DamageCase {
            kind,
            end,
            prior: before,
            lines: live_lines(kind, &image),
            image,
            model,
            opened,
            used,
        }
    }

    pub(crate) fn read(&self, image: &Image) -> Result<(Image, u64), String> {
        read_all(self.kind, image, &self.model, self.prior.as_ref())
    }

    pub(crate) fn flip(&self, bit: u64) -> FlipOutcome {
        let mut image = self.image.clone();
        let at = bit as usize / 64 * 8;
        image.set_word(at, image.word(at) ^ 1 << (bit % 64));
        let report = check_image(self.kind, &image);
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
                // An operation that no client knows to be done may vanish with its record.
                let may_go = self.prior.is_some();
                assert!(
                    !is_silent || may_go || lost.is_none(),
                    "silently lost: byte {lost:?}"
                );
                match (is_silent, damaged) {
                    (true, _) => FlipOutcome::Unused,
                    (false, 0) => FlipOutcome::Repaired,
                    (false, _) => FlipOutcome::ReadError,
                }
            }
            Err(error) => {
                assert!(
                    !is_silent,
                    "refused, and the check finds no damage: {error}"
                );
                FlipOutcome::Refused(error)
            }
        };
        let Ok((report, plan)) = report else {
            return found;
        };
        if report.findings.iter().all(|it| it.remedy == Remedy::Pool) {
            let media = self.kind.media(&image);
            plan.apply(&*media).expect("the damage can be repaired");
            let corrected = media.crash_point().image(0);
            let (again, _) = check_image(self.kind, &corrected).expect("a pool");
            assert!(again.is_sound(), "not repaired: {report:?}, then {again:?}");
            let (_, damaged) = self.read(&corrected).expect("a repaired pool");
            assert_eq!(damaged, 0, "repaired: {report:?}");
        }
        found
    }
}

/// The outcome of a flipped bit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FlipOutcome {
    /// Opening the pool corrects the bit, and the check names it.
    Repaired,
    /// The bit stores nothing.
    Unused,
    /// Reading the page fails with an error that names it.
    ReadError,
    /// Opening the pool fails.
    Refused(String),
}
