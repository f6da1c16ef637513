//! Adding, removing and promoting copies of volumes, over HTTP.

use crate::cluster;
use cluster::{
    BrickBehavior, Cluster, MIB, assert_refused, brick_id, create_request, legs, name, registration,
};
use pagemesh_base::brick_name::BrickRef;
use pagemesh_base::layout::{BrickId, EpochNumber, LegState};
use pagemesh_manage::wire::{
    AttachReplica, AttachVolume, ChooseReplica, CreateVolume, ErrorCode, LegChange, ReplicaLag,
    ReplicationStatus, ReportReplication, ResyncProgress, VolumeDetail, VolumeHealth,
};
use pagemesh_manage::{LayoutKind, ManagerClient, ManagerError};

fn replica_choice(copy: usize) -> ChooseReplica {
    ChooseReplica {
        copy,
        force: false,
        expected: None,
    }
}

fn attach_request(brick: Option<BrickId>, asynchronous: bool) -> AttachReplica {
    AttachReplica {
        brick: brick.map(BrickRef::from),
        asynchronous,
        auto_promote: false,
    }
}

fn forced_choice(copy: usize) -> ChooseReplica {
    ChooseReplica {
        copy,
        force: true,
        expected: None,
    }
}

/// State of each leg, and whether it needs a full resync.
fn leg_states(volume: &VolumeDetail) -> Vec<(LegState, bool)> {
    let legs = legs(&volume.layout);
    legs.map(|leg| (leg.state, leg.needs_full_resync)).collect()
}

/// A client attaches the volume, moves a leg through these states, and detaches the volume.
fn transition_leg(client: &ManagerClient, leg: usize, to: &[LegState]) {
    let v = name("v");
    let attached = client.attach(&v, "one").expect("attached");
    let attachment = attached.layout.epoch;
    let mut epoch = attachment;
    for &to in to {
        let change = LegChange {
            segment: 0,
            column: 0,
            leg,
            to,
            note: None,
        };
        let changed = client.change_legs(&v, Some(attachment), epoch, &[change]);
        epoch = changed.expect("changed").epoch;
    }
    client.detach(&v, Some(attachment)).expect("detached");
}

use LegState::{AsyncReplica, InSync, Stale, Syncing};

#[test]
fn copies_are_attached_and_detached() {
    let cluster = Cluster::new(4);
    let served = cluster.serve_with_bricks_alive();
    let (client, v) = (&served.client, name("v"));
    let made = client
        .create(&create_request("v", LayoutKind::Concat, MIB))
        .expect("made")
        .volume;
    let first = made.layout.segments[0].columns[0].legs[0].brick;
    client.attach(&v, "one").expect("attached, and it stays so");

    assert_refused(
        client.attach_replica(&v, attach_request(Some(brick_id(9)), false)),
        ErrorCode::NotFound,
        &[],
    );
    assert_refused(
        client.attach_replica(&v, attach_request(Some(first), false)),
        ErrorCode::NoRoom,
        &["failure domains"],
    );
    let other = (0..4)
        .map(brick_id)
        .find(|brick| *brick != first)
        .expect("four");
    let two = client
        .attach_replica(&v, attach_request(Some(other), false))
        .expect("attached");
    assert_eq!(leg_states(&two), [(InSync, false), (Stale, true)]);
    assert_eq!(two.layout.segments[0].columns[0].legs[1].brick, other);
    assert_eq!((two.info.layout, two.info.copies), (LayoutKind::Mirror, 2));
    assert_eq!(
        (two.layout.epoch, two.info.health),
        (EpochNumber(3), VolumeHealth::Degraded)
    );
    assert_eq!(
        two.layout.segments[0].columns[0].lost_since, two.layout.epoch,
        "changes are tracked"
    );
    assert_eq!(two.info.attached.expect("still").client, "one");
    let three = client
        .attach_replica(&v, attach_request(None, false))
        .expect("attached");
    assert_eq!(three.info.copies, 3);
    assert_refused(
        client.attach_replica(&v, attach_request(None, false)),
        ErrorCode::InUse,
        &["3 copies"],
    );
    let crashed = cluster.crash_copy_without_heartbeats();
    assert_eq!(crashed.show(&v).expect("there").layout, three.layout);
    let grown = client.grow(&v, 2 * MIB).expect("grown").volume;
    assert_eq!(grown.layout.segments[1].columns[0].legs.len(), 3);
    cluster.assert_no_orphans(served.handle.manager());

    assert_refused(
        client.detach_replica(&v, replica_choice(1)),
        ErrorCode::InUse,
        &["one"],
    );
    assert_refused(
        client.detach_replica(&v, forced_choice(0)),
        ErrorCode::InUse,
        &["in-sync"],
    );
    assert_refused(
        client.detach_replica(&v, forced_choice(3)),
        ErrorCode::BadRequest,
        &["copy 3"],
    );
    let left = client
        .detach_replica(&v, forced_choice(1))
        .expect("detached");
    assert_eq!(leg_states(&left)[..2], [(InSync, false), (Stale, true)]);
    assert_eq!((left.info.copies, left.info.attached), (2, None));
    let left = client
        .detach_replica(&v, replica_choice(1))
        .expect("detached");
    assert_eq!(
        (left.info.layout, left.info.health),
        (LayoutKind::Concat, VolumeHealth::InSync)
    );
    assert_refused(
        client.detach_replica(&v, replica_choice(0)),
        ErrorCode::InUse,
        &["in-sync"],
    );
    cluster.assert_no_orphans(served.handle.manager());
    served.handle.stop();
}

#[test]
fn copy_is_promoted() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let (client, v) = (&served.client, name("v"));
    client
        .create(&create_request("v", LayoutKind::Concat, MIB))
        .expect("made");
    client
        .attach_replica(&v, attach_request(None, false))
        .expect("attached");
    // The copy is empty, and force does not change that.
    for choice in [replica_choice(1), forced_choice(1)] {
        assert_refused(
            client.promote_replica(&v, choice),
            ErrorCode::InUse,
            &["never"],
        );
    }
    transition_leg(client, 1, &[Syncing, InSync]);
    assert_eq!(
        leg_states(&client.volume(&v).expect("shown")),
        [(InSync, false); 2]
    );
    transition_leg(client, 1, &[Stale]);
    assert_refused(
        client.promote_replica(&v, replica_choice(1)),
        ErrorCode::BadRequest,
        &["copy 1", "stale", "acknowledged writes"],
    );
    client.attach(&v, "two").expect("attached");
    assert_refused(
        client.promote_replica(&v, replica_choice(0)),
        ErrorCode::InUse,
        &["two"],
    );
    let promoted = client
        .promote_replica(&v, forced_choice(1))
        .expect("promoted");
    assert_eq!(leg_states(&promoted), [(Stale, true), (InSync, false)]);
    assert_eq!(promoted.info.attached, None);
    // The copy promoted before may still be the better one.
    let behind = client.promote_replica(&v, replica_choice(0));
    assert_refused(behind, ErrorCode::BadRequest, &["copy 0", "stale"]);
    let other = client
        .promote_replica(&v, forced_choice(0))
        .expect("promoted");
    assert_eq!(leg_states(&other), [(InSync, false), (Stale, true)]);
    transition_leg(client, 1, &[Syncing, InSync]);
    // Where the copy is in-sync, the promotion gives up no other copy.
    let same = client
        .promote_replica(&v, replica_choice(0))
        .expect("promoted");
    assert_eq!(leg_states(&same), [(InSync, false); 2]);
    assert_refused(
        client.promote_replica(&v, forced_choice(2)),
        ErrorCode::BadRequest,
        &["copy 2"],
    );
    served.handle.stop();
}

/// The last copy on a living brick is not removed, even if the layout calls another one in-sync. A
/// number with an old epoch does not name another copy.
#[test]
fn last_live_copy_is_not_detached() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let (client, v) = (&served.client, name("v"));
    let made = client
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made")
        .volume;
    let second = made.layout.segments[0].columns[0].legs[1].brick;
    let expected = Some(EpochNumber(made.layout.epoch.0 + 1));
    let other = client.detach_replica(
        &v,
        ChooseReplica {
            expected,
            ..replica_choice(0)
        },
    );
    assert!(
        matches!(other, Err(ManagerError::Conflict { .. })),
        "{other:?}"
    );
    cluster.clock.advance(std::time::Duration::from_secs(60));
    let alive = (0..2).find(|n| brick_id(*n) != second).expect("two");
    client.heartbeat(&registration(alive)).expect("heard");
    assert_refused(
        client.detach_replica(&v, replica_choice(0)),
        ErrorCode::BadRequest,
        &["alive"],
    );
    assert_eq!(client.volume(&v).expect("shown").layout, made.layout);
    let left = client
        .detach_replica(&v, replica_choice(1))
        .expect("detached");
    assert_eq!(leg_states(&left), [(InSync, false)]);
    served.handle.stop();
}

/// A brick failure during the attach leaves the volume unchanged.
#[test]
fn failed_replica_attach_leaves_no_slices() {
    for mood in [
        BrickBehavior::Unreachable,
        BrickBehavior::Full,
        BrickBehavior::LosesAnswers,
        BrickBehavior::DelaysRequests,
        BrickBehavior::FailsAfterCreate,
    ] {
        let cluster = Cluster::new(2);
        let served = cluster.serve_with_bricks_alive();
        let (client, v) = (&served.client, name("v"));
        let made = client
            .create(&create_request("v", LayoutKind::Concat, MIB))
            .expect("made")
            .volume;
        let first = made.layout.segments[0].columns[0].legs[0].brick;
        let other = cluster
            .fakes
            .iter()
            .find(|fake| fake.id != first)
            .expect("two");
        other.set(mood);
        assert_refused(
            client.attach_replica(&v, attach_request(None, false)),
            ErrorCode::BrickFailed,
            &[],
        );
        assert_eq!(client.volume(&v).expect("shown").layout, made.layout);
        cluster.reset_bricks();
        other.deliver_delayed();
        cluster.sweep_until_certain(served.handle.manager());
        cluster.assert_no_orphans(served.handle.manager());
        client
            .attach_replica(&v, attach_request(None, false))
            .expect("attached");
        cluster.assert_no_orphans(served.handle.manager());
        served.handle.stop();
    }
}

/// An asynchronous copy has its own state. It is promoted without force once all bricks with
/// in-sync copies are dead.
#[test]
fn async_replica_state_and_promotion() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_with_bricks_alive();
    let (client, v) = (&served.client, name("v"));
    let made = client
        .create(&create_request("v", LayoutKind::Concat, MIB))
        .expect("made");
    let first = made.volume.layout.segments[0].columns[0].legs[0].brick;
    let added = client
        .attach_replica(&v, attach_request(None, true))
        .expect("attached");
    assert!(added.layout.segments[0].columns[0].legs[1].asynchronous);
    assert_eq!(leg_states(&added), [(InSync, false), (Stale, true)]);
    assert_refused(
        client.attach_replica(&v, attach_request(None, true)),
        ErrorCode::BadRequest,
        &["asynchronous copy already"],
    );
    assert_refused(
        client.grow(&v, 2 * MIB),
        ErrorCode::BadRequest,
        &["asynchronous copy"],
    );
    assert_refused(
        client.promote_replica(&v, forced_choice(1)),
        ErrorCode::InUse,
        &["never"],
    );
    // It receives no write together with the others.
    let attached = client.attach(&v, "one").expect("attached");
    let epoch = attached.layout.epoch;
    let turn_to = |to| LegChange {
        segment: 0,
        column: 0,
        leg: 1,
        to,
        note: None,
    };
    let syncing = client.change_legs(&v, Some(epoch), epoch, &[turn_to(Syncing)]);
    assert!(syncing.is_err(), "{syncing:?}");
    client.detach(&v, Some(epoch)).expect("detached");
    transition_leg(client, 1, &[AsyncReplica]);
    let follows = client.volume(&v).expect("shown");
    assert_eq!(
        leg_states(&follows),
        [(InSync, false), (AsyncReplica, false)]
    );
    assert_eq!(follows.layout.segments[0].columns[0].lost_since.0, 0);
    assert_eq!(follows.info.health, VolumeHealth::InSync);
    let crashed = cluster.crash_copy_without_heartbeats();
    assert_eq!(crashed.show(&v).expect("there").layout, follows.layout);
    // This manager has received no heartbeat yet, so it knows no dead brick.
    let refusal = crashed.promote_replica(&v, replica_choice(1));
    let refusal = refusal.expect_err("an in-sync copy may live").to_string();
    assert!(refusal.contains("may be"), "{refusal}");
    // No epoch tells the writes that it lacks.
    transition_leg(client, 1, &[Stale, AsyncReplica, Stale]);
    assert_eq!(
        leg_states(&client.volume(&v).expect("shown")),
        [(InSync, false), (Stale, true)]
    );
    transition_leg(client, 1, &[Stale, AsyncReplica]);

    assert_refused(
        client.promote_replica(&v, replica_choice(1)),
        ErrorCode::BadRequest,
        &["is alive", "acknowledged last"],
    );
    cluster.clock.advance(std::time::Duration::from_secs(60));
    for n in (0..3).filter(|n| brick_id(*n) != first) {
        client.heartbeat(&registration(n)).expect("heard");
    }
    let promoted = client
        .promote_replica(&v, replica_choice(1))
        .expect("promoted");
    assert_eq!(leg_states(&promoted), [(Stale, true), (InSync, false)]);
    let legs = &promoted.layout.segments[0].columns[0].legs;
    assert!(legs.iter().all(|leg| !leg.asynchronous));
    served.handle.stop();
}

/// The volume shows the lag and resync progress of its client's last report, and the age of the
/// report.
#[test]
fn volume_shows_last_replication_report() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_with_bricks_alive();
    let (client, v) = (&served.client, name("v"));
    client
        .create(&create_request("v", LayoutKind::Concat, MIB))
        .expect("made");
    for asynchronous in [true, false] {
        let copy = attach_request(None, asynchronous);
        client.attach_replica(&v, copy).expect("attached");
    }
    transition_leg(client, 1, &[AsyncReplica]);
    let shown = || client.volume(&v).expect("shown").replication;
    let attach = || {
        let attached = client.attach(&v, "one").expect("attached");
        attached.layout.epoch
    };
    let lag = |changes| ReplicaLag {
        changes,
        bytes: 4096 * changes,
        age_us: 100,
    };
    let resync = |copy| ResyncProgress {
        copy,
        bytes_todo: MIB,
        bytes_done: 4096,
        elapsed_ms: 5,
    };
    let report = |attachment, changes| ReportReplication {
        attachment,
        lag: Some(lag(changes)),
        resyncs: vec![resync(2)],
        replica_snapshots: vec![],
    };
    let first = attach();
    assert_eq!(shown(), None);
    client
        .report_replication(&v, &report(first, 7))
        .expect("accepted");
    client
        .report_replication(&v, &report(first, 3))
        .expect("accepted");
    cluster.clock.advance(std::time::Duration::from_secs(4));
    let all = ReplicationStatus {
        lag: Some(lag(3)),
        resyncs: vec![resync(2)],
        reported_us_ago: 4_000_000,
    };
    assert_eq!(shown(), Some(all.clone()));
    for wrong in [vec![resync(2), resync(2)], vec![resync(99)]] {
        let wrong = ReportReplication {
            resyncs: wrong,
            ..report(first, 9)
        };
        let hints = &["reported twice"];
        assert_refused(
            client.report_replication(&v, &wrong),
            ErrorCode::BadRequest,
            hints,
        );
    }
    assert_eq!(shown(), Some(all));

    let second = attach();
    assert_eq!(shown(), None, "that was another client");
    let late = client.report_replication(&v, &report(first, 1));
    assert!(matches!(late, Err(ManagerError::Fenced { .. })), "{late:?}");
    assert_eq!(shown(), None);
    client
        .report_replication(&v, &report(second, 0))
        .expect("accepted");
    let behind = || shown().and_then(|status| status.lag);
    assert_eq!(behind(), Some(lag(0)));
    client.detach(&v, Some(second)).expect("detached");
    assert_eq!(shown(), None, "nobody has it");

    let third = attach();
    client
        .report_replication(&v, &report(third, 5))
        .expect("accepted");
    let change = |leg, to| {
        let change = LegChange {
            segment: 0,
            column: 0,
            leg,
            to,
            note: None,
        };
        let epoch = client.volume(&v).expect("shown").layout.epoch;
        let changed = client.change_legs(&v, Some(third), epoch, &[change]);
        changed.expect("changed");
    };
    change(1, Stale);
    assert_eq!(behind(), None, "it follows no more");
    assert_eq!(shown().map(|status| status.resyncs), Some(vec![resync(2)]));
    change(2, Syncing);
    assert_eq!(shown().map(|status| status.resyncs), Some(vec![resync(2)]));
    change(2, InSync);
    assert_eq!(shown(), None, "all of it is there");
    served.handle.stop();
}

/// With `auto_promote` the manager promotes the asynchronous copy by itself, for a client that
/// reaches no in-sync copy while every brick with one is dead.
#[test]
fn manager_auto_promotes_async_replica() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_with_bricks_alive();
    let (client, v) = (&served.client, name("v"));
    let made = client
        .create(&create_request("v", LayoutKind::Concat, MIB))
        .expect("made");
    let first = made.volume.layout.segments[0].columns[0].legs[0].brick;
    let allowed = |asynchronous| AttachReplica {
        auto_promote: true,
        ..attach_request(None, asynchronous)
    };
    assert_refused(
        client.attach_replica(&v, allowed(false)),
        ErrorCode::BadRequest,
        &["asynchronous"],
    );
    let added = client.attach_replica(&v, allowed(true)).expect("attached");
    assert!(added.info.auto_promote);
    let other = added.layout.segments[0].columns[0].legs[1].brick;
    let beat = |brick| {
        for n in (0..3).filter(|n| brick_id(*n) == brick) {
            client.heartbeat(&registration(n)).expect("heard");
        }
    };
    let late = || cluster.clock.advance(std::time::Duration::from_secs(60));
    let attached = |unreachable| {
        let request = AttachVolume {
            client: "one".into(),
            unreachable,
            process: None,
            replaces: None,
            receive: false,
        };
        let attached = client.attach_as(&v, &request).expect("attached");
        let epoch = attached.layout.epoch;
        client.detach(&v, Some(epoch)).expect("detached");
        leg_states(&client.volume(&v).expect("shown"))
    };
    // The copy must be in step before.
    late();
    beat(other);
    assert_eq!(attached(true), [(InSync, false), (Stale, true)]);
    transition_leg(client, 1, &[AsyncReplica]);
    // Refused while a brick with an in-sync copy is alive, or the brick of the asynchronous copy is
    // not.
    beat(first);
    assert_eq!(attached(true), [(InSync, false), (AsyncReplica, false)]);
    late();
    assert_eq!(attached(true), [(InSync, false), (AsyncReplica, false)]);
    // Refused without the client's report that it reaches no in-sync copy.
    beat(other);
    assert_eq!(attached(false), [(InSync, false), (AsyncReplica, false)]);
    let promoted = client
        .promote_replica(&v, replica_choice(0))
        .expect("nothing changes");
    assert!(promoted.info.auto_promote, "the other copy still follows");
    assert_eq!(attached(true), [(Stale, true), (InSync, false)]);
    assert!(!client.volume(&v).expect("shown").info.auto_promote);
    served.handle.stop();
}

#[test]
fn async_replica_of_striped_volume_is_refused() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_with_bricks_alive();
    let (client, v) = (&served.client, name("v"));
    let striped = CreateVolume {
        columns: Some(2),
        ..create_request("v", LayoutKind::Stripe, MIB)
    };
    client.create(&striped).expect("made");
    assert_refused(
        client.attach_replica(&v, attach_request(None, true)),
        ErrorCode::BadRequest,
        &["one column"],
    );
    served.handle.stop();
}
