//! Requests of NFSv4.1 at the limits of state and of replies.

use crate::support;
use support::client::Encoder;
use support::compounds::{Client4, StateId, close, op, put};
use support::decoder::Decoder;
use support::session::Session;
use support::world::ServedWorld;

const DELAY: u32 = 10_008;
const NO_ENTRY: u32 = 2;
const REPLY_TOO_BIG: u32 = 10_066;
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

/// READ from an offset with the anonymous stateid.
fn read_at(offset: usize, count: usize) -> Encoder {
    op(25, &[0, 0, 0, 0, 0, offset as u32, count as u32])
}

/// A file of this length in an export, and bytes that follow from their places.
fn written(world: &ServedWorld, len: usize) -> (Vec<u8>, Vec<u8>) {
    let mut session = Session::new(world);
    let root = session.root();
    let file = session.create(&root, "f", 0o644).unwrap().handle;
    let data: Vec<u8> = (0..len).map(|at| (at / 4 + at) as u8).collect();
    session.write(&file, 0, &data).unwrap();
    (file, data)
}

#[test]
fn read_beyond_the_reply_is_a_short_one() {
    const REPLY_BYTES: usize = 4096;
    /// Bytes of a reply before the results after SEQUENCE.
    const HEAD_BYTES: usize = 32 + 48;
    let world = ServedWorld::new();
    let (file, data) = written(&world, 10_000);
    let session = Session::new(&world);
    let mut client = Client4::with_replies(session, "client", REPLY_BYTES as u32);
    let mut whole: Vec<u8> = Vec::new();
    let mut is_end = false;
    while !is_end {
        let asked = read_at(whole.len(), data.len());
        let (status, results) = client.call(vec![put(&file), asked]);
        assert_eq!(status, 0);
        assert!(HEAD_BYTES + results.len() <= REPLY_BYTES);
        let mut decoder = Decoder(&results[16..]);
        is_end = decoder.word() == 1;
        let part = decoder.opaque();
        assert!(is_end || part.len() > REPLY_BYTES / 2, "{}", part.len());
        whole.extend(part);
    }
    assert_eq!(whole, data);
}

#[test]
fn read_without_room_for_a_byte_is_refused() {
    let world = ServedWorld::new();
    let (file, data) = written(&world, 100);
    // The smallest session: its replies have room for the results of PUTFH and 8 bytes of data.
    let mut client = Client4::with_replies(Session::new(&world), "client", 128);
    let mut check = |handles: usize, wanted: Result<&[u8], u32>| {
        let mut operations: Vec<_> = (0..handles).map(|_| put(&file)).collect();
        operations.push(read_at(0, data.len()));
        let read = client.last(operations);
        let bytes = read.map(|fields| Decoder(&fields[4..]).opaque().to_vec());
        assert_eq!(bytes, wanted.map(<[u8]>::to_vec), "{handles}");
    };
    check(2, Ok(&data[..8]));
    check(3, Err(REPLY_TOO_BIG));
}

#[test]
fn listing_beyond_the_reply_returns_what_fits() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let names: Vec<String> = (0..60).map(|it| format!("name-{it:020}")).collect();
    for name in &names {
        session.create(&root, name, 0o644).unwrap();
    }
    let mut client = Client4::with_replies(session, "client", 1024);
    let mut list = op(26, &[0, 0, 0, 0, 1 << 16, 1 << 16]);
    list.word(0);
    let fields = client.on(&root, list).unwrap();
    let mut decoder = Decoder(&fields[8..]);
    let mut count = 0;
    while decoder.word() == 1 {
        decoder.long();
        let name = decoder.opaque().to_vec();
        assert!(names.iter().any(|it| it.as_bytes() == name));
        assert_eq!((decoder.word(), decoder.word()), (0, 0));
        count += 1;
    }
    assert!((1..60).contains(&count) && decoder.word() == 0, "{count}");
}
