//! The history of events: each decision of a person stays, and each role reads its own part.

use crate::cluster;
use crate::http;
use cluster::{Cluster, MIB, TestServer, assert_refused, create_request, name};
use http::{exchange, fresh_peer, request};
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::access::{TokenRole, TokenSecret, WRONG_TOKENS_MAX};
use pagemesh_manage::events::LOGIN_REFUSED_MAX;
use pagemesh_manage::wire::{
    CreateToken, ErrorCode, EventFilter, EventGap, EventKind, EventRecord, Severity,
};
use pagemesh_manage::{EventStream, LayoutKind, ManagerClient, ManagerSettings, Role, WatchTimes};
use std::time::Duration;

fn all(client: &ManagerClient) -> Vec<EventRecord> {
    client.events(&EventFilter::default()).expect("events")
}

fn of_kind(client: &ManagerClient, kind: EventKind) -> Vec<EventRecord> {
    let mut events = all(client);
    events.retain(|event| event.kind == kind);
    events
}

/// A client with a new token of this role, named as `viewer-1`.
fn client_with(served: &TestServer, role: TokenRole) -> ManagerClient {
    let name = format!("{}-1", Role::from(role));
    let request = CreateToken {
        name: name.parse().expect("a name"),
        role,
        expires_s: None,
    };
    let token = served.client.create_token(&request).expect("made").token;
    let token = TokenSecret::parse(&token).expect("a token");
    ManagerClient::with_token(&served.handle.url(), &token).expect("a client")
}

fn with_volume(cluster: &Cluster) -> (TestServer, VolumeName) {
    let served = cluster.serve_with_bricks_alive();
    let made = create_request("v", LayoutKind::Mirror, MIB);
    served.client.create(&made).expect("made");
    (served, name("v"))
}

#[test]
fn each_change_keeps_its_actor_and_text() {
    let cluster = Cluster::new(2);
    let (served, volume) = with_volume(&cluster);
    let operator = client_with(&served, TokenRole::Operator);
    served.client.grow(&volume, 2 * MIB).expect("grown");
    operator.grow(&volume, 3 * MIB).expect("grown");
    operator.grow(&volume, 4 * MIB).expect("grown");
    let grown = of_kind(&served.client, EventKind::VolumeGrown);
    let shown: Vec<_> = grown
        .iter()
        .map(|it| (it.actor.as_str(), it.text.split(' ').nth(6), it.count))
        .collect();
    assert_eq!(
        shown,
        [
            ("cluster key", Some("2097152"), 1),
            ("operator-1", Some("3145728"), 1),
            ("operator-1", Some("4194304"), 1),
        ]
    );
    served.handle.stop();
}

/// The console names the attachment that it ends, as a client does.
#[test]
fn detach_by_operator_names_the_operator() {
    let cluster = Cluster::new(2);
    let (served, volume) = with_volume(&cluster);
    let operator = client_with(&served, TokenRole::Operator);
    for client in [&operator, &served.client] {
        let attached = served.client.attach(&volume, "host-a:1").expect("attached");
        let attachment = Some(attached.layout.epoch);
        assert!(client.detach(&volume, attachment).expect("ended").detached);
    }
    let detached = of_kind(&served.client, EventKind::Detached);
    let actors: Vec<_> = detached.iter().map(|it| it.actor.as_str()).collect();
    assert_eq!(actors, ["operator-1", "host-a:1"]);
    served.handle.stop();
}

/// Sends wrong tokens from an address until the manager has an event about it.
fn send_wrong_tokens(served: &TestServer, wrong: &TokenSecret) {
    let peer = fresh_peer();
    let headers = [format!("Authorization: Bearer {}", wrong.expose())];
    let text = request("GET", "/api/v1/status", &headers);
    for _ in 0..=WRONG_TOKENS_MAX {
        exchange(served.handle.address(), peer, &text);
    }
    // The event comes after the answer.
    let filter = EventFilter {
        last: Some(1),
        ..EventFilter::default()
    };
    let needle = format!(" {peer};");
    while !(served.handle.manager().list_events(&filter, 1).0)
        .iter()
        .any(|it| it.text.contains(&needle))
    {
        std::thread::yield_now();
    }
}

/// Floods of wrong tokens from many addresses leave the other events, and a stream names the gap.
#[test]
fn refused_logins_are_bounded_and_leave_a_named_gap() {
    const DROPPED: usize = 3;
    let cluster = Cluster::new(1);
    let served = cluster.serve_with_bricks_alive();
    let wrong = TokenSecret::random().expect("random bytes");
    let before = all(&served.client);
    let last_seq = before.last().expect("an event").seq;
    for _ in 0..LOGIN_REFUSED_MAX + DROPPED {
        send_wrong_tokens(&served, &wrong);
    }
    let refused = of_kind(&served.client, EventKind::LoginRefused);
    assert_eq!(refused.len(), LOGIN_REFUSED_MAX);
    assert_eq!(all(&served.client)[..before.len()], before);
    let dropped = last_seq + DROPPED as u64;
    let check = |served: &TestServer| {
        let gap = |after| {
            let mut stream = served.client.watch(Some(after)).expect("a stream");
            assert_eq!(stream.next_message().expect("a message").kind, "hello");
            let next = stream.next_message().expect("a message");
            (next.kind == "gap").then(|| serde_json::from_str(&next.data).expect("a gap"))
        };
        let up_to = dropped;
        let wanted = EventGap { after: 1, up_to };
        assert_eq!(gap(1), Some(wanted));
        let after = dropped - 1;
        assert_eq!(gap(after), Some(EventGap { after, up_to }));
        assert_eq!(gap(dropped), None);
    };
    check(&served);
    served.handle.stop();
    // The next manager knows it, too.
    let served = cluster.serve();
    check(&served);
    served.handle.stop();
}

/// The next event of a stream.
fn next_event(stream: &mut EventStream) -> EventRecord {
    loop {
        let message = stream.next_message().expect("a message");
        assert_ne!(message.kind, "acknowledged", "{}", message.data);
        if message.kind == "event" {
            return serde_json::from_str(&message.data).expect("an event");
        }
    }
}

/// The names, roles and lives of tokens are for the roles that list tokens: in the list, by number,
/// in the past of a stream and in its news.
#[test]
fn events_about_tokens_are_for_admins() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let clients = [TokenRole::Viewer, TokenRole::Operator, TokenRole::Admin]
        .map(|role| (Role::from(role), client_with(&served, role)));
    let is_about_token =
        |kind: EventKind| matches!(kind, EventKind::TokenCreated | EventKind::TokenRevoked);
    let whole = all(&served.client);
    let about_tokens = whole.iter().filter(|it| is_about_token(it.kind)).count();
    assert_eq!(about_tokens, 4, "one of the first start, and three");
    let public: Vec<_> = whole
        .iter()
        .filter(|it| !is_about_token(it.kind))
        .cloned()
        .collect();
    let readable = |role| if role < Role::Admin { &public } else { &whole };
    let mut streams: Vec<_> = clients
        .iter()
        .map(|(role, client)| (*role, client.watch(Some(0)).expect("a stream")))
        .collect();
    for (role, stream) in &mut streams {
        let past: Vec<_> = readable(*role).iter().map(|_| next_event(stream)).collect();
        assert_eq!(&past, readable(*role), "{role}");
    }
    for (role, client) in &clients {
        assert_eq!(&all(client), readable(*role), "{role}");
        let filter = EventFilter {
            subject: Some("token:viewer-1".into()),
            ..EventFilter::default()
        };
        let found = client.events(&filter).expect("events").len();
        assert_eq!(found, usize::from(*role >= Role::Admin), "{role}");
    }
    let created = whole.iter().rfind(|it| it.kind == EventKind::TokenCreated);
    let created = created.expect("an event").seq;
    let (_, operator) = &clients[1];
    let refused = operator.acknowledge_event(created);
    assert_refused(refused, ErrorCode::NotFound, &["no event"]);
    let (_, admin) = &clients[2];
    let tokens = admin.tokens().expect("listed");
    let viewer = tokens.iter().find(|it| it.name.as_str() == "viewer-1");
    // News: an acknowledgement and an event for admins, then an event for all.
    admin
        .revoke_token(viewer.expect("there").id)
        .expect("revoked");
    let made = create_request("v", LayoutKind::Mirror, MIB);
    served.client.create(&made).expect("made");
    let mut next_kind = |at: usize| next_event(&mut streams[at].1).kind;
    assert_eq!(next_kind(1), EventKind::VolumeCreated);
    assert_eq!(next_kind(2), EventKind::TokenRevoked);
    assert_eq!(next_kind(2), EventKind::VolumeCreated);
    admin.acknowledge_event(created).expect("acknowledged");
    served.client.grow(&name("v"), 2 * MIB).expect("grown");
    assert_eq!(next_kind(1), EventKind::VolumeGrown);
    served.handle.stop();
}

/// The checks of its credential do not put off the comments of a stream.
#[test]
fn stream_gets_comments_between_checks() {
    let cluster = Cluster::new(0);
    let served = cluster.serve_with(ManagerSettings {
        watch: WatchTimes {
            comment_every: Duration::from_millis(200),
            check_every: Duration::from_millis(20),
            ..WatchTimes::default()
        },
        ..ManagerSettings::default()
    });
    let authorization = format!(
        "Authorization: Bearer {}",
        pagemesh_manage::token::token(&cluster.key)
    );
    let mut lines = http::stream_lines(served.handle.address(), "/api/v1/watch", &authorization);
    assert!(lines.any(|line| line.trim_end() == ":"), "the stream ended");
    served.handle.stop();
}

#[test]
fn unacknowledged_critical_events_are_counted() {
    let cluster = Cluster::new(1);
    let served = cluster.serve_with_bricks_alive();
    let manager = served.handle.manager();
    let made = create_request("v", LayoutKind::Concat, MIB);
    served.client.create(&made).expect("made");
    let text = || manager.metrics().text().expect("a text");
    let line = |count| format!("pagemesh_manager_unacknowledged_critical_events {count}\n");
    assert!(text().contains(&line(0)));
    cluster.clock.advance(Duration::from_secs(8));
    manager.sweep();
    let lost = of_kind(&served.client, EventKind::BrickLost).remove(0);
    assert_eq!(lost.severity, Severity::Critical);
    assert!(text().contains(&line(1)));
    assert!(text().contains("pagemesh_volumes_without_reachable_copy 1\n"));
    served.client.acknowledge_event(lost.seq).expect("done");
    assert!(text().contains(&line(0)));
    served.handle.stop();
}
