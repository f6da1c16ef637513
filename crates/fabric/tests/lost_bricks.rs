//! A client's view of a brick that ends, stays silent, or is another brick.

use crate::support;
use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::slice::*;
use pagemesh_base::wait::until_ready;
use pagemesh_fabric::auth::{CHALLENGE_BYTES, HELLO_BYTES, Purpose, Versions};
use pagemesh_fabric::brick_client::BrickClient;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::message::MessageKind;
use pagemesh_fabric::message::reply::Reply;
use pagemesh_fabric::tcp::TcpLeg;
use rustix::event::{PollFd, PollFlags};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use support::raw::{FakeBrick, RawConnection, admit, encode_answer, forged};
use support::*;

/// Short, for the tests that wait for it to pass.
const SHORT: Duration = Duration::from_millis(40);

fn leg_with(address: SocketAddr, timeouts: Timeouts) -> Result<TcpLeg, SliceError> {
    TcpLeg::connect(address, &key(), timeouts, SLICE, Epoch(1))
}

fn leg(impostor: &FakeBrick) -> TcpLeg {
    leg_with(impostor.address, timeouts()).expect("attached")
}

#[track_caller]
fn assert_refused(outcome: Result<TcpLeg, SliceError>, says: &str) {
    match outcome.err() {
        Some(SliceError::Refused(reason)) => assert!(reason.contains(says), "{reason}"),
        other => panic!("not refused but {other:?}"),
    }
}

/// Submits reads, and checks that all of them, and every later one, are lost for this reason.
#[track_caller]
fn check_lost(impostor: &FakeBrick, count: usize, says: &str) {
    let mut leg = leg(impostor);
    for tag in 0..count as u64 {
        leg.submit(tag, SliceRequest::Read { offset: 0, len: 8 });
    }
    let mut completions = reap(&mut leg, count);
    completions.sort_by_key(|completion| completion.tag);
    for (tag, completion) in completions.iter().enumerate() {
        assert_eq!(completion.tag, tag as u64);
        assert_lost(&completion.result, says);
    }
    assert_lost(&execute(&mut leg, SliceRequest::Flush), says);
    let mut fds = Vec::new();
    leg.poll_fds(&mut fds);
    assert!(fds.is_empty() && leg.deadline().is_none());
}

#[test]
fn vanished_brick_loses_every_request_in_flight() {
    let impostor = FakeBrick::attached(|mut raw| {
        raw.receive_request();
    });
    check_lost(&impostor, 1000, "brick");
}

#[test]
fn truncated_reply_is_a_lost_request() {
    let whole = encode_answer(
        MessageKind::Read,
        0,
        Ok(Reply::Slice(SliceReply::Data(vec![1; 8]))),
    );
    for len in [1, 63, 64, whole.len() - 1] {
        let impostor = FakeBrick::attached(move |mut raw| {
            let (kind, tag, _) = raw.receive_request();
            let reply = encode_answer(kind, tag, Ok(Reply::Slice(SliceReply::Data(vec![1; 8]))));
            raw.send(&reply[..len]);
        });
        check_lost(&impostor, 1, "closed");
    }
}

#[test]
fn reply_before_hangup_is_delivered() {
    let impostor = FakeBrick::attached(|mut raw| {
        let (kind, tag, _) = raw.receive_request();
        let (_, _, _) = raw.receive_request();
        raw.answer(kind, tag, Ok(Reply::Slice(SliceReply::Done)));
    });
    let mut leg = leg(&impostor);
    leg.submit(1, SliceRequest::Flush);
    leg.submit(2, SliceRequest::ForgetInFlight);
    let completions = reap(&mut leg, 2);
    assert_eq!(completions[0].result, Ok(SliceReply::Done));
    assert_lost(&completions[1].result, "closed");
}

#[test]
fn brick_end_within_large_write_loses_it() {
    let impostor = FakeBrick::attached(|mut raw| {
        let _: [u8; 1000] = raw.receive();
    });
    let mut leg = leg(&impostor);
    let data = Bytes::from(vec![1; SLICE_IO_BYTES_MAX as usize]);
    for tag in 0..64 {
        let (data, stamp) = (data.clone(), stamp(1));
        let offset = 0;
        leg.submit(
            tag,
            SliceRequest::Write {
                offset,
                data,
                stamp,
            },
        );
    }
    for completion in reap(&mut leg, 64) {
        assert_lost(&completion.result, "brick");
    }
}

#[test]
fn idle_leg_descriptor_shows_brick_hangup() {
    let impostor = FakeBrick::attached(drop);
    let mut leg = leg(&impostor);
    drop(impostor);
    assert!(has_arrived(&leg));
    leg.reap(&mut Vec::new());
    assert_lost(&execute(&mut leg, SliceRequest::Flush), "closed");
}

/// How long a request waits for its answer before the leg gives the brick up.
fn check_silence(request: &SliceRequest, limits: Timeouts, least: Duration, told: &str) {
    let impostor = FakeBrick::attached(|mut raw| raw.wait_end());
    let mut leg = leg_with(impostor.address, limits).expect("attached");
    assert_eq!(leg.deadline(), None);
    let began = Instant::now();
    leg.submit(1, request.clone());
    leg.submit(2, request.clone());
    for completion in reap(&mut leg, 2) {
        assert_lost(&completion.result, told);
    }
    assert!(began.elapsed() >= least);
}

#[test]
fn silent_brick_is_lost_after_stall_limit() {
    let stall = SHORT;
    let limits = Timeouts {
        stall,
        ..timeouts()
    };
    let read = SliceRequest::Read { offset: 0, len: 1 };
    check_silence(&read, limits, stall, "no reply came for 40 ms");
}

#[test]
fn flush_may_take_the_call_timeout() {
    let (stall, call) = (SHORT, SHORT * 3);
    let limits = Timeouts {
        stall,
        call,
        ..timeouts()
    };
    check_silence(
        &SliceRequest::Flush,
        limits,
        call,
        "no reply came for 120 ms",
    );
}

/// Unsent bytes are dropped: the brick sees the end at once.
#[test]
fn full_socket_does_not_hide_silence() {
    let impostor = FakeBrick::attached(|mut raw| {
        let _ = raw.receive::<64>();
        // The brick sends and reads nothing until the client has closed the connection.
        let mut fds = [PollFd::new(&raw.0, PollFlags::RDHUP)];
        let patience = Some(Instant::now() + TEST_TIMEOUT);
        let gone = until_ready(&mut fds, patience).expect("polled");
        assert!(gone, "the brick did not see the client's end");
    });
    let stall = SHORT;
    let limits = Timeouts {
        stall,
        ..timeouts()
    };
    let mut leg = leg_with(impostor.address, limits).expect("attached");
    let data = Bytes::from(vec![1; SLICE_IO_BYTES_MAX as usize]);
    for tag in 0..64 {
        let (data, stamp) = (data.clone(), stamp(1));
        let offset = 0;
        leg.submit(
            tag,
            SliceRequest::Write {
                offset,
                data,
                stamp,
            },
        );
    }
    for completion in reap(&mut leg, 64) {
        assert_lost(&completion.result, "no reply came");
    }
    drop(leg);
}

#[test]
fn silent_server_fails_the_handshake() {
    let impostor = FakeBrick::without_handshake(|mut raw| raw.wait_end());
    let handshake = SHORT;
    let limits = Timeouts {
        handshake,
        ..timeouts()
    };
    let outcome = leg_with(impostor.address, limits);
    assert_lost(&outcome.map(|_| SliceReply::Done), "handshake");
}

#[test]
fn unanswered_call_ends_with_its_connection() {
    let impostor = FakeBrick::authenticated(|mut raw| raw.wait_end());
    let call = SHORT;
    let limits = Timeouts { call, ..timeouts() };
    let brick = BrickClient::connect(impostor.address, &key(), limits).expect("connected");
    for _ in 0..2 {
        let ended = brick.status().map(|_| SliceReply::Done);
        assert_lost(&ended, "no answer within 40 ms");
    }
}

#[test]
fn brick_with_another_key_gets_no_proof() {
    let impostor = FakeBrick::without_handshake(|mut raw| {
        admit(&mut raw, &Key::from_bytes([8; 32]), Versions::OURS);
        raw.assert_hung_up();
    });
    assert_refused(
        leg_with(impostor.address, timeouts()),
        "another cluster key",
    );
}

#[test]
fn client_with_another_key_is_refused_and_opens_nothing() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let other = Key::from_bytes([8; 32]);
    let outcome = TcpLeg::connect(server.address(), &other, timeouts(), SLICE, Epoch(1));
    assert_refused(outcome, "another cluster key");
    assert_eq!((server.connections(), memory.state().opened), (0, 0));
}

#[test]
fn relayed_challenge_is_refused() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let address = server.address();
    // The impostor asks the real brick with another hello, and forwards its answer.
    let impostor = FakeBrick::without_handshake(move |mut raw| {
        let mut hello: [u8; HELLO_BYTES] = raw.receive();
        hello[40] ^= 1;
        let mut real = RawConnection::connect(address);
        real.send(&hello);
        let challenge: [u8; CHALLENGE_BYTES] = real.receive();
        raw.send(&challenge);
        raw.assert_hung_up();
    });
    assert_refused(
        leg_with(impostor.address, timeouts()),
        "another cluster key",
    );
}

#[test]
fn version_downgrade_is_detected() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let address = server.address();
    let impostor = FakeBrick::without_handshake(move |mut raw| {
        let mut hello: [u8; HELLO_BYTES] = raw.receive();
        hello[5] = 9;
        let mut real = RawConnection::connect(address);
        real.send(&hello);
        let challenge: [u8; CHALLENGE_BYTES] = real.receive();
        raw.send(&challenge);
        raw.assert_hung_up();
    });
    assert_refused(
        leg_with(impostor.address, timeouts()),
        "another cluster key",
    );
}

#[test]
fn refusal_names_versions_of_brick() {
    let impostor = FakeBrick::without_handshake(|mut raw| {
        let newer = Versions {
            min: 4,
            max: 6,
            knows: 0,
        };
        admit(&mut raw, &key(), newer);
    });
    assert_refused(leg_with(impostor.address, timeouts()), "4 to 6");
}

#[test]
fn server_of_another_protocol_is_refused_with_hint() {
    let impostor = FakeBrick::without_handshake(|mut raw| {
        raw.try_send(&[b'x'; CHALLENGE_BYTES]);
        raw.wait_end();
    });
    assert_refused(
        leg_with(impostor.address, timeouts()),
        "is the address that of a brick?",
    );
}

/// Every reply of the brick that ends a leg.
#[test]
fn unexpected_or_short_reply_ends_the_leg() {
    type Twist = fn(Vec<u8>) -> Vec<u8>;
    let eight = || Ok(Reply::Slice(SliceReply::Data(vec![1; 8])));
    let cases: [(&str, Twist); 9] = [
        ("answers nothing", |m| forged(&m, 8, &[0x77; 8])),
        ("answers nothing", |m| forged(&m, 9, &[0xff])),
        ("answers nothing", |m| {
            let tag = u64::from_le_bytes(m[8..16].try_into().expect("eight"));
            encode_answer(MessageKind::Flush, tag, Ok(Reply::Slice(SliceReply::Done)))
        }),
        ("answers nothing", |m| {
            let tag = u64::from_le_bytes(m[8..16].try_into().expect("eight"));
            let short = SliceReply::Data(vec![1; 7]);
            encode_answer(MessageKind::Read, tag, Ok(Reply::Slice(short)))
        }),
        ("at most 1048576", |m| forged(&m, 20, &[0xff; 4])),
        ("misplaced kind 0x01", |m| forged(&m, 5, &[1])),
        ("unused field", |m| forged(&m, 48, &[1])),
        ("does not match its checksum", |mut m| {
            m[70] ^= 1;
            m
        }),
        ("no message starts here", |_| vec![b'x'; 64]),
    ];
    for (says, twist) in cases {
        let impostor = FakeBrick::attached(move |mut raw| {
            let (kind, tag, _) = raw.receive_request();
            raw.try_send(&twist(encode_answer(kind, tag, eight())));
            raw.wait_end();
        });
        check_lost(&impostor, 3, says);
    }
}

#[test]
fn repeated_reply_ends_the_leg() {
    let impostor = FakeBrick::attached(|mut raw| {
        let (kind, tag, _) = raw.receive_request();
        let done = encode_answer(kind, tag, Ok(Reply::Slice(SliceReply::Done)));
        raw.try_send(&[&done[..], &done].concat());
        raw.wait_end();
    });
    let mut leg = leg(&impostor);
    leg.submit(1, SliceRequest::Flush);
    leg.submit(2, SliceRequest::Flush);
    let completions = reap(&mut leg, 2);
    assert_eq!(completions[0].result, Ok(SliceReply::Done));
    assert_lost(&completions[1].result, "answers nothing");
}

#[test]
fn brick_reporting_itself_lost_is_lost() {
    let says = || Err(SliceError::Lost("the pool has failed".into()));
    let impostor = FakeBrick::attached(move |mut raw| {
        let (kind, tag, _) = raw.receive_request();
        raw.answer(kind, tag, says());
        raw.wait_end();
    });
    check_lost(&impostor, 3, "the pool has failed");
    let impostor = FakeBrick::authenticated(move |mut raw| {
        let (kind, tag, _) = raw.receive_request();
        raw.answer(kind, tag, says());
        raw.wait_end();
    });
    let brick = BrickClient::connect(impostor.address, &key(), timeouts()).expect("connected");
    for _ in 0..2 {
        let ended = brick.delete(SLICE).map(|()| SliceReply::Done);
        assert_lost(&ended, "the pool has failed");
    }
}

#[test]
fn replies_in_another_order_find_their_requests() {
    let impostor = FakeBrick::attached(|mut raw| {
        let asked: Vec<_> = (0..50).map(|_| raw.receive_request()).collect();
        for (kind, tag, request) in asked.into_iter().rev() {
            let pagemesh_fabric::message::request::Request::Slice { request, .. } = request else {
                panic!("not of a slice");
            };
            let SliceRequest::Read { offset, .. } = request else {
                panic!("not a read");
            };
            let data = offset.to_le_bytes().to_vec();
            raw.answer(kind, tag, Ok(Reply::Slice(SliceReply::Data(data))));
        }
    });
    let mut leg = leg(&impostor);
    for tag in 0..50 {
        let offset = tag * 1000;
        leg.submit(tag, SliceRequest::Read { offset, len: 8 });
    }
    for completion in reap(&mut leg, 50) {
        let data = (completion.tag * 1000).to_le_bytes().to_vec();
        assert_eq!(completion.result, Ok(SliceReply::Data(data)));
    }
}

#[test]
fn listing_without_progress_ends() {
    let info = SliceInfo {
        slice: SLICE,
        size_bytes: 1,
        epoch: 1,
    };
    let impostor = FakeBrick::authenticated(move |mut raw| {
        for _ in 0..2 {
            let (kind, tag, _) = raw.receive_request();
            let (slices, more) = (vec![info.clone()], true);
            raw.answer(kind, tag, Ok(Reply::List { slices, more }));
        }
        raw.wait_end();
    });
    let brick = BrickClient::connect(impostor.address, &key(), timeouts()).expect("connected");
    let ended = brick.list().map(|_| SliceReply::Done);
    assert_lost(&ended, "does not fit the request");
}

#[test]
fn short_reply_to_a_read_call_is_refused() {
    let impostor = FakeBrick::authenticated(|mut raw| {
        let (kind, tag, _) = raw.receive_request();
        let short = SliceReply::Data(vec![1; 7]);
        raw.answer(kind, tag, Ok(Reply::Slice(short)));
        raw.wait_end();
    });
    let brick = BrickClient::connect(impostor.address, &key(), timeouts()).expect("connected");
    let request = SliceRequest::Read { offset: 0, len: 8 };
    assert_lost(&brick.execute(0, request), "does not fit the request");
}

/// The hello of a control connection states its purpose.
#[test]
fn hello_carries_the_purpose() {
    let (told, heard) = std::sync::mpsc::channel();
    let impostor = FakeBrick::without_handshake(move |mut raw| {
        let hello: [u8; HELLO_BYTES] = raw.receive();
        told.send(hello[7]).expect("heard");
    });
    assert!(BrickClient::connect(impostor.address, &key(), timeouts()).is_err());
    assert_eq!(heard.recv(), Ok(Purpose::Control.code()));
}
