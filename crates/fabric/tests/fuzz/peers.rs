//! Whole ends of a connection: a brick that receives any bytes, cut at any place, and clients that
//! receive any answers.

use super::*;
use pagemesh_base::layout::BrickId;
use pagemesh_base::slice::*;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::message::Direction;
use pagemesh_fabric::message::reply::{self, AttachReply, Reply};
use pagemesh_fabric::serve::ConnectionError;
use pagemesh_fabric::service::{Handler, Outcome};
use pagemesh_fabric::stop::StopSignal;
use pagemesh_fabric::tcp::TcpLeg;
use pagemesh_fabric::test_api;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use std::collections::BTreeMap;
use std::mem::{Discriminant, discriminant};
use std::sync::{Arc, Mutex};

const BRICK: BrickId = BrickId(Uuid::from_u128(0xb));
/// Bytes of the longest read that the fake answers: all replies of a case fit
/// into a socket.
const READ_BYTES_MAX: u32 = 512;
/// Streams up to here are cut at every byte, longer ones at some.
const ALL_CUTS_BYTES: usize = 300;
const SOME_CUTS: usize = 40;

/// A brick that records its requests.
#[derive(Clone, Default)]
struct RecordingBrick(Arc<Mutex<Vec<String>>>);

impl RecordingBrick {
    fn record(&self, what: String) {
        self.0.lock().expect("no panic").push(what);
    }

    fn control(&self, what: String) -> Result<(), SliceError> {
        self.record(what);
        Ok(())
    }
}

impl BrickControl for RecordingBrick {
    fn create(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        self.control(format!("create {slice} {size_bytes}"))
    }

    fn resize(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        self.control(format!("resize {slice} {size_bytes}"))
    }

    fn delete(&self, slice: SliceId) -> Result<(), SliceError> {
        self.control(format!("delete {slice}"))
    }

    fn list(&self) -> Result<Vec<SliceInfo>, SliceError> {
        self.record("list".into());
        Ok(vec![])
    }

    fn status(&self) -> Result<BrickStatus, SliceError> {
        self.record("status".into());
        Err(SliceError::NoSpace)
    }

    fn prepare_snapshot(&self, slice: SliceId, snapshot: Epoch) -> Result<(), SliceError> {
        self.control(format!("prepare {slice} {snapshot}"))
    }

    fn drop_snapshots(&self, slice: SliceId, dropped: &[Epoch]) -> Result<(), SliceError> {
        assert!(
            dropped.len() <= DROPPED_SNAPSHOTS_MAX,
            "refused before it is seen"
        );
        self.control(format!("drop {slice} {dropped:?}"))
    }

    fn snapshots(&self, slice: SliceId) -> Result<Vec<Epoch>, SliceError> {
        self.control(format!("snapshots {slice}"))?;
        Ok(vec![Epoch(1), Epoch(3)])
    }
}

impl Handler for RecordingBrick {
    fn attach(&mut self, slice: SliceId, epoch: Epoch) -> Result<AttachReply, SliceError> {
        self.record(format!("attach {slice} {epoch:?}"));
        Ok(AttachReply {
            handle: 0,
            size_bytes: 1 << 30,
        })
    }

    fn execute(&mut self, handle: u32, request: SliceRequest) -> Outcome {
        pagemesh_fabric::message::request::check_limits(&request)
            .expect("refused before it is seen");
        self.record(format!("{handle} {request:?}"));
        Outcome::Done(match request {
            SliceRequest::Read { len, .. } if len <= READ_BYTES_MAX => {
                Ok(SliceReply::Data(vec![7; len as usize]))
            }
            SliceRequest::Write { .. } | SliceRequest::Flush => Ok(SliceReply::Done),
            _ => Err(SliceError::NoSpace),
        })
    }
}

/// The requests that a brick got, the bytes that it sent, and its error at the end.
type ServeResult = (Vec<String>, Vec<u8>, Option<Discriminant<ConnectionError>>);

/// Serves a client that sends these pieces and hangs up.
fn serve(pieces: &[&[u8]]) -> ServeResult {
    let (client, stream) = pair();
    let notes = RecordingBrick::default();
    let stop = StopSignal::new().expect("a descriptor");
    let session = notes.clone();
    let mut open = || Ok(Box::new(session.clone()) as Box<dyn Handler>);
    let talk = || {
        for piece in pieces {
            send_all(&client, piece);
        }
        shutdown(&client, Shutdown::Write).expect("a socket");
    };
    let mut run = || test_api::serve_connection(&stream, &notes, &stop, &mut open);
    let ended = match pieces.len() {
        0 | 1 => {
            talk();
            run()
        }
        _ => std::thread::scope(|scope| {
            scope.spawn(talk);
            run()
        }),
    };
    stream.close();
    let mut said = Vec::new();
    let mut buffer = [0; 65536];
    while let Ok((len @ 1.., _)) = recv(&client, &mut buffer[..], RecvFlags::DONTWAIT) {
        said.extend_from_slice(&buffer[..len]);
    }
    let asked = std::mem::take(&mut *notes.0.lock().expect("no panic"));
    (
        asked,
        without_times(&said),
        ended.err().map(|cause| discriminant(&cause)),
    )
}

/// The replies without the time that the brick spent, which differs from run to run. The last may be
/// incomplete.
fn without_times(mut said: &[u8]) -> Vec<u8> {
    let mut without = Vec::new();
    while let Some((head, rest)) = said.split_first_chunk::<HEADER_BYTES>() {
        let header = Header::decode(head, Direction::Reply).expect("a reply");
        without.extend(header.with_service(ServiceTime::default()).encode());
        let (body, rest) = rest.split_at(rest.len().min(header.body_len as usize));
        without.extend(body);
        said = rest;
    }
    without.extend(said);
    without
}

/// Splits bytes into replies; each must be complete.
fn replies(mut said: &[u8]) -> Vec<Header> {
    let mut found = Vec::new();
    while let Some((head, rest)) = said.split_first_chunk::<HEADER_BYTES>() {
        let header = Header::decode(head, Direction::Reply).expect("a reply");
        let (body, rest) = rest.split_at(header.body_len as usize);
        header.check_body(body).expect("a whole reply");
        let decoded = reply::decode(&header, body.to_vec());
        assert!(decoded.is_ok(), "{decoded:?}");
        found.push(header);
        said = rest;
    }
    assert!(said.is_empty(), "a cut reply");
    found
}

/// The end of every complete request in a stream.
fn request_ends(stream: &[u8]) -> Vec<usize> {
    let (mut ends, mut at) = (Vec::new(), 0);
    while let Some((head, rest)) = stream[at..].split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = Header::decode(head, Direction::Request) else {
            break;
        };
        let Some(body) = rest.get(..header.body_len as usize) else {
            break;
        };
        let body = Bytes::copy_from_slice(body);
        if header.check_body(&body).is_err() || Request::decode(&header, body).is_err() {
            break;
        }
        at += HEADER_BYTES + header.body_len as usize;
        ends.push(at);
    }
    ends
}

fn brick(stream: &[u8]) -> impl std::hash::Hash + use<> {
    let whole = serve(&[stream]);
    let ends = request_ends(stream);
    let answered = replies(&whole.1);
    assert!(whole.0.len() <= ends.len(), "asked more than was said");
    if whole.2.is_none() {
        assert_eq!(answered.len(), ends.len(), "every request has one reply");
    }
    // The connection ends where the stream continues with invalid bytes.
    let rest = &stream[ends.last().copied().unwrap_or(0)..];
    if rest.len() >= HEADER_BYTES && whole.2.is_none() {
        let header = rest
            .first_chunk()
            .map(|head| Header::decode(head, Direction::Request));
        assert!(matches!(header, Some(Ok(_))), "nonsense was passed over");
    }
    if stream.len() > 1 {
        let middle: Vec<&[u8]> = stream.chunks(stream.len().div_ceil(7)).collect();
        let split = serve(&middle);
        assert!(split.0 == whole.0, "another delivery, other requests");
        assert!(split.2 == whole.2, "another delivery, another end");
        // A connection that breaks may drop the replies of its last batch.
        assert!(split.2.is_some() || split.1 == whole.1, "other replies");
    }
    let step = match stream.len() <= ALL_CUTS_BYTES {
        true => 1,
        false => stream.len().div_ceil(SOME_CUTS),
    };
    for cut in (0..stream.len()).step_by(step) {
        let (asked, said, _) = serve(&[&stream[..cut]]);
        assert!(whole.0.starts_with(&asked), "cut at {cut}");
        let there = ends.iter().take_while(|&&end| end <= cut).count();
        assert!(replies(&said).len() <= there, "cut at {cut}");
    }
    (whole.0.len().min(5), answered.len().min(5), whole.2)
}

#[test]
fn fuzz_brick() {
    let requests = requests();
    let of = |range: std::ops::Range<usize>| -> Vec<u8> {
        let one = |(tag, one): (usize, &Request)| joined(one.encode(tag as u64));
        let all = requests[range].iter().enumerate().map(one);
        all.collect::<Vec<_>>().concat()
    };
    let attach = of(0..1);
    target("brick")
        .seeds([
            of(0..4),
            [attach.clone(), of(1..3)].concat(),
            [attach, of(4..8)].concat(),
            of(8..13),
            of(13..17),
            of(requests.len() - 6..requests.len()),
        ])
        .cases(600)
        .bytes_max(1200)
        .fixup(|bytes, _| fix_all_checksums(bytes, 0))
        .run(brick);
}

fn leg_requests() -> [SliceRequest; 8] {
    [
        SliceRequest::Read { offset: 0, len: 16 },
        SliceRequest::Flush,
        SliceRequest::Extents {
            offset: 0,
            len: 1 << 20,
        },
        SliceRequest::Checksums {
            page: PageNo(0),
            count: 2,
        },
        SliceRequest::Dirty {
            since: Epoch(1),
            from: PageNo(0),
        },
        SliceRequest::InFlight,
        SliceRequest::ForgetInFlight,
        SliceRequest::KeepOrder,
    ]
}

/// A leg that has sent requests, the brick's end, and the headers that the brick received.
fn leg() -> (TcpLeg, OwnedFd, Vec<Header>) {
    let (brick, stream) = pair();
    let timeouts = Timeouts::default();
    let remote = test_api::brick_client(stream, BRICK, timeouts.call);
    let attached = AttachReply {
        handle: 0,
        size_bytes: 1 << 20,
    };
    let mut leg = test_api::tcp_leg(remote, attached, timeouts);
    for (tag, request) in leg_requests().into_iter().enumerate() {
        leg.submit(tag as u64, request);
    }
    let mut none = Vec::new();
    leg.reap(&mut none);
    assert!(none.is_empty(), "nothing is answered yet");
    let mut buffer = [0; 4096];
    let (len, _) = recv(&brick, &mut buffer[..], RecvFlags::DONTWAIT).expect("requests");
    let (heads, rest) = buffer[..len].as_chunks::<HEADER_BYTES>();
    assert!(rest.is_empty(), "none of them has a body");
    let decode = |head| Header::decode(head, Direction::Request).expect("a request");
    let heads = heads.iter().map(decode).collect();
    (leg, brick, heads)
}

/// Whether a reply has the kind of the request.
fn fits(request: &SliceRequest, reply: &SliceReply) -> bool {
    match (request, reply) {
        (SliceRequest::Read { len, .. }, SliceReply::Data(data)) => data.len() == *len as usize,
        (SliceRequest::Checksums { count, .. }, SliceReply::Checksums(sums)) => {
            sums.len() == *count as usize
        }
        (SliceRequest::Extents { .. }, SliceReply::Extents(_))
        | (SliceRequest::Dirty { .. }, SliceReply::Dirty { .. })
        | (SliceRequest::InFlight, SliceReply::InFlight(_))
        | (
            SliceRequest::Flush | SliceRequest::ForgetInFlight | SliceRequest::KeepOrder,
            SliceReply::Done,
        ) => true,
        _ => false,
    }
}

type Completed = BTreeMap<u64, Result<SliceReply, SliceError>>;

/// The completions of the requests when a brick answers with these pieces and hangs up.
fn answer<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Completed {
    let (mut leg, brick, _) = leg();
    let (mut found, mut done) = (BTreeMap::new(), Vec::new());
    for piece in pieces {
        // The leg may have hung up already.
        let _ = send(&brick, piece, SendFlags::NOSIGNAL);
        leg.reap(&mut done);
    }
    drop(brick);
    leg.reap(&mut done);
    leg.reap(&mut done);
    for SliceCompletion { tag, result, .. } in done {
        assert!(found.insert(tag, result).is_none(), "{tag} ended twice");
    }
    assert_eq!(found.len(), leg_requests().len(), "every request ends");
    found
}

fn client(bytes: &[u8]) -> impl std::hash::Hash + use<> {
    let whole = answer([bytes].into_iter());
    for (request, (tag, result)) in leg_requests().iter().zip(&whole) {
        let fit = result.as_ref().map_or(true, |reply| fits(request, reply));
        assert!(fit, "request {tag} {request:?} was answered {result:?}");
    }
    let kept = |found: &Completed, cut: usize| {
        for (tag, result) in found {
            let lost = matches!(result, Err(SliceError::Lost(_)));
            assert!(lost || whole[tag] == *result, "{tag}, cut at {cut}");
        }
    };
    let step = bytes.len().div_ceil(60).max(1);
    for cut in (0..bytes.len()).step_by(step) {
        kept(&answer([&bytes[..cut]].into_iter()), cut);
    }
    kept(&answer(bytes.chunks(1)), bytes.len());
    let form = |result: &Result<SliceReply, SliceError>| match result {
        Ok(reply) => (true, format!("{:?}", discriminant(reply))),
        Err(error) => (false, format!("{:?}", discriminant(error))),
    };
    whole.values().map(form).collect::<Vec<_>>()
}

#[test]
fn fuzz_leg() {
    let (_, _, heads) = leg();
    let replies = [
        SliceReply::Data(vec![5; 16]),
        SliceReply::Done,
        SliceReply::Extents(vec![]),
        SliceReply::Checksums(vec![1, 2]),
        SliceReply::Dirty {
            runs: vec![],
            next: None,
        },
        SliceReply::InFlight(None),
        SliceReply::Done,
    ];
    let one = |(head, reply): (&Header, &SliceReply)| {
        joined(reply::encode(
            head.kind,
            head.tag,
            Ok(Reply::Slice(reply.clone())),
        ))
    };
    let answers: Vec<Vec<u8>> = heads.iter().zip(&replies).map(one).collect();
    let errors = [
        SliceError::NoSpace,
        SliceError::Damaged { offset: 0 },
        SliceError::Refused("no".into()),
        SliceError::Lost("gone".into()),
    ];
    let errors = heads.iter().zip(errors);
    let errors = errors.map(|(head, error)| joined(reply::encode(head.kind, head.tag, Err(error))));
    let mut backwards = answers.clone();
    backwards.reverse();
    target("leg")
        .seeds([
            answers.concat(),
            backwards.concat(),
            errors.collect::<Vec<_>>().concat(),
        ])
        .cases(600)
        .bytes_max(1500)
        .fixup(|bytes, _| fix_all_checksums(bytes, 0))
        .run(client);
}

#[test]
fn fuzz_listing() {
    let listed = |from: u128, count: u128, more, tag| {
        let info = |id| SliceInfo {
            slice: SliceId(Uuid::from_u128(id)),
            size_bytes: 4096,
            epoch: 1,
        };
        let slices = (from..from + count).map(info).collect();
        joined(reply::encode(
            MessageKind::List,
            tag,
            Ok(Reply::List { slices, more }),
        ))
    };
    target("listing")
        .seeds([
            listed(1, 3, false, 1),
            [
                listed(1, 2, true, 1),
                listed(3, 2, true, 2),
                listed(9, 0, false, 3),
            ]
            .concat(),
            listed(1, 0, true, 1),
        ])
        .cases(2000)
        .bytes_max(1500)
        .fixup(|bytes, _| fix_all_checksums(bytes, 0))
        .run(|bytes| {
            let (brick, stream) = pair();
            send_all(&brick, bytes);
            shutdown(&brick, Shutdown::Write).expect("a socket");
            let remote = test_api::brick_client(stream, BRICK, Timeouts::default().call);
            let listed = remote.list();
            if let Ok(slices) = &listed {
                assert!(slices.is_sorted_by(|a, b| a.slice < b.slice), "{slices:?}");
                assert!(slices.len() * 32 <= bytes.len(), "more than was said");
            }
            listed.map(|slices| slices.len().min(5)).map_err(|error| {
                let said = format!("{:?}", discriminant(&error));
                (
                    said,
                    matches!(error, SliceError::Lost(ref why) if why.contains("closed")),
                )
            })
        });
}
