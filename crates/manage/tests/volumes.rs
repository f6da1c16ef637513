//! What clients see of volumes and bricks, over HTTP.

mod cluster;

use cluster::{Cluster, MIB, brick_id, legs, name, refused, registration, wish};
use pagemesh_base::key::Key;
use pagemesh_base::layout::{EpochNumber, LegState};
use pagemesh_manage::wire::{AttachVolume, Code, CreateVolume, Health, LegChange};
use pagemesh_manage::{Client, Kind, ManagerError};
use std::collections::BTreeSet;

fn turn(leg: usize, to: LegState) -> LegChange {
    LegChange {
        segment: 0,
        column: 0,
        leg,
        to,
        note: None,
    }
}

#[test]
fn a_volume_lives_and_dies() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let client = &served.client;
    let v = name("v");
    let made = client.create(&wish("v", Kind::Mirror, MIB)).expect("made");
    assert_eq!((made.asked_bytes, made.rounded), (MIB, false));
    assert_eq!(client.volume(&v).expect("shown"), made.volume);
    assert_eq!(client.volumes().expect("listed"), [made.volume.info]);
    assert_eq!(cluster.slices().len(), 2);

    let attached = client.attach(&v, "one").expect("attached");
    assert_eq!(attached.layout.epoch, EpochNumber(2));
    assert_eq!(attached.bricks.len(), 2);
    refused(client.delete(&v, false), Code::InUse, &["v", "one"]);

    let grown = client.grow(&v, 3 * MIB).expect("grown").volume;
    assert_eq!(grown.info.size_bytes, 3 * MIB);
    assert_eq!(grown.layout.segments[..1], attached.layout.segments);
    refused(client.grow(&v, 3 * MIB), Code::BadRequest, &["3145728"]);
    refused(
        client.grow(&v, MIB),
        Code::BadRequest,
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
    refused(client.volume(&v), Code::NotFound, &["v"]);
    refused(client.delete(&v, true), Code::NotFound, &["v"]);
    cluster.assert_no_orphans(served.handle.manager());
    served.handle.stop();
}

/// Everything that was answered is there after a crash, epochs above all.
#[test]
fn an_answer_is_durable() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_living();
    let client = &served.client;
    let v = name("v");
    let same = |step: &str| {
        let crashed = cluster.crashed_without_beats();
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
    client.create(&wish("v", Kind::Mirror, MIB)).expect("made");
    same("create");
    client.attach(&v, "one").expect("attached");
    same("attach");
    let stale = turn(0, LegState::Stale);
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
    // A stop and a start on the same file.
    let served = cluster.serve();
    assert_eq!(served.client.bricks().expect("listed").len(), 3);
    assert_eq!(served.client.status().expect("status").bricks_alive, 0);
}

#[test]
fn a_new_attachment_fences_the_old_one() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let client = &served.client;
    let v = name("v");
    client.create(&wish("v", Kind::Mirror, MIB)).expect("made");
    let mut epochs = vec![];
    for label in ["one", "two", "one"] {
        epochs.push(client.attach(&v, label).expect("attached").layout.epoch);
    }
    assert_eq!(epochs, [2, 3, 4].map(EpochNumber));
    let stale = [turn(1, LegState::Stale)];
    // The old client cannot change anything, whatever epoch it names.
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
    // An attachment outlives changes of the layout, and ends once.
    let synced = [turn(1, LegState::Syncing)];
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
        refused(client.attach(&v, bad), Code::BadRequest, &["128"]);
    }
    refused(client.attach(&name("w"), "one"), Code::NotFound, &["w"]);
}

#[test]
fn leg_states_change_by_compare_and_swap() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_living();
    let client = &served.client;
    let v = name("v");
    let three = CreateVolume {
        copies: Some(3),
        ..wish("v", Kind::Mirror, MIB)
    };
    client.create(&three).expect("made");
    let attempt =
        |epoch, changes: &[LegChange]| client.change_legs(&v, None, EpochNumber(epoch), changes);
    let conflict = attempt(7, &[turn(0, LegState::Stale)]);
    let Err(ManagerError::Conflict { current, .. }) = conflict else {
        panic!("{conflict:?}");
    };
    assert_eq!(current, EpochNumber(1));
    use LegState::{InSync, Stale, Syncing};
    let all = [turn(0, Stale), turn(1, Stale), turn(2, Stale)];
    refused(attempt(1, &all), Code::InUse, &["no in-sync leg"]);
    refused(attempt(1, &[]), Code::BadRequest, &["no leg"]);
    let twice = [turn(0, Stale), turn(0, Syncing)];
    refused(attempt(1, &twice), Code::BadRequest, &["twice"]);
    refused(attempt(1, &[turn(3, Stale)]), Code::BadRequest, &["leg 3"]);
    let far = LegChange {
        segment: usize::MAX,
        ..turn(0, Stale)
    };
    refused(attempt(1, &[far]), Code::BadRequest, &["segment"]);
    for to in [InSync, Syncing] {
        refused(
            attempt(1, &[turn(0, to)]),
            Code::InUse,
            &["in-sync", "cannot"],
        );
    }
    // All of a change or nothing of it.
    refused(
        attempt(1, &[turn(0, Stale), turn(1, Syncing)]),
        Code::InUse,
        &[],
    );
    assert_eq!(
        client.volume(&v).expect("shown").layout.epoch,
        EpochNumber(1)
    );

    let layout = attempt(1, &[turn(0, Stale), turn(2, Stale)]).expect("changed");
    assert_eq!(
        (layout.epoch.0, layout.segments[0].columns[0].round),
        (2, 1)
    );
    assert_eq!(
        client.volume(&v).expect("shown").info.health,
        Health::Degraded
    );
    refused(
        attempt(2, &[turn(1, Stale)]),
        Code::InUse,
        &["no in-sync leg"],
    );
    refused(
        attempt(2, &[turn(0, InSync)]),
        Code::InUse,
        &["stale", "in-sync"],
    );
    attempt(2, &[turn(0, Syncing)]).expect("changed");
    // A syncing leg is not one that counts.
    refused(
        attempt(3, &[turn(1, Stale)]),
        Code::InUse,
        &["no in-sync leg"],
    );
    attempt(3, &[turn(0, InSync), turn(2, Syncing)]).expect("changed");
    assert_eq!(
        client.volume(&v).expect("shown").info.health,
        Health::Syncing
    );
    let layout = attempt(4, &[turn(2, InSync)]).expect("changed");
    assert_eq!(
        (layout.epoch.0, layout.segments[0].columns[0].round),
        (5, 0)
    );
    let layout = attempt(5, &[turn(1, Stale)]).expect("changed");
    assert_eq!(layout.segments[0].columns[0].round, 2, "another round");
}

#[test]
fn notes_say_why_until_the_leg_is_back() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let client = &served.client;
    let v = name("v");
    client.create(&wish("v", Kind::Mirror, MIB)).expect("made");
    let say = |epoch, to, note: Option<&str>| {
        let note = note.map(str::to_owned);
        let change = LegChange {
            note,
            ..turn(0, to)
        };
        client.change_legs(&v, None, EpochNumber(epoch), &[change])
    };
    let notes = || -> Vec<String> {
        let notes = client.volume(&v).expect("shown").notes;
        notes.into_iter().map(|note| note.text).collect()
    };
    for bad in ["", "a\u{1b}[2J", &"x".repeat(257)] {
        refused(
            say(1, LegState::Stale, Some(bad)),
            Code::BadRequest,
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
fn a_wrong_key_opens_nothing() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let other = Client::new(&served.handle.url(), &Key::from_bytes([8; 32])).expect("a client");
    let is_refused = |result: Result<(), ManagerError>| {
        assert!(
            matches!(result, Err(ManagerError::Unauthorized { .. })),
            "{result:?}"
        );
    };
    is_refused(other.status().map(drop));
    is_refused(other.create(&wish("v", Kind::Mirror, MIB)).map(drop));
    is_refused(other.delete(&name("v"), true).map(drop));
    is_refused(other.heartbeat(&registration(0)).map(drop));
    is_refused(other.forget_brick(brick_id(0), true));
    assert!(cluster.slices().is_empty());
}

/// The client tells apart who does not answer and who is no manager.
#[test]
fn the_client_names_what_is_wrong() {
    let cluster = Cluster::new(0);
    for bad in [
        "",
        "127.0.0.1:1",
        "https://a:1",
        "http://",
        "http://a:1/x",
        "ftp://a",
    ] {
        let client = Client::new(bad, &cluster.key);
        assert!(
            matches!(client, Err(ManagerError::BadUrl { .. })),
            "{bad}: {client:?}"
        );
    }
    let served = cluster.serve();
    let url = format!("{}/", served.handle.url());
    let client = Client::new(&url, &cluster.key).expect("a client");
    client.status().expect("status");
    served.handle.stop();
    let gone = client.status();
    assert!(
        matches!(gone, Err(ManagerError::Unreachable { .. })),
        "{gone:?}"
    );
}

/// Of many who want to change the same layout at once, one does.
#[test]
fn one_of_many_wins() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let v = name("v");
    served
        .client
        .create(&wish("v", Kind::Mirror, MIB))
        .expect("made");
    let results: Vec<_> = std::thread::scope(|scope| {
        let attempt = |leg| {
            let (client, v) = (served.client.clone(), &v);
            scope.spawn(move || {
                client.change_legs(v, None, EpochNumber(1), &[turn(leg, LegState::Stale)])
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
                    },
                )
            })
        };
        let threads: Vec<_> = (0..8).map(|_| attach()).collect();
        let epoch = |t: std::thread::ScopedJoinHandle<'_, Result<_, _>>| {
            let attached: pagemesh_manage::wire::Attached =
                t.join().expect("no panic").expect("attached");
            attached.layout.epoch
        };
        threads.into_iter().map(epoch).collect()
    });
    assert_eq!(epochs, (3..11).map(EpochNumber).collect());
}
