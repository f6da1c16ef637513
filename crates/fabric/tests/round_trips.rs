//! Requests over TCP arrive, and their answers come back.

use crate::support;
use bytes::Bytes;
use pagemesh_base::ids::{EPOCH_MAX, Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::*;
use pagemesh_base::space::Extent;
use pagemesh_fabric::auth::Purpose;
use pagemesh_fabric::brick_client::BrickClient;
use pagemesh_fabric::limits::{DEFERRED_BYTES_MAX, DEFERRED_MAX, UNSENT_REPLY_BYTES_MAX};
use pagemesh_fabric::message::reply::Reply;
use pagemesh_fabric::message::request::Request;
use pagemesh_fabric::tcp::{ServerOptions, TcpLeg, TcpServer};
use std::sync::Arc;
use support::raw::{RawConnection, encode_request};
use support::*;
use uuid::Uuid;

fn write(offset: u64, data: impl Into<Bytes>) -> SliceRequest {
    let (data, stamp) = (data.into(), stamp(1));
    SliceRequest::Write {
        offset,
        data,
        stamp,
    }
}

fn read(offset: u64, len: u32) -> SliceRequest {
    SliceRequest::Read { offset, len }
}

/// Bytes that differ from their neighbours and from the same place of other pages.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251 + at / 4096) as u8).collect()
}

fn exchanges() -> Vec<(SliceRequest, Result<SliceReply, SliceError>)> {
    let (page, epoch) = (PageNo(9), Epoch(4));
    let stamp = Stamp {
        epoch,
        op: 1 << 60,
        open_ops: 17,
    };
    let operation = InFlightOp {
        page,
        count: 3,
        epoch,
        op: 8,
    };
    let extent = |len, mapped| Extent { len, mapped };
    let dirty = |next| SliceReply::Dirty {
        runs: vec![PageRun { page, count: 7 }],
        next,
    };
    let (offset, len) = (4097, 1 << 30);
    let clear = SliceRequest::Clear { offset, len, stamp };
    let written = SliceRequest::Write {
        offset,
        data: Bytes::from(pattern(777)),
        stamp,
    };
    let listed = |since| SliceRequest::Dirty {
        since: Epoch(since),
        from: page,
    };
    let raise = |epoch| SliceRequest::RaiseEpoch {
        epoch: Epoch(epoch),
        lost_since: Epoch(epoch / 2),
    };
    let copied = |data: Vec<u8>| SliceRequest::Copy {
        page,
        births: vec![Epoch(3), Epoch(0)],
        data: data.into(),
        stamp,
    };
    let births = SliceRequest::Births { page, count: 2 };
    let sums = SliceRequest::Checksums { page, count: 2 };
    let extents = SliceRequest::Extents { offset, len };
    let found = vec![extent(4096, true), extent(1 << 40, false)];
    vec![
        (read(1, 3), Ok(SliceReply::Data(vec![1, 2, 3]))),
        (read(0, 0), Ok(SliceReply::Data(vec![]))),
        (written.clone(), Ok(SliceReply::Done)),
        (clear.clone(), Ok(SliceReply::Done)),
        (
            transact(vec![write_pages(7, 2), clear_pages(3, 1)], stamp),
            Ok(SliceReply::Done),
        ),
        (
            transact(
                (0..64).map(|page| write_pages(page * 2, 1)).collect(),
                stamp,
            ),
            Ok(SliceReply::Done),
        ),
        (SliceRequest::Flush, Ok(SliceReply::Done)),
        (extents, Ok(SliceReply::Extents(found))),
        (sums, Ok(SliceReply::Checksums(vec![1, u32::MAX]))),
        (listed(1), Ok(dirty(Some(PageNo(77))))),
        (listed(EPOCH_MAX), Ok(dirty(None))),
        (births, Ok(SliceReply::Births(vec![Epoch(5), Epoch(0)]))),
        (copied(pattern(8192)), Ok(SliceReply::Done)),
        (copied(Vec::new()), Ok(SliceReply::Done)),
        (SliceRequest::InFlight, Ok(SliceReply::InFlight(None))),
        (
            SliceRequest::InFlight,
            Ok(SliceReply::InFlight(Some(vec![operation; 4]))),
        ),
        (SliceRequest::ForgetInFlight, Ok(SliceReply::Done)),
        (raise(1), Ok(SliceReply::Done)),
        (raise(EPOCH_MAX), Ok(SliceReply::Done)),
        (written, Err(SliceError::StaleEpoch { current: Epoch(5) })),
        (clear, Err(SliceError::NoSpace)),
        (read(0, 1), Err(SliceError::Damaged { offset: 4096 })),
        (read(0, 2), Err(SliceError::NoSuchSlice(SLICE))),
        (read(0, 3), Err(SliceError::OutOfRange("too far".into()))),
        (read(0, 4), Err(SliceError::Refused("no, so there".into()))),
    ]
}

fn write_pages(page: u64, count: usize) -> TransactionPart {
    TransactionPart::Write {
        offset: page * 4096,
        data: Bytes::from(pattern(count * 4096)),
    }
}

fn clear_pages(page: u64, count: u64) -> TransactionPart {
    let (offset, len) = (page * 4096, count * 4096);
    TransactionPart::Clear { offset, len }
}

fn transact(parts: Vec<TransactionPart>, stamp: Stamp) -> SliceRequest {
    SliceRequest::Transact { parts, stamp }
}

#[test]
fn every_request_and_answer_arrives_unchanged() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    let (requests, answers): (Vec<_>, Vec<_>) = exchanges().into_iter().unzip();
    memory.change(|state| state.script = answers.clone().into());
    for (tag, request) in requests.iter().enumerate() {
        leg.submit(tag as u64, request.clone());
    }
    let mut completions = reap(&mut leg, requests.len());
    completions.sort_by_key(|completion| completion.tag);
    let results: Vec<_> = completions.into_iter().map(|done| done.result).collect();
    assert_eq!(results, answers);
    assert_eq!(memory.state().requests, requests);
}

#[test]
fn leg_knows_brick_and_slice_size() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let leg = attach(&server);
    assert_eq!((leg.brick(), leg.size_bytes()), (BRICK, SLICE_BYTES));
    assert_eq!(server.connections(), 1);
    let address = memory.state().peers[0].address;
    assert!(address.is_some_and(|it| it.ip().is_loopback()));
}

#[test]
fn attaching_fails_with_the_reason() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let attach = |slice, epoch| {
        TcpLeg::connect(server.address(), &key(), timeouts(), slice, Epoch(epoch)).err()
    };
    let other = SliceId(Uuid::from_u128(404));
    assert_eq!(attach(other, 1), Some(SliceError::NoSuchSlice(other)));
    let stale = SliceError::StaleEpoch { current: Epoch(1) };
    assert_eq!(attach(SLICE, 0), Some(stale));
}

#[test]
fn leg_pipelines_its_limit_and_refuses_one_more() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    let cell = |at: usize| (at as u64 * 512, [at as u8; 512].to_vec());
    for at in 0..LEG_REQUESTS_MAX {
        let (offset, data) = cell(at);
        leg.submit(at as u64, write(offset, data));
    }
    leg.submit(7777, SliceRequest::Flush);
    let (refused, done): (Vec<_>, Vec<_>) = reap(&mut leg, LEG_REQUESTS_MAX + 1)
        .into_iter()
        .partition(|completion| completion.tag == 7777);
    assert!(matches!(refused[0].result, Err(SliceError::Refused(_))));
    let tags: std::collections::BTreeSet<u64> = done.iter().map(|c| c.tag).collect();
    assert_eq!(tags.len(), LEG_REQUESTS_MAX);
    assert!(done.iter().all(|c| c.result == Ok(SliceReply::Done)));
    for at in 0..LEG_REQUESTS_MAX {
        leg.submit(at as u64, read(cell(at).0, 512));
    }
    for completion in reap(&mut leg, LEG_REQUESTS_MAX) {
        let (_, data) = cell(completion.tag as usize);
        assert_eq!(completion.result, Ok(SliceReply::Data(data)));
    }
}

#[test]
fn longest_io_arrives_and_longer_io_is_not_sent() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    let max = SLICE_IO_BYTES_MAX as usize;
    let whole = pattern(SLICE_BYTES as usize);
    for (at, data) in whole.chunks(max).enumerate() {
        leg.submit(at as u64, write((at * max) as u64, data.to_vec()));
    }
    let count = whole.len() / max;
    reap(&mut leg, count);
    for at in 0..count {
        leg.submit(at as u64, read((at * max) as u64, max as u32));
    }
    for completion in reap(&mut leg, count) {
        let at = completion.tag as usize * max;
        let right = Ok(SliceReply::Data(whole[at..at + max].to_vec()));
        assert!(completion.result == right, "read {at} differs");
    }
    let asked = memory.state().requests.len();
    for beyond in [write(0, vec![0; max + 1]), read(0, SLICE_IO_BYTES_MAX + 1)] {
        let refused = execute(&mut leg, beyond);
        assert!(matches!(refused, Err(SliceError::OutOfRange(_))));
    }
    assert_eq!(memory.state().requests.len(), asked);
}

#[test]
fn reply_is_sent_after_its_batch_ends() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    memory.change(|state| state.gate_closed = true);
    leg.submit(1, write(0, vec![1; 100]));
    memory.wait("the batch's end", |state| !state.batches.is_empty());
    assert!(!has_arrived(&leg), "answered before the batch has ended");
    memory.change(|state| state.gate_closed = false);
    assert_eq!(reap(&mut leg, 1)[0].result, Ok(SliceReply::Done));
}

#[test]
fn requests_that_arrive_together_are_one_batch() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    memory.change(|state| state.gate_closed = true);
    leg.submit(0, SliceRequest::Flush);
    memory.wait("the first batch", |state| state.batches.len() == 1);
    for tag in 1..10 {
        leg.submit(tag, SliceRequest::Flush);
    }
    let mut completions = Vec::new();
    leg.reap(&mut completions);
    assert!(completions.is_empty());
    memory.change(|state| state.gate_closed = false);
    reap(&mut leg, 10);
    assert_eq!(memory.state().batches, [1, 10]);
}

#[test]
fn failed_batch_loses_its_requests() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    memory.change(|state| state.fail_batches = true);
    assert_lost(
        &execute(&mut leg, SliceRequest::Flush),
        "closed the connection",
    );
    memory.wait("the session's end", |state| state.dropped == 1);
}

#[test]
fn deferred_replies_come_in_any_order() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    memory.change(|state| state.mode = ReplyMode::Deferred);
    for tag in 0..3 {
        leg.submit(tag, write(tag * 8, vec![tag as u8 + 1; 8]));
    }
    let mut completions = Vec::new();
    leg.reap(&mut completions);
    memory.wait("three tickets", |state| state.waiting == 3);
    assert!(completions.is_empty());
    memory.release();
    let tags: Vec<u64> = reap(&mut leg, 3).into_iter().map(|c| c.tag).collect();
    assert_eq!(tags, [2, 1, 0]);
    let all: Vec<u8> = [[1; 8], [2; 8], [3; 8]].concat();
    assert_eq!(execute(&mut leg, read(0, 24)), Ok(SliceReply::Data(all)));
}

/// A handler that finishes tickets at the batch's end cannot wake the connection afterwards.
#[test]
fn ticket_finished_by_batch_end_is_answered() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    memory.change(|state| state.mode = ReplyMode::AtBatchEnd);
    let done = execute(&mut leg, write(0, vec![1; 8]));
    assert_eq!(done, Ok(SliceReply::Done));
}

#[test]
fn ticket_used_twice_ends_the_connection() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    memory.change(|state| state.mode = ReplyMode::SameTicket);
    leg.submit(1, SliceRequest::Flush);
    leg.submit(2, SliceRequest::Flush);
    for completion in reap(&mut leg, 2) {
        assert_lost(&completion.result, "closed the connection");
    }
}

/// Requests beyond the brick's limit of deferred requests are held back, not refused.
#[test]
fn requests_beyond_deferred_limit_are_held_back() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    memory.change(|state| state.mode = ReplyMode::Deferred);
    for tag in 0..LEG_REQUESTS_MAX as u64 {
        leg.submit(tag, write(0, vec![1; 8]));
    }
    let mut none = Vec::new();
    leg.reap(&mut none);
    memory.wait("the most tickets", |state| state.waiting == DEFERRED_MAX);
    memory.release();
    for completion in reap(&mut leg, LEG_REQUESTS_MAX) {
        assert_eq!(completion.result, Ok(SliceReply::Done));
    }
    assert_eq!(memory.state().waiting_max, DEFERRED_MAX);
}

#[test]
fn bytes_of_deferred_requests_are_bounded() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    memory.change(|state| state.mode = ReplyMode::Deferred);
    let len = SLICE_IO_BYTES_MAX as usize;
    let (count, most) = (2 * DEFERRED_BYTES_MAX / len, DEFERRED_BYTES_MAX / len);
    let data = Bytes::from(vec![1; len]);
    let mut completions = Vec::new();
    for tag in 0..count as u64 {
        leg.submit(tag, write(0, data.clone()));
    }
    let until = std::time::Instant::now() + TEST_TIMEOUT;
    while memory.state().waiting < most {
        leg.reap(&mut completions);
        assert!(
            std::time::Instant::now() < until,
            "the bound is not reached"
        );
    }
    assert!(completions.is_empty());
    memory.release();
    reap(&mut leg, count);
    assert!(memory.state().held_bytes_max <= DEFERRED_BYTES_MAX);
}

/// A client that requests more than it reads is not served beyond the bound.
#[test]
fn unread_replies_are_bounded() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut raw = RawConnection::client(server.address(), Purpose::Session);
    let (slice, epoch) = (SLICE, Epoch(1));
    let Ok(Reply::Attach(attached)) = raw.ask(&Request::Attach { slice, epoch }) else {
        panic!("not attached");
    };
    let (handle, tags) = (attached.handle, 2..66);
    let request = read(0, SLICE_IO_BYTES_MAX);
    let all = tags.clone().flat_map(|tag| {
        let request = request.clone();
        encode_request(&Request::Slice { handle, request }, tag)
    });
    raw.send(&all.collect::<Vec<u8>>());
    memory.wait("the first batch", |state| !state.batches.is_empty());
    let most = UNSENT_REPLY_BYTES_MAX / SLICE_IO_BYTES_MAX as usize;
    assert!(memory.state().batches[0] <= most);
    for tag in tags {
        let (found, answer) = raw.receive_answer();
        assert_eq!((found, answer.is_ok()), (tag, true));
    }
}

/// Another client or connection may have changed the same bytes since (seed 3144 of the cluster
/// simulation).
#[test]
fn repeated_or_late_request_ends_the_connection() {
    for late in [7, 6, 0] {
        let memory = MemoryBrick::new();
        let server = serve(&memory);
        let mut raw = RawConnection::client(server.address(), Purpose::Session);
        let (slice, epoch) = (SLICE, Epoch(1));
        assert!(raw.ask(&Request::Attach { slice, epoch }).is_ok());
        let handle = 0;
        let write = |byte| Request::Slice {
            handle,
            request: write(0, vec![byte; 8]),
        };
        raw.send(&encode_request(&write(1), 7));
        assert_eq!(raw.receive_answer().0, 7);
        raw.send(&encode_request(&write(2), late));
        raw.assert_hung_up();
        assert_eq!(memory.state().requests.len(), 1, "{late}");
    }
}

#[test]
fn fenced_client_is_told_the_epoch() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let (mut old, mut new) = (attach(&server), attach(&server));
    let epoch = Epoch(2);
    let raised = execute(
        &mut new,
        SliceRequest::RaiseEpoch {
            epoch,
            lost_since: Epoch(0),
        },
    );
    assert_eq!(raised, Ok(SliceReply::Done));
    let refused = execute(&mut old, write(0, vec![1; 8]));
    assert_eq!(refused, Err(SliceError::StaleEpoch { current: epoch }));
}

#[test]
fn unknown_handle_is_refused_and_connection_stays() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut raw = RawConnection::client(server.address(), Purpose::Session);
    let flush = |handle| Request::Slice {
        handle,
        request: read(0, 8),
    };
    let none = raw.ask(&flush(0));
    assert!(matches!(none, Err(SliceError::OutOfRange(_))), "{none:?}");
    assert_eq!(memory.state().opened, 0);
    let (slice, epoch) = (SLICE, Epoch(1));
    assert!(raw.ask(&Request::Attach { slice, epoch }).is_ok());
    let wrong = raw.ask(&flush(77));
    assert!(matches!(wrong, Err(SliceError::OutOfRange(_))), "{wrong:?}");
    assert!(raw.ask(&flush(0)).is_ok());
}

#[test]
fn requests_beyond_limits_never_reach_the_handler() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut raw = RawConnection::client(server.address(), Purpose::Session);
    let (slice, epoch) = (SLICE, Epoch(1));
    assert!(raw.ask(&Request::Attach { slice, epoch }).is_ok());
    let (offset, page) = (0, PageNo(0));
    for request in [
        read(0, u32::MAX),
        SliceRequest::Clear {
            offset,
            len: (1 << 30) + 1,
            stamp: stamp(1),
        },
        transact(vec![clear_pages(0, 65)], stamp(1)),
        transact(vec![clear_pages(4, 2), write_pages(5, 1)], stamp(1)),
        SliceRequest::Checksums { page, count: 4097 },
        SliceRequest::Births { page, count: 4097 },
        SliceRequest::RaiseEpoch {
            epoch: Epoch(EPOCH_MAX + 1),
            lost_since: Epoch(0),
        },
    ] {
        let handle = 0;
        let answer = raw.ask(&Request::Slice { handle, request });
        assert!(matches!(answer, Err(SliceError::OutOfRange(_))));
    }
    assert!(memory.state().requests.is_empty());
}

#[test]
fn session_ends_with_connection_despite_pending_requests() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut leg = attach(&server);
    memory.change(|state| state.mode = ReplyMode::Deferred);
    leg.submit(1, SliceRequest::Flush);
    memory.wait("a ticket", |state| state.waiting == 1);
    drop(leg);
    memory.wait("the session's end", |state| state.dropped == 1);
    memory.change(|state| state.mode = ReplyMode::Immediate);
    assert!(execute(&mut attach(&server), SliceRequest::Flush).is_ok());
}

/// The session ends even if the brick takes no further request of it at the time.
#[test]
fn session_at_deferred_limit_ends_with_its_connection() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let mut raw = RawConnection::client(server.address(), Purpose::Session);
    let (slice, epoch) = (SLICE, Epoch(1));
    assert!(raw.ask(&Request::Attach { slice, epoch }).is_ok());
    memory.change(|state| state.mode = ReplyMode::Deferred);
    let flush = Request::Slice {
        handle: 0,
        request: SliceRequest::Flush,
    };
    let all = (2..2 + DEFERRED_MAX as u64).flat_map(|tag| encode_request(&flush, tag));
    raw.send(&all.collect::<Vec<u8>>());
    memory.wait("the most tickets", |state| state.waiting == DEFERRED_MAX);
    drop(raw);
    memory.wait("the session's end", |state| state.dropped == 1);
}

#[test]
fn server_stop_ends_sessions_and_loses_requests() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let address = server.address();
    let (mut busy, mut idle) = (attach(&server), attach(&server));
    memory.change(|state| state.mode = ReplyMode::Deferred);
    for tag in 0..100 {
        busy.submit(tag, write(0, vec![1; 100]));
    }
    busy.reap(&mut Vec::new());
    memory.wait("a ticket", |state| state.waiting > 0);
    server.stop().expect("every connection ended");
    assert_eq!(memory.state().dropped, 2);
    for completion in reap(&mut busy, 100) {
        assert_lost(&completion.result, "brick");
    }
    assert_lost(&execute(&mut idle, SliceRequest::Flush), "brick");
    let later = TcpLeg::connect(address, &key(), timeouts(), SLICE, Epoch(1));
    assert_lost(&later.map(|_| SliceReply::Done), "cannot be reached");
}

#[test]
fn bind_error_names_address_in_use() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let service = Arc::new(MemoryBrickService(memory));
    let second = TcpServer::bind(server.address(), key(), service, ServerOptions::default());
    let said = second.err().expect("in use").to_string();
    assert!(said.contains(&server.address().to_string()), "{said}");
}

#[test]
fn client_beyond_limit_is_admitted_when_another_leaves() {
    let memory = MemoryBrick::new();
    let connections_max = 1;
    let options = ServerOptions {
        connections_max,
        ..ServerOptions::default()
    };
    let server = serve_with(&memory, options);
    let first = attach(&server);
    let connect = || TcpLeg::connect(server.address(), &key(), timeouts(), SLICE, Epoch(1));
    match connect().err() {
        Some(SliceError::NoSession(said)) => assert!(said.contains("too many"), "{said}"),
        other => panic!("{other:?}"),
    }
    drop(first);
    let until = std::time::Instant::now() + TEST_TIMEOUT;
    while connect().is_err() {
        assert!(std::time::Instant::now() < until, "the slot stays in use");
    }
}

#[test]
fn manager_creates_grows_lists_and_deletes_slices() {
    let memory = MemoryBrick::new();
    let server = serve(&memory);
    let brick = BrickClient::connect(server.address(), &key(), timeouts()).expect("connected");
    assert_eq!(brick.brick(), BRICK);
    let slice = SliceId(Uuid::from_u128(1));
    assert_eq!(brick.create(slice, 4096), Ok(()));
    let taken = SliceError::SliceExists(slice);
    assert_eq!(brick.create(slice, 4096), Err(taken));
    assert_eq!(brick.resize(slice, 8192), Ok(()));
    let listed = brick.list().expect("listed");
    let sizes: Vec<_> = listed.iter().map(|i| (i.slice, i.size_bytes)).collect();
    assert_eq!(sizes, [(slice, 8192), (SLICE, SLICE_BYTES)]);
    assert_eq!(brick.delete(slice), Ok(()));
    assert_eq!(brick.delete(slice), Err(SliceError::NoSuchSlice(slice)));
    let status = brick.status().expect("a status");
    assert_eq!((status.brick, &*status.durability), (BRICK, "process"));
    assert!(!brick.has_hung_up());
    assert_eq!(memory.state().opened, 0);
    let session = brick.attach(SLICE, Epoch(1));
    assert!(matches!(session, Err(SliceError::Refused(_))));
    server.stop().expect("stopped");
    assert!(brick.has_hung_up());
}

#[test]
fn long_list_comes_in_parts() {
    let memory = MemoryBrick::new();
    let count = 2 * LIST_ENTRIES_MAX as u128 + 1;
    memory.change(|state| {
        let ids = (1..count).map(|id| SliceId(Uuid::from_u128(id << 40)));
        state
            .slices
            .extend(ids.map(|id| (id, (Vec::new(), Epoch(0)))));
    });
    let server = serve(&memory);
    let brick = BrickClient::connect(server.address(), &key(), timeouts()).expect("connected");
    let listed = brick.list().expect("listed");
    assert_eq!(listed.len(), count as usize);
    assert!(listed.is_sorted_by(|a, b| a.slice < b.slice));
}
