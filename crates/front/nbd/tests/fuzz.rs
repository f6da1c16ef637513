//! Fuzz targets: messages of clients, before and after they chose an export, in pieces and cut at
//! every byte.
//!
//! `pagemesh_fuzz` describes how they run, `docs/rfd/004-fuzzing.md` why.

use memory::{CompletionMode, Memory};
use pagemesh_base::space::{Request, check_range};
use pagemesh_fuzz::{FuzzTarget, Random, measure_allocation};
use pagemesh_nbd::test_api::wire::{
    HEADER_BYTES, OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC, command, option,
};
use pagemesh_nbd::test_api::{
    Continuation, EndReason, Handshake, INPUT_BYTES_MAX, NegotiatedOptions, Negotiation,
    NegotiationStep, OPTIONS_MAX, ProtocolViolation, RECEIVE_BYTES, ReceiveOutcome, Receiver,
    RequestFrame, RequestPlan, SKIPPED_BYTES_MAX, StopSignal, next_zeroes, plan,
};
use pagemesh_nbd::{ExportOptions, Exports, Limits, PAYLOAD_BYTES_MAX};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType};
use rustix::net::{recv, send, shutdown, socketpair};
use std::hash::Hash;
use std::mem::discriminant;
use std::sync::Arc;

#[path = "support/memory.rs"]
mod memory;

const SIZE: u64 = 1 << 20;
/// Streams up to this length are cut at every byte, longer ones at some.
const ALL_CUTS_BYTES: usize = 300;
const SOME_CUTS: usize = 40;
/// Cuts of a target with a whole server, which takes three threads.
const SERVER_CUTS: usize = 10;
/// Most memory for answering an option: the option, its parsed form, and the answer.
const ANSWER_BYTES_MAX: u64 = 8 * INPUT_BYTES_MAX as u64;
/// A receiver's buffer, one payload, and a copy of both.
const RECEIVED_BYTES_MAX: u64 = 2 * (RECEIVE_BYTES + PAYLOAD_BYTES_MAX as usize) as u64;

fn target(name: &'static str) -> FuzzTarget {
    FuzzTarget::new(name, env!("CARGO_MANIFEST_DIR"))
}

fn exports() -> Exports {
    let exports = Exports::new();
    for (name, read_only) in [("disk", false), ("glass", true)] {
        let space = Arc::new(Memory::new(SIZE, CompletionMode::AtOnce));
        let options = ExportOptions {
            read_only,
            description: "of a test".into(),
        };
        exports.add(name, space, options).expect("a name");
    }
    exports
}

fn cut_positions(len: usize) -> impl Iterator<Item = usize> {
    let step = match len <= ALL_CUTS_BYTES {
        true => 1,
        false => len.div_ceil(SOME_CUTS),
    };
    (0..len).step_by(step)
}

fn option_message(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn length_prefixed_text(text: &str) -> Vec<u8> {
    let len = text.len() as u32;
    [&len.to_be_bytes(), text.as_bytes()].concat()
}

fn info_data(name: &str, wanted: &[u16]) -> Vec<u8> {
    let wanted: Vec<u8> = wanted.iter().flat_map(|kind| kind.to_be_bytes()).collect();
    let count = wanted.len() as u16 / 2;
    [
        length_prefixed_text(name),
        count.to_be_bytes().into(),
        wanted,
    ]
    .concat()
}

fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = length_prefixed_text(name);
    data.extend((queries.len() as u32).to_be_bytes());
    queries
        .iter()
        .for_each(|query| data.extend(length_prefixed_text(query)));
    data
}

/// Handshakes as clients make them, the flags included.
fn handshake_seeds() -> Vec<Vec<u8>> {
    let flags = 3u32.to_be_bytes().to_vec();
    let structured = option_message(option::STRUCTURED_REPLY, &[]);
    let set = option_message(
        option::SET_META_CONTEXT,
        &context_data("disk", &["base:allocation"]),
    );
    let scripts = [
        vec![option_message(option::EXPORT_NAME, b"disk")],
        vec![
            structured.clone(),
            set.clone(),
            option_message(option::GO, &info_data("disk", &[0, 1, 2, 3])),
        ],
        vec![
            option_message(option::LIST, &[]),
            option_message(option::ABORT, &[]),
        ],
        vec![
            option_message(option::INFO, &info_data("glass", &[3])),
            option_message(option::GO, &info_data("nothing", &[])),
            option_message(option::GO, &info_data("glass", &[])),
        ],
        vec![
            structured,
            option_message(option::LIST_META_CONTEXT, &context_data("disk", &[])),
            option_message(
                option::LIST_META_CONTEXT,
                &context_data("disk", &["base:", "x"]),
            ),
            set,
            option_message(99, b"?"),
        ],
    ];
    let whole = |script: Vec<Vec<u8>>| [&flags[..], &script.concat()].concat();
    let mut all: Vec<Vec<u8>> = scripts.into_iter().map(whole).collect();
    all.push([&[0; 4][..], &option_message(option::EXPORT_NAME, b"disk")].concat());
    all
}

/// Corrects the lengths of options.
fn fix_option_lengths(bytes: &mut [u8], random: &mut Random) {
    let magic = OPTION_MAGIC.to_be_bytes();
    let starts: Vec<usize> = (0..bytes.len())
        .filter(|&at| bytes[at..].starts_with(&magic))
        .collect();
    for (index, &start) in starts.iter().enumerate() {
        let end = starts.get(index + 1).copied().unwrap_or(bytes.len());
        let len = end.saturating_sub(start + 16) as u32;
        if random.below(4) > 0
            && let Some(field) = bytes.get_mut(start + 12..start + 16)
        {
            field.copy_from_slice(&len.to_be_bytes());
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum NegotiationEnd {
    More,
    Closed,
    Chosen(NegotiatedOptions),
    Violated(ProtocolViolation),
}

/// The server's output for these pieces, its end, and the bytes not consumed.
fn run_negotiation<'a>(
    pieces: impl Iterator<Item = &'a [u8]>,
) -> (Vec<u8>, NegotiationEnd, Vec<u8>) {
    let mut negotiation = Negotiation::new(exports());
    let (mut input, mut out) = (Vec::new(), Vec::new());
    negotiation.greet(&mut out);
    let mut rest: std::collections::VecDeque<u8> = std::collections::VecDeque::new();
    let mut pieces = pieces;
    let mut options = 0;
    let end = loop {
        let before = input.len();
        let (step, took) = measure_allocation(|| negotiation.step(&mut input, &mut out));
        assert!(
            took <= ANSWER_BYTES_MAX + 2 * out.len() as u64,
            "{took} bytes"
        );
        options += u32::from(input.len() < before);
        assert!(options <= OPTIONS_MAX + 1, "options without end");
        match step {
            Err(violation) => break NegotiationEnd::Violated(violation),
            Ok(NegotiationStep::Close) => break NegotiationEnd::Closed,
            Ok(NegotiationStep::Again) => assert!(input.len() < before, "again without progress"),
            Ok(NegotiationStep::Open(export)) => {
                let opened = negotiation.finish_open(Ok(export.space.size_bytes()), &mut out);
                match opened.expect("it may be opened") {
                    Some(session) => break NegotiationEnd::Chosen(session),
                    None => panic!("it was opened"),
                }
            }
            Ok(NegotiationStep::More) => {
                if rest.is_empty() {
                    match pieces.next() {
                        Some(piece) => rest.extend(piece),
                        None => break NegotiationEnd::More,
                    }
                }
                // As in the handshake: never more than fits.
                let room = INPUT_BYTES_MAX - input.len();
                assert!(room > 0, "it asks for more than it takes");
                let count = rest.len().min(room).min(4096);
                input.extend(rest.drain(..count));
            }
        }
    };
    input.extend(rest);
    input.extend(pieces.flatten());
    (out, end, input)
}

/// Counts answers to options. The greeting comes before them, and the answer to an export's name,
/// which has no frame, may come after them.
fn check_answers(out: &[u8], chosen: bool) -> usize {
    assert!(out.starts_with(b"NBDMAGICIHAVEOPT"));
    let (mut rest, mut count) = (&out[18..], 0);
    while rest.starts_with(&OPTION_REPLY_MAGIC.to_be_bytes()) {
        let len = rest[16..20].first_chunk().expect("a length");
        rest = &rest[20 + u32::from_be_bytes(*len) as usize..];
        count += 1;
    }
    let frameless = chosen && [10, 134].contains(&rest.len());
    assert!(rest.is_empty() || frameless, "{rest:02x?}");
    count
}

fn check_negotiation(bytes: &[u8]) -> impl Hash + use<> {
    let whole = run_negotiation([bytes].into_iter());
    let chosen = matches!(whole.1, NegotiationEnd::Chosen(_));
    let answers = check_answers(&whole.0, chosen);
    let split = run_negotiation(bytes.chunks(1));
    assert!(split == whole, "byte by byte: {:?}, {:?}", split.1, whole.1);
    let odd = bytes.chunks(7 + bytes.len() % 11);
    assert!(run_negotiation(odd) == whole, "in pieces");
    for cut in cut_positions(bytes.len()) {
        let (out, end, _) = run_negotiation([&bytes[..cut]].into_iter());
        assert!(whole.0.starts_with(&out), "cut at {cut}");
        assert!(
            end == NegotiationEnd::More || end == whole.1,
            "cut at {cut}: {end:?}"
        );
    }
    let end = match &whole.1 {
        NegotiationEnd::More => (0, None),
        NegotiationEnd::Closed => (1, None),
        NegotiationEnd::Chosen(session) => (
            2 + u8::from(session.has_structured_replies)
                + 2 * u8::from(session.has_allocation_context),
            None,
        ),
        NegotiationEnd::Violated(violation) => (9, Some(discriminant(violation))),
    };
    // The kinds of answers distinguish options.
    let kinds: Vec<u8> = whole
        .0
        .windows(20)
        .filter(|at| at.starts_with(&OPTION_REPLY_MAGIC.to_be_bytes()))
        .map(|at| at[15] ^ at[11] << 4)
        .take(6)
        .collect();
    (end, answers.min(6), kinds)
}

#[test]
fn fuzz_negotiation() {
    target("negotiation")
        .seeds(handshake_seeds())
        .cases(1500)
        .bytes_max(700)
        .fixup(fix_option_lengths)
        .run(check_negotiation);
}

fn request_message(command: u16, flags: u16, offset: u64, len: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend((offset ^ 0x77).to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes.extend(data);
    bytes
}

fn request_seeds() -> Vec<Vec<u8>> {
    let short = request_message(command::WRITE, 1, 4096, 100, &[7; 100]);
    let long = request_message(command::WRITE, 0, 0, 20_000, &[8; 20_000]);
    let read = request_message(command::READ, 0, 4000, 200, &[]);
    let others = [
        request_message(command::FLUSH, 0, 0, 0, &[]),
        request_message(command::TRIM, 1, 8192, 4096, &[]),
        request_message(command::WRITE_ZEROES, 2, 100, 9000, &[]),
        request_message(command::BLOCK_STATUS, 8, 0, 1 << 20, &[]),
        request_message(command::CACHE, 0, 0, 512, &[]),
    ];
    let end = request_message(command::DISCONNECT, 0, 0, 0, &[]);
    let edge = [100, 101].map(|len| request_message(command::READ, 0, SIZE - 100, len, &[]));
    vec![
        edge.concat(),
        [&short[..], &read].concat(),
        [&others.concat()[..], &end].concat(),
        [&long[..], &short, &long].concat(),
        request_message(command::WRITE, 0, 0, PAYLOAD_BYTES_MAX + 1, &[1; 50]),
        [&read[..], &others[3], &short, &end].concat(),
    ]
}

/// Makes payloads as long as their requests say, if a request begins.
fn fix_request_lengths(bytes: &mut [u8], random: &mut Random) {
    let magic = REQUEST_MAGIC.to_be_bytes();
    let starts: Vec<usize> = (0..bytes.len())
        .filter(|&at| bytes[at..].starts_with(&magic))
        .collect();
    for (index, &start) in starts.iter().enumerate() {
        let end = starts.get(index + 1).copied().unwrap_or(bytes.len());
        let write = bytes.get(start + 6..start + 8) == Some(&command::WRITE.to_be_bytes());
        let len = end.saturating_sub(start + HEADER_BYTES) as u32;
        if write
            && random.below(4) > 0
            && let Some(field) = bytes.get_mut(start + 24..start + 28)
        {
            field.copy_from_slice(&len.to_be_bytes());
        }
    }
}

fn socket_pair() -> (OwnedFd, OwnedFd) {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    socketpair(family, SocketType::STREAM, flags, None).expect("a pair of sockets")
}

fn send_all(socket: &OwnedFd, bytes: &[u8]) {
    if !bytes.is_empty() {
        let sent = send(socket, bytes, SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(bytes.len()), "the socket takes it");
    }
}

type ReceivedFrames = (Vec<RequestFrame>, Option<ProtocolViolation>);

/// The frames received from these pieces, delivered one after the other.
fn receive_pieces<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> ReceivedFrames {
    let (client, server) = socket_pair();
    let mut receiver = Receiver::new(&[]);
    let mut frames = Vec::new();
    for piece in pieces {
        send_all(&client, piece);
        loop {
            let filled = receiver.receive_once(server.as_fd()).expect("a socket");
            loop {
                match receiver.next_frame() {
                    Ok(Some(frame)) => frames.push(frame),
                    Ok(None) => break,
                    Err(violation) => return (frames, Some(violation)),
                }
            }
            if filled == ReceiveOutcome::Empty {
                break;
            }
        }
    }
    (frames, None)
}

fn check_transmission(bytes: &[u8]) -> impl Hash + use<> {
    let (whole, took) = measure_allocation(|| receive_pieces([bytes].into_iter()));
    let held: usize = whole.0.len() * 256 + bytes.len();
    assert!(took <= RECEIVED_BYTES_MAX + 4 * held as u64, "{took} bytes");
    let mut at = 0;
    let mut plans = Vec::new();
    for frame in &whole.0 {
        let header = match frame {
            RequestFrame::Whole(header, payload) => {
                let start = at + HEADER_BYTES;
                assert_eq!(payload[..], bytes[start..start + payload.len()]);
                let writes = header.command == command::WRITE;
                let len = if writes { header.len as usize } else { 0 };
                assert_eq!(payload.len(), len);
                assert!(len <= PAYLOAD_BYTES_MAX as usize);
                plans.extend([false, true].map(|read_only| check_plan(frame, read_only)));
                at = start + len;
                header
            }
            RequestFrame::Refused(header, _) => {
                assert!(header.len > PAYLOAD_BYTES_MAX && header.len <= SKIPPED_BYTES_MAX);
                at += HEADER_BYTES + header.len as usize;
                header
            }
        };
        let begin = at
            - HEADER_BYTES
            - if header.command == command::WRITE {
                header.len as usize
            } else {
                0
            };
        let mut again = REQUEST_MAGIC.to_be_bytes().to_vec();
        again.extend(header.flags.to_be_bytes());
        again.extend(header.command.to_be_bytes());
        again.extend(header.cookie.to_be_bytes());
        again.extend(header.offset.to_be_bytes());
        again.extend(header.len.to_be_bytes());
        assert_eq!(bytes[begin..begin + HEADER_BYTES], again);
    }
    let chunk = match bytes.len() <= 1000 {
        true => 1,
        false => 997,
    };
    assert!(
        receive_pieces(bytes.chunks(chunk)) == whole,
        "in pieces of {chunk}"
    );
    for cut in cut_positions(bytes.len()) {
        let (frames, end) = receive_pieces([&bytes[..cut]].into_iter());
        assert!(whole.0.starts_with(&frames), "cut at {cut}");
        assert!(end.is_none() || end == whole.1, "cut at {cut}: {end:?}");
    }
    plans.truncate(8);
    (plans, whole.1.as_ref().map(discriminant))
}

/// Checks that the plan keeps within the export and its rights.
fn check_plan(frame: &RequestFrame, read_only: bool) -> (u8, u16) {
    let RequestFrame::Whole(header, payload) = frame else {
        return (9, 0);
    };
    let session = NegotiatedOptions {
        size_bytes: SIZE,
        read_only,
        has_structured_replies: header.cookie % 2 == 0,
        has_allocation_context: header.cookie % 3 == 0,
    };
    let planned = plan(&session, header, payload.clone());
    let (mut request, mut then) = match planned {
        RequestPlan::Submit(request, then) => (request, then),
        RequestPlan::Fail(failure) => {
            assert!(!failure.reason.is_empty());
            return (1, header.command.min(9));
        }
        RequestPlan::Disconnect => return (2, 0),
    };
    let mut steps = 0u64;
    loop {
        let (offset, len, changes) = match &request {
            Request::Read { offset, len } => (*offset, u64::from(*len), false),
            Request::Write { offset, data, .. } => (*offset, data.len() as u64, true),
            Request::Discard { offset, len } => (*offset, *len, true),
            Request::WriteZeroes { offset, len, .. } => (*offset, *len, true),
            Request::Extents { offset, len } => (*offset, *len, false),
            Request::Flush => (0, 0, false),
            Request::Transact { .. } => panic!("clients of NBD have no transactions"),
        };
        assert!(check_range(SIZE, offset, len).is_ok(), "{request:?}");
        assert!(!(changes && read_only), "{request:?} of a read-only export");
        steps += 1;
        assert!(steps <= SIZE, "zeroes without end");
        let Continuation::Zeroes { next, end, durable } = then else {
            return (3, header.command);
        };
        (request, then) = next_zeroes(next, end, durable);
    }
}

#[test]
fn fuzz_transmission() {
    target("transmission")
        .seeds(request_seeds())
        .cases(600)
        .bytes_max(50_000)
        .fixup(fix_request_lengths)
        .run(check_transmission);
}

/// Serves a client that sends this and hangs up; returns the bytes that it receives.
fn serve_client(pieces: &[&[u8]]) -> (Vec<u8>, u8) {
    let (client, server) = socket_pair();
    let signal = Arc::new(StopSignal::new().expect("a descriptor"));
    let exports = exports();
    let talk = || {
        for piece in pieces {
            let mut rest = *piece;
            // The server may hang up before the end.
            while let Ok(sent @ 1..) = send(&client, rest, SendFlags::NOSIGNAL) {
                rest = &rest[sent..];
            }
        }
        let _ = shutdown(&client, Shutdown::Write);
    };
    let listen = || {
        let (mut heard, mut buffer) = (Vec::new(), vec![0; 65536]);
        while let Ok((len @ 1.., _)) = recv(&client, &mut buffer[..], RecvFlags::empty()) {
            heard.extend_from_slice(&buffer[..len]);
        }
        heard
    };
    std::thread::scope(|scope| {
        scope.spawn(talk);
        let heard = scope.spawn(listen);
        let handshake = Handshake::new(1, server, signal, exports, Limits::default());
        let ended = match handshake.run() {
            Ok(served) => served.connection.serve(),
            Err(ended) => ended,
        };
        let ended = match ended {
            EndReason::Disconnected => 0,
            EndReason::Closed => 1,
            EndReason::Violated(_) => 2,
            // A client that hangs up while it is answered.
            EndReason::Socket(_) => 3,
            other => panic!("{other}"),
        };
        (heard.join().expect("no panic"), ended)
    })
}

/// Counts of each received byte: refusals overtake requests in the space, so the order of replies
/// has no meaning.
fn byte_counts(heard: &[u8]) -> [usize; 256] {
    let mut counts = [0; 256];
    heard
        .iter()
        .for_each(|&byte| counts[usize::from(byte)] += 1);
    counts
}

fn check_client(bytes: &[u8]) -> impl Hash + use<> {
    let whole = serve_client(&[bytes]);
    let most = byte_counts(&whole.0);
    let pieces: Vec<&[u8]> = bytes.chunks(5 + bytes.len() / 9).collect();
    let split = serve_client(&pieces);
    assert_eq!(split.1, whole.1, "another delivery, another end");
    // After a violation the server drops the unsent answers.
    let is_kept = whole.1 < 2;
    assert!(!is_kept || byte_counts(&split.0) == most, "other answers");
    for cut in (0..bytes.len()).step_by(bytes.len().div_ceil(SERVER_CUTS).max(1)) {
        let (heard, _) = serve_client(&[&bytes[..cut]]);
        let fewer = byte_counts(&heard).iter().zip(&most).all(|(a, b)| a <= b);
        assert!(!is_kept || fewer, "cut at {cut}");
    }
    (whole.1, whole.0.len().ilog2())
}

/// A whole server, with a socket and threads of its own.
#[test]
fn fuzz_client() {
    let handshakes = handshake_seeds();
    let mut seeds: Vec<Vec<u8>> = request_seeds()
        .into_iter()
        .map(|requests| [&handshakes[1][..], &requests].concat())
        .collect();
    seeds.push([&handshakes[0][..], &request_seeds()[4]].concat());
    seeds.extend(handshakes);
    target("client")
        .seeds(seeds)
        .cases(50)
        .bytes_max(30_000)
        .fixup(|bytes, random| {
            fix_option_lengths(bytes, random);
            fix_request_lengths(bytes, random);
        })
        .run(check_client);
}
