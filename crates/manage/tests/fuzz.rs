//! Fuzz targets: bodies of the REST API, in both directions, and records of the
//! manager's store.
//!
//! `pagemesh_fuzz` describes how the targets run, `docs/rfd/004-fuzzing.md` why they exist.

mod fuzz_snapshots;
mod fuzzing;

use fuzzing::{check_decoded, check_plain, decodes, json, kept_answer, target, token_record};
use pagemesh_base::brick_name::{BrickName, BrickRef};
use pagemesh_base::layout::*;
use pagemesh_manage::access::{TokenRecord, TokenRole};
use pagemesh_manage::durability::Durability;
use pagemesh_manage::idempotency::{KEY_BYTES_MAX, KeptAnswer};
use pagemesh_manage::layout_state::LayoutState;
use pagemesh_manage::records::{BrickRecord, CloneOrigin, PendingDelete, VolumeRecord};
use pagemesh_manage::shape::{LayoutKind, Shape};
use pagemesh_manage::wire::*;
use pagemesh_manage::{Role, TierPolicy};
use std::collections::BTreeMap;
use uuid::Uuid;

fn name() -> BrickName {
    "brick-1".parse().expect("a name")
}

const BRICK: BrickId = BrickId(Uuid::from_u128(0xb));

const LAG: ReplicaLag = ReplicaLag {
    changes: 2,
    bytes: 8192,
    age_us: 40,
};

const RESYNC: ResyncProgress = ResyncProgress {
    copy: 1,
    bytes_todo: 1 << 30,
    bytes_done: 4096,
    elapsed_ms: 70,
};

fn rollback() -> Rollback {
    Rollback {
        to: "one".parse().expect("a name"),
        to_epoch: EpochNumber(3),
        undo: "before".parse().expect("a name"),
        phase: RollbackPhase::Copying,
        since_unix_s: 5,
    }
}

fn layout() -> Layout {
    let leg = |slice, state| Leg {
        brick: BRICK,
        slice: SliceId(Uuid::from_u128(slice)),
        state,
        needs_full_resync: false,
        asynchronous: false,
        empty: false,
    };
    let column = |slice| Column {
        legs: vec![
            leg(slice, LegState::InSync),
            leg(slice + 1, LegState::Stale),
        ],
        lost_since: EpochNumber(6),
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

/// Two segments with this number of columns and bytes.
fn two_segments(columns: usize, bytes: u64) -> Layout {
    let mut layout = layout();
    layout.segments[0].bytes = bytes;
    layout.segments[0].columns.truncate(columns);
    layout.segments.push(layout.segments[0].clone());
    layout
}

fn address() -> BrickAddress {
    BrickAddress {
        name: Some(name()),
        tcp: "127.0.0.1:7".into(),
        map_socket: Some("/run/brick.sock".into()),
        durability: Durability::Process,
    }
}

fn registration() -> BrickRegistration {
    BrickRegistration {
        brick: BRICK,
        name: Some(name()),
        name_is_default: true,
        address: "127.0.0.1:10000".into(),
        map_socket: None,
        domain: "rack".into(),
        durability: Durability::Process,
        capacity_bytes: 1 << 40,
        used_bytes: 5,
        incarnation: 2,
        sessions: 1,
        scrub: Some(scrub()),
        devices: Some(devices()),
        tier: Some(BrickTier::default()),
        tier_pages: None,
    }
}

fn devices() -> BrickDevices {
    let device = BrickDevice {
        device: Uuid::from_u128(9),
        path: Some("/dev/sdz".into()),
        is_first: false,
        size_bytes: 1 << 30,
        used_bytes: 5,
        state: DeviceState::Draining,
        errors: 1,
        last_error_s: Some(9),
        drain: Some(DrainProgress {
            left_bytes: 5,
            moved_bytes: 6,
            bytes_per_s: 7,
            running_s: 8,
            problem: Some("no room".into()),
        }),
    };
    let result = DeviceResult {
        request: Uuid::from_u128(10),
        device: Some(device.device),
        error: Some("it is mounted".into()),
    };
    BrickDevices {
        list: vec![device],
        results: vec![result],
    }
}

fn scrub() -> BrickScrub {
    let found = ScrubReport {
        checked: 9,
        superblocks: 1,
        records: 1,
        skipped_journals: 0,
        in_flight: 0,
        bitmap_lines: 0,
        objects: 0,
        slots: 0,
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
        corrected: 2,
        fulfilled: Some(Uuid::from_u128(6)),
    }
}

fn bodies() -> Vec<Vec<u8>> {
    let create = CreateVolume {
        name: "v".parse().expect("a name"),
        size_bytes: 1 << 30,
        layout: LayoutKind::StripeMirror,
        columns: Some(2),
        copies: Some(3),
        durability: Some(Durability::Process),
        content: VolumeContent::Blocks,
        tier: TierPolicy::Flash,
        received: false,
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
            process: Some("boot pid:[1] 7 5".into()),
            replaces: attachment,
            receive: false,
        }),
        json(&ReportHolder {
            attachment: EpochNumber(3),
            ending: true,
        }),
        json(&DetachVolume { attachment }),
        json(&changes),
        json(&ForceParam { force: true }),
        json(&ScrubBrick { stop: true }),
        json(&AttachReplica {
            brick: Some(BrickRef::Id(BRICK)),
            asynchronous: true,
            auto_promote: true,
        }),
        json(&AttachReplica {
            brick: Some(BrickRef::Name(name())),
            ..AttachReplica::default()
        }),
        json(&ChooseReplica {
            copy: 1,
            force: true,
            expected: Some(EpochNumber(7)),
        }),
        json(&ReportReplication {
            attachment: EpochNumber(3),
            lag: Some(LAG),
            resyncs: vec![RESYNC],
            replica_snapshots: vec![ReplicaSnapshot {
                slice: SliceId(Uuid::from_u128(4)),
                epoch: EpochNumber(5),
            }],
        }),
        json(&EventFilter {
            after: Some(7),
            limit: Some(10),
            last: None,
            severity: Some(Severity::Warning),
            subject: Some("volume:v".into()),
        }),
        json(&create_token()),
        json(&LoginRequest {
            token: "pm_x".into(),
        }),
        json(&ListVolumes {
            limit: Some(10),
            after: Some("a".parse().expect("a name")),
            search: Some("v".into()),
            health: Some(VolumeHealth::Syncing),
            content: Some(VolumeContent::Files),
        }),
        json(&ListBricks {
            limit: Some(10),
            after: Some("a".into()),
            search: None,
            health: Some(BrickHealth::Dead),
        }),
        b"{}".to_vec(),
    ]
}

fn create_token() -> CreateToken {
    CreateToken {
        name: "backup".parse().expect("a name"),
        role: TokenRole::Operator,
        expires_s: Some(60),
    }
}

fn token_info() -> TokenInfo {
    TokenInfo {
        id: Uuid::from_u128(7),
        name: "backup".parse().expect("a name"),
        role: TokenRole::Viewer,
        created_unix_s: 5,
        expires_unix_s: Some(65),
        expired: false,
    }
}

#[test]
fn fuzz_rest_request() {
    let seeds = bodies();
    decodes::<BrickRegistration>(&seeds);
    decodes::<CreateVolume>(&seeds);
    decodes::<GrowVolume>(&seeds);
    decodes::<AttachVolume>(&seeds);
    decodes::<ReportHolder>(&seeds);
    decodes::<DetachVolume>(&seeds);
    decodes::<ChangeLegs>(&seeds);
    decodes::<ForceParam>(&seeds);
    decodes::<ScrubBrick>(&seeds);
    decodes::<AttachReplica>(&seeds);
    decodes::<ChooseReplica>(&seeds);
    decodes::<ReportReplication>(&seeds);
    decodes::<CreateToken>(&seeds);
    decodes::<LoginRequest>(&seeds);
    decodes::<EventFilter>(&seeds);
    decodes::<ListVolumes>(&seeds);
    decodes::<ListBricks>(&seeds);
    target("rest_request")
        .seeds(bodies())
        .cases(30_000)
        .bytes_max(1200)
        .run(|bytes| {
            let name = check_decoded::<CreateVolume>(bytes).map(|request| {
                check_plain(request.name.as_str());
                (
                    request.layout as u8,
                    request.columns.is_some(),
                    request.copies,
                )
            });
            (
                check_decoded::<BrickRegistration>(bytes).map(|body| {
                    body.name.iter().for_each(|name| check_plain(name.as_str()));
                    (
                        body.map_socket.is_some(),
                        body.name.is_some(),
                        body.scrub.map(|it| it.damaged()),
                    )
                }),
                check_decoded::<ScrubBrick>(bytes).map(|body| body.stop),
                name,
                check_decoded::<GrowVolume>(bytes).is_some(),
                check_decoded::<AttachVolume>(bytes).map(|body| body.replaces.is_some()),
                check_decoded::<ReportHolder>(bytes).map(|body| body.ending),
                check_decoded::<DetachVolume>(bytes).map(|body| body.attachment.is_some()),
                check_decoded::<ChangeLegs>(bytes).map(|body| body.changes.len().min(4)),
                check_decoded::<ForceParam>(bytes).map(|body| body.force),
                (
                    check_decoded::<EventFilter>(bytes).map(|body| body.matches(&event())),
                    check_decoded::<AttachReplica>(bytes)
                        .map(|body| (body.brick.is_some(), body.asynchronous)),
                    check_decoded::<ChooseReplica>(bytes).map(|body| body.expected.is_some()),
                    check_decoded::<ReportReplication>(bytes).map(|body| body.resyncs.len().min(4)),
                    check_decoded::<ListVolumes>(bytes).map(|body| {
                        body.after
                            .iter()
                            .for_each(|name| check_plain(name.as_str()));
                        (body.content.is_some(), body.health.map(|it| it as u8))
                    }),
                    check_decoded::<ListBricks>(bytes).map(|body| body.health.map(|it| it as u8)),
                    check_decoded::<LoginRequest>(bytes).is_some(),
                    check_decoded::<CreateToken>(bytes).map(|body| {
                        check_plain(body.name.as_str());
                        body.role as u8
                    }),
                ),
            )
        });
}

fn brick_info() -> BrickInfo {
    BrickInfo {
        brick: BRICK,
        name: Some(name()),
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
        scrub_request: None,
        devices: Some(devices().list),
        tier: Some(BrickTier::default()),
    }
}

fn status() -> ClusterStatus {
    ClusterStatus {
        schedules: 3,
        schedules_warning: 1,
        schedules_critical: 1,
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
        scrubs_corrected: 2,
        scrubs_damaged: 1,
        store_failed: true,
    }
}

fn event() -> EventRecord {
    EventRecord {
        seq: 7,
        time_unix_ms: 1_700_000_000_000,
        kind: EventKind::BrickLost,
        severity: Severity::Warning,
        subject: Subject {
            kind: SubjectKind::Brick,
            name: "brick-1".into(),
        },
        actor: "manager".into(),
        text: "The brick is lost.".into(),
        count: 2,
        first_unix_ms: 1_600_000_000_000,
        acknowledged: Some(Acknowledgement {
            by: "cluster key".into(),
            time_unix_ms: 1,
        }),
    }
}

fn answers() -> Vec<Vec<u8>> {
    let attached = AttachReply {
        layout: layout(),
        bricks: BTreeMap::from([(BRICK, address())]),
    };
    let error = ErrorBody {
        error: "what".into(),
        hint: "do".into(),
        code: ErrorCode::NotFound,
        epoch: Some(3),
    };
    let info = VolumeInfo {
        name: "v".parse().expect("a name"),
        id: Uuid::from_u128(1),
        content: VolumeContent::Files,
        size_bytes: 4 << 20,
        layout: LayoutKind::Mirror,
        columns: 1,
        copies: 2,
        durability: Durability::Process,
        epoch: EpochNumber(7),
        health: VolumeHealth::Degraded,
        unreachable_legs: 1,
        attached: None,
        auto_promote: true,
        tier: TierPolicy::Memory,
        received: Some(EpochNumber(2)),
        created_unix_s: 5,
        origin: None,
        rollback: Some(rollback()),
        content_returns: 0,
        labels: BTreeMap::from([("env".into(), "prod".into())]),
    };
    let detail = VolumeDetail {
        info,
        layout: layout(),
        bricks: BTreeMap::new(),
        notes: vec![],
        replication: Some(ReplicationStatus {
            lag: Some(LAG),
            resyncs: vec![RESYNC],
            reported_us_ago: 9_000_000,
        }),
        lost_snapshots: vec!["s".parse().expect("a name")],
    };
    let heartbeat = HeartbeatReply {
        interval_ms: 1000,
        dead_after_ms: 5000,
        scrub: Some(ScrubRequest {
            id: Uuid::from_u128(6),
            stop: false,
        }),
        devices: vec![DeviceRequest {
            id: Uuid::from_u128(11),
            change: DeviceChange::Add {
                path: "/dev/sdz".into(),
                size_bytes: Some(1 << 30),
            },
        }],
        tiers: Some(vec![SliceTier {
            slice: SliceId(Uuid::from_u128(5)),
            policy: TierPolicy::Memory,
        }]),
        name: Some(name()),
    };
    let sized = VolumeSizeReply {
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
        json(&event()),
        json(&DeleteReply {
            pending_deletions: 1,
        }),
        json(&DetachReply { detached: true }),
        json(&token_info()),
        json(&CreatedToken {
            token: "pm_x".into(),
            info: token_info(),
        }),
        json(&WhoAmI {
            name: "cluster key".into(),
            role: Role::Cluster,
            expires_unix_s: None,
        }),
        json(&Hello {
            version: "0.0.1".into(),
            started_unix_ms: 5,
            last_seq: 7,
        }),
        json(&layout()),
        json(&two_segments(0, 4 << 20)),
        json(&two_segments(2, u64::MAX)),
    ]
}

#[test]
fn fuzz_rest_answer() {
    let seeds = answers();
    decodes::<AttachReply>(&seeds);
    decodes::<ErrorBody>(&seeds);
    decodes::<VolumeDetail>(&seeds);
    decodes::<VolumeSizeReply>(&seeds);
    decodes::<HeartbeatReply>(&seeds);
    decodes::<BrickInfo>(&seeds);
    decodes::<ClusterStatus>(&seeds);
    decodes::<EventRecord>(&seeds);
    decodes::<DeleteReply>(&seeds);
    decodes::<DetachReply>(&seeds);
    decodes::<TokenInfo>(&seeds);
    decodes::<CreatedToken>(&seeds);
    decodes::<WhoAmI>(&seeds);
    decodes::<Hello>(&seeds);
    decodes::<Layout>(&seeds);
    target("rest_answer")
        .seeds(seeds)
        .cases(10_000)
        .bytes_max(2000)
        .run(|bytes| {
            let layout = check_decoded::<AttachReply>(bytes).map(|attached| attached.layout);
            let layout = layout.or_else(|| check_decoded::<Layout>(bytes));
            (
                layout.map(|layout| layout_summary(&layout)),
                check_decoded::<ErrorBody>(bytes).map(|body| body.code as u8),
                check_decoded::<VolumeDetail>(bytes).map(|body| body.layout.segments.len().min(3)),
                check_decoded::<VolumeSizeReply>(bytes).map(|body| body.rounded),
                check_decoded::<HeartbeatReply>(bytes)
                    .map(|body| body.scrub.map(|request| request.stop)),
                check_decoded::<DeleteReply>(bytes).is_some(),
                check_decoded::<DetachReply>(bytes).is_some(),
                check_decoded::<CreatedToken>(bytes).map(|body| body.info.role as u8),
                check_decoded::<WhoAmI>(bytes).map(|body| body.role),
                check_decoded::<BrickInfo>(bytes).map(|body| body.scrub.is_some()),
                (
                    check_decoded::<ClusterStatus>(bytes).is_some(),
                    check_decoded::<Hello>(bytes).is_some(),
                ),
                check_decoded::<EventRecord>(bytes).map(|event| event.kind),
            )
        });
}

/// Checks that a decoded layout can be measured and mapped.
fn layout_summary(layout: &Layout) -> (usize, bool) {
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
        name: Some(name()),
        address: "127.0.0.1:1".into(),
        map_socket: None,
        domain: "d".into(),
        durability: Durability::Process,
        capacity_bytes: 1 << 30,
        used_bytes: 0,
        incarnation: 1,
        reported_lost: false,
    };
    let volume = VolumeRecord {
        layout_state: LayoutState::new(layout()),
        shape: Shape {
            kind: LayoutKind::Mirror,
            columns: 1,
            copies: 2,
        },
        durability: Durability::Process,
        attachment: None,
        notes: vec![],
        created_unix_s: 1,
        files_bytes: Some(1 << 20),
        auto_promote: true,
        tier: TierPolicy::Memory,
        origin: Some(CloneOrigin {
            volume: "o".parse().expect("a name"),
            snapshot: "s".parse().expect("a name"),
            epoch: EpochNumber(3),
        }),
        received: Some(EpochNumber(2)),
        rollback: Some(rollback()),
        content_returns: 0,
        labels: BTreeMap::new(),
    };
    let pending = PendingDelete {
        brick: BRICK,
        slice: SliceId(Uuid::from_u128(5)),
        uncertain: true,
    };
    let seeds = [
        json(&brick),
        json(&volume),
        json(&pending),
        json(&event()),
        json(&token_record()),
        json(&kept_answer()),
    ];
    decodes::<VolumeRecord>(&seeds);
    decodes::<TokenRecord>(&seeds);
    decodes::<EventRecord>(&seeds);
    decodes::<KeptAnswer>(&seeds);
    target("store_record")
        .seeds(seeds)
        .cases(10_000)
        .bytes_max(2000)
        .run(|bytes| {
            let volume = check_decoded::<VolumeRecord>(bytes);
            (
                check_decoded::<BrickRecord>(bytes).is_some(),
                volume.map(|volume| layout_summary(&volume.layout_state.layout)),
                check_decoded::<PendingDelete>(bytes).map(|pending| pending.uncertain),
                check_decoded::<EventRecord>(bytes).map(|event| event.severity),
                check_decoded::<TokenRecord>(bytes).map(|token| token.is_expired(65)),
                check_decoded::<KeptAnswer>(bytes).map(|answer| {
                    let key = answer.key.text.to_string();
                    assert!((1..=KEY_BYTES_MAX).contains(&key.len()), "{key}");
                    answer.key.token.is_some()
                }),
            )
        });
}
