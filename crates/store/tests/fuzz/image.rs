//! Whole pools. A pool that opens can be listed, read, written, emptied, checkpointed and closed
//! without a panic or an endless wait. Acknowledged writes are present after the next opening. A
//! pool can also be checked and repaired, and scrubbed to the end; a second check or scrub finds no
//! more to correct.
//!
//! An input is the number of a pool that the code itself wrote, and changes of its image (see
//! `tampering`), so an image of 2 MiB is stored as a few dozen bytes.

use super::tampering::{CHANGE_BYTES, TamperedImage};
use super::target;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{Stamp, TransactionPart};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Recorder;
use pagemesh_store::check::{CheckOptions, FINDINGS_MAX, FindingKind, Remedy, check};
use pagemesh_store::pool::{ObjectError, Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::recovery::PoolError;
use pagemesh_store::scrub::{ScrubCursor, ScrubReport};
use pagemesh_store::session::{LegSession, Session, clear, write};
use pagemesh_store::test_api::{ControlInternals, recover};
use pagemesh_store::transaction::transact;
use std::hash::Hash;
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

const POOL_BYTES: usize = 2 << 20;
const OLD: SliceId = SliceId(Uuid::from_u128(0xa));
const OTHER: SliceId = SliceId(Uuid::from_u128(0xb));
const NEW: SliceId = SliceId(Uuid::from_u128(0xc));
const SLICE_BYTES: u64 = 256 << 10;
/// Pages of a slice that the test reads; of a large slice only a part.
const PAGES_READ: u64 = 80;
/// Frames that the writes of a case need, nodes included.
const FRAMES_NEEDED: u64 = 16;
/// Maintenance rounds after which all deleted objects are gone.
const ROUNDS_MAX: u32 = 100;
/// Steps within which a scrub of so small a pool ends.
const SCRUB_STEPS_MAX: u32 = 1000;

type Medium = Arc<Recorder>;
type OpenResult = Result<Pool<Recorder>, PoolError>;

fn open(media: &Medium) -> OpenResult {
    Pool::open(media.clone(), media.clone()).map(|(pool, _)| pool)
}

fn session(pool: &mut Pool<Recorder>) -> Result<Session<Recorder>, ObjectError> {
    let number = pool.open_session(1, 1)?;
    Ok(Session::new(pool.mapping().clone(), number))
}

fn stamp(op: u64) -> Stamp {
    Stamp {
        epoch: Epoch(1),
        op,
        open_ops: 1,
    }
}

fn put(
    session: &mut Session<Recorder>,
    handle: Handle,
    offset: u64,
    data: &[u8],
    stamp: Stamp,
) -> Result<(), StoreError> {
    write(&mut [LegSession { session, handle }], offset, data, stamp).map_err(|failed| failed.cause)
}

fn page(byte: u8) -> Vec<u8> {
    vec![byte; PAGE_BYTES]
}

/// A pool with groups of records in the last lines of a journal.
fn with_groups() -> pagemesh_pmem::Image {
    let media = Arc::new(Recorder::new(POOL_BYTES));
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let mut pool = open(&media).expect("a sound pool");
    pool.create(OLD, SLICE_BYTES).expect("an object");
    let handle = pool.handle(OLD).expect("the object");
    let mut session = session(&mut pool).expect("a session");
    for op in 1..4 {
        let part = |number: u64| TransactionPart::Write {
            offset: (op + number * 7) * PAGE_BYTES as u64,
            data: page((op + number) as u8).into(),
        };
        let parts: Vec<TransactionPart> = (0..4).map(part).collect();
        let session = &mut session;
        transact(&mut [LegSession { session, handle }], &parts, stamp(op)).expect("room");
    }
    media.crash_point().all_persisted()
}

/// Pools as the code leaves them: new, in use, closed, emptied, torn.
fn bases() -> Vec<pagemesh_pmem::Image> {
    let media = Arc::new(Recorder::new(POOL_BYTES));
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let mut bases = vec![media.crash_point().all_persisted()];
    let mut pool = open(&media).expect("a sound pool");
    for slice in [OLD, OTHER] {
        pool.create(slice, SLICE_BYTES).expect("an object");
    }
    let old = pool.handle(OLD).expect("the object");
    let other = pool.handle(OTHER).expect("the object");
    let mut one = session(&mut pool).expect("a session");
    let mut two = session(&mut pool).expect("a session");
    for op in 1..12 {
        put(&mut one, old, op * 4096, &page(op as u8), stamp(op)).expect("a write");
        pool.maintain().expect("a sound pool");
    }
    for op in 1..6 {
        put(&mut two, other, op * 8192, &page(7).repeat(3), stamp(op)).expect("a write");
        put(&mut one, old, op * 5000, &[9; 700], stamp(op + 20)).expect("a write");
    }
    let member = |session| LegSession {
        session,
        handle: old,
    };
    clear(&mut [member(&mut one)], 8192, 8192, stamp(40)).expect("a clear");
    bases.push(media.crash_point().all_persisted());
    put(&mut two, other, 0, &page(8).repeat(8), stamp(30)).expect("a write");
    bases.push(media.crash_point().sample_recorder(5).visible_image());
    pool.raise_epoch(OLD, Epoch(2)).expect("a barrier");
    drop((one, two));
    pool.close_session(1).expect("a sound pool");
    pool.delete(OTHER).expect("the object");
    bases.push(media.crash_point().all_persisted());
    while pool.maintain().expect("a sound pool") {}
    pool.close().expect("a sound pool");
    bases.push(media.crash_point().all_persisted());
    bases.push(with_groups());
    bases
}

/// How far a case came: the result of each step.
#[derive(Hash)]
enum CaseOutcome {
    Refused(Discriminant<PoolError>),
    Exercised(Vec<StepResult>, Result<usize, Discriminant<PoolError>>),
}

#[derive(Hash)]
enum StepResult {
    Done,
    Store(Discriminant<StoreError>),
    Object(Discriminant<ObjectError>, Option<Discriminant<PoolError>>),
}

impl From<Result<(), StoreError>> for StepResult {
    fn from(result: Result<(), StoreError>) -> StepResult {
        result.map_or_else(
            |error| StepResult::Store(discriminant(&error)),
            |()| StepResult::Done,
        )
    }
}

impl From<ObjectError> for StepResult {
    fn from(error: ObjectError) -> StepResult {
        let inner = match &error {
            ObjectError::Pool(inner) => Some(discriminant(inner)),
            _ => None,
        };
        StepResult::Object(discriminant(&error), inner)
    }
}

fn case(bases: &[pagemesh_pmem::Image], input: &[u8]) -> Option<impl Hash + use<>> {
    let (&base, script) = input.split_first()?;
    let mut image = TamperedImage::new(&bases[usize::from(base) % bases.len()]);
    image.tamper(script);
    let (is_evident, is_counting) = (image.is_detectable, image.has_true_counters);
    let image = image.to_image();
    let repaired = [true, false].map(|is_ordered| repair(&image, is_ordered, is_counting));
    let scrubbed = scrub_twice(&image, is_counting);
    let used = use_pool(image, is_evident, is_counting);
    Some((repaired, scrubbed, used))
}

/// Kinds of findings, and whether the pool could be repaired.
type RepairResult = Result<(Vec<Discriminant<FindingKind>>, bool), Discriminant<PoolError>>;

/// Checks a pool and applies the repair. If the superblock's numbers are forged (`is_counting` is
/// false), records of another incarnation may count after the repair, or no number may be left.
fn repair(image: &pagemesh_pmem::Image, is_ordered: bool, is_counting: bool) -> RepairResult {
    let look = |image: pagemesh_pmem::Image| {
        let mut options = CheckOptions {
            is_ordered,
            reads_data: true,
            progress: &mut |_, _| {},
        };
        check(&Recorder::from_image(image), &mut options)
    };
    let (report, plan) = look(image.clone()).map_err(|error| discriminant(&error))?;
    assert!(report.findings.len() <= FINDINGS_MAX, "findings");
    let media = Recorder::from_image(image.clone());
    let applied = plan.apply(&media).is_ok();
    assert_eq!(
        applied,
        plan.is_possible(),
        "the plan is applied if and only if it is possible"
    );
    if applied && is_counting {
        let (again, _) = look(media.crash_point().all_persisted()).expect("a pool");
        let mut left = again.findings.iter();
        let left = left.find(|it| it.remedy == Remedy::Pool);
        assert!(left.is_none(), "{left:?} after a repair of {report:?}");
    }
    let mut kinds: Vec<_> = report
        .findings
        .iter()
        .map(|it| discriminant(&it.kind))
        .collect();
    kinds.dedup();
    Ok((kinds, applied))
}

/// Opens a pool and scrubs it to the end, twice. The second scrub finds no more to correct, unless
/// the superblock's numbers are forged: a forged number may exceed every valid one.
fn scrub_twice(
    image: &pagemesh_pmem::Image,
    is_counting: bool,
) -> Option<Result<(u64, u64), StepResult>> {
    let media = Arc::new(Recorder::from_image(image.clone()));
    let mut pool = open(&media).ok()?;
    let first = match scrub(&mut pool) {
        Ok(found) => found,
        Err(error) => return Some(Err(error.into())),
    };
    let again = scrub(&mut pool).expect("a pool that was scrubbed");
    assert!(
        !is_counting || (again.corrected(), again.damaged) == (0, first.damaged),
        "{first:?}, then {again:?}"
    );
    Some(Ok((first.corrected(), first.damaged)))
}

fn scrub(pool: &mut Pool<Recorder>) -> Result<ScrubReport, ObjectError> {
    let (mut next, mut found) = (Some(ScrubCursor::default()), ScrubReport::default());
    for _ in 0..SCRUB_STEPS_MAX {
        let Some(cursor) = next else {
            return Ok(found);
        };
        next = pool.scrub(cursor, &mut found)?;
    }
    panic!("the scrub does not end: {found:?}");
}

/// Opens a pool, uses it, closes it, and opens it again.
fn use_pool(image: pagemesh_pmem::Image, is_evident: bool, is_counting: bool) -> impl Hash {
    // On a file the order of persisted lines is unknown.
    let unordered = recover(&Recorder::from_image(image.clone()), false);
    let unordered = unordered.map_err(|error| discriminant(&error));
    let media = Arc::new(Recorder::from_image(image));
    let pool = match open(&media) {
        Err(error) => return (unordered, CaseOutcome::Refused(discriminant(&error))),
        Ok(pool) => pool,
    };
    let (steps, closed, kept) = exercise(pool);
    if let Ok(listed) = &closed {
        // A cleanly closed pool opens again, with the listed slices and the written pages.
        let mut pool = match open(&media) {
            Ok(pool) => pool,
            // With forged numbers the count of openings may overflow, or match the incarnation of
            // older records.
            Err(_) if !is_counting => {
                return (unordered, CaseOutcome::Exercised(steps, Ok(0)));
            }
            Err(error) => panic!("a closed pool does not open: {error}"),
        };
        let mut found: Vec<_> = pool.list().map(|object| object.slice).collect();
        found.sort_unstable();
        assert_eq!(found, *listed, "slices");
        // Where a forged value has a valid checksum, two slots may name one frame.
        if let Some(pages) = kept.filter(|_| is_evident) {
            read_back(&mut pool, &pages);
        }
    }
    let closed = closed
        .map(|listed| listed.len())
        .map_err(|error| discriminant(&error));
    (unordered, CaseOutcome::Exercised(steps, closed))
}

type CloseResult = Result<Vec<SliceId>, PoolError>;
/// Acknowledged pages: offsets and contents.
type AcknowledgedPages = Option<Vec<(u64, Vec<u8>)>>;

fn exercise(mut pool: Pool<Recorder>) -> (Vec<StepResult>, CloseResult, AcknowledgedPages) {
    let mut steps = Vec::new();
    let mut slices: Vec<SliceId> = pool.list().map(|object| object.slice).collect();
    slices.sort_unstable();
    assert!(slices.len() <= pool.mapping().geometry().object_count() as usize);
    let mut kept = None;
    match session(&mut pool) {
        Err(error) => steps.push(error.into()),
        Ok(mut session) => {
            for slice in slices.iter().take(3) {
                read_slice(&mut pool, &mut session, *slice, &mut steps);
            }
            kept = add_slice(&mut pool, &mut session, &mut steps);
            for slice in slices.iter().take(3) {
                change_slice(&mut pool, &mut session, *slice, &mut steps);
            }
        }
    }
    for slice in slices {
        if slice != NEW {
            steps.push(
                pool.delete(slice)
                    .map_or_else(StepResult::from, |()| StepResult::Done),
            );
        }
    }
    for round in 0.. {
        assert!(round < ROUNDS_MAX, "maintenance does not end");
        match pool.maintain() {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                steps.push(error.into());
                break;
            }
        }
    }
    let mut listed: Vec<_> = pool.list().map(|object| object.slice).collect();
    listed.sort_unstable();
    let closed = pool.checkpoint().and_then(|()| pool.close());
    (steps, closed.map(|()| listed), kept)
}

fn read_slice(
    pool: &mut Pool<Recorder>,
    session: &mut Session<Recorder>,
    slice: SliceId,
    steps: &mut Vec<StepResult>,
) {
    let (handle, object) = match (pool.handle(slice), pool.find(slice)) {
        (Ok(handle), Ok((_, object))) => (handle, object),
        (Err(error), _) | (_, Err(error)) => return steps.push(error.into()),
    };
    let pages = (object.size_bytes / PAGE_BYTES as u64).min(PAGES_READ);
    let mut bytes = page(0);
    for number in 0..pages {
        let read = session.read(
            &handle,
            number * PAGE_BYTES as u64,
            &mut bytes,
            object.epoch,
        );
        if number < 3 || read.is_err() {
            steps.push(read.into());
        }
    }
    let visited = session.visit_slots(&handle, 0..pages, object.epoch, |_, _, _| true);
    steps.push(visited.map(drop).into());
    let sums = session.checksums(&handle, PageNo(0), pages as u32, object.epoch);
    steps.push(sums.map(drop).into());
    if let Err(error) = pool.in_flight(slice) {
        steps.push(error.into());
    }
}

/// Whether the next writes need not wait for the owner, which is this thread.
fn has_frames_for_writes(
    pool: &mut Pool<Recorder>,
    session: &Session<Recorder>,
    steps: &mut Vec<StepResult>,
) -> bool {
    if let Err(error) = pool.maintain() {
        steps.push(error.into());
        return false;
    }
    let cells = pool.mapping().control().session_cells(session.number());
    let granted = cells.granted().load(Ordering::Acquire);
    granted.wrapping_sub(cells.consumed().load(Ordering::Acquire)) >= FRAMES_NEEDED
}

fn add_slice(
    pool: &mut Pool<Recorder>,
    session: &mut Session<Recorder>,
    steps: &mut Vec<StepResult>,
) -> AcknowledgedPages {
    if let Err(error) = pool.create(NEW, SLICE_BYTES) {
        steps.push(error.into());
        return None;
    }
    if !has_frames_for_writes(pool, session, steps) {
        return None;
    }
    let handle = pool.handle(NEW).expect("it was made");
    let mut kept = Vec::new();
    for (op, byte) in (1..).zip([3, 4]) {
        let data = page(byte);
        let written = put(session, handle, op * 20480, &data, stamp(op));
        if written.is_ok() {
            kept.push((op * 20480, data));
        }
        steps.push(written.into());
    }
    Some(kept)
}

fn change_slice(
    pool: &mut Pool<Recorder>,
    session: &mut Session<Recorder>,
    slice: SliceId,
    steps: &mut Vec<StepResult>,
) {
    let (Ok(handle), Ok((_, object))) = (pool.handle(slice), pool.find(slice)) else {
        return;
    };
    if slice == NEW || !has_frames_for_writes(pool, session, steps) {
        return;
    }
    let stamp = Stamp {
        epoch: object.epoch,
        op: 100,
        open_ops: 0,
    };
    steps.push(put(session, handle, 4096, &page(5), stamp).into());
    let mut members = [LegSession { session, handle }];
    let cleared = clear(&mut members, 8192, 3 * 4096, stamp);
    steps.push(cleared.map_err(|failed| failed.cause).into());
    let raised = pool.raise_epoch(slice, Epoch(object.epoch.0.saturating_add(1)));
    steps.push(raised.map_or_else(StepResult::from, |()| StepResult::Done));
    steps.push(
        pool.clear_in_flight(slice)
            .map_or_else(StepResult::from, |()| StepResult::Done),
    );
}

fn read_back(pool: &mut Pool<Recorder>, pages: &[(u64, Vec<u8>)]) {
    let handle = pool.handle(NEW).expect("the created slice");
    let mut session = session(pool).expect("a session");
    let mut found = page(0);
    for (offset, written) in pages {
        let read = session.read(&handle, *offset, &mut found, Epoch(1));
        assert_eq!(read, Ok(()), "the acknowledged write at {offset}");
        assert!(found == *written, "other bytes at {offset}");
    }
}

fn scripts() -> Vec<Vec<u8>> {
    let none = (0..6).map(|base| vec![base]);
    let one = |base: u8, what: u8, unit: u8, at: u16, value: u64| {
        let [low, high] = at.to_le_bytes();
        let mut script = vec![base, what, unit, low, high];
        script.extend(value.to_le_bytes());
        assert_eq!(script.len(), 1 + CHANGE_BYTES);
        script
    };
    let each = (0..6).flat_map(|base| (0..16).map(move |what| (base, what)));
    let each = each.map(|(base, what)| one(base, what, 1, 8, 0x0302_0000_0000_0007));
    // Counters: generation, incarnation, checkpoint, heads, a record's seq and its first page.
    let counts = [
        (0, 32),
        (0, 40),
        (0, 48),
        (0, 1024),
        (5, 3 << 14 | 8),
        (5, 3 << 14 | 24),
    ];
    let last = counts
        .iter()
        .flat_map(|&(what, at)| [1, 4].map(|base| one(base, what, 2, at, u64::MAX)));
    none.chain(each).chain(last).collect()
}

#[test]
fn fuzz_image() {
    let bases = bases();
    target("image")
        .seeds(scripts())
        .cases(600)
        .bytes_max(1 + 16 * CHANGE_BYTES)
        .run(|input| case(&bases, input));
}
