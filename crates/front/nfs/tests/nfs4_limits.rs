//! Requests of NFSv4.1 at the limits of state and of replies.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use support::client::Encoder;
use support::compounds::{Client4, StateId, close, op, put};
use support::session::Session;
use support::world::ServedWorld;

const DELAY: u32 = 10_008;
const NO_ENTRY: u32 = 2;
const READ_AND_WRITE: (u32, u32) = (3, 0);
/// The mode of a new file: the number of the attribute, and its value.
const MODE: (&[u32], &[u8]) = (&[33], &[0, 0, 1, 0xa4]);
/// Opens of one client.
const OPENS_MAX: usize = pagemesh_nfs::nfs4::state::limits::OPENS_PER_CLIENT_MAX;
/// Opens of one request, which has 64 operations at most.
const OPENS_AT_ONCE: usize = 25;

/// OPEN of the current file by an owner.
fn open_by(owner: usize) -> Encoder {
    let mut out = op(18, &[0, READ_AND_WRITE.0, READ_AND_WRITE.1, 0, 0]);
    out.opaque(&owner.to_be_bytes()).word(0).word(4);
    out
}

/// Opens a file by new owners until the client has as many opens as it may have.
fn open_all(client: &mut Client4, file: &[u8], present: usize) {
    let owners: Vec<usize> = (present..OPENS_MAX).collect();
    for owners in owners.chunks(OPENS_AT_ONCE) {
        let opens = owners.iter().map(|it| open_by(*it));
        let operations = std::iter::once(put(file)).chain(opens);
        assert_eq!(client.call(operations.collect()).0, 0);
    }
}

#[test]
fn open_beyond_the_limits_makes_no_file() {
    let world = ServedWorld::new();
    let mut client = Client4::new(Session::new(&world), "client");
    let mut other = Session::new(&world);
    let root = other.root();
    let state: StateId = client.open(&root, "f", READ_AND_WRITE, Some(MODE)).unwrap();
    let file = client.lookup(&root, "f").unwrap();
    open_all(&mut client, &file, 1);
    let refused = client.open(&root, "g", READ_AND_WRITE, Some(MODE));
    assert_eq!(refused, Err(DELAY));
    assert_eq!(client.lookup(&root, "g"), Err(NO_ENTRY));
    client.on(&file, close(state)).unwrap();
    client.open(&root, "g", READ_AND_WRITE, Some(MODE)).unwrap();
    client.lookup(&root, "g").unwrap();
}
