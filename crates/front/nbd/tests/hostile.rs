//! Arbitrary bytes from a client: the server goes on serving others, and no resource of the client
//! stays.

use crate::support;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::Shutdown;
use support::TestServer;
use support::client::*;
use support::memory::CompletionMode;

const SIZE: u64 = 1 << 20;

/// Sends the bytes, reads all answers, and checks that nothing is left.
fn send_and_check(running: &TestServer, mut client: NbdClient, bytes: &[u8]) {
    let mut reader = client.stream.try_clone().unwrap();
    let listener = std::thread::spawn(move || {
        // The end may come as an error; it comes in any case.
        let _ = reader.read_to_end(&mut Vec::new());
    });
    // The server may hang up before the end.
    let _ = client.stream.write_all(bytes);
    let _ = client.stream.shutdown(Shutdown::Write);
    listener.join().unwrap();
    drop(client);
    running.wait_until_idle();
    let mut other = NbdClient::open(&running.path());
    assert_eq!(other.request(&NbdRequest::new(READ, 0, 1)).errno(), 0);
    other.send(&NbdRequest::new(DISC, 0, 0).encode(1));
    assert!(other.is_closed());
}

/// An option with a plausible frame.
fn any_option() -> impl Strategy<Value = Vec<u8>> {
    let data = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        Just(info("disk", &[0, 3])),
        Just(context("disk", &["base:allocation"])),
        Just(b"disk".to_vec()),
    ];
    (0..13u32, data, any::<prop::sample::Index>(), 0..4u8).prop_map(|(kind, data, at, harm)| {
        let mut bytes = option(kind, &data);
        if harm == 0 {
            let at = at.index(bytes.len());
            bytes[at] ^= 0x81;
        }
        bytes
    })
}

/// A request with a plausible frame.
fn any_request() -> impl Strategy<Value = Vec<u8>> {
    let len = prop_oneof![0..70_000u32, Just((33 << 20) + 1), any::<u32>()];
    let offset = prop_oneof![0..SIZE, any::<u64>()];
    let flags = prop_oneof![Just(0), 0..32u16, any::<u16>()];
    let data = prop::collection::vec(any::<u8>(), 0..70_000);
    (0..9u16, flags, offset, len, data).prop_map(|(command, flags, offset, len, data)| {
        let data = if command == WRITE { data } else { vec![] };
        // Half of the writes have the right length.
        let len = if offset % 2 == 0 && command == WRITE {
            data.len() as u32
        } else {
            len
        };
        NbdRequest {
            command,
            flags,
            offset,
            len,
            data,
        }
        .encode(offset)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_as_handshake_are_survived(
        noises in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 60),
    ) {
        let running = TestServer::new(SIZE, CompletionMode::AtOnce);
        for noise in noises {
            send_and_check(&running, NbdClient::connect_without_handshake(&running.path()), &noise);
        }
    }

    #[test]
    fn random_options_are_survived(
        scripts in prop::collection::vec(prop::collection::vec(any_option(), 1..12), 150),
    ) {
        let running = TestServer::new(SIZE, CompletionMode::AtOnce);
        for script in scripts {
            send_and_check(&running, NbdClient::connect(&running.path()), &script.concat());
        }
    }

    #[test]
    fn random_requests_are_survived(
        scripts in prop::collection::vec(prop::collection::vec(any_request(), 1..12), 100),
        seed: u64,
    ) {
        let running = TestServer::new(SIZE, CompletionMode::Shuffled(seed));
        for script in scripts {
            send_and_check(&running, NbdClient::open(&running.path()), &script.concat());
        }
    }

    #[test]
    fn random_bytes_as_requests_are_survived(
        noises in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 60),
    ) {
        let running = TestServer::new(SIZE, CompletionMode::AtOnce);
        for noise in noises {
            send_and_check(&running, NbdClient::open(&running.path()), &noise);
        }
    }
}
