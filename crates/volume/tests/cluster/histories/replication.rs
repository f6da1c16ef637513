//! Random histories of a volume with an asynchronous replica. Whenever the manager would allow
//! its promotion, the replica holds a state that the volume was in, with all changes that were
//! acknowledged as durable.
//!
//! A failure names its seed: `PAGEMESH_SEED=n cargo test -p pagemesh-volume
//! replay_replication_seed -- --ignored` repeats it.

use crate::world::bricks::{Fabric, Page};
use crate::world::cluster::{REPLICA_SLICE, create_slices};
use crate::world::history::World;
use crate::world::manager::{Manager, ManagerMode, brick, segment};
use crate::world::oracle::{PAGE_SECTORS, SECTOR, fill, value_of};
use crate::world::{SeedReporter, seeds_from_env};
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{LegState, STRIPE_BYTES};
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::TransactionPart;
use pagemesh_base::space::{Channel, Reply, Request, SpaceError, Token};
use pagemesh_volume::test_api::{ControllerEvent, ScrubOrder, VolumeChannel};
use pagemesh_volume::{ScrubPlan, VolumeState};
use std::collections::BTreeMap;
use std::panic;

const STEPS: usize = 6000;
const SETTLE_STEPS_MAX: usize = 200_000;
const IN_FLIGHT_MAX: usize = 6;
const SECTORS: u64 = STRIPE_BYTES / SECTOR;
/// From this sector on pages are cleared, too, so a hole there has no unique meaning.
const CLEARED_FROM: u64 = SECTORS / 2;

/// A change, or a flush with no sectors. The value of a change is its number.
#[derive(Debug)]
struct ChangeRecord {
    sectors: Vec<u64>,
    began: u64,
    acknowledged: Option<u64>,
    durable: bool,
    /// Whether it is a transaction.
    is_atomic: bool,
}

struct ReplicationScenario {
    world: World,
    threads: Vec<(VolumeChannel, BTreeMap<u64, ()>)>,
    copies: usize,
    buffers: bool,
    changes: BTreeMap<u64, ChangeRecord>,
    clock: u64,
    /// The number of checks of a replica.
    checks: u64,
    /// The checks in which the replica lacked some changes.
    lagging_checks: u64,
}

impl ReplicationScenario {
    fn new(seed: u64) -> ReplicationScenario {
        let mut rng = SplitMix64::new(seed);
        let copies = 1 + rng.below(2) as usize;
        let buffers = rng.one_in(4);
        let segments = vec![segment(0, 1, copies, STRIPE_BYTES)];
        let fabric = Fabric::default();
        for copy in 0..=copies {
            poison::lock(&fabric.0).add(brick(copy as u128), buffers);
        }
        create_slices(&fabric, &segments);
        let manager = Manager::new(segments, if buffers { "file-sync" } else { "process" });
        let follower = brick(copies as u128);
        poison::lock(&fabric.0).create(follower, REPLICA_SLICE, STRIPE_BYTES);
        manager.add_copy(follower, REPLICA_SLICE, true);
        ReplicationScenario {
            world: World::new(rng, fabric, manager),
            threads: vec![],
            copies,
            buffers,
            changes: BTreeMap::new(),
            clock: 0,
            checks: 0,
            lagging_checks: 0,
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn attach(&mut self) {
        self.threads.clear();
        self.world.replace_client();
        for _ in 0..SETTLE_STEPS_MAX {
            self.world.background();
            self.world.client.poll();
            match self.world.client.take_attach_result() {
                Some(Ok(())) => {
                    for _ in 0..1 + self.world.rng.below(3) {
                        self.threads
                            .push((self.world.client.open(), BTreeMap::new()));
                    }
                    return;
                }
                Some(Err(_)) => {
                    self.restore_all();
                    self.world.replace_client();
                }
                None => {}
            }
        }
        panic!("an attach does not end");
    }

    fn submit(&mut self) {
        let at = self.world.rng.below(self.threads.len() as u64) as usize;
        if self.threads[at].1.len() >= IN_FLIGHT_MAX {
            return;
        }
        let (began, durable) = (self.tick(), self.world.rng.one_in(8));
        let start = self.world.rng.below(SECTORS);
        let len = 1 + self.world.rng.below(12);
        let end = (start + len).min(SECTORS);
        let run = |from: u64, to: u64| (from..to).collect::<Vec<u64>>();
        let (request, sectors, durable) = match self.world.rng.below(10) {
            0..=5 => {
                let request = Request::Write {
                    offset: start * SECTOR,
                    data: Bytes::from(fill(began, end - start)),
                    durable,
                };
                (request, run(start, end), durable)
            }
            6 | 7 => self.transaction(began, durable),
            8 => {
                let start = start.max(CLEARED_FROM);
                let end = end.max(start + 1);
                let request = Request::WriteZeroes {
                    offset: start * SECTOR,
                    len: (end - start) * SECTOR,
                    durable,
                };
                // A clear leaves no value that identifies it.
                (request, vec![], false)
            }
            _ => (Request::Flush, vec![], true),
        };
        let done = ChangeRecord {
            sectors,
            began,
            acknowledged: None,
            durable,
            is_atomic: matches!(request, Request::Transact { .. }),
        };
        self.changes.insert(began, done);
        self.threads[at].1.insert(began, ());
        self.threads[at].0.submit(Token(began), request);
    }

    /// A transaction of two distant pages.
    fn transaction(&mut self, value: u64, durable: bool) -> (Request, Vec<u64>, bool) {
        let pages = SECTORS / PAGE_SECTORS;
        let (a, b) = (
            self.world.rng.below(pages / 2),
            pages / 2 + self.world.rng.below(pages / 2),
        );
        let part = |page: u64| TransactionPart::Write {
            offset: page * 4096,
            data: Bytes::from(fill(value, PAGE_SECTORS)),
        };
        let parts = vec![part(a), part(b)];
        let sectors = [a, b].into_iter();
        let sectors = sectors.flat_map(|page| page * PAGE_SECTORS..(page + 1) * PAGE_SECTORS);
        (
            Request::Transact { parts, durable },
            sectors.collect(),
            durable,
        )
    }

    fn reap(&mut self, at: usize) {
        let mut completions = vec![];
        self.threads[at].0.reap(&mut completions);
        for completion in completions {
            let token = completion.token.0;
            self.threads[at].1.remove(&token).expect("answered once");
            let now = self.tick();
            match completion.result {
                Ok(Reply::Done) => {
                    let done = self.changes.get_mut(&token).expect("submitted");
                    done.acknowledged = Some(now);
                }
                Err(SpaceError::Unavailable(_) | SpaceError::NoSpace(_)) => {}
                other => panic!("token {token} ended with {other:?}"),
            }
        }
    }

    fn inject_fault(&mut self) {
        let any = self.world.rng.below(self.copies as u64 + 1) as u128;
        let follower = self.copies as u128;
        match self.world.rng.below(16) {
            0 => {
                // A buffering source that dies could lose changes that no other leg has.
                let which = if self.buffers { follower } else { any };
                self.world.kill(brick(which));
            }
            1..=3 => self.world.restart(brick(any)),
            4 => self.world.break_any_connection(),
            5 => {
                self.world.set_any_manager_mode(&[
                    ManagerMode::Down,
                    ManagerMode::LoseNextReply,
                    ManagerMode::LoseNextReplyThenDown,
                    ManagerMode::Up,
                ]);
            }
            6 => {
                let room = match self.world.rng.one_in(2) {
                    true => self.world.rng.below(10),
                    false => u64::MAX,
                };
                self.world.set_room(brick(follower), room);
            }
            7 => self.world.set_room(brick(follower), u64::MAX),
            9 => {
                // Parts of this page cannot be written any more.
                let page = self.world.rng.below(SECTORS / PAGE_SECTORS);
                let mut bricks = poison::lock(&self.world.fabric.0);
                let slice = bricks.slice_mut(brick(follower), REPLICA_SLICE);
                if slice.pages()[page as usize].is_some() {
                    slice.damage_page(page);
                }
            }
            // A frozen brick accumulates many requests.
            10 | 11 => self.freeze(true),
            12 => self.freeze(false),
            8 if self.world.rng.one_in(3) => self.attach(),
            13 => self.scrub(),
            _ => self.world.manager.set_mode(ManagerMode::Up),
        }
    }

    fn freeze(&mut self, frozen: bool) {
        let follower = brick(self.copies as u128);
        let mut bricks = poison::lock(&self.world.fabric.0);
        bricks.bricks.get_mut(&follower).expect("brick").frozen = frozen;
    }

    fn scrub(&mut self) {
        let plan = ScrubPlan {
            every: None,
            bytes_per_s: 1 << 40,
        };
        for order in [ScrubOrder::Plan(plan), ScrubOrder::Start] {
            self.world
                .client
                .mailbox
                .post(ControllerEvent::Scrub(order));
        }
    }

    /// The replica's contents by sector, if it could be promoted now.
    fn replica_sectors(&self) -> Option<Vec<u64>> {
        let layout = self.world.manager.layout();
        let leg = layout.segments[0].columns[0].legs.last()?.clone();
        if leg.state != LegState::AsyncReplica {
            return None;
        }
        let bricks = poison::lock(&self.world.fabric.0);
        Some(sectors(bricks.slice(leg.brick, leg.slice).pages()))
    }

    fn check_replica(&mut self) {
        let Some(held) = self.replica_sectors() else {
            return;
        };
        self.checks += 1;
        let is_in = |value: &u64| *value != 0;
        let newest = held.iter().copied().filter(is_in).max().unwrap_or(0);
        let mut lacks = false;
        // The flush covers changes that were acknowledged before it began.
        let flushes = self.changes.values().filter(|it| it.durable);
        let flushes = flushes.filter(|it| it.sectors.is_empty() && it.acknowledged.is_some());
        let flushed = flushes.map(|flush| flush.began).max().unwrap_or(0);
        for (value, change) in &self.changes {
            // A later change may have replaced it on all other legs.
            let misses = |sector: &u64| {
                let there = held[*sector as usize];
                let before = self.changes.get(&there);
                match (there, before) {
                    (0, _) => *sector < CLEARED_FROM,
                    (there, _) if there == *value => false,
                    (_, Some(before)) => before
                        .acknowledged
                        .is_some_and(|acknowledged| acknowledged < change.began),
                    (_, None) => panic!("sector {sector} holds {there}, which was never written"),
                }
            };
            let Some(sector) = change.sectors.iter().find(|sector| misses(sector)) else {
                continue;
            };
            let there = held[*sector as usize];
            let tell = || format!("sector {sector} holds {there}, not {value}, {change:?}");
            let is_half = change.is_atomic && held.contains(value);
            assert!(!is_half, "half of a transaction: {}", tell());
            let Some(acknowledged) = change.acknowledged else {
                continue;
            };
            lacks = true;
            assert!(!change.durable, "durable: {}", tell());
            assert!(acknowledged > flushed, "flushed at {flushed}: {}", tell());
            assert!(
                acknowledged > newest,
                "{newest} is there, which came later: {}",
                tell()
            );
        }
        self.lagging_checks += u64::from(lacks);
    }

    fn restore_all(&mut self) {
        self.world.restart_all();
        let mut bricks = poison::lock(&self.world.fabric.0);
        let all = bricks.bricks.values_mut();
        all.for_each(|brick| (brick.room, brick.frozen) = (u64::MAX, false));
    }

    fn run_until_healthy(&mut self) {
        self.restore_all();
        for _ in 0..SETTLE_STEPS_MAX {
            self.world.background();
            (0..self.threads.len()).for_each(|at| self.reap(at));
            let calm = self.threads.iter().all(|(_, pending)| pending.is_empty());
            let status = self.world.client.status();
            let ship = &self.world.client.shared.replication;
            let ended = ship.is_done(ship.last_number());
            if calm && ended && status.state == VolumeState::Healthy {
                return;
            }
        }
        panic!("no rest: {:#?}", self.world.client.status());
    }

    fn assert_legs_equal(&self) {
        let layout = self.world.manager.layout();
        let bricks = poison::lock(&self.world.fabric.0);
        let legs = &layout.segments[0].columns[0].legs;
        let held =
            |leg: &pagemesh_base::layout::Leg| sectors(bricks.slice(leg.brick, leg.slice).pages());
        let first = held(&legs[0]);
        for leg in legs {
            for (sector, (there, wanted)) in held(leg).iter().zip(&first).enumerate() {
                let change = |value| self.changes.get(value);
                assert_eq!(
                    there,
                    wanted,
                    "sector {sector} of a leg that is {:?} has {:?}, the first one {:?}; {:?}",
                    leg.state,
                    change(there),
                    change(wanted),
                    self.world.client.status()
                );
            }
        }
    }

    fn run_steps(&mut self) {
        self.attach();
        for _ in 0..STEPS {
            match self.world.rng.below(100) {
                0..=19 => self.submit(),
                20..=39 => {
                    let at = self.world.rng.below(self.threads.len() as u64) as usize;
                    self.reap(at);
                }
                99 if self.world.rng.one_in(4) => self.inject_fault(),
                _ => self.world.background(),
            }
            if self.clock.is_multiple_of(8) {
                self.check_replica();
            }
        }
        if let Some(held) = self.replica_sectors()
            && self.world.rng.one_in(2)
        {
            self.check_replica();
            self.promote_and_compare(&held);
        }
        self.run_until_healthy();
        self.check_replica();
        self.assert_legs_equal();
    }

    /// Promotes the replica after the client and all other bricks are gone.
    fn promote_and_compare(&mut self, held: &[u64]) {
        self.threads.clear();
        self.restore_all();
        (0..self.copies).for_each(|copy| self.world.kill(brick(copy as u128)));
        // A page that is damaged on every copy would keep the others from resyncing.
        let mut bricks = poison::lock(&self.world.fabric.0);
        let follower = bricks.slice_mut(brick(self.copies as u128), REPLICA_SLICE);
        follower.damaged.clear();
        drop(bricks);
        self.world.manager.promote(self.copies);
        self.world.replace_client();
        let orphans = poison::lock(&self.world.fabric.0).orphans();
        for number in orphans {
            poison::lock(&self.world.fabric.0).break_connection(number);
        }
        self.attach();
        self.run_until_healthy();
        let layout = self.world.manager.layout();
        let leg = &layout.segments[0].columns[0].legs[self.copies];
        let bricks = poison::lock(&self.world.fabric.0);
        assert_eq!(sectors(bricks.slice(leg.brick, leg.slice).pages()), held);
    }
}

fn sectors(pages: &[Page]) -> Vec<u64> {
    let page = |page: &Page| {
        let sectors = (0..PAGE_SECTORS as usize).map(|at| match page {
            None => 0,
            Some(bytes) => value_of(&bytes[at * 512..(at + 1) * 512]).expect("no torn sector"),
        });
        sectors.collect::<Vec<u64>>()
    };
    pages.iter().flat_map(page).collect()
}

fn run_seed(seed: u64) -> u64 {
    let _told = SeedReporter(seed, "replay_replication_seed");
    let mut life = ReplicationScenario::new(seed);
    life.run_steps();
    if std::env::var("PAGEMESH_TELL").is_ok() {
        let (behind, checks) = (life.lagging_checks, life.checks);
        eprintln!(
            "seed {seed}: behind in {behind} of {checks} checks, {:?}",
            life.world.client.status()
        );
    }
    life.lagging_checks
}

fn seeds(from: u64) {
    let behind: u64 = (from..from + seeds_from_env().unwrap_or(300))
        .map(run_seed)
        .sum();
    assert!(behind > 100, "it lacked something {behind} times only");
}

#[test]
fn replica_holds_a_past_state_1() {
    seeds(0);
}

#[test]
fn replica_holds_a_past_state_2() {
    seeds(1_000_000);
}

#[test]
#[ignore = "repeats the seed in PAGEMESH_SEED"]
fn replay_replication_seed() {
    let seed = std::env::var("PAGEMESH_SEED").expect("PAGEMESH_SEED");
    run_seed(seed.parse().expect("a number"));
}

#[test]
fn random_histories_catch_replication_defects() {
    for (found, defect) in [
        ("durable", Defect::DurableNotAwaited),
        ("", Defect::ReplicaReportedTooEarly),
        ("", Defect::ReplicatedOutOfOrder),
        ("", Defect::ReplicaOfDeadClientKept),
    ] {
        defect::set(Some(defect));
        let caught = (0..1000).find_map(|seed| {
            let told = panic::catch_unwind(|| run_seed(seed)).err()?;
            let text = told.downcast_ref::<String>().cloned().unwrap_or_default();
            Some((seed, text))
        });
        defect::set(None);
        let (seed, text) = caught.unwrap_or_else(|| panic!("{defect:?} is not caught"));
        let first: String = text.chars().take(100).collect();
        println!("{defect:?} {} {first}", seed + 1);
        assert!(text.contains(found), "{defect:?} at {seed}: {text}");
    }
}
