//! Full legs, and discards that free space.

use crate::world::cluster::{PAGE, TestCluster, write};
use pagemesh_base::layout::LegState;
use pagemesh_base::space::{Reply, Request, SpaceError};
use pagemesh_volume::VolumeState;
use std::time::Duration;

#[test]
fn full_leg_leaves_and_returns_with_space() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 2 * PAGE, 1);
    world.set_room(1, 0);
    world.write(0, 2 * PAGE, 2);
    let leg = world.leg_status(1);
    assert_eq!(leg.state, LegState::Stale);
    let error = leg.last_error.expect("a reason");
    assert!(error.contains("full"), "{error}");
    world.advance_time(Duration::from_secs(30));
    assert_eq!(world.client.status().state, VolumeState::Degraded);
    world.assert_holds(0, 2 * PAGE, 2);
    // Deletes never need space.
    world.discard(0, PAGE);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 0);
    world.assert_holds(PAGE, PAGE, 2);
}

#[test]
fn write_fails_without_leg_loss_if_all_legs_are_full() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 4 * PAGE, 1);
    // Each leg runs out of space at another page.
    world.set_room(0, 1);
    world.set_room(1, 2);
    // The write has a part of a page, which both legs accept, and two pages, which both refuse.
    let token = world.submit(0, write(512, 3 * PAGE - 512, 2));
    let ending = world.result_of(token).expect("an answer");
    assert!(matches!(ending, Err(SpaceError::NoSpace(_))), "{ending:?}");
    assert_eq!(world.client.status().counters.legs_lost, 0);
    world.assert_legs_equal();
    let zeroes = Request::WriteZeroes {
        offset: 512,
        len: 3 * PAGE,
        durable: false,
    };
    // One leg has space for one end of the range.
    world.set_room(0, 1);
    world.set_room(1, 0);
    let token = world.submit(0, zeroes);
    let ending = world.result_of(token).expect("an answer");
    assert!(matches!(ending, Err(SpaceError::NoSpace(_))), "{ending:?}");
    world.assert_legs_equal();
    // A request that frees whole pages succeeds.
    world.discard(0, 4 * PAGE);
    world.assert_holds(0, 4 * PAGE, 0);
    world.restore_and_compare();
}

/// A leg accepted a write, the epoch rose, and at the second send all legs are full.
#[test]
fn write_accepted_before_legs_filled_completes() {
    let mut world = TestCluster::mirror(3);
    world.set_room(0, 1);
    world.set_room(1, 1);
    world.set_frozen(1, true);
    world.set_frozen(2, true);
    let token = world.submit(0, write(0, PAGE, 5));
    world.run_until_idle();
    world.kill(2);
    world.set_frozen(2, false);
    world.set_room(1, 0);
    world.set_frozen(1, false);
    world.advance_time(Duration::from_secs(1));
    let ending = world.result_of(token).expect("an answer");
    assert_eq!(ending, Ok(Reply::Done), "leg 0 holds it");
    world.assert_legs_equal();
    world.assert_holds(0, PAGE, 5);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 5);
}

#[test]
fn trims_while_degraded_are_resynced() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 8 * PAGE, 1);
    world.write(9 * PAGE, PAGE, 1);
    world.kill(1);
    world.discard(PAGE, 2 * PAGE);
    // The writes and discards include parts of pages.
    world.discard(5 * PAGE + 512, PAGE);
    world.write(7 * PAGE, PAGE, 3);
    world.discard(7 * PAGE, PAGE);
    assert!(!world.page_bytes(0, 1, 1).is_empty(), "the page is there");
    world.restore_and_compare();
    world.assert_holds(PAGE, 2 * PAGE, 0);
    assert!(world.page_bytes(0, 1, 1).is_empty(), "freed, not zeroed");
    assert!(world.page_bytes(0, 1, 7).is_empty());
    let moved = world.client.status().counters.bytes_resynced;
    // Writes in flight at the loss are copied twice, later ones once.
    assert!(moved <= 9 * PAGE, "moved {moved}");
}

/// Pages that were written and discarded while two legs were away are holes on the first leg
/// that returns, whether or not they were written there. The second leg must clear them, too.
#[test]
fn trims_reach_second_returning_leg_through_first() {
    let mut world = TestCluster::mirror(3);
    world.kill(0);
    // A write in flight at the loss, and the last write of a session, are in the in-flight
    // tables. The page under test is neither.
    world.write(8 * PAGE, PAGE, 1);
    world.write(0, PAGE, 1);
    world.write(4 * PAGE, PAGE, 1);
    world.kill(1);
    world.write(8 * PAGE, PAGE, 2);
    world.discard(0, PAGE);
    world.write(5 * PAGE, PAGE, 1);
    world.restart(0);
    world.advance_time(Duration::from_secs(20));
    assert_eq!(world.leg_status(0).state, LegState::InSync);
    // Leg 0 is the only source for leg 1.
    world.kill(2);
    world.restart(1);
    world.advance_time(Duration::from_secs(20));
    assert_eq!(world.leg_status(1).state, LegState::InSync);
    world.assert_legs_equal();
    world.restore_and_compare();
}

/// One of several concurrent chunks does not fit. The others complete, and the leg comes back
/// once there is space.
#[test]
fn resync_with_partial_space_retries() {
    for room in 0..5 {
        let mut world = TestCluster::mirror(2);
        world.kill(1);
        for page in [0, 2, 4, 6, 8] {
            world.write(page * PAGE, PAGE, page + 1);
        }
        world.restart(1);
        world.run_until_syncing(1);
        world.set_room(1, room);
        world.advance_time(Duration::from_secs(2));
        assert_ne!(world.leg_status(1).state, LegState::InSync);
        world.write(2 * PAGE, PAGE, 9);
        world.restore_and_compare();
        world.assert_holds(2 * PAGE, PAGE, 9);
        world.assert_holds(8 * PAGE, PAGE, 9);
    }
}
