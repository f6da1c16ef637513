//! Bricks that reach their pools by requests to a disk, with a small cache, against a simple model.

mod client;
mod device_failures;
mod devices;
mod failed_devices;
mod faults;
mod pool_devices;
mod power_cuts;
mod reopened;

use client::{Client, PAGE, Pool, SIZE, SLICE, open, open_all, options, random_write};
use pagemesh_base::ids::PageNo;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, SliceError, SliceReply, SliceRequest};
use pagemesh_brick::brick::Brick;
use pagemesh_brick::file::{self, FileError, NewPool, Preallocation};
use pagemesh_pmem::{Durability, StatedClass};
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

#[test]
fn disk_pool_holds_what_the_model_holds() {
    for devices in 1..=3 {
        check_histories(devices);
    }
}

fn check_histories(devices: usize) {
    let home = Pool::with_devices(devices);
    let mut model = vec![0; SIZE as usize];
    let mut rng = SplitMix64::new(7);
    for turn in 1..=4 {
        let (brick, _maintenance) = open(&home.path());
        if turn == 1 {
            brick.create(SLICE, SIZE).expect("room");
        }
        let mut client = Client::new(&brick, turn);
        assert!(client.read_all() == model, "opening {turn}");
        for round in 0..200 * devices {
            let write = random_write(&mut rng, &mut client, &mut model);
            let batch = match round % 5 {
                0 => vec![write, SliceRequest::Flush],
                _ => vec![write],
            };
            for result in client.execute(batch) {
                assert_eq!(result, Ok(SliceReply::Done), "round {round}");
            }
            let offset = rng.below(SIZE / PAGE - 4) * PAGE;
            let len = 4 * PAGE as u32;
            let read = client.execute(vec![SliceRequest::Read { offset, len }]);
            let expected = model[offset as usize..][..len as usize].to_vec();
            assert!(read == [Ok(SliceReply::Data(expected))], "round {round}");
        }
        assert!(client.read_all() == model, "end of turn {turn}");
    }
    for (number, image) in home.images().into_iter().enumerate() {
        let pages = image.chunks(PAGE as usize);
        let written = pages.filter(|page| page.iter().any(|byte| *byte != 0));
        assert!(written.count() > 100, "device {number} has no frame in use");
    }
}

#[test]
fn answered_write_is_on_the_disk() {
    for devices in [1, 3] {
        check_answered_writes(devices);
    }
}

fn check_answered_writes(devices: usize) {
    let home = Pool::with_devices(devices);
    let (brick, _maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let mut client = Client::new(&brick, 1);
    let mut model = vec![0; SIZE as usize];
    let mut rng = SplitMix64::new(11);
    for turn in 1..=6 {
        for _ in 0..40 {
            let write = random_write(&mut rng, &mut client, &mut model);
            assert_eq!(client.execute(vec![write]), [Ok(SliceReply::Done)]);
        }
        // A brick that starts after the kill of this one finds these files.
        let copies = home.named(&format!("killed-{turn}"));
        for (path, copy) in home.paths().iter().zip(&copies) {
            std::fs::copy(path, copy).expect("a copy");
        }
        let (restarted, _maintenance) = open_all(&copies);
        let mut reader = Client::new(&restarted, 1);
        assert!(reader.read_all() == model, "turn {turn}");
    }
}

#[test]
fn requests_of_a_batch_are_all_answered() {
    let home = Pool::new();
    let (brick, _maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let mut client = Client::new(&brick, 1);
    // Four times the cache in one batch, every page by itself.
    let write = |client: &mut Client, page: u64| SliceRequest::Write {
        offset: page * PAGE,
        data: vec![page as u8; PAGE as usize].into(),
        stamp: client.stamp(),
    };
    for _ in 0..10 {
        let batch: Vec<_> = (0..64).map(|page| write(&mut client, page)).collect();
        let results = client.execute(batch);
        assert!(
            results.iter().all(|it| *it == Ok(SliceReply::Done)),
            "{results:?}"
        );
        let read = |page| SliceRequest::Read {
            offset: page * PAGE,
            len: PAGE as u32,
        };
        let reads = client.execute((0..64).map(read).collect());
        for (page, read) in reads.into_iter().enumerate() {
            let expected = vec![page as u8; PAGE as usize];
            assert_eq!(read, Ok(SliceReply::Data(expected)), "page {page}");
        }
    }
}

#[test]
fn sessions_share_the_cache() {
    let home = Pool::new();
    let (brick, _maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let brick = brick.clone();
            std::thread::spawn(move || {
                let mut client = Client::new(&brick, 1);
                // Numbers of its own, and a quarter of the pages.
                client.ops += thread << 20;
                let mut rng = SplitMix64::new(thread);
                let mut fills = HashMap::new();
                for round in 0..200u64 {
                    let page = thread * 64 + rng.below(64);
                    let fill = (round % 251) as u8;
                    let write = SliceRequest::Write {
                        offset: page * PAGE,
                        data: vec![fill; PAGE as usize].into(),
                        stamp: client.stamp(),
                    };
                    assert_eq!(client.execute(vec![write]), [Ok(SliceReply::Done)]);
                    fills.insert(page, fill);
                }
                for (page, fill) in fills {
                    let read = SliceRequest::Read {
                        offset: page * PAGE,
                        len: PAGE as u32,
                    };
                    let expected = vec![fill; PAGE as usize];
                    assert_eq!(client.execute(vec![read]), [Ok(SliceReply::Data(expected))]);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic");
    }
}

#[test]
fn pool_in_memory_is_refused() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let path = directory.path().join("pool");
    file::create(&path, 16 << 20).expect("a pool");
    let refused = Brick::open_disk(&path, options()).err().expect("a refusal");
    assert!(
        matches!(
            refused,
            FileError::NoDisk {
                class: Durability::Process,
                ..
            }
        ),
        "{refused}"
    );
    // A class that was stated for a medium is no reason to refuse it.
    let path = directory.path().join("stated");
    let stated = StatedClass {
        class: Durability::FileSync,
        is_trusted: true,
    };
    file::create_with(
        &path,
        NewPool {
            stated: Some(stated),
            ..NewPool::of_size(16 << 20)
        },
        &mut |_, _| {},
    )
    .expect("a pool");
    Brick::open_disk(&path, options()).expect("a brick");
}

/// A file system reports unwritten blocks as holes.
#[test]
fn full_preallocation_writes_each_block_of_file() {
    const BYTES: u64 = 96 << 20;
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("pool");
    let mut written = Vec::new();
    file::create_with(
        &path,
        NewPool {
            preallocation: Preallocation::Full,
            ..NewPool::of_size(BYTES)
        },
        &mut |done, total| written.push((done, total)),
    )
    .expect("a pool");
    assert!(written.is_sorted());
    assert_eq!(written.last(), Some(&(BYTES, BYTES)));
    let pool = std::fs::File::open(&path).expect("the file");
    let hole = rustix::fs::seek(&pool, rustix::fs::SeekFrom::Hole(0)).expect("its end");
    assert_eq!(hole, BYTES);
    Brick::open_disk(&path, options()).expect("a brick");
}

/// A scrub of a volume compares what the disks hold, not what is cached.
#[test]
fn checksums_find_damage_below_cached_page() {
    let home = Pool::new();
    let (brick, _maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let mut client = Client::new(&brick, 1);
    let write = SliceRequest::Write {
        offset: 0,
        data: vec![0x5a; PAGE as usize].into(),
        stamp: client.stamp(),
    };
    let results = client.execute(vec![write, SliceRequest::Flush]);
    assert_eq!(results, [Ok(SliceReply::Done), Ok(SliceReply::Done)]);
    let sums = || SliceRequest::Checksums {
        page: PageNo(0),
        count: 1,
    };
    let sound = client.execute(vec![sums()]).remove(0);
    assert!(matches!(sound, Ok(SliceReply::Checksums(_))), "{sound:?}");
    let bytes = std::fs::read(home.path()).expect("the pool");
    let pages = bytes.chunks(PAGE as usize);
    let mut pages = pages
        .enumerate()
        .filter(|(_, page)| page.iter().all(|byte| *byte == 0x5a));
    let (number, _) = pages.next().expect("the page");
    let file = std::fs::File::options().write(true).open(home.path());
    let damage = file
        .expect("the pool")
        .write_all_at(&[1], number as u64 * PAGE);
    damage.expect("a flipped byte");
    let read = SliceRequest::Read {
        offset: 0,
        len: PAGE as u32,
    };
    let cached = client.execute(vec![read]).remove(0);
    assert_eq!(cached, Ok(SliceReply::Data(vec![0x5a; PAGE as usize])));
    let damaged = client.execute(vec![sums()]).remove(0);
    assert_eq!(damaged, Err(SliceError::Damaged { offset: 0 }));
}

/// The journals and tables of a running brick are in memory: its scrub restores them on the disk.
#[test]
fn scrub_rewrites_lines_that_differ_on_disk() {
    let home = Pool::new();
    let (brick, _maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let mut client = Client::new(&brick, 1);
    let mut model = vec![0; SIZE as usize];
    let mut rng = SplitMix64::new(5);
    let write = random_write(&mut rng, &mut client, &mut model);
    let results = client.execute(vec![write, SliceRequest::Flush]);
    assert_eq!(results, [Ok(SliceReply::Done), Ok(SliceReply::Done)]);
    // Nothing is left to write: the writer would restore a page that has changed.
    while brick.maintain() {}
    let flushed = client.execute(vec![SliceRequest::Flush]);
    assert_eq!(flushed, [Ok(SliceReply::Done)]);
    let geometry = *brick.mapping().geometry();
    let mut options = std::fs::File::options();
    let opened = options.read(true).write(true).open(home.path());
    let file = opened.expect("the pool");
    let places = [geometry.bitmap.start + 9, geometry.journal_region.start + 7];
    let byte_at = |at| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("a byte");
        byte[0]
    };
    let before = places.map(byte_at);
    for (at, byte) in places.into_iter().zip(before) {
        file.write_all_at(&[byte ^ 16], at).expect("a flipped bit");
    }
    brick.start_scrub(Instant::now());
    let end = Instant::now() + Duration::from_secs(60);
    let found = loop {
        if let Some((found, _)) = brick.scrub_status(Instant::now()).last {
            break found;
        }
        assert!(Instant::now() < end, "no scrub has run");
        std::thread::yield_now();
    };
    assert_eq!((found.bitmap_lines, found.records), (1, 1), "{found:?}");
    assert_eq!((found.corrected(), found.damaged), (2, 0), "{found:?}");
    assert_eq!(places.map(byte_at), before);
    assert!(client.read_all() == model);
}
