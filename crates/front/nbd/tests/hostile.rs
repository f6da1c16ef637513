//! Whatever bytes a client sends: the server goes on serving others, and
//! nothing of the client stays.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::Shutdown;
use support::Running;
use support::client::*;
use support::memory::Mode;

const SIZE: u64 = 1 << 20;

/// Sends the bytes, hears the server out, and checks what is left behind.
fn check(running: &Running, mut client: Client, bytes: &[u8]) {
    let mut reader = client.stream.try_clone().unwrap();
    let listener = std::thread::spawn(move || {
        // Its end may come as an error; it comes in any case.
        let _ = reader.read_to_end(&mut Vec::new());
    });
    // The server may hang up before the end.
    let _ = client.stream.write_all(bytes);
    let _ = client.stream.shutdown(Shutdown::Write);
    listener.join().unwrap();
    drop(client);
    running.await_idle();
    let mut other = Client::open(&running.path());
    assert_eq!(other.ask(&Ask::new(READ, 0, 1)).errno(), 0);
    other.send(&Ask::new(DISC, 0, 0).encode(1));
    assert!(other.is_closed());
}

/// An option with a plausible frame.
fn some_option() -> impl Strategy<Value = Vec<u8>> {
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
fn some_request() -> impl Strategy<Value = Vec<u8>> {
    let len = prop_oneof![0..70_000u32, Just((33 << 20) + 1), any::<u32>()];
    let offset = prop_oneof![0..SIZE, any::<u64>()];
    let flags = prop_oneof![Just(0), 0..32u16, any::<u16>()];
    let data = prop::collection::vec(any::<u8>(), 0..70_000);
    (0..9u16, flags, offset, len, data).prop_map(|(command, flags, offset, len, data)| {
        let data = if command == WRITE { data } else { vec![] };
        // Half of the writes are framed right.
        let len = if offset % 2 == 0 && command == WRITE {
            data.len() as u32
        } else {
            len
        };
        Ask {
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
    fn noise_instead_of_a_handshake(
        noises in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 60),
    ) {
        let running = Running::new(SIZE, Mode::AtOnce);
        for noise in noises {
            check(&running, Client::connect_silent(&running.path()), &noise);
        }
    }

    #[test]
    fn options_of_any_kind(
        scripts in prop::collection::vec(prop::collection::vec(some_option(), 1..12), 150),
    ) {
        let running = Running::new(SIZE, Mode::AtOnce);
        for script in scripts {
            check(&running, Client::connect(&running.path()), &script.concat());
        }
    }

    #[test]
    fn requests_of_any_kind(
        scripts in prop::collection::vec(prop::collection::vec(some_request(), 1..12), 100),
        seed: u64,
    ) {
        let running = Running::new(SIZE, Mode::Shuffled(seed));
        for script in scripts {
            check(&running, Client::open(&running.path()), &script.concat());
        }
    }

    #[test]
    fn noise_instead_of_requests(
        noises in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 60),
    ) {
        let running = Running::new(SIZE, Mode::AtOnce);
        for noise in noises {
            check(&running, Client::open(&running.path()), &noise);
        }
    }
}
