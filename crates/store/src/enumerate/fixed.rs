//! Every operation, every pair, and every access at which a session can die.

use super::budget::{Budget, COUNTED, Part};
use super::model::{Held, Oracle, Wrong, wrong};
use super::ops::{self, FILL, MAIN, MAIN_PAGES, OTHER, Op, Run};
use super::recover::{self, Kind};
use super::world::World;
use super::{POOL_BYTES, Tally, guard};
use crate::pool::format;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Recorder};
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
/// Records that fill the lanes of two sessions but for a few lines.
const LANE_RECORDS: u64 = 2 * 117;
/// Images at each sync of that recovery.
const IMAGES_OF_HIDDEN: u64 = 100;
/// Records that are more than a quarter of a lane.
const HELD_RECORDS: u64 = 34;
/// Pages of the object that fills a pool, and about how many frames are left.
const FILL_PAGES: u64 = 460;
const FREE_FRAMES: u64 = 20;

/// Clients of the workloads of listed operations; the lane of the last is new.
const CLIENTS: usize = 3;

/// A pool with data: part of it checkpointed, part not.
#[derive(Clone)]
pub(super) struct Base {
    pub(super) kind: Kind,
    pub(super) image: Image,
    pub(super) held: Held,
}

/// The base of each kind, roomy or nearly full.
pub(super) fn base(kind: Kind, is_full: bool) -> &'static Base {
    static BASES: [OnceLock<Base>; 4] = [const { OnceLock::new() }; 4];
    let place = usize::from(kind == Kind::File) * 2 + usize::from(is_full);
    BASES[place].get_or_init(|| {
        let present = crate::defect::present();
        crate::defect::set(None);
        let base = make(kind, is_full).unwrap_or_else(|wrong| panic!("the base: {wrong:?}"));
        crate::defect::set(present);
        base
    })
}

fn make(kind: Kind, is_full: bool) -> Result<Base, Wrong> {
    // Frames hold what was there before: nothing may rely on zeroes.
    let recorder = Recorder::unrecorded(Image::filled(POOL_BYTES, 0x5555_aaaa_1234_8765));
    format(&recorder, Uuid::from_u128(9)).expect("a pool");
    let mut tally = Tally::default();
    let image = recorder.now();
    let mut world = World::open(kind, image, Oracle::default(), 2, None, &mut tally)?;
    let create = |world: &mut World<'_>, slice, pages| {
        let entry = super::model::Entry {
            pages,
            epoch: 0,
            round: 0,
        };
        world.own(
            true,
            Some(super::model::Effect::Put(slice, Some(entry))),
            |pool| {
                let created = pool.borrow_mut().create(slice, pages * PAGE);
                created.map_err(|cause| cause.to_string())
            },
        )
    };
    create(&mut world, MAIN, MAIN_PAGES)?;
    if is_full {
        create(&mut world, FILL, FILL_PAGES)?;
        for chunk in 0..FILL_PAGES / 10 {
            let data = ops::bytes(1 << 32 | chunk, 10 * PAGE_BYTES);
            world.write(0, FILL, chunk * 10 * PAGE, &data, 0, None)?;
            ops::run(&mut world, &Op::Tend, 0)?;
        }
    }
    // Lanes are about to wrap.
    for record in 0..LANE_RECORDS {
        write(&mut world, record as usize % 2, 20, 1, 1000 + record)?;
        if record % 40 == 0 {
            ops::run(&mut world, &Op::Tend, 0)?;
        }
    }
    for page in [0, 1, 2, 20] {
        write(&mut world, 0, page, 1, page)?;
    }
    ops::run(&mut world, &Op::Tend, 0)?;
    ops::run(&mut world, &Op::Settle(MAIN), 0)?;
    ops::run(&mut world, &Op::Settle(FILL), 0)?;
    write(&mut world, 1, 3, 1, 99)?;
    ops::run(&mut world, &Op::Flush, 0)?;
    let held = world.oracle.certain.clone();
    Ok(Base {
        kind,
        image: world.medium.recorder.crash_point().image(0),
        held,
    })
}

pub(super) fn write(
    world: &mut World<'_>,
    client: usize,
    page: u64,
    pages: u64,
    tag: u64,
) -> Result<(), Wrong> {
    let op = Op::Write {
        client,
        slice: MAIN,
        at: page * PAGE,
        len: pages * PAGE,
        open: 0,
        death: None,
    };
    ops::run(world, &op, 1 << 33 | tag)
}

impl Base {
    /// The pool at work.
    pub(super) fn open<'t>(
        &self,
        clients: usize,
        budget: Option<Budget>,
        tally: &'t mut Tally,
    ) -> Result<World<'t>, Wrong> {
        let oracle = Oracle {
            certain: self.held.clone(),
            ..Oracle::default()
        };
        let image = self.image.clone();
        let mut world = World::open(self.kind, image, oracle, clients, budget, tally)?;
        if let Some(fill) = self.held.get(&FILL) {
            let sums = fill.pages.iter().map(|(&page, content)| (page, content.0));
            world.unread = BTreeMap::from([(FILL, sums.collect())]);
        }
        Ok(world)
    }
}

/// Every operation in a form or two.
pub(super) fn all() -> Vec<Op> {
    let write = |client, slice, at, len, open| Op::Write {
        client,
        slice,
        at,
        len,
        open,
        death: None,
    };
    let clear = |at, len| Op::Clear {
        client: 0,
        slice: MAIN,
        at,
        len,
        open: 0,
        death: None,
    };
    let run = |page, pages, is_written| Run {
        page,
        pages,
        is_written,
    };
    let transact = |client, slice, runs| Op::Transact {
        client,
        slice,
        runs,
        open: 1,
        death: None,
    };
    vec![
        write(0, MAIN, PAGE, PAGE, 0),
        write(0, MAIN, 30 * PAGE, PAGE, 1),
        write(1, MAIN, 2 * PAGE, 3 * PAGE, 1),
        // The first record in a lane that was never used.
        write(2, MAIN, 5 * PAGE, PAGE, 0),
        write(0, MAIN, PAGE + 100, 300, 0),
        // Bytes of the same page, some of them the same, by another.
        write(1, MAIN, PAGE + 350, 200, 1),
        // Three records: part, whole, part.
        write(0, MAIN, PAGE + 8, 2 * PAGE, 2),
        // A node is linked in a frame that held other bytes.
        write(1, MAIN, 511 * PAGE, 2 * PAGE, 0),
        write(0, OTHER, PAGE, 2 * PAGE, 0),
        clear(PAGE, 2 * PAGE),
        clear(3 * PAGE + 8, 64),
        clear(8, 3 * PAGE),
        // Three records, one of several lines.
        transact(
            0,
            MAIN,
            vec![run(1, 4, true), run(20, 1, true), run(33, 1, true)],
        ),
        // Two leaves, the second of which is linked for it; what is not mapped
        // is left out.
        transact(
            0,
            MAIN,
            vec![run(510, 4, true), run(0, 2, false), run(7, 9, false)],
        ),
        transact(
            0,
            MAIN,
            vec![run(1, 1, false), run(3, 1, false), run(20, 2, false)],
        ),
        transact(1, MAIN, vec![run(540, 3, false)]),
        Op::Create,
        Op::Grow(MAIN),
        Op::Delete(MAIN),
        Op::Raise(MAIN, 2),
        Op::Settle(MAIN),
        Op::Tend,
        Op::Flush,
        Op::Reopen,
        Op::Replace(0),
    ]
}

/// Runs operations from a pool with data and checks a crash at each fence. The
/// first `known` operations are not checked: another list begins with them.
pub(super) fn enumerate(
    kind: Kind,
    list: &[Op],
    known: usize,
    budget: Budget,
    tally: &mut Tally,
) -> Result<(), Wrong> {
    tally.sequences += 1;
    // The opening is the same for all.
    let opening = list.is_empty().then_some(budget);
    let mut world = base(kind, false).open(CLIENTS, opening, tally)?;
    for (at, op) in list.iter().enumerate() {
        world.budget = (at >= known).then_some(budget);
        ops::run(&mut world, op, at as u64 + 1)?;
    }
    world.empty()
}

/// Lists of operations, of which the first so many are known.
fn enumerate_all(
    kind: Kind,
    lists: impl Iterator<Item = (usize, Vec<Op>)>,
    budget: Budget,
    tally: &mut Tally,
) -> Result<(), Wrong> {
    for (known, list) in lists {
        let checked = enumerate(kind, &list, known, budget, tally);
        checked.or_else(|Wrong { check, detail }| wrong(check, format!("{list:?}: {detail}")))?;
    }
    Ok(())
}

/// Runs a workload with the budget of the tests, or of a campaign.
pub(super) fn check(
    name: &str,
    part: Part,
    workload: impl Fn(Budget, &mut Tally) -> Result<(), Wrong>,
) -> Tally {
    let run = |budget| {
        let mut tally = Tally::default();
        let outcome = guard(|| workload(budget, &mut tally));
        outcome.unwrap_or_else(|wrong| panic!("{name}, {budget}, after {tally}: {wrong:?}"));
        tally
    };
    let budget = match part.asked_for() {
        None => part.budget,
        Some(images) => run(COUNTED).legal.spend(images, part.budget),
    };
    let tally = run(budget);
    println!("{name}, {budget}: {tally}");
    assert!(tally.images >= part.least, "{tally:?}");
    tally
}

const OPERATIONS: Part = Part {
    budget: Budget {
        all_max: 4096,
        sampled: 200,
    },
    least: 3000,
    percent: 5,
};
const PAIRS: Part = Part {
    budget: Budget {
        all_max: 1024,
        sampled: 8,
    },
    least: 20_000,
    percent: 10,
};
const DEATHS: Part = Part {
    budget: Budget {
        all_max: 256,
        sampled: 8,
    },
    least: 10_000,
    percent: 5,
};
const STANDING: Part = Part {
    budget: Budget {
        all_max: 16,
        sampled: 4,
    },
    least: 10_000,
    percent: 5,
};
const LAPS: Part = Part {
    budget: Budget {
        all_max: 64,
        sampled: 6,
    },
    least: 1000,
    percent: 5,
};
const _: () = {
    let parts = [
        OPERATIONS,
        OPERATIONS,
        PAIRS,
        PAIRS,
        DEATHS,
        DEATHS,
        DEATHS,
        STANDING,
        LAPS,
        LAPS,
        super::mending::MENDINGS,
        super::mending::MENDINGS,
        super::random::PART,
    ];
    let (mut at, mut images, mut percent) = (0, 0, 0);
    while at < parts.len() {
        images += parts[at].least;
        percent += parts[at].percent;
        at += 1;
    }
    assert!(images >= super::IMAGES && percent == 100);
};

/// The operations, after those without which they would be ruled out.
fn possible(mut list: Vec<Op>) -> Vec<Op> {
    let is_other = |op: &Op| matches!(op, Op::Write { slice: OTHER, .. });
    if list.iter().any(is_other) {
        list.insert(0, Op::Create);
    }
    list
}

/// Nothing but the opening, and every operation; none is known.
fn operations() -> impl Iterator<Item = (usize, Vec<Op>)> {
    let single = all().into_iter().map(|op| (0, possible(vec![op])));
    std::iter::once((0, Vec::new())).chain(single)
}

/// Of each pair all but the second operation is known.
pub(super) fn pairs() -> impl Iterator<Item = (usize, Vec<Op>)> {
    let pair = |a: Op| all().into_iter().map(move |b| vec![a.clone(), b]);
    let pairs = all().into_iter().flat_map(pair).map(possible);
    pairs.map(|list| (list.len() - 1, list))
}

/// Pairs of which the second changes what the first deleted.
fn impossible_pairs() -> u64 {
    let changes_main = |op: &Op| match op {
        Op::Write { slice, .. } | Op::Clear { slice, .. } | Op::Transact { slice, .. } => {
            *slice == MAIN
        }
        _ => false,
    };
    all().iter().filter(|op| changes_main(op)).count() as u64
}

/// What a file got is durable at the end.
fn flushed((known, mut list): (usize, Vec<Op>)) -> (usize, Vec<Op>) {
    if !list.is_empty() {
        list.push(Op::Flush);
    }
    (known, list)
}

#[test]
fn every_operation_in_memory() {
    let tally = check("every operation in memory", OPERATIONS, |budget, tally| {
        enumerate_all(Kind::Memory, operations(), budget, tally)
    });
    assert_eq!(tally.ruled_out, 0, "operations of the list were not run");
}

#[test]
fn every_operation_in_a_file() {
    let tally = check("every operation in a file", OPERATIONS, |budget, tally| {
        enumerate_all(Kind::File, operations().map(flushed), budget, tally)
    });
    assert_eq!(tally.ruled_out, 0, "operations of the list were not run");
}

#[test]
fn every_pair_in_memory() {
    let tally = check("every pair in memory", PAIRS, |budget, tally| {
        enumerate_all(Kind::Memory, pairs(), budget, tally)
    });
    assert_eq!(tally.ruled_out, impossible_pairs(), "operations not run");
}

#[test]
fn every_pair_in_a_file() {
    let tally = check("every pair in a file", PAIRS, |budget, tally| {
        enumerate_all(Kind::File, pairs().map(flushed), budget, tally)
    });
    assert_eq!(tally.ruled_out, impossible_pairs(), "operations not run");
}

/// Who dies when a session does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dead {
    /// It alone: another writes, the owner makes a checkpoint, ends the dead
    /// one, and the other goes on.
    Session,
    /// All processes: the pool is opened with what was not fenced yet.
    Everybody,
    /// It alone, and nobody notices until others have filled their lanes: as one that
    /// stands still.
    Unnoticed,
}

/// Two clients write the same pages, of which the dead one has none: one until the
/// owner has much to do, the other behind it. Where the dead one is inside with a seq it
/// takes a bypass.
fn fill_lanes(
    world: &mut World<'_>,
    [one, other]: [usize; 2],
    round: u64,
    budget: Budget,
) -> Result<(), Wrong> {
    world.budget = None;
    let write = |world: &mut World<'_>, client, page, record: u64| {
        // A part of each page: some go in place.
        let len = [PAGE, 200][record as usize % 5 / 4];
        let op = Op::Write {
            client,
            slice: MAIN,
            at: page * PAGE,
            len,
            open: 0,
            death: None,
        };
        ops::run(world, &op, 1 << 34 | round << 16 | page << 8 | record)
    };
    for record in 0..HELD_RECORDS {
        write(world, one, 60, record)?;
    }
    write(world, other, 60, 0)?;
    write(world, other, 70, 0)?;
    world.budget = Some(budget);
    ops::run(world, &Op::Tend, 0)?;
    let pool = world.pool.borrow();
    let next = pool.view().control().seq().load(Ordering::Acquire);
    world.tally.bypasses += u64::from(pool.limit().0 < next);
    assert!(!pool.is_held_up(), "no bypass");
    drop(pool);
    write(world, one, 60, HELD_RECORDS)?;
    write(world, other, 70, 1)
}

/// A session dies at each of its accesses. On a file it is a thread of the owner, and
/// everybody dies.
pub(super) fn deaths(
    kind: Kind,
    dead: Dead,
    budget: Budget,
    tally: &mut Tally,
) -> Result<(), Wrong> {
    let changes = all().into_iter().filter(|op| match op {
        Op::Write { slice, .. } => *slice == MAIN,
        Op::Clear { .. } | Op::Transact { .. } => true,
        _ => false,
    });
    for change in changes {
        for accesses in 0.. {
            let mut victim = change.clone();
            let (Op::Write { client, death, .. }
            | Op::Clear { client, death, .. }
            | Op::Transact { client, death, .. }) = &mut victim
            else {
                unreachable!("only changes were chosen");
            };
            *death = Some(accesses);
            let (victims, before) = (*client, tally.deaths);
            tally.sequences += 1;
            let mut world = base(kind, false).open(CLIENTS, None, tally)?;
            world.budget = Some(budget);
            ops::run(&mut world, &victim, 1)?;
            if world.tally.deaths == before {
                // A transaction of nothing that is mapped stores nothing.
                let is_empty = matches!(&change, Op::Transact { runs, .. } if runs.len() == 1);
                assert!(accesses > 0 || is_empty, "{change:?} cannot die");
                break;
            }
            if dead == Dead::Everybody {
                world.reopen()?;
            } else if dead == Dead::Unnoticed {
                let others = [1, 2].map(|next| (victims + next) % CLIENTS);
                for round in 0..2 {
                    fill_lanes(&mut world, others, round, budget)?;
                }
                ops::bury(&mut world)?;
            } else {
                // Where its locks are free, the other goes to the same pages.
                for (tag, page, pages) in [(2, 1, 1), (3, 36, 1)] {
                    write(&mut world, (victims + 1) % CLIENTS, page, pages, tag)?;
                }
                ops::run(&mut world, &Op::Tend, 0)?;
                ops::bury(&mut world)?;
            }
            for (client, page) in [(0, 1), (1, 2), (0, 36)] {
                write(&mut world, client, page, 1, 10 + page)?;
            }
            world.empty()?;
        }
    }
    Ok(())
}

#[test]
fn a_session_dies_at_every_access() {
    let tally = check("a session that dies", DEATHS, |budget, tally| {
        deaths(Kind::Memory, Dead::Session, budget, tally)
    });
    assert!(tally.finished > 3 && tally.voided > 10, "{tally:?}");
}

#[test]
fn a_session_stands_still_at_every_access() {
    let tally = check("a session that stands still", STANDING, |budget, tally| {
        deaths(Kind::Memory, Dead::Unnoticed, budget, tally)
    });
    assert!(tally.finished > 3 && tally.voided > 10, "{tally:?}");
    assert!(tally.bypasses > 50, "{tally:?}");
}

#[test]
fn everybody_dies_at_every_access() {
    check("everybody dies", DEATHS, |budget, tally| {
        deaths(Kind::Memory, Dead::Everybody, budget, tally)
    });
}

#[test]
fn everybody_dies_at_every_access_to_a_file() {
    check("everybody dies on a file", DEATHS, |budget, tally| {
        deaths(Kind::File, Dead::Everybody, budget, tally)
    });
}

/// Writes two pages in turn, until every line of the lane, and on a nearly full
/// pool every free frame, was used again. Nobody asks for a checkpoint: the
/// session does when it lacks something.
pub(super) fn laps(kind: Kind, budget: Budget, tally: &mut Tally) -> Result<(), Wrong> {
    tally.sequences += 1;
    let mut world = base(kind, kind == Kind::File).open(1, None, tally)?;
    world.budget = Some(budget);
    let records = match kind {
        Kind::Memory => LANE_RECORDS,
        Kind::File => 4 * FREE_FRAMES,
    };
    for record in 0..records {
        write(&mut world, 0, 1 + record % 2, 1, record)?;
    }
    world.empty()
}

/// A page is written, without its data reaching the file, and cleared. Its
/// first frame is named by the slot alone, until recovery stores the hole; the
/// recovery crashes.
pub(super) fn hidden(tally: &mut Tally) -> Result<(), Wrong> {
    const TAG: u64 = 7;
    tally.sequences += 1;
    let mut world = base(Kind::File, false).open(1, None, tally)?;
    write(&mut world, 0, 1, 2, TAG)?;
    let clear = Op::Clear {
        client: 0,
        slice: MAIN,
        at: PAGE,
        len: PAGE,
        open: 0,
        death: None,
    };
    ops::run(&mut world, &clear, 0)?;
    let mut image = world.medium.recorder.crash_point().everything();
    let lost = ops::bytes(1 << 33 | TAG, 8);
    let lost = u64::from_le_bytes(*lost.first_chunk().expect("a word"));
    for at in (0..POOL_BYTES).step_by(PAGE_BYTES) {
        if image.word(at) == lost {
            (0..PAGE_BYTES)
                .step_by(8)
                .for_each(|word| image.set_word(at + word, 0));
        }
    }
    let (medium, _pool) = recover::open(Kind::File, Kind::File.recorded(image))?;
    for point in medium.recorder.take_crash_points() {
        for seed in 0..IMAGES_OF_HIDDEN {
            world.tally.images += 1;
            recover::recover(Kind::File, point.sample(seed), &BTreeMap::new())?;
        }
    }
    Ok(())
}

#[test]
fn a_recovery_that_crashes_frees_what_only_a_slot_named() {
    let mut tally = Tally::default();
    let outcome = guard(|| hidden(&mut tally));
    outcome.unwrap_or_else(|wrong| panic!("after {tally:?}: {wrong:?}"));
}

#[test]
fn lines_and_frames_are_used_again() {
    for kind in [Kind::Memory, Kind::File] {
        let name = format!("laps, {kind:?}");
        check(&name, LAPS, |budget, tally| laps(kind, budget, tally));
    }
}

#[test]
fn the_base_holds_what_it_says() {
    for (kind, is_full) in [
        (Kind::Memory, false),
        (Kind::Memory, true),
        (Kind::File, false),
        (Kind::File, true),
    ] {
        let base = base(kind, is_full);
        let found = recover::recover(kind, base.image.clone(), &BTreeMap::new()).expect("sound");
        let oracle = Oracle {
            certain: base.held.clone(),
            ..Oracle::default()
        };
        oracle.judge(&found).expect("the same");
    }
}
