//! Histories of a volume with direct clients. They read and overwrite mapped legs one step at a
//! time, and die at any step. Meanwhile the mount has its own requests, legs are lost and
//! return, checks and repairs run, and the mount dies. All reads agree with one order.
//! Acknowledged writes are there. In the end the legs are equal.
//!
//! The legs are models. The segment, the controller and the channels are the product's. The
//! steps of a process are written again here after `pagemesh_direct`: a row, then the access
//! checks; a shared file map that is closed for each request of the mount; the row of a dead
//! client is cleared after its reconciliation, with all other clients blocked.
//!
//! `PAGEMESH_SEED=n cargo test -p pagemesh-volume replay_direct_client_seed -- --ignored`
//! repeats a seed.

mod clients;
mod mount;

use crate::world::bricks::Fabric;
use crate::world::cluster::create_slices;
use crate::world::history::World;
use crate::world::manager::{Manager, ManagerMode, brick, segment};
use crate::world::oracle::{PAGE_SECTORS, ReadOracle, SECTOR, value_of};
use crate::world::{SeedReporter, seeds_from_env};
use clients::SimulatedClient;
use mount::{DeadRow, MountRequest};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::BrickId;
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use pagemesh_volume::VolumeState;
use pagemesh_volume::direct_access::DirectSegment;
use pagemesh_volume::limits::DOWN_LIMIT;
use pagemesh_volume::test_api::{
    CheckJob, ControllerEvent, DirectAccess, VolumeChannel, VolumeShared,
};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const STEPS: usize = 4000;
/// The maximum of steps after the last fault until everything is idle.
const SETTLE_STEPS_MAX: usize = 200_000;
const CLIENTS: usize = 3;
/// Each has half of the pages.
const FILES: u64 = 2;
/// Few, so that all clients collide.
const PAGES: u64 = 8;
const FILE_SECTORS: u64 = PAGES / FILES * PAGE_SECTORS;
/// The maximum of concurrent requests of the mount.
const REQUESTS_MAX: usize = 4;
/// The oracle's channel numbers of direct clients begin here.
const FIRST_CLIENT_CHANNEL: usize = 100;

struct DirectScenario {
    world: World,
    channel: Option<VolumeChannel>,
    clients: Vec<SimulatedClient>,
    dead_rows: Vec<DeadRow>,
    requests: Vec<MountRequest>,
    closed_files: [u64; FILES as usize],
    checks: Vec<Arc<CheckJob>>,
    /// A brick that has a dead client's record, and will die.
    targeted_brick: Option<BrickId>,
    oracle: ReadOracle,
    copies: usize,
    next: u64,
    coverage: Coverage,
}

/// The counts of the events that occurred.
#[derive(Clone, Copy, Debug, Default)]
struct Coverage {
    writes: u64,
    reads: u64,
    requests: u64,
    fallbacks: u64,
    deaths_in_op: u64,
    crashes: u64,
    checks: u64,
}

impl Coverage {
    fn add(&mut self, other: Coverage) {
        self.writes += other.writes;
        self.reads += other.reads;
        self.requests += other.requests;
        self.fallbacks += other.fallbacks;
        self.deaths_in_op += other.deaths_in_op;
        self.crashes += other.crashes;
        self.checks += other.checks;
    }
}

fn segment_of(hub: &VolumeShared) -> &DirectSegment {
    &hub.direct_access
        .get()
        .expect("direct access is enabled")
        .segment
}

impl DirectScenario {
    fn new(seed: u64) -> DirectScenario {
        let mut rng = SplitMix64::new(seed);
        let copies = [2, 2, 2, 3][rng.below(4) as usize];
        let segments = vec![segment(0, 1, copies, PAGES * 4096)];
        let fabric = Fabric::default();
        poison::lock(&fabric.0).table_max = rng.one_in(4).then_some(6);
        for copy in 0..copies {
            poison::lock(&fabric.0).add(brick(copy as u128), false);
        }
        create_slices(&fabric, &segments);
        let manager = Manager::new(segments, "process");
        DirectScenario {
            world: World::new(rng, fabric, manager),
            channel: None,
            clients: vec![],
            dead_rows: vec![],
            requests: vec![],
            closed_files: [0; FILES as usize],
            checks: vec![],
            targeted_brick: None,
            oracle: ReadOracle::new(PAGES * PAGE_SECTORS),
            copies,
            next: 0,
            coverage: Coverage::default(),
        }
    }

    fn attach(&mut self) {
        for _ in 0..SETTLE_STEPS_MAX {
            self.step_any_background();
            self.world.client.poll();
            match self.world.client.take_attach_result() {
                Some(Ok(())) => {
                    let guests =
                        DirectAccess::new(self.world.client.shared.last_op()).expect("memory");
                    assert!(self.world.client.shared.direct_access.set(guests).is_ok());
                    self.world
                        .client
                        .mailbox
                        .post(ControllerEvent::DirectAccessEnabled);
                    self.channel = Some(self.world.client.open());
                    self.add_clients();
                    return;
                }
                Some(Err(_)) => {
                    self.restore_all();
                    self.world.replace_client();
                }
                None if self.world.rng.one_in(400) => self.restore_all(),
                None => {}
            }
        }
        panic!("an attach does not end");
    }

    /// Adds direct clients up to their intended number.
    fn add_clients(&mut self) {
        while self.clients.iter().filter(|it| !it.is_orphan).count() < CLIENTS {
            let used = |row: &usize| {
                let mut living = self.clients.iter().filter(|it| !it.is_orphan);
                living.any(|it| it.row == *row) || self.dead_rows.iter().any(|it| it.row == *row)
            };
            let row = (0..).find(|row| !used(row)).expect("rows are many");
            self.next += 1;
            self.clients.push(SimulatedClient {
                hub: Arc::clone(&self.world.client.shared),
                row,
                channel: FIRST_CLIENT_CHANNEL + self.next as usize,
                lease: None,
                legs: vec![],
                op: None,
                is_orphan: false,
            });
        }
    }

    /// Makes one step without a request.
    fn step_any_background(&mut self) {
        match self.world.rng.below(3) {
            0 => self.world.background(),
            1 if !self.clients.is_empty() => {
                let at = self.world.rng.below(self.clients.len() as u64) as usize;
                self.step_client(at, false);
            }
            _ => {
                let mut bricks = poison::lock(&self.world.fabric.0);
                let dead = bricks.dead_sessions();
                if !dead.is_empty() && self.world.rng.one_in(8) {
                    let at = self.world.rng.below(dead.len() as u64) as usize;
                    bricks.retire(dead[at]);
                }
                drop(bricks);
                self.world.background();
            }
        }
    }

    fn inject_fault(&mut self) {
        let number = self.any_brick();
        match self.world.rng.below(10) {
            0 | 1 => self.world.kill(number),
            2..=4 => self.world.restart(number),
            5 => self.world.break_any_connection(),
            6 => {
                self.world.set_any_manager_mode(&[
                    ManagerMode::Down,
                    ManagerMode::LoseNextReply,
                    ManagerMode::Up,
                ]);
            }
            7 if self.world.rng.one_in(4) => self.world.client.now += DOWN_LIMIT,
            8 if self.checks.is_empty() => self.start_check(),
            9 => {
                // At most one copy of a page is damaged.
                let leg = self.world.manager.layout().segments[0].columns[0].legs[0].clone();
                let page = self.world.rng.below(PAGES);
                let mut bricks = poison::lock(&self.world.fabric.0);
                let is_locked = bricks.is_locked(leg.slice, page);
                let slice = bricks.slice_mut(leg.brick, leg.slice);
                if !is_locked && slice.pages()[page as usize].is_some() {
                    slice.damage_page(page);
                }
            }
            _ => self.world.manager.set_mode(ManagerMode::Up),
        }
    }

    fn any_brick(&mut self) -> BrickId {
        brick(u128::from(self.world.rng.below(self.copies as u64)))
    }

    /// The mount dies, or another one attaches. Its direct clients end their operations.
    fn crash(&mut self) {
        self.coverage.crashes += 1;
        self.clear_damage();
        for actor in &mut self.clients {
            actor.is_orphan = true;
            if let Some(work) = &mut actor.op {
                work.order = None;
            }
        }
        self.oracle.crash();
        self.dead_rows.clear();
        self.requests.clear();
        self.checks.clear();
        self.closed_files = [0; FILES as usize];
        self.channel = None;
        // A killed mount never reopens the segment that it closed.
        let guests = self.world.client.shared.direct_access.get();
        if let Some(guests) = guests.filter(|it| it.segment.is_closed()) {
            guests.segment.close();
        }
        self.world.replace_client();
        self.attach();
    }

    fn restore_all(&mut self) {
        self.world.restart_all();
    }

    fn step(&mut self) {
        match self.world.rng.below(200) {
            0..=69 if !self.clients.is_empty() => {
                let at = self.world.rng.below(self.clients.len() as u64) as usize;
                self.step_client(at, true);
            }
            70 if self.world.rng.one_in(2) => self.add_request(),
            71..=99 => self.process_requests(),
            100..=109 => self.reconcile_dead_row(),
            110 => self.inject_fault(),
            111 if self.world.rng.one_in(3) => self.kill_random_client(),
            112 if self.world.rng.one_in(16) => self.crash(),
            113 => self.collect_checks(),
            114 | 115 => self.kill_client_after_first_leg(),
            _ => self.step_any_background(),
        }
    }

    fn run_steps(&mut self) {
        self.attach();
        for _ in 0..STEPS {
            self.step();
        }
        self.run_until_healthy();
        self.compare_legs();
        if self.world.rng.one_in(2) {
            self.crash();
            self.run_until_healthy();
            self.compare_legs();
        }
    }

    /// Repairs all damage. A page that the only source of a resync or recovery lacks would keep
    /// it from ending.
    fn clear_damage(&mut self) {
        let legs = self.world.manager.layout().segments[0].columns[0]
            .legs
            .clone();
        let mut bricks = poison::lock(&self.world.fabric.0);
        for leg in legs {
            bricks.slice_mut(leg.brick, leg.slice).damaged.clear();
        }
    }

    /// Faults end, direct clients end their operations, and all legs come back.
    fn run_until_healthy(&mut self) {
        self.clear_damage();
        for _ in 0..SETTLE_STEPS_MAX {
            if self.world.rng.one_in(16) {
                self.restore_all();
            }
            self.step_any_background();
            self.process_requests();
            self.reconcile_dead_row();
            self.collect_checks();
            let is_idle = self
                .clients
                .iter()
                .all(|it| it.op.is_none() && !it.is_orphan);
            let is_calm =
                self.requests.is_empty() && self.dead_rows.is_empty() && self.checks.is_empty();
            if is_idle && is_calm && self.world.client.status().state == VolumeState::Healthy {
                return;
            }
        }
        let works: Vec<_> = self
            .clients
            .iter()
            .map(|it| it.op.as_ref().map(|it| it.phase))
            .collect();
        panic!(
            "no rest: {works:?}, {} asks, {} dead, {:#?}",
            self.requests.len(),
            self.dead_rows.len(),
            self.world.client.status()
        );
    }

    fn compare_legs(&mut self) {
        let layout = self.world.manager.layout();
        let bricks = poison::lock(&self.world.fabric.0);
        let legs = &layout.segments[0].columns[0].legs;
        let slices: Vec<_> = legs
            .iter()
            .map(|leg| bricks.slice(leg.brick, leg.slice))
            .collect();
        let mut held: BTreeMap<u64, u64> = BTreeMap::new();
        for (leg, slice) in slices.iter().enumerate() {
            for (page, bytes) in slice.pages().iter().enumerate() {
                if slice.damaged.contains(&(page as u64)) {
                    continue;
                }
                let zeroes = Box::new([0; 4096]);
                let bytes = bytes.as_ref().unwrap_or(&zeroes);
                for (sector, bytes) in (0..).zip(bytes.chunks(SECTOR as usize)) {
                    let sector = page as u64 * PAGE_SECTORS + sector;
                    let value = value_of(bytes).expect("no torn sector");
                    let first = *held.entry(sector).or_insert(value);
                    assert_eq!(value, first, "sector {sector} differs on leg {leg}");
                    let allowed = self.oracle.allowed_values(sector);
                    assert!(
                        allowed.contains(&value),
                        "sector {sector} holds {value}, not {allowed:?}"
                    );
                }
            }
        }
    }
}

fn run_seed(seed: u64) -> Coverage {
    let mut life = DirectScenario::new(seed);
    life.run_steps();
    life.coverage
}

fn seeds(from: u64) {
    let mut tally = Coverage::default();
    for seed in from..from + seeds_from_env().unwrap_or(400) {
        let _told = SeedReporter(seed, "replay_direct_client_seed");
        tally.add(run_seed(seed));
    }
    println!("{tally:?}");
    let Coverage {
        writes,
        reads,
        requests: asks,
        deaths_in_op: deaths_inside,
        crashes,
        checks,
        ..
    } = tally;
    let all = [writes, reads, asks, deaths_inside, crashes, checks];
    assert!(all.iter().all(|&count| count > 100), "{tally:?}");
}

#[test]
fn random_histories_with_direct_clients_converge() {
    seeds(0);
}

#[test]
#[ignore = "repeats the seed in PAGEMESH_SEED"]
fn replay_direct_client_seed() {
    let seed = std::env::var("PAGEMESH_SEED").expect("PAGEMESH_SEED");
    println!("{:?}", run_seed(seed.parse().expect("a number")));
}

/// The number of histories after which a defect counts as not caught.
const HISTORIES_MAX: u64 = 3000;

#[test]
fn direct_access_defects_are_caught() {
    let defects = [
        Defect::FirstLegRead,
        Defect::RecoveredByNewest,
        Defect::ReconciledDuringClientWrites,
        Defect::RowClearedFirst,
        Defect::ReconciledInPart,
        Defect::AccessDisabledIgnored,
        Defect::RecoveryAwaitsReconcile,
        Defect::NoBarrier,
    ];
    let mut missed = vec![];
    for defect in defects {
        defect::set(Some(defect));
        let caught = (0..HISTORIES_MAX)
            .find(|&seed| catch_unwind(AssertUnwindSafe(|| run_seed(seed))).is_err());
        defect::set(None);
        println!("{defect:?}: seed {caught:?}");
        missed.extend(caught.is_none().then_some(defect));
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
