//! The bytes of every message of protocol version 2, compared with the text of the build that froze it.

use super::reply::{self, Answer, AttachReply, Reply};
use super::request::{Control, Request};
use super::*;
use bytes::Bytes;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::*;
use pagemesh_base::space::Extent;
use std::fmt::Write as _;
use std::path::Path;
use uuid::Uuid;

const PAGE: PageNo = PageNo(0x12_3456);
const TAG: u64 = 0x0102_0304_0506_0708;

fn slice() -> SliceId {
    SliceId(Uuid::from_u128(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff))
}

fn slice_requests() -> Vec<SliceRequest> {
    use SliceRequest::*;
    let stamp = Stamp {
        epoch: Epoch(0x0a0b_0c0d),
        op: 0x1112_1314_1516_1718,
        open_ops: 0x2122_2324,
    };
    let (offset, len, count) = (0x3132_3334_0000, 0x4142_0000, 3);
    let data = Bytes::from_static(&[0xcc; 4096]);
    let parts = vec![
        TransactionPart::Write {
            offset: 0x1000,
            data: data.clone(),
        },
        TransactionPart::Clear { offset, len },
    ];
    let copy = |births, data| Copy {
        page: PAGE,
        births,
        data,
        stamp,
    };
    vec![
        Read {
            offset,
            len: 0x5152,
        },
        Write {
            offset,
            data: Bytes::from_static(b"123456789"),
            stamp,
        },
        Clear { offset, len, stamp },
        Flush,
        Extents { offset, len },
        Checksums { page: PAGE, count },
        Dirty {
            since: Epoch(9),
            from: PAGE,
        },
        InFlight,
        ForgetInFlight,
        RaiseEpoch {
            epoch: Epoch(8),
            lost_since: Epoch(6),
        },
        Transact { parts, stamp },
        KeepOrder,
        Births { page: PAGE, count },
        copy(vec![Epoch(7), Epoch(0)], Bytes::new()),
        copy(vec![Epoch(7)], data.clone()),
        Durable {
            change: Box::new(Write {
                offset,
                data,
                stamp,
            }),
        },
    ]
}

fn requests() -> Vec<Request> {
    let handle = 0x6162_6364;
    let (slice, size_bytes) = (slice(), 0x7172_7000);
    let requests = slice_requests().into_iter();
    let mut all: Vec<_> = requests
        .map(|request| Request::Slice { handle, request })
        .collect();
    all.push(Request::Attach {
        slice,
        epoch: Epoch(5),
    });
    let controls = [
        Control::Create { slice, size_bytes },
        Control::Resize { slice, size_bytes },
        Control::Delete { slice },
        Control::List { after: None },
        Control::List { after: Some(slice) },
        Control::Status,
    ];
    all.extend(controls.map(Request::Control));
    all
}

fn replies() -> Vec<(MessageKind, SliceReply)> {
    let extents = [(0x2000, true), (0x3000, false)];
    let runs = vec![PageRun {
        page: PAGE,
        count: 2,
    }];
    let listed = vec![InFlightOp {
        page: PAGE,
        count: 4,
        epoch: Epoch(5),
        op: 6,
    }];
    let dirty = |next| SliceReply::Dirty {
        runs: runs.clone(),
        next,
    };
    vec![
        (MessageKind::Read, SliceReply::Data(b"data".to_vec())),
        (MessageKind::Write, SliceReply::Done),
        (
            MessageKind::Extents,
            SliceReply::Extents(extents.map(|(len, mapped)| Extent { len, mapped }).to_vec()),
        ),
        (MessageKind::Checksums, SliceReply::Checksums(vec![1, 2])),
        (
            MessageKind::Births,
            SliceReply::Births(vec![Epoch(3), Epoch(4)]),
        ),
        (MessageKind::Dirty, dirty(None)),
        (MessageKind::Dirty, dirty(Some(PAGE))),
        (MessageKind::InFlight, SliceReply::InFlight(None)),
        (MessageKind::InFlight, SliceReply::InFlight(Some(listed))),
    ]
}

fn answers() -> Vec<(MessageKind, Answer)> {
    let (slice, text) = (slice(), || "a reason".to_owned());
    let replies = replies().into_iter();
    let mut all: Vec<(MessageKind, Answer)> = replies
        .map(|(kind, reply)| (kind, Ok(Reply::Slice(reply))))
        .collect();
    let attached = AttachReply {
        handle: 7,
        size_bytes: 0x8000,
    };
    let listed = SliceInfo {
        slice,
        size_bytes: 0x9000,
        epoch: 10,
    };
    let status = BrickStatus {
        brick: BrickId(slice.0),
        durability: "process".into(),
        capacity_bytes: 11,
        used_bytes: 12,
        sessions: 13,
        incarnation: 14,
    };
    let list = Reply::List {
        slices: vec![listed],
        more: true,
    };
    all.push((MessageKind::Attach, Ok(Reply::Attach(attached))));
    all.push((MessageKind::List, Ok(list)));
    all.push((MessageKind::Status, Ok(Reply::Status(status))));
    let errors = [
        SliceError::StaleEpoch { current: Epoch(15) },
        SliceError::NoSpace,
        SliceError::Damaged { offset: 0x1_6000 },
        SliceError::NoSuchSlice(slice),
        SliceError::SliceExists(slice),
        SliceError::OutOfRange(text()),
        SliceError::Lost(text()),
        SliceError::Refused(text()),
        SliceError::NoSession(text()),
    ];
    all.extend(errors.map(|error| (MessageKind::Write, Err(error))));
    all
}

/// The messages of snapshots, which both ends use if their hellos say so.
fn snapshot_requests() -> Vec<Request> {
    let (handle, slice, snapshot) = (0x6162_6364, slice(), Epoch(0x0a0b_0c0d));
    let of_slice = [
        SliceRequest::PrepareSnapshot { snapshot },
        SliceRequest::ReadVersion {
            snapshot,
            offset: 0x3132_3334_0000,
            len: 0x5152,
        },
        SliceRequest::VersionExtents {
            snapshot,
            offset: 0x3132_3334_0000,
            len: 0x4142_0000,
        },
        SliceRequest::VersionChanges {
            from: Epoch(0x0102_0304),
            to: snapshot,
            offset: 0x3132_3334_0000,
            len: 0x4142_0000,
        },
    ];
    let control = [
        Control::PrepareSnapshot { slice, snapshot },
        Control::DropSnapshots {
            slice,
            snapshots: vec![Epoch(3), snapshot],
        },
        Control::Snapshots {
            slice,
            after: Epoch(3),
        },
    ];
    let of_slice = of_slice.map(|request| Request::Slice { handle, request });
    of_slice
        .into_iter()
        .chain(control.map(Request::Control))
        .collect()
}

fn snapshot_answers() -> Vec<(MessageKind, Answer)> {
    let extent = Extent {
        len: 0x2000,
        mapped: true,
    };
    let done = || Ok(Reply::Slice(SliceReply::Done));
    let of_slice = |reply| Ok(Reply::Slice(reply));
    let listed = Reply::Snapshots {
        snapshots: vec![Epoch(3), Epoch(4)],
        more: true,
    };
    vec![
        (MessageKind::PrepareSnapshot, done()),
        (
            MessageKind::ReadVersion,
            of_slice(SliceReply::Data(b"data".to_vec())),
        ),
        (
            MessageKind::VersionExtents,
            of_slice(SliceReply::Extents(vec![extent])),
        ),
        (
            MessageKind::VersionChanges,
            of_slice(SliceReply::Extents(vec![extent])),
        ),
        (MessageKind::ControlPrepareSnapshot, done()),
        (MessageKind::DropSnapshots, done()),
        (MessageKind::Snapshots, Ok(listed)),
    ]
}

/// A line for each message: its header, and its body in runs of equal bytes.
fn lines(requests: Vec<Request>, answers: Vec<(MessageKind, Answer)>) -> String {
    let requests = requests.into_iter().map(|it| it.encode(TAG));
    let answers = answers.into_iter();
    let answers = answers.map(|(kind, answer)| reply::encode(kind, TAG, answer));
    let mut text = String::new();
    for (header, body) in requests.chain(answers) {
        for byte in header.encode() {
            let _infallible = write!(text, "{byte:02x}");
        }
        for run in body.chunk_by(|a, b| a == b) {
            let _infallible = write!(text, " {:02x}", run[0]);
            if run.len() > 1 {
                let _infallible = write!(text, "*{}", run.len());
            }
        }
        text.push('\n');
    }
    text
}

/// Compares the lines with those of the build that froze them.
fn check_frozen(name: &str, lines: &str) {
    assert_eq!(VERSION, 2, "another version needs a text of its own");
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name);
    if std::env::var_os("PAGEMESH_KEEP_IMAGES").is_some() && !path.exists() {
        std::fs::write(&path, lines).expect("written");
    }
    let frozen = std::fs::read_to_string(&path).expect("the text of version 2");
    for (number, (now, then)) in lines.lines().zip(frozen.lines()).enumerate() {
        assert_eq!(
            now, then,
            "message {number} of protocol version 2 has changed, which is frozen: undo that. A new message \
             takes a feature bit, and a text of its own"
        );
    }
    assert_eq!(lines.lines().count(), frozen.lines().count());
}

#[test]
fn every_message_has_its_frozen_bytes() {
    check_frozen("protocol-2.txt", &lines(requests(), answers()));
}

#[test]
fn every_snapshot_message_has_its_frozen_bytes() {
    let lines = lines(snapshot_requests(), snapshot_answers());
    check_frozen("protocol-2-snapshots.txt", &lines);
}

/// Sent only if the control segment has a generation of versions.
#[test]
fn message_of_mapped_snapshots_has_its_frozen_bytes() {
    let request = SliceRequest::VersionLeaf {
        snapshot: Epoch(0x0a0b_0c0d),
        leaf: 0x3132_3334,
    };
    let handle = 0x6162_6364;
    let frames = SliceReply::Data(vec![7; VERSION_LEAF_BYTES]);
    let lines = lines(
        vec![Request::Slice { handle, request }],
        vec![(MessageKind::VersionLeaf, Ok(Reply::Slice(frames)))],
    );
    check_frozen("protocol-2-mapped-snapshots.txt", &lines);
}

#[test]
fn every_clone_message_has_its_frozen_bytes() {
    let slice = slice();
    let control = [
        Control::CreateClone {
            slice,
            source: CloneSource {
                origin: SliceId(Uuid::from_u128(0x7777)),
                snapshot: Epoch(0x0a0b_0c0d),
            },
            size_bytes: 0x5000,
        },
        Control::PromoteClone { slice },
    ];
    let progress = |done| Ok(Reply::Progress(CloneProgress { done, all: 5 }));
    let answers = vec![
        (MessageKind::CreateClone, progress(3)),
        (MessageKind::PromoteClone, progress(5)),
    ];
    let lines = lines(control.map(Request::Control).to_vec(), answers);
    check_frozen("protocol-2-clones.txt", &lines);
}

#[test]
fn every_message_of_version_copies_has_its_frozen_bytes() {
    let (slice, snapshot) = (slice(), Epoch(0x0a0b_0c0d));
    let edit = |from, to| VersionEdit {
        page: PageNo(0x3132),
        birth: Epoch(0x0102_0304),
        sum: 0x2122_2324,
        from,
        to,
    };
    let edits = VersionEdits {
        below: Epoch(0x1112_1314),
        edits: vec![edit(None, Some(snapshot)), edit(Some(snapshot), None)],
        data: vec![5; PAGE_BYTES].into(),
    };
    let range = VersionRange {
        below: Epoch(0x1112_1314),
        snapshots: vec![Epoch(3), snapshot],
        from: PageNo(0x3132),
    };
    let control = [
        Control::AdoptSnapshots {
            slice,
            snapshots: vec![Epoch(3), snapshot],
        },
        Control::ListVersions { slice, range },
        Control::EditVersions { slice, edits },
        Control::ReadVersion {
            slice,
            snapshot,
            range: (0x3132_3334_0000, 0x5152),
        },
    ];
    let version = PageVersion {
        page: PageNo(0x3132),
        birth: Epoch(3),
        death: Epoch(4),
        sum: 0x2122_2324,
    };
    let list = VersionList {
        versions: vec![version],
        next: Some(PageNo(0x4142)),
    };
    let done = || Ok(Reply::Slice(SliceReply::Done));
    let data = SliceReply::Data(b"data".to_vec());
    let answers = vec![
        (MessageKind::AdoptSnapshots, done()),
        (MessageKind::ListVersions, Ok(Reply::Versions(list))),
        (MessageKind::EditVersions, done()),
        (MessageKind::ControlReadVersion, Ok(Reply::Slice(data))),
    ];
    let lines = lines(control.map(Request::Control).to_vec(), answers);
    check_frozen("protocol-2-version-copies.txt", &lines);
}

#[test]
fn every_space_message_has_its_frozen_bytes() {
    let slice = slice();
    let from = PageNo(0x0506);
    let runs = vec![
        SeenPages {
            pages: 7,
            first: Epoch(3),
            last: Epoch(0x0a0b_0c0d),
        },
        SeenPages {
            pages: 9,
            first: Epoch(4),
            last: SEEN_BY_SLICE,
        },
    ];
    let next = Some(PageNo(0x0706));
    let list = SeenPagesList { runs, next };
    let requests = vec![Request::Control(Control::CountSeenPages { slice, from })];
    let answers = vec![(MessageKind::CountSeenPages, Ok(Reply::SeenPages(list)))];
    check_frozen("protocol-2-space.txt", &lines(requests, answers));
}
