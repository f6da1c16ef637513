//! What clients may say before the transmission phase, and what they hear.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use pagemesh_nbd::{ExportOptions, Limits};
use std::sync::Arc;
use std::time::Duration;
use support::Running;
use support::client::*;
use support::memory::{Memory, Mode};

const SIZE: u64 = 1 << 20;

fn running() -> Running {
    Running::new(SIZE, Mode::AtOnce)
}

fn add(running: &Running, name: &str, read_only: bool, description: &str) {
    let options = ExportOptions {
        read_only,
        description: description.into(),
    };
    let space = Arc::new(Memory::new(2 * SIZE, Mode::AtOnce));
    running.exports.add(name, space, options).unwrap();
}

#[test]
fn go_tells_size_flags_and_block_sizes() {
    let running = running();
    let mut client = Client::connect(&running.path());
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
    let running = running();
    add(&running, "frozen", true, "");
    let mut client = Client::connect(&running.path());
    client.go("frozen");
    assert_eq!(client.flags & 0b1000_0110_0010, 0b10);
    for ask in [
        Ask::write(0, vec![1; 512]),
        Ask::write(0, vec![1; 100_000]),
        Ask::new(TRIM, 0, 512),
        Ask::new(ZEROES, 0, 512),
    ] {
        assert_eq!(client.ask(&ask).errno(), EPERM);
    }
    assert_eq!(
        client.ask(&Ask::new(READ, 0, 512)),
        Answer::Data(0, vec![0; 512])
    );
}

#[test]
fn the_default_export_is_the_only_one() {
    let running = running();
    Client::connect(&running.path()).go("");
    add(&running, "other", false, "");
    let mut client = Client::connect(&running.path());
    let answers = client.option(GO, &info("", &[]));
    assert_eq!(answers[0].0, UNKNOWN);
    client.go("other");
    assert_eq!(client.size_bytes, 2 * SIZE);
}

#[test]
fn an_unknown_export_is_named_in_the_refusal() {
    let running = running();
    let mut client = Client::connect(&running.path());
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
    let running = running();
    add(&running, "a", false, "the first");
    let mut client = Client::connect(&running.path());
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
    let running = running();
    let mut client = Client::connect(&running.path());
    assert_eq!(client.option(ABORT, &[]), [(ACK, vec![])]);
    assert!(client.is_closed());
}

#[test]
fn export_name_pads_only_for_old_clients() {
    let running = running();
    for (client_flags, padding) in [(3u32, 0), (1, 124)] {
        let mut client = Client::connect_silent(&running.path());
        client.take(18);
        client.send(&client_flags.to_be_bytes());
        client.send(&option(EXPORT_NAME, b"disk"));
        assert_eq!(client.take_u64(), SIZE);
        client.take_u16();
        assert_eq!(client.take(padding), vec![0; padding]);
        assert_eq!(client.ask(&Ask::new(FLUSH, 0, 0)), Answer::Done);
    }
    let mut client = Client::connect(&running.path());
    client.send(&option(EXPORT_NAME, b"other"));
    assert!(client.is_closed());
}

#[test]
fn requests_sent_right_behind_the_choice_are_served() {
    let running = running();
    let mut client = Client::connect(&running.path());
    let mut bytes = option(EXPORT_NAME, b"disk");
    bytes.extend(Ask::write(0, vec![7; 9000]).encode(5));
    client.send(&bytes);
    client.take(10);
    assert_eq!(client.answer(|_| 0), (5, Answer::Done));
    assert_eq!(
        running.memory.bytes()[..9001],
        [&[7; 9000][..], &[0]].concat()
    );
}

#[test]
fn unknown_and_malformed_options_leave_the_connection_usable() {
    let running = running();
    let mut client = Client::connect(&running.path());
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
fn contexts_are_chosen_for_one_export_after_structured_replies() {
    let running = running();
    add(&running, "other", false, "");
    let mut client = Client::connect(&running.path());
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
    assert_eq!(client.ask(&Ask::new(STATUS, 0, 4096)).errno(), EINVAL);
}

#[test]
fn what_is_not_the_protocol_ends_the_connection() {
    let running = running();
    let mut client = Client::connect_silent(&running.path());
    client.send(&0xffu32.to_be_bytes());
    assert!(client.is_closed(), "unknown flags");

    let mut client = Client::connect(&running.path());
    client.send(b"GET / HTTP/1.1\r\n");
    assert!(client.is_closed(), "no option");

    let mut client = Client::connect(&running.path());
    let mut long = option(GO, &[]);
    long[12..].copy_from_slice(&(1u32 << 30).to_be_bytes());
    client.send(&long);
    assert_eq!(client.take_answer().1, TOO_BIG);
    assert!(client.is_closed(), "a long option");

    let mut client = Client::connect(&running.path());
    for _ in 0..256 {
        client.option(99, &[]);
    }
    client.send(&option(99, &[]));
    assert!(client.is_closed(), "too many options");
    running.await_idle();
    assert_eq!(running.server.counters().violated, 4);
}

#[test]
fn a_handshake_that_takes_too_long_ends() {
    let limits = Limits {
        handshake: Duration::from_millis(50),
        ..Limits::default()
    };
    let running = Running::with(SIZE, Mode::AtOnce, limits);
    let mut silent = Client::connect_silent(&running.path());
    let mut half = Client::connect(&running.path());
    half.send(&option(GO, &info("disk", &[]))[..20]);
    assert!(silent.is_closed() && half.is_closed());
    running.await_idle();
    assert_eq!(running.server.counters().violated, 2);
}

#[test]
fn a_client_that_does_not_read_answers_ends_too() {
    let limits = Limits {
        handshake: Duration::from_millis(100),
        ..Limits::default()
    };
    let running = Running::with(SIZE, Mode::AtOnce, limits);
    for number in 0..400 {
        add(&running, &format!("e{number}"), false, &"d".repeat(1000));
    }
    let mut client = Client::connect(&running.path());
    client.send(&option(LIST, &[]));
    running.await_idle();
}

#[test]
fn a_space_that_cannot_be_opened_is_refused_with_its_reason() {
    let running = running();
    let why = "volume v is awaiting its manager";
    running
        .memory
        .fail_with(Some(pagemesh_base::space::SpaceError::Unavailable(
            why.into(),
        )));
    let mut client = Client::connect(&running.path());
    let answers = client.option(GO, &info("disk", &[]));
    assert_eq!(answers, [(UNKNOWN, why.as_bytes().to_vec())]);
    assert_eq!(running.exports.connections("disk"), Some(0));
    running.memory.fail_with(None);
    client.go("disk");
    assert_eq!(running.exports.connections("disk"), Some(1));
}

#[test]
fn full_space_refuses_handshake_until_it_has_room() {
    let running = running();
    let why = "the pool has no session left";
    let full = pagemesh_base::space::SpaceError::Busy(why.into());
    running.memory.fail_with(Some(full));
    let mut client = Client::connect(&running.path());
    let answers = client.option(GO, &info("disk", &[]));
    assert_eq!(answers, [(POLICY, why.as_bytes().to_vec())]);
    running.memory.fail_with(None);
    client.go("disk");
    assert_eq!(client.ask(&Ask::new(FLUSH, 0, 0)), Answer::Done);
}

#[test]
fn fenced_space_refuses_handshake_and_says_so() {
    let running = running();
    let fenced = pagemesh_base::space::SpaceError::Fenced;
    running.memory.fail_with(Some(fenced));
    let mut client = Client::connect(&running.path());
    let answers = client.option(GO, &info("disk", &[]));
    let why = String::from_utf8(answers[0].1.clone()).unwrap();
    assert_eq!(answers[0].0, SHUTTING_DOWN, "{why}");
    assert!(why.contains("another client attached"), "{why}");
}

#[test]
fn a_new_size_is_seen_by_new_connections() {
    let running = running();
    let mut old = Client::open(&running.path());
    running.memory.grow(2 * SIZE);
    assert_eq!(old.ask(&Ask::write(SIZE, vec![1; 10])).errno(), ENOSPC);
    let mut new = Client::open(&running.path());
    assert_eq!(new.size_bytes, 2 * SIZE);
    assert_eq!(new.ask(&Ask::write(SIZE, vec![1; 10])), Answer::Done);
}
