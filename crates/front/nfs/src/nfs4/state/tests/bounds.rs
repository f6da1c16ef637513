//! The bounds of expired clients with state, and of the ranges of all files.

use super::*;
use limits::{
    COURTESY_CLIENTS_MAX, COURTESY_STATES_MAX, LEASE, RANGES_MAX, RANGES_PER_FILE_MAX,
    RANGES_PER_OWNER_MAX,
};

const MILLISECOND: Duration = Duration::from_millis(1);

#[test]
fn client_that_expired_first_makes_room() {
    let mut server = TestServer::new();
    let mut clients = Vec::new();
    for number in 0..=COURTESY_CLIENTS_MAX as u64 {
        let (client, _) = server.client(&format!("host-{number}"));
        server.open(client, "owner", number, 3, 0).expect("free");
        clients.push(client);
        server.pass(MILLISECOND);
    }
    server.pass(LEASE);
    assert_eq!(server.removals(), [(clients[0], RemovalReason::Limit)]);
    let counts = server.state.counts();
    assert_eq!(counts.courtesy_clients, COURTESY_CLIENTS_MAX);
}

#[test]
fn expired_clients_keep_a_bounded_number_of_opens() {
    let mut server = TestServer::new();
    let (small, _) = server.client("small");
    server.open(small, "owner", 0, 3, 0).expect("free");
    server.pass(SECOND);
    let (large, _) = server.client("large");
    for number in 0..COURTESY_STATES_MAX as u64 {
        server.open(large, "owner", number, 3, 0).expect("free");
    }
    server.pass(LEASE);
    assert_eq!(server.removals(), [(small, RemovalReason::Limit)]);
    assert_eq!(server.state.counts().opens, COURTESY_STATES_MAX);
}

#[test]
fn ranges_of_all_files_are_bounded() {
    let mut server = TestServer::new();
    let (client, _) = server.client("host");
    let mut is_full = false;
    let mut last = None;
    for number in 0..(RANGES_MAX / RANGES_PER_FILE_MAX + 1) as u64 {
        let open = server.open(client, "owner", number, 3, 0).expect("free");
        for owner in 0..RANGES_PER_FILE_MAX / RANGES_PER_OWNER_MAX {
            let owner = owner.to_string();
            for byte in 0..RANGES_PER_OWNER_MAX as u64 {
                let owner = owner.as_bytes();
                let locker = Locker::New { open, owner };
                let range = (2 * byte, 2 * byte);
                let locked = server.lock(client, number, locker, LockKind::Read, range);
                is_full |= locked == Err(StateError::Delay.into());
                assert!(is_full || locked.is_ok());
            }
        }
        last = Some((open, number));
    }
    assert!(is_full);
    assert_eq!(server.state.counts().ranges, RANGES_MAX);
    let (open, number) = last.expect("an open");
    let closed = server.state.close(client, open, file(number));
    assert!(closed.is_ok());
    assert!(server.state.counts().ranges < RANGES_MAX);
}

#[test]
fn denials_are_counted_with_their_opens() {
    let mut server = TestServer::new();
    let (client, _) = server.client("host");
    assert!(!server.state.has_denials() && !server.state.has_opens());
    let first = server.open(client, "owner", 1, 3, 0).expect("free");
    assert!(!server.state.has_denials() && server.state.has_opens());
    let second = server.open(client, "owner", 1, 1, 2).expect("own");
    assert!(server.state.has_denials());
    let bits = |bits| ShareBits::new(bits).expect("bits");
    let downgraded = server
        .state
        .open_downgrade(client, second, file(1), bits(3), bits(0));
    assert!(!server.state.has_denials());
    let closed = server
        .state
        .close(client, downgraded.expect("a mode"), file(1));
    assert!(closed.is_ok() && !server.state.has_opens());
    assert_eq!(first.other, second.other);
    server.open(client, "owner", 1, 1, 3).expect("free");
    server.pass(LEASE);
    server.pass(limits::COURTESY);
    assert!(!server.state.has_denials() && !server.state.has_opens());
}
