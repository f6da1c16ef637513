//! Bookmarks of snapshots, and volumes that receive snapshots, at a manager with fake bricks.

use crate::cluster;
use crate::snapshot_support;
use cluster::{Cluster, MIB, attach_request, create_request, legs, name};
use pagemesh_base::layout::LegState;
use pagemesh_manage::store::SCHEMA_MAX;
use pagemesh_manage::wire::{
    AttachVolume, ChangeLegs, ChooseReplica, CreateBookmark, CreateVolume, DeleteVolumeParams,
    DetachVolume, ErrorCode, EventKind, LegChange,
};
use pagemesh_manage::{LayoutKind, Manager};
use snapshot_support::{
    assert_fault, create, event_kinds, manager_with_volume, request, serve_with_volume, snap,
};

fn bookmark(text: &str, as_name: Option<&str>) -> CreateBookmark {
    CreateBookmark {
        snapshot: snap(text),
        name: as_name.map(snap),
    }
}

fn bookmark_names(manager: &Manager) -> Vec<String> {
    let found = manager.bookmarks(&name("v")).expect("listed");
    found.iter().map(|it| it.name.to_string()).collect()
}

#[test]
fn bookmark_outlives_its_snapshot_and_restarts() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    let v = name("v");
    let made = manager
        .create_bookmark(&v, &bookmark("a", None))
        .expect("made");
    assert_eq!(
        (made.name.as_str(), made.epoch.0, made.size_bytes),
        ("a", 2, MIB)
    );
    let other = manager.create_bookmark(&v, &bookmark("a", Some("b")));
    other.expect("a second one of the epoch");
    let again = manager.create_bookmark(&v, &bookmark("a", Some("b")));
    assert_fault(again, ErrorCode::Exists, &["v#b"]);
    manager.delete_snapshot(&v, &snap("a")).expect("deleted");
    let gone = manager.create_bookmark(&v, &bookmark("a", Some("c")));
    assert_fault(gone, ErrorCode::NotFound, &["v@a"]);
    drop(manager);
    let manager = cluster.manager_with_bricks_alive();
    assert_eq!(bookmark_names(&manager), ["a", "b"]);
    let (detail, _) = manager.show_bookmark(&v, &snap("a")).expect("shown");
    assert_eq!((detail.layout.epoch.0, detail.bricks.len()), (2, 2));
    assert_eq!(legs(&detail.layout).count(), 2);
    manager.delete_bookmark(&v, &snap("a")).expect("deleted");
    assert_fault(
        manager.delete_bookmark(&v, &snap("a")),
        ErrorCode::NotFound,
        &["v#a"],
    );
    assert_eq!(bookmark_names(&cluster.crash_copy()), ["b"]);
    // The volume takes its bookmarks with it.
    manager
        .delete_with(&v, DeleteVolumeParams::default())
        .expect("deleted");
    let mirror = create_request("v", LayoutKind::Mirror, MIB);
    manager.create(&mirror).expect("room");
    assert_eq!(bookmark_names(&manager), [""; 0]);
    assert_eq!(bookmark_names(&cluster.crash_copy()), [""; 0]);
}

#[test]
fn bookmarks_are_served_over_rest() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, Default::default());
    let (client, v) = (&served.client, name("v"));
    client.create_snapshot(&v, &request("a")).expect("made");
    let made = client
        .create_bookmark(&v, &bookmark("a", Some("b")))
        .expect("made");
    assert_eq!(
        client.bookmarks(&v).expect("listed"),
        std::slice::from_ref(&made)
    );
    assert_eq!(client.bookmark(&v, &snap("b")).expect("shown").info, made);
    client.delete_bookmark(&v, &snap("b")).expect("deleted");
    client.delete_bookmark(&v, &snap("b")).expect_err("gone");
    assert_eq!(client.bookmarks(&v).expect("listed"), []);
}

/// Pages of the promoted copy may be older than the bookmark, and their births tell nothing of it.
#[test]
fn lossy_promotion_deletes_bookmarks() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let v = name("v");
    create(&manager, "a").expect("made");
    manager
        .create_bookmark(&v, &bookmark("a", None))
        .expect("made");
    let promote = || {
        let request = ChooseReplica {
            copy: 1,
            force: true,
            expected: None,
        };
        manager.promote_replica(&v, request).expect("promoted")
    };
    promote();
    assert_eq!(bookmark_names(&manager), ["a"], "the copy was in-sync");
    let epoch = manager.show(&v).expect("shown").layout.epoch;
    let stale = LegChange {
        segment: 0,
        column: 0,
        leg: 1,
        to: LegState::Stale,
        note: None,
    };
    let change = ChangeLegs {
        expected: epoch,
        attachment: None,
        changes: vec![stale],
    };
    manager.change_legs(&v, &change).expect("changed");
    promote();
    assert_eq!(bookmark_names(&manager), [""; 0]);
    assert_eq!(bookmark_names(&cluster.crash_copy()), [""; 0]);
}

fn receiver(client: &str) -> AttachVolume {
    AttachVolume {
        receive: true,
        ..attach_request(client)
    }
}

#[test]
fn received_volume_is_attached_by_receivers_alone() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let v = name("v");
    let wanted = CreateVolume {
        received: true,
        ..create_request("v", LayoutKind::Mirror, MIB)
    };
    let made = manager.create(&wanted).expect("room").volume;
    assert_eq!(made.info.received.map(|it| it.0), Some(0));
    let client = manager.attach(&v, &attach_request("c"));
    assert_fault(client, ErrorCode::InUse, &["v receives snapshots"]);
    assert_fault(
        create(&manager, "a"),
        ErrorCode::InUse,
        &["v receives snapshots"],
    );
    let attached = manager.attach(&v, &receiver("r")).expect("attached");
    let during = manager.promote_volume(&v);
    assert_fault(during, ErrorCode::InUse, &["attached to r"]);
    let manager = cluster.crash_copy();
    let shown = manager.show(&v).expect("shown").info;
    assert_eq!(shown.received, Some(attached.layout.epoch));
    let any = DetachVolume { attachment: None };
    manager.detach(&v, any).expect("detached");
    let unfinished = manager.promote_volume(&v);
    assert_fault(unfinished, ErrorCode::InUse, &["not received all"]);
}

#[test]
fn promoted_volume_is_attached_by_clients_alone() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, Default::default());
    let manager = served.handle.manager();
    let w = name("w");
    let wanted = CreateVolume {
        received: true,
        ..create_request("w", LayoutKind::Mirror, MIB)
    };
    served.client.create(&wanted).expect("room");
    let attached = served
        .client
        .attach_as(&w, &receiver("r"))
        .expect("attached");
    let epoch = attached.layout.epoch;
    // The receiver cuts its volume.
    let client = served.client.clone();
    let cutter = std::thread::spawn(move || {
        let order = client
            .poll_cut(&name("w"), epoch)
            .expect("polled")
            .expect("an order");
        let answer = pagemesh_manage::wire::AnswerCut {
            attachment: epoch,
            epoch: order.epoch,
            step: order.step,
            result: pagemesh_manage::wire::CutResult::Done,
        };
        client.answer_cut(&name("w"), &answer).expect("answered");
    });
    served
        .client
        .create_snapshot(
            &w,
            &pagemesh_manage::wire::CreateSnapshot {
                labels: vec!["received=x@1".into()],
                ..request("a")
            },
        )
        .expect("made");
    cutter.join().expect("no panic");
    let any = DetachVolume { attachment: None };
    manager.detach(&w, any).expect("detached");
    let promoted = served.client.promote_volume(&w).expect("promoted");
    assert_eq!(promoted.info.received, None);
    let again = served.client.promote_volume(&w).expect("promoted already");
    assert_eq!(again.info.received, None);
    let refused = manager.attach(&w, &receiver("r"));
    assert_fault(refused, ErrorCode::InUse, &["w receives no snapshots"]);
    manager.attach(&w, &attach_request("c")).expect("attached");
    assert_eq!(event_kinds(manager).len(), 1, "of the other volume");
    let filter = pagemesh_manage::wire::EventFilter {
        subject: Some("volume:w".into()),
        ..Default::default()
    };
    let (events, _) = manager.list_events(&filter, 100);
    let promotions = events
        .iter()
        .filter(|it| it.kind == EventKind::VolumePromoted);
    assert_eq!(promotions.count(), 1);
}

#[test]
fn first_bookmark_or_received_volume_raises_the_schema() {
    for is_bookmark in [true, false] {
        let cluster = Cluster::new(2);
        let manager = manager_with_volume(&cluster);
        create(&manager, "a").expect("made");
        match is_bookmark {
            true => drop(manager.create_bookmark(&name("v"), &bookmark("a", None))),
            false => {
                let wanted = CreateVolume {
                    received: true,
                    ..create_request("w", LayoutKind::Mirror, MIB)
                };
                manager.create(&wanted).expect("room");
            }
        }
        // A later snapshot does not lower it.
        create(&manager, "b").expect("made");
        drop(manager);
        let database = redb::Database::open(cluster.store()).expect("a database");
        let table = redb::TableDefinition::<&str, &str>::new("meta");
        let read = redb::ReadableDatabase::begin_read(&database).expect("read");
        let meta = read.open_table(table).expect("a table");
        let found = meta.get("schema").expect("read").expect("a schema");
        assert_eq!(found.value(), SCHEMA_MAX.to_string());
    }
}
