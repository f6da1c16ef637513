//! Clones of snapshots on fake bricks: create, list, promote and delete, and their records in the store.

use crate::cluster;
use crate::snapshot_support;
use cluster::{BrickBehavior, Cluster, MIB, attach_request, create_request, legs, name};
use pagemesh_base::layout::LegState;
use pagemesh_manage::fault::Fault;
use pagemesh_manage::wire::{
    ChangeLegs, CreateClone, DeleteVolumeParams, ErrorCode, EventFilter, EventKind, LegChange,
    VolumeSizeReply,
};
use pagemesh_manage::{LayoutKind, Manager};
use snapshot_support::{
    assert_fault, create, detach, list, manager_with_volume, snap, sweep_to_the_end,
};

fn event_kinds(manager: &Manager) -> Vec<EventKind> {
    let filter = EventFilter {
        subject: Some("volume:c".into()),
        ..EventFilter::default()
    };
    let (events, _) = manager.list_events(&filter, 1000);
    events.iter().map(|event| event.kind).collect()
}

fn clone_to(manager: &Manager, clone: &str) -> Result<VolumeSizeReply, Fault> {
    let request = CreateClone { name: name(clone) };
    manager.create_clone(&name("v"), &snap("a"), &request)
}

#[test]
fn clone_lies_on_the_bricks_of_its_origin() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let snapshot = create(&manager, "a").expect("made");
    let made = clone_to(&manager, "c").expect("made").volume;
    let origin = made.info.origin.clone().expect("a clone");
    assert_eq!((origin.volume, origin.epoch), (name("v"), snapshot.epoch));
    assert_eq!(made.info.size_bytes, MIB);
    let of = manager.show(&name("v")).expect("shown");
    let bricks = |detail: &pagemesh_manage::wire::VolumeDetail| -> Vec<_> {
        legs(&detail.layout).map(|leg| leg.brick).collect()
    };
    assert_eq!(bricks(&made), bricks(&of));
    assert!(legs(&made.layout).all(|leg| leg.state == LegState::InSync));
    // A change of the clone is never older than the snapshot.
    assert_eq!(made.layout.epoch, snapshot.epoch);
    let attached = manager.attach(&name("c"), &attach_request("x"));
    assert!(attached.expect("attached").layout.epoch > snapshot.epoch);
    let manager = cluster.crash_copy();
    assert_eq!(list(&manager, false)[0].clones, [name("c")]);
    assert!(event_kinds(&manager).contains(&EventKind::VolumeCloned));
}

#[test]
fn snapshot_stays_while_a_clone_shares_its_pages() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    clone_to(&manager, "c").expect("made");
    let kept = manager.delete_snapshot(&name("v"), &snap("a"));
    assert_fault(kept, ErrorCode::InUse, &["pages with it: c"]);
    let params = DeleteVolumeParams {
        force: true,
        snapshots: true,
    };
    let kept = manager.delete_with(&name("v"), params);
    assert_fault(kept, ErrorCode::InUse, &["pages with it: c"]);
    let manager = cluster.crash_copy();
    let kept = manager.delete_snapshot(&name("v"), &snap("a"));
    assert_fault(kept, ErrorCode::InUse, &["pages with it: c"]);
    manager.delete(&name("c"), false).expect("deleted");
    manager
        .delete_snapshot(&name("v"), &snap("a"))
        .expect("nothing depends on it");
}

#[test]
fn promoted_clone_depends_on_nothing() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    clone_to(&manager, "c").expect("made");
    let none = manager.promote_clone(&name("v"));
    assert_fault(none, ErrorCode::BadRequest, &["is no clone"]);
    let progress = manager.promote_clone(&name("c")).expect("promoted");
    assert_eq!((progress.done, progress.all), (4, 4));
    let shown = manager.show(&name("c")).expect("shown");
    assert_eq!(shown.info.origin, None);
    assert!(event_kinds(&manager).contains(&EventKind::ClonePromoted));
    let manager = cluster.crash_copy();
    manager
        .delete_snapshot(&name("v"), &snap("a"))
        .expect("nothing depends on it");
}

#[test]
fn leg_without_the_snapshot_is_resynced() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let attached = manager
        .attach(&name("v"), &attach_request("x"))
        .expect("attached");
    let lost = ChangeLegs {
        attachment: Some(attached.layout.epoch),
        expected: attached.layout.epoch,
        changes: vec![LegChange {
            segment: 0,
            column: 0,
            leg: 1,
            to: LegState::Stale,
            note: None,
        }],
    };
    manager.change_legs(&name("v"), &lost).expect("changed");
    detach(&manager);
    create(&manager, "a").expect("made");
    let made = clone_to(&manager, "c").expect("made").volume;
    let states: Vec<_> = legs(&made.layout)
        .map(|leg| (leg.state, leg.needs_full_resync, leg.empty))
        .collect();
    assert_eq!(
        states,
        [
            (LegState::InSync, false, false),
            (LegState::Stale, true, true)
        ]
    );
}

#[test]
fn failed_clone_leaves_nothing() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    let before = cluster.fakes[1].slices();
    cluster.fakes[1].set(BrickBehavior::Full);
    assert!(clone_to(&manager, "c").is_err());
    cluster.fakes[1].set(BrickBehavior::Healthy);
    sweep_to_the_end(&cluster, &manager);
    assert_eq!(cluster.fakes[1].slices(), before);
    assert_eq!(list(&manager, false)[0].clones, []);
    clone_to(&manager, "c").expect("made");
    let taken = clone_to(&manager, "c");
    assert_fault(taken, ErrorCode::Exists, &["c"]);
    let missing = manager.create_clone(
        &name("v"),
        &snap("missing"),
        &CreateClone { name: name("d") },
    );
    assert_fault(missing, ErrorCode::NotFound, &["v@missing"]);
    let other = manager.create(&create_request("d", LayoutKind::Mirror, 2 * MIB));
    other.expect("made");
}
