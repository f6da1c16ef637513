//! A further device fails while a brick writes, and is lost: the pool goes on without it.

use crate::disk::client::{Client, PAGE, Pool, SIZE, SLICE, open, options, random_write};
use crate::disk::pool_devices::{DEVICE_BYTES, SmallPool, fill, find, until};
use pagemesh_base::layout::SliceId;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, SliceError, SliceReply, SliceRequest};
use pagemesh_brick::brick::Brick;
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file;
use pagemesh_brick::offline::open_offline;
use pagemesh_pmem::DevicePlan;
use pagemesh_store::devices::DeviceState;
use uuid::Uuid;

const EIO: i32 = 5;
/// A slice with page tables on the second device, because another slice has filled the first.
const LATER: SliceId = SliceId(Uuid::from_u128(8));

/// The knowledge that a client has of a slice on a pool with a lost device.
struct LostDevice {
    home: Pool,
    device: Uuid,
    /// The bytes that were flushed last, and those with the writes after them.
    flushed: Vec<u8>,
    written: Vec<u8>,
}

/// Rounds before the second device fails.
const FAILED_AFTER: u32 = 900;

/// Writes until the second device fails with all its requests, and removes its file.
fn lose_second_device() -> LostDevice {
    let home = Pool::with_devices(2);
    let plans = [DevicePlan::of_next_device(), DevicePlan::of_next_device()];
    let (brick, maintenance) = open(&home.path());
    brick.create(SLICE, SIZE).expect("room");
    let mut client = Client::new(&brick, 1);
    let mut written = vec![0; SIZE as usize];
    let mut rng = SplitMix64::new(41);
    let mut flushed = written.clone();
    let mut is_over = false;
    for round in 0..3000u32 {
        if round == FAILED_AFTER {
            plans[1].fail_all(EIO);
        }
        let write = random_write(&mut rng, &mut client, &mut written);
        let results = client.execute(vec![write, SliceRequest::Flush]);
        if results[1].is_err() {
            is_over = true;
            break;
        }
        // A part of a page needs the rest of it, which the device may refuse before any write does.
        let is_refused = matches!(results[0], Err(SliceError::Damaged { .. }));
        if is_refused && round >= FAILED_AFTER {
            written.copy_from_slice(&flushed);
            continue;
        }
        assert_eq!(results[0], Ok(SliceReply::Done));
        flushed.copy_from_slice(&written);
    }
    assert!(is_over && brick.has_failed() && plans[1].befallen() > 0);
    drop(client);
    drop((brick, maintenance));
    plans[1].clear();
    let geometry = file::read_superblock(&home.path())
        .expect("a pool")
        .geometry;
    let device = geometry.devices.iter().next().expect("a device").id;
    std::fs::remove_file(home.paths().remove(1)).expect("removed");
    LostDevice {
        home,
        device,
        flushed,
        written,
    }
}

fn without(device: Uuid) -> OpenOptions {
    OpenOptions {
        failed_devices: vec![device],
        ..options()
    }
}

/// Reads each page. It is as it was flushed or written last, or damaged. Returns the damaged ones.
fn damaged_pages(client: &mut Client, lost: &LostDevice) -> Vec<u64> {
    let mut damaged = Vec::new();
    for page in 0..SIZE / PAGE {
        let read = SliceRequest::Read {
            offset: page * PAGE,
            len: PAGE as u32,
        };
        let range = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
        match client.execute(vec![read]).remove(0) {
            Ok(SliceReply::Data(found)) => {
                let is_known = found == lost.flushed[range.clone()] || found == lost.written[range];
                assert!(is_known, "page {page} is older than its flush");
            }
            Err(SliceError::Damaged { .. }) => damaged.push(page),
            other => panic!("page {page}: {other:?}"),
        }
    }
    damaged
}

/// Writes pages as the volume engine repairs them from another copy.
fn repair(client: &mut Client, pages: &[u64], bytes: &[u8]) {
    for &page in pages {
        let range = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
        let write = SliceRequest::Write {
            offset: page * PAGE,
            data: bytes[range].to_vec().into(),
            stamp: client.stamp(),
        };
        let results = client.execute(vec![write]);
        assert_eq!(results, [Ok(SliceReply::Done)]);
    }
}

#[test]
fn pool_goes_on_without_a_lost_device() {
    let lost = lose_second_device();
    let path = lost.home.path();
    let refused = Brick::open_disk(&path, options()).err().expect("a refusal");
    let way_out = format!("--failed-device {}", lost.device);
    assert!(refused.to_string().contains(&way_out), "{refused}");
    let unknown = Brick::open_disk(&path, without(Uuid::from_u128(9)));
    let said = unknown.err().expect("a refusal").to_string();
    assert!(said.contains(&way_out), "{said}");
    let opened = Brick::open_disk(&path, without(lost.device));
    let (brick, maintenance, _) = opened.expect("a brick");
    let mut client = Client::new(&brick, 2);
    let damaged = damaged_pages(&mut client, &lost);
    let pages = (SIZE / PAGE) as usize;
    assert!((10..pages - 10).contains(&damaged.len()), "{damaged:?}");
    let status = find(&brick, lost.device).expect("it is listed");
    assert_eq!((status.state, status.drain), (DeviceState::Failed, None));
    // The pool gets room, and its pages are repaired there.
    let other = lost.home.directory.path().join("other");
    let added = brick.add_device(&other, Some(3 << 20));
    added.expect("a new device");
    repair(&mut client, &damaged, &lost.flushed);
    assert_eq!(damaged_pages(&mut client, &lost), []);
    let flushed = client.execute(vec![SliceRequest::Flush]);
    assert_eq!(flushed, [Ok(SliceReply::Done)]);
    // No later opening needs the device.
    drop(client);
    maintenance.stop();
    drop(brick);
    let check = open_offline(&path, &[]).expect("a pool");
    let report = check.check(true, &mut |_, _| {}).expect("a check").0;
    assert!(report.is_sound(), "{report:?}");
    drop(check);
    let (brick, maintenance) = open(&path);
    let mut client = Client::new(&brick, 3);
    assert_eq!(damaged_pages(&mut client, &lost), []);
    brick.drain_device(lost.device).expect("it leaves");
    until("the end of the failed device", || {
        find(&brick, lost.device).is_none()
    });
    drop(client);
    maintenance.stop();
    drop(brick);
    let (brick, _maintenance) = open(&path);
    assert_eq!(brick.devices().len(), 2);
    assert_eq!(damaged_pages(&mut Client::new(&brick, 4), &lost), []);
}

#[test]
fn present_device_is_not_taken_for_failed() {
    let home = Pool::with_devices(2);
    let path = home.path();
    let block = file::read_superblock(&path).expect("a pool");
    let device = block.geometry.devices.iter().next().expect("a device").id;
    let refused = Brick::open_disk(&path, without(device)).err();
    let said = refused.expect("a refusal").to_string();
    let second = home.paths().remove(1);
    assert!(said.contains(&second.display().to_string()), "{said}");
    // At another path, the operator may name it.
    let moved = home.directory.path().join("moved");
    std::fs::rename(&second, &moved).expect("moved");
    let named = OpenOptions {
        devices: vec![moved.clone()],
        ..without(device)
    };
    let refused = Brick::open_disk(&path, named).err();
    let said = refused.expect("a refusal").to_string();
    assert!(said.contains(&moved.display().to_string()), "{said}");
    let opened = Brick::open_disk(&path, without(device));
    drop(opened.expect("a brick"));
    // The pool calls it failed now.
    std::fs::rename(&moved, &second).expect("back");
    drop(Brick::open_disk(&path, without(device)).expect("a brick"));
}

#[test]
fn failed_device_with_pages_stays_and_says_why() {
    let lost = lose_second_device();
    let opened = Brick::open_disk(&lost.home.path(), without(lost.device));
    let (brick, _maintenance, _) = opened.expect("a brick");
    brick.drain_device(lost.device).expect("asked");
    let problem = || find(&brick, lost.device)?.drain?.problem;
    until("the reason", || problem().is_some());
    let text = problem().expect("a reason");
    assert!(text.contains("cannot be read"), "{text}");
    let refused = brick.cancel_drain(lost.device).expect_err("it has failed");
    assert!(refused.to_string().contains("has failed"), "{refused}");
    assert!(!brick.has_failed());
    // The device comes back, and is not used.
    let status = find(&brick, lost.device).expect("it is listed");
    assert_eq!(status.state, DeviceState::Failed);
}

#[test]
fn brick_replaces_page_tables_of_a_lost_device() {
    let home = SmallPool::new();
    let (brick, maintenance) = open(&home.path("pool"));
    let second = brick.add_device(&home.path("second"), Some(2 * DEVICE_BYTES));
    let second = second.expect("a device");
    let mut model = vec![0; SIZE as usize];
    for slice in [SLICE, LATER] {
        brick.create(slice, SIZE).expect("a thin slice");
        let mut client = Client::of_slice(&brick, slice, 1);
        fill(&mut client, &mut model);
        let flushed = client.execute(vec![SliceRequest::Flush]);
        assert_eq!(flushed, [Ok(SliceReply::Done)]);
    }
    maintenance.stop();
    drop(brick);
    std::fs::remove_file(home.path("second")).expect("removed");
    let opened = Brick::open_disk(&home.path("pool"), without(second));
    let (brick, _maintenance, _) = opened.expect("a brick");
    let mut client = Client::of_slice(&brick, LATER, 2);
    let mut write = |page: u64| {
        let range = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
        let write = SliceRequest::Write {
            offset: page * PAGE,
            data: model[range].to_vec().into(),
            stamp: client.stamp(),
        };
        client.execute(vec![write]).remove(0)
    };
    // The first device is full, or has room for some nodes.
    let third = home.path("third");
    let added = brick.add_device(&third, Some(3 * DEVICE_BYTES));
    added.expect("a new device");
    for page in 0..SIZE / PAGE {
        until("the replacement of nodes", || match write(page) {
            Ok(_) => true,
            Err(SliceError::Damaged { .. }) => false,
            Err(cause) => panic!("{cause}"),
        });
    }
    assert!(client.read_all() == model);
    drop(client);
    fill(&mut Client::of_slice(&brick, SLICE, 2), &mut model);
    brick.drain_device(second).expect("it leaves");
    until("the end of the failed device", || {
        find(&brick, second).is_none()
    });
    for slice in [SLICE, LATER] {
        assert!(Client::of_slice(&brick, slice, 3).read_all() == model);
    }
}
