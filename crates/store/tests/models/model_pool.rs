//! A small pool with a few sessions, and the conditions that must hold at the end.

use super::medium::{ModelMedium, StreamVisibility};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Image;
use pagemesh_store::journal::{JournalChunk, NextEntry};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::record::Record;
use pagemesh_store::session::{LegFailure, LegSession, Session, write};
use pagemesh_store::test_api::{ControlInternals, PoolInternals};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use uuid::Uuid;

pub(super) const SLICE: SliceId = SliceId(Uuid::from_u128(1));
const POOL_BYTES: usize = 2 << 20;
/// Pages of the object.
pub(super) const PAGES: u64 = 400;
/// Pages written in advance, each with its number plus [`INITIAL_BYTE`].
pub(super) const WRITTEN: u64 = 4;
pub(super) const INITIAL_BYTE: u8 = 100;

pub(super) struct ModelPool {
    pub medium: Arc<ModelMedium>,
    pub pool: Pool<ModelMedium>,
    pub sessions: Vec<Session<ModelMedium>>,
    pub handle: Handle,
}

/// The byte that fills one of the first pages initially.
pub(super) fn initial_byte(page: u64) -> u8 {
    INITIAL_BYTE + page as u8
}

fn open(image: Image, streams: StreamVisibility) -> (Arc<ModelMedium>, Pool<ModelMedium>) {
    let medium = Arc::new(ModelMedium::new(image, streams));
    let (pool, _) = Pool::open(medium.clone(), medium.clone()).expect("a sound pool");
    (medium, pool)
}

/// A closed pool with its first pages written.
fn image() -> Image {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    let make = || {
        let medium = ModelMedium::new(Image::filled(POOL_BYTES, 0), StreamVisibility::Immediate);
        format(&medium, Uuid::from_u128(9)).expect("a pool");
        let (medium, mut pool) = open(medium.now(), StreamVisibility::Immediate);
        pool.create(SLICE, PAGES * PAGE_BYTES as u64).expect("room");
        let number = pool.open_session(1, 1).expect("a session");
        let mut session = Session::new(pool.mapping().clone(), number);
        let handle = pool.handle(SLICE).expect("the object");
        for page in 0..WRITTEN {
            write_page(&mut session, handle, page, initial_byte(page)).expect("room");
        }
        drop(session);
        pool.close_session(number).expect("a sound pool");
        pool.close().expect("a sound pool");
        medium.now()
    };
    IMAGE.get_or_init(make).clone()
}

/// Fills one page with this byte.
pub(super) fn write_page(
    session: &mut Session<ModelMedium>,
    handle: Handle,
    page: u64,
    byte: u8,
) -> Result<(), LegFailure> {
    write_bytes(
        session,
        handle,
        page * PAGE_BYTES as u64,
        &[byte; PAGE_BYTES],
    )
}

/// Writes bytes.
pub(super) fn write_bytes(
    session: &mut Session<ModelMedium>,
    handle: Handle,
    at: u64,
    bytes: &[u8],
) -> Result<(), LegFailure> {
    let stamp = Stamp {
        epoch: Epoch(1),
        op: 1,
        open_ops: 0,
    };
    write(&mut [LegSession { session, handle }], at, bytes, stamp)
}

/// The byte that fills a page.
pub(super) fn read_page(
    session: &mut Session<ModelMedium>,
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

impl ModelPool {
    pub(super) fn new(sessions: usize, streams: StreamVisibility) -> ModelPool {
        super::explore_product();
        let (medium, mut pool) = open(image(), streams);
        let handle = pool.handle(SLICE).expect("the object");
        let session = |_| {
            let number = pool.open_session(1, 1).expect("a session");
            Session::new(pool.mapping().clone(), number)
        };
        let sessions = (0..sessions).map(session).collect();
        ModelPool {
            medium,
            pool,
            sessions,
            handle,
        }
    }

    /// Checks that a checkpoint has applied every record that it passed, and that journals hold no
    /// applied record that recovery would replay.
    pub(super) fn check_checkpoint(&mut self) {
        let block = self.pool.superblock().clone();
        for number in 0..block.journals_end {
            let view = self.pool.mapping().clone();
            let committed = view.control().session_cells(number).committed();
            let committed = committed.load(Ordering::Acquire);
            let applied = self.pool.applied_end(number);
            let head = block.journal_heads[number as usize];
            let mut journal = self.pool.journal_at(number, head);
            let (mut chunk, mut record) = (JournalChunk::default(), Record::empty());
            while journal.end() < committed {
                journal.read_ahead(&**view.media(), committed, &mut chunk);
                let is_applied = journal.end() < applied;
                let found = journal.read_next(&chunk, &mut record).expect("a record");
                if found == NextEntry::Map {
                    let is_right = is_applied == (record.seq < block.checkpoint);
                    assert!(is_right, "{}: applied {is_applied}", record.seq);
                }
            }
        }
    }

    /// Unused grants of a session.
    pub(super) fn grants_left(pool: &Pool<ModelMedium>, number: u32) -> u64 {
        let cells = pool.mapping().control().session_cells(number);
        let granted = cells.granted().load(Ordering::SeqCst);
        granted - cells.consumed().load(Ordering::SeqCst)
    }

    /// Requests frames for a session, as if the session waited for the answer.
    pub(super) fn request_frames(pool: &Pool<ModelMedium>, number: u32, frames: u64) {
        let asked = pool.mapping().control().session_cells(number).asked();
        let ticket = (asked.load(Ordering::SeqCst) as u32).wrapping_add(77);
        asked.store(u64::from(ticket) | frames << 32, Ordering::SeqCst);
    }

    /// Ends all sessions and checks: every frame has one user or is free, and each page holds one
    /// of the allowed bytes, here and after the death of all processes.
    pub(super) fn check(mut self, allowed: &[&[u8]]) {
        self.check_checkpoint();
        self.check_pages(allowed);
        let image = self.medium.now();
        self.check_frames();
        let (medium, mut pool) = open(image, StreamVisibility::Immediate);
        let number = pool.open_session(1, 1).expect("a session");
        let mut again = ModelPool {
            medium,
            sessions: vec![Session::new(pool.mapping().clone(), number)],
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
            let found = read_page(session, self.handle, page).expect("a sound page");
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
        let next = self.pool.mapping().control().seq().load(Ordering::Acquire);
        assert_eq!(self.pool.checkpoint_limit().0, next, "a floor was left");
        let mapped = self.pool.mapped_frames().expect("a table is damaged");
        let used = self.pool.used_frames();
        assert!(used == mapped, "a frame is lost or used twice");
        let usage = self.pool.usage();
        let used: u32 = used.iter().map(|word| word.count_ones()).sum();
        let used_bytes = u64::from(used) * PAGE_BYTES as u64;
        assert_eq!(
            usage.free_bytes + used_bytes,
            usage.capacity_bytes,
            "grants are lost"
        );
    }
}
