//! The births of pages after a loss: which of them a returning leg gets, and that it keeps them.

use crate::world::cluster::{PAGE, TestCluster, part, transact, write};
use crate::world::manager::{brick, segment};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{LegState, STRIPE_BYTES, SliceId};
use pagemesh_base::poison;
use pagemesh_base::space::{Reply, Request};
use pagemesh_volume::VolumeState;
use pagemesh_volume::limits::MANAGER_RETRY_MAX;
use std::time::Duration;
use uuid::Uuid;

/// The births of the pages of a leg of the only column.
fn births(world: &TestCluster, leg: usize) -> Vec<u32> {
    let layout = world.manager.layout();
    let leg = &layout.segments[0].columns[0].legs[leg];
    let bricks = poison::lock(&world.fabric.0);
    bricks.slice(leg.brick, leg.slice).births().to_vec()
}

#[test]
fn returned_leg_has_births_of_its_source() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 6 * PAGE, 1);
    world.kill(1);
    world.write(PAGE, 2 * PAGE, 2);
    world.discard(3 * PAGE, PAGE);
    world.write(4 * PAGE + 512, 1024, 3);
    let source = births(&world, 0);
    assert!(source[1] > source[0], "a loss raises the epoch: {source:?}");
    assert_eq!(source[1..5], [source[1]; 4]);
    assert_eq!(source[5], source[0]);
    world.restore_and_compare();
    assert!(world.manager.layout().epoch.0 > source[1]);
    assert_eq!(
        births(&world, 0),
        source,
        "nothing is written to the source"
    );
    assert_eq!(births(&world, 1), source);
}

/// The discard was made on the remaining leg before the loss. When it is sent again, the page is a
/// hole there.
#[test]
fn discard_in_flight_at_loss_reaches_returned_leg() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 4 * PAGE, 1);
    world.set_frozen(1, true);
    let (offset, len) = (PAGE, PAGE);
    let token = world.submit(0, Request::Discard { offset, len });
    assert_eq!(world.result_of(token), None, "one leg has it");
    assert!(world.page_bytes(0, 0, 1).is_empty());
    world.kill(1);
    world.advance_time(MANAGER_RETRY_MAX);
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    // The next operation of the connection says that the discard is complete.
    world.write(3 * PAGE, PAGE, 2);
    world.restore_and_compare();
    world.assert_holds(PAGE, PAGE, 0);
}

/// A mirror of buffering legs. Page 1 was acknowledged by all of them before the last one lost it
/// with its power. The remaining ones have completed it since, and other pages after it.
fn world_after_power_loss(legs: usize) -> TestCluster {
    let column = segment(0, 1, legs, STRIPE_BYTES);
    let mut world = TestCluster::of_class(vec![column], "file-sync");
    world.write(0, 4 * PAGE, 1);
    world.complete(Request::Flush);
    // The lost leg remembers by its own list only operations that it does not know as complete.
    world.write(8 * PAGE, PAGE, 1);
    world.complete(Request::Flush);
    world.write(PAGE, PAGE, 2);
    world.kill(legs as u128 - 1);
    world.write(2 * PAGE, PAGE, 3);
    for value in 4..8 {
        world.complete(Request::Flush);
        world.write(3 * PAGE, PAGE, value);
    }
    world
}

#[test]
fn unflushed_write_reaches_leg_after_power_loss() {
    let mut world = world_after_power_loss(2);
    let source = births(&world, 0);
    assert!(source[1] < source[2], "page 1 is older than the loss");
    world.restore_and_compare();
    world.kill(0);
    world.assert_holds(0, PAGE, 1);
    world.assert_holds(PAGE, PAGE, 2);
    world.assert_holds(2 * PAGE, PAGE, 3);
}

/// The page is still listed after a restart of the source, and after the return of another leg, which
/// becomes the only source.
#[test]
fn unflushed_write_is_listed_over_second_loss() {
    let mut world = world_after_power_loss(3);
    world.complete(Request::Flush);
    world.kill(1);
    world.write(2 * PAGE, PAGE, 8);
    world.complete(Request::Flush);
    world.restart(1);
    world.advance_time(Duration::from_secs(20));
    world.complete(Request::Flush);
    world.kill(0);
    world.write(3 * PAGE, PAGE, 9);
    world.complete(Request::Flush);
    world.restart(2);
    world.advance_time(Duration::from_secs(20));
    world.kill(1);
    world.assert_holds(PAGE, PAGE, 2);
    world.assert_holds(2 * PAGE, PAGE, 8);
}

/// A slot had four bits for the number of a loss. Each page was written during the loss 16 before, too.
#[test]
fn losses_are_not_limited() {
    let mut world = TestCluster::mirror(2);
    for loss in 0..40 {
        world.kill(1);
        world.write(loss % 16 * PAGE, PAGE, loss + 1);
        let before = world.counters().bytes_resynced;
        world.restart(1);
        world.advance_time(Duration::from_secs(20));
        world.assert_legs_equal();
        let copied = world.counters().bytes_resynced - before;
        assert_eq!(copied, PAGE, "loss {loss}");
    }
}

/// The client died after the first leg alone had got a write, a part of a page, a discard and a
/// transaction.
fn world_with_operations_on_one_leg() -> TestCluster {
    let mut world = TestCluster::mirror(2);
    world.write(0, 12 * PAGE, 1);
    // The second leg lists only this page: it knows the others as complete.
    world.write(14 * PAGE, PAGE, 1);
    world.set_frozen(1, true);
    world.submit(0, write(PAGE, 2 * PAGE, 2));
    world.submit(0, write(4 * PAGE + 512, 1024, 3));
    let (offset, len) = (6 * PAGE, PAGE);
    world.submit(0, Request::Discard { offset, len });
    world.submit(0, transact(vec![part(8, 4), part(10, 4)]));
    world.run_until_idle();
    world.set_frozen(1, false);
    world.attach_partially(0);
    world
}

#[test]
fn recovered_pages_have_equal_births() {
    let mut world = world_with_operations_on_one_leg();
    world.attach();
    world.open();
    for (page, value) in [(1, 2), (2, 2), (6, 0), (8, 4), (10, 4), (11, 1)] {
        world.assert_holds(page * PAGE, PAGE, value);
    }
    world.assert_legs_equal();
    assert_eq!(births(&world, 0), births(&world, 1));
}

/// The leg that has the operations is full: it cannot give them a new birth, and serves on.
#[test]
fn full_leg_with_operations_in_flight_serves() {
    let mut world = world_with_operations_on_one_leg();
    // Room for the page that the other leg lists.
    world.set_room(0, 1);
    world.attach();
    world.open();
    for leg in 0..2 {
        let status = world.leg_status(leg);
        assert_eq!(status.state, LegState::InSync, "{:?}", status.last_error);
    }
    world.assert_holds(PAGE, 2 * PAGE, 2);
    world.assert_holds(8 * PAGE, PAGE, 4);
    world.assert_legs_equal();
}

/// The new leg holds the same bytes in a page, of another birth.
#[test]
fn full_resync_makes_births_equal() {
    let mut world = TestCluster::mirror(1);
    world.write(0, 4 * PAGE, 1);
    world.discard(2 * PAGE, PAGE);
    let new = (brick(2), SliceId(Uuid::from_u128(77)));
    world.add_copy(new.0, new.1);
    let same = world.page_bytes(0, 0, 1);
    poison::lock(&world.fabric.0)
        .slice_mut(new.0, new.1)
        .set_page(1, &same);
    world.refresh_layout();
    world.run_until_state(VolumeState::Healthy);
    world.assert_legs_equal();
    assert!(births(&world, 0)[1] > 1);
    assert_eq!(births(&world, 0), births(&world, 1));
}

#[test]
fn defects_of_births_are_caught() {
    let stories: [(Defect, fn()); 2] = [
        (
            Defect::RecoveredBirthsDiffer,
            recovered_pages_have_equal_births,
        ),
        (Defect::ResyncedBirthsDiffer, full_resync_makes_births_equal),
    ];
    for (defect, story) in stories {
        defect::set(Some(defect));
        let told = std::panic::catch_unwind(story);
        defect::set(None);
        assert!(told.is_err(), "{defect:?} is not caught");
    }
}
