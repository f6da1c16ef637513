//! A correction writes to the pool and may itself crash. One structure is damaged; a scrub, a
//! checkpoint, an opening or a repair detects it. Crash images are built at each fence of the
//! correction. Each image must open, be sound after another scrub or check, need no further
//! correction, and hold the same contents as before.

use super::CheckCounts;
use super::budget::{Budget, WorkloadShare};
use super::fixed::{self, base};
use super::harness::CrashHarness;
use super::model::{CheckFailure, Oracle, RecoveredContents, fail};
use super::ops::{self, MAIN, Op};
use super::recover::{self, LAST_EPOCH, MediumKind};
use pagemesh_base::ids::PageNo;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{CrashPoint, Image, Media, Recorder};
use pagemesh_store::check::{CheckOptions, PoolReport, RepairPlan, check};
use pagemesh_store::journal::Journal;
use pagemesh_store::pool::Pool;
use pagemesh_store::record::RecordAddress;
use pagemesh_store::scrub::{ScrubCursor, ScrubReport};
use pagemesh_store::table::{PageTable, SlotLocation};
use pagemesh_store::test_api::{COPY_AT, PoolInternals, ROOT_AT, update_line_checksum};
use std::collections::BTreeMap;

/// Far above the number of scrub steps that so small a pool needs.
const STEPS_MAX: u32 = 1000;

/// The component that detects the damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Detector {
    Scrub,
    Checkpoint,
    /// A session that looks up a page.
    Walk,
    /// The next opening, after all processes died.
    Open,
    /// `pool check --repair`.
    Repair,
}

use Detector::{Checkpoint, Open, Repair, Scrub, Walk};

/// The activity of the pool when the damage happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PoolActivity {
    /// The journals hold records, and one of them is applied.
    Busy,
    /// The pool was opened and has done nothing since.
    Idle,
}

/// Words of the pool to flip, and the detectors that must find them.
struct InjectedDamage {
    name: String,
    flips: Vec<(usize, u64)>,
    detectors: &'static [Detector],
}

/// A pool with an operation in the in-flight table. A busy pool also has one operation in an
/// applied record and one in a record that is not applied yet.
fn prepare(
    kind: MediumKind,
    life: PoolActivity,
    tally: &mut CheckCounts,
) -> Result<CrashHarness<'_>, CheckFailure> {
    let mut world = base(kind, false).open(2, None, tally)?;
    for (client, page) in [(0, 1), (1, 2)] {
        fixed::write(&mut world, client, page, 1, page)?;
    }
    ops::run(&mut world, &Op::RaiseEpoch(MAIN), 0)?;
    fixed::write(&mut world, 0, 5, 1, 5)?;
    ops::run(&mut world, &Op::Maintain, 0)?;
    fixed::write(&mut world, 1, 36, 1, 36)?;
    ops::run(&mut world, &Op::Flush, 0)?;
    if life == PoolActivity::Idle {
        world.reopen()?;
    }
    world.medium.recorder.take_crash_points();
    Ok(world)
}

/// Live records of a client's journal: position and byte offset.
fn records(world: &CrashHarness<'_>, client: usize) -> Vec<(u64, usize)> {
    let pool = world.pool.borrow();
    let (block, geometry) = (pool.superblock(), *pool.mapping().geometry());
    let number = world.clients[client].session.number();
    let head = block.journal_heads[number as usize];
    let place = RecordAddress::new(block.pool, block.incarnation, number, head);
    let (start, length) = (geometry.journal_at(number), geometry.journal_lines());
    let scan = Journal::new(start, length, place).recover(&**pool.mapping().media());
    let entries = scan.expect("sound").entries;
    let at = |position| start + (position % length) as usize * LINE_BYTES;
    entries.iter().map(|(it, _)| (*it, at(*it))).collect()
}

fn damages(world: &CrashHarness<'_>, kind: MediumKind, life: PoolActivity) -> Vec<InjectedDamage> {
    // Without records a checkpoint has nothing to apply.
    let works = life == PoolActivity::Busy;
    let all: &'static [Detector] = match works {
        true => &[Scrub, Checkpoint, Open, Repair],
        false => &[Scrub, Open, Repair],
    };
    let mut found = Vec::new();
    let mut add = |name: String, at: usize, bit: u32, acts: &'static [Detector]| {
        let flips = vec![(at, 1 << bit)];
        found.push(InjectedDamage {
            name,
            flips,
            detectors: acts,
        });
    };
    let pool = world.pool.borrow();
    let (view, data) = (pool.mapping(), &**pool.mapping().media());
    let geometry = *view.geometry();
    for (name, generation) in [("newer", 0), ("older", 1)] {
        let place = (pool.superblock().generation - generation) % 2;
        let at = place as usize * PAGE_BYTES;
        for (word, bit) in [(0, 3), (1024, 0)] {
            add(
                format!("{name} superblock, byte {word}"),
                at + word,
                bit,
                all,
            );
        }
    }
    if works {
        for (name, client) in [("applied", 0), ("fresh", 1)] {
            let (_, at) = *records(world, client).last().expect("a live record");
            for (word, bit) in [(0, 9), (24, 1), (56, 0)] {
                add(format!("{name} record, byte {word}"), at + word, bit, all);
            }
        }
    }
    let in_flight = (geometry.in_flight.start..geometry.in_flight.end()).step_by(32);
    let mut in_flight = in_flight.map(|at| at as usize);
    let entry = in_flight.find(|&at| data.load(at) != 0 && data.load(at + 24) != 0);
    let entry = entry.expect("an operation is in flight");
    for (word, bit) in [(0, 2), (8, 1), (24, 33)] {
        add(
            format!("in-flight entry, byte {word}"),
            entry + word,
            bit,
            all,
        );
    }
    let line = geometry.bitmap.start as usize;
    for (word, bit) in [(8, 20), (56, 3)] {
        add(format!("bitmap, byte {word}"), line + word, bit, all);
    }
    let handle = world.handle(MAIN);
    let entry = geometry.object_at(handle.object());
    for (name, at) in [("line", 0), ("copy", COPY_AT)] {
        for (word, bit) in [(8, 1), (32, 14)] {
            add(
                format!("object's {name}, byte {word}"),
                entry + at + word,
                bit,
                all,
            );
        }
    }
    let table = PageTable::new(data, entry + ROOT_AT, 4, geometry.first_frames());
    let acts: &'static [Detector] = match (kind, life) {
        // The owner's stores in memory hide the damage in the file from all readers but the
        // checkpoint, which reads the file.
        (MediumKind::File, PoolActivity::Busy) => &[Checkpoint, Open, Repair],
        (MediumKind::Memory | MediumKind::Tier, PoolActivity::Busy) => {
            &[Scrub, Checkpoint, Walk, Open, Repair]
        }
        (_, PoolActivity::Idle) => &[Scrub, Walk, Open, Repair],
    };
    for level in 0..=4 {
        let Ok(SlotLocation::At(at)) = table.locate(level, PageNo(1)) else {
            panic!("page 1 is mapped");
        };
        let acts = if level == 0 { &[Repair][..] } else { acts };
        for bit in [2, 45, 60] {
            add(format!("slot of level {level}, bit {bit}"), at, bit, acts);
        }
    }
    let mut bytes = [0; LINE_BYTES];
    data.read(line, &mut bytes);
    let before = bytes;
    // Flips the bit of a used frame and the bit of a free one.
    let bit_of = |is_used: bool| {
        let frames = geometry.first_frames().start as usize..448;
        let mut frames = frames.filter(|it| (before[it / 8] >> (it % 8) & 1 != 0) == is_used);
        frames.next().expect("no such frame")
    };
    for bit in [bit_of(true), bit_of(false)] {
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    update_line_checksum(view.pool(), 0, &mut bytes);
    let words = (0..).zip(
        bytes
            .as_chunks::<8>()
            .0
            .iter()
            .zip(before.as_chunks::<8>().0),
    );
    let differ = |(at, (new, old)): (usize, (&[u8; 8], &[u8; 8]))| {
        let mask = u64::from_le_bytes(*new) ^ u64::from_le_bytes(*old);
        (mask != 0).then_some((line + at * 8, mask))
    };
    found.push(InjectedDamage {
        name: "bits of a bitmap line with a valid checksum".into(),
        flips: words.filter_map(differ).collect(),
        detectors: &[Repair],
    });
    found
}

fn scrub(pool: &mut Pool<super::medium::CrashMedium>) -> Result<ScrubReport, CheckFailure> {
    let (mut cursor, mut found) = (ScrubCursor::default(), ScrubReport::default());
    for _ in 0..STEPS_MAX {
        match pool.scrub(cursor, &mut found) {
            Ok(Some(next)) => cursor = next,
            Ok(None) => return Ok(found),
            Err(cause) => return fail("scrubbing", cause.to_string()),
        }
    }
    fail("scrubbing", "no end after the maximum of steps")
}

fn check_image(kind: MediumKind, image: &Image) -> Result<(PoolReport, RepairPlan), CheckFailure> {
    let mut options = CheckOptions {
        is_ordered: kind != MediumKind::File,
        reads_data: true,
        progress: &mut |_, _| {},
    };
    let scratch = Recorder::unrecorded(image.clone());
    check(&scratch, &mut options).or_else(|cause| fail("checking", cause.to_string()))
}

/// Lets the detector meet the damage; returns the crash points of the correction.
fn detect(
    kind: MediumKind,
    world: &CrashHarness<'_>,
    act: Detector,
) -> Result<Vec<CrashPoint>, CheckFailure> {
    let recorder = &world.medium.recorder;
    match act {
        Scrub => {
            let found = scrub(&mut world.pool.borrow_mut())?;
            if found.corrected() == 0 || found.damaged > 0 {
                return fail("correction", format!("{found:?}"));
            }
        }
        Checkpoint => {
            let done = world.pool.borrow_mut().checkpoint();
            done.or_else(|cause| fail("a checkpoint", cause.to_string()))?;
        }
        Walk => {
            let handle = world.handle(MAIN);
            let walked = recover::session(&world.pool).checksums(&handle, PageNo(1), 1, LAST_EPOCH);
            if let Err(cause) = walked {
                return fail("reading", cause.to_string());
            }
            let corrected = world.pool.borrow().corrected_slots();
            if corrected != 1 {
                return fail("correction", format!("{corrected} slots"));
            }
        }
        Open => {
            let image = recorder.crash_point().image(0);
            let (medium, _pool) = recover::open(kind, kind.recorder(image))?;
            return Ok(medium.recorder.take_crash_points());
        }
        Repair => {
            let image = recorder.crash_point().image(0);
            let (report, plan) = check_image(kind, &image)?;
            if report.is_sound() {
                return fail("checking", "the check finds no damage");
            }
            let medium = kind.recorder(image);
            let done = plan.apply(&medium);
            done.or_else(|cause| fail("repairing", cause.to_string()))?;
            return Ok(medium.take_crash_points());
        }
    }
    Ok(recorder.take_crash_points())
}

/// Recovers a crash image and repeats the scrub or repair; returns the contents of the pool.
fn continue_after_crash(
    kind: MediumKind,
    image: Image,
    act: Detector,
) -> Result<RecoveredContents, CheckFailure> {
    if act == Repair {
        let (report, plan) = check_image(kind, &image)?;
        let recorder = Recorder::unrecorded(image);
        if !report.is_sound() {
            let done = plan.apply(&recorder);
            done.or_else(|cause| fail("repairing again", cause.to_string()))?;
            let (again, _) = check_image(kind, &recorder.visible_image())?;
            if !again.is_sound() {
                return fail("checking again", format!("{report:?}, then {again:?}"));
            }
        }
        return recover::recover(kind, recorder.visible_image(), &BTreeMap::new());
    }
    let (_, pool) = recover::open(kind, Recorder::unrecorded(image))?;
    let first = scrub(&mut pool.borrow_mut())?;
    let again = scrub(&mut pool.borrow_mut())?;
    if first.damaged > 0 || again.damaged > 0 || again.corrected() > 0 {
        return fail("scrubbing again", format!("{first:?}, then {again:?}"));
    }
    recover::read_use_and_empty(&pool, &BTreeMap::new())
}

fn check_points(
    points: &[CrashPoint],
    Budget { all_max, sampled }: Budget,
    tally: &mut CheckCounts,
    mut check: impl FnMut(Image) -> Result<(), CheckFailure>,
) -> Result<(), CheckFailure> {
    for point in points {
        let mut images = point.images(all_max.max(sampled), sampled, tally.images);
        tally.points += 1;
        tally.exhausted_points += u64::from(images.is_all());
        tally.legal_images.record(point.count());
        images.try_for_each(|image| {
            tally.images += 1;
            check(image)
        })?;
    }
    Ok(())
}

fn flip(world: &CrashHarness<'_>, flips: &[(usize, u64)]) {
    let recorder = &*world.medium.recorder;
    for &(at, mask) in flips {
        recorder.store(at / 8 * 8, recorder.load(at / 8 * 8) ^ mask);
        let _durable = recorder.fence(recorder.flush(at / 8 * 8, 8));
    }
    recorder.sync().expect("a recorder");
    recorder.take_crash_points();
}

/// Damages every structure, with each component that can detect it first.
pub(super) fn corrections(
    kind: MediumKind,
    budget: Budget,
    tally: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    for life in [PoolActivity::Busy, PoolActivity::Idle] {
        let count = damages(
            &prepare(kind, life, &mut CheckCounts::default())?,
            kind,
            life,
        )
        .len();
        for number in 0..count {
            for act in [Scrub, Checkpoint, Walk, Open, Repair] {
                let mut own = CheckCounts::default();
                let world = prepare(kind, life, &mut own)?;
                let damage = damages(&world, kind, life).swap_remove(number);
                if !damage.detectors.contains(&act) {
                    continue;
                }
                flip(&world, &damage.flips);
                let InjectedDamage { name, .. } = &damage;
                let named = |CheckFailure { check, detail }| CheckFailure {
                    check,
                    detail: format!("{name}, {act:?}, {life:?}: {detail}"),
                };
                let points = detect(kind, &world, act).map_err(named)?;
                let oracle = &world.oracle;
                tally.sequences += 1;
                check_points(&points, budget, tally, |image| {
                    oracle
                        .check(&continue_after_crash(kind, image, act)?)
                        .map(drop)
                })
                .map_err(named)?;
            }
        }
    }
    skipped_records(kind, budget, tally)
}

/// An applied record lost two bits. Once recovery starts behind that record, the oracle expects all
/// its operations to be listed.
pub(super) fn skipped_records(
    kind: MediumKind,
    budget: Budget,
    tally: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    let mut own = CheckCounts::default();
    let world = prepare(kind, PoolActivity::Busy, &mut own)?;
    let (position, at) = *records(&world, 0).last().expect("a live record");
    let number = world.clients[0].session.number();
    flip(&world, &[(at + 24, 2), (at + 40, 4)]);
    let points = detect(kind, &world, Scrub)?;
    // Until then a lost record looks like a torn one of a crash, so nothing is expected to be
    // listed.
    let unknown = Oracle {
        open: BTreeMap::new(),
        ..world.oracle.clone()
    };
    let (mut passed, mut images) = (0, 0);
    tally.sequences += 1;
    check_points(&points, budget, tally, |image| {
        let block = Pool::peek(&Recorder::unrecorded(image.clone()));
        let block = block.or_else(|cause| fail("opening", cause.to_string()))?;
        let is_passed = block.journal_heads[number as usize] > position;
        images += 1;
        passed += u64::from(is_passed);
        let oracle = if is_passed { &world.oracle } else { &unknown };
        oracle
            .check(&continue_after_crash(kind, image, Scrub)?)
            .map(drop)
    })?;
    if budget.sampled > 0 && (passed == 0 || passed == images) {
        return fail("records left behind", format!("{passed} of {images}"));
    }
    Ok(())
}

pub(super) const CORRECTIONS: WorkloadShare = WorkloadShare {
    budget: Budget {
        all_max: 64,
        sampled: 10,
    },
    images_min: 1000,
    percent: 5,
};

#[test]
fn every_correction_in_memory() {
    fixed::check("corrections in memory", CORRECTIONS, |budget, tally| {
        corrections(MediumKind::Memory, budget, tally)
    });
}

#[test]
fn every_correction_in_file() {
    fixed::check("corrections in a file", CORRECTIONS, |budget, tally| {
        corrections(MediumKind::File, budget, tally)
    });
}
