//! Births of pages and holes: which record sets them, and that copies, moves, crashes and checkpoints
//! keep them.

use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{PageRun, SliceReply, SliceRequest, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, Recorder};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::requests::{ExecuteOutcome, execute};
use pagemesh_store::session::Session;
use pagemesh_store::test_api::ControlInternals;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));
const PAGE: u64 = PAGE_BYTES as u64;
const PAGES: u64 = 1024;
/// Pages of one leaf of a page table.
const LEAF_PAGES: u64 = 512;

struct BirthFixture {
    media: Arc<Recorder>,
    pool: Pool<Recorder>,
    session: Session<Recorder>,
    handle: Handle,
    epoch: u32,
    op: u64,
}

impl BirthFixture {
    fn new() -> BirthFixture {
        let recorder = Recorder::new(8 << 20);
        format(&recorder, Uuid::from_u128(1)).expect("a pool");
        BirthFixture::open(recorder)
    }

    fn open(recorder: Recorder) -> BirthFixture {
        let media = Arc::new(recorder);
        let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
        if pool.handle(SLICE).is_err() {
            pool.create(SLICE, PAGES * PAGE).expect("room");
        }
        let number = pool.open_session(1, 1).expect("a session");
        BirthFixture {
            session: Session::new(pool.mapping().clone(), number),
            handle: pool.handle(SLICE).expect("the object"),
            media,
            pool,
            epoch: 1,
            op: 0,
        }
    }

    fn raise(&mut self, epoch: u32) {
        self.pool.raise_epoch(SLICE, Epoch(epoch)).expect("sound");
        self.epoch = epoch;
    }

    fn stamp(&mut self) -> Stamp {
        self.op += 1;
        Stamp {
            epoch: Epoch(self.epoch),
            op: self.op,
            open_ops: 0,
        }
    }

    fn ask(&mut self, request: SliceRequest) -> SliceReply {
        let epoch = Epoch(self.epoch);
        match execute(&mut self.session, self.handle, epoch, request) {
            ExecuteOutcome::Done(reply) => reply.expect("sound"),
            other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, page: u64, count: usize) {
        let stamp = self.stamp();
        self.ask(SliceRequest::Write {
            offset: page * PAGE,
            data: vec![self.epoch as u8; count * PAGE_BYTES].into(),
            stamp,
        });
    }

    fn clear(&mut self, page: u64, count: u64) {
        let stamp = self.stamp();
        let (offset, len) = (page * PAGE, count * PAGE);
        self.ask(SliceRequest::Clear { offset, len, stamp });
    }

    fn copy(&mut self, page: u64, births: &[u32], is_hole: bool) {
        let stamp = self.stamp();
        let bytes = if is_hole {
            0
        } else {
            births.len() * PAGE_BYTES
        };
        self.ask(SliceRequest::Copy {
            page: PageNo(page),
            births: births.iter().copied().map(Epoch).collect(),
            data: vec![0xcc; bytes].into(),
            stamp,
        });
    }

    fn births(&mut self, page: u64, count: u32) -> Vec<u32> {
        let page = PageNo(page);
        match self.ask(SliceRequest::Births { page, count }) {
            SliceReply::Births(births) => births.into_iter().map(|birth| birth.0).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn dirty(&mut self, since: u32) -> Vec<(u64, u64)> {
        let (since, from) = (Epoch(since), PageNo(0));
        let runs = match self.ask(SliceRequest::Dirty { since, from }) {
            SliceReply::Dirty { runs, next: None } => runs,
            other => panic!("{other:?}"),
        };
        let pair = |PageRun { page, count }: PageRun| (page.0, count);
        runs.into_iter().map(pair).collect()
    }

    /// The pool after a power failure, when everything that was fenced is there.
    fn after_crash(self) -> BirthFixture {
        let epoch = self.epoch;
        drop((self.session, self.pool));
        let image = self.media.crash_point().image(0);
        let mut next = BirthFixture::open(Recorder::from_image(image));
        next.epoch = epoch;
        next
    }
}

/// Each word of a frame may have to be read from a disk, and barriers wait for an operation.
#[test]
fn dirty_examines_one_leaf_in_an_operation() {
    let mut world = BirthFixture::new();
    world.raise(3);
    world.write(LEAF_PAGES - 1, 2);
    let (mapping, number) = (world.pool.mapping().clone(), world.session.number());
    let cells = mapping.control().session_cells(number);
    let before = cells.active().load(Ordering::SeqCst);
    assert_eq!(world.dirty(3), [(LEAF_PAGES - 1, 2)]);
    // Odd within an operation.
    let operations = (cells.active().load(Ordering::SeqCst) - before) / 2;
    assert_eq!(operations, PAGES / LEAF_PAGES);
}

#[test]
fn pages_and_holes_are_born_at_their_record() {
    let mut world = BirthFixture::new();
    world.raise(3);
    world.write(0, 4);
    world.raise(5);
    assert_eq!(
        world.births(0, 5),
        [3, 3, 3, 3, 0],
        "a barrier marks nothing"
    );
    world.write(1, 1);
    world.clear(2, 1);
    assert_eq!(world.births(0, 5), [3, 5, 5, 3, 0]);
    assert_eq!(world.dirty(5), [(1, 2)]);
    assert_eq!(world.dirty(4), [(1, 2)]);
    assert_eq!(world.dirty(3), [(0, 4)]);
    assert_eq!(world.dirty(6), []);
    let mut world = world.after_crash();
    assert_eq!(world.births(0, 5), [3, 5, 5, 3, 0]);
    world.pool.checkpoint().expect("sound");
    let mut world = world.after_crash();
    assert_eq!(world.births(0, 5), [3, 5, 5, 3, 0]);
}

/// A clear in flight at a loss is sent again under the epoch of the loss.
#[test]
fn hole_of_earlier_epoch_is_born_anew_by_clear() {
    let mut world = BirthFixture::new();
    world.raise(3);
    world.write(0, 2);
    world.clear(0, 3);
    assert_eq!(world.births(0, 3), [3, 3, 0]);
    let number = world.session.number();
    let end = |world: &BirthFixture| {
        let cells = world.pool.mapping().control().session_cells(number);
        cells.committed().load(Ordering::Acquire)
    };
    let before = end(&world);
    world.clear(0, 3);
    assert_eq!(end(&world), before, "no record for holes of the same epoch");
    world.raise(4);
    defect::set(Some(Defect::HoleKeepsBirth));
    world.clear(0, 3);
    defect::set(None);
    assert_eq!(world.births(0, 3), [3, 3, 0], "the defect");
    world.clear(0, 3);
    assert_eq!(world.births(0, 3), [4, 4, 0], "page 2 was never written");
}

#[test]
fn copies_keep_births() {
    let mut world = BirthFixture::new();
    world.raise(9);
    world.write(0, 6);
    world.copy(0, &[2, 2, 0, 7], false);
    assert_eq!(world.births(0, 6), [2, 2, 9, 7, 9, 9]);
    // Holes, on mapped pages, on a hole, and where no leaf is linked yet.
    world.copy(4, &[3, 0], true);
    world.copy(4, &[4, 0], true);
    world.copy(600, &[5, 0, 6], true);
    for is_checkpointed in [false, true] {
        assert_eq!(world.births(0, 6), [2, 2, 9, 7, 4, 9]);
        assert_eq!(world.births(600, 3), [5, 0, 6]);
        assert_eq!(world.dirty(7), [(2, 2), (5, 1)]);
        if is_checkpointed {
            world.pool.checkpoint().expect("sound");
        }
        world = world.after_crash();
    }
    let mut bytes = [0; 2 * PAGE_BYTES];
    let read = world
        .session
        .read(&world.handle, 3 * PAGE, &mut bytes, Epoch(9));
    read.expect("sound");
    assert_eq!(bytes[..PAGE_BYTES], [0xcc; PAGE_BYTES]);
    assert_eq!(bytes[PAGE_BYTES..], [0; PAGE_BYTES]);
}

#[test]
fn page_with_damaged_frame_word_is_listed() {
    for bit in 0..64 {
        let mut world = BirthFixture::new();
        world.raise(3);
        world.write(0, 3);
        let mapping = world.pool.mapping().clone();
        let geometry = *mapping.geometry();
        // The pages lie in consecutive frames: the word of the second has the birth 3.
        let words = geometry
            .first_frames()
            .map(|frame| geometry.frame_entry_at(FrameNo(frame)));
        let is_born = |at: &usize| mapping.media().load(*at) >> 32 & 0xfff_ffff == 3;
        let used: Vec<usize> = words.filter(is_born).collect();
        assert_eq!(used.len(), 3);
        let flipped = mapping.media().load(used[1]) ^ 1 << bit;
        mapping.media().store(used[1], flipped);
        assert_eq!(world.dirty(1000), [(1, 1)], "bit {bit}");
        assert_eq!(world.births(0, 3), [3, 0, 3], "bit {bit}");
    }
}
