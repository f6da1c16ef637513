//! Cuts for snapshots: by the client that has attached the volume, or by the manager; failures during a cut.

use crate::cluster;
use crate::snapshot_support;
use cluster::{BrickBehavior, Cluster, assert_refused, legs, name};
use pagemesh_base::layout::{EpochNumber, LegState};
use pagemesh_manage::snapshots::CutTimes;
use pagemesh_manage::wire::{
    AnswerCut, ChangeLegs, CutResult, CutStep, ErrorCode, EventKind, LegChange,
};
use snapshot_support::{
    SHORT, assert_fault, create, detach, epochs, event_kinds, list, manager_with_volume, names,
    request, serve_with_volume, snap, spawn_client, sweep_to_the_end,
};
use std::sync::{Arc, mpsc};
use std::time::Duration;

#[test]
fn dead_brick_prevents_a_snapshot() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    cluster.clock.advance(Duration::from_secs(8));
    manager
        .heartbeat(cluster::registration(0))
        .expect("welcome");
    assert_fault(create(&manager, "a"), ErrorCode::BrickFailed, &["dead"]);
    assert_eq!(list(&manager, true), [], "no epoch was taken");
    assert_eq!(
        event_kinds(&manager).last(),
        Some(&EventKind::SnapshotFailed)
    );
}

#[test]
fn failing_brick_leaves_no_snapshot() {
    for behavior in [
        BrickBehavior::Unreachable,
        BrickBehavior::LosesAnswers,
        BrickBehavior::KnowsNoSnapshots,
    ] {
        let cluster = Cluster::new(2);
        let manager = manager_with_volume(&cluster);
        cluster.fakes[1].set(behavior);
        let failed = create(&manager, "a");
        assert_fault(failed, ErrorCode::BrickFailed, &["failed"]);
        assert_eq!(list(&manager, false), []);
        let kinds = event_kinds(&manager);
        assert_eq!(kinds.last(), Some(&EventKind::SnapshotFailed));
        // A brick of an earlier release has no snapshot, so nothing waits for its upgrade.
        if behavior != BrickBehavior::KnowsNoSnapshots {
            cluster.reset_bricks();
        }
        sweep_to_the_end(&cluster, &manager);
        assert_eq!(epochs(&cluster), [[], [] as [u32; 0]], "{behavior:?}");
        cluster.reset_bricks();
        create(&manager, "a").expect("made");
    }
}

/// A request to prepare that arrives after the drop must not leave a snapshot.
#[test]
fn late_preparation_is_dropped_again() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    cluster.fakes[1].set(BrickBehavior::LosesAnswers);
    create(&manager, "a").expect_err("the answer is lost");
    let kept = cluster.fakes[1].snapshots.lock().expect("no panic").clone();
    assert_eq!(kept.len(), 1);
    cluster.reset_bricks();
    manager.sweep();
    assert_eq!(epochs(&cluster), [[], [] as [u32; 0]]);
    let late = || *cluster.fakes[1].snapshots.lock().expect("no panic") = kept.clone();
    late();
    drop(manager);
    let manager = cluster.manager_with_bricks_alive();
    sweep_to_the_end(&cluster, &manager);
    assert_eq!(epochs(&cluster), [[], [] as [u32; 0]]);
}

#[test]
fn attach_during_the_cut_makes_it_void() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let intruder = manager.clone();
    let hook = move |_: &cluster::FakeBrick| {
        // Attached for a moment only: the next attempt finds no client, but a later epoch.
        let volume = intruder.show(&name("v")).expect("shown");
        if volume.layout.epoch.0 == 1 {
            let attach = cluster::attach_request("c");
            intruder.attach(&name("v"), &attach).expect("attached");
            detach(&intruder);
        }
    };
    *cluster.fakes[1].hook.lock().expect("no panic") = Some(Arc::new(Box::new(hook)));
    let made = create(&manager, "a").expect("made");
    // 2 is void, 3 is the layout of the attachment.
    assert_eq!(made.epoch.0, 4);
    sweep_to_the_end(&cluster, &manager);
    assert_eq!(epochs(&cluster), [[4], [4]]);
}

#[test]
fn volume_that_changes_at_each_attempt_is_given_up() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let intruder = manager.clone();
    let hook = move |_: &cluster::FakeBrick| {
        let attach = cluster::attach_request("c");
        intruder.attach(&name("v"), &attach).expect("attached");
        detach(&intruder);
    };
    *cluster.fakes[0].hook.lock().expect("no panic") = Some(Arc::new(Box::new(hook)));
    assert_fault(create(&manager, "a"), ErrorCode::InUse, &["3 attempts"]);
    *cluster.fakes[0].hook.lock().expect("no panic") = None;
    assert_eq!(list(&manager, false), []);
    sweep_to_the_end(&cluster, &manager);
    assert_eq!(epochs(&cluster), [[], [] as [u32; 0]]);
}

#[test]
fn client_of_the_volume_makes_the_cut() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, CutTimes::default());
    let attached = served.client.attach(&name("v"), "c").expect("attached");
    let client = spawn_client(&served.client, attached.layout.epoch, |_| CutResult::Done);
    let made = served.client.create_snapshot(&name("v"), &request("a"));
    let made = made.expect("made");
    assert_eq!(made.epoch.0, 3);
    let again = served.client.create_snapshot(&name("v"), &request("b"));
    assert_eq!(again.expect("made").epoch.0, 4);
    assert_eq!(
        epochs(&cluster),
        [[], [] as [u32; 0]],
        "bricks hear of it from the client"
    );
    served.client.detach(&name("v"), None).expect("detached");
    assert_eq!(client.join().expect("no panic"), 2);
    let manager = served.handle.manager().clone();
    assert_eq!(names(&list(&manager, false)), ["b", "a"]);
}

#[test]
fn changed_layout_is_cut_again() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, CutTimes::default());
    let attached = served.client.attach(&name("v"), "c").expect("attached");
    let attachment = attached.layout.epoch;
    let client = spawn_client(&served.client, attachment, |epoch| match epoch {
        3 => CutResult::LayoutChanged("a leg\nis lost".into()),
        _ => CutResult::Done,
    });
    let made = served.client.create_snapshot(&name("v"), &request("a"));
    assert_eq!(made.expect("made").epoch.0, 4);
    served.client.detach(&name("v"), None).expect("detached");
    client.join().expect("no panic");
    let manager = served.handle.manager();
    assert_eq!(names(&list(manager, false)), ["a"]);
    sweep_to_the_end(&cluster, manager);
}

/// The manager compares the layout with the one before the cut, whatever the client says.
#[test]
fn leg_lost_during_the_cut_makes_it_void() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, CutTimes::default());
    let attached = served.client.attach(&name("v"), "c").expect("attached");
    let attachment = attached.layout.epoch;
    let manager = served.handle.manager().clone();
    let loser = manager.clone();
    let client = spawn_client(&served.client, attachment, move |epoch| {
        if epoch == 3 {
            let change = LegChange {
                segment: 0,
                column: 0,
                leg: 1,
                to: LegState::Stale,
                note: None,
            };
            let lost = ChangeLegs {
                expected: attachment,
                attachment: Some(attachment),
                changes: vec![change],
            };
            loser.change_legs(&name("v"), &lost).expect("changed");
        }
        CutResult::Done
    });
    let made = manager.create_snapshot(&name("v"), &request("a"));
    assert_eq!(made.expect("made").epoch.0, 5);
    let (detail, _) = manager
        .show_snapshot(&name("v"), &snap("a"))
        .expect("shown");
    assert_eq!(legs(&detail.layout).count(), 1, "the stale leg has no part");
    detach(&manager);
    client.join().expect("no panic");
}

#[test]
fn refusal_of_the_client_is_passed_on() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, CutTimes::default());
    let attached = served.client.attach(&name("v"), "c").expect("attached");
    let client = spawn_client(&served.client, attached.layout.epoch, |_| {
        CutResult::Failed("a brick is old".into())
    });
    let refused = served.client.create_snapshot(&name("v"), &request("a"));
    assert_refused(refused, ErrorCode::InUse, &["c", "a brick is old"]);
    served.client.detach(&name("v"), None).expect("detached");
    assert_eq!(client.join().expect("no panic"), 1, "it is not repeated");
    sweep_to_the_end(&cluster, served.handle.manager());
}

#[test]
fn client_that_fetches_no_order_is_named() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, SHORT);
    served.client.attach(&name("v"), "c").expect("attached");
    let refused = served.client.create_snapshot(&name("v"), &request("a"));
    assert_refused(
        refused,
        ErrorCode::InUse,
        &["the client c", "does not answer"],
    );
    let manager = served.handle.manager();
    assert_eq!(
        (list(manager, false), list(manager, true)),
        (vec![], vec![])
    );
    assert_eq!(
        event_kinds(manager).last(),
        Some(&EventKind::SnapshotFailed)
    );
    // It is no order for a client that comes later.
    detach(manager);
    create(manager, "a").expect("made");
}

#[test]
fn client_that_never_answers_leaves_no_snapshot() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, SHORT);
    let attached = served.client.attach(&name("v"), "c").expect("attached");
    let attachment = attached.layout.epoch;
    let poller = served.client.clone();
    let fetches = std::thread::spawn(move || poller.poll_cut(&name("v"), attachment));
    let manager = served.handle.manager();
    // The poll may come after the order, within the time for it or not.
    let refused = create(manager, "a").expect_err("no answer");
    assert_eq!(refused.code(), ErrorCode::InUse, "{refused}");
    detach(manager);
    let _ = fetches.join().expect("no panic");
    let late = AnswerCut {
        attachment,
        epoch: EpochNumber(3),
        step: CutStep::Whole,
        result: CutResult::Done,
    };
    let answered = served.client.answer_cut(&name("v"), &late);
    assert!(answered.is_err(), "the attachment is over");
    assert_eq!(list(manager, false), []);
    sweep_to_the_end(&cluster, manager);
}

#[test]
fn end_of_the_attachment_ends_poll_and_order() {
    let cluster = Cluster::new(2);
    let served = serve_with_volume(&cluster, CutTimes::default());
    let first = served.client.attach(&name("v"), "c").expect("attached");
    let attachment = first.layout.epoch;
    let (fetched, is_fetched) = mpsc::channel();
    let poller = served.client.clone();
    let client = std::thread::spawn(move || {
        let order = poller.poll_cut(&name("v"), attachment);
        fetched.send(order.clone()).expect("the test waits");
        // The next poll waits until the attachment ends.
        poller.poll_cut(&name("v"), attachment)
    });
    let manager = served.handle.manager().clone();
    let maker = std::thread::spawn(move || create(&manager, "a"));
    let order = is_fetched.recv().expect("a poll").expect("an order");
    assert_eq!(order.map(|it| it.epoch.0), Some(3));
    // A fetched order is given again, because its answer may be lost.
    let again = client.join().expect("no panic").expect("an order");
    assert_eq!(again.map(|it| it.epoch.0), Some(3));
    served.client.detach(&name("v"), None).expect("detached");
    let fenced = served.client.poll_cut(&name("v"), attachment);
    assert!(fenced.is_err(), "{fenced:?}");
    // The next attempt finds no client, and asks the bricks.
    let made = maker.join().expect("no panic").expect("made");
    assert_eq!(made.epoch.0, 4);
    assert_eq!(epochs(&cluster), [[4], [4]]);
}

#[test]
fn restart_during_a_cut_drops_the_snapshot() {
    let cluster = Cluster::new(2);
    let manager = manager_with_volume(&cluster);
    let path = cluster.dir.path().join("copy.redb");
    let (from, to) = (cluster.store(), path.clone());
    let hook = move |brick: &cluster::FakeBrick| {
        // The store as it is while the last brick prepares the snapshot.
        if brick.id == cluster::brick_id(1) && !to.exists() {
            std::fs::copy(&from, &to).expect("a copy");
        }
    };
    *cluster.fakes[1].hook.lock().expect("no panic") = Some(Arc::new(Box::new(hook)));
    create(&manager, "a").expect("made");
    *cluster.fakes[1].hook.lock().expect("no panic") = None;
    assert_eq!(epochs(&cluster), [[2], [2]]);
    let restarted = cluster.manager_on(&path);
    cluster.send_heartbeats(&restarted);
    assert_eq!(list(&restarted, false), [], "it was not committed");
    sweep_to_the_end(&cluster, &restarted);
    assert_eq!(epochs(&cluster), [[], [] as [u32; 0]]);
    let next = create(&restarted, "a").expect("made");
    assert_eq!(next.epoch.0, 3, "the epoch is not used again");
}
