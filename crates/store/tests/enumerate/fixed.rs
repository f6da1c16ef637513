//! Every operation, every pair of operations, and every access at which a session can die.

use super::budget::{Budget, COUNT_ONLY, WorkloadShare};
use super::harness::CrashHarness;
use super::model::{CheckFailure, Oracle, PoolContents, fail};
use super::ops::{self, FILL, MAIN, MAIN_PAGES, OTHER, Op, PartSpec};
use super::recover::{self, MediumKind};
use super::{CheckCounts, POOL_BYTES, catch_panic, set_defect};
use pagemesh_base::defect;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Recorder};
use pagemesh_store::pool::format;
use pagemesh_store::test_api::{ControlInternals, PoolInternals};
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
/// Records that fill the journals of two sessions but for a few lines.
const JOURNAL_RECORDS: u64 = 2 * 117;
/// Images at each sync of the recovery in `slot_only_frame`.
const SLOT_ONLY_IMAGES: u64 = 100;
/// Records that fill more than a quarter of a journal.
const UNAPPLIED_RECORDS: u64 = 34;
/// Pages of the object that fills a pool, and the approximate number of frames left free.
const FILL_PAGES: u64 = 460;
const FREE_FRAMES: u64 = 20;

/// Clients of the workloads with listed operations; the last client's journal is unused.
const CLIENTS: usize = 3;

/// A pool with data: part of it checkpointed, part not.
#[derive(Clone)]
pub(super) struct BasePool {
    pub(super) kind: MediumKind,
    pub(super) image: Image,
    pub(super) contents: PoolContents,
}

/// The base pool of each kind, roomy or nearly full.
pub(super) fn base(kind: MediumKind, is_full: bool) -> &'static BasePool {
    static BASES: [OnceLock<BasePool>; 4] = [const { OnceLock::new() }; 4];
    let place = usize::from(kind == MediumKind::File) * 2 + usize::from(is_full);
    BASES[place].get_or_init(|| {
        let present = defect::present();
        set_defect(None);
        let base = make_base(kind, is_full).unwrap_or_else(|wrong| panic!("the base: {wrong:?}"));
        set_defect(present);
        base
    })
}

fn make_base(kind: MediumKind, is_full: bool) -> Result<BasePool, CheckFailure> {
    // Frames hold old bytes: no code may rely on zeroes.
    let recorder = Recorder::unrecorded(Image::filled(POOL_BYTES, 0x5555_aaaa_1234_8765));
    format(&recorder, Uuid::from_u128(9)).expect("a pool");
    let mut tally = CheckCounts::default();
    let image = recorder.visible_image();
    let mut world = CrashHarness::open(kind, image, Oracle::default(), 2, None, &mut tally)?;
    let create = |world: &mut CrashHarness<'_>, slice, pages| {
        let entry = super::model::ObjectEntry { pages, epoch: 0 };
        world.owner_op(
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
            ops::run(&mut world, &Op::Maintain, 0)?;
        }
    }
    // Fills the journals until they are about to wrap.
    for record in 0..JOURNAL_RECORDS {
        write(&mut world, record as usize % 2, 20, 1, 1000 + record)?;
        if record % 40 == 0 {
            ops::run(&mut world, &Op::Maintain, 0)?;
        }
    }
    for page in [0, 1, 2, 20] {
        write(&mut world, 0, page, 1, page)?;
    }
    ops::run(&mut world, &Op::Maintain, 0)?;
    ops::run(&mut world, &Op::ClearInFlight(MAIN), 0)?;
    ops::run(&mut world, &Op::ClearInFlight(FILL), 0)?;
    write(&mut world, 1, 3, 1, 99)?;
    ops::run(&mut world, &Op::Flush, 0)?;
    let held = world.oracle.certain.clone();
    Ok(BasePool {
        kind,
        image: world.medium.recorder.crash_point().image(0),
        contents: held,
    })
}

pub(super) fn write(
    world: &mut CrashHarness<'_>,
    client: usize,
    page: u64,
    pages: u64,
    tag: u64,
) -> Result<(), CheckFailure> {
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

impl BasePool {
    /// Opens the base pool with new clients.
    pub(super) fn open<'t>(
        &self,
        clients: usize,
        budget: Option<Budget>,
        tally: &'t mut CheckCounts,
    ) -> Result<CrashHarness<'t>, CheckFailure> {
        let oracle = Oracle {
            certain: self.contents.clone(),
            ..Oracle::default()
        };
        let image = self.image.clone();
        let mut world = CrashHarness::open(self.kind, image, oracle, clients, budget, tally)?;
        if let Some(fill) = self.contents.get(&FILL) {
            let sums = fill.pages.iter().map(|(&page, content)| (page, content.0));
            world.unread_sums = BTreeMap::from([(FILL, sums.collect())]);
        }
        Ok(world)
    }
}

/// Every operation in one or two forms.
pub(super) fn all_ops() -> Vec<Op> {
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
    let run = |page, pages, is_written| PartSpec {
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
        // The first record in an unused journal.
        write(2, MAIN, 5 * PAGE, PAGE, 0),
        write(0, MAIN, PAGE + 100, 300, 0),
        // Another client writes overlapping bytes of the same page.
        write(1, MAIN, PAGE + 350, 200, 1),
        // Three records: a partial page, whole pages, a partial page.
        write(0, MAIN, PAGE + 8, 2 * PAGE, 2),
        // Links a node in a frame that held other bytes.
        write(1, MAIN, 511 * PAGE, 2 * PAGE, 0),
        write(0, OTHER, PAGE, 2 * PAGE, 0),
        clear(PAGE, 2 * PAGE),
        clear(3 * PAGE + 8, 64),
        clear(8, 3 * PAGE),
        // Three records, one of them several lines long.
        transact(
            0,
            MAIN,
            vec![run(1, 4, true), run(20, 1, true), run(33, 1, true)],
        ),
        // Two leaves; the transaction links the second one. Pages that are not mapped are left out.
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
        Op::RaiseEpoch(MAIN),
        Op::ClearInFlight(MAIN),
        Op::Maintain,
        Op::Flush,
        Op::Reopen,
        Op::Replace(0),
    ]
}

/// Runs operations on a base pool and checks a crash at each fence. The first `known` operations
/// are not checked, because another list begins with them.
pub(super) fn enumerate(
    kind: MediumKind,
    list: &[Op],
    known: usize,
    budget: Budget,
    tally: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    tally.sequences += 1;
    // The opening is the same for all lists: only the empty list checks it.
    let opening = list.is_empty().then_some(budget);
    let mut world = base(kind, false).open(CLIENTS, opening, tally)?;
    for (at, op) in list.iter().enumerate() {
        world.budget = (at >= known).then_some(budget);
        ops::run(&mut world, op, at as u64 + 1)?;
    }
    world.empty_pool()
}

/// Enumerates lists of operations; each comes with the number of its known operations.
fn enumerate_all(
    kind: MediumKind,
    lists: impl Iterator<Item = (usize, Vec<Op>)>,
    budget: Budget,
    tally: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    for (known, list) in lists {
        let checked = enumerate(kind, &list, known, budget, tally);
        checked
            .or_else(|CheckFailure { check, detail }| fail(check, format!("{list:?}: {detail}")))?;
    }
    Ok(())
}

/// Runs a workload with the budget of the tests, or of a campaign.
pub(super) fn check(
    name: &str,
    part: WorkloadShare,
    workload: impl Fn(Budget, &mut CheckCounts) -> Result<(), CheckFailure>,
) -> CheckCounts {
    let run = |budget| {
        let mut tally = CheckCounts::default();
        let outcome = catch_panic(|| workload(budget, &mut tally));
        outcome.unwrap_or_else(|wrong| panic!("{name}, {budget}, after {tally}: {wrong:?}"));
        tally
    };
    let budget = match part.campaign_images() {
        None => part.budget,
        Some(images) => run(COUNT_ONLY)
            .legal_images
            .with_samples(images, part.budget),
    };
    let tally = run(budget);
    println!("{name}, {budget}: {tally}");
    assert!(tally.images >= part.images_min, "{tally:?}");
    tally
}

const OPERATIONS: WorkloadShare = WorkloadShare {
    budget: Budget {
        all_max: 4096,
        sampled: 200,
    },
    images_min: 3000,
    percent: 5,
};
const PAIRS: WorkloadShare = WorkloadShare {
    budget: Budget {
        all_max: 1024,
        sampled: 8,
    },
    images_min: 20_000,
    percent: 10,
};
const DEATHS: WorkloadShare = WorkloadShare {
    budget: Budget {
        all_max: 256,
        sampled: 8,
    },
    images_min: 10_000,
    percent: 5,
};
const STALLS: WorkloadShare = WorkloadShare {
    budget: Budget {
        all_max: 16,
        sampled: 4,
    },
    images_min: 10_000,
    percent: 5,
};
const LAPS: WorkloadShare = WorkloadShare {
    budget: Budget {
        all_max: 64,
        sampled: 6,
    },
    images_min: 1000,
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
        STALLS,
        LAPS,
        LAPS,
        super::correction::CORRECTIONS,
        super::correction::CORRECTIONS,
        super::random::SHARE,
        super::tier::TIER,
    ];
    let (mut at, mut images, mut percent) = (0, 0, 0);
    while at < parts.len() {
        images += parts[at].images_min;
        percent += parts[at].percent;
        at += 1;
    }
    assert!(images >= super::IMAGES && percent == 100);
};

/// Inserts the operations before the list without which its operations are not applicable.
fn with_prerequisites(mut list: Vec<Op>) -> Vec<Op> {
    let is_other = |op: &Op| matches!(op, Op::Write { slice: OTHER, .. });
    if list.iter().any(is_other) {
        list.insert(0, Op::Create);
    }
    list
}

/// The empty list, and each operation by itself; none is known.
fn operations() -> impl Iterator<Item = (usize, Vec<Op>)> {
    let single = all_ops()
        .into_iter()
        .map(|op| (0, with_prerequisites(vec![op])));
    std::iter::once((0, Vec::new())).chain(single)
}

/// All pairs: only the last operation of each is unknown.
pub(super) fn op_pairs() -> impl Iterator<Item = (usize, Vec<Op>)> {
    let pair = |a: Op| all_ops().into_iter().map(move |b| vec![a.clone(), b]);
    let pairs = all_ops().into_iter().flat_map(pair).map(with_prerequisites);
    pairs.map(|list| (list.len() - 1, list))
}

/// Number of pairs in which the second operation changes the slice that the first one deleted.
fn impossible_pairs() -> u64 {
    let changes_main = |op: &Op| match op {
        Op::Write { slice, .. } | Op::Clear { slice, .. } | Op::Transact { slice, .. } => {
            *slice == MAIN
        }
        _ => false,
    };
    all_ops().iter().filter(|op| changes_main(op)).count() as u64
}

/// Appends a flush, so that the data in the file is durable at the end.
fn with_flush((known, mut list): (usize, Vec<Op>)) -> (usize, Vec<Op>) {
    if !list.is_empty() {
        list.push(Op::Flush);
    }
    (known, list)
}

#[test]
fn every_operation_in_memory() {
    let tally = check("every operation in memory", OPERATIONS, |budget, tally| {
        enumerate_all(MediumKind::Memory, operations(), budget, tally)
    });
    assert_eq!(
        tally.inapplicable, 0,
        "the list has operations that were not run"
    );
}

#[test]
fn every_operation_in_a_file() {
    let tally = check("every operation in a file", OPERATIONS, |budget, tally| {
        enumerate_all(
            MediumKind::File,
            operations().map(with_flush),
            budget,
            tally,
        )
    });
    assert_eq!(
        tally.inapplicable, 0,
        "the list has operations that were not run"
    );
}

#[test]
fn every_pair_in_memory() {
    let tally = check("every pair in memory", PAIRS, |budget, tally| {
        enumerate_all(MediumKind::Memory, op_pairs(), budget, tally)
    });
    assert_eq!(tally.inapplicable, impossible_pairs(), "operations not run");
}

#[test]
fn every_pair_in_a_file() {
    let tally = check("every pair in a file", PAIRS, |budget, tally| {
        enumerate_all(MediumKind::File, op_pairs().map(with_flush), budget, tally)
    });
    assert_eq!(tally.inapplicable, impossible_pairs(), "operations not run");
}

/// The processes that die when a session dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeathMode {
    /// Only the session: another session writes, the owner makes a checkpoint and retires the dead
    /// session, and the other session continues.
    SessionAlone,
    /// All processes: the pool is opened with the stores that were not fenced yet.
    AllProcesses,
    /// Only the session, and the owner does not notice until other sessions have filled their
    /// journals: the session looks stalled.
    Unnoticed,
}

/// Two clients write the same pages, none of which the dead client holds. The first writes until a
/// checkpoint is due, the other after it. If the dead client is inside an operation with a sequence
/// number, the owner makes a partial checkpoint.
fn fill_journals(
    world: &mut CrashHarness<'_>,
    [one, other]: [usize; 2],
    round: u64,
    budget: Budget,
) -> Result<(), CheckFailure> {
    world.budget = None;
    let write = |world: &mut CrashHarness<'_>, client, page, record: u64| {
        // Some writes change a part of a page, and some of those go in place.
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
    for record in 0..UNAPPLIED_RECORDS {
        write(world, one, 60, record)?;
    }
    write(world, other, 60, 0)?;
    write(world, other, 70, 0)?;
    world.budget = Some(budget);
    ops::run(world, &Op::Maintain, 0)?;
    let pool = world.pool.borrow();
    let next = pool.mapping().control().seq().load(Ordering::Acquire);
    world.tally.partial_checkpoints += u64::from(pool.checkpoint_limit().0 < next);
    assert!(!pool.is_journal_blocked(), "no partial checkpoint");
    drop(pool);
    write(world, one, 60, UNAPPLIED_RECORDS)?;
    write(world, other, 70, 1)
}

/// A session dies at each of its accesses. On a file a session is a thread of the owner, so all
/// processes die.
pub(super) fn deaths(
    kind: MediumKind,
    dead: DeathMode,
    budget: Budget,
    tally: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    let changes = all_ops().into_iter().filter(|op| match op {
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
                // A transaction on unmapped pages only stores nothing.
                let is_empty = matches!(&change, Op::Transact { runs, .. } if runs.len() == 1);
                assert!(accesses > 0 || is_empty, "{change:?} cannot die");
                break;
            }
            if dead == DeathMode::AllProcesses {
                world.reopen()?;
            } else if dead == DeathMode::Unnoticed {
                let others = [1, 2].map(|next| (victims + next) % CLIENTS);
                for round in 0..2 {
                    fill_journals(&mut world, others, round, budget)?;
                }
                ops::retire_dead_clients(&mut world)?;
            } else {
                // The other client writes the same pages if their locks are free.
                for (tag, page, pages) in [(2, 1, 1), (3, 36, 1)] {
                    write(&mut world, (victims + 1) % CLIENTS, page, pages, tag)?;
                }
                ops::run(&mut world, &Op::Maintain, 0)?;
                ops::retire_dead_clients(&mut world)?;
            }
            for (client, page) in [(0, 1), (1, 2), (0, 36)] {
                write(&mut world, client, page, 1, 10 + page)?;
            }
            world.empty_pool()?;
        }
    }
    Ok(())
}

#[test]
fn session_death_at_every_access() {
    let tally = check("a session that dies", DEATHS, |budget, tally| {
        deaths(MediumKind::Memory, DeathMode::SessionAlone, budget, tally)
    });
    assert!(tally.rolled_forward > 3 && tally.voided > 10, "{tally:?}");
}

#[test]
fn session_stall_at_every_access() {
    let tally = check("a stalled session", STALLS, |budget, tally| {
        deaths(MediumKind::Memory, DeathMode::Unnoticed, budget, tally)
    });
    assert!(tally.rolled_forward > 3 && tally.voided > 10, "{tally:?}");
    assert!(tally.partial_checkpoints > 50, "{tally:?}");
}

#[test]
fn all_processes_die_at_every_access() {
    check("all processes die", DEATHS, |budget, tally| {
        deaths(MediumKind::Memory, DeathMode::AllProcesses, budget, tally)
    });
}

#[test]
fn all_processes_die_at_every_file_access() {
    check("all processes die on a file", DEATHS, |budget, tally| {
        deaths(MediumKind::File, DeathMode::AllProcesses, budget, tally)
    });
}

/// Writes two pages in turn until every line of the journal, and on a nearly full pool every free
/// frame, has been reused. The test requests no checkpoint: the session does when it runs out of
/// space.
pub(super) fn laps(
    kind: MediumKind,
    budget: Budget,
    tally: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    tally.sequences += 1;
    let mut world = base(kind, kind == MediumKind::File).open(1, None, tally)?;
    world.budget = Some(budget);
    let records = match kind {
        MediumKind::Memory | MediumKind::Tier => JOURNAL_RECORDS,
        MediumKind::File => 4 * FREE_FRAMES,
    };
    for record in 0..records {
        write(&mut world, 0, 1 + record % 2, 1, record)?;
    }
    world.empty_pool()
}

/// A page is written, its data does not reach the file, and the page is cleared. Only the slot
/// names its first frame until recovery stores the hole. The recovery crashes.
pub(super) fn slot_only_frame(tally: &mut CheckCounts) -> Result<(), CheckFailure> {
    const TAG: u64 = 7;
    tally.sequences += 1;
    let mut world = base(MediumKind::File, false).open(1, None, tally)?;
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
    let mut image = world.medium.recorder.crash_point().all_persisted();
    let lost = ops::bytes(1 << 33 | TAG, 8);
    let lost = u64::from_le_bytes(*lost.first_chunk().expect("a word"));
    for at in (0..POOL_BYTES).step_by(PAGE_BYTES) {
        if image.word(at) == lost {
            (0..PAGE_BYTES)
                .step_by(8)
                .for_each(|word| image.set_word(at + word, 0));
        }
    }
    let (medium, _pool) = recover::open(MediumKind::File, MediumKind::File.recorder(image))?;
    for point in medium.recorder.take_crash_points() {
        for seed in 0..SLOT_ONLY_IMAGES {
            world.tally.images += 1;
            recover::recover(MediumKind::File, point.sample(seed), &BTreeMap::new())?;
        }
    }
    Ok(())
}

#[test]
fn crashed_recovery_frees_frame_named_only_by_slot() {
    let mut tally = CheckCounts::default();
    let outcome = catch_panic(|| slot_only_frame(&mut tally));
    outcome.unwrap_or_else(|wrong| panic!("after {tally:?}: {wrong:?}"));
}

#[test]
fn journal_lines_and_frames_are_reused() {
    for kind in [MediumKind::Memory, MediumKind::File] {
        let name = format!("laps, {kind:?}");
        check(&name, LAPS, |budget, tally| laps(kind, budget, tally));
    }
}

#[test]
fn base_pool_holds_its_contents() {
    for (kind, is_full) in [
        (MediumKind::Memory, false),
        (MediumKind::Memory, true),
        (MediumKind::File, false),
        (MediumKind::File, true),
    ] {
        let base = base(kind, is_full);
        let found = recover::recover(kind, base.image.clone(), &BTreeMap::new()).expect("sound");
        let oracle = Oracle {
            certain: base.contents.clone(),
            ..Oracle::default()
        };
        oracle.check(&found).expect("the same");
    }
}
