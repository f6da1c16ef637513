//! The bricks, and the network between them and their peers.
//!
//! Locks are held briefly and never while production code runs: that code sends and receives, and
//! takes the locks itself.

use crate::brick_host::{BrickHost, CrashKind, PoolKind, RunningBrick, catch_crash};
use crate::direct_clients::DirectClientSet;
use crate::event_log::EventLog;
use crate::network::{ConnectionId, Direction, Network, Peer};
use crate::rng::SimRng;
use crate::sim_wire::{BrickEnd, PeerEnd};
use pagemesh_base::layout::BrickId;
use pagemesh_base::poison::lock;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::SliceError;
use pagemesh_fabric::brick_client::BrickClient;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::serve::{ConnectionError, Exchange};
use std::collections::BTreeMap;
use std::fmt::Arguments;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Maximum of a brick's turns until a blocking call has its answer.
const BLOCKING_CALL_TURNS_MAX: u32 = 64;

pub(crate) struct Cluster {
    net: Mutex<Network>,
    hosts: Mutex<Vec<BrickHost>>,
    exchanges: Mutex<BTreeMap<ConnectionId, Exchange>>,
    event_log: Mutex<EventLog>,
    /// Hosts with a disk that have lost their power.
    pub(crate) power_losses: Mutex<Vec<usize>>,
    rng: Mutex<SplitMix64>,
    scrub_every: Option<Duration>,
    pub(crate) direct_clients: Mutex<DirectClientSet>,
    /// Whether direct clients map the bricks' pools.
    pub(crate) has_direct_clients: bool,
    /// The origin of the fake clock; only differences matter.
    started_at: Instant,
}

/// Appends a line to the event log.
macro_rules! tell {
    ($cluster:expr, $($what:tt)*) => { $cluster.tell(format_args!($($what)*)) };
}
pub(crate) use tell;

impl Cluster {
    pub(crate) fn new(
        mut rng: SplitMix64,
        pools: &[(usize, PoolKind)],
        scrub_every: Option<Duration>,
        history: EventLog,
        client_set: Option<DirectClientSet>,
    ) -> Arc<Cluster> {
        let hosts = pools.iter().enumerate();
        let mut disk_rng = rng.derive();
        let hosts = hosts
            .map(|(number, &(bytes, kind))| BrickHost::new(number, bytes, kind, disk_rng.split()));
        let hosts = hosts.collect();
        let cluster = Arc::new(Cluster {
            net: Mutex::new(Network::new(rng.split(), pools.len())),
            hosts: Mutex::new(hosts),
            exchanges: Mutex::default(),
            event_log: Mutex::new(history),
            power_losses: Mutex::default(),
            rng: Mutex::new(rng),
            scrub_every,
            has_direct_clients: client_set.is_some(),
            direct_clients: Mutex::new(client_set.unwrap_or_else(|| DirectClientSet::new(0))),
            started_at: Instant::now(),
        });
        (0..pools.len()).for_each(|host| cluster.plan_scrubs(host));
        cluster
    }

    fn plan_scrubs(&self, host: usize) {
        if let (Some(every), Some(running)) = (self.scrub_every, self.running_brick(host)) {
            running.brick.plan_scrubs(Some(every), self.instant());
        }
    }

    /// Completed pool scrubs of the running bricks, and the corrections that they made.
    pub(crate) fn scrub_counts(&self) -> (u64, u64) {
        let now = self.instant();
        let hosts = self.hosts();
        let running = hosts.iter().filter_map(|host| host.running.as_ref());
        let scrubs = running.map(|running| running.brick.scrub_status(now));
        scrubs.fold((0, 0), |(passes, mended), scrubs| {
            (passes + scrubs.passes, mended + scrubs.corrected)
        })
    }

    pub(crate) fn net(&self) -> MutexGuard<'_, Network> {
        lock(&self.net)
    }

    pub(crate) fn hosts(&self) -> MutexGuard<'_, Vec<BrickHost>> {
        lock(&self.hosts)
    }

    pub(crate) fn now(&self) -> Duration {
        self.net().now
    }

    pub(crate) fn instant(&self) -> Instant {
        self.started_at + self.now()
    }

    pub(crate) fn tell(&self, what: Arguments<'_>) {
        let now = self.now();
        lock(&self.event_log).record(now, what);
    }

    pub(crate) fn digest(&self) -> u64 {
        lock(&self.event_log).digest()
    }

    pub(crate) fn running_brick(&self, host: usize) -> Option<Arc<RunningBrick>> {
        self.hosts()[host].running.clone()
    }

    pub(crate) fn is_up(&self, host: usize) -> bool {
        self.hosts()[host].running.is_some()
    }

    pub(crate) fn host_of(&self, brick: BrickId) -> Option<usize> {
        self.hosts().iter().position(|host| host.id == brick)
    }

    /// A connection for blocking calls to the brick at this address.
    pub(crate) fn connect(
        self: &Arc<Cluster>,
        peer: Peer,
        address: &str,
        timeouts: Timeouts,
    ) -> Result<(BrickClient<PeerEnd>, ConnectionId), SliceError> {
        let lost = |why: &str| SliceError::Lost(format!("the brick at {address}: {why}"));
        let found = {
            let hosts = self.hosts();
            let at = hosts.iter().position(|host| host.address() == address);
            let at = at.filter(|at| hosts[*at].running.is_some());
            at.map(|at| (at, hosts[at].id))
        };
        let (host, id) = found.ok_or_else(|| lost("cannot be reached"))?;
        let connection = {
            let mut net = self.net();
            if net.is_partitioned(peer, host) {
                return Err(lost("no answer"));
            }
            net.open(peer, host)
        };
        lock(&self.exchanges).insert(connection, Exchange::default());
        let wire = PeerEnd::new(Arc::clone(self), connection);
        Ok((BrickClient::new(wire, id, timeouts.call), connection))
    }

    /// Lets a brick answer a blocking call; false if it does not.
    pub(crate) fn serve_blocking_call(&self, connection: ConnectionId) -> bool {
        for _ in 0..BLOCKING_CALL_TURNS_MAX {
            if self.net().deliver(connection, Direction::ToPeer) {
                return true;
            }
            if !self.serve(connection) {
                break;
            }
        }
        self.net().deliver(connection, Direction::ToPeer)
    }

    /// A brick's turn with one connection: one message. False if no message or no brick is there.
    pub(crate) fn serve(&self, connection: ConnectionId) -> bool {
        let host = match self.net().connection(connection) {
            Some(found) => found.host,
            None => return false,
        };
        let Some(running) = self.running_brick(host) else {
            return false;
        };
        if !self.net().deliver(connection, Direction::ToBrick) {
            return false;
        }
        self.serve_with(host, connection, |exchange, wire| {
            running.serve_turn(exchange, wire)
        })
    }

    /// A brick's turn with one connection. False: there is none.
    pub(crate) fn serve_with(
        &self,
        host: usize,
        connection: ConnectionId,
        serve: impl FnOnce(&mut Exchange, &BrickEnd<'_>) -> Result<bool, ConnectionError>,
    ) -> bool {
        let Some(mut exchange) = lock(&self.exchanges).remove(&connection) else {
            return false;
        };
        let wire = BrickEnd {
            cluster: self,
            connection,
        };
        self.begin_brick_work(host);
        let served = catch_crash(|| serve(&mut exchange, &wire));
        self.end_brick_work();
        match served {
            Ok(Ok(true)) => {
                lock(&self.exchanges).insert(connection, exchange);
            }
            Ok(ended) => {
                if let Err(broken) = ended {
                    tell!(self, "brick {host} ends connection {connection}: {broken}");
                }
                self.end_session(host, connection, exchange);
            }
            Err(_) => {
                self.crash_brick(host);
                drop(exchange);
            }
        }
        true
    }

    fn end_session(&self, host: usize, connection: ConnectionId, exchange: Exchange) {
        self.net().close_brick_end(connection);
        self.begin_brick_work(host);
        let dropped = catch_crash(|| drop(exchange));
        self.end_brick_work();
        if dropped.is_err() {
            self.crash_brick(host);
        }
    }

    /// Breaks a connection: both ends see it.
    pub(crate) fn hang_up(&self, connection: ConnectionId) {
        let host = self.net().connection(connection).map(|line| line.host);
        let exchange = lock(&self.exchanges).remove(&connection);
        if let (Some(host), Some(exchange)) = (host, exchange) {
            self.end_session(host, connection, exchange);
        }
    }

    /// A round of the maintenance loop, if the doorbell was rung.
    pub(crate) fn run_maintenance(&self, host: usize) -> bool {
        let Some(running) = self.running_brick(host) else {
            return false;
        };
        if self.scrub_every.is_some() {
            let now = self.instant();
            if catch_crash(|| running.brick.scrub_if_due(now)).is_err() {
                self.crash_brick(host);
                return true;
            }
        }
        let rung = running.brick.mapping().control().doorbell_count();
        if self.hosts()[host].doorbell_count == rung {
            return false;
        }
        self.hosts()[host].doorbell_count = rung;
        self.begin_brick_work(host);
        let tended = catch_crash(|| running.brick.maintain());
        self.end_brick_work();
        match tended {
            // There is more to do.
            Ok(true) => self.hosts()[host].doorbell_count = rung.wrapping_sub(1),
            Ok(false) => {}
            Err(_) => self.crash_brick(host),
        }
        assert!(
            !running.brick.has_failed() || running.disk_failure().is_some(),
            "the pool of brick {host} failed"
        );
        self.end_failed_brick(host);
        true
    }

    /// The connections that a brick serves, and those that are gone.
    pub(crate) fn connections_of(&self, host: usize) -> Vec<ConnectionId> {
        let net = self.net();
        let exchanges = lock(&self.exchanges);
        let is_its = |id: &ConnectionId| net.connection(*id).is_none_or(|it| it.host == host);
        exchanges.keys().copied().filter(is_its).collect()
    }

    pub(crate) fn crash_brick(&self, host: usize) {
        let doom = self.hosts()[host].crash_kind;
        self.kill_brick(host, doom);
    }

    /// Kills a brick at once.
    pub(crate) fn kill_brick(&self, host: usize, death: CrashKind) {
        if death == CrashKind::Power && self.hosts()[host].device.is_some() {
            lock(&self.power_losses).push(host);
        }
        let seed = lock(&self.rng).next_u64();
        let Some(running) = self.hosts()[host].stop(death, seed) else {
            if death == CrashKind::Power {
                self.hosts()[host].lose_power(seed);
            }
            return;
        };
        tell!(self, "brick {host} dies: {death:?}");
        if self.has_direct_clients {
            running.brick.mapping().mark_owner_gone();
        }
        let connections = self.connections_of(host);
        self.net().drop_brick(host, death == CrashKind::Power);
        let dead: Vec<Exchange> = {
            let mut exchanges = lock(&self.exchanges);
            connections
                .iter()
                .filter_map(|connection| exchanges.remove(connection))
                .collect()
        };
        drop(dead);
        drop(running);
    }

    /// Starts a stopped brick; with a fuse it may die during its recovery.
    pub(crate) fn start_brick(&self, host: usize, fuse: Option<u32>, has_new_port: bool) {
        if self.is_up(host) {
            return;
        }
        self.end_clients_mapping(host);
        let started = {
            let mut hosts = self.hosts();
            hosts[host].port += u32::from(has_new_port);
            hosts[host].start(fuse)
        };
        let (death, has_disk) = {
            let hosts = self.hosts();
            (hosts[host].crash_kind, hosts[host].device.is_some())
        };
        if !started && death == CrashKind::Power && has_disk {
            lock(&self.power_losses).push(host);
        }
        self.net().restore_brick(host);
        self.plan_scrubs(host);
        match started {
            true => tell!(self, "brick {host} starts"),
            false => tell!(self, "brick {host} dies during its recovery: {death:?}"),
        }
    }
}
