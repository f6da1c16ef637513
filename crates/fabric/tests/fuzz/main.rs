//! Fuzz targets: everything that a client or a brick reads from the other.
//!
//! See `pagemesh_fuzz` for how they run, `docs/rfd/004-fuzzing.md` for why.

mod handshake;
mod map;
mod messages;
mod peers;
mod streams;

use bytes::Bytes;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{SliceRequest, Stamp, TransactionPart};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fabric::message::request::{Control, Request};
use pagemesh_fabric::message::{HEADER_BYTES, Header, MessageKind};
use pagemesh_fabric::test_api::Stream;
use pagemesh_fuzz::{FuzzTarget, Random};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
use std::os::fd::OwnedFd;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(0x51));

fn target(name: &'static str) -> FuzzTarget {
    FuzzTarget::new(name, env!("CARGO_MANIFEST_DIR"))
}

fn pair() -> (OwnedFd, Stream) {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let pair = socketpair(family, SocketType::STREAM, flags, None);
    let (ours, theirs) = pair.expect("a pair of sockets");
    (ours, Stream::unix(theirs))
}

/// Sends bytes that fit into the socket's buffer.
fn send_all(socket: &OwnedFd, bytes: &[u8]) {
    if !bytes.is_empty() {
        let sent = send(socket, bytes, SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(bytes.len()), "the socket takes it");
    }
}

/// One request of each kind.
fn requests() -> Vec<Request> {
    let stamp = Stamp {
        epoch: Epoch(3),
        op: 9,
        open_ops: 2,
    };
    let data = Bytes::from_static(b"forty-two bytes of a page, more or less...");
    let of_slice = [
        SliceRequest::Read {
            offset: 8192,
            len: 300,
        },
        SliceRequest::Write {
            offset: 4096,
            data,
            stamp,
        },
        SliceRequest::Clear {
            offset: 0,
            len: 1 << 20,
            stamp,
        },
        SliceRequest::Transact {
            parts: parts(),
            stamp,
        },
        SliceRequest::Flush,
        SliceRequest::Extents {
            offset: 0,
            len: 1 << 30,
        },
        SliceRequest::Checksums {
            page: PageNo(1),
            count: 2,
        },
        SliceRequest::Dirty {
            since: Epoch(3),
            from: PageNo(0),
        },
        SliceRequest::Births {
            page: PageNo(1),
            count: 2,
        },
        SliceRequest::Copy {
            page: PageNo(1),
            births: vec![Epoch(3)],
            data: vec![1; 4096].into(),
            stamp,
        },
        SliceRequest::InFlight,
        SliceRequest::ForgetInFlight,
        SliceRequest::KeepOrder,
        SliceRequest::RaiseEpoch {
            epoch: Epoch(4),
            lost_since: Epoch(0),
        },
    ];
    let (slice, size_bytes) = (SLICE, 1 << 30);
    let control = [
        Control::Create { slice, size_bytes },
        Control::Resize { slice, size_bytes },
        Control::Delete { slice },
        Control::List { after: None },
        Control::List { after: Some(slice) },
        Control::Status,
    ];
    let epoch = Epoch(1);
    let mut requests = vec![Request::Attach { slice, epoch }];
    requests.extend(
        of_slice
            .into_iter()
            .map(|request| Request::Slice { handle: 0, request }),
    );
    requests.extend(control.map(Request::Control));
    requests.extend(of_snapshots());
    assert!(MessageKind::ALL.iter().all(|kind| {
        let mut kinds = requests.iter().map(Request::kind);
        kinds.any(|found| found == *kind)
    }));
    requests
}

fn of_snapshots() -> Vec<Request> {
    let (slice, snapshot) = (SLICE, Epoch(5));
    let of_slice = [
        SliceRequest::PrepareSnapshot { snapshot },
        SliceRequest::ReadVersion {
            snapshot,
            offset: 4096,
            len: 512,
        },
        SliceRequest::VersionExtents {
            snapshot,
            offset: 0,
            len: 1 << 20,
        },
        SliceRequest::VersionLeaf { snapshot, leaf: 1 },
        SliceRequest::VersionChanges {
            from: Epoch(2),
            to: snapshot,
            offset: 0,
            len: 1 << 20,
        },
    ];
    let control = [
        Control::PrepareSnapshot { slice, snapshot },
        Control::DropSnapshots {
            slice,
            snapshots: vec![Epoch(2), snapshot],
        },
        Control::Snapshots {
            slice,
            after: Epoch(2),
        },
        Control::CreateClone {
            slice,
            source: pagemesh_base::slice::CloneSource {
                origin: SliceId(Uuid::from_u128(3)),
                snapshot,
            },
            size_bytes: 1 << 20,
        },
        Control::PromoteClone { slice },
        Control::CountSeenPages {
            slice,
            from: PageNo(512),
        },
        Control::AdoptSnapshots {
            slice,
            snapshots: vec![Epoch(2), snapshot],
        },
        Control::ListVersions {
            slice,
            range: pagemesh_base::slice::VersionRange {
                below: Epoch(9),
                snapshots: vec![Epoch(2), snapshot],
                from: PageNo(3),
            },
        },
        Control::EditVersions {
            slice,
            edits: pagemesh_base::slice::VersionEdits {
                below: Epoch(9),
                edits: vec![pagemesh_base::slice::VersionEdit {
                    page: PageNo(3),
                    birth: Epoch(2),
                    sum: 4,
                    from: None,
                    to: Some(snapshot),
                }],
                data: Bytes::from(vec![3; PAGE_BYTES]),
            },
        },
        Control::ReadVersion {
            slice,
            snapshot,
            range: (4096, 512),
        },
    ];
    let of_slice = of_slice.map(|request| Request::Slice { handle: 0, request });
    of_slice
        .into_iter()
        .chain(control.map(Request::Control))
        .collect()
}

/// The parts of a transaction that is within all limits.
fn parts() -> Vec<TransactionPart> {
    let page = PAGE_BYTES as u64;
    let write = |at, fill| TransactionPart::Write {
        offset: at * page,
        data: Bytes::from(vec![fill; PAGE_BYTES]),
    };
    let clear = TransactionPart::Clear {
        offset: 5 * page,
        len: 2 * page,
    };
    vec![write(9, 1), clear, write(2, 3)]
}

fn joined((header, body): (Header, Bytes)) -> Vec<u8> {
    [&header.encode(), &body[..]].concat()
}

/// Corrects the checksums of the message at `at`; returns the offset of its end.
fn fix_checksums_at(bytes: &mut [u8], at: usize) -> Option<usize> {
    let (head, body) = bytes
        .get_mut(at..)?
        .split_first_chunk_mut::<HEADER_BYTES>()?;
    let (fields, _) = head.split_first_chunk::<24>()?;
    let len = u32::from_le_bytes(*fields.last_chunk()?) as usize;
    if let Some(body) = body.get(..len) {
        head[56..60].copy_from_slice(&crc32c(body).to_le_bytes());
    }
    let crc = crc32c(&head[..60]);
    head[60..].copy_from_slice(&crc.to_le_bytes());
    Some(at + HEADER_BYTES + len)
}

/// Corrects the checksums of every message of a stream.
fn fix_all_checksums(bytes: &mut [u8], from: usize) {
    let mut at = Some(from);
    while let Some(next) = at.filter(|&at| at < bytes.len()) {
        at = fix_checksums_at(bytes, next);
    }
}

/// Makes one message valid again, mostly with a body of all bytes that are there.
fn fix_one_message(bytes: &mut [u8], random: &mut Random) {
    let len = bytes.len().saturating_sub(HEADER_BYTES) as u32;
    if random.below(4) > 0
        && let Some(field) = bytes.get_mut(20..24)
    {
        field.copy_from_slice(&len.to_le_bytes());
    }
    fix_checksums_at(bytes, 0);
}
