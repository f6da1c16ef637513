//! Fuzz targets: bodies of the REST API, in both directions, and records of the
//! manager's store.
//!
//! See `pagemesh_fuzz` for how they run, `docs/rfd/004-fuzzing.md` for why.

use crate::durability::Durability;
use crate::ledger::Ledger;
use crate::records::{BrickRecord, Doomed, VolumeRecord};
use crate::shape::{Kind, Shape};
use crate::wire::*;
use pagemesh_base::layout::*;
use pagemesh_fuzz::{FuzzTarget, measure_allocation};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use uuid::Uuid;

/// Bytes that decoding may have allocated per byte of a body: the smallest
/// element of a list, `{}`, could become a structure of a few words, in a
/// vector that doubles.
const ALLOCATED_MAX: u64 = 128;
/// And besides: what a refusal says.
const SPARE_BYTES: u64 = 16 << 10;

fn target(name: &'static str) -> FuzzTarget {
    FuzzTarget::new(name, env!("CARGO_MANIFEST_DIR"))
}

/// Whether each type that a target is about decodes from one of its seeds.
fn decodes<T: DeserializeOwned + Serialize + PartialEq + Debug>(seeds: &[Vec<u8>]) {
    let any = seeds.iter().any(|seed| check::<T>(seed).is_some());
    assert!(any, "no seed is a {}", std::any::type_name::<T>());
}

/// Decodes a body as one type; whatever decodes encodes to the same again, and
/// with a word behind it, it does not.
fn check<T: DeserializeOwned + Serialize + PartialEq + Debug>(bytes: &[u8]) -> Option<T> {
    let (decoded, took) = measure_allocation(|| serde_json::from_slice::<T>(bytes));
    let most = ALLOCATED_MAX * bytes.len() as u64 + SPARE_BYTES;
    assert!(took <= most, "{took} bytes for {}", bytes.len());
    let value = decoded.ok()?;
    let again = serde_json::to_vec(&value).expect("it has only what JSON has");
    let decoded = serde_json::from_slice::<T>(&again);
    assert_eq!(decoded.expect("its own words"), value);
    let longer = [bytes, b"0"].concat();
    assert!(
        serde_json::from_slice::<T>(&longer).is_err(),
        "a word too many"
    );
    Some(value)
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("JSON")
}

const BRICK: BrickId = BrickId(Uuid::from_u128(0xb));

const LAG: Lag = Lag {
    changes: 2,
    bytes: 8192,
    age_us: 40,
};

const RETURN: CopyReturn = CopyReturn {
    copy: 1,
    bytes_todo: 1 << 30,
    bytes_done: 4096,
    elapsed_ms: 70,
};

fn layout() -> Layout {
    let leg = |slice, state| Leg {
        brick: BRICK,
        slice: SliceId(Uuid::from_u128(slice)),
        state,
        fresh: false,
        asynchronous: false,
        empty: false,
    };
    let column = |slice| Column {
        legs: vec![
            leg(slice, LegState::InSync),
            leg(slice + 1, LegState::Stale),
        ],
        round: 1,
    };
    Layout {
        volume: Uuid::from_u128(1),
        name: "vol-1".parse().expect("a name"),
        epoch: EpochNumber(7),
        segments: vec![Segment {
            bytes: 4 << 20,
            columns: vec![column(1), column(3)],
        }],
    }
}

/// Two segments of so many columns and bytes.
fn stretched(columns: usize, bytes: u64) -> Layout {
    let mut layout = layout();
    layout.segments[0].bytes = bytes;
    layout.segments[0].columns.truncate(columns);
    layout.segments.push(layout.segments[0].clone());
    layout
}

fn address() -> BrickAddress {
    BrickAddress {
        tcp: "127.0.0.1:7".into(),
        map_socket: Some("/run/brick.sock".into()),
        durability: Durability::Process,
    }
}

fn registration() -> BrickRegistration {
    BrickRegistration {
        brick: BRICK,
        address: "127.0.0.1:10000".into(),
        map_socket: None,
        domain: "rack".into(),
        durability: Durability::Process,
        capacity_bytes: 1 << 40,
        used_bytes: 5,
        incarnation: 2,
        sessions: 1,
        scrub: Some(scrub()),
    }
}

fn scrub() -> BrickScrub {
    let found = ScrubFound {
        checked: 9,
        superblocks: 1,
        records: 1,
        left_behind: 0,
        in_flight: 0,
        bitmap_lines: 0,
        objects: 0,
        slots: 0,
        mended: 2,
        damaged: 1,
    };
    BrickScrub {
        state: ScrubState::Running,
        passes: 1,
        progress_percent: Some(40),
        next_in_ms: None,
        pass: Some(found),
        last: None,
        ended_ms_ago: Some(7),
        mended: 2,
        fulfilled: Some(Uuid::from_u128(6)),
    }
}

fn bodies() -> Vec<Vec<u8>> {
    let create = CreateVolume {
        name: "v".parse().expect("a name"),
        size_bytes: 1 << 30,
        layout: Kind::StripeMirror,
        columns: Some(2),
        copies: Some(3),
        durability: Some(Durability::Process),
        content: Content::Blocks,
    };
    let change = LegChange {
        segment: 0,
        column: 1,
        leg: 1,
        to: LegState::Syncing,
        note: Some("back".into()),
    };
    let changes = ChangeLegs {
        expected: EpochNumber(7),
        attachment: Some(EpochNumber(6)),
        changes: vec![change.clone(), change],
    };
    let client = "host:1".to_owned();
    let attachment = Some(EpochNumber(3));
    vec![
        json(&registration()),
        json(&create),
        json(&GrowVolume {
            size_bytes: 1 << 31,
        }),
        json(&AttachVolume {
            client,
            unreachable: true,
        }),
        json(&DetachVolume { attachment }),
        json(&changes),
        json(&Force { force: true }),
        json(&ScrubBrick { stop: true }),
        json(&AttachReplica {
            brick: Some(BRICK),
            asynchronous: true,
            auto_promote: true,
        }),
        json(&ChooseReplica {
            copy: 1,
            force: true,
            expected: Some(EpochNumber(7)),
        }),
        json(&TellCopies {
            attachment: EpochNumber(3),
            lag: Some(LAG),
            returns: vec![RETURN],
        }),
        b"{}".to_vec(),
    ]
}

#[test]
fn fuzz_rest_request() {
    let seeds = bodies();
    decodes::<BrickRegistration>(&seeds);
    decodes::<CreateVolume>(&seeds);
    decodes::<GrowVolume>(&seeds);
    decodes::<AttachVolume>(&seeds);
    decodes::<DetachVolume>(&seeds);
    decodes::<ChangeLegs>(&seeds);
    decodes::<Force>(&seeds);
    decodes::<ScrubBrick>(&seeds);
    decodes::<AttachReplica>(&seeds);
    decodes::<ChooseReplica>(&seeds);
    decodes::<TellCopies>(&seeds);
    target("rest_request")
        .seeds(bodies())
        .cases(30_000)
        .bytes_max(1200)
        .run(|bytes| {
            let name = check::<CreateVolume>(bytes).map(|wish| {
                let name = wish.name.as_str().to_owned();
                let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
                assert!((1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(plain));
                (wish.layout as u8, wish.columns.is_some(), wish.copies)
            });
            (
                check::<BrickRegistration>(bytes)
                    .map(|body| (body.map_socket.is_some(), body.scrub.map(|it| it.damaged()))),
                check::<ScrubBrick>(bytes).map(|body| body.stop),
                name,
                check::<GrowVolume>(bytes).is_some(),
                check::<AttachVolume>(bytes).is_some(),
                check::<DetachVolume>(bytes).map(|body| body.attachment.is_some()),
                check::<ChangeLegs>(bytes).map(|body| body.changes.len().min(4)),
                check::<Force>(bytes).map(|body| body.force),
                (
                    check::<AttachReplica>(bytes)
                        .map(|body| (body.brick.is_some(), body.asynchronous)),
                    check::<ChooseReplica>(bytes).map(|body| body.expected.is_some()),
                    check::<TellCopies>(bytes).map(|body| body.returns.len().min(4)),
                ),
            )
        });
}

fn brick_info() -> BrickInfo {
    BrickInfo {
        brick: BRICK,
        alive: true,
        heartbeat_age_ms: Some(12),
        address: "127.0.0.1:10000".into(),
        map_socket: Some("/run/brick.sock".into()),
        domain: "rack".into(),
        durability: Durability::Process,
        capacity_bytes: 1 << 40,
        used_bytes: 5,
        provisioned_bytes: 1 << 30,
        slices: 2,
        pending_deletions: 0,
        sessions: 1,
        scrub: Some(scrub()),
        scrub_wish: None,
    }
}

fn status() -> Status {
    Status {
        version: "1.2.3".into(),
        bricks: 3,
        bricks_alive: 2,
        capacity_bytes: 1 << 40,
        used_bytes: 5,
        provisioned_bytes: 1 << 30,
        overprovision_factor: 2,
        volumes: 4,
        volumes_attached: 1,
        volumes_degraded: 1,
        pending_deletions: 0,
        bricks_scrubbing: 1,
        scrubs_mended: 2,
        scrubs_damaged: 1,
    }
}

fn answers() -> Vec<Vec<u8>> {
    let attached = Attached {
        layout: layout(),
        bricks: BTreeMap::from([(BRICK, address())]),
    };
    let error = ErrorBody {
        error: "what".into(),
        hint: "do".into(),
        code: Code::NotFound,
        epoch: Some(3),
    };
    let info = VolumeInfo {
        name: "v".parse().expect("a name"),
        id: Uuid::from_u128(1),
        content: Content::Files,
        size_bytes: 4 << 20,
        layout: Kind::Mirror,
        columns: 1,
        copies: 2,
        durability: Durability::Process,
        epoch: EpochNumber(7),
        health: Health::Degraded,
        unreachable_legs: 1,
        attached: None,
        auto_promote: true,
        created_unix_s: 5,
    };
    let detail = VolumeDetail {
        info,
        layout: layout(),
        bricks: BTreeMap::new(),
        notes: vec![],
        told: Some(CopiesTold {
            lag: Some(LAG),
            returns: vec![RETURN],
            told_us_ago: 9_000_000,
        }),
    };
    let heartbeat = HeartbeatReply {
        interval_ms: 1000,
        dead_after_ms: 5000,
        scrub: Some(ScrubWish {
            id: Uuid::from_u128(6),
            stop: false,
        }),
    };
    let sized = Sized {
        volume: detail.clone(),
        asked_bytes: 5 << 20,
        rounded: true,
        note: Some("whole stripes".into()),
    };
    vec![
        json(&attached),
        json(&error),
        json(&detail),
        json(&sized),
        json(&heartbeat),
        json(&brick_info()),
        json(&status()),
        json(&Deleted {
            pending_deletions: 1,
        }),
        json(&Detached { detached: true }),
        json(&layout()),
        json(&stretched(0, 4 << 20)),
        json(&stretched(2, u64::MAX)),
    ]
}

#[test]
fn fuzz_rest_answer() {
    let seeds = answers();
    decodes::<Attached>(&seeds);
    decodes::<ErrorBody>(&seeds);
    decodes::<VolumeDetail>(&seeds);
    decodes::<Sized>(&seeds);
    decodes::<HeartbeatReply>(&seeds);
    decodes::<BrickInfo>(&seeds);
    decodes::<Status>(&seeds);
    decodes::<Deleted>(&seeds);
    decodes::<Detached>(&seeds);
    decodes::<Layout>(&seeds);
    target("rest_answer")
        .seeds(seeds)
        .cases(10_000)
        .bytes_max(2000)
        .run(|bytes| {
            let layout = check::<Attached>(bytes).map(|attached| attached.layout);
            let layout = layout.or_else(|| check::<Layout>(bytes));
            (
                layout.map(|layout| shape(&layout)),
                check::<ErrorBody>(bytes).map(|body| body.code as u8),
                check::<VolumeDetail>(bytes).map(|body| body.layout.segments.len().min(3)),
                check::<Sized>(bytes).map(|body| body.rounded),
                check::<HeartbeatReply>(bytes).map(|body| body.scrub.map(|wish| wish.stop)),
                check::<Deleted>(bytes).is_some(),
                check::<Detached>(bytes).is_some(),
                check::<BrickInfo>(bytes).map(|body| body.scrub.is_some()),
                check::<Status>(bytes).is_some(),
            )
        });
}

/// A layout that decodes can be measured and mapped.
fn shape(layout: &Layout) -> (usize, bool) {
    let size = layout.size_bytes();
    for offset in [0, 4096, size / 2, size.saturating_sub(1)] {
        let extents = layout.map(offset, 300_000);
        let mapped: u64 = extents.iter().map(|extent| extent.len).sum();
        assert_eq!(mapped, size.saturating_sub(offset).min(300_000));
    }
    for segment in &layout.segments {
        assert!(segment.slice_bytes() <= segment.bytes);
    }
    (layout.segments.len().min(3), size == 0)
}

#[test]
fn fuzz_store_record() {
    let brick = BrickRecord {
        brick: BRICK,
        address: "127.0.0.1:1".into(),
        map_socket: None,
        domain: "d".into(),
        durability: Durability::Process,
        capacity_bytes: 1 << 30,
        used_bytes: 0,
        incarnation: 1,
    };
    let volume = VolumeRecord {
        ledger: Ledger {
            layout: layout(),
            last_rounds: vec![vec![1, 1]],
        },
        shape: Shape {
            kind: Kind::Mirror,
            columns: 1,
            copies: 2,
        },
        durability: Durability::Process,
        attachment: None,
        notes: vec![],
        created_unix_s: 1,
        files_bytes: Some(1 << 20),
        auto_promote: true,
    };
    let doomed = Doomed {
        brick: BRICK,
        slice: SliceId(Uuid::from_u128(5)),
        uncertain: true,
    };
    let seeds = [json(&brick), json(&volume), json(&doomed)];
    decodes::<VolumeRecord>(&seeds);
    target("store_record")
        .seeds(seeds)
        .cases(10_000)
        .bytes_max(2000)
        .run(|bytes| {
            let volume = check::<VolumeRecord>(bytes);
            (
                check::<BrickRecord>(bytes).is_some(),
                volume.map(|volume| shape(&volume.ledger.layout)),
                check::<Doomed>(bytes).map(|doomed| doomed.uncertain),
            )
        });
}
