//! A pool in a file, and a connection's session on a brick of it.

use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest, Stamp};
use pagemesh_base::wait::until_ready;
use pagemesh_brick::brick::{Brick, MaintenanceThread};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file;
use pagemesh_brick::worker::Worker;
use pagemesh_fabric::service::{Handler, Outcome};
use pagemesh_pmem::{Disk, DiskMedia, DiskOptions, Media, NewDevice, RequestLimits};
use pagemesh_store as store;
use rustix::event::{PollFd, PollFlags};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use uuid::Uuid;

pub const SLICE: SliceId = SliceId(Uuid::from_u128(5));
pub const SIZE: u64 = 4 << 20;
pub const PAGE: u64 = 4096;
/// Sixteen pages: most reads are misses.
const CACHE_BYTES: usize = 64 << 10;

/// Bytes of the first device of a pool with several, and of each other: the slice needs frames of all.
const FIRST_BYTES: u64 = 4 << 20;
const DEVICE_BYTES: u64 = 3 << 20;

pub struct Pool {
    pub directory: TempDir,
    devices: usize,
}

impl Pool {
    pub fn new() -> Pool {
        Pool::with_devices(1)
    }

    pub fn with_devices(devices: usize) -> Pool {
        let pool = Pool::without_devices(devices);
        match devices {
            1 => drop(file::create(&pool.path(), 32 << 20).expect("a pool on a disk")),
            _ => {
                file::create(&pool.path(), FIRST_BYTES).expect("a pool on a disk");
                pool.add_devices();
            }
        }
        pool
    }

    /// Paths of a pool that is not made yet.
    fn without_devices(devices: usize) -> Pool {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        Pool { directory, devices }
    }

    /// A pool, with further devices that `with_store` adds.
    pub fn of_first_device(devices: usize) -> Pool {
        let pool = Pool::without_devices(devices);
        file::create(&pool.path(), FIRST_BYTES).expect("a pool on a disk");
        pool
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    /// The paths of all devices.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.named("pool")
    }

    /// Paths for as many devices.
    pub fn named(&self, name: &str) -> Vec<PathBuf> {
        let others = (1..self.devices).map(|number| format!("{name}-{number}"));
        let names = std::iter::once(name.to_owned()).chain(others);
        names.map(|name| self.directory.path().join(name)).collect()
    }

    /// The bytes of all devices.
    pub fn images(&self) -> Vec<Vec<u8>> {
        let images = self.paths().into_iter().map(std::fs::read);
        images.map(|image| image.expect("an image")).collect()
    }

    fn add_devices(&self) {
        self.with_store(|mut pool, media| {
            for path in &self.paths()[1..] {
                add_device(&mut pool, media, path);
            }
            pool.close().expect("closed");
        });
    }

    /// Opens the store of a pool without a brick. Its further devices are not in it yet.
    pub fn with_store(&self, change: impl FnOnce(store::pool::Pool<DiskMedia>, &DiskMedia)) {
        let path = self.path();
        let geometry = file::read_superblock(&path).expect("a pool").geometry;
        let first = NewDevice {
            file: opened(&path),
            bytes: 0..geometry.pool_bytes as usize,
            head_len: geometry.frames.start as usize,
            frame_table: geometry.frame_table.bytes(),
        };
        let options = DiskOptions {
            cache_bytes: CACHE_BYTES,
            limits: RequestLimits::default(),
        };
        let disk = Arc::new(Disk::start(Some(first), options).expect("a disk"));
        let views = [disk.data(), disk.overlay()].map(Arc::new);
        let [data, overlay] = views.clone();
        let (pool, _) = store::pool::Pool::open(data, overlay).expect("a pool");
        change(pool, &views[0]);
    }
}

fn opened(path: &Path) -> File {
    let mut options = File::options();
    let opened = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path);
    opened.expect("a file")
}

/// Adds a new file to a pool. Returns the device's id.
pub fn add_device<M: Media>(pool: &mut store::pool::Pool<M>, media: &M, path: &Path) -> Uuid {
    let file = opened(path);
    file.set_len(DEVICE_BYTES).expect("its length");
    let id = Uuid::new_v4();
    let planned = pool.plan_device(id, DEVICE_BYTES).expect("a place");
    let new = NewDevice {
        file,
        bytes: planned.bytes(),
        head_len: planned.head_len(),
        frame_table: planned.frame_table_bytes(),
    };
    media.attach_device(new).expect("attached");
    assert!(pool.set_device_path(id, path), "room for the path");
    pool.add_device(planned).expect("a new device");
    id
}

pub fn options() -> OpenOptions {
    OpenOptions {
        memory_budget: CACHE_BYTES,
        ..OpenOptions::default()
    }
}

pub fn open(path: &Path) -> (Arc<Brick<DiskMedia>>, MaintenanceThread<DiskMedia>) {
    open_all(&[path.to_owned()])
}

/// Opens a pool whose devices lie at these paths.
pub fn open_all(paths: &[PathBuf]) -> (Arc<Brick<DiskMedia>>, MaintenanceThread<DiskMedia>) {
    let options = OpenOptions {
        devices: paths[1..].to_vec(),
        ..options()
    };
    let (brick, maintenance, _) = Brick::open_disk(&paths[0], options).expect("a brick");
    (brick, maintenance)
}

/// A connection's session, with the results of its requests.
pub struct Client<M: Media = DiskMedia> {
    worker: Worker<M>,
    pub ops: u64,
    results: HashMap<u64, Result<SliceReply, SliceError>>,
}

impl<M: Media + Send + Sync + 'static> Client<M> {
    pub fn new(brick: &Arc<Brick<M>>, epoch: u32) -> Client<M> {
        Client::of_slice(brick, SLICE, epoch)
    }

    pub fn of_slice(brick: &Arc<Brick<M>>, slice: SliceId, epoch: u32) -> Client<M> {
        let mut worker = Worker::open(brick, 1, 1).expect("a session");
        let attached = Worker::attach(&mut worker, slice, Epoch(epoch));
        assert_eq!(attached, Ok((0, SIZE)));
        Client {
            worker,
            ops: u64::from(epoch) << 32,
            results: HashMap::new(),
        }
    }

    pub fn stamp(&mut self) -> Stamp {
        self.ops += 1;
        Stamp {
            epoch: Epoch((self.ops >> 32) as u32),
            op: self.ops,
            open_ops: 0,
        }
    }

    /// Executes a batch of requests that do not depend on each other. Returns their results in order.
    pub fn execute(&mut self, batch: Vec<SliceRequest>) -> Vec<Result<SliceReply, SliceError>> {
        let start = |request| match Handler::execute(&mut self.worker, 0, request) {
            Outcome::Done(result) => Err(result),
            Outcome::Deferred(ticket) => Ok(ticket),
        };
        let started: Vec<_> = batch.into_iter().map(start).collect();
        Handler::end_batch(&mut self.worker).expect("a batch");
        let mut results = Vec::new();
        for each in started {
            results.push(match each {
                Err(result) => result,
                Ok(ticket) => self.wait(ticket.0),
            });
        }
        results
    }

    fn wait(&mut self, ticket: u64) -> Result<SliceReply, SliceError> {
        loop {
            let mut done = Vec::new();
            self.worker.poll(&mut done);
            self.results
                .extend(done.into_iter().map(|(ticket, result)| (ticket.0, result)));
            if let Some(result) = self.results.remove(&ticket) {
                return result;
            }
            let mut fds = Vec::new();
            self.worker.poll_fds(&mut fds);
            let watched = fds.into_iter();
            let mut fds: Vec<_> = watched
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            assert!(!fds.is_empty(), "ticket {ticket} waits for something");
            until_ready(&mut fds, None).expect("a wait");
        }
    }

    pub fn read_all(&mut self) -> Vec<u8> {
        let read = |at| SliceRequest::Read {
            offset: at * (256 << 10),
            len: 256 << 10,
        };
        let parts = self.execute((0..SIZE / (256 << 10)).map(read).collect());
        let bytes = parts.into_iter().map(|part| match part {
            Ok(SliceReply::Data(bytes)) => bytes,
            other => panic!("{other:?}"),
        });
        bytes.collect::<Vec<_>>().concat()
    }
}

/// A write of whole pages or of a part of one.
pub fn random_write<M: Media + Send + Sync + 'static>(
    rng: &mut SplitMix64,
    client: &mut Client<M>,
    model: &mut [u8],
) -> SliceRequest {
    let (offset, len) = if rng.below(3) == 0 {
        (rng.below(SIZE - PAGE), 1 + rng.below(PAGE))
    } else {
        let pages = 1 + rng.below(8);
        (rng.below(SIZE / PAGE - pages) * PAGE, pages * PAGE)
    };
    let data: Vec<u8> = (0..len).map(|_| rng.below(256) as u8).collect();
    model[offset as usize..(offset + len) as usize].copy_from_slice(&data);
    SliceRequest::Write {
        offset,
        data: Bytes::from(data),
        stamp: client.stamp(),
    }
}
