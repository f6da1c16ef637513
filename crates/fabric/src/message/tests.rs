use super::reply::{self, Answer, AttachReply, Reply};
use super::request::{Control, Request};
use super::*;
use bytes::Bytes;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::*;
use pagemesh_base::space::Extent;
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::PAGE_BYTES;
use proptest::prelude::*;
use uuid::Uuid;

fn slices() -> impl Strategy<Value = SliceId> {
    any::<u128>().prop_map(|bits| SliceId(Uuid::from_u128(bits)))
}

fn stamps() -> impl Strategy<Value = Stamp> {
    any::<(u32, u64, u32)>().prop_map(|(epoch, op, open)| Stamp {
        epoch: Epoch(epoch),
        op,
        open_ops: open,
    })
}

fn parts() -> impl Strategy<Value = Vec<TransactionPart>> {
    let bytes = prop::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from);
    let part = prop_oneof![
        (any::<u64>(), bytes).prop_map(|(offset, data)| TransactionPart::Write { offset, data }),
        (any::<u64>(), any::<u32>()).prop_map(|(offset, len)| TransactionPart::Clear {
            offset,
            len: len.into()
        }),
    ];
    prop::collection::vec(part, 1..20)
}

fn births() -> impl Strategy<Value = Vec<Epoch>> {
    prop::collection::vec(any::<u32>().prop_map(Epoch), 1..4)
}

fn copies() -> impl Strategy<Value = SliceRequest> {
    let parts = (any::<u64>(), births(), any::<bool>(), stamps());
    parts.prop_map(|(page, births, has_data, stamp)| SliceRequest::Copy {
        page: PageNo(page),
        data: vec![7; usize::from(has_data) * births.len() * PAGE_BYTES].into(),
        births,
        stamp,
    })
}

fn durable_changes() -> impl Strategy<Value = SliceRequest> {
    let write = (any::<u64>(), stamps()).prop_map(|(offset, stamp)| SliceRequest::Write {
        offset,
        data: Bytes::from_static(b"durable"),
        stamp,
    });
    let clear = (any::<(u64, u64)>(), stamps())
        .prop_map(|((offset, len), stamp)| SliceRequest::Clear { offset, len, stamp });
    let transact =
        (parts(), stamps()).prop_map(|(parts, stamp)| SliceRequest::Transact { parts, stamp });
    prop_oneof![write, clear, transact].prop_map(|change| SliceRequest::Durable {
        change: Box::new(change),
    })
}

fn snapshot_requests() -> impl Strategy<Value = SliceRequest> {
    use SliceRequest::*;
    (any::<u32>().prop_map(Epoch), any::<(u64, u64)>(), 0..5).prop_map(
        |(snapshot, (offset, len), kind)| match kind {
            0 => PrepareSnapshot { snapshot },
            1 => ReadVersion {
                snapshot,
                offset,
                len: len as u32,
            },
            2 => VersionExtents {
                snapshot,
                offset,
                len,
            },
            3 => VersionLeaf {
                snapshot,
                leaf: offset,
            },
            _ => VersionChanges {
                from: Epoch(snapshot.0 / 2),
                to: snapshot,
                offset,
                len,
            },
        },
    )
}

fn slice_requests() -> impl Strategy<Value = SliceRequest> {
    use SliceRequest::*;
    let range = any::<(u64, u64)>();
    let bytes = prop::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from);
    prop_oneof![
        any::<(u64, u32)>().prop_map(|(offset, len)| Read { offset, len }),
        (any::<u64>(), bytes, stamps()).prop_map(|(offset, data, stamp)| Write {
            offset,
            data,
            stamp
        }),
        (range, stamps()).prop_map(|((offset, len), stamp)| Clear { offset, len, stamp }),
        (parts(), stamps()).prop_map(|(parts, stamp)| Transact { parts, stamp }),
        Just(Flush),
        any::<(u64, u64)>().prop_map(|(offset, len)| Extents { offset, len }),
        any::<(u64, u32)>().prop_map(|(page, count)| Checksums {
            page: PageNo(page),
            count
        }),
        any::<(u32, u64)>().prop_map(|(since, page)| Dirty {
            since: Epoch(since),
            from: PageNo(page)
        }),
        any::<(u64, u32)>().prop_map(|(page, count)| Births {
            page: PageNo(page),
            count
        }),
        copies(),
        snapshot_requests(),
        durable_changes(),
        Just(InFlight),
        Just(ForgetInFlight),
        any::<[u32; 2]>().prop_map(|[epoch, lost_since]| RaiseEpoch {
            epoch: Epoch(epoch),
            lost_since: Epoch(lost_since),
        }),
    ]
}

fn requests() -> impl Strategy<Value = Request> {
    let sized = || (slices(), any::<u64>());
    prop_oneof![
        4 => (any::<u32>(), slice_requests())
            .prop_map(|(handle, request)| Request::Slice { handle, request }),
        1 => (slices(), any::<u32>())
            .prop_map(|(slice, epoch)| Request::Attach { slice, epoch: Epoch(epoch) }),
        1 => prop_oneof![
            sized().prop_map(|(slice, size_bytes)| Control::Create { slice, size_bytes }),
            sized().prop_map(|(slice, size_bytes)| Control::Resize { slice, size_bytes }),
            slices().prop_map(|slice| Control::Delete { slice }),
            prop::option::of(slices()).prop_map(|after| Control::List { after }),
            Just(Control::Status),
            (slices(), any::<u32>()).prop_map(|(slice, snapshot)| Control::PrepareSnapshot {
                slice,
                snapshot: Epoch(snapshot),
            }),
            (slices(), prop::collection::vec(any::<u32>().prop_map(Epoch), 1..20))
                .prop_map(|(slice, snapshots)| Control::DropSnapshots { slice, snapshots }),
            (slices(), any::<u32>()).prop_map(|(slice, after)| Control::Snapshots {
                slice,
                after: Epoch(after),
            }),
            (slices(), slices(), any::<(u32, u64)>()).prop_map(
                |(slice, origin, (snapshot, size_bytes))| Control::CreateClone {
                    slice,
                    source: CloneSource { origin, snapshot: Epoch(snapshot) },
                    size_bytes,
                }
            ),
            slices().prop_map(|slice| Control::PromoteClone { slice }),
            (slices(), any::<u64>()).prop_map(|(slice, page)| Control::CountSeenPages {
                slice,
                from: PageNo(page),
            }),
            version_copies(),
        ].prop_map(Request::Control),
    ]
}

fn version_copies() -> impl Strategy<Value = Control> {
    let epochs = || prop::collection::vec(any::<u32>().prop_map(Epoch), 1..20);
    let death = || prop::option::of((1u32..).prop_map(Epoch));
    let edit =
        (any::<(u64, u32, u32)>(), death(), death()).prop_map(|((page, birth, sum), from, to)| {
            VersionEdit {
                page: PageNo(page),
                birth: Epoch(birth),
                sum,
                from,
                to,
            }
        });
    prop_oneof![
        (slices(), epochs())
            .prop_map(|(slice, snapshots)| Control::AdoptSnapshots { slice, snapshots }),
        (slices(), epochs(), any::<(u32, u64)>()).prop_map(|(slice, snapshots, (below, from))| {
            let range = VersionRange {
                below: Epoch(below),
                snapshots,
                from: PageNo(from),
            };
            Control::ListVersions { slice, range }
        }),
        (slices(), prop::collection::vec(edit, 1..5), any::<u32>()).prop_map(
            |(slice, edits, below)| {
                let added = edits.iter().filter(|edit| edit.from.is_none()).count();
                let edits = VersionEdits {
                    below: Epoch(below),
                    edits,
                    data: vec![7; added * PAGE_BYTES].into(),
                };
                Control::EditVersions { slice, edits }
            }
        ),
        (slices(), any::<(u32, u64, u32)>()).prop_map(|(slice, (snapshot, offset, len))| {
            Control::ReadVersion {
                slice,
                snapshot: Epoch(snapshot),
                range: (offset, len),
            }
        }),
    ]
}

fn errors() -> impl Strategy<Value = SliceError> {
    let text = || "[ -~é]{0,300}";
    prop_oneof![
        any::<u32>().prop_map(|current| SliceError::StaleEpoch {
            current: Epoch(current)
        }),
        Just(SliceError::NoSpace),
        any::<u64>().prop_map(|offset| SliceError::Damaged { offset }),
        slices().prop_map(SliceError::NoSuchSlice),
        slices().prop_map(SliceError::SliceExists),
        text().prop_map(SliceError::OutOfRange),
        text().prop_map(SliceError::Lost),
        text().prop_map(SliceError::Refused),
    ]
}

fn slice_replies() -> impl Strategy<Value = (MessageKind, SliceReply)> {
    use prop::collection::vec;
    let extents = (0..1u64 << 63, any::<bool>()).prop_map(|(len, mapped)| Extent { len, mapped });
    let runs = any::<(u64, u64)>().prop_map(|(page, count)| PageRun {
        page: PageNo(page),
        count,
    });
    let operations =
        any::<(u64, u32, u32, u64)>().prop_map(|(page, count, epoch, op)| InFlightOp {
            page: PageNo(page),
            count,
            epoch: Epoch(epoch),
            op,
        });
    prop_oneof![
        prop::sample::select(MessageKind::ALL.to_vec())
            .prop_filter("plain", |&kind| Header::new(kind, Direction::Reply, 0)
                .body_bytes_max()
                == 0
                && kind != MessageKind::Attach)
            .prop_map(|kind| (kind, SliceReply::Done)),
        vec(any::<u8>(), 0..300).prop_map(|data| (MessageKind::Read, SliceReply::Data(data))),
        vec(extents.clone(), 0..20)
            .prop_map(|list| (MessageKind::Extents, SliceReply::Extents(list))),
        vec(extents.clone(), 0..20)
            .prop_map(|list| (MessageKind::VersionChanges, SliceReply::Extents(list))),
        vec(extents, 0..20)
            .prop_map(|list| (MessageKind::VersionExtents, SliceReply::Extents(list))),
        vec(any::<u8>(), 0..300)
            .prop_map(|data| (MessageKind::ReadVersion, SliceReply::Data(data))),
        vec(any::<u8>(), 0..300)
            .prop_map(|data| (MessageKind::VersionLeaf, SliceReply::Data(data))),
        vec(any::<u32>(), 0..20)
            .prop_map(|list| (MessageKind::Checksums, SliceReply::Checksums(list))),
        births().prop_map(|list| (MessageKind::Births, SliceReply::Births(list))),
        (vec(runs, 0..20), prop::option::of(any::<u64>())).prop_map(|(runs, next)| {
            let next = next.map(PageNo);
            (MessageKind::Dirty, SliceReply::Dirty { runs, next })
        }),
        prop::option::of(vec(operations, 0..20))
            .prop_map(|found| (MessageKind::InFlight, SliceReply::InFlight(found))),
    ]
}

fn infos() -> impl Strategy<Value = SliceInfo> {
    (slices(), any::<(u64, u32)>()).prop_map(|(slice, (size_bytes, epoch))| SliceInfo {
        slice,
        size_bytes,
        epoch,
    })
}

fn statuses() -> impl Strategy<Value = BrickStatus> {
    (any::<u128>(), "[a-z-]{0,40}", any::<(u64, u64, u32, u32)>()).prop_map(
        |(brick, durability, (capacity_bytes, used_bytes, sessions, incarnation))| BrickStatus {
            brick: BrickId(Uuid::from_u128(brick)),
            durability,
            capacity_bytes,
            used_bytes,
            sessions,
            incarnation,
        },
    )
}

fn answers() -> impl Strategy<Value = (MessageKind, Answer)> {
    let kinds = prop::sample::select(MessageKind::ALL.to_vec());
    prop_oneof![
        4 => slice_replies().prop_map(|(kind, reply)| (kind, Ok(Reply::Slice(reply)))),
        1 => any::<(u32, u64)>().prop_map(|(handle, size_bytes)| {
            (MessageKind::Attach, Ok(Reply::Attach(AttachReply { handle, size_bytes })))
        }),
        1 => (prop::collection::vec(infos(), 0..20), any::<bool>())
            .prop_map(|(slices, more)| (MessageKind::List, Ok(Reply::List { slices, more }))),
        1 => (births(), any::<bool>()).prop_map(|(snapshots, more)| {
            (MessageKind::Snapshots, Ok(Reply::Snapshots { snapshots, more }))
        }),
        1 => any::<(bool, u64, u64)>().prop_map(|(is_promotion, done, all)| {
            let kind = match is_promotion {
                true => MessageKind::PromoteClone,
                false => MessageKind::CreateClone,
            };
            (kind, Ok(Reply::Progress(CloneProgress { done, all })))
        }),
        1 => (prop::collection::vec(any::<(u64, u32, u32, u32)>(), 0..20), prop::option::of(any::<u64>()))
            .prop_map(|(versions, next)| {
                let version = |(page, birth, death, sum)| PageVersion {
                    page: PageNo(page),
                    birth: Epoch(birth),
                    death: Epoch(death),
                    sum,
                };
                let list = VersionList {
                    versions: versions.into_iter().map(version).collect(),
                    next: next.map(PageNo),
                };
                (MessageKind::ListVersions, Ok(Reply::Versions(list)))
            }),
        1 => (prop::collection::vec(any::<(u64, u32, u32)>(), 0..20), any::<Option<u64>>()).prop_map(
            |(runs, next)| {
                let runs = runs.into_iter().map(|(pages, first, last)| SeenPages {
                    pages,
                    first: Epoch(first),
                    last: Epoch(last),
                });
                let list = SeenPagesList {
                    runs: runs.collect(),
                    next: next.map(PageNo),
                };
                (MessageKind::CountSeenPages, Ok(Reply::SeenPages(list)))
            }
        ),
        1 => statuses().prop_map(|status| (MessageKind::Status, Ok(Reply::Status(status)))),
        2 => (kinds, errors()).prop_map(|(kind, error)| (kind, Err(error))),
    ]
}

/// Decodes the bytes of one message as a receiver does.
fn receive_request(bytes: &[u8]) -> Result<(u64, Request), MalformedMessage> {
    let (header, body) = receive(bytes, Direction::Request)?;
    Ok((
        header.tag,
        Request::decode(&header, Bytes::copy_from_slice(body))?,
    ))
}

fn receive_answer(bytes: &[u8]) -> Result<(u64, MessageKind, Answer), MalformedMessage> {
    let (header, body) = receive(bytes, Direction::Reply)?;
    let answer = reply::decode(&header, body.to_vec())?;
    Ok((header.tag, header.kind, answer))
}

fn receive(bytes: &[u8], way: Direction) -> Result<(Header, &[u8]), MalformedMessage> {
    let first = bytes
        .first_chunk::<HEADER_BYTES>()
        .ok_or(MalformedMessage::Magic)?;
    let header = Header::decode(first, way)?;
    let end = HEADER_BYTES + header.body_len as usize;
    let body = bytes
        .get(HEADER_BYTES..end)
        .ok_or(MalformedMessage::Magic)?;
    header.check_body(body)?;
    Ok((header, body))
}

/// A reply with the time that the brick spent.
fn timed((header, body): (Header, Bytes), service: ServiceTime) -> Vec<u8> {
    joined((header.with_service(service), body))
}

fn joined((header, body): (Header, Bytes)) -> Vec<u8> {
    [&header.encode()[..], &body].concat()
}

/// The bytes with the checksums corrected.
fn with_fixed_checksums(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some((header, body)) = bytes.split_first_chunk_mut::<HEADER_BYTES>() {
        header[56..60].copy_from_slice(&crc32c(body).to_le_bytes());
        let crc = crc32c(&header[..60]);
        header[60..].copy_from_slice(&crc.to_le_bytes());
    }
    bytes
}

proptest! {
    #[test]
    fn requests_round_trip(request in requests(), tag: u64) {
        let bytes = joined(request.encode(tag));
        prop_assert_eq!(receive_request(&bytes), Ok((tag, request)));
        prop_assert!(receive_answer(&bytes).is_err());
    }

    #[test]
    fn answers_round_trip((kind, answer) in answers(), tag: u64, times: (u64, u64)) {
        let (brick_ns, store_ns) = times;
        let service = if kind.is_of_slice() { ServiceTime { brick_ns, store_ns } } else { ServiceTime::default() };
        let bytes = timed(reply::encode(kind, tag, answer.clone()), service);
        prop_assert_eq!(receive_answer(&bytes), Ok((tag, kind, answer)));
        prop_assert_eq!(receive(&bytes, Direction::Reply).map(|(header, _)| header.service()), Ok(service));
        prop_assert!(receive_request(&bytes).is_err());
    }

    #[test]
    fn any_bytes_decode_or_are_malformed(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = receive_request(&bytes);
        let _ = receive_answer(&bytes);
    }

    /// With right checksums, decoding checks the fields themselves. An accepted message encodes to
    /// the same bytes: decoding overlooks no field.
    #[test]
    fn changed_fields_are_refused_or_round_trip(
        request in requests(), (kind, answer) in answers(), at in 4usize..56, xor in 1u8..,
        cut in 0usize..40,
    ) {
        for bytes in [joined(request.encode(7)), joined(reply::encode(kind, 7, answer))] {
            let mut changed = bytes;
            changed[at] ^= xor;
            let short = changed.len().saturating_sub(cut).max(HEADER_BYTES);
            changed.truncate(short);
            let changed = with_fixed_checksums(changed);
            if let Ok((tag, request)) = receive_request(&changed) {
                prop_assert_eq!(&joined(request.encode(tag))[..], &changed[..]);
            }
            if let Ok((tag, kind, answer)) = receive_answer(&changed) {
                let service = receive(&changed, Direction::Reply).map(|(header, _)| header.service());
                let service = service.unwrap();
                prop_assert_eq!(&timed(reply::encode(kind, tag, answer), service)[..], &changed[..]);
            }
        }
    }

    #[test]
    fn flipped_bit_is_always_detected(request in requests(), at: prop::sample::Index, bit in 0u8..8) {
        let mut bytes = joined(request.encode(7));
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(receive_request(&bytes).is_err());
    }
}

#[test]
fn lengths_beyond_limits_are_refused_by_the_header_alone() {
    for kind in MessageKind::ALL {
        for way in [Direction::Request, Direction::Reply] {
            let mut header = Header::new(kind, way, 1);
            header.body_len = header.body_bytes_max();
            assert!(Header::decode(&header.encode(), way).is_ok(), "{kind:?}");
            header.body_len += 1;
            let refused = Header::decode(&header.encode(), way);
            assert!(
                matches!(refused, Err(MalformedMessage::TooLong { .. })),
                "{kind:?}"
            );
        }
    }
}

#[test]
fn answers_beyond_limit_or_form_are_sent_as_errors() {
    let long = vec![0; BODY_BYTES_MAX as usize + 1];
    let cases = [
        (MessageKind::Read, Reply::Slice(SliceReply::Data(long))),
        (MessageKind::Read, Reply::Slice(SliceReply::Done)),
        (MessageKind::Write, Reply::Slice(SliceReply::Data(vec![]))),
        (
            MessageKind::Checksums,
            Reply::Slice(SliceReply::Checksums(vec![0; LIST_ENTRIES_MAX + 1])),
        ),
    ];
    for (kind, reply) in cases {
        let bytes = joined(reply::encode(kind, 3, Ok(reply)));
        let received = receive_answer(&bytes);
        assert!(
            matches!(received, Ok((3, _, Err(SliceError::Refused(_))))),
            "{kind:?}"
        );
    }
}

#[test]
fn long_reasons_are_cut_between_characters() {
    let reason = "é".repeat(TEXT_BYTES_MAX);
    let bytes = joined(reply::encode(
        MessageKind::Read,
        1,
        Err(SliceError::Refused(reason)),
    ));
    match receive_answer(&bytes) {
        Ok((_, _, Err(SliceError::Refused(text)))) => assert_eq!(text.len(), TEXT_BYTES_MAX),
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_changes_with_stamp_are_durable() {
    for (kind, is_accepted) in [
        (MessageKind::Write, true),
        (MessageKind::Clear, true),
        (MessageKind::Flush, false),
        (MessageKind::Read, false),
        (MessageKind::Copy, false),
        (MessageKind::Attach, false),
        (MessageKind::Status, false),
    ] {
        let mut header = Header::new(kind, Direction::Request, 1);
        header.flags = FLAG_DURABLE;
        let decoded = Request::decode(&header, Bytes::new());
        assert_eq!(decoded.is_ok(), is_accepted, "{kind:?}");
    }
}

/// The bytes of version 2: a change of this test is a change of the protocol.
#[test]
fn write_message_matches_format() {
    let request = Request::Slice {
        handle: 0x0403_0201,
        request: SliceRequest::Write {
            offset: 0x1000,
            data: Bytes::from_static(b"123456789"),
            stamp: Stamp {
                epoch: Epoch(3),
                op: 5,
                open_ops: 2,
            },
        },
    };
    let bytes = joined(request.encode(0xaabb));
    let expected: [u8; 56] = [
        b'P', b'M', b'S', b'H', 2, 2, 0, 0, 0xbb, 0xaa, 0, 0, 0, 0, 0, 0, //
        1, 2, 3, 4, 9, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, //
        9, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, //
        3, 0, 0, 0, 2, 0, 0, 0,
    ];
    assert_eq!(bytes[..56], expected);
    // The check value of CRC-32C.
    assert_eq!(bytes[56..60], 0xe306_9283u32.to_le_bytes());
    assert_eq!(&bytes[64..], b"123456789");
}

#[test]
fn hint_arrives_with_reads_and_writes_only() {
    let hints = [0, 1, 2, 3].map(TierHint::from_bits);
    let stamp = Stamp {
        epoch: Epoch(1),
        op: 2,
        open_ops: 0,
    };
    let (offset, len, data) = (0, 4096, Bytes::from_static(b"data"));
    let write = SliceRequest::Write {
        offset,
        data,
        stamp,
    };
    let clear = SliceRequest::Clear { offset, len, stamp };
    let change = Box::new(write.clone());
    let takers = [
        SliceRequest::Read { offset, len: 4 },
        SliceRequest::Durable { change },
        write,
    ];
    for hint in hints {
        for request in takers.clone() {
            let request = Request::Slice { handle: 3, request };
            let (header, body) = request.encode_hinted(9, hint);
            let bytes = header.encode();
            let header = Header::decode(&bytes, Direction::Request).expect("a header");
            assert_eq!(header.hint(), hint);
            assert_eq!(Request::decode(&header, body), Ok(request));
        }
        let request = Request::Slice {
            handle: 3,
            request: clear.clone(),
        };
        let (mut header, body) = request.encode_hinted(9, hint);
        assert_eq!(header.flags, 0, "a clear has no place for it");
        header.flags = u16::from(hint.bits()) << HINT_SHIFT;
        let is_sound = Request::decode(&header, body).is_ok();
        assert_eq!(is_sound, hint == TierHint::None);
    }
}
