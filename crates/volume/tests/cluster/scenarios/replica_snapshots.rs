//! Snapshots on asynchronous replicas: a snapshot that is reported has the pages of the source.

use crate::world::cluster::{PAGE, REPLICA_SLICE, TestCluster, replicated_cluster, write};
use crate::world::manager::brick;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{LegState, SliceId};
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::space::Reply;
use pagemesh_volume::CutError;
use pagemesh_volume::limits::REPLICA_PREPARE_LIMIT;
use pagemesh_volume::test_api::ControllerEvent;
use std::collections::BTreeSet;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

type CutResult = Result<(), CutError>;

fn start_cut(world: &TestCluster) -> (Epoch, Receiver<CutResult>) {
    let snapshot = world.manager.reserve_epoch();
    let (answer, result) = mpsc::channel();
    let cut = ControllerEvent::Cut(snapshot, answer);
    world.client.mailbox.post(cut);
    (snapshot, result)
}

/// The snapshots that the client reported.
fn reported(world: &TestCluster) -> BTreeSet<Epoch> {
    let state = poison::lock(&world.manager.0);
    let all = state.replica_snapshots.iter();
    all.inspect(|it| assert_eq!(it.slice, REPLICA_SLICE))
        .map(|it| it.snapshot)
        .collect()
}

fn leg(world: &TestCluster, number: usize) -> SliceId {
    world.manager.layout().segments[0].columns[0].legs[number].slice
}

#[track_caller]
fn assert_equal_snapshots(world: &TestCluster, snapshots: &BTreeSet<Epoch>) {
    let bricks = poison::lock(&world.fabric.0);
    let source = bricks.slice(brick(0), leg(world, 0));
    let replica = bricks.slice(brick(1), REPLICA_SLICE);
    for &snapshot in snapshots {
        assert!(replica.has_snapshot(snapshot), "{snapshot} is prepared");
        let (wanted, found) = (
            source.snapshot_pages(snapshot),
            replica.snapshot_pages(snapshot),
        );
        let differs = wanted
            .iter()
            .zip(&found)
            .position(|(one, other)| one != other);
        assert_eq!(differs, None, "a page of snapshot {snapshot} differs");
    }
}

#[test]
fn replica_has_a_snapshot_once_it_has_older_changes() {
    let mut world = replicated_cluster();
    world.write(0, 2 * PAGE, 2);
    world.set_frozen(1, true);
    world.write(PAGE, PAGE, 3);
    let (snapshot, result) = start_cut(&world);
    world.run_until_idle();
    assert!(
        result.try_recv().is_err(),
        "the replica has not prepared it"
    );
    // The replica prepares it, and is behind again.
    world.set_frozen(1, false);
    world.run_until_idle();
    assert_eq!(result.try_recv(), Ok(Ok(())));
    world.write(0, 3 * PAGE, 4);
    world.advance_time(Duration::from_secs(1));
    assert_eq!(reported(&world), BTreeSet::from([snapshot]));
    world.write(0, 3 * PAGE, 5);
    world.advance_time(Duration::from_secs(1));
    assert_equal_snapshots(&world, &BTreeSet::from([snapshot]));
}

#[test]
fn silent_replica_delays_a_cut_and_gets_no_snapshot() {
    let mut world = replicated_cluster();
    world.set_frozen(1, true);
    let (_, result) = start_cut(&world);
    world.advance_time(REPLICA_PREPARE_LIMIT / 2);
    assert!(result.try_recv().is_err(), "it waits");
    world.advance_time(REPLICA_PREPARE_LIMIT);
    assert_eq!(result.try_recv(), Ok(Ok(())));
    world.set_frozen(1, false);
    world.write(0, PAGE, 2);
    world.advance_time(Duration::from_secs(2));
    assert_eq!(reported(&world), BTreeSet::new());
}

#[test]
fn lost_replica_has_earlier_snapshots_only() {
    let mut world = replicated_cluster();
    world.write(0, 3 * PAGE, 2);
    let (first, _result) = start_cut(&world);
    world.advance_time(Duration::from_secs(1));
    world.write(0, PAGE, 3);
    world.kill(1);
    world.advance_time(Duration::from_secs(1));
    let (_, result) = start_cut(&world);
    world.advance_time(Duration::from_secs(1));
    assert_eq!(result.try_recv(), Ok(Ok(())));
    world.write(0, 2 * PAGE, 4);
    world.restart(1);
    world.advance_time(Duration::from_secs(30));
    assert_eq!(world.leg_status(1).state, LegState::AsyncReplica);
    world.write(PAGE, PAGE, 5);
    let (third, _result) = start_cut(&world);
    world.advance_time(Duration::from_secs(1));
    world.write(0, 3 * PAGE, 6);
    world.advance_time(Duration::from_secs(1));
    let expected = BTreeSet::from([first, third]);
    assert_eq!(reported(&world), expected);
    assert_equal_snapshots(&world, &expected);
}

/// Random writes of several channels while snapshots are cut, one message at a time. Returns the number of reported
/// snapshots.
fn replicate_under_load(seed: u64, loses_replica: bool) -> usize {
    const PAGES: u64 = 6;
    let mut world = replicated_cluster();
    let mut rng = SplitMix64::new(seed);
    world.open();
    let (mut value, mut is_up) = (10, true);
    let mut pending = BTreeSet::new();
    let mut running: Option<(Epoch, Receiver<CutResult>)> = None;
    let mut cuts = BTreeSet::new();
    for _ in 0..600 {
        match rng.below(12) {
            0..=2 if pending.len() < 6 => {
                value += 1;
                let (page, channel) = (rng.below(PAGES), rng.below(2) as usize);
                pending.insert(world.submit(channel, write(page * PAGE, PAGE, value)));
            }
            3 if running.is_none() => running = Some(start_cut(&world)),
            4 if loses_replica && rng.one_in(8) => {
                match is_up {
                    true => world.kill(1),
                    false => world.restart(1),
                }
                is_up = !is_up;
            }
            5 => {
                world.client.now += Duration::from_millis(5);
                world.client.poll();
                world.client.run_call();
            }
            6 => {
                world.reap();
            }
            _ => world.run_steps(1),
        }
        for (token, result) in std::mem::take(&mut world.results) {
            assert!(pending.remove(&token), "a write");
            assert_eq!(result, Ok(Reply::Done));
        }
        let ended = running.take_if(|(_, result)| match result.try_recv() {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                assert!(loses_replica, "{error}");
                true
            }
            Err(_) => false,
        });
        cuts.extend(ended.map(|(snapshot, _)| snapshot));
    }
    world.restart(1);
    world.advance_time(Duration::from_secs(30));
    cuts.extend(running.map(|(snapshot, _)| snapshot));
    let found = reported(&world);
    assert!(found.is_subset(&cuts), "{found:?} of {cuts:?}");
    assert_equal_snapshots(&world, &found);
    found.len()
}

#[test]
fn reported_snapshots_equal_the_source_under_load() {
    let count: usize = (0..80).map(|seed| replicate_under_load(seed, false)).sum();
    assert!(count > 60, "{count} snapshots");
}

#[test]
fn reported_snapshots_equal_the_source_while_it_is_lost() {
    let count: usize = (0..120).map(|seed| replicate_under_load(seed, true)).sum();
    assert!(count > 60, "{count} snapshots");
}
