//! The disks of the cluster's bricks: their requests end, their writers go on, and connections notice it.

use crate::brick_host::CrashKind;
use crate::cluster::{Cluster, tell};
use pagemesh_base::poison::lock;
use pagemesh_base::rng::SplitMix64;
use pagemesh_pmem::{REQUEST_LIMIT, SimulatedCounts, SimulatedDevice};
use std::sync::Arc;
use std::time::Duration;

impl Cluster {
    /// The device of a host, if its pool is on a disk.
    pub(crate) fn device(&self, host: usize) -> Option<Arc<SimulatedDevice>> {
        self.hosts()[host].device.clone()
    }

    fn devices(&self) -> Vec<Arc<SimulatedDevice>> {
        let hosts = self.hosts();
        hosts
            .iter()
            .filter_map(|host| host.device.clone())
            .collect()
    }

    /// Tells the devices the time.
    pub(crate) fn set_disk_time(&self) {
        let now = self.now();
        self.devices()
            .iter()
            .for_each(|device| device.set_time(now));
    }

    /// When the next request of a disk is due.
    pub(crate) fn next_disk_due(&self) -> Option<Duration> {
        self.devices()
            .iter()
            .filter_map(|device| device.next_due())
            .min()
    }

    /// What happened to all devices so far.
    pub(crate) fn disk_counts(&self) -> Vec<SimulatedCounts> {
        self.devices()
            .iter()
            .map(|device| device.counts())
            .collect()
    }

    /// A step of a brick's disk: a request ends, the writer goes on, or connections notice what has ended. False: there is nothing
    /// to do.
    pub(crate) fn step_disk(&self, host: usize, rng: &mut SplitMix64) -> bool {
        let Some(running) = self.running_brick(host) else {
            return false;
        };
        let Some(disk) = running.disk() else {
            return false;
        };
        let device = self.device(host);
        let ended = device.as_ref().map_or(0, |device| device.counts().ended);
        let needs_poll = {
            let host = &self.hosts()[host];
            host.needs_poll || host.ended_seen != ended
        };
        if needs_poll && rng.one_in(3) {
            self.poll_disk_users(host, ended);
            return true;
        }
        let end_due = || device.as_ref().is_some_and(|device| device.end_due());
        let steps: [&dyn Fn() -> bool; 3] =
            [&end_due, &|| disk.step_writer(), &|| disk.step_flusher()];
        let first = rng.below(3) as usize;
        let has_acted = (first..first + 3).any(|step| steps[step % 3]());
        if device
            .as_ref()
            .is_some_and(|device| device.oldest_age() >= REQUEST_LIMIT)
        {
            disk.fail("a request has not ended".into());
        }
        if self.end_failed_brick(host) {
            return true;
        }
        self.hosts()[host].needs_poll |= has_acted;
        if !has_acted && needs_poll {
            self.poll_disk_users(host, ended);
        }
        has_acted || needs_poll
    }

    /// The connections of a brick answer what has ended.
    fn poll_disk_users(&self, host: usize, ended: u64) {
        {
            let host = &mut self.hosts()[host];
            (host.needs_poll, host.ended_seen) = (false, ended);
        }
        for connection in self.connections_of(host) {
            let Some(running) = self.running_brick(host) else {
                return;
            };
            self.serve_with(host, connection, |exchange, wire| {
                running.poll(exchange, wire)
            });
        }
        self.end_failed_brick(host);
    }

    /// Ends a brick whose disk has failed. False: it has not.
    pub(crate) fn end_failed_brick(&self, host: usize) -> bool {
        let running = self.running_brick(host);
        let Some(failure) = running.and_then(|running| running.disk_failure()) else {
            return false;
        };
        tell!(self, "the disk of brick {host} fails: {failure}");
        self.kill_brick(host, CrashKind::Process);
        self.hosts()[host].disk_failures += 1;
        true
    }

    /// How often a disk has failed, and ended its brick.
    pub(crate) fn disk_failures(&self) -> u64 {
        self.hosts().iter().map(|host| host.disk_failures).sum()
    }

    /// The hosts with a disk that have lost their power since the last call.
    pub(crate) fn take_power_losses(&self) -> Vec<usize> {
        std::mem::take(&mut lock(&self.power_losses))
    }
}
