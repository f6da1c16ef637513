//! Clients as operators see and expire them.

use super::*;

const RANGE: (u64, u64) = (0, 9);

/// Opens the file with this number, and locks a range for writes.
fn lock(server: &mut TestServer, client: ClientId, number: u64) -> Result<StateId, LockError> {
    let open = server.open(client, "owner", number, 3, 0).expect("free");
    let owner = b"locker";
    server.lock(
        client,
        number,
        Locker::New { open, owner },
        LockKind::Write,
        RANGE,
    )
}

fn is_denied(locked: &Result<StateId, LockError>) -> bool {
    matches!(locked, Err(LockError::Denied(_)))
}

fn listed(server: &TestServer, client: ClientId) -> ClientListing {
    let clients = server.state.clients(None, 10, server.now).into_iter();
    clients
        .filter(|it| it.client == client)
        .last()
        .expect("listed")
}

#[test]
fn operators_see_clients_with_their_state() {
    let mut server = TestServer::new();
    let (first, session) = server.client("first");
    let (second, _) = server.client("second");
    lock(&mut server, second, 1).expect("free");
    server.now += SECOND;
    server.renew(session, 1);
    server.now += SECOND;
    let clients = server.state.clients(None, 10, server.now);
    let ages: Vec<_> = clients.iter().map(|it| (it.client, it.lease_age)).collect();
    // Lists are in the order of the ids, which are random.
    let mut expected = [(first, SECOND), (second, 2 * SECOND)];
    expected.sort_unstable();
    assert_eq!(ages, expected);
    let last = listed(&server, second);
    assert_eq!((&*last.owner, last.address), (&b"second"[..], address()));
    assert_eq!((last.opens, last.lock_states, last.ranges), (1, 1, 1));
    assert_eq!((last.sessions, last.file_systems), (1, vec![EXPORT]));
    assert!(last.has_reclaimed && !last.may_reclaim && last.running == 0);
    let page = |after| server.state.clients(after, 1, server.now);
    let [(low, _), (high, _)] = expected;
    assert_eq!(page(None)[0].client, low);
    assert_eq!(page(Some(low))[0].client, high);
    assert!(page(Some(high)).is_empty());
}

#[test]
fn another_client_gets_the_lock_of_an_expired_one() {
    let mut server = TestServer::new();
    let (holder, session) = server.client("holder");
    let (other, _) = server.client("other");
    lock(&mut server, holder, 1).expect("free");
    assert!(is_denied(&lock(&mut server, other, 1)));
    let expired = ExpiredState {
        opens: 1,
        ranges: 1,
        file_systems: vec![EXPORT],
    };
    assert_eq!(server.state.expire_client(holder), Some(expired));
    assert_eq!(server.state.expire_client(holder), None);
    server.store();
    assert_eq!(server.removals(), [(holder, RemovalReason::Operator)]);
    assert!(lock(&mut server, other, 1).is_ok());
    let owners: Vec<_> = server.list.iter().map(|(owner, _)| &**owner).collect();
    assert_eq!(owners, [b"other"]);
    let repeated = server.sequence(session, 0, 1);
    assert_eq!(repeated, Err(StateError::BadSession));
    let session = server.create(holder, 2, 0);
    assert_eq!(session, Err(StateError::StaleClientId));
    let (again, _) = server.reclaiming_client("holder");
    let reclaimed = server.open_with(again, "owner", 1, (3, 0), true);
    assert_eq!(reclaimed, Err(StateError::NoGrace));
}

#[test]
fn expiry_waits_for_requests_in_progress() {
    let mut server = TestServer::new();
    let (holder, session) = server.client("holder");
    let (other, _) = server.client("other");
    lock(&mut server, holder, 1).expect("free");
    let [first, second] = [0, 1].map(|slot| server.run(session, slot, 1));
    assert!(server.state.expire_client(holder).is_some());
    server.state.finish(first.slot, Some(b"reply"), server.now);
    assert_eq!(server.state.expiring(holder), Some(1));
    // The second request may be a WRITE.
    assert!(is_denied(&lock(&mut server, other, 1)));
    let refused = Err(StateError::BadSession);
    assert_eq!(server.sequence(session, 0, 2), refused);
    assert_eq!(server.sequence(session, 0, 1), refused);
    assert_eq!(
        server.state.destroy_session(session, None),
        Err(StateError::BadSession)
    );
    for verifier in [1, 2] {
        let exchanged = server.exchange("holder", verifier, 0, 0);
        assert_eq!(exchanged, Err(StateError::Delay));
    }
    let created = server.create(holder, 2, 0);
    assert_eq!(created, Err(StateError::Delay));
    // An OPEN in progress puts the client into no further list.
    let opened = server
        .state
        .check_open(holder, EXPORT + 1, false, server.now);
    assert_eq!(opened, Err(StateError::Delay));
    server.pass(limits::COURTESY);
    assert_eq!(server.state.expiring(holder), Some(1));
    server.state.finish(second.slot, None, server.now);
    server.store();
    assert_eq!(server.state.expiring(holder), None);
    assert!(
        server
            .removals()
            .contains(&(holder, RemovalReason::Operator))
    );
    assert!(lock(&mut server, other, 1).is_ok());
    assert!(server.exchange("holder", 1, 0, 0).is_ok());
}

#[test]
fn expiry_in_grace_ends_the_right_to_reclaim() {
    let mut server = TestServer::new();
    let owners = ["expired", "absent", "idle"];
    for owner in owners {
        server.client(owner);
    }
    server.restart();
    let (client, _) = server.reclaiming_client("expired");
    assert!(listed(&server, client).may_reclaim);
    let reclaim = |server: &mut TestServer, client| {
        let opened = server.open_with(client, "owner", 1, (3, 0), true);
        opened.map(|_| ())
    };
    assert_eq!(reclaim(&mut server, client), Ok(()));
    assert_eq!(listed(&server, client).file_systems, [EXPORT]);
    let expired = server.state.expire_client(client).expect("there");
    assert_eq!(expired.file_systems, [EXPORT]);
    // A client that has reclaimed nothing so far.
    let (idle, _) = server.reclaiming_client("idle");
    let expired = server.state.expire_client(idle).expect("there");
    assert_eq!(expired.file_systems, [EXPORT]);
    server.store();
    let (client, _) = server.reclaiming_client("expired");
    assert!(!listed(&server, client).may_reclaim);
    let refused = Err(StateError::ReclaimBad);
    assert_eq!(reclaim(&mut server, client), refused);
    // A crash of the server does not bring it back.
    server.restart();
    let (client, _) = server.reclaiming_client("expired");
    assert_eq!(reclaim(&mut server, client), refused);
    let (absent, _) = server.reclaiming_client("absent");
    assert_eq!(reclaim(&mut server, absent), Ok(()));
    assert!(server.state.is_in_grace());
    // The last client of the lists ends the grace period.
    let expired = server.state.expire_client(absent).expect("there");
    assert_eq!(expired.file_systems, [EXPORT]);
    assert!(!server.state.is_in_grace());
}
