//! Cuts in steps: changes of a held volume wait, and a group of volumes is cut at one moment.

use super::snapshots::{begin_op, snapshot_values, world_with_direct_access};
use crate::world::cluster::{PAGE, TestCluster, write};
use pagemesh_base::ids::Epoch;
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::space::Reply;
use pagemesh_volume::limits::HOLD_LIMIT;
use pagemesh_volume::test_api::{ControllerEvent, StepOrder};
use pagemesh_volume::{CutError, CutStep, StepResult};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::Duration;

fn order(world: &TestCluster, snapshot: Epoch, step: CutStep) -> Receiver<StepResult> {
    let (answer, result) = mpsc::channel();
    let order = StepOrder {
        snapshot,
        step,
        answer,
    };
    world.client.mailbox.post(ControllerEvent::CutStep(order));
    result
}

/// Orders a step, and makes all progress without time passing.
#[track_caller]
fn take(world: &mut TestCluster, snapshot: Epoch, step: CutStep) -> StepResult {
    let result = order(world, snapshot, step);
    world.run_until_idle();
    result.try_recv().expect("an answer")
}

/// Raises the stamps of a volume, and holds its changes.
#[track_caller]
fn hold(world: &mut TestCluster) -> Epoch {
    let snapshot = world.manager.reserve_epoch();
    for step in [CutStep::Prepare, CutStep::Raise] {
        assert_eq!(take(world, snapshot, step), Ok(Duration::ZERO), "{step:?}");
    }
    snapshot
}

fn expired() -> StepResult {
    Err(CutError::HoldExpired(HOLD_LIMIT))
}

#[test]
fn held_change_waits_for_the_last_step() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 2 * PAGE, 1);
    let snapshot = hold(&mut world);
    let late = world.submit(0, write(0, PAGE, 2));
    assert_eq!(world.result_of(late), None, "it waits");
    world.assert_holds(PAGE, PAGE, 1);
    world.client.now += Duration::from_millis(3);
    let held = take(&mut world, snapshot, CutStep::Finish);
    assert_eq!(held, Ok(Duration::from_millis(3)));
    assert_eq!(world.result_of(late), Some(Ok(Reply::Done)));
    world.assert_holds(0, PAGE, 2);
    assert_eq!(snapshot_values(&world, snapshot)[0], 1);
    // An answer that was lost is given again.
    assert_eq!(take(&mut world, snapshot, CutStep::Finish), held);
}

#[test]
fn change_in_flight_ends_during_a_hold() {
    let mut world = TestCluster::mirror(2);
    let early = world.submit(0, write(0, PAGE, 1));
    let snapshot = hold(&mut world);
    assert_eq!(world.result_of(early), Some(Ok(Reply::Done)));
    assert!(take(&mut world, snapshot, CutStep::Finish).is_ok());
    assert_eq!(snapshot_values(&world, snapshot)[0], 1);
}

#[test]
fn hold_ends_at_its_limit_and_fails_the_cut() {
    let mut world = TestCluster::mirror(2);
    let snapshot = hold(&mut world);
    let late = world.submit(0, write(0, PAGE, 2));
    world.advance_time(HOLD_LIMIT - Duration::from_millis(1));
    assert_eq!(world.result_of(late), None);
    world.advance_time(Duration::from_millis(1));
    assert_eq!(world.result_of(late), Some(Ok(Reply::Done)));
    assert_eq!(take(&mut world, snapshot, CutStep::Finish), expired());
    let next = hold(&mut world);
    assert!(take(&mut world, next, CutStep::Finish).is_ok());
}

#[test]
fn abandoned_cut_lets_changes_go_on() {
    let mut world = TestCluster::mirror(2);
    let snapshot = hold(&mut world);
    let late = world.submit(0, write(0, PAGE, 2));
    assert!(take(&mut world, snapshot, CutStep::Abandon).is_ok());
    assert_eq!(world.result_of(late), Some(Ok(Reply::Done)));
    let ended = take(&mut world, snapshot, CutStep::Finish);
    assert_eq!(ended, Err(CutError::Abandoned));
}

#[test]
fn lost_leg_ends_a_hold() {
    let mut world = TestCluster::mirror(2);
    let snapshot = hold(&mut world);
    let late = world.submit(0, write(0, PAGE, 2));
    world.kill(1);
    world.advance_time(Duration::from_secs(1));
    assert_eq!(world.result_of(late), Some(Ok(Reply::Done)));
    let ended = take(&mut world, snapshot, CutStep::Finish);
    assert_eq!(ended, Err(CutError::LegsChanged));
    world.assert_holds(0, PAGE, 2);
}

#[test]
fn newer_cut_ends_one_that_waits() {
    let mut world = TestCluster::mirror(2);
    let old = hold(&mut world);
    let new = hold(&mut world);
    let late = take(&mut world, old, CutStep::Finish);
    assert_eq!(late, Err(CutError::NoSuchStep(old)));
    assert!(take(&mut world, new, CutStep::Finish).is_ok());
}

#[test]
fn step_without_the_one_before_is_refused() {
    let mut world = TestCluster::mirror(2);
    let snapshot = world.manager.reserve_epoch();
    let refused = Err(CutError::NoSuchStep(snapshot));
    assert_eq!(take(&mut world, snapshot, CutStep::Raise), refused);
    assert!(take(&mut world, snapshot, CutStep::Prepare).is_ok());
    assert_eq!(take(&mut world, snapshot, CutStep::Finish), refused);
    let token = world.submit(0, write(0, PAGE, 1));
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    assert!(take(&mut world, snapshot, CutStep::Raise).is_ok());
    assert!(take(&mut world, snapshot, CutStep::Finish).is_ok());
}

#[test]
fn direct_client_waits_for_the_last_step() {
    let (mut world, segment) = world_with_direct_access();
    let access = world.client.shared.direct_access.get().expect("enabled");
    let lease = access.lease().expect("a lease").epoch;
    begin_op(&segment);
    let snapshot = hold(&mut world);
    std::thread::scope(|scope| {
        let stamp = scope.spawn(|| segment.stamp_epoch(lease));
        let finished = order(&world, snapshot, CutStep::Finish);
        world.run_until_idle();
        assert_eq!(stamp.join().expect("no panic"), snapshot);
        // The operation began before the stamps were raised, so the cut waits for its end.
        assert_eq!(finished.try_recv(), Err(TryRecvError::Empty));
        segment.row(3).end_op();
        world.advance_time(Duration::from_millis(20));
        assert!(finished.try_recv().expect("an answer").is_ok());
    });
}

/// The controller does nothing while the direct client waits, as one that is dead.
#[test]
fn direct_client_does_not_wait_for_a_dead_controller() {
    let (mut world, segment) = world_with_direct_access();
    let access = world.client.shared.direct_access.get().expect("enabled");
    let lease = access.lease().expect("a lease").epoch;
    let snapshot = hold(&mut world);
    assert_eq!(segment.stamp_epoch(lease), snapshot, "its own limit");
    assert_eq!(take(&mut world, snapshot, CutStep::Finish), expired());
}

/// Makes one step of a volume. An idle one lets a little time pass.
fn step(world: &mut TestCluster) {
    let busy = poison::lock(&world.fabric.0).busy();
    match busy.first() {
        Some(&connection) => {
            poison::lock(&world.fabric.0).step(connection, &mut world.rng);
        }
        None => world.client.now += Duration::from_micros(500),
    }
    world.client.poll();
    world.client.run_call();
    world.reap();
}

/// Two volumes of one group.
struct Pair {
    worlds: [TestCluster; 2],
    rng: SplitMix64,
    /// The write in progress, and its volume: the next one begins after its acknowledgement.
    running: Option<(usize, u64)>,
    value: u64,
    cuts: Vec<[Epoch; 2]>,
}

impl Pair {
    fn new(seed: u64) -> Pair {
        Pair {
            worlds: [TestCluster::mirror(2), TestCluster::mirror(2)],
            rng: SplitMix64::new(seed),
            running: None,
            value: 0,
            cuts: vec![],
        }
    }

    /// Makes a few steps of both volumes, one message at a time: value i is written to the first one, and then to the second.
    fn run(&mut self) {
        for _ in 0..1 + self.rng.below(30) {
            let number = self.rng.below(2) as usize;
            step(&mut self.worlds[number]);
            if let Some((of, token)) = self.running {
                let Some(result) = self.worlds[of].results.remove(&token) else {
                    continue;
                };
                assert_eq!(result, Ok(Reply::Done));
            }
            let next = self.running.map_or(0, |(of, _)| 1 - of);
            self.value += u64::from(next == 0);
            let token = self.worlds[next].submit(0, write(0, PAGE, self.value));
            self.running = Some((next, token));
        }
    }

    /// Orders a step from both volumes at any time, and waits for both answers.
    fn order(&mut self, snapshots: [Epoch; 2], step: CutStep) {
        let first = self.rng.below(2) as usize;
        let mut awaited = vec![];
        for number in [first, 1 - first] {
            awaited.push(order(&self.worlds[number], snapshots[number], step));
            self.run();
        }
        while !awaited.is_empty() {
            self.run();
            awaited.retain(|result| match result.try_recv() {
                Ok(Ok(_)) => false,
                Ok(Err(error)) => panic!("{step:?}: {error}"),
                Err(_) => true,
            });
        }
    }

    fn cut(&mut self, steps: &[CutStep]) {
        let snapshots = [0, 1].map(|number: usize| self.worlds[number].manager.reserve_epoch());
        for step in steps {
            self.order(snapshots, *step);
        }
        self.cuts.push(snapshots);
    }
}

#[test]
fn group_holds_each_change_that_came_before_another() {
    for seed in 0..40 {
        let mut pair = Pair::new(seed);
        for _ in 0..8 {
            pair.run();
            pair.cut(&[CutStep::Prepare, CutStep::Raise, CutStep::Finish]);
        }
        for cut in &pair.cuts {
            let value = |number: usize| snapshot_values(&pair.worlds[number], cut[number])[0];
            let (first, second) = (value(0), value(1));
            assert!(
                second <= first && first <= second + 1,
                "{seed}: {first} and {second}"
            );
        }
        assert!(pair.value > 8, "{seed}: {} writes", pair.value);
    }
}
