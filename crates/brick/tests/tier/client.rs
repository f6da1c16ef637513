//! A pool with memory in front of a file, and a connection's session on a brick of it.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest, Stamp};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::wait::until_ready;
use pagemesh_brick::brick::{Brick, MaintenanceThread, OpenedPool};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file;
use pagemesh_brick::worker::Worker;
use pagemesh_fabric::service::{Handler, Outcome};
use pagemesh_pmem::{Disk, DiskOptions, MappedMedia, Media, NewDevice, RequestLimits, TieredMedia};
use pagemesh_store::pool::Pool;
use rustix::event::{PollFd, PollFlags};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use uuid::Uuid;

pub const SLICE: SliceId = SliceId(Uuid::from_u128(5));
pub const PAGE: u64 = 4096;
const MEMORY_BYTES: u64 = 16 << 20;
const FLASH_BYTES: u64 = 192 << 20;
const CACHE_BYTES: usize = 4 << 20;

/// The files of a pool.
pub struct TieredFiles {
    memory: PathBuf,
    disk: PathBuf,
    directory: PathBuf,
    _removed: Option<[TempDir; 2]>,
}

fn options() -> OpenOptions {
    OpenOptions {
        memory_budget: CACHE_BYTES,
        ..OpenOptions::default()
    }
}

impl TieredFiles {
    /// A new pool. None where there is no file system in memory.
    pub fn new() -> Option<TieredFiles> {
        TieredFiles::prepared(|_| {})
    }

    /// A new pool, changed by `prepare` before a brick opens it.
    pub fn prepared(prepare: impl FnOnce(&mut Pool<TieredMedia>)) -> Option<TieredFiles> {
        let in_memory = tempfile::tempdir_in("/dev/shm").ok()?;
        let on_disk = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let memory = in_memory.path().join("pool");
        file::create(&memory, MEMORY_BYTES).expect("a pool in memory");
        let link = on_disk.path().join("memory");
        std::os::unix::fs::symlink(&memory, link).expect("a link");
        let mut files = TieredFiles::at(on_disk.path().to_owned());
        files.add_disk(prepare);
        files._removed = Some([in_memory, on_disk]);
        Some(files)
    }

    /// The pool in a directory.
    pub fn at(directory: PathBuf) -> TieredFiles {
        let memory = std::fs::read_link(directory.join("memory")).expect("a link");
        TieredFiles {
            memory,
            disk: directory.join("disk"),
            directory,
            _removed: None,
        }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The file with the count of acknowledged operations.
    pub fn counter(&self) -> PathBuf {
        self.directory.join("count")
    }

    fn add_disk(&self, prepare: impl FnOnce(&mut Pool<TieredMedia>)) {
        let opened = File::options().read(true).write(true).open(&self.memory);
        let mapped = MappedMedia::new(opened.expect("the pool"), MEMORY_BYTES as usize);
        let limits = RequestLimits::default();
        let cache_bytes = CACHE_BYTES;
        let disk = Disk::start(
            None,
            DiskOptions {
                cache_bytes,
                limits,
            },
        );
        let disk = Arc::new(disk.expect("a disk"));
        let media = Arc::new(TieredMedia::new(mapped.expect("a mapping"), disk.data()));
        let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("a pool");
        let id = Uuid::from_u128(9);
        let planned = pool.plan_device(id, FLASH_BYTES).expect("a place");
        let file = File::create_new(&self.disk).expect("a file");
        file.set_len(FLASH_BYTES).expect("its length");
        drop(file);
        let file = File::options().read(true).write(true).open(&self.disk);
        let new = NewDevice {
            file: file.expect("the file"),
            bytes: planned.bytes(),
            head_len: planned.head_len(),
            frame_table: planned.frame_table_bytes(),
        };
        media.attach_device(new).expect("attached");
        assert!(pool.set_device_path(id, &self.disk), "room for the path");
        pool.add_device(planned).expect("a new device");
        assert!(pool.is_tiered());
        prepare(&mut pool);
        pool.close().expect("closed");
    }

    pub fn open(&self) -> (Arc<Brick<TieredMedia>>, MaintenanceThread<TieredMedia>) {
        match OpenedPool::open(&self.memory, options()).expect("a brick") {
            OpenedPool::Tiered((brick, maintenance, _)) => (brick, maintenance),
            _ => panic!("the pool has no disk"),
        }
    }
}

/// A connection's session.
pub struct Client<M: Media> {
    worker: Worker<M>,
    ops: u64,
    /// The hint of its requests.
    pub hint: TierHint,
}

impl<M: Media + Send + Sync + 'static> Client<M> {
    pub fn new(brick: &Arc<Brick<M>>, epoch: u32) -> Client<M> {
        Client::of(brick, SLICE, epoch)
    }

    pub fn of(brick: &Arc<Brick<M>>, slice: SliceId, epoch: u32) -> Client<M> {
        let mut worker = Worker::open(brick, 1, 1).expect("a session");
        Worker::attach(&mut worker, slice, Epoch(epoch)).expect("the slice");
        let ops = u64::from(epoch) << 32;
        let hint = TierHint::None;
        Client { worker, ops, hint }
    }

    /// Pages that reads found in memory, and on flash.
    pub fn tier_reads(&self) -> (u64, u64) {
        self.worker.tier_reads()
    }

    pub fn stamp(&mut self) -> Stamp {
        self.ops += 1;
        Stamp {
            epoch: Epoch((self.ops >> 32) as u32),
            op: self.ops,
            open_ops: 0,
        }
    }

    pub fn execute(&mut self, request: SliceRequest) -> Result<SliceReply, SliceError> {
        let started = Handler::execute_hinted(&mut self.worker, 0, request, self.hint);
        Handler::end_batch(&mut self.worker).expect("a batch");
        let ticket = match started {
            Outcome::Done(result) => return result,
            Outcome::Deferred(ticket) => ticket,
        };
        loop {
            let mut done = Vec::new();
            self.worker.poll(&mut done);
            if let Some((_, result)) = done.into_iter().find(|(it, _)| it.0 == ticket.0) {
                return result;
            }
            let mut fds = Vec::new();
            self.worker.poll_fds(&mut fds);
            let watched = fds.into_iter();
            let mut fds: Vec<_> = watched
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            until_ready(&mut fds, None).expect("a wait");
        }
    }
}
