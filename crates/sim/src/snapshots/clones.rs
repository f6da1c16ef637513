//! Clones of snapshots. No client attaches them, so they keep the values of their snapshots.

use super::reads::LegContent;
use super::{CLONES_MAX, SnapshotOracle, TakenClone};
use crate::manager_host::OperatorCall;
use crate::scenario::Scenario;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::wire::CreateClone;

impl Scenario {
    /// An operator clones a snapshot.
    pub(super) fn clone_random_snapshot(
        &mut self,
        oracle: &mut SnapshotOracle,
    ) -> Result<(), String> {
        if oracle.taken.is_empty() || oracle.clones.len() >= CLONES_MAX {
            return Ok(());
        }
        let at = oracle.rng.below(oracle.taken.len() as u64) as usize;
        let (origin, snapshot) = (oracle.taken[at].epoch, oracle.taken[at].name.clone());
        let name: VolumeName = format!("c{}", oracle.next_name()).parse().expect("a name");
        let request = CreateClone { name: name.clone() };
        let made = self.manager_host.operate("clone", |manager| {
            manager.create_clone(&self.name, &snapshot, &request)
        });
        let clone = TakenClone { name, origin };
        match made {
            OperatorCall::Answered(Ok(_)) => {
                self.report.count("snapshot cloned", 1);
                oracle.clones.push(clone);
                self.read_clone(oracle, oracle.clones.len() - 1)
            }
            OperatorCall::Died => {
                oracle.unsure_clones.push(clone);
                Ok(())
            }
            // A brick is down, or out of reach.
            _ => Ok(()),
        }
    }

    /// Reads a clone from all its legs that run.
    pub(super) fn read_random_clone(&mut self, oracle: &mut SnapshotOracle) -> Result<(), String> {
        if oracle.clones.is_empty() {
            return Ok(());
        }
        let at = oracle.rng.below(oracle.clones.len() as u64) as usize;
        self.read_clone(oracle, at)
    }

    pub(super) fn read_clone(
        &mut self,
        oracle: &mut SnapshotOracle,
        at: usize,
    ) -> Result<(), String> {
        let clone = &oracle.clones[at];
        let Some(manager) = self.manager_host.manager() else {
            return Ok(());
        };
        let shown = manager.show(&clone.name);
        let detail = shown.map_err(|fault| format!("the clone {} is gone: {fault}", clone.name))?;
        drop(manager);
        let origin = oracle.taken.iter_mut().find(|it| it.epoch == clone.origin);
        let origin = origin.ok_or_else(|| format!("the snapshot of {} is gone", clone.name))?;
        let content = LegContent::Present(Epoch(detail.layout.epoch.0));
        let name = format!("the clone {}", clone.name);
        for leg in self.leg_parts(&detail.layout) {
            self.read_leg(&leg, content, &name, &mut origin.values)?;
        }
        self.report.count("clone read", 1);
        Ok(())
    }

    /// An operator deletes a clone.
    pub(super) fn delete_random_clone(
        &mut self,
        oracle: &mut SnapshotOracle,
    ) -> Result<(), String> {
        if oracle.clones.is_empty() {
            return Ok(());
        }
        let at = oracle.rng.below(oracle.clones.len() as u64) as usize;
        self.delete_clone(oracle, at)
    }

    pub(super) fn delete_clone(
        &mut self,
        oracle: &mut SnapshotOracle,
        at: usize,
    ) -> Result<(), String> {
        let clone = oracle.clones.swap_remove(at);
        let deleted = self.manager_host.operate("delete a clone", |manager| {
            manager.delete(&clone.name, true)
        });
        match deleted {
            OperatorCall::Unreachable => oracle.clones.push(clone),
            OperatorCall::Died => oracle.unsure_clones.push(clone),
            OperatorCall::Answered(Ok(_)) => self.report.count("clone deleted", 1),
            OperatorCall::Answered(Err(fault)) => {
                return Err(format!("the clone {} is not deleted: {fault}", clone.name));
            }
        }
        Ok(())
    }
}
