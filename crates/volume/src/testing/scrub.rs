//! Scrubs: what they find and repair, how fast they are, and what they leave
//! alone.

use super::Dice;
use super::following::followed;
use super::manager::{brick, segment};
use super::world::{PAGE, World, write};
use crate::hub::guard;
use crate::keeper::{Event, ScrubOrder, ScrubPlan};
use crate::limits::{SCRUB_BATCH_BYTES, SCRUB_DELAY, SHIP_AGE_MAX, SHIP_CHANGES_MAX};
use crate::status::{ScrubPass, ScrubState, ScrubStatus, VolumeState};
use pagemesh_base::layout::LegState;
use pagemesh_base::space::{Request, SpaceError};
use std::collections::BTreeSet;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
const RATE: u64 = 4 << 20;
const BYTES: u64 = 8 << 20;

fn world(copies: usize) -> World {
    let mut world = World::new(vec![segment(0, 1, copies, BYTES)]);
    world.order(ScrubOrder::Plan(ScrubPlan {
        every: None,
        bytes_per_s: RATE,
    }));
    world
}

impl World {
    fn order(&mut self, order: ScrubOrder) {
        self.client.mailbox.post(Event::Scrub(order));
        self.rest();
    }

    fn scrub(&self) -> ScrubStatus {
        self.client.status().scrub
    }

    /// Bytes that the scrub under way has looked at.
    fn scrubbed(&mut self) -> u64 {
        // The status is told now and then only.
        self.pass(SECOND);
        self.scrub().pass.map_or(0, |pass| pass.bytes_done)
    }

    /// Runs a scrub to its end.
    fn scrub_all(&mut self) -> ScrubPass {
        let before = self.scrub().passes;
        self.order(ScrubOrder::Start);
        self.scrub_to_end(before)
    }

    fn scrub_to_end(&mut self, before: u64) -> ScrubPass {
        for _ in 0..100 {
            if self.scrub().passes > before {
                return self.scrub().last.expect("it ended");
            }
            self.pass(SECOND);
        }
        panic!("a scrub does not end: {:?}", self.scrub());
    }

    fn spoil(&mut self, leg: usize, page: u64) {
        let leg = self.manager.layout().segments[0].columns[0].legs[leg].clone();
        let mut bricks = guard(&self.fabric.0);
        bricks.slice_mut(leg.brick, leg.slice).spoil(page);
    }

    fn spoiled(&self, leg: usize) -> BTreeSet<u64> {
        let leg = self.manager.layout().segments[0].columns[0].legs[leg].clone();
        let bricks = guard(&self.fabric.0);
        bricks.slice(leg.brick, leg.slice).damaged.clone()
    }
}

#[test]
fn a_scrub_repairs_what_is_damaged_on_each_leg() {
    let mut world = world(3);
    world.write(0, 200 * PAGE, 1);
    for (leg, page) in [
        (0, 1),
        (1, 100),
        (2, 199),
        (0, 5),
        (1, 5),
        (2, 700),
        (0, 2047),
    ] {
        world.spoil(leg, page);
    }
    let pass = world.scrub_all();
    assert_eq!(pass.bytes_done, BYTES);
    assert_eq!(pass.found.pages_compared, BYTES / PAGE);
    assert_eq!(
        (pass.found.pages_damaged, pass.found.pages_repaired),
        (6, 6)
    );
    assert_eq!(pass.found.pages_differing, 0);
    let mut offsets: Vec<u64> = pass.found.damages.iter().map(|it| it.offset).collect();
    offsets.sort_unstable();
    assert_eq!(offsets, [1, 5, 100, 199, 700, 2047].map(|page| page * PAGE));
    let both = pass.found.damages.iter().find(|it| it.offset == 5 * PAGE);
    assert_eq!(
        both.map(|it| (it.bricks.len(), it.repaired)),
        Some((2, true))
    );
    assert!((0..3).all(|leg| world.spoiled(leg).is_empty()));
    world.legs_are_equal();
    let counters = world.counters();
    assert_eq!(counters.pages_scrubbed, BYTES / PAGE);
    assert_eq!((counters.pages_repaired, counters.repairs_failed), (6, 0));
    assert_eq!(world.client.status().state, VolumeState::Healthy);
    let again = world.scrub_all();
    assert_eq!(
        (again.found.pages_damaged, again.found.damages.len()),
        (0, 0)
    );
}

#[test]
fn what_no_leg_has_is_named_and_its_reads_fail() {
    let mut world = world(2);
    world.write(0, 32 * PAGE, 1);
    world.spoil(0, 7);
    world.spoil(1, 7);
    world.spoil(1, 9);
    let pass = world.scrub_all();
    assert_eq!(
        (pass.found.pages_damaged, pass.found.pages_repaired),
        (2, 1)
    );
    let lost = pass.found.damages.iter().find(|it| !it.repaired);
    let lost = lost.expect("one is not repaired");
    assert_eq!((lost.offset, lost.bricks.len()), (7 * PAGE, 2));
    let request = Request::Read {
        offset: 6 * PAGE,
        len: 3 * PAGE as u32,
    };
    let token = world.submit(0, request);
    match world.ending(token) {
        Some(Err(SpaceError::Damaged { offset, .. })) => assert_eq!(offset, 7 * PAGE),
        other => panic!("{other:?}"),
    }
    world.holds(8 * PAGE, 2 * PAGE, 1);
    // It is written anew, and so all is well.
    world.write(7 * PAGE, PAGE, 2);
    assert_eq!(world.scrub_all().found.pages_damaged, 0);
}

#[test]
fn a_scrub_keeps_its_pace_and_makes_room_for_writes() {
    let mut world = world(2);
    world.write(0, BYTES, 1);
    world.order(ScrubOrder::Start);
    let done = world.scrubbed();
    assert!(done <= RATE + SCRUB_BATCH_BYTES, "{done}");
    assert!(done >= RATE / 2, "{done}");
    let begun = world.client.now;
    world.scrub_to_end(0);
    assert!(world.client.now - begun <= 2 * SECOND);
    let took = world.scrub().last.expect("one ended").elapsed_ms;
    assert!(
        (2000..2500).contains(&took),
        "{took} ms for 8 MiB at 4 MiB/s"
    );
    world.order(ScrubOrder::Start);
    for _ in 0..1500 {
        if world.scrub().passes == 2 {
            break;
        }
        world.write(0, PAGE, 1);
        world.pass(SECOND / 100);
    }
    let took = world.scrub().last.expect("one ended").elapsed_ms;
    assert!((7000..9000).contains(&took), "{took} ms at a quarter of it");
    world.order(ScrubOrder::Start);
    world.order(ScrubOrder::Plan(ScrubPlan {
        every: None,
        bytes_per_s: 1 << 40,
    }));
    world.pass(SECOND);
    assert_eq!(world.scrub().passes, 3);
}

/// What holds nothing on any leg is not walked through.
#[test]
fn a_scrub_passes_over_what_nobody_wrote() {
    let mut world = World::new(vec![segment(0, 1, 2, BYTES), segment(1, 1, 2, BYTES)]);
    let size = 2 * BYTES;
    world.order(ScrubOrder::Plan(ScrubPlan {
        every: None,
        bytes_per_s: RATE / 16,
    }));
    world.write(0, PAGE, 1);
    world.write(size - PAGE, PAGE, 1);
    world.spoil(0, 0);
    world.order(ScrubOrder::Start);
    for _ in 0..4 {
        world.pass(SECOND);
    }
    let pass = world.scrub().last.expect("it ended");
    assert_eq!(pass.found.pages_compared, size / PAGE);
    assert_eq!(pass.found.pages_repaired, 1);
}

#[test]
fn a_scrub_stops_and_goes_on_from_there() {
    let mut world = world(2);
    world.write(0, BYTES, 1);
    (0..2048).step_by(64).for_each(|page| world.spoil(1, page));
    world.order(ScrubOrder::Start);
    world.pass(SECOND);
    world.order(ScrubOrder::Stop);
    let left = world.spoiled(1).len();
    assert!((1..32).contains(&left), "{left}");
    world.pass(10 * SECOND);
    assert_eq!(world.spoiled(1).len(), left);
    assert_eq!(world.scrub().state, ScrubState::Stopped);
    world.order(ScrubOrder::Start);
    let pass = world.scrub_to_end(0);
    assert_eq!(pass.found.pages_compared, BYTES / PAGE, "each page once");
    assert_eq!(pass.found.pages_repaired, 32);
    assert_eq!(world.scrub().state, ScrubState::Off, "nothing is planned");
}

#[test]
fn scrubs_begin_when_they_are_planned() {
    let mut world = world(2);
    world.write(0, BYTES, 1);
    world.order(ScrubOrder::Plan(ScrubPlan {
        every: Some(SCRUB_DELAY * 6),
        bytes_per_s: RATE,
    }));
    world.pass(SECOND);
    assert_eq!(world.scrub().state, ScrubState::Waiting);
    world.client.now += SCRUB_DELAY;
    world.pass(SECOND / 10);
    assert_eq!(world.scrub().state, ScrubState::Running);
    world.pass(4 * SECOND);
    assert_eq!(world.scrub().passes, 1);
    world.client.now += SCRUB_DELAY * 5;
    world.pass(SECOND);
    assert_eq!(world.scrub().state, ScrubState::Waiting);
    world.client.now += SCRUB_DELAY;
    world.pass(4 * SECOND);
    assert_eq!(world.scrub().passes, 2);
    assert_eq!(world.counters().pages_scrubbed, 2 * BYTES / PAGE);
}

/// A leg goes in the middle of a scrub and comes back: the pass waits for it,
/// and ends.
#[test]
fn a_scrub_outlives_the_loss_of_a_leg() {
    let mut world = world(2);
    world.write(0, BYTES, 1);
    (0..2048).step_by(64).for_each(|page| world.spoil(1, page));
    world.order(ScrubOrder::Start);
    world.pass(SECOND);
    world.kill(1);
    world.write(64 * PAGE, PAGE, 2);
    world.pass(SECOND / 4);
    world.restart(1);
    world.until(VolumeState::Healthy);
    let pass = world.scrub_to_end(0);
    assert_eq!((pass.bytes_done, pass.bytes_skipped), (BYTES, 0));
    assert_eq!(pass.found.pages_differing, 0);
    world.scrub_all();
    assert!(world.spoiled(1).is_empty());
    world.legs_are_equal();
    world.holds(64 * PAGE, PAGE, 2);
}

/// Writes reach one leg before the other, and scrubs look in between.
#[test]
fn pages_that_are_being_written_are_not_reported() {
    for seed in 0..20 {
        let mut world = World::new(vec![segment(0, 1, 2, 1 << 20)]);
        world.dice = Dice(seed);
        world.open();
        world.order(ScrubOrder::Plan(ScrubPlan {
            every: None,
            bytes_per_s: 1 << 40,
        }));
        let mut spoiled = 0;
        for value in 1..400 {
            if world.dice.one_in(2) {
                let start = world.dice.roll(250) * PAGE + world.dice.roll(2) * 512;
                let channel = world.dice.roll(2) as usize;
                world.submit(channel, write(start, 3 * PAGE, value));
            }
            if world.dice.one_in(40) {
                world.spoil(1, 255 - spoiled);
                spoiled += 1;
            }
            if world.scrub().pass.is_none() {
                world.client.mailbox.post(Event::Scrub(ScrubOrder::Start));
            }
            for _ in 0..world.dice.roll(30) {
                let busy = guard(&world.fabric.0).busy();
                if !busy.is_empty() {
                    let at = world.dice.roll(busy.len() as u64) as usize;
                    guard(&world.fabric.0).step(busy[at], &mut world.dice);
                }
                world.client.turn();
                world.client.now += Duration::from_micros(200);
            }
            world.reap();
            if let Some(last) = world.scrub().last {
                assert_eq!(last.found.pages_differing, 0, "seed {seed}: {last:?}");
            }
        }
        world.pass(SECOND);
        assert!(world.scrub().passes > 2, "seed {seed}: {:?}", world.scrub());
        assert_eq!(world.scrub_all().found.pages_differing, 0);
        assert!(world.spoiled(1).is_empty());
        world.legs_are_equal();
    }
}

/// The source is brick 0, and brick 1 follows it.
#[test]
fn a_scrub_repairs_a_copy_that_follows() {
    let mut world = followed();
    world.order(ScrubOrder::Plan(ScrubPlan {
        every: None,
        bytes_per_s: 1 << 40,
    }));
    world.write(0, 12 * PAGE, 1);
    world.pass(SECOND);
    world.spoil(1, 3);
    // Lost, and never there.
    for page in [5, 11, 14] {
        let leg = world.leg(1);
        let mut bricks = guard(&world.fabric.0);
        bricks
            .slice_mut(leg.brick, leg.slice)
            .hold(page, &[7; PAGE as usize]);
    }
    let pass = world.scrub_all();
    assert_eq!(
        (pass.found.pages_damaged, pass.found.pages_repaired),
        (4, 4)
    );
    let mut offsets: Vec<u64> = pass.found.damages.iter().map(|it| it.offset).collect();
    offsets.sort_unstable();
    assert_eq!(offsets, [3, 5, 11, 14].map(|page| page * PAGE));
    assert!(pass.found.damages.iter().all(|it| it.bricks == [brick(1)]));
    for page in 0..16 {
        assert!(
            world.page(0, 0, page) == world.page(0, 1, page),
            "page {page}"
        );
    }
    assert_eq!(world.leg(1).state, LegState::Following);
    assert_eq!(world.scrub_all().found.pages_damaged, 0);
}

/// The copy lags behind writes, and what it lacks is not taken for wrong.
#[test]
fn what_a_copy_has_yet_to_get_is_not_reported() {
    for seed in 0..20 {
        let mut world = followed();
        world.dice = Dice(seed);
        world.open();
        world.order(ScrubOrder::Plan(ScrubPlan {
            every: None,
            bytes_per_s: 1 << 40,
        }));
        for value in 1..400 {
            if world.dice.one_in(2) {
                let start = world.dice.roll(13) * PAGE + world.dice.roll(2) * 512;
                let channel = world.dice.roll(2) as usize;
                world.submit(channel, write(start, 3 * PAGE, value));
            }
            if world.scrub().pass.is_none() {
                world.client.mailbox.post(Event::Scrub(ScrubOrder::Start));
            }
            for _ in 0..world.dice.roll(30) {
                let busy = guard(&world.fabric.0).busy();
                if !busy.is_empty() {
                    let at = world.dice.roll(busy.len() as u64) as usize;
                    guard(&world.fabric.0).step(busy[at], &mut world.dice);
                }
                world.client.turn();
                world.client.now += Duration::from_micros(200);
            }
            world.reap();
            if let Some(last) = world.scrub().last {
                assert_eq!(last.found.pages_damaged, 0, "seed {seed}: {last:?}");
            }
        }
        world.pass(SECOND);
        assert!(world.scrub().passes > 2, "seed {seed}: {:?}", world.scrub());
        assert_eq!(world.scrub_all().found.pages_damaged, 0);
        assert_eq!(world.leg(1).state, LegState::Following);
    }
}

/// Changes that wait in the queue are no difference either.
#[test]
fn a_copy_that_is_far_behind_is_waited_for() {
    let mut world = followed();
    world.order(ScrubOrder::Plan(ScrubPlan {
        every: None,
        bytes_per_s: 1 << 40,
    }));
    world.freeze(1, true);
    for value in 0..SHIP_CHANGES_MAX as u64 {
        world.write(value % 8 * PAGE, PAGE, 2 + value);
    }
    let behind = world.page(0, 1, 0);
    world.order(ScrubOrder::Start);
    world.pass(SHIP_AGE_MAX / 2);
    assert_eq!(world.scrub().passes, 0, "the copy does not answer");
    assert!(world.page(0, 1, 0) == behind);
    world.freeze(1, false);
    let pass = world.scrub_to_end(0);
    assert_eq!((pass.found.pages_damaged, pass.bytes_skipped), (0, 0));
    assert!((0..8).all(|page| world.page(0, 0, page) == world.page(0, 1, page)));
}
