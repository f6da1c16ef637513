//! Streams of changes: their messages, and the bounds of clients that do not read, hang or come in
//! great numbers.

use crate::cluster;
use cluster::{Cluster, MIB, TestServer, create_request, name, registration};
use pagemesh_manage::api::REQUESTS_MAX;
use pagemesh_manage::api::watch::{PEER_STREAMS_MAX, STREAMS_MAX};
use pagemesh_manage::token::token;
use pagemesh_manage::wire::{BrickInfo, EventKind, EventRecord, Hello, VolumeInfo};
use pagemesh_manage::{EventStream, LayoutKind, ManagerSettings, WatchTimes};
use serde::de::DeserializeOwned;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Longer than anything takes; only a failing test waits for it.
const LIMIT: Duration = Duration::from_secs(20);
const DEAD_AFTER: Duration = Duration::from_secs(8);

/// A client of the loopback address with this last number.
struct WatchPeer<'a> {
    cluster: &'a Cluster,
    served: &'a TestServer,
}

struct RawStream {
    reader: BufReader<TcpStream>,
    status: u16,
    head: String,
}

impl WatchPeer<'_> {
    fn open_from(&self, last_byte: u8, more: &str, receive_bytes: Option<usize>) -> RawStream {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        if let Some(bytes) = receive_bytes {
            socket.set_recv_buffer_size(bytes).expect("set");
        }
        let own = SocketAddr::from((Ipv4Addr::new(127, 0, 0, last_byte), 0));
        socket.bind(&SockAddr::from(own)).expect("bound");
        let address = SockAddr::from(self.served.handle.address());
        socket.connect(&address).expect("connected");
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(LIMIT)).expect("set");
        let token = token(&self.cluster.key);
        let request = format!(
            "GET /api/v1/watch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n{more}\r\n"
        );
        stream.write_all(request.as_bytes()).expect("sent");
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            let read = reader.read_line(&mut head).expect("a head");
            assert!(read > 0, "the connection ended after {head:?}");
        }
        let status = head.split(' ').nth(1).and_then(|it| it.parse().ok());
        RawStream {
            reader,
            status: status.expect("a status"),
            head: head.to_lowercase(),
        }
    }

    fn open(&self) -> RawStream {
        self.open_from(1, "", None)
    }
}

impl RawStream {
    /// Reads to the end of the connection; a reset counts as the end.
    fn read_to_end(mut self) -> String {
        let mut bytes = vec![];
        if let Err(error) = self.reader.read_to_end(&mut bytes) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn read_until(&mut self, words: &str) {
        let mut line = String::new();
        while !line.contains(words) {
            line.clear();
            let read = self.reader.read_line(&mut line).expect("a line");
            assert!(read > 0, "the stream ended before {words:?}");
        }
    }
}

fn with_peer(bricks: usize, times: WatchTimes, test: impl FnOnce(&WatchPeer<'_>)) {
    let cluster = Cluster::new(bricks);
    let served = cluster.serve_with(ManagerSettings {
        watch: times,
        ..ManagerSettings::default()
    });
    cluster.send_heartbeats(served.handle.manager());
    let peer = WatchPeer {
        cluster: &cluster,
        served: &served,
    };
    test(&peer);
    served.client.status().expect("the manager answers");
    let stopping = Instant::now();
    served.handle.stop();
    assert!(
        stopping.elapsed() < Duration::from_secs(4),
        "streams hold up the end"
    );
}

/// The next message of this kind for which `wanted` holds.
fn next_of<T: DeserializeOwned>(
    stream: &mut EventStream,
    kind: &str,
    wanted: impl Fn(&T) -> bool,
) -> T {
    loop {
        let message = stream.next_message().expect("a message");
        if message.kind != kind {
            continue;
        }
        if let Ok(found) = serde_json::from_str(&message.data)
            && wanted(&found)
        {
            return found;
        }
    }
}

#[test]
fn stream_reports_changes() {
    with_peer(2, WatchTimes::default(), |peer| {
        let client = &peer.served.client;
        // An event may come before or after the item that it is about.
        let mut events = client.watch(None).expect("a stream");
        let mut stream = client.watch(None).expect("a stream");
        let hello = stream.next_message().expect("a message");
        assert_eq!(hello.kind, "hello");
        let hello: Hello = serde_json::from_str(&hello.data).expect("hello");
        assert_eq!(hello.last_seq, 4, "one start, one token and two bricks");
        next_of::<serde_json::Value>(&mut stream, "status", |it| it["bricks_alive"] == 2);
        client
            .create(&create_request("v", LayoutKind::Mirror, MIB))
            .expect("made");
        let made: VolumeInfo = next_of(&mut stream, "volume", |it: &VolumeInfo| it.epoch.0 == 1);
        assert_eq!(made, client.volume(&name("v")).expect("shown").info);
        let event: EventRecord = next_of(&mut events, "event", |_| true);
        assert_eq!((event.seq, event.kind), (5, EventKind::VolumeCreated));
        // The server sweeps too: at no time is the other brick silent for too long.
        peer.cluster.clock.advance(DEAD_AFTER / 2);
        peer.served
            .handle
            .manager()
            .heartbeat(registration(0))
            .expect("welcome");
        peer.cluster.clock.advance(DEAD_AFTER / 2);
        peer.served.handle.manager().sweep();
        let dead: BrickInfo = next_of(&mut stream, "brick", |it: &BrickInfo| !it.alive);
        assert_eq!(dead.brick, cluster::brick_id(1));
        next_of(&mut stream, "volume", |it: &VolumeInfo| {
            it.unreachable_legs == 1
        });
        let lost = next_of(&mut events, "event", |it: &EventRecord| {
            it.kind == EventKind::BrickLost && it.subject.name.ends_with('2')
        });
        client.acknowledge_event(lost.seq).expect("acknowledged");
        let by =
            next_of::<serde_json::Value>(&mut stream, "acknowledged", |it| it["seq"] == lost.seq);
        assert_eq!(by["acknowledged"]["by"], "cluster key");
        client.delete(&name("v"), false).expect("deleted");
        let gone = next_of::<serde_json::Value>(&mut stream, "volume", |it| it["deleted"] == true);
        assert_eq!(gone["name"], "v");
    });
}

/// A client that continues after the last event that it has gets each event once, also from the
/// next manager.
#[test]
fn stream_continues_after_last_event() {
    let cluster = Cluster::new(2);
    let mut seen: Vec<u64> = vec![];
    let mut last = 0;
    for round in 0..3 {
        let served = cluster.serve_with_bricks_alive();
        // More events than one message of the past has.
        for number in 0..60 {
            let request = create_request(&format!("v{round}-{number}"), LayoutKind::Concat, MIB);
            served.client.create(&request).expect("made");
            served.client.attach(&request.name, "c").expect("attached");
        }
        let mut stream = served.client.watch(Some(last)).expect("a stream");
        for number in 0..10 {
            let request = create_request(&format!("w{round}-{number}"), LayoutKind::Concat, MIB);
            served.client.create(&request).expect("made");
        }
        let wanted = format!("w{round}-9");
        loop {
            let event: EventRecord = next_of(&mut stream, "event", |_| true);
            seen.push(event.seq);
            if event.subject.name == wanted {
                break;
            }
        }
        last = *seen.last().expect("an event");
        served.handle.stop();
        assert_eq!(stream.next_message(), None, "the manager ends its streams");
    }
    let rising = seen.windows(2).all(|pair| pair[0] < pair[1]);
    assert!(rising, "{seen:?}");
    assert!(seen.len() >= 3 * 130, "{} events", seen.len());
    let served = cluster.serve();
    let mut stream = served.client.watch(Some(u64::MAX)).expect("a stream");
    assert_eq!(stream.next_message().expect("a message").kind, "hello");
    served.handle.stop();
}

#[test]
fn wrong_event_id_is_refused() {
    with_peer(0, WatchTimes::default(), |peer| {
        for wrong in ["", "x", "-1", "1.5", "18446744073709551616", "1 2"] {
            let stream = peer.open_from(1, &format!("Last-Event-ID: {wrong}\r\n"), None);
            assert_eq!(stream.status, 400, "{wrong:?}");
        }
    });
}

#[test]
fn idle_stream_gets_comments() {
    let times = WatchTimes {
        comment_every: Duration::from_millis(10),
        ..WatchTimes::default()
    };
    with_peer(0, times, |peer| {
        let mut stream = peer.open();
        assert!(
            stream.head.contains("content-type: text/event-stream"),
            "{}",
            stream.head
        );
        stream.read_until("event: hello");
        for _ in 0..3 {
            stream.read_until(": \n");
        }
    });
}

/// Streams hold no permits of requests, and are limited in total and for each address.
#[test]
fn streams_are_limited() {
    with_peer(1, WatchTimes::default(), |peer| {
        let mut open = vec![];
        for number in 0..STREAMS_MAX {
            let mut stream = peer.open_from(10 + (number / PEER_STREAMS_MAX) as u8, "", None);
            assert_eq!(stream.status, 200, "stream {number}");
            stream.read_until("event: hello");
            open.push(stream);
        }
        assert_eq!(STREAMS_MAX, REQUESTS_MAX);
        peer.served.client.status().expect("requests have permits");
        let refused = peer.open_from(99, "", None);
        assert_eq!(refused.status, 503);
        assert!(
            refused.head.contains("connection: close"),
            "{}",
            refused.head
        );
        assert!(refused.read_to_end().contains("overloaded"));
        // The end of one makes room for another, as soon as the manager notices it.
        open.remove(0);
        let from_full_address = peer.open_from(11, "", None);
        assert_eq!(from_full_address.status, 503);
        while peer.open_from(99, "", None).status != 200 {}
    });
}

#[test]
fn ten_thousand_watchers_leave_room_for_others() {
    with_peer(1, WatchTimes::default(), |peer| {
        let mut open = vec![];
        let mut refused = vec![];
        for number in 0..10_000 {
            let stream = peer.open();
            match stream.status {
                200 => open.push(stream),
                503 => refused.push(stream),
                other => panic!("{other}"),
            }
            // The ends of refused clients stay open, as many as fit into a process.
            if refused.len() > 300 {
                refused.clear();
            }
            if number % 500 == 0 {
                peer.served.client.status().expect("others are served");
                peer.served
                    .client
                    .heartbeat(&registration(0))
                    .expect("welcome");
            }
        }
        assert_eq!(open.len(), PEER_STREAMS_MAX);
        // The streams still work.
        peer.served
            .client
            .create(&create_request("v", LayoutKind::Concat, MIB))
            .expect("made");
        for stream in &mut open {
            stream.read_until("volume-created");
        }
    });
}

/// A client that does not read loses its stream, its connection and its place.
#[test]
fn stalled_client_is_cut() {
    let times = WatchTimes {
        write_limit: Duration::from_millis(100),
        ..WatchTimes::default()
    };
    with_peer(1, times, |peer| {
        let client = &peer.served.client;
        client
            .create(&create_request("v", LayoutKind::Concat, MIB))
            .expect("made");
        let stalled: Vec<_> = (0..PEER_STREAMS_MAX)
            .map(|_| peer.open_from(1, "", Some(2048)))
            .collect();
        assert_eq!(peer.open().status, 503);
        let start = Instant::now();
        loop {
            client
                .attach(&name("v"), &"c".repeat(100))
                .expect("attached");
            let next = peer.open();
            if next.status == 200 {
                break;
            }
            assert!(start.elapsed() < 3 * LIMIT, "no stalled stream is cut");
        }
        drop(stalled);
    });
}

#[test]
fn streams_end_with_manager() {
    let cluster = Cluster::new(1);
    let served = cluster.serve_with_bricks_alive();
    let peer = WatchPeer {
        cluster: &cluster,
        served: &served,
    };
    let mut read = peer.open();
    read.read_until("event: hello");
    let unread: Vec<_> = (0..3).map(|_| peer.open()).collect();
    let start = Instant::now();
    served.handle.stop();
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "{:?}",
        start.elapsed()
    );
    read.read_to_end();
    for stream in unread {
        stream.read_to_end();
    }
}
