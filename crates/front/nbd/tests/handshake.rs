//! The messages of clients before the transmission phase, and their answers.

use crate::support;
use pagemesh_nbd::{ExportOptions, Limits};
use std::sync::Arc;
use std::time::Duration;
use support::TestServer;
use support::client::*;
use support::memory::{CompletionMode, Memory};

const SIZE: u64 = 1 << 20;

fn start_server() -> TestServer {
    TestServer::new(SIZE, CompletionMode::AtOnce)
}

fn add_export(running: &TestServer, name: &str, read_only: bool, description: &str) {
    let options = ExportOptions {
        read_only,
        description: description.into(),
    };
    let space = Arc::new(Memory::new(2 * SIZE, CompletionMode::AtOnce));
    running.exports.add(name, space, options).unwrap();
}

#[test]
fn go_reports_size_flags_and_block_sizes() {
    let running = start_server();
    let mut client = NbdClient::connect(&running.path());
    client.option(STRUCTURED, &[]);
    let answers = client.option(GO, &info("disk", &[1, 2, 3]));
    let told = |kind: u8| {
        let found = answers.iter().find(|(_, data)| data[..2] == [0, kind]);
        found.unwrap().1[2..].to_vec()
    };
    // Has flags, flush, FUA, trim, zeroes, DF, multi-conn, fast zero.
    let flags = 0b1001_1110_1101u16;
    assert_eq!(
        told(0),
        [&SIZE.to_be_bytes()[..], &flags.to_be_bytes()].concat()
    );
    assert_eq!(told(1), b"disk");
    assert_eq!(told(2), b"");
    let sizes = [1u32, 4096, 32 << 20].map(u32::to_be_bytes).concat();
    assert_eq!(told(3), sizes);
    assert_eq!(answers.last(), Some(&(ACK, vec![])));
}

#[test]
fn read_only_exports_say_so_and_refuse_changes() {
    let running = start_server();
    add_export(&running, "frozen", true, "");
    let mut client = NbdClient::connect(&running.path());
    client.go("frozen");
    assert_eq!(client.flags & 0b1000_0110_0010, 0b10);
    for ask in [
        NbdRequest::write(0, vec![1; 512]),
        NbdRequest::write(0, vec![1; 100_000]),
        NbdRequest::new(TRIM, 0, 512),
        NbdRequest::new(ZEROES, 0, 512),
    ] {
        assert_eq!(client.request(&ask).errno(), EPERM);
    }
    assert_eq!(
        client.request(&NbdRequest::new(READ, 0, 512)),
        NbdReply::Data(0, vec![0; 512])
    );
}

#[test]
fn empty_name_selects_only_export() {
    let running = start_server();
    NbdClient::connect(&running.path()).go("");
    add_export(&running, "other", false, "");
    let mut client = NbdClient::connect(&running.path());
    let answers = client.option(GO, &info("", &[]));
    assert_eq!(answers[0].0, UNKNOWN);
    client.go("other");
    assert_eq!(client.size_bytes, 2 * SIZE);
}

#[test]
fn unknown_export_is_named_in_refusal() {
    let running = start_server();
    let mut client = NbdClient::connect(&running.path());
    for option in [INFO, GO] {
        let answers = client.option(option, &info("no\nsuch", &[]));
        let why = String::from_utf8(answers[0].1.clone()).unwrap();
        assert_eq!(
            (answers[0].0, why.as_str()),
            (UNKNOWN, "there is no export 'no\\nsuch'")
        );
    }
    client.go("disk");
}

#[test]
fn exports_are_listed_with_descriptions() {
    let running = start_server();
    add_export(&running, "a", false, "the first");
    let mut client = NbdClient::connect(&running.path());
    let answers = client.option(LIST, &[]);
    let entry = |name: &str, rest: &str| {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend(rest.as_bytes());
        (SERVER, data)
    };
    assert_eq!(
        answers,
        [entry("a", "the first"), entry("disk", ""), (ACK, vec![])]
    );
    assert_eq!(client.option(LIST, b"x")[0].0, INVALID);
}

#[test]
fn abort_is_acknowledged() {
    let running = start_server();
    let mut client = NbdClient::connect(&running.path());
    assert_eq!(client.option(ABORT, &[]), [(ACK, vec![])]);
    assert!(client.is_closed());
}

#[test]
fn export_name_pads_only_for_old_clients() {
    let running = start_server();
    for (client_flags, padding) in [(3u32, 0), (1, 124)] {
        let mut client = NbdClient::connect_without_handshake(&running.path());
        client.take(18);
        client.send(&client_flags.to_be_bytes());
        client.send(&option(EXPORT_NAME, b"disk"));
        assert_eq!(client.take_u64(), SIZE);
        client.take_u16();
        assert_eq!(client.take(padding), vec![0; padding]);
        assert_eq!(
            client.request(&NbdRequest::new(FLUSH, 0, 0)),
            NbdReply::Done
        );
    }
    let mut client = NbdClient::connect(&running.path());
    client.send(&option(EXPORT_NAME, b"other"));
    assert!(client.is_closed());
}

#[test]
fn requests_pipelined_after_go_are_served() {
    let running = start_server();
    let mut client = NbdClient::connect(&running.path());
    let mut bytes = option(EXPORT_NAME, b"disk");
    bytes.extend(NbdRequest::write(0, vec![7; 9000]).encode(5));
    client.send(&bytes);
    client.take(10);
    assert_eq!(client.read_reply(|_| 0), (5, NbdReply::Done));
    assert_eq!(
        running.memory.bytes()[..9001],
        [&[7; 9000][..], &[0]].concat()
    );
}

#[test]
fn malformed_options_leave_connection_usable() {
    let running = start_server();
    let mut client = NbdClient::connect(&running.path());
    for unknown in [4, 5, 11, 99] {
        assert_eq!(client.option(unknown, b"data")[0].0, UNSUPPORTED);
    }
    assert_eq!(client.option(STRUCTURED, b"x")[0].0, INVALID);
    let good = info("disk", &[1, 2]);
    for len in 0..good.len() {
        assert_eq!(client.option(INFO, &good[..len])[0].0, INVALID, "{len}");
    }
    let good = context("disk", &["base:allocation", "x"]);
    for len in 0..good.len() {
        assert_eq!(client.option(LIST_CONTEXT, &good[..len])[0].0, INVALID);
    }
    let endless = [&context("disk", &[])[..8], &u32::MAX.to_be_bytes()].concat();
    assert_eq!(client.option(LIST_CONTEXT, &endless)[0].0, INVALID);
    client.go("disk");
}

#[test]
fn contexts_require_structured_replies_and_one_export() {
    let running = start_server();
    add_export(&running, "other", false, "");
    let mut client = NbdClient::connect(&running.path());
    let chosen = context("disk", &["qemu:dirty", "base:allocation"]);
    assert_eq!(client.option(SET_CONTEXT, &chosen)[0].0, INVALID);
    for queries in [&[][..], &["base:"], &["base:allocation"]] {
        let answers = client.option(LIST_CONTEXT, &context("disk", queries));
        assert_eq!(answers[0], (CONTEXT, b"\0\0\0\0base:allocation".to_vec()));
    }
    client.option(STRUCTURED, &[]);
    assert_eq!(
        client.option(SET_CONTEXT, &context("disk", &[])),
        [(ACK, vec![])]
    );
    assert_eq!(
        client.option(SET_CONTEXT, &context("no", &[]))[0].0,
        UNKNOWN
    );
    let answers = client.option(SET_CONTEXT, &chosen);
    assert_eq!(answers[0], (CONTEXT, b"\0\0\0\x01base:allocation".to_vec()));
    client.go("other");
    assert_eq!(
        client.request(&NbdRequest::new(STATUS, 0, 4096)).errno(),
        EINVAL
    );
}

#[test]
fn protocol_violation_ends_connection() {
    let running = start_server();
    let mut client = NbdClient::connect_without_handshake(&running.path());
    client.send(&0xffu32.to_be_bytes());
    assert!(client.is_closed(), "unknown flags");

    let mut client = NbdClient::connect(&running.path());
    client.send(b"GET / HTTP/1.1\r\n");
    assert!(client.is_closed(), "no option");

    let mut client = NbdClient::connect(&running.path());
    let mut long = option(GO, &[]);
    long[12..].copy_from_slice(&(1u32 << 30).to_be_bytes());
    client.send(&long);
    assert_eq!(client.take_answer().1, TOO_BIG);
    assert!(client.is_closed(), "a long option");

    let mut client = NbdClient::connect(&running.path());
    for _ in 0..256 {
        client.option(99, &[]);
    }
    client.send(&option(99, &[]));
    assert!(client.is_closed(), "too many options");
    running.wait_until_idle();
    assert_eq!(running.server.counters().violations, 4);
}

#[test]
fn slow_handshake_times_out() {
    let limits = Limits {
        handshake: Duration::from_millis(50),
        ..Limits::default()
    };
    let running = TestServer::with_limits(SIZE, CompletionMode::AtOnce, limits);
    let mut silent = NbdClient::connect_without_handshake(&running.path());
    let mut half = NbdClient::connect(&running.path());
    half.send(&option(GO, &info("disk", &[]))[..20]);
    assert!(silent.is_closed() && half.is_closed());
    running.wait_until_idle();
    assert_eq!(running.server.counters().violations, 2);
}

#[test]
fn handshake_without_reading_answers_times_out() {
    let limits = Limits {
        handshake: Duration::from_millis(100),
        ..Limits::default()
    };
    let running = TestServer::with_limits(SIZE, CompletionMode::AtOnce, limits);
    for number in 0..400 {
        add_export(&running, &format!("e{number}"), false, &"d".repeat(1000));
    }
    let mut client = NbdClient::connect(&running.path());
    client.send(&option(LIST, &[]));
    running.wait_until_idle();
}

#[test]
fn unopenable_space_is_refused_with_reason() {
    let running = start_server();
    let why = "volume v is awaiting its manager";
    running
        .memory
        .fail_with(Some(pagemesh_base::space::SpaceError::Unavailable(
            why.into(),
        )));
    let mut client = NbdClient::connect(&running.path());
    let answers = client.option(GO, &info("disk", &[]));
    assert_eq!(answers, [(UNKNOWN, why.as_bytes().to_vec())]);
    assert_eq!(running.exports.connections("disk"), Some(0));
    running.memory.fail_with(None);
    client.go("disk");
    assert_eq!(running.exports.connections("disk"), Some(1));
}

#[test]
fn full_space_refuses_handshake_until_it_has_room() {
    let running = start_server();
    let why = "the pool has no session left";
    let full = pagemesh_base::space::SpaceError::Busy(why.into());
    running.memory.fail_with(Some(full));
    let mut client = NbdClient::connect(&running.path());
    let answers = client.option(GO, &info("disk", &[]));
    assert_eq!(answers, [(POLICY, why.as_bytes().to_vec())]);
    running.memory.fail_with(None);
    client.go("disk");
    assert_eq!(
        client.request(&NbdRequest::new(FLUSH, 0, 0)),
        NbdReply::Done
    );
}

#[test]
fn fenced_space_refuses_handshake_and_says_so() {
    let running = start_server();
    let fenced = pagemesh_base::space::SpaceError::Fenced;
    running.memory.fail_with(Some(fenced));
    let mut client = NbdClient::connect(&running.path());
    let answers = client.option(GO, &info("disk", &[]));
    let why = String::from_utf8(answers[0].1.clone()).unwrap();
    assert_eq!(answers[0].0, SHUTTING_DOWN, "{why}");
    assert!(why.contains("another client attached"), "{why}");
}

#[test]
fn new_connection_sees_new_size() {
    let running = start_server();
    let mut old = NbdClient::open(&running.path());
    running.memory.grow(2 * SIZE);
    assert_eq!(
        old.request(&NbdRequest::write(SIZE, vec![1; 10])).errno(),
        ENOSPC
    );
    let mut new = NbdClient::open(&running.path());
    assert_eq!(new.size_bytes, 2 * SIZE);
    assert_eq!(
        new.request(&NbdRequest::write(SIZE, vec![1; 10])),
        NbdReply::Done
    );
}
