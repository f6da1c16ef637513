//! Random lives of a volume with a copy that follows: at every moment at which the
//! manager would let it be promoted, it holds what the volume was at some time, and all
//! that was acknowledged as durable.
//!
//! A failure names its seed: `PAGEMESH_SEED=n cargo test -p pagemesh-volume
//! one_following -- --ignored` repeats it.

use super::brick::{Fabric, Page};
use super::client::Client;
use super::manager::{Answering, Manager, brick, segment};
use super::oracle::{SECTOR, fill, value_of};
use super::world::{self, World, create_slices};
use super::{Dice, Seed, let_happen, seeds_asked};
use crate::channel::VolumeChannel;
use crate::hub::guard;
use crate::keeper::{Event, ScrubOrder, ScrubPlan};
use crate::limits::{DOWN_LIMIT, SHIP_AGE_MAX, SHIP_CHANGES_MAX};
use crate::status::VolumeState;
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{LegState, STRIPE_BYTES, SliceId};
use pagemesh_base::slice::Part;
use pagemesh_base::space::{Channel, Reply, Request, SpaceError, Token};
use std::collections::BTreeMap;
use std::panic;
use std::time::Duration;
use uuid::Uuid;

const STEPS: usize = 6000;
const REST_STEPS_MAX: usize = 200_000;
const IN_FLIGHT_MAX: usize = 6;
pub(super) const PAGE_SECTORS: u64 = 4096 / SECTOR;
const SECTORS: u64 = STRIPE_BYTES / SECTOR;
/// From here on pages are cleared, too, so that what a hole means is not known.
const CLEARED_FROM: u64 = SECTORS / 2;
pub(super) const FOLLOWER: SliceId = SliceId(Uuid::from_u128(77));

/// A change, or a flush with no sectors. Changes have their numbers as values.
#[derive(Debug)]
struct Done {
    sectors: Vec<u64>,
    began: u64,
    acknowledged: Option<u64>,
    durable: bool,
    /// It is a transaction.
    whole: bool,
}

struct Life {
    dice: Dice,
    fabric: Fabric,
    manager: Manager,
    client: Client,
    threads: Vec<(VolumeChannel, BTreeMap<u64, ()>)>,
    copies: usize,
    buffers: bool,
    changes: BTreeMap<u64, Done>,
    clock: u64,
    /// Checks of a copy that followed.
    checks: u64,
    /// Those in which it lacked something.
    behind: u64,
}

impl Life {
    fn new(seed: u64) -> Life {
        let mut dice = Dice(seed);
        let copies = 1 + dice.roll(2) as usize;
        let buffers = dice.one_in(4);
        let segments = vec![segment(0, 1, copies, STRIPE_BYTES)];
        let fabric = Fabric::default();
        for copy in 0..=copies {
            guard(&fabric.0).add(brick(copy as u128), buffers);
        }
        create_slices(&fabric, &segments);
        let manager = Manager::new(segments, if buffers { "file-sync" } else { "process" });
        let follower = brick(copies as u128);
        guard(&fabric.0).create(follower, FOLLOWER, STRIPE_BYTES);
        manager.add_copy(follower, FOLLOWER, true);
        let client = Client::new(&fabric, &manager);
        Life {
            dice,
            fabric,
            manager,
            client,
            threads: vec![],
            copies,
            buffers,
            changes: BTreeMap::new(),
            clock: 0,
            checks: 0,
            behind: 0,
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn attach(&mut self) {
        self.threads.clear();
        self.client = Client::new(&self.fabric, &self.manager);
        for _ in 0..REST_STEPS_MAX {
            self.background();
            self.client.turn();
            match self.client.take_attached() {
                Some(Ok(())) => {
                    for _ in 0..1 + self.dice.roll(3) {
                        self.threads.push((self.client.open(), BTreeMap::new()));
                    }
                    return;
                }
                Some(Err(_)) => {
                    self.heal();
                    self.client = Client::new(&self.fabric, &self.manager);
                }
                None => {}
            }
        }
        panic!("an attach does not end");
    }

    fn background(&mut self) {
        let_happen(&mut self.dice, &self.fabric, &mut self.client);
    }

    fn submit(&mut self) {
        let at = self.dice.roll(self.threads.len() as u64) as usize;
        if self.threads[at].1.len() >= IN_FLIGHT_MAX {
            return;
        }
        let (began, durable) = (self.tick(), self.dice.one_in(8));
        let start = self.dice.roll(SECTORS);
        let len = 1 + self.dice.roll(12);
        let end = (start + len).min(SECTORS);
        let run = |from: u64, to: u64| (from..to).collect::<Vec<u64>>();
        let (request, sectors, durable) = match self.dice.roll(10) {
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
                // What it leaves tells nothing of it.
                (request, vec![], false)
            }
            _ => (Request::Flush, vec![], true),
        };
        let done = Done {
            sectors,
            began,
            acknowledged: None,
            durable,
            whole: matches!(request, Request::Transact { .. }),
        };
        self.changes.insert(began, done);
        self.threads[at].1.insert(began, ());
        self.threads[at].0.submit(Token(began), request);
    }

    /// Two pages, far from each other.
    fn transaction(&mut self, value: u64, durable: bool) -> (Request, Vec<u64>, bool) {
        let pages = SECTORS / PAGE_SECTORS;
        let (a, b) = (
            self.dice.roll(pages / 2),
            pages / 2 + self.dice.roll(pages / 2),
        );
        let part = |page: u64| Part::Write {
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

    fn fault(&mut self) {
        let any = self.dice.roll(self.copies as u64 + 1) as u128;
        let follower = self.copies as u128;
        match self.dice.roll(16) {
            0 => {
                // One that buffers takes with it what others may not have.
                let which = if self.buffers { follower } else { any };
                guard(&self.fabric.0).kill(brick(which));
            }
            1..=3 => guard(&self.fabric.0).restart(brick(any)),
            4 => guard(&self.fabric.0).cut_any(&mut self.dice),
            5 => {
                let how = [
                    Answering::No,
                    Answering::Deafly,
                    Answering::DeaflyAtLast,
                    Answering::Yes,
                ];
                self.manager.answer(how[self.dice.roll(4) as usize]);
            }
            6 => {
                let room = match self.dice.one_in(2) {
                    true => self.dice.roll(10),
                    false => u64::MAX,
                };
                self.give_room(follower, room);
            }
            7 => self.give_room(follower, u64::MAX),
            9 => {
                // Parts of this page cannot be written any more.
                let page = self.dice.roll(SECTORS / PAGE_SECTORS);
                let mut bricks = guard(&self.fabric.0);
                let slice = bricks.slice_mut(brick(follower), FOLLOWER);
                if slice.pages()[page as usize].is_some() {
                    slice.spoil(page);
                }
            }
            // It comes to have much to do at once.
            10 | 11 => self.freeze(true),
            12 => self.freeze(false),
            8 if self.dice.one_in(3) => self.attach(),
            13 => self.scrub(),
            _ => self.manager.answer(Answering::Yes),
        }
    }

    fn freeze(&mut self, frozen: bool) {
        let follower = brick(self.copies as u128);
        let mut bricks = guard(&self.fabric.0);
        bricks.bricks.get_mut(&follower).expect("brick").frozen = frozen;
    }

    fn scrub(&mut self) {
        let plan = ScrubPlan {
            every: None,
            bytes_per_s: 1 << 40,
        };
        for order in [ScrubOrder::Plan(plan), ScrubOrder::Start] {
            self.client.mailbox.post(Event::Scrub(order));
        }
    }

    fn give_room(&mut self, number: u128, room: u64) {
        let mut bricks = guard(&self.fabric.0);
        bricks.bricks.get_mut(&brick(number)).expect("brick").room = room;
    }

    /// What the copy holds by sector, if it could be promoted now.
    fn followed(&self) -> Option<Vec<u64>> {
        let layout = self.manager.layout();
        let leg = layout.segments[0].columns[0].legs.last()?.clone();
        if leg.state != LegState::Following {
            return None;
        }
        let bricks = guard(&self.fabric.0);
        Some(sectors(bricks.slice(leg.brick, leg.slice).pages()))
    }

    fn check(&mut self) {
        let Some(held) = self.followed() else {
            return;
        };
        self.checks += 1;
        let is_in = |value: &u64| *value != 0;
        let newest = held.iter().copied().filter(is_in).max().unwrap_or(0);
        let mut lacks = false;
        // Flushed: what was acknowledged before this.
        let flushes = self.changes.values().filter(|it| it.durable);
        let flushes = flushes.filter(|it| it.sectors.is_empty() && it.acknowledged.is_some());
        let flushed = flushes.map(|flush| flush.began).max().unwrap_or(0);
        for (value, change) in &self.changes {
            // A later one may have replaced it everywhere else.
            let misses = |sector: &u64| {
                let there = held[*sector as usize];
                let before = self.changes.get(&there);
                match (there, before) {
                    (0, _) => *sector < CLEARED_FROM,
                    (there, _) if there == *value => false,
                    (_, Some(before)) => before
                        .acknowledged
                        .is_some_and(|acknowledged| acknowledged < change.began),
                    (_, None) => panic!("sector {sector} holds {there}, which nobody wrote"),
                }
            };
            let Some(sector) = change.sectors.iter().find(|sector| misses(sector)) else {
                continue;
            };
            let there = held[*sector as usize];
            let tell = || format!("sector {sector} holds {there}, not {value}, {change:?}");
            let is_half = change.whole && held.contains(value);
            assert!(!is_half, "half of it: {}", tell());
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
        self.behind += u64::from(lacks);
    }

    fn heal(&mut self) {
        self.manager.answer(Answering::Yes);
        let mut bricks = guard(&self.fabric.0);
        (0..=self.copies).for_each(|copy| bricks.restart(brick(copy as u128)));
        let all = bricks.bricks.values_mut();
        all.for_each(|brick| (brick.room, brick.frozen) = (u64::MAX, false));
    }

    fn rest(&mut self) {
        self.heal();
        for _ in 0..REST_STEPS_MAX {
            self.background();
            (0..self.threads.len()).for_each(|at| self.reap(at));
            let calm = self.threads.iter().all(|(_, pending)| pending.is_empty());
            let status = self.client.status();
            let ship = &self.client.hub.ship;
            let ended = ship.is_done(ship.last());
            if calm && ended && status.state == VolumeState::Healthy {
                return;
            }
        }
        panic!("no rest: {:#?}", self.client.status());
    }

    fn all_hold_the_same(&self) {
        let layout = self.manager.layout();
        let bricks = guard(&self.fabric.0);
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
                    self.client.status()
                );
            }
        }
    }

    fn live(&mut self) {
        self.attach();
        for _ in 0..STEPS {
            match self.dice.roll(100) {
                0..=19 => self.submit(),
                20..=39 => {
                    let at = self.dice.roll(self.threads.len() as u64) as usize;
                    self.reap(at);
                }
                99 if self.dice.one_in(4) => self.fault(),
                _ => self.background(),
            }
            if self.clock.is_multiple_of(8) {
                self.check();
            }
        }
        if let Some(held) = self.followed()
            && self.dice.one_in(2)
        {
            self.check();
            self.goes_on_alone(&held);
        }
        self.rest();
        self.check();
        self.all_hold_the_same();
    }

    /// The client and all other bricks are gone.
    fn goes_on_alone(&mut self, held: &[u64]) {
        self.threads.clear();
        self.heal();
        (0..self.copies).for_each(|copy| guard(&self.fabric.0).kill(brick(copy as u128)));
        // A page that nobody has undamaged would keep the others away.
        let mut bricks = guard(&self.fabric.0);
        let follower = bricks.slice_mut(brick(self.copies as u128), FOLLOWER);
        follower.damaged.clear();
        drop(bricks);
        self.manager.promote(self.copies);
        self.client = Client::new(&self.fabric, &self.manager);
        let orphans = guard(&self.fabric.0).orphans();
        for number in orphans {
            guard(&self.fabric.0).cut(number);
        }
        self.attach();
        self.rest();
        let layout = self.manager.layout();
        let leg = &layout.segments[0].columns[0].legs[self.copies];
        let bricks = guard(&self.fabric.0);
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

fn run(seed: u64) -> u64 {
    let _told = Seed(seed, "one_following");
    let mut life = Life::new(seed);
    life.live();
    if std::env::var("PAGEMESH_TELL").is_ok() {
        let (behind, checks) = (life.behind, life.checks);
        eprintln!(
            "seed {seed}: behind in {behind} of {checks} checks, {:?}",
            life.client.status()
        );
    }
    life.behind
}

fn seeds(from: u64) {
    let behind: u64 = (from..from + seeds_asked().unwrap_or(300)).map(run).sum();
    assert!(behind > 100, "it lacked something {behind} times only");
}

#[test]
fn what_follows_is_what_was_1() {
    seeds(0);
}

#[test]
fn what_follows_is_what_was_2() {
    seeds(1_000_000);
}

/// What a connection that was replaced still carries is refused, although the volume's
/// epoch had risen when it was sent, and the slice hears of that epoch over the next one
/// only (seed 1006578 of these lives as they then were).
#[test]
fn what_a_replaced_connection_carries_comes_to_nothing() {
    let mut tried = 0;
    for steps in 0..60 {
        let mut world = World::mirror(2);
        world.write(0, 4096, 1);
        world.add_follower(brick(2), FOLLOWER);
        world.ask_to_look();
        world.steps(steps);
        // The volume's epoch rises, and the copy hears of no change.
        world.freeze(2, true);
        world.kill(1);
        world.rest();
        // One that is copied to while it stands still holds up writes there, in these
        // tests for ever.
        let token = world.submit(0, world::write(0, 4096, 2));
        world.rest();
        if world.ending(token).is_none() {
            continue;
        }
        tried += 1;
        let old = guard(&world.fabric.0).connections_of(brick(2));
        // Its copies are made equal: the follower begins anew, over another connection.
        world.kill(0);
        world.restart(0);
        world.pass(Duration::from_secs(2));
        world.write(0, 4096, 3);
        world.freeze(2, false);
        for _ in 0..2000 {
            if world.leg(2).state == LegState::Following {
                break;
            }
            let mut busy = guard(&world.fabric.0).busy();
            busy.retain(|number| !old.contains(number));
            for number in busy {
                guard(&world.fabric.0).step(number, &mut world.dice);
            }
            world.client.now += Duration::from_millis(1);
            world.client.turn();
            world.client.call();
        }
        world.pass(Duration::from_secs(20));
        assert_eq!(world.leg(2).state, LegState::Following, "{steps}");
        let held = world.page(0, 2, 0);
        assert!(held == world.page(0, 0, 0), "after {steps} steps");
    }
    assert!(tried > 10, "{tried} of 60");
}

/// The source is brick 0, and brick 1 follows it.
pub(super) fn followed() -> World {
    let mut world = World::mirror(1);
    world.write(0, 4096, 1);
    world.add_follower(brick(1), FOLLOWER);
    world.ask_to_look();
    world.pass(Duration::from_secs(1));
    assert_eq!(world.leg(1).state, LegState::Following);
    world
}

/// How far a copy may be behind is a promise: in changes, and in time.
#[test]
fn acknowledgements_wait_for_a_copy_that_is_too_far_behind() {
    let mut world = followed();
    world.freeze(1, true);
    for value in 0..SHIP_CHANGES_MAX as u64 {
        world.write(value % 8 * 4096, 4096, 2 + value);
    }
    let one_more = world.submit(0, world::write(0, 4096, 1000));
    assert_eq!(world.ending(one_more), None);
    world.freeze(1, false);
    assert_eq!(world.ending(one_more), Some(Ok(Reply::Done)));

    world.freeze(1, true);
    world.write(0, 4096, 1001);
    world.pass(SHIP_AGE_MAX / 2);
    world.write(0, 4096, 1002);
    world.pass(SHIP_AGE_MAX);
    let late = world.submit(0, world::write(0, 4096, 1003));
    assert_eq!(world.ending(late), None);
    world.freeze(1, false);
    assert_eq!(world.ending(late), Some(Ok(Reply::Done)));
}

/// Who looks at its layout tells what the copy lacks then.
#[test]
fn the_manager_is_told_how_far_a_copy_is_behind() {
    let mut world = followed();
    let told = |world: &mut World| {
        world.look_again();
        let lag = guard(&world.manager.0).told.lag.expect("told");
        (lag.changes, lag.bytes)
    };
    assert_eq!(told(&mut world), (0, 0));
    world.freeze(1, true);
    world.write(0, 4096, 2);
    world.write(4096, 512, 3);
    assert_eq!(told(&mut world), (2, 4608));
    world.freeze(1, false);
    world.rest();
    assert_eq!(told(&mut world), (0, 0));
}

/// The first copy of a leg is told of while it goes on.
#[test]
fn the_manager_is_told_how_far_a_return_is() {
    let mut world = World::mirror(1);
    let pages = STRIPE_BYTES / 4096;
    world.write(0, pages * 4096, 1);
    world.add_copy(brick(1), FOLLOWER);
    let mut seen = vec![];
    for _ in 0..2000 {
        world.ask_to_look();
        world.steps(2);
        let told = guard(&world.manager.0).told.returns.get(&1).copied();
        seen.extend(told.map(|it| (it.bytes_todo, it.bytes_done)));
    }
    world.rest();
    world.look_again();
    assert_eq!(world.leg(1).state, LegState::InSync);
    assert!(guard(&world.manager.0).told.is_empty());
    let whole = pages * 4096;
    assert!(seen.contains(&(whole, 0)), "{seen:?}");
    assert!(
        seen.is_sorted()
            && seen
                .iter()
                .all(|(todo, done)| done <= todo && *todo <= whole)
    );
}

/// Nobody is left who could say that the copy does not follow any more.
#[test]
fn what_waits_for_a_copy_fails_when_no_other_is_in_reach_for_long() {
    let mut world = followed();
    world.freeze(1, true);
    world.write(0, 4096, 2);
    let flush = world.submit(0, Request::Flush);
    assert_eq!(world.ending(flush), None);
    world.kill(0);
    world.kill(1);
    world.pass(DOWN_LIMIT + Duration::from_secs(1));
    let ending = world.ending(flush);
    assert!(
        matches!(ending, Some(Err(SpaceError::Unavailable(_)))),
        "{ending:?}"
    );
}

/// The manager has made the copy one that follows, nobody has heard of it, and the
/// connection to the copy ends: it must not be written before the manager takes that back.
#[test]
fn a_copy_that_may_follow_is_not_copied_to() {
    let mut world = World::mirror(1);
    world.write(0, 4096, 1);
    world.add_follower(brick(1), FOLLOWER);
    world.ask_to_look();
    world.client.turn();
    assert!(world.client.call(), "it asks for the layout");
    world.manager.answer(Answering::DeaflyAtLast);
    world.pass(Duration::from_secs(1));
    let layout = |world: &World| world.manager.layout().segments[0].columns[0].legs[1].state;
    assert_eq!(layout(&world), LegState::Following);
    assert_eq!(world.leg(1).state, LegState::Stale);
    world.kill(1);
    world.restart(1);
    let before = world.page(0, 1, 0);
    world.write(0, 4096, 2);
    let flush = world.submit(0, Request::Flush);
    world.pass(Duration::from_secs(5));
    assert_eq!(layout(&world), LegState::Following);
    assert!(world.page(0, 1, 0) == before);
    assert_eq!(world.ending(flush), None);
    world.manager.answer(Answering::Yes);
    world.pass(Duration::from_secs(20));
    assert_eq!(world.ending(flush), Some(Ok(Reply::Done)));
    assert_eq!(world.leg(1).state, LegState::Following);
}

/// Of changes that are on their way together, none is made behind one that failed.
#[test]
fn a_copy_gets_nothing_behind_a_change_that_it_refused() {
    let mut world = followed();
    world.write(4096, 4096, 2);
    world.freeze(1, true);
    guard(&world.fabric.0)
        .slice_mut(brick(1), FOLLOWER)
        .spoil(0);
    // A part of that page cannot be written, and the next page as a whole could.
    world.write(0, 512, 3);
    world.write(4096, 4096, 4);
    let before = world.page(0, 1, 1);
    world.freeze(1, false);
    for _ in 0..10 {
        let busy = guard(&world.fabric.0).busy();
        for connection in busy {
            guard(&world.fabric.0).step(connection, &mut world.dice);
        }
    }
    assert!(world.page(0, 1, 1) == before);
    world.pass(Duration::from_secs(20));
    assert_eq!(world.leg(1).state, LegState::Following);
    assert!(world.page(0, 1, 1) == world.page(0, 0, 1));
}

#[test]
fn defects_of_following_are_caught_by_stories() {
    let stories: [(Defect, fn()); 2] = [
        (
            Defect::EpochNotTold,
            what_a_replaced_connection_carries_comes_to_nothing,
        ),
        (
            Defect::OrderNotKept,
            a_copy_gets_nothing_behind_a_change_that_it_refused,
        ),
    ];
    for (defect, story) in stories {
        defect::set(Some(defect));
        let told = panic::catch_unwind(story);
        defect::set(None);
        assert!(told.is_err(), "{defect:?} is not caught");
    }
}

#[test]
#[ignore = "repeats the seed in PAGEMESH_SEED"]
fn one_following() {
    let seed = std::env::var("PAGEMESH_SEED").expect("PAGEMESH_SEED");
    run(seed.parse().expect("a number"));
}

#[test]
fn defects_of_following_are_caught_by_lives() {
    for (found, defect) in [
        ("durable", Defect::DurableNotAwaited),
        ("", Defect::FollowsTooEarly),
        ("", Defect::ShippedOutOfOrder),
        ("", Defect::FollowsTheDead),
    ] {
        defect::set(Some(defect));
        let caught = (0..1000).find_map(|seed| {
            let told = panic::catch_unwind(|| run(seed)).err()?;
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
