//! Copies that are added to volumes, removed, and promoted, over HTTP.

mod cluster;

use cluster::{Cluster, MIB, Mood, brick_id, legs, name, refused, registration, wish};
use pagemesh_base::layout::{BrickId, EpochNumber, LegState};
use pagemesh_manage::wire::{
    AttachReplica, ChooseReplica, Code, CopiesTold, CopyReturn, CreateVolume, Health, Lag,
    LegChange, TellCopies, VolumeDetail,
};
use pagemesh_manage::{Client, Kind, ManagerError};

fn choice(copy: usize) -> ChooseReplica {
    ChooseReplica {
        copy,
        force: false,
        expected: None,
    }
}

fn copy_on(brick: Option<BrickId>, asynchronous: bool) -> AttachReplica {
    AttachReplica {
        brick,
        asynchronous,
        auto_promote: false,
    }
}

fn forced(copy: usize) -> ChooseReplica {
    ChooseReplica {
        copy,
        force: true,
        expected: None,
    }
}

/// State and freshness of each leg.
fn states(volume: &VolumeDetail) -> Vec<(LegState, bool)> {
    let legs = legs(&volume.layout);
    legs.map(|leg| (leg.state, leg.fresh)).collect()
}

/// A client takes the volume, has a leg take these states, and gives it back.
fn turn(client: &Client, leg: usize, to: &[LegState]) {
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

use LegState::{Following, InSync, Stale, Syncing};

#[test]
fn a_volume_gets_copies_and_loses_them() {
    let cluster = Cluster::new(4);
    let served = cluster.serve_living();
    let (client, v) = (&served.client, name("v"));
    let made = client
        .create(&wish("v", Kind::Concat, MIB))
        .expect("made")
        .volume;
    let first = made.layout.segments[0].columns[0].legs[0].brick;
    client.attach(&v, "one").expect("attached, and it stays so");

    refused(
        client.attach_replica(&v, copy_on(Some(brick_id(9)), false)),
        Code::NotFound,
        &[],
    );
    refused(
        client.attach_replica(&v, copy_on(Some(first), false)),
        Code::NoRoom,
        &["failure domains"],
    );
    let other = (0..4)
        .map(brick_id)
        .find(|brick| *brick != first)
        .expect("four");
    let two = client
        .attach_replica(&v, copy_on(Some(other), false))
        .expect("attached");
    assert_eq!(states(&two), [(InSync, false), (Stale, true)]);
    assert_eq!(two.layout.segments[0].columns[0].legs[1].brick, other);
    assert_eq!((two.info.layout, two.info.copies), (Kind::Mirror, 2));
    assert_eq!(
        (two.layout.epoch, two.info.health),
        (EpochNumber(3), Health::Degraded)
    );
    assert_eq!(
        two.layout.segments[0].columns[0].round, 1,
        "changes are tracked"
    );
    assert_eq!(two.info.attached.expect("still").client, "one");
    let three = client
        .attach_replica(&v, copy_on(None, false))
        .expect("attached");
    assert_eq!(three.info.copies, 3);
    refused(
        client.attach_replica(&v, copy_on(None, false)),
        Code::InUse,
        &["3 copies"],
    );
    let crashed = cluster.crashed_without_beats();
    assert_eq!(crashed.show(&v).expect("there").layout, three.layout);
    let grown = client.grow(&v, 2 * MIB).expect("grown").volume;
    assert_eq!(grown.layout.segments[1].columns[0].legs.len(), 3);
    cluster.assert_no_orphans(served.handle.manager());

    refused(client.detach_replica(&v, choice(1)), Code::InUse, &["one"]);
    refused(
        client.detach_replica(&v, forced(0)),
        Code::InUse,
        &["in-sync"],
    );
    refused(
        client.detach_replica(&v, forced(3)),
        Code::BadRequest,
        &["copy 3"],
    );
    let left = client.detach_replica(&v, forced(1)).expect("detached");
    assert_eq!(states(&left)[..2], [(InSync, false), (Stale, true)]);
    assert_eq!((left.info.copies, left.info.attached), (2, None));
    let left = client.detach_replica(&v, choice(1)).expect("detached");
    assert_eq!(
        (left.info.layout, left.info.health),
        (Kind::Concat, Health::InSync)
    );
    refused(
        client.detach_replica(&v, choice(0)),
        Code::InUse,
        &["in-sync"],
    );
    cluster.assert_no_orphans(served.handle.manager());
    served.handle.stop();
}

#[test]
fn a_copy_is_promoted() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let (client, v) = (&served.client, name("v"));
    client.create(&wish("v", Kind::Concat, MIB)).expect("made");
    client
        .attach_replica(&v, copy_on(None, false))
        .expect("attached");
    // It holds nothing yet, and force does not change that.
    for choice in [choice(1), forced(1)] {
        refused(client.promote_replica(&v, choice), Code::InUse, &["never"]);
    }
    turn(client, 1, &[Syncing, InSync]);
    assert_eq!(
        states(&client.volume(&v).expect("shown")),
        [(InSync, false); 2]
    );
    turn(client, 1, &[Stale]);
    refused(
        client.promote_replica(&v, choice(1)),
        Code::BadRequest,
        &["copy 1", "stale", "acknowledged writes"],
    );
    client.attach(&v, "two").expect("attached");
    refused(client.promote_replica(&v, choice(0)), Code::InUse, &["two"]);
    let promoted = client.promote_replica(&v, forced(1)).expect("promoted");
    assert_eq!(states(&promoted), [(Stale, true), (InSync, false)]);
    assert_eq!(promoted.info.attached, None);
    // The one before may be the better one after all.
    let behind = client.promote_replica(&v, choice(0));
    refused(behind, Code::BadRequest, &["copy 0", "stale"]);
    let other = client.promote_replica(&v, forced(0)).expect("promoted");
    assert_eq!(states(&other), [(InSync, false), (Stale, true)]);
    turn(client, 1, &[Syncing, InSync]);
    // Where it is in-sync, no other copy is given up for it.
    let same = client.promote_replica(&v, choice(0)).expect("promoted");
    assert_eq!(states(&same), [(InSync, false); 2]);
    refused(
        client.promote_replica(&v, forced(2)),
        Code::BadRequest,
        &["copy 2"],
    );
    served.handle.stop();
}

/// What only the ledger calls in-sync is not left alone, and a number is not taken
/// for another copy's.
#[test]
fn a_copy_is_not_removed_by_mistake() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let (client, v) = (&served.client, name("v"));
    let made = client
        .create(&wish("v", Kind::Mirror, MIB))
        .expect("made")
        .volume;
    let second = made.layout.segments[0].columns[0].legs[1].brick;
    let expected = Some(EpochNumber(made.layout.epoch.0 + 1));
    let other = client.detach_replica(
        &v,
        ChooseReplica {
            expected,
            ..choice(0)
        },
    );
    assert!(
        matches!(other, Err(ManagerError::Conflict { .. })),
        "{other:?}"
    );
    cluster.clock.advance(std::time::Duration::from_secs(60));
    let alive = (0..2).find(|n| brick_id(*n) != second).expect("two");
    client.heartbeat(&registration(alive)).expect("heard");
    refused(
        client.detach_replica(&v, choice(0)),
        Code::BadRequest,
        &["alive"],
    );
    assert_eq!(client.volume(&v).expect("shown").layout, made.layout);
    let left = client.detach_replica(&v, choice(1)).expect("detached");
    assert_eq!(states(&left), [(InSync, false)]);
    served.handle.stop();
}

/// A brick that fails in between leaves the volume as it was.
#[test]
fn a_copy_that_cannot_be_made_leaves_nothing() {
    for mood in [Mood::Away, Mood::Full, Mood::Mute, Mood::Deaf, Mood::Denies] {
        let cluster = Cluster::new(2);
        let served = cluster.serve_living();
        let (client, v) = (&served.client, name("v"));
        let made = client
            .create(&wish("v", Kind::Concat, MIB))
            .expect("made")
            .volume;
        let first = made.layout.segments[0].columns[0].legs[0].brick;
        let other = cluster
            .fakes
            .iter()
            .find(|fake| fake.id != first)
            .expect("two");
        other.set(mood);
        refused(
            client.attach_replica(&v, copy_on(None, false)),
            Code::BrickFailed,
            &[],
        );
        assert_eq!(client.volume(&v).expect("shown").layout, made.layout);
        cluster.cheer();
        other.deliver();
        cluster.sweep_out(served.handle.manager());
        cluster.assert_no_orphans(served.handle.manager());
        client
            .attach_replica(&v, copy_on(None, false))
            .expect("attached");
        cluster.assert_no_orphans(served.handle.manager());
        served.handle.stop();
    }
}

/// A copy that follows has a state of its own, and is promoted without force once all
/// that have everything are gone.
#[test]
fn a_copy_follows() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_living();
    let (client, v) = (&served.client, name("v"));
    let made = client.create(&wish("v", Kind::Concat, MIB)).expect("made");
    let first = made.volume.layout.segments[0].columns[0].legs[0].brick;
    let added = client
        .attach_replica(&v, copy_on(None, true))
        .expect("attached");
    assert!(added.layout.segments[0].columns[0].legs[1].asynchronous);
    assert_eq!(states(&added), [(InSync, false), (Stale, true)]);
    refused(
        client.attach_replica(&v, copy_on(None, true)),
        Code::BadRequest,
        &["asynchronous copy already"],
    );
    refused(
        client.grow(&v, 2 * MIB),
        Code::BadRequest,
        &["asynchronous copy"],
    );
    refused(
        client.promote_replica(&v, forced(1)),
        Code::InUse,
        &["never"],
    );
    // It is not written with the others.
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
    turn(client, 1, &[Following]);
    let follows = client.volume(&v).expect("shown");
    assert_eq!(states(&follows), [(InSync, false), (Following, false)]);
    assert_eq!(follows.layout.segments[0].columns[0].round, 0);
    assert_eq!(follows.info.health, Health::InSync);
    let crashed = cluster.crashed_without_beats();
    assert_eq!(crashed.show(&v).expect("there").layout, follows.layout);
    // It has heard of nobody, which says nothing of who lives.
    let refusal = crashed.promote_replica(&v, choice(1));
    let refusal = refusal.expect_err("an in-sync copy may live").to_string();
    assert!(refusal.contains("may be"), "{refusal}");
    // No round tells what it lacks.
    turn(client, 1, &[Stale, Following, Stale]);
    assert_eq!(
        states(&client.volume(&v).expect("shown")),
        [(InSync, false), (Stale, true)]
    );
    turn(client, 1, &[Stale, Following]);

    refused(
        client.promote_replica(&v, choice(1)),
        Code::BadRequest,
        &["is alive", "acknowledged last"],
    );
    cluster.clock.advance(std::time::Duration::from_secs(60));
    for n in (0..3).filter(|n| brick_id(*n) != first) {
        client.heartbeat(&registration(n)).expect("heard");
    }
    let promoted = client.promote_replica(&v, choice(1)).expect("promoted");
    assert_eq!(states(&promoted), [(Stale, true), (InSync, false)]);
    let legs = &promoted.layout.segments[0].columns[0].legs;
    assert!(legs.iter().all(|leg| !leg.asynchronous));
    served.handle.stop();
}

/// How far a copy is, behind or in its return, is what its client told last, and how long
/// ago that was.
#[test]
fn of_copies_is_shown_what_their_client_told_last() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_living();
    let (client, v) = (&served.client, name("v"));
    client.create(&wish("v", Kind::Concat, MIB)).expect("made");
    for asynchronous in [true, false] {
        let copy = copy_on(None, asynchronous);
        client.attach_replica(&v, copy).expect("attached");
    }
    turn(client, 1, &[Following]);
    let shown = || client.volume(&v).expect("shown").told;
    let attach = || {
        let attached = client.attach(&v, "one").expect("attached");
        attached.layout.epoch
    };
    let lag = |changes| Lag {
        changes,
        bytes: 4096 * changes,
        age_us: 100,
    };
    let returns = |copy| CopyReturn {
        copy,
        bytes_todo: MIB,
        bytes_done: 4096,
        elapsed_ms: 5,
    };
    let told = |attachment, changes| TellCopies {
        attachment,
        lag: Some(lag(changes)),
        returns: vec![returns(2)],
    };
    let first = attach();
    assert_eq!(shown(), None);
    client.tell_copies(&v, &told(first, 7)).expect("told");
    client.tell_copies(&v, &told(first, 3)).expect("told");
    cluster.clock.advance(std::time::Duration::from_secs(4));
    let all = CopiesTold {
        lag: Some(lag(3)),
        returns: vec![returns(2)],
        told_us_ago: 4_000_000,
    };
    assert_eq!(shown(), Some(all.clone()));
    for wrong in [vec![returns(2), returns(2)], vec![returns(99)]] {
        let wrong = TellCopies {
            returns: wrong,
            ..told(first, 9)
        };
        let hints = &["told of twice"];
        refused(client.tell_copies(&v, &wrong), Code::BadRequest, hints);
    }
    assert_eq!(shown(), Some(all));

    let second = attach();
    assert_eq!(shown(), None, "that was another client");
    let late = client.tell_copies(&v, &told(first, 1));
    assert!(matches!(late, Err(ManagerError::Fenced { .. })), "{late:?}");
    assert_eq!(shown(), None);
    client.tell_copies(&v, &told(second, 0)).expect("told");
    let behind = || shown().and_then(|told| told.lag);
    assert_eq!(behind(), Some(lag(0)));
    client.detach(&v, Some(second)).expect("detached");
    assert_eq!(shown(), None, "nobody has it");

    let third = attach();
    client.tell_copies(&v, &told(third, 5)).expect("told");
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
    assert_eq!(shown().map(|told| told.returns), Some(vec![returns(2)]));
    change(2, Syncing);
    assert_eq!(shown().map(|told| told.returns), Some(vec![returns(2)]));
    change(2, InSync);
    assert_eq!(shown(), None, "all of it is there");
    served.handle.stop();
}

/// Where that was allowed, the manager promotes the copy that follows by itself: for a
/// client that can reach no in-sync one, while every brick with one is dead.
#[test]
fn a_copy_that_follows_is_promoted_by_the_manager() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_living();
    let (client, v) = (&served.client, name("v"));
    let made = client.create(&wish("v", Kind::Concat, MIB)).expect("made");
    let first = made.volume.layout.segments[0].columns[0].legs[0].brick;
    let allowed = |asynchronous| AttachReplica {
        auto_promote: true,
        ..copy_on(None, asynchronous)
    };
    refused(
        client.attach_replica(&v, allowed(false)),
        Code::BadRequest,
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
        let attached = client.attach_as(&v, "one", unreachable).expect("attached");
        let epoch = attached.layout.epoch;
        client.detach(&v, Some(epoch)).expect("detached");
        states(&client.volume(&v).expect("shown"))
    };
    // It has to follow before.
    late();
    beat(other);
    assert_eq!(attached(true), [(InSync, false), (Stale, true)]);
    turn(client, 1, &[Following]);
    // While a brick with an in-sync copy is alive, or the other one is not.
    beat(first);
    assert_eq!(attached(true), [(InSync, false), (Following, false)]);
    late();
    assert_eq!(attached(true), [(InSync, false), (Following, false)]);
    // Or a client may reach one, whatever the manager hears.
    beat(other);
    assert_eq!(attached(false), [(InSync, false), (Following, false)]);
    let promoted = client
        .promote_replica(&v, choice(0))
        .expect("nothing changes");
    assert!(promoted.info.auto_promote, "the other copy still follows");
    assert_eq!(attached(true), [(Stale, true), (InSync, false)]);
    assert!(!client.volume(&v).expect("shown").info.auto_promote);
    served.handle.stop();
}

#[test]
fn copies_of_several_columns_do_not_follow() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_living();
    let (client, v) = (&served.client, name("v"));
    let striped = CreateVolume {
        columns: Some(2),
        ..wish("v", Kind::Stripe, MIB)
    };
    client.create(&striped).expect("made");
    refused(
        client.attach_replica(&v, copy_on(None, true)),
        Code::BadRequest,
        &["one column"],
    );
    served.handle.stop();
}
