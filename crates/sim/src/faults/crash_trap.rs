//! A client that dies after a transaction that one brick lacks, and a brick that dies in the
//! recovery from that.

use super::STAGE_STEPS_MAX;
use crate::brick_host::CrashKind;
use crate::client::VolumeClient;
use crate::cluster::tell;
use crate::network::Peer;
use crate::scenario::Scenario;

/// Odds of a crash trap in a step, where a history has transactions.
const CRASH_TRAP_ODDS: u64 = 800;
/// Maximum of steps from the first copy of a recovery to its end.
const RECOVERY_STEPS_MAX: u64 = 40;

/// See [`Scenario::step_crash_trap`].
enum CrashTrapStage {
    /// The client's transaction reaches all but one brick, for this many steps.
    Sending(u32),
    /// The next client attaches, and recovers the in-flight writes.
    Recovering,
    /// The next client has begun to copy; this many steps to go.
    Copying(u32),
}

/// See [`Scenario::step_crash_trap`].
pub(crate) struct CrashTrap {
    client: u32,
    /// The brick that did not get the transaction.
    skipped_host: usize,
    stage: CrashTrapStage,
    steps: u32,
}

impl Scenario {
    /// Kills a client after a transaction that one brick lacks. Then kills a brick that may have
    /// the transaction, while the next client makes the legs equal.
    pub(crate) fn step_crash_trap(&mut self) {
        let is_possible = self.plan.sets_crash_traps
            && self.plan.damaged_brick.is_none()
            && self.plan.copies > 1
            && self.takeover.is_none()
            && !self.is_promotion_under_way();
        let Some(mut crash_trap) = self.crash_trap.take() else {
            if is_possible && self.crash_trap_rng.one_in(CRASH_TRAP_ODDS) {
                self.set_crash_trap();
            }
            return;
        };
        crash_trap.steps += 1;
        if crash_trap.steps > STAGE_STEPS_MAX || self.takeover.is_some() {
            return self.cluster.net().clear_faults();
        }
        let client = self
            .clients
            .iter()
            .position(|it| it.number == crash_trap.client);
        let Some(at) = client else {
            return;
        };
        crash_trap.stage = match crash_trap.stage {
            CrashTrapStage::Sending(0) => {
                self.cluster.net().clear_faults();
                self.crash_client(at);
                self.start_client();
                crash_trap.client = self.next_client;
                CrashTrapStage::Recovering
            }
            CrashTrapStage::Sending(steps) => CrashTrapStage::Sending(steps - 1),
            CrashTrapStage::Recovering if self.clients[at].oracle.has_copied() => {
                CrashTrapStage::Copying(self.crash_trap_rng.below(RECOVERY_STEPS_MAX) as u32)
            }
            CrashTrapStage::Recovering => CrashTrapStage::Recovering,
            CrashTrapStage::Copying(0) => {
                let others =
                    (0..self.plan.pool_bytes.len()).filter(|it| *it != crash_trap.skipped_host);
                let others: Vec<usize> = others.collect();
                if let Some(host) = self.crash_trap_rng.pick(&others) {
                    self.count_event("recovery of writes interrupted");
                    self.cluster.kill_brick(host, CrashKind::Process);
                }
                return;
            }
            CrashTrapStage::Copying(steps) => CrashTrapStage::Copying(steps - 1),
        };
        self.crash_trap = Some(crash_trap);
    }

    fn set_crash_trap(&mut self) {
        let ready =
            |it: &VolumeClient| it.is_healthy() && !it.is_stopped() && !it.threads.is_empty();
        let Some(at) = self.clients.iter().position(ready) else {
            return;
        };
        let client = self.clients[at].number;
        let spared = self.crash_trap_rng.below(self.plan.pool_bytes.len() as u64) as usize;
        tell!(
            self.cluster,
            "client {client} does not reach brick {spared}, and will end"
        );
        self.cluster
            .net()
            .partition(Peer::Client(client), spared, true, false);
        self.transact(at, 0);
        self.crash_trap = Some(CrashTrap {
            client,
            skipped_host: spared,
            stage: CrashTrapStage::Sending(10 + self.crash_trap_rng.below(40) as u32),
            steps: 0,
        });
    }
}
