//! Proof that the checks can fail: each deliberate defect of the store must be
//! caught. The table that the test prints says by which check, and after how
//! many images.

use super::budget::Budget;
use super::fixed::{self, Dead};
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
    Sequences(Kind, bool),
}

use Workload::{Deaths, Hidden, Laps, Operations, Pairs, Sequences};

const DEFECTS: &[(Defect, Workload)] = &[
    (Defect::NoCommitFence, Operations(Kind::Memory)),
    (Defect::SwapBeforeFence, Operations(Kind::Memory)),
    (Defect::UnlockBeforeFence, Deaths(Dead::Session)),
    (Defect::DataAfterRecord, Operations(Kind::Memory)),
    (Defect::SkippedCrc, Operations(Kind::Memory)),
    (Defect::SlotsNotSettled, Sequences(Kind::Memory, false)),
    (Defect::SettledTooFar, Sequences(Kind::Memory, false)),
    (Defect::PassOpenWindow, Deaths(Dead::Session)),
    (Defect::HoleKept, Deaths(Dead::Session)),
    (Defect::DeadNotFinished, Deaths(Dead::Session)),
    (Defect::InFlightLost, Operations(Kind::Memory)),
    (Defect::InFlightMisplaced, Operations(Kind::Memory)),
    (Defect::InFlightOfDeadLost, Pairs(Kind::Memory)),
    (Defect::HeadPastOpen, Pairs(Kind::Memory)),
    (Defect::NodeNotZeroed, Operations(Kind::Memory)),
    (Defect::PadNotFenced, Sequences(Kind::Memory, false)),
    (Defect::TablesWithSuperblock, Pairs(Kind::Memory)),
    (Defect::FrameTableNotFlushed, Pairs(Kind::Memory)),
    (Defect::FrameReuse, Laps(Kind::File)),
    (Defect::LaneReuse, Laps(Kind::Memory)),
    (Defect::LaneNotNamed, Operations(Kind::Memory)),
    (Defect::ReplayedBeforeFence, Deaths(Dead::Everybody)),
    (Defect::IncarnationKept, Sequences(Kind::File, false)),
    (Defect::ObjectNotFenced, Pairs(Kind::Memory)),
    (Defect::CheckpointNotSynced, Sequences(Kind::File, false)),
    (Defect::FlushNotSynced, Pairs(Kind::File)),
    (Defect::AppliedOutOfOrder, Sequences(Kind::File, false)),
    (Defect::RecoveryNotSynced, Sequences(Kind::File, false)),
    (Defect::SlotsBeforeFrames, Hidden),
    (Defect::LostNodeKept, Operations(Kind::File)),
    (Defect::GroupHalfRecovered, Operations(Kind::Memory)),
    (Defect::GroupHalfRecovered, Operations(Kind::File)),
    (Defect::GroupPublishedEarly, Deaths(Dead::Session)),
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
            for mut pair in fixed::pairs() {
                pair.push(super::ops::Op::Flush);
                fixed::enumerate(kind, &pair, 1, OF_PAIRS, tally)?;
                if tally.images > IMAGES_MAX {
                    break;
                }
            }
        }
        Deaths(dead) => fixed::deaths(dead, BUDGET, tally)?,
        Laps(kind) => fixed::laps(kind, BUDGET, tally)?,
        Hidden => fixed::hidden(tally)?,
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
                for &(defect, workload) in DEFECTS.iter().skip(part).step_by(2) {
                    let found = caught(defect, workload);
                    sender
                        .send((defect, workload, found))
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
    let mut missed = Vec::new();
    for (defect, workload, (outcome, tally)) in receiver {
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
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}

#[test]
fn a_panic_of_the_store_is_a_failure_of_a_check() {
    assert!(guard(|| panic!("a frame is freed twice")).is_err());
    assert!(guard(|| wrong("a check", "")).is_err());
    assert!(guard(|| Ok(())).is_ok());
}
