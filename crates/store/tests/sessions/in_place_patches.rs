//! Tests of pages that are changed in place: the flush of the bytes, the frames that recovery may
//! copy them into, damaged pages, and the pages that are copied all the same.

use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::test_api::RecordedMedium;
use pagemesh_pmem::{Image, Media, Recorder};
use pagemesh_store::control::FrameRun;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::{Handle, StoreError};
use pagemesh_store::session::{LegSession, Session, write};
use pagemesh_store::slot::Slot;
use pagemesh_store::table::SlotLocation;
use pagemesh_store::test_api::{
    ControlInternals, MappingInternals, PoolInternals, SessionInternals, frame_at,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));
const PAGE: u64 = PAGE_BYTES as u64;
const PAGES: u64 = 400;

/// A medium that can ignore flushes. A flush by another processor has no effect either until that
/// processor's fence.
struct UnflushedMedium {
    recorder: Recorder,
    does_flush: AtomicBool,
}

impl RecordedMedium for UnflushedMedium {
    fn recorder(&self) -> &Recorder {
        &self.recorder
    }
    fn does_flush(&self) -> bool {
        self.does_flush.load(Ordering::Relaxed)
    }
}

struct PatchFixture {
    medium: Arc<UnflushedMedium>,
    pool: Pool<UnflushedMedium>,
    session: Session<UnflushedMedium>,
    handle: Handle,
    epoch: Epoch,
    op: u64,
}

impl PatchFixture {
    fn open(recorder: Recorder) -> PatchFixture {
        let medium = Arc::new(UnflushedMedium {
            recorder,
            does_flush: AtomicBool::new(true),
        });
        let (mut pool, _) = Pool::open(medium.clone(), medium.clone()).expect("sound");
        if pool.handle(SLICE).is_err() {
            pool.create(SLICE, PAGES * PAGE).expect("room");
        }
        let number = pool.open_session(1, 1).expect("a session");
        PatchFixture {
            session: Session::new(pool.mapping().clone(), number),
            handle: pool.handle(SLICE).expect("the object"),
            medium,
            pool,
            epoch: Epoch(1),
            op: 0,
        }
    }

    /// A pool with a first page that is full of ones and checkpointed.
    fn new() -> PatchFixture {
        let recorder = Recorder::new(2 << 20);
        format(&recorder, Uuid::from_u128(1)).expect("a pool");
        let mut world = PatchFixture::open(recorder);
        world.write(0, &[1; PAGE_BYTES]);
        world.pool.maintain().expect("sound");
        world
    }

    fn write(&mut self, at: u64, data: &[u8]) {
        self.op += 1;
        let stamp = Stamp {
            epoch: self.epoch,
            op: self.op,
            open_ops: 0,
        };
        let (session, handle) = (&mut self.session, self.handle);
        write(&mut [LegSession { session, handle }], at, data, stamp).expect("room");
    }

    fn read_page(&mut self, page: u64) -> Result<[u8; PAGE_BYTES], StoreError> {
        let mut bytes = [0; PAGE_BYTES];
        let read = self
            .session
            .read(&self.handle, page * PAGE, &mut bytes, Epoch(1));
        read.map(|()| bytes)
    }

    fn births(&mut self, page: u64, count: u32) -> Vec<Epoch> {
        let (session, page) = (&mut self.session, PageNo(page));
        let births = session.births(&self.handle, page, count, self.epoch);
        births.expect("sound")
    }

    fn slot(&self, page: u64) -> Slot {
        let view = self.pool.mapping();
        match view.locate(self.handle.object(), 0, PageNo(page)) {
            Ok(SlotLocation::At(at)) => view.slot(at, PageNo(page)).expect("sound"),
            other => panic!("{other:?}"),
        }
    }

    fn frame(&self, page: u64) -> FrameNo {
        self.slot(page).frame().expect("it is mapped")
    }

    /// The pool, reopened from an image.
    fn reopened(image: Image) -> PatchFixture {
        PatchFixture::open(Recorder::from_image(image))
    }
}

/// A page of ones, a part of which is twos.
fn patched_page(within: usize, len: usize) -> [u8; PAGE_BYTES] {
    std::array::from_fn(|at| 1 + u8::from((within..within + len).contains(&at)))
}

/// The owner reads the bytes of a patch only if its session may not have flushed them yet.
#[test]
fn flushed_patch_bytes_are_not_read_again() {
    let mut world = PatchFixture::new();
    let spoil = |world: &PatchFixture, line: u64| {
        let geometry = world.pool.mapping().geometry();
        let journal = geometry.journal_at(world.session.number());
        let at = journal + (line % geometry.journal_lines()) as usize * LINE_BYTES;
        world.medium.store(at, !world.medium.load(at));
    };
    // Their slots are in lines of their own: a session flushes a line when it moves to the next
    // one.
    let pages = [1, 101, 201];
    pages
        .iter()
        .for_each(|page| world.write(page * PAGE, &[1; PAGE_BYTES]));
    let first = world.session.journal_end();
    pages
        .iter()
        .for_each(|page| world.write(page * PAGE + 8, &[2; 200]));
    spoil(&world, first + 1);
    world.pool.maintain().expect("the bytes are not needed");
    assert_eq!(world.read_page(1).expect("sound")[8..208], [2; 200]);
    world.write(pages[0] * PAGE, &[3; 200]);
    spoil(&world, world.session.journal_end() - 1);
    assert!(
        world.pool.maintain().is_err(),
        "nothing has flushed the last patch"
    );
}

/// A leg that was lost before a patch must get the page, so a patch is a birth.
#[test]
fn patch_is_a_birth() {
    let mut world = PatchFixture::new();
    world.pool.raise_epoch(SLICE, Epoch(2)).expect("sound");
    world.epoch = Epoch(2);
    world.write(0, &[1; 4 * PAGE_BYTES]);
    assert_eq!(world.births(0, 4), [2; 4].map(Epoch));
    let frame = world.frame(1);
    world.pool.raise_epoch(SLICE, Epoch(3)).expect("sound");
    world.epoch = Epoch(3);
    world.write(PAGE + 100, &[2; 200]);
    assert_eq!(world.frame(1), frame, "a patch");
    assert_eq!(world.births(0, 4), [2, 3, 2, 2].map(Epoch));
}

/// A wrong check leaves the birth unknown. The page is copied instead of patched, and its new word is
/// sound.
#[test]
fn page_with_damaged_frame_word_is_not_patched() {
    for bit in 32..64 {
        let mut world = PatchFixture::new();
        world.write(0, &[1; PAGE_BYTES]);
        let frame = world.frame(0);
        let view = world.pool.mapping().clone();
        let at = view.geometry().frame_entry_at(frame);
        view.media().store(at, view.media().load(at) ^ 1 << bit);
        assert_eq!(world.births(0, 1), [Epoch(0)], "bit {bit}");
        world.write(100, &[2; 200]);
        assert_ne!(world.frame(0), frame, "bit {bit}");
        assert_eq!(world.births(0, 1), [world.epoch], "bit {bit}");
        let expected = patched_page(100, 200);
        assert_eq!(world.read_page(0), Ok(expected), "bit {bit}");
    }
}

#[test]
fn only_patch_keeps_the_frame() {
    let mut world = PatchFixture::new();
    for (within, len) in [
        (0, 1),
        (4095, 1),
        (100, 300),
        (1000, pagemesh_store::patch::PATCH_MAX),
    ] {
        let before = world.slot(0);
        world.write(0, &[1; PAGE_BYTES]);
        let fresh = world.slot(0);
        assert_ne!(fresh.frame(), before.frame());
        world.write(within, &vec![2; len]);
        let frame = fresh.frame().expect("it is mapped");
        assert_eq!(world.slot(0), fresh.map(frame), "{len} at {within}");
        let expected = patched_page(within as usize, len);
        assert_eq!(world.read_page(0), Ok(expected), "{len} at {within}");
        world.pool.maintain().expect("sound");
    }
    let before = world.frame(0);
    world.write(0, &[1; pagemesh_store::patch::PATCH_MAX + 1]);
    assert_ne!(world.frame(0), before, "too long");
    world.write(7 * PAGE + 5, &[2; 10]);
    let page = world.read_page(7).expect("sound");
    assert_eq!(
        (page[4], page[5], page[14], page[15]),
        (0, 2, 2, 0),
        "a hole"
    );
}

#[test]
fn file_pool_is_never_patched_in_place() {
    let data = Arc::new(Recorder::for_file(Image::filled(2 << 20, 0)));
    format(&*data, Uuid::from_u128(1)).expect("a pool");
    let overlay = Arc::new(data.overlay());
    let (mut pool, _) = Pool::open(data, overlay).expect("sound");
    pool.create(SLICE, PAGES * PAGE).expect("room");
    let number = pool.open_session(1, 1).expect("a session");
    let mut session = Session::new(pool.mapping().clone(), number);
    let handle = pool.handle(SLICE).expect("the object");
    let stamp = Stamp {
        epoch: Epoch(1),
        op: 0,
        open_ops: 0,
    };
    let mut frames = Vec::new();
    for data in [&[1; PAGE_BYTES][..], &[2; 300], &[3; 300]] {
        let session = &mut session;
        write(&mut [LegSession { session, handle }], 0, data, stamp).expect("room");
        let view = pool.mapping();
        let Ok(SlotLocation::At(at)) = view.locate(handle.object(), 0, PageNo(0)) else {
            panic!("no slot");
        };
        frames.push(view.slot(at, PageNo(0)).expect("sound").frame());
    }
    frames.dedup();
    assert_eq!(frames.len(), 3, "{frames:?}");
}

/// Whether a change in place survives a crash after a checkpoint, although its session never
/// reached a fence.
fn survives_crash_after_checkpoint() -> bool {
    let mut world = PatchFixture::new();
    world.medium.does_flush.store(false, Ordering::Relaxed);
    world.write(200, &[2; 300]);
    world.medium.does_flush.store(true, Ordering::Relaxed);
    world.pool.checkpoint().expect("sound");
    let image = world.medium.recorder.crash_point().image(0);
    PatchFixture::reopened(image).read_page(0) == Ok(patched_page(200, 300))
}

#[test]
fn checkpoint_flushes_unflushed_patches() {
    assert!(survives_crash_after_checkpoint());
    defect::set(Some(Defect::CheckpointPatchNotFlushed));
    assert!(!survives_crash_after_checkpoint(), "the check cannot fail");
    defect::set(None);
}

/// Whether a page is unchanged if recovery, from the older superblock, finds a patch of the frame
/// that the page has now.
fn is_unchanged_by_recovery() -> bool {
    let mut world = PatchFixture::new();
    let frame = world.frame(0);
    // Leaves the session one of all frames.
    while world.pool.allocate_frames(PAGES).is_some() {}
    let number = world.session.number();
    let left = |pool: &Pool<UnflushedMedium>| {
        let cells = pool.mapping().control().session_cells(number);
        let granted = cells.granted().load(Ordering::SeqCst);
        granted - cells.consumed().load(Ordering::SeqCst)
    };
    let mut page = 10;
    while left(&world.pool) > 1 {
        world.write(page * PAGE, &[9; PAGE_BYTES]);
        world.pool.checkpoint().expect("sound");
        page += 1;
    }
    world.write(50, &[2; 300]);
    world.write(0, &[3; PAGE_BYTES]);
    world.pool.checkpoint().expect("sound");
    world.pool.grant_frames(number, 1);
    world.write(page * PAGE, &[4; PAGE_BYTES]);
    assert_eq!(world.frame(page), frame, "it is used again");
    let mut image = world.medium.recorder.crash_point().all_persisted();
    let newest = world.pool.superblock().offset();
    image.set_word(newest + 40, !image.word(newest + 40));
    let mut again = PatchFixture::reopened(image);
    assert_eq!(again.read_page(0), Ok([3; PAGE_BYTES]));
    again.read_page(page) == Ok([4; PAGE_BYTES])
}

#[test]
fn recovery_skips_patch_of_reassigned_frame() {
    assert!(is_unchanged_by_recovery());
    defect::set(Some(Defect::PatchOnMovedFrame));
    assert!(!is_unchanged_by_recovery(), "the check cannot fail");
    defect::set(None);
}

#[test]
fn damaged_page_stays_damaged_after_patch() {
    for flipped in [64, 904] {
        let mut world = PatchFixture::new();
        let at = frame_at(world.frame(0)) + flipped;
        world.medium.store(at, world.medium.load(at) ^ 1 << 5);
        assert!(world.read_page(0).is_err());
        world.write(32, &[2; 300]);
        assert_eq!(world.read_page(0), Err(StoreError::Damaged { offset: 0 }));
        world.write(0, &[3; PAGE_BYTES]);
        assert_eq!(world.read_page(0), Ok([3; PAGE_BYTES]));
    }
}

/// Laps of a slot's generation, and of the journal.
#[test]
fn page_is_patched_beyond_generation_lap() {
    let mut world = PatchFixture::new();
    let frame = world.frame(0);
    let mut expected = [1; PAGE_BYTES];
    for round in 0..5000u32 {
        let (within, len) = (round as usize * 97 % 3500, 1 + round as usize * 31 % 200);
        let byte = round as u8;
        world.write(within as u64, &vec![byte; len]);
        expected[within..within + len].fill(byte);
        if round % 4 == 0 {
            world.pool.maintain().expect("sound");
        }
        if round % 500 == 0 {
            let image = world.medium.recorder.crash_point().image(0);
            assert_eq!(
                PatchFixture::reopened(image).read_page(0),
                Ok(expected),
                "{round}"
            );
        }
    }
    assert_eq!((world.read_page(0), world.frame(0)), (Ok(expected), frame));
    let number = world.session.number();
    world.pool.close_session(number).expect("sound");
    let runs: Vec<FrameRun> = std::iter::from_fn(|| world.pool.allocate_frames(PAGES)).collect();
    let named = runs
        .iter()
        .any(|run| (run.start..run.start + run.len).contains(&frame.0));
    assert!(!named, "the frame is free and in use");
}
