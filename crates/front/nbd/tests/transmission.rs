//! Requests and their replies.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use pagemesh_base::space::SpaceError;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use support::client::*;
use support::memory::Mode;
use support::{Running, await_that};

const SIZE: u64 = 300_000;

fn running() -> Running {
    Running::new(SIZE, Mode::AtOnce)
}

#[test]
fn what_was_written_is_read_with_either_kind_of_reply() {
    let running = running();
    let data: Vec<u8> = (0..200_000u32).map(|at| (at % 251) as u8).collect();
    let mut structured = Client::open(&running.path());
    let mut simple = Client::open_simple(&running.path());
    for (first, len) in [(1, 1), (4096, 4096), (5000, 40_000), (0, 200_000)] {
        let wanted = data[..len as usize].to_vec();
        assert_eq!(simple.ask(&Ask::write(first, wanted.clone())), Answer::Done);
        let read = Ask::new(READ, first, len);
        assert_eq!(simple.ask(&read), Answer::Data(0, wanted.clone()));
        let read = read.flags(DF);
        assert_eq!(structured.ask(&read), Answer::Data(first, wanted));
    }
    assert_eq!(simple.ask(&Ask::new(READ, 0, 1).flags(DF)).errno(), EINVAL);
}

#[test]
fn bad_requests_fail_and_the_connection_goes_on() {
    let running = running();
    let mut client = Client::open(&running.path());
    let end = SIZE - 10;
    for (ask, errno) in [
        (Ask::new(READ, end, 11), EINVAL),
        (Ask::new(READ, u64::MAX, 2), EINVAL),
        (Ask::write(end, vec![1; 11]), ENOSPC),
        (Ask::write(u64::MAX - 5, vec![1; 20_000]), ENOSPC),
        (Ask::new(ZEROES, end, 11), ENOSPC),
        (Ask::new(TRIM, end, u32::MAX), EINVAL),
        (Ask::new(STATUS, end, 11), EINVAL),
        (Ask::new(READ, 0, 0), EINVAL),
        (Ask::write(0, vec![]), EINVAL),
        (Ask::new(FLUSH, 0, 1), EINVAL),
        (Ask::new(CACHE, 0, 4096), EINVAL),
        (Ask::new(77, 0, 0), EINVAL),
        (Ask::new(READ, 0, 1).flags(NO_HOLE), EINVAL),
        (Ask::new(TRIM, 0, 1).flags(1 << 9), EINVAL),
        (Ask::new(READ, 0, (32 << 20) + 1), EINVAL),
        (Ask::write(0, vec![1; (32 << 20) + 1]), EINVAL),
    ] {
        let answer = client.ask(&ask);
        assert_eq!(answer.errno(), errno, "{} {answer:?}", ask.command);
        assert!(matches!(answer, Answer::Error(_, why) if !why.is_empty()));
    }
    assert_eq!(
        client.ask(&Ask::new(READ, end, 10)),
        Answer::Data(end, vec![0; 10])
    );
}

#[test]
fn a_read_longer_than_the_limit_is_refused_within_the_size() {
    let running = Running::new(40 << 20, Mode::AtOnce);
    let mut client = Client::open(&running.path());
    assert_eq!(
        client.ask(&Ask::new(READ, 0, (32 << 20) + 1)).errno(),
        EINVAL
    );
    let most = vec![3; 32 << 20];
    assert_eq!(client.ask(&Ask::write(9, most.clone())), Answer::Done);
    assert_eq!(
        client.ask(&Ask::new(READ, 9, 32 << 20)),
        Answer::Data(9, most)
    );
}

#[test]
fn garbage_and_absurd_writes_end_the_connection() {
    let running = running();
    let mut client = Client::open(&running.path());
    client.send(&[0x55; 28]);
    assert!(client.is_closed());
    let mut client = Client::open(&running.path());
    let mut absurd = Ask::new(WRITE, 0, u32::MAX).encode(1);
    absurd.extend([0; 5000]);
    client.send(&absurd);
    assert!(client.is_closed());
    running.await_idle();
    assert_eq!(running.server.counters().violated, 2);
}

#[test]
fn half_a_request_changes_nothing_and_leaves_nothing() {
    let running = running();
    for sent in [1, 27, 28, 29, 100, 60_000] {
        let mut client = Client::open(&running.path());
        client.send(&Ask::write(0, vec![9; 100_000]).encode(1)[..sent]);
    }
    running.await_idle();
    assert!(running.memory.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn durability_is_passed_on() {
    let running = running();
    let mut client = Client::open(&running.path());
    let seen = running.memory.seen();
    let counts = || {
        let flushes = seen.flushes.load(Ordering::SeqCst);
        (seen.durable_writes.load(Ordering::SeqCst), flushes)
    };
    client.ask(&Ask::write(0, vec![1; 10]));
    client.ask(&Ask::new(TRIM, 0, 10));
    assert_eq!(counts(), (0, 0));
    client.ask(&Ask::write(0, vec![1; 10]).flags(FUA));
    client.ask(&Ask::new(ZEROES, 0, 10).flags(FUA));
    assert_eq!(counts(), (2, 0));
    client.ask(&Ask::new(ZEROES, 0, 10).flags(FUA | NO_HOLE));
    assert_eq!(counts(), (3, 0));
    client.ask(&Ask::new(TRIM, 0, 10).flags(FUA));
    assert_eq!(counts(), (3, 1));
    assert_eq!(client.ask(&Ask::new(FLUSH, 0, 0)), Answer::Done);
    assert_eq!(client.ask(&Ask::new(READ, 0, 1).flags(FUA)).errno(), 0);
    assert_eq!(counts(), (3, 2));
}

#[test]
fn extents_tell_data_from_holes() {
    const MAPPED: u32 = 0;
    const HOLE: u32 = 3;
    let running = Running::new(8 << 20, Mode::AtOnce);
    let mut client = Client::open(&running.path());
    client.ask(&Ask::write(4096, vec![1; 8192]));
    let status = Ask::new(STATUS, 0, 20_480);
    let all = Answer::Extents(vec![(4096, HOLE), (8192, MAPPED), (8192, HOLE)]);
    assert_eq!(client.ask(&status), all);
    let one = status.clone().flags(REQ_ONE);
    assert_eq!(client.ask(&one), Answer::Extents(vec![(4096, HOLE)]));

    let zeroes = Ask::new(ZEROES, 0, 5 << 20);
    assert_eq!(client.ask(&zeroes.clone().flags(FAST_ZERO)), Answer::Done);
    assert_eq!(client.ask(&status), Answer::Extents(vec![(20_480, HOLE)]));
    let both = zeroes.clone().flags(FAST_ZERO | NO_HOLE);
    assert_eq!(client.ask(&both).errno(), ENOTSUP);
    assert_eq!(client.ask(&zeroes.flags(NO_HOLE)), Answer::Done);
    let status = Ask::new(STATUS, 0, 8 << 20);
    let all = Answer::Extents(vec![(5 << 20, MAPPED), (3 << 20, HOLE)]);
    assert_eq!(client.ask(&status), all);

    let mut simple = Client::open_simple(&running.path());
    assert_eq!(simple.ask(&status).errno(), EINVAL);
}

#[test]
fn errors_of_the_space_reach_the_client_with_their_words() {
    let running = running();
    let mut client = Client::open(&running.path());
    let mut simple = Client::open_simple(&running.path());
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
            Ask::new(READ, 0, 5000),
            Ask::write(0, vec![1; 5000]),
            Ask::new(TRIM, 0, 1).flags(FUA),
            Ask::new(ZEROES, 0, 1).flags(NO_HOLE),
            Ask::new(FLUSH, 0, 0),
            Ask::new(STATUS, 0, 1),
        ] {
            let wanted = Answer::Error(errno, error.to_string());
            assert_eq!(client.ask(&ask), wanted, "{ask:?}");
            if ask.command != STATUS {
                assert_eq!(simple.ask(&ask).errno(), errno);
            }
        }
    }
    running.memory.fail_with(None);
    assert_eq!(client.ask(&Ask::new(FLUSH, 0, 0)), Answer::Done);
}

#[test]
fn dead_channel_ends_its_connection_after_the_error() {
    let running = running();
    for (error, errno) in [
        (SpaceError::Fenced, ESHUTDOWN),
        (SpaceError::Busy("no session".into()), EIO),
    ] {
        let mut client = Client::open(&running.path());
        running.memory.fail_with(Some(error));
        assert_eq!(client.ask(&Ask::new(FLUSH, 0, 0)).errno(), errno);
        assert!(client.is_closed());
        running.memory.fail_with(None);
        // Its cause is over, and so is the error.
        let mut client = Client::open(&running.path());
        assert_eq!(client.ask(&Ask::new(FLUSH, 0, 0)), Answer::Done);
    }
}

#[test]
fn no_more_requests_are_taken_than_a_channel_takes() {
    const ASKED: usize = 3000;
    let running = Running::new(SIZE, Mode::Held);
    let mut client = Client::open(&running.path());
    let flushes: Vec<u8> = (0..ASKED as u64)
        .flat_map(|cookie| Ask::new(FLUSH, 0, 0).encode(cookie))
        .collect();
    client.send(&flushes);
    let submitted = || running.memory.seen().submitted.load(Ordering::SeqCst);
    await_that("requests are submitted", || submitted() >= 1024);
    assert_eq!(submitted(), 1024);
    running.memory.release();
    let mut seen = [false; ASKED];
    for _ in 0..ASKED {
        let (cookie, answer) = client.answer(|_| 0);
        assert_eq!(answer, Answer::Done);
        assert!(!std::mem::replace(&mut seen[cookie as usize], true));
    }
}

#[test]
fn held_bytes_are_bounded_and_all_are_answered() {
    const ASKED: u64 = 12;
    let running = Running::new(32 << 20, Mode::Held);
    let mut client = Client::open(&running.path());
    for cookie in 0..ASKED {
        client.send(&Ask::new(READ, 0, 16 << 20).encode(cookie));
    }
    let submitted = || running.memory.seen().submitted.load(Ordering::SeqCst);
    await_that("requests are submitted", || submitted() >= 4);
    assert_eq!(submitted(), 4, "64 MiB are 4 reads of 16 MiB");
    running.memory.release();
    for _ in 0..ASKED {
        let (_, answer) = client.answer(|_| 0);
        assert_eq!(answer, Answer::Data(0, vec![0; 16 << 20]));
    }
}

#[test]
fn a_client_that_leaves_is_waited_for_until_its_requests_end() {
    for says_so in [true, false] {
        let running = Running::new(SIZE, Mode::Held);
        let mut client = Client::open(&running.path());
        client.send(&Ask::write(0, vec![1; 4096]).encode(1));
        let seen = running.memory.seen();
        await_that("the write is submitted", || {
            seen.submitted.load(Ordering::SeqCst) == 1
        });
        if says_so {
            client.send(&Ask::new(DISC, 0, 0).encode(2));
        }
        drop(client);
        // Another connection lives and dies meanwhile.
        let mut other = Client::open(&running.path());
        other.send(&Ask::new(DISC, 0, 0).encode(2));
        assert!(other.is_closed());
        let channels = || seen.channels.load(Ordering::SeqCst);
        await_that("the other channel closes", || channels() < 2);
        assert_eq!(channels(), 1);
        running.memory.release();
        running.await_idle();
    }
}

#[test]
fn replies_sent_before_a_disconnect_arrive() {
    let running = Running::new(SIZE, Mode::Shuffled(9));
    let mut client = Client::open(&running.path());
    let mut bytes = Vec::new();
    for cookie in 0..50 {
        bytes.extend(Ask::new(READ, 0, 4096).encode(cookie));
    }
    bytes.extend(Ask::new(DISC, 0, 0).encode(99));
    bytes.extend([0xff; 1000]);
    client.send(&bytes);
    for _ in 0..50 {
        assert_eq!(client.answer(|_| 0).1, Answer::Data(0, vec![0; 4096]));
    }
    assert!(client.is_closed());
    assert_eq!(running.server.counters().violated, 0);
}

fn asks() -> impl Strategy<Value = Vec<Ask>> {
    let range = (0..SIZE, 1..60_000u32).prop_map(|(offset, len)| {
        let len = u64::from(len).min(SIZE - offset) as u32;
        (offset, len)
    });
    let ask = (0..5u8, range, any::<u8>(), any::<bool>()).prop_map(|(kind, range, byte, fua)| {
        let (offset, len) = range;
        let flags = if fua { FUA } else { 0 };
        let ask = match kind {
            0 | 1 => Ask::new(READ, offset, len),
            2 => Ask::write(offset, vec![byte; len as usize]),
            3 => Ask::new(TRIM, offset, len),
            _ => Ask::new(ZEROES, offset, len),
        };
        ask.flags(flags)
    });
    prop::collection::vec(ask, 1..40)
}

/// What each request answers, if they take effect in this order.
fn expect(model: &mut [u8], asks: &[Ask]) -> HashMap<u64, Answer> {
    let mut wanted = HashMap::new();
    for (cookie, ask) in asks.iter().enumerate() {
        let start = ask.offset as usize;
        let range = start..start + ask.len as usize;
        let answer = match ask.command {
            READ => Answer::Data(ask.offset, model[range].to_vec()),
            WRITE => {
                model[range].copy_from_slice(&ask.data);
                Answer::Done
            }
            _ => {
                model[range].fill(0);
                Answer::Done
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
    fn pipelined_requests_do_what_they_would_one_by_one(
        asks in asks(),
        seed: u64,
        at_once: bool,
        cuts in prop::collection::vec(1..20_000usize, 1..8),
    ) {
        let mode = if at_once { Mode::AtOnce } else { Mode::Shuffled(seed) };
        let running = Running::new(SIZE, mode);
        let client = Client::open(&running.path());
        let mut model = vec![0; SIZE as usize];
        let mut wanted = expect(&mut model, &asks);
        let bytes: Vec<u8> = asks
            .iter()
            .enumerate()
            .flat_map(|(cookie, ask)| ask.encode(cookie as u64))
            .collect();
        let mut reader = Client {
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
            let (cookie, answer) = reader.answer(|_| 0);
            prop_assert_eq!(wanted.remove(&cookie), Some(answer));
        }
        sender.join().unwrap();
        prop_assert_eq!(running.memory.bytes(), model);
    }
}
