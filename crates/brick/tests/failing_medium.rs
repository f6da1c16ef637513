//! A medium that cannot be made durable any more ends its brick.

use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{
    BrickControl, CloneSource, SliceError, SliceReply, SliceRequest, Stamp,
};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_brick::brick::Brick;
use pagemesh_brick::worker::Worker;
use pagemesh_pmem::test_api::RecordedMedium;
use pagemesh_pmem::{Durability, Recorder};
use pagemesh_store::pool::{Pool, format};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));

/// Memory with a `sync` that fails once told to.
struct FailingMedia {
    memory: Recorder,
    fails: AtomicBool,
}

impl RecordedMedium for FailingMedia {
    fn recorder(&self) -> &Recorder {
        &self.memory
    }
    fn fails_sync(&self) -> bool {
        self.fails.load(Ordering::Relaxed)
    }
}

/// A brick without threads, and its medium.
fn brick() -> (Arc<Brick<FailingMedia>>, Arc<FailingMedia>) {
    let media = Arc::new(FailingMedia {
        memory: Recorder::new(4 << 20),
        fails: AtomicBool::new(false),
    });
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let (pool, _) = Pool::open(media.clone(), media.clone()).expect("a sound pool");
    let brick = Brick::new(pool, Durability::FileSync);
    brick.create(SLICE, 1 << 20).expect("room");
    (Arc::new(brick), media)
}

fn worker(brick: &Arc<Brick<FailingMedia>>) -> Worker<FailingMedia> {
    let mut worker = Worker::open(brick, std::process::id(), 1).expect("a session");
    worker.attach(SLICE, Epoch(1)).expect("attached");
    let stamp = Stamp {
        epoch: Epoch(1),
        op: 1,
        open_ops: 0,
    };
    let data = Bytes::from(vec![7; PAGE_BYTES]);
    let offset = 0;
    let write = SliceRequest::Write {
        offset,
        data,
        stamp,
    };
    assert_eq!(worker.execute(0, write), Ok(SliceReply::Done));
    worker
}

/// A request after the medium's failure ends the brick, and wakes the maintenance thread at once.
#[track_caller]
fn check(
    ask: impl FnOnce(&Brick<FailingMedia>, &mut Worker<FailingMedia>) -> Result<(), SliceError>,
) {
    check_after(|_| {}, ask);
}

/// The same after some requests to the sound medium.
#[track_caller]
fn check_after(
    prepare: impl FnOnce(&mut Worker<FailingMedia>),
    ask: impl FnOnce(&Brick<FailingMedia>, &mut Worker<FailingMedia>) -> Result<(), SliceError>,
) {
    let (brick, media) = brick();
    let mut worker = worker(&brick);
    prepare(&mut worker);
    assert_eq!(worker.execute(0, SliceRequest::Flush), Ok(SliceReply::Done));
    assert!(!brick.has_failed());
    let rung = brick.mapping().control().doorbell_count();
    media.fails.store(true, Ordering::Relaxed);
    ask(&brick, &mut worker).expect_err("the medium fails");
    assert!(brick.has_failed());
    assert_ne!(
        brick.mapping().control().doorbell_count(),
        rung,
        "the maintenance thread sleeps"
    );
}

#[test]
fn failed_flush_ends_brick() {
    check(|_, worker| worker.execute(0, SliceRequest::Flush).map(drop));
}

#[test]
fn failed_owner_change_ends_brick() {
    let raise = SliceRequest::RaiseEpoch {
        epoch: Epoch(2),
        lost_since: Epoch(0),
    };
    check(|_, worker| worker.execute(0, raise).map(drop));
    check(|brick, _| brick.create(SliceId(Uuid::from_u128(6)), 1 << 20));
    check(|brick, _| brick.delete(SLICE));
}

const SNAPSHOT: Epoch = Epoch(2);

/// Makes a snapshot, and replaces the page that it sees.
fn make_version(worker: &mut Worker<FailingMedia>) {
    let snapshot = SNAPSHOT;
    let prepared = worker.execute(0, SliceRequest::PrepareSnapshot { snapshot });
    assert_eq!(prepared, Ok(SliceReply::Done));
    let write = SliceRequest::Write {
        offset: 0,
        data: Bytes::from(vec![8; PAGE_BYTES]),
        stamp: Stamp {
            epoch: SNAPSHOT,
            op: 2,
            open_ops: 0,
        },
    };
    assert_eq!(worker.execute(0, write), Ok(SliceReply::Done));
}

#[test]
fn failed_change_of_snapshots_ends_brick() {
    let snapshot = SNAPSHOT;
    check(|_, worker| {
        let prepared = worker.execute(0, SliceRequest::PrepareSnapshot { snapshot });
        prepared.map(drop)
    });
    check(|brick, _| brick.prepare_snapshot(SLICE, snapshot));
    check(|brick, _| brick.adopt_snapshots(SLICE, &[snapshot]));
    check_after(make_version, |brick, _| {
        brick.drop_snapshots(SLICE, &[snapshot])
    });
    let clone = SliceId(Uuid::from_u128(6));
    let source = CloneSource {
        origin: SLICE,
        snapshot,
    };
    check_after(make_version, |brick, _| {
        brick.create_clone(clone, source, 1 << 20).map(drop)
    });
}

#[test]
fn failed_merge_of_versions_ends_brick() {
    let (brick, media) = brick();
    let mut worker = worker(&brick);
    make_version(&mut worker);
    assert_eq!(worker.execute(0, SliceRequest::Flush), Ok(SliceReply::Done));
    // The sweep of the dropped snapshot needs a merge.
    brick.drop_snapshots(SLICE, &[SNAPSHOT]).expect("sound");
    media.fails.store(true, Ordering::Relaxed);
    for _ in 0..100 {
        brick.maintain();
    }
    assert!(brick.has_failed());
}

#[test]
fn refused_request_does_not_end_brick() {
    let (brick, _media) = brick();
    let mut worker = worker(&brick);
    brick.create(SLICE, 1 << 20).expect_err("it is there");
    brick.resize(SLICE, 4096).expect_err("it would shrink");
    let beyond = SliceRequest::Read {
        offset: 1 << 20,
        len: 1,
    };
    worker.execute(0, beyond).expect_err("out of range");
    assert!(!brick.has_failed());
}
