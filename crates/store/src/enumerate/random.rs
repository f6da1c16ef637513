//! Random sequences: several sessions, some of which die, checkpoints, a pool
//! that is nearly full, and crashes from which the sequence goes on.

use super::budget::{Budget, COUNTED, EXTREMES, Part, number};
use super::dice::Dice;
use super::fixed::base;
use super::model::Wrong;
use super::ops::{self, MAIN, MAIN_PAGES, OTHER, Op, Run};
use super::recover::Kind;
use super::{Tally, guard};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

const PAGE: u64 = PAGE_BYTES as u64;
/// Operations between two crashes.
const LIFE: u64 = 12;
const LIVES: u64 = 4;

/// What sequences of a kind look like.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) kind: Kind,
    pub(super) is_full: bool,
    /// Whether some operations are transactions.
    pub(super) transacts: bool,
    pub(super) budget: Budget,
}

/// Few pages, so that operations meet: near each other, in a second leaf, and
/// far enough for another lock.
fn place(dice: &mut Dice, slice: SliceId) -> u64 {
    match (slice == MAIN, dice.roll(10)) {
        (true, 0) => 508 + dice.roll(8),
        (true, 1..=4) => 30 + dice.roll(6),
        _ => dice.roll(8),
    }
}

fn range(dice: &mut Dice, slice: SliceId) -> (u64, u64) {
    let page = place(dice, slice) * PAGE;
    match dice.roll(8) {
        0..=2 => (page, PAGE),
        3 => (page, (2 + dice.roll(4)) * PAGE),
        4 => (page + dice.roll(PAGE - 512), 1 + dice.roll(512)),
        5 => (page + dice.roll(PAGE), PAGE + dice.roll(3 * PAGE)),
        6 => (page, PAGE * (1 + dice.roll(3)) + 100),
        _ => (page, PAGE),
    }
}

/// Up to five parts that do not overlap.
fn runs(dice: &mut Dice, slice: SliceId) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for _ in 0..2 + dice.roll(4) {
        let run = Run {
            page: place(dice, slice),
            pages: dice.any(&[1, 1, 1, 2, 4]),
            is_written: dice.roll(4) != 0,
        };
        let is_beside = |other: &Run| {
            other.page + other.pages <= run.page || run.page + run.pages <= other.page
        };
        if runs.iter().all(is_beside) {
            runs.push(run);
        }
    }
    runs
}

fn choose(dice: &mut Dice, plan: Plan) -> Op {
    let slice = dice.any(&[MAIN, MAIN, MAIN, OTHER]);
    let client = dice.roll(2) as usize;
    let open = dice.any(&[0, 0, 1, 2, 5]);
    // On a file a session is a thread of the owner: they die together.
    let is_transaction = plan.transacts && dice.roll(5) == 0;
    let mortal = plan.kind == Kind::Memory && dice.roll(6) == 0;
    let death = mortal.then(|| dice.roll(90) as i64);
    if is_transaction {
        let runs = runs(dice, slice);
        return Op::Transact {
            client,
            slice,
            runs,
            open,
            death,
        };
    }
    match dice.roll(40) {
        0..=19 => {
            let (at, len) = range(dice, slice);
            Op::Write {
                client,
                slice,
                at,
                len,
                open,
                death,
            }
        }
        20..=24 => {
            let (at, len) = range(dice, slice);
            Op::Clear {
                client,
                slice,
                at,
                len,
                open,
                death,
            }
        }
        25 => Op::Create,
        26 => Op::Grow(slice),
        27 => Op::Delete(OTHER),
        28 => Op::Raise(slice, dice.roll(3) as u8),
        29..=30 => Op::Settle(slice),
        31..=33 => Op::Tend,
        34 => Op::Checkpoint,
        35..=36 => Op::Flush,
        37 => Op::Reopen,
        _ => Op::Replace(client),
    }
}

/// One sequence.
pub(super) fn run(plan: Plan, seed: u64, tally: &mut Tally) -> Result<(), Wrong> {
    let mut dice = Dice::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
    tally.sequences += 1;
    let mut tag = 0;
    let mut world = base(plan.kind, plan.is_full).open(2, Some(EXTREMES), tally)?;
    world.budget = Some(plan.budget);
    for life in 0..LIVES {
        for _ in 0..1 + dice.roll(LIFE) {
            if world.clients.iter().any(|client| client.died_in.is_some()) && dice.roll(3) == 0 {
                ops::bury(&mut world)?;
            }
            tag += 1;
            let op = choose(&mut dice, plan);
            ops::run(&mut world, &op, seed << 16 | tag)?;
        }
        if life + 1 < LIVES {
            let chosen = dice.roll(world.last.len() as u64) as usize;
            let (point, oracle) = world.last[chosen].clone();
            let image = match dice.roll(4) {
                0 => point.image(0),
                1 => point.everything(),
                _ => point.sample(dice.roll(1 << 40)),
            };
            world.crash_to(image, oracle, 2)?;
        }
    }
    ops::bury(&mut world)?;
    world.empty()
}

/// Runs one seed after the other until the plan's part is done. What a seed
/// does depends on the budget, and on nothing else.
fn run_all(plan: Plan, images: u64) -> Result<Tally, String> {
    let mut tally = Tally::default();
    let only = number("PAGEMESH_SEED");
    let mut seed = only.or(number("PAGEMESH_FROM")).unwrap_or(1);
    while tally.images < images {
        let mut own = Tally::default();
        let outcome = guard(|| run(plan, seed, &mut own));
        tally.add(&own);
        if let Err(Wrong { check, detail }) = outcome {
            let all_max = plan.budget.all_max;
            return Err(format!(
                "{plan:?}, after {own:?}: {check}: {detail}\n  \
                 cargo xtask enumerate --seed {seed} --all-max {all_max}"
            ));
        }
        seed += 1;
        if only.is_some() {
            break;
        }
    }
    println!("{plan}, seeds below {seed}: {tally}");
    if only.is_none() {
        plan.look_at(&tally)?;
    }
    Ok(tally)
}

/// The plan with the highest bound for which a quarter of so many images
/// exhausts a few of its sequences: the other quarters are other sequences.
fn grown(plan: Plan, images: u64) -> Plan {
    let mut counted = Tally::default();
    let first = number("PAGEMESH_FROM").unwrap_or(1);
    for seed in first..first + COUNTED_SEQUENCES {
        let only_counted = Plan {
            budget: COUNTED,
            ..plan
        };
        // What is wrong with one is told when its images are checked.
        let _told_later = guard(|| run(only_counted, seed, &mut counted));
    }
    Plan {
        budget: counted.legal.exhaust(images / 4, plan.budget),
        ..plan
    }
}

pub(super) const PART: Part = Part {
    budget: Budget {
        all_max: 16,
        sampled: 6,
    },
    least: 160_000,
    percent: 30,
};

/// Sequences of a plan whose points are counted to find the bound of a campaign.
const COUNTED_SEQUENCES: u64 = 16;

pub(super) const fn plan(kind: Kind, is_full: bool) -> Plan {
    Plan {
        kind,
        is_full,
        transacts: true,
        budget: PART.budget,
    }
}

const PLANS: [Plan; 4] = [
    plan(Kind::Memory, false),
    plan(Kind::File, false),
    plan(Kind::Memory, true),
    plan(Kind::File, true),
];

impl Plan {
    /// Whether sequences met what they are for.
    fn look_at(&self, tally: &Tally) -> Result<(), String> {
        let mortal = self.kind == Kind::Memory;
        let met = [
            ("a full pool", !self.is_full || tally.full > 8),
            ("deaths", !mortal || tally.deaths > 8),
            (
                "operations finished for the dead",
                !mortal || tally.finished > 2,
            ),
            (
                "operations voided for the dead",
                !mortal || tally.voided > 2,
            ),
            (
                "recoveries that crash",
                tally.of_recovery > tally.images / 100,
            ),
            ("lives", tally.lives > 50),
            (
                "lists of what is in flight",
                tally.compared < tally.images / 10,
            ),
            ("operations", tally.left_out < tally.operations / 4),
        ];
        match met.iter().find(|(_, is_met)| !is_met) {
            None => Ok(()),
            Some((what, _)) => Err(format!("{self} met too little of: {what}: {tally:?}")),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let room = if self.is_full { "nearly full" } else { "roomy" };
        write!(f, "{:?}, {room}, {}", self.kind, self.budget)
    }
}

#[test]
fn random_sequences() {
    let (began, plans) = (Instant::now(), PLANS.len() as u64);
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let run = |plan: Plan| match (number("PAGEMESH_ALL_MAX"), PART.asked_for()) {
        (Some(all_max), images) => {
            let budget = Budget {
                all_max,
                ..plan.budget
            };
            let images = images.unwrap_or(PART.least);
            run_all(Plan { budget, ..plan }, images.div_ceil(plans))
        }
        (None, Some(images)) => {
            let images = images.div_ceil(plans);
            run_all(grown(plan, images), images)
        }
        (None, None) => run_all(plan, PART.least.div_ceil(plans)),
    };
    thread::scope(|scope| {
        for _ in 0..threads.min(PLANS.len()) {
            scope.spawn(|| {
                while let Some(&plan) = PLANS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = run(plan);
                    outcomes.lock().expect("no panic inside").push(outcome);
                }
            });
        }
    });
    let mut tally = Tally::default();
    for outcome in outcomes.into_inner().expect("no panic inside") {
        tally.add(&outcome.unwrap_or_else(|wrong| panic!("{wrong}")));
    }
    println!(
        "random sequences in {} s: {tally}",
        began.elapsed().as_secs()
    );
    if number("PAGEMESH_SEED").is_none() {
        let least = PART.asked_for().unwrap_or(PART.least);
        assert!(tally.images >= least && tally.lives > 0, "{tally:?}");
    }
}

#[test]
fn sequences_that_found_something() {
    // Frames that stayed in use, and counts of frames that drifted until a
    // write was refused, or the pool.
    for (is_full, seed) in [(false, 79), (true, 1043), (true, 100_053)] {
        let mut tally = Tally::default();
        let found_by = Plan {
            transacts: false,
            ..plan(Kind::File, is_full)
        };
        let outcome = guard(|| run(found_by, seed, &mut tally));
        outcome.unwrap_or_else(|wrong| panic!("seed {seed}, after {tally:?}: {wrong:?}"));
    }
}

const _: () = assert!(MAIN_PAGES > 508 + 8 + 5);
