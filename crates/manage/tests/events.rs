//! Events: each change has one, in its transaction, and none is lost or doubled by a crash.

use crate::cluster;
use cluster::{Cluster, MIB, assert_refused, brick_id, create_request, name, named_registration};
use pagemesh_base::layout::{EpochNumber, LegState};
use pagemesh_manage::wire::{
    AttachReplica, BrickRegistration, BrickScrub, ChooseReplica, ErrorCode, EventFilter, EventKind,
    EventRecord, LegChange, ScrubBrick, ScrubReport, ScrubState, Severity, SubjectKind,
};
use pagemesh_manage::{LayoutKind, Manager, ManagerClient};
use std::time::Duration;

const DEAD_AFTER: Duration = Duration::from_secs(8);

fn all(client: &ManagerClient) -> Vec<EventRecord> {
    client.events(&EventFilter::default()).expect("events")
}

fn since(client: &ManagerClient, seq: u64) -> Vec<EventRecord> {
    let filter = EventFilter {
        after: Some(seq),
        ..EventFilter::default()
    };
    client.events(&filter).expect("events")
}

fn kinds(events: &[EventRecord]) -> Vec<EventKind> {
    events.iter().map(|event| event.kind).collect()
}

fn last_seq(client: &ManagerClient) -> u64 {
    all(client).last().map_or(0, |event| event.seq)
}

fn beat(manager: &Manager, numbers: &[usize]) {
    for &number in numbers {
        manager
            .heartbeat(named_registration(number, &format!("b{number}")))
            .expect("welcome");
    }
}

fn leg_change(leg: usize, to: LegState) -> LegChange {
    LegChange {
        segment: 0,
        column: 0,
        leg,
        to,
        note: (to == LegState::Stale).then(|| "the link is down".to_owned()),
    }
}

/// A warning or worse ends with the way out; each text names its subject.
#[track_caller]
fn assert_texts(events: &[EventRecord]) {
    for event in events {
        let text = &event.text;
        let name = &event.subject.name;
        assert!(text.ends_with('.') && text.len() > 20, "{text}");
        let is_manager = event.subject.kind == SubjectKind::Manager;
        assert!(
            is_manager || text.contains(name.as_str()),
            "{text} lacks {name}"
        );
        assert!(!event.actor.is_empty());
        assert!(event.count >= 1 && event.first_unix_ms <= event.time_unix_ms);
    }
}

#[test]
fn changes_of_volumes_have_events() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let joined = kinds(&all(client));
    let mut wanted = vec![EventKind::ManagerStarted, EventKind::TokenCreated];
    wanted.extend([EventKind::BrickJoined; 3]);
    assert_eq!(joined, wanted);
    let start = last_seq(client);
    let v = name("v");
    client
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    client.grow(&v, 2 * MIB).expect("grown");
    let first = client
        .attach(&v, "host-a:1")
        .expect("attached")
        .layout
        .epoch;
    let second = client
        .attach(&v, "host-b:2")
        .expect("attached")
        .layout
        .epoch;
    let fenced = client.change_legs(&v, Some(first), second, &[leg_change(0, LegState::Stale)]);
    fenced.expect_err("host-a is fenced");
    let stale = [leg_change(0, LegState::Stale)];
    let layout = client.change_legs(&v, Some(second), second, &stale);
    let mut epoch = layout.expect("changed").epoch;
    for to in [LegState::Syncing, LegState::InSync] {
        let layout = client.change_legs(&v, Some(second), epoch, &[leg_change(0, to)]);
        epoch = layout.expect("changed").epoch;
    }
    client
        .detach(&v, Some(EpochNumber(1)))
        .expect("another attachment");
    client.detach(&v, Some(second)).expect("detached");
    client
        .attach_replica(&v, AttachReplica::default())
        .expect("a third copy");
    let choice = ChooseReplica {
        copy: 1,
        force: false,
        expected: None,
    };
    client.promote_replica(&v, choice).expect("in-sync");
    client
        .detach_replica(&v, ChooseReplica { copy: 2, ..choice })
        .expect("detached");
    client.attach(&v, "host-b:2").expect("attached");
    client.delete(&v, true).expect("deleted");
    let events = since(client, start);
    assert_eq!(
        kinds(&events),
        [
            EventKind::VolumeCreated,
            EventKind::VolumeGrown,
            EventKind::Attached,
            EventKind::Fenced,
            EventKind::Attached,
            EventKind::LegLost,
            EventKind::LegReturned,
            EventKind::Detached,
            EventKind::ReplicaAttached,
            EventKind::Promoted,
            EventKind::ReplicaDetached,
            EventKind::Attached,
            EventKind::VolumeDeleted,
        ]
    );
    assert_texts(&events);
    let of = |kind| events.iter().find(|it| it.kind == kind).expect("there");
    let fenced = of(EventKind::Fenced);
    assert_eq!(
        (fenced.severity, fenced.actor.as_str()),
        (Severity::Warning, "host-b:2")
    );
    assert!(fenced.text.contains("host-a:1") && fenced.text.contains("stop it"));
    let lost = of(EventKind::LegLost);
    assert!(lost.text.contains("the link is down"), "{}", lost.text);
    assert_eq!(of(EventKind::Attached).actor, "host-a:1");
    assert!(events.iter().all(|event| event.count == 1), "{events:?}");
    assert_eq!(of(EventKind::VolumeCreated).actor, "cluster key");
    assert_eq!(of(EventKind::VolumeDeleted).severity, Severity::Warning);
    served.handle.stop();
}

#[test]
fn lost_brick_is_reported_once_until_it_returns() {
    let cluster = Cluster::new(2);
    let served = cluster.serve();
    let (manager, client) = (served.handle.manager(), &served.client);
    beat(manager, &[0, 1]);
    client
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    client
        .create(&create_request("w", LayoutKind::Concat, MIB))
        .expect("made");
    let start = last_seq(client);
    manager.sweep();
    assert_eq!(since(client, start), []);
    // The server sweeps too: at no time is the other brick silent for too long.
    cluster.clock.advance(DEAD_AFTER / 2);
    beat(manager, &[1]);
    cluster.clock.advance(DEAD_AFTER / 2);
    manager.sweep();
    manager.sweep();
    let lost = since(client, start);
    assert_eq!(kinds(&lost), [EventKind::BrickLost]);
    assert_eq!(lost[0].subject.name, "b0");
    assert!(lost[0].severity >= Severity::Warning, "{lost:?}");
    assert!(lost[0].text.contains("volumes have legs on it"), "{lost:?}");
    assert!(lost[0].text.contains("Start it again"), "{lost:?}");
    cluster.clock.advance(DEAD_AFTER);
    manager.sweep();
    let both = since(client, lost[0].seq);
    assert_eq!(both.len(), 1);
    assert_eq!(
        both[0].severity,
        Severity::Critical,
        "no copy lives: {both:?}"
    );
    // A restarted manager knows that both are reported.
    served.handle.stop();
    let served = cluster.serve();
    let (manager, client) = (served.handle.manager(), &served.client);
    let restart = last_seq(client);
    cluster.clock.advance(DEAD_AFTER);
    manager.sweep();
    assert_eq!(since(client, restart), []);
    beat(manager, &[0, 1]);
    manager.sweep();
    let back = since(client, restart);
    assert_eq!(kinds(&back), [EventKind::BrickReturned; 2]);
    assert_texts(&back);
    // A brick that lives through a restart of the manager has no event.
    served.handle.stop();
    let served = cluster.serve();
    let restart = last_seq(&served.client);
    beat(served.handle.manager(), &[0, 1]);
    served.handle.manager().sweep();
    assert_eq!(since(&served.client, restart), []);
    served.handle.stop();
}

#[test]
fn flapping_brick_has_two_events() {
    let cluster = Cluster::new(1);
    let served = cluster.serve();
    let (manager, client) = (served.handle.manager(), &served.client);
    beat(manager, &[0]);
    let mut seen = last_seq(client);
    for flap in 1..=50 {
        cluster.clock.advance(DEAD_AFTER);
        manager.sweep();
        beat(manager, &[0]);
        manager.sweep();
        // A follower sees each repetition, under a new number.
        let news = since(client, seen);
        assert_eq!(
            kinds(&news),
            [EventKind::BrickLost, EventKind::BrickReturned]
        );
        assert!(news.iter().all(|it| it.count == flap), "{news:?}");
        seen = last_seq(client);
    }
    let ring = kinds(&all(client));
    let flaps = ring
        .iter()
        .filter(|kind| **kind != EventKind::ManagerStarted);
    assert_eq!(
        flaps.copied().collect::<Vec<_>>(),
        [
            EventKind::TokenCreated,
            EventKind::BrickJoined,
            EventKind::BrickLost,
            EventKind::BrickReturned
        ]
    );
    // After a quiet hour it is another event.
    cluster.clock.advance(Duration::from_secs(3600));
    manager.sweep();
    assert_eq!(since(client, seen)[0].count, 1);
    cluster.clock.advance(DEAD_AFTER);
    client.forget_brick(brick_id(0), false).expect("forgotten");
    let last = all(client).pop().expect("an event");
    assert_eq!(last.kind, EventKind::BrickForgotten);
    served.handle.stop();
}

fn scrub_beat(state: ScrubState, corrected: u64, damaged: u64) -> BrickRegistration {
    let found = ScrubReport {
        damaged,
        ..ScrubReport::default()
    };
    BrickRegistration {
        scrub: Some(BrickScrub {
            state,
            passes: 0,
            progress_percent: None,
            next_in_ms: None,
            pass: None,
            last: Some(found),
            ended_ms_ago: None,
            corrected,
            fulfilled: None,
        }),
        ..named_registration(0, "b0")
    }
}

#[test]
fn scrubs_have_events() {
    let cluster = Cluster::new(1);
    let served = cluster.serve();
    let client = &served.client;
    let beat = |state, corrected, damaged| {
        client
            .heartbeat(&scrub_beat(state, corrected, damaged))
            .expect("welcome")
    };
    // Corrections before the first heartbeat are not news.
    beat(ScrubState::Waiting, 7, 0);
    let start = last_seq(client);
    let asked = client.scrub_brick(brick_id(0), false).expect("asked");
    assert_eq!(since(client, start), [], "a request is not a start");
    let mut running = scrub_beat(ScrubState::Running, 7, 0);
    running.scrub.as_mut().expect("a scrub").fulfilled = asked.scrub_request.map(|it| it.id);
    client.heartbeat(&running).expect("welcome");
    beat(ScrubState::Running, 7, 0);
    beat(ScrubState::Running, 9, 0);
    beat(ScrubState::Waiting, 9, 3);
    beat(ScrubState::Waiting, 9, 3);
    let events = since(client, start);
    assert_eq!(
        kinds(&events),
        [
            EventKind::ScrubStarted,
            EventKind::ScrubFound,
            EventKind::ScrubFound
        ]
    );
    assert_eq!(events[0].actor, "cluster key");
    let found = events[1..].iter().map(|it| (it.severity, it.count));
    let wanted = [(Severity::Warning, 1), (Severity::Critical, 1)];
    assert_eq!(found.collect::<Vec<_>>(), wanted);
    assert!(events[2].text.contains("pool check"), "{events:?}");
    // Corrections of the next scrub are a warning, and leave the damage in the list.
    beat(ScrubState::Waiting, 11, 3);
    let again = since(client, start);
    assert_eq!(again[1], events[2]);
    assert_eq!((again[2].severity, again[2].count), (Severity::Warning, 2));
    assert_texts(&events);
    served.handle.stop();
}

#[test]
fn list_is_filtered_and_cut() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    for number in 0..12 {
        let request = create_request(&format!("v{number}"), LayoutKind::Mirror, MIB);
        client.create(&request).expect("made");
    }
    client.attach(&name("v1"), "a:1").expect("attached");
    client.attach(&name("v1"), "b:1").expect("attached");
    let whole = all(client);
    let ask = |filter: EventFilter| client.events(&filter).expect("events");
    let mut paged = vec![];
    loop {
        let after = paged.last().map(|it: &EventRecord| it.seq);
        let page = ask(EventFilter {
            after,
            limit: Some(5),
            ..EventFilter::default()
        });
        if page.is_empty() {
            break;
        }
        assert!(page.len() <= 5);
        paged.extend(page);
    }
    assert_eq!(paged, whole);
    let last = ask(EventFilter {
        last: Some(3),
        ..EventFilter::default()
    });
    assert_eq!(last, whole[whole.len() - 3..]);
    let severe = ask(EventFilter {
        severity: Some(Severity::Warning),
        ..EventFilter::default()
    });
    assert_eq!(kinds(&severe), [EventKind::Fenced]);
    for subject in ["v1", "volume:v1"] {
        let of = ask(EventFilter {
            subject: Some(subject.into()),
            ..EventFilter::default()
        });
        assert_eq!(
            kinds(&of),
            [
                EventKind::VolumeCreated,
                EventKind::Attached,
                EventKind::Fenced,
                EventKind::Attached
            ],
            "v10 is another volume"
        );
    }
    for subject in ["brick:v1", "v", "", "volume:", "v1\u{0}&limit=1"] {
        let of = ask(EventFilter {
            subject: Some(subject.into()),
            ..EventFilter::default()
        });
        assert_eq!(of, [], "{subject}");
    }
    assert_eq!(since(client, u64::MAX), []);
    for limit in [0, 1001, usize::MAX] {
        let wrong = EventFilter {
            limit: Some(limit),
            ..EventFilter::default()
        };
        assert_refused(client.events(&wrong), ErrorCode::BadRequest, &["1 to 1000"]);
        let wrong = EventFilter {
            last: Some(limit),
            ..EventFilter::default()
        };
        assert_refused(client.events(&wrong), ErrorCode::BadRequest, &["1 to 1000"]);
    }
    served.handle.stop();
}

#[test]
fn acknowledgement_is_kept_and_ends_repetition() {
    let cluster = Cluster::new(1);
    let served = cluster.serve_with_bricks_alive();
    let (manager, client) = (served.handle.manager(), &served.client);
    cluster.clock.advance(DEAD_AFTER);
    manager.sweep();
    let lost = all(client).pop().expect("an event");
    assert_eq!(
        (lost.kind, &lost.acknowledged),
        (EventKind::BrickLost, &None)
    );
    let done = client.acknowledge_event(lost.seq).expect("acknowledged");
    assert_eq!(
        done.acknowledged.as_ref().map(|it| it.by.as_str()),
        Some("cluster key")
    );
    cluster.clock.advance(Duration::from_secs(1));
    assert_eq!(client.acknowledge_event(lost.seq).expect("again"), done);
    assert_refused(
        client.acknowledge_event(10_000),
        ErrorCode::NotFound,
        &["no event 10000"],
    );
    served.handle.stop();
    let served = cluster.serve();
    let (manager, client) = (served.handle.manager(), &served.client);
    assert!(all(client).contains(&done));
    // The next loss is an event of its own.
    cluster.send_heartbeats(manager);
    manager.sweep();
    cluster.clock.advance(DEAD_AFTER);
    manager.sweep();
    let again = all(client).pop().expect("an event");
    assert_eq!((again.kind, again.count), (EventKind::BrickLost, 1));
    assert!(all(client).contains(&done));
    served.handle.stop();
}

/// After a crash at any time, the manager has each event once, and numbers rise.
#[test]
fn restarted_manager_continues_numbers() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    manager
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    let read = |manager: &Manager| {
        let (events, more) = manager.list_events(&EventFilter::default(), 1000);
        assert!(!more);
        events
    };
    let before = read(&manager);
    let crashed = cluster.crash_copy_without_heartbeats();
    let after = read(&crashed);
    let started = after.last().expect("an event");
    assert_eq!(
        (started.kind, started.count),
        (EventKind::ManagerStarted, 2)
    );
    assert!(started.seq > before.last().expect("an event").seq);
    // The second start has replaced the first.
    assert_eq!(after[..after.len() - 1], before[1..]);
    assert_eq!(crashed.scrub(brick_id(0), ScrubBrick::default()).ok(), None);
}
