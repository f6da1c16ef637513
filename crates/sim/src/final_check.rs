//! The end of a history: no more faults. The cluster must become quiescent and consistent.

use crate::any_medium::SimMedium;
use crate::checker::{SECTOR, value_of};
use crate::client::VolumeClient;
use crate::cluster::tell;
use crate::scenario::Scenario;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{Layout, Leg, LegState};
use pagemesh_base::slice::{BrickControl, SliceError, SliceReply, SliceRequest};
use pagemesh_brick::worker::Worker;
use pagemesh_pmem::Media;
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

/// Maximum of steps, and of time, until the cluster is quiescent.
pub(crate) const STEPS_MAX: u64 = 400_000;
const TIME_MAX: Duration = Duration::from_secs(600);
/// Maintenance rounds after which all deleted frames are free.
const MAINTENANCE_ROUNDS_MAX: u32 = 200;
const PAGE: u64 = 4096;

struct LegReader {
    house: usize,
    worker: Worker<SimMedium>,
    handle: u32,
    may_be_damaged: bool,
}

impl LegReader {
    fn execute(&mut self, request: SliceRequest) -> Result<Option<SliceReply>, String> {
        match self.worker.execute(self.handle, request) {
            Ok(reply) => Ok(Some(reply)),
            Err(SliceError::Damaged { .. }) if self.may_be_damaged => Ok(None),
            Err(cause) => Err(format!("brick {}: {cause}", self.house)),
        }
    }

    /// Reads a page; none if it is damaged.
    fn read(&mut self, page: u64) -> Result<Option<Vec<u8>>, String> {
        let request = SliceRequest::Read {
            offset: page * PAGE,
            len: PAGE as u32,
        };
        match self.execute(request)? {
            Some(SliceReply::Data(data)) => Ok(Some(data)),
            None => Ok(None),
            Some(_) => Err(format!("brick {} reads nothing", self.house)),
        }
    }

    /// Adds the pages of a slice that hold data, or may.
    fn add_mapped_pages(&mut self, bytes: u64, pages: &mut BTreeSet<u64>) -> Result<(), String> {
        let mut offset = 0;
        while offset < bytes {
            let len = bytes - offset;
            let Some(SliceReply::Extents(extents)) =
                self.execute(SliceRequest::Extents { offset, len })?
            else {
                pages.extend(0..bytes / PAGE);
                return Ok(());
            };
            for extent in extents {
                let next = offset + extent.len;
                if extent.mapped {
                    pages.extend(offset / PAGE..next.div_ceil(PAGE));
                }
                offset = next;
            }
        }
        Ok(())
    }
}
/// Every leg state.
pub(crate) const ALL_LEG_STATES: [LegState; 4] = [
    LegState::InSync,
    LegState::Stale,
    LegState::Syncing,
    LegState::AsyncReplica,
];
/// Sectors of a request at the end.
const PART_SECTORS: u64 = 256;

impl Scenario {
    /// Ends all faults, waits, and checks everything.
    pub(crate) fn final_check(&mut self) -> Result<(), String> {
        tell!(self.cluster, "no more faults");
        self.stop_direct_clients();
        self.end_cuts()?;
        self.clear_faults();
        self.run_until_promoted()?;
        // A client that attached meanwhile may not reach the lost copies.
        self.clear_faults();
        if self.plan.is_undersized {
            // The smallest pools have three sessions. A client that lost its connections needs them
            // twice for a short time, and gets none.
            while !self.clients.is_empty() {
                self.crash_client(0);
            }
            self.start_client();
            self.run_until_attached()?;
            self.remove_refused_threads()?;
            self.is_fault_free = true;
            self.read_all()?;
            self.crash_client(0);
            self.drain_connections();
            self.compare_legs(&[LegState::InSync])?;
            self.start_client();
            self.run_until_attached()?;
            self.discard_volume();
        }
        self.run_until_quiescent()?;
        if self.plan.has_files {
            self.is_fault_free = true;
            return self.final_check_files();
        }
        // A channel learns that a column has reconnected when it takes its answers.
        self.reap_completions(0)?;
        self.remove_refused_threads()?;
        self.is_fault_free = true;
        self.read_all()?;
        // A damaged page may have cost a leg.
        self.run_until_quiescent()?;
        self.end_all_clients();
        // Compares before any rewrite.
        self.compare_all_legs()?;
        self.is_fault_free = false;
        self.start_client();
        self.run_until_quiescent()?;
        self.reap_completions(0)?;
        self.remove_refused_threads()?;
        self.is_fault_free = true;
        self.write_all()?;
        self.flush_for_power_loss()?;
        self.is_rewritten = true;
        self.end_all_clients();
        self.count_scrubs();
        self.compare_all_legs()?;
        self.recover_disks()?;
        self.end_snapshots()?;
        let searched = self.checker.check(self.sectors)?;
        (self.report.sectors_searched, self.report.sectors_skipped) =
            (searched.sectors, searched.skipped);
        self.report
            .count("transaction without an answer happened", searched.happened);
        self.report.count(
            "transaction without an answer vanished",
            searched.rolled_back,
        );
        self.report
            .count("transaction of unknown outcome", searched.unknown);
        self.report
            .count("change lost with a promotion", searched.lost);
        self.report
            .count("durable change kept by a promotion", searched.durable_kept);
        self.delete_volume()
    }

    pub(crate) fn count_scrubs(&mut self) {
        let (scrubs, mended) = self.cluster.scrub_counts();
        self.report.count("pool scrubbed", scrubs);
        self.report.count("pool corrected by a scrub", mended);
    }

    /// Clears all faults of the cluster.
    pub(crate) fn clear_faults(&mut self) {
        self.cluster.net().clear_faults();
        self.manager_host.clear_faults();
        for host in 0..self.plan.pool_bytes.len() {
            if let Some(running) = self.cluster.running_brick(host) {
                running.medium.disarm_fuse();
                if let Some(memory) = running.medium.memory() {
                    memory.clear_write_fault();
                }
            }
            if let Some(device) = self.cluster.device(host) {
                device.clear_faults();
                // A request may have failed before, unnoticed.
                while self.cluster.step_disk(host, &mut self.disk_rng) {}
            }
            self.cluster.start_brick(host, None, false);
            self.manager_host.send_heartbeat(host);
        }
        for client in &mut self.clients {
            client.stopped_until = Duration::ZERO;
            for thread in &mut client.threads {
                thread.stalled_until = Duration::ZERO;
            }
        }
    }

    pub(crate) fn run_until_quiescent(&mut self) -> Result<(), String> {
        let until = self.cluster.now() + TIME_MAX;
        for _ in 0..STEPS_MAX {
            self.step()?;
            self.step_direct_clients()?;
            self.end_superseded_client();
            if let [client] = &self.clients[..]
                && client.attachment > 0
                && client.is_quiescent()
                && self.are_direct_clients_quiescent()
            {
                tell!(self.cluster, "all is calm");
                return Ok(());
            }
            if self.cluster.now() > until {
                break;
            }
        }
        let clients = self.clients.iter().map(|client| {
            let pending: Vec<_> = client.threads.iter().map(|t| t.pending.len()).collect();
            let (number, status) = (client.number, client.driven.status());
            format!("client {number} has {pending:?} pending {status:#?}")
        });
        let clients: Vec<String> = clients.collect();
        Err(format!("not quiescent: {}", clients.join("\n")))
    }

    /// Ends a client if another one has its volume.
    pub(crate) fn end_fenced_client(&mut self) {
        let present = self.clients.iter().map(|client| client.attachment).max();
        let over = self.clients.iter().position(|client| {
            let is_idle = client.is_idle();
            let is_older = client.attachment > 0 && Some(client.attachment) < present;
            // A client that is fenced without a successor stays: then the cluster is never
            // quiescent.
            let is_fenced =
                client.is_fenced() && self.manager_host.is_superseded(client.attachment);
            is_idle && (is_older || is_fenced)
        });
        if let Some(at) = over {
            self.crash_client(at);
        }
        if self.clients.is_empty() {
            self.start_client();
        }
    }

    /// Also ends a superseded client that does not know it, because the client that took the volume
    /// is gone and has told no leg. It would work on until it asks the manager.
    fn end_superseded_client(&mut self) {
        let is_over = |client: &VolumeClient| {
            let is_superseded = self.manager_host.is_superseded(client.attachment);
            client.attachment > 0 && client.is_idle() && is_superseded
        };
        if let Some(at) = self.clients.iter().position(is_over) {
            self.crash_client(at);
        }
        self.end_fenced_client();
    }

    /// Waits until one client has the volume, with or without all legs.
    fn run_until_attached(&mut self) -> Result<(), String> {
        for _ in 0..STEPS_MAX {
            self.end_superseded_client();
            if self.clients.len() == 1 && self.clients[0].attachment > 0 {
                return Ok(());
            }
            self.step()?;
        }
        Err("no client attaches".into())
    }

    /// Waits until every request has its answer, with or without all legs.
    pub(crate) fn run_until_answered(&mut self) -> Result<(), String> {
        for _ in 0..STEPS_MAX {
            if self.clients.iter().all(VolumeClient::is_idle) {
                return Ok(());
            }
            self.step()?;
        }
        Err("requests have no answer".into())
    }

    /// Discards the whole volume if it fills its pools, so that legs without free space can return.
    fn discard_volume(&mut self) {
        self.ensure_thread();
        let sectors = self.sectors;
        self.discard(0, 0, 0..sectors);
    }

    /// Removes threads that were refused and do not know it.
    fn remove_refused_threads(&mut self) -> Result<(), String> {
        for thread in 0..self.clients[0].threads.len() {
            self.flush(0, thread);
        }
        self.run_until_answered()?;
        self.ensure_thread();
        Ok(())
    }

    fn ensure_thread(&mut self) {
        if self.clients[0].threads.is_empty() {
            self.next_thread += 1;
            self.clients[0].open_thread(self.next_thread);
        }
    }

    pub(crate) fn parts(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let sectors = self.sectors;
        let starts = (0..sectors).step_by(PART_SECTORS as usize);
        starts.map(move |start| start..(start + PART_SECTORS).min(sectors))
    }

    /// Reads all: acknowledged writes are present, even if legs are missing.
    fn read_all(&mut self) -> Result<(), String> {
        self.ensure_thread();
        for part in self.parts() {
            self.read(0, 0, part);
            self.run_until_answered()?;
        }
        Ok(())
    }

    /// Writes every page: no dead client has left a lock behind, in a brick or in the client.
    fn write_all(&mut self) -> Result<(), String> {
        for part in self.parts() {
            self.write(0, 0, part.clone(), false);
            self.run_until_quiescent()?;
            self.read(0, 0, part.clone());
            self.run_until_quiescent()?;
            if self.plan.is_undersized {
                self.discard(0, 0, part);
                self.run_until_quiescent()?;
            }
        }
        Ok(())
    }

    /// Ends all clients, and lets bricks notice it.
    pub(crate) fn end_all_clients(&mut self) {
        for mut client in std::mem::take(&mut self.clients) {
            client.program = None;
            self.add_client_counts(&client);
        }
        self.drain_connections();
    }

    /// Lets bricks notice that their clients are gone.
    fn drain_connections(&mut self) {
        self.advance_time(Duration::from_secs(1));
        loop {
            let connections = self.cluster.net().connections_with_arrivals();
            if connections.is_empty() {
                break;
            }
            for connection in connections {
                self.cluster.serve(connection);
            }
        }
    }

    /// Opens a reader of a leg's pages that bypasses all clients.
    fn open_leg_reader(&self, leg: &Leg, epoch: Epoch) -> Result<LegReader, String> {
        let host = self.cluster.host_of(leg.brick).ok_or("no such brick")?;
        let running = self.cluster.running_brick(host).ok_or("a brick is down")?;
        let told = |cause: SliceError| format!("brick {host}: {cause}");
        let mut worker = Worker::open(&running.brick, 1, 1).map_err(told)?;
        let (handle, _) = worker.attach(leg.slice, epoch).map_err(told)?;
        Ok(LegReader {
            house: host,
            worker,
            handle,
            may_be_damaged: self.plan.damaged_brick == Some(host) && !self.is_rewritten,
        })
    }

    /// Checks that all legs are present and equal.
    pub(crate) fn compare_all_legs(&self) -> Result<(), String> {
        for (number, column) in self.layout()?.columns().enumerate() {
            let lost_since = column.lost_since.0;
            if lost_since != 0 {
                return Err(format!("column {number} lost a leg at {lost_since}"));
            }
        }
        self.compare_legs(&ALL_LEG_STATES)
    }

    pub(crate) fn layout(&self) -> Result<Layout, String> {
        let manager = self.manager_host.manager().ok_or("no manager")?;
        let detail = manager.show(&self.name);
        Ok(detail.map_err(|fault| fault.to_string())?.layout)
    }

    /// Checks that the legs in these states are equal.
    fn compare_legs(&self, states: &[LegState]) -> Result<(), String> {
        self.read_legs(states).map(drop)
    }

    /// The same. Returns a digest of their pages.
    pub(crate) fn read_legs(&self, states: &[LegState]) -> Result<u32, String> {
        let mut digest = 0u32;
        let layout = self.layout()?;
        let epoch = Epoch(layout.epoch.0);
        for segment in &layout.segments {
            for (number, column) in segment.columns.iter().enumerate() {
                let legs = column.legs.iter();
                let legs = legs.filter(|leg| states.contains(&leg.state));
                let readers = legs.map(|leg| self.open_leg_reader(leg, epoch));
                let mut ways = readers.collect::<Result<Vec<_>, String>>()?;
                let mut pages = BTreeSet::new();
                for way in &mut ways {
                    way.add_mapped_pages(segment.slice_bytes(), &mut pages)?;
                }
                for page in pages {
                    let found = ways.iter_mut().map(|way| way.read(page));
                    let found = found.collect::<Result<Vec<_>, String>>()?;
                    let found = found.iter().flatten();
                    let found: Vec<_> = found.collect();
                    if found.windows(2).any(|pair| pair[0] != pair[1]) {
                        let sectors = |bytes: &[u8]| -> Vec<_> {
                            bytes.chunks(SECTOR as usize).map(value_of).collect()
                        };
                        let held: Vec<_> = found.iter().map(|bytes| sectors(bytes)).collect();
                        return Err(format!("page {page} of column {number} differs: {held:?}"));
                    }
                    let Some(bytes) = found.first() else {
                        return Err(format!("page {page} of column {number} is lost"));
                    };
                    digest = crc32c(bytes).rotate_left(5) ^ digest.rotate_left(1);
                }
            }
        }
        Ok(digest)
    }

    /// Deletes the volume: every frame must be free again.
    pub(crate) fn delete_volume(&mut self) -> Result<(), String> {
        let manager = self.manager_host.manager().ok_or("no manager")?;
        let deleted = manager.delete(&self.name, true);
        deleted.map_err(|fault| format!("the volume is not deleted: {fault}"))?;
        drop(manager);
        for host in 0..self.plan.pool_bytes.len() {
            let running = self.cluster.running_brick(host).ok_or("a brick is down")?;
            let used = || running.brick.status().map_or(u64::MAX, |s| s.used_bytes);
            let mut rounds = 0;
            while used() > 0 && rounds < MAINTENANCE_ROUNDS_MAX {
                running.brick.maintain();
                rounds += 1;
            }
            // A damaged slot or page frees no frames: a frame that a damaged slot named stays in
            // use, and so does an unreadable one.
            let is_damaged = self.plan.damaged_brick == Some(host);
            let withheld = if is_damaged { self.frames_withheld } else { 0 };
            if used() > withheld * PAGE {
                return Err(format!("brick {host} has lost {} bytes of frames", used()));
            }
            let unreadable = running.medium.unreadable_pages().len() as u64;
            if used() < unreadable * PAGE {
                return Err(format!(
                    "brick {host} would use one of {unreadable} unreadable frames again"
                ));
            }
        }
        Ok(())
    }
}
