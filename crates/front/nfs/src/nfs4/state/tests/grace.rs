use super::*;
use limits::{GRACE, GRACE_EXTENSION, GRACE_MAX, LATE_RECLAIM_WAIT};

/// A server after a restart that these clients have survived.
fn restarted(owners: &[&str]) -> TestServer {
    let mut server = TestServer::new();
    for owner in owners {
        server.client(owner);
    }
    server.restart();
    server
}

fn open(server: &mut TestServer, client: ClientId, is_reclaim: bool) -> Result<(), StateError> {
    let opened = server.open_with(client, "owner", client.0, (3, 0), is_reclaim);
    let checked = server
        .state
        .check_open(client, EXPORT, is_reclaim, server.now);
    assert_eq!(checked, opened.map(|_| ()));
    checked
}

fn complete(server: &mut TestServer, client: ClientId) -> Result<(), StateError> {
    let completed = server.state.reclaim_complete(client, false, server.now);
    server.store();
    completed
}

#[test]
fn first_start_has_no_grace_period() {
    let mut server = TestServer::new();
    assert!(!server.state.is_in_grace());
    let (client, _) = server.reclaiming_client("host");
    assert_eq!(open(&mut server, client, false), Err(StateError::Grace));
    assert_eq!(open(&mut server, client, true), Err(StateError::NoGrace));
    let one_fs = server.state.reclaim_complete(client, true, server.now);
    assert_eq!(one_fs, Ok(()));
    assert_eq!(complete(&mut server, client), Ok(()));
    assert_eq!(open(&mut server, client, false), Ok(()));
    let twice = complete(&mut server, client);
    assert_eq!(twice, Err(StateError::CompleteAlready));
}

#[test]
fn grace_ends_early_after_the_last_known_client() {
    let mut server = restarted(&["first", "second"]);
    let (first, _) = server.reclaiming_client("first");
    let (second, _) = server.reclaiming_client("second");
    let (new, _) = server.reclaiming_client("new");
    assert_eq!(open(&mut server, new, true), Err(StateError::ReclaimBad));
    assert_eq!(open(&mut server, first, false), Err(StateError::Grace));
    assert_eq!(open(&mut server, first, true), Ok(()));
    for client in [new, first] {
        assert_eq!(complete(&mut server, client), Ok(()));
        assert_eq!(open(&mut server, client, true), Err(StateError::NoGrace));
        assert_eq!(open(&mut server, client, false), Err(StateError::Grace));
    }
    let special = server.io(first, StateId::ANONYMOUS, 9, IoAccess::Read);
    assert_eq!(special, Err(StateError::Grace));
    let bypass = server.io(first, StateId::READ_BYPASS, 9, IoAccess::Read);
    assert_eq!(bypass, Ok(()));
    assert!(server.state.is_in_grace());
    assert_eq!(complete(&mut server, second), Ok(()));
    assert!(!server.state.is_in_grace());
    assert!(server.events.contains(&StateEvent::GraceEnded));
    assert_eq!(open(&mut server, new, false), Ok(()));
    // The second one has no state in this file system.
    let owners: Vec<_> = server
        .list
        .iter()
        .map(|(owner, _)| owner.to_vec())
        .collect();
    assert_eq!(owners, [b"first".to_vec(), b"new".to_vec()]);
}

#[test]
fn client_reclaims_only_where_it_is_listed() {
    let mut server = restarted(&["host"]);
    let (client, _) = server.reclaiming_client("host");
    let mut check = |export| {
        let state = &mut server.state;
        state.check_open(client, export, true, server.now)
    };
    assert_eq!(check(EXPORT), Ok(()));
    assert_eq!(check(EXPORT + 1), Err(StateError::ReclaimBad));
}

#[test]
fn half_reclaimed_client_may_not_reclaim_in_the_next_run() {
    let mut server = restarted(&["slow"]);
    let (slow, _) = server.reclaiming_client("slow");
    assert_eq!(open(&mut server, slow, true), Ok(()));
    // The grace period ends before its RECLAIM_COMPLETE: others may get the rest of its state.
    server.pass(GRACE_MAX);
    assert!(server.list.is_empty());
    server.restart();
    let (slow, _) = server.reclaiming_client("slow");
    assert_eq!(open(&mut server, slow, true), Err(StateError::NoGrace));
}

#[test]
fn late_reclaim_complete_lists_the_reclaimed_state() {
    let mut server = restarted(&["slow"]);
    let (slow, session) = server.reclaiming_client("slow");
    assert_eq!(open(&mut server, slow, true), Ok(()));
    let early = server.state.list_late_reclaims(slow, server.now);
    assert_eq!(early, Ok(LateReclaims::default()));
    server.pass(GRACE_MAX - SECOND);
    server.renew(session, 1);
    server.pass(SECOND);
    let mut check = |must_wait, now| {
        let late = server.state.list_late_reclaims(slow, now);
        let exports = vec![EXPORT];
        assert_eq!(late, Ok(LateReclaims { exports, must_wait }));
    };
    let since = server.now;
    check(true, since);
    check(true, since + LATE_RECLAIM_WAIT - SECOND);
    check(false, since + LATE_RECLAIM_WAIT);
    assert_eq!(complete(&mut server, slow), Ok(()));
    assert_eq!(server.list.len(), 1);
}

#[test]
fn grace_ends_by_time_and_absent_clients_lose_their_right() {
    let mut server = restarted(&["absent", "late"]);
    let (late, _) = server.reclaiming_client("late");
    server.now += GRACE - SECOND;
    assert_eq!(open(&mut server, late, true), Ok(()));
    // The reclaim has extended the period.
    server.now += GRACE_EXTENSION - SECOND;
    assert_eq!(open(&mut server, late, true), Ok(()));
    server.now += GRACE_EXTENSION;
    // No tick: the time alone decides.
    assert_eq!(open(&mut server, late, true), Err(StateError::NoGrace));
    server.store();
    assert!(!server.state.is_in_grace());
    assert!(server.list.is_empty());
    server.restart();
    let (absent, _) = server.reclaiming_client("absent");
    assert_eq!(open(&mut server, absent, true), Err(StateError::NoGrace));
}

#[test]
fn reclaims_extend_grace_to_a_bound() {
    let mut server = restarted(&["host"]);
    let (client, session) = server.reclaiming_client("host");
    let start = server.now;
    let mut sequence = 0;
    while open(&mut server, client, true).is_ok() {
        sequence += 1;
        server.renew(session, sequence);
        server.now += SECOND;
        assert!(server.now <= start + GRACE_MAX);
    }
    assert!(server.now + SECOND > start + GRACE_MAX);
}

#[test]
fn crash_in_grace_keeps_the_right_to_reclaim() {
    let mut server = restarted(&["first", "second"]);
    let (first, _) = server.reclaiming_client("first");
    assert_eq!(open(&mut server, first, true), Ok(()));
    assert_eq!(complete(&mut server, first), Ok(()));
    server.restart();
    for owner in ["first", "second"] {
        let (client, _) = server.reclaiming_client(owner);
        assert_eq!(open(&mut server, client, true), Ok(()), "{owner}");
    }
}

#[test]
fn another_principal_inherits_no_right() {
    let mut server = restarted(&["host"]);
    let reply = server.exchange("host", 1, 5, 0).expect("a new owner");
    server.create(reply.client, 1, 5).expect("new");
    let thief = reply.client;
    assert_eq!(open(&mut server, thief, true), Err(StateError::ReclaimBad));
    assert_eq!(complete(&mut server, thief), Ok(()));
    assert!(server.state.is_in_grace());
}

#[test]
fn reclaim_of_conflicting_state_is_refused() {
    let mut server = restarted(&["first", "second"]);
    let [first, second] = ["first", "second"].map(|it| server.reclaiming_client(it).0);
    let mut reclaim = |client, deny| {
        let grant = server.open_with(client, "owner", 1, (3, deny), true);
        grant.map(|it| it.stateid)
    };
    let open = reclaim(first, 0).expect("the first one");
    let conflict = Err(StateError::ReclaimConflict);
    assert_eq!(reclaim(second, 3).map(|_| ()), conflict);
    let other = reclaim(second, 0).expect("no conflict");
    let mut lock = |client, open, is_reclaim| {
        let args = LockArgs {
            client,
            file: file(1),
            locker: Locker::New { open, owner: b"p" },
            kind: LockKind::Write,
            range: LockRange::new(0, 9).expect("a range"),
            is_reclaim,
        };
        server.state.lock(&args, server.now).map(|_| ())
    };
    assert_eq!(lock(first, open, false), Err(StateError::Grace.into()));
    assert_eq!(lock(first, open, true), Ok(()));
    let refused = lock(second, other, true);
    assert_eq!(refused, Err(StateError::ReclaimConflict.into()));
}

#[test]
fn destroyed_client_does_not_hold_up_grace() {
    let mut server = restarted(&["host"]);
    let (client, session) = server.reclaiming_client("host");
    server.state.destroy_session(session, None).expect("there");
    server.state.destroy_client(client).expect("unused");
    server.store();
    assert!(!server.state.is_in_grace());
    assert!(server.list.is_empty());
}

#[test]
fn ids_of_earlier_runs_are_stale() {
    let mut server = TestServer::new();
    let (client, session) = server.client("host");
    let open = server.open(client, "owner", 1, 3, 0).expect("free");
    server.restart();
    assert_eq!(server.sequence(session, 0, 1), Err(StateError::BadSession));
    assert_eq!(server.create(client, 2, 0), Err(StateError::StaleClientId));
    let (new, _) = server.reclaiming_client("host");
    assert_ne!(new, client);
    let stale = server.io(new, open, 1, IoAccess::Read);
    assert_eq!(stale, Err(StateError::StaleStateId));
}
