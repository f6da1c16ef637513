//! Unreadable pages: the file in memory under a running pool is truncated. A read behind its end
//! gets a SIGBUS, as for a machine check.

use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, FrameNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::unreadable::PATTERN;
use pagemesh_pmem::{MappedMedia, SharedSegment};
use pagemesh_store::check::{CheckOptions, check};
use pagemesh_store::control::Control;
use pagemesh_store::pool::{ObjectError, Pool, format};
use pagemesh_store::pool_mapping::{Handle, PoolMapping, StoreError};
use pagemesh_store::recovery::PoolError;
use pagemesh_store::session::{LegFailure, LegSession, Session, clear, write};
use pagemesh_store::slot::Slot;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

const POOL_BYTES: usize = 8 << 20;
const SLICE: SliceId = SliceId(Uuid::from_u128(7));
const SIZE: u64 = 8 << 20;
const PAGE: u64 = PAGE_BYTES as u64;

fn map(file: &File) -> Arc<MappedMedia> {
    let file = file.try_clone().expect("the file");
    Arc::new(MappedMedia::new(file, POOL_BYTES).expect("a mapping"))
}

/// A new pool with a slice, and its file.
fn new_pool() -> (File, Arc<MappedMedia>, Pool<MappedMedia>) {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    file.set_len(POOL_BYTES as u64).expect("room");
    let media = map(&file);
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("a sound pool");
    pool.create(SLICE, SIZE).expect("a slice");
    (file, media, pool)
}

/// The mapping of a client that maps the pool for itself.
fn client_mapping(file: &File, pool: &Pool<MappedMedia>) -> Arc<PoolMapping<MappedMedia>> {
    let media = map(file);
    let block = Pool::peek(&*media).expect("a pool");
    let control = pool.mapping().control().shared();
    let length = control.len_bytes();
    let control = control.as_fd().try_clone_to_owned().expect("a descriptor");
    let shared = SharedSegment::open(File::from(control), length).expect("the segment");
    let control = Control::open(shared, block.geometry.journals, block.incarnation);
    let control = control.expect("the segment");
    Arc::new(PoolMapping::new(
        media.clone(),
        media,
        control,
        block.geometry,
        block.pool,
        block.incarnation,
    ))
}

struct Writer {
    session: Session<MappedMedia>,
    handle: Handle,
    op: u64,
}

impl Writer {
    fn new(pool: &mut Pool<MappedMedia>, view: &Arc<PoolMapping<MappedMedia>>) -> Writer {
        let number = pool.open_session(1, 1).expect("a session");
        pool.maintain().expect("grants");
        let session = Session::new(view.clone(), number);
        Writer {
            // No owner maintains the pool during the wait.
            session: session.with_owner_wait(Duration::from_millis(1)),
            handle: pool.handle(SLICE).expect("there"),
            op: 0,
        }
    }

    fn stamp(&mut self) -> Stamp {
        self.op += 1;
        Stamp {
            epoch: Epoch(1),
            op: self.op,
            open_ops: 0,
        }
    }

    fn write_page(&mut self, page: u64, byte: u8) -> Result<(), LegFailure> {
        let (stamp, handle) = (self.stamp(), self.handle);
        let session = &mut self.session;
        let members = &mut [LegSession { session, handle }];
        write(members, page * PAGE, &[byte; PAGE_BYTES], stamp)
    }

    /// Writes; maintains the pool while there is no room.
    fn write_with_maintenance(
        &mut self,
        pool: &mut Pool<MappedMedia>,
        page: u64,
        byte: u8,
    ) -> Result<(), LegFailure> {
        for _ in 0..10 {
            match self.write_page(page, byte) {
                Err(failure)
                    if matches!(failure.cause, StoreError::NoSpace | StoreError::TimedOut) => {}
                other => return other,
            }
            pool.maintain().expect("sound");
        }
        self.write_page(page, byte)
    }

    fn try_clear(&mut self, page: u64, count: u64) -> Result<(), LegFailure> {
        let (stamp, handle) = (self.stamp(), self.handle);
        let session = &mut self.session;
        let members = &mut [LegSession { session, handle }];
        clear(members, page * PAGE, count * PAGE, stamp)
    }

    fn clear(&mut self, page: u64, count: u64) {
        self.try_clear(page, count).expect("cleared");
    }

    fn read_page(&mut self, page: u64) -> Result<u8, StoreError> {
        let mut bytes = [0; PAGE_BYTES];
        let handle = self.handle;
        self.session
            .read(&handle, page * PAGE, &mut bytes, Epoch(1))?;
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "torn");
        Ok(bytes[0])
    }
}

/// When the pool is reopened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReopenMode {
    Never,
    /// After its brick was killed, before a checkpoint had freed a frame.
    AfterKill,
    /// After it was closed.
    AfterClose,
}

/// Fills a pool, makes its last frame unreadable, and rewrites that page and others many times.
fn check_pool_stays_usable(is_client: bool, opened: ReopenMode) {
    let (file, media, mut pool) = new_pool();
    let view = match is_client {
        true => client_mapping(&file, &pool),
        false => pool.mapping().clone(),
    };
    let mut writer = Writer::new(&mut pool, &view);
    let mut pages = 0;
    while writer.write_with_maintenance(&mut pool, pages, 1).is_ok() {
        pages += 1;
    }
    assert!(pages > 1000, "{pages} pages are in use");
    file.set_len((POOL_BYTES - PAGE_BYTES) as u64)
        .expect("cut off");
    let damaged: Vec<u64> = (0..pages)
        .filter(|page| match writer.read_page(*page) {
            Ok(byte) => byte != 1,
            Err(StoreError::Damaged { offset }) => offset == page * PAGE,
            Err(cause) => panic!("{cause}"),
        })
        .collect();
    assert_eq!(damaged.len(), 1, "the last frame is in use: {damaged:?}");
    let lost = damaged[0];

    let first = if lost < pages / 2 { pages / 2 } else { 0 };
    writer.clear(first, pages / 2);
    pool.maintain().expect("sound");
    let anew = writer.write_with_maintenance(&mut pool, lost, 2);
    anew.expect("written elsewhere");
    if opened != ReopenMode::AfterKill {
        use_all_frames(&mut pool, &mut writer, first..first + pages / 2, pages);
        assert_eq!(writer.read_page(lost), Ok(2));
    }
    match opened {
        ReopenMode::Never => return,
        ReopenMode::AfterKill => drop((writer, pool)),
        ReopenMode::AfterClose => {
            let number = writer.session.number();
            pool.close_session(number).expect("closed");
            drop(writer);
            pool.close().expect("closed");
        }
    }
    drop((view, media));
    let media = map_truncated_file(&file);
    let (mut pool, _) = Pool::open(media.clone(), media).expect("opened");
    let view = pool.mapping().clone();
    let mut writer = Writer::new(&mut pool, &view);
    use_all_frames(&mut pool, &mut writer, first..first + pages / 2, pages);
    assert_eq!(writer.read_page(lost), Ok(2));
}

/// Uses all free frames several times: as many as the pages `free` take. Clears those pages, and
/// all from `pages` on, after each round.
fn use_all_frames(pool: &mut Pool<MappedMedia>, writer: &mut Writer, free: Range<u64>, pages: u64) {
    let count = free.end - free.start;
    for round in 0..4 {
        let mut used = 0;
        for page in free.clone().chain(pages..SIZE / PAGE) {
            if writer.write_with_maintenance(pool, page, round).is_err() {
                break;
            }
            assert_eq!(writer.read_page(page), Ok(round));
            used += 1;
        }
        assert!(used > count - 8, "{used} frames were free");
        writer.clear(free.start, count);
        writer.clear(pages, SIZE / PAGE - pages);
        pool.maintain().expect("sound");
    }
}

#[test]
fn unreadable_page_is_damaged_and_frame_withheld() {
    check_pool_stays_usable(false, ReopenMode::Never);
    check_pool_stays_usable(false, ReopenMode::AfterKill);
    check_pool_stays_usable(false, ReopenMode::AfterClose);
}

#[test]
fn client_reports_unreadable_page() {
    check_pool_stays_usable(true, ReopenMode::Never);
    check_pool_stays_usable(true, ReopenMode::AfterClose);
}

/// An unreadable leaf: its pages are damaged, no page is changed there, and its records are kept.
#[test]
fn unreadable_leaf_is_damaged_and_unchanged() {
    let (file, media, mut pool) = new_pool();
    let view = pool.mapping().clone();
    let mut writer = Writer::new(&mut pool, &view);
    writer.write_page(0, 1).expect("room");
    pool.maintain().expect("sound");
    writer.write_page(1, 1).expect("room");
    let content = content_of(&file);
    let pages = content.as_chunks::<PAGE_BYTES>().0;
    let data = pages.iter().position(|page| *page == [1; PAGE_BYTES]);
    let data = FrameNo(data.expect("the page") as u64);
    let names_it = |word: &[u8; 8]| {
        let slot = Slot::decode(u64::from_le_bytes(*word));
        slot.is_ok_and(|slot| slot.frame() == Some(data))
    };
    let frames = view.geometry().first_frames();
    let leaf = frames.clone().find(|frame| {
        let words = pages[*frame as usize].as_chunks::<8>().0;
        words.iter().any(names_it)
    });
    let leaf = leaf.expect("a leaf");
    // The first frames are nodes: no other leaf lies behind this one.
    file.set_len(leaf * PAGE).expect("cut off");

    let damaged = |page| StoreError::Damaged {
        offset: page * PAGE,
    };
    for page in [0, 1, 2] {
        assert_eq!(writer.read_page(page), Err(damaged(page)));
        let put = writer.write_page(page, 2).map_err(|failure| failure.cause);
        assert_eq!(put, Err(damaged(page)));
        let cleared = writer.try_clear(page, 1).map_err(|failure| failure.cause);
        assert_eq!(cleared, Err(damaged(page)));
    }
    // The record of page 1 has to stay, because its slot never reached the medium.
    let tended = pool.maintain().map(drop);
    let is_its = |cause: &PoolError| matches!(cause, PoolError::Unreadable(at) if *at / PAGE_BYTES == leaf as usize);
    assert!(
        matches!(&tended, Err(ObjectError::Pool(cause)) if is_its(cause)),
        "{tended:?}"
    );
    drop((writer, view, pool, media));
    let media = map_truncated_file(&file);
    let opened = Pool::open(media.clone(), media).map(drop);
    assert!(opened.as_ref().is_err_and(is_its), "{opened:?}");
}

/// The last page of the file that is full of this byte.
fn last_page(content: &[u8], byte: u8) -> usize {
    let mut pages = content.as_chunks::<PAGE_BYTES>().0.iter();
    let last = pages.rposition(|page| *page == [byte; PAGE_BYTES]);
    last.expect("the page")
}

fn content_of(file: &File) -> Vec<u8> {
    let mut content = vec![0; POOL_BYTES];
    file.read_exact_at(&mut content, 0).expect("the pool");
    content
}

/// The last change of a session was to page 0, and its frame is unreadable. Returns the dropped and
/// damaged counts of the opening, and the contents of pages 0 and 1.
fn open_with_unreadable_last_page() -> (u64, u64, [Result<u8, StoreError>; 2]) {
    let (file, media, mut pool) = new_pool();
    let view = pool.mapping().clone();
    let mut writer = Writer::new(&mut pool, &view);
    for (page, byte) in [(0, 1), (1, 1)] {
        writer.write_page(page, byte).expect("room");
    }
    let before = content_of(&file);
    writer.write_page(0, 2).expect("room");
    drop((writer, view, pool, media));

    // Frames are granted in order: the last one lies behind all others in use.
    let content = content_of(&file);
    let last = last_page(&content, 2);
    let pages = content.as_chunks::<PAGE_BYTES>().0;
    assert_eq!(
        pages.iter().rposition(|page| *page != [0; PAGE_BYTES]),
        Some(last)
    );
    // Restores the slot: a persistent one would prove that the change was committed.
    let words = content
        .as_chunks::<8>()
        .0
        .iter()
        .zip(before.as_chunks::<8>().0);
    for (word, (now, before)) in words.enumerate() {
        let slot = Slot::decode(u64::from_le_bytes(*now));
        if now != before && slot.is_ok_and(|slot| slot.frame() == Some(FrameNo(last as u64))) {
            file.write_all_at(before, word as u64 * 8)
                .expect("the pool");
        }
    }
    file.set_len((last * PAGE_BYTES) as u64).expect("cut off");

    let media = map_truncated_file(&file);
    let (mut pool, recovered) = Pool::open(media.clone(), media).expect("opened");
    let view = pool.mapping().clone();
    let mut reader = Writer::new(&mut pool, &view);
    let pages = [reader.read_page(0), reader.read_page(1)];
    (recovered.dropped, recovered.damaged, pages)
}

/// The change may have been acknowledged, so the page must not show its older bytes.
#[test]
fn page_unreadable_at_open_is_damaged_and_not_older() {
    let damaged = Err(StoreError::Damaged { offset: 0 });
    let found = open_with_unreadable_last_page();
    assert_eq!(found, (0, 1, [damaged, Ok(1)]));
    defect::set(Some(Defect::UnreadableDropped));
    let found = open_with_unreadable_last_page();
    defect::set(None);
    assert_eq!(found, (1, 0, [Ok(1), Ok(1)]), "the defect has an effect");
}

/// Maps the full length of a truncated pool file.
fn map_truncated_file(file: &File) -> Arc<MappedMedia> {
    let length = file.metadata().expect("a size").len();
    file.set_len(POOL_BYTES as u64).expect("room");
    let media = map(file);
    file.set_len(length).expect("cut off");
    media
}

#[test]
fn check_names_unreadable_page() {
    let (file, media, mut pool) = new_pool();
    let view = pool.mapping().clone();
    let mut writer = Writer::new(&mut pool, &view);
    writer.write_page(3, 5).expect("room");
    pool.close_session(writer.session.number()).expect("closed");
    drop((writer, view));
    pool.close().expect("closed");
    let last = last_page(&content_of(&file), 5);
    file.set_len((last * PAGE_BYTES) as u64).expect("cut off");
    let scratch = media.overlay().expect("an overlay");
    let mut options = CheckOptions {
        is_ordered: true,
        reads_data: true,
        progress: &mut |_, _| {},
    };
    let (report, _) = check(&scratch, &mut options).expect("checked");
    let [finding] = &report.findings[..] else {
        panic!("{:?}", report.findings);
    };
    assert_eq!(finding.location.pages, Some(3..4));
    assert_eq!(finding.location.frame, Some(last as u64));
}

#[test]
fn unreadable_page_filler_is_no_valid_slot() {
    assert!(Slot::decode(PATTERN).is_err());
    assert_eq!(Slot::correct(PATTERN), None);
}
