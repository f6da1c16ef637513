//! Pages that move between memory and flash, with other operations between the steps of a move.

use super::CheckCounts;
use super::budget::{Budget, WorkloadShare};
use super::devices::base_with_room;
use super::fixed::check;
use super::harness::CrashHarness;
use super::medium::CrashMedium;
use super::model::{CheckFailure, fail};
use super::ops::{self, MAIN, MAIN_PAGES, Op};
use super::owner;
use super::random::{plan, random_op};
use super::recover::{self, MediumKind};
use super::rng::Rng;
use pagemesh_base::ids::FrameNo;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_store::session::Session;
use pagemesh_store::session::tier::PageMove;

const PAGE: u64 = PAGE_BYTES as u64;
const CLIENTS: usize = 2;
/// Operations of a random sequence.
const OPS: u64 = 28;
/// Random sequences of a test run.
pub(super) const TIER_SEQUENCES: u64 = 60;
const CRASH_INTERVAL: u64 = 8;

pub(super) const TIER: WorkloadShare = WorkloadShare {
    budget: Budget {
        all_max: 64,
        sampled: 8,
    },
    images_min: 4_000,
    percent: 2,
};

pub(super) const FIRST_DISK: WorkloadShare = WorkloadShare {
    images_min: 1_000,
    ..TIER
};

/// Pages of the main object, and the tier that they move to.
#[derive(Clone, Copy, Debug)]
pub(super) struct TierRange {
    page: u64,
    pages: u64,
    to_flash: bool,
}

/// Pages on their way to another tier.
#[derive(Default)]
pub(super) struct TierMoves {
    session: Option<Session<CrashMedium>>,
    moves: Vec<PageMove>,
    /// Reserved frames without a page.
    unused: Vec<FrameNo>,
}

impl CrashHarness<'_> {
    /// Copies pages, after the moves before them have ended.
    pub(super) fn start_moves(&mut self, range: TierRange) -> Result<(), CheckFailure> {
        self.end_moves()?;
        if self.entry(MAIN).is_none() {
            return Ok(());
        }
        let handle = self.handle(MAIN);
        let mut session = recover::session(&self.pool);
        let mut found = TierMoves::default();
        let moves = &mut found;
        let pages = range.page..(range.page + range.pages).min(MAIN_PAGES);
        self.owner_op(false, None, |pool| {
            let mapping = session.mapping().clone();
            let is_wanted =
                |frame: FrameNo| mapping.geometry().is_on_flash(frame) != range.to_flash;
            let copied = session.copy_pages(&handle, pages, is_wanted);
            moves.moves = copied.map_err(|cause| cause.to_string())?;
            if range.to_flash {
                let wanted = moves.moves.len() as u64 + 1;
                let frames = pool.borrow_mut().reserve_flash(wanted);
                let count = frames.len().min(moves.moves.len());
                moves.moves.truncate(count);
                for (copy, &frame) in moves.moves.iter_mut().zip(&frames) {
                    copy.write_to_flash(&mapping, frame);
                }
                moves.unused = frames[count..].to_vec();
            }
            Ok(())
        })?;
        found.session = Some(session);
        self.tier_moves = found;
        Ok(())
    }

    /// Makes the copies durable.
    pub(super) fn sync_moves(&mut self) -> Result<(), CheckFailure> {
        let Some(session) = self.tier_moves.session.take() else {
            return Ok(());
        };
        self.owner_op(false, None, |_| {
            let synced = session.sync_moves();
            synced.map_err(|cause| cause.to_string())
        })?;
        self.tier_moves.session = Some(session);
        Ok(())
    }

    /// Commits the moves of the pages that did not change.
    pub(super) fn end_moves(&mut self) -> Result<(), CheckFailure> {
        self.sync_moves()?;
        let TierMoves {
            session,
            mut moves,
            unused,
        } = std::mem::take(&mut self.tier_moves);
        let Some(mut session) = session else {
            return Ok(());
        };
        let handle = self.entry(MAIN).map(|_| self.handle(MAIN));
        self.owner_op(false, None, |pool| {
            let committed = handle.map_or(Ok(()), |handle| {
                owner::with_owner(pool, || session.commit_moves(&handle, &mut moves))
            });
            let mut pool = pool.borrow_mut();
            pool.end_moves(&moves, &unused);
            let closed = pool.close_session(session.number());
            closed.map_err(|cause| cause.to_string())?;
            committed.map_err(|cause| cause.to_string())
        })
    }
}

fn write(page: u64, pages: u64) -> Op {
    Op::Write {
        client: page as usize % CLIENTS,
        slice: MAIN,
        at: page * PAGE,
        len: pages * PAGE,
        open: 0,
        death: None,
    }
}

fn patch(page: u64) -> Op {
    Op::Write {
        client: page as usize % CLIENTS,
        slice: MAIN,
        at: page * PAGE + 100,
        len: 200,
        open: 0,
        death: None,
    }
}

fn clear(page: u64, pages: u64) -> Op {
    Op::Clear {
        client: 0,
        slice: MAIN,
        at: page * PAGE,
        len: pages * PAGE,
        open: 0,
        death: None,
    }
}

fn moves(page: u64, pages: u64, to_flash: bool) -> [Op; 3] {
    let start = Op::StartMoves(TierRange {
        page,
        pages,
        to_flash,
    });
    [start, Op::SyncMoves, Op::EndMoves]
}

/// A move with operations between its steps.
fn interrupted(page: u64, to_flash: bool, between: [Vec<Op>; 2]) -> Vec<Op> {
    let [start, sync, end] = moves(page, 8, to_flash);
    let [early, late] = between;
    let mut list = vec![start];
    list.extend(early);
    list.push(sync);
    list.extend(late);
    list.push(end);
    list
}

fn lists() -> Vec<Vec<Op>> {
    let changes = || {
        [
            vec![write(1, 1)],
            vec![patch(2)],
            vec![clear(0, 2)],
            vec![Op::Checkpoint],
        ]
    };
    let mut lists = Vec::new();
    for change in changes() {
        for is_late in [false, true] {
            let between = || match is_late {
                true => [Vec::new(), change.clone()],
                false => [change.clone(), Vec::new()],
            };
            let mut list = vec![write(0, 4)];
            list.extend(interrupted(0, true, between()));
            list.extend([Op::Checkpoint, patch(3), Op::Checkpoint]);
            list.extend(interrupted(0, false, between()));
            list.extend([Op::Reopen, patch(2), Op::Checkpoint]);
            // Frames that no opening counts anew.
            list.extend(interrupted(0, true, between()));
            lists.push(list);
        }
    }
    // The frames of both tiers are used again.
    let mut reused = vec![write(0, 8)];
    for round in 0..4 {
        reused.extend(moves(0, 8, true));
        reused.extend([Op::Checkpoint, write(round, 3), Op::Checkpoint]);
        reused.extend(moves(0, 8, false));
        reused.push(Op::Maintain);
    }
    lists.push(reused);
    lists.push(drained());
    lists
}

/// The flash device leaves, with a move on its way there.
fn drained() -> Vec<Op> {
    let mut list = vec![write(0, 8)];
    list.extend(moves(0, 4, true));
    let [start, sync, end] = moves(4, 4, true);
    list.extend([
        start,
        sync,
        Op::StartDrain,
        end,
        Op::MovePages,
        Op::MoveNodes,
    ]);
    list.extend([Op::Checkpoint, Op::RemoveDevice, write(2, 4), Op::Reopen]);
    list
}

/// Random operations, a third of them steps of moves.
fn run_random(seed: u64, world: &mut CrashHarness<'_>) -> Result<(), CheckFailure> {
    let mut rng = Rng::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
    for tag in 1..=OPS {
        let op = match rng.below(9) {
            0 | 1 => Op::StartMoves(TierRange {
                page: rng.pick(&[0, 0, 2, 28, 506]),
                pages: 1 + rng.below(10),
                to_flash: rng.below(3) > 0,
            }),
            2 => Op::SyncMoves,
            3 => Op::EndMoves,
            _ => random_op(&mut rng, plan(MediumKind::Tier, false)),
        };
        ops::run(world, &op, seed << 16 | tag)?;
        if tag.is_multiple_of(CRASH_INTERVAL) {
            let chosen = rng.below(world.last_points.len() as u64) as usize;
            let (point, oracle) = world.last_points[chosen].clone();
            let image = point.sample(rng.below(1 << 40));
            world.resume_from_image(image, oracle, CLIENTS)?;
        }
    }
    Ok(())
}

pub(super) fn tier(
    sequences: u64,
    budget: Budget,
    counts: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    let base = base_with_room(MediumKind::Tier, false);
    let lists = lists();
    for number in 0..lists.len() as u64 + sequences {
        counts.sequences += 1;
        let mut world = base.open(CLIENTS, None, counts)?;
        world.budget = Some(budget);
        ops::run(&mut world, &Op::AddDevice, 0)?;
        if !world.pool.borrow().is_tiered() {
            return fail("the device", "it is not flash");
        }
        match lists.get(number as usize) {
            Some(list) => {
                for (tag, op) in (1..).zip(list) {
                    ops::run(&mut world, op, tag)?;
                }
            }
            None => run_random(number, &mut world)?,
        }
        world.empty_pool()?;
    }
    Ok(())
}

#[test]
fn moves_between_tiers_survive_crashes() {
    check("moves between tiers", TIER, |budget, counts| {
        tier(TIER_SEQUENCES, budget, counts)
    });
}

/// A pool in memory, with changes above its last checkpoint or without, is opened on a medium that takes disks. Its first disk
/// joins, takes pages, and leaves.
pub(super) fn first_disk(budget: Budget, counts: &mut CheckCounts) -> Result<(), CheckFailure> {
    let base = base_with_room(MediumKind::Memory, false);
    for (number, last) in (0..).zip([Op::Checkpoint, Op::Flush, patch(3), clear(5, 2)]) {
        counts.sequences += 1;
        let mut world = base.open(CLIENTS, None, counts)?;
        world.budget = Some(budget);
        for (tag, op) in (1..).zip([write(0, 8), patch(2), last]) {
            ops::run(&mut world, &op, tag)?;
        }
        if world.pool.borrow().is_tiered() {
            return fail("the pool", "it has a tier before its first disk");
        }
        let Some((point, oracle)) = world.last_points.last().cloned() else {
            return fail("the pool", "its last operation wrote nothing");
        };
        world.kind = MediumKind::Tier;
        world.resume_from_image(point.sample(number), oracle, CLIENTS)?;
        let mut list = vec![Op::AddDevice, write(8, 2)];
        list.extend(interrupted(0, true, [vec![patch(1)], Vec::new()]));
        list.extend([Op::Checkpoint, Op::Reopen, patch(4)]);
        list.extend(drained());
        for (tag, op) in (20..).zip(&list) {
            ops::run(&mut world, op, tag)?;
        }
        if world.pool.borrow().is_tiered() && pagemesh_base::defect::present().is_none() {
            return fail("the disk", "it did not leave");
        }
        world.empty_pool()?;
    }
    Ok(())
}

#[test]
fn first_disk_of_memory_pool_survives_crashes() {
    check("a first disk", FIRST_DISK, first_disk);
}
