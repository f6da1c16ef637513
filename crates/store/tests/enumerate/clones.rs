//! Clones: created from snapshots, filled, written, promoted and deleted, with crashes at every fence.
//!
//! A crash may leave a clone that is not filled. Each image fills it, and must have the contents of the snapshot then.

use super::CheckCounts;
use super::budget::Budget;
use super::harness::CrashHarness;
use super::model::{CheckFailure, Effect, ObjectContents, ObjectEntry, content, fail};
use super::ops::{self, MAIN, Op};
use super::owner::SharedPool;
use super::random::{self, SequencePlan};
use super::recover::MediumKind;
use super::rng::Rng;
use super::snapshots::{Workload, is_full};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_store::clones::CloneSource;
use pagemesh_store::pool::ObjectError;
use uuid::Uuid;

/// The clone of the main slice.
pub(super) const CLONE: SliceId = SliceId(Uuid::from_u128(0x10));
/// Images that the tests check at least, for each kind of medium.
const IMAGES_MIN: u64 = 12_000;
const BUDGET: Budget = Budget {
    all_max: 12,
    sampled: 4,
};

/// Fills clones that a crash left unfilled.
pub(super) fn fill_all(pool: &SharedPool) -> Result<(), CheckFailure> {
    let listed: Vec<_> = pool.borrow().list().map(|entry| entry.slice).collect();
    for slice in listed {
        fill(pool, slice).or_else(|cause| fail("filling a clone", cause.to_string()))?;
    }
    Ok(())
}

fn fill(pool: &SharedPool, slice: SliceId) -> Result<(), ObjectError> {
    while !pool.borrow_mut().fill_clone(slice)?.is_complete() {}
    Ok(())
}

/// Clones the snapshot of this number of the main slice, unless there is a clone.
pub(super) fn create(world: &mut CrashHarness<'_>, number: u64) -> Result<(), CheckFailure> {
    let known = world.oracle.snapshot_contents.iter();
    let known = known.filter(|(key, _)| key.0 == MAIN && world.oracle.snapshots.contains_key(key));
    let known: Vec<_> = known.map(|(key, pages)| (key.1, pages.clone())).collect();
    let (None, Some((snapshot, pages))) = (
        world.entry(CLONE),
        known.get(number as usize % known.len().max(1)),
    ) else {
        return Ok(());
    };
    ops::retire_dead_clients(world)?;
    let entry = ObjectEntry {
        pages: world.entry(MAIN).map_or(0, |entry| entry.pages),
        epoch: *snapshot,
    };
    // A page that the clone shares counts as born at the base: a promotion lets it be so.
    let pages = pages.iter();
    let pages = pages.map(|(&page, (_, bytes))| (page, content(**bytes, *snapshot)));
    let contents = ObjectContents {
        entry,
        pages: pages.collect(),
    };
    let source = CloneSource {
        origin: MAIN,
        snapshot: Epoch(*snapshot),
    };
    let mut is_refused = false;
    let effect = Effect::Clone(CLONE, contents);
    world.owner_op(true, Some(effect), |pool| {
        let size = entry.pages * pagemesh_base::units::PAGE_BYTES as u64;
        let created = pool.borrow_mut().create_clone(CLONE, source, size);
        match created.and_then(|()| fill(pool, CLONE)) {
            Err(cause) if is_full(&cause) => is_refused = true,
            result => result.map_err(|cause| cause.to_string())?,
        }
        Ok(())
    })?;
    if is_refused {
        return fail("operations", "the pool of the workload is full");
    }
    Ok(())
}

/// Copies all pages that the clone shares.
pub(super) fn promote(world: &mut CrashHarness<'_>) -> Result<(), CheckFailure> {
    let is_shared = |pool: &SharedPool| {
        let mut listed = pool.borrow().list().collect::<Vec<_>>().into_iter();
        listed.any(|entry| entry.slice == CLONE && entry.base != Epoch(0))
    };
    // A second promotion does nothing.
    if !is_shared(&world.pool) {
        return Ok(());
    }
    ops::retire_dead_clients(world)?;
    world.owner_op(true, None, |pool| {
        loop {
            match pool.borrow_mut().promote_clone(CLONE) {
                Ok(progress) if progress.is_complete() => return Ok(()),
                Err(cause) if is_full(&cause) => return Ok(()),
                step => step.map_err(|cause| cause.to_string())?,
            };
        }
    })
}

fn random_op(rng: &mut Rng, plan: SequencePlan) -> Op {
    match rng.below(24) {
        0..=1 => Op::Snapshot(rng.pick(&[MAIN, CLONE])),
        2 => Op::DropSnapshot(rng.pick(&[MAIN, CLONE]), rng.below(8)),
        3..=6 => Op::Clone(rng.below(8)),
        7 => Op::PromoteClone,
        8 => Op::Delete(CLONE),
        9 => Op::MergeVersions,
        10 => Op::Checkpoint,
        _ => on_clone(random::random_op(rng, plan), rng.below(2) == 0),
    }
}

/// The operation, on the clone in place of its slice if so chosen.
fn on_clone(mut op: Op, is_on_clone: bool) -> Op {
    if let (
        Op::Write { slice, .. }
        | Op::Clear { slice, .. }
        | Op::Transact { slice, .. }
        | Op::RaiseEpoch(slice)
        | Op::ClearInFlight(slice),
        true,
    ) = (&mut op, is_on_clone)
    {
        *slice = CLONE;
    }
    op
}

const WORKLOAD: Workload = Workload {
    first: &[Op::Snapshot(MAIN), Op::Clone(0)],
    random_op,
    budget: BUDGET,
};

/// Runs sequences until so many images are checked.
pub(super) fn sequences(
    kind: MediumKind,
    images: u64,
    counts: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    WORKLOAD.sequences(kind, images, counts)
}

#[test]
fn clones_in_memory_survive_crashes() {
    WORKLOAD.check(MediumKind::Memory, IMAGES_MIN);
}

#[test]
fn clones_on_files_survive_crashes() {
    WORKLOAD.check(MediumKind::File, IMAGES_MIN);
}
