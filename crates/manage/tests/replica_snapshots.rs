//! Snapshots on asynchronous replicas, and what a promotion keeps of them, on fake bricks.

use crate::cluster;
use crate::snapshot_support;
use cluster::{Cluster, MIB, create_request, legs, name};
use pagemesh_base::layout::{EpochNumber, LegState, SliceId};
use pagemesh_manage::snapshots::SnapshotRecord;
use pagemesh_manage::wire::{
    AttachReplica, AttachVolume, ChangeLegs, ChooseReplica, CreateClone, ErrorCode, LegChange,
    ReplicaSnapshot, ReportReplication, VolumeDetail,
};
use pagemesh_manage::{LayoutKind, Manager};
use snapshot_support::{assert_fault, create, detach, list, names, snap};

fn attach(manager: &Manager, unreachable: bool) -> EpochNumber {
    let request = AttachVolume {
        client: "one".into(),
        unreachable,
        process: None,
        replaces: None,
        receive: false,
    };
    let attached = manager.attach(&name("v"), &request);
    attached.expect("attached").layout.epoch
}

/// The volume `v` with one copy, and an asynchronous replica in step.
fn volume_with_replica(cluster: &Cluster) -> Manager {
    let manager = cluster.manager_with_bricks_alive();
    let concat = create_request("v", LayoutKind::Concat, MIB);
    manager.create(&concat).expect("room");
    let replica = AttachReplica {
        brick: None,
        asynchronous: true,
        auto_promote: true,
    };
    manager.attach_replica(&name("v"), replica).expect("room");
    let epoch = attach(&manager, false);
    let follows = ChangeLegs {
        expected: epoch,
        attachment: Some(epoch),
        changes: vec![LegChange {
            segment: 0,
            column: 0,
            leg: 1,
            to: LegState::AsyncReplica,
            note: None,
        }],
    };
    manager.change_legs(&name("v"), &follows).expect("changed");
    detach(&manager);
    manager
}

fn replica_slice(manager: &Manager) -> SliceId {
    let shown = manager.show(&name("v")).expect("shown");
    legs(&shown.layout).nth(1).expect("a replica").slice
}

/// The client reports that the replica has these snapshots.
fn report(manager: &Manager, slice: SliceId, epochs: &[EpochNumber]) {
    let attachment = attach(manager, false);
    let snapshots = epochs.iter().map(|&epoch| ReplicaSnapshot { slice, epoch });
    let report = ReportReplication {
        attachment,
        lag: None,
        resyncs: vec![],
        replica_snapshots: snapshots.collect(),
    };
    let taken = manager.report_replication(&name("v"), report);
    taken.expect("accepted");
    detach(manager);
}

fn promote(manager: &Manager, force: bool) -> Result<VolumeDetail, pagemesh_manage::fault::Fault> {
    let choice = ChooseReplica {
        copy: 1,
        force,
        expected: None,
    };
    manager.promote_replica(&name("v"), choice)
}

fn missing(manager: &Manager) -> Vec<(usize, bool)> {
    let found = list(manager, false);
    found
        .iter()
        .map(|it| (it.missing_copies, it.missing_on_replica))
        .collect()
}

#[test]
fn promotion_keeps_reported_snapshots_only() {
    let cluster = Cluster::new(3);
    let manager = volume_with_replica(&cluster);
    let first = create(&manager, "first").expect("made");
    create(&manager, "second").expect("made");
    assert_eq!(missing(&manager), [(1, true), (1, true)]);
    let slice = replica_slice(&manager);
    // A slice that is no replica, and an epoch without a snapshot, change nothing.
    report(&manager, SliceId(uuid::Uuid::nil()), &[first.epoch]);
    report(&manager, slice, &[EpochNumber(999)]);
    assert_eq!(missing(&manager), [(1, true), (1, true)]);
    report(&manager, slice, &[first.epoch, first.epoch]);
    assert_eq!(missing(&manager), [(1, true), (0, false)]);
    let again = cluster.crash_copy();
    assert_eq!(missing(&again), [(1, true), (0, false)], "after a restart");
    drop(again);
    let promoted = promote(&manager, true).expect("promoted");
    assert_eq!(promoted.lost_snapshots, [snap("second")]);
    assert_eq!(names(&list(&manager, false)), ["first"]);
    assert_eq!(missing(&manager), [(0, false)]);
    let (shown, _) = manager
        .show_snapshot(&name("v"), &snap("first"))
        .expect("shown");
    let slices: Vec<_> = legs(&shown.layout).map(|leg| leg.slice).collect();
    assert!(slices.contains(&slice), "readers use the promoted copy");
}

#[test]
fn needed_snapshot_refuses_a_promotion_that_loses_it() {
    let cluster = Cluster::new(3);
    let manager = volume_with_replica(&cluster);
    create(&manager, "cloned").expect("made");
    let clone = CreateClone { name: name("c") };
    let cloned = manager.create_clone(&name("v"), &snap("cloned"), &clone);
    cloned.expect("cloned");
    assert_fault(
        promote(&manager, true),
        ErrorCode::InUse,
        &["v@cloned", "the clone c"],
    );
    assert_eq!(names(&list(&manager, false)), ["cloned"]);
    let slice = replica_slice(&manager);
    let epoch = list(&manager, false)[0].epoch;
    report(&manager, slice, &[epoch]);
    let promoted = promote(&manager, true).expect("promoted");
    assert_eq!(promoted.lost_snapshots, []);
}

#[test]
fn records_of_earlier_managers_have_no_replicas() {
    let old = serde_json::json!({
        "volume": uuid::Uuid::nil(),
        "name": "s",
        "epoch": 5,
        "created_unix_ms": 7,
        "state": "committed",
        "layout": 5,
        "made_by": "cluster key",
    });
    let record: SnapshotRecord = serde_json::from_value(old.clone()).expect("it is read");
    assert_eq!(record.replica_copies, []);
    let stored = serde_json::to_value(&record).expect("it is written");
    assert_eq!(stored, old, "nothing is added");
}
