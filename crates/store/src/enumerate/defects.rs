//! Proof that the checks can fail: each deliberate defect of the store must be
//! caught. The table that the test prints says by which check, and after how
//! many images.

use super::budget::Budget;
use super::fixed::{self, Dead};
use super::mending::{self, MENDINGS};
use super::model::{Wrong, wrong};
use super::random::{self, plan};
use super::recover::Kind;
use super::{Tally, guard};
use crate::defect::{self, Defect};
use std::sync::mpsc;
use std::thread;

/// Images after which a defect counts as not caught.
const IMAGES_MAX: u64 = 60_000;
/// Of each point, so that many points are met soon.
const BUDGET: Budget = Budget {
    all_max: 64,
    sampled: 8,
};
/// One of them shows in few images of few pairs.
const OF_PAIRS: Budget = Budget {
    all_max: 64,
    sampled: 64,
};

/// The workload that a defect shows in.
#[derive(Clone, Copy, Debug)]
enum Workload {
    Operations(Kind),
    Pairs(Kind),
    Deaths(Dead),
    Laps(Kind),
    Hidden,
    Mendings(Kind),
    Behind(Kind),
    Sequences(Kind, bool),
}

use Workload::{Behind, Deaths, Hidden, Laps, Mendings, Operations, Pairs, Sequences};

/// Each with a workload that shows it, and the check that it fails first.
const DEFECTS: &[(Defect, Workload, &str)] = &[
    (
        Defect::NoCommitFence,
        Operations(Kind::Memory),
        "acknowledged writes",
    ),
    (Defect::SwapBeforeFence, Operations(Kind::Memory), "reading"),
    (
        Defect::UnlockBeforeFence,
        Deaths(Dead::Session),
        "frames in use",
    ),
    (
        Defect::DataAfterRecord,
        Operations(Kind::Memory),
        "acknowledged writes",
    ),
    (Defect::SkippedCrc, Operations(Kind::Memory), "reading"),
    (
        Defect::NearlyWholeKept,
        Sequences(Kind::Memory, false),
        "damage",
    ),
    (
        Defect::NearlyWholeKept,
        Sequences(Kind::File, false),
        "damage",
    ),
    (
        Defect::SlotsNotSettled,
        Sequences(Kind::Memory, false),
        "frames in use",
    ),
    (
        Defect::SettledTooFar,
        Sequences(Kind::Memory, false),
        "reading",
    ),
    (Defect::PassOpenWindow, Deaths(Dead::Session), "reading"),
    (
        Defect::BypassPassesWindow,
        Deaths(Dead::Unnoticed),
        "ending a session",
    ),
    (
        Defect::BypassKeepsRecords,
        Deaths(Dead::Unnoticed),
        "frames in use",
    ),
    (
        Defect::BypassNotesNothing,
        Deaths(Dead::Unnoticed),
        "operations in flight",
    ),
    (
        Defect::BypassedOfDeadForgotten,
        Deaths(Dead::Unnoticed),
        "operations in flight",
    ),
    (Defect::HoleKept, Deaths(Dead::Session), "checkpoints"),
    (
        Defect::DeadNotFinished,
        Deaths(Dead::Session),
        "a dead session's operation",
    ),
    (
        Defect::InFlightLost,
        Operations(Kind::Memory),
        "operations in flight",
    ),
    (
        Defect::InFlightMisplaced,
        Operations(Kind::Memory),
        "operations in flight",
    ),
    (
        Defect::InFlightOfDeadLost,
        Pairs(Kind::Memory),
        "operations in flight",
    ),
    (
        Defect::HeadPastOpen,
        Pairs(Kind::Memory),
        "operations in flight",
    ),
    (Defect::NodeNotZeroed, Operations(Kind::Memory), "reading"),
    (
        Defect::PadNotFenced,
        Sequences(Kind::Memory, false),
        "opening",
    ),
    (
        Defect::TablesWithSuperblock,
        Pairs(Kind::Memory),
        "ending a session",
    ),
    (Defect::FrameTableNotFlushed, Pairs(Kind::Memory), "reading"),
    (Defect::FrameReuse, Laps(Kind::File), "reading"),
    (Defect::LaneReuse, Laps(Kind::Memory), "opening"),
    (
        Defect::LaneNotNamed,
        Operations(Kind::Memory),
        "acknowledged writes",
    ),
    (
        Defect::ReplayedBeforeFence,
        Deaths(Dead::Everybody),
        "reading",
    ),
    (
        Defect::IncarnationKept,
        Sequences(Kind::File, false),
        "tending",
    ),
    (
        Defect::ObjectNotFenced,
        Pairs(Kind::Memory),
        "frames in use",
    ),
    (
        Defect::CheckpointNotSynced,
        Sequences(Kind::File, false),
        "damage",
    ),
    (
        Defect::FlushNotSynced,
        Pairs(Kind::File),
        "acknowledged writes",
    ),
    (
        Defect::AppliedOutOfOrder,
        Sequences(Kind::File, false),
        "frames in use",
    ),
    (
        Defect::RecoveryNotSynced,
        Sequences(Kind::File, false),
        "frames in use",
    ),
    (Defect::SlotsBeforeFrames, Hidden, "frames in use"),
    (Defect::LostNodeKept, Operations(Kind::File), "reading"),
    (
        Defect::GroupHalfRecovered,
        Operations(Kind::Memory),
        "atomic records",
    ),
    (
        Defect::GroupHalfRecovered,
        Operations(Kind::File),
        "atomic records",
    ),
    (
        Defect::GroupPublishedEarly,
        Deaths(Dead::Session),
        "operations",
    ),
    (
        Defect::PatchedBeforeFence,
        Operations(Kind::Memory),
        "reading",
    ),
    (
        Defect::PatchNotSettled,
        Sequences(Kind::Memory, false),
        "reading",
    ),
    (Defect::PatchNotFlushed, Pairs(Kind::Memory), "reading"),
    (Defect::PatchedFrameFreed, Pairs(Kind::Memory), "tending"),
    (Defect::PatchedPageTorn, Pairs(Kind::Memory), "damage"),
    (Defect::DeadPatchNotPut, Deaths(Dead::Session), "reading"),
    (Defect::NewerNotLookedAt, Mendings(Kind::Memory), "opening"),
    (Defect::NewerNotLookedAt, Mendings(Kind::File), "opening"),
    (
        Defect::OlderSuperblockFirst,
        Mendings(Kind::Memory),
        "opening",
    ),
    (
        Defect::OlderSuperblockFirst,
        Mendings(Kind::File),
        "opening",
    ),
    (
        Defect::SuperblocksTogether,
        Mendings(Kind::Memory),
        "opening",
    ),
    (Defect::SuperblocksTogether, Mendings(Kind::File), "opening"),
    (
        Defect::MarkedAfterwards,
        Behind(Kind::Memory),
        "operations in flight",
    ),
    (
        Defect::MarkedAfterwards,
        Behind(Kind::File),
        "operations in flight",
    ),
];

/// Runs the workload until something is wrong.
fn hunt(workload: Workload, tally: &mut Tally) -> Result<(), Wrong> {
    match workload {
        Operations(kind) => {
            for op in fixed::all() {
                fixed::enumerate(kind, &[op, super::ops::Op::Flush], 0, BUDGET, tally)?;
            }
        }
        Pairs(kind) => {
            for (known, mut pair) in fixed::pairs() {
                pair.push(super::ops::Op::Flush);
                fixed::enumerate(kind, &pair, known, OF_PAIRS, tally)?;
                if tally.images > IMAGES_MAX {
                    break;
                }
            }
        }
        Deaths(dead) => fixed::deaths(Kind::Memory, dead, BUDGET, tally)?,
        Laps(kind) => fixed::laps(kind, BUDGET, tally)?,
        Hidden => fixed::hidden(tally)?,
        Mendings(kind) => mending::mendings(kind, MENDINGS.budget, tally)?,
        Behind(kind) => mending::left_behind(kind, MENDINGS.budget, tally)?,
        Sequences(kind, is_full) => {
            for seed in 1.. {
                let mut own = Tally::default();
                let outcome = random::run(plan(kind, is_full), seed, &mut own);
                tally.add(&own);
                outcome?;
                if tally.images > IMAGES_MAX {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// What caught the defect, and the work it took.
fn caught(defect: Defect, workload: Workload) -> (Result<(), Wrong>, Tally) {
    let mut tally = Tally::default();
    defect::set(Some(defect));
    let outcome = guard(|| hunt(workload, &mut tally));
    defect::set(None);
    (outcome, tally)
}

#[test]
fn every_defect_is_caught() {
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        for part in 0..2 {
            let sender = sender.clone();
            scope.spawn(move || {
                for &(defect, workload, by) in DEFECTS.iter().skip(part).step_by(2) {
                    let found = caught(defect, workload);
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
        let Err(Wrong { check, detail }) = outcome else {
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
fn a_panic_of_the_store_is_a_failure_of_a_check() {
    assert!(guard(|| panic!("a frame is freed twice")).is_err());
    assert!(guard(|| wrong("a check", "")).is_err());
    assert!(guard(|| Ok(())).is_ok());
}
