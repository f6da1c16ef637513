//! Layouts that grow or get another copy while the volume is in use.

use crate::world::cluster::{PAGE, TestCluster, create_slices, write};
use crate::world::manager::{brick, segment};
use crate::world::oracle::fill;
use pagemesh_base::layout::{LegState, STRIPE_BYTES, SliceId};
use pagemesh_base::poison;
use pagemesh_base::space::{Reply, SpaceError};
use pagemesh_volume::VolumeState;
use pagemesh_volume::test_api::ControllerEvent;
use std::sync::mpsc;
use std::time::Duration;
use uuid::Uuid;

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
