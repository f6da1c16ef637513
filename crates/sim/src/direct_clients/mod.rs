//! A history of a mount with direct clients (RFD 021). They read and write files on the direct path
//! concurrently with the mount's program, die at any access, and their torn operations are
//! reconciled.
//!
//! Invariants: operations of the program leave these files alone. Every sector of the files is a
//! register that direct clients and the mount read and write. The operation of a dead client stays
//! open until its row is cleared.

mod append_log;
mod client_set;
pub(crate) mod client_thread;
mod deaths;
mod mount_requests;
pub(crate) mod shared_files;

pub(crate) use client_set::DirectClientSet;
pub(crate) use mount_requests::PendingFileRequest;

use crate::checker::{OpKind, OpOutcome, SECTOR, fill};
use crate::cluster::tell;
use crate::scenario::Scenario;
use append_log::{APPEND_SECTORS_MAX, AppendLog, LOG_BYTES};
use client_set::{CheckedOp, ClientOp};
use client_thread::{ActionResult, ExposedFile, FileAction};
use deaths::PendingReconcile;
use pagemesh_base::poison::lock;
use pagemesh_base::rng::SplitMix64;
use pagemesh_volume::direct_access::DirectSegment;
use shared_files::{ALL_FILES, APPEND_FILE, FILE_SECTORS, FileRequest, OVERWRITTEN_FILES, PAGES};
use std::ops::Range;
use std::sync::Arc;

/// Separates the random numbers of direct clients from the others of a seed.
const DIRECT_CLIENT_SEED: u64 = 0x6775_6573_7469_6e67;
/// Direct clients of a mount.
const CLIENTS_PER_MOUNT: usize = 3;
/// Odds (one in this many) that a client dies instead of continuing.
const DEATH_ODDS: u64 = 60;
/// Rounds of contention at the end, and steps of each.
const FINAL_ROUNDS: u32 = 3;
const FINAL_ROUND_STEPS: u32 = 150;
/// Odds that an operation is on the append file.
const APPEND_FILE_ODDS: u64 = 4;
/// Sectors of a page.
const PAGE_SECTORS: u64 = 4096 / SECTOR;
/// Sectors of both overwritten files.
const ALL_FILES_SECTORS: u64 = OVERWRITTEN_FILES as u64 * FILE_SECTORS;

/// A mount's knowledge of its direct clients.
pub(crate) struct MountClients {
    pub(crate) segment: Arc<DirectSegment>,
    exposed_files: [Option<ExposedFile>; ALL_FILES],
    /// Rows of dead clients that are not cleared yet.
    pending_reconciles: Vec<PendingReconcile>,
}

pub(crate) struct DirectClientWorkload {
    rng: SplitMix64,
    last_number: u32,
    last_value: u64,
    append_log: AppendLog,
    /// The range of the last death, so that other clients access it.
    last_death: Option<(usize, Range<u64>)>,
    /// Pages of each file that clients use; fewer pages cause more conflicts.
    hot_pages: u64,
    /// A brick that dies after this many steps.
    brick_trap: Option<(usize, u64)>,
    /// Clients begin no more operations.
    is_stopped: bool,
    /// No more clients die.
    is_fault_free: bool,
}

impl DirectClientWorkload {
    pub(crate) fn new(seed: u64) -> (DirectClientWorkload, DirectClientSet) {
        let mut rng = SplitMix64::new(seed ^ DIRECT_CLIENT_SEED);
        let client_set = DirectClientSet::new(rng.next_u64());
        let hot_pages = [1, 2, PAGES][rng.below(3) as usize];
        let guests = DirectClientWorkload {
            rng,
            last_death: None,
            hot_pages,
            last_number: 0,
            last_value: 0,
            append_log: AppendLog::default(),
            brick_trap: None,
            is_stopped: false,
            is_fault_free: false,
        };
        (guests, client_set)
    }

    /// Begins an append; returns its operation and its bytes.
    fn begin_append(&mut self, is_gradual: bool) -> (CheckedOp, Vec<u8>) {
        let (value, sectors) = (self.next_value(), 1 + self.rng.below(APPEND_SECTORS_MAX));
        self.append_log.begin(value, sectors, is_gradual);
        (CheckedOp::Append(value), fill(value, sectors))
    }

    fn next_value(&mut self) -> u64 {
        self.last_value += 1;
        self.last_value
    }

    /// Some sectors of a file, often whole pages.
    fn random_range(&mut self) -> (usize, Range<u64>) {
        let file = self.rng.below(OVERWRITTEN_FILES as u64) as usize;
        let start = self.rng.below(self.hot_pages * PAGE_SECTORS);
        let (start, len) = match self.rng.one_in(2) {
            true => (start, 1 + self.rng.below(PAGE_SECTORS)),
            false => {
                let pages = [1, 1, 1, 2, 3][self.rng.below(5) as usize];
                (start / PAGE_SECTORS * PAGE_SECTORS, pages * PAGE_SECTORS)
            }
        };
        (file, start..(start + len).min(FILE_SECTORS))
    }
}

/// A read of all appended data.
fn append_file_read() -> FileRequest {
    FileRequest::Read(0, 2 * LOG_BYTES as u32)
}

/// The checker's numbers of a file's sectors.
fn checker_sectors(file: usize, own: &Range<u64>) -> Range<u64> {
    let first = file as u64 * FILE_SECTORS;
    first + own.start..first + own.end
}

impl MountClients {
    pub(crate) fn new(segment: Arc<DirectSegment>) -> MountClients {
        MountClients {
            segment,
            exposed_files: [const { None }; ALL_FILES],
            pending_reconciles: Vec::new(),
        }
    }
}

impl Scenario {
    fn client_workload(&mut self) -> &mut DirectClientWorkload {
        self.direct_clients
            .as_mut()
            .expect("a history of direct clients")
    }

    /// A step of the direct clients, or of the cleanup behind them.
    pub(crate) fn step_direct_clients(&mut self) -> Result<(), String> {
        if self.direct_clients.is_none() {
            return Ok(());
        }
        self.step_brick_trap();
        self.report_dead_clients()?;
        self.clear_dead_rows()?;
        if !self.client_workload().is_stopped {
            self.admit_direct_clients();
        }
        let count = lock(&self.cluster.direct_clients).clients.len();
        if count == 0 {
            return Ok(());
        }
        let at = self.client_workload().rng.below(count as u64) as usize;
        let ended = lock(&self.cluster.direct_clients).take_result(at);
        if let Some((work, end, must_call)) = ended {
            return self.end_client_op(at, &work, end, must_call);
        }
        let is_inside = lock(&self.cluster.direct_clients).clients[at].op.is_some();
        if is_inside {
            let guests = self.client_workload();
            if !guests.is_stopped && !guests.is_fault_free && guests.rng.one_in(DEATH_ODDS) {
                self.kill_direct_client(at);
            } else {
                lock(&self.cluster.direct_clients).continue_client(at);
            }
            return Ok(());
        }
        self.begin_client_op(at)
    }

    /// Admits a direct client if the mount has too few.
    fn admit_direct_clients(&mut self) {
        let Some(at) = self.hosting_client() else {
            return;
        };
        let client = &self.clients[at];
        let hosting = client.mount_clients.as_ref().expect("a hosting mount");
        let segment = Arc::clone(&hosting.segment);
        let mut client_set = lock(&self.cluster.direct_clients);
        let own = |guest: &&client_set::DirectClient| guest.client == client.number;
        let mut rows: Vec<usize> = client_set
            .clients
            .iter()
            .filter(own)
            .map(|it| it.row)
            .collect();
        let living = rows.len();
        rows.extend(
            hosting
                .pending_reconciles
                .iter()
                .map(|it| it.dead_client.row),
        );
        let fallen = client_set
            .dead_clients
            .iter()
            .filter(|it| it.client == client.number);
        rows.extend(fallen.map(|it| it.row));
        if living < CLIENTS_PER_MOUNT {
            let row = (0..).find(|row| !rows.contains(row)).expect("a row");
            let guests = self
                .direct_clients
                .as_mut()
                .expect("a history of direct clients");
            guests.last_number += 1;
            client_set.admit(guests.last_number, client.number, row, segment);
        }
    }

    /// The client with a mount that has direct clients.
    fn hosting_client(&self) -> Option<usize> {
        let hosts = |client: &crate::client::VolumeClient| {
            let program = client.program.as_ref();
            client.mount_clients.is_some() && program.is_some_and(|it| it.hosts_direct_clients())
        };
        self.clients.iter().position(hosts)
    }

    /// Marks a client's direct clients as orphans: they finish their operations only.
    pub(crate) fn orphan_direct_clients(&mut self, client: u32) {
        for guest in &mut lock(&self.cluster.direct_clients).clients {
            guest.is_orphan |= guest.client == client;
        }
    }

    /// Kills all direct clients, as when their machine loses its power.
    pub(crate) fn kill_direct_clients(&mut self) {
        let mut client_set = lock(&self.cluster.direct_clients);
        while !client_set.clients.is_empty() {
            client_set.kill(0);
        }
    }

    fn begin_client_op(&mut self, at: usize) -> Result<(), String> {
        let (client, is_orphan, number) = {
            let client_set = lock(&self.cluster.direct_clients);
            let guest = &client_set.clients[at];
            (guest.client, guest.is_orphan, guest.number)
        };
        let host = self.clients.iter().position(|it| it.number == client);
        let Some(host) = host.filter(|_| !is_orphan) else {
            self.cluster.release_sessions(at, true);
            return Ok(());
        };
        let lease = self.clients[host].driven.layout_lease();
        let has = lock(&self.cluster.direct_clients).clients[at].lease.clone();
        let Some(lease) = lease else {
            return Ok(());
        };
        if has.as_ref() != Some(&lease) {
            if let Err(cause) = self.cluster.open_sessions(at, lease) {
                tell!(self.cluster, "direct client {number} has no legs: {cause}");
            }
            return Ok(());
        }
        let attachment = self.clients[host].attachment;
        let guests = self
            .direct_clients
            .as_mut()
            .expect("a history of direct clients");
        if guests.is_stopped || guests.rng.one_in(3) {
            return Ok(());
        }
        let (mut file, mut own) = guests.random_range();
        let looks = guests.last_death.is_some() && guests.rng.one_in(2);
        if let Some(at) = guests.last_death.clone().filter(|_| looks) {
            (file, own) = at;
        }
        let hosting = self.clients[host].mount_clients.as_ref().expect("its host");
        if guests.rng.one_in(APPEND_FILE_ODDS) {
            let Some(shown) = hosting.exposed_files[APPEND_FILE].clone() else {
                return Ok(());
            };
            let size = shown.map.size();
            let (operation, deed) = match size > LOG_BYTES || guests.rng.one_in(4) {
                true => {
                    // A shorter read would cut data that is appended meanwhile.
                    let len = 2 * LOG_BYTES as usize;
                    (
                        CheckedOp::LogRead(guests.append_log.now()),
                        FileAction::Read(0, len),
                    )
                }
                false => {
                    let (operation, data) = guests.begin_append(false);
                    (operation, FileAction::Write(None, data))
                }
            };
            tell!(self.cluster, "direct client {number} begins {operation:?}");
            let work = ClientOp {
                checked: operation,
                file: APPEND_FILE,
                sectors: 0..0,
                action: deed,
                ino: shown.ino,
            };
            lock(&self.cluster.direct_clients).begin(at, shown, work);
            return Ok(());
        }
        let Some(shown) = hosting.exposed_files[file].clone() else {
            return Ok(());
        };
        let offset = own.start * SECTOR;
        let (deed, kind) = match looks || guests.rng.one_in(3) {
            true => {
                let len = (own.end - own.start) * SECTOR;
                (FileAction::Read(offset, len as usize), OpKind::Read(vec![]))
            }
            false => {
                let value = guests.next_value();
                let data = fill(value, own.end - own.start);
                (FileAction::Write(Some(offset), data), OpKind::Write(value))
            }
        };
        let all = checker_sectors(file, &own);
        tell!(
            self.cluster,
            "direct client {number} begins {kind:?} of {all:?}"
        );
        let operation = self.checker.begin(attachment, number, all, kind);
        let operation = CheckedOp::Sectors(operation);
        let work = ClientOp {
            checked: operation,
            file,
            sectors: own,
            action: deed,
            ino: shown.ino,
        };
        lock(&self.cluster.direct_clients).begin(at, shown, work);
        Ok(())
    }

    fn end_client_op(
        &mut self,
        at: usize,
        work: &ClientOp,
        end: ActionResult,
        must_call: bool,
    ) -> Result<(), String> {
        let (number, client, is_followed) = {
            let client_set = lock(&self.cluster.direct_clients);
            let guest = &client_set.clients[at];
            let is_followed = guest.segment.ring().has_replica();
            (guest.number, guest.client, is_followed)
        };
        let host = self.clients.iter().position(|it| it.number == client);
        if let Some(host) = host.filter(|_| must_call) {
            self.clients[host].driven.wake_replication();
        }
        let operation = work.checked;
        match end {
            ActionResult::Read(data) => {
                tell!(self.cluster, "direct client {number} has read");
                self.report.count("direct client read", 1);
                self.record_read(operation, &data)
            }
            ActionResult::Written => {
                tell!(self.cluster, "direct client {number} has written");
                self.report.count("direct client wrote", 1);
                if is_followed {
                    self.report.count("direct client wrote for a replica", 1);
                }
                self.report.acknowledged += 1;
                if matches!(operation, CheckedOp::Append(_)) {
                    self.report.count("direct client appended", 1);
                }
                self.record_end(operation, OpOutcome::Done)
            }
            ActionResult::ByKernel | ActionResult::NoRoom => {
                let is_short = matches!(end, ActionResult::NoRoom);
                self.report.count("direct client sent to the kernel", 1);
                if let Some(host) = host
                    && let Some(hosting) = &mut self.clients[host].mount_clients
                    && let Some(shown) = &hosting.exposed_files[work.file]
                    && (is_short || shown.map.is_outdated())
                {
                    hosting.exposed_files[work.file] = None;
                }
                self.record_refusal(operation)
            }
            ActionResult::Failed(cause) => {
                tell!(self.cluster, "direct client {number} fails: {cause}");
                self.report.count("direct client failed", 1);
                self.cluster.release_sessions(at, false);
                self.record_refusal(operation)
            }
        }
    }

    /// Records the end of an operation.
    fn record_end(&mut self, operation: CheckedOp, ending: OpOutcome) -> Result<(), String> {
        let log = &mut self
            .direct_clients
            .as_mut()
            .expect("it has some")
            .append_log;
        match (operation, ending) {
            (CheckedOp::Sectors(number), _) => return self.checker.end(number, ending),
            (CheckedOp::Append(value), OpOutcome::Done) => log.acknowledge(value),
            (CheckedOp::Append(value), _) => log.record_client_death(value),
            (CheckedOp::LogRead(_), _) => {}
        }
        Ok(())
    }

    /// Records that a client leaves an operation to the kernel.
    fn record_refusal(&mut self, operation: CheckedOp) -> Result<(), String> {
        match operation {
            CheckedOp::Append(value) => {
                self.client_workload().append_log.record_refusal(value);
                Ok(())
            }
            operation => self.record_end(operation, OpOutcome::Decided),
        }
    }

    fn record_read(&mut self, operation: CheckedOp, data: &[u8]) -> Result<(), String> {
        match operation {
            CheckedOp::Sectors(number) => self.checker.read(number, data),
            CheckedOp::LogRead(began) => self.client_workload().append_log.read(began, data),
            CheckedOp::Append(_) => Err("an append has read".into()),
        }
    }

    /// Whether no operation is in progress and all cleanup is done.
    pub(crate) fn are_direct_clients_quiescent(&self) -> bool {
        let client_set = lock(&self.cluster.direct_clients);
        let is_idle = client_set.clients.iter().all(|guest| guest.op.is_none());
        let mut hosting = self
            .clients
            .iter()
            .filter_map(|it| it.mount_clients.as_ref());
        is_idle
            && client_set.dead_clients.is_empty()
            && hosting.all(|it| it.pending_reconciles.is_empty())
    }

    /// Lets no client begin another operation.
    pub(crate) fn stop_direct_clients(&mut self) {
        if let Some(guests) = &mut self.direct_clients {
            guests.is_stopped = true;
        }
    }

    /// With all legs and without faults, clients contend for the same page. Afterwards each leg,
    /// replicas included, has the last writes.
    pub(crate) fn final_check_direct_clients(&mut self) -> Result<(), String> {
        if self.direct_clients.is_none() {
            return Ok(());
        }
        self.client_workload().is_fault_free = true;
        self.client_workload().hot_pages = 1;
        for _ in 0..FINAL_ROUNDS {
            for file in 0..ALL_FILES {
                self.start_file_request(PendingFileRequest {
                    file,
                    request: FileRequest::Expose(file == APPEND_FILE),
                    operation: None,
                })?;
                self.run_until_quiescent()?;
            }
            self.client_workload().is_stopped = false;
            for _ in 0..FINAL_ROUND_STEPS {
                self.step()?;
                self.step_direct_clients()?;
            }
            self.client_workload().is_stopped = true;
            self.run_until_quiescent()?;
            self.compare_all_legs()?;
        }
        for file in 0..OVERWRITTEN_FILES {
            let len = (FILE_SECTORS * SECTOR) as u32;
            let (ask, kind) = (FileRequest::Read(0, len), OpKind::Read(vec![]));
            let asked = self.begin_file_request(0, file, &(0..FILE_SECTORS), ask, kind);
            self.start_file_request(asked)?;
            self.run_until_quiescent()?;
        }
        let operation = CheckedOp::LogRead(self.client_workload().append_log.now());
        self.start_file_request(PendingFileRequest {
            file: APPEND_FILE,
            request: append_file_read(),
            operation: Some(operation),
        })?;
        self.run_until_quiescent()?;
        self.end_direct_clients();
        let searched = self.checker.check(ALL_FILES_SECTORS)?;
        (self.report.sectors_searched, self.report.sectors_skipped) =
            (searched.sectors, searched.skipped);
        Ok(())
    }

    /// Ends the direct clients, which have no operation in progress.
    fn end_direct_clients(&mut self) {
        while !lock(&self.cluster.direct_clients).clients.is_empty() {
            self.cluster.release_sessions(0, true);
        }
    }
}
