//! Random operations on files of a mount and the same operations in memory: after each operation
//! both hold the same bytes. At times the mount ends and returns, either unmounted or because its
//! process was killed, also in the middle of a write.
//!
//! The idea comes from fsx (Apple, 1991). PAGEMESH_FSX_OPS sets the number of operations,
//! PAGEMESH_FSX_SEED their order: `make fsx OPS=10000000 SEED=7`. Needs root and /dev/fuse.
//!
//! Further tests give a part of the work to other processes, some of them on the direct path, also
//! several at once, and kill them at times. Another one maps the files, through the kernel or under
//! `pagemesh exec`.

mod mapper;
mod worker;
mod worker_ops;

use crate::by_both;
use crate::support;
use mapper::MapperProcess;
use pagemesh_fuzz::Random;
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, copy_file_range, fallocate};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::time::{Duration, Instant};
use support::Cluster;
use support::mounted::{self, LIBRARY_FLAGS, TestMount};
use worker::{FsxWorker, WorkerOp, WorkerRequest};

/// Operations when all tests run.
const OPERATIONS: u64 = 100_000;
/// Operations of a run with mappings, most of which take a sync.
const MAP_OPERATIONS: u64 = 10_000;
const FILES: usize = 3;
/// The longest file: few pages, so that operations overlap.
const BYTES_MAX: u64 = 600_000;
const LEN_MAX: u64 = 70_000;
const PAGE: u64 = 4096;
/// Operations between two remounts, at most.
const BETWEEN_MOUNTS: u64 = 8000;
/// The same for tests that map files: a mapped file has no direct path until the next mount.
const BETWEEN_MAPPED_MOUNTS: u64 = 200;
/// How often a long run reports its progress.
const TELL_EVERY: Duration = Duration::from_secs(20);

fn number(name: &str, otherwise: u64) -> u64 {
    let given = std::env::var(name);
    given.map_or(otherwise, |it| it.parse().unwrap())
}

struct FsxState {
    mount: TestMount,
    open: Vec<File>,
    models: Vec<Vec<u8>>,
    /// Processes that do a part of the work; none in most tests.
    workers: Vec<FsxWorker>,
    mapper: Option<MapperProcess>,
    /// Operations of direct clients that did not use the kernel.
    direct_count: u64,
    /// Whether files are opened as the library opens them, so that they have a direct path.
    is_library: bool,
    rng: Random,
    /// The latest operations, printed at a failure.
    recent_ops: Vec<String>,
}

fn path_of(mount: &TestMount, at: usize) -> std::path::PathBuf {
    mount.path(&format!("f{at}"))
}

impl FsxState {
    fn below(&mut self, end: u64) -> u64 {
        self.rng.below(end as usize) as u64
    }

    /// An offset in a file or after its end; often the start of a page.
    fn offset(&mut self) -> u64 {
        let at = self.below(BYTES_MAX - LEN_MAX);
        match self.below(3) {
            0 => at - at % PAGE,
            _ => at,
        }
    }

    fn len(&mut self) -> u64 {
        match self.below(4) {
            0 => PAGE * (1 + self.below(8)),
            1 => 1 + self.below(100),
            _ => 1 + self.below(LEN_MAX),
        }
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len as usize + 8);
        while (bytes.len() as u64) < len {
            bytes.extend(self.rng.draw().to_le_bytes());
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

    fn grow_model(&mut self, at: usize, size: u64) {
        let model = &mut self.models[at];
        if (model.len() as u64) < size {
            model.resize(size as usize, 0);
        }
    }

    fn apply_write(&mut self, at: usize, offset: u64, bytes: &[u8]) {
        self.grow_model(at, offset + bytes.len() as u64);
        self.models[at][offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn log_op(&mut self, what: String) {
        if self.recent_ops.len() == 200 {
            self.recent_ops.remove(0);
        }
        self.recent_ops.push(what);
    }

    fn operation(&mut self) {
        let at = self.below(FILES as u64) as usize;
        let (offset, len) = (self.offset(), self.len());
        match self.below(22) {
            0..=5 => {
                let bytes = self.bytes(len);
                self.log_op(format!("write {at} {offset} {len}"));
                self.open[at].write_all_at(&bytes, offset).unwrap();
                self.apply_write(at, offset, &bytes);
            }
            6..=9 => {
                self.log_op(format!("read {at} {offset} {len}"));
                self.compare(at, offset, len);
            }
            10 => {
                let size = self.below(BYTES_MAX);
                self.log_op(format!("truncate {at} {size}"));
                self.open[at].set_len(size).unwrap();
                self.models[at].resize(size as usize, 0);
            }
            11 => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                self.log_op(format!("punch {at} {offset} {len}"));
                fallocate(&self.open[at], flags, offset, len).unwrap();
                self.zero_model(at, offset, len);
            }
            12 => {
                let keeps = self.below(2) == 0;
                let mut flags = FallocateFlags::ZERO_RANGE;
                flags.set(FallocateFlags::KEEP_SIZE, keeps);
                self.log_op(format!("zero {at} {offset} {len} {keeps}"));
                fallocate(&self.open[at], flags, offset, len).unwrap();
                if !keeps {
                    self.grow_model(at, offset + len);
                }
                self.zero_model(at, offset, len);
            }
            13 => {
                let keeps = self.below(2) == 0;
                let mut flags = FallocateFlags::empty();
                flags.set(FallocateFlags::KEEP_SIZE, keeps);
                self.log_op(format!("allocate {at} {offset} {len} {keeps}"));
                fallocate(&self.open[at], flags, offset, len).unwrap();
                if !keeps {
                    self.grow_model(at, offset + len);
                }
            }
            14 if self.below(2) == 0 => self.copy_whole(at),
            14 => self.copy(at, offset, len),
            15 => {
                self.log_op(format!("append {at} {len}"));
                if self.models[at].len() as u64 + len < BYTES_MAX {
                    let bytes = self.bytes(len);
                    let end = self.models[at].len() as u64;
                    let file = self.open(at, OFlags::APPEND);
                    // O_APPEND overrides the offset that the write names.
                    file.write_all_at(&bytes, offset).unwrap();
                    self.apply_write(at, end, &bytes);
                }
            }
            16 => {
                self.log_op(format!("write durably {at} {offset} {len}"));
                let bytes = self.bytes(len);
                let file = self.open(at, OFlags::SYNC);
                file.write_all_at(&bytes, offset).unwrap();
                self.apply_write(at, offset, &bytes);
            }
            17 => {
                self.log_op(format!("look for holes {at}"));
                self.seek(at, offset);
            }
            18 => {
                self.log_op(format!("reopen {at}"));
                self.open[at].sync_all().unwrap();
                self.open[at] = self.open(at, OFlags::empty());
            }
            19 | 20 if self.mapper.is_some() => self.map_operation(at),
            _ => {
                self.log_op(format!("stat {at}"));
                let size = self.open[at].metadata().unwrap().size();
                assert_eq!(size, self.models[at].len() as u64, "{:#?}", self.recent_ops);
            }
        }
    }

    fn zero_model(&mut self, at: usize, offset: u64, len: u64) {
        let model = &mut self.models[at];
        let end = (offset + len).min(model.len() as u64);
        if offset < end {
            model[offset as usize..end as usize].fill(0);
        }
    }

    fn other(&mut self, than: usize) -> usize {
        (than + 1 + self.below(FILES as u64 - 1) as usize) % FILES
    }

    fn copy(&mut self, from: usize, offset: u64, len: u64) {
        let (to, target) = (self.other(from), self.offset());
        self.copy_to((from, offset), (to, target), len);
    }

    /// The copy then shares the pages of its source.
    fn copy_whole(&mut self, from: usize) {
        let to = self.other(from);
        self.log_op(format!("empty {to}"));
        self.open[to].set_len(0).unwrap();
        self.models[to].clear();
        self.copy_to((from, 0), (to, 0), BYTES_MAX);
    }

    fn copy_to(&mut self, (from, mut offset): (usize, u64), to: (usize, u64), len: u64) {
        let (to, mut target) = to;
        self.log_op(format!("copy {from} {offset} to {to} {target} {len}"));
        let mut left = len;
        while left > 0 {
            // The kernel copies up to the file size that it last heard of
            // (`generic_copy_file_checks`). Direct clients may have made the file longer since.
            // Programs ask for the size before, too.
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
                assert!(
                    begin >= self.models[from].len() as u64,
                    "{:#?}",
                    self.recent_ops
                );
                return;
            }
            let bytes = self.models[from][begin as usize..][..copied as usize].to_vec();
            self.apply_write(to, goal, &bytes);
            left -= copied;
        }
    }

    /// Where the file reports a hole, it has zeroes.
    fn seek(&mut self, at: usize, offset: u64) {
        let size = self.models[at].len() as u64;
        let found = rustix::fs::seek(&self.open[at], SeekFrom::Data(offset));
        match found {
            Ok(data) => {
                assert!((offset..size).contains(&data), "{:#?}", self.recent_ops);
                let hole = &self.models[at][offset as usize..data as usize];
                assert!(hole.iter().all(|byte| *byte == 0), "{:#?}", self.recent_ops);
                let end = rustix::fs::seek(&self.open[at], SeekFrom::Hole(data)).unwrap();
                assert!(data < end && end <= size, "{:#?}", self.recent_ops);
            }
            Err(rustix::io::Errno::NXIO) => {
                let rest = self.models[at].get(offset as usize..).unwrap_or(&[]);
                assert!(rest.iter().all(|byte| *byte == 0), "{:#?}", self.recent_ops);
            }
            Err(other) => panic!("{other}: {:#?}", self.recent_ops),
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
        assert_eq!(
            read,
            model.len(),
            "bytes of file {at}: {:#?}",
            self.recent_ops
        );
        let differs = (0..read).find(|&byte| found[byte] != model[byte]);
        if let Some(byte) = differs {
            let where_ = offset + byte as u64;
            panic!("file {at} differs at byte {where_}: {:#?}", self.recent_ops);
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

    /// Unmounts and mounts again.
    fn remount(&mut self, cluster: &Cluster) {
        match self.below(4) {
            0 => {
                self.log_op("unmount".into());
                self.close();
                cluster.ok(&["umount", self.mount.dir.to_str().unwrap()]);
                let mut daemon = self.mount.daemon.take().unwrap();
                assert!(daemon.await_end().success(), "{}", daemon.log());
            }
            1 => {
                self.log_op("kill".into());
                self.mount.daemon.take().unwrap().kill();
            }
            _ => return self.kill_during_write(cluster),
        }
        self.remount_and_reopen(cluster);
        self.compare_all();
    }

    fn close(&mut self) {
        self.open.clear();
        let order = WorkerRequest::of(WorkerOp::Close, 0, 0, 0);
        for hand in &mut self.workers {
            hand.execute(&order).unwrap();
        }
    }

    fn remount_and_reopen(&mut self, cluster: &Cluster) {
        self.close();
        self.mount.remount(cluster, "files", "auto");
        self.reopen();
    }

    /// Kills the mount during a write: each page of the write is there or not, and all pages are if
    /// the write was acknowledged.
    fn kill_during_write(&mut self, cluster: &Cluster) {
        let at = self.below(FILES as u64) as usize;
        let (offset, len) = (self.offset(), self.len());
        let bytes = self.bytes(len);
        let turns = self.below(100_000);
        self.log_op(format!(
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
        self.apply_write(at, offset, &bytes);
        self.remount_and_reopen(cluster);
        if !is_done {
            self.models[at] = self.read_torn_write(at, &old, offset);
        }
        self.compare_all();
    }

    /// The contents of a file after a torn write: each page from `offset` on is as before the write
    /// or as after it.
    fn read_torn_write(&self, at: usize, old: &[u8], offset: u64) -> Vec<u8> {
        let new = &self.models[at];
        let size = self.open[at].metadata().unwrap().size() as usize;
        assert!(
            (old.len()..=new.len()).contains(&size),
            "{:#?}",
            self.recent_ops
        );
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
                self.recent_ops
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
    run_fsx(
        &cluster,
        fuse,
        (OPERATIONS, BETWEEN_MOUNTS),
        &[],
        MapMode::No,
    );
}

/// The same, with a program that maps the files.
fn files_hold_what_is_stored_into_mappings(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[64, 64], "32M") else {
        return;
    };
    run_fsx(
        &cluster,
        fuse,
        (MAP_OPERATIONS, BETWEEN_MOUNTS),
        &[],
        MapMode::ByKernel,
    );
}

/// Not a test: the entry point of the worker processes of the following tests.
#[test]
fn worker_process() {
    worker::run_worker();
}

#[test]
fn files_match_model_with_concurrent_clients() {
    let Some(cluster) = mounted::cluster(&[256, 256], "32M") else {
        return;
    };
    run_fsx(
        &cluster,
        mounted::CLASSIC,
        (worker_ops::OPERATIONS, worker_ops::BETWEEN_MOUNTS),
        &[true, true, false],
        MapMode::No,
    );
}

/// A mapping bars its file from the direct path as long as any process has the file open.
#[test]
fn files_match_model_if_direct_clients_map_them() {
    let Some(cluster) = mounted::cluster(&[256, 256], "32M") else {
        return;
    };
    run_fsx(
        &cluster,
        mounted::CLASSIC,
        (MAP_OPERATIONS, BETWEEN_MAPPED_MOUNTS),
        &[true, true],
        MapMode::Directly,
    );
}

/// Whether a part of the work is done through mappings.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MapMode {
    No,
    ByKernel,
    Directly,
}

/// Runs random operations, with at most `between` of them between two remounts, and with workers on
/// the direct path or through the kernel.
fn run_fsx(
    cluster: &Cluster,
    fuse: &'static str,
    (operations, between): (u64, u64),
    hands: &[bool],
    maps: MapMode,
) {
    let operations = number("PAGEMESH_FSX_OPS", operations);
    let mut files = FsxState {
        mount: TestMount::with_fuse(cluster, "files", "auto", fuse),
        open: vec![],
        models: vec![vec![]; FILES],
        workers: vec![],
        mapper: None,
        direct_count: 0,
        is_library: hands.contains(&true),
        rng: Random::new(number("PAGEMESH_FSX_SEED", 1)),
        recent_ops: vec![],
    };
    files.reopen();
    let started = hands
        .iter()
        .map(|&it| FsxWorker::start(cluster, &files.mount, it));
    files.workers = started.collect();
    files.mapper = match maps {
        MapMode::No => None,
        maps => Some(MapperProcess::start(
            &files.mount,
            maps == MapMode::Directly,
        )),
    };
    let (began, mut told) = (Instant::now(), Instant::now());
    let mut until_remount = files.below(between);
    for done in 0..operations {
        match files.workers.is_empty() {
            true => files.operation(),
            false => files.operation_with_workers(cluster),
        }
        if until_remount == 0 {
            files.remount(cluster);
            until_remount = files.below(between);
        }
        until_remount -= until_remount.min(1);
        if told.elapsed() > TELL_EVERY {
            told = Instant::now();
            eprintln!("{done} of {operations} after {:?}", began.elapsed());
        }
    }
    files.compare_all();
    // Mapped files have no direct path.
    if maps == MapMode::No {
        files.check_direct_count(operations);
    }
    files.close();
    files.workers.clear();
    files.mapper = None;
    files.mount.stop(cluster);
    cluster.check_identical("files");
}
