//! Random sequences: several sessions, some of which die, checkpoints, a nearly full pool, and
//! crashes after which the sequence continues.

use super::budget::{Budget, COUNT_ONLY, EXTREMES, WorkloadShare, env_number};
use super::fixed::base;
use super::model::CheckFailure;
use super::ops::{self, MAIN, MAIN_PAGES, OTHER, Op, PartSpec};
use super::recover::MediumKind;
use super::rng::Rng;
use super::{CheckCounts, catch_panic};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

const PAGE: u64 = PAGE_BYTES as u64;
/// Operations between two crashes.
const OPS_PER_LIFE: u64 = 12;
const LIVES_PER_SEQUENCE: u64 = 4;

/// The shape of the sequences of a kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequencePlan {
    pub(super) kind: MediumKind,
    pub(super) is_full: bool,
    /// Whether some operations are transactions.
    pub(super) transacts: bool,
    pub(super) budget: Budget,
}

/// Few pages, so that operations overlap: near each other, in a second leaf, and far enough away
/// for another lock.
fn random_page(rng: &mut Rng, slice: SliceId) -> u64 {
    match (slice == MAIN, rng.below(10)) {
        (true, 0) => 508 + rng.below(8),
        (true, 1..=4) => 30 + rng.below(6),
        _ => rng.below(8),
    }
}

fn random_range(rng: &mut Rng, slice: SliceId) -> (u64, u64) {
    let page = random_page(rng, slice) * PAGE;
    match rng.below(8) {
        0..=2 => (page, PAGE),
        3 => (page, (2 + rng.below(4)) * PAGE),
        4 => (page + rng.below(PAGE - 512), 1 + rng.below(512)),
        5 => (page + rng.below(PAGE), PAGE + rng.below(3 * PAGE)),
        6 => (page, PAGE * (1 + rng.below(3)) + 100),
        _ => (page, PAGE),
    }
}

/// Up to five parts that do not overlap.
fn random_parts(rng: &mut Rng, slice: SliceId) -> Vec<PartSpec> {
    let mut runs: Vec<PartSpec> = Vec::new();
    for _ in 0..2 + rng.below(4) {
        let run = PartSpec {
            page: random_page(rng, slice),
            pages: rng.pick(&[1, 1, 1, 2, 4]),
            is_written: rng.below(4) != 0,
        };
        let is_beside = |other: &PartSpec| {
            other.page + other.pages <= run.page || run.page + run.pages <= other.page
        };
        if runs.iter().all(is_beside) {
            runs.push(run);
        }
    }
    runs
}

pub(super) fn random_op(rng: &mut Rng, plan: SequencePlan) -> Op {
    let slice = rng.pick(&[MAIN, MAIN, MAIN, OTHER]);
    let client = rng.below(2) as usize;
    let open = rng.pick(&[0, 0, 1, 2, 5]);
    // On a file a session is a thread of the owner: they die together.
    let is_transaction = plan.transacts && rng.below(5) == 0;
    let mortal = plan.kind == MediumKind::Memory && rng.below(6) == 0;
    let death = mortal.then(|| rng.below(90) as i64);
    if is_transaction {
        let runs = random_parts(rng, slice);
        return Op::Transact {
            client,
            slice,
            runs,
            open,
            death,
        };
    }
    match rng.below(40) {
        0..=19 => {
            let (at, len) = random_range(rng, slice);
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
            let (at, len) = random_range(rng, slice);
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
        28 => {
            rng.below(3);
            Op::RaiseEpoch(slice)
        }
        29..=30 => Op::ClearInFlight(slice),
        31..=33 => Op::Maintain,
        34 => Op::Checkpoint,
        35..=36 => Op::Flush,
        37 => Op::Reopen,
        _ => Op::Replace(client),
    }
}

/// Runs one sequence.
pub(super) fn run(
    plan: SequencePlan,
    seed: u64,
    tally: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    let mut rng = Rng::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
    tally.sequences += 1;
    let mut tag = 0;
    let mut world = base(plan.kind, plan.is_full).open(2, Some(EXTREMES), tally)?;
    world.budget = Some(plan.budget);
    for life in 0..LIVES_PER_SEQUENCE {
        for _ in 0..1 + rng.below(OPS_PER_LIFE) {
            if world.clients.iter().any(|client| client.died_in.is_some()) && rng.below(3) == 0 {
                ops::retire_dead_clients(&mut world)?;
            }
            tag += 1;
            let op = random_op(&mut rng, plan);
            ops::run(&mut world, &op, seed << 16 | tag)?;
        }
        if life + 1 < LIVES_PER_SEQUENCE {
            let chosen = rng.below(world.last_points.len() as u64) as usize;
            let (point, oracle) = world.last_points[chosen].clone();
            let image = match rng.below(4) {
                0 => point.image(0),
                1 => point.all_persisted(),
                _ => point.sample(rng.below(1 << 40)),
            };
            world.resume_from_image(image, oracle, 2)?;
        }
    }
    ops::retire_dead_clients(&mut world)?;
    world.empty_pool()
}

/// Runs one seed after the other until the plan's images are checked. A seed's sequence depends on
/// nothing but the budget.
fn run_all(plan: SequencePlan, images: u64) -> Result<CheckCounts, String> {
    let mut tally = CheckCounts::default();
    let only = env_number("PAGEMESH_SEED");
    let mut seed = only.or(env_number("PAGEMESH_FROM")).unwrap_or(1);
    while tally.images < images {
        let mut own = CheckCounts::default();
        let outcome = catch_panic(|| run(plan, seed, &mut own));
        tally.add(&own);
        if let Err(CheckFailure { check, detail }) = outcome {
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
        plan.check_coverage(&tally)?;
    }
    Ok(tally)
}

/// The plan with the highest bound at which a quarter of `images` exhausts a few of its sequences.
/// The other three quarters go to other sequences.
fn plan_for_images(plan: SequencePlan, images: u64) -> SequencePlan {
    let mut counted = CheckCounts::default();
    let first = env_number("PAGEMESH_FROM").unwrap_or(1);
    for seed in first..first + COUNTED_SEQUENCES {
        let only_counted = SequencePlan {
            budget: COUNT_ONLY,
            ..plan
        };
        // A failure here is reported when the images of the seed are checked.
        let _told_later = catch_panic(|| run(only_counted, seed, &mut counted));
    }
    SequencePlan {
        budget: counted.legal_images.highest_bound(images / 4, plan.budget),
        ..plan
    }
}

pub(super) const SHARE: WorkloadShare = WorkloadShare {
    budget: Budget {
        all_max: 16,
        sampled: 6,
    },
    images_min: 160_000,
    percent: 28,
};

/// Sequences of a plan that are counted to find the bound of a campaign.
const COUNTED_SEQUENCES: u64 = 16;

pub(super) const fn plan(kind: MediumKind, is_full: bool) -> SequencePlan {
    SequencePlan {
        kind,
        is_full,
        transacts: true,
        budget: SHARE.budget,
    }
}

const PLANS: [SequencePlan; 4] = [
    plan(MediumKind::Memory, false),
    plan(MediumKind::File, false),
    plan(MediumKind::Memory, true),
    plan(MediumKind::File, true),
];

impl SequencePlan {
    /// Whether the sequences exercised the cases that they exist for.
    fn check_coverage(&self, tally: &CheckCounts) -> Result<(), String> {
        let mortal = self.kind == MediumKind::Memory;
        let met = [
            ("a full pool", !self.is_full || tally.pool_full > 8),
            ("deaths", !mortal || tally.deaths > 8),
            (
                "operations rolled forward for the dead",
                !mortal || tally.rolled_forward > 2,
            ),
            (
                "operations voided for the dead",
                !mortal || tally.voided > 2,
            ),
            (
                "recoveries that crash",
                tally.recovery_images > tally.images / 100,
            ),
            ("resumptions", tally.resumptions > 50),
            (
                "lists of operations in flight",
                tally.unlisted_images < tally.images / 10,
            ),
            ("operations", tally.blocked < tally.operations / 4),
        ];
        match met.iter().find(|(_, is_met)| !is_met) {
            None => Ok(()),
            Some((what, _)) => Err(format!("{self} met too little of: {what}: {tally:?}")),
        }
    }
}

impl fmt::Display for SequencePlan {
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
    let run = |plan: SequencePlan| match (env_number("PAGEMESH_ALL_MAX"), SHARE.campaign_images()) {
        (Some(all_max), images) => {
            let budget = Budget {
                all_max,
                ..plan.budget
            };
            let images = images.unwrap_or(SHARE.images_min);
            run_all(SequencePlan { budget, ..plan }, images.div_ceil(plans))
        }
        (None, Some(images)) => {
            let images = images.div_ceil(plans);
            run_all(plan_for_images(plan, images), images)
        }
        (None, None) => run_all(plan, SHARE.images_min.div_ceil(plans)),
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
    let mut tally = CheckCounts::default();
    for outcome in outcomes.into_inner().expect("no panic inside") {
        tally.add(&outcome.unwrap_or_else(|wrong| panic!("{wrong}")));
    }
    println!(
        "random sequences in {} s: {tally}",
        began.elapsed().as_secs()
    );
    if env_number("PAGEMESH_SEED").is_none() {
        let least = SHARE.campaign_images().unwrap_or(SHARE.images_min);
        assert!(tally.images >= least && tally.resumptions > 0, "{tally:?}");
    }
}

#[test]
fn regression_sequences() {
    // Frames stayed in use, and frame counts drifted until the pool refused a write or an opening
    // failed.
    for (is_full, seed) in [(false, 79), (true, 1043), (true, 100_053)] {
        let mut tally = CheckCounts::default();
        let found_by = SequencePlan {
            transacts: false,
            ..plan(MediumKind::File, is_full)
        };
        let outcome = catch_panic(|| run(found_by, seed, &mut tally));
        outcome.unwrap_or_else(|wrong| panic!("seed {seed}, after {tally:?}: {wrong:?}"));
    }
}

const _: () = assert!(MAIN_PAGES > 508 + 8 + 5);
