//! Devices that fail while they join or leave a pool, and devices that may not join.

use crate::disk::client::{Client, PAGE, SIZE, SLICE, open};
use crate::disk::pool_devices::{
    DEVICE_BYTES, MIB, SmallPool, add, fill, find, is_locked, outcome_of, until,
};
use crate::skip;
use pagemesh_base::slice::{BrickControl, SliceReply, SliceRequest};
use pagemesh_brick::brick::Brick;
use pagemesh_brick::file;
use pagemesh_brick::pool_devices::DeviceChange;
use pagemesh_pmem::{DeviceFault, DevicePlan, DiskMedia, PlannedRequest};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use uuid::Uuid;

const EIO: i32 = 5;
/// More than the head of a device of these tests has.
const HEAD_BYTES: u64 = 128 << 10;

fn problem(brick: &Brick<DiskMedia>, device: Uuid) -> Option<String> {
    find(brick, device)?.drain?.problem
}

/// A full slice that has pages on a device, whose requests have a plan.
struct FilledDevice {
    brick: Arc<Brick<DiskMedia>>,
    client: Client,
    model: Vec<u8>,
    device: Uuid,
    plan: Arc<DevicePlan>,
    _maintenance: pagemesh_brick::brick::MaintenanceThread<DiskMedia>,
}

impl FilledDevice {
    fn new(home: &SmallPool) -> FilledDevice {
        let (brick, maintenance) = open(&home.path("pool"));
        brick.create(SLICE, SIZE).expect("a thin slice");
        let plan = DevicePlan::of_next_device();
        let device = add(&brick, &home.path("second"));
        let mut client = Client::new(&brick, 1);
        let mut model = vec![0; SIZE as usize];
        fill(&mut client, &mut model);
        let flushed = client.execute(vec![SliceRequest::Flush]);
        assert_eq!(flushed, [Ok(SliceReply::Done)]);
        let is_used = || find(&brick, device).is_some_and(|it| it.used_bytes > MIB / 2);
        until("a checkpoint", is_used);
        add(&brick, &home.path("third"));
        FilledDevice {
            brick,
            client,
            model,
            device,
            plan,
            _maintenance: maintenance,
        }
    }

    fn break_reads(&self, bytes: Range<u64>) {
        let fault = DeviceFault::Error(EIO);
        self.plan.add(PlannedRequest::Read, bytes, u64::MAX, fault);
    }

    /// As the volume engine repairs pages from another copy.
    fn repair(&mut self) {
        fill(&mut self.client, &mut self.model);
    }
}

/// The first page of frames with data, as a place on the device.
fn place_with_data(path: &Path) -> u64 {
    let bytes = std::fs::read(path).expect("the device");
    let pages = bytes.chunks(PAGE as usize).enumerate();
    let is_data = |page: &[u8]| page[0] != 0 && page.iter().all(|byte| *byte == page[0]);
    let found = pages.skip((HEAD_BYTES / PAGE) as usize);
    let found = found.filter(|(_, page)| is_data(page)).nth(1);
    found.expect("a page of data").0 as u64 * PAGE
}

#[test]
fn drain_goes_on_once_a_page_was_repaired() {
    let home = SmallPool::new();
    let mut filled = FilledDevice::new(&home);
    let place = place_with_data(&home.path("second"));
    filled.break_reads(place..place + PAGE);
    let device = filled.device;
    filled.brick.drain_device(device).expect("room elsewhere");
    until("the problem", || problem(&filled.brick, device).is_some());
    filled.repair();
    until("the drain", || find(&filled.brick, device).is_none());
    assert!(filled.client.read_all() == filled.model);
    assert!(!filled.brick.has_failed());
}

#[test]
fn drain_of_a_dying_disk_stops_before_it_fails() {
    let home = SmallPool::new();
    let mut filled = FilledDevice::new(&home);
    filled.break_reads(HEAD_BYTES..DEVICE_BYTES);
    let device = filled.device;
    filled.brick.drain_device(device).expect("room elsewhere");
    until("the problem", || {
        problem(&filled.brick, device).is_some() || filled.brick.has_failed()
    });
    assert!(!filled.brick.has_failed(), "the drain has failed the disk");
    let text = problem(&filled.brick, device).expect("a sentence");
    assert!(text.contains("cannot be read"), "{text}");
    filled.repair();
    until("the drain", || find(&filled.brick, device).is_none());
    assert!(filled.client.read_all() == filled.model);
}

#[test]
fn failed_superblock_leaves_a_pool_that_opens() {
    // The first superblock that is written fails, or only the second: then the first names the device.
    let mut counts = [0, 1].map(devices_after_failed_superblock);
    counts.sort_unstable();
    assert_eq!(counts, [1, 2]);
}

/// The devices of a pool after its brick failed to write a superblock while a device joined.
fn devices_after_failed_superblock(page: u64) -> usize {
    let home = SmallPool::new();
    let plan = DevicePlan::of_next_device();
    let (brick, maintenance) = open(&home.path("pool"));
    let bytes = page * PAGE..(page + 1) * PAGE;
    let fault = DeviceFault::Error(EIO);
    plan.add(PlannedRequest::Write, bytes, u64::MAX, fault);
    let added = brick.add_device(&home.path("second"), Some(DEVICE_BYTES));
    assert!(added.is_err(), "{added:?}");
    assert!(brick.has_failed());
    plan.clear();
    maintenance.stop();
    drop(brick);
    until("the unlock", || !is_locked(&home.path("pool")));
    let (brick, _maintenance) = open(&home.path("pool"));
    brick.devices().len()
}

#[test]
fn path_without_room_in_the_superblock_is_refused() {
    let home = SmallPool::new();
    let (brick, _maintenance) = open(&home.path("pool"));
    let mut directory = home.path("long");
    for _ in 0..4 {
        directory.push("x".repeat(200));
    }
    std::fs::create_dir_all(&directory).expect("a directory");
    let path = directory.join("device");
    let refused = brick.add_device(&path, Some(DEVICE_BYTES));
    let text = refused.expect_err("no room").to_string();
    assert!(text.contains("shorter path"), "{text}");
    assert!(!path.exists());
    assert_eq!(brick.devices().len(), 1);
}

#[test]
fn relative_path_of_a_pool_is_reported_as_absolute() {
    let home = SmallPool::new();
    let up = std::env::current_dir().expect("a directory");
    let up = up.components().skip(1).map(|_| "..");
    let root: PathBuf = up.collect();
    let pool = home.path("pool");
    let (brick, _maintenance) = open(&root.join(pool.strip_prefix("/").expect("absolute")));
    let path = brick.devices().remove(0).path.expect("its path");
    assert!(path.is_absolute(), "{}", path.display());
}

fn run(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output().expect(program);
    assert!(out.status.success(), "{program} {args:?}: {out:?}");
    String::from_utf8(out.stdout).expect("text").trim().into()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// A loop device over a file.
struct LoopDevice {
    path: PathBuf,
    has_partitions: bool,
}

impl LoopDevice {
    /// None without permission to create one.
    fn new(below: &Path) -> Option<LoopDevice> {
        if !nix::unistd::geteuid().is_root() {
            skip::skip("loop devices are made by root");
            return None;
        }
        let path = run("losetup", &["--find", "--show", text(below)]);
        Some(LoopDevice {
            path: path.into(),
            has_partitions: false,
        })
    }

    /// Has the kernel read its partitions. Returns a node of the first one.
    fn partition(&mut self, node: PathBuf) -> PathBuf {
        run("partx", &["--add", text(&self.path)]);
        self.has_partitions = true;
        let name = self.path.file_name().expect("a name");
        let name = name.to_str().expect("text");
        let numbers = std::fs::read_to_string(format!("/sys/block/{name}/{name}p1/dev"));
        let numbers = numbers.expect("the partition");
        let (major, minor) = numbers.trim().split_once(':').expect("two numbers");
        run("mknod", &[text(&node), "b", major, minor]);
        node
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if self.has_partitions {
            let mut partx = Command::new("partx");
            let _ = partx.arg("--delete").arg(&self.path).status();
        }
        let mut losetup = Command::new("losetup");
        let _ = losetup.arg("--detach").arg(&self.path).status();
    }
}

/// A file of 16 MiB with a partition of all but the first MiB.
fn partitioned(path: &Path) {
    let mut bytes = vec![0; 512];
    bytes[446 + 4] = 0x83;
    bytes[446 + 8..446 + 12].copy_from_slice(&2048u32.to_le_bytes());
    bytes[446 + 12..446 + 16].copy_from_slice(&(15u32 * 2048).to_le_bytes());
    bytes[510..].copy_from_slice(&[0x55, 0xaa]);
    std::fs::write(path, bytes).expect("a file");
    let file = std::fs::File::options().write(true).open(path);
    file.and_then(|file| file.set_len(16 * MIB))
        .expect("its length");
}

#[test]
fn disk_with_partitions_is_refused() {
    let home = SmallPool::new();
    partitioned(&home.path("below"));
    let Some(mut device) = LoopDevice::new(&home.path("below")) else {
        return;
    };
    let partition = device.partition(home.path("partition"));
    file::create(&partition, 8 * MIB).expect("a pool");
    let other = SmallPool::new();
    let (brick, _maintenance) = open(&other.path("pool"));
    let refused = brick.add_device(&device.path, None);
    let said = refused.expect_err("it has partitions").to_string();
    assert!(said.contains("partition"), "{said}");
    file::read_superblock(&partition).expect("the pool is still there");
}

#[test]
fn block_devices_in_use_are_claimed_from_the_kernel() {
    use std::os::unix::fs::OpenOptionsExt;
    let home = SmallPool::new();
    for name in ["first", "further"] {
        let made = std::fs::File::create(home.path(name));
        made.and_then(|file| file.set_len(8 * MIB)).expect("a file");
    }
    let Some(first) = LoopDevice::new(&home.path("first")) else {
        return;
    };
    let further = LoopDevice::new(&home.path("further")).expect("root");
    file::create(&first.path, 8 * MIB).expect("a pool");
    let exclusive = |path: &Path| {
        let mut options = std::fs::File::options();
        let opened = options
            .read(true)
            .custom_flags(nix::libc::O_EXCL)
            .open(path);
        opened.map_err(|cause| cause.kind())
    };
    let busy = Some(std::io::ErrorKind::ResourceBusy);
    let (brick, maintenance) = open(&first.path);
    brick.add_device(&further.path, None).expect("a device");
    assert_eq!(exclusive(&first.path).err(), busy);
    assert_eq!(exclusive(&further.path).err(), busy);
    maintenance.stop();
    drop(brick);
    until("the end", || exclusive(&further.path).is_ok());
    until("the end", || exclusive(&first.path).is_ok());
    let (brick, maintenance) = open(&first.path);
    assert_eq!(exclusive(&first.path).err(), busy);
    assert_eq!(exclusive(&further.path).err(), busy);
    maintenance.stop();
    drop(brick);
    until("the end", || exclusive(&further.path).is_ok());
}

struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn device_that_cannot_be_written_leaves_the_brick() {
    if !nix::unistd::geteuid().is_root() {
        skip::skip("file systems are mounted by root");
        return;
    }
    let home = SmallPool::new();
    let at = home.path("at");
    std::fs::create_dir(&at).expect("a directory");
    run(
        "mount",
        &["-t", "tmpfs", "-o", "size=64k", "none", text(&at)],
    );
    let _mounted = Mounted(at.clone());
    let filled = std::fs::write(at.join("filler"), vec![0; 64 << 10]);
    filled.expect("room");
    let below = at.join("below");
    let made = std::fs::File::create(&below);
    made.and_then(|file| file.set_len(8 * MIB)).expect("a file");
    let device = LoopDevice::new(&below).expect("root");
    let (brick, _maintenance) = open(&home.path("pool"));
    let change = DeviceChange::Add {
        path: device.path.clone(),
        size_bytes: None,
    };
    let said = outcome_of(&brick, change).expect_err("no block can be written");
    assert!(said.contains(text(&device.path)), "{said}");
    assert!(!brick.has_failed(), "{said}");
    assert_eq!(brick.devices().len(), 1);
    // The pool takes another one.
    add(&brick, &home.path("second"));
}
