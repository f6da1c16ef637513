//! Random operations on files of a mount, beside the same ones in memory: after each
//! both hold the same. Now and then the mount goes and comes back, in order or
//! because its process was killed, also in the middle of a write.
//!
//! The idea is that of fsx (Apple, 1991). PAGEMESH_FSX_OPS says how many operations,
//! PAGEMESH_FSX_SEED which: `make fsx OPS=10000000 SEED=7`. For root with /dev/fuse.
//!
//! Once more with part of the work done by other processes, some of them on the direct
//! path, also several at once, and killed now and then; and by one that maps the files, by
//! the kernel or under `exec`.

#![allow(clippy::unwrap_used)] // Tests.

#[path = "fsx/hand.rs"]
mod hand;
#[path = "fsx/hands.rs"]
mod hands;
#[path = "fsx/mapper.rs"]
mod mapper;
mod support;

use hand::{Hand, Order, What};
use mapper::Mapper;
use pagemesh_fuzz::Random;
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, copy_file_range, fallocate};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::time::{Duration, Instant};
use support::Cluster;
use support::mounted::{self, LIBRARY_FLAGS, Mounted};

/// Of a run of all tests.
const OPERATIONS: u64 = 100_000;
/// The same of one with mappings, most of which take a sync.
const MAP_OPERATIONS: u64 = 10_000;
const FILES: usize = 3;
/// So long may a file become; few pages, so that operations meet.
const BYTES_MAX: u64 = 600_000;
const LEN_MAX: u64 = 70_000;
const PAGE: u64 = 4096;
/// Operations from one remount to the next, at most.
const BETWEEN_MOUNTS: u64 = 8000;
/// The same where mapped files are nobody's on the direct path from then on.
const BETWEEN_MAPPED_MOUNTS: u64 = 200;
/// How often a long run says how far it is.
const TELL_EVERY: Duration = Duration::from_secs(20);

fn number(name: &str, otherwise: u64) -> u64 {
    let given = std::env::var(name);
    given.map_or(otherwise, |it| it.parse().unwrap())
}

struct Files {
    mount: Mounted,
    open: Vec<File>,
    models: Vec<Vec<u8>>,
    /// Processes that do part of the work; in most tests none.
    hands: Vec<Hand>,
    mapper: Option<Mapper>,
    /// What those on the direct path did without the kernel.
    direct: u64,
    /// Files are opened as the library does, so that they have a direct path.
    is_library: bool,
    dice: Random,
    /// What happened to be done, for a failure.
    last: Vec<String>,
}

fn path_of(mount: &Mounted, at: usize) -> std::path::PathBuf {
    mount.path(&format!("f{at}"))
}

impl Files {
    fn roll(&mut self, end: u64) -> u64 {
        self.dice.below(end as usize) as u64
    }

    /// Somewhere in a file or behind its end; often where a page begins.
    fn offset(&mut self) -> u64 {
        let at = self.roll(BYTES_MAX - LEN_MAX);
        match self.roll(3) {
            0 => at - at % PAGE,
            _ => at,
        }
    }

    fn len(&mut self) -> u64 {
        match self.roll(4) {
            0 => PAGE * (1 + self.roll(8)),
            1 => 1 + self.roll(100),
            _ => 1 + self.roll(LEN_MAX),
        }
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len as usize + 8);
        while (bytes.len() as u64) < len {
            bytes.extend(self.dice.draw().to_le_bytes());
        }
        bytes.truncate(len as usize);
        bytes
    }

    fn open(&self, at: usize, more: OFlags) -> File {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true);
        let flags = match self.is_library {
            true => more.bits() | LIBRARY_FLAGS,
            false => more.bits(),
        };
        options.custom_flags(flags.cast_signed());
        options.open(path_of(&self.mount, at)).unwrap()
    }

    fn grow(&mut self, at: usize, size: u64) {
        let model = &mut self.models[at];
        if (model.len() as u64) < size {
            model.resize(size as usize, 0);
        }
    }

    fn put(&mut self, at: usize, offset: u64, bytes: &[u8]) {
        self.grow(at, offset + bytes.len() as u64);
        self.models[at][offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn did(&mut self, what: String) {
        if self.last.len() == 200 {
            self.last.remove(0);
        }
        self.last.push(what);
    }

    fn operation(&mut self) {
        let at = self.roll(FILES as u64) as usize;
        let (offset, len) = (self.offset(), self.len());
        match self.roll(22) {
            0..=5 => {
                let bytes = self.bytes(len);
                self.did(format!("write {at} {offset} {len}"));
                self.open[at].write_all_at(&bytes, offset).unwrap();
                self.put(at, offset, &bytes);
            }
            6..=9 => {
                self.did(format!("read {at} {offset} {len}"));
                self.compare(at, offset, len);
            }
            10 => {
                let size = self.roll(BYTES_MAX);
                self.did(format!("truncate {at} {size}"));
                self.open[at].set_len(size).unwrap();
                self.models[at].resize(size as usize, 0);
            }
            11 => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                self.did(format!("punch {at} {offset} {len}"));
                fallocate(&self.open[at], flags, offset, len).unwrap();
                self.zero(at, offset, len);
            }
            12 => {
                let keeps = self.roll(2) == 0;
                let mut flags = FallocateFlags::ZERO_RANGE;
                flags.set(FallocateFlags::KEEP_SIZE, keeps);
                self.did(format!("zero {at} {offset} {len} {keeps}"));
                fallocate(&self.open[at], flags, offset, len).unwrap();
                if !keeps {
                    self.grow(at, offset + len);
                }
                self.zero(at, offset, len);
            }
            13 => {
                let keeps = self.roll(2) == 0;
                let mut flags = FallocateFlags::empty();
                flags.set(FallocateFlags::KEEP_SIZE, keeps);
                self.did(format!("allocate {at} {offset} {len} {keeps}"));
                fallocate(&self.open[at], flags, offset, len).unwrap();
                if !keeps {
                    self.grow(at, offset + len);
                }
            }
            14 if self.roll(2) == 0 => self.copy_whole(at),
            14 => self.copy(at, offset, len),
            15 => {
                self.did(format!("append {at} {len}"));
                if self.models[at].len() as u64 + len < BYTES_MAX {
                    let bytes = self.bytes(len);
                    let end = self.models[at].len() as u64;
                    let file = self.open(at, OFlags::APPEND);
                    // Where it is told to write does not count.
                    file.write_all_at(&bytes, offset).unwrap();
                    self.put(at, end, &bytes);
                }
            }
            16 => {
                self.did(format!("write durably {at} {offset} {len}"));
                let bytes = self.bytes(len);
                let file = self.open(at, OFlags::SYNC);
                file.write_all_at(&bytes, offset).unwrap();
                self.put(at, offset, &bytes);
            }
            17 => {
                self.did(format!("look for holes {at}"));
                self.seek(at, offset);
            }
            18 => {
                self.did(format!("reopen {at}"));
                self.open[at].sync_all().unwrap();
                self.open[at] = self.open(at, OFlags::empty());
            }
            19 | 20 if self.mapper.is_some() => self.map(at),
            _ => {
                self.did(format!("stat {at}"));
                let size = self.open[at].metadata().unwrap().size();
                assert_eq!(size, self.models[at].len() as u64, "{:#?}", self.last);
            }
        }
    }

    fn zero(&mut self, at: usize, offset: u64, len: u64) {
        let model = &mut self.models[at];
        let end = (offset + len).min(model.len() as u64);
        if offset < end {
            model[offset as usize..end as usize].fill(0);
        }
    }

    fn other(&mut self, than: usize) -> usize {
        (than + 1 + self.roll(FILES as u64 - 1) as usize) % FILES
    }

    fn copy(&mut self, from: usize, offset: u64, len: u64) {
        let (to, target) = (self.other(from), self.offset());
        self.copy_to((from, offset), (to, target), len);
    }

    /// The other then shares the pages of the one.
    fn copy_whole(&mut self, from: usize) {
        let to = self.other(from);
        self.did(format!("empty {to}"));
        self.open[to].set_len(0).unwrap();
        self.models[to].clear();
        self.copy_to((from, 0), (to, 0), BYTES_MAX);
    }

    fn copy_to(&mut self, (from, mut offset): (usize, u64), to: (usize, u64), len: u64) {
        let (to, mut target) = to;
        self.did(format!("copy {from} {offset} to {to} {target} {len}"));
        let mut left = len;
        while left > 0 {
            // The kernel copies up to the end that it was told last (`generic_copy_file_checks`);
            // guests may have made the file longer since. Programs ask before, too.
            self.open[from].metadata().unwrap();
            let (begin, goal) = (offset, target);
            let (one, other) = (&self.open[from], &self.open[to]);
            let copied = copy_file_range(
                one,
                Some(&mut offset),
                other,
                Some(&mut target),
                left as usize,
            );
            let copied = copied.unwrap() as u64;
            if copied == 0 {
                assert!(begin >= self.models[from].len() as u64, "{:#?}", self.last);
                return;
            }
            let bytes = self.models[from][begin as usize..][..copied as usize].to_vec();
            self.put(to, goal, &bytes);
            left -= copied;
        }
    }

    /// Where the file is said to have a hole, it has zeroes.
    fn seek(&mut self, at: usize, offset: u64) {
        let size = self.models[at].len() as u64;
        let found = rustix::fs::seek(&self.open[at], SeekFrom::Data(offset));
        match found {
            Ok(data) => {
                assert!((offset..size).contains(&data), "{:#?}", self.last);
                let hole = &self.models[at][offset as usize..data as usize];
                assert!(hole.iter().all(|byte| *byte == 0), "{:#?}", self.last);
                let end = rustix::fs::seek(&self.open[at], SeekFrom::Hole(data)).unwrap();
                assert!(data < end && end <= size, "{:#?}", self.last);
            }
            Err(rustix::io::Errno::NXIO) => {
                let rest = self.models[at].get(offset as usize..).unwrap_or(&[]);
                assert!(rest.iter().all(|byte| *byte == 0), "{:#?}", self.last);
            }
            Err(other) => panic!("{other}: {:#?}", self.last),
        }
    }

    fn compare(&self, at: usize, offset: u64, len: u64) {
        let mut found = vec![0; len as usize];
        let mut read = 0;
        loop {
            let more = self.open[at].read_at(&mut found[read..], offset + read as u64);
            match more.unwrap() {
                0 => break,
                more => read += more,
            }
        }
        let model = self.models[at].get(offset as usize..).unwrap_or(&[]);
        let model = &model[..model.len().min(len as usize)];
        assert_eq!(read, model.len(), "bytes of file {at}: {:#?}", self.last);
        let differs = (0..read).find(|&byte| found[byte] != model[byte]);
        if let Some(byte) = differs {
            let where_ = offset + byte as u64;
            panic!("file {at} differs at byte {where_}: {:#?}", self.last);
        }
    }

    fn compare_all(&self) {
        for at in 0..FILES {
            self.compare(at, 0, BYTES_MAX);
        }
    }

    fn reopen(&mut self) {
        let open = (0..FILES).map(|at| self.open(at, OFlags::empty()));
        self.open = open.collect();
    }

    /// Takes the mount away and brings it back.
    fn remount(&mut self, cluster: &Cluster) {
        match self.roll(4) {
            0 => {
                self.did("unmount".into());
                self.close();
                cluster.ok(&["umount", self.mount.dir.to_str().unwrap()]);
                let mut daemon = self.mount.daemon.take().unwrap();
                assert!(daemon.await_end().success(), "{}", daemon.log());
            }
            1 => {
                self.did("kill".into());
                self.mount.daemon.take().unwrap().kill();
            }
            _ => return self.kill_amid(cluster),
        }
        self.come_back(cluster);
        self.compare_all();
    }

    fn close(&mut self) {
        self.open.clear();
        let order = Order::of(What::Close, 0, 0, 0);
        for hand in &mut self.hands {
            hand.does(&order).unwrap();
        }
    }

    fn come_back(&mut self, cluster: &Cluster) {
        self.close();
        self.mount.come_back(cluster, "files", "auto");
        self.reopen();
    }

    /// Kills while a write is under way: each of its pages is there or not, and all
    /// are if it was acknowledged.
    fn kill_amid(&mut self, cluster: &Cluster) {
        let at = self.roll(FILES as u64) as usize;
        let (offset, len) = (self.offset(), self.len());
        let bytes = self.bytes(len);
        let turns = self.roll(100_000);
        self.did(format!(
            "kill amid write {at} {offset} {len}, {turns} turns"
        ));
        let (file, daemon) = (&self.open[at], self.mount.daemon.take().unwrap());
        let is_done = std::thread::scope(|scope| {
            let write = scope.spawn(|| file.write_all_at(&bytes, offset).is_ok());
            (0..turns).for_each(|_| std::hint::spin_loop());
            daemon.kill();
            write.join().unwrap()
        });
        let old = self.models[at].clone();
        self.put(at, offset, &bytes);
        self.come_back(cluster);
        if !is_done {
            self.models[at] = self.either(at, &old, offset);
        }
        self.compare_all();
    }

    /// What a file holds, each page of which is as before a write from `offset` on or
    /// as after it.
    fn either(&self, at: usize, old: &[u8], offset: u64) -> Vec<u8> {
        let new = &self.models[at];
        let size = self.open[at].metadata().unwrap().size() as usize;
        assert!((old.len()..=new.len()).contains(&size), "{:#?}", self.last);
        let mut found = vec![0; size];
        self.open[at].read_exact_at(&mut found, 0).unwrap();
        let mut padded = old.to_vec();
        padded.resize(size, 0);
        for (number, page) in found.chunks(PAGE as usize).enumerate() {
            let first = number * PAGE as usize;
            let is_of = |of: &[u8]| &of[first..first + page.len()] == page;
            assert!(
                is_of(&padded) || is_of(new) && first + page.len() > offset as usize,
                "page {number} of file {at} is neither: {:#?}",
                self.last
            );
        }
        found
    }
}

by_both! {
    files_hold_what_is_stored_into_mappings
    files_hold_what_they_hold_in_memory
}

fn files_hold_what_they_hold_in_memory(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[64, 64], "32M") else {
        return;
    };
    work(&cluster, fuse, (OPERATIONS, BETWEEN_MOUNTS), &[], Maps::No);
}

/// The same, with a program that maps them.
fn files_hold_what_is_stored_into_mappings(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[64, 64], "32M") else {
        return;
    };
    work(
        &cluster,
        fuse,
        (MAP_OPERATIONS, BETWEEN_MOUNTS),
        &[],
        Maps::ByKernel,
    );
}

/// Not a test by itself: what the processes of the next one do.
#[test]
fn hand_works() {
    hand::work();
}

#[test]
fn files_hold_it_if_guests_and_others_work_at_once() {
    let Some(cluster) = mounted::cluster(&[256, 256], "32M") else {
        return;
    };
    work(
        &cluster,
        mounted::CLASSIC,
        (hands::OPERATIONS, hands::BETWEEN_MOUNTS),
        &[true, true, false],
        Maps::No,
    );
}

/// Whoever maps a file bars it from the direct path, as long as somebody has it open.
#[test]
fn files_hold_it_if_guests_map_them() {
    let Some(cluster) = mounted::cluster(&[256, 256], "32M") else {
        return;
    };
    work(
        &cluster,
        mounted::CLASSIC,
        (MAP_OPERATIONS, BETWEEN_MAPPED_MOUNTS),
        &[true, true],
        Maps::Directly,
    );
}

/// Whether some of the work is done through mappings.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Maps {
    No,
    ByKernel,
    Directly,
}

/// Does random operations, and remounts, so many between them at most, with hands that are
/// on the direct path or not.
fn work(
    cluster: &Cluster,
    fuse: &'static str,
    (operations, between): (u64, u64),
    hands: &[bool],
    maps: Maps,
) {
    let operations = number("PAGEMESH_FSX_OPS", operations);
    let mut files = Files {
        mount: Mounted::by(cluster, "files", "auto", fuse),
        open: vec![],
        models: vec![vec![]; FILES],
        hands: vec![],
        mapper: None,
        direct: 0,
        is_library: hands.contains(&true),
        dice: Random::new(number("PAGEMESH_FSX_SEED", 1)),
        last: vec![],
    };
    files.reopen();
    let started = hands
        .iter()
        .map(|&it| Hand::start(cluster, &files.mount, it));
    files.hands = started.collect();
    files.mapper = match maps {
        Maps::No => None,
        maps => Some(Mapper::start(&files.mount, maps == Maps::Directly)),
    };
    let (began, mut told) = (Instant::now(), Instant::now());
    let mut until_remount = files.roll(between);
    for done in 0..operations {
        match files.hands.is_empty() {
            true => files.operation(),
            false => files.operation_with_hands(cluster),
        }
        if until_remount == 0 {
            files.remount(cluster);
            until_remount = files.roll(between);
        }
        until_remount -= until_remount.min(1);
        if told.elapsed() > TELL_EVERY {
            told = Instant::now();
            eprintln!("{done} of {operations} after {:?}", began.elapsed());
        }
    }
    files.compare_all();
    // Mapped files are the kernel's.
    if maps == Maps::No {
        files.check_hands(operations);
    }
    files.close();
    files.hands.clear();
    files.mapper = None;
    files.mount.stop(cluster);
    cluster.check_identical("files");
}
