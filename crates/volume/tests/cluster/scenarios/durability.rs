//! Damage, flushes, and changes in flight at a close or an attach.

use crate::world::cluster::{PAGE, TestCluster, write};
use crate::world::manager::segment;
use pagemesh_base::layout::STRIPE_BYTES;
use pagemesh_base::poison;
use pagemesh_base::space::{Reply, Request};
use pagemesh_volume::VolumeState;
use pagemesh_volume::limits::HEDGE_DELAY_MAX;

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
/// all deaths but the last leg's.
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

/// A durable write is durable on every leg when it is acknowledged, with the writes before it.
#[test]
fn durable_write_survives_death_of_all_buffering_legs() {
    for channels in [1, 2] {
        let mut world = TestCluster::of_class(vec![segment(0, 1, 2, STRIPE_BYTES)], "file-sync");
        world.write(0, PAGE, 1);
        let durable = |value| match write(PAGE, PAGE, value) {
            Request::Write { offset, data, .. } => Request::Write {
                offset,
                data,
                durable: true,
            },
            other => other,
        };
        let channel = if channels == 1 { 0 } else { world.open() };
        let token = world.submit(channel, durable(2));
        world.run_until_idle();
        assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
        for brick in [0, 1] {
            world.kill(brick);
        }
        for brick in [0, 1] {
            world.restart(brick);
        }
        world.run_until_state(VolumeState::Healthy);
        // It covered the other channel's write, so no loss is reported.
        world.complete(Request::Flush);
        world.assert_holds(0, PAGE, 1);
        world.assert_holds(PAGE, PAGE, 2);
        world.assert_legs_equal();
    }
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
