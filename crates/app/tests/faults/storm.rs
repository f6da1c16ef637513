//! Everything is killed, stopped and cut off, over and over and several things
//! at once, in an order that a seed decides, under a checked load.
//!
//! PAGEMESH_STORM_ROUNDS says how often, PAGEMESH_STORM_SEED in which order.

use crate::load::{Load, Mix, Plan};
use crate::nbd::{Command, EIO, Nbd};
use crate::oracle::{BLOCK, Rng};
use crate::rig::{Rig, VOLUME};
use crate::support::net::Host;
use crate::support::{Cluster, Export, PAGEMESH, Pools, program, until};
use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Rounds of a test; each has two faults at least, so that in this many every
/// kind is seen.
const ROUNDS: u64 = 10;
/// Blocks that a superseded client is told to write.
const LATE_BLOCKS: u64 = 16;

fn number(name: &str, otherwise: u64) -> u64 {
    let found = std::env::var(name);
    found.map_or(otherwise, |text| text.parse().expect("a number"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Client,
    Brick,
    Manager,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    KillBrick,
    KillBricks,
    KillManager,
    KillClient,
    StopBrick,
    StopManager,
    StopClient,
    /// Another client attaches while the one that works is stopped, unplugged
    /// or well.
    Supersede,
    /// What one sends to the other is lost.
    Lose(Role, Role),
    /// Neither hears the other.
    Cut(Role, Role),
    /// Nobody hears it.
    Unplug(Role),
    /// Any of all directions at once.
    Tangle,
}

use Fault::*;
use Role::*;

/// What needs no network.
const OF_PROCESSES: [Fault; 8] = [
    KillBrick,
    KillBricks,
    KillManager,
    KillClient,
    StopBrick,
    StopManager,
    StopClient,
    Supersede,
];
const OF_NETWORKS: [Fault; 13] = [
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
    Tangle,
];

/// What is wrong now.
#[derive(Default)]
struct Wrong {
    dead: Vec<Host>,
    stopped: Vec<Host>,
    lost: Vec<(Host, Host)>,
    unplugged: Vec<Host>,
}

impl Wrong {
    fn is_running(&self, host: Host) -> bool {
        !self.dead.contains(&host) && !self.stopped.contains(&host)
    }

    /// Ends what can be ended beside others that work.
    fn lift(&self, cluster: &Cluster) {
        for &(from, to) in &self.lost {
            cluster.net().deliver(from, to);
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

struct Storm {
    rig: Rig,
    load: Option<Load>,
    /// A connection that asks for nothing until its client is superseded.
    late: Option<Nbd>,
    rng: Rng,
    bricks: usize,
    /// Whether machines are apart.
    has_net: bool,
    /// Whether a flush says that writes may be gone, after all bricks died.
    buffers: bool,
    /// The machine of the client, and how it reaches bricks.
    client: usize,
    transport: &'static str,
    wrong: Wrong,
    /// Kinds that are to come before any comes again.
    deck: Vec<Fault>,
    counts: BTreeMap<String, u64>,
}

impl Storm {
    fn new(rig: Rig, bricks: usize, seed: u64, (has_net, buffers): (bool, bool)) -> Storm {
        let mut storm = Storm {
            rig,
            load: None,
            late: None,
            rng: Rng(seed),
            bricks,
            has_net,
            buffers,
            client: 0,
            transport: "tcp",
            wrong: Wrong::default(),
            deck: vec![],
            counts: BTreeMap::new(),
        };
        storm.serve();
        storm.work();
        storm
    }

    fn kinds(&self) -> Vec<Fault> {
        let networks = match self.has_net {
            true => &OF_NETWORKS[..],
            false => &[],
        };
        [&OF_PROCESSES, networks].concat()
    }

    fn count(&mut self, what: String) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn below(&mut self, end: usize) -> usize {
        self.rng.below(end as u64) as usize
    }

    /// Half of them shorter than what makes a leg count as lost, half longer.
    fn draw_pause(&mut self) -> Duration {
        Duration::from_millis(match self.rng.below(2) {
            0 => 20 + self.rng.below(400),
            _ => 2200 + self.rng.below(1200),
        })
    }

    fn draw_transport(&mut self) {
        // Nobody maps a pool on a disk.
        let mapped = if self.buffers { "tcp" } else { "map" };
        self.transport = ["tcp", mapped, "tcp"][self.below(3)];
    }

    fn serve(&mut self) {
        self.draw_transport();
        self.rig.serve_from(self.client, self.transport);
    }

    fn work(&mut self) {
        let late = Nbd::connect(&self.rig.socket(), VOLUME, true);
        self.late = Some(late.expect("clients are taken"));
        self.load = Some(self.rig.load(&Plan {
            connections: 3,
            readers: 1,
            mix: Mix {
                reads: 20,
                trims: 6,
                zeroes: 4,
                fua: 4,
            },
            flush_every: Some(64),
            rate: Some(1500),
            ..Plan::default()
        }));
    }

    fn load(&self) -> &Load {
        self.load.as_ref().expect("the load runs")
    }

    /// Ends the load, of which nothing may have failed.
    fn rest(&mut self) -> usize {
        let report = self.load.take().expect("the load runs").finish();
        match self.buffers {
            true => report.expect_at_worst(EIO, "Flush"),
            false => assert!(report.failures.is_empty(), "{:#?}", report.failures),
        }
        report.broken
    }

    fn host(&mut self, role: Role) -> Host {
        match role {
            Client => Host::Client(self.client),
            Brick => Host::Brick(self.below(self.bricks)),
            Manager => Host::Manager,
        }
    }

    /// So many faults at once.
    fn strike(&mut self, faults: u64) -> Option<Fault> {
        let (mut later, mut takeover, mut left) = (vec![], None, faults);
        while left > 0 {
            if self.deck.is_empty() {
                self.deck = self.kinds();
                for at in (1..self.deck.len()).rev() {
                    let other = self.below(at + 1);
                    self.deck.swap(at, other);
                }
            }
            let Some(fault) = self.deck.pop() else {
                continue;
            };
            let is_takeover = matches!(fault, KillClient | Supersede);
            if is_takeover && takeover.is_none() {
                takeover = Some(fault);
            } else if is_takeover || !self.inflict(fault) {
                later.push(fault);
                continue;
            }
            print!(" {fault:?}");
            self.count(format!("{fault:?}"));
            left -= 1;
        }
        self.deck.extend(later);
        takeover
    }

    /// Whether it could be done to what goes on still.
    fn inflict(&mut self, fault: Fault) -> bool {
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
                self.wrong.unplugged.push(host);
                true
            }
            Tangle => {
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
        if self.wrong.dead.contains(&host) {
            return false;
        }
        match host {
            Host::Brick(brick) => self.rig.cluster.kill_brick(brick),
            _ => self.rig.cluster.kill_manager(),
        }
        self.wrong.stopped.retain(|stopped| *stopped != host);
        self.wrong.dead.push(host);
        true
    }

    fn stop(&mut self, host: Host) -> bool {
        if !self.wrong.is_running(host) {
            return false;
        }
        match host {
            Host::Brick(brick) => self.rig.cluster.brick(brick).signal("STOP"),
            Host::Manager => self.rig.cluster.manager().signal("STOP"),
            _ => self.rig.export().daemon.signal("STOP"),
        }
        self.wrong.stopped.push(host);
        true
    }

    fn lose(&mut self, from: Host, to: Host) -> bool {
        // Who maps pools does not meet their bricks through the network.
        let is_mapped = self.transport == "map"
            && matches!(
                (from, to),
                (Host::Client(_), Host::Brick(_)) | (Host::Brick(_), Host::Client(_))
            );
        let is_new = !is_mapped && !self.wrong.lost.contains(&(from, to));
        if is_new {
            self.rig.cluster.net().lose(from, to);
            self.wrong.lost.push((from, to));
        }
        is_new
    }

    /// Starts again what died.
    fn revive(&mut self) {
        for host in std::mem::take(&mut self.wrong.dead) {
            match host {
                Host::Brick(brick) => self.rig.cluster.restart_brick(brick),
                _ => self.rig.cluster.start_manager(),
            }
        }
    }

    /// Gives back all that was taken, the client's leave to go on included.
    fn heal(&mut self) {
        // Dead ones come back before the others are heard, or after.
        if self.rng.below(2) == 0 {
            self.revive();
        }
        if !self.wrong.is_running(Host::Client(self.client)) {
            // Fails only if a brick had to end it.
            let pid = self.rig.export().daemon.pid().to_string();
            let _ = program::run("kill", &["-s", "CONT", &pid]);
        }
        self.wrong.lift(&self.rig.cluster);
        self.revive();
        self.wrong = Wrong::default();
    }

    /// Serves the volume from a machine while faults last, which end meanwhile:
    /// it works or says why not.
    fn attach(&mut self, client: usize) -> Export {
        // Somebody must be there to be asked.
        if self.wrong.dead.len() > 1 || self.wrong.dead.contains(&Host::Manager) {
            self.revive();
        }
        self.draw_transport();
        let (pause, transport) = (self.draw_pause(), self.transport);
        let (cluster, wrong) = (&self.rig.cluster, &self.wrong);
        let tried = std::thread::scope(|scope| {
            scope.spawn(move || {
                sleep(pause);
                wrong.lift(cluster);
            });
            cluster.try_export_from(client, &[VOLUME], transport)
        });
        self.revive();
        self.wrong = Wrong::default();
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
    fn replace(&mut self) {
        self.rig.take_export().kill();
        self.rest();
        self.wrong
            .stopped
            .retain(|host| !matches!(host, Host::Client(_)));
        let next = self.below(2);
        let export = self.attach(next);
        self.client = next;
        self.rig.adopt(export);
        self.rig.verify();
        self.work();
    }

    /// Another client attaches, whatever the one before does then: nothing that
    /// it was told to write afterwards is anywhere.
    fn supersede(&mut self) {
        let before = Host::Client(self.client);
        let mut late = self.late.take().expect("it is connected");
        let load = self.load.take().expect("the load runs");
        load.ask_to_stop();
        let mut old = self.rig.take_export();
        let is_stopped = self.wrong.stopped.contains(&before);
        let mut is_unplugged = self.wrong.unplugged.contains(&before);
        self.wrong.stopped.retain(|host| *host != before);
        self.wrong.unplugged.retain(|host| *host != before);
        if !is_stopped && !is_unplugged && self.has_net && self.rng.below(2) == 0 {
            self.rig.cluster.net().unplug(before);
            is_unplugged = true;
        }
        let next = 1 - self.client;
        let export = self.attach(next);
        self.client = next;
        self.rig.adopt(export);
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
        // A brick may have had to end it.
        let is_killed = is_stopped && !old.daemon.is_running();
        if is_killed {
            self.count("a stopped client was ended".into());
        } else {
            if is_stopped {
                old.daemon.signal("CONT");
            }
            old.await_fenced();
            for _ in blocks.filter(|_| sent.is_ok()) {
                // The connection ends behind the first error.
                let Ok(reply) = late.reply() else { break };
                assert_ne!(reply.errno, 0, "a fenced client wrote {}", reply.cookie);
            }
        }
        let report = load.finish();
        let lost = report.failures.iter().find(|what| what.contains("lost"));
        assert_eq!(lost, None);
        old.kill();
        self.rig.verify();
        self.work();
    }

    /// What the volume is like while it lasts, as far as it can be asked.
    fn observe(&mut self) {
        if self.wrong.is_running(Host::Client(self.client)) {
            let status = self.rig.export().status();
            let state = status["state"].as_str().expect("a state").to_owned();
            self.count(format!("was {state}"));
        }
    }

    /// A client that stands still is ended by a brick that needs its pool.
    fn replace_if_ended(&mut self, was_stopped: bool) {
        let mut export = self.rig.take_export();
        if export.daemon.is_running() {
            self.rig.adopt(export);
            return;
        }
        assert!(
            was_stopped && self.transport == "map",
            "the client ended: {}",
            export.daemon.log()
        );
        self.count("a stopped client was ended".into());
        self.rest();
        self.rig.cluster.await_bricks(self.bricks);
        self.serve();
        self.rig.verify();
        self.work();
    }

    fn round(&mut self, round: u64) -> Duration {
        let more = 1 + self.rng.below(400);
        self.load().await_answers(more);
        let faults = 2 + self.rng.below(3);
        print!("round {round}, {}:", self.transport);
        let takeover = self.strike(faults);
        sleep(self.draw_pause());
        self.observe();
        let healed = Instant::now();
        match takeover {
            Some(KillClient) => self.replace(),
            Some(_) => self.supersede(),
            None => {
                let was_stopped = !self.wrong.is_running(Host::Client(self.client));
                self.heal();
                self.replace_if_ended(was_stopped);
            }
        }
        self.rig.export().await_state("healthy");
        self.load().await_answers(100);
        let took = healed.elapsed();
        println!("; well after {took:?}");
        if round % 3 == 2 {
            assert_eq!(self.rest(), 0, "connections broke");
            self.rig.verify();
            if round % 9 == 8 {
                self.rig.end_and_check();
                self.serve();
            }
            self.work();
        }
        took
    }
}

/// At the end every acknowledged block is right, the legs are identical, each
/// holds all by itself, and no pool is damaged.
fn storm(rig: Rig, bricks: usize, seed: u64, traits: (bool, bool)) {
    let rounds = number("PAGEMESH_STORM_ROUNDS", ROUNDS);
    let mut storm = Storm::new(rig, bricks, seed, traits);
    let mut longest = Duration::ZERO;
    for round in 0..rounds {
        longest = longest.max(storm.round(round));
    }
    assert_eq!(storm.rest(), 0, "connections broke");
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

fn seed(otherwise: u64) -> u64 {
    let seed = number("PAGEMESH_STORM_SEED", otherwise);
    println!("PAGEMESH_STORM_SEED={seed}");
    seed
}

#[test]
fn everything_is_killed_under_a_mirror() {
    let seed = seed(0x51);
    let rig = Rig::new(Pools::Memory, 2, 32, &[], seed);
    storm(rig, 2, seed, (false, false));
}

#[test]
fn everything_is_killed_on_disks() {
    let seed = seed(0x53);
    let rig = Rig::new(Pools::Disk, 2, 32, &[], seed);
    storm(rig, 2, seed, (false, true));
}

#[test]
fn everything_is_killed_and_cut_off_under_three_copies() {
    let seed = seed(0x52);
    if let Some(rig) = Rig::apart((3, 2), 32, &["--copies", "3"], seed) {
        storm(rig, 3, seed, (true, false));
    }
}
