//! The summaries that lists show equal the ones that layouts and bricks give, after any history.

use crate::cluster;
use cluster::{Cluster, MIB, brick_id, create_request, legs, name, registration};
use pagemesh_base::layout::{LegState, VolumeName};
use pagemesh_manage::wire::{
    AttachReplica, ChangeLegs, ChooseReplica, GrowVolume, LegChange, VolumeContent,
};
use pagemesh_manage::{LayoutKind, Manager};
use proptest::prelude::*;
use std::time::Duration;

const NAMES: usize = 3;
const BRICKS: usize = 4;

#[derive(Clone, Debug)]
enum HistoryOp {
    Create(usize, LayoutKind, bool),
    Grow(usize),
    Delete(usize),
    Legs(usize, usize, LegState),
    AddCopy(usize),
    RemoveCopy(usize, usize),
    /// Time passes; only these bricks send heartbeats.
    Beat(u64, Vec<bool>),
    Forget(usize),
    Sweep,
    Restart,
}

fn history_op() -> impl Strategy<Value = HistoryOp> {
    use LegState::{InSync, Stale, Syncing};
    let kinds = vec![LayoutKind::Concat, LayoutKind::Stripe, LayoutKind::Mirror];
    let kind = prop::sample::select(kinds);
    let state = prop::sample::select(vec![Stale, Syncing, InSync]);
    prop_oneof![
        4 => (0..NAMES, kind, any::<bool>()).prop_map(|(name, kind, files)| HistoryOp::Create(name, kind, files)),
        2 => (0..NAMES).prop_map(HistoryOp::Grow),
        1 => (0..NAMES).prop_map(HistoryOp::Delete),
        6 => (0..NAMES, 0..3usize, state).prop_map(|(name, leg, to)| HistoryOp::Legs(name, leg, to)),
        2 => (0..NAMES).prop_map(HistoryOp::AddCopy),
        1 => (0..NAMES, 0..3usize).prop_map(|(name, copy)| HistoryOp::RemoveCopy(name, copy)),
        6 => (0..9u64, prop::collection::vec(any::<bool>(), BRICKS)).prop_map(|(s, beats)| HistoryOp::Beat(s, beats)),
        1 => (0..BRICKS).prop_map(HistoryOp::Forget),
        1 => Just(HistoryOp::Sweep),
        1 => Just(HistoryOp::Restart),
    ]
}

fn volume(number: usize) -> VolumeName {
    name(&format!("v{number}"))
}

/// Applies an operation; the manager may refuse it.
fn apply(cluster: &Cluster, manager: Manager, op: &HistoryOp) -> Manager {
    match op {
        HistoryOp::Create(number, kind, files) => {
            let mut request = create_request(&format!("v{number}"), *kind, 64 * MIB);
            if *files {
                request.content = VolumeContent::Files;
            }
            let _ = manager.create(&request);
        }
        HistoryOp::Grow(number) => {
            let size_bytes = manager
                .show(&volume(*number))
                .map_or(MIB, |it| it.info.size_bytes);
            let size_bytes = size_bytes + 16 * MIB;
            let _ = manager.grow(&volume(*number), GrowVolume { size_bytes });
        }
        HistoryOp::Delete(number) => drop(manager.delete(&volume(*number), true)),
        HistoryOp::Legs(number, leg, to) => {
            let change = LegChange {
                segment: 0,
                column: 0,
                leg: *leg,
                to: *to,
                note: None,
            };
            if let Ok(shown) = manager.show(&volume(*number)) {
                let request = ChangeLegs {
                    expected: shown.layout.epoch,
                    attachment: None,
                    changes: vec![change],
                };
                let _ = manager.change_legs(&volume(*number), &request);
            }
        }
        HistoryOp::AddCopy(number) => {
            let _ = manager.attach_replica(&volume(*number), AttachReplica::default());
        }
        HistoryOp::RemoveCopy(number, copy) => {
            let request = ChooseReplica {
                copy: *copy,
                force: true,
                expected: None,
            };
            let _ = manager.detach_replica(&volume(*number), request);
        }
        HistoryOp::Beat(seconds, beats) => {
            cluster.clock.advance(Duration::from_secs(*seconds));
            for (number, _) in beats.iter().enumerate().filter(|(_, beats)| **beats) {
                manager.heartbeat(registration(number)).expect("welcome");
            }
        }
        HistoryOp::Forget(brick) => drop(manager.forget(brick_id(*brick), true)),
        HistoryOp::Sweep => manager.sweep(),
        HistoryOp::Restart => {
            drop(manager);
            return cluster.manager();
        }
    }
    manager
}

fn check_summaries(manager: &Manager) {
    let listed = manager.volumes();
    let bricks = manager.bricks();
    let mut slices = [0; BRICKS];
    let mut degraded = 0;
    for info in &listed {
        // The details are computed from the layout.
        let shown = manager.show(&info.name).expect("shown");
        assert_eq!(*info, shown.info);
        let is_dead = |id| !bricks.iter().any(|it| it.brick == id && it.alive);
        let dead = legs(&shown.layout).filter(|leg| is_dead(leg.brick)).count();
        assert_eq!(info.unreachable_legs, dead);
        for leg in legs(&shown.layout) {
            let number = (0..BRICKS).find(|number| brick_id(*number) == leg.brick);
            slices[number.expect("a brick")] += 1;
        }
        let mut columns = shown.layout.columns();
        degraded += usize::from(columns.any(|column| column.lost_since.0 != 0));
    }
    for brick in &bricks {
        let number = (0..BRICKS).find(|number| brick_id(*number) == brick.brick);
        assert_eq!(brick.slices, slices[number.expect("a brick")]);
        assert!(brick.slices > 0 || brick.provisioned_bytes == 0);
    }
    let status = manager.status();
    assert_eq!(
        (status.volumes, status.volumes_degraded),
        (listed.len(), degraded)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn summaries_match_layouts(ops in prop::collection::vec(history_op(), 1..60)) {
        let cluster = Cluster::new(BRICKS);
        let mut manager = cluster.manager_with_bricks_alive();
        for op in &ops {
            manager = apply(&cluster, manager, op);
            check_summaries(&manager);
        }
    }
}
