//! One history: a cluster, clients that read and write, faults, and a final check in which the
//! cluster must be quiescent and consistent.

mod disks;
mod plan;
mod runs;

pub(crate) use plan::ScenarioPlan;
pub use runs::{run, run_direct_clients, run_disks, run_files, run_snapshots};

use crate::checker::HistoryChecker;
use crate::client::VolumeClient;
use crate::cluster::{Cluster, tell};
use crate::direct_clients::DirectClientWorkload;
use crate::event_log::EventLog;
use crate::faults::{CrashTrap, HotPage, TakeoverFault};
use crate::files::FilesOracle;
use crate::manager_host::ManagerHost;
use crate::promotion::PromotionFault;
use crate::rng::SimRng;
use crate::snapshots::SnapshotOracle;
use pagemesh_base::layout::{LEGS_MAX, Layout, VolumeName};
use pagemesh_base::rng::SplitMix64;
use pagemesh_manage::TierPolicy;
use pagemesh_manage::wire::{AttachReplica, CreateVolume, VolumeContent};
use pagemesh_store::wait::set_yield_fn;
use pagemesh_volume::AttachError;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Steps with faults.
const STEPS: u64 = 4000;
/// The same for histories of files: an operation takes about thirty steps.
const STEPS_WITH_FILES: u64 = 12_000;
const HEARTBEAT: Duration = Duration::from_secs(2);
/// Odds that a step severs a connection, where a history has that.
pub(crate) const SEVER_ODDS: u64 = 500;
/// Separates the random numbers of severed connections from the others of a seed.
const SEVER_SEED: u64 = 0x7365_7665_7265_6421;
/// Separates the random numbers of transactions from the others of a seed.
const TRANSACTION_SEED: u64 = 0x7472_616e_7361_6374;
/// Separates the random numbers of crash traps from the others of a seed.
const CRASH_TRAP_SEED: u64 = 0x616d_6275_7368_6520;
/// Separates the random numbers of flipped slots from the others of a seed.
const SLOT_FLIP_SEED: u64 = 0x666c_6970_7069_6e67;
/// Separates the random numbers of unreadable pages from the others of a seed.
const UNREADABLE_SEED: u64 = 0x7370_6f69_6c69_6e67;
const REPLICA_SEED: u64 = 0x666f_6c6c_6f77_696e;
/// Separates the random numbers of promotions from the others of a seed.
const PROMOTION_SEED: u64 = 0x7072_6f6d_6f74_696e;
/// Separates the random numbers of snapshots from the others of a seed.
const SNAPSHOT_SEED: u64 = 0x736e_6170_7368_6f74;
/// Separates the random numbers of disks from the others of a seed.
const DISK_SEED: u64 = 0x6469_736b_7320_3120;
/// Odds that the bricks of a history with requests to the volume itself have disks.
const DISK_ODDS: u64 = 5;
/// Idle steps after which time jumps ahead.
const IDLE_STEPS_MAX: u32 = 2;
/// Maximum of a jump: only a poll detects a silent leg.
const JUMP_MAX: Duration = Duration::from_millis(250);
/// Odds that a slow brick serves a message that has come, in each step.
const SLOW_SERVE_ODDS: u64 = 10;
/// Maximum of a jump while a slow brick has messages. With longer jumps it would let connections time out whenever
/// the rest of the cluster is idle.
const SLOW_JUMP_MAX: Duration = Duration::from_millis(50);

/// The use of a volume.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VolumeUse {
    Blocks,
    /// Requests to a volume on disks.
    Disks,
    Files,
    DirectClients,
    /// Requests to a volume of which an operator takes snapshots.
    Snapshots,
}

/// The result of one history, or of many.
#[derive(Clone, Debug, Default)]
pub struct HistoryReport {
    /// Number of histories.
    pub histories: u64,
    /// A digest that is equal for two runs of a seed.
    pub digest: u64,
    /// Acknowledged operations.
    pub acknowledged: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Messages sent.
    pub messages: u64,
    /// Events that happened, by name.
    pub event_counts: std::collections::BTreeMap<&'static str, u64>,
    /// Searched sectors.
    pub sectors_searched: u64,
    /// Sectors that the search skipped.
    pub sectors_skipped: u64,
    /// Pages that were rewritten from another leg.
    pub pages_repaired: u64,
    /// Time that passed in the simulation.
    pub simulated_time: Duration,
}

pub(crate) struct Scenario {
    pub(crate) plan: ScenarioPlan,
    pub(crate) rng: SplitMix64,
    pub(crate) sever_rng: SplitMix64,
    pub(crate) transaction_rng: SplitMix64,
    pub(crate) crash_trap_rng: SplitMix64,
    pub(crate) slot_flip_rng: SplitMix64,
    pub(crate) unreadable_rng: SplitMix64,
    pub(crate) disk_rng: SplitMix64,
    /// Hosts with a disk whose last power loss no flush has followed, and the checker's time of that.
    pub(crate) powerless_hosts: BTreeMap<usize, usize>,
    /// The last layout that was examined for the loss of changes.
    pub(crate) epoch_at_power_loss: Option<u32>,
    /// Whether an in-sync leg of each column had all changes then.
    pub(crate) had_current_copy: bool,
    /// Frames withheld for damaged slots and unreadable pages.
    pub(crate) frames_withheld: u64,
    /// The next connection with requests to a brick is severed.
    pub(crate) is_severing: bool,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) manager_host: Arc<ManagerHost>,
    pub(crate) name: VolumeName,
    pub(crate) checker: HistoryChecker,
    /// The last client is the newest.
    pub(crate) clients: Vec<VolumeClient>,
    pub(crate) next_client: u32,
    pub(crate) next_thread: u32,
    pub(crate) next_value: u64,
    pub(crate) sectors: u64,
    /// The positions of bytes; the legs' states in it may be outdated.
    pub(crate) layout: Layout,
    pub(crate) next_heartbeat: Duration,
    pub(crate) idle_steps: u32,
    /// Parts of unanswered transactions, by first sector, that a later client has read.
    reread_parts: BTreeSet<(usize, u64)>,
    pub(crate) takeover: Option<TakeoverFault>,
    pub(crate) hot_page: Option<HotPage>,
    pub(crate) crash_trap: Option<CrashTrap>,
    pub(crate) promotion: Option<PromotionFault>,
    pub(crate) files: Option<FilesOracle>,
    pub(crate) snapshots: Option<SnapshotOracle>,
    pub(crate) direct_clients: Option<DirectClientWorkload>,
    /// Bricks that a newly attaching client cannot reach.
    pub(crate) unreachable_bricks: Vec<usize>,
    /// All faults are cleared: every request that begins now succeeds.
    pub(crate) is_fault_free: bool,
    /// Every page was rewritten since the last fault: no medium may lack one.
    pub(crate) is_rewritten: bool,
    pub(crate) report: HistoryReport,
}

impl Scenario {
    fn new(seed: u64, used: VolumeUse, is_printed: bool) -> Scenario {
        let has_files = matches!(used, VolumeUse::Files | VolumeUse::DirectClients);
        let mut rng = SplitMix64::new(seed);
        // Separate generators: histories without such faults stay as they were before those
        // existed.
        let mut severing = SplitMix64::new(seed ^ SEVER_SEED);
        let mut plan = ScenarioPlan::random(&mut rng);
        let mut disk_rng = SplitMix64::new(seed ^ DISK_SEED);
        if !has_files && (disk_rng.one_in(DISK_ODDS) || used == VolumeUse::Disks) {
            plan.set_disks(&mut disk_rng);
        }
        if has_files {
            plan.set_files();
        }
        if used == VolumeUse::DirectClients {
            plan.set_direct_clients();
        }
        if used == VolumeUse::Snapshots {
            plan.damaged_brick = None;
        }
        let odds = if plan.copies == 1 { 2 } else { 12 };
        plan.severs_connections = plan.damaged_brick.is_none() && severing.one_in(odds);
        let mut transacting = SplitMix64::new(seed ^ TRANSACTION_SEED);
        plan.has_transactions = transacting.one_in(2);
        let mut ambushing = SplitMix64::new(seed ^ CRASH_TRAP_SEED);
        plan.sets_crash_traps = plan.has_transactions && ambushing.one_in(2);
        let mut flipping = SplitMix64::new(seed ^ SLOT_FLIP_SEED);
        plan.flips_slots = plan.damaged_brick.is_some() && flipping.one_in(2);
        let mut spoiling = SplitMix64::new(seed ^ UNREADABLE_SEED);
        plan.has_unreadable_pages = plan.damaged_brick.is_some() && spoiling.one_in(2);
        let has_room = plan.copies < plan.pool_bytes.len().min(LEGS_MAX);
        let has_room = has_room && plan.columns == 1 && !plan.is_undersized && !plan.is_mixed();
        plan.has_replica = has_room && SplitMix64::new(seed ^ REPLICA_SEED).one_in(2);
        let mut promoting = SplitMix64::new(seed ^ PROMOTION_SEED);
        plan.promotes_replica = has_room
            && plan.damaged_brick.is_none()
            && !plan.has_direct_clients
            && !plan.has_disks()
            && !promoting.one_in(3);
        plan.has_replica |= plan.promotes_replica;
        let promotion = plan
            .promotes_replica
            .then(|| PromotionFault::new(promoting));
        if has_files {
            // Histories of files have requests of their own.
            (
                plan.severs_connections,
                plan.has_transactions,
                plan.sets_crash_traps,
            ) = (false, false, false);
        }
        let files = has_files.then(|| FilesOracle::new(seed));
        let history = EventLog::new(is_printed);
        let (guests, client_set) = plan
            .has_direct_clients
            .then(|| DirectClientWorkload::new(seed))
            .unzip();
        let every = plan.scrub_every;
        let pools = plan.pools();
        let cluster = Cluster::new(rng.split(), &pools, every, history, client_set);
        if plan.has_direct_clients {
            let weak = Arc::downgrade(&cluster);
            set_yield_fn(Some(Rc::new(move || {
                let cluster = weak.upgrade();
                cluster.is_some_and(|cluster| cluster.continue_any_client())
            })));
        }
        tell!(cluster, "seed {seed}: {plan:?}");
        let manager_host = ManagerHost::new(&cluster, rng.split());
        let name: VolumeName = "volume".parse().expect("a name");
        let request = CreateVolume {
            name: name.clone(),
            size_bytes: plan.volume_bytes,
            layout: plan.kind,
            columns: (plan.columns > 1).then_some(plan.columns),
            copies: (plan.copies > 1).then_some(plan.copies),
            durability: None,
            content: if has_files {
                VolumeContent::Files
            } else {
                VolumeContent::Blocks
            },
            tier: TierPolicy::Auto,
            received: false,
        };
        let manager = manager_host.manager().expect("a running manager");
        let made = manager.create(&request);
        let made = made.unwrap_or_else(|fault| panic!("no volume was made: {fault}"));
        if plan.has_replica {
            let request = AttachReplica {
                asynchronous: true,
                auto_promote: promotion.as_ref().is_some_and(PromotionFault::is_automatic),
                ..AttachReplica::default()
            };
            let added = manager.attach_replica(&name, request);
            added.unwrap_or_else(|fault| panic!("no copy was added: {fault}"));
            manager_host.expect_promotion_later();
        }
        let sectors = made.volume.layout.size_bytes() / crate::checker::SECTOR;
        let mut scenario = Scenario {
            plan,
            rng,
            sever_rng: severing,
            transaction_rng: transacting,
            crash_trap_rng: ambushing,
            slot_flip_rng: flipping,
            unreadable_rng: spoiling,
            disk_rng,
            powerless_hosts: BTreeMap::new(),
            epoch_at_power_loss: None,
            had_current_copy: true,
            frames_withheld: 0,
            is_severing: false,
            cluster,
            manager_host,
            name,
            checker: HistoryChecker::default(),
            clients: Vec::new(),
            next_client: 0,
            next_thread: 0,
            next_value: 0,
            sectors,
            layout: made.volume.layout,
            next_heartbeat: HEARTBEAT,
            idle_steps: 0,
            reread_parts: BTreeSet::new(),
            takeover: None,
            hot_page: None,
            crash_trap: None,
            promotion,
            files,
            snapshots: (used == VolumeUse::Snapshots)
                .then(|| SnapshotOracle::new(SplitMix64::new(seed ^ SNAPSHOT_SEED))),
            direct_clients: guests,
            unreachable_bricks: vec![],
            is_fault_free: false,
            is_rewritten: false,
            report: HistoryReport::default(),
        };
        scenario.start_client();
        scenario
    }

    /// Another client begins to attach.
    pub(crate) fn start_client(&mut self) {
        self.start_client_with(false);
    }

    /// Another client begins to attach, the first one or after a failed attach.
    pub(crate) fn start_client_with(&mut self, found_no_copy: bool) {
        self.next_client += 1;
        self.partition_next_client();
        let client = VolumeClient::new(
            &self.cluster,
            &self.manager_host,
            self.next_client,
            &self.name,
            self.next_value + 1,
            self.rng.split(),
            found_no_copy,
        );
        self.clients.push(client);
    }

    fn host_count(&self) -> usize {
        self.plan.pool_bytes.len()
    }

    /// Runs a random event; true if it did something.
    pub(crate) fn step(&mut self) -> Result<bool, String> {
        self.record_power_losses();
        if self.step_random_disk() {
            self.idle_steps = 0;
            return Ok(true);
        }
        let at = self.rng.below(self.clients.len().max(1) as u64) as usize;
        let acted = match self.rng.below(100) {
            0..=34 => self.serve_random_connection(),
            35..=59 => self.run_client_turn(at)?,
            60..=71 => self.run_client_call(at),
            72..=79 => {
                let by = self.rng.micros_below(200);
                self.advance_time(by);
                false
            }
            _ => {
                let host = self.rng.below(self.host_count() as u64) as usize;
                self.cluster.run_maintenance(host)
            }
        };
        self.idle_steps = if acted { 0 } else { self.idle_steps + 1 };
        if self.idle_steps > IDLE_STEPS_MAX {
            self.idle_steps = 0;
            if !self.run_due_event()? {
                self.jump_to_next_event();
            }
        }
        Ok(acted)
    }

    /// Runs a due event that the random choice missed.
    fn run_due_event(&mut self) -> Result<bool, String> {
        let clients = self.clients.len();
        if self.step_disks() {
            return Ok(true);
        }
        if self.serve_random_connection() || (0..clients).any(|at| self.run_client_call(at)) {
            return Ok(true);
        }
        for at in 0..clients {
            if self.run_client_turn(at)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn run_client_call(&mut self, at: usize) -> bool {
        let client = self.clients.get_mut(at);
        client.is_some_and(|client| !client.is_stopped() && client.run_due_call())
    }

    fn serve_random_connection(&mut self) -> bool {
        let connections = self.cluster.net().connections_with_arrivals();
        let Some(connection) = self.rng.pick(&connections) else {
            return false;
        };
        let is_slow = {
            let net = self.cluster.net();
            net.connection(connection)
                .is_some_and(|line| net.is_slow(line.host))
        };
        (!is_slow || self.rng.one_in(SLOW_SERVE_ODDS)) && self.cluster.serve(connection)
    }

    /// A client's turn: volume controller and channels.
    fn run_client_turn(&mut self, at: usize) -> Result<bool, String> {
        let Some(client) = self.clients.get_mut(at) else {
            return Ok(false);
        };
        if client.is_stopped() {
            return Ok(false);
        }
        let number = client.number;
        match client.run_turn() {
            Some(Ok(())) => {
                tell!(self.cluster, "client {number} has attached");
                let (attachment, is_whole) = self.clients[at].attachment_state();
                self.check_promotion(attachment);
                self.checker.record_attach(attachment, !is_whole);
                if let Some(every) = self.plan.scrub_every {
                    self.clients[at].plan_scrubs(every);
                }
                if self.plan.has_files {
                    return self.start_program(at).map(|()| true);
                }
                let channels = 1 + self.rng.below(self.plan.channels_max);
                for _ in 0..channels {
                    self.next_thread += 1;
                    self.clients[at].open_thread(self.next_thread);
                }
                self.read_unanswered_transactions(at);
                return Ok(true);
            }
            Some(Err(cause)) => {
                tell!(self.cluster, "client {number} fails to attach: {cause}");
                self.crash_client(at);
                if self.clients.is_empty() {
                    let is_unreachable = matches!(cause, AttachError::Unreachable { .. });
                    self.start_client_with(is_unreachable && self.plan.promotes_replica);
                }
                return Ok(true);
            }
            None => {}
        }
        let client = &self.clients[at];
        if self.checker.is_partial(client.attachment) && client.is_healthy() {
            self.checker.record_all_legs_reached();
        }
        Ok(self.step_program(at)? | self.reap_completions(at)?)
    }

    /// Ends a client as a crash would.
    pub(crate) fn crash_client(&mut self, at: usize) {
        if self.plan.has_files {
            self.end_program(at);
        }
        let client = self.clients.remove(at);
        tell!(self.cluster, "client {} is gone", client.number);
        self.add_client_counts(&client);
    }

    /// A newly attached client reads the ranges of other clients' unanswered transactions.
    fn read_unanswered_transactions(&mut self, at: usize) {
        if self.clients[at].threads.is_empty() {
            return;
        }
        let parts = self
            .checker
            .unanswered_transactions_before(self.clients[at].attachment);
        for (number, sectors) in parts {
            if self.reread_parts.insert((number, sectors.start)) {
                self.read(at, 0, sectors);
            }
        }
    }

    /// Adds the counts of a client that ends.
    pub(crate) fn add_client_counts(&mut self, client: &VolumeClient) {
        let Some(status) = client.driven.status() else {
            return;
        };
        self.report.pages_repaired += status.counters.pages_repaired;
        self.report
            .count("reads hedged", status.counters.reads_hedged);
        self.report.count(
            "transaction recovered as a whole",
            client.oracle.transactions_recovered(),
        );
        let scrub = &status.scrub;
        self.report.count("volume scrubbed", scrub.passes);
        let found = scrub.last.iter().chain(&scrub.pass);
        let repaired = found.map(|pass| pass.found.pages_repaired).sum();
        self.report.count("page repaired by a scrub", repaired);
    }

    pub(crate) fn advance_time(&mut self, by: Duration) {
        self.cluster.net().now += by;
        self.cluster.set_disk_time();
        let now = self.cluster.now();
        if now >= self.next_heartbeat {
            self.next_heartbeat = now + HEARTBEAT;
            for host in 0..self.host_count() {
                self.manager_host.send_heartbeat(host);
            }
            if let Some(manager) = self.manager_host.manager() {
                manager.sweep();
            }
        }
    }

    /// Moves time to the next event.
    fn jump_to_next_event(&mut self) {
        let now = self.cluster.now();
        let clients = self.clients.iter().filter_map(VolumeClient::next_due);
        let arrival = self.cluster.net().next_arrival();
        let next = clients.chain(arrival).chain([self.next_heartbeat]);
        let next = next.chain(self.cluster.next_disk_due());
        let next = next.filter(|at| *at > now).min();
        let by = next.map_or(Duration::from_millis(1), |at| at - now);
        let most = match self.cluster.net().has_slow_arrivals() {
            true => SLOW_JUMP_MAX,
            false => JUMP_MAX,
        };
        self.advance_time(by.min(most));
    }

    fn run(&mut self) -> Result<(), String> {
        let steps = if self.plan.has_files {
            STEPS_WITH_FILES
        } else {
            STEPS
        };
        for _ in 0..steps {
            self.step_takeover();
            self.sever_connection();
            self.step_crash_trap();
            self.step_promotion()?;
            self.step_direct_clients()?;
            self.step_snapshots()?;
            if self.rng.one_in(self.plan.fault_odds) {
                self.inject_fault();
            } else if self.rng.one_in(4) {
                self.submit()?;
            } else {
                self.step()?;
            }
        }
        self.final_check()
    }
}
