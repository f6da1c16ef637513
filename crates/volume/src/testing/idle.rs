//! The keeper sleeps while there is nothing that it can do.

use super::world::{PAGE, World};
use crate::hub::guard;
use crate::status::VolumeState;

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
