//! This build opens a store that an earlier build wrote, and reads the same records.

use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, Layout, Leg, LegState, Segment, SliceId,
};
use pagemesh_fuzz::image;
use pagemesh_manage::layout_state::LayoutState;
use pagemesh_manage::records::{Attachment, BrickRecord, LegNote, PendingDelete, VolumeRecord};
use pagemesh_manage::shape::Shape;
use pagemesh_manage::store::{Store, StoreContents, StoreWrite};
use pagemesh_manage::{Durability, LayoutKind, TierPolicy};
use std::path::Path;
use uuid::Uuid;

const FORMAT_HINT: &str = "a store of version 0 that an earlier build wrote is not read as it was meant: \
    undo what changed, or give new fields a default; if the format was meant to change, see the \
    top of docs/formats.md";

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
        layout_state: LayoutState { layout },
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

fn write_store() -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("store");
    let store = Store::open(&path).expect("a store");
    let contents = contents();
    let bricks = contents.bricks.iter().map(StoreWrite::PutBrick);
    let volumes = contents.volumes.iter().map(StoreWrite::PutVolume);
    let pending = contents
        .pending_deletes
        .iter()
        .copied()
        .map(StoreWrite::AddPendingDelete);
    let writes: Vec<_> = bricks.chain(volumes).chain(pending).collect();
    store.commit(&writes).expect("committed");
    drop(store);
    std::fs::read(&path).expect("the store")
}

#[test]
fn stored_file_of_version_0_is_opened() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/manager-0.txt");
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("store");
    std::fs::write(&path, image::golden_image(&kept, write_store)).expect("written");
    let store = Store::open(&path).unwrap_or_else(|cause| panic!("{FORMAT_HINT} ({cause})"));
    let found = store
        .load()
        .unwrap_or_else(|cause| panic!("{FORMAT_HINT} ({cause})"));
    assert_eq!(found, contents(), "{FORMAT_HINT}");
}
