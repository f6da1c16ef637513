//! The steps of a history that has disks, and what its clients may lose.

use super::Scenario;
use crate::brick_host::CrashKind;
use crate::cluster::tell;
use crate::final_check::ALL_LEG_STATES;
use pagemesh_base::layout::LegState;

/// Odds that a step is one of a disk.
const DISK_STEP_ODDS: u64 = 3;

impl Scenario {
    /// Runs a random disk.
    pub(super) fn step_random_disk(&mut self) -> bool {
        if !self.plan.has_disks() || !self.disk_rng.one_in(DISK_STEP_ODDS) {
            return false;
        }
        let host = self.disk_rng.below(self.plan.pool_bytes.len() as u64) as usize;
        self.cluster.step_disk(host, &mut self.disk_rng)
    }

    /// Runs a disk that has something to do.
    pub(super) fn step_disks(&mut self) -> bool {
        let hosts = 0..self.plan.pool_bytes.len();
        let rng = &mut self.disk_rng;
        self.plan.has_disks()
            && hosts
                .into_iter()
                .any(|host| self.cluster.step_disk(host, rng))
    }

    /// Tells the checker if acknowledged changes may be lost: every in-sync leg of a column has lost its power since the last flush.
    /// The others may also have left the layout after that.
    pub(crate) fn record_power_losses(&mut self) {
        let lost = self.cluster.take_power_losses();
        let epoch = self.manager_host.last_epoch();
        let is_new = !lost.is_empty();
        let has_new_layout = epoch != self.epoch_at_power_loss && !self.powerless_hosts.is_empty();
        if !is_new && !has_new_layout {
            return;
        }
        self.epoch_at_power_loss = epoch;
        let now = self.checker.event_count();
        self.powerless_hosts
            .extend(lost.into_iter().map(|host| (host, now)));
        let had_current_copy = self.had_current_copy;
        self.had_current_copy = self.has_current_copy();
        if !self.had_current_copy && (is_new || had_current_copy) {
            tell!(self.cluster, "changes that no flush covers may be lost");
            self.checker.record_power_loss();
            self.report.count("unflushed changes lost their copies", 1);
        }
    }

    /// A flush that began at this time of the checker was acknowledged: every leg has all earlier changes.
    pub(crate) fn record_flush_of_disks(&mut self, began: usize) {
        self.powerless_hosts.retain(|_, lost| *lost >= began);
        self.had_current_copy = self.has_current_copy();
    }

    /// Whether each column has an in-sync leg with all acknowledged changes.
    fn has_current_copy(&self) -> bool {
        let Ok(layout) = self.layout() else {
            return false;
        };
        layout.columns().all(|column| {
            let mut legs = column.legs.iter();
            legs.any(|leg| {
                let host = self.cluster.host_of(leg.brick);
                let has_all = host.is_some_and(|host| !self.powerless_hosts.contains_key(&host));
                leg.state == LegState::InSync && has_all
            })
        })
    }

    /// Flushes all, if the history has disks.
    pub(crate) fn flush_for_power_loss(&mut self) -> Result<(), String> {
        if self.plan.has_disks() && !self.clients[0].threads.is_empty() {
            self.flush(0, 0);
            self.run_until_answered()?;
        }
        Ok(())
    }

    /// All disks lose their power once more. What was flushed is there after the recovery.
    pub(crate) fn recover_disks(&mut self) -> Result<(), String> {
        if !self.plan.has_disks() {
            return Ok(());
        }
        self.report.count("histories with disks", 1);
        let before = self.read_legs(&ALL_LEG_STATES)?;
        for host in 0..self.plan.pool_bytes.len() {
            if self.cluster.device(host).is_some() {
                self.cluster.kill_brick(host, CrashKind::Power);
                self.cluster.start_brick(host, None, false);
                self.manager_host.send_heartbeat(host);
            }
        }
        if self.read_legs(&ALL_LEG_STATES)? != before {
            return Err("the last power loss has changed flushed pages".into());
        }
        self.count_disk_events();
        Ok(())
    }

    fn count_disk_events(&mut self) {
        for counts in self.cluster.disk_counts() {
            let events = [
                ("page loaded from a disk", counts.loads),
                ("disk write torn by a death", counts.torn_writes),
                ("sector of a disk lost with its power", counts.sectors_lost),
                ("error of a disk", counts.errors),
                ("disk flushed", counts.flushes),
                ("disk request overtaken", counts.overtaken),
            ];
            for (name, times) in events {
                self.report.count(name, times);
            }
        }
        let failures = self.cluster.disk_failures();
        self.report.count("disk failed", failures);
    }
}
