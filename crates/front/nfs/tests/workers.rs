//! Calls that run side by side, and exports that are stalled.

use crate::support;
use pagemesh_nfs::handle::HandleBytes;
use pagemesh_nfs::limits::{EXPORT_WORKERS_MAX, Limits, PIN_IDLE_LIMIT};
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::files::{Durability, ReadArguments, WriteArguments};
use pagemesh_nfs::nfs3::status::Status;
use pagemesh_nfs::{ExportFigures, SizingReason};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::session::Session;
use support::world::ServedWorld;

const PAGE: u32 = 4096;

/// A session with a file in both exports.
fn session_of_both(world: &ServedWorld) -> (Session, Vec<u8>, Vec<u8>) {
    let mut session = Session::new(world);
    let file = |session: &mut Session, path: &str| {
        let root = session.mount(path).expect("mounted");
        let file = session.create(&root, "file", 0o644).expect("made").handle;
        session
            .write(&file, 0, &[7; PAGE as usize])
            .expect("written");
        file
    };
    let first = file(&mut session, "/data");
    let second = file(&mut session, "/other");
    (session, first, second)
}

fn read_of(session: &mut Session, file: &[u8]) -> Vec<u8> {
    session.bytes_of(&Nfs3Call::Read(ReadArguments {
        file: HandleBytes(file),
        offset: 0,
        count: PAGE,
    }))
}

/// The call's id in a call with its mark.
fn xid_of(call: &[u8]) -> [u8; 4] {
    call[4..8].try_into().unwrap()
}

fn figures(world: &ServedWorld, name: &str) -> ExportFigures {
    let exports = world.server.figures().exports;
    let named = exports
        .into_iter()
        .find(|it| it.export.as_deref() == Some(name));
    named.expect("an export")
}

/// Waits until the figures of an export meet a condition.
#[track_caller]
fn wait_for(world: &ServedWorld, name: &str, is_met: impl Fn(&ExportFigures) -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let now = figures(world, name);
        if is_met(&now) {
            return;
        }
        assert!(Instant::now() < until, "{now:?}");
        std::thread::yield_now();
    }
}

#[test]
fn stalled_export_does_not_stop_calls_of_its_connection() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let (mut session, healthy, stalled) = session_of_both(&world);
    let late: Vec<_> = (0..100).map(|_| read_of(&mut session, &stalled)).collect();
    other.memory.while_stalled(|wait_for_request| {
        session.stream.write_all(&late.concat()).expect("sent");
        wait_for_request();
        for _ in 0..200 {
            let (data, _) = session.read(&healthy, 0, PAGE).expect("read");
            assert_eq!(data, [7; PAGE as usize]);
        }
        let mut more = Session::new(&world);
        assert!(more.read(&healthy, 0, PAGE).is_ok());
        assert_eq!(figures(&world, "other").procedures[6].calls, 0);
    });
    let mut answered: Vec<_> = late.iter().map(|_| xid_of_reply(&mut session)).collect();
    answered.sort_unstable();
    let sent: Vec<_> = late.iter().map(|call| xid_of(call)).collect();
    assert_eq!(answered, sent);
    assert_eq!(figures(&world, "other").procedures[6].calls, 100);
}

fn xid_of_reply(session: &mut Session) -> [u8; 4] {
    let reply = session.receive().expect("a reply");
    reply[..4].try_into().unwrap()
}

#[test]
fn replies_to_short_calls_do_not_wait_for_a_slow_one() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let (mut session, _, stalled) = session_of_both(&world);
    let attributes =
        |session: &mut Session| session.bytes_of(&Nfs3Call::GetAttributes(HandleBytes(&stalled)));
    // They come with one read, so the same thread runs them.
    let short: Vec<_> = (0..3).map(|_| attributes(&mut session)).collect();
    let slow = read_of(&mut session, &stalled);
    // The first sweep of pins would send them, too.
    let limit = PIN_IDLE_LIMIT - Duration::from_secs(1);
    session.stream.set_read_timeout(Some(limit)).expect("set");
    other.memory.while_stalled(|wait_for_request| {
        let calls = [short.concat(), slow.clone()].concat();
        session.stream.write_all(&calls).expect("sent");
        wait_for_request();
        // A worker may run some of them beside the polling thread, so the order is open.
        let mut answered: Vec<_> = short.iter().map(|_| xid_of_reply(&mut session)).collect();
        answered.sort_unstable();
        assert_eq!(
            answered,
            short.iter().map(|it| xid_of(it)).collect::<Vec<_>>()
        );
    });
    assert_eq!(xid_of_reply(&mut session), xid_of(&slow));
}

#[test]
fn many_clients_of_a_stalled_export_leave_the_other_one_served() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let (mut session, healthy, stalled) = session_of_both(&world);
    let mut stuck: Vec<_> = (0..50).map(|_| Session::new(&world)).collect();
    other.memory.while_stalled(|wait_for_request| {
        for client in &mut stuck {
            let call = read_of(client, &stalled);
            client.stream.write_all(&call).expect("sent");
        }
        wait_for_request();
        wait_for(&world, "other", |now| now.queued + now.running == 50);
        for _ in 0..100 {
            assert!(session.read(&healthy, 0, PAGE).is_ok());
        }
        assert!(figures(&world, "other").running <= EXPORT_WORKERS_MAX);
    });
    for client in &mut stuck {
        assert!(client.receive().is_some());
    }
}

#[test]
fn blocked_workers_let_an_export_grow_to_its_share() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let (mut session, _, stalled) = session_of_both(&world);
    let calls: Vec<_> = (0..100).map(|_| read_of(&mut session, &stalled)).collect();
    other.memory.while_stalled(|_| {
        session.stream.write_all(&calls.concat()).expect("sent");
        wait_for(&world, "other", |now| now.workers == EXPORT_WORKERS_MAX);
    });
    calls
        .iter()
        .for_each(|_| assert!(session.receive().is_some()));
    let now = figures(&world, "other");
    assert_eq!(now.workers_most, EXPORT_WORKERS_MAX);
    assert!(matches!(
        now.last_change,
        Some(SizingReason::AllBlocked | SizingReason::ProcessorIdle)
    ));
    assert!(figures(&world, "data").workers_most < EXPORT_WORKERS_MAX);
}

#[test]
fn stalled_export_refuses_calls_beyond_the_share_of_a_client() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let (mut session, healthy, stalled) = session_of_both(&world);
    let calls: Vec<_> = (0..300).map(|_| read_of(&mut session, &stalled)).collect();
    other.memory.while_stalled(|wait_for_request| {
        session.stream.write_all(&calls.concat()).expect("sent");
        wait_for_request();
        // The calls beyond the share wait for room, and then the server notices the stall.
        wait_for(&world, "other", |now| now.refused >= 100);
        let mut more = Session::new(&world);
        assert!(more.read(&healthy, 0, PAGE).is_ok());
    });
    let mut refused = 0;
    for _ in &calls {
        let reply = session.receive().expect("a reply");
        let status = u32::from_be_bytes(reply[24..28].try_into().unwrap());
        refused += u64::from(status == Status::Jukebox.number());
    }
    assert_eq!(refused, figures(&world, "other").refused);
    assert!(session.read(&healthy, 0, PAGE).is_ok());
}

/// READs of 1 MiB: seven fit into the share of a connection, which is 8 MiB.
#[test]
fn full_connection_is_refused_while_others_are_answered() {
    let (world, other) = ServedWorld::pair(Limits::default());
    let (mut session, healthy, stalled) = session_of_both(&world);
    let long_read = |session: &mut Session| {
        session.bytes_of(&Nfs3Call::Read(ReadArguments {
            file: HandleBytes(&stalled),
            offset: 0,
            count: 1 << 20,
        }))
    };
    let reads: Vec<_> = (0..7).map(|_| long_read(&mut session)).collect();
    let beyond = long_read(&mut session);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        other.memory.while_stalled(|wait_for_request| {
            session.stream.write_all(&reads.concat()).expect("sent");
            wait_for_request();
            let mut others = Session::new(&world);
            let (stalled, is_over) = (&stalled, &is_over);
            let until = Instant::now() + Duration::from_secs(60);
            scope.spawn(move || {
                while !is_over.load(Ordering::SeqCst) && Instant::now() < until {
                    assert!(others.attributes(stalled).is_ok());
                }
            });
            session.stream.write_all(&beyond).expect("sent");
            let reply = session.receive();
            is_over.store(true, Ordering::SeqCst);
            let reply = reply.expect("a reply");
            assert_eq!(reply[..4], xid_of(&beyond));
            let status = u32::from_be_bytes(reply[24..28].try_into().unwrap());
            assert_eq!(status, Status::Jukebox.number());
            assert!(session.read(&healthy, 0, PAGE).is_ok());
        });
    });
    let mut answered: Vec<_> = reads.iter().map(|_| xid_of_reply(&mut session)).collect();
    answered.sort_unstable();
    assert_eq!(
        answered,
        reads.iter().map(|it| xid_of(it)).collect::<Vec<_>>()
    );
    assert_eq!(figures(&world, "other").refused, 1);
}

#[test]
fn connections_with_many_calls_do_not_starve_another() {
    let world = ServedWorld::new();
    let mut greedy = Session::new(&world);
    let root = greedy.root();
    let file = greedy.create(&root, "file", 0o644).expect("made").handle;
    greedy
        .write(&file, 0, &[7; PAGE as usize])
        .expect("written");
    let mut modest = Session::new(&world);
    let one = read_of(&mut modest, &file);
    let many: Vec<_> = (0..120).map(|_| read_of(&mut greedy, &file)).collect();
    world.space.memory.while_stalled(|wait_for_request| {
        greedy.stream.write_all(&many.concat()).expect("sent");
        wait_for_request();
        wait_for(&world, "data", |now| now.queued + now.running == 120);
        modest.stream.write_all(&one).expect("sent");
        wait_for(&world, "data", |now| now.queued + now.running == 121);
    });
    assert!(modest.receive().is_some());
    many.iter()
        .for_each(|_| assert!(greedy.receive().is_some()));
}

#[test]
fn figures_count_calls_errors_and_bytes() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let file = session.create(&root, "file", 0o644).expect("made").handle;
    session
        .write(&file, 0, &[7; PAGE as usize])
        .expect("written");
    session.read(&file, 0, PAGE).expect("read");
    assert_eq!(session.remove(&root, "none"), Err(Status::NoEntry));
    let now = figures(&world, "data");
    let (write, read, remove) = (now.procedures[7], now.procedures[6], now.procedures[12]);
    assert_eq!((write.calls, read.calls, remove.calls), (1, 1, 1));
    assert_eq!((write.errors, read.errors, remove.errors), (0, 0, 1));
    assert!(write.bytes_received > u64::from(PAGE) && read.bytes_sent > u64::from(PAGE));
    assert!(read.bytes_received < 300 && write.bytes_sent < 300);
    assert_eq!(read.latency.iter().sum::<u64>(), 1);
    assert!(read.time > Duration::ZERO && read.queue_time <= read.time);
    assert_eq!((now.running, now.queued, now.inline), (0, 0, 0));
    // One call at a time: each ran in a polling thread.
    assert_eq!(now.workers_most, 0);
    assert_eq!(now.last_change, None);
}

#[test]
fn stop_during_a_stall_ends_after_the_drain_limit() {
    let limits = Limits {
        drain: Duration::from_millis(20),
        ..Limits::default()
    };
    let (world, other) = ServedWorld::pair(limits);
    let (mut session, _, stalled) = session_of_both(&world);
    let calls: Vec<_> = (0..10).map(|_| read_of(&mut session, &stalled)).collect();
    other.memory.while_stalled(|wait_for_request| {
        session.stream.write_all(&calls.concat()).expect("sent");
        wait_for_request();
        let report = world.server.stop();
        assert_eq!(report.cut_off, 1);
        assert!(report.abandoned > 0, "{report:?}");
    });
    let report = world.server.stop();
    assert_eq!((report.cut_off, report.abandoned), (0, 0));
}

#[test]
fn sequential_writes_in_flight_leave_no_hole() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    let file = session.create(&root, "file", 0o644).expect("made").handle;
    let parts: Vec<Vec<u8>> = (0..60u8).map(|part| vec![part; 10_000]).collect();
    let calls: Vec<_> = parts
        .iter()
        .enumerate()
        .map(|(at, data)| {
            session.bytes_of(&Nfs3Call::Write(WriteArguments {
                file: HandleBytes(&file),
                offset: at as u64 * 10_000,
                durability: Durability::Unstable,
                data,
            }))
        })
        .collect();
    world.space.memory.while_stalled(|_| {
        session.stream.write_all(&calls.concat()).expect("sent");
        wait_for(&world, "data", |now| now.running >= 1);
    });
    let mut sizes: Vec<(Vec<u8>, u64)> = Vec::new();
    for _ in &calls {
        let reply = session.receive().expect("a reply");
        // The size is after the status, the attributes before, and five words of those after.
        let at = 28 + 28 + 4 + 20;
        let size = u64::from_be_bytes(reply[at..at + 8].try_into().unwrap());
        sizes.push((reply[..4].to_vec(), size));
    }
    // In the order of the calls.
    sizes.sort();
    let sizes: Vec<u64> = sizes.into_iter().map(|(_, size)| size).collect();
    let wanted: Vec<u64> = (1..=60).map(|count| count * 10_000).collect();
    assert_eq!(sizes, wanted);
    let (data, _) = session.read(&file, 0, 600_000).expect("read");
    assert_eq!(data, parts.concat());
}
