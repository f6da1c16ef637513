//! Connections: their bounds, their ends, and clients that break the protocol.

use crate::support;
use pagemesh_nfs::handle::HandleBytes;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::files::ReadArguments;
use pagemesh_nfs::{Server, ServerError, StopReport};
use rustix::net::sockopt::set_socket_recv_buffer_size;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;
use support::session::{MOUNT, NFS, Session};
use support::world::ServedWorld;

/// The limits with another time, which a test waits for.
const SHORT: Duration = Duration::from_millis(20);

#[track_caller]
fn assert_closed(session: &mut Session) {
    assert_eq!(session.receive(), None, "the connection is open");
}

/// Connections that send a part of a mark, if any.
fn half_open(world: &ServedWorld, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let address = world.server.local_addrs()[0];
    let connect = |_| {
        let mut stream = TcpStream::connect(address).expect("connected");
        stream.write_all(bytes).expect("sent");
        stream
    };
    (0..count).map(connect).collect()
}

#[test]
fn oldest_half_open_connection_makes_room() {
    let limits = Limits {
        half_open_max: 3,
        ..Limits::default()
    };
    let world = ServedWorld::with_limits(limits);
    let mut served = Session::new(&world);
    let root = served.root();
    let mut held = half_open(&world, 5, &[]);
    world.wait_until("the end of two", |now| {
        now.refused == 2 && now.connections == 4
    });
    let mut rest = Vec::new();
    for closed in &mut held[..2] {
        closed.read_to_end(&mut rest).expect("the end");
    }
    assert!(served.attributes(&root).is_ok());
    assert!(Session::new(&world).mount("/data").is_ok());
}

#[test]
fn connection_beyond_the_limit_ends_at_its_first_call() {
    let limits = Limits {
        connections_max: 3,
        address_connections_max: 2,
        ..Limits::default()
    };
    let world = ServedWorld::with_limits(limits);
    let mut served: Vec<_> = (0..2).map(|_| Session::new(&world)).collect();
    let root = served[0].root();
    served[1].root();
    let mut refused = Session::new(&world);
    let call = refused.bytes_of(&Nfs3Call::Null);
    refused.stream.write_all(&call).expect("sent");
    assert_closed(&mut refused);
    world.wait_until("the refusal", |now| {
        now.refused == 1 && now.connections == 2
    });
    served.pop();
    world.wait_until("the end", |now| now.connections == 1);
    assert!(Session::new(&world).mount("/data").is_ok());
    assert!(served[0].attributes(&root).is_ok());
}

#[test]
fn garbage_closes_only_its_connection() {
    let world = ServedWorld::new();
    let mut served = Session::new(&world);
    let root = served.root();
    let garbage: [&[u8]; 4] = [
        // A record that is too long, an empty one, one without a header, and a reply.
        &[0xff; 64],
        &[0x80, 0, 0, 0],
        &[0x80, 0, 0, 2, 1, 2],
        &[0x80, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 1],
    ];
    for bytes in garbage {
        let mut broken = Session::new(&world);
        broken.stream.write_all(bytes).expect("sent");
        assert_closed(&mut broken);
        assert!(served.attributes(&root).is_ok());
    }
    world.wait_until("violations", |now| now.violations == 4);
}

#[test]
fn unknown_programs_and_versions_are_refused() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let mut refused = |program, number, rest: &[u8], wanted: &[u32]| {
        let reply = session.exchange(program, number, rest).expect("a reply");
        let wanted: Vec<u8> = wanted.iter().flat_map(|it| it.to_be_bytes()).collect();
        assert_eq!(reply, wanted, "{program:?}, {number}");
    };
    // Accepted, no verifier, and the status.
    refused((100_000, 2), 0, &[], &[0, 0, 0, 1]);
    for version in [1, 2, 5] {
        refused((NFS, version), 0, &[], &[0, 0, 0, 2, 3, 4]);
        refused((MOUNT, version), 0, &[], &[0, 0, 0, 2, 3, 3]);
    }
    refused((NFS, 4), 2, &[], &[0, 0, 0, 3]);
    refused((NFS, 4), 1, &[0, 0, 4, 1], &[0, 0, 0, 4]);
    refused((NFS, 4), 0, &[], &[0, 0, 0, 0]);
    refused((NFS, 3), 22, &[], &[0, 0, 0, 3]);
    refused((MOUNT, 3), 6, &[], &[0, 0, 0, 3]);
    refused((NFS, 3), 1, &[0, 0, 0, 65], &[0, 0, 0, 4]);
    refused((NFS, 3), 0, &[], &[0, 0, 0, 0]);
    refused((MOUNT, 3), 0, &[], &[0, 0, 0, 0]);
    assert_eq!(world.server.counters().refused_calls, 12);
}

#[test]
fn each_call_of_one_burst_is_answered() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let calls: Vec<Vec<u8>> = (0..100)
        .map(|_| session.bytes_of(&Nfs3Call::GetAttributes(HandleBytes(&root))))
        .collect();
    session.stream.write_all(&calls.concat()).expect("sent");
    let xid = |bytes: &[u8]| bytes[..4].to_vec();
    let mut answered: Vec<_> = calls
        .iter()
        .map(|_| xid(&session.receive().expect("a reply")))
        .collect();
    answered.sort();
    let sent: Vec<_> = calls.iter().map(|call| xid(&call[4..])).collect();
    assert_eq!(answered, sent);
    assert_eq!(world.server.counters().calls[1], 100);
}

#[test]
fn record_in_single_bytes_is_answered() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    session.stream.set_nodelay(true).expect("set");
    let call = session.bytes_of(&Nfs3Call::Null);
    for byte in call {
        session.stream.write_all(&[byte]).expect("sent");
    }
    assert!(session.receive().is_some());
}

#[test]
fn stop_ends_all_threads_of_connected_clients() {
    let world = ServedWorld::new();
    let mut idle = Session::new(&world);
    idle.root();
    let mut half = Session::new(&world);
    half.root();
    half.stream.write_all(&[0x80, 0, 0]).expect("sent");
    assert_eq!(world.server.counters().connections, 2);
    assert_eq!(world.server.stop(), StopReport::default());
    assert_eq!(world.server.counters().connections, 0);
    assert_closed(&mut idle);
    assert_closed(&mut half);
    let address = world.server.local_addrs()[0];
    assert!(TcpStream::connect(address).is_err(), "it still listens");
    assert_eq!(world.server.stop(), StopReport::default());
}

#[test]
fn call_in_progress_is_answered_before_the_stop() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let file = session.create(&root, "file", 0o644).expect("made").handle;
    session.write(&file, 0, &[7; 8192]).expect("written");
    let read = session.bytes_of(&Nfs3Call::Read(ReadArguments {
        file: HandleBytes(&file),
        offset: 0,
        count: 8192,
    }));
    let memory = world.space.memory.clone();
    let stopped = std::thread::scope(|scope| {
        let stop = memory.while_stalled(|wait_for_request| {
            session.stream.write_all(&read).expect("sent");
            wait_for_request();
            scope.spawn(|| world.server.stop())
        });
        stop.join().expect("no panic")
    });
    assert_eq!(stopped, StopReport::default());
    let reply = session
        .receive()
        .expect("the reply of the call in progress");
    assert_eq!(reply[reply.len() - 8192..], [7; 8192]);
    assert_closed(&mut session);
}

#[test]
fn client_that_takes_no_reply_is_cut_off() {
    let limits = Limits {
        reply: SHORT,
        ..Limits::default()
    };
    let world = ServedWorld::with_limits(limits);
    let mut session = Session::new(&world);
    let root = session.root();
    let file = session.create(&root, "file", 0o644).expect("made").handle;
    session.write(&file, 0, &vec![7; 1 << 20]).expect("written");
    let read = session.bytes_of(&Nfs3Call::Read(ReadArguments {
        file: HandleBytes(&file),
        offset: 0,
        count: 1 << 20,
    }));
    // More replies than the buffers of both sockets hold.
    session.stream.write_all(&read.repeat(64)).expect("sent");
    world.wait_until("violation", |now| now.violations == 1);
    assert!(world.server.counters().calls[6] < 64);
    assert!(Session::new(&world).mount("/data").is_ok());
}

#[test]
fn silent_connections_are_closed() {
    let limits = Limits {
        idle: SHORT,
        ..Limits::default()
    };
    let world = ServedWorld::with_limits(limits);
    assert_closed(&mut Session::new(&world));
    world.wait_until("the end", |now| now.connections == 0);
    assert_eq!(world.server.counters().violations, 0);
}

#[test]
fn stalled_record_is_a_violation() {
    let limits = Limits {
        record: SHORT,
        ..Limits::default()
    };
    let world = ServedWorld::with_limits(limits);
    let mut stalled = Session::new(&world);
    stalled.stream.write_all(&[0x80]).expect("sent");
    assert_closed(&mut stalled);
    world.wait_until("violation", |now| now.violations == 1);
}

#[test]
fn closed_half_of_a_connection_ends_it() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let call = session.bytes_of(&Nfs3Call::Null);
    session.stream.write_all(&call).expect("sent");
    session.stream.shutdown(Shutdown::Write).expect("shut");
    assert!(session.receive().is_some(), "the reply to the last call");
    let mut rest = Vec::new();
    session.stream.read_to_end(&mut rest).expect("the end");
    assert!(rest.is_empty());
}

#[test]
fn address_in_use_is_an_error() {
    let world = ServedWorld::new();
    let address = world.server.local_addrs()[0];
    let exports = || pagemesh_nfs::Exports::new(Vec::new()).expect("none");
    let started = Server::start(&[address], exports(), Box::new(|_, _| {}));
    assert!(matches!(started, Err(ServerError::Listen { .. })));
    let started = Server::start(&[], exports(), Box::new(|_, _| {}));
    assert!(matches!(started, Err(ServerError::NoAddress)));
}

fn read_of(session: &mut Session, file: &[u8], count: u32) -> Vec<u8> {
    session.bytes_of(&Nfs3Call::Read(ReadArguments {
        file: HandleBytes(file),
        offset: 0,
        count,
    }))
}

/// READs of 1 MiB that a connection has in flight at most.
const READS_IN_SHARE: u64 = 7;

/// Clients that take no replies, so many that the server holds these bytes of them.
fn fill_with_replies(world: &ServedWorld, file: &[u8], bytes: usize) -> Vec<Session> {
    let is_full = || world.server.figures().held_bytes > bytes;
    let mut clients: Vec<Session> = Vec::new();
    while !is_full() {
        let mut slow = Session::new(world);
        set_socket_recv_buffer_size(&slow.stream, 64 << 10).expect("a small buffer");
        let calls: Vec<_> = (0..READS_IN_SHARE)
            .map(|_| read_of(&mut slow, file, 1 << 20))
            .collect();
        slow.stream.write_all(&calls.concat()).expect("sent");
        clients.push(slow);
        let reads = READS_IN_SHARE * clients.len() as u64;
        world.wait_until("replies", |_| {
            let exports = world.server.figures().exports;
            let answered: u64 = exports.iter().map(|it| it.procedures[6].calls).sum();
            answered == reads || is_full()
        });
    }
    clients
}

#[test]
fn clients_that_take_no_replies_throttle_themselves_alone() {
    let limits = Limits {
        // More than the half and the replies of two further clients.
        unsent_bytes_max: 32 << 20,
        ..Limits::default()
    };
    let (world, other) = ServedWorld::pair(limits);
    let mut session = Session::new(&world);
    let made = |session: &mut Session, path: &str| {
        let root = session.mount(path).expect("mounted");
        let file = session.create(&root, "file", 0o644).expect("made").handle;
        session.write(&file, 0, &[7; 1 << 20]).expect("written");
        file
    };
    let (long, stalled) = (made(&mut session, "/data"), made(&mut session, "/other"));
    let _slow = fill_with_replies(&world, &long, limits.unsent_bytes_max / 2);
    let calls: Vec<_> = (0..5)
        .map(|_| read_of(&mut session, &stalled, 4096))
        .collect();
    other.memory.while_stalled(|_| {
        session.stream.write_all(&calls.concat()).expect("sent");
        world.wait_until("calls side by side", |_| {
            let exports = world.server.figures().exports;
            exports
                .iter()
                .map(|it| it.running + it.queued)
                .sum::<usize>()
                == calls.len()
        });
    });
    for _ in &calls {
        assert!(session.receive().is_some());
    }
}
