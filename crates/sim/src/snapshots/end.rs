//! The end of a history with snapshots: every snapshot is read from every leg, also after restarts and after deletions of
//! others. Then no brick has one.

use super::SnapshotOracle;
use super::cuts::LISTED_MAX;
use crate::brick_host::CrashKind;
use crate::scenario::Scenario;
use pagemesh_base::slice::BrickControl;
use pagemesh_manage::wire::ListSnapshots;
use std::collections::BTreeSet;
use std::time::Duration;

/// Longer than a request to prepare a snapshot may be on its way, as the manager takes it.
const UNCERTAIN_TIME: Duration = Duration::from_secs(150);
/// Steps of that time, each with a sweep of the manager.
const SWEEP_STEP: Duration = Duration::from_secs(10);
/// Maintenance rounds between two deletions.
const ROUNDS_MAX: u64 = 8;

impl Scenario {
    /// Ends the cut in progress: from now on the operator takes no snapshot.
    pub(crate) fn end_cuts(&mut self) -> Result<(), String> {
        let Some(mut oracle) = self.snapshots.take() else {
            return Ok(());
        };
        for client in &mut self.clients {
            client.cut = None;
        }
        let result = self
            .step_pending_cut(&mut oracle)
            .and_then(|()| self.end_pending_cut(&mut oracle));
        self.snapshots = Some(oracle);
        result
    }

    /// Checks all snapshots, and deletes them. No client is left, and all machines run.
    pub(crate) fn end_snapshots(&mut self) -> Result<(), String> {
        let Some(mut oracle) = self.snapshots.take() else {
            return Ok(());
        };
        self.check_list(&mut oracle)?;
        self.check_all(&mut oracle)?;
        self.restart_bricks(&mut oracle);
        self.check_all(&mut oracle)?;
        self.forget_uncertain();
        self.check_copies()?;
        self.check_all(&mut oracle)?;
        self.check_bricks(&oracle)?;
        while !oracle.clones.is_empty() {
            self.delete_random_clone(&mut oracle)?;
        }
        while !oracle.taken.is_empty() {
            self.delete_random_snapshot(&mut oracle)?;
            for host in 0..self.plan.pool_bytes.len() {
                for _ in 0..oracle.rng.below(ROUNDS_MAX) {
                    self.cluster.run_maintenance(host);
                }
            }
            self.check_all(&mut oracle)?;
        }
        self.forget_uncertain();
        self.check_list(&mut oracle)?;
        self.check_bricks(&oracle)
    }

    fn check_all(&mut self, oracle: &mut SnapshotOracle) -> Result<(), String> {
        for at in 0..oracle.taken.len() {
            self.read_snapshot(&mut oracle.taken[at])?;
            let taken = &oracle.taken[at];
            if !taken.is_read() {
                return Err(format!("no leg has all of the snapshot {}", taken.name));
            }
        }
        (0..oracle.clones.len()).try_for_each(|at| self.read_clone(oracle, at))
    }

    /// All bricks die, and start again.
    fn restart_bricks(&mut self, oracle: &mut SnapshotOracle) {
        for host in 0..self.plan.pool_bytes.len() {
            let death = match oracle.rng.one_in(2) {
                true => CrashKind::Process,
                false => CrashKind::Power,
            };
            self.cluster.kill_brick(host, death);
            self.cluster.start_brick(host, None, false);
            self.manager_host.send_heartbeat(host);
        }
    }

    /// Lets the manager drop the snapshots that were given up.
    fn forget_uncertain(&mut self) {
        let steps = UNCERTAIN_TIME.as_secs() / SWEEP_STEP.as_secs();
        (0..steps).for_each(|_| self.advance_time(SWEEP_STEP));
    }

    /// Checks that each leg of the volume has all of each snapshot, if pools have room for that.
    fn check_copies(&self) -> Result<(), String> {
        let manager = self.manager_host.manager().ok_or("no manager")?;
        let listed = manager.list_snapshots(&self.name, &ListSnapshots::default(), LISTED_MAX);
        let (listed, _) = listed.map_err(|fault| fault.to_string())?;
        match listed.iter().find(|it| it.missing_copies > 0) {
            Some(it) if !self.plan.is_undersized => {
                let (name, count) = (&it.name, it.missing_copies);
                Err(format!(
                    "{count} copies lack the snapshot {name} at the end"
                ))
            }
            _ => Ok(()),
        }
    }

    /// Checks that no leg of the volume has a snapshot that the manager does not have.
    fn check_bricks(&self, oracle: &SnapshotOracle) -> Result<(), String> {
        let known: BTreeSet<u32> = oracle.taken.iter().map(|it| it.epoch).collect();
        for leg in self.layout()?.columns().flat_map(|column| &column.legs) {
            let host = self.cluster.host_of(leg.brick).ok_or("no such brick")?;
            let running = self.cluster.running_brick(host).ok_or("a brick is down")?;
            let found = running.brick.snapshots(leg.slice);
            let found = found.map_err(|cause| format!("brick {host}: {cause}"))?;
            if let Some(epoch) = found.iter().find(|epoch| !known.contains(&epoch.0)) {
                return Err(format!(
                    "brick {host} keeps the snapshot of epoch {epoch}, which is given up or deleted"
                ));
            }
        }
        Ok(())
    }
}
