//! Crash enumeration: for every fence of a workload, legal crash images are
//! built, recovered and compared with an oracle (`model`):
//!
//! - what was acknowledged is there, on `file-sync` pools what was flushed;
//! - each record that was not is there as a whole or not at all;
//! - nothing else changed, no checksum is wrong;
//! - operations that another leg may lack are listed as in flight;
//! - the pool can be written again, and when everything is deleted every frame
//!   is free;
//! - the same when the recovery crashes in turn.
//!
//! Workloads: every operation, every pair of them, every access at which a
//! session can die, laps of lanes and frames, every mending of a damaged
//! structure, and random sequences of several sessions. A failure names its seed; `cargo xtask enumerate` runs that one
//! alone, or as many others as it is told.
//!
//! What the checks are worth: `defects`.

mod budget;
mod changes;
mod crashes;
mod defects;
mod dice;
mod fixed;
pub(crate) mod guests;
mod medium;
mod mending;
mod model;
mod ops;
pub(crate) mod owner;
mod random;
mod recover;
mod unlinked;
mod world;

use budget::Legal;
use model::Wrong;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The smallest pool: images are cheap, and it is full soon.
const POOL_BYTES: usize = crate::geometry::POOL_BYTES_MIN as usize;

/// Images that every run of the tests checks, at least.
const IMAGES: u64 = 200_000;

/// What was checked.
#[derive(Clone, Debug, Default)]
struct Tally {
    images: u64,
    /// Of them, of a recovery that crashed.
    of_recovery: u64,
    /// Images in which too much is in flight to be listed, or so it says.
    compared: u64,
    points: u64,
    /// Points of which every image was checked; of the others samples were.
    exhausted: u64,
    /// Points by how many images are legal there.
    legal: Legal,
    operations: u64,
    /// Operations that the state of the pool had no place for.
    ruled_out: u64,
    /// Operations that would have met a dead session's lock.
    left_out: u64,
    /// Operations refused because the pool was full.
    full: u64,
    deaths: u64,
    finished: u64,
    voided: u64,
    /// Lanes that were filled behind a window that stayed open.
    bypasses: u64,
    /// Crashes from which a sequence went on.
    lives: u64,
    sequences: u64,
}

impl Tally {
    fn add(&mut self, other: &Tally) {
        let Tally {
            images,
            of_recovery,
            compared,
            points,
            exhausted,
            legal,
            operations,
            ruled_out,
            left_out,
            full,
            deaths,
            finished,
            voided,
            bypasses,
            lives,
            sequences,
        } = other;
        self.images += images;
        self.of_recovery += of_recovery;
        self.compared += compared;
        self.points += points;
        self.exhausted += exhausted;
        self.legal.add(legal);
        self.operations += operations;
        self.ruled_out += ruled_out;
        self.left_out += left_out;
        self.full += full;
        self.deaths += deaths;
        self.finished += finished;
        self.voided += voided;
        self.bypasses += bypasses;
        self.lives += lives;
        self.sequences += sequences;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} points, {} images, {} of them of recoveries that crashed; all images of {} points, \
             samples of {}; {} sequences, {} operations, {} refused by a full pool, {} deaths, \
             {} lives; {} images that list nothing in flight",
            self.points,
            self.images,
            self.of_recovery,
            self.exhausted,
            self.points - self.exhausted,
            self.sequences,
            self.operations,
            self.full,
            self.deaths,
            self.lives,
            self.compared,
        )
    }
}

/// Runs a check; a panic of the store is a failure like any other.
fn guard(run: impl FnOnce() -> Result<(), Wrong>) -> Result<(), Wrong> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|cause| {
        let text = cause.downcast_ref::<String>().cloned();
        let text = text.or_else(|| cause.downcast_ref::<&str>().map(ToString::to_string));
        model::wrong("the store's own assertions", text.unwrap_or_default())
    })
}
