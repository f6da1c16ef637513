use super::*;
use crate::message::request::Request;
use crate::stream::Stream;
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{SliceRequest, Stamp};
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, send, socketpair};
use std::os::fd::OwnedFd;

fn pair() -> (OwnedFd, Stream) {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let pair = socketpair(family, SocketType::STREAM, flags, None);
    let (ours, theirs) = pair.expect("a pair of sockets");
    (ours, Stream::unix(theirs))
}

fn write(len: usize) -> Request {
    let (epoch, op, open) = (Epoch(1), len as u64, 0);
    let stamp = Stamp {
        epoch,
        op,
        open_ops: open,
    };
    let data = (0..len).map(|at| (at * 7 + len) as u8).collect();
    let request = SliceRequest::Write {
        offset: 0,
        data,
        stamp,
    };
    Request::Slice { handle: 0, request }
}

fn joined(requests: &[Request]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (tag, request) in requests.iter().enumerate() {
        let (header, body) = request.encode(tag as u64);
        bytes.extend_from_slice(&header.encode());
        bytes.extend_from_slice(&body);
    }
    bytes
}

/// Sends these pieces one after the other and returns the received messages.
fn receive_pieces<'a>(
    pieces: impl Iterator<Item = &'a [u8]>,
    aligned: bool,
) -> Result<Vec<Request>, MalformedMessage> {
    let (sender, stream) = pair();
    let mut inflow = ReceiveBuffer::new(Direction::Request, aligned);
    let mut requests = Vec::new();
    for piece in pieces {
        let sent = send(&sender, piece, rustix::net::SendFlags::empty());
        assert_eq!(sent, Ok(piece.len()));
        while inflow.receive(&stream).expect("a socket") != ReceiveResult::WouldBlock {
            while let Some((header, body)) = inflow.next_message()? {
                let large = matches!(body, Body::Owned { .. });
                let body = inflow.share(body);
                let at = body.as_ptr().addr() % PAGE_BYTES;
                assert!(!aligned || !large || at == 0, "a large body at {at}");
                assert_eq!(header.tag, requests.len() as u64);
                requests.push(Request::decode(&header, body)?);
            }
        }
    }
    Ok(requests)
}

/// Cuts bytes at the given places.
fn cut(bytes: &[u8], mut at: Vec<usize>) -> impl Iterator<Item = &[u8]> {
    at.iter_mut().for_each(|at| *at %= bytes.len());
    at.extend([0, bytes.len()]);
    // Each piece fits into the socket's buffer.
    at.extend((0..bytes.len()).step_by(64 << 10));
    at.sort_unstable();
    at.dedup();
    let ends: Vec<_> = at.windows(2).map(|ends| ends[0]..ends[1]).collect();
    ends.into_iter().map(|range| &bytes[range])
}

fn lengths() -> impl Strategy<Value = usize> {
    let edges = [
        0,
        1,
        4096,
        LARGE_BODY_BYTES - 1,
        LARGE_BODY_BYTES,
        RECEIVE_BYTES - HEADER_BYTES,
        RECEIVE_BYTES,
        200_000,
    ];
    prop_oneof![prop::sample::select(edges.to_vec()), 0usize..40_000]
}

proptest! {
    /// The messages received are those sent, however the stream is cut and although all bodies are
    /// held.
    #[test]
    fn stream_split_anywhere_gives_same_messages(
        lens in prop::collection::vec(lengths(), 1..8),
        cuts in prop::collection::vec(any::<usize>(), 0..20), aligned: bool,
    ) {
        let requests: Vec<Request> = lens.into_iter().map(write).collect();
        let bytes = joined(&requests);
        let received = receive_pieces(cut(&bytes, cuts), aligned);
        prop_assert!(received == Ok(requests), "other messages");
    }

    #[test]
    fn any_bytes_are_messages_or_malformed(
        len in 0usize..200, noise in prop::collection::vec(any::<u8>(), 1..300),
        cuts in prop::collection::vec(any::<usize>(), 0..20),
    ) {
        let bytes = [joined(&[write(len)]), noise].concat();
        let _ = receive_pieces(cut(&bytes, cuts), true);
    }
}

#[test]
fn byte_by_byte_gives_the_same_messages() {
    let requests: Vec<Request> = [0, 1, 100, 17_000, 0, 5].map(write).into();
    let bytes = joined(&requests);
    assert!(receive_pieces(bytes.chunks(1), true) == Ok(requests));
}

/// Memory is allocated for the length that a checked header announces, and not before.
#[test]
fn announced_length_beyond_limit_allocates_nothing() {
    let (header, _) = write(RECEIVE_BYTES).encode(0);
    let mut bytes = header.encode();
    bytes[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
    let crc = pagemesh_base::checksum::crc32c(&bytes[..60]);
    bytes[60..].copy_from_slice(&crc.to_le_bytes());
    let refused = receive_pieces([&bytes[..]].into_iter(), true).err();
    assert!(matches!(refused, Some(MalformedMessage::TooLong { .. })));
}
