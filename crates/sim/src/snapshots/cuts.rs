//! An operator takes, lists and deletes snapshots.

use super::{SNAPSHOTS_MAX, SnapshotOracle, TakenSnapshot};
use crate::cluster::tell;
use crate::manager_host::OperatorCall;
use crate::scenario::Scenario;
use pagemesh_manage::SnapshotCut;
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::{CreateSnapshot, ListSnapshots};
use std::collections::BTreeMap;
use std::time::Duration;

/// Snapshots in a list: more than there are.
pub(super) const LISTED_MAX: usize = 1000;
/// The time in which a client must answer an order, as [`pagemesh_manage::snapshots::CutTimes`] has it.
const ANSWER_TIME: Duration = Duration::from_secs(25);
/// Odds that the manager ends a cut in a step, once it can.
const END_ODDS: u64 = 6;
/// Odds that it gives up a cut without an answer in a step.
const GIVE_UP_ODDS: u64 = 3000;

/// A snapshot between the two steps of the manager.
pub(super) struct PendingCut {
    cut: SnapshotCut,
    name: SnapshotName,
    begun_at: Duration,
    /// The start of the manager that has it in memory.
    manager_start: u32,
    /// A client may have answered.
    pub(super) is_answered: bool,
}

impl PendingCut {
    pub(super) fn epoch(&self) -> u32 {
        self.cut.epoch().0
    }
}

impl Scenario {
    /// An operator asks for a snapshot.
    pub(super) fn begin_snapshot(&mut self, oracle: &mut SnapshotOracle) {
        if oracle.pending.is_some() || oracle.taken.len() >= SNAPSHOTS_MAX {
            return;
        }
        let name: SnapshotName = format!("s{}", oracle.next_name()).parse().expect("a name");
        let request = CreateSnapshot {
            name: name.clone(),
            labels: vec![],
        };
        let begun = self.manager_host.operate("a snapshot", |manager| {
            manager.begin_snapshot(&self.name, &request)
        });
        if let OperatorCall::Answered(Ok(cut)) = begun {
            tell!(self.cluster, "{name} gets epoch {}", cut.epoch().0);
            oracle.pending = Some(PendingCut {
                cut,
                name,
                begun_at: self.cluster.now(),
                manager_start: self.manager_host.starts(),
                is_answered: false,
            });
        }
    }

    /// An operator ends the attachment, and asks for a snapshot, which the manager prepares itself.
    pub(super) fn detach_and_snapshot(
        &mut self,
        oracle: &mut SnapshotOracle,
    ) -> Result<(), String> {
        if oracle.pending.is_some() || self.is_promotion_under_way() {
            return Ok(());
        }
        self.manager_host.end_attachment(&self.name);
        self.begin_snapshot(oracle);
        Ok(())
    }

    /// Ends the pending cut if it is done, or is given up.
    pub(super) fn step_pending_cut(&mut self, oracle: &mut SnapshotOracle) -> Result<(), String> {
        let Some(pending) = &oracle.pending else {
            return Ok(());
        };
        let is_other_manager = pending.manager_start != self.manager_host.starts();
        if is_other_manager || self.manager_host.manager().is_none() {
            self.report
                .count("manager died between the steps of a snapshot", 1);
            oracle.gone.insert(pending.epoch());
            oracle.pending = None;
            return Ok(());
        }
        let is_ready = pending.is_answered || pending.cut.attachment().is_none();
        let is_late = self.cluster.now() >= pending.begun_at + ANSWER_TIME;
        let is_over = is_late || oracle.rng.one_in(GIVE_UP_ODDS);
        match is_over || is_ready && oracle.rng.one_in(END_ODDS) {
            true => self.end_pending_cut(oracle),
            false => Ok(()),
        }
    }

    /// The second step of the manager.
    pub(super) fn end_pending_cut(&mut self, oracle: &mut SnapshotOracle) -> Result<(), String> {
        let Some(PendingCut { cut, name, .. }) = oracle.pending.take() else {
            return Ok(());
        };
        let epoch = cut.epoch().0;
        let is_prepared_by_manager = cut.attachment().is_none();
        let own = is_prepared_by_manager.then(|| {
            let newest = self.checker.newest_attachment();
            self.checker.begin_snapshot(newest, self.sectors)
        });
        let ended = self
            .manager_host
            .operate("the end of a snapshot", |manager| manager.end_snapshot(cut));
        if let Some(own) = own {
            self.checker.end_snapshot(own)?;
        }
        let operation = own.or_else(|| oracle.ended.remove(&epoch));
        let taken = operation.map(|operation| TakenSnapshot {
            name: name.clone(),
            epoch,
            operation,
            values: vec![None; self.sectors as usize],
            first_legs: vec![],
        });
        match (ended, taken) {
            (OperatorCall::Answered(Ok(_)), Some(taken)) => {
                tell!(self.cluster, "{name} is committed");
                self.report.count(
                    match is_prepared_by_manager {
                        true => "snapshot prepared by the manager",
                        false => "snapshot committed",
                    },
                    1,
                );
                oracle.taken.push(taken);
            }
            (OperatorCall::Answered(Ok(_)), None) => {
                return Err(format!(
                    "the snapshot {name} is committed, and no client has cut it"
                ));
            }
            (OperatorCall::Died, Some(taken)) => oracle.unsure.push(taken),
            _ => {
                self.report.count("snapshot given up", 1);
                oracle.gone.insert(epoch);
            }
        }
        Ok(())
    }

    /// Checks that the manager lists the committed snapshots, and no other one.
    pub(super) fn check_list(&mut self, oracle: &mut SnapshotOracle) -> Result<(), String> {
        let Some(manager) = self.manager_host.manager() else {
            return Ok(());
        };
        let listed = manager.list_snapshots(&self.name, &ListSnapshots::default(), LISTED_MAX);
        let (listed, _) = listed.map_err(|fault| fault.to_string())?;
        let listed = listed.into_iter().map(|it| (it.epoch.0, it.name));
        let mut listed: BTreeMap<u32, SnapshotName> = listed.collect();
        for taken in &oracle.taken {
            if listed.remove(&taken.epoch).as_ref() != Some(&taken.name) {
                return Err(format!("the snapshot {} is not listed", taken.name));
            }
        }
        for unsure in std::mem::take(&mut oracle.unsure) {
            match listed.remove(&unsure.epoch) {
                Some(_) => oracle.taken.push(unsure),
                None => drop(oracle.gone.insert(unsure.epoch)),
            }
        }
        if let Some((epoch, name)) = listed.pop_first() {
            let why = match oracle.gone.contains(&epoch) {
                true => "it was given up or deleted",
                false => "it was never committed",
            };
            return Err(format!(
                "the snapshot {name} of epoch {epoch} is listed: {why}"
            ));
        }
        let volumes = manager.volumes();
        for unsure in std::mem::take(&mut oracle.unsure_clones) {
            if volumes.iter().any(|it| it.name == unsure.name) {
                oracle.clones.push(unsure);
            }
        }
        oracle.listed_start = self.manager_host.starts();
        Ok(())
    }

    /// An operator deletes a snapshot.
    pub(super) fn delete_random_snapshot(
        &mut self,
        oracle: &mut SnapshotOracle,
    ) -> Result<(), String> {
        if oracle.taken.is_empty() {
            return Ok(());
        }
        let at = oracle.rng.below(oracle.taken.len() as u64) as usize;
        self.delete_snapshot(oracle, at)
    }

    pub(super) fn delete_snapshot(
        &mut self,
        oracle: &mut SnapshotOracle,
        at: usize,
    ) -> Result<(), String> {
        let taken = oracle.taken.swap_remove(at);
        let mut clones = oracle.clones.iter().chain(&oracle.unsure_clones);
        let has_clones = clones.any(|it| it.origin == taken.epoch);
        let what = format!("delete {}", taken.name);
        let deleted = self.manager_host.operate(&what, |manager| {
            manager.delete_snapshot(&self.name, &taken.name)
        });
        match deleted {
            OperatorCall::Unreachable => oracle.taken.push(taken),
            OperatorCall::Died => oracle.unsure.push(taken),
            OperatorCall::Answered(Ok(_)) => {
                self.report.count("snapshot deleted", 1);
                oracle.gone.insert(taken.epoch);
            }
            OperatorCall::Answered(Err(_)) if has_clones => oracle.taken.push(taken),
            OperatorCall::Answered(Err(fault)) => {
                return Err(format!(
                    "the snapshot {} is not deleted: {fault}",
                    taken.name
                ));
            }
        }
        Ok(())
    }
}
