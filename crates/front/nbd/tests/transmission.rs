//! Requests and their replies.

use crate::support;
use pagemesh_base::space::SpaceError;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use support::client::*;
use support::memory::CompletionMode;
use support::{TestServer, wait_until};

const SIZE: u64 = 300_000;

fn start_server() -> TestServer {
    TestServer::new(SIZE, CompletionMode::AtOnce)
}

#[test]
fn written_data_is_read_with_both_reply_kinds() {
    let running = start_server();
    let data: Vec<u8> = (0..200_000u32).map(|at| (at % 251) as u8).collect();
    let mut structured = NbdClient::open(&running.path());
    let mut simple = NbdClient::open_simple(&running.path());
    for (first, len) in [(1, 1), (4096, 4096), (5000, 40_000), (0, 200_000)] {
        let wanted = data[..len as usize].to_vec();
        assert_eq!(
            simple.request(&NbdRequest::write(first, wanted.clone())),
            NbdReply::Done
        );
        let read = NbdRequest::new(READ, first, len);
        assert_eq!(simple.request(&read), NbdReply::Data(0, wanted.clone()));
        let read = read.flags(DF);
        assert_eq!(structured.request(&read), NbdReply::Data(first, wanted));
    }
    assert_eq!(
        simple
            .request(&NbdRequest::new(READ, 0, 1).flags(DF))
            .errno(),
        EINVAL
    );
}

#[test]
fn bad_requests_fail_and_connection_survives() {
    let running = start_server();
    let mut client = NbdClient::open(&running.path());
    let end = SIZE - 10;
    for (ask, errno) in [
        (NbdRequest::new(READ, end, 11), EINVAL),
        (NbdRequest::new(READ, u64::MAX, 2), EINVAL),
        (NbdRequest::write(end, vec![1; 11]), ENOSPC),
        (NbdRequest::write(u64::MAX - 5, vec![1; 20_000]), ENOSPC),
        (NbdRequest::new(ZEROES, end, 11), ENOSPC),
        (NbdRequest::new(TRIM, end, u32::MAX), EINVAL),
        (NbdRequest::new(STATUS, end, 11), EINVAL),
        (NbdRequest::new(READ, 0, 0), EINVAL),
        (NbdRequest::write(0, vec![]), EINVAL),
        (NbdRequest::new(FLUSH, 0, 1), EINVAL),
        (NbdRequest::new(CACHE, 0, 4096), EINVAL),
        (NbdRequest::new(77, 0, 0), EINVAL),
        (NbdRequest::new(READ, 0, 1).flags(NO_HOLE), EINVAL),
        (NbdRequest::new(TRIM, 0, 1).flags(1 << 9), EINVAL),
        (NbdRequest::new(READ, 0, (32 << 20) + 1), EINVAL),
        (NbdRequest::write(0, vec![1; (32 << 20) + 1]), EINVAL),
    ] {
        let answer = client.request(&ask);
        assert_eq!(answer.errno(), errno, "{} {answer:?}", ask.command);
        assert!(matches!(answer, NbdReply::Error(_, why) if !why.is_empty()));
    }
    assert_eq!(
        client.request(&NbdRequest::new(READ, end, 10)),
        NbdReply::Data(end, vec![0; 10])
    );
}

#[test]
fn read_above_payload_limit_is_refused() {
    let running = TestServer::new(40 << 20, CompletionMode::AtOnce);
    let mut client = NbdClient::open(&running.path());
    assert_eq!(
        client
            .request(&NbdRequest::new(READ, 0, (32 << 20) + 1))
            .errno(),
        EINVAL
    );
    let most = vec![3; 32 << 20];
    assert_eq!(
        client.request(&NbdRequest::write(9, most.clone())),
        NbdReply::Done
    );
    assert_eq!(
        client.request(&NbdRequest::new(READ, 9, 32 << 20)),
        NbdReply::Data(9, most)
    );
}

#[test]
fn garbage_and_oversized_writes_end_connection() {
    let running = start_server();
    let mut client = NbdClient::open(&running.path());
    client.send(&[0x55; 28]);
    assert!(client.is_closed());
    let mut client = NbdClient::open(&running.path());
    let mut absurd = NbdRequest::new(WRITE, 0, u32::MAX).encode(1);
    absurd.extend([0; 5000]);
    client.send(&absurd);
    assert!(client.is_closed());
    running.wait_until_idle();
    assert_eq!(running.server.counters().violations, 2);
}

#[test]
fn partial_request_has_no_effect() {
    let running = start_server();
    for sent in [1, 27, 28, 29, 100, 60_000] {
        let mut client = NbdClient::open(&running.path());
        client.send(&NbdRequest::write(0, vec![9; 100_000]).encode(1)[..sent]);
    }
    running.wait_until_idle();
    assert!(running.memory.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn fua_and_flush_reach_the_space() {
    let running = start_server();
    let mut client = NbdClient::open(&running.path());
    let seen = running.memory.counters();
    let counts = || {
        let flushes = seen.flushes.load(Ordering::SeqCst);
        (seen.durable_writes.load(Ordering::SeqCst), flushes)
    };
    client.request(&NbdRequest::write(0, vec![1; 10]));
    client.request(&NbdRequest::new(TRIM, 0, 10));
    assert_eq!(counts(), (0, 0));
    client.request(&NbdRequest::write(0, vec![1; 10]).flags(FUA));
    client.request(&NbdRequest::new(ZEROES, 0, 10).flags(FUA));
    assert_eq!(counts(), (2, 0));
    client.request(&NbdRequest::new(ZEROES, 0, 10).flags(FUA | NO_HOLE));
    assert_eq!(counts(), (3, 0));
    client.request(&NbdRequest::new(TRIM, 0, 10).flags(FUA));
    assert_eq!(counts(), (3, 1));
    assert_eq!(
        client.request(&NbdRequest::new(FLUSH, 0, 0)),
        NbdReply::Done
    );
    assert_eq!(
        client
            .request(&NbdRequest::new(READ, 0, 1).flags(FUA))
            .errno(),
        0
    );
    assert_eq!(counts(), (3, 2));
}

#[test]
fn block_status_distinguishes_data_and_holes() {
    const MAPPED: u32 = 0;
    const HOLE: u32 = 3;
    let running = TestServer::new(8 << 20, CompletionMode::AtOnce);
    let mut client = NbdClient::open(&running.path());
    client.request(&NbdRequest::write(4096, vec![1; 8192]));
    let status = NbdRequest::new(STATUS, 0, 20_480);
    let all = NbdReply::Extents(vec![(4096, HOLE), (8192, MAPPED), (8192, HOLE)]);
    assert_eq!(client.request(&status), all);
    let one = status.clone().flags(REQ_ONE);
    assert_eq!(client.request(&one), NbdReply::Extents(vec![(4096, HOLE)]));

    let zeroes = NbdRequest::new(ZEROES, 0, 5 << 20);
    assert_eq!(
        client.request(&zeroes.clone().flags(FAST_ZERO)),
        NbdReply::Done
    );
    assert_eq!(
        client.request(&status),
        NbdReply::Extents(vec![(20_480, HOLE)])
    );
    let both = zeroes.clone().flags(FAST_ZERO | NO_HOLE);
    assert_eq!(client.request(&both).errno(), ENOTSUP);
    assert_eq!(client.request(&zeroes.flags(NO_HOLE)), NbdReply::Done);
    let status = NbdRequest::new(STATUS, 0, 8 << 20);
    let all = NbdReply::Extents(vec![(5 << 20, MAPPED), (3 << 20, HOLE)]);
    assert_eq!(client.request(&status), all);

    let mut simple = NbdClient::open_simple(&running.path());
    assert_eq!(simple.request(&status).errno(), EINVAL);
}

#[test]
fn space_errors_reach_client_with_text() {
    let running = start_server();
    let mut client = NbdClient::open(&running.path());
    let mut simple = NbdClient::open_simple(&running.path());
    let place = "brick 3".to_string();
    for (error, errno) in [
        (SpaceError::NoSpace("v".into()), ENOSPC),
        (
            SpaceError::Damaged {
                offset: 4096,
                place,
            },
            EIO,
        ),
        (SpaceError::Unavailable("gone".into()), EIO),
        (
            SpaceError::OutOfRange {
                offset: 1,
                end: 2,
                size_bytes: 1,
            },
            EINVAL,
        ),
    ] {
        running.memory.fail_with(Some(error.clone()));
        for ask in [
            NbdRequest::new(READ, 0, 5000),
            NbdRequest::write(0, vec![1; 5000]),
            NbdRequest::new(TRIM, 0, 1).flags(FUA),
            NbdRequest::new(ZEROES, 0, 1).flags(NO_HOLE),
            NbdRequest::new(FLUSH, 0, 0),
            NbdRequest::new(STATUS, 0, 1),
        ] {
            let wanted = NbdReply::Error(errno, error.to_string());
            assert_eq!(client.request(&ask), wanted, "{ask:?}");
            if ask.command != STATUS {
                assert_eq!(simple.request(&ask).errno(), errno);
            }
        }
    }
    running.memory.fail_with(None);
    assert_eq!(
        client.request(&NbdRequest::new(FLUSH, 0, 0)),
        NbdReply::Done
    );
}

#[test]
fn failed_channel_ends_connection_after_error() {
    let running = start_server();
    for (error, errno) in [
        (SpaceError::Fenced, ESHUTDOWN),
        (SpaceError::Busy("no session".into()), EIO),
    ] {
        let mut client = NbdClient::open(&running.path());
        running.memory.fail_with(Some(error));
        assert_eq!(client.request(&NbdRequest::new(FLUSH, 0, 0)).errno(), errno);
        assert!(client.is_closed());
        running.memory.fail_with(None);
        // Its cause is over, and so is the error.
        let mut client = NbdClient::open(&running.path());
        assert_eq!(
            client.request(&NbdRequest::new(FLUSH, 0, 0)),
            NbdReply::Done
        );
    }
}

#[test]
fn requests_in_flight_stay_within_channel_limit() {
    const SENT_REQUESTS: usize = 3000;
    let running = TestServer::new(SIZE, CompletionMode::Held);
    let mut client = NbdClient::open(&running.path());
    let flushes: Vec<u8> = (0..SENT_REQUESTS as u64)
        .flat_map(|cookie| NbdRequest::new(FLUSH, 0, 0).encode(cookie))
        .collect();
    client.send(&flushes);
    let submitted = || running.memory.counters().submitted.load(Ordering::SeqCst);
    wait_until("requests are submitted", || submitted() >= 1024);
    assert_eq!(submitted(), 1024);
    running.memory.release();
    let mut seen = [false; SENT_REQUESTS];
    for _ in 0..SENT_REQUESTS {
        let (cookie, answer) = client.read_reply(|_| 0);
        assert_eq!(answer, NbdReply::Done);
        assert!(!std::mem::replace(&mut seen[cookie as usize], true));
    }
}

#[test]
fn held_bytes_are_bounded_and_requests_answered() {
    const SENT_REQUESTS: u64 = 12;
    let running = TestServer::new(32 << 20, CompletionMode::Held);
    let mut client = NbdClient::open(&running.path());
    for cookie in 0..SENT_REQUESTS {
        client.send(&NbdRequest::new(READ, 0, 16 << 20).encode(cookie));
    }
    let submitted = || running.memory.counters().submitted.load(Ordering::SeqCst);
    wait_until("requests are submitted", || submitted() >= 4);
    assert_eq!(submitted(), 4, "64 MiB are 4 reads of 16 MiB");
    running.memory.release();
    for _ in 0..SENT_REQUESTS {
        let (_, answer) = client.read_reply(|_| 0);
        assert_eq!(answer, NbdReply::Data(0, vec![0; 16 << 20]));
    }
}

#[test]
fn channel_closes_after_requests_of_gone_client_end() {
    for says_so in [true, false] {
        let running = TestServer::new(SIZE, CompletionMode::Held);
        let mut client = NbdClient::open(&running.path());
        client.send(&NbdRequest::write(0, vec![1; 4096]).encode(1));
        let seen = running.memory.counters();
        wait_until("the write is submitted", || {
            seen.submitted.load(Ordering::SeqCst) == 1
        });
        if says_so {
            client.send(&NbdRequest::new(DISC, 0, 0).encode(2));
        }
        drop(client);
        // Another connection opens and closes meanwhile.
        let mut other = NbdClient::open(&running.path());
        other.send(&NbdRequest::new(DISC, 0, 0).encode(2));
        assert!(other.is_closed());
        let channels = || seen.channels.load(Ordering::SeqCst);
        wait_until("the other channel closes", || channels() < 2);
        assert_eq!(channels(), 1);
        running.memory.release();
        running.wait_until_idle();
    }
}

#[test]
fn replies_before_disconnect_arrive() {
    let running = TestServer::new(SIZE, CompletionMode::Shuffled(9));
    let mut client = NbdClient::open(&running.path());
    let mut bytes = Vec::new();
    for cookie in 0..50 {
        bytes.extend(NbdRequest::new(READ, 0, 4096).encode(cookie));
    }
    bytes.extend(NbdRequest::new(DISC, 0, 0).encode(99));
    bytes.extend([0xff; 1000]);
    client.send(&bytes);
    for _ in 0..50 {
        assert_eq!(client.read_reply(|_| 0).1, NbdReply::Data(0, vec![0; 4096]));
    }
    assert!(client.is_closed());
    assert_eq!(running.server.counters().violations, 0);
}

fn any_requests() -> impl Strategy<Value = Vec<NbdRequest>> {
    let range = (0..SIZE, 1..60_000u32).prop_map(|(offset, len)| {
        let len = u64::from(len).min(SIZE - offset) as u32;
        (offset, len)
    });
    let ask = (0..5u8, range, any::<u8>(), any::<bool>()).prop_map(|(kind, range, byte, fua)| {
        let (offset, len) = range;
        let flags = if fua { FUA } else { 0 };
        let ask = match kind {
            0 | 1 => NbdRequest::new(READ, offset, len),
            2 => NbdRequest::write(offset, vec![byte; len as usize]),
            3 => NbdRequest::new(TRIM, offset, len),
            _ => NbdRequest::new(ZEROES, offset, len),
        };
        ask.flags(flags)
    });
    prop::collection::vec(ask, 1..40)
}

/// The expected reply of each request, if they take effect in this order.
fn expected_replies(model: &mut [u8], asks: &[NbdRequest]) -> HashMap<u64, NbdReply> {
    let mut wanted = HashMap::new();
    for (cookie, ask) in asks.iter().enumerate() {
        let start = ask.offset as usize;
        let range = start..start + ask.len as usize;
        let answer = match ask.command {
            READ => NbdReply::Data(ask.offset, model[range].to_vec()),
            WRITE => {
                model[range].copy_from_slice(&ask.data);
                NbdReply::Done
            }
            _ => {
                model[range].fill(0);
                NbdReply::Done
            }
        };
        wanted.insert(cookie as u64, answer);
    }
    wanted
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Any requests, cut into pieces anywhere, answered in any order.
    #[test]
    fn pipelined_requests_act_like_sequential_ones(
        asks in any_requests(),
        seed: u64,
        at_once: bool,
        cuts in prop::collection::vec(1..20_000usize, 1..8),
    ) {
        let mode = if at_once { CompletionMode::AtOnce } else { CompletionMode::Shuffled(seed) };
        let running = TestServer::new(SIZE, mode);
        let client = NbdClient::open(&running.path());
        let mut model = vec![0; SIZE as usize];
        let mut wanted = expected_replies(&mut model, &asks);
        let bytes: Vec<u8> = asks
            .iter()
            .enumerate()
            .flat_map(|(cookie, ask)| ask.encode(cookie as u64))
            .collect();
        let mut reader = NbdClient {
            stream: client.stream.try_clone().unwrap(),
            ..client
        };
        let sender = std::thread::spawn(move || {
            let mut client = client;
            let mut rest = &bytes[..];
            for cut in cuts.iter().cycle() {
                let (piece, after) = rest.split_at(rest.len().min(*cut));
                client.send(piece);
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
        });
        while !wanted.is_empty() {
            let (cookie, answer) = reader.read_reply(|_| 0);
            prop_assert_eq!(wanted.remove(&cookie), Some(answer));
        }
        sender.join().unwrap();
        prop_assert_eq!(running.memory.bytes(), model);
    }
}
