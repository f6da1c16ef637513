//! The controller sleeps while it cannot make progress.

use crate::world::cluster::{PAGE, TestCluster, write};
use crate::world::manager::brick;
use pagemesh_base::poison;
use pagemesh_base::space::Reply;
use pagemesh_volume::VolumeState;

/// Two legs are asked at once, and one is stalled. The answer of the other is taken before its
/// task asks for it. Otherwise it would wake the controller for ever.
#[test]
fn answers_are_taken_while_another_leg_is_stalled() {
    for still in [0, 1] {
        let mut world = TestCluster::mirror(3);
        world.write(0, PAGE, 1);
        world.set_frozen(still, true);
        world.kill(2);
        world.run_until_idle();
        let bricks = poison::lock(&world.fabric.0);
        assert!(bricks.has_request_to_frozen(), "the controller asks both");
        assert!(!bricks.has_unreaped(), "of leg {}", 1 - still);
        drop(bricks);
        world.set_frozen(still, false);
        world.run_until_state(VolumeState::Degraded);
    }
}

/// A channel may not be polled for a long time. A brick cannot come back while one of its
/// clients maps its pool.
#[test]
fn idle_channel_drops_links_to_dead_brick() {
    for copies in 1..=2 {
        let mut world = TestCluster::mirror(copies);
        let other = world.open();
        // A request of the first channel is in flight.
        let token = world.submit(0, write(0, PAGE, 1));
        world.set_frozen(0, true);
        let away = [world.channels.remove(0), world.channels.remove(other - 1)];
        world.kill(0);
        world.run_until_idle();
        let kept = poison::lock(&world.fabric.0).connections_of(brick(0));
        assert!(kept.is_empty(), "{kept:?}");
        world.channels.extend(away);
        world.restore_and_compare();
        assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
        world.assert_holds(0, PAGE, 1);
    }
}
