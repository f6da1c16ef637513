//! Legs that return.

use crate::world::cluster::{PAGE, TestCluster, write};
use crate::world::manager::brick;
use crate::world::oracle::fill;
use pagemesh_base::poison;
use pagemesh_base::space::{Reply, SpaceError};
use pagemesh_volume::VolumeState;

/// A write reached only a leg that then died. The client died before it sent the write again,
/// so only the dead leg has it.
#[test]
fn returning_leg_drops_write_known_only_to_it() {
    let mut world = TestCluster::mirror(2);
    world.write(0, PAGE, 1);
    // The last write of a session is in the in-flight tables, so another write comes last.
    world.write(4 * PAGE, PAGE, 1);
    world.set_frozen(0, true);
    world.submit(0, write(0, PAGE, 2));
    world.run_until_idle();
    assert_eq!(world.page_bytes(0, 1, 0), fill(2, 8));
    world.kill(1);
    world.set_frozen(0, false);
    world.crash();
    world.assert_holds(0, PAGE, 1);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 1);
}

/// A syncing leg accepts a write that the in-sync leg refuses.
#[test]
fn syncing_leg_drops_write_refused_by_others() {
    let mut world = TestCluster::mirror(2);
    world.kill(1);
    world.write(0, PAGE, 1);
    world.restart(1);
    world.run_until_syncing(1);
    world.set_room(0, 0);
    let token = world.submit(0, write(4 * PAGE, PAGE, 2));
    let ending = world.result_of(token);
    assert!(
        matches!(ending, Some(Err(SpaceError::NoSpace(_)))),
        "{ending:?}"
    );
    world.restore_and_compare();
    world.assert_holds(4 * PAGE, PAGE, 0);
}

/// A distant or busy leg takes long for each message.
#[test]
fn resync_copies_several_chunks_concurrently() {
    let mut world = TestCluster::mirror(2);
    world.kill(1);
    let places = [0, 2, 4, 6];
    for page in places {
        world.write(page * PAGE, PAGE, page + 1);
    }
    world.restart(1);
    world.run_until_syncing(1);
    world.set_frozen(1, true);
    world.run_until_idle();
    assert_eq!(poison::lock(&world.fabric.0).queued(brick(1)), places.len());
    // A write there waits for the copy of its range, and is not overwritten by it.
    let token = world.submit(0, write(4 * PAGE, PAGE, 9));
    assert!(world.result_of(token).is_none());
    world.restore_and_compare();
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    world.assert_holds(4 * PAGE, PAGE, 9);
    world.assert_holds(6 * PAGE, PAGE, 7);
}

/// A returning leg gets the writes that it missed, not the writes before its last return or of
/// earlier channels.
#[test]
fn repeated_loss_resyncs_only_missed_writes() {
    let mut world = TestCluster::mirror(2);
    world.kill(1);
    for page in 0..12 {
        world.write(page * PAGE, PAGE, 1);
    }
    world.restore_and_compare();
    for value in 2..6 {
        let before = world.counters().bytes_resynced;
        world.kill(1);
        let token = world.submit(0, write(3 * PAGE, PAGE, value));
        world.run_until_state(VolumeState::Degraded);
        assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
        world.restore_and_compare();
        assert_eq!(world.counters().bytes_resynced - before, PAGE);
    }
}
