use super::*;

/// Every pair of opens of two owners.
#[test]
fn share_modes_conflict_as_their_bits_overlap() {
    for bits in 0..256_u32 {
        let [a, b, c, d] = [bits & 3, bits >> 2 & 3, bits >> 4 & 3, bits >> 6];
        if a == 0 || c == 0 {
            continue;
        }
        let mut server = TestServer::new();
        let (first, _) = server.client("first");
        let (second, _) = server.client("second");
        server.open(first, "owner", 1, a, b).expect("alone");
        let is_free = a & d == 0 && b & c == 0;
        for client in [first, second] {
            let opened = server.open(client, "other", 1, c, d);
            assert_eq!(opened.is_ok(), is_free, "{a} {b} {c} {d}");
            match opened {
                Ok(stateid) => drop(server.state.close(client, stateid, file(1))),
                Err(error) => assert_eq!(error, StateError::ShareDenied),
            }
        }
        server.open(second, "other", 2, c, d).expect("another file");
        // The owner itself is never in its own way.
        server.open(first, "owner", 1, c, d).expect("an upgrade");
    }
}

#[test]
fn stateids_are_checked() {
    let mut server = TestServer::new();
    let (client, _) = server.client("host");
    let (other, _) = server.client("other");
    let first = server.open(client, "owner", 1, 1, 0).expect("free");
    let second = server.open(client, "owner", 1, 2, 0).expect("own");
    assert_eq!((first.seqid, second.seqid), (1, 2));
    assert_eq!(first.other, second.other);
    let newest = StateId { seqid: 0, ..second };
    let future = StateId { seqid: 3, ..second };
    let mut stale = second;
    stale.other[3] ^= 4;
    let mut unknown = second;
    unknown.other[11] ^= 64;
    let bad = Err(StateError::BadStateId);
    let mut check = |client, stateid, number, expected: Result<(), StateError>| {
        let checked = server.io(client, stateid, number, IoAccess::Write);
        assert_eq!(checked, expected, "{stateid:?}");
        if number == 1 && expected.is_err() {
            assert_eq!(server.state.test_stateid(client, stateid), expected);
            let closed = server.state.close(client, stateid, file(number));
            assert_eq!(closed.map(|_| ()), expected, "{stateid:?}");
        }
    };
    check(client, second, 1, Ok(()));
    check(client, newest, 1, Ok(()));
    check(client, first, 1, Err(StateError::OldStateId));
    check(client, future, 1, bad);
    check(client, stale, 1, Err(StateError::StaleStateId));
    check(client, unknown, 1, bad);
    check(other, second, 1, bad);
    check(client, second, 2, bad);
    check(client, StateId::CURRENT, 1, bad);
    check(client, StateId::INVALID, 1, bad);
    let held = Err(StateError::LocksHeld);
    assert_eq!(server.state.free_stateid(client, second), held);
    let closed = server.state.close(client, newest, file(1));
    assert_eq!(closed, Ok(StateId::INVALID));
    assert_eq!(server.io(client, second, 1, IoAccess::Read), bad);
}

#[test]
fn downgrade_takes_only_unions_of_opens() {
    let mut server = TestServer::new();
    let (client, _) = server.client("host");
    let bits = |it| ShareBits::new(it).expect("bits");
    let mut downgrade = |opens: &[(u32, u32)], access, deny| {
        let mut last = None;
        for (access, deny) in opens {
            last = server.open(client, "owner", 1, *access, *deny).ok();
        }
        let open = last.expect("an open");
        let reduced = server
            .state
            .open_downgrade(client, open, file(1), bits(access), bits(deny));
        let newest = StateId { seqid: 0, ..open };
        let write = server.io(client, newest, 1, IoAccess::Write);
        if reduced.is_ok() {
            assert_eq!(write.is_ok(), access & 2 != 0);
        }
        server.state.close(client, newest, file(1)).expect("open");
        reduced.map(|it| it.seqid - open.seqid)
    };
    let refused = Err(StateError::Inval);
    assert_eq!(downgrade(&[(3, 0)], 1, 0), refused);
    assert_eq!(downgrade(&[(3, 0)], 3, 0), Ok(1));
    assert_eq!(downgrade(&[(1, 0), (2, 0)], 1, 0), Ok(1));
    assert_eq!(downgrade(&[(1, 0), (3, 2)], 1, 0), Ok(1));
    assert_eq!(downgrade(&[(1, 0), (3, 2)], 1, 2), refused);
    assert_eq!(downgrade(&[(1, 1), (3, 2)], 3, 2), Ok(1));
    assert_eq!(downgrade(&[(1, 1), (2, 2)], 3, 3), Ok(1));
    assert_eq!(downgrade(&[(1, 0)], 0, 0), refused);
    assert_eq!(downgrade(&[(1, 0)], 3, 0), refused);
}

#[test]
fn denied_modes_bind_access_without_opens() {
    let mut server = TestServer::new();
    let (client, _) = server.client("host");
    let mut check = |deny, access, anonymous, bypass| {
        let open = server.open(client, "owner", 1, 3, deny).expect("free");
        let now = server.now;
        let v3 = server.state.check_io_without_state(file(1), access, now);
        assert_eq!(v3, anonymous, "{deny}");
        assert_eq!(server.io(client, StateId::ANONYMOUS, 1, access), anonymous);
        assert_eq!(server.io(client, StateId::READ_BYPASS, 1, access), bypass);
        server.state.close(client, open, file(1)).expect("open");
    };
    use IoAccess::{Read, Write};
    let locked = Err(StateError::Locked);
    check(0, Read, Ok(()), Ok(()));
    check(0, Write, Ok(()), Ok(()));
    check(1, Read, locked, Ok(()));
    check(1, Write, Ok(()), Ok(()));
    check(2, Read, Ok(()), Ok(()));
    check(2, Write, locked, locked);
    check(3, Read, locked, Ok(()));
}

#[test]
fn access_follows_the_open() {
    let mut server = TestServer::new();
    let (client, _) = server.client("host");
    let reader = server.open(client, "reader", 1, 1, 0).expect("free");
    let write = server.io(client, reader, 1, IoAccess::Write);
    assert_eq!(write, Err(StateError::OpenMode));
    let writer = server.open(client, "writer", 1, 2, 0).expect("free");
    assert_eq!(server.io(client, writer, 1, IoAccess::Read), Ok(()));
    server.state.close(client, reader, file(1)).expect("open");
    server.open(client, "reader", 1, 2, 1).expect("free");
    let read = server.io(client, writer, 1, IoAccess::Read);
    assert_eq!(read, Err(StateError::Locked));
    let other = server.open(client, "alone", 2, 2, 1).expect("free");
    assert_eq!(server.io(client, other, 2, IoAccess::Read), Ok(()));
}

#[test]
fn first_and_last_open_of_a_file_are_told() {
    let mut server = TestServer::new();
    let (client, _) = server.client("host");
    let mut open = |owner| {
        let grant = server.open_with(client, owner, 1, (1, 0), false);
        grant.expect("free")
    };
    let (first, again, second) = (open("a"), open("a"), open("b"));
    assert!(first.is_first_of_file);
    assert!(!again.is_first_of_file && !second.is_first_of_file);
    let is_unused = |server: &mut TestServer| {
        server.store();
        server.events.contains(&StateEvent::FileUnused(file(1)))
    };
    server
        .state
        .close(client, again.stateid, file(1))
        .expect("open");
    assert!(!is_unused(&mut server));
    server
        .state
        .close(client, second.stateid, file(1))
        .expect("open");
    assert!(is_unused(&mut server));
}

#[test]
fn current_stateid_follows_the_compound() {
    let stateid = StateId {
        seqid: 3,
        other: [9; 12],
    };
    let mut ids = CompoundStateIds::default();
    assert_eq!(ids.resolve(StateId::CURRENT), None);
    assert_eq!(ids.resolve(stateid), Some(stateid));
    assert_eq!(ids.resolve(StateId::ANONYMOUS), Some(StateId::ANONYMOUS));
    ids.set(stateid);
    ids.save();
    ids.clear();
    assert_eq!(ids.resolve(StateId::CURRENT), None);
    ids.restore();
    assert_eq!(ids.resolve(StateId::CURRENT), Some(stateid));
}
