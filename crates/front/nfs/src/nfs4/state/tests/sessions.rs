use super::*;
use std::sync::Arc;

#[test]
fn repeated_request_gets_the_kept_reply() {
    let mut server = TestServer::new();
    let (_, session) = server.client("host");
    let grant = server.run(session, 0, 1);
    assert_eq!(server.sequence(session, 0, 1), Err(StateError::Delay));
    assert_eq!(
        server.sequence(session, 0, 2),
        Err(StateError::SeqMisordered)
    );
    let reply = vec![5; 2048];
    server.state.finish(grant.slot, Some(&reply), server.now);
    for _ in 0..2 {
        let replay = SequenceOutcome::Replay(Arc::from(&reply[..]));
        assert_eq!(server.sequence(session, 0, 1), Ok(replay));
    }
    assert_eq!(server.state.counts().cached_bytes, 2048);
    let other = server.sequence_with(session, 0, 1, |args| args.fingerprint = 78);
    assert_eq!(other, Err(StateError::SeqFalseRetry));
    for wrong in [0, 3, 4, u32::MAX] {
        let outcome = server.sequence(session, 0, wrong);
        assert_eq!(outcome, Err(StateError::SeqMisordered), "{wrong}");
    }
    let grant = server.run(session, 0, 2);
    assert_eq!(server.state.counts().cached_bytes, 0);
    server.state.finish(grant.slot, None, server.now);
}

#[test]
fn reply_that_is_not_kept_is_no_second_run() {
    let mut server = TestServer::new();
    let (_, session) = server.client("host");
    let small = vec![1; limits::SMALL_REPLY_BYTES];
    let large = vec![1; limits::SMALL_REPLY_BYTES + 1];
    let mut check = |slot, is_cached, reply: Option<&[u8]>, is_kept: bool| {
        let outcome = server.sequence_with(session, slot, 1, |it| it.is_cached = is_cached);
        let Ok(SequenceOutcome::Run(grant)) = outcome else {
            panic!("a new request");
        };
        server.state.finish(grant.slot, reply, server.now);
        match server.sequence(session, slot, 1) {
            Ok(SequenceOutcome::Replay(_)) => assert!(is_kept, "{slot}"),
            Err(StateError::RetryUncachedRep) => assert!(!is_kept, "{slot}"),
            other => panic!("{other:?}"),
        }
    };
    check(0, false, Some(&small), true);
    check(1, false, Some(&large), false);
    check(2, true, Some(&large), true);
    check(3, true, None, false);
    check(4, true, Some(&vec![1; 2049]), false);
}

#[test]
fn sequence_numbers_wrap() {
    let mut server = TestServer::new();
    let (_, session) = server.client("host");
    let grant = server.run(session, 0, 1);
    server.state.finish(grant.slot, None, server.now);
    server.state.sessions.start(session, 0, u32::MAX, 77);
    let slot = SlotUse {
        session,
        slot: 0,
        is_cached: true,
    };
    server.state.sessions.finish(&slot, None);
    server.renew(session, 0);
    server.renew(session, 1);
}

#[test]
fn request_beyond_the_session_is_refused() {
    let mut server = TestServer::new();
    let (_, session) = server.client("host");
    let mut check = |change: &dyn Fn(&mut SequenceArgs), expected| {
        let outcome = server.sequence_with(session, 7, 1, |args| change(args));
        assert_eq!(outcome, Err(expected));
    };
    check(&|it| it.slot = 8, StateError::BadSlot);
    check(&|it| it.highest_slot = 8, StateError::BadHighSlot);
    check(&|it| it.request_bytes = 8193, StateError::ReqTooBig);
    check(&|it| it.operations = 17, StateError::TooManyOps);
    check(&|it| it.session.0[15] ^= 8, StateError::BadSession);
    // None of them has used the slot.
    let grant = server.run(session, 7, 1);
    assert_eq!(grant.reply.highest_slot, 7);
    assert_eq!(grant.reply.target_highest_slot, 7);
    server.state.finish(grant.slot, None, server.now);
}

#[test]
fn tiny_reply_cache_refuses_cached_requests() {
    let mut server = TestServer::new();
    let client = server.exchange("host", 1, 1, 0).expect("new").client;
    let fore = ChannelAttributes {
        cached_reply_bytes_max: 10,
        ..channel()
    };
    let session = server.create_with(client, 1, 1, fore).expect("allowed");
    let outcome = server.sequence(session.session, 0, 1);
    assert_eq!(outcome, Err(StateError::RepTooBigToCache));
}

#[test]
fn create_session_is_repeated_and_ordered() {
    let mut server = TestServer::new();
    let client = server.exchange("host", 1, 1, 0).expect("new").client;
    let misordered = Err(StateError::SeqMisordered);
    assert_eq!(server.create(client, 0, 1), misordered);
    assert_eq!(server.create(client, 2, 1), misordered);
    // Failures count no number.
    for _ in 0..2 {
        assert_eq!(server.create(client, 1, 2), Err(StateError::ClidInUse));
    }
    let small = ChannelAttributes {
        request_bytes_max: 20,
        ..channel()
    };
    let refused = server.create_with(client, 1, 1, small);
    assert_eq!(refused, Err(StateError::TooSmall));
    let first = server.create(client, 1, 1);
    assert!(first.is_ok_and(|it| it.sequence == 1));
    assert_eq!(server.create(client, 1, 1), first);
    assert_eq!(server.state.counts().sessions, 1);
    assert_eq!(server.create(client, 0, 1), misordered);
    assert_eq!(server.create(client, 3, 1), misordered);
    // Another principal may make a session of a confirmed client.
    let second = server.create(client, 2, 2);
    assert!(second.is_ok() && second != first);
    assert_eq!(server.create(client, 1, 1), misordered);
    assert_eq!(server.state.counts().sessions, 2);
    let again = server.exchange("host", 1, 1, 0).expect("the same run");
    assert_eq!((again.client, again.sequence), (client, 3));
}

#[test]
fn channels_are_negotiated_within_the_limits() {
    let mut server = TestServer::new();
    let client = server.exchange("host", 1, 1, 0).expect("new").client;
    let fore = ChannelAttributes {
        header_padding: 9,
        request_bytes_max: u32::MAX,
        reply_bytes_max: u32::MAX,
        cached_reply_bytes_max: u32::MAX,
        operations_max: u32::MAX,
        slots: u32::MAX,
    };
    let granted = server.create_with(client, 1, 1, fore).expect("new").fore;
    let expected = ChannelAttributes {
        header_padding: 0,
        request_bytes_max: crate::limits::RECORD_BYTES_MAX as u32,
        reply_bytes_max: crate::limits::RECORD_BYTES_MAX as u32,
        cached_reply_bytes_max: limits::CACHED_REPLY_BYTES_MAX,
        operations_max: limits::OPERATIONS_MAX,
        slots: 64,
    };
    assert_eq!(granted, expected);
    let mut check = |change: &dyn Fn(&mut ChannelAttributes)| {
        let mut fore = channel();
        change(&mut fore);
        let refused = server.create_with(client, 2, 1, fore);
        assert_eq!(refused, Err(StateError::TooSmall));
    };
    check(&|it| it.slots = 0);
    check(&|it| it.operations_max = 0);
    check(&|it| it.reply_bytes_max = 0);
}

#[test]
fn kept_replies_are_bounded_for_all_sessions() {
    let mut server = TestServer::new();
    let fore = ChannelAttributes {
        cached_reply_bytes_max: u32::MAX,
        slots: u32::MAX,
        ..channel()
    };
    let mut sessions = 0;
    let refused = 'filled: loop {
        let owner = format!("host {sessions}");
        server.address = SocketAddr::from(([10, 0, 0, (sessions / 400) as u8], 700));
        let client = server.exchange(&owner, 1, 1, 0).expect("new").client;
        for sequence in 1..=limits::SESSIONS_PER_CLIENT_MAX as u32 {
            match server.create_with(client, sequence, 1, fore) {
                Ok(_) => sessions += 1,
                Err(error) => break 'filled error,
            }
            let reserved = server.state.counts().cached_bytes_reserved;
            assert!(reserved <= limits::CACHED_BYTES_MAX);
        }
    };
    assert_eq!(refused, StateError::NoSpc);
    assert!(sessions > 1000, "{sessions}");
    let reserved = server.state.counts().cached_bytes_reserved;
    assert_eq!(reserved, limits::CACHED_BYTES_MAX);
    server.pass(limits::LEASE);
    assert_eq!(server.state.counts(), StateCounts::default());
}

/// The attributes of a session that reserves as much as it can get.
fn greedy() -> ChannelAttributes {
    ChannelAttributes {
        cached_reply_bytes_max: u32::MAX,
        slots: u32::MAX,
        ..channel()
    }
}

/// Clients of one address make sessions until one is refused: their number.
fn fill_address(server: &mut TestServer, name: &str) -> usize {
    let mut sessions = 0;
    loop {
        let owner = format!("{name} {sessions}");
        let client = server.exchange(&owner, 1, 1, 0).expect("new").client;
        match server.create_with(client, 1, 1, greedy()) {
            Ok(_) => sessions += 1,
            Err(error) => {
                assert_eq!(error, StateError::NoSpc);
                return sessions;
            }
        }
    }
}

#[test]
fn greedy_address_leaves_memory_for_replies_to_others() {
    let mut server = TestServer::new();
    let sessions = fill_address(&mut server, "greedy");
    assert!(sessions > 500, "{sessions}");
    let reserved = server.state.counts().cached_bytes_reserved;
    assert_eq!(reserved, limits::CACHED_BYTES_PER_ADDRESS_MAX);
    // Another form of the same address.
    server.address = "[::ffff:192.0.2.1]:700".parse().expect("an address");
    assert_eq!(fill_address(&mut server, "mapped"), 0);
    server.address = SocketAddr::from(([192, 0, 2, 2], 700));
    let client = server.exchange("other", 1, 1, 0).expect("new").client;
    let other = server.create_with(client, 1, 1, greedy()).expect("memory");
    assert!(other.fore.slots >= 32, "{} slots", other.fore.slots);
    // The memory comes back with the end of the sessions.
    server.address = address();
    server.pass(limits::LEASE);
    assert_eq!(fill_address(&mut server, "again"), sessions);
}

#[test]
fn sessions_of_one_client_get_fewer_slots_each() {
    let mut server = TestServer::new();
    let client = server.exchange("host", 1, 1, 0).expect("new").client;
    let mut before = u32::MAX;
    for sequence in 1..=limits::SESSIONS_PER_CLIENT_MAX as u32 {
        let created = server.create_with(client, sequence, 1, greedy());
        let slots = created.expect("memory").fore.slots;
        assert!(slots >= 1 && slots <= before, "{slots} after {before}");
        before = slots;
    }
    let reserved = server.state.counts().cached_bytes_reserved;
    assert!(reserved <= limits::CACHED_BYTES_PER_CLIENT_MAX);
}

#[test]
fn short_memory_lowers_the_slot_target() {
    let mut server = TestServer::new();
    let (_, session) = server.client("host");
    let fore = ChannelAttributes {
        cached_reply_bytes_max: u32::MAX,
        slots: u32::MAX,
        ..channel()
    };
    let mut number = 0_u32;
    while !server.state.sessions.is_short_of_memory() {
        number += 1;
        server.address = SocketAddr::from(([10, 0, 0, (number / 400) as u8], 700));
        let owner = format!("other {number}");
        let client = server.exchange(&owner, 1, 1, 0).expect("new").client;
        server
            .create_with(client, 1, 1, fore)
            .expect("memory is left");
    }
    let grant = server.run(session, 0, 1);
    assert_eq!(grant.reply.target_highest_slot, limits::SLOTS_SHORT - 1);
    assert_eq!(grant.reply.highest_slot, 7);
    server.state.finish(grant.slot, None, server.now);
}

#[test]
fn connections_are_bound_without_callbacks() {
    use ChannelDirection::*;
    let mut server = TestServer::new();
    let (_, session) = server.client("host");
    let mut check = |asked, expected| {
        assert_eq!(server.state.bind_connection(session, asked), expected);
    };
    check(Fore, Ok(Fore));
    check(ForeOrBoth, Ok(Fore));
    check(Back, Ok(Back));
    check(BackOrBoth, Ok(Both));
    check(Both, Err(StateError::Inval));
}

/// A client cannot guess the ids of another one from its own.
#[test]
fn ids_differ_between_runs_of_the_same_calls() {
    let (mut one, mut other) = (TestServer::new(), TestServer::new());
    let (client, session) = one.client("host");
    let (other_client, other_session) = other.client("host");
    assert_ne!(client, other_client);
    assert_ne!(session.0[8..], other_session.0[8..]);
}
