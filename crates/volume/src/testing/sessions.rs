//! Bricks that have no session left.

use super::world::{PAGE, World, write};
use crate::channel;
use crate::limits::{CHANNELS_MAX, RETURN_RETRY_MAX};
use crate::status::VolumeState;
use pagemesh_base::layout::LegState;
use pagemesh_base::space::{Channel, Reply, SpaceError};
use std::time::Duration;

fn is_busy(ending: Option<&Result<Reply, SpaceError>>) -> bool {
    matches!(ending, Some(Err(SpaceError::Busy(_))))
}

#[test]
fn a_channel_that_finds_no_session_fails_alone() {
    let mut world = World::mirror(2);
    world.write(0, PAGE, 1);
    // The keeper's, and the channel's.
    world.sessions(1, 2);
    let late = world.client.open();
    world.rest();
    assert_eq!(
        world.connections(0),
        2,
        "it keeps none, though nobody looks"
    );
    world.channels.push(late);
    for value in 2..4 {
        let token = world.submit(1, write(0, PAGE, 9));
        assert!(is_busy(world.ending(token).as_ref()));
        world.write(0, PAGE, value);
        world.holds(0, PAGE, value);
    }
    assert_eq!(world.client.status().state, VolumeState::Healthy);
    assert_eq!(world.leg(1).state, LegState::InSync);
    assert_eq!(world.counters().legs_lost, 0);
    // One that is closed makes room.
    world.sessions(1, 3);
    world.channels.pop();
    let next = world.open();
    let token = world.submit(next, write(0, PAGE, 5));
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    world.heals();
}

#[test]
fn channel_says_before_requests_whether_it_has_sessions() {
    let mut world = World::mirror(2);
    let mut first = world.client.open();
    assert_eq!(first.ready(), Ok(false), "no brick was asked yet");
    world.rest();
    assert_eq!(first.ready(), Ok(true));
    world.sessions(1, 3);
    let mut late = world.client.open();
    world.rest();
    assert!(matches!(late.ready(), Err(SpaceError::Busy(_))));
    drop(first);
    drop(late);
    world.rest();
    let mut next = world.client.open();
    world.rest();
    assert_eq!(next.ready(), Ok(true));
}

#[test]
fn a_leg_that_returns_waits_for_a_session_for_each_channel() {
    let mut world = World::mirror(2);
    let other = world.open();
    world.kill(1);
    world.write(0, PAGE, 1);
    world.until(VolumeState::Degraded);
    world.sessions(1, 2);
    world.restart(1);
    for value in 2..6 {
        world.pass(RETURN_RETRY_MAX);
        world.write(0, PAGE, value);
    }
    assert_ne!(world.leg(1).state, LegState::InSync);
    assert_eq!(world.leg(0).state, LegState::InSync);
    world.channels.remove(other);
    world.pass(RETURN_RETRY_MAX * 2);
    world.until(VolumeState::Healthy);
    world.holds(0, PAGE, 5);
    world.heals();
}

/// The only copy is as good as it was, and others were faster.
#[test]
fn a_copy_that_comes_up_with_too_few_sessions_is_not_lost_again() {
    let mut world = World::mirror(1);
    let other = world.open();
    world.write(0, PAGE, 1);
    world.kill(0);
    world.rest();
    let lost = world.counters().legs_lost;
    world.sessions(0, 2);
    world.restart(0);
    let token = world.submit(other, write(0, PAGE, 2));
    world.pass(Duration::from_secs(5));
    assert_eq!(world.ending(token), None, "its channel has yet to get one");
    assert_eq!(world.counters().legs_lost, lost);
    world.sessions(0, 3);
    world.pass(Duration::from_millis(100));
    assert_eq!(world.ending(token), Some(Ok(Reply::Done)));
    assert_eq!(world.counters().legs_lost, lost);
    // What was opened meanwhile is turned away, and nobody waits for it.
    world.kill(0);
    world.rest();
    world.restart(0);
    world.channels.push(world.client.open());
    world.pass(Duration::from_secs(1));
    let late = world.submit(2, write(0, PAGE, 9));
    assert!(is_busy(world.ending(late).as_ref()));
    world.write(0, PAGE, 3);
    world.heals();
    world.holds(0, PAGE, 3);
}

#[test]
fn a_volume_has_so_many_channels() {
    let mut world = World::mirror(1);
    while world.channels.len() < CHANNELS_MAX {
        world.channels.push(world.client.open());
    }
    let open = |world: &World| channel::open(&world.client.hub, &world.client.mailbox);
    assert!(matches!(open(&world), Err(SpaceError::Busy(_))));
    world.channels.pop();
    world.rest();
    assert!(open(&world).is_ok());
}
