//! Random faults: processes are killed, stopped and cut off, several at once, again and again,
//! under a checked load. A seed decides the order.
//!
//! PAGEMESH_STORM_ROUNDS sets the number of rounds, PAGEMESH_STORM_SEED the order.

use crate::faults::load::{LoadPlan, RequestMix, RunningLoad};
use crate::faults::nbd::{Command, EIO, NbdConnection};
use crate::faults::oracle::BLOCK;
use crate::faults::rig::{VOLUME, VolumeRig};
use crate::support::net::Host;
use crate::support::{Cluster, Export, PAGEMESH, Pools, program, until};
use pagemesh_base::rng::SplitMix64;
use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Rounds of a test. Each has two faults at least, so that every kind occurs in this many.
const ROUNDS: u64 = 10;
/// Blocks that a superseded client is asked to write.
const LATE_BLOCKS: u64 = 16;

fn env_number(name: &str, otherwise: u64) -> u64 {
    let found = std::env::var(name);
    found.map_or(otherwise, |text| text.parse().expect("a number"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum HostRole {
    Client,
    Brick,
    Manager,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FaultKind {
    KillBrick,
    KillBricks,
    KillManager,
    KillClient,
    StopBrick,
    StopManager,
    StopClient,
    /// Another client attaches while the working one is stopped, unplugged or healthy.
    Supersede,
    /// Packets from the first to the second are lost.
    Lose(HostRole, HostRole),
    /// Packets are lost in both directions.
    Cut(HostRole, HostRole),
    /// The machine's link is down.
    Unplug(HostRole),
    /// Random directions between all machines are lost.
    RandomLoss,
}

use FaultKind::*;
use HostRole::*;

/// Faults that need no network.
const PROCESS_FAULTS: [FaultKind; 8] = [
    KillBrick,
    KillBricks,
    KillManager,
    KillClient,
    StopBrick,
    StopManager,
    StopClient,
    Supersede,
];
const NETWORK_FAULTS: [FaultKind; 13] = [
    Lose(Client, Brick),
    Lose(Brick, Client),
    Lose(Client, Manager),
    Lose(Manager, Client),
    Lose(Brick, Manager),
    Lose(Manager, Brick),
    Cut(Client, Brick),
    Cut(Client, Manager),
    Cut(Brick, Manager),
    Unplug(Client),
    Unplug(Brick),
    Unplug(Manager),
    RandomLoss,
];

/// The faults in effect.
#[derive(Default)]
struct ActiveFaults {
    dead: Vec<Host>,
    stopped: Vec<Host>,
    lost_links: Vec<(Host, Host)>,
    unplugged: Vec<Host>,
}

impl ActiveFaults {
    fn is_running(&self, host: Host) -> bool {
        !self.dead.contains(&host) && !self.stopped.contains(&host)
    }

    /// Clears the faults that can be cleared while other threads work.
    fn clear_live_faults(&self, cluster: &Cluster) {
        for &(from, to) in &self.lost_links {
            cluster.net().restore_packets(from, to);
        }
        self.unplugged
            .iter()
            .for_each(|&host| cluster.net().plug(host));
        for &host in &self.stopped {
            match host {
                Host::Brick(brick) => cluster.brick(brick).signal("CONT"),
                Host::Manager => cluster.manager().signal("CONT"),
                Host::Client(_) | Host::Hub => {}
            }
        }
    }
}

struct FaultStorm {
    rig: VolumeRig,
    load: Option<RunningLoad>,
    /// A connection that sends no request until its client is superseded.
    late: Option<NbdConnection>,
    rng: SplitMix64,
    bricks: usize,
    /// Whether each process has a machine of its own.
    has_net: bool,
    /// Whether a flush reports lost writes after the death of all bricks.
    has_write_cache: bool,
    /// The machine of the client, and its transport to bricks.
    client: usize,
    transport: &'static str,
    active: ActiveFaults,
    /// Kinds that must occur before any kind repeats.
    pending_faults: Vec<FaultKind>,
    counts: BTreeMap<String, u64>,
}

impl FaultStorm {
    fn new(
        rig: VolumeRig,
        bricks: usize,
        seed: u64,
        (has_net, buffers): (bool, bool),
    ) -> FaultStorm {
        let mut storm = FaultStorm {
            rig,
            load: None,
            late: None,
            rng: SplitMix64::new(seed),
            bricks,
            has_net,
            has_write_cache: buffers,
            client: 0,
            transport: "tcp",
            active: ActiveFaults::default(),
            pending_faults: vec![],
            counts: BTreeMap::new(),
        };
        storm.serve();
        storm.start_load();
        storm
    }

    fn kinds(&self) -> Vec<FaultKind> {
        let networks = match self.has_net {
            true => &NETWORK_FAULTS[..],
            false => &[],
        };
        [&PROCESS_FAULTS, networks].concat()
    }

    fn count(&mut self, what: String) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn below(&mut self, end: usize) -> usize {
        self.rng.below(end as u64) as usize
    }

    /// Half of the pauses are shorter than the time-out of a leg, half longer.
    fn draw_pause(&mut self) -> Duration {
        Duration::from_millis(match self.rng.below(2) {
            0 => 20 + self.rng.below(400),
            _ => 2200 + self.rng.below(1200),
        })
    }

    fn draw_transport(&mut self) {
        // A pool on a disk is never mapped.
        let mapped = if self.has_write_cache { "tcp" } else { "map" };
        self.transport = ["tcp", mapped, "tcp"][self.below(3)];
    }

    fn serve(&mut self) {
        self.draw_transport();
        self.rig.serve_from(self.client, self.transport);
    }

    fn start_load(&mut self) {
        let late = NbdConnection::connect(&self.rig.socket(), VOLUME, true);
        self.late = Some(late.expect("clients are taken"));
        self.load = Some(self.rig.load(&LoadPlan {
            connections: 3,
            readers: 1,
            mix: RequestMix {
                reads: 20,
                trims: 6,
                zeroes: 4,
                fua: 4,
            },
            flush_every: Some(64),
            rate: Some(1500),
            ..LoadPlan::default()
        }));
    }

    fn load(&self) -> &RunningLoad {
        self.load.as_ref().expect("the load runs")
    }

    /// Ends the load, and asserts that no request failed.
    fn finish_load(&mut self) -> usize {
        let report = self.load.take().expect("the load runs").finish();
        match self.has_write_cache {
            true => report.assert_only_errors(EIO, "Flush"),
            false => assert!(report.failures.is_empty(), "{:#?}", report.failures),
        }
        report.broken
    }

    fn host(&mut self, role: HostRole) -> Host {
        match role {
            Client => Host::Client(self.client),
            Brick => Host::Brick(self.below(self.bricks)),
            Manager => Host::Manager,
        }
    }

    /// Injects this many faults.
    fn inject_faults(&mut self, faults: u64) -> Option<FaultKind> {
        let (mut later, mut takeover, mut left) = (vec![], None, faults);
        while left > 0 {
            if self.pending_faults.is_empty() {
                self.pending_faults = self.kinds();
                for at in (1..self.pending_faults.len()).rev() {
                    let other = self.below(at + 1);
                    self.pending_faults.swap(at, other);
                }
            }
            let Some(fault) = self.pending_faults.pop() else {
                continue;
            };
            let is_takeover = matches!(fault, KillClient | Supersede);
            if is_takeover && takeover.is_none() {
                takeover = Some(fault);
            } else if is_takeover || !self.inject(fault) {
                later.push(fault);
                continue;
            }
            print!(" {fault:?}");
            self.count(format!("{fault:?}"));
            left -= 1;
        }
        self.pending_faults.extend(later);
        takeover
    }

    /// Injects a fault. Returns whether it was possible in the current state.
    fn inject(&mut self, fault: FaultKind) -> bool {
        let brick = self.below(self.bricks);
        match fault {
            KillBrick => self.kill(Host::Brick(brick)),
            KillBricks => {
                let bricks = (0..self.bricks).map(Host::Brick);
                bricks.filter(|&brick| self.kill(brick)).count() > 0
            }
            KillManager => self.kill(Host::Manager),
            StopBrick => self.stop(Host::Brick(brick)),
            StopManager => self.stop(Host::Manager),
            StopClient => self.stop(Host::Client(self.client)),
            Lose(from, to) => {
                let (from, to) = (self.host(from), self.host(to));
                self.lose(from, to)
            }
            Cut(one, other) => {
                let (one, other) = (self.host(one), self.host(other));
                self.lose(one, other) | self.lose(other, one)
            }
            Unplug(role) => {
                let host = self.host(role);
                self.rig.cluster.net().unplug(host);
                self.active.unplugged.push(host);
                true
            }
            RandomLoss => {
                let (client, manager) = (Host::Client(self.client), Host::Manager);
                let bricks = (0..self.bricks).map(Host::Brick);
                let mut pairs = vec![(client, manager)];
                pairs.extend(bricks.flat_map(|brick| [(client, brick), (manager, brick)]));
                let mut any = false;
                for (one, other) in pairs {
                    any |= self.rng.below(3) == 0 && self.lose(one, other);
                    any |= self.rng.below(3) == 0 && self.lose(other, one);
                }
                any
            }
            KillClient | Supersede => false,
        }
    }

    fn kill(&mut self, host: Host) -> bool {
        if self.active.dead.contains(&host) {
            return false;
        }
        match host {
            Host::Brick(brick) => self.rig.cluster.kill_brick(brick),
            _ => self.rig.cluster.kill_manager(),
        }
        self.active.stopped.retain(|stopped| *stopped != host);
        self.active.dead.push(host);
        true
    }

    fn stop(&mut self, host: Host) -> bool {
        if !self.active.is_running(host) {
            return false;
        }
        match host {
            Host::Brick(brick) => self.rig.cluster.brick(brick).signal("STOP"),
            Host::Manager => self.rig.cluster.manager().signal("STOP"),
            _ => self.rig.export().daemon.signal("STOP"),
        }
        self.active.stopped.push(host);
        true
    }

    fn lose(&mut self, from: Host, to: Host) -> bool {
        // A client that maps pools does not reach their bricks through the network.
        let is_mapped = self.transport == "map"
            && matches!(
                (from, to),
                (Host::Client(_), Host::Brick(_)) | (Host::Brick(_), Host::Client(_))
            );
        let is_new = !is_mapped && !self.active.lost_links.contains(&(from, to));
        if is_new {
            self.rig.cluster.net().drop_packets(from, to);
            self.active.lost_links.push((from, to));
        }
        is_new
    }

    /// Restarts the dead processes.
    fn restart_dead(&mut self) {
        for host in std::mem::take(&mut self.active.dead) {
            match host {
                Host::Brick(brick) => self.rig.cluster.restart_brick(brick),
                _ => self.rig.cluster.start_manager(),
            }
        }
    }

    /// Clears all faults; the client continues as well.
    fn clear_faults(&mut self) {
        // Dead processes restart before the links are restored, or after.
        if self.rng.below(2) == 0 {
            self.restart_dead();
        }
        if !self.active.is_running(Host::Client(self.client)) {
            // Fails only if a brick had to kill the client.
            let pid = self.rig.export().daemon.pid().to_string();
            let _ = program::run("kill", &["-s", "CONT", &pid]);
        }
        self.active.clear_live_faults(&self.rig.cluster);
        self.restart_dead();
        self.active = ActiveFaults::default();
    }

    /// Exports the volume from a machine while faults last, and clears them meanwhile. The export
    /// either works or is refused with an error.
    fn attach(&mut self, client: usize) -> Export {
        // The manager and all bricks but one must run to answer.
        if self.active.dead.len() > 1 || self.active.dead.contains(&Host::Manager) {
            self.restart_dead();
        }
        self.draw_transport();
        let (pause, transport) = (self.draw_pause(), self.transport);
        let (cluster, wrong) = (&self.rig.cluster, &self.active);
        let tried = std::thread::scope(|scope| {
            scope.spawn(move || {
                sleep(pause);
                wrong.clear_live_faults(cluster);
            });
            cluster.try_export_from(client, &[VOLUME], transport)
        });
        self.restart_dead();
        self.active = ActiveFaults::default();
        tried.unwrap_or_else(|refused| {
            program::refused("export", &refused, &[]);
            self.count("attach refused".into());
            self.rig.cluster.await_bricks(self.bricks);
            // The manager may name addresses that bricks had before they died.
            let (cluster, mut export) = (&self.rig.cluster, None);
            until("the volume is attached", || {
                export = cluster.try_export_from(client, &[VOLUME], transport).ok();
                export.is_some()
            });
            export.expect("until it is there")
        })
    }

    /// The client dies, and the next one attaches on this machine or another.
    fn replace_client(&mut self) {
        self.rig.take_export().kill();
        self.finish_load();
        self.active
            .stopped
            .retain(|host| !matches!(host, Host::Client(_)));
        let next = self.below(2);
        let export = self.attach(next);
        self.client = next;
        self.rig.set_export(export);
        self.rig.verify();
        self.start_load();
    }

    /// Another client attaches, and the previous one may be in any state. Later writes of the
    /// previous client reach no leg.
    fn supersede_client(&mut self) {
        let before = Host::Client(self.client);
        let mut late = self.late.take().expect("it is connected");
        let load = self.load.take().expect("the load runs");
        load.ask_to_stop();
        let mut old = self.rig.take_export();
        let is_stopped = self.active.stopped.contains(&before);
        let mut is_unplugged = self.active.unplugged.contains(&before);
        self.active.stopped.retain(|host| *host != before);
        self.active.unplugged.retain(|host| *host != before);
        if !is_stopped && !is_unplugged && self.has_net && self.rng.below(2) == 0 {
            self.rig.cluster.net().unplug(before);
            is_unplugged = true;
        }
        let next = 1 - self.client;
        let export = self.attach(next);
        self.client = next;
        self.rig.set_export(export);
        self.rig.verify();
        let data = [0xee; BLOCK];
        let blocks = 0..LATE_BLOCKS;
        let sent = blocks.clone().try_for_each(|block| {
            let at = block * BLOCK as u64;
            late.send(block, (Command::Write, 0), at, BLOCK as u32, &data)
        });
        if is_unplugged {
            self.rig.cluster.net().plug(before);
        }
        // A brick may have had to kill the client.
        let is_killed = is_stopped && !old.daemon.is_running();
        if is_killed {
            self.count("a stopped client was ended".into());
        } else {
            if is_stopped {
                old.daemon.signal("CONT");
            }
            old.await_fenced();
            for _ in blocks.filter(|_| sent.is_ok()) {
                // The connection ends after the first error.
                let Ok(reply) = late.reply() else { break };
                assert_ne!(reply.errno, 0, "a fenced client wrote {}", reply.cookie);
            }
        }
        let report = load.finish();
        let lost = report.failures.iter().find(|what| what.contains("lost"));
        assert_eq!(lost, None);
        old.kill();
        self.rig.verify();
        self.start_load();
    }

    /// Counts the state of the volume during the faults, if the client can be asked.
    fn count_state(&mut self) {
        if self.active.is_running(Host::Client(self.client)) {
            let status = self.rig.export().status();
            let state = status["state"].as_str().expect("a state").to_owned();
            self.count(format!("was {state}"));
        }
    }

    /// Replaces the client if a brick that needed its pool killed the stalled client.
    fn replace_if_ended(&mut self, was_stopped: bool) {
        let mut export = self.rig.take_export();
        if export.daemon.is_running() {
            self.rig.set_export(export);
            return;
        }
        assert!(
            was_stopped && self.transport == "map",
            "the client ended: {}",
            export.daemon.log()
        );
        self.count("a stopped client was ended".into());
        self.finish_load();
        self.rig.cluster.await_bricks(self.bricks);
        self.serve();
        self.rig.verify();
        self.start_load();
    }

    fn round(&mut self, round: u64) -> Duration {
        let more = 1 + self.rng.below(400);
        self.load().await_answers(more);
        let faults = 2 + self.rng.below(3);
        print!("round {round}, {}:", self.transport);
        let takeover = self.inject_faults(faults);
        sleep(self.draw_pause());
        self.count_state();
        let healed = Instant::now();
        match takeover {
            Some(KillClient) => self.replace_client(),
            Some(_) => self.supersede_client(),
            None => {
                let was_stopped = !self.active.is_running(Host::Client(self.client));
                self.clear_faults();
                self.replace_if_ended(was_stopped);
            }
        }
        self.rig.export().await_state("healthy");
        self.load().await_answers(100);
        let took = healed.elapsed();
        println!("; well after {took:?}");
        if round % 3 == 2 {
            assert_eq!(self.finish_load(), 0, "connections broke");
            self.rig.verify();
            if round % 9 == 8 {
                self.rig.end_and_check();
                self.serve();
            }
            self.start_load();
        }
        took
    }
}

/// In the end every acknowledged block is right, the legs are identical, each leg holds all data by
/// itself, and no pool is damaged.
fn run_storm(rig: VolumeRig, bricks: usize, seed: u64, traits: (bool, bool)) {
    let rounds = env_number("PAGEMESH_STORM_ROUNDS", ROUNDS);
    let mut storm = FaultStorm::new(rig, bricks, seed, traits);
    let mut longest = Duration::ZERO;
    for round in 0..rounds {
        longest = longest.max(storm.round(round));
    }
    assert_eq!(storm.finish_load(), 0, "connections broke");
    println!(
        "{rounds} rounds, {:?} at most until all was well again: {:#?}",
        longest, storm.counts
    );
    for kind in storm.kinds() {
        let seen = storm.counts.get(&format!("{kind:?}"));
        assert!(rounds < ROUNDS || seen.is_some(), "never: {kind:?}");
    }
    let mut states = storm.counts.keys().filter(|what| what.starts_with("was "));
    let is_noticed = states.any(|state| state != "was healthy");
    assert!(rounds < ROUNDS || is_noticed, "no fault was noticed");
    let mut rig = storm.rig;
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(bricks, "auto");
    rig.take_export().stop();
    for brick in 0..bricks {
        rig.cluster.kill_brick(brick);
        let pool = rig.cluster.pool(brick).to_str().expect("a path");
        program::ok(PAGEMESH, &["pool", "check", pool]);
        rig.cluster.restart_brick(brick);
    }
}

fn env_seed(otherwise: u64) -> u64 {
    let seed = env_number("PAGEMESH_STORM_SEED", otherwise);
    println!("PAGEMESH_STORM_SEED={seed}");
    seed
}

#[test]
fn random_kills_keep_mirror_consistent() {
    let seed = env_seed(0x51);
    let rig = VolumeRig::new(Pools::Memory, 2, 32, &[], seed);
    run_storm(rig, 2, seed, (false, false));
}

#[test]
fn random_kills_keep_disk_pools_consistent() {
    let seed = env_seed(0x53);
    let rig = VolumeRig::new(Pools::Disk, 2, 32, &[], seed);
    run_storm(rig, 2, seed, (false, true));
}

#[test]
fn random_kills_and_partitions_keep_three_copies() {
    let seed = env_seed(0x52);
    if let Some(rig) = VolumeRig::on_separate_hosts((3, 2), 32, &["--copies", "3"], seed) {
        run_storm(rig, 3, seed, (true, false));
    }
}
