//! Proof that the checks can fail: each deliberate defect of the store must be caught. The test
//! prints the check that caught each defect, and after how many images. `PAGEMESH_DEFECT` limits it to
//! the defects with this text in their names.

use super::budget::Budget;
use super::correction::{self, CORRECTIONS};
use super::devices::devices;
use super::fixed::{self, DeathMode};
use super::model::{CheckFailure, fail};
use super::random::{self, plan};
use super::recover::MediumKind;
use super::tier::{self, TIER_SEQUENCES};
use super::{CheckCounts, catch_panic, set_defect};
use super::{clones, snapshots};
use pagemesh_base::defect::Defect;
use std::sync::mpsc;
use std::thread;

/// A defect counts as not caught after this many images.
const IMAGES_MAX: u64 = 60_000;
/// A small budget for each point, so that the run reaches many points early.
const POINT_BUDGET: Budget = Budget {
    all_max: 64,
    sampled: 8,
};
/// For a defect that few images of few pairs reveal.
const PAIR_BUDGET: Budget = Budget {
    all_max: 64,
    sampled: 64,
};

/// The workload that reveals a defect.
#[derive(Clone, Copy, Debug)]
enum Workload {
    Operations(MediumKind),
    Pairs(MediumKind),
    Deaths(DeathMode),
    Laps(MediumKind),
    SlotOnlyFrame,
    Devices(MediumKind),
    Tier,
    Corrections(MediumKind),
    SkippedRecords(MediumKind),
    Sequences(MediumKind, bool),
    Snapshots(MediumKind),
    Clones(MediumKind),
}

use Workload::{
    Clones, Corrections, Deaths, Devices, Laps, Operations, Pairs, Sequences, SkippedRecords,
    SlotOnlyFrame, Snapshots, Tier,
};

/// Each defect, a workload that reveals it, and the check that must fail first.
const DEFECTS: &[(Defect, Workload, &str)] = &[
    (
        Defect::SeenVersionFreed,
        Snapshots(MediumKind::Memory),
        "snapshots",
    ),
    (
        Defect::VersionLogNotFenced,
        Snapshots(MediumKind::File),
        "snapshots",
    ),
    (
        Defect::RecoveredVersionsLost,
        Snapshots(MediumKind::Memory),
        "frames in use",
    ),
    (
        Defect::RecoveredVersionsLost,
        Snapshots(MediumKind::File),
        "frames in use",
    ),
    (
        Defect::SeenPagePatched,
        Snapshots(MediumKind::Memory),
        "snapshots",
    ),
    (
        Defect::VersionLogHeadEarly,
        Snapshots(MediumKind::Memory),
        "frames in use",
    ),
    (
        Defect::SeenVersionDropped,
        Snapshots(MediumKind::Memory),
        "snapshots",
    ),
    (
        Defect::SweptBeforeLogHead,
        Snapshots(MediumKind::Memory),
        "maintenance",
    ),
    (
        Defect::VersionsUnordered,
        Snapshots(MediumKind::File),
        "maintenance",
    ),
    (
        Defect::OriginFrameFreed,
        Clones(MediumKind::Memory),
        "maintenance",
    ),
    (
        Defect::OriginFrameFreedByReplay,
        Clones(MediumKind::Memory),
        "maintenance",
    ),
    (Defect::CloneLeafZeroed, Clones(MediumKind::File), "objects"),
    (
        Defect::NoCommitFence,
        Operations(MediumKind::Memory),
        "acknowledged writes",
    ),
    (
        Defect::SwapBeforeFence,
        Operations(MediumKind::Memory),
        "damage",
    ),
    (
        Defect::UnlockBeforeFence,
        Deaths(DeathMode::SessionAlone),
        "frames in use",
    ),
    (
        Defect::DataAfterRecord,
        Operations(MediumKind::Memory),
        "acknowledged writes",
    ),
    (
        Defect::SkippedCrc,
        Operations(MediumKind::Memory),
        "reading",
    ),
    (
        Defect::BirthNotStored,
        Sequences(MediumKind::Memory, false),
        "acknowledged writes",
    ),
    (
        Defect::CopyBornNow,
        Devices(MediumKind::Memory),
        "acknowledged writes",
    ),
    (
        Defect::NearlyWholeKept,
        Sequences(MediumKind::Memory, false),
        "damage",
    ),
    (
        Defect::NearlyWholeKept,
        Sequences(MediumKind::File, false),
        "damage",
    ),
    (
        Defect::SessionSlotsNotFlushed,
        Sequences(MediumKind::Memory, false),
        "frames in use",
    ),
    (
        Defect::LastSlotsReportedFlushed,
        Sequences(MediumKind::Memory, false),
        "reading",
    ),
    (
        Defect::CheckpointPassesUnpublished,
        Deaths(DeathMode::SessionAlone),
        "reading",
    ),
    (
        Defect::PartialCheckpointPassesUnpublished,
        Deaths(DeathMode::Unnoticed),
        "ending a session",
    ),
    (
        Defect::PartialCheckpointKeepsRecords,
        Deaths(DeathMode::Unnoticed),
        "frames in use",
    ),
    (
        Defect::PartialCheckpointListsNothing,
        Deaths(DeathMode::Unnoticed),
        "operations in flight",
    ),
    (
        Defect::PartialCheckpointOfDeadForgotten,
        Deaths(DeathMode::Unnoticed),
        "operations in flight",
    ),
    (
        Defect::SeqHoleKept,
        Deaths(DeathMode::SessionAlone),
        "checkpoints",
    ),
    (
        Defect::DeadNotRolledForward,
        Deaths(DeathMode::SessionAlone),
        "a dead session's operation",
    ),
    (
        Defect::InFlightLost,
        Operations(MediumKind::Memory),
        "operations in flight",
    ),
    (
        Defect::InFlightMisplaced,
        Operations(MediumKind::Memory),
        "operations in flight",
    ),
    (
        Defect::InFlightOfDeadLost,
        Pairs(MediumKind::Memory),
        "operations in flight",
    ),
    (
        Defect::HeadPastOpen,
        Pairs(MediumKind::Memory),
        "operations in flight",
    ),
    (
        Defect::NodeNotZeroed,
        Operations(MediumKind::Memory),
        "reading",
    ),
    (
        Defect::PadNotFenced,
        Sequences(MediumKind::Memory, false),
        "opening",
    ),
    (
        Defect::TablesWithSuperblock,
        Pairs(MediumKind::Memory),
        "reading",
    ),
    (
        Defect::FrameTableNotFlushed,
        Pairs(MediumKind::Memory),
        "reading",
    ),
    (Defect::FrameReuse, Laps(MediumKind::File), "reading"),
    (Defect::JournalReuse, Laps(MediumKind::Memory), "opening"),
    (
        Defect::JournalNotNamed,
        Operations(MediumKind::Memory),
        "acknowledged writes",
    ),
    // In memory the count of frames in use shows it, and the bitmap is made anew.
    (
        Defect::BitmapEndNotStored,
        Devices(MediumKind::File),
        "opening",
    ),
    (
        Defect::RecoveredBitmapEndNotStored,
        Devices(MediumKind::File),
        "opening",
    ),
    (
        Defect::DeviceNotNamed,
        Devices(MediumKind::Memory),
        "acknowledged writes",
    ),
    (
        Defect::DeviceHeadersLast,
        Devices(MediumKind::Memory),
        "opening",
    ),
    (
        Defect::DeviceHeadersLast,
        Devices(MediumKind::File),
        "opening",
    ),
    (
        Defect::DeviceHeadersTogether,
        Devices(MediumKind::Memory),
        "opening",
    ),
    (
        Defect::DeviceRemovedInUse,
        Devices(MediumKind::Memory),
        "reading",
    ),
    (
        Defect::NodeMovedBeforeSync,
        Devices(MediumKind::File),
        "reading",
    ),
    (
        Defect::MovedLeafCached,
        Devices(MediumKind::Memory),
        "frames in use",
    ),
    (Defect::DemotedBeforeSync, Tier, "reading"),
    (Defect::MovedWithoutCompare, Tier, "acknowledged writes"),
    (Defect::FlashFrameKept, Tier, "counting frames"),
    (Defect::FlashFrameFreedTwice, Tier, "operations"),
    (Defect::FlashTablesNotSynced, Tier, "reading"),
    (
        Defect::ReplayedBeforeFence,
        Deaths(DeathMode::AllProcesses),
        "damage",
    ),
    (
        Defect::IncarnationKept,
        Sequences(MediumKind::File, false),
        "acknowledged writes",
    ),
    (
        Defect::CheckpointNotSynced,
        Sequences(MediumKind::File, false),
        "damage",
    ),
    (
        Defect::FlushNotSynced,
        Pairs(MediumKind::File),
        "acknowledged writes",
    ),
    (
        Defect::AppliedOutOfOrder,
        Sequences(MediumKind::File, false),
        "frames in use",
    ),
    (
        Defect::RecoveryNotSynced,
        Sequences(MediumKind::File, false),
        "frames in use",
    ),
    (Defect::SlotsBeforeFrames, SlotOnlyFrame, "frames in use"),
    (
        Defect::LostNodeKept,
        Operations(MediumKind::File),
        "reading",
    ),
    (
        Defect::GroupHalfRecovered,
        Operations(MediumKind::Memory),
        "atomic records",
    ),
    (
        Defect::GroupHalfRecovered,
        Operations(MediumKind::File),
        "atomic records",
    ),
    (
        Defect::GroupPublishedEarly,
        Deaths(DeathMode::SessionAlone),
        "operations",
    ),
    (
        Defect::PatchedBeforeFence,
        Operations(MediumKind::Memory),
        "reading",
    ),
    (
        Defect::SessionPatchNotFlushed,
        Sequences(MediumKind::Memory, false),
        "reading",
    ),
    (
        Defect::CheckpointPatchNotFlushed,
        Pairs(MediumKind::Memory),
        "reading",
    ),
    (
        Defect::PatchedFrameFreed,
        Pairs(MediumKind::Memory),
        "maintenance",
    ),
    (Defect::PatchedPageTorn, Pairs(MediumKind::Memory), "damage"),
    (
        Defect::DeadPatchNotApplied,
        Deaths(DeathMode::SessionAlone),
        "reading",
    ),
    (
        Defect::NewerSuperblockNotChecked,
        Corrections(MediumKind::Memory),
        "opening",
    ),
    (
        Defect::NewerSuperblockNotChecked,
        Corrections(MediumKind::File),
        "opening",
    ),
    (
        Defect::OlderSuperblockFirst,
        Corrections(MediumKind::Memory),
        "opening",
    ),
    (
        Defect::OlderSuperblockFirst,
        Corrections(MediumKind::File),
        "opening",
    ),
    (
        Defect::SuperblocksTogether,
        Corrections(MediumKind::Memory),
        "opening",
    ),
    (
        Defect::SuperblocksTogether,
        Corrections(MediumKind::File),
        "opening",
    ),
    (
        Defect::SlicesMarkedAfterHead,
        SkippedRecords(MediumKind::Memory),
        "operations in flight",
    ),
    (
        Defect::SlicesMarkedAfterHead,
        SkippedRecords(MediumKind::File),
        "operations in flight",
    ),
];

/// Runs the workload until a check fails.
fn run_workload(workload: Workload, counts: &mut CheckCounts) -> Result<(), CheckFailure> {
    match workload {
        Operations(kind) => {
            for op in fixed::all_ops() {
                fixed::enumerate(kind, &[op, super::ops::Op::Flush], 0, POINT_BUDGET, counts)?;
            }
        }
        Pairs(kind) => {
            for (known, mut pair) in fixed::op_pairs() {
                pair.push(super::ops::Op::Flush);
                fixed::enumerate(kind, &pair, known, PAIR_BUDGET, counts)?;
                if counts.images > IMAGES_MAX {
                    break;
                }
            }
        }
        Deaths(dead) => fixed::deaths(MediumKind::Memory, dead, POINT_BUDGET, counts)?,
        Laps(kind) => fixed::laps(kind, POINT_BUDGET, counts)?,
        Devices(kind) => devices(kind, POINT_BUDGET, counts)?,
        Tier => tier::tier(TIER_SEQUENCES, POINT_BUDGET, counts)?,
        Snapshots(kind) => snapshots::sequences(kind, IMAGES_MAX, counts)?,
        Clones(kind) => clones::sequences(kind, IMAGES_MAX, counts)?,
        SlotOnlyFrame => fixed::slot_only_frame(counts)?,
        Corrections(kind) => correction::corrections(kind, CORRECTIONS.budget, counts)?,
        SkippedRecords(kind) => correction::skipped_records(kind, CORRECTIONS.budget, counts)?,
        Sequences(kind, is_full) => {
            for seed in 1.. {
                let mut own = CheckCounts::default();
                let outcome = random::run(plan(kind, is_full), seed, &mut own);
                counts.add(&own);
                outcome?;
                if counts.images > IMAGES_MAX {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// The failure that caught the defect, and the work until then.
fn run_with_defect(defect: Defect, workload: Workload) -> (Result<(), CheckFailure>, CheckCounts) {
    let mut counts = CheckCounts::default();
    set_defect(Some(defect));
    let outcome = catch_panic(|| run_workload(workload, &mut counts));
    set_defect(None);
    (outcome, counts)
}

fn chosen_defects() -> impl Iterator<Item = &'static (Defect, Workload, &'static str)> {
    let chosen = std::env::var("PAGEMESH_DEFECT").unwrap_or_default();
    let is_chosen = move |it: &&(Defect, Workload, &str)| format!("{:?}", it.0).contains(&chosen);
    DEFECTS.iter().filter(is_chosen)
}

#[test]
fn every_defect_is_caught() {
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        for part in 0..2 {
            let sender = sender.clone();
            scope.spawn(move || {
                for &(defect, workload, by) in chosen_defects().skip(part).step_by(2) {
                    let found = run_with_defect(defect, workload);
                    sender
                        .send((defect, workload, by, found))
                        .expect("the test waits");
                }
            });
        }
    });
    drop(sender);
    println!(
        "{:24} {:30} {:>8} {:>6}  detail",
        "defect", "caught by", "images", "runs"
    );
    let (mut missed, mut others) = (Vec::new(), Vec::new());
    for (defect, workload, by, (outcome, tally)) in receiver {
        let Err(CheckFailure { check, detail }) = outcome else {
            missed.push((defect, workload));
            continue;
        };
        let detail: String = detail.chars().take(90).collect();
        let name = format!("{defect:?}");
        println!(
            "{name:24} {check:30} {:>8} {:>6}  {detail}",
            tally.images, tally.sequences
        );
        if check != by {
            others.push((defect, workload, check));
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
    assert!(others.is_empty(), "caught by other checks: {others:?}");
}

#[test]
fn store_panic_fails_a_check() {
    assert!(catch_panic(|| panic!("a frame is freed twice")).is_err());
    assert!(catch_panic(|| fail("a check", "")).is_err());
    assert!(catch_panic(|| Ok(())).is_ok());
}
