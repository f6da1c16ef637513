//! Scenarios that must end well, step by step: questions of an operator, each with the volume's
//! state meanwhile.

use super::Rng;
use super::client::Client;
use super::cluster::{PAGE, TestCluster, create_slices, part, transact, write};
use super::manager::{ManagerMode, brick, segment};
use super::oracle::fill;
use crate::controller::ControllerEvent;
use crate::limits::{DOWN_LIMIT, HEDGE_DELAY_MAX, MANAGER_RETRY_MAX};
use crate::status::VolumeState;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{LegState, STRIPE_BYTES, SliceId};
use pagemesh_base::poison;
use pagemesh_base::slice::TransactionPart;
use pagemesh_base::space::{Reply, Request, SpaceError};
use std::sync::mpsc;
use std::time::Duration;
use uuid::Uuid;

#[test]
fn requests_succeed_without_manager() {
    let mut world = TestCluster::mirror(2);
    world.manager.set_mode(ManagerMode::Down);
    world.write(0, 3 * PAGE, 7);
    world.discard(PAGE, PAGE);
    world.assert_holds(0, PAGE, 7);
    world.assert_holds(PAGE, PAGE, 0);
    world.advance_time(Duration::from_secs(5));
    assert_eq!(world.client.status().state, VolumeState::Healthy);
    world.assert_legs_equal();
}

#[test]
fn lost_leg_stalls_writes_until_manager_returns() {
    let mut world = TestCluster::mirror(2);
    world.write(0, PAGE, 1);
    world.manager.set_mode(ManagerMode::Down);
    world.kill(1);
    let token = world.submit(0, write(0, PAGE, 2));
    world.advance_time(DOWN_LIMIT * 2);
    assert_eq!(
        world.result_of(token),
        None,
        "only the manager may leave a leg out"
    );
    assert_eq!(world.client.status().state, VolumeState::AwaitingManager);
    // Reads outside the write's range are served meanwhile.
    world.assert_holds(4 * PAGE, PAGE, 0);
    world.manager.set_mode(ManagerMode::Up);
    world.advance_time(MANAGER_RETRY_MAX);
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    assert_eq!(world.client.status().state, VolumeState::Degraded);
    assert_eq!(world.leg_status(1).state, LegState::Stale);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 2);
}

#[test]
fn stalled_leg_delays_few_reads() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 16 * PAGE, 3);
    world.set_frozen(1, true);
    let read = |page: u64| Request::Read {
        offset: page * PAGE,
        len: PAGE as u32,
    };
    let reads: Vec<u64> = (0..8).map(|page| world.submit(0, read(page))).collect();
    world.run_until_idle();
    let has_ended = |world: &TestCluster, token: &u64| world.results.contains_key(token);
    let (served, held): (Vec<u64>, Vec<u64>) =
        reads.iter().partition(|token| has_ended(&world, token));
    assert!(!served.is_empty() && !held.is_empty(), "in turns");
    world.advance_time(HEDGE_DELAY_MAX);
    assert!(held.iter().all(|token| has_ended(&world, token)));
    let hedged = world.counters().reads_hedged;
    assert_eq!(hedged, held.len() as u64);
    // Unanswered reads count as load, so the other reads go to the less loaded leg.
    for page in 0..16 {
        world.assert_holds(page * PAGE, PAGE, 3);
    }
    assert_eq!(world.counters().reads_hedged, hedged);
    assert_eq!(world.client.status().state, VolumeState::Healthy);
    // The answers come late, and reads go to the leg again. Or they never come.
    world.set_frozen(1, false);
    world.run_until_idle();
    let before = world.leg_reads(0);
    (0..8).for_each(|page| world.assert_holds(page * PAGE, PAGE, 3));
    assert!(world.leg_reads(0) > before, "both serve reads");
    world.set_frozen(1, true);
    let reads: Vec<u64> = (0..4).map(|page| world.submit(0, read(page))).collect();
    world.advance_time(HEDGE_DELAY_MAX);
    world.kill(1);
    world.run_until_state(VolumeState::Degraded);
    assert!(reads.iter().all(|token| has_ended(&world, token)));
    world.restore_and_compare();
    world.assert_holds(0, 16 * PAGE, 3);
}

/// Of two reads during a write, the later one returned older data: one leg had the write, the
/// other not yet (found by seeds 60, 1005 and 1465 of an earlier cluster simulation).
#[test]
fn write_on_one_leg_is_not_read() {
    let mut world = TestCluster::mirror(2);
    let other = world.open();
    world.write(0, PAGE, 1);
    world.set_frozen(1, true);
    let token = world.submit(0, write(0, PAGE, 2));
    let read = |offset| Request::Read {
        offset,
        len: PAGE as u32,
    };
    // Reads go to both legs in turns, and one leg does not answer.
    let reads: Vec<u64> = (0..4).map(|_| world.submit(other, read(0))).collect();
    for read in &reads {
        assert_eq!(world.result_of(*read), None, "one leg may be lost");
    }
    assert_eq!(
        world.page_bytes(0, 0, 0),
        fill(2, PAGE / 512),
        "the write is on one leg"
    );
    let beside: Vec<u64> = (0..2)
        .map(|_| world.submit(other, read(4 * PAGE)))
        .collect();
    for read in beside {
        assert!(world.result_of(read).is_some(), "other reads do not wait");
    }
    // The leg with the write is lost. The write and the reads that wait for it go on.
    world.set_frozen(1, false);
    world.kill(0);
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    for read in reads {
        assert!(world.result_of(read).is_some_and(|ending| ending.is_ok()));
    }
    world.assert_holds(0, PAGE, 2);
    world.restart(0);
    world.restore_and_compare();
}

/// The remaining legs track writes after a loss, so no write may be sent before they have heard
/// of the round.
#[test]
fn writes_wait_for_barrier_after_leg_loss() {
    let mut world = TestCluster::mirror(2);
    world.kill(1);
    poison::lock(&world.fabric.0).hold_barriers = true;
    let token = world.submit(0, write(0, PAGE, 2));
    world.advance_time(Duration::from_secs(1));
    assert_eq!(world.result_of(token), None);
    let later = world.submit(0, write(4 * PAGE, PAGE, 3));
    world.advance_time(Duration::from_secs(1));
    assert_eq!(world.result_of(later), None);
    assert!(world.page_bytes(0, 0, 4).is_empty(), "not even sent");
    poison::lock(&world.fabric.0).hold_barriers = false;
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    assert_eq!(world.result_of(later), Some(Ok(Reply::Done)));
    world.restore_and_compare();
}

/// The barrier of one loss went to a stalled leg. Once a channel has lost that leg, too, the
/// controller must not wait for its answer, which may take the time of a whole call.
#[test]
fn barrier_does_not_wait_for_lost_leg() {
    let mut world = TestCluster::mirror(3);
    world.write(0, PAGE, 1);
    world.set_frozen(1, true);
    world.kill(0);
    let token = world.submit(0, write(0, PAGE, 2));
    world.advance_time(Duration::from_secs(1));
    assert_eq!(world.result_of(token), None, "leg 1 may have it");
    {
        let mut bricks = poison::lock(&world.fabric.0);
        // The connection of the channel; the controller's is older.
        let newest = bricks.connections_of(brick(1)).pop();
        bricks.break_connection(newest.expect("a connection"));
    }
    world.advance_time(MANAGER_RETRY_MAX);
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    assert_eq!(world.leg_status(0).state, LegState::Stale);
    assert_eq!(world.leg_status(1).state, LegState::Stale);
    world.assert_holds(0, PAGE, 2);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 2);
}

/// A brick cannot open its pool again before every client has unmapped it. A channel that is
/// polled only now never used the connection that it was given.
#[test]
fn unpolled_channel_drops_links_to_dead_brick() {
    let mut world = TestCluster::mirror(2);
    let late = world.client.open();
    world.run_until_idle();
    world.kill(1);
    world.write(0, PAGE, 1);
    world.channels.push(late);
    world.run_until_idle();
    let kept = poison::lock(&world.fabric.0).connections_of(brick(1));
    assert!(kept.is_empty(), "{kept:?}");
    world.restore_and_compare();
}

/// The same for a volume without requests, with channels or without any.
#[test]
fn idle_volume_drops_links_to_dead_brick() {
    for channels in [1, 0] {
        let mut world = TestCluster::mirror(2);
        world.channels.truncate(channels);
        world.run_until_idle();
        world.kill(1);
        world.run_until_idle();
        let kept = poison::lock(&world.fabric.0).connections_of(brick(1));
        assert!(kept.is_empty(), "{channels} channels: {kept:?}");
    }
}

/// The manager left the leg out, but its reply was lost. The client must ask for the outcome,
/// not assume one.
#[test]
fn lost_manager_reply_is_queried_again() {
    let mut world = TestCluster::mirror(2);
    world.manager.set_mode(ManagerMode::LoseNextReply);
    world.kill(0);
    let token = world.submit(0, write(0, PAGE, 2));
    world.advance_time(MANAGER_RETRY_MAX * 2);
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    assert_eq!(world.leg_status(0).state, LegState::Stale);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 2);
}

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

#[test]
fn overlapping_channel_writes_leave_legs_equal() {
    for seed in 0..40 {
        let mut world = TestCluster::mirror(3);
        world.rng = Rng(seed);
        for _ in 0..3 {
            world.open();
        }
        let mut tokens = vec![];
        for round in 0..10 {
            for channel in 0..4 {
                let start = world.rng.below(20) * 512;
                let value = round * 10 + channel + 1;
                let request = write(start, 3 * PAGE, value);
                tokens.push(world.submit(channel as usize, request));
            }
            // Some legs are slower than others.
            for _ in 0..world.rng.below(12) {
                let busy = poison::lock(&world.fabric.0).busy();
                if let Some(at) = busy.len().checked_sub(1) {
                    let at = world.rng.below(at as u64 + 1) as usize;
                    poison::lock(&world.fabric.0).step(busy[at], &mut world.rng);
                }
            }
            world.reap();
        }
        world.run_until_idle();
        for token in tokens {
            assert_eq!(world.results.remove(&token), Some(Ok(Reply::Done)));
        }
        world.assert_legs_equal();
    }
}

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

#[test]
fn volume_grows_in_use() {
    for degraded in [false, true] {
        let mut world = TestCluster::mirror(2);
        let size = STRIPE_BYTES;
        world.write(size - PAGE, PAGE, 1);
        if degraded {
            world.kill(1);
            world.write(size - PAGE, PAGE, 2);
        }
        let busy = world.submit(0, write(0, 4 * PAGE, 9));
        let more = segment(1, 2, 2, 2 * STRIPE_BYTES);
        create_slices(&world.fabric, std::slice::from_ref(&more));
        world.manager.grow(more);
        let beyond = world.submit(0, write(size, PAGE, 3));
        let ending = world.result_of(beyond).expect("an answer");
        assert!(
            matches!(ending, Err(SpaceError::OutOfRange { .. })),
            "{ending:?}"
        );
        let (answer, told) = mpsc::channel();
        world.client.mailbox.post(ControllerEvent::Refresh(answer));
        world.advance_time(Duration::from_secs(3));
        assert_eq!(told.try_recv(), Ok(Ok(())));
        assert_eq!(world.result_of(busy), Some(Ok(Reply::Done)));
        let status = world.client.status();
        assert_eq!(status.size_bytes, 3 * STRIPE_BYTES);
        assert_eq!(status.epoch, world.manager.layout().epoch.0);
        // The writes cross the border of the segments, and reach the last page.
        world.write(size - PAGE, 3 * PAGE, 4);
        world.write(3 * STRIPE_BYTES - PAGE, PAGE, 5);
        // New slices refuse older clients from the start.
        let epoch = status.epoch;
        for leg in &world.manager.layout().segments[1].columns[1].legs {
            let bricks = poison::lock(&world.fabric.0);
            if bricks.bricks[&leg.brick].up {
                assert_eq!(
                    bricks.slice(leg.brick, leg.slice).epoch(),
                    world.client.status().epoch.max(epoch)
                );
            }
        }
        world.restore_and_compare();
        world.assert_holds(size - PAGE, 3 * PAGE, 4);
        world.assert_holds(3 * STRIPE_BYTES - PAGE, PAGE, 5);
        world.crash();
        world.assert_holds(size - PAGE, 3 * PAGE, 4);
        world.assert_legs_equal();
    }
}

/// An added copy may hold any data, so all pages that are mapped on any copy are compared.
#[test]
fn leg_is_added_in_use() {
    for copies in [1, 2] {
        let mut world = TestCluster::mirror(copies);
        world.write(0, 4 * PAGE, 1);
        world.discard(2 * PAGE, PAGE);
        let new = (brick(2), SliceId(Uuid::from_u128(77)));
        world.add_copy(new.0, new.1);
        // Pages that are mapped on the other copies, and pages that are holes there.
        for page in [0, 2, 14] {
            let mut bricks = poison::lock(&world.fabric.0);
            bricks.slice_mut(new.0, new.1).set_page(page, &fill(9, 8));
        }
        world.write(PAGE, PAGE, 2);
        world.refresh_layout();
        let busy = world.submit(0, write(8 * PAGE, 4 * PAGE, 3));
        world.run_until_state(VolumeState::Healthy);
        assert_eq!(world.result_of(busy), Some(Ok(Reply::Done)));
        world.assert_legs_equal();
        let leg = world.leg_status(copies);
        assert_eq!((leg.brick, leg.state), (new.0, LegState::InSync));
        (0..copies as u128).for_each(|number| world.kill(number));
        world.run_until_state(VolumeState::Degraded);
        for (page, value) in [(0, 1), (1, 2), (2, 0), (3, 1), (11, 3), (14, 0)] {
            world.assert_holds(page * PAGE, PAGE, value);
        }
        world.restore_and_compare();
    }
}

/// A leg was away when a page was discarded. It clears the page with an added copy as its only
/// source.
#[test]
fn added_leg_propagates_earlier_discards() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 4 * PAGE, 1);
    // The page under test is in no in-flight table.
    world.write(8 * PAGE, PAGE, 1);
    world.kill(1);
    world.write(8 * PAGE, PAGE, 2);
    world.discard(2 * PAGE, PAGE);
    world.write(5 * PAGE, PAGE, 1);
    world.add_copy(brick(2), SliceId(Uuid::from_u128(77)));
    world.refresh_layout();
    world.advance_time(Duration::from_secs(20));
    assert_eq!(world.leg_status(2).state, LegState::InSync);
    world.kill(0);
    world.restart(1);
    world.advance_time(Duration::from_secs(20));
    assert_eq!(world.leg_status(1).state, LegState::InSync);
    world.assert_legs_equal();
    world.restore_and_compare();
}

/// A late answer to an earlier request has an older layout than the present one. Legs refuse
/// its epoch.
#[test]
fn late_layout_is_ignored() {
    let mut world = TestCluster::mirror(2);
    world.write(0, PAGE, 1);
    world.request_refresh();
    world.client.poll();
    let late = world
        .client
        .perform_call()
        .expect("the layout is asked for");
    world.kill(1);
    world.run_until_state(VolumeState::Degraded);
    let raised = world.counters().epochs_raised;
    world.client.deliver_answer(late);
    world.run_until_idle();
    assert_eq!(world.counters().epochs_raised, raised, "no leg hears of it");
    assert_eq!(world.client.status().state, VolumeState::Degraded);
    world.write(0, PAGE, 2);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 2);
}

/// The added leg is lost before or during its resync.
#[test]
fn added_leg_lost_during_resync_recovers() {
    for steps in 0..120 {
        let mut world = TestCluster::mirror(1);
        world.write(0, 16 * PAGE, 1);
        world.add_copy(brick(1), SliceId(Uuid::from_u128(77)));
        world.request_refresh();
        world.run_steps(steps);
        world.kill(1);
        world.write(7 * PAGE, PAGE, 2);
        world.restore_and_compare();
        let status = world.leg_status(1);
        assert_eq!(status.state, LegState::InSync, "after {steps} steps");
    }
}

/// Concatenated segments, stripes, and stripes of mirrors: every page is at its place, on every
/// copy.
#[test]
fn layouts_map_every_page_correctly() {
    for (columns, copies, segments) in [(1, 1, 2), (3, 1, 1), (2, 2, 1), (2, 2, 2), (3, 3, 2)] {
        let bytes = 2 * STRIPE_BYTES * columns as u64;
        let all = (0..segments).map(|n| segment(n, columns, copies, bytes));
        let mut world = TestCluster::new(all.collect());
        let size = world.client.status().size_bytes;
        assert_eq!(size, bytes * segments as u64);
        for page in 0..size / PAGE {
            world.submit(0, write(page * PAGE, PAGE, page + 1));
            if page % 16 == 15 {
                world.run_until_idle();
            }
        }
        world.run_until_idle();
        assert!(
            world
                .results
                .values()
                .all(|ending| *ending == Ok(Reply::Done))
        );
        let layout = world.manager.layout();
        let before = |segment: usize| -> usize {
            let earlier = layout.segments[..segment].iter();
            earlier.map(|s| s.columns.len()).sum()
        };
        for page in 0..size / PAGE {
            let [place] = layout.map(page * PAGE, PAGE)[..] else {
                panic!("a page in two places");
            };
            let column = before(place.segment) + place.column;
            for leg in 0..copies {
                let found = world.page_bytes(column, leg, (place.offset / PAGE) as usize);
                assert_eq!(found, fill(page + 1, 8), "page {page}, leg {leg}");
            }
        }
        // A long read joins stripes and segments.
        let values = world.read(0, size);
        let expected = (0..size / 512).map(|sector| sector / 8 + 1);
        assert!(values.into_iter().eq(expected));
        world.discard(PAGE + 512, size - 2 * PAGE);
        let values = world.read(0, size);
        let kept = |sector: u64| sector < 9 || sector >= size / 512 - 7;
        let expected = (0..size / 512).map(|s| if kept(s) { s / 8 + 1 } else { 0 });
        assert!(values.into_iter().eq(expected));
    }
}

#[test]
fn three_way_mirror_survives_two_losses() {
    for (first, second) in [(0, 1), (1, 2), (2, 0)] {
        let mut world = TestCluster::mirror(3);
        world.write(0, 8 * PAGE, 1);
        world.kill(first);
        world.write(PAGE, PAGE, 2);
        world.kill(second);
        world.write(2 * PAGE, PAGE, 3);
        world.write(3 * PAGE + 512, 1024, 4);
        assert_eq!(world.client.status().state, VolumeState::Degraded);
        world.assert_holds(PAGE, PAGE, 2);
        // The leg that left first returns first, and is the only source of the other one.
        world.restart(first);
        world.advance_time(Duration::from_secs(20));
        world.write(4 * PAGE, PAGE, 5);
        let survivor = 3 - first - second;
        world.kill(survivor);
        world.write(5 * PAGE, PAGE, 6);
        world.restart(second);
        world.advance_time(Duration::from_secs(20));
        world.assert_legs_equal();
        world.restore_and_compare();
        for (page, value) in [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 1)] {
            world.assert_holds(page * PAGE, PAGE, value);
        }
        world.assert_holds(3 * PAGE + 512, 1024, 4);
        world.assert_holds(3 * PAGE + 1536, 512, 1);
    }
}

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

/// A lost leg is made stale, and the reply is lost. Then both legs are back, with no change
/// pending (found by seed 28243 of the cluster simulation).
#[test]
fn lost_manager_reply_is_queried_without_pending_change() {
    let mut world = TestCluster::mirror(2);
    world.write(0, PAGE, 1);
    world.manager.set_mode(ManagerMode::LoseNextReplyThenDown);
    world.kill(1);
    world.run_until_idle();
    assert_eq!(
        world.manager.layout().segments[0].columns[0].legs[1].state,
        LegState::Stale
    );
    assert_eq!(
        world.leg_status(1).state,
        LegState::InSync,
        "the reply was lost"
    );
    world.kill(0);
    world.run_until_idle();
    world.restart(0);
    world.restart(1);
    world.advance_time(Duration::from_secs(1));
    world.manager.set_mode(ManagerMode::Up);
    world.advance_time(Duration::from_secs(5));
    world.run_until_state(VolumeState::Healthy);
    let layout = world.manager.layout();
    let column = &layout.segments[0].columns[0];
    assert!(
        column.legs.iter().all(|leg| leg.state == LegState::InSync),
        "{column:?}"
    );
    world.assert_legs_equal();
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

/// All legs are away for too long. Requests fail, and changes that one leg made are recovered
/// when the legs return.
#[test]
fn volume_without_legs_fails_requests_after_timeout() {
    let mut world = TestCluster::mirror(2);
    world.write(0, PAGE, 1);
    world.write(4 * PAGE, PAGE, 1);
    world.set_frozen(0, true);
    let token = world.submit(0, write(0, PAGE, 2));
    world.run_until_idle();
    // The manager leaves no leg out before both are gone.
    world.manager.set_mode(ManagerMode::Down);
    world.kill(0);
    world.kill(1);
    world.set_frozen(0, false);
    // The read detects the loss of the other leg.
    let read = world.submit(
        0,
        Request::Read {
            offset: 0,
            len: 512,
        },
    );
    let other = world.submit(
        0,
        Request::Read {
            offset: 8 * PAGE,
            len: 512,
        },
    );
    world.run_until_state(VolumeState::Unavailable);
    assert_eq!(world.result_of(token), None);
    world.manager.set_mode(ManagerMode::Up);
    world.advance_time(DOWN_LIMIT + Duration::from_secs(1));
    let ending = world.result_of(token);
    assert!(
        matches!(ending, Some(Err(SpaceError::Unavailable(_)))),
        "{ending:?}"
    );
    for token in [read, other] {
        let ending = world.result_of(token);
        assert!(
            matches!(ending, Some(Err(SpaceError::Unavailable(_)))),
            "{ending:?}"
        );
    }
    // The leg without the write is the source for the other.
    world.restart(0);
    world.advance_time(Duration::from_secs(10));
    world.assert_holds(0, PAGE, 1);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 1);
}

/// A short absence of all legs is a stall, not an error.
#[test]
fn requests_succeed_if_all_legs_return_soon() {
    let mut world = TestCluster::mirror(2);
    world.write(0, PAGE, 1);
    world.kill(0);
    world.kill(1);
    let token = world.submit(0, write(0, PAGE, 2));
    world.advance_time(Duration::from_secs(5));
    assert_eq!(world.result_of(token), None);
    world.restart(0);
    world.restart(1);
    world.advance_time(Duration::from_secs(2));
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 2);
}

/// A client crash leaves a write on one leg. The next attach makes the legs equal before it
/// serves, and rolls forward data that a read may have returned.
#[test]
fn write_on_one_leg_rolls_forward_at_attach() {
    for reached in [0, 1] {
        let mut world = TestCluster::mirror(2);
        world.write(0, PAGE, 1);
        world.set_frozen(1 - reached, true);
        world.submit(0, write(0, PAGE, 2));
        world.run_until_idle();
        world.set_frozen(1 - reached, false);
        world.crash();
        world.assert_legs_equal();
        world.assert_holds(0, PAGE, 2);
    }
}

#[test]
fn damaged_page_is_repaired_from_another_leg() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 2 * PAGE, 1);
    let leg = world.manager.layout().segments[0].columns[0].legs[1].clone();
    poison::lock(&world.fabric.0)
        .slice_mut(leg.brick, leg.slice)
        .damage_page(1);
    world.assert_holds(PAGE, PAGE, 1);
    let status = world.client.status();
    assert_eq!(status.state, VolumeState::Healthy);
    assert!(
        poison::lock(&world.fabric.0)
            .slice(leg.brick, leg.slice)
            .damaged
            .is_empty()
    );
    world.assert_legs_equal();
}

/// A late repair is not hedged, as a read would be. Otherwise the column would wait for ever
/// for an answer that it had counted as a read.
#[test]
fn late_repair_does_not_block_column() {
    let mut world = TestCluster::mirror(3);
    world.write(0, 2 * PAGE, 1);
    let leg = world.manager.layout().segments[0].columns[0].legs[1].clone();
    poison::lock(&world.fabric.0)
        .slice_mut(leg.brick, leg.slice)
        .damage_page(1);
    // The first good leg, from which the repair reads, is stalled.
    world.set_frozen(0, true);
    let read = || Request::Read {
        offset: PAGE,
        len: PAGE as u32,
    };
    let reads: Vec<u64> = (0..6).map(|_| world.submit(0, read())).collect();
    world.run_until_idle();
    world.advance_time(HEDGE_DELAY_MAX * 4);
    world.set_frozen(0, false);
    for token in reads {
        assert!(matches!(world.result_of(token), Some(Ok(Reply::Data(_)))));
    }
    assert!(world.counters().pages_repaired > 0);
    world.kill(2);
    world.write(0, 2 * PAGE, 2);
    world.restore_and_compare();
    world.assert_holds(0, 2 * PAGE, 2);
}

/// On buffering legs, flushed writes survive the death of every brick. Unflushed ones survive
/// all deaths but that of the last leg.
#[test]
fn acknowledged_writes_survive_buffering_leg_death() {
    let mut world = TestCluster::of_class(vec![segment(0, 1, 2, STRIPE_BYTES)], "file-sync");
    world.write(0, PAGE, 1);
    world.complete(Request::Flush);
    world.write(PAGE, PAGE, 2);
    world.kill(1);
    world.write(2 * PAGE, PAGE, 3);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 1);
    world.assert_holds(PAGE, PAGE, 2);
    world.assert_holds(2 * PAGE, PAGE, 3);
    // The leg was flushed when it came back, so the other one may be lost.
    world.kill(0);
    world.assert_holds(PAGE, PAGE, 2);
    world.restore_and_compare();
}

/// A channel that closes cleanly leaves nothing to compare at a leg's return or at the next
/// attach.
#[test]
fn closed_channels_leave_nothing_in_flight() {
    for class in ["process", "file-sync"] {
        let mut world = TestCluster::of_class(vec![segment(0, 1, 2, STRIPE_BYTES)], class);
        for value in 1..4 {
            let own = world.open();
            let token = world.submit(own, write(value * PAGE, PAGE, value));
            world.run_until_idle();
            assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
            drop(world.channels.pop());
            world.run_until_idle();
        }
        let legs = world.manager.layout().segments[0].columns[0].legs.clone();
        for leg in legs {
            let bricks = poison::lock(&world.fabric.0);
            assert!(bricks.slice(leg.brick, leg.slice).has_nothing_in_flight());
        }
    }
}

/// A returning leg gets the writes that it missed, not those of its last return or of earlier
/// channels.
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

/// A flush covers the acknowledged writes of other channels, so it fails if they are lost. Each
/// channel reports a loss once; a channel that joins later only if no other has.
#[test]
fn flush_on_any_channel_reports_lost_writes() {
    let flush = |world: &mut TestCluster, channel| {
        let token = world.submit(channel, Request::Flush);
        world.run_until_state(VolumeState::Healthy);
        world.run_until_idle();
        world.result_of(token).expect("an answer").is_ok()
    };
    for writer_leaves in [false, true] {
        let mut world = TestCluster::of_class(vec![segment(0, 1, 2, STRIPE_BYTES)], "file-sync");
        let (other, writer) = (world.open(), world.open());
        let token = world.submit(writer, write(0, PAGE, 1));
        world.run_until_idle();
        assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
        if writer_leaves {
            drop(world.channels.pop());
        }
        for brick in [0, 1] {
            world.kill(brick);
        }
        for brick in [0, 1] {
            world.restart(brick);
        }
        assert!(!flush(&mut world, other));
        assert!(flush(&mut world, other));
        // Channel 0 was open at the loss, and may have waited for the same write.
        assert!(!flush(&mut world, 0));
        assert!(flush(&mut world, 0));
        let late = world.open();
        assert!(flush(&mut world, late));
        // Writes that a flush of another channel covered are not lost.
        world.write(0, PAGE, 2);
        assert!(flush(&mut world, other));
        for brick in [0, 1] {
            world.kill(brick);
        }
        for brick in [0, 1] {
            world.restart(brick);
        }
        assert!(flush(&mut world, 0));
        world.assert_holds(0, PAGE, 2);
    }
}

/// A channel that is dropped during a write neither leaves the legs unequal nor its range
/// locked.
#[test]
fn dropped_channel_changes_complete() {
    let mut world = TestCluster::mirror(2);
    let own = world.open();
    world.set_frozen(1, true);
    world.submit(own, write(0, PAGE, 2));
    world.run_until_idle();
    drop(world.channels.pop());
    world.kill(1);
    world.set_frozen(1, false);
    world.run_until_idle();
    world.write(0, PAGE, 3);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 3);
    assert_eq!(poison::lock(&world.client.shared.members).len(), 2);
}

#[test]
fn transaction_changes_several_extents_of_one_column() {
    let mut world = TestCluster::mirror(3);
    world.write(0, 16 * PAGE, 1);
    let (offset, len) = (5 * PAGE, 2 * PAGE);
    let parts = vec![
        part(9, 2),
        TransactionPart::Clear { offset, len },
        part(0, 3),
    ];
    assert_eq!(world.complete(transact(parts)), Reply::Done);
    for (page, value) in [(0, 3), (1, 1), (4, 1), (5, 0), (6, 0), (7, 1), (9, 2)] {
        world.assert_holds(page * PAGE, PAGE, value);
    }
    world.assert_legs_equal();
    let mut refused = |parts, why: &str| {
        let token = world.submit(0, transact(parts));
        let ending = world.result_of(token).expect("an answer");
        let told = ending.expect_err("refused").to_string();
        assert!(told.contains(why), "{told}");
    };
    refused(vec![], "no parts");
    refused(vec![part(1, 9), part(1, 9)], "overlaps");
    refused(vec![part(1, 9), part(16, 9)], "beyond the end");
    world.assert_holds(PAGE, PAGE, 1);
}

#[test]
fn transaction_across_columns_is_refused() {
    let stripe = STRIPE_BYTES / PAGE;
    let mut world = TestCluster::new(vec![segment(0, 2, 2, 4 * STRIPE_BYTES)]);
    let token = world.submit(0, transact(vec![part(0, 1), part(stripe, 1)]));
    let ending = world.result_of(token).expect("an answer");
    let Err(SpaceError::Unsupported(why)) = ending else {
        panic!("{ending:?}");
    };
    assert!(
        why.contains("2 columns") && why.contains("one column"),
        "{why}"
    );
    world.assert_holds(0, PAGE, 0);
    // Two stripes lie in one column.
    let token = world.submit(0, transact(vec![part(2 * stripe, 4), part(1, 4)]));
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    world.assert_holds(PAGE, PAGE, 4);
    world.assert_holds(2 * stripe * PAGE, PAGE, 4);
    world.assert_holds(stripe * PAGE, PAGE, 0);
}

#[test]
fn overlapping_transactions_and_writes_serialize() {
    let mut world = TestCluster::mirror(2);
    let other = world.open();
    world.set_frozen(1, true);
    let first = world.submit(0, write(4 * PAGE, PAGE, 1));
    let second = world.submit(other, transact(vec![part(2, 2), part(4, 2)]));
    let third = world.submit(0, transact(vec![part(4, 3), part(2, 3)]));
    let fourth = world.submit(other, write(0, 8 * PAGE, 4));
    let beside = world.submit(other, write(9 * PAGE, PAGE, 5));
    world.run_until_idle();
    assert_eq!(
        world.page_bytes(0, 0, 4),
        fill(1, PAGE / 512),
        "the other transactions wait"
    );
    assert_eq!(world.page_bytes(0, 0, 2), Vec::<u8>::new());
    assert_eq!(
        world.page_bytes(0, 0, 9),
        fill(5, PAGE / 512),
        "it overlaps none"
    );
    world.set_frozen(1, false);
    for token in [first, second, third, fourth, beside] {
        assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    }
    world.assert_holds(0, 8 * PAGE, 4);
    world.assert_legs_equal();
}

#[test]
fn transaction_on_one_leg_is_not_read() {
    let mut world = TestCluster::mirror(2);
    let other = world.open();
    world.set_frozen(1, true);
    let token = world.submit(0, transact(vec![part(1, 2), part(6, 2)]));
    let read = |page: u64| Request::Read {
        offset: page * PAGE,
        len: PAGE as u32,
    };
    let asked = [1, 6].map(|page| [0, 1].map(|_| world.submit(other, read(page))));
    for read in asked.as_flattened() {
        assert_eq!(world.result_of(*read), None, "one leg may be lost");
    }
    world.set_frozen(1, false);
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    for read in asked.as_flattened() {
        assert!(world.result_of(*read).is_some_and(|ending| ending.is_ok()));
    }
}

#[test]
fn resent_transaction_is_complete() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 8 * PAGE, 1);
    (0..2).for_each(|leg| world.set_frozen(leg, true));
    let token = world.submit(0, transact(vec![part(1, 2), part(3, 2), part(5, 2)]));
    assert_eq!(world.result_of(token), None);
    // The requests in flight are lost with both legs.
    (0..2).for_each(|leg| world.kill(leg));
    world.run_until_idle();
    (0..2).for_each(|leg| world.set_frozen(leg, false));
    (0..2).for_each(|leg| world.restart(leg));
    world.run_until_state(VolumeState::Healthy);
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    for page in [1, 3, 5] {
        world.assert_holds(page * PAGE, PAGE, 2);
    }
    world.assert_legs_equal();
}

#[test]
fn full_leg_applies_no_part_of_transaction() {
    let mut world = TestCluster::mirror(2);
    world.set_room(1, 2);
    let token = world.submit(0, transact(vec![part(1, 2), part(3, 2), part(5, 2)]));
    world.run_until_state(VolumeState::Degraded);
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    assert_eq!(world.leg_status(1).state, LegState::Stale);
    assert_eq!(world.page_bytes(0, 1, 1), Vec::<u8>::new());
    world.restore_and_compare();
    world.set_room(0, 2);
    world.set_room(1, 2);
    let token = world.submit(0, transact(vec![part(7, 9), part(8, 9), part(9, 9)]));
    let ending = world.result_of(token);
    assert!(
        matches!(ending, Some(Err(SpaceError::NoSpace(_)))),
        "{ending:?}"
    );
    world.assert_holds(7 * PAGE, 3 * PAGE, 0);
    assert_eq!(world.client.status().state, VolumeState::Healthy);
}

#[test]
fn transaction_on_one_leg_rolls_forward_at_attach() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 8 * PAGE, 1);
    world.set_frozen(1, true);
    let (offset, len) = (6 * PAGE, PAGE);
    let parts = vec![
        part(1, 2),
        part(3, 2),
        TransactionPart::Clear { offset, len },
    ];
    world.submit(0, transact(parts));
    world.run_until_idle();
    world.set_frozen(1, false);
    poison::lock(&world.fabric.0).take_messages();
    world.crash();
    for (page, value) in [(1, 2), (2, 1), (3, 2), (6, 0)] {
        world.assert_holds(page * PAGE, PAGE, value);
    }
    world.assert_legs_equal();
}

/// The source of a recovery dies during the copy. At each step the other leg has all of a
/// transaction or nothing.
#[test]
fn interrupted_recovery_keeps_transactions_atomic() {
    for steps in 0..60 {
        let mut world = TestCluster::mirror(2);
        world.write(0, 8 * PAGE, 1);
        world.set_frozen(1, true);
        world.submit(0, transact(vec![part(1, 2), part(3, 2), part(6, 2)]));
        world.run_until_idle();
        world.set_frozen(1, false);
        world.attach_partially(steps);
        world.kill(0);
        world.attach();
        world.open();
        let first = world.read(PAGE, PAGE)[0];
        world.assert_holds(3 * PAGE, PAGE, first);
        world.assert_holds(6 * PAGE, PAGE, first);
        world.assert_holds(2 * PAGE, PAGE, 1);
        world.restore_and_compare();
        world.assert_holds(PAGE, PAGE, first);
    }
}

/// The outdated leg is lost during its recovery, at any request. It gets the rest when it
/// returns (found by seed 1000472 of an earlier cluster simulation).
#[test]
fn leg_lost_during_recovery_returns_complete() {
    for steps in 0..60 {
        let mut world = TestCluster::mirror(2);
        world.write(0, 2 * PAGE, 1);
        world.set_frozen(1, true);
        world.submit(0, write(8 * PAGE, 3 * PAGE, 2));
        world.run_until_idle();
        world.set_frozen(1, false);
        world.attach_partially(steps);
        world.kill(1);
        world.attach();
        world.open();
        world.assert_holds(8 * PAGE, 3 * PAGE, 2);
        world.restore_and_compare();
    }
}

#[test]
fn defects_of_transactions_are_caught() {
    let stories: [(Defect, fn()); 3] = [
        (
            Defect::FirstPartLocked,
            overlapping_transactions_and_writes_serialize,
        ),
        (Defect::FirstPartResent, resent_transaction_is_complete),
        (
            Defect::RecoveredByPage,
            interrupted_recovery_keeps_transactions_atomic,
        ),
    ];
    for (defect, story) in stories {
        defect::set(Some(defect));
        let told = std::panic::catch_unwind(story);
        defect::set(None);
        assert!(told.is_err(), "{defect:?} is not caught");
    }
}
