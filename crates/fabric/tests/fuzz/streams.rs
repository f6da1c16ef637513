//! A stream of messages, cut at every byte and delivered in every division: complete messages are
//! taken once and in order, and nothing else is taken.

use super::*;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fabric::limits::{BODY_BYTES_MAX, RECEIVE_BYTES};
use pagemesh_fabric::message::{Direction, MalformedMessage};
use pagemesh_fabric::test_api::ReceiveBuffer;
use pagemesh_fabric::wire::ReceiveResult;
use pagemesh_fuzz::measure_allocation;
use std::mem::discriminant;

/// Streams up to here are cut at every byte, longer ones at some.
const ALL_CUTS_BYTES: usize = 400;
const SOME_CUTS: usize = 40;
/// A receive buffer, a body in transit, and the allocations to make them.
const ALLOCATED_MAX: u64 = (2 * (RECEIVE_BYTES + PAGE_BYTES) + BODY_BYTES_MAX as usize) as u64;

type Messages = Vec<(Header, Vec<u8>)>;

/// The messages taken from these pieces, delivered one after the other, and the error that stopped
/// it.
fn deliver<'a>(
    pieces: impl Iterator<Item = &'a [u8]>,
    (way, aligned, shared): (Direction, bool, bool),
) -> (Messages, Option<MalformedMessage>) {
    let (sender, stream) = pair();
    let mut inflow = ReceiveBuffer::new(way, aligned);
    let (mut messages, mut held) = (Vec::new(), Vec::new());
    for piece in pieces {
        send_all(&sender, piece);
        while inflow.receive(&stream).expect("a socket") != ReceiveResult::WouldBlock {
            loop {
                match inflow.next_message() {
                    Ok(None) => break,
                    Err(cause) => return (messages, Some(cause)),
                    Ok(Some((header, body))) if shared => {
                        let body = inflow.share(body);
                        messages.push((header, body.to_vec()));
                        // A body that is held beyond its batch must not change.
                        held.push(body);
                    }
                    Ok(Some((header, body))) => {
                        let body = inflow.take(body);
                        messages.push((header, body));
                    }
                }
            }
        }
    }
    for ((_, taken), held) in messages.iter().zip(&held) {
        assert!(taken[..] == held[..], "a body changed while it was held");
    }
    (messages, None)
}

/// Cuts a stream at places derived from a number.
fn pieces(stream: &[u8], number: u64) -> Vec<&[u8]> {
    let mut random = Random::new(number);
    let mut rest = stream;
    let mut pieces = Vec::new();
    while !rest.is_empty() {
        let most = match random.below(3) {
            0 => 4,
            1 => 100,
            _ => 20_000,
        };
        let (piece, behind) = rest.split_at((1 + random.below(most)).min(rest.len()));
        pieces.push(piece);
        rest = behind;
    }
    pieces
}

fn stream(bytes: &[u8]) -> impl std::hash::Hash + use<> {
    let (head, stream) = bytes.split_first_chunk::<9>()?;
    let [how, number @ ..] = *head;
    let way = match how & 1 {
        0 => Direction::Request,
        _ => Direction::Reply,
    };
    let how = (way, how & 2 != 0, how & 4 != 0);
    let (whole, took) = measure_allocation(|| deliver([stream].into_iter(), how));
    let held: usize = whole.0.iter().map(|(_, body)| 2 * body.len() + 256).sum();
    assert!(took <= ALLOCATED_MAX + 2 * held as u64, "{took} bytes");
    let mut at = 0;
    for (header, body) in &whole.0 {
        assert_eq!(body.len(), header.body_len as usize);
        let end = at + HEADER_BYTES + body.len();
        assert_eq!(stream[at..end], joined((*header, body.clone().into())));
        at = end;
    }
    let split = deliver(pieces(stream, u64::from_le_bytes(number)).into_iter(), how);
    assert!(split == whole, "another delivery, other messages");
    if stream.len() <= ALL_CUTS_BYTES {
        assert!(deliver(stream.chunks(1), how) == whole, "byte by byte");
    }
    let step = match stream.len() <= ALL_CUTS_BYTES {
        true => 1,
        false => stream.len().div_ceil(SOME_CUTS),
    };
    for cut in (0..stream.len()).step_by(step) {
        let (messages, end) = deliver([&stream[..cut]].into_iter(), how);
        assert!(whole.0.starts_with(&messages), "cut at {cut}");
        assert!(end.is_none() || end == whole.1, "cut at {cut}: {end:?}");
        let there = whole.0.iter().scan(0, |at, (_, body)| {
            *at += HEADER_BYTES + body.len();
            Some(*at)
        });
        let there = there.take_while(|&end| end <= cut).count();
        assert_eq!(messages.len(), there, "cut at {cut}");
    }
    let kinds: Vec<u8> = whole
        .0
        .iter()
        .map(|(header, _)| header.kind as u8)
        .collect();
    Some((
        kinds.len().min(4),
        whole.1.as_ref().map(discriminant),
        at < stream.len(),
    ))
}

fn write(len: usize) -> Request {
    let data = (0..len).map(|at| (at * 7 + len) as u8).collect();
    let stamp = Stamp {
        epoch: Epoch(1),
        op: 1,
        open_ops: 0,
    };
    let request = SliceRequest::Write {
        offset: 0,
        data,
        stamp,
    };
    Request::Slice { handle: 0, request }
}

#[test]
fn fuzz_stream() {
    let all: Vec<Vec<u8>> = requests().iter().map(|one| joined(one.encode(1))).collect();
    let long: Vec<Vec<u8>> = [0, 17_000, 5, 16_384]
        .map(|len| joined(write(len).encode(2)))
        .into();
    let with = |how: u8, stream: Vec<u8>| [&[how, 1, 2, 3, 4, 5, 6, 7, 8], &stream[..]].concat();
    target("stream")
        .seeds([
            with(2, all[..5].concat()),
            with(6, all[5..].concat()),
            with(4, long.concat()),
            with(6, long.concat()),
            with(0, joined(write(200).encode(3))),
        ])
        .cases(1500)
        .bytes_max(60_000)
        .fixup(|bytes, _| fix_all_checksums(bytes, 9))
        .run(stream);
}
