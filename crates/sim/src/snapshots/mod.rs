//! Snapshots of the volume: an operator takes, reads, clones and deletes them while clients write and machines fail.
//!
//! The oracle knows for each committed snapshot its read in the [`HistoryChecker`](crate::checker::HistoryChecker), and
//! the values of its sectors once a leg has returned them. Every later read, from every leg that the manager lists,
//! must return the same.
//!
//! Checks:
//! - the manager lists exactly the committed snapshots, whatever dies, and never one that was given up;
//! - each leg that it lists reads the same bytes of a snapshot, always;
//! - these bytes are the volume at one moment of the cut;
//! - a clone begins with them;
//! - at the end no brick has a snapshot that was given up or deleted.

mod client;
mod clones;
mod cuts;
mod end;
mod reads;

pub(crate) use client::ClientCut;

use crate::scenario::Scenario;
use cuts::PendingCut;
use pagemesh_base::layout::{SliceId, VolumeName};
use pagemesh_base::rng::SplitMix64;
use pagemesh_manage::snapshots::SnapshotName;
use std::collections::{BTreeMap, BTreeSet};

/// Odds that a step is one of the operator.
const OPERATOR_ODDS: u64 = 25;
/// Snapshots at once.
const SNAPSHOTS_MAX: usize = 8;
/// Clones at once.
const CLONES_MAX: usize = 2;

/// A committed snapshot.
pub(super) struct TakenSnapshot {
    name: SnapshotName,
    epoch: u32,
    /// Its read in the checker; none of a cut that the operator did not see, and that a client ended.
    operation: usize,
    /// The values of its sectors, as far as a leg has returned them.
    values: Vec<Option<u64>>,
    /// The slices that had it when it was first read. Others get it by copies.
    first_legs: Vec<SliceId>,
}

impl TakenSnapshot {
    fn is_read(&self) -> bool {
        self.values.iter().all(Option::is_some)
    }
}

/// A volume that begins with the values of a snapshot, and does not change.
pub(super) struct TakenClone {
    name: VolumeName,
    /// The epoch of its snapshot.
    origin: u32,
}

/// The snapshots of a history.
pub(crate) struct SnapshotOracle {
    rng: SplitMix64,
    pending: Option<PendingCut>,
    taken: Vec<TakenSnapshot>,
    /// Snapshots that the manager may have committed, or deleted, when it died. The next list tells.
    unsure: Vec<TakenSnapshot>,
    clones: Vec<TakenClone>,
    unsure_clones: Vec<TakenClone>,
    /// Epochs of snapshots that must never be listed: given up, or deleted.
    gone: BTreeSet<u32>,
    /// The reads of cuts that a client has begun, and those that it has ended, by epoch.
    begun: BTreeMap<u32, usize>,
    ended: BTreeMap<u32, usize>,
    last_name: u32,
    /// The start of the manager that was listed last.
    listed_start: u32,
}

impl SnapshotOracle {
    pub(crate) fn new(rng: SplitMix64) -> SnapshotOracle {
        SnapshotOracle {
            rng,
            pending: None,
            taken: vec![],
            unsure: vec![],
            clones: vec![],
            unsure_clones: vec![],
            gone: BTreeSet::new(),
            begun: BTreeMap::new(),
            ended: BTreeMap::new(),
            last_name: 0,
            listed_start: 0,
        }
    }

    fn next_name(&mut self) -> u32 {
        self.last_name += 1;
        self.last_name
    }
}

impl Scenario {
    /// A step of the operator and of clients that cut, if the history has snapshots.
    pub(crate) fn step_snapshots(&mut self) -> Result<(), String> {
        let Some(mut oracle) = self.snapshots.take() else {
            return Ok(());
        };
        let result = self.step_oracle(&mut oracle);
        self.snapshots = Some(oracle);
        result
    }

    fn step_oracle(&mut self, oracle: &mut SnapshotOracle) -> Result<(), String> {
        for at in 0..self.clients.len() {
            self.step_client_cut(oracle, at)?;
        }
        self.step_pending_cut(oracle)?;
        if oracle.listed_start != self.manager_host.starts() {
            self.check_list(oracle)?;
        }
        if !oracle.rng.one_in(OPERATOR_ODDS) {
            return Ok(());
        }
        match oracle.rng.below(20) {
            0..=7 => self.begin_snapshot(oracle),
            8..=13 => self.read_random_snapshot(oracle)?,
            14 | 15 => self.delete_random_snapshot(oracle)?,
            16 => self.clone_random_snapshot(oracle)?,
            17 => self.read_random_clone(oracle)?,
            18 => self.delete_random_clone(oracle)?,
            _ if oracle.rng.one_in(4) => self.detach_and_snapshot(oracle)?,
            _ => self.check_list(oracle)?,
        }
        Ok(())
    }
}
