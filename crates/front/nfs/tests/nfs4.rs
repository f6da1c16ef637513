//! Sessions of NFSv4.1 through a connection.

use crate::support;
use std::sync::atomic::Ordering;
use support::client::Encoder;
use support::decoder::Decoder;
use support::session::Session;
use support::world::ServedWorld;

const NFS4: (u32, u32) = (100_003, 4);
const DENIED: u32 = 10_010;
const BAD_XDR: u32 = 10_036;
const BAD_SESSION: u32 = 10_052;
const SHARE_DENIED: u32 = 10_015;
const NOT_IN_SESSION: u32 = 10_071;
const MINOR_VERSION_MISMATCH: u32 = 10_021;
const GETATTR: u32 = 9;
const GETFH: u32 = 10;
const LOCK: u32 = 12;
const OPEN: u32 = 18;
const READ: u32 = 25;
const READDIR: u32 = 26;
const WRITE: u32 = 38;
/// Seconds beyond a lease.
const BEYOND_LEASE: u64 = 91;

type StateId = [u32; 4];

fn op(number: u32, fields: &[u32]) -> Encoder {
    let mut out = Encoder::default();
    out.word(number);
    for field in fields {
        out.word(*field);
    }
    out
}

fn put_root() -> Encoder {
    op(24, &[])
}

fn lookup(name: &str) -> Encoder {
    let mut out = op(15, &[]);
    out.opaque(name.as_bytes());
    out
}

/// OPEN of a name: it makes a new file, or opens an existing one.
fn open(name: &str, (access, deny): (u32, u32), is_create: bool) -> Encoder {
    let mut out = op(OPEN, &[0, access, deny, 0, 0]);
    out.opaque(b"owner");
    match is_create {
        true => out
            .word(1)
            .word(1)
            .word(2)
            .word(0)
            .word(2)
            .word(4)
            .word(0o666),
        false => out.word(0),
    };
    out.word(0).opaque(name.as_bytes());
    out
}

fn with_state(number: u32, before: &[u32], state: StateId, after: &[u32]) -> Encoder {
    op(number, &[before, &state, after].concat())
}

/// LOCK by a new owner of a write lock of ten bytes.
fn lock(open: StateId) -> Encoder {
    let mut out = with_state(LOCK, &[2, 0, 0, 0, 0, 10, 1, 0], open, &[0, 0, 0]);
    out.opaque(b"locker");
    out
}

/// A client with one session and one slot.
struct Client {
    session: Session,
    id: [u32; 4],
    sequence: u32,
}

/// The results of a request: its status, and the results.
fn compound(session: &mut Session, minor: u32, operations: &[Encoder]) -> Option<(u32, Vec<u8>)> {
    let mut arguments = Encoder::default();
    arguments
        .opaque(b"tag")
        .word(minor)
        .word(operations.len() as u32);
    for operation in operations {
        arguments.0.extend(&operation.0);
    }
    let reply = session.exchange(NFS4, 1, &arguments.0)?;
    let mut decoder = Decoder(&reply);
    let header: [u32; 4] = std::array::from_fn(|_| decoder.word());
    assert_eq!(header, [0; 4], "the call is accepted");
    let status = decoder.word();
    assert_eq!(decoder.opaque(), b"tag");
    Some((status, decoder.0.to_vec()))
}

impl Client {
    fn new(world: &ServedWorld, name: &str) -> Client {
        let mut session = Session::new(world);
        let mut exchange = op(42, &[1, 2]);
        exchange.opaque(name.as_bytes()).word(0).word(0).word(0);
        let (status, results) = compound(&mut session, 1, &[exchange]).unwrap();
        assert_eq!(status, 0);
        let mut decoder = Decoder(&results);
        let head: [u32; 3] = std::array::from_fn(|_| decoder.word());
        assert_eq!(head, [1, 42, 0]);
        let (upper, lower, sequence) = (decoder.word(), decoder.word(), decoder.word());
        let channel = [0, 1 << 20, 1 << 20, 4096, 16, 4, 0];
        let fields = [
            &[upper, lower, sequence, 0][..],
            &channel,
            &channel,
            &[0, 0],
        ]
        .concat();
        let (status, results) = compound(&mut session, 1, &[op(43, &fields)]).unwrap();
        assert_eq!(status, 0);
        let mut decoder = Decoder(&results);
        (0..3).for_each(|_| {
            decoder.word();
        });
        let id = std::array::from_fn(|_| decoder.word());
        let sequence = 0;
        let mut client = Client {
            session,
            id,
            sequence,
        };
        // RECLAIM_COMPLETE: no open is granted before it.
        assert_eq!(client.call(vec![op(58, &[0])]).0, 0);
        client
    }

    /// The request with the present sequence number again, or the first one of it.
    fn send(&mut self, operations: Vec<Encoder>) -> (u32, Vec<u8>) {
        let id = self.id;
        let fields = [&id[..], &[self.sequence, 0, 0, 1]].concat();
        let mut all = vec![op(53, &fields)];
        all.extend(operations);
        compound(&mut self.session, 1, &all).unwrap()
    }

    /// Sends a request with a new sequence number.
    fn call(&mut self, operations: Vec<Encoder>) -> (u32, Vec<u8>) {
        self.sequence += 1;
        self.send(operations)
    }

    /// As [`Client::call`]; returns the results after SEQUENCE, LOOKUP and PUTROOTFH.
    fn call_in_root(&mut self, operations: Vec<Encoder>) -> (u32, Vec<u8>) {
        let mut all = vec![put_root(), lookup("data")];
        all.extend(operations);
        let (status, results) = self.call(all);
        let skipped = 4 + 8 + 36 + 8 + 8;
        (status, results.get(skipped..).unwrap_or_default().to_vec())
    }

    fn opened(&mut self, name: &str, share: (u32, u32), is_create: bool) -> (StateId, Vec<u8>) {
        let (status, results) =
            self.call_in_root(vec![open(name, share, is_create), op(GETFH, &[])]);
        assert_eq!(status, 0);
        let mut decoder = Decoder(&results);
        assert_eq!([decoder.word(), decoder.word()], [OPEN, 0]);
        let state = std::array::from_fn(|_| decoder.word());
        // The change of the directory and the flags.
        (0..6).for_each(|_| {
            decoder.word();
        });
        let words = decoder.word();
        (0..words).for_each(|_| {
            decoder.word();
        });
        assert_eq!(decoder.word(), 0, "no delegation");
        assert_eq!([decoder.word(), decoder.word()], [GETFH, 0]);
        (state, decoder.opaque().to_vec())
    }

    /// Runs one operation on a file; returns its status and the fields of its result.
    fn on_file(&mut self, handle: &[u8], operation: Encoder) -> (u32, Vec<u8>) {
        let mut put = op(22, &[]);
        put.opaque(handle);
        let (status, results) = self.call(vec![put, operation]);
        let skipped = 4 + 8 + 36 + 8 + 8;
        (status, results.get(skipped..).unwrap_or_default().to_vec())
    }
}

const BOTH: (u32, u32) = (3, 0);

#[test]
fn open_file_is_written_and_read() {
    let world = ServedWorld::new();
    let mut client = Client::new(&world, "a");
    let (state, handle) = client.opened("f", BOTH, true);
    let mut write = with_state(WRITE, &[], state, &[0, 0, 0]);
    write.opaque(b"some data");
    let (status, written) = client.on_file(&handle, write);
    assert_eq!((status, Decoder(&written).word()), (0, 9));
    let (status, _) = client.on_file(&handle, op(5, &[0, 0, 0]));
    assert_eq!(status, 0, "COMMIT");
    let read = with_state(READ, &[], state, &[0, 5, 100]);
    let (status, read) = client.on_file(&handle, read);
    let mut decoder = Decoder(&read);
    assert_eq!(
        (status, decoder.word(), decoder.opaque()),
        (0, 1, &b"data"[..])
    );
    decoder.end();
    // TYPE and SIZE.
    let (status, attributes) = client.on_file(&handle, op(GETATTR, &[1, 0b1_0010]));
    let mut decoder = Decoder(&attributes);
    let head: [u32; 4] = std::array::from_fn(|_| decoder.word());
    assert_eq!((status, head, decoder.long()), (0, [1, 0b1_0010, 12, 1], 9));
    let close = with_state(4, &[0], state, &[]);
    assert_eq!(client.on_file(&handle, close).0, 0);
    let closed = with_state(READ, &[], state, &[0, 0, 1]);
    assert_ne!(client.on_file(&handle, closed).0, 0);
}

#[test]
fn removed_file_stays_while_it_is_open() {
    let world = ServedWorld::new();
    let (mut client, mut other) = (Client::new(&world, "a"), Client::new(&world, "b"));
    let (state, handle) = client.opened("f", BOTH, true);
    let mut write = with_state(WRITE, &[], state, &[0, 0, 2]);
    write.opaque(b"kept");
    assert_eq!(client.on_file(&handle, write).0, 0);
    let mut remove = op(28, &[]);
    remove.opaque(b"f");
    assert_eq!(other.call_in_root(vec![remove]).0, 0);
    let read = || with_state(READ, &[], state, &[0, 0, 100]);
    let (status, data) = client.on_file(&handle, read());
    assert_eq!((status, &data[8..]), (0, &b"kept"[..]));
    assert_eq!(
        client.on_file(&handle, with_state(4, &[0], state, &[])).0,
        0
    );
    let stale = client.on_file(&handle, op(GETATTR, &[1, 1 << 4])).0;
    assert_eq!(stale, 70);
}

#[test]
fn conflicting_lock_of_another_client_is_denied() {
    let world = ServedWorld::new();
    let (mut client, mut other) = (Client::new(&world, "a"), Client::new(&world, "b"));
    let (state, handle) = client.opened("f", BOTH, true);
    let (other_state, _) = other.opened("f", BOTH, false);
    let (status, locked) = client.on_file(&handle, lock(state));
    assert_eq!((status, locked.len()), (0, 16));
    let (status, denied) = other.on_file(&handle, lock(other_state));
    let mut decoder = Decoder(&denied);
    assert_eq!(status, DENIED);
    assert_eq!((decoder.long(), decoder.long(), decoder.word()), (0, 10, 2));
    decoder.long();
    assert_eq!(decoder.opaque(), b"locker");
    let mut decoder = Decoder(&locked);
    let lock_state = std::array::from_fn(|_| decoder.word());
    let unlock = with_state(14, &[2, 0], lock_state, &[0, 0, 0, 10]);
    assert_eq!(client.on_file(&handle, unlock).0, 0);
    assert_eq!(other.on_file(&handle, lock(other_state)).0, 0);
}

#[test]
fn repeated_request_gets_the_kept_reply() {
    let world = ServedWorld::new();
    let mut client = Client::new(&world, "a");
    let make = || {
        let mut make = op(6, &[2]);
        make.opaque(b"d").word(0).word(0);
        vec![put_root(), lookup("data"), make]
    };
    let first = client.call(make());
    assert_eq!(first.0, 0);
    assert_eq!(client.send(make()), first, "not run again");
    assert_eq!(client.call(make()).0, 17, "a new request runs");
    assert_eq!(world.server.counters().repeated_calls, 1);
}

#[test]
fn expired_client_yields_to_a_conflicting_open() {
    let world = ServedWorld::new();
    let (mut client, mut other) = (Client::new(&world, "a"), Client::new(&world, "b"));
    let (_, handle) = client.opened("f", (3, 2), true);
    let write = || vec![open("f", (2, 0), false)];
    assert_eq!(other.call_in_root(write()).0, SHARE_DENIED);
    world
        .lease_seconds
        .fetch_add(BEYOND_LEASE, Ordering::SeqCst);
    let mut other = Client::new(&world, "b2");
    assert_eq!(other.call_in_root(write()).0, 0);
    let (status, _) = client.on_file(&handle, op(GETFH, &[]));
    assert_eq!(status, BAD_SESSION);
}

#[test]
fn root_lists_the_exports() {
    let world = ServedWorld::new();
    let mut client = Client::new(&world, "a");
    // No cookie, no verifier, and the attribute FSID.
    let list = op(READDIR, &[0, 0, 0, 0, 1000, 1000, 1, 1 << 8]);
    let (status, results) = client.call(vec![put_root(), list]);
    assert_eq!(status, 0);
    let mut decoder = Decoder(&results[4 + 8 + 36 + 8 + 8 + 8..]);
    assert_eq!((decoder.word(), decoder.long()), (1, 3));
    assert_eq!(decoder.opaque(), b"data");
    assert_eq!(
        [decoder.word(), decoder.word(), decoder.word()],
        [1, 1 << 8, 16]
    );
    assert_ne!(decoder.long(), 0, "another file system than the root");
}

#[test]
fn requests_out_of_order_are_refused() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let (status, _) = compound(&mut session, 1, &[put_root()]).unwrap();
    assert_eq!(status, NOT_IN_SESSION);
    for minor in [0, 2] {
        let (status, results) = compound(&mut session, minor, &[put_root()]).unwrap();
        assert_eq!((status, results), (MINOR_VERSION_MISMATCH, vec![0; 4]));
    }
    assert_eq!(compound(&mut session, 1, &[]).unwrap().0, 0);
}

/// Lengths that are longer than the record, or than their limits.
#[test]
fn lying_lengths_are_malformed() {
    let world = ServedWorld::new();
    let mut client = Client::new(&world, "a");
    let bad = [
        op(GETATTR, &[4, 0, 0, 0, 0]),
        op(GETATTR, &[u32::MAX]),
        op(15, &[u32::MAX]),
        op(22, &[65]),
        op(WRITE, &[0, 0, 0, 0, 0, 0, 0, u32::MAX]),
        op(55, &[1 << 28]),
        op(9, &[]),
    ];
    for operation in bad {
        let (status, _) = client.call(vec![put_root(), operation]);
        assert_eq!(status, BAD_XDR);
    }
}

#[test]
fn fenced_file_system_gets_no_reply() {
    let world = ServedWorld::new();
    let mut client = Client::new(&world, "a");
    let (_, handle) = client.opened("f", BOTH, true);
    world.space.fence();
    let mut make = op(6, &[2]);
    make.opaque(b"d").word(0).word(0);
    let mut put = op(22, &[]);
    put.opaque(&handle);
    let operations = [put_root(), lookup("data"), make];
    client.sequence += 1;
    let fields = [&client.id[..], &[client.sequence, 0, 0, 1]].concat();
    let mut all = vec![op(53, &fields)];
    all.extend(operations);
    assert_eq!(compound(&mut client.session, 1, &all), None);
}
