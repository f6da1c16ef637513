use super::*;
use LockKind::{Read, Write};

const ALL: (u64, u64) = (0, u64::MAX);

struct Opened {
    server: TestServer,
    clients: [ClientId; 2],
    opens: [StateId; 2],
}

/// Two clients with the same file open for both accesses.
fn opened() -> Opened {
    let mut server = TestServer::new();
    let clients = ["first", "second"].map(|it| server.client(it).0);
    let opens = clients.map(|it| server.open(it, "owner", 1, 3, 0).expect("free"));
    Opened {
        server,
        clients,
        opens,
    }
}

impl Opened {
    fn lock_new(
        &mut self,
        index: usize,
        owner: &str,
        kind: LockKind,
        range: (u64, u64),
    ) -> Result<StateId, LockError> {
        let locker = Locker::New {
            open: self.opens[index],
            owner: owner.as_bytes(),
        };
        let client = self.clients[index];
        self.server.lock(client, 1, locker, kind, range)
    }

    fn unlock(&mut self, index: usize, lock: StateId, range: (u64, u64)) -> StateId {
        let range = LockRange::new(range.0, range.1).expect("a range");
        let unlocked = self
            .server
            .state
            .unlock(self.clients[index], lock, file(1), range);
        unlocked.expect("locked before")
    }
}

#[test]
fn conflicting_lock_is_denied_with_its_owner() {
    let mut it = opened();
    let lock = it.lock_new(0, "p1", Write, (10, 19)).expect("free");
    let expected = LockError::Denied(LockDenied {
        range: LockRange::new(10, 19).expect("a range"),
        kind: Write,
        client: it.clients[0],
        owner: b"p1"[..].into(),
    });
    assert_eq!(it.lock_new(1, "p1", Read, ALL), Err(expected.clone()));
    assert_eq!(it.lock_new(0, "p2", Read, ALL), Err(expected.clone()));
    assert_eq!(it.server.state.counts().lock_states, 1);
    let (now, range) = (it.server.now, LockRange::new(15, 15).expect("a range"));
    let [first, second] = it.clients;
    let mut test = |client, owner: &[u8]| {
        let state = &mut it.server.state;
        state.test_lock(client, file(1), owner, (range, Read), now)
    };
    assert_eq!(test(second, b"p1"), Err(expected));
    assert_eq!(test(first, b"p1"), Ok(()));
    it.unlock(0, lock, (10, 18));
    it.lock_new(1, "p1", Read, (0, 18)).expect("unlocked");
}

#[test]
fn lock_stateid_counts_changes() {
    let mut it = opened();
    let first = it.lock_new(0, "p1", Read, (0, 9)).expect("free");
    let again = it.lock_new(0, "p1", Write, (20, 29)).expect("own");
    assert_eq!((first.seqid, again.seqid), (1, 2));
    assert_eq!(first.other, again.other);
    let client = it.clients[0];
    let existing = Locker::Existing(first);
    let refused = it.server.lock(client, 1, existing, Read, ALL);
    assert_eq!(refused, Err(StateError::OldStateId.into()));
    let existing = Locker::Existing(again);
    let third = it.server.lock(client, 1, existing, Read, ALL).expect("own");
    assert_eq!(third.seqid, 3);
    assert_eq!(it.server.state.counts().ranges, 1);
    let held = Err(StateError::LocksHeld);
    assert_eq!(it.server.state.free_stateid(client, third), held);
    assert_eq!(it.server.io(client, third, 1, IoAccess::Write), Ok(()));
    let last = it.unlock(0, third, ALL);
    assert_eq!(last.seqid, 4);
    assert_eq!(it.server.state.test_stateid(client, last), Ok(()));
    assert_eq!(it.server.state.free_stateid(client, last), Ok(()));
    let bad = Err(StateError::BadStateId);
    assert_eq!(it.server.state.test_stateid(client, last), bad);
    assert_eq!(it.server.state.counts().lock_states, 0);
}

#[test]
fn lock_needs_the_access_of_its_kind() {
    let mut it = opened();
    let client = it.clients[0];
    let mut check = |owner: &str, access, kind, is_allowed: bool| {
        let open = it.server.open(client, owner, 2, access, 0).expect("free");
        let owner = owner.as_bytes();
        let locked = it
            .server
            .lock(client, 2, Locker::New { open, owner }, kind, (0, 0));
        match locked {
            Err(LockError::State(StateError::OpenMode)) => assert!(!is_allowed),
            other => assert!(is_allowed && other.is_ok()),
        }
        let newest = StateId { seqid: 0, ..open };
        it.server
            .state
            .close(client, newest, file(2))
            .expect("open");
    };
    check("a", 1, Read, true);
    check("b", 1, Write, false);
    check("c", 2, Read, false);
    check("d", 2, Write, true);
    check("e", 3, Write, true);
}

#[test]
fn close_unlocks_ranges_of_its_open() {
    let mut it = opened();
    let client = it.clients[0];
    it.lock_new(0, "p1", Write, ALL).expect("free");
    it.server
        .state
        .close(client, it.opens[0], file(1))
        .expect("open");
    it.lock_new(1, "p1", Write, ALL).expect("unlocked");
    let counts = it.server.state.counts();
    assert_eq!((counts.lock_states, counts.ranges, counts.opens), (1, 1, 1));
}

#[test]
fn lock_by_two_opens_lasts_as_long_as_either() {
    let mut it = opened();
    let client = it.clients[0];
    let other = it.server.open(client, "other", 1, 1, 0).expect("free");
    it.lock_new(0, "p1", Write, (0, 0)).expect("free");
    let locker = Locker::New {
        open: other,
        owner: b"p1",
    };
    let lock = it
        .server
        .lock(client, 1, locker, Read, (9, 9))
        .expect("own");
    it.server
        .state
        .close(client, it.opens[0], file(1))
        .expect("open");
    assert_eq!(it.server.state.counts().ranges, 2);
    // The open for READ is left.
    let write = it.server.io(client, lock, 1, IoAccess::Write);
    assert_eq!(write, Err(StateError::OpenMode));
    it.server.state.close(client, other, file(1)).expect("open");
    assert_eq!(it.server.state.counts().lock_states, 0);
    it.lock_new(1, "p1", Write, ALL).expect("unlocked");
}

#[test]
fn ranges_of_an_owner_are_bounded() {
    let mut it = opened();
    let mut lock = it.lock_new(0, "p1", Write, (0, 0)).expect("free");
    let client = it.clients[0];
    let mut granted = 1;
    let refused = loop {
        let range = (2 * granted, 2 * granted);
        let existing = Locker::Existing(lock);
        match it.server.lock(client, 1, existing, Write, range) {
            Ok(changed) => lock = changed,
            Err(error) => break error,
        }
        granted += 1;
    };
    assert_eq!(refused, StateError::Delay.into());
    assert_eq!(granted, limits::RANGES_PER_OWNER_MAX as u64);
    lock = it.unlock(0, lock, ALL);
    assert_eq!(it.server.state.free_stateid(client, lock), Ok(()));
}
