//! Snapshots: created, written behind, merged, dropped and swept, with crashes at every fence.
//!
//! Each image must have each snapshot with its contents. After that the image is written, merged and swept, and its
//! snapshots are read once more.

use super::budget::{Budget, EXTREMES};
use super::fixed::base;
use super::harness::CrashHarness;
use super::model::{CheckFailure, RecoveredContents, SnapshotKey, fail};
use super::ops::{self, MAIN, OTHER, Op};
use super::owner::SharedPool;
use super::random::{self, SequencePlan, plan};
use super::recover::MediumKind;
use super::rng::Rng;
use super::{CheckCounts, catch_panic};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_store::frame_word::FrameWord;
use pagemesh_store::pool::ObjectError;
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::test_api::PoolInternals;
use std::collections::BTreeMap;

/// Pages of a leaf.
const LEAF: u64 = 512;
const LIVES: u64 = 3;
const OPS_PER_LIFE: u64 = 14;
/// Images that the tests check at least, for each kind of medium.
const IMAGES_MIN: u64 = 15_000;
const BUDGET: Budget = Budget {
    all_max: 12,
    sampled: 5,
};

/// Adds the contents of all snapshots of a slice.
pub(super) fn read_all(
    pool: &SharedPool,
    slice: SliceId,
    pages: u64,
    found: &mut RecoveredContents,
) -> Result<(), CheckFailure> {
    let mut pool = pool.borrow_mut();
    let listed = pool.snapshots_of(slice);
    let listed = listed.or_else(|cause| fail("snapshots", cause.to_string()))?;
    for snapshot in listed {
        let mut seen = BTreeMap::new();
        for leaf in 0..pages.div_ceil(LEAF) {
            let frames = pool.version_leaf(slice, snapshot, leaf);
            let frames = frames.or_else(|cause| fail("snapshots", cause.to_string()))?;
            for index in 0..LEAF {
                let Some(frame) = frames.frame(index as usize) else {
                    continue;
                };
                let page = PageNo(leaf * LEAF + index);
                let mut bytes = [0; PAGE_BYTES];
                let read = pool.mapping().read_version(frame, page, &mut bytes);
                read.or_else(|cause| fail("reading snapshots", cause.to_string()))?;
                seen.insert(page.0, crc32c(&bytes));
            }
        }
        found.snapshots.insert((slice, snapshot.0), seen);
    }
    Ok(())
}

/// Merges and sweeps everything, and reads the snapshots again.
pub(super) fn check_after_writes(
    pool: &SharedPool,
    before: &RecoveredContents,
) -> Result<(), CheckFailure> {
    if before.snapshots.is_empty() {
        return Ok(());
    }
    pool.borrow_mut().merge_versions_soon();
    for _ in 0..40 {
        let more = pool.borrow_mut().maintain();
        if !more.or_else(|cause| fail("maintenance", cause.to_string()))? {
            break;
        }
    }
    let mut after = RecoveredContents::default();
    for (&slice, object) in &before.objects {
        read_all(pool, slice, object.entry.pages, &mut after)?;
    }
    for (key, expected) in &before.snapshots {
        let pages = &after.snapshots[key];
        let both = pages.keys().chain(expected.keys());
        let differs: Vec<_> = both
            .filter(|page| pages.get(page) != expected.get(page))
            .collect();
        if !differs.is_empty() {
            let detail = format!("pages {differs:?} of {key:?} changed with later writes");
            return fail("snapshots", detail);
        }
    }
    Ok(())
}

pub(super) fn is_full(cause: &ObjectError) -> bool {
    matches!(cause, ObjectError::Store(StoreError::NoSpace))
}

/// Creates a snapshot, and raises the epoch of the slice to its own.
pub(super) fn create(world: &mut CrashHarness<'_>, slice: SliceId) -> Result<(), CheckFailure> {
    let Some(entry) = world.entry(slice) else {
        return Ok(());
    };
    ops::retire_dead_clients(world)?;
    let snapshot = entry.epoch + 1;
    let mut is_refused = false;
    world.oracle.uncertain_snapshot = Some((slice, snapshot));
    world.owner_op(true, None, |pool| {
        match pool.borrow_mut().prepare_snapshot(slice, Epoch(snapshot)) {
            Err(cause) if is_full(&cause) => is_refused = true,
            result => result.map_err(|cause| cause.to_string())?,
        }
        Ok(())
    })?;
    if !is_refused {
        let contents = world.oracle.current();
        let pages = contents[&slice].pages.iter();
        let sums = pages.map(|(&page, content)| (page, FrameWord::from_bits(content.0).crc()));
        let key = (slice, snapshot);
        world.oracle.snapshots.insert(key, sums.collect());
        let pages = std::sync::Arc::new(contents[&slice].pages.clone());
        world.oracle.snapshot_contents.insert(key, pages);
    }
    // A refused one may be listed.
    world.oracle.uncertain_snapshot = is_refused.then_some((slice, snapshot));
    ops::run(world, &Op::RaiseEpoch(slice), 0)
}

/// Drops the snapshot of this number, if there is one.
pub(super) fn drop_one(
    world: &mut CrashHarness<'_>,
    slice: SliceId,
    number: u64,
) -> Result<(), CheckFailure> {
    if world.entry(slice).is_none() {
        return Ok(());
    }
    let of_slice = world.oracle.snapshots.keys().filter(|key| key.0 == slice);
    let keys: Vec<_> = of_slice.copied().collect();
    let Some(&key) = keys.get(number as usize % keys.len().max(1)) else {
        return Ok(());
    };
    drop_one_at(world, key)
}

fn drop_one_at(world: &mut CrashHarness<'_>, key: SnapshotKey) -> Result<(), CheckFailure> {
    let clones = world.pool.borrow().clones_of(key.0);
    let clones = clones.or_else(|cause| fail("clones", cause.to_string()))?;
    if clones.iter().any(|clone| clone.1.0 == key.1) {
        let dropped = world
            .pool
            .borrow_mut()
            .drop_snapshots(key.0, &[Epoch(key.1)]);
        return match dropped {
            Err(ObjectError::HasClone { .. }) => Ok(()),
            other => fail("clones", format!("dropping their snapshot: {other:?}")),
        };
    }
    world.oracle.uncertain_snapshot = Some(key);
    let mut is_refused = false;
    world.owner_op(true, None, |pool| {
        match pool.borrow_mut().drop_snapshots(key.0, &[Epoch(key.1)]) {
            Err(cause) if is_full(&cause) => is_refused = true,
            result => result.map_err(|cause| cause.to_string())?,
        }
        Ok(())
    })?;
    if !is_refused {
        world.oracle.snapshots.remove(&key);
        world.oracle.uncertain_snapshot = None;
    }
    Ok(())
}

/// Drops snapshots that a crash left behind before the barrier at their epochs: as the manager does, which has not
/// committed them.
pub(super) fn drop_unfinished(world: &mut CrashHarness<'_>) -> Result<(), CheckFailure> {
    let keys: Vec<_> = world.oracle.snapshots.keys().copied().collect();
    for (slice, snapshot) in keys {
        let epoch = world.entry(slice).map_or(0, |entry| entry.epoch);
        if snapshot > epoch {
            drop_one_at(world, (slice, snapshot))?;
        }
    }
    Ok(())
}

fn random_op(rng: &mut Rng, plan: SequencePlan) -> Op {
    let slice = rng.pick(&[MAIN, MAIN, MAIN, OTHER]);
    match rng.below(16) {
        0..=1 => Op::Snapshot(slice),
        2 => Op::DropSnapshot(slice, rng.below(8)),
        3..=4 => Op::MergeVersions,
        5 => Op::Checkpoint,
        _ => random::random_op(rng, plan),
    }
}

/// The workload of a test with snapshots: its first operations, and each later one.
pub(super) struct Workload {
    pub(super) first: &'static [Op],
    pub(super) random_op: fn(&mut Rng, SequencePlan) -> Op,
    pub(super) budget: Budget,
}

const WORKLOAD: Workload = Workload {
    first: &[Op::Snapshot(MAIN)],
    random_op,
    budget: BUDGET,
};

impl Workload {
    fn run(
        &self,
        plan: SequencePlan,
        seed: u64,
        counts: &mut CheckCounts,
    ) -> Result<(), CheckFailure> {
        let mut rng = Rng::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        counts.sequences += 1;
        let mut tag = 0;
        let mut world = base(plan.kind, plan.is_full).open(2, Some(EXTREMES), counts)?;
        world.budget = Some(plan.budget);
        for op in self.first {
            ops::run(&mut world, op, 0)?;
        }
        for life in 0..LIVES {
            for _ in 0..2 + rng.below(OPS_PER_LIFE) {
                tag += 1;
                let op = (self.random_op)(&mut rng, plan);
                ops::run(&mut world, &op, seed << 16 | tag)?;
            }
            if life + 1 < LIVES {
                let chosen = rng.below(world.last_points.len() as u64) as usize;
                let (point, oracle) = world.last_points[chosen].clone();
                let image = match rng.below(3) {
                    0 => point.image(0),
                    1 => point.all_persisted(),
                    _ => point.sample(rng.below(1 << 40)),
                };
                world.resume_from_image(image, oracle, 2)?;
                drop_unfinished(&mut world)?;
            }
        }
        ops::retire_dead_clients(&mut world)?;
        world.empty_pool()
    }

    /// Runs sequences until so many images are checked.
    pub(super) fn sequences(
        &self,
        kind: MediumKind,
        images: u64,
        counts: &mut CheckCounts,
    ) -> Result<(), CheckFailure> {
        let plan = SequencePlan {
            budget: self.budget,
            ..plan(kind, false)
        };
        let only = super::budget::env_number("PAGEMESH_SEED");
        let mut seed = only.unwrap_or(1);
        while counts.images < images {
            let mut own = CheckCounts::default();
            let outcome = self.run(plan, seed, &mut own);
            counts.add(&own);
            outcome.map_err(|CheckFailure { check, detail }| CheckFailure {
                check,
                detail: format!("seed {seed}: {detail}"),
            })?;
            seed += 1;
            if only.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// Checks so many images of a kind of medium.
    pub(super) fn check(&self, kind: MediumKind, images: u64) {
        let mut counts = CheckCounts::default();
        let outcome = catch_panic(|| self.sequences(kind, images, &mut counts));
        println!("{kind:?}: {counts}");
        if let Err(CheckFailure { check, detail }) = outcome {
            panic!(
                "{kind:?}, after {} images: {check}: {detail}",
                counts.images
            );
        }
    }
}

/// Runs sequences until so many images are checked.
pub(super) fn sequences(
    kind: MediumKind,
    images: u64,
    counts: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    WORKLOAD.sequences(kind, images, counts)
}

#[test]
fn snapshots_in_memory_survive_crashes() {
    WORKLOAD.check(MediumKind::Memory, IMAGES_MIN);
}

#[test]
fn snapshots_on_files_survive_crashes() {
    WORKLOAD.check(MediumKind::File, IMAGES_MIN);
}
