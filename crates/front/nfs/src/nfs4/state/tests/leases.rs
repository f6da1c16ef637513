use super::*;
use limits::{COURTESY, LEASE};

fn status(server: &TestServer, client: ClientId) -> Option<LeaseStatus> {
    let clients = server.state.clients(None, usize::MAX, server.now);
    let client = clients.iter().find(|it| it.client == client)?;
    Some(client.status)
}

#[test]
fn unused_expired_client_is_removed() {
    let mut server = TestServer::new();
    let (client, session) = server.client("host");
    server.pass(LEASE - SECOND);
    server.renew(session, 1);
    server.pass(LEASE - SECOND);
    assert_eq!(status(&server, client), Some(LeaseStatus::Active));
    server.pass(SECOND);
    assert_eq!(server.removals(), [(client, RemovalReason::LeaseExpired)]);
    assert_eq!(server.sequence(session, 0, 2), Err(StateError::BadSession));
    assert_eq!(server.state.counts(), StateCounts::default());
    assert!(server.list.is_empty());
}

#[test]
fn unconfirmed_client_is_removed_after_a_lease() {
    let mut server = TestServer::new();
    let client = server.exchange("host", 1, 1, 0).expect("new").client;
    server.pass(LEASE - SECOND);
    assert_eq!(status(&server, client), Some(LeaseStatus::Unconfirmed));
    server.pass(SECOND);
    assert_eq!(server.removals(), [(client, RemovalReason::Unconfirmed)]);
    assert_eq!(server.create(client, 1, 1), Err(StateError::StaleClientId));
}

#[test]
fn expired_client_keeps_its_state_and_comes_back() {
    let mut server = TestServer::new();
    let (client, session) = server.client("host");
    let open = server.open(client, "owner", 1, 3, 3).expect("free");
    server.pass(LEASE);
    assert_eq!(status(&server, client), Some(LeaseStatus::Courtesy));
    assert_eq!(server.state.counts().courtesy_clients, 1);
    server.pass(COURTESY - SECOND);
    server.renew(session, 1);
    assert_eq!(status(&server, client), Some(LeaseStatus::Active));
    assert_eq!(server.io(client, open, 1, IoAccess::Write), Ok(()));
    server.pass(LEASE);
    server.pass(COURTESY);
    assert_eq!(server.removals(), [(client, RemovalReason::CourtesyEnded)]);
    assert!(server.events.contains(&StateEvent::FileUnused(file(1))));
    assert_eq!(server.state.counts(), StateCounts::default());
}

/// A client with an open that denies all and a lock, and another client a lease later.
fn check_conflict(asks: impl Fn(&mut TestServer, ClientId) -> bool) {
    for is_expired in [false, true] {
        let mut server = TestServer::new();
        let (old, _) = server.client("old");
        let (shared, _) = server.client("shared");
        let open = server.open(old, "owner", 1, 3, 3).expect("free");
        let shared_open = server.open(shared, "owner", 2, 3, 0).expect("free");
        let old_open = server.open(old, "owner", 2, 3, 0).expect("free");
        let locker = Locker::New {
            open: old_open,
            owner: b"p1",
        };
        let range = (0, 9);
        server
            .lock(old, 2, locker, LockKind::Write, range)
            .expect("free");
        if is_expired {
            // No tick: the time alone decides.
            server.now += LEASE;
        }
        let (new, _) = server.client("new");
        assert_eq!(asks(&mut server, new), is_expired);
        server.store();
        let removed = server.state.clients.get(old).is_err();
        assert_eq!(removed, is_expired);
        let reasons = [(old, RemovalReason::Conflict)];
        assert_eq!(
            server.removals(),
            if is_expired { &reasons[..] } else { &[] }
        );
        // The entry of the stable list is gone before the other client has its reply.
        assert_eq!(server.list.len(), if is_expired { 2 } else { 3 });
        let other = server.io(shared, shared_open, 2, IoAccess::Write);
        assert_eq!(other, Ok(()));
        assert_eq!(server.io(old, open, 1, IoAccess::Read).is_ok(), !is_expired);
    }
}

#[test]
fn expired_client_gives_way_to_an_open() {
    check_conflict(|server, client| server.open(client, "owner", 1, 1, 0).is_ok());
}

#[test]
fn expired_client_gives_way_to_access_without_open() {
    check_conflict(|server, client| {
        let id = StateId::ANONYMOUS;
        server.io(client, id, 1, IoAccess::Read).is_ok()
    });
}

#[test]
fn expired_client_gives_way_to_a_lock() {
    check_conflict(|server, client| {
        let open = server.open(client, "owner", 2, 3, 0).expect("no deny bits");
        let locker = Locker::New { open, owner: b"p" };
        let locked = server.lock(client, 2, locker, LockKind::Read, (5, 5));
        locked.is_ok()
    });
}

#[test]
fn expired_client_gives_way_to_a_lock_test() {
    check_conflict(|server, client| {
        let range = LockRange::new(0, 0).expect("a range");
        let (state, now) = (&mut server.state, server.now);
        let tested = state.test_lock(client, file(2), b"p", (range, LockKind::Read), now);
        tested.is_ok()
    });
}

#[test]
fn running_request_keeps_the_lease() {
    let mut server = TestServer::new();
    let (client, session) = server.client("host");
    server.open(client, "owner", 1, 3, 3).expect("free");
    let grant = server.run(session, 0, 1);
    server.pass(3 * LEASE);
    assert_eq!(status(&server, client), Some(LeaseStatus::Active));
    let (other, _) = server.client("other");
    let opened = server.open(other, "owner", 1, 1, 0);
    assert_eq!(opened, Err(StateError::ShareDenied));
    server.state.finish(grant.slot, None, server.now);
    server.pass(LEASE - SECOND);
    assert_eq!(status(&server, client), Some(LeaseStatus::Active));
    server.pass(LEASE);
    assert_eq!(status(&server, client), Some(LeaseStatus::Courtesy));
}

#[test]
fn one_running_lease_refuses_and_changes_nothing() {
    let mut server = TestServer::new();
    let (expired, _) = server.client("expired");
    let (active, session) = server.client("active");
    server.open(expired, "owner", 1, 2, 0).expect("free");
    server.open(active, "owner", 1, 2, 0).expect("free");
    server.pass(LEASE - SECOND);
    server.renew(session, 1);
    server.pass(SECOND);
    let (new, _) = server.client("new");
    let opened = server.open(new, "owner", 1, 1, 2);
    assert_eq!(opened, Err(StateError::ShareDenied));
    assert_eq!(status(&server, expired), Some(LeaseStatus::Courtesy));
}

#[test]
fn idle_server_wakes_once_per_lease() {
    let mut server = TestServer::new();
    assert_eq!(server.state.next_deadline(), None);
    let (client, session) = server.client("host");
    for number in 0..1000 {
        server.open(client, "owner", number, 1, 0).expect("free");
    }
    let mut wakes = 0;
    let end = server.now + 100 * LEASE;
    for sequence in 1.. {
        server.renew(session, sequence);
        let until = server.now + LEASE / 3;
        while server.state.next_deadline().is_some_and(|it| it <= until) {
            server.now = server.state.next_deadline().expect("there");
            server.state.tick(server.now);
            wakes += 1;
        }
        server.now = until;
        if server.now >= end {
            break;
        }
    }
    assert!((100..=160).contains(&wakes), "{wakes}");
    assert_eq!(server.state.counts().opens, 1000);
}
