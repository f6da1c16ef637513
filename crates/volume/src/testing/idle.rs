//! The keeper sleeps while there is nothing that it can do.

use super::manager::brick;
use super::world::{PAGE, World, write};
use crate::hub::guard;
use crate::status::VolumeState;
use pagemesh_base::space::Reply;

/// Two legs are asked at once, and one stands still: the answer of the other is taken
/// although nobody awaits it yet. Left where it is, it would wake the keeper for ever.
#[test]
fn no_answer_is_left_while_another_leg_stands_still() {
    for still in [0, 1] {
        let mut world = World::mirror(3);
        world.write(0, PAGE, 1);
        world.freeze(still, true);
        world.kill(2);
        world.rest();
        let bricks = guard(&world.fabric.0);
        assert!(bricks.waits_for_frozen(), "the keeper asks both");
        assert!(!bricks.has_unread(), "of leg {}", 1 - still);
        drop(bricks);
        world.freeze(still, false);
        world.until(VolumeState::Degraded);
    }
}

/// Threads that have a channel may be elsewhere for long, and a brick cannot come back
/// while one of its clients has its pool mapped.
#[test]
fn no_channel_keeps_a_connection_to_a_brick_that_died_while_its_thread_is_elsewhere() {
    for copies in 1..=2 {
        let mut world = World::mirror(copies);
        let other = world.open();
        // Of the first, what was asked for is not over.
        let token = world.submit(0, write(0, PAGE, 1));
        world.freeze(0, true);
        let away = [world.channels.remove(0), world.channels.remove(other - 1)];
        world.kill(0);
        world.rest();
        let kept = guard(&world.fabric.0).connections_of(brick(0));
        assert!(kept.is_empty(), "{kept:?}");
        world.channels.extend(away);
        world.heals();
        assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
        world.holds(0, PAGE, 1);
    }
}
