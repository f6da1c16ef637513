//! One message. A decoded message encodes to the same bytes, so decoding accepts nothing outside
//! the format. Decoding allocates in proportion to the bytes received.

use super::*;
use pagemesh_base::layout::BrickId;
use pagemesh_base::slice::{
    BrickStatus, InFlightOp, LIST_ENTRIES_MAX, PageRun, SEEN_RUNS_MAX, SliceError, SliceInfo,
    SliceReply,
};
use pagemesh_base::space::{EXTENTS_MAX, Extent};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_fabric::limits::{BODY_BYTES_MAX, TEXT_BYTES_MAX};
use pagemesh_fabric::message::reply::{self, Answer, AttachReply, Reply};
use pagemesh_fabric::message::request::check_limits;
use pagemesh_fabric::message::{Direction, MalformedMessage};
use pagemesh_fuzz::measure_allocation;
use std::mem::{Discriminant, discriminant};

/// Bytes that decoding may allocate per byte of a body: an extent takes 16 for 8, a growing list
/// twice the size of its content, and once more while it moves.
const ALLOCATED_MAX: u64 = 8;
/// The bytes beyond that: the reason of a refusal.
const SPARE_BYTES: u64 = 4096;

#[derive(Hash)]
enum DecodeOutcome<T> {
    Short,
    Refused(Discriminant<MalformedMessage>, Option<&'static str>),
    Message(T),
}

fn refused<T>(cause: &MalformedMessage) -> DecodeOutcome<T> {
    let what = match cause {
        MalformedMessage::Content { what, .. } => Some(*what),
        _ => None,
    };
    DecodeOutcome::Refused(discriminant(cause), what)
}

/// The header and body of one whole message.
fn open(bytes: &[u8], way: Direction) -> Result<(Header, &[u8]), Option<MalformedMessage>> {
    let (head, body) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(None)?;
    let header = Header::decode(head, way)?;
    assert_eq!(header.encode(), *head, "a header reads as it was written");
    assert!(header.body_len <= BODY_BYTES_MAX, "{header:?}");
    let body = body.get(..header.body_len as usize).ok_or(None)?;
    header.check_body(body)?;
    Ok((header, body))
}

#[test]
fn fuzz_request() {
    let hints = [TierHint::None, TierHint::Memory].into_iter();
    let seeds = hints.flat_map(|hint| {
        let requests = requests().into_iter();
        requests.map(move |request| joined(request.encode_hinted(7, hint)))
    });
    target("request")
        .seeds(seeds)
        .cases(30_000)
        .bytes_max(600)
        .fixup(fix_one_message)
        .run(request);
}

fn request(bytes: &[u8]) -> impl std::hash::Hash + use<> {
    let (header, body) = match open(bytes, Direction::Request) {
        Ok(opened) => opened,
        Err(None) => return DecodeOutcome::Short,
        Err(Some(cause)) => return refused(&cause),
    };
    let body = Bytes::copy_from_slice(body);
    let (decoded, took) = measure_allocation(|| Request::decode(&header, body.clone()));
    assert!(took <= SPARE_BYTES, "{took} bytes for {header:?}");
    let request = match decoded {
        Ok(request) => request,
        Err(cause) => return refused(&cause),
    };
    let (again, payload) = request.encode_hinted(header.tag, header.hint());
    assert_eq!((again, &payload), (header, &body), "{request:?}");
    // Decoding never ignores a byte after the end of a body.
    let longer = [&body[..], &[0]].concat();
    let mut stretched = joined((header, longer.into()));
    let len = header.body_len + 1;
    stretched[20..24].copy_from_slice(&len.to_le_bytes());
    fix_checksums_at(&mut stretched, 0);
    if let Ok((header, body)) = open(&stretched, Direction::Request) {
        let decoded = Request::decode(&header, Bytes::copy_from_slice(body));
        assert!(decoded.is_err(), "a byte too many: {decoded:?}");
    }
    let limits = match &request {
        Request::Slice { request, .. } => check_limits(request).is_ok(),
        _ => true,
    };
    DecodeOutcome::Message((header.kind as u8, limits, body.is_empty()))
}

fn answers() -> Vec<(MessageKind, Answer)> {
    let slice = |reply| Ok(Reply::Slice(reply));
    let extents = [(4096, true), (8192, false)].map(|(len, mapped)| Extent { len, mapped });
    let run = PageRun {
        page: PageNo(5),
        count: 6,
    };
    let runs = vec![run, run];
    let next = Some(PageNo(99));
    let operation = InFlightOp {
        page: PageNo(1),
        count: 2,
        epoch: Epoch(3),
        op: 4,
    };
    let info = SliceInfo {
        slice: SLICE,
        size_bytes: 1 << 30,
        epoch: 3,
    };
    let status = BrickStatus {
        brick: BrickId(Uuid::from_u128(0xb)),
        durability: "file-sync".into(),
        capacity_bytes: 1 << 40,
        used_bytes: 77,
        sessions: 5,
        incarnation: 6,
    };
    let attached = AttachReply {
        handle: 3,
        size_bytes: 1 << 20,
    };
    let current = Epoch(9);
    let text = || "why: é".to_owned();
    vec![
        (MessageKind::Read, slice(SliceReply::Data(vec![7; 20]))),
        (MessageKind::Write, slice(SliceReply::Done)),
        (
            MessageKind::Extents,
            slice(SliceReply::Extents(extents.into())),
        ),
        (
            MessageKind::Checksums,
            slice(SliceReply::Checksums(vec![1, 2])),
        ),
        (
            MessageKind::Births,
            slice(SliceReply::Births(vec![Epoch(1), Epoch(0)])),
        ),
        (MessageKind::Dirty, slice(SliceReply::Dirty { runs, next })),
        (MessageKind::InFlight, slice(SliceReply::InFlight(None))),
        (
            MessageKind::InFlight,
            slice(SliceReply::InFlight(Some(vec![operation]))),
        ),
        (MessageKind::Attach, Ok(Reply::Attach(attached))),
        (
            MessageKind::List,
            Ok(Reply::List {
                slices: vec![info],
                more: true,
            }),
        ),
        (MessageKind::Status, Ok(Reply::Status(status))),
        (
            MessageKind::ReadVersion,
            slice(SliceReply::Data(vec![7; 20])),
        ),
        (
            MessageKind::Snapshots,
            Ok(Reply::Snapshots {
                snapshots: vec![Epoch(1), Epoch(9)],
                more: true,
            }),
        ),
        (MessageKind::Write, Err(SliceError::StaleEpoch { current })),
        (MessageKind::Write, Err(SliceError::NoSpace)),
        (MessageKind::Read, Err(SliceError::Damaged { offset: 4096 })),
        (MessageKind::Attach, Err(SliceError::NoSuchSlice(SLICE))),
        (MessageKind::Create, Err(SliceError::SliceExists(SLICE))),
        (MessageKind::Read, Err(SliceError::OutOfRange(text()))),
        (MessageKind::Flush, Err(SliceError::Lost(text()))),
        (
            MessageKind::ForgetInFlight,
            Err(SliceError::Refused(text())),
        ),
        (MessageKind::Attach, Err(SliceError::NoSession(text()))),
    ]
}

#[test]
fn fuzz_reply() {
    let seeds = answers()
        .into_iter()
        .map(|(kind, answer)| joined(reply::encode(kind, 7, answer)));
    target("reply")
        .seeds(seeds)
        .cases(30_000)
        .bytes_max(2000)
        .fixup(fix_one_message)
        .run(reply);
}

fn reply(bytes: &[u8]) -> impl std::hash::Hash + use<> {
    let (header, body) = match open(bytes, Direction::Reply) {
        Ok(opened) => opened,
        Err(None) => return DecodeOutcome::Short,
        Err(Some(cause)) => return refused(&cause),
    };
    let owned = body.to_vec();
    let (decoded, took) = measure_allocation(|| reply::decode(&header, owned));
    let most = ALLOCATED_MAX * body.len() as u64 + SPARE_BYTES;
    assert!(took <= most, "{took} bytes for {header:?}");
    let answer = match decoded {
        Ok(answer) => answer,
        Err(cause) => return refused(&cause),
    };
    check_lengths(&answer);
    let form = form(&answer);
    let (again, payload) = reply::encode(header.kind, header.tag, answer.clone());
    let again = again.with_service(header.service());
    assert_eq!((again, &payload[..]), (header, body), "{answer:?}");
    DecodeOutcome::Message((header.kind as u8, form))
}

/// No list or text is longer than its limit.
fn check_lengths(answer: &Answer) {
    let (len, max) = match answer {
        Ok(Reply::Slice(SliceReply::Data(data))) => (data.len(), BODY_BYTES_MAX as usize),
        Ok(Reply::Slice(SliceReply::Extents(list))) => (list.len(), EXTENTS_MAX),
        Ok(Reply::Slice(SliceReply::Checksums(list))) => (list.len(), LIST_ENTRIES_MAX),
        Ok(Reply::Slice(SliceReply::Dirty { runs, .. })) => (runs.len(), LIST_ENTRIES_MAX),
        Ok(Reply::Slice(SliceReply::InFlight(Some(list)))) => (list.len(), LIST_ENTRIES_MAX),
        Ok(Reply::List { slices, .. }) => (slices.len(), LIST_ENTRIES_MAX),
        Ok(Reply::Snapshots { snapshots, .. }) => (snapshots.len(), LIST_ENTRIES_MAX),
        Ok(Reply::Versions(list)) => (list.versions.len(), LIST_ENTRIES_MAX),
        Ok(Reply::SeenPages(list)) => (list.runs.len(), SEEN_RUNS_MAX),
        Ok(Reply::Status(status)) => (status.durability.len(), TEXT_BYTES_MAX),
        Err(
            SliceError::OutOfRange(text)
            | SliceError::Lost(text)
            | SliceError::Refused(text)
            | SliceError::NoSession(text),
        ) => (text.len(), TEXT_BYTES_MAX),
        _ => (0, 0),
    };
    assert!(len <= max, "{len} of at most {max}: {answer:?}");
}

fn form(answer: &Answer) -> (Option<Discriminant<SliceReply>>, u8) {
    match answer {
        Ok(Reply::Slice(reply)) => (Some(discriminant(reply)), 0),
        Ok(Reply::Attach(_)) => (None, 1),
        Ok(Reply::List { more, .. }) => (None, 2 + u8::from(*more)),
        Ok(Reply::Status(_)) => (None, 4),
        Ok(Reply::Snapshots { more, .. }) => (None, 20 + u8::from(*more)),
        Ok(Reply::Progress(_)) => (None, 22),
        Ok(Reply::Versions(list)) => (None, 23 + u8::from(list.next.is_some())),
        Ok(Reply::SeenPages(list)) => (None, 25 + u8::from(list.next.is_some())),
        Err(error) => (None, 5 + error_code(error)),
    }
}

fn error_code(error: &SliceError) -> u8 {
    match error {
        SliceError::StaleEpoch { .. } => 1,
        SliceError::NoSpace => 2,
        SliceError::Damaged { .. } => 3,
        SliceError::NoSuchSlice(_) => 4,
        SliceError::SliceExists(_) => 5,
        SliceError::OutOfRange(_) => 6,
        SliceError::Lost(_) => 7,
        SliceError::Refused(_) => 8,
        SliceError::NoSession(_) => 9,
        SliceError::OnFlash => 10,
    }
}
