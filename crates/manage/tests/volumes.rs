//! Volumes and bricks from a client's point of view, over HTTP.

use crate::cluster;
use cluster::{Cluster, MIB, assert_refused, brick_id, create_request, legs, name, registration};
use pagemesh_base::key::Key;
use pagemesh_base::layout::{EpochNumber, LegState};
use pagemesh_manage::wire::{AttachVolume, CreateVolume, ErrorCode, LegChange, VolumeHealth};
use pagemesh_manage::{LayoutKind, ManagerClient, ManagerError};
use std::collections::BTreeSet;

fn leg_change(leg: usize, to: LegState) -> LegChange {
    LegChange {
        segment: 0,
        column: 0,
        leg,
        to,
        note: None,
    }
}

#[test]
fn volume_is_created_grown_and_deleted() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let v = name("v");
    let made = client
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    assert_eq!((made.asked_bytes, made.rounded), (MIB, false));
    assert_eq!(client.volume(&v).expect("shown"), made.volume);
    assert_eq!(client.volumes().expect("listed"), [made.volume.info]);
    assert_eq!(cluster.slices().len(), 2);

    let attached = client.attach(&v, "one").expect("attached");
    assert_eq!(attached.layout.epoch, EpochNumber(2));
    assert_eq!(attached.bricks.len(), 2);
    assert_refused(client.delete(&v, false), ErrorCode::InUse, &["v", "one"]);

    let grown = client.grow(&v, 3 * MIB).expect("grown").volume;
    assert_eq!(grown.info.size_bytes, 3 * MIB);
    assert_eq!(grown.layout.segments[..1], attached.layout.segments);
    assert_refused(
        client.grow(&v, 3 * MIB),
        ErrorCode::BadRequest,
        &["3145728"],
    );
    assert_refused(
        client.grow(&v, MIB),
        ErrorCode::BadRequest,
        &["3145728", "1048576"],
    );

    let other = client.detach(&v, Some(EpochNumber(9))).expect("answered");
    assert!(!other.detached);
    let own = client.detach(&v, Some(EpochNumber(2))).expect("answered");
    assert!(own.detached);
    assert_eq!(
        client.delete(&v, false).expect("deleted").pending_deletions,
        0
    );
    assert_refused(client.volume(&v), ErrorCode::NotFound, &["v"]);
    assert_refused(client.delete(&v, true), ErrorCode::NotFound, &["v"]);
    cluster.assert_no_orphans(served.handle.manager());
    served.handle.stop();
}

/// Every acknowledged change survives a crash, epochs above all.
#[test]
fn answered_changes_survive_crash() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let v = name("v");
    let same = |step: &str| {
        let crashed = cluster.crash_copy_without_heartbeats();
        let now = served.handle.manager();
        let volumes = |m: &pagemesh_manage::Manager| -> Vec<_> {
            let volumes = m.volumes().into_iter();
            let shown = volumes.map(|info| m.show(&info.name).expect("there"));
            shown
                .map(|volume| (volume.layout, volume.notes, volume.info.attached))
                .collect()
        };
        assert_eq!(volumes(&crashed), volumes(now), "{step}");
        let bricks = |m: &pagemesh_manage::Manager| -> Vec<_> {
            let bricks = m.bricks();
            let of = |b: &pagemesh_manage::wire::BrickInfo| (b.brick, b.address.clone(), b.slices);
            bricks.iter().map(of).collect()
        };
        assert_eq!(bricks(&crashed), bricks(now), "{step}");
    };
    client
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    same("create");
    client.attach(&v, "one").expect("attached");
    same("attach");
    let stale = leg_change(0, LegState::Stale);
    let changes = [LegChange {
        note: Some("gone".into()),
        ..stale
    }];
    let own = Some(EpochNumber(2));
    client
        .change_legs(&v, own, EpochNumber(2), &changes)
        .expect("changed");
    same("legs");
    client.grow(&v, 2 * MIB).expect("grown");
    same("grow");
    client.detach(&v, None).expect("detached");
    same("detach");
    let moved = pagemesh_manage::wire::BrickRegistration {
        incarnation: 2,
        address: "10.0.0.1:1".into(),
        ..registration(2)
    };
    client.heartbeat(&moved).expect("welcome");
    same("move");
    client.delete(&v, true).expect("deleted");
    same("delete");
    drop(served);
    // Stop and start on the same file.
    let served = cluster.serve();
    assert_eq!(served.client.bricks().expect("listed").len(), 3);
    assert_eq!(served.client.status().expect("status").bricks_alive, 0);
}

#[test]
fn new_attachment_fences_old_one() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let v = name("v");
    client
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    let mut epochs = vec![];
    for label in ["one", "two", "one"] {
        epochs.push(client.attach(&v, label).expect("attached").layout.epoch);
    }
    assert_eq!(epochs, [2, 3, 4].map(EpochNumber));
    let stale = [leg_change(1, LegState::Stale)];
    // The old client cannot change anything, at any epoch.
    for expected in [2, 3, 4, 5] {
        let fenced = client.change_legs(&v, Some(epochs[1]), EpochNumber(expected), &stale);
        let Err(ManagerError::Fenced { error, .. }) = fenced else {
            panic!("{fenced:?}");
        };
        assert!(error.contains('3') && error.contains("one"), "{error}");
    }
    assert!(
        !client
            .detach(&v, Some(epochs[1]))
            .expect("answered")
            .detached
    );
    let changed = client.change_legs(&v, Some(epochs[2]), epochs[2], &stale);
    assert_eq!(changed.expect("changed").epoch, EpochNumber(5));
    // An attachment outlives layout changes, and ends once.
    let synced = [leg_change(1, LegState::Syncing)];
    client
        .change_legs(&v, Some(epochs[2]), EpochNumber(5), &synced)
        .expect("changed");
    assert!(
        client
            .detach(&v, Some(epochs[2]))
            .expect("answered")
            .detached
    );
    let over = client.change_legs(&v, Some(epochs[2]), EpochNumber(6), &stale);
    assert!(matches!(over, Err(ManagerError::Fenced { .. })), "{over:?}");
    for bad in ["", "a\nb", &"x".repeat(129)] {
        assert_refused(client.attach(&v, bad), ErrorCode::BadRequest, &["128"]);
    }
    assert_refused(
        client.attach(&name("w"), "one"),
        ErrorCode::NotFound,
        &["w"],
    );
}

#[test]
fn leg_states_change_by_compare_and_swap() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let v = name("v");
    let three = CreateVolume {
        copies: Some(3),
        ..create_request("v", LayoutKind::Mirror, MIB)
    };
    client.create(&three).expect("made");
    let attempt =
        |epoch, changes: &[LegChange]| client.change_legs(&v, None, EpochNumber(epoch), changes);
    let conflict = attempt(7, &[leg_change(0, LegState::Stale)]);
    let Err(ManagerError::Conflict { current, .. }) = conflict else {
        panic!("{conflict:?}");
    };
    assert_eq!(current, EpochNumber(1));
    use LegState::{InSync, Stale, Syncing};
    let all = [
        leg_change(0, Stale),
        leg_change(1, Stale),
        leg_change(2, Stale),
    ];
    assert_refused(attempt(1, &all), ErrorCode::InUse, &["no in-sync leg"]);
    assert_refused(attempt(1, &[]), ErrorCode::BadRequest, &["no leg"]);
    let twice = [leg_change(0, Stale), leg_change(0, Syncing)];
    assert_refused(attempt(1, &twice), ErrorCode::BadRequest, &["twice"]);
    assert_refused(
        attempt(1, &[leg_change(3, Stale)]),
        ErrorCode::BadRequest,
        &["leg 3"],
    );
    let far = LegChange {
        segment: usize::MAX,
        ..leg_change(0, Stale)
    };
    assert_refused(attempt(1, &[far]), ErrorCode::BadRequest, &["segment"]);
    for to in [InSync, Syncing] {
        assert_refused(
            attempt(1, &[leg_change(0, to)]),
            ErrorCode::InUse,
            &["in-sync", "cannot"],
        );
    }
    // The manager makes all of a change or none of it.
    assert_refused(
        attempt(1, &[leg_change(0, Stale), leg_change(1, Syncing)]),
        ErrorCode::InUse,
        &[],
    );
    assert_eq!(
        client.volume(&v).expect("shown").layout.epoch,
        EpochNumber(1)
    );

    let layout = attempt(1, &[leg_change(0, Stale), leg_change(2, Stale)]).expect("changed");
    assert_eq!(
        (layout.epoch.0, layout.segments[0].columns[0].lost_since.0),
        (2, 2)
    );
    assert_eq!(
        client.volume(&v).expect("shown").info.health,
        VolumeHealth::Degraded
    );
    assert_refused(
        attempt(2, &[leg_change(1, Stale)]),
        ErrorCode::InUse,
        &["no in-sync leg"],
    );
    assert_refused(
        attempt(2, &[leg_change(0, InSync)]),
        ErrorCode::InUse,
        &["stale", "in-sync"],
    );
    attempt(2, &[leg_change(0, Syncing)]).expect("changed");
    // A syncing leg does not count as in-sync.
    assert_refused(
        attempt(3, &[leg_change(1, Stale)]),
        ErrorCode::InUse,
        &["no in-sync leg"],
    );
    attempt(3, &[leg_change(0, InSync), leg_change(2, Syncing)]).expect("changed");
    assert_eq!(
        client.volume(&v).expect("shown").info.health,
        VolumeHealth::Syncing
    );
    let layout = attempt(4, &[leg_change(2, InSync)]).expect("changed");
    assert_eq!(
        (layout.epoch.0, layout.segments[0].columns[0].lost_since.0),
        (5, 0)
    );
    let layout = attempt(5, &[leg_change(1, Stale)]).expect("changed");
    let lost = layout.segments[0].columns[0].lost_since;
    assert_eq!(lost.0, 6, "another loss");
}

#[test]
fn leg_notes_are_kept_until_leg_is_in_sync() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let v = name("v");
    client
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    let say = |epoch, to, note: Option<&str>| {
        let note = note.map(str::to_owned);
        let change = LegChange {
            note,
            ..leg_change(0, to)
        };
        client.change_legs(&v, None, EpochNumber(epoch), &[change])
    };
    let notes = || -> Vec<String> {
        let notes = client.volume(&v).expect("shown").notes;
        notes.into_iter().map(|note| note.text).collect()
    };
    for bad in ["", "a\u{1b}[2J", &"x".repeat(257)] {
        assert_refused(
            say(1, LegState::Stale, Some(bad)),
            ErrorCode::BadRequest,
            &["256"],
        );
    }
    say(1, LegState::Stale, Some("the brick is full")).expect("changed");
    say(2, LegState::Syncing, None).expect("changed");
    assert_eq!(notes(), ["the brick is full"]);
    say(3, LegState::Stale, Some("again")).expect("changed");
    assert_eq!(notes(), ["again"]);
    say(4, LegState::Syncing, None).expect("changed");
    say(5, LegState::InSync, None).expect("changed");
    assert!(notes().is_empty());
}

#[test]
fn wrong_key_is_unauthorized() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let other =
        ManagerClient::new(&served.handle.url(), &Key::from_bytes([8; 32])).expect("a client");
    let is_refused = |result: Result<(), ManagerError>| {
        assert!(
            matches!(result, Err(ManagerError::Unauthorized { .. })),
            "{result:?}"
        );
    };
    is_refused(other.status().map(drop));
    is_refused(
        other
            .create(&create_request("v", LayoutKind::Mirror, MIB))
            .map(drop),
    );
    is_refused(other.delete(&name("v"), true).map(drop));
    is_refused(other.heartbeat(&registration(0)).map(drop));
    is_refused(other.forget_brick(brick_id(0), true));
    assert!(cluster.slices().is_empty());
}

/// The client distinguishes a missing answer from a server that is no manager.
#[test]
fn client_errors_name_cause() {
    let cluster = Cluster::new(0);
    for bad in [
        "",
        "127.0.0.1:1",
        "https://a:1",
        "http://",
        "http://a:1/x",
        "ftp://a",
    ] {
        let client = ManagerClient::new(bad, &cluster.key);
        assert!(
            matches!(client, Err(ManagerError::BadUrl { .. })),
            "{bad}: {client:?}"
        );
    }
    let served = cluster.serve();
    let url = format!("{}/", served.handle.url());
    let client = ManagerClient::new(&url, &cluster.key).expect("a client");
    client.status().expect("status");
    served.handle.stop();
    let gone = client.status();
    assert!(
        matches!(gone, Err(ManagerError::Unreachable { .. })),
        "{gone:?}"
    );
}

/// Of several concurrent changes of one layout, exactly one succeeds.
#[test]
fn one_of_concurrent_changes_wins() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let v = name("v");
    served
        .client
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    let results: Vec<_> = std::thread::scope(|scope| {
        let attempt = |leg| {
            let (client, v) = (served.client.clone(), &v);
            scope.spawn(move || {
                client.change_legs(v, None, EpochNumber(1), &[leg_change(leg, LegState::Stale)])
            })
        };
        let threads: Vec<_> = (0..8).map(|number| attempt(number % 2)).collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("no panic"))
            .collect()
    });
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
    let manager = served.handle.manager();
    let layout = manager.show(&v).expect("shown").layout;
    assert_eq!(
        legs(&layout)
            .filter(|leg| leg.state == LegState::InSync)
            .count(),
        1
    );

    let epochs: BTreeSet<_> = std::thread::scope(|scope| {
        let attach = || {
            scope.spawn(|| {
                manager.attach(
                    &v,
                    &AttachVolume {
                        client: "c".into(),
                        unreachable: false,
                        process: None,
                        replaces: None,
                        receive: false,
                    },
                )
            })
        };
        let threads: Vec<_> = (0..8).map(|_| attach()).collect();
        let epoch = |t: std::thread::ScopedJoinHandle<'_, Result<_, _>>| {
            let attached: pagemesh_manage::wire::AttachReply =
                t.join().expect("no panic").expect("attached");
            attached.layout.epoch
        };
        threads.into_iter().map(epoch).collect()
    });
    assert_eq!(epochs, (3..11).map(EpochNumber).collect());
}
