//! Clients that another client has superseded.

use crate::world::client::Client;
use crate::world::cluster::{PAGE, TestCluster, write};
use crate::world::manager::{ManagerMode, segment};
use pagemesh_base::layout::{LegState, STRIPE_BYTES};
use pagemesh_base::poison;
use pagemesh_base::space::{Request, SpaceError};
use pagemesh_volume::VolumeState;
use pagemesh_volume::limits::MANAGER_RETRY_MAX;
use std::time::Duration;

#[test]
fn superseded_client_late_writes_are_refused() {
    let mut world = TestCluster::mirror(2);
    world.write(0, PAGE, 1);
    // The write is on its way to both legs when the other client attaches.
    world.set_frozen(0, true);
    world.set_frozen(1, true);
    let late = world.submit(0, write(0, PAGE, 2));
    world.run_until_idle();
    let mut old = std::mem::replace(
        &mut world.client,
        Client::new(&world.fabric, &world.manager),
    );
    let old_channels = std::mem::take(&mut world.channels);
    // The barriers of the new client overtake the writes of the old one.
    let delayed = poison::lock(&world.fabric.0).take_messages();
    world.set_frozen(0, false);
    world.set_frozen(1, false);
    world.attach();
    world.open();
    world.write(0, PAGE, 3);
    poison::lock(&world.fabric.0).restore_messages(delayed);
    std::mem::swap(&mut world.client, &mut old);
    world.channels.extend(old_channels);
    let ending = world.result_of(late);
    assert_eq!(ending, Some(Err(SpaceError::Fenced)));
    assert_eq!(world.client.status().state, VolumeState::Fenced);
    let again = world.submit(1, write(0, PAGE, 4));
    assert_eq!(world.result_of(again), Some(Err(SpaceError::Fenced)));
    // A sync must not end well without a flush: an asynchronous replica may lack changes of this client.
    assert!(world.client.flush_state().needs_flush);
    let read = world.submit(
        1,
        Request::Read {
            offset: 0,
            len: 512,
        },
    );
    assert_eq!(world.result_of(read), Some(Err(SpaceError::Fenced)));
    std::mem::swap(&mut world.client, &mut old);
    world.assert_holds(0, PAGE, 3);
    world.assert_legs_equal();
}

/// A fenced client must not mark a lost leg stale: the attachment belongs to another client.
#[test]
fn superseded_client_changes_no_legs() {
    let mut world = TestCluster::mirror(2);
    let mut old = std::mem::replace(
        &mut world.client,
        Client::new(&world.fabric, &world.manager),
    );
    let old_channels = std::mem::take(&mut world.channels);
    world.attach();
    world.open();
    std::mem::swap(&mut world.client, &mut old);
    world.channels.extend(old_channels);
    let all = poison::lock(&world.fabric.0).connections();
    poison::lock(&world.fabric.0).break_connection(all[0]);
    let token = world.submit(1, write(0, PAGE, 4));
    world.advance_time(Duration::from_secs(5));
    assert_eq!(world.result_of(token), Some(Err(SpaceError::Fenced)));
    let layout = world.manager.layout();
    let mut legs = layout.segments[0].columns[0].legs.iter();
    assert!(legs.all(|leg| leg.state == LegState::InSync));
}

/// A fenced channel with unflushed writes has no leg to flush to when it is closed.
#[test]
fn superseded_channel_with_unflushed_writes_closes() {
    let mut world = TestCluster::of_class(vec![segment(0, 1, 2, STRIPE_BYTES)], "file-sync");
    world.write(0, PAGE, 1);
    let mut old = std::mem::replace(
        &mut world.client,
        Client::new(&world.fabric, &world.manager),
    );
    let old_channels = std::mem::take(&mut world.channels);
    world.attach();
    world.open();
    std::mem::swap(&mut world.client, &mut old);
    let new_channels = std::mem::replace(&mut world.channels, old_channels);
    let late = world.submit(0, write(0, PAGE, 2));
    assert_eq!(world.result_of(late), Some(Err(SpaceError::Fenced)));
    world.channels = vec![];
    world.advance_time(Duration::from_secs(1));
    assert_eq!(world.client.status().state, VolumeState::Fenced);
    std::mem::swap(&mut world.client, &mut old);
    world.channels = new_channels;
    world.assert_holds(0, PAGE, 1);
    world.assert_legs_equal();
}

/// A client without a reply asks for the layout. It must not take a layout of another client
/// for its own change: both would write at one epoch.
#[test]
fn superseded_client_ignores_new_owner_layout() {
    let mut world = TestCluster::mirror(2);
    world.manager.set_mode(ManagerMode::Down);
    world.kill(1);
    let late = world.submit(0, write(0, PAGE, 2));
    world.advance_time(Duration::from_secs(1));
    assert_eq!(world.client.status().state, VolumeState::AwaitingManager);
    let mut old = std::mem::replace(
        &mut world.client,
        Client::new(&world.fabric, &world.manager),
    );
    let old_channels = std::mem::take(&mut world.channels);
    world.manager.set_mode(ManagerMode::Up);
    world.attach();
    assert_eq!(
        world.leg_status(1).state,
        LegState::Stale,
        "the old client's change was made"
    );
    world.open();
    world.write(0, PAGE, 3);
    std::mem::swap(&mut world.client, &mut old);
    world.channels.extend(old_channels);
    world.advance_time(MANAGER_RETRY_MAX);
    assert_eq!(world.result_of(late), Some(Err(SpaceError::Fenced)));
    assert_eq!(world.client.status().state, VolumeState::Fenced);
    std::mem::swap(&mut world.client, &mut old);
    world.assert_holds(0, PAGE, 3);
}
