//! A small pool with a few sessions, and what must be true of it at the end.

use super::medium::{Medium, Streams};
use crate::lane::{Chunk, Followed};
use crate::pool::{Pool, format};
use crate::record::Record;
use crate::seen::Seen;
use crate::session::{Failure, Member, Session, write};
use crate::view::{Handle, StoreError};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Image;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use uuid::Uuid;

pub(super) const SLICE: SliceId = SliceId(Uuid::from_u128(1));
const POOL_BYTES: usize = 2 << 20;
/// Pages of the object.
pub(super) const PAGES: u64 = 400;
/// Pages that are written before, each with its number and [`BEFORE`].
pub(super) const WRITTEN: u64 = 4;
pub(super) const BEFORE: u8 = 100;

pub(super) struct World {
    pub medium: Arc<Medium>,
    pub pool: Pool<Medium>,
    pub sessions: Vec<Session<Medium>>,
    pub handle: Handle,
}

/// What the first pages of the object hold.
pub(super) fn before(page: u64) -> u8 {
    BEFORE + page as u8
}

fn open(image: Image, streams: Streams) -> (Arc<Medium>, Pool<Medium>) {
    let medium = Arc::new(Medium::new(image, streams));
    let (pool, _) = Pool::open(medium.clone(), medium.clone()).expect("a sound pool");
    (medium, pool)
}

/// A closed pool whose first pages are written.
fn image() -> Image {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    let make = || {
        let medium = Medium::new(Image::filled(POOL_BYTES, 0), Streams::AtOnce);
        format(&medium, Uuid::from_u128(9)).expect("a pool");
        let (medium, mut pool) = open(medium.now(), Streams::AtOnce);
        pool.create(SLICE, PAGES * PAGE_BYTES as u64).expect("room");
        let number = pool.open_session(1, 1).expect("a session");
        let mut session = Session::new(pool.view().clone(), number);
        let handle = pool.handle(SLICE).expect("the object");
        for page in 0..WRITTEN {
            put(&mut session, handle, page, before(page)).expect("room");
        }
        drop(session);
        pool.close_session(number).expect("a sound pool");
        pool.close().expect("a sound pool");
        medium.now()
    };
    IMAGE.get_or_init(make).clone()
}

/// Writes one page full of this byte.
pub(super) fn put(
    session: &mut Session<Medium>,
    handle: Handle,
    page: u64,
    byte: u8,
) -> Result<(), Failure> {
    put_part(
        session,
        handle,
        page * PAGE_BYTES as u64,
        &[byte; PAGE_BYTES],
    )
}

/// Writes bytes.
pub(super) fn put_part(
    session: &mut Session<Medium>,
    handle: Handle,
    at: u64,
    bytes: &[u8],
) -> Result<(), Failure> {
    let stamp = Stamp {
        epoch: Epoch(1),
        op: 1,
        open: 0,
    };
    write(&mut [Member { session, handle }], at, bytes, stamp)
}

/// The byte that a page is full of.
pub(super) fn get(
    session: &mut Session<Medium>,
    handle: Handle,
    page: u64,
) -> Result<u8, StoreError> {
    let mut bytes = [0; PAGE_BYTES];
    session.read(&handle, page * PAGE_BYTES as u64, &mut bytes, Epoch(1))?;
    assert!(
        bytes.iter().all(|&byte| byte == bytes[0]),
        "page {page} is torn"
    );
    Ok(bytes[0])
}

impl World {
    pub(super) fn new(sessions: usize, streams: Streams) -> World {
        let (medium, mut pool) = open(image(), streams);
        let handle = pool.handle(SLICE).expect("the object");
        let session = |_| {
            let number = pool.open_session(1, 1).expect("a session");
            Session::new(pool.view().clone(), number)
        };
        let sessions = (0..sessions).map(session).collect();
        World {
            medium,
            pool,
            sessions,
            handle,
        }
    }

    /// No record that a checkpoint passed has been left unapplied by it, and lanes keep none
    /// that was applied and would be replayed.
    pub(super) fn check_checkpoint(&mut self) {
        let passed = self.pool.block.checkpoint;
        for number in 0..self.pool.block.lanes_end {
            let view = self.pool.view().clone();
            let committed = view.control.cells(number).committed();
            let committed = committed.load(Ordering::Acquire);
            let applied = self.pool.lanes.book(number).applied.end();
            let mut lane = self
                .pool
                .lane_at(number, self.pool.block.heads[number as usize]);
            let (mut chunk, mut record) = (Chunk::default(), Record::empty());
            while lane.end() < committed {
                lane.read_on(&*view.data, committed, &mut chunk);
                let is_applied = lane.end() < applied;
                let found = lane.follow(&chunk, &mut record).expect("a record");
                if found == Followed::Map {
                    let is_right = is_applied == (record.seq < passed);
                    assert!(is_right, "{}: applied {is_applied}", record.seq);
                }
            }
        }
    }

    /// Grants that a session has left.
    pub(super) fn left(pool: &Pool<Medium>, number: u32) -> u64 {
        let cells = pool.view().control().cells(number);
        let granted = cells.granted().load(Ordering::SeqCst);
        granted - cells.consumed().load(Ordering::SeqCst)
    }

    /// Has a session ask for frames, as if it waited for the answer.
    pub(super) fn ask(pool: &Pool<Medium>, number: u32, frames: u64) {
        let asked = pool.view().control().cells(number).asked();
        let ticket = (asked.load(Ordering::SeqCst) as u32).wrapping_add(77);
        asked.store(u64::from(ticket) | frames << 32, Ordering::SeqCst);
    }

    /// Ends all sessions; every frame has one user or is free, and the pages
    /// hold one of these bytes each, here and after the death of all processes.
    pub(super) fn check(mut self, allowed: &[&[u8]]) {
        self.check_checkpoint();
        self.check_pages(allowed);
        let image = self.medium.now();
        self.check_frames();
        let (medium, mut pool) = open(image, Streams::AtOnce);
        let number = pool.open_session(1, 1).expect("a session");
        let mut again = World {
            medium,
            sessions: vec![Session::new(pool.view().clone(), number)],
            handle: self.handle,
            pool,
        };
        again.check_pages(allowed);
        again.check_frames();
    }

    fn check_pages(&mut self, allowed: &[&[u8]]) {
        let pool = &self.pool;
        let mut open = self.sessions.iter_mut();
        let session = open.find(|session| pool.is_open(session.number()));
        let session = session.expect("one is left");
        for (page, allowed) in (0..).zip(allowed) {
            let found = get(session, self.handle, page).expect("a sound page");
            assert!(allowed.contains(&found), "page {page} holds {found}");
        }
    }

    fn check_frames(&mut self) {
        for session in &self.sessions {
            if self.pool.is_open(session.number()) {
                let ended = self.pool.close_session(session.number());
                ended.expect("a sound pool");
            }
        }
        self.pool.checkpoint().expect("a sound pool");
        let view = self.pool.view().clone();
        let next = view.control.seq().load(Ordering::Acquire);
        assert_eq!(self.pool.limit().0, next, "a floor was left");
        let (seen, is_whole) =
            Seen::follow(&*view.data, &view.geometry, self.pool.block.objects_end);
        assert!(is_whole, "a table is damaged");
        let bitmap = self.pool.frames.bitmap();
        assert!(
            bitmap.words() == seen.words(),
            "a frame is lost or used twice"
        );
        let usage = self.pool.usage();
        let used_bytes = bitmap.used() * PAGE_BYTES as u64;
        assert_eq!(
            usage.free_bytes + used_bytes,
            usage.capacity_bytes,
            "grants are lost"
        );
    }
}
