//! Requests of NFSv4.1 to a stalled file system. Beyond the share of a connection, the server answers requests of a session with
//! NFS4ERR_DELAY. No reply refuses other requests, so they wait in the connection.

use crate::support;
use pagemesh_nfs::ExportFigures;
use pagemesh_nfs::limits::{EXPORT_WORKERS_MAX, Limits};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};
use support::client::Encoder;
use support::compounds::{Client4, get_attributes, lookup, put_root};
use support::decoder::Decoder;
use support::memory::MemorySpace;
use support::session::Session;
use support::world::ServedWorld;

const NFS4: (u32, u32) = (100_003, 4);
const DELAY: u32 = 10_008;
const PUT_HANDLE: u32 = 22;
const READ: u32 = 25;
const EXCHANGE_ID: u32 = 42;
const CREATE_SESSION: u32 = 43;
const SEQUENCE: u32 = 53;
const RECLAIM_COMPLETE: u32 = 58;
/// Slots of the session.
const SLOTS: u32 = 16;
/// Bytes of a READ: seven fit into the share of a connection, which is 8 MiB.
const READ_BYTES: u32 = 1_000_000;
const READS_IN_SHARE: usize = 7;

fn operation(number: u32, fields: &[u32]) -> Encoder {
    let mut out = Encoder::default();
    out.word(number);
    fields.iter().for_each(|field| {
        out.word(*field);
    });
    out
}

fn arguments(operations: &[Encoder]) -> Vec<u8> {
    let mut out = Encoder::default();
    out.opaque(b"").word(1).word(operations.len() as u32);
    for operation in operations {
        out.0.extend(&operation.0);
    }
    out.0
}

/// The results of a request that succeeds, after its status and its tag.
fn request(session: &mut Session, operations: &[Encoder]) -> Vec<u8> {
    let reply = session.exchange(NFS4, 1, &arguments(operations));
    let reply = reply.expect("a reply");
    let mut decoder = Decoder(&reply);
    let header: [u32; 6] = std::array::from_fn(|_| decoder.word());
    assert_eq!(header, [0; 6], "accepted, done, and without a tag");
    decoder.0.to_vec()
}

/// A session of NFSv4.1 on a connection.
fn open_session(session: &mut Session, client: &str) -> [u32; 4] {
    let mut exchange = operation(EXCHANGE_ID, &[1, 2]);
    exchange.opaque(client.as_bytes());
    exchange.word(0).word(0).word(0);
    let results = request(session, &[exchange]);
    let mut decoder = Decoder(&results);
    let [_, _, _, upper, lower, sequence]: [u32; 6] = std::array::from_fn(|_| decoder.word());
    let channel = [0, 1 << 20, 1 << 20, 4096, 16, SLOTS, 0];
    let fields = [
        &[upper, lower, sequence, 0][..],
        &channel,
        &channel,
        &[0, 0],
    ]
    .concat();
    let results = request(session, &[operation(CREATE_SESSION, &fields)]);
    let mut decoder = Decoder(&results);
    let [_, _, _, id @ ..]: [u32; 7] = std::array::from_fn(|_| decoder.word());
    let complete = operation(RECLAIM_COMPLETE, &[0]);
    request(session, &[sequence_of(id, 0), complete]);
    id
}

/// SEQUENCE of the next request of a slot.
fn sequence_of(id: [u32; 4], slot: u32) -> Encoder {
    operation(SEQUENCE, &[&id[..], &[1, slot, SLOTS - 1, 0]].concat())
}

/// The bytes of a READ on the stream.
fn read_of(session: &mut Session, id: [u32; 4], slot: u32, file: &[u8]) -> Vec<u8> {
    let mut put = operation(PUT_HANDLE, &[]);
    put.opaque(file);
    // The anonymous stateid, and the offset.
    let read = operation(READ, &[0, 0, 0, 0, 0, 0, READ_BYTES]);
    let all = arguments(&[sequence_of(id, slot), put, read]);
    session.framed(NFS4, 1, &all)
}

#[track_caller]
fn wait_for(world: &ServedWorld, is_met: impl Fn(&ExportFigures) -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let exports = world.server.figures().exports;
        let named = exports
            .iter()
            .find(|it| it.export.as_deref() == Some("other"));
        let now = named.expect("an export");
        if is_met(now) {
            return;
        }
        assert!(Instant::now() < until, "{now:?}");
        std::thread::yield_now();
    }
}

/// A connection that fills its share of the stalled file system "other", sends `last`, and continues with `check` during the stall. Returns the
/// connection, without the replies to the READs.
fn fill_share(
    world: &ServedWorld,
    other: &MemorySpace,
    last: impl FnOnce(&mut Session, [u32; 4], &[u8]) -> Vec<u8>,
    mut check: impl FnMut(&mut Session),
) -> Session {
    let mut session = Session::new(world);
    let root = session.mount("/other").expect("mounted");
    let made = session.create(&root, "file", 0o644).expect("made");
    let data = vec![7; READ_BYTES as usize];
    session.write(&made.handle, 0, &data).expect("written");
    let id = open_session(&mut session, "client");
    let reads = 1..=READS_IN_SHARE as u32;
    let reads: Vec<_> = reads
        .map(|slot| read_of(&mut session, id, slot, &made.handle))
        .collect();
    let last = last(&mut session, id, &made.handle);
    other.while_stalled(|_| {
        session.stream.write_all(&reads.concat()).expect("sent");
        wait_for(world, |now| {
            now.is_stalled && now.running + now.queued == READS_IN_SHARE
        });
        session.stream.write_all(&last).expect("sent");
        check(&mut session);
    });
    session
}

/// The bytes of a READ that no reply can refuse.
fn without_session(session: &mut Session, _: [u32; 4], file: &[u8]) -> Vec<u8> {
    let mut put = operation(PUT_HANDLE, &[]);
    put.opaque(file);
    let read = operation(READ, &[0, 0, 0, 0, 0, 0, READ_BYTES]);
    session.framed(NFS4, 1, &arguments(&[put, read]))
}

#[test]
fn call_beyond_a_full_share_is_read_after_the_stall() {
    let limits = Limits {
        // No sweep helps the connection.
        sweep: Duration::from_secs(3600),
        ..Limits::default()
    };
    let (world, other) = ServedWorld::pair(limits);
    let mut session = fill_share(&world, &other.memory, without_session, |_| {
        wait_for(&world, |now| now.waiting_connections == 1);
    });
    let mut long_replies = 0;
    for _ in 0..=READS_IN_SHARE {
        let reply = session.receive().expect("a reply");
        long_replies += usize::from(reply.len() > READ_BYTES as usize);
    }
    assert_eq!(long_replies, READS_IN_SHARE);
}

/// A connection that sends a part of a call, until the server ends it.
fn wait_for_record_limit(world: &ServedWorld) {
    let address = world.server.local_addrs()[0];
    let mut partial = TcpStream::connect(address).expect("connected");
    partial.write_all(&[0x80, 0, 0]).expect("sent");
    let mut rest = Vec::new();
    partial.read_to_end(&mut rest).expect("the end");
}

#[test]
fn connection_that_looks_for_room_again_waits_once() {
    let limits = Limits {
        // Many sweeps, at each of which the connection looks for room.
        sweep: Duration::from_millis(1),
        record: Duration::from_millis(200),
        ..Limits::default()
    };
    let (world, other) = ServedWorld::pair(limits);
    let mut session = fill_share(&world, &other.memory, without_session, |_| {
        wait_for(&world, |now| now.waiting_connections == 1);
        wait_for_record_limit(&world);
        let exports = world.server.figures().exports.into_iter();
        let waiting = exports.map(|it| it.waiting_connections).sum::<usize>();
        assert_eq!(waiting, 1);
    });
    for _ in 0..=READS_IN_SHARE {
        assert!(session.receive().is_some());
    }
}

/// The descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("descriptors")
        .count()
}

#[test]
fn connection_that_its_client_closes_in_a_stall_is_closed() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let mut session = fill_share(&world, &other.memory, without_session, |session| {
        wait_for(&world, |now| now.waiting_connections == 1);
        let before = descriptors();
        session.stream.shutdown(Shutdown::Write).expect("shut down");
        world.wait_until("the end", |now| now.connections == 0);
        // The calls of the connection still run.
        world.wait_until("its descriptor", |_| descriptors() < before);
    });
    assert_eq!(session.receive(), None);
    world.wait_until("the end of its calls", |_| {
        let exports = world.server.figures().exports;
        exports.iter().all(|it| it.running + it.queued == 0)
    });
}

#[test]
fn session_with_a_full_share_goes_on_in_a_stall() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let read = |session: &mut Session, id, file: &[u8]| read_of(session, id, SLOTS - 1, file);
    let mut session = fill_share(&world, &other.memory, read, |session| {
        let reply = session.receive().expect("a reply in the stall");
        let mut decoder = Decoder(&reply);
        let [_xid, header @ ..]: [u32; 6] = std::array::from_fn(|_| decoder.word());
        assert_eq!(header, [1, 0, 0, 0, 0], "accepted");
        let fields: [u32; 5] = std::array::from_fn(|_| decoder.word());
        assert_eq!(fields, [DELAY, 0, 1, SEQUENCE, DELAY]);
        // The connection is read on for the other file system.
        session.mount("/data").expect("mounted");
    });
    for _ in 0..READS_IN_SHARE {
        let reply = session.receive().expect("a reply");
        assert!(reply.len() > READ_BYTES as usize, "{} bytes", reply.len());
    }
}

/// A READ of the file of "other", by its path from the root of all exports on.
fn read_by_path(session: &mut Session, id: [u32; 4], slot: u32) -> Vec<u8> {
    let read = operation(READ, &[0, 0, 0, 0, 0, 0, 4096]);
    let path = [put_root(), lookup("other"), lookup("file"), read];
    let all: Vec<_> = [sequence_of(id, slot)].into_iter().chain(path).collect();
    session.framed(NFS4, 1, &arguments(&all))
}

#[test]
fn paths_into_a_stalled_file_system_leave_others_mountable() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let mut session = Session::new(&world);
    let root = session.mount("/other").expect("mounted");
    let made = session.create(&root, "file", 0o644).expect("made");
    session.write(&made.handle, 0, &[7; 4096]).expect("written");
    let mut stuck: Vec<_> = (0..3).map(|_| Session::new(&world)).collect();
    let mut calls = 0;
    other.memory.while_stalled(|_| {
        for (number, session) in stuck.iter_mut().enumerate() {
            let id = open_session(session, &format!("client {number}"));
            // RECLAIM_COMPLETE has used slot 0.
            for slot in 1..SLOTS {
                let call = read_by_path(session, id, slot);
                session.stream.write_all(&call).expect("sent");
                calls += 1;
            }
        }
        assert!(calls > EXPORT_WORKERS_MAX);
        world.wait_until("all calls", |_| {
            let exports = world.server.figures().exports;
            let sum = |of: fn(&ExportFigures) -> usize| exports.iter().map(of).sum::<usize>();
            let running = sum(|it| it.running);
            running >= EXPORT_WORKERS_MAX && running + sum(|it| it.queued) == calls
        });
        // A mount: the root, its attributes, and the way to an export.
        let mut client = Client4::new(Session::new(&world), "another");
        assert_eq!(client.call(vec![put_root(), get_attributes(&[1])]).0, 0);
        let data = client.walk(&["data"]).expect("a root");
        assert!(client.attributes(&data, &[1]).is_ok());
    });
    for session in &mut stuck {
        for _ in 1..SLOTS {
            assert!(session.receive().is_some());
        }
    }
}
