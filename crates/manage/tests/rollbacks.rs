//! Rollbacks on fake bricks: each step, with a crash of the manager behind it, and what is refused meanwhile.

use crate::cluster;
use crate::snapshot_support;
use cluster::{Cluster, attach_request, name};
use pagemesh_base::layout::EpochNumber;
use pagemesh_manage::Manager;
use pagemesh_manage::fault::Fault;
use pagemesh_manage::rollback::{ROLLBACK_HOLD, Rollback, RollbackPhase};
use pagemesh_manage::wire::{
    BeginRollback, CutResult, ErrorCode, EventKind, FinishRollback, SnapshotInfo,
};
use snapshot_support::{
    SHORT, assert_fault, create, detach, event_kinds, list, manager_with_volume, names,
    serve_with_volume, snap, spawn_client,
};

fn begin(manager: &Manager, to: &str, force: bool) -> Result<Rollback, Fault> {
    let request = BeginRollback {
        snapshot: snap(to),
        force,
    };
    manager.begin_rollback(&name("v"), &request)
}

fn attach(manager: &Manager) -> EpochNumber {
    let attached = manager.attach_for_rollback(&name("v"), &attach_request("rollback"));
    attached.expect("attached").layout.epoch
}

fn finish(manager: &Manager, attachment: EpochNumber, phase: RollbackPhase) -> Result<bool, Fault> {
    let request = FinishRollback { attachment, phase };
    let ended = manager.finish_rollback(&name("v"), request)?;
    Ok(ended.ended)
}

fn phase(manager: &Manager) -> Option<RollbackPhase> {
    let shown = manager.show(&name("v")).expect("shown");
    shown.info.rollback.map(|it| it.phase)
}

fn find(manager: &Manager, text: &str) -> SnapshotInfo {
    let mut found = list(manager, false).into_iter();
    found.find(|it| it.name == snap(text)).expect("there")
}

/// Makes the snapshot of before as the attached client does: it detaches first, as fake bricks have no client to cut.
fn create_undo(manager: &Manager) {
    detach(manager);
    create(manager, "before-rollback-a").expect("made");
}

#[test]
fn rollback_goes_on_after_a_crash_behind_each_step() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    let begun = begin(&manager, "a", false).expect("begun");
    assert_eq!(begun.undo, snap("before-rollback-a"));
    for expected in [
        RollbackPhase::Requested,
        RollbackPhase::Preparing,
        RollbackPhase::Copying,
    ] {
        let crashed = cluster.crash_copy();
        assert_eq!(phase(&crashed), Some(expected));
        // The same command takes it up.
        for manager in [&crashed, &manager] {
            let again = begin(manager, "a", false).expect("taken up");
            assert_eq!((again.phase, &again.undo), (expected, &begun.undo));
        }
        match expected {
            RollbackPhase::Requested => drop(attach(&manager)),
            RollbackPhase::Preparing => {
                create_undo(&manager);
                let attachment = attach(&manager);
                let copying = manager.start_rollback_copy(&name("v"), attachment);
                assert_eq!(copying.expect("copying").phase, RollbackPhase::Copying);
            }
            _ => {
                let attachment = attach(&manager);
                let early = finish(&manager, attachment, RollbackPhase::Undoing);
                assert_fault(early, ErrorCode::InUse, &["rolled back to v@a"]);
                finish(&manager, attachment, RollbackPhase::Copying).expect("ended");
            }
        }
    }
    assert_eq!(phase(&cluster.crash_copy()), None);
    assert_eq!(find(&manager, "before-rollback-a").holds.len(), 1);
    let kinds = event_kinds(&manager);
    for kind in [EventKind::RollbackBegun, EventKind::RollbackEnded] {
        assert_eq!(
            kinds.iter().filter(|it| **it == kind).count(),
            1,
            "{kind:?}"
        );
    }
    detach(&manager);
    manager
        .attach(&name("v"), &attach_request("c"))
        .expect("attached");
}

/// Brings a rollback to the phase in which pages are copied.
fn copying(manager: &Manager) -> EpochNumber {
    create(manager, "a").expect("made");
    begin(manager, "a", false).expect("begun");
    attach(manager);
    create_undo(manager);
    let attachment = attach(manager);
    let copying = manager.start_rollback_copy(&name("v"), attachment);
    copying.expect("copying");
    attachment
}

#[test]
fn undo_before_a_copy_ends_at_once() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    for is_attached in [false, true] {
        begin(&manager, "a", false).expect("begun");
        if is_attached {
            attach(&manager);
            detach(&manager);
        }
        let undone = manager.undo_rollback(&name("v")).expect("undone");
        assert!(undone.ended);
        assert_eq!(phase(&cluster.crash_copy()), None);
    }
    let none = manager.undo_rollback(&name("v"));
    assert_fault(none, ErrorCode::NotFound, &["no rollback of the volume v"]);
    let none = manager.attach_for_rollback(&name("v"), &attach_request("c"));
    assert_fault(none, ErrorCode::NotFound, &["no rollback"]);
}

#[test]
fn undo_of_a_copy_fences_it_and_releases_the_snapshot_of_before() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let copier = copying(&manager);
    assert!(!manager.undo_rollback(&name("v")).expect("undone").ended);
    // The copy has ended, and its client does not know of the undo.
    let late = finish(&manager, copier, RollbackPhase::Copying);
    assert_fault(late, ErrorCode::InUse, &["being undone"]);
    let crashed = cluster.crash_copy();
    assert!(!crashed.undo_rollback(&name("v")).expect("repeated").ended);
    assert!(!manager.undo_rollback(&name("v")).expect("repeated").ended);
    let back = begin(&manager, "a", false);
    assert_fault(back, ErrorCode::InUse, &["being undone"]);
    let attachment = attach(&manager);
    let late = finish(&manager, copier, RollbackPhase::Undoing);
    assert_fault(late, ErrorCode::Fenced, &["is over"]);
    finish(&manager, attachment, RollbackPhase::Undoing).expect("ended");
    assert_eq!(phase(&cluster.crash_copy()), None);
    assert_eq!(find(&manager, "before-rollback-a").holds, []);
}

#[test]
fn other_uses_are_refused_until_the_end() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "b").expect("made");
    let attachment = copying(&manager);
    let words = &["rolled back to v@a"];
    let refused = manager.attach(&name("v"), &attach_request("c"));
    assert_fault(refused, ErrorCode::InUse, words);
    assert_fault(create(&manager, "c"), ErrorCode::InUse, words);
    assert_fault(begin(&manager, "b", true), ErrorCode::InUse, words);
    assert_fault(manager.delete(&name("v"), false), ErrorCode::InUse, words);
    for needed in ["a", "before-rollback-a"] {
        let refused = manager.delete_snapshot(&name("v"), &snap(needed));
        assert_fault(refused, ErrorCode::InUse, words);
    }
    manager
        .delete_snapshot(&name("v"), &snap("b"))
        .expect("deleted");
    finish(&manager, attachment, RollbackPhase::Copying).expect("ended");
    let mut left = names(&list(&manager, false))
        .iter()
        .map(|it| (*it).to_owned())
        .collect::<Vec<_>>();
    left.sort();
    assert_eq!(left, ["a", "before-rollback-a"]);
    assert_eq!(
        find(&manager, "before-rollback-a").holds[0].to_string(),
        ROLLBACK_HOLD
    );
}

#[test]
fn attached_volume_is_rolled_back_by_force_only() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    create(&manager, "a").expect("made");
    let attached = manager.attach(&name("v"), &attach_request("user"));
    let user = attached.expect("attached").layout.epoch;
    assert_fault(begin(&manager, "a", false), ErrorCode::InUse, &["user"]);
    assert_eq!(phase(&manager), None);
    begin(&manager, "a", true).expect("begun");
    // The user may still write: no snapshot of before yet, and no copy.
    assert_fault(
        create(&manager, "before-rollback-a"),
        ErrorCode::InUse,
        &["rolled back"],
    );
    let early = manager.start_rollback_copy(&name("v"), user);
    assert_fault(early, ErrorCode::InUse, &["rolled back"]);
    let attachment = attach(&manager);
    assert!(attachment > user);
    let no_snapshot = manager.start_rollback_copy(&name("v"), attachment);
    assert_fault(no_snapshot, ErrorCode::NotFound, &["before-rollback-a"]);
}

#[test]
fn name_of_the_snapshot_of_before_is_free_and_short() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let long = "x".repeat(64);
    for taken in ["a", "before-rollback-a", "before-rollback-a-2", &long] {
        create(&manager, taken).expect("made");
    }
    let begun = begin(&manager, "a", false).expect("begun");
    assert_eq!(begun.undo, snap("before-rollback-a-3"));
    manager.undo_rollback(&name("v")).expect("undone");
    let begun = begin(&manager, &long, false).expect("begun");
    assert_eq!(begun.undo.as_str().len(), 58);
    let absent = begin(&manager, "c", false);
    assert_fault(absent, ErrorCode::NotFound, &["v@c"]);
}

#[test]
fn client_makes_the_snapshot_of_before_over_rest() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, SHORT);
    let client = &served.client;
    let volume = name("v");
    client
        .create_snapshot(&volume, &snapshot_support::request("a"))
        .expect("made");
    let request = BeginRollback {
        snapshot: snap("a"),
        force: false,
    };
    client.begin_rollback(&volume, &request).expect("begun");
    let attached = client.attach_for_rollback(&volume, &attach_request("c"));
    let attachment = attached.expect("attached").layout.epoch;
    let cutter = spawn_client(client, attachment, |_| CutResult::Done);
    let before = snapshot_support::request("before-rollback-a");
    client.create_snapshot(&volume, &before).expect("made");
    let copying = client.start_rollback_copy(&volume, attachment);
    assert_eq!(copying.expect("copying").phase, RollbackPhase::Copying);
    assert_eq!(
        client.rollback(&volume).expect("shown").phase,
        RollbackPhase::Copying
    );
    let request = FinishRollback {
        attachment,
        phase: RollbackPhase::Copying,
    };
    assert!(
        client
            .finish_rollback(&volume, &request)
            .expect("ended")
            .ended
    );
    client.detach(&volume, Some(attachment)).expect("detached");
    assert_eq!(cutter.join().expect("no panic"), 1);
}
