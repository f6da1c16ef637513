//! Devices that fail: each kind of error, by plan.

use crate::disk::client::{Client, PAGE, Pool, SIZE, SLICE, open, options};
use pagemesh_base::slice::{BrickControl, SliceError, SliceReply, SliceRequest};
use pagemesh_brick::brick::{Brick, MaintenanceThread};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file::{self, FileError};
use pagemesh_pmem::{DeviceFault, DevicePlan, DiskMedia, PlannedRequest, RequestLimits};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const EVERYTHING: Range<u64> = 0..u64::MAX;
const EIO: i32 = 5;
const ENXIO: i32 = 6;
const ENOSPC: i32 = 28;

fn write(client: &mut Client, page: u64, fill: u8) -> SliceRequest {
    SliceRequest::Write {
        offset: page * PAGE,
        data: vec![fill; PAGE as usize].into(),
        stamp: client.stamp(),
    }
}

fn read(page: u64) -> SliceRequest {
    SliceRequest::Read {
        offset: page * PAGE,
        len: PAGE as u32,
    }
}

fn holds(fill: u8) -> Result<SliceReply, SliceError> {
    Ok(SliceReply::Data(vec![fill; PAGE as usize]))
}

/// Executes one request.
fn ask(client: &mut Client, request: SliceRequest) -> Result<SliceReply, SliceError> {
    client.execute(vec![request]).remove(0)
}

/// A pool with 64 pages, each full of its number plus 1, and flushed.
fn filled_pool() -> Pool {
    let home = Pool::new();
    let (brick, maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let mut client = Client::new(&brick, 1);
    let mut batch: Vec<_> = (0..64)
        .map(|page| write(&mut client, page, page as u8 + 1))
        .collect();
    batch.push(SliceRequest::Flush);
    for result in client.execute(batch) {
        assert_eq!(result, Ok(SliceReply::Done));
    }
    drop(client);
    maintenance.stop();
    home
}

/// A brick on a device with a plan.
struct PlannedBrick {
    plan: Arc<DevicePlan>,
    brick: Arc<Brick<DiskMedia>>,
    _maintenance: MaintenanceThread<DiskMedia>,
}

impl Drop for PlannedBrick {
    fn drop(&mut self) {
        // The disk ends after its requests.
        self.plan.clear();
    }
}

impl PlannedBrick {
    fn open(path: &Path) -> PlannedBrick {
        PlannedBrick::open_with(path, options())
    }

    fn open_with(path: &Path, options: OpenOptions) -> PlannedBrick {
        let plan = DevicePlan::of_next_device();
        let (brick, maintenance, _) = Brick::open_disk(path, options).expect("a brick");
        PlannedBrick {
            plan,
            brick,
            _maintenance: maintenance,
        }
    }

    /// The bytes of the device that hold the pages full of a byte.
    fn places_of(path: &Path, fill: u8) -> Vec<Range<u64>> {
        let bytes = std::fs::read(path).expect("the pool");
        let start = file::read_superblock(path)
            .expect("a pool")
            .geometry
            .frames
            .start;
        let pages = bytes.chunks(PAGE as usize).enumerate();
        let found = pages.filter(|(_, page)| page.iter().all(|byte| *byte == fill));
        let places = found.map(|(number, _)| number as u64 * PAGE..(number as u64 + 1) * PAGE);
        places.filter(|place| place.start >= start).collect()
    }

    #[track_caller]
    fn wait_until_failed(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        while !self.brick.has_failed() {
            assert!(Instant::now() < end, "the brick goes on");
            std::thread::yield_now();
        }
    }
}

#[test]
fn unreadable_page_is_damaged_and_rewritten_elsewhere() {
    let home = filled_pool();
    let place = PlannedBrick::places_of(&home.path(), 8).remove(0);
    let planned = PlannedBrick::open(&home.path());
    let fault = DeviceFault::Error(EIO);
    planned
        .plan
        .add(PlannedRequest::Read, place.clone(), u64::MAX, fault);
    let mut client = Client::new(&planned.brick, 2);
    let damaged = ask(&mut client, read(7));
    assert!(
        matches!(damaged, Err(SliceError::Damaged { .. })),
        "{damaged:?}"
    );
    // Its neighbours are not.
    assert_eq!(ask(&mut client, read(6)), holds(7));
    assert_eq!(ask(&mut client, read(8)), holds(9));
    // As the volume engine repairs it.
    let repair = write(&mut client, 7, 77);
    assert_eq!(ask(&mut client, repair), Ok(SliceReply::Done));
    // No later write gets the bad frame.
    for round in 0..20 {
        let batch: Vec<_> = (100..228)
            .map(|page| write(&mut client, page, 200 + round))
            .collect();
        for result in client.execute(batch) {
            assert_eq!(result, Ok(SliceReply::Done));
        }
        planned.brick.maintain();
    }
    assert_eq!(ask(&mut client, read(7)), holds(77));
    let figures = planned.brick.disk_figures().expect("a disk");
    assert_eq!(figures.unreadable_pages, 1);
    assert!(!planned.brick.has_failed());
    let bytes = std::fs::read(home.path()).expect("the pool");
    let place = place.start as usize..place.end as usize;
    assert!(
        bytes[place].iter().all(|byte| *byte == 8),
        "the bad frame was written"
    );
}

#[test]
fn unreadable_page_of_tables_refuses_pool() {
    let home = filled_pool();
    let geometry = file::read_superblock(&home.path())
        .expect("a pool")
        .geometry;
    for region in [geometry.journal_region, geometry.bitmap, geometry.in_flight] {
        let plan = DevicePlan::of_next_device();
        let bytes = region.start..region.start + PAGE;
        plan.add(
            PlannedRequest::Read,
            bytes,
            u64::MAX,
            DeviceFault::Error(EIO),
        );
        let refused = Brick::open_disk(&home.path(), options());
        let refused = refused.err().expect("a refusal");
        let FileError::DiskFailed { cause, .. } = &refused else {
            panic!("{refused}");
        };
        let wanted = format!("byte {} of", region.start);
        assert!(
            cause.starts_with(&wanted) && cause.contains("replace"),
            "{cause}"
        );
    }
    // Nothing was written: the pool is whole once the device can be read.
    let (brick, _maintenance) = open(&home.path());
    assert_eq!(ask(&mut Client::new(&brick, 2), read(7)), holds(8));
}

/// A request fails with the device, the brick ends, and every later flush fails as well. What was flushed is there
/// after a restart.
#[track_caller]
fn check_failure(request: PlannedRequest, bytes: impl Fn(&Path) -> Range<u64>, fault: DeviceFault) {
    let home = filled_pool();
    let planned = PlannedBrick::open(&home.path());
    let mut client = Client::new(&planned.brick, 2);
    let before = write(&mut client, 3, 100);
    assert_eq!(
        client.execute(vec![before, SliceRequest::Flush]),
        [Ok(SliceReply::Done), Ok(SliceReply::Done)]
    );
    planned.plan.add(request, bytes(&home.path()), 1, fault);
    let change = write(&mut client, 4, 101);
    let results = client.execute(vec![change, SliceRequest::Flush]);
    assert!(results[1].is_err(), "{results:?}");
    assert_eq!(planned.plan.befallen(), 1);
    assert!(planned.brick.has_failed());
    // The device works again, but what it holds is unknown.
    for _ in 0..3 {
        assert!(ask(&mut client, SliceRequest::Flush).is_err());
        let change = write(&mut client, 5, 102);
        assert!(ask(&mut client, change).is_err());
    }
    drop((client, planned));
    let (brick, _maintenance) = open(&home.path());
    let mut client = Client::new(&brick, 3);
    assert_eq!(ask(&mut client, read(3)), holds(100));
    assert_eq!(ask(&mut client, read(7)), holds(8));
    assert_ne!(ask(&mut client, read(5)), holds(102));
}

fn frames(path: &Path) -> Range<u64> {
    let frames = file::read_superblock(path).expect("a pool").geometry.frames;
    frames.start..frames.end()
}

fn journals(path: &Path) -> Range<u64> {
    let journals = file::read_superblock(path)
        .expect("a pool")
        .geometry
        .journal_region;
    journals.start..journals.end()
}

#[test]
fn failed_write_of_data_ends_brick() {
    check_failure(PlannedRequest::Write, frames, DeviceFault::Error(EIO));
}

#[test]
fn failed_write_of_journal_ends_brick() {
    check_failure(PlannedRequest::Write, journals, DeviceFault::Error(EIO));
}

#[test]
fn short_write_ends_brick() {
    check_failure(PlannedRequest::Write, frames, DeviceFault::Short(512));
}

#[test]
fn full_thin_device_ends_brick() {
    check_failure(PlannedRequest::Write, frames, DeviceFault::Error(ENOSPC));
}

#[test]
fn failed_flush_of_disk_ends_brick() {
    check_failure(
        PlannedRequest::Flush,
        |_| EVERYTHING,
        DeviceFault::Error(EIO),
    );
}

#[test]
fn device_that_is_gone_ends_brick_and_returns() {
    let home = filled_pool();
    let planned = PlannedBrick::open(&home.path());
    let mut client = Client::new(&planned.brick, 2);
    planned.plan.fail_all(ENXIO);
    // A read is enough.
    assert!(ask(&mut client, read(40)).is_err());
    assert!(planned.brick.has_failed());
    drop((client, planned));
    let (brick, _maintenance) = open(&home.path());
    assert_eq!(ask(&mut Client::new(&brick, 3), read(40)), holds(41));
}

#[test]
fn device_with_many_unreadable_pages_ends_brick() {
    let home = Pool::new();
    let (brick, maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let mut client = Client::new(&brick, 1);
    for page in 0..128 {
        let change = write(&mut client, page, 1);
        assert_eq!(ask(&mut client, change), Ok(SliceReply::Done));
    }
    drop(client);
    maintenance.stop();
    drop(brick);
    let planned = PlannedBrick::open(&home.path());
    for place in PlannedBrick::places_of(&home.path(), 1) {
        let fault = DeviceFault::Error(EIO);
        planned
            .plan
            .add(PlannedRequest::Read, place, u64::MAX, fault);
    }
    let mut client = Client::new(&planned.brick, 2);
    let failed_at = (0..128).find(|&page| {
        ask(&mut client, read(page)).expect_err("unreadable");
        planned.brick.has_failed()
    });
    assert!(failed_at.is_some_and(|page| page >= 63), "{failed_at:?}");
}

/// A request that does not end fails the pool, and what waits for it.
fn check_hang(request: PlannedRequest) {
    let home = filled_pool();
    // A loaded machine reaches neither.
    let limits = RequestLimits {
        slow: Duration::from_secs(1),
        fail: Duration::from_secs(5),
    };
    let options = OpenOptions {
        request_limits: limits,
        ..options()
    };
    let planned = PlannedBrick::open_with(&home.path(), options);
    let mut client = Client::new(&planned.brick, 2);
    planned.plan.add(request, EVERYTHING, 1, DeviceFault::Hang);
    let waiting = std::thread::spawn(move || {
        let _ = ask(&mut client, read(50));
        let change = write(&mut client, 4, 101);
        client.execute(vec![change, SliceRequest::Flush])
    });
    planned.wait_until_failed();
    let figures = planned.brick.disk_figures().expect("a disk");
    assert!(figures.slow_requests > 0, "{request:?}");
    // The device answers after all: too late.
    planned.plan.clear();
    let results = waiting.join().expect("no panic");
    // A change is answered when its writes have ended: it does not wait for a FLUSH.
    let needed = match request {
        PlannedRequest::Flush => &results[1..],
        _ => &results[..],
    };
    let have_failed = needed.iter().all(Result::is_err);
    assert!(have_failed, "{request:?}: {results:?}");
}

#[test]
fn request_without_end_fails_pool() {
    let kinds = [
        PlannedRequest::Read,
        PlannedRequest::Write,
        PlannedRequest::Flush,
    ];
    let checks = kinds.map(|kind| std::thread::spawn(move || check_hang(kind)));
    for check in checks {
        check.join().expect("no panic");
    }
}

#[test]
fn slow_request_is_reported_and_ends_well() {
    let home = filled_pool();
    let limits = RequestLimits {
        slow: Duration::from_millis(50),
        fail: Duration::from_secs(3600),
    };
    let slow = OpenOptions {
        request_limits: limits,
        ..options()
    };
    let planned = PlannedBrick::open_with(&home.path(), slow);
    planned
        .plan
        .add(PlannedRequest::Flush, EVERYTHING, 1, DeviceFault::Hang);
    let brick = planned.brick.clone();
    let waiting = std::thread::spawn(move || {
        let mut client = Client::new(&brick, 2);
        ask(&mut client, SliceRequest::Flush)
    });
    let end = Instant::now() + Duration::from_secs(60);
    while planned.brick.disk_figures().expect("a disk").slow_requests == 0 {
        assert!(Instant::now() < end, "no report");
        std::thread::yield_now();
    }
    planned.plan.clear();
    assert_eq!(waiting.join().expect("no panic"), Ok(SliceReply::Done));
    assert!(!planned.brick.has_failed());
}

#[test]
fn brick_without_io_uring_serves_its_pool() {
    let home = filled_pool();
    let plan = DevicePlan::of_next_device();
    plan.refuse_io_uring();
    let (brick, _maintenance) = open(&home.path());
    let mut client = Client::new(&brick, 2);
    for page in 0..64 {
        assert_eq!(ask(&mut client, read(page)), holds(page as u8 + 1));
    }
    let batch: Vec<_> = (0..64).map(|page| write(&mut client, page, 99)).collect();
    for result in client.execute(batch) {
        assert_eq!(result, Ok(SliceReply::Done));
    }
    assert_eq!(ask(&mut client, SliceRequest::Flush), Ok(SliceReply::Done));
    for page in 0..64 {
        assert_eq!(ask(&mut client, read(page)), holds(99));
    }
}
