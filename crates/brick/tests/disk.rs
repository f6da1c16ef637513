//! Bricks that reach their pools by requests to a disk, with a small cache, against a simple model.

use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, SliceError, SliceReply, SliceRequest, Stamp};
use pagemesh_base::wait::until_ready;
use pagemesh_brick::brick::{Brick, MaintenanceThread};
use pagemesh_brick::file::{self, FileError};
use pagemesh_brick::worker::Worker;
use pagemesh_fabric::service::{Handler, Outcome};
use pagemesh_pmem::{DiskMedia, Durability, StatedClass};
use rustix::event::{PollFd, PollFlags};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));
const SIZE: u64 = 4 << 20;
const PAGE: u64 = 4096;
/// Sixteen pages: most reads are misses.
const CACHE_BYTES: usize = 64 << 10;

struct Pool {
    directory: TempDir,
}

impl Pool {
    fn new() -> Pool {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        file::create(&directory.path().join("pool"), 32 << 20).expect("a pool on a disk");
        Pool { directory }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("pool")
    }
}

fn open(path: &Path) -> (Arc<Brick<DiskMedia>>, MaintenanceThread<DiskMedia>) {
    let (brick, maintenance, _) = Brick::open_disk(path, CACHE_BYTES).expect("a brick");
    (brick, maintenance)
}

/// A connection's session, with the results of its requests.
struct Client {
    worker: Worker<DiskMedia>,
    ops: u64,
    results: HashMap<u64, Result<SliceReply, SliceError>>,
}

impl Client {
    fn new(brick: &Arc<Brick<DiskMedia>>, epoch: u32) -> Client {
        let mut worker = Worker::open(brick, 1, 1).expect("a session");
        let attached = Worker::attach(&mut worker, SLICE, Epoch(epoch));
        assert_eq!(attached, Ok((0, SIZE)));
        Client {
            worker,
            ops: u64::from(epoch) << 32,
            results: HashMap::new(),
        }
    }

    fn stamp(&mut self) -> Stamp {
        self.ops += 1;
        Stamp {
            epoch: Epoch((self.ops >> 32) as u32),
            op: self.ops,
            open_ops: 0,
        }
    }

    /// Executes a batch of requests that do not depend on each other. Returns their results in order.
    fn execute(&mut self, batch: Vec<SliceRequest>) -> Vec<Result<SliceReply, SliceError>> {
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

    fn read_all(&mut self) -> Vec<u8> {
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
fn random_write(rng: &mut SplitMix64, client: &mut Client, model: &mut [u8]) -> SliceRequest {
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

#[test]
fn disk_pool_holds_what_the_model_holds() {
    let home = Pool::new();
    let mut model = vec![0; SIZE as usize];
    let mut rng = SplitMix64::new(7);
    for turn in 1..=4 {
        let (brick, _maintenance) = open(&home.path());
        if turn == 1 {
            brick.create(SLICE, SIZE).expect("room");
        }
        let mut client = Client::new(&brick, turn);
        assert!(client.read_all() == model, "opening {turn}");
        for round in 0..150 {
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
}

#[test]
fn answered_write_is_on_the_disk() {
    let home = Pool::new();
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
        // What the file holds now is what a brick finds that starts after this one was killed.
        let copy = home.directory.path().join(format!("killed-{turn}"));
        std::fs::copy(home.path(), &copy).expect("a copy");
        let (restarted, _maintenance) = open(&copy);
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
    let refused = Brick::open_disk(&path, CACHE_BYTES)
        .err()
        .expect("a refusal");
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
    file::create_with_class(&path, 16 << 20, Some(stated), &mut |_, _| {}).expect("a pool");
    Brick::open_disk(&path, CACHE_BYTES).expect("a brick");
}
