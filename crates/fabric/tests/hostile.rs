//! Unauthenticated and broken clients cannot disturb other clients of a server.

use crate::support;
use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{SliceReply, SliceRequest};
use pagemesh_fabric::auth::{
    AuthError, CHALLENGE_BYTES, ClientHandshake, HELLO_BYTES, PROOF_BYTES, Purpose, VERDICT_BYTES,
    Versions, read_verdict,
};
use pagemesh_fabric::limits::{HANDSHAKE_LIMIT, UNAUTHENTICATED_MAX};
use pagemesh_fabric::message::request::{Control, Request};
use pagemesh_fabric::message::{HEADER_BYTES, MessageKind, reply};
use pagemesh_fabric::tcp::{TcpLeg, TcpServer};
use proptest::prelude::*;
use std::io::Read;
use std::net::Shutdown;
use std::time::Instant;
use support::raw::{RawConnection, encode_request, forged};
use support::*;
use uuid::Uuid;

fn hello(versions: Versions, purpose: Purpose) -> [u8; HELLO_BYTES] {
    let key = key();
    let (_, hello) = ClientHandshake::new(&key, purpose, versions, Uuid::nil(), [3; 32]);
    hello
}

fn write_message() -> Vec<u8> {
    let (data, stamp) = (Bytes::from(vec![1; 100]), stamp(1));
    let request = SliceRequest::Write {
        offset: 0,
        data,
        stamp,
    };
    encode_request(&Request::Slice { handle: 0, request }, 1)
}

/// Other clients are served as before.
#[track_caller]
fn assert_serves(server: &TcpServer) {
    let done = execute(&mut attach(server), SliceRequest::Flush);
    assert_eq!(done, Ok(SliceReply::Done));
}

#[test]
fn malformed_message_ends_only_its_connection() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut other = attach(&server);
    let status = encode_request(&Request::Control(Control::Status), 1);
    let damaged = |at: usize| {
        let mut message = write_message();
        message[at] ^= 4;
        message
    };
    let (reply, _) = reply::encode(
        MessageKind::Flush,
        1,
        Ok(reply::Reply::Slice(SliceReply::Done)),
    );
    let cases: [(&str, Vec<u8>); 13] = [
        ("garbage", vec![b'x'; 200]),
        ("zeroes", vec![0; 64]),
        (
            "a web request",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(4),
        ),
        ("a damaged header", damaged(30)),
        ("a damaged checksum", damaged(61)),
        ("a damaged body", damaged(HEADER_BYTES + 50)),
        (
            "the longest length",
            forged(&write_message(), 20, &[0xff; 4]),
        ),
        (
            "a body where none belongs",
            forged(&status, 20, &[1, 0, 0, 0]),
        ),
        ("an unknown kind", forged(&status, 5, &[99])),
        ("a reply", reply.encode().to_vec()),
        ("another version", forged(&status, 4, &[1])),
        ("an unused field", forged(&status, 52, &[1])),
        (
            "a write of another length",
            forged(&write_message(), 32, &[101]),
        ),
    ];
    for (what, bytes) in cases {
        let mut raw = RawConnection::client(server.address(), Purpose::Session);
        raw.try_send(&bytes);
        println!("{what}");
        raw.assert_hung_up();
        assert_eq!(
            execute(&mut other, SliceRequest::Flush),
            Ok(SliceReply::Done)
        );
    }
    assert_eq!(memory.state().opened, 1);
}

/// A body that never arrives takes no more memory than its kind allows, and its session ends with
/// the client.
#[test]
fn half_messages_are_never_carried_out() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    for len in [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 99] {
        let mut raw = RawConnection::client(server.address(), Purpose::Session);
        let (slice, epoch) = (SLICE, Epoch(1));
        assert!(raw.ask(&Request::Attach { slice, epoch }).is_ok());
        raw.send(&write_message()[..len]);
        raw.0.shutdown(Shutdown::Write).expect("shut");
        raw.assert_hung_up();
    }
    memory.wait("all sessions' ends", |state| state.dropped == 4);
    assert!(memory.state().requests.is_empty());
    assert_serves(&server);
}

#[test]
fn connection_without_hello_is_refused() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let ours = hello(Versions::OURS, Purpose::Session);
    for bytes in [
        vec![b'x'; HELLO_BYTES],
        vec![0; HELLO_BYTES],
        write_message()[..HELLO_BYTES].to_vec(),
        // A hello with the role of a server.
        [&ours[..6], &[2], &ours[7..]].concat(),
    ] {
        let mut raw = RawConnection::connect(server.address());
        raw.send(&bytes);
        raw.assert_hung_up();
    }
    for len in [0, 1, HELLO_BYTES - 1] {
        let mut raw = RawConnection::connect(server.address());
        raw.send(&ours[..len]);
        raw.0.shutdown(Shutdown::Write).expect("shut");
        raw.assert_hung_up();
    }
    assert_eq!((server.connections(), memory.state().opened), (0, 0));
    assert_serves(&server);
}

#[test]
fn client_without_proof_is_refused_and_opens_nothing() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let prove = |proof: &dyn Fn([u8; CHALLENGE_BYTES]) -> [u8; PROOF_BYTES]| {
        let mut raw = RawConnection::connect(server.address());
        raw.send(&hello(Versions::OURS, Purpose::Session));
        let challenge = raw.receive();
        raw.send(&proof(challenge));
        // The server ignores the bytes after the proof.
        raw.try_send(&encode_request(&Request::Control(Control::Status), 1));
        let verdict: [u8; VERDICT_BYTES] = raw.receive();
        assert_eq!(read_verdict(verdict), Err(AuthError::WrongKey));
        raw.assert_hung_up();
    };
    prove(&|_| [0; PROOF_BYTES]);
    // The server's own proof, sent back.
    prove(&|challenge| *challenge.last_chunk().expect("a proof"));
    assert_eq!((server.connections(), memory.state().opened), (0, 0));
}

#[test]
fn challenges_differ_and_a_proof_works_once() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let (key, versions) = (key(), Versions::OURS);
    let (client, hello) =
        ClientHandshake::new(&key, Purpose::Session, versions, Uuid::nil(), [3; 32]);
    let mut first = RawConnection::connect(server.address());
    first.send(&hello);
    let challenge: [u8; CHALLENGE_BYTES] = first.receive();
    let (proof, _) = client.answer_challenge(&challenge).expect("the right key");
    first.send(&proof);
    assert_eq!(read_verdict(first.receive()), Ok(()));

    let mut again = RawConnection::connect(server.address());
    again.send(&hello);
    let other: [u8; CHALLENGE_BYTES] = again.receive();
    assert_ne!(challenge[32..64], other[32..64]);
    again.send(&proof);
    assert_eq!(read_verdict(again.receive()), Err(AuthError::WrongKey));
}

#[test]
fn client_without_common_version_or_purpose_is_told() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let newer = Versions {
        min: 3,
        max: 9,
        knows: 0,
    };
    let (key, id) = (key(), Uuid::nil());
    let (client, hello) = ClientHandshake::new(&key, Purpose::Session, newer, id, [3; 32]);
    let answer = |hello: &[u8]| {
        let mut raw = RawConnection::connect(server.address());
        raw.send(hello);
        let challenge: [u8; CHALLENGE_BYTES] = raw.receive();
        raw.assert_hung_up();
        client.answer_challenge(&challenge).err()
    };
    let (theirs, ours) = (Versions::OURS, newer);
    assert_eq!(answer(&hello), Some(AuthError::Versions { theirs, ours }));
    let mut unknown = session_hello();
    unknown[7] = 77;
    assert_eq!(answer(&unknown), Some(AuthError::Purpose));
}

fn session_hello() -> [u8; HELLO_BYTES] {
    hello(Versions::OURS, Purpose::Session)
}

/// Unauthenticated connections have few slots and little time, however slowly they send.
/// Authenticated connections are not affected.
#[test]
fn unauthenticated_connections_are_limited_in_number_and_time() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut known = attach(&server);
    let began = Instant::now();
    let mut strangers: Vec<RawConnection> = (0..UNAUTHENTICATED_MAX)
        .map(|_| {
            let mut raw = RawConnection::connect(server.address());
            raw.send(b"P");
            raw
        })
        .collect();
    RawConnection::connect(server.address()).assert_hung_up();
    assert!(began.elapsed() < HANDSHAKE_LIMIT, "too slow to tell");
    assert_eq!(
        execute(&mut known, SliceRequest::Flush),
        Ok(SliceReply::Done)
    );
    for stranger in &mut strangers {
        stranger.assert_hung_up();
    }
    assert!(began.elapsed() >= HANDSHAKE_LIMIT);
    // The last connection releases its slot shortly after it was closed.
    let connect = || TcpLeg::connect(server.address(), &key(), timeouts(), SLICE, Epoch(1));
    while connect().is_err() {
        assert!(began.elapsed() < TEST_TIMEOUT, "the slots stay in use");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// With any bytes after the handshake, the server closes the connection or continues, and
    /// serves the next client.
    #[test]
    fn any_bytes_leave_the_server_alive(
        mut bytes in prop::collection::vec(any::<u8>(), 0..300), start in 0usize..70,
    ) {
        thread_local! {
            static SERVER: TcpServer = serve(&MemoryBrick::new());
        }
        let message = write_message();
        let start = start.min(bytes.len());
        bytes[..start].copy_from_slice(&message[..start]);
        SERVER.with(|server| {
            let mut raw = RawConnection::client(server.address(), Purpose::Session);
            raw.try_send(&bytes);
            let _ = raw.0.shutdown(Shutdown::Write);
            let mut said = Vec::new();
            let _ = raw.0.read_to_end(&mut said);
            assert_serves(server);
        });
    }
}
