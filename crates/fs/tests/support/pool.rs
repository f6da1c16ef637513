//! A space on a slice of a pool in recorded memory. A crash image of the pool, with cached lines
//! lost or not, is recovered into a crash image of the space.

use super::memory::wait;
use super::{OWNER, clock};
use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{SLICE_IO_BYTES_MAX, SliceError, SliceReply, SliceRequest, Stamp};
use pagemesh_base::space::{
    Channel, Completion, Reply, Request, Space, SpaceError, Token, check_range,
};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{Fs, IoChannel, MkfsOptions, mkfs};
use pagemesh_pmem::{CrashPoint, Image, Recorder};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::requests::{ExecuteOutcome, execute};
use pagemesh_store::session::Session;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(1));
/// The slice of another volume.
const OTHER: SliceId = SliceId(Uuid::from_u128(2));
const EPOCH: Epoch = Epoch(1);

/// A slice, and the process that has it open.
#[derive(Clone)]
pub struct PoolSpace {
    media: Arc<Recorder>,
    /// The pool is a file: unflushed writes may be lost.
    buffers: bool,
    size_bytes: u64,
    session: Arc<Mutex<(Session<Recorder>, u64)>>,
    pool: Arc<Mutex<Pool<Recorder>>>,
    requests: Arc<ChangeCounts>,
}

/// Changes so far.
#[derive(Default)]
struct ChangeCounts {
    transactions: AtomicUsize,
    /// Of pages, outside of transactions.
    direct: AtomicUsize,
}

fn open(media: &Arc<Recorder>, buffers: bool) -> Pool<Recorder> {
    let overlay = if buffers {
        Arc::new(media.overlay())
    } else {
        media.clone()
    };
    let (pool, _) = Pool::open(media.clone(), overlay).expect("it recovers");
    pool
}

impl PoolSpace {
    /// A new pool with a file system.
    pub fn new(pool_bytes: usize, size_bytes: u64, buffers: bool) -> PoolSpace {
        let media = Arc::new(if buffers {
            Recorder::for_file(Image::filled(pool_bytes, 0))
        } else {
            Recorder::new(pool_bytes)
        });
        format(&*media, Uuid::from_u128(9)).expect("a pool");
        let mut pool = open(&media, buffers);
        pool.create(SLICE, size_bytes).expect("room");
        let made = PoolSpace::of(media, pool, buffers);
        let options = MkfsOptions {
            uuid: Uuid::from_u128(1),
            hash_key: [2, 3],
            limit_bytes: 0,
            owner: OWNER,
            mode: 0o755,
        };
        mkfs(&made.shared(), wait, clock, options).expect("made");
        made
    }

    /// A pool after a crash.
    pub fn recover(image: Image, buffers: bool) -> PoolSpace {
        let media = Arc::new(if buffers {
            Recorder::for_file(image).without_crash_points()
        } else {
            Recorder::unrecorded(image)
        });
        let pool = open(&media, buffers);
        PoolSpace::of(media, pool, buffers)
    }

    /// Fills the free room of the pool from another slice.
    pub fn fill(&self) {
        let created = self.lock_pool().create(OTHER, self.size_bytes).map(drop);
        created.expect("room");
        for offset in (0..self.size_bytes).step_by(PAGE_BYTES) {
            let write = SliceRequest::Write {
                offset,
                data: Bytes::from(vec![9; PAGE_BYTES]),
                stamp: self.stamp(),
            };
            match self.execute_on_slice(OTHER, write) {
                Ok(_) => {}
                Err(SliceError::NoSpace) => return,
                Err(other) => panic!("the pool refuses: {other}"),
            }
        }
    }

    /// Makes all changes so far durable.
    pub fn flush(&self) {
        self.run(Request::Flush).expect("a sound medium");
    }

    fn of(media: Arc<Recorder>, mut pool: Pool<Recorder>, buffers: bool) -> PoolSpace {
        let number = pool.open_session(1, 1).expect("a session");
        let session = Session::new(pool.mapping().clone(), number);
        let (_, object) = pool.find(SLICE).expect("the slice");
        let pool = Arc::new(Mutex::new(pool));
        let owner = pool.clone();
        let tend = Box::new(move || {
            let tended = owner.lock().expect("no panic").maintain();
            tended.map(drop).expect("sound");
        });
        PoolSpace {
            media,
            buffers,
            size_bytes: object.size_bytes,
            session: Arc::new(Mutex::new((session.in_owner_process(tend), 0))),
            pool,
            requests: Arc::default(),
        }
    }

    /// Numbers of transactions, and of other changes of pages, since the last call.
    pub fn take_change_counts(&self) -> (usize, usize) {
        let take = |count: &AtomicUsize| count.swap(0, Ordering::Relaxed);
        (
            take(&self.requests.transactions),
            take(&self.requests.direct),
        )
    }

    /// The possible crash images at each fence since the last call, and now.
    pub fn crash_points(&self) -> Vec<CrashPoint> {
        self.media.take_crash_points()
    }

    pub fn shared(&self) -> Arc<dyn Space> {
        Arc::new(self.clone())
    }

    pub fn mount(&self) -> (Fs, IoChannel) {
        let fs = Fs::mount(self.shared(), wait, clock).expect("mounted");
        while fs.free_deferred_piece() {}
        let port = fs.open_channel().expect("a port");
        (fs, port)
    }

    /// Mapped pages of the slice.
    pub fn mapped_pages(&self) -> u64 {
        let mut at = 0;
        let mut bytes = 0;
        while at < self.size_bytes {
            let len = self.size_bytes - at;
            let Ok(SliceReply::Extents(extents)) =
                self.execute_request(SliceRequest::Extents { offset: at, len })
            else {
                panic!("a reply to extents");
            };
            for extent in extents {
                at += extent.len;
                bytes += extent.len * u64::from(extent.mapped);
            }
        }
        bytes / 4096
    }

    fn lock_pool(&self) -> std::sync::MutexGuard<'_, Pool<Recorder>> {
        self.pool.lock().expect("no panic")
    }

    fn execute_request(&self, request: SliceRequest) -> Result<SliceReply, SliceError> {
        self.execute_on_slice(SLICE, request)
    }

    fn execute_on_slice(
        &self,
        slice: SliceId,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        // The owner's share first: no other thread does it here.
        let handle = {
            let mut pool = self.lock_pool();
            pool.maintain().expect("sound");
            pool.handle(slice).expect("the slice")
        };
        let mut session = self.session.lock().expect("no panic");
        match execute(&mut session.0, handle, EPOCH, request) {
            ExecuteOutcome::Done(answer) => answer,
            ExecuteOutcome::NeedsOwner(request) => panic!("unexpected request {request:?}"),
        }
    }

    fn stamp(&self) -> Stamp {
        let mut session = self.session.lock().expect("no panic");
        session.1 += 1;
        Stamp {
            epoch: EPOCH,
            op: session.1,
            open_ops: 0,
        }
    }

    fn run(&self, request: Request) -> Result<Reply, SpaceError> {
        let is_durable = matches!(
            request,
            Request::Write { durable: true, .. } | Request::Transact { durable: true, .. }
        );
        match request {
            Request::Transact { .. } => {
                self.requests.transactions.fetch_add(1, Ordering::Relaxed);
            }
            Request::Write { .. } | Request::Discard { .. } => {
                self.requests.direct.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
        let reply = self.run_buffered(request)?;
        if is_durable {
            self.change(SliceRequest::Flush)?;
        }
        Ok(reply)
    }

    fn run_buffered(&self, request: Request) -> Result<Reply, SpaceError> {
        match request {
            Request::Read { offset, len } => {
                check_range(self.size_bytes, offset, len.into())?;
                let mut bytes = Vec::new();
                while bytes.len() < len as usize {
                    let rest = len - bytes.len() as u32;
                    let read = SliceRequest::Read {
                        offset: offset + bytes.len() as u64,
                        len: rest.min(SLICE_IO_BYTES_MAX),
                    };
                    match self.execute_request(read).map_err(space_error)? {
                        SliceReply::Data(data) => bytes.extend(data),
                        other => panic!("a read gives {other:?}"),
                    }
                }
                Ok(Reply::Data(bytes))
            }
            Request::Write { offset, data, .. } => {
                check_range(self.size_bytes, offset, data.len() as u64)?;
                let mut rest: Bytes = data;
                let mut offset = offset;
                while !rest.is_empty() {
                    let data = rest.split_to(rest.len().min(SLICE_IO_BYTES_MAX as usize));
                    let len = data.len() as u64;
                    let stamp = self.stamp();
                    self.change(SliceRequest::Write {
                        offset,
                        data,
                        stamp,
                    })?;
                    offset += len;
                }
                Ok(Reply::Done)
            }
            Request::Transact { parts, .. } => {
                let stamp = self.stamp();
                self.change(SliceRequest::Transact { parts, stamp })
            }
            Request::Discard { offset, len } => {
                let stamp = self.stamp();
                self.change(SliceRequest::Clear { offset, len, stamp })
            }
            Request::WriteZeroes { .. } => panic!("the file system never sends it"),
            Request::Flush => self.change(SliceRequest::Flush),
            Request::Extents { offset, len } => {
                match self.execute_request(SliceRequest::Extents { offset, len }) {
                    Ok(SliceReply::Extents(extents)) => Ok(Reply::Extents(extents)),
                    other => panic!("a question for extents gives {other:?}"),
                }
            }
        }
    }

    fn change(&self, request: SliceRequest) -> Result<Reply, SpaceError> {
        self.execute_request(request).map_err(space_error)?;
        Ok(Reply::Done)
    }
}

fn space_error(cause: SliceError) -> SpaceError {
    match cause {
        SliceError::NoSpace => SpaceError::NoSpace("the pool".into()),
        other => panic!("the pool refuses: {other}"),
    }
}

impl Space for PoolSpace {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn has_write_cache(&self) -> bool {
        self.buffers
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        Ok(Box::new(PoolChannel {
            space: self.clone(),
            done: Vec::new(),
        }))
    }
}

struct PoolChannel {
    space: PoolSpace,
    done: Vec<Completion>,
}

impl Channel for PoolChannel {
    fn submit(&mut self, token: Token, request: Request) {
        let result = self.space.run(request);
        self.done.push(Completion { token, result });
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.done);
    }

    fn poll_fds(&self, _: &mut Vec<RawFd>) {}
}
