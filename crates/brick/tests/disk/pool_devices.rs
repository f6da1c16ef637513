//! Devices that join and leave the pool of a running brick.

use crate::disk::client::{Client, PAGE, SIZE, SLICE, open, random_write};
use pagemesh_base::layout::SliceId;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, SliceError, SliceReply, SliceRequest};
use pagemesh_brick::brick::Brick;
use pagemesh_brick::file;
use pagemesh_brick::pool_devices::{DeviceChange, DeviceStatus};
use pagemesh_pmem::DiskMedia;
use pagemesh_store::devices::DeviceState;
use rustix::fs::FlockOperation;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use uuid::Uuid;

pub const MIB: u64 = 1 << 20;
const FILLER: SliceId = SliceId(Uuid::from_u128(6));
/// Fewer than the slice's.
const FIRST_BYTES: u64 = 3 * MIB;
pub const DEVICE_BYTES: u64 = 6 * MIB;
/// Much longer than any step takes.
const LIMIT: Duration = Duration::from_secs(120);

pub struct SmallPool(TempDir);

impl SmallPool {
    pub fn new() -> SmallPool {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let home = SmallPool(directory);
        file::create(&home.path("pool"), FIRST_BYTES).expect("a pool on a disk");
        home
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

pub fn until(what: &str, mut is_done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_done() {
        assert!(began.elapsed() < LIMIT, "{what} takes too long");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn find(brick: &Brick<DiskMedia>, id: Uuid) -> Option<DeviceStatus> {
    brick.devices().into_iter().find(|device| device.id == id)
}

pub fn is_locked(path: &Path) -> bool {
    let file = File::open(path).expect("the file");
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
}

/// Writes every page of the slice, and the model.
pub fn fill(client: &mut Client, model: &mut [u8]) {
    for (page, bytes) in model.chunks_mut(PAGE as usize).enumerate() {
        bytes.fill(page as u8 | 1);
        let write = SliceRequest::Write {
            offset: page as u64 * PAGE,
            data: bytes.to_vec().into(),
            stamp: client.stamp(),
        };
        assert_eq!(client.execute(vec![write]), [Ok(SliceReply::Done)]);
    }
}

/// Writes pages until the pool is full.
fn fill_until_full(client: &mut Client) {
    for page in 0..SIZE / PAGE {
        let write = SliceRequest::Write {
            offset: page * PAGE,
            data: vec![7; PAGE as usize].into(),
            stamp: client.stamp(),
        };
        match client.execute(vec![write]).remove(0) {
            Ok(_) => {}
            Err(SliceError::NoSpace) => return,
            Err(cause) => panic!("{cause}"),
        }
    }
    panic!("the pool has room for the whole slice");
}

pub fn add(brick: &Brick<DiskMedia>, path: &Path) -> Uuid {
    let added = brick.add_device(path, Some(DEVICE_BYTES));
    added.expect("a device")
}

#[test]
fn pool_grows_by_a_device_and_drains_it() {
    let home = SmallPool::new();
    let (brick, _maintenance) = open(&home.path("pool"));
    brick.create(SLICE, SIZE).expect("a thin slice");
    let capacity = brick.status().expect("a status").capacity_bytes;
    let second = add(&brick, &home.path("second"));
    assert!(brick.status().expect("a status").capacity_bytes > capacity + DEVICE_BYTES / 2);
    assert!(is_locked(&home.path("second")));
    let mut client = Client::new(&brick, 1);
    let mut model = vec![0; SIZE as usize];
    fill(&mut client, &mut model);
    until("a checkpoint", || {
        find(&brick, second).expect("the device").used_bytes > 0
    });
    let third = add(&brick, &home.path("third"));
    brick.drain_device(second).expect("room on the third");
    let mut rng = SplitMix64::new(3);
    until("the drain", || {
        let write = random_write(&mut rng, &mut client, &mut model);
        assert_eq!(client.execute(vec![write]), [Ok(SliceReply::Done)]);
        find(&brick, second).is_none()
    });
    until("the unlock", || !is_locked(&home.path("second")));
    assert!(client.read_all() == model);
    let left = find(&brick, third).expect("the third device");
    assert_eq!((left.state, left.is_first), (DeviceState::Active, false));
    assert!(left.used_bytes > 0);
    assert_eq!(left.path, Some(home.path("third")));
    // Nothing keeps the device from joining another pool.
    let header = std::fs::read(home.path("second")).expect("the file");
    assert!(header[..8192].iter().all(|byte| *byte == 0));
}

#[test]
fn unsuitable_device_is_refused_with_a_way_out() {
    let home = SmallPool::new();
    let (brick, _maintenance) = open(&home.path("pool"));
    add(&brick, &home.path("member"));
    std::fs::write(home.path("taken"), b"text").expect("a file");
    let other = SmallPool::new();
    let refusal = |path: &Path, size: Option<u64>| {
        let refused = brick.add_device(path, size);
        refused.expect_err("it is unsuitable").to_string()
    };
    let size = Some(DEVICE_BYTES);
    for (path, size, words) in [
        (home.path("absent"), None, "does not exist"),
        (PathBuf::from("/dev/absent"), size, "does not exist"),
        (PathBuf::from("relative"), size, "not an absolute path"),
        (home.path("small"), Some(MIB), "at least 2M"),
        (home.path("member"), size, "of this pool already"),
        (home.path("pool"), size, "of this pool already"),
        (home.path("taken"), size, "exists"),
        (other.path("pool"), size, "holds a pagemesh pool"),
        (home.path("no/directory"), size, "cannot create"),
        (PathBuf::from("/dev/null"), size, "neither a block device"),
        (home.path("huge"), Some(1 << 60), "larger than 64T"),
    ] {
        let text = refusal(&path, size);
        assert!(text.contains(words), "{}: {text}", path.display());
    }
    assert_eq!(brick.devices().len(), 2);
    assert!(!home.path("small").exists() && !home.path("huge").exists());
}

#[test]
fn device_in_memory_is_refused_for_a_pool_on_a_disk() {
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
        return;
    };
    let home = SmallPool::new();
    let (brick, _maintenance) = open(&home.path("pool"));
    let path = memory.path().join("device");
    let refused = brick.add_device(&path, Some(DEVICE_BYTES));
    let text = refused.expect_err("it forgets").to_string();
    assert!(text.contains("loses its data"), "{text}");
    assert!(!path.exists());
}

#[test]
fn drain_that_is_impossible_is_refused() {
    let home = SmallPool::new();
    let (brick, _maintenance) = open(&home.path("pool"));
    brick.create(SLICE, SIZE).expect("a thin slice");
    let second = add(&brick, &home.path("second"));
    let mut client = Client::new(&brick, 1);
    let mut model = vec![0; SIZE as usize];
    fill(&mut client, &mut model);
    let refusal = |device| {
        let refused = brick.drain_device(device);
        refused.expect_err("impossible").to_string()
    };
    let text = refusal(second);
    assert!(text.contains("add a device, or delete something"), "{text}");
    let text = refusal(brick.id().0);
    assert!(text.contains("the first device"), "{text}");
    let text = refusal(Uuid::from_u128(1));
    assert!(text.contains("has no device"), "{text}");
    let state = find(&brick, second).expect("the device").state;
    assert_eq!(state, DeviceState::Active);
    assert!(client.read_all() == model);
}

#[test]
fn cancelled_drain_leaves_the_device_in_use() {
    let home = SmallPool::new();
    let (brick, _maintenance) = open(&home.path("pool"));
    brick.create(SLICE, SIZE).expect("a thin slice");
    let second = add(&brick, &home.path("second"));
    let mut client = Client::new(&brick, 1);
    let mut model = vec![0; SIZE as usize];
    fill(&mut client, &mut model);
    add(&brick, &home.path("third"));
    brick.drain_device(second).expect("room on the third");
    // The drain may have ended already: then there is nothing to cancel.
    if brick.cancel_drain(second).is_ok() {
        let found = find(&brick, second).expect("the device");
        assert_eq!((found.state, found.drain), (DeviceState::Active, None));
    }
    fill(&mut client, &mut model);
    assert!(client.read_all() == model);
}

#[test]
fn drain_continues_after_a_restart() {
    let home = SmallPool::new();
    let (brick, maintenance) = open(&home.path("pool"));
    brick.create(SLICE, SIZE).expect("a thin slice");
    let second = add(&brick, &home.path("second"));
    let mut client = Client::new(&brick, 1);
    let mut model = vec![0; SIZE as usize];
    fill(&mut client, &mut model);
    until("a checkpoint", || {
        find(&brick, second).expect("the device").used_bytes > 0
    });
    let third = add(&brick, &home.path("third"));
    // One step, and then a pause that only the end of the brick cuts short.
    brick.limit_drains(1);
    brick.drain_device(second).expect("room on the third");
    let moved = |brick: &Brick<DiskMedia>| {
        let found = find(brick, second).expect("the device").drain;
        found.expect("it drains").moved_bytes
    };
    until("a step", || moved(&brick) > 0);
    drop(client);
    maintenance.stop();
    drop(brick);
    until("the unlock", || !is_locked(&home.path("second")));
    let (brick, maintenance) = open(&home.path("pool"));
    let mut client = Client::new(&brick, 2);
    until("the drain", || find(&brick, second).is_none());
    assert!(client.read_all() == model);
    fill(&mut client, &mut model);
    assert!(client.read_all() == model);
    assert_eq!(brick.devices().len(), 2);
    assert_eq!(
        find(&brick, third).expect("the device").path,
        Some(home.path("third"))
    );
    until("the unlock", || !is_locked(&home.path("second")));
    // The next device has the second's place in the superblock, and pages behind the third's.
    add(&brick, &home.path("fourth"));
    drop(client);
    maintenance.stop();
    drop(brick);
    let (brick, _maintenance) = open(&home.path("pool"));
    assert!(Client::new(&brick, 3).read_all() == model);
    assert_eq!(brick.devices().len(), 3);
}

#[test]
fn drain_without_room_waits_and_says_so() {
    let home = SmallPool::new();
    let (brick, _maintenance) = open(&home.path("pool"));
    brick.create(SLICE, SIZE).expect("a thin slice");
    brick.create(FILLER, SIZE).expect("a thin slice");
    let second = add(&brick, &home.path("second"));
    let mut client = Client::new(&brick, 1);
    let mut model = vec![0; SIZE as usize];
    fill(&mut client, &mut model);
    until("a checkpoint", || {
        find(&brick, second).expect("the device").used_bytes > 0
    });
    let third = brick
        .add_device(&home.path("third"), Some(3 * MIB))
        .expect("a device");
    brick.limit_drains(1);
    brick.drain_device(second).expect("room on the third");
    // The room of the drain goes to another slice.
    let mut filler = Client::of_slice(&brick, FILLER, 1);
    fill_until_full(&mut filler);
    brick.limit_drains(u64::MAX);
    let problem = |brick: &Brick<DiskMedia>| find(brick, second)?.drain?.problem;
    until("the problem", || problem(&brick).is_some());
    assert!(problem(&brick).is_some_and(|text| text.contains("full")));
    drop(filler);
    brick.delete(FILLER).expect("deleted");
    until("the drain", || find(&brick, second).is_none());
    assert!(client.read_all() == model);
    assert!(find(&brick, third).is_some());
}

/// The outcome of a request that the thread of the devices carries out.
pub fn outcome_of(brick: &Arc<Brick<DiskMedia>>, change: DeviceChange) -> Result<Uuid, String> {
    let request = Uuid::new_v4();
    // The manager repeats requests.
    brick.request_device_change(request, change.clone());
    brick.request_device_change(request, change.clone());
    let mut outcome = None;
    until("a request", || {
        let results = brick.device_results().0;
        outcome = results.into_iter().find(|it| it.request == request);
        outcome.is_some()
    });
    brick.request_device_change(request, change);
    outcome.expect("a result").outcome
}

#[test]
fn repeated_request_is_carried_out_once() {
    let home = SmallPool::new();
    let (brick, maintenance) = open(&home.path("pool"));
    let path = home.path("second");
    let change = DeviceChange::Add {
        path: path.clone(),
        size_bytes: Some(DEVICE_BYTES),
    };
    let device = outcome_of(&brick, change.clone()).expect("a device");
    assert_eq!(brick.devices().len(), 2);
    let again = outcome_of(&brick, change).expect_err("it is there");
    assert!(again.contains("of this pool already"), "{again}");
    outcome_of(&brick, DeviceChange::Drain(device)).expect("it is empty");
    until("the drain", || brick.devices().len() == 1);
    until("the unlock", || !is_locked(&path));
    maintenance.stop();
}
