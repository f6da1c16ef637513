//! Snapshots that legs lack, and get from other legs, on fake bricks.

use crate::cluster;
use crate::snapshot_support;
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

/// The second leg of `v` comes back.
fn return_leg(manager: &Manager) {
    turn(manager, LegState::Syncing);
    turn(manager, LegState::InSync);
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

/// A version of a page; its checksum is ten times its birth.
fn version(birth: u32, death: u32) -> PageVersion {
    PageVersion {
        page: PageNo(3),
        birth: Epoch(birth),
        death: Epoch(death),
        sum: 10 * birth,
    }
}

/// Takes a snapshot while the second leg is away. The leg has a version that outlived its death.
fn snapshot_of_one_leg(cluster: &Cluster, manager: &Manager) {
    create(manager, "before").expect("made");
    turn(manager, LegState::Stale);
    create(manager, "away").expect("made");
    let legs = slices(cluster, manager);
    set_versions(&legs[0], &[version(1, 3), version(3, 5)]);
    set_versions(&legs[1], &[version(1, 5)]);
}

fn set_versions((slice, fake): &(SliceId, Arc<FakeBrick>), versions: &[PageVersion]) {
    let mut all = fake.versions.lock().expect("no panic");
    all.insert(*slice, versions.iter().copied().collect());
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
    return_leg(&manager);
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
    assert_eq!(versions(&legs[1]), [version(1, 2), version(3, 4)]);
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
fn leg_that_lists_snapshots_late_is_compared_then() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    snapshot_of_one_leg(&cluster, &manager);
    let legs = slices(&cluster, &manager);
    *legs[1].1.knows_version_copies.lock().expect("no panic") = false;
    return_leg(&manager);
    manager.sweep();
    assert_eq!(missing(&manager), [1, 0]);
    assert_eq!(versions(&legs[1]), [version(1, 5)]);
    *legs[1].1.knows_version_copies.lock().expect("no panic") = true;
    manager.sweep();
    assert_eq!(missing(&manager), [0, 0]);
    assert_eq!(versions(&legs[1]), [version(1, 2), version(3, 4)]);
}

/// Both versions are of one birth: the page was changed twice in that epoch, and the leg was lost between.
#[test]
fn version_of_one_birth_with_other_bytes_is_replaced() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    snapshot_of_one_leg(&cluster, &manager);
    let legs = slices(&cluster, &manager);
    let old = PageVersion {
        sum: 31,
        ..version(3, 5)
    };
    set_versions(&legs[1], &[version(1, 2), old]);
    return_leg(&manager);
    manager.sweep();
    assert_eq!(missing(&manager), [0, 0]);
    assert_eq!(versions(&legs[1]), [version(1, 2), version(3, 4)]);
}

#[test]
fn leg_with_other_pages_of_the_slice_is_not_read_for_a_snapshot() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    snapshot_of_one_leg(&cluster, &manager);
    let legs = slices(&cluster, &manager);
    let live = |sum| PageVersion {
        sum,
        ..version(3, u32::MAX)
    };
    set_versions(&legs[0], &[live(30)]);
    set_versions(&legs[1], &[live(31)]);
    return_leg(&manager);
    for _ in 0..3 {
        manager.sweep();
    }
    assert_eq!(missing(&manager), [1, 0]);
    assert_eq!(readers(&manager, "away"), 1);
    assert_eq!(versions(&legs[1]), [live(31)]);
    // A later layout compares again.
    set_versions(&legs[1], &[live(30)]);
    let attached = manager.attach(&name("v"), &cluster::attach_request("c"));
    attached.expect("attached");
    manager.sweep();
    assert_eq!(missing(&manager), [0, 0]);
}

/// The manager is asked to begin with a snapshot that another one of the same leg had progress for.
#[test]
fn snapshot_does_not_inherit_the_progress_of_a_deleted_one() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    snapshot_of_one_leg(&cluster, &manager);
    let legs = slices(&cluster, &manager);
    return_leg(&manager);
    // The list ends before the last page, and the copy stops there.
    for (_, fake) in &legs {
        *fake.list_end.lock().expect("no panic") = Some(PageNo(9));
    }
    manager.sweep();
    turn(&manager, LegState::Stale);
    create(&manager, "second").expect("made");
    return_leg(&manager);
    let deleted = manager.delete_snapshot(&name("v"), &snap("away"));
    deleted.expect("deleted");
    let early = |sum| PageVersion {
        sum,
        ..version(3, 8)
    };
    set_versions(&legs[0], &[early(30)]);
    set_versions(&legs[1], &[early(31)]);
    for (_, fake) in &legs {
        *fake.list_end.lock().expect("no panic") = None;
    }
    manager.sweep();
    assert_ne!(versions(&legs[1]), [early(31)], "page 3 was compared");
}

#[test]
fn check_names_pages_that_differ_between_copies() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "one").expect("made");
    create(&manager, "two").expect("made");
    let legs = slices(&cluster, &manager);
    // The epochs of the snapshots are 2 and 3.
    set_versions(&legs[0], &[version(1, 2), version(2, u32::MAX)]);
    let other = PageVersion {
        sum: 5,
        ..version(2, u32::MAX)
    };
    set_versions(&legs[1], &[version(1, 2), other]);
    let volume = name("v");
    let check = |name: Option<&str>, from| {
        let name = name.map(snap);
        manager.check_snapshots(&volume, name.as_ref(), from)
    };
    let all = check(None, None).expect("checked");
    let found: Vec<_> = all
        .differences
        .iter()
        .map(|it| (it.snapshot.as_str(), it.offset_bytes))
        .collect();
    assert_eq!(found, [("two", 3 * 4096)]);
    assert_eq!((all.done_bytes, all.next), (all.all_bytes, None));
    let one = check(Some("one"), None).expect("checked");
    assert_eq!((one.checked_pages, one.differences.len()), (1, 0));
    // A place of another layout is refused.
    let old = "99.9.0.0.0.0".parse().expect("a place");
    assert!(check(None, Some(old)).is_err());
}

#[test]
fn snapshot_deleted_during_an_adoption_does_not_come_back() {
    let cluster = Cluster::new(2);
    let manager = Arc::new(manager_with_volume(&cluster));
    snapshot_of_one_leg(&cluster, &manager);
    let legs = slices(&cluster, &manager);
    turn(&manager, LegState::Syncing);
    let deleting = Arc::downgrade(&manager);
    legs[1].1.set_adoption_hook(move || {
        let manager = deleting.upgrade().expect("running");
        let deleted = manager.delete_snapshot(&name("v"), &snap("away"));
        deleted.expect("deleted");
    });
    turn(&manager, LegState::InSync);
    assert_eq!(legs[1].1.snapshot_epochs(), legs[0].1.snapshot_epochs());
    assert_eq!(legs[1].1.snapshot_epochs(), [2]);
}
