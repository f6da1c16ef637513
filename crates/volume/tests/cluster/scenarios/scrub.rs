//! Scrubs: their findings, repairs and rate, and the data that they must not change.

use crate::world::cluster::{PAGE, TestCluster, replicated_cluster, write};
use crate::world::manager::{brick, segment};
use pagemesh_base::layout::LegState;
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::space::{Request, SpaceError};
use pagemesh_volume::limits::{REPLICATION_AGE_MAX, SCRUB_BATCH_BYTES, SCRUB_DELAY};
use pagemesh_volume::test_api::LOWERED_REPLICATION_CHANGES_MAX;
use pagemesh_volume::test_api::{ControllerEvent, ScrubOrder};
use pagemesh_volume::{ScrubPass, ScrubPlan, ScrubState, ScrubStatus, VolumeState};
use std::collections::BTreeSet;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
const RATE: u64 = 4 << 20;
const BYTES: u64 = 8 << 20;

fn scrub_cluster(copies: usize) -> TestCluster {
    let mut world = TestCluster::new(vec![segment(0, 1, copies, BYTES)]);
    world.send_order(ScrubOrder::Plan(ScrubPlan {
        every: None,
        bytes_per_s: RATE,
    }));
    world
}

impl TestCluster {
    fn send_order(&mut self, order: ScrubOrder) {
        self.client.mailbox.post(ControllerEvent::Scrub(order));
        self.run_until_idle();
    }

    fn scrub_status(&self) -> ScrubStatus {
        self.client.status().scrub
    }

    /// The bytes that the running scrub has read.
    fn scrubbed_bytes(&mut self) -> u64 {
        // The status is updated only from time to time.
        self.advance_time(SECOND);
        self.scrub_status().pass.map_or(0, |pass| pass.bytes_done)
    }

    /// Runs a scrub to its end.
    fn run_scrub(&mut self) -> ScrubPass {
        let before = self.scrub_status().passes;
        self.send_order(ScrubOrder::Start);
        self.run_scrub_to_end(before)
    }

    fn run_scrub_to_end(&mut self, before: u64) -> ScrubPass {
        for _ in 0..100 {
            if self.scrub_status().passes > before {
                return self.scrub_status().last.expect("it ended");
            }
            self.advance_time(SECOND);
        }
        panic!("a scrub does not end: {:?}", self.scrub_status());
    }

    fn damage_page(&mut self, leg: usize, page: u64) {
        let leg = self.manager.layout().segments[0].columns[0].legs[leg].clone();
        let mut bricks = poison::lock(&self.fabric.0);
        bricks.slice_mut(leg.brick, leg.slice).damage_page(page);
    }

    fn damaged_pages(&self, leg: usize) -> BTreeSet<u64> {
        let leg = self.manager.layout().segments[0].columns[0].legs[leg].clone();
        let bricks = poison::lock(&self.fabric.0);
        bricks.slice(leg.brick, leg.slice).damaged.clone()
    }
}

#[test]
fn scrub_repairs_damage_on_every_leg() {
    let mut world = scrub_cluster(3);
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
        world.damage_page(leg, page);
    }
    let pass = world.run_scrub();
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
    assert!((0..3).all(|leg| world.damaged_pages(leg).is_empty()));
    world.assert_legs_equal();
    let counters = world.counters();
    assert_eq!(counters.pages_scrubbed, BYTES / PAGE);
    assert_eq!((counters.pages_repaired, counters.repairs_failed), (6, 0));
    assert_eq!(world.client.status().state, VolumeState::Healthy);
    let again = world.run_scrub();
    assert_eq!(
        (again.found.pages_damaged, again.found.damages.len()),
        (0, 0)
    );
}

#[test]
fn page_damaged_on_all_legs_is_reported_and_unreadable() {
    let mut world = scrub_cluster(2);
    world.write(0, 32 * PAGE, 1);
    world.damage_page(0, 7);
    world.damage_page(1, 7);
    world.damage_page(1, 9);
    let pass = world.run_scrub();
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
    match world.result_of(token) {
        Some(Err(SpaceError::Damaged { offset, .. })) => assert_eq!(offset, 7 * PAGE),
        other => panic!("{other:?}"),
    }
    world.assert_holds(8 * PAGE, 2 * PAGE, 1);
    // The page is written anew, so the damage is gone.
    world.write(7 * PAGE, PAGE, 2);
    assert_eq!(world.run_scrub().found.pages_damaged, 0);
}

#[test]
fn scrub_keeps_rate_and_slows_for_writes() {
    let mut world = scrub_cluster(2);
    world.write(0, BYTES, 1);
    world.send_order(ScrubOrder::Start);
    let done = world.scrubbed_bytes();
    assert!(done <= RATE + SCRUB_BATCH_BYTES, "{done}");
    assert!(done >= RATE / 2, "{done}");
    let begun = world.client.now;
    world.run_scrub_to_end(0);
    assert!(world.client.now - begun <= 2 * SECOND);
    let took = world.scrub_status().last.expect("one ended").elapsed_ms;
    assert!(
        (2000..2500).contains(&took),
        "{took} ms for 8 MiB at 4 MiB/s"
    );
    world.send_order(ScrubOrder::Start);
    for _ in 0..1500 {
        if world.scrub_status().passes == 2 {
            break;
        }
        world.write(0, PAGE, 1);
        world.advance_time(SECOND / 100);
    }
    let took = world.scrub_status().last.expect("one ended").elapsed_ms;
    assert!((7000..9000).contains(&took), "{took} ms at a quarter of it");
    world.send_order(ScrubOrder::Start);
    world.send_order(ScrubOrder::Plan(ScrubPlan {
        every: None,
        bytes_per_s: 1 << 40,
    }));
    world.advance_time(SECOND);
    assert_eq!(world.scrub_status().passes, 3);
}

/// A range that is a hole on every leg is skipped.
#[test]
fn scrub_skips_unwritten_ranges() {
    let mut world = TestCluster::new(vec![segment(0, 1, 2, BYTES), segment(1, 1, 2, BYTES)]);
    let size = 2 * BYTES;
    world.send_order(ScrubOrder::Plan(ScrubPlan {
        every: None,
        bytes_per_s: RATE / 16,
    }));
    world.write(0, PAGE, 1);
    world.write(size - PAGE, PAGE, 1);
    world.damage_page(0, 0);
    world.send_order(ScrubOrder::Start);
    for _ in 0..4 {
        world.advance_time(SECOND);
    }
    let pass = world.scrub_status().last.expect("it ended");
    assert_eq!(pass.found.pages_compared, size / PAGE);
    assert_eq!(pass.found.pages_repaired, 1);
}

#[test]
fn stopped_scrub_resumes_at_same_place() {
    let mut world = scrub_cluster(2);
    world.write(0, BYTES, 1);
    (0..2048)
        .step_by(64)
        .for_each(|page| world.damage_page(1, page));
    world.send_order(ScrubOrder::Start);
    world.advance_time(SECOND);
    world.send_order(ScrubOrder::Stop);
    let left = world.damaged_pages(1).len();
    assert!((1..32).contains(&left), "{left}");
    world.advance_time(10 * SECOND);
    assert_eq!(world.damaged_pages(1).len(), left);
    assert_eq!(world.scrub_status().state, ScrubState::Stopped);
    world.send_order(ScrubOrder::Start);
    let pass = world.run_scrub_to_end(0);
    assert_eq!(pass.found.pages_compared, BYTES / PAGE, "each page once");
    assert_eq!(pass.found.pages_repaired, 32);
    assert_eq!(
        world.scrub_status().state,
        ScrubState::Off,
        "nothing is planned"
    );
}

#[test]
fn scrubs_start_on_schedule() {
    let mut world = scrub_cluster(2);
    world.write(0, BYTES, 1);
    world.send_order(ScrubOrder::Plan(ScrubPlan {
        every: Some(SCRUB_DELAY * 6),
        bytes_per_s: RATE,
    }));
    world.advance_time(SECOND);
    assert_eq!(world.scrub_status().state, ScrubState::Waiting);
    world.client.now += SCRUB_DELAY;
    world.advance_time(SECOND / 10);
    assert_eq!(world.scrub_status().state, ScrubState::Running);
    world.advance_time(4 * SECOND);
    assert_eq!(world.scrub_status().passes, 1);
    world.client.now += SCRUB_DELAY * 5;
    world.advance_time(SECOND);
    assert_eq!(world.scrub_status().state, ScrubState::Waiting);
    world.client.now += SCRUB_DELAY;
    world.advance_time(4 * SECOND);
    assert_eq!(world.scrub_status().passes, 2);
    assert_eq!(world.counters().pages_scrubbed, 2 * BYTES / PAGE);
}

/// A leg is lost during a scrub and comes back. The pass waits for it, and ends.
#[test]
fn scrub_survives_leg_loss() {
    let mut world = scrub_cluster(2);
    world.write(0, BYTES, 1);
    (0..2048)
        .step_by(64)
        .for_each(|page| world.damage_page(1, page));
    world.send_order(ScrubOrder::Start);
    world.advance_time(SECOND);
    world.kill(1);
    world.write(64 * PAGE, PAGE, 2);
    world.advance_time(SECOND / 4);
    world.restart(1);
    world.run_until_state(VolumeState::Healthy);
    let pass = world.run_scrub_to_end(0);
    assert_eq!((pass.bytes_done, pass.bytes_skipped), (BYTES, 0));
    assert_eq!(pass.found.pages_differing, 0);
    world.run_scrub();
    assert!(world.damaged_pages(1).is_empty());
    world.assert_legs_equal();
    world.assert_holds(64 * PAGE, PAGE, 2);
}

/// Writes reach one leg before the other, and scrubs read in between.
#[test]
fn scrub_ignores_pages_being_written() {
    for seed in 0..20 {
        let mut world = TestCluster::new(vec![segment(0, 1, 2, 1 << 20)]);
        world.rng = SplitMix64::new(seed);
        world.open();
        world.send_order(ScrubOrder::Plan(ScrubPlan {
            every: None,
            bytes_per_s: 1 << 40,
        }));
        let mut spoiled = 0;
        for value in 1..400 {
            if world.rng.one_in(2) {
                let start = world.rng.below(250) * PAGE + world.rng.below(2) * 512;
                let channel = world.rng.below(2) as usize;
                world.submit(channel, write(start, 3 * PAGE, value));
            }
            if world.rng.one_in(40) {
                world.damage_page(1, 255 - spoiled);
                spoiled += 1;
            }
            if world.scrub_status().pass.is_none() {
                world
                    .client
                    .mailbox
                    .post(ControllerEvent::Scrub(ScrubOrder::Start));
            }
            for _ in 0..world.rng.below(30) {
                let busy = poison::lock(&world.fabric.0).busy();
                if !busy.is_empty() {
                    let at = world.rng.below(busy.len() as u64) as usize;
                    poison::lock(&world.fabric.0).step(busy[at], &mut world.rng);
                }
                world.client.poll();
                world.client.now += Duration::from_micros(200);
            }
            world.reap();
            if let Some(last) = world.scrub_status().last {
                assert_eq!(last.found.pages_differing, 0, "seed {seed}: {last:?}");
            }
        }
        world.advance_time(SECOND);
        assert!(
            world.scrub_status().passes > 2,
            "seed {seed}: {:?}",
            world.scrub_status()
        );
        assert_eq!(world.run_scrub().found.pages_differing, 0);
        assert!(world.damaged_pages(1).is_empty());
        world.assert_legs_equal();
    }
}

/// Brick 0 is the source, and brick 1 its asynchronous replica.
#[test]
fn scrub_repairs_asynchronous_replica() {
    let mut world = replicated_cluster();
    world.send_order(ScrubOrder::Plan(ScrubPlan {
        every: None,
        bytes_per_s: 1 << 40,
    }));
    world.write(0, 12 * PAGE, 1);
    world.advance_time(SECOND);
    world.damage_page(1, 3);
    // Pages that were lost, and pages that were never there.
    for page in [5, 11, 14] {
        let leg = world.leg_status(1);
        let mut bricks = poison::lock(&world.fabric.0);
        bricks
            .slice_mut(leg.brick, leg.slice)
            .set_page(page, &[7; PAGE as usize]);
    }
    let pass = world.run_scrub();
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
            world.page_bytes(0, 0, page) == world.page_bytes(0, 1, page),
            "page {page}"
        );
    }
    assert_eq!(world.leg_status(1).state, LegState::AsyncReplica);
    assert_eq!(world.run_scrub().found.pages_damaged, 0);
}

/// The replica lags behind writes. Changes that it lacks are not reported as differences.
#[test]
fn scrub_ignores_replication_lag() {
    for seed in 0..20 {
        let mut world = replicated_cluster();
        world.rng = SplitMix64::new(seed);
        world.open();
        world.send_order(ScrubOrder::Plan(ScrubPlan {
            every: None,
            bytes_per_s: 1 << 40,
        }));
        for value in 1..400 {
            if world.rng.one_in(2) {
                let start = world.rng.below(13) * PAGE + world.rng.below(2) * 512;
                let channel = world.rng.below(2) as usize;
                world.submit(channel, write(start, 3 * PAGE, value));
            }
            if world.scrub_status().pass.is_none() {
                world
                    .client
                    .mailbox
                    .post(ControllerEvent::Scrub(ScrubOrder::Start));
            }
            for _ in 0..world.rng.below(30) {
                let busy = poison::lock(&world.fabric.0).busy();
                if !busy.is_empty() {
                    let at = world.rng.below(busy.len() as u64) as usize;
                    poison::lock(&world.fabric.0).step(busy[at], &mut world.rng);
                }
                world.client.poll();
                world.client.now += Duration::from_micros(200);
            }
            world.reap();
            if let Some(last) = world.scrub_status().last {
                assert_eq!(last.found.pages_damaged, 0, "seed {seed}: {last:?}");
            }
        }
        world.advance_time(SECOND);
        assert!(
            world.scrub_status().passes > 2,
            "seed {seed}: {:?}",
            world.scrub_status()
        );
        assert_eq!(world.run_scrub().found.pages_damaged, 0);
        assert_eq!(world.leg_status(1).state, LegState::AsyncReplica);
    }
}

/// Changes that wait in the queue are not reported as differences.
#[test]
fn scrub_waits_for_lagging_replica() {
    let mut world = replicated_cluster();
    world.send_order(ScrubOrder::Plan(ScrubPlan {
        every: None,
        bytes_per_s: 1 << 40,
    }));
    world.set_frozen(1, true);
    for value in 0..LOWERED_REPLICATION_CHANGES_MAX as u64 {
        world.write(value % 8 * PAGE, PAGE, 2 + value);
    }
    let behind = world.page_bytes(0, 1, 0);
    world.send_order(ScrubOrder::Start);
    world.advance_time(REPLICATION_AGE_MAX / 2);
    assert_eq!(world.scrub_status().passes, 0, "the copy does not answer");
    assert!(world.page_bytes(0, 1, 0) == behind);
    world.set_frozen(1, false);
    let pass = world.run_scrub_to_end(0);
    assert_eq!((pass.found.pages_damaged, pass.bytes_skipped), (0, 0));
    assert!((0..8).all(|page| world.page_bytes(0, 0, page) == world.page_bytes(0, 1, page)));
}
