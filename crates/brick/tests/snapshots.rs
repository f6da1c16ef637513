//! Requests of snapshots at a brick: they are admitted and refused, listed and dropped.

use bytes::Bytes;
use pagemesh_base::ids::{EPOCH_MAX, Epoch};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{
    BrickControl, DROPPED_SNAPSHOTS_MAX, SLICE_IO_BYTES_MAX, SliceError, SliceReply, SliceRequest,
    Stamp,
};
use pagemesh_base::space::Extent;
use pagemesh_brick::brick::{Brick, MaintenanceThread};
use pagemesh_brick::file;
use pagemesh_brick::worker::Worker;
use std::sync::Arc;
use tempfile::TempDir;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));
const PAGE: u64 = 4096;
const LEAF: u64 = 512 * PAGE;
const SIZE: u64 = 3 * LEAF;

struct TestPool {
    brick: Arc<Brick>,
    _keeper: MaintenanceThread,
    _directory: TempDir,
}

fn pool() -> TestPool {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let path = directory.path().join("pool");
    file::create(&path, 32 << 20).expect("a pool");
    let (brick, keeper, _) = Brick::open(&path).expect("a brick");
    brick.create(SLICE, SIZE).expect("room");
    TestPool {
        brick,
        _keeper: keeper,
        _directory: directory,
    }
}

fn attach(brick: &Arc<Brick>, epoch: u32) -> Worker {
    let mut worker = Worker::open(brick, std::process::id(), 1).expect("a session");
    assert_eq!(worker.attach(SLICE, Epoch(epoch)), Ok((0, SIZE)));
    worker
}

fn stamp(epoch: u32, op: u64) -> Stamp {
    Stamp {
        epoch: Epoch(epoch),
        op,
        open_ops: 0,
    }
}

#[track_caller]
fn write(worker: &mut Worker, offset: u64, data: Vec<u8>, stamp: Stamp) {
    let data = Bytes::from(data);
    let request = SliceRequest::Write {
        offset,
        data,
        stamp,
    };
    assert_eq!(worker.execute(0, request), Ok(SliceReply::Done));
}

fn prepare(worker: &mut Worker, snapshot: u32) -> Result<SliceReply, SliceError> {
    let snapshot = Epoch(snapshot);
    worker.execute(0, SliceRequest::PrepareSnapshot { snapshot })
}

fn read(
    worker: &mut Worker,
    snapshot: u32,
    offset: u64,
    len: u32,
) -> Result<SliceReply, SliceError> {
    let request = SliceRequest::ReadVersion {
        snapshot: Epoch(snapshot),
        offset,
        len,
    };
    worker.execute(0, request)
}

fn extents(
    worker: &mut Worker,
    snapshot: u32,
    offset: u64,
    len: u64,
) -> Result<SliceReply, SliceError> {
    let request = SliceRequest::VersionExtents {
        snapshot: Epoch(snapshot),
        offset,
        len,
    };
    worker.execute(0, request)
}

fn changes(
    worker: &mut Worker,
    (from, to): (u32, u32),
    offset: u64,
    len: u64,
) -> Result<SliceReply, SliceError> {
    let (from, to) = (Epoch(from), Epoch(to));
    let request = SliceRequest::VersionChanges {
        from,
        to,
        offset,
        len,
    };
    worker.execute(0, request)
}

fn raise(worker: &mut Worker, epoch: u32) -> Result<SliceReply, SliceError> {
    let (epoch, lost_since) = (Epoch(epoch), Epoch(0));
    worker.execute(0, SliceRequest::RaiseEpoch { epoch, lost_since })
}

#[track_caller]
fn assert_refused(result: Result<SliceReply, SliceError>, says: &str) {
    match result {
        Err(SliceError::Refused(why)) => assert!(why.contains(says), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn snapshot_is_read_across_pages_and_leaves() {
    let pool = pool();
    let mut worker = attach(&pool.brick, 2);
    let data: Vec<u8> = (0..2 * PAGE).map(|at| (at % 251) as u8).collect();
    let from = LEAF - PAGE;
    write(&mut worker, from, data.clone(), stamp(2, 1));
    assert_eq!(prepare(&mut worker, 3), Ok(SliceReply::Done));
    assert_eq!(prepare(&mut worker, 3), Ok(SliceReply::Done), "once more");
    let whole = [vec![0; 4096], data, vec![0; 4096]].concat();
    for (start, len) in [(0, 16384), (1, 4096), (4000, 9000), (5000, 10), (0, 0)] {
        let found = read(&mut worker, 3, from - PAGE + start as u64, len as u32);
        let expected = whole[start..start + len].to_vec();
        assert!(found == Ok(SliceReply::Data(expected)), "{len} at {start}");
    }
    let extent = |len, mapped| Extent { len, mapped };
    let listed = |list: &[Extent]| Ok(SliceReply::Extents(list.to_vec()));
    let all = [
        extent(from, false),
        extent(2 * PAGE, true),
        extent(SIZE - from - 2 * PAGE, false),
    ];
    assert_eq!(extents(&mut worker, 3, 0, SIZE), listed(&all));
    let part = [extent(100, false), extent(50, true)];
    assert_eq!(extents(&mut worker, 3, from - 100, 150), listed(&part));
    assert_eq!(extents(&mut worker, 3, 0, 0), listed(&[]));
}

#[test]
fn request_beyond_limits_of_snapshot_is_refused() {
    let pool = pool();
    let mut worker = attach(&pool.brick, 2);
    assert_eq!(prepare(&mut worker, 3), Ok(SliceReply::Done));
    let out_of_range = |result| matches!(result, Err(SliceError::OutOfRange(_)));
    assert!(out_of_range(read(
        &mut worker,
        3,
        0,
        SLICE_IO_BYTES_MAX + 1
    )));
    assert!(out_of_range(read(&mut worker, 3, SIZE - 10, 11)));
    assert!(out_of_range(read(&mut worker, 3, u64::MAX, 2)));
    assert!(out_of_range(extents(&mut worker, 3, 0, SIZE + 1)));
    assert!(out_of_range(extents(&mut worker, 3, 1, u64::MAX)));
    assert!(out_of_range(prepare(&mut worker, EPOCH_MAX + 1)));
    assert_refused(read(&mut worker, 4, 0, 512), "no snapshot of epoch 4");
    assert_refused(extents(&mut worker, 2, 0, 512), "no snapshot");
}

#[test]
fn fenced_client_reads_snapshots_and_prepares_none() {
    let pool = pool();
    let (mut old, mut new) = (attach(&pool.brick, 2), attach(&pool.brick, 5));
    write(&mut old, 0, vec![1; 4096], stamp(2, 1));
    assert_eq!(prepare(&mut old, 3), Ok(SliceReply::Done));
    assert_eq!(raise(&mut new, 5), Ok(SliceReply::Done));
    let page = Ok(SliceReply::Data(vec![1; 4096]));
    assert!(read(&mut old, 3, 0, 4096) == page);
    let stale = Err(SliceError::StaleEpoch { current: Epoch(5) });
    assert_eq!(prepare(&mut old, 6), stale);
    assert_eq!(prepare(&mut new, 4), stale, "older than the layout");
    assert_eq!(pool.brick.snapshots(SLICE), Ok(vec![Epoch(3)]));
}

/// A reader attaches with the highest epoch, and so raises nothing.
#[test]
fn reader_of_snapshot_fences_nobody() {
    let pool = pool();
    let mut client = attach(&pool.brick, 2);
    write(&mut client, 0, vec![1; 4096], stamp(2, 1));
    assert_eq!(prepare(&mut client, 3), Ok(SliceReply::Done));
    let mut reader = attach(&pool.brick, EPOCH_MAX);
    let page = Ok(SliceReply::Data(vec![1; 4096]));
    assert!(read(&mut reader, 3, 0, 4096) == page);
    write(&mut client, 4096, vec![2; 4096], stamp(3, 2));
    // The barrier of a client that comes back does not stop the reader.
    let mut again = attach(&pool.brick, 2);
    assert_eq!(raise(&mut again, 2), Ok(SliceReply::Done));
    assert!(read(&mut reader, 3, 0, 4096) == page);
}

#[test]
fn dropped_snapshot_is_neither_listed_nor_read() {
    let pool = pool();
    let mut worker = attach(&pool.brick, 2);
    write(&mut worker, 0, vec![1; 4096], stamp(2, 1));
    for snapshot in [3, 4, 7] {
        assert_eq!(prepare(&mut worker, snapshot), Ok(SliceReply::Done));
    }
    assert!(read(&mut worker, 4, 0, 4096).is_ok());
    let dropped = [Epoch(4), Epoch(3), Epoch(99)];
    assert_eq!(pool.brick.drop_snapshots(SLICE, &dropped), Ok(()));
    assert_eq!(pool.brick.snapshots(SLICE), Ok(vec![Epoch(7)]));
    assert_refused(read(&mut worker, 4, 0, 4096), "no snapshot");
    assert!(read(&mut worker, 7, 0, 4096).is_ok());
    let many = vec![Epoch(1); DROPPED_SNAPSHOTS_MAX + 1];
    let refused = pool.brick.drop_snapshots(SLICE, &many);
    assert!(matches!(refused, Err(SliceError::OutOfRange(_))));
    pool.brick.delete(SLICE).expect("deleted");
    let gone = SliceError::NoSuchSlice(SLICE);
    assert_eq!(pool.brick.snapshots(SLICE), Err(gone.clone()));
    assert_eq!(read(&mut worker, 7, 0, 4096), Err(gone));
}

#[test]
fn manager_prepares_slice_without_client() {
    let pool = pool();
    let mut client = attach(&pool.brick, 2);
    write(&mut client, 0, vec![1; 4096], stamp(2, 1));
    // The client tells the slice that its write is on all legs, and detaches.
    let complete = SliceRequest::Clear {
        offset: 0,
        len: 0,
        stamp: stamp(2, 2),
    };
    assert_eq!(client.execute(0, complete), Ok(SliceReply::Done));
    drop(client);
    let control: &dyn BrickControl = &*pool.brick;
    assert_eq!(control.prepare_snapshot(SLICE, Epoch(5)), Ok(()));
    assert_eq!(control.prepare_snapshot(SLICE, Epoch(5)), Ok(()));
    assert_eq!(control.snapshots(SLICE), Ok(vec![Epoch(5)]));
    let older = control.prepare_snapshot(SLICE, Epoch(4));
    let stale = SliceError::StaleEpoch { current: Epoch(5) };
    assert_eq!(older, Err(stale.clone()), "the slice has the epoch");
    let mut late = Worker::open(&pool.brick, std::process::id(), 1).expect("a session");
    assert_eq!(late.attach(SLICE, Epoch(2)), Err(stale));
}

/// The other copies may lack the last write of a client that died.
#[test]
fn manager_prepares_no_slice_with_operations_in_flight() {
    let pool = pool();
    let mut client = attach(&pool.brick, 2);
    write(&mut client, 0, vec![1; 4096], stamp(2, 1));
    drop(client);
    let refused = pool.brick.prepare_snapshot(SLICE, Epoch(5));
    assert_refused(refused.map(|()| SliceReply::Done), "may differ");
    assert_eq!(pool.brick.snapshots(SLICE), Ok(vec![]));
    let slice = pool.brick.list().expect("a list")[0].clone();
    assert!(slice.epoch < 5, "nothing was raised");
}

#[test]
fn changes_are_the_pages_that_differ_between_snapshots() {
    let pool = pool();
    let mut worker = attach(&pool.brick, 2);
    write(&mut worker, 0, vec![1; 3 * 4096], stamp(2, 1));
    write(&mut worker, LEAF, vec![1; 4096], stamp(2, 2));
    assert_eq!(prepare(&mut worker, 3), Ok(SliceReply::Done));
    write(&mut worker, PAGE + 100, vec![2; 10], stamp(3, 3));
    let (offset, len) = (LEAF, PAGE);
    let clear = SliceRequest::Clear {
        offset,
        len,
        stamp: stamp(3, 4),
    };
    assert_eq!(worker.execute(0, clear), Ok(SliceReply::Done));
    assert_eq!(prepare(&mut worker, 4), Ok(SliceReply::Done));
    write(&mut worker, 2 * PAGE, vec![3; 4096], stamp(4, 5));
    assert_eq!(prepare(&mut worker, 5), Ok(SliceReply::Done));
    let extent = |len, mapped| Extent { len, mapped };
    let listed = |list: &[Extent]| Ok(SliceReply::Extents(list.to_vec()));
    let first = [
        extent(PAGE, false),
        extent(PAGE, true),
        extent(LEAF - 2 * PAGE, false),
        extent(PAGE, true),
        extent(SIZE - LEAF - PAGE, false),
    ];
    assert_eq!(changes(&mut worker, (3, 4), 0, SIZE), listed(&first));
    let part = [extent(50, false), extent(30, true)];
    assert_eq!(changes(&mut worker, (3, 4), PAGE - 50, 80), listed(&part));
    let both = changes(&mut worker, (3, 5), 0, LEAF);
    let second = [
        extent(PAGE, false),
        extent(2 * PAGE, true),
        extent(LEAF - 3 * PAGE, false),
    ];
    assert_eq!(both, listed(&second));
    let all = changes(&mut worker, (0, 3), 0, SIZE);
    assert_eq!(all, extents(&mut worker, 3, 0, SIZE));
    assert_eq!(changes(&mut worker, (3, 4), 0, 0), listed(&[]));
    for epochs in [(4, 4), (4, 3)] {
        let refused = changes(&mut worker, epochs, 0, PAGE);
        assert!(matches!(refused, Err(SliceError::OutOfRange(_))));
    }
    let beyond = changes(&mut worker, (3, 4), SIZE, 1);
    assert!(matches!(beyond, Err(SliceError::OutOfRange(_))));
}

fn clear(worker: &mut Worker, offset: u64, len: u64, stamp: Stamp) {
    let request = SliceRequest::Clear { offset, len, stamp };
    assert_eq!(worker.execute(0, request), Ok(SliceReply::Done));
}

/// The pages that may have changed.
#[track_caller]
fn changed_pages(worker: &mut Worker, epochs: (u32, u32)) -> Vec<u64> {
    let (mut pages, mut at) = (Vec::new(), 0);
    while at < SIZE {
        let Ok(SliceReply::Extents(extents)) = changes(worker, epochs, at, SIZE - at) else {
            panic!("no extents");
        };
        for extent in extents {
            if extent.mapped {
                pages.extend(at / PAGE..(at + extent.len) / PAGE);
            }
            at += extent.len;
        }
    }
    pages
}

#[test]
fn changes_since_dropped_snapshot_are_told_by_births() {
    let pool = pool();
    let mut worker = attach(&pool.brick, 2);
    write(&mut worker, 0, vec![1; 8 * 4096], stamp(2, 1));
    write(&mut worker, LEAF, vec![1; 4096], stamp(2, 2));
    clear(&mut worker, 6 * PAGE, 2 * PAGE, stamp(2, 3));
    assert_eq!(prepare(&mut worker, 3), Ok(SliceReply::Done));
    // A bookmark keeps the epoch alone.
    pool.brick
        .drop_snapshots(SLICE, &[Epoch(3)])
        .expect("dropped");
    write(&mut worker, PAGE + 100, vec![2; 10], stamp(3, 4));
    write(&mut worker, 3 * PAGE, vec![2; 4096], stamp(3, 5));
    clear(&mut worker, LEAF, PAGE, stamp(3, 6));
    // A page that is discarded and written again may get its old frame.
    clear(&mut worker, 5 * PAGE, PAGE, stamp(3, 7));
    write(&mut worker, 5 * PAGE, vec![1; 4096], stamp(3, 8));
    assert_eq!(prepare(&mut worker, 4), Ok(SliceReply::Done));
    let since = [1, 3, 5, 512];
    assert_eq!(changed_pages(&mut worker, (3, 4)), since);
    // Later changes do not hide the births of the versions that the snapshot sees.
    write(&mut worker, 0, vec![9; 4096], stamp(4, 9));
    write(&mut worker, 3 * PAGE, vec![9; 4096], stamp(4, 10));
    clear(&mut worker, 5 * PAGE, PAGE, stamp(4, 11));
    assert_eq!(changed_pages(&mut worker, (3, 4)), since);
    write(&mut worker, 7 * PAGE, vec![9; 4096], stamp(4, 12));
    assert_eq!(prepare(&mut worker, 5), Ok(SliceReply::Done));
    // The birth of a hole that was written since is not known. So it is listed.
    write(&mut worker, 6 * PAGE, vec![9; 4096], stamp(5, 13));
    let both = [0, 1, 3, 5, 6, 7, 512];
    assert_eq!(changed_pages(&mut worker, (3, 5)), both);
    assert_eq!(changed_pages(&mut worker, (4, 5)), [0, 3, 5, 7]);
    assert_refused(
        changes(&mut worker, (3, 6), 0, PAGE),
        "no snapshot of epoch 6",
    );
}
