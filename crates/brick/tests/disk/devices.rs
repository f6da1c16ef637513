//! Pools on several devices: how their devices are found, locked and checked, and what happens when one fails.

use crate::disk::client::{
    Client, PAGE, Pool, SIZE, SLICE, add_device, open, options, random_write,
};
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, SliceReply, SliceRequest};
use pagemesh_brick::brick::{Brick, OpenedPool};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file::{self, FileError};
use pagemesh_brick::further_devices::FindDeviceError;
use pagemesh_brick::offline::open_offline;
use pagemesh_pmem::{
    DeviceFault, DevicePlan, Disk, DiskOptions, MappedMedia, PlannedRequest, RequestLimits,
    TieredMedia,
};
use pagemesh_store as store;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A pool of several devices with random content.
fn filled_pool(devices: usize) -> (Pool, Vec<u8>) {
    let home = Pool::with_devices(devices);
    let (brick, maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let mut client = Client::new(&brick, 1);
    let mut model = vec![0; SIZE as usize];
    let mut rng = SplitMix64::new(17);
    for _ in 0..900 {
        let write = random_write(&mut rng, &mut client, &mut model);
        assert_eq!(client.execute(vec![write]), [Ok(SliceReply::Done)]);
    }
    assert_eq!(
        client.execute(vec![SliceRequest::Flush]),
        [Ok(SliceReply::Done)]
    );
    drop(client);
    maintenance.stop();
    (home, model)
}

#[test]
fn missing_device_is_named_and_found_elsewhere() {
    let (home, model) = filled_pool(3);
    let (from, to) = (home.paths().remove(1), home.directory.path().join("moved"));
    std::fs::rename(&from, &to).expect("moved");
    let refused = Brick::open_disk(&home.path(), options())
        .err()
        .expect("a refusal");
    let said = refused.to_string();
    let is_missing = matches!(refused, FileError::Device(FindDeviceError::Missing { .. }));
    assert!(is_missing && said.contains("--device"), "{said}");
    assert!(said.contains(&from.display().to_string()), "{said}");
    // A file that is no device of the pool.
    let wrong = OpenOptions {
        devices: vec![home.path()],
        ..options()
    };
    let refused = Brick::open_disk(&home.path(), wrong)
        .err()
        .expect("a refusal");
    let is_wrong = matches!(
        refused,
        FileError::Device(FindDeviceError::NotOfPool { .. })
    );
    assert!(is_wrong, "{refused}");
    let named = OpenOptions {
        devices: vec![to],
        ..options()
    };
    let (brick, maintenance, _) = Brick::open_disk(&home.path(), named).expect("a brick");
    assert!(Client::new(&brick, 2).read_all() == model);
    // A checkpoint remembers the path.
    let mut client = Client::new(&brick, 3);
    let write = SliceRequest::Write {
        offset: 0,
        data: model[..PAGE as usize].to_vec().into(),
        stamp: client.stamp(),
    };
    assert_eq!(client.execute(vec![write]), [Ok(SliceReply::Done)]);
    drop(client);
    maintenance.stop();
    drop(brick);
    let (brick, _maintenance) = open(&home.path());
    assert!(Client::new(&brick, 4).read_all() == model);
}

#[test]
fn device_of_another_pool_is_not_taken() {
    let [(one, _), (other, _)] = [filled_pool(2), filled_pool(2)];
    let [here, there] = [&one, &other].map(|home| home.paths().remove(1));
    std::fs::copy(there, here).expect("replaced");
    let refused = Brick::open_disk(&one.path(), options())
        .err()
        .expect("a refusal");
    assert!(refused.to_string().contains("another device"), "{refused}");
}

#[test]
fn stale_copy_of_a_device_is_refused_by_its_path() {
    let (home, model) = filled_pool(2);
    let device = home.paths().remove(1);
    let [copy, pool_copy] = ["copy", "pool-copy"].map(|name| home.directory.path().join(name));
    std::fs::copy(&device, &copy).expect("a copy");
    std::fs::copy(home.path(), &pool_copy).expect("a copy");
    drop(open(&home.path()));
    let refused = |pool: &Path, device: &Path| {
        let named = OpenOptions {
            devices: vec![device.to_owned()],
            ..options()
        };
        let by_brick = Brick::open_disk(pool, named).err().expect("a refusal");
        let by_check = open_offline(pool, &[device.to_owned()]).err();
        let said = by_brick.to_string();
        assert_eq!(Some(&said), by_check.map(|it| it.to_string()).as_ref());
        said
    };
    let said = refused(&home.path(), &copy);
    let names = said.contains(&copy.display().to_string());
    assert!(names && said.contains("stale copy of device"), "{said}");
    // One opening later the device may be of a crash within an opening. Two openings later the pool's file is old.
    drop(open(&home.path()));
    let said = refused(&pool_copy, &device);
    assert!(said.contains("stale copy of the pool's first"), "{said}");
    let (brick, _maintenance) = open(&home.path());
    assert!(Client::new(&brick, 2).read_all() == model);
}

#[test]
fn unreadable_copy_of_a_header_is_written_again() {
    for bad in 0..2 {
        let (home, model) = filled_pool(2);
        let header = || {
            let mut image = home.images().remove(1);
            image.truncate(2 * PAGE as usize);
            image
        };
        let before = header();
        let plans = [DevicePlan::of_next_device(), DevicePlan::of_next_device()];
        let bytes = bad * PAGE..(bad + 1) * PAGE;
        plans[1].add(PlannedRequest::Read, bytes, u64::MAX, DeviceFault::Error(5));
        let (brick, maintenance) = open(&home.path());
        assert!(Client::new(&brick, 2).read_all() == model);
        assert!(!brick.has_failed() && plans[1].befallen() > 0);
        let after = header();
        let (one, other) = after.split_at(PAGE as usize);
        assert!(one == other && before != after, "copy {bad} is not new");
        maintenance.stop();
    }
}

#[test]
fn device_without_a_readable_header_is_refused() {
    let (home, model) = filled_pool(2);
    let plans = [DevicePlan::of_next_device(), DevicePlan::of_next_device()];
    let both = 0..2 * PAGE;
    plans[1].add(PlannedRequest::Read, both, u64::MAX, DeviceFault::Error(5));
    let refused = Brick::open_disk(&home.path(), options()).err();
    let said = refused.expect("a refusal").to_string();
    assert!(said.contains("--failed-device"), "{said}");
    let (brick, _maintenance) = open(&home.path());
    assert!(Client::new(&brick, 2).read_all() == model);
}

#[test]
fn devices_of_running_brick_are_locked() {
    let (home, _) = filled_pool(2);
    let (brick, maintenance) = open(&home.path());
    let second = File::open(home.paths().remove(1)).expect("the device");
    assert!(second.try_lock().is_err(), "the brick has no lock");
    drop(maintenance);
    drop(brick);
    second.try_lock().expect("free");
    let refused = Brick::open_disk(&home.path(), options())
        .err()
        .expect("a refusal");
    assert!(matches!(refused, FileError::InUse(_)), "{refused}");
}

#[test]
fn check_reads_all_devices() {
    let (home, model) = filled_pool(3);
    let check = || {
        let pool = open_offline(&home.path(), &[]).expect("a pool");
        pool.check(true, &mut |_, _| {}).expect("a check").0
    };
    let sound = check();
    assert!(sound.is_sound() && sound.pages > 900, "{sound:?}");
    // A page of the last device that is in use.
    let path = home.paths().remove(2);
    let mut image = std::fs::read(&path).expect("the device");
    let is_used = |page: &[u8]| model.chunks(PAGE as usize).any(|it| it == page);
    let start = file::read_superblock(&home.path())
        .expect("a pool")
        .geometry;
    let last = start.devices.iter().last().expect("a device");
    let frames = image
        .chunks_mut(PAGE as usize)
        .skip(last.head_len() / PAGE as usize);
    let used = frames.filter(|page| page.iter().any(|byte| *byte != 0) && is_used(page));
    let mut damaged = 0;
    for page in used {
        page[77] ^= 4;
        damaged += 1;
    }
    assert!(damaged > 0, "no page on the last device");
    std::fs::write(&path, image).expect("damaged");
    let found = check();
    assert!(!found.is_sound() && !found.findings.is_empty(), "{found:?}");
}

/// A request to the second device fails, and the brick ends. What was flushed is there after a restart.
fn check_failure_of_second(request: PlannedRequest, fault: DeviceFault) {
    let (home, mut model) = filled_pool(2);
    let plans = [DevicePlan::of_next_device(), DevicePlan::of_next_device()];
    let (brick, maintenance) = open(&home.path());
    let mut client = Client::new(&brick, 2);
    plans[1].add(request, 0..u64::MAX, u64::MAX, fault);
    let mut rng = SplitMix64::new(23);
    let mut next = model.clone();
    for _ in 0..2000 {
        let write = random_write(&mut rng, &mut client, &mut next);
        let results = client.execute(vec![write, SliceRequest::Flush]);
        if results[1].is_err() {
            break;
        }
        model.copy_from_slice(&next);
    }
    assert!(brick.has_failed() && plans[1].befallen() > 0);
    assert_eq!(plans[0].befallen(), 0);
    // The device works again, but what it holds is unknown.
    plans[1].clear();
    assert!(client.execute(vec![SliceRequest::Flush])[0].is_err());
    drop(client);
    drop((brick, maintenance));
    let (brick, _maintenance) = open(&home.path());
    let found = Client::new(&brick, 3).read_all();
    // The last write may be there, or a part of its pages.
    let pages = found.chunks(PAGE as usize).zip(model.chunks(PAGE as usize));
    let mut pages = pages.zip(next.chunks(PAGE as usize));
    assert!(pages.all(|((found, flushed), last)| found == flushed || found == last));
}

#[test]
fn failed_write_to_second_device_ends_brick() {
    check_failure_of_second(PlannedRequest::Write, DeviceFault::Error(5));
    check_failure_of_second(PlannedRequest::Write, DeviceFault::Short(512));
}

#[test]
fn failed_flush_of_second_device_ends_brick() {
    check_failure_of_second(PlannedRequest::Flush, DeviceFault::Error(5));
}

#[test]
fn memory_with_disk_behind_holds_what_the_model_holds() {
    let memory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let disks = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let path = memory.path().join("pool");
    file::create(&path, 4 << 20).expect("a pool");
    {
        let mut files = File::options();
        let file = files.read(true).write(true).open(&path).expect("the pool");
        let mapped = MappedMedia::new(file, 4 << 20).expect("a mapping");
        let options = DiskOptions {
            cache_bytes: 64 << 10,
            limits: RequestLimits::default(),
        };
        let disk = Arc::new(Disk::start(None, options).expect("a disk"));
        let media = Arc::new(TieredMedia::new(mapped, disk.data()));
        let (mut pool, _) = store::pool::Pool::open(media.clone(), media.clone()).expect("a pool");
        add_device(&mut pool, &media, &disks.path().join("disk"));
        pool.close().expect("closed");
    }
    let mut model = vec![0; SIZE as usize];
    let mut rng = SplitMix64::new(31);
    for turn in 1..=3 {
        let OpenedPool::Tiered((brick, _maintenance, _)) =
            OpenedPool::open(&path, options()).expect("a brick")
        else {
            panic!("no disk behind the memory");
        };
        if turn == 1 {
            brick.create(SLICE, SIZE).expect("room");
        }
        let mut client = Client::new(&brick, turn);
        assert!(client.read_all() == model, "opening {turn}");
        for round in 0..400 {
            let write = random_write(&mut rng, &mut client, &mut model);
            for result in client.execute(vec![write, SliceRequest::Flush]) {
                assert_eq!(result, Ok(SliceReply::Done), "round {round}");
            }
        }
        assert!(client.read_all() == model, "end of turn {turn}");
    }
    let disk = std::fs::read(disks.path().join("disk")).expect("the disk");
    let pages = disk.chunks(PAGE as usize);
    let written = pages.filter(|page| page.iter().any(|byte| *byte != 0));
    assert!(written.count() > 100, "the disk has no frame in use");
}

#[test]
fn device_in_an_older_place_is_attached_in_order() {
    let home = Pool::of_first_device(4);
    let [_, left, other, late] = home.paths().try_into().expect("four paths");
    home.with_store(|mut pool, media| {
        let id = add_device(&mut pool, media, &left);
        add_device(&mut pool, media, &other);
        pool.start_drain(id).expect("room on the other");
        assert!(pool.remove_device(id).expect("removed"));
        // It takes the first entry, and lies behind the other.
        add_device(&mut pool, media, &late);
        pool.close().expect("closed");
    });
    let geometry = file::read_superblock(&home.path())
        .expect("a pool")
        .geometry;
    let starts: Vec<_> = geometry.devices.iter().map(|it| it.first_page).collect();
    assert!(!starts.is_sorted(), "{starts:?}");
    let (brick, _maintenance) = open(&home.path());
    assert_eq!(brick.devices().len(), 3);
    drop(brick);
    drop(_maintenance);
    open_offline(&home.path(), &[]).expect("a pool");
}

#[test]
fn crash_within_a_removal_leaves_the_pool_openable() {
    const BLOCK: usize = PAGE as usize;
    let home = Pool::of_first_device(3);
    let [path, left, other] = home.paths().try_into().expect("three paths");
    let mut images = Vec::new();
    home.with_store(|mut pool, media| {
        let id = add_device(&mut pool, media, &left);
        add_device(&mut pool, media, &other);
        pool.start_drain(id).expect("room on the other");
        let before = std::fs::read(&path).expect("the pool");
        assert!(pool.remove_device(id).expect("removed"));
        // One superblock names the device that has left.
        for older in [0, BLOCK] {
            let mut image = std::fs::read(&path).expect("the pool");
            image[older..older + BLOCK].copy_from_slice(&before[older..older + BLOCK]);
            images.push(image);
        }
    });
    for image in images {
        std::fs::write(&path, image).expect("the state at the crash");
        let (brick, maintenance) = open(&path);
        assert_eq!(brick.devices().len(), 2);
        drop((brick, maintenance));
    }
}

#[test]
fn two_files_of_one_device_are_refused() {
    let (home, model) = filled_pool(2);
    let device = home.paths().remove(1);
    let [copy, link] = ["copy", "link"].map(|name| home.directory.path().join(name));
    std::fs::copy(&device, &copy).expect("a copy");
    std::os::unix::fs::symlink(&device, &link).expect("a link");
    let named = |paths: [&PathBuf; 2]| OpenOptions {
        devices: paths.map(PathBuf::clone).into(),
        ..options()
    };
    let refused = Brick::open_disk(&home.path(), named([&copy, &device]));
    let said = refused.err().expect("a refusal").to_string();
    assert!(said.contains("one is a copy"), "{said}");
    let opened = Brick::open_disk(&home.path(), named([&link, &device]));
    let (brick, _maintenance, _) = opened.expect("one file by two names");
    assert!(Client::new(&brick, 2).read_all() == model);
}

#[test]
fn only_files_and_block_devices_are_opened_by_paths() {
    let (home, _) = filled_pool(2);
    let (device, moved) = (home.paths().remove(1), home.directory.path().join("moved"));
    std::fs::rename(&device, &moved).expect("moved");
    std::os::unix::fs::symlink("/dev/null", &device).expect("a link");
    let refusal = || {
        let refused = Brick::open_disk(&home.path(), options());
        let refused = refused.err().expect("a refusal");
        let is_missing = matches!(refused, FileError::Device(FindDeviceError::Missing { .. }));
        assert!(is_missing, "{refused}");
        refused.to_string()
    };
    let said = refusal();
    assert!(said.contains("neither a block device"), "{said}");
    std::fs::remove_file(&device).expect("removed");
    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
    rustix::fs::mknodat(rustix::fs::CWD, &device, kind, mode, 0).expect("a FIFO");
    let said = refusal();
    assert!(said.contains("neither a block device"), "{said}");
    // A link to the device is as good as its path.
    std::fs::remove_file(&device).expect("removed");
    std::os::unix::fs::symlink(&moved, &device).expect("a link");
    open(&home.path());
}

/// Descriptors of this process that are open at a path.
fn descriptors_of(path: &Path) -> usize {
    let open = std::fs::read_dir("/proc/self/fd").expect("descriptors");
    let links = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| link == path).count()
}

#[test]
fn device_that_leaves_during_the_wait_is_not_taken() {
    let (home, _) = filled_pool(2);
    let device = home.paths().remove(1);
    let mut files = File::options();
    let holder = files.read(true).write(true).open(&device).expect("open");
    holder.try_lock().expect("free");
    let path = home.path();
    let opening = std::thread::spawn(move || {
        let opened = Brick::open_disk(&path, options());
        opened.err().map(|refused| refused.to_string())
    });
    // Its first look at the header is over, or about to be: the refusal is the same.
    while descriptors_of(&device) < 2 && !opening.is_finished() {
        std::thread::yield_now();
    }
    holder.write_all_at(&[0; 8192], 0).expect("cleared");
    holder.unlock().expect("unlocked");
    let said = opening.join().expect("no panic").expect("a refusal");
    assert!(said.contains("has no header of a device"), "{said}");
}
