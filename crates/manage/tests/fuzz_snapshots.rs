//! Fuzz targets: bodies of the REST API about snapshots and cuts, and their records in the manager's store.
//!
//! `pagemesh_fuzz` describes how the targets run, `docs/rfd/004-fuzzing.md` why they exist.

use crate::fuzzing;
use fuzzing::{check_decoded, check_plain, decodes, json, target};
use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, Layout, Leg, LegState, Segment, SliceId,
};
use pagemesh_manage::schedules::{Retention, ScheduleRecord, SentSnapshot, TargetRecord};
use pagemesh_manage::snapshots::{BookmarkRecord, SnapshotLayout, SnapshotRecord, SnapshotState};
use pagemesh_manage::wire::*;
use std::collections::BTreeMap;
use uuid::Uuid;

fn answer(result: CutResult) -> AnswerCut {
    AnswerCut {
        attachment: EpochNumber(3),
        epoch: EpochNumber(5),
        step: CutStep::Raise,
        result,
    }
}

fn info() -> SnapshotInfo {
    SnapshotInfo {
        volume: "v".parse().expect("a name"),
        name: "s".parse().expect("a name"),
        epoch: EpochNumber(5),
        created_unix_ms: 7,
        state: SnapshotState::Committed,
        size_bytes: 1 << 20,
        holds: vec!["backup".parse().expect("a name")],
        labels: vec!["nightly".into()],
        made_by: "cluster key".into(),
        clones: vec!["c".parse().expect("a name")],
        missing_copies: 1,
        missing_on_replica: true,
    }
}

fn record() -> SnapshotRecord {
    let info = info();
    SnapshotRecord {
        volume: Uuid::from_u128(1),
        name: info.name,
        epoch: info.epoch,
        created_unix_ms: 7,
        state: SnapshotState::Preparing,
        layout: EpochNumber(2),
        made_by: info.made_by,
        holds: info.holds,
        labels: info.labels,
        uncertain: true,
        copies: vec![],
        replica_copies: vec![SliceId(Uuid::from_u128(2))],
    }
}

fn segments() -> Vec<Segment> {
    let leg = Leg {
        brick: BrickId(Uuid::from_u128(0xb)),
        slice: SliceId(Uuid::from_u128(1)),
        state: LegState::InSync,
        needs_full_resync: false,
        asynchronous: false,
        empty: false,
    };
    let column = Column {
        legs: vec![leg],
        lost_since: EpochNumber(0),
    };
    vec![Segment {
        bytes: 4 << 20,
        columns: vec![column],
    }]
}

fn bodies() -> Vec<Vec<u8>> {
    vec![
        json(&CreateSnapshot {
            name: "s".parse().expect("a name"),
            labels: vec!["nightly".into()],
        }),
        json(&CreateSnapshots {
            volumes: vec!["v".parse().expect("a name")],
            name: "s".parse().expect("a name"),
            labels: vec![],
        }),
        json(&ListSnapshots {
            limit: Some(10),
            after: Some(7),
            after_volume: Some("v".parse().expect("a name")),
            search: Some("s".into()),
            label: Some("nightly".into()),
            held: Some(true),
            deleting: true,
        }),
        json(&DeleteVolumeParams {
            force: true,
            snapshots: true,
        }),
        json(&PollCut { attachment: 3 }),
        json(&answer(CutResult::Done)),
        json(&answer(CutResult::Released(1200))),
        json(&answer(CutResult::LayoutChanged("a leg is lost".into()))),
        json(&answer(CutResult::Failed("no".into()))),
        b"{}".to_vec(),
    ]
}

#[test]
fn fuzz_snapshot_request() {
    let seeds = bodies();
    decodes::<CreateSnapshot>(&seeds);
    decodes::<CreateSnapshots>(&seeds);
    decodes::<ListSnapshots>(&seeds);
    decodes::<DeleteVolumeParams>(&seeds);
    decodes::<PollCut>(&seeds);
    decodes::<AnswerCut>(&seeds);
    target("snapshot_request")
        .seeds(seeds)
        .cases(10_000)
        .bytes_max(600)
        .run(|bytes| {
            (
                check_decoded::<CreateSnapshot>(bytes).map(|body| {
                    check_plain(body.name.as_str());
                    body.labels.len().min(3)
                }),
                check_decoded::<CreateSnapshots>(bytes).map(|body| {
                    let volumes = body.volumes.iter();
                    volumes.for_each(|volume| check_plain(volume.as_str()));
                    body.volumes.len().min(3)
                }),
                check_decoded::<ListSnapshots>(bytes)
                    .map(|body| (body.after.is_some(), body.held, body.deleting)),
                check_decoded::<DeleteVolumeParams>(bytes).map(|body| body.snapshots),
                check_decoded::<PollCut>(bytes).is_some(),
                check_decoded::<AnswerCut>(bytes).map(|body| match body.result {
                    CutResult::Done | CutResult::Released(_) => 0,
                    CutResult::LayoutChanged(_) => 1,
                    CutResult::Failed(_) => 2,
                }),
            )
        });
}

fn policy() -> SchedulePolicy {
    SchedulePolicy {
        prefix: Some("auto".into()),
        volumes: vec!["db-*".into()],
        retention: Retention {
            hourly: 24,
            ..Retention::default()
        },
        frequent_minutes: Some(15),
        warn_after_s: Some(7200),
        critical_after_s: Some(14_400),
        enabled: true,
        prune: false,
        group: true,
        targets: vec![ScheduleTarget {
            name: "b".parse().expect("a name"),
            manager: "http://h:1".into(),
            volume_prefix: "x-".into(),
        }],
    }
}

#[test]
fn fuzz_schedule_request() {
    let seeds = [
        json(&CreateBookmark {
            snapshot: "s".parse().expect("a name"),
            name: Some("b".parse().expect("a name")),
        }),
        json(&CreateSchedule {
            name: "c".parse().expect("a name"),
            policy: policy(),
        }),
        json(&policy()),
        json(&RunSchedule {
            volume: "v".parse().expect("a name"),
        }),
        json(&ReportSent {
            target: "b".parse().expect("a name"),
            volume: "v".parse().expect("a name"),
            snapshot: "s".parse().expect("a name"),
        }),
    ];
    decodes::<CreateBookmark>(&seeds);
    decodes::<CreateSchedule>(&seeds);
    decodes::<ReportSent>(&seeds);
    target("schedule_request")
        .seeds(seeds)
        .cases(10_000)
        .bytes_max(600)
        .run(|bytes| {
            (
                check_decoded::<CreateBookmark>(bytes).map(|body| {
                    check_plain(body.snapshot.as_str());
                    body.name.is_some()
                }),
                check_decoded::<CreateSchedule>(bytes).map(|body| {
                    check_plain(body.name.as_str());
                    body.policy.targets.len().min(3)
                }),
                check_decoded::<SchedulePolicy>(bytes).map(|body| (body.enabled, body.prune)),
                check_decoded::<RunSchedule>(bytes).is_some(),
                check_decoded::<ReportSent>(bytes).is_some(),
            )
        });
}

#[test]
fn fuzz_schedule_record() {
    let sent = SentSnapshot {
        volume: Uuid::from_u128(1),
        snapshot: "s".parse().expect("a name"),
        epoch: EpochNumber(5),
        sent_unix_ms: 7,
    };
    let schedule = ScheduleRecord {
        name: "c".parse().expect("a name"),
        prefix: "auto".into(),
        volumes: vec!["db-*".into()],
        retention: policy().retention,
        frequent_minutes: 15,
        warn_after_s: 7200,
        critical_after_s: 14_400,
        enabled: true,
        prune: true,
        group: false,
        targets: vec![TargetRecord {
            name: "b".parse().expect("a name"),
            manager: "http://h:1".into(),
            volume_prefix: String::new(),
            sent: BTreeMap::from([("v".parse().expect("a name"), sent)]),
        }],
        created_unix_s: 1,
        made_by: "x".into(),
    };
    let bookmark = BookmarkRecord {
        volume: Uuid::from_u128(1),
        name: "b".parse().expect("a name"),
        epoch: EpochNumber(5),
        snapshot: "s".parse().expect("a name"),
        created_unix_ms: 7,
        size_bytes: 4 << 20,
        segments: segments(),
        made_by: "x".into(),
    };
    let seeds = [json(&schedule), json(&bookmark)];
    decodes::<ScheduleRecord>(&seeds);
    decodes::<BookmarkRecord>(&seeds);
    target("schedule_record")
        .seeds(seeds)
        .cases(10_000)
        .bytes_max(1200)
        .run(|bytes| {
            (
                check_decoded::<ScheduleRecord>(bytes).map(|record| {
                    check_plain(record.name.as_str());
                    record.targets.len().min(3)
                }),
                check_decoded::<BookmarkRecord>(bytes).map(|it| it.segments.len().min(3)),
            )
        });
}

#[test]
fn fuzz_snapshot_record() {
    let layout = Layout {
        volume: Uuid::from_u128(1),
        name: "v".parse().expect("a name"),
        epoch: EpochNumber(5),
        segments: segments(),
    };
    let seeds = [
        json(&record()),
        json(&SnapshotLayout {
            volume: Uuid::from_u128(1),
            first: EpochNumber(2),
            size_bytes: 4 << 20,
            segments: segments(),
        }),
        json(&info()),
        json(&SnapshotDetail {
            info: info(),
            layout,
            bricks: BTreeMap::new(),
        }),
        json(&CreatedSnapshots {
            snapshots: vec![info()],
            consistent: true,
            held_us: Some(1200),
        }),
        json(&CutOrder {
            epoch: EpochNumber(5),
            step: CutStep::Finish,
        }),
    ];
    decodes::<SnapshotRecord>(&seeds);
    decodes::<SnapshotLayout>(&seeds);
    decodes::<SnapshotDetail>(&seeds);
    decodes::<CreatedSnapshots>(&seeds);
    target("snapshot_record")
        .seeds(seeds)
        .cases(10_000)
        .bytes_max(1200)
        .run(|bytes| {
            (
                check_decoded::<SnapshotRecord>(bytes).map(|record| {
                    check_plain(record.name.as_str());
                    (record.state as u8, record.uncertain)
                }),
                check_decoded::<SnapshotLayout>(bytes).map(|it| it.segments.len().min(3)),
                check_decoded::<SnapshotInfo>(bytes).map(|it| it.holds.len().min(3)),
                check_decoded::<SnapshotDetail>(bytes).map(|it| it.layout.segments.len().min(3)),
                check_decoded::<CreatedSnapshots>(bytes).map(|it| it.consistent),
                check_decoded::<CutOrder>(bytes).is_some(),
            )
        });
}
