//! This build opens stores that earlier builds wrote, and reads the same records. It writes records as JSON that
//! those builds read.

use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, Layout, Leg, LegState, Segment, SliceId,
};
use pagemesh_fuzz::image;
use pagemesh_manage::layout_state::LayoutState;
use pagemesh_manage::records::{Attachment, BrickRecord, LegNote, PendingDelete, VolumeRecord};
use pagemesh_manage::shape::Shape;
use pagemesh_manage::store::{SCHEMA, Store, StoreContents, StoreWrite};
use pagemesh_manage::{Durability, LayoutKind, TierPolicy};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use uuid::Uuid;

const FORMAT_HINT: &str = "a store that an earlier build wrote is not read as it was meant: undo what \
    changed, or give new fields a default (the format is frozen, see docs/formats.md)";

fn brick(number: u128) -> BrickRecord {
    BrickRecord {
        brick: BrickId(Uuid::from_u128(number)),
        name: None,
        address: format!("10.0.0.{number}:7071"),
        map_socket: (number == 1).then(|| "/run/brick.sock".to_owned()),
        domain: format!("rack-{number}"),
        durability: Durability::Process,
        capacity_bytes: 1 << 30,
        used_bytes: 1 << 20,
        incarnation: 3,
        reported_lost: false,
    }
}

fn leg(number: u128, state: LegState) -> Leg {
    Leg {
        brick: BrickId(Uuid::from_u128(number)),
        slice: SliceId(Uuid::from_u128(10 + number)),
        state,
        needs_full_resync: false,
        asynchronous: false,
        empty: false,
    }
}

fn volume() -> VolumeRecord {
    let column = Column {
        legs: vec![leg(1, LegState::InSync), leg(2, LegState::Stale)],
        // The build counted losses in rounds. So the leg misses all that was ever written.
        lost_since: EpochNumber(1),
    };
    let layout = Layout {
        volume: Uuid::from_u128(100),
        name: "data".parse().expect("a name"),
        epoch: EpochNumber(9),
        segments: vec![Segment {
            bytes: 64 << 20,
            columns: vec![column],
        }],
    };
    VolumeRecord {
        layout_state: LayoutState::new(layout),
        shape: Shape {
            kind: LayoutKind::Mirror,
            columns: 1,
            copies: 2,
        },
        durability: Durability::Process,
        attachment: Some(Attachment {
            client: "host (pid 7)".into(),
            epoch: EpochNumber(8),
            since_unix_s: 1_700_000_000,
            process: None,
        }),
        notes: vec![LegNote {
            segment: 0,
            column: 0,
            leg: 1,
            text: "the connection was closed".into(),
            since_unix_s: 1_700_000_100,
        }],
        created_unix_s: 1_690_000_000,
        files_bytes: None,
        auto_promote: false,
        tier: TierPolicy::Auto,
        origin: None,
        received: None,
        rollback: None,
        content_returns: 0,
        labels: BTreeMap::new(),
    }
}

fn contents() -> StoreContents {
    StoreContents {
        bricks: vec![brick(1), brick(2)],
        volumes: vec![volume()],
        pending_deletes: vec![PendingDelete {
            brick: BrickId(Uuid::from_u128(2)),
            slice: SliceId(Uuid::from_u128(50)),
            uncertain: true,
        }],
        ..StoreContents::default()
    }
}

/// The records of each kind as JSON, all fields set.
fn records() -> Value {
    serde_json::from_slice(include_bytes!("data/manager-1.json")).expect("JSON")
}

/// The same records in memory.
fn frozen_contents() -> StoreContents {
    fn all<T: DeserializeOwned>(kind: &str) -> Vec<T> {
        let found = serde_json::from_value(records()[kind].clone());
        found.unwrap_or_else(|cause| panic!("{kind}: {FORMAT_HINT} ({cause})"))
    }
    StoreContents {
        bricks: all("bricks"),
        volumes: all("volumes"),
        pending_deletes: all("pending_deletes"),
        events: all("events"),
        dropped_event_seq: 40,
        tokens: all("tokens"),
        answers: all("answers"),
        token_mark_unix_s: 1_700_000_300,
        admin_token_made: true,
        ..StoreContents::default()
    }
}

fn write_store(contents: &StoreContents) -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("store");
    let store = Store::open(&path).expect("a store");
    let mut writes: Vec<_> = contents.bricks.iter().map(StoreWrite::PutBrick).collect();
    writes.extend(contents.volumes.iter().map(StoreWrite::PutVolume));
    let pending = contents.pending_deletes.iter().copied();
    writes.extend(pending.map(StoreWrite::AddPendingDelete));
    writes.extend(contents.events.iter().map(StoreWrite::PutEvent));
    writes.extend(contents.tokens.iter().map(StoreWrite::PutToken));
    writes.extend(contents.answers.iter().map(StoreWrite::PutAnswer));
    if contents.admin_token_made {
        writes.push(StoreWrite::SetDroppedEvent(contents.dropped_event_seq));
        writes.push(StoreWrite::SetTokenMark(contents.token_mark_unix_s));
        writes.push(StoreWrite::NoteAdminTokenMade);
    }
    store.commit(&writes).expect("committed");
    drop(store);
    std::fs::read(&path).expect("the store")
}

fn check_stored(name: &str, contents: &StoreContents) {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("store");
    let kept = image::golden_image(&data.join(name), || write_store(contents));
    std::fs::write(&path, kept).expect("written");
    let store = Store::open(&path).unwrap_or_else(|cause| panic!("{FORMAT_HINT} ({cause})"));
    let found = store
        .load()
        .unwrap_or_else(|cause| panic!("{FORMAT_HINT} ({cause})"));
    assert_eq!(&found, contents, "{name}: {FORMAT_HINT}");
}

#[test]
fn stored_file_of_first_build_is_opened() {
    check_stored("manager-0.txt", &contents());
}

#[test]
fn stored_file_of_schema_1_is_opened() {
    assert_eq!(SCHEMA, 1, "a higher schema needs an image of its own");
    check_stored("manager-1.txt", &frozen_contents());
}

#[test]
fn records_are_written_as_frozen_json() {
    let contents = frozen_contents();
    let written = json!({
        "bricks": contents.bricks,
        "volumes": contents.volumes,
        "pending_deletes": contents.pending_deletes,
        "events": contents.events,
        "tokens": contents.tokens,
        "answers": contents.answers,
    });
    let frozen = records();
    for (kind, records) in written.as_object().expect("an object") {
        assert_eq!(*records, frozen[kind], "{kind}: {FORMAT_HINT}");
    }
}
