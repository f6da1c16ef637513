//! Snapshots that legs lack, and get from other legs, on fake bricks.

mod cluster;
mod snapshot_support;

use cluster::{Cluster, FakeBrick, legs, name};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{EpochNumber, LegState, SliceId};
use pagemesh_base::slice::PageVersion;
use pagemesh_manage::Manager;
use pagemesh_manage::wire::{ChangeLegs, EventKind, LegChange};
use snapshot_support::{create, event_kinds, list, manager_with_volume, snap};
use std::sync::Arc;

/// Changes the state of the second leg of `v`.
fn turn(manager: &Manager, to: LegState) -> EpochNumber {
    let shown = manager.show(&name("v")).expect("shown");
    let change = LegChange {
        segment: 0,
        column: 0,
        leg: 1,
        to,
        note: None,
    };
    let request = ChangeLegs {
        expected: shown.layout.epoch,
        attachment: None,
        changes: vec![change],
    };
    let layout = manager.change_legs(&name("v"), &request);
    layout.expect("changed").epoch
}

/// The slices of `v`, and their bricks.
fn slices(cluster: &Cluster, manager: &Manager) -> Vec<(SliceId, Arc<FakeBrick>)> {
    let layout = manager.show(&name("v")).expect("shown").layout;
    let brick = |id| {
        let mut fakes = cluster.fakes.iter();
        fakes.find(|fake| fake.id == id).expect("a brick").clone()
    };
    legs(&layout)
        .map(|leg| (leg.slice, brick(leg.brick)))
        .collect()
}

fn readers(manager: &Manager, text: &str) -> usize {
    let shown = manager.show_snapshot(&name("v"), &snap(text));
    legs(&shown.expect("shown").0.layout).count()
}

fn missing(manager: &Manager) -> Vec<usize> {
    let found = list(manager, false);
    found.iter().map(|it| it.missing_copies).collect()
}

fn version(birth: u32, death: u32) -> PageVersion {
    PageVersion {
        page: PageNo(3),
        birth: Epoch(birth),
        death: Epoch(death),
    }
}

/// Takes a snapshot while the second leg is away. The leg has a version that outlived its death.
fn snapshot_of_one_leg(cluster: &Cluster, manager: &Manager) {
    create(manager, "before").expect("made");
    turn(manager, LegState::Stale);
    create(manager, "away").expect("made");
    let legs = slices(cluster, manager);
    let add = |at: usize, versions: &[PageVersion]| {
        let (slice, fake): &(SliceId, Arc<FakeBrick>) = &legs[at];
        let mut all = fake.versions.lock().expect("no panic");
        all.insert(*slice, versions.iter().copied().collect());
    };
    add(0, &[version(1, 3), version(3, 5)]);
    add(1, &[version(1, 5)]);
}

fn versions(leg: &(SliceId, Arc<FakeBrick>)) -> Vec<PageVersion> {
    let all = leg.1.versions.lock().expect("no panic");
    all.get(&leg.0).into_iter().flatten().copied().collect()
}

#[test]
fn leg_that_returns_is_read_once_it_has_the_snapshot() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    snapshot_of_one_leg(&cluster, &manager);
    turn(&manager, LegState::Syncing);
    turn(&manager, LegState::InSync);
    assert_eq!(missing(&manager), [1, 0]);
    assert_eq!(readers(&manager, "away"), 1);
    let legs = slices(&cluster, &manager);
    assert_eq!(legs[1].1.snapshot_epochs(), legs[0].1.snapshot_epochs());
    manager.sweep();
    assert_eq!(missing(&manager), [0, 0]);
    assert_eq!(
        (readers(&manager, "before"), readers(&manager, "away")),
        (2, 2)
    );
    assert_eq!(versions(&legs[1]), [version(1, 2), version(3, 5)]);
    assert!(event_kinds(&manager).contains(&EventKind::SnapshotsCopied));
    // The record outlives the manager.
    let manager = cluster.crash_copy();
    assert_eq!(missing(&manager), [0, 0]);
    assert_eq!(readers(&manager, "away"), 2);
    cluster.send_heartbeats(&manager);
    manager
        .delete_snapshot(&name("v"), &snap("away"))
        .expect("deleted");
    assert_eq!(legs[1].1.snapshot_epochs(), [2]);
}

#[test]
fn leg_that_lists_snapshots_late_waits_for_a_layout() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    snapshot_of_one_leg(&cluster, &manager);
    let legs = slices(&cluster, &manager);
    *legs[1].1.knows_version_copies.lock().expect("no panic") = false;
    turn(&manager, LegState::Syncing);
    turn(&manager, LegState::InSync);
    manager.sweep();
    assert_eq!(missing(&manager), [1, 0]);
    *legs[1].1.knows_version_copies.lock().expect("no panic") = true;
    let attached = manager.attach(&name("v"), &cluster::attach_request("c"));
    attached.expect("attached");
    // The brick lists them now. Versions of this layout may be lost already.
    manager.sweep();
    manager.sweep();
    assert_eq!(missing(&manager), [1, 0]);
    assert_eq!(versions(&legs[1]), [version(1, 5)]);
    let attached = manager.attach(&name("v"), &cluster::attach_request("c"));
    attached.expect("attached");
    manager.sweep();
    assert_eq!(missing(&manager), [0, 0]);
    assert_eq!(versions(&legs[1]), [version(1, 2), version(3, 5)]);
}
