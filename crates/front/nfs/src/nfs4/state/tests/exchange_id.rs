use super::*;

const UPDATE: u32 = exchange_flags::UPD_CONFIRMED_REC_A;

/// The record of the owner before the call, made by user 1 with verifier 1.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    None,
    Unconfirmed,
    /// Confirmed, with a session.
    Confirmed,
    /// Confirmed, without any state.
    Unused,
    /// Confirmed, and its lease is over.
    Expired,
}

/// The effect on the record of before.
#[derive(Clone, Copy, Debug, PartialEq)]
enum After {
    Same,
    /// A new record; the earlier one stays until CREATE_SESSION.
    Beside,
    /// A new record; the earlier one is gone.
    Replaced,
}

fn check(
    before: Before,
    (verifier, uid, flags): (u8, u32, u32),
    expected: Result<After, StateError>,
) {
    let case = format!("{before:?}, verifier {verifier}, user {uid}, flags {flags:x}");
    let mut server = TestServer::new();
    let mut old = None;
    if before != Before::None {
        let reply = server.exchange("host", 1, 1, 0).expect("a new owner");
        assert_eq!(reply.flags, exchange_flags::USE_NON_PNFS);
        old = Some(reply.client);
        if before != Before::Unconfirmed {
            let session = server.create(reply.client, reply.sequence, 1).expect("new");
            if before == Before::Unused {
                server
                    .state
                    .destroy_session(session.session, None)
                    .expect("it is there");
            }
        }
    }
    if before == Before::Expired {
        server.now += limits::LEASE;
    }
    let reply = server.exchange("host", verifier, uid, flags);
    assert_eq!(reply.map(|_| ()), expected.map(|_| ()), "{case}");
    let is_there = old.is_some_and(|old| server.state.clients.get(old).is_ok());
    let (Ok(reply), Ok(after)) = (reply, expected) else {
        assert_eq!(is_there, old.is_some(), "{case}");
        return;
    };
    assert_eq!(Some(reply.client) == old, after == After::Same, "{case}");
    assert_eq!(is_there, after != After::Replaced, "{case}");
    let is_confirmed = reply.flags & exchange_flags::CONFIRMED_R != 0;
    assert_eq!(is_confirmed, after == After::Same, "{case}");
    let created = server.create(reply.client, reply.sequence, uid);
    assert!(created.is_ok(), "{case}: {created:?}");
    let counts = server.state.counts();
    assert_eq!(counts.clients, 1, "{case}");
}

/// The cases of RFC 8881 section 18.35.4.
#[test]
fn exchange_id_follows_the_table_of_cases() {
    use After::*;
    use Before::{Confirmed, Expired, None, Unconfirmed, Unused};
    use StateError::*;
    // Cases 1 and 4: without a confirmed record, whichever verifier and principal.
    check(None, (1, 1, 0), Ok(Replaced));
    for (verifier, uid) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        check(Unconfirmed, (verifier, uid, 0), Ok(Replaced));
        // Case 7.
        check(None, (verifier, uid, UPDATE), Err(NoEnt));
        check(Unconfirmed, (verifier, uid, UPDATE), Err(NoEnt));
    }
    for before in [Confirmed, Unused, Expired] {
        // Cases 2, 5, 6, 8 and 9.
        check(before, (1, 1, 0), Ok(Same));
        check(before, (2, 1, 0), Ok(Beside));
        check(before, (1, 1, UPDATE), Ok(Same));
        check(before, (2, 1, UPDATE), Err(NotSame));
        check(before, (2, 2, UPDATE), Err(NotSame));
        check(before, (1, 2, UPDATE), Err(Perm));
    }
    // Case 3.
    for verifier in [1, 2] {
        check(Confirmed, (verifier, 2, 0), Err(ClidInUse));
        check(Unused, (verifier, 2, 0), Ok(Replaced));
        check(Expired, (verifier, 2, 0), Ok(Replaced));
    }
}

#[test]
fn unknown_flags_and_protections_are_refused() {
    let mut server = TestServer::new();
    for flags in [4, exchange_flags::CONFIRMED_R, 0x8_0000] {
        assert_eq!(server.exchange("host", 1, 1, flags), Err(StateError::Inval));
    }
    let mut check = |protection, expected| {
        let args = ExchangeIdArgs {
            owner: b"host",
            verifier: Verifier([1; 8]),
            principal: user(1),
            flags: 0,
            protection,
            address: address(),
        };
        assert_eq!(server.state.exchange_id(&args, server.now), Err(expected));
    };
    check(StateProtection::MachineCredential, StateError::Inval);
    check(
        StateProtection::SecretStateVerifier,
        StateError::EncrAlgUnsupp,
    );
    let owner = "x".repeat(limits::OWNER_BYTES_MAX + 1);
    assert_eq!(server.exchange(&owner, 1, 1, 0), Err(StateError::Inval));
    assert_eq!(server.state.counts(), StateCounts::default());
}

#[test]
fn restarted_client_loses_its_state_at_confirmation() {
    let mut server = TestServer::new();
    let (old, session) = server.client("host");
    server.open(old, "owner", 1, 3, 0).expect("no other opens");
    let new = server.exchange("host", 2, 0, 0).expect("a restart");
    server.renew(session, 1);
    server.create(new.client, new.sequence, 0).expect("new");
    server.store();
    assert_eq!(server.removals(), [(old, RemovalReason::Replaced)]);
    assert!(server.events.contains(&StateEvent::FileUnused(file(1))));
    assert_eq!(server.sequence(session, 0, 2), Err(StateError::BadSession));
    assert_eq!(server.state.counts().opens, 0);
    assert!(server.list.is_empty());
}

#[test]
fn flood_of_unconfirmed_clients_leaves_confirmed_ones() {
    let mut server = TestServer::new();
    let (client, _) = server.client("host");
    for number in 0..limits::CLIENTS_MAX + 10 {
        let owner = format!("flood {number}");
        server
            .exchange(&owner, 1, 1, 0)
            .expect("the oldest one makes room");
    }
    let counts = server.state.counts();
    assert_eq!(counts.clients, limits::UNCONFIRMED_MAX + 1);
    assert!(server.state.clients.get(client).is_ok());
    server.pass(limits::LEASE);
    assert_eq!(server.state.counts(), StateCounts::default());
}

#[test]
fn client_with_state_is_not_destroyed() {
    let mut server = TestServer::new();
    let (client, session) = server.client("host");
    let open = server.open(client, "owner", 1, 1, 0).expect("free");
    let busy = Err(StateError::ClientIdBusy);
    assert_eq!(server.state.destroy_client(client), busy);
    server
        .state
        .destroy_session(session, None)
        .expect("it is there");
    assert_eq!(server.state.destroy_client(client), busy);
    server.state.close(client, open, file(1)).expect("open");
    assert_eq!(server.state.destroy_client(client), Ok(()));
    let gone = Err(StateError::StaleClientId);
    assert_eq!(server.state.destroy_client(client), gone);
    server.store();
    assert!(server.list.is_empty());
    assert_eq!(server.state.counts(), StateCounts::default());
    assert_eq!(server.state.next_deadline(), None);
}
