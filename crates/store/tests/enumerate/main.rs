//! Crash enumeration: for every fence of a workload, legal crash images are built, recovered and
//! compared with an oracle (`model`):
//!
//! - acknowledged writes are present; on `file-sync` pools, flushed writes;
//! - each other record is present as a whole or not at all;
//! - nothing else changed, and no checksum is wrong;
//! - operations that another leg may lack are listed as in flight;
//! - the pool can be written again, and every frame is free after everything is deleted;
//! - the same holds when the recovery crashes in turn.
//!
//! Workloads: every operation, every pair of operations, every access at which a session can die,
//! laps of journals and frames, every correction of a damaged structure, and random sequences of
//! several sessions.
//!
//! A failure of a random sequence prints the command that repeats its seed (`cargo xtask enumerate
//! --seed N --all-max M`). The fixed and correction workloads have no seed: run their test again. The
//! same code gives the same images. After a campaign set its number of images, because the budget
//! follows from it: `PAGEMESH_IMAGES=N cargo test -p pagemesh-store --test enumerate TEST`.
//!
//! `defects` proves that the checks can fail.

mod budget;
mod changes;
mod clones;
mod correction;
mod crashes;
mod defects;
mod devices;
mod direct_clients;
mod fixed;
mod harness;
mod medium;
mod model;
mod ops;
mod owner;
mod random;
mod recover;
mod rng;
mod snapshots;
mod tier;
mod unlinked;

use budget::ImageHistogram;
use model::CheckFailure;
use pagemesh_base::defect::{self, Defect};
use pagemesh_store::test_api::forget_granted_frames;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The smallest pool: its images are cheap, and it fills up early.
const POOL_BYTES: usize = pagemesh_store::geometry::POOL_BYTES_MIN as usize;

/// Images that an ordinary test run checks at least.
const IMAGES: u64 = 200_000;

/// Counts of the checks.
#[derive(Clone, Debug, Default)]
struct CheckCounts {
    images: u64,
    /// Images of a recovery that crashed.
    recovery_images: u64,
    /// Images with a list of operations in flight that is too long, or said to be.
    unlisted_images: u64,
    points: u64,
    /// Points of which every image was checked; the others were sampled.
    exhausted_points: u64,
    /// Points by their number of legal images.
    legal_images: ImageHistogram,
    operations: u64,
    /// Operations that did not apply to the state of the pool.
    inapplicable: u64,
    /// Operations skipped because a dead session holds a lock.
    blocked: u64,
    /// Operations refused because the pool was full.
    pool_full: u64,
    deaths: u64,
    rolled_forward: u64,
    voided: u64,
    /// Partial checkpoints: journals were filled behind an operation that stayed open.
    partial_checkpoints: u64,
    /// Crashes after which a sequence continued.
    resumptions: u64,
    sequences: u64,
}

impl CheckCounts {
    fn add(&mut self, other: &CheckCounts) {
        let CheckCounts {
            images,
            recovery_images: of_recovery,
            unlisted_images: compared,
            points,
            exhausted_points: exhausted,
            legal_images: legal,
            operations,
            inapplicable: ruled_out,
            blocked: left_out,
            pool_full: full,
            deaths,
            rolled_forward: finished,
            voided,
            partial_checkpoints: bypasses,
            resumptions: lives,
            sequences,
        } = other;
        self.images += images;
        self.recovery_images += of_recovery;
        self.unlisted_images += compared;
        self.points += points;
        self.exhausted_points += exhausted;
        self.legal_images.add(legal);
        self.operations += operations;
        self.inapplicable += ruled_out;
        self.blocked += left_out;
        self.pool_full += full;
        self.deaths += deaths;
        self.rolled_forward += finished;
        self.voided += voided;
        self.partial_checkpoints += bypasses;
        self.resumptions += lives;
        self.sequences += sequences;
    }
}

impl fmt::Display for CheckCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} points, {} images, {} of them of recoveries that crashed; all images of {} points, \
             samples of {}; {} sequences, {} operations, {} refused by a full pool, {} deaths, \
             {} resumptions; {} images that list nothing in flight",
            self.points,
            self.images,
            self.recovery_images,
            self.exhausted_points,
            self.points - self.exhausted_points,
            self.sequences,
            self.operations,
            self.pool_full,
            self.deaths,
            self.resumptions,
            self.unlisted_images,
        )
    }
}

/// Sets the defect of this thread, or clears it.
fn set_defect(defect: Option<Defect>) {
    defect::set(defect);
    forget_granted_frames();
}

/// Runs a check; a panic of the store is a failure like any other.
fn catch_panic(run: impl FnOnce() -> Result<(), CheckFailure>) -> Result<(), CheckFailure> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|cause| {
        let text = cause.downcast_ref::<String>().cloned();
        let text = text.or_else(|| cause.downcast_ref::<&str>().map(ToString::to_string));
        model::fail("the store's own assertions", text.unwrap_or_default())
    })
}
