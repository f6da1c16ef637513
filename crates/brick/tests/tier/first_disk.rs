//! The first disk behind a pool in memory: the brick ends, and its pool is opened again with the disk.

use super::client::{Client, SLICE};
use super::{MEMORY_PAGES, is_sound, read_page, write_page};
use pagemesh_base::slice::BrickControl;
use pagemesh_brick::brick::{Brick, MaintenanceThread, OpenedPool};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file;
use pagemesh_brick::pool_devices::{DeviceChange, DeviceChangeResult, FirstDisk};
use pagemesh_pmem::{MappedMedia, Media, TieredMedia};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use uuid::Uuid;

const MEMORY_BYTES: u64 = MEMORY_PAGES * 4096;
const DISK_BYTES: u64 = 64 << 20;
/// More pages than memory has.
const PAGES: u64 = 2 * MEMORY_PAGES;
/// Pages before the disk joins.
const EARLY_PAGES: u64 = MEMORY_PAGES / 2;
const LIMIT: Duration = Duration::from_mins(1);

struct Home {
    memory: TempDir,
    disk: TempDir,
}

impl Home {
    fn new() -> Option<Home> {
        let home = Home {
            memory: tempfile::tempdir_in("/dev/shm").ok()?,
            disk: tempfile::tempdir_in("/var/tmp").expect("a directory"),
        };
        file::create(&home.pool(), MEMORY_BYTES).expect("a pool in memory");
        Some(home)
    }

    fn pool(&self) -> PathBuf {
        self.memory.path().join("pool")
    }

    fn disk(&self) -> PathBuf {
        self.disk.path().join("disk")
    }

    fn add(&self) -> DeviceChange {
        DeviceChange::Add {
            path: self.disk(),
            size_bytes: Some(DISK_BYTES),
        }
    }

    fn open_mapped(&self) -> (Arc<Brick>, MaintenanceThread, Receiver<()>) {
        let opened = OpenedPool::open(&self.pool(), options()).expect("a brick");
        let OpenedPool::Mapped((brick, maintenance, _)) = opened else {
            panic!("the pool has a disk");
        };
        let (tell, asked) = mpsc::channel();
        brick.on_first_disk(move || tell.send(()).expect("the test waits"));
        (brick, maintenance, asked)
    }
}

fn options() -> OpenOptions {
    OpenOptions {
        memory_budget: 4 << 20,
        ..OpenOptions::default()
    }
}

fn result_of<M: Media + Send + Sync + 'static>(
    brick: &Arc<Brick<M>>,
    request: Uuid,
) -> DeviceChangeResult {
    let end = Instant::now() + LIMIT;
    loop {
        let (results, _) = brick.device_results();
        if let Some(found) = results.into_iter().find(|it| it.request == request) {
            return found;
        }
        assert!(Instant::now() < end, "the request has no result");
        std::thread::yield_now();
    }
}

/// Ends a brick in memory, and opens its pool for a disk.
fn reopen(
    home: &Home,
    brick: Arc<Brick>,
    maintenance: MaintenanceThread<MappedMedia>,
    first: FirstDisk,
) -> (Arc<Brick<TieredMedia>>, MaintenanceThread<TieredMedia>) {
    let claim = brick.keep_away(&home.pool()).expect("a handle");
    let ended = Arc::downgrade(&brick);
    maintenance.stop();
    drop(brick);
    assert!(
        OpenedPool::open(&home.pool(), options()).is_err(),
        "the lock is kept"
    );
    let opened = Brick::reopen_for_disk(&home.pool(), &options(), &ended, claim, first);
    let (brick, maintenance, recovered) = opened.expect("a brick");
    assert_eq!(recovered.damaged, 0);
    (brick, maintenance)
}

#[test]
fn memory_pool_gets_its_first_disk_in_the_process() {
    let Some(home) = Home::new() else {
        return;
    };
    let (brick, maintenance, asked) = home.open_mapped();
    brick.create(SLICE, PAGES * 4096).expect("room");
    let mut client = Client::new(&brick, 1);
    (0..EARLY_PAGES).for_each(|page| write_page(&mut client, page, 1));
    // An earlier result, which the manager may not have.
    let drain = Uuid::from_u128(1);
    brick.request_device_change(drain, DeviceChange::Drain(Uuid::from_u128(77)));
    let refused = result_of(&brick, drain);
    let add = Uuid::from_u128(2);
    (0..3).for_each(|_| brick.request_device_change(add, home.add()));
    asked.recv_timeout(LIMIT).expect("the brick asks for it");
    brick.request_device_change(add, home.add());
    let first = brick.take_first_disk().expect("the request");
    assert!(brick.take_first_disk().is_none());
    // Until then the brick serves, and nothing is left at the path.
    write_page(&mut client, 0, 2);
    assert!(!home.disk().exists());
    drop(client);
    let (brick, maintenance) = reopen(&home, brick, maintenance, first);
    let added = result_of(&brick, add).outcome.expect("it has joined");
    assert_eq!(result_of(&brick, drain), refused);
    assert!(brick.devices().iter().any(|it| it.id == added));
    let mut client = Client::new(&brick, 2);
    (EARLY_PAGES..PAGES).for_each(|page| write_page(&mut client, page, 1));
    let check = |client: &mut Client<TieredMedia>| {
        for page in 0..PAGES {
            let version = if page == 0 { 2 } else { 1 };
            assert!(
                is_sound(page, version, &read_page(client, page)),
                "page {page}"
            );
        }
    };
    check(&mut client);
    // Memory has no room for all.
    assert!(brick.drain_device(added).is_err());
    drop(client);
    maintenance.stop();
    drop(brick);
    let OpenedPool::Tiered((brick, _maintenance, _)) =
        OpenedPool::open(&home.pool(), options()).expect("a brick")
    else {
        panic!("the pool has no disk");
    };
    check(&mut Client::new(&brick, 3));
}

#[test]
fn refused_first_disk_leaves_brick_open() {
    let Some(home) = Home::new() else {
        return;
    };
    let (brick, _maintenance, asked) = home.open_mapped();
    std::fs::write(home.disk(), "data").expect("a file");
    let add = Uuid::from_u128(2);
    brick.request_device_change(add, home.add());
    let refused = result_of(&brick, add).outcome;
    assert!(refused.is_err_and(|text| text.contains("exists")));
    assert!(brick.take_first_disk().is_none() && asked.try_recv().is_err());
    assert_eq!(std::fs::read(home.disk()).expect("a file"), b"data");
}

#[test]
fn first_disk_leaves_once_memory_has_room() {
    let Some(home) = Home::new() else {
        return;
    };
    let (brick, maintenance, asked) = home.open_mapped();
    brick.create(SLICE, PAGES * 4096).expect("room");
    brick.request_device_change(Uuid::from_u128(2), home.add());
    asked.recv_timeout(LIMIT).expect("the brick asks for it");
    let first = brick.take_first_disk().expect("the request");
    let (brick, _maintenance) = reopen(&home, brick, maintenance, first);
    let added = result_of(&brick, Uuid::from_u128(2)).outcome;
    let added = added.expect("it has joined");
    brick.limit_drains(u64::MAX);
    let mut client = Client::new(&brick, 1);
    (0..PAGES).for_each(|page| write_page(&mut client, page, 1));
    let clear = pagemesh_base::slice::SliceRequest::Clear {
        offset: EARLY_PAGES * 4096,
        len: (PAGES - EARLY_PAGES) * 4096,
        stamp: client.stamp(),
    };
    client.execute(clear).expect("cleared");
    let end = Instant::now() + LIMIT;
    while brick.drain_device(added).is_err() {
        assert!(Instant::now() < end, "memory has no room");
        std::thread::sleep(Duration::from_millis(5));
    }
    while brick.devices().len() > 1 {
        assert!(Instant::now() < end, "{:?}", brick.devices());
        std::thread::sleep(Duration::from_millis(5));
    }
    for page in 0..EARLY_PAGES {
        assert!(
            is_sound(page, 1, &read_page(&mut client, page)),
            "page {page}"
        );
    }
}
