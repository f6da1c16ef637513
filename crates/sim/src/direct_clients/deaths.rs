//! Deaths of direct clients, and of the brick that cleaned up first; reports of them to the mount,
//! which reconciles torn operations and clears the rows.

use super::client_set::DeadClient;
use super::shared_files::APPEND_FILE;
use crate::brick_host::CrashKind;
use crate::checker::OpOutcome;
use crate::cluster::tell;
use crate::scenario::Scenario;
use pagemesh_base::poison::lock;
use pagemesh_direct::rows;
use pagemesh_volume::direct_access::TornOp;
use std::sync::mpsc::{Receiver, TryRecvError};

/// Odds that a mount hears of a dead client in a step.
const DEATH_REPORT_ODDS: u64 = 30;
/// Odds that a brick that has retired a dead client before the others dies soon after.
const BRICK_TRAP_ODDS: u64 = 8;
/// Maximum of direct-client steps until then.
const BRICK_TRAP_STEPS: u64 = 60;

pub(super) struct PendingReconcile {
    pub(super) dead_client: DeadClient,
    pub(super) reconciled: Receiver<()>,
}

impl Scenario {
    pub(super) fn kill_direct_client(&mut self, at: usize) {
        let number = lock(&self.cluster.direct_clients).clients[at].number;
        let work = lock(&self.cluster.direct_clients).clients[at].op.clone();
        self.client_workload().last_death = work
            .filter(|work| work.file != APPEND_FILE)
            .map(|work| (work.file, work.sectors));
        let bricks = lock(&self.cluster.direct_clients).kill(at);
        let picked = self.client_workload().rng.pick(&bricks);
        tell!(self.cluster, "direct client {number} dies");
        self.report
            .count("direct client killed inside an operation", 1);
        let guests = self.client_workload();
        if let Some(host) = picked
            && guests.brick_trap.is_none()
            && guests.rng.one_in(BRICK_TRAP_ODDS)
        {
            let steps = guests.rng.below(BRICK_TRAP_STEPS);
            guests.brick_trap = Some((host, steps));
            self.cluster.begin_brick_work(host);
            self.cluster.end_brick_work();
            tell!(self.cluster, "brick {host} has cleaned up, and will die");
        }
    }

    /// Kills a brick that retired a dead client before the others: the state of that one leg goes
    /// with it.
    pub(super) fn step_brick_trap(&mut self) {
        let guests = self.client_workload();
        match guests.brick_trap.take() {
            Some((_, 0)) if guests.is_stopped => {}
            Some((host, 0)) if self.takeover.is_none() => {
                self.report.count("brick killed after it retired first", 1);
                self.cluster.kill_brick(host, CrashKind::Process);
            }
            Some((host, steps)) => {
                self.client_workload().brick_trap = Some((host, steps.saturating_sub(1)));
            }
            None => {}
        }
    }

    /// Mounts hear of their dead clients.
    pub(super) fn report_dead_clients(&mut self) -> Result<(), String> {
        let is_heard = self.client_workload().is_stopped
            || self.client_workload().rng.one_in(DEATH_REPORT_ODDS);
        let fallen = match is_heard {
            true => std::mem::take(&mut lock(&self.cluster.direct_clients).dead_clients),
            false => return Ok(()),
        };
        let mut over = vec![];
        for fallen in fallen {
            let host = self.clients.iter_mut();
            let host = host
                .filter(|it| it.number == fallen.client)
                .find_map(|it| Some((&it.driven, it.mount_clients.as_mut()?)));
            let Some((driven, hosting)) = host else {
                continue;
            };
            let wound = TornOp::of_row(fallen.segment.row(fallen.row));
            let Some(wound) = wound else {
                // The client died with an empty row: its operation happened or not, and that is
                // final.
                over.push(fallen.op.checked);
                continue;
            };
            let healed = driven.reconcile(fallen.row, wound);
            hosting.pending_reconciles.push(PendingReconcile {
                dead_client: fallen,
                reconciled: healed,
            });
        }
        over.into_iter()
            .try_for_each(|operation| self.record_end(operation, OpOutcome::Decided))
    }

    /// Clears rows of dead clients once their ranges are reconciled.
    pub(super) fn clear_dead_rows(&mut self) -> Result<(), String> {
        let mut over = vec![];
        for client in &mut self.clients {
            let Some(hosting) = &mut client.mount_clients else {
                continue;
            };
            let (mut cleared, mut wounded) = (vec![], vec![]);
            for one in std::mem::take(&mut hosting.pending_reconciles) {
                match one.reconciled.try_recv() {
                    Err(TryRecvError::Empty) => wounded.push(one),
                    // The volume has ended, and no controller reconciles any more.
                    Err(TryRecvError::Disconnected) => {}
                    Ok(()) => cleared.push(one.dead_client),
                }
            }
            if wounded.is_empty() && !cleared.is_empty() {
                self.direct_clients
                    .as_mut()
                    .expect("it has some")
                    .last_death = None;
            }
            hosting.pending_reconciles = wounded;
            for fallen in cleared {
                let shown = hosting.exposed_files[fallen.op.file].as_ref();
                let shown = shown.filter(|shown| shown.ino == fallen.op.ino);
                let board = shown.map(|shown| &*shown.map);
                rows::clear_row(&fallen.segment, fallen.row, board);
                tell!(
                    self.cluster,
                    "row of direct client {} is cleared",
                    fallen.number
                );
                self.report.count("row of a dead direct client cleared", 1);
                over.push(fallen.op.checked);
            }
        }
        over.into_iter()
            .try_for_each(|operation| self.record_end(operation, OpOutcome::Decided))
    }
}
