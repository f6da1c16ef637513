//! Bricks without a free session.

use crate::world::cluster::{PAGE, TestCluster, write};
use pagemesh_base::layout::LegState;
use pagemesh_base::space::{Channel, Reply, SpaceError};
use pagemesh_volume::VolumeState;
use pagemesh_volume::limits::{CHANNELS_MAX, RESYNC_RETRY_MAX};
use pagemesh_volume::test_api::open_channel;
use std::time::Duration;

fn is_busy(ending: Option<&Result<Reply, SpaceError>>) -> bool {
    matches!(ending, Some(Err(SpaceError::Busy(_))))
}

#[test]
fn channel_without_session_fails_alone() {
    let mut world = TestCluster::mirror(2);
    world.write(0, PAGE, 1);
    // The sessions of the controller and of the channel.
    world.set_sessions_max(1, 2);
    let late = world.client.open();
    world.run_until_idle();
    assert_eq!(
        world.connections(0),
        2,
        "a channel that is not polled keeps no session"
    );
    world.channels.push(late);
    for value in 2..4 {
        let token = world.submit(1, write(0, PAGE, 9));
        assert!(is_busy(world.result_of(token).as_ref()));
        world.write(0, PAGE, value);
        world.assert_holds(0, PAGE, value);
    }
    assert_eq!(world.client.status().state, VolumeState::Healthy);
    assert_eq!(world.leg_status(1).state, LegState::InSync);
    assert_eq!(world.counters().legs_lost, 0);
    // A closed channel frees its session.
    world.set_sessions_max(1, 3);
    world.channels.pop();
    let next = world.open();
    let token = world.submit(next, write(0, PAGE, 5));
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    world.restore_and_compare();
}

#[test]
fn channel_reports_readiness_before_first_request() {
    let mut world = TestCluster::mirror(2);
    let mut first = world.client.open();
    assert_eq!(first.ready(), Ok(false), "no brick was asked yet");
    world.run_until_idle();
    assert_eq!(first.ready(), Ok(true));
    world.set_sessions_max(1, 3);
    let mut late = world.client.open();
    world.run_until_idle();
    assert!(matches!(late.ready(), Err(SpaceError::Busy(_))));
    drop(first);
    drop(late);
    world.run_until_idle();
    let mut next = world.client.open();
    world.run_until_idle();
    assert_eq!(next.ready(), Ok(true));
}

#[test]
fn returning_leg_waits_for_sessions_of_all_channels() {
    let mut world = TestCluster::mirror(2);
    let other = world.open();
    world.kill(1);
    world.write(0, PAGE, 1);
    world.run_until_state(VolumeState::Degraded);
    world.set_sessions_max(1, 2);
    world.restart(1);
    for value in 2..6 {
        world.advance_time(RESYNC_RETRY_MAX);
        world.write(0, PAGE, value);
    }
    assert_ne!(world.leg_status(1).state, LegState::InSync);
    assert_eq!(world.leg_status(0).state, LegState::InSync);
    world.channels.remove(other);
    world.advance_time(RESYNC_RETRY_MAX * 2);
    world.run_until_state(VolumeState::Healthy);
    world.assert_holds(0, PAGE, 5);
    world.restore_and_compare();
}

/// The only copy is intact, but other clients took its sessions first.
#[test]
fn returning_only_leg_with_few_sessions_is_kept() {
    let mut world = TestCluster::mirror(1);
    let other = world.open();
    world.write(0, PAGE, 1);
    world.kill(0);
    world.run_until_idle();
    let lost = world.counters().legs_lost;
    world.set_sessions_max(0, 2);
    world.restart(0);
    let token = world.submit(other, write(0, PAGE, 2));
    world.advance_time(Duration::from_secs(5));
    assert_eq!(
        world.result_of(token),
        None,
        "its channel has yet to get one"
    );
    assert_eq!(world.counters().legs_lost, lost);
    world.set_sessions_max(0, 3);
    world.advance_time(Duration::from_millis(100));
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    assert_eq!(world.counters().legs_lost, lost);
    // A channel that was opened meanwhile is rejected, and no other one waits for it.
    world.kill(0);
    world.run_until_idle();
    world.restart(0);
    world.channels.push(world.client.open());
    world.advance_time(Duration::from_secs(1));
    let late = world.submit(2, write(0, PAGE, 9));
    assert!(is_busy(world.result_of(late).as_ref()));
    world.write(0, PAGE, 3);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 3);
}

#[test]
fn volume_refuses_more_than_max_channels() {
    let mut world = TestCluster::mirror(1);
    while world.channels.len() < CHANNELS_MAX {
        world.channels.push(world.client.open());
    }
    let open = |world: &TestCluster| open_channel(&world.client.shared, &world.client.mailbox);
    assert!(matches!(open(&world), Err(SpaceError::Busy(_))));
    world.channels.pop();
    world.run_until_idle();
    assert!(open(&world).is_ok());
}
