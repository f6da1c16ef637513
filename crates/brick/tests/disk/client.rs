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
use pagemesh_pmem::DiskMedia;
use rustix::event::{PollFd, PollFlags};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use uuid::Uuid;

pub const SLICE: SliceId = SliceId(Uuid::from_u128(5));
pub const SIZE: u64 = 4 << 20;
pub const PAGE: u64 = 4096;
/// Sixteen pages: most reads are misses.
const CACHE_BYTES: usize = 64 << 10;

pub struct Pool {
    pub directory: TempDir,
}

impl Pool {
    pub fn new() -> Pool {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        file::create(&directory.path().join("pool"), 32 << 20).expect("a pool on a disk");
        Pool { directory }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("pool")
    }
}

pub fn options() -> OpenOptions {
    OpenOptions {
        memory_budget: CACHE_BYTES,
        ..OpenOptions::default()
    }
}

pub fn open(path: &Path) -> (Arc<Brick<DiskMedia>>, MaintenanceThread<DiskMedia>) {
    let (brick, maintenance, _) = Brick::open_disk(path, options()).expect("a brick");
    (brick, maintenance)
}

/// A connection's session, with the results of its requests.
pub struct Client {
    worker: Worker<DiskMedia>,
    pub ops: u64,
    results: HashMap<u64, Result<SliceReply, SliceError>>,
}

impl Client {
    pub fn new(brick: &Arc<Brick<DiskMedia>>, epoch: u32) -> Client {
        let mut worker = Worker::open(brick, 1, 1).expect("a session");
        let attached = Worker::attach(&mut worker, SLICE, Epoch(epoch));
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
pub fn random_write(rng: &mut SplitMix64, client: &mut Client, model: &mut [u8]) -> SliceRequest {
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
