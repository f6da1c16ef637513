//! Snapshots of volumes on fake bricks: create, list, hold and delete; limits, and their records in the store.

use crate::cluster;
use crate::snapshot_support;
use cluster::{BrickBehavior, Cluster, MIB, create_request, legs, name};
use pagemesh_base::layout::{EpochNumber, LegState};
use pagemesh_manage::fault::Fault;
use pagemesh_manage::idempotency::ScopedKey;
use pagemesh_manage::snapshots::{CutTimes, HOLDS_MAX, SnapshotName, SnapshotState};
use pagemesh_manage::store::{Store, StoreWrite};
use pagemesh_manage::wire::{
    ChangeLegs, ChooseReplica, CreateSnapshot, CreateSnapshots, DeleteReply, DeleteVolumeParams,
    ErrorCode, EventKind, GrowVolume, LegChange, ListSnapshots,
};
use pagemesh_manage::{CallContext, LayoutKind, Manager};
use snapshot_support::{
    ALL, assert_fault, create, epochs, event_kinds, list, manager_with_volume, names, request,
    serve_with_volume, snap, sweep_to_the_end,
};
use std::sync::Arc;

#[test]
fn snapshot_takes_an_epoch_of_its_own() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let before = manager.show(&name("v")).expect("shown");
    let first = create(&manager, "a").expect("made");
    let second = create(&manager, "b").expect("made");
    assert_eq!((first.epoch.0, second.epoch.0), (2, 3));
    assert_eq!(first.state, SnapshotState::Committed);
    assert_eq!(
        (first.size_bytes, first.made_by.as_str()),
        (MIB, "cluster key")
    );
    assert_eq!(epochs(&cluster), [[2, 3], [2, 3]]);
    // A client would take another epoch of the layout for a change of the layout.
    assert_eq!(manager.show(&name("v")).expect("shown"), before);
    let attached = manager.attach(&name("v"), &cluster::attach_request("c"));
    assert_eq!(attached.expect("attached").layout.epoch.0, 4);
    let manager = cluster.crash_copy();
    assert_eq!(names(&list(&manager, false)), ["b", "a"]);
    let (detail, _) = manager
        .show_snapshot(&name("v"), &snap("a"))
        .expect("shown");
    assert_eq!(detail.info, first);
    assert_eq!(detail.layout.epoch.0, 2);
    assert_eq!((legs(&detail.layout).count(), detail.bricks.len()), (2, 2));
}

#[test]
fn snapshot_changes_no_tag_of_its_volume() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let (_, tag) = manager.show_tagged(&name("v")).expect("shown");
    create(&manager, "a").expect("made");
    let (_, after) = manager.show_tagged(&name("v")).expect("shown");
    assert_eq!(tag, after);
    let expecting = manager.acting_for(CallContext {
        expected: Some(Arc::new([tag])),
        ..CallContext::default()
    });
    let larger = GrowVolume {
        size_bytes: 2 * MIB,
    };
    expecting.grow(&name("v"), larger).expect("unchanged");
}

#[test]
fn names_are_checked_and_unique() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let long = "x".repeat(65);
    for bad in [
        "", "a@b", "a/b", "a\nb", "a\u{7f}b", "-a", ".a", "a%b", "é", &long,
    ] {
        assert!(bad.parse::<SnapshotName>().is_err(), "{bad:?}");
        let body = serde_json::json!({ "name": bad }).to_string();
        let parsed: Result<CreateSnapshot, _> = serde_json::from_str(&body);
        assert!(parsed.is_err(), "{bad:?}");
    }
    create(&manager, &"x".repeat(64)).expect("made");
    create(&manager, "a").expect("made");
    assert_fault(create(&manager, "a"), ErrorCode::Exists, &["v@a"]);
    let absent = manager.create_snapshot(&name("w"), &request("a"));
    assert_fault(absent, ErrorCode::NotFound, &["w"]);
    // The name is free as soon as the snapshot is being deleted.
    cluster.fakes[0].set(BrickBehavior::RefusesDelete);
    let deleted = manager
        .delete_snapshot(&name("v"), &snap("a"))
        .expect("deleted");
    assert_eq!(deleted.pending_slices, 1);
    create(&manager, "a").expect("made");
    cluster.reset_bricks();
    sweep_to_the_end(&cluster, &manager);
    assert_eq!(list(&manager, false).len(), 2);
    assert_eq!(epochs(&cluster), [[2, 4], [2, 4]]);
}

#[test]
fn labels_are_bounded() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let with = |labels: Vec<String>| {
        let name = snap(&format!("s{}", labels.len()));
        manager.create_snapshot(&cluster::name("v"), &CreateSnapshot { name, labels })
    };
    for bad in [
        vec!["x".to_owned(); 9],
        vec!["x".repeat(129)],
        vec![String::new()],
        vec!["a\nb".to_owned()],
    ] {
        assert_fault(with(bad), ErrorCode::BadRequest, &["label"]);
    }
    with(vec!["x".repeat(128); 8]).expect("made");
    with(vec!["nightly".to_owned()]).expect("made");
    let asked = ListSnapshots {
        label: Some("nightly".into()),
        ..ListSnapshots::default()
    };
    let (found, _) = manager.list_all_snapshots(&asked, ALL);
    assert_eq!(names(&found), ["s1"]);
}

#[test]
fn lists_are_newest_first_in_pages() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, CutTimes::default());
    let manager = served.handle.manager();
    let other = create_request("w", LayoutKind::Mirror, MIB);
    manager.create(&other).expect("room");
    for number in 0..5 {
        create(manager, &format!("s{number}")).expect("made");
    }
    let of_other = manager.create_snapshot(&name("w"), &request("t"));
    of_other.expect("made");
    let page = |asked: ListSnapshots, limit| {
        let listed = manager.list_snapshots(&name("v"), &asked, limit);
        let (found, has_more) = listed.expect("listed");
        let names: Vec<String> = found.iter().map(|it| it.name.to_string()).collect();
        (names.join(" "), has_more)
    };
    let after = |after| ListSnapshots {
        after,
        ..ListSnapshots::default()
    };
    assert_eq!(page(after(None), 2), ("s4 s3".into(), true));
    assert_eq!(page(after(Some(5)), 2), ("s2 s1".into(), true));
    assert_eq!(page(after(Some(3)), 2), ("s0".into(), false));
    let all = served.client.snapshots(None, None).expect("listed");
    assert_eq!(names(&all), ["s4", "s3", "s2", "s1", "s0", "t"]);
    let searched = ListSnapshots {
        search: Some("3".into()),
        ..ListSnapshots::default()
    };
    assert_eq!(page(searched, 2), ("s3".into(), false));
    // The next page of all volumes begins behind a position in one of them.
    let asked = ListSnapshots {
        after: Some(3),
        after_volume: Some(name("v")),
        ..ListSnapshots::default()
    };
    let (found, _) = manager.list_all_snapshots(&asked, ALL);
    assert_eq!(names(&found), ["s0", "t"]);
    let missing = manager.list_snapshots(&name("x"), &after(None), 1);
    assert_fault(missing, ErrorCode::NotFound, &["x"]);
}

#[test]
fn holds_keep_a_snapshot() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    let (v, a) = (name("v"), snap("a"));
    let tag = |number: usize| format!("t{number}").parse().expect("a tag");
    for _ in 0..2 {
        let held = manager.hold_snapshot(&v, &a, &tag(0)).expect("held");
        assert_eq!(held.holds, [tag(0)]);
    }
    for number in 1..HOLDS_MAX {
        manager.hold_snapshot(&v, &a, &tag(number)).expect("held");
    }
    let more = manager.hold_snapshot(&v, &a, &tag(HOLDS_MAX));
    assert_fault(more, ErrorCode::NoRoom, &["holds"]);
    for number in 2..HOLDS_MAX {
        let released = manager.release_snapshot(&v, &a, &tag(number));
        released.expect("released");
    }
    let refused = manager.delete_snapshot(&v, &a);
    assert_fault(refused, ErrorCode::InUse, &["v@a", "t0, t1"]);
    let all = DeleteVolumeParams {
        force: true,
        snapshots: true,
    };
    let refused = manager.delete_with(&v, all);
    assert_fault(refused, ErrorCode::InUse, &["t0, t1"]);
    // Holds outlive a restart.
    drop(manager);
    let manager = cluster.manager_with_bricks_alive();
    manager.release_snapshot(&v, &a, &tag(0)).expect("released");
    let again = manager.release_snapshot(&v, &a, &tag(0));
    assert_fault(again, ErrorCode::NotFound, &["t0"]);
    assert_fault(
        manager.delete_snapshot(&v, &a),
        ErrorCode::InUse,
        &["held by t1"],
    );
    manager.release_snapshot(&v, &a, &tag(1)).expect("released");
    manager.delete_snapshot(&v, &a).expect("deleted");
    assert_eq!(epochs(&cluster), [[], [] as [u32; 0]]);
}

#[test]
fn deletion_is_batched_and_survives_restarts() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    for number in 0..5 {
        create(&manager, &format!("s{number}")).expect("made");
    }
    cluster.fakes[1].set(BrickBehavior::Unreachable);
    for number in 0..4 {
        let name = snap(&format!("s{number}"));
        let reply = manager.delete_snapshot(&cluster::name("v"), &name);
        assert_eq!(reply.expect("deleted").pending_slices, 1);
    }
    assert_eq!(epochs(&cluster), [vec![6], vec![2, 3, 4, 5, 6]]);
    let again = manager.delete_snapshot(&name("v"), &snap("s0"));
    assert_fault(again, ErrorCode::NotFound, &["v@s0"]);
    drop(manager);
    let manager = cluster.manager_with_bricks_alive();
    assert_eq!(names(&list(&manager, false)), ["s4"]);
    assert_eq!(list(&manager, true).len(), 4);
    manager.sweep();
    assert_eq!(list(&manager, true).len(), 4, "a brick has them");
    cluster.reset_bricks();
    manager.sweep();
    assert_eq!(list(&manager, true), []);
    assert_eq!(epochs(&cluster), [[6], [6]]);
    let drops = cluster.fakes[1].drops.lock().expect("no panic").clone();
    assert_eq!(drops, [4], "one call for all");
    assert_eq!(
        cluster
            .crash_copy()
            .list_all_snapshots(&ListSnapshots::default(), ALL)
            .0
            .len(),
        1
    );
    let kinds = event_kinds(&manager);
    let count = |kind| kinds.iter().filter(|it| **it == kind).count();
    assert_eq!(count(EventKind::SnapshotCreated), 5);
    assert_eq!(count(EventKind::SnapshotDeleted), 4);
}

#[test]
fn volume_with_snapshots_is_kept() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    create(&manager, "b").expect("made");
    let refused: Result<DeleteReply, Fault> = manager.delete(&name("v"), true);
    assert_fault(refused, ErrorCode::InUse, &["2 snapshots"]);
    let all = DeleteVolumeParams {
        force: false,
        snapshots: true,
    };
    manager.delete_with(&name("v"), all).expect("deleted");
    assert_eq!(
        (list(&manager, false), list(&manager, true)),
        (vec![], vec![])
    );
    cluster.assert_no_orphans(&manager);
    let store = cluster.crash_copy();
    assert_eq!(list(&store, false), []);
    // The name of the volume is free, with epochs of its own.
    let mirror = create_request("v", LayoutKind::Mirror, MIB);
    manager.create(&mirror).expect("room");
    assert_eq!(create(&manager, "a").expect("made").epoch.0, 2);
}

#[test]
fn last_copy_of_a_snapshot_is_kept() {
    let cluster = Cluster::new(3);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    let detail = manager.show(&name("v")).expect("shown");
    let remove = |copy| ChooseReplica {
        copy,
        force: true,
        expected: None,
    };
    manager
        .detach_replica(&name("v"), remove(0))
        .expect("the other copy has it");
    let (shown, _) = manager
        .show_snapshot(&name("v"), &snap("a"))
        .expect("shown");
    let left: Vec<_> = legs(&shown.layout).map(|leg| leg.slice).collect();
    assert_eq!(left, [legs(&detail.layout).nth(1).expect("a leg").slice]);
    let added = manager.attach_replica(&name("v"), Default::default());
    let added = added.expect("room").layout;
    let change = LegChange {
        segment: 0,
        column: 0,
        leg: 1,
        to: LegState::Syncing,
        note: None,
    };
    let to = |expected, to| ChangeLegs {
        expected,
        attachment: None,
        changes: vec![LegChange {
            to,
            ..change.clone()
        }],
    };
    let syncing = to(added.epoch, LegState::Syncing);
    let layout = manager.change_legs(&name("v"), &syncing).expect("changed");
    let in_sync = to(layout.epoch, LegState::InSync);
    manager.change_legs(&name("v"), &in_sync).expect("changed");
    let refused = manager.detach_replica(&name("v"), remove(0));
    assert_fault(refused, ErrorCode::InUse, &["copy 0", "1 snapshots"]);
    manager
        .delete_snapshot(&name("v"), &snap("a"))
        .expect("deleted");
    manager
        .detach_replica(&name("v"), remove(0))
        .expect("no snapshot needs it");
}

#[test]
fn group_is_made_as_a_whole_or_not() {
    let cluster = Cluster::new(4);
    let manager = manager_with_volume(&cluster);
    let other = create_request("w", LayoutKind::Mirror, MIB);
    manager.create(&other).expect("room");
    let group = |volumes: &[&str], text: &str| CreateSnapshots {
        volumes: volumes.iter().map(|it| name(it)).collect(),
        name: snap(text),
        labels: vec![],
    };
    let made = manager.create_snapshots_keyed(&group(&["v", "w"], "g"));
    let made = made.expect("made").reply;
    assert!(made.consistent);
    assert_eq!(made.held_us, None, "no client has attached a volume");
    assert_eq!(names(&made.snapshots), ["g", "g"]);
    let one = manager.create_snapshots_keyed(&group(&["v"], "h"));
    assert!(one.expect("made").reply.consistent);
    for bad in [&[][..], &["v", "v"]] {
        let refused = manager.create_snapshots_keyed(&group(bad, "i"));
        assert_fault(refused, ErrorCode::BadRequest, &["1 to 16"]);
    }
    // `w` has the name already.
    manager
        .create_snapshot(&name("w"), &request("j"))
        .expect("made");
    let refused = manager.create_snapshots_keyed(&group(&["v", "w"], "j"));
    assert_fault(refused, ErrorCode::Exists, &["w@j"]);
    let (of_v, _) = manager
        .list_snapshots(&name("v"), &ListSnapshots::default(), ALL)
        .expect("listed");
    assert_eq!(names(&of_v), ["h", "g"]);
    sweep_to_the_end(&cluster, &manager);
}

#[test]
fn repetition_makes_no_second_snapshot() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let keyed = |manager: &Manager| {
        manager.acting_for(CallContext {
            key: Some(ScopedKey {
                token: None,
                text: "k".parse().expect("a key"),
            }),
            ..CallContext::default()
        })
    };
    let make = |manager: &Manager| keyed(manager).create_snapshot_keyed(&name("v"), &request("a"));
    let first = make(&manager).expect("made");
    assert_eq!(make(&manager).expect("the same"), first);
    assert_eq!(make(&cluster.crash_copy()).expect("the same"), first);
    assert_eq!(list(&manager, false).len(), 1);
    let (_, tag) = manager
        .show_snapshot(&name("v"), &snap("a"))
        .expect("shown");
    assert!(first.etag.starts_with(&format!("\"{tag}.")));
}

#[test]
fn changed_snapshot_refuses_an_old_tag() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    let (v, a) = (name("v"), snap("a"));
    let (_, tag) = manager.show_snapshot(&v, &a).expect("shown");
    let expecting = manager.acting_for(CallContext {
        expected: Some(Arc::new([tag])),
        ..CallContext::default()
    });
    let hold = "t".parse().expect("a tag");
    expecting.hold_snapshot(&v, &a, &hold).expect("unchanged");
    let refused = expecting.release_snapshot(&v, &a, &hold);
    assert_fault(refused, ErrorCode::ChangedMeanwhile, &["v@a"]);
    manager.release_snapshot(&v, &a, &hold).expect("released");
    expecting.delete_snapshot(&v, &a).expect("as it was");
}

/// An earlier manager would give epochs of snapshots to layouts, so it must refuse the store.
#[test]
fn first_snapshot_raises_the_schema() {
    let cluster = Cluster::new(2);
    let schema = |cluster: &Cluster| {
        let copy = cluster.dir.path().join("schema.redb");
        std::fs::copy(cluster.store(), &copy).expect("a copy");
        let database = redb::Database::open(&copy).expect("a database");
        let table = redb::TableDefinition::<&str, &str>::new("meta");
        let read = redb::ReadableDatabase::begin_read(&database).expect("read");
        let meta = read.open_table(table).expect("a table");
        let found = meta.get("schema").expect("read").expect("a schema");
        found.value().to_owned()
    };
    let manager = manager_with_volume(&cluster);
    assert_eq!(schema(&cluster), "1");
    create(&manager, "a").expect("made");
    assert_eq!(schema(&cluster), "2");
}

#[test]
fn contradicting_records_are_damage() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    drop(manager);
    let store = Store::open(&cluster.store()).expect("a store");
    let contents = store.load().expect("sound");
    assert_eq!(
        (contents.snapshots.len(), contents.snapshot_layouts.len()),
        (1, 1)
    );
    // A record of an epoch that the volume did not reserve.
    let mut record = contents.snapshots[0].clone();
    (record.epoch, record.name) = (EpochNumber(9), snap("b"));
    store
        .commit(&[StoreWrite::PutSnapshot(&record)])
        .expect("written");
    let error = store.load().expect_err("damage");
    assert!(error.to_string().contains("snapshot 9"), "{error}");
}
