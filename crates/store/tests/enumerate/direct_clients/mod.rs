//! Direct clients: sessions of two pools with overlapping writes. Only the pools' lock words order
//! them (`write_with_number`, docs/rfd/015). One client writes, another starts at any of its
//! accesses, and each may die at any of its own accesses. The owners of the pools retire the dead
//! one after the other, while a third client writes; the torn ranges are reconciled. Both pools
//! crash at every fence and are recovered:
//!
//! - the legs are equal afterwards;
//! - their contents are the result of one order of the writes, which has every acknowledged one;
//! - each pool is sound (`recover`).
//!
//! Without a crash, the bytes that a dead client left in the last pool are in all pools before it.

mod media_pair;
mod oracle;

use super::budget::env_number;
use super::model::{CheckFailure, fail};
use super::recover::{self, MediumKind};
use super::rng::Rng;
use super::{POOL_BYTES, catch_panic, set_defect};
use media_pair::{ClientDeath, MediaPair, PairedMedium};
use oracle::{RecoveredLeg, WriteOracle, reconcile_and_check};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{CrashPoint, Image, Recorder};
use pagemesh_store::control::LockWords;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::{LegSession, Session, write, write_numbered};
use pagemesh_store::test_api::ControlInternals;
use pagemesh_store::wait::set_yield_fn;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock};
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(1));
/// Two lock words, of 16 pages each.
const PAGES: usize = 20;
const EPOCH: Epoch = Epoch(1);
/// All sessions of the smallest pool but one: the controller reconciles torn ranges through that
/// one.
const CLIENTS: usize = 3;
/// The base's own operations have lower numbers.
const FIRST_OP: u64 = 1000;
/// Images of one medium at one crash point; if more are legal, they are sampled.
const IMAGES_MAX: u64 = 6;
/// Random scenarios of a test run, besides those of every access.
const SCENARIOS: u64 = 150;

/// Bytes of the slice: offset and length.
type ByteRange = (usize, usize);

/// The writes, the points at which clients start, and the deaths.
#[derive(Clone, Copy, Debug, Default)]
struct Scenario {
    writes: [ByteRange; CLIENTS],
    /// Accesses of the first client before the second one starts.
    second_starts_after: Option<u64>,
    /// Accesses of each client before it dies.
    death_after: [Option<u64>; CLIENTS],
    /// The pool of the owner that retires the dead first.
    first_owner: usize,
    seed: u64,
}

/// A direct client: a session of each pool.
struct DirectClient {
    sessions: Option<[Session<PairedMedium>; 2]>,
    numbers: [u32; 2],
    /// The index and bytes of the write in which the client died.
    died_in: Option<(usize, ByteRange)>,
}

struct DirectHarness {
    media_pair: Arc<MediaPair>,
    pools: [RefCell<Pool<PairedMedium>>; 2],
    clients: RefCell<Vec<DirectClient>>,
    /// Ranges of retired clients that are still to be reconciled.
    torn_ranges: RefCell<Vec<ByteRange>>,
    op: Cell<u64>,
    tag: Cell<u8>,
}

thread_local! {
    /// The harness; its owners retire the dead when a client waits for a lock word.
    static WORLD: RefCell<Option<Rc<DirectHarness>>> = const { RefCell::new(None) };
}

/// In place of a wait, the owners retire the dead clients of this thread's harness; false if there
/// are none.
fn retire_dead() -> bool {
    let world = WORLD.with_borrow(Clone::clone);
    world.is_some_and(|world| media_pair::without_access_plan(|| world.retire_all([0, 1])))
}

/// Runs an operation of an owner, which waits for no client.
fn as_owner<T>(run: impl FnOnce() -> T) -> T {
    set_yield_fn(None);
    let result = run();
    set_yield_fn(Some(Rc::new(retire_dead)));
    result
}

/// The initial pools: some pages, partly checkpointed.
fn base() -> &'static ([Image; 2], Arc<[u8]>) {
    static BASE: OnceLock<([Image; 2], Arc<[u8]>)> = OnceLock::new();
    BASE.get_or_init(|| {
        let present = defect::present();
        set_defect(None);
        let bytes: Vec<u8> = (0..PAGES * PAGE_BYTES)
            .map(|at| (at / 64 % 251) as u8 | 1)
            .collect();
        let images = [9, 10].map(|id| {
            let media = Recorder::unrecorded(Image::filled(POOL_BYTES, 0x5555_aaaa_1234_8765));
            format(&media, Uuid::from_u128(id)).expect("a pool");
            let media = Arc::new(media);
            let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("a pool");
            pool.create(SLICE, bytes.len() as u64).expect("an object");
            pool.raise_epoch(SLICE, EPOCH).expect("an epoch");
            let number = pool.open_session(1, 1).expect("a session");
            let mut session = Session::new(pool.mapping().clone(), number);
            let handle = pool.handle(SLICE).expect("the slice");
            for (page, data) in bytes.as_chunks::<PAGE_BYTES>().0.iter().enumerate() {
                let stamp = Stamp {
                    epoch: EPOCH,
                    op: page as u64 + 1,
                    open_ops: 0,
                };
                let session = &mut session;
                let at = (page * PAGE_BYTES) as u64;
                write(&mut [LegSession { session, handle }], at, data, stamp).expect("room");
            }
            pool.close_session(number).expect("a sound pool");
            pool.clear_in_flight(SLICE).expect("a sound pool");
            media.visible_image()
        });
        set_defect(present);
        (images, bytes.into())
    })
}

impl DirectHarness {
    fn open() -> Rc<DirectHarness> {
        let (images, bytes) = base();
        let both = Arc::new(MediaPair {
            media: images.clone().map(Recorder::from_image),
            oracle: Mutex::new(WriteOracle::new(bytes.clone())),
            crash_points: Mutex::default(),
        });
        let pools = [0, 1].map(|at| {
            let both = both.clone();
            let half = Arc::new(PairedMedium { pair: both, at });
            RefCell::new(Pool::open(half.clone(), half).expect("a sound pool").0)
        });
        let client = |_| {
            let numbers = pools
                .each_ref()
                .map(|pool| pool.borrow_mut().open_session(1, 1).expect("a session"));
            let session = |at: usize| {
                let view = pools[at].borrow().mapping().clone();
                Session::new(view, numbers[at])
            };
            DirectClient {
                sessions: Some([session(0), session(1)]),
                numbers,
                died_in: None,
            }
        };
        let guests = (0..CLIENTS).map(client).collect();
        both.crash_points.lock().expect("no panic inside").clear();
        Rc::new(DirectHarness {
            media_pair: both,
            pools,
            clients: RefCell::new(guests),
            torn_ranges: RefCell::default(),
            op: Cell::new(FIRST_OP),
            tag: Cell::new(0),
        })
    }

    fn with_oracle<T>(&self, change: impl FnOnce(&mut WriteOracle) -> T) -> T {
        change(&mut self.media_pair.oracle.lock().expect("no panic inside"))
    }

    fn next_stamp(&self) -> Stamp {
        self.op.set(self.op.get() + 1);
        Stamp {
            epoch: EPOCH,
            op: self.op.get(),
            open_ops: 0,
        }
    }

    fn handles(&self) -> [Handle; 2] {
        let handle = |at: usize| self.pools[at].borrow().handle(SLICE).expect("the slice");
        [handle(0), handle(1)]
    }

    /// Whether all lock words of these pages are free. A client that runs in between another's
    /// accesses must not wait for it.
    fn is_free(&self, (offset, len): ByteRange) -> bool {
        let (first, last) = (offset / PAGE_BYTES, (offset + len - 1) / PAGE_BYTES);
        let (page, count) = (PageNo(first as u64), (last - first + 1) as u64);
        let handles = self.handles();
        (0..2).all(|at| {
            let range = LockWords::of(handles[at].object(), page, count);
            let pool = self.pools[at].borrow();
            pool.mapping().control().is_unlocked(&range)
        })
    }

    /// A client writes as every direct client does; returns the number of its accesses.
    fn write(
        &self,
        guest: usize,
        bytes: ByteRange,
        death: Option<u64>,
        other: Option<(u64, Box<dyn FnOnce()>)>,
    ) -> Result<u64, CheckFailure> {
        let sessions = self.clients.borrow_mut()[guest].sessions.take();
        let Some([mut one, mut two]) = sessions else {
            return Ok(0);
        };
        self.tag.set(self.tag.get() + 1);
        let data: Arc<[u8]> = vec![0x80 | self.tag.get(); bytes.1].into();
        let id = self.with_oracle(|oracle| oracle.begin_write(bytes.0, data.clone()));
        let handles = self.handles();
        let (outcome, accesses) = media_pair::with_access_plan(death, other, || {
            let mut members = [(&mut one, handles[0]), (&mut two, handles[1])]
                .map(|(session, handle)| LegSession { session, handle });
            let stamp = || {
                let stamp = self.next_stamp();
                self.with_oracle(|oracle| oracle.assign_number(Some(id), stamp.op));
                media_pair::step();
                stamp
            };
            write_numbered(&mut members, bytes.0 as u64, &data, EPOCH, stamp)
        });
        match outcome {
            Ok(Ok(())) => {
                self.with_oracle(|oracle| oracle.end_write(id));
                self.clients.borrow_mut()[guest].sessions = Some([one, two]);
            }
            Ok(Err(failure)) => return fail("operations", failure.to_string()),
            Err(cause) if cause.is::<ClientDeath>() => {
                self.clients.borrow_mut()[guest].died_in = Some((id, bytes));
            }
            Err(cause) => std::panic::resume_unwind(cause),
        }
        self.media_pair.record_crash_point();
        Ok(accesses)
    }

    /// The owner of a pool retires a dead client.
    fn retire_in_pool(&self, client: usize, at: usize) {
        let number = self.clients.borrow()[client].numbers[at];
        let mut pool = self.pools[at].borrow_mut();
        if pool.is_open(number) {
            as_owner(|| pool.close_session(number)).expect("a sound pool");
        }
    }

    /// Both owners retire the dead in this order; false if no client is dead.
    fn retire_all(&self, order: [usize; 2]) -> bool {
        let dead = |client: &usize| self.clients.borrow()[*client].died_in.is_some();
        let dead: Vec<usize> = (0..CLIENTS).filter(dead).collect();
        for &client in &dead {
            order.iter().for_each(|&at| self.retire_in_pool(client, at));
            let died_in = self.clients.borrow_mut()[client].died_in.take();
            let (id, bytes) = died_in.expect("it is dead");
            self.with_oracle(|oracle| oracle.retire_write(id));
            self.torn_ranges.borrow_mut().push(bytes);
        }
        !dead.is_empty()
    }

    /// Runs a closure with a living client's session, or with a new one.
    fn with_session<T>(&self, at: usize, run: impl FnOnce(&mut Session<PairedMedium>) -> T) -> T {
        let mut guests = self.clients.borrow_mut();
        let mut alive = guests.iter_mut().filter_map(|it| it.sessions.as_mut());
        match alive.next() {
            Some(sessions) => run(&mut sessions[at]),
            None => {
                let (number, mut session) = self.open_session(at);
                let result = run(&mut session);
                let closed = as_owner(|| self.pools[at].borrow_mut().close_session(number));
                closed.expect("a sound pool");
                result
            }
        }
    }

    fn open_session(&self, at: usize) -> (u32, Session<PairedMedium>) {
        let mut pool = self.pools[at].borrow_mut();
        let number = as_owner(|| pool.open_session(1, 1)).expect("a session");
        (number, Session::new(pool.mapping().clone(), number))
    }

    fn read(&self, at: usize) -> Vec<u8> {
        let (handle, mut bytes) = (self.handles()[at], vec![0; PAGES * PAGE_BYTES]);
        let read = self.with_session(at, |session| session.read(&handle, 0, &mut bytes, EPOCH));
        read.expect("nothing is damaged");
        bytes
    }

    /// Copies the pages of torn ranges from the last pool to the first.
    fn reconcile_torn(&self) {
        let rows = self.torn_ranges.take();
        if rows.is_empty() {
            return;
        }
        let (_, mut session) = self.open_session(0);
        for (offset, len) in rows {
            for page in offset / PAGE_BYTES..(offset + len).div_ceil(PAGE_BYTES) {
                let place = page * PAGE_BYTES;
                let [from, to] = [1, 0].map(|at| self.read(at)[place..][..PAGE_BYTES].to_vec());
                if from != to {
                    let (stamp, handle) = (self.next_stamp(), self.handles()[0]);
                    self.with_oracle(|oracle| oracle.assign_number(None, stamp.op));
                    let session = &mut session;
                    let mut members = [LegSession { session, handle }];
                    write(&mut members, place as u64, &from, stamp).expect("room");
                }
            }
        }
        self.media_pair.record_crash_point();
    }

    /// Checks the visible contents of both pools.
    fn check_visible(&self) -> Result<(), CheckFailure> {
        let [one, two] = [0, 1].map(|at| self.read(at));
        let allowed = self.with_oracle(|oracle| oracle.all_allowed());
        for (page, allowed) in allowed.iter().enumerate() {
            let [one, two] = [&one, &two].map(|bytes| &bytes[page * PAGE_BYTES..][..PAGE_BYTES]);
            if one != two {
                return fail("legs are equal", format!("page {page} differs"));
            }
            let sum = crc32c(one);
            if !allowed.iter().any(|(allowed, _)| *allowed == sum) {
                return fail("one order of writes", format!("page {page} is wrong"));
            }
        }
        Ok(())
    }

    /// Direct clients read the last pool: each new page that a dead client left there must be in
    /// the other pool, too.
    fn check_last_leg_on_all(&self) -> Result<(), CheckFailure> {
        let [one, two] = [0, 1].map(|at| self.read(at));
        let base = &base().1;
        for at in (0..one.len()).step_by(PAGE_BYTES) {
            let page = |bytes: &[u8]| bytes[at..][..PAGE_BYTES].to_vec();
            if page(&two) != page(base) && page(&one) == page(base) {
                let detail = format!("page {} is new in the last pool alone", at / PAGE_BYTES);
                return fail("the last leg's data is on all legs", detail);
            }
        }
        Ok(())
    }

    /// Crashes at every crash point so far.
    fn check_crashes(&self, seed: u64, tally: &mut ScenarioCounts) -> Result<(), CheckFailure> {
        let moments = std::mem::take(
            &mut *self
                .media_pair
                .crash_points
                .lock()
                .expect("no panic inside"),
        );
        for moment in moments {
            let allowed = moment.oracle.all_allowed();
            let mut legs: [Vec<RecoveredLeg>; 2] = [vec![], vec![]];
            for (legs, point) in legs.iter_mut().zip(&moment.points) {
                for image in images(point, seed) {
                    let found = recover::recover(MediumKind::Memory, image, &BTreeMap::new())?;
                    let leg = RecoveredLeg::new(found, SLICE, PAGES);
                    leg.check_numbers(&moment.oracle, &allowed)?;
                    legs.push(leg);
                    tally.images += 1;
                }
            }
            for one in &legs[0] {
                for other in &legs[1] {
                    tally.differing += u64::from(reconcile_and_check([one, other], &allowed)? > 0);
                    tally.pairs += 1;
                }
            }
        }
        Ok(())
    }
}

/// Images of one medium: no uncertain write, all of them, and subsets.
fn images(point: &CrashPoint, seed: u64) -> Vec<Image> {
    if point.count() <= IMAGES_MAX {
        return (0..point.count()).map(|index| point.image(index)).collect();
    }
    let sampled = (0..IMAGES_MAX - 2).map(|number| point.sample(seed << 8 | number));
    [point.image(0), point.all_persisted()]
        .into_iter()
        .chain(sampled)
        .collect()
}

/// Counts of the checks.
#[derive(Default, Debug)]
struct ScenarioCounts {
    scenarios: u64,
    images: u64,
    pairs: u64,
    differing: u64,
}

/// Runs a scenario; returns the number of accesses of each client.
fn run_scenario(
    story: Scenario,
    tally: &mut ScenarioCounts,
) -> Result<[u64; CLIENTS], CheckFailure> {
    tally.scenarios += 1;
    let world = as_owner(DirectHarness::open);
    WORLD.set(Some(world.clone()));
    let reported = run_scenario_in(&world, story, tally);
    set_yield_fn(None);
    WORLD.set(None);
    reported
}

fn run_scenario_in(
    world: &Rc<DirectHarness>,
    story: Scenario,
    tally: &mut ScenarioCounts,
) -> Result<[u64; CLIENTS], CheckFailure> {
    let [a, b, c] = story.writes;
    let nested: Rc<Cell<Option<Result<u64, CheckFailure>>>> = Rc::default();
    let other = story.second_starts_after.map(|after| {
        let (world, nested) = (world.clone(), nested.clone());
        let go_on = move || {
            if world.is_free(b) {
                nested.set(Some(world.write(1, b, story.death_after[1], None)));
            }
        };
        (after, Box::new(go_on) as Box<dyn FnOnce()>)
    });
    let mut accesses = [0; CLIENTS];
    accesses[0] = world.write(0, a, story.death_after[0], other)?;
    let mut has_b = false;
    if let Some(nested) = nested.take() {
        accesses[1] = nested?;
        has_b = true;
    }
    // One owner retires the dead before the third write.
    let order = [story.first_owner, 1 - story.first_owner];
    for client in 0..CLIENTS {
        if world.clients.borrow()[client].died_in.is_some() {
            world.retire_in_pool(client, order[0]);
        }
    }
    let mut has_c = false;
    if world.is_free(c) {
        accesses[2] = world.write(2, c, story.death_after[2], None)?;
        has_c = true;
    }
    world.retire_all(order);
    if story.death_after[2].is_none() {
        world.check_last_leg_on_all()?;
    }
    if !has_b {
        accesses[1] = world.write(1, b, story.death_after[1], None)?;
        world.retire_all(order);
    }
    if !has_c {
        accesses[2] = world.write(2, c, story.death_after[2], None)?;
        world.retire_all(order);
    }
    world.reconcile_torn();
    world.check_visible()?;
    world.check_crashes(story.seed, tally)?;
    Ok(accesses)
}

fn check(story: Scenario, tally: &mut ScenarioCounts) -> Result<[u64; CLIENTS], CheckFailure> {
    let mut accesses = [0; CLIENTS];
    catch_panic(|| {
        accesses = run_scenario(story, tally)?;
        Ok(())
    })
    .or_else(|CheckFailure { check, detail }| fail(check, format!("{story:?}: {detail}")))?;
    Ok(accesses)
}

const P: usize = PAGE_BYTES;
/// Overlapping ranges. Two of the last three also touch, or only touch, another lock word.
const RANGES: [ByteRange; 9] = [
    (P, P),
    (P + 100, 300),
    (P + 300, 1000),
    (P, 2 * P),
    (2 * P, 2 * P),
    (P + 8, 2 * P),
    (15 * P, 2 * P),
    (17 * P + 5, 600),
    (P + 350, 200),
];

/// The first client dies, or the second starts, at every access of these writes.
fn every_access(tally: &mut ScenarioCounts) -> Result<(), CheckFailure> {
    let pairs = [
        (0, 0, 1),
        (1, 2, 1),
        (0, 1, 2),
        (3, 4, 1),
        (1, 7, 0),
        // Both writes go in place and share some bytes.
        (1, 8, 1),
    ];
    for (a, b, c) in pairs {
        let writes = [RANGES[a], RANGES[b], RANGES[c]];
        let story = Scenario {
            writes,
            ..Scenario::default()
        };
        let [accesses, ..] = check(story, tally)?;
        for at in 0..accesses {
            let dies = Scenario {
                death_after: [Some(at), None, None],
                first_owner: at as usize % 2,
                ..story
            };
            check(dies, tally)?;
            let lets_go = Scenario {
                second_starts_after: Some(at),
                ..story
            };
            check(lets_go, tally)?;
        }
    }
    Ok(())
}

fn random_scenario(seed: u64) -> Scenario {
    let mut rng = Rng::new(seed);
    let mut place = || RANGES[rng.below(RANGES.len() as u64) as usize];
    let writes = [place(), place(), place()];
    // About as many accesses as a one-page write has.
    let death = |rng: &mut Rng| (rng.below(2) == 0).then(|| rng.below(24));
    Scenario {
        writes,
        second_starts_after: (rng.below(3) > 0).then(|| rng.below(20)),
        death_after: [(); CLIENTS].map(|()| death(&mut rng)),
        first_owner: rng.below(2) as usize,
        seed,
    }
}

#[test]
fn direct_writes_end_in_some_serial_order() {
    let mut tally = ScenarioCounts::default();
    let reported = match env_number("PAGEMESH_SEED") {
        Some(seed) => check(random_scenario(seed), &mut tally).map(drop),
        None => every_access(&mut tally).and_then(|()| {
            let from = env_number("PAGEMESH_FROM").unwrap_or(1);
            let count = env_number("PAGEMESH_STORIES").unwrap_or(SCENARIOS);
            (from..from + count)
                .try_for_each(|seed| check(random_scenario(seed), &mut tally).map(drop))
        }),
    };
    reported.unwrap_or_else(|wrong| panic!("{wrong:?}"));
    println!("guests: {tally:?}");
    assert!(tally.differing > 100 || tally.scenarios == 1, "{tally:?}");
}

/// Each defect, and the check that must fail first.
const DEFECTS: [(Defect, &str); 4] = [
    (
        Defect::NumberedBeforeLocks,
        "numbers are in the order of slots",
    ),
    (Defect::UnlockBeforePublish, "the store's own assertions"),
    (Defect::LastLegFirst, "the last leg's data is on all legs"),
    (Defect::NoCommitFence, "one order of writes"),
];

#[test]
fn defects_of_direct_writes_are_caught() {
    for (defect, by) in DEFECTS {
        set_defect(Some(defect));
        let mut tally = ScenarioCounts::default();
        let random = |tally: &mut ScenarioCounts| {
            (1..2000).try_for_each(|seed| check(random_scenario(seed), tally).map(drop))
        };
        let reported = every_access(&mut tally).and_then(|()| random(&mut tally));
        set_defect(None);
        let Err(CheckFailure { check, detail }) = reported else {
            panic!("{defect:?} is not caught: {tally:?}");
        };
        println!("{defect:?}: {check}: {detail}, {tally:?}");
        assert_eq!(check, by, "{defect:?}");
    }
}
