//! Bit flips in page-table slots of a running pool. The first access to a slot above the leaves
//! corrects it. A flipped slot of a page makes reading the page an error, until the whole page is
//! written or cleared; everything else keeps working.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{PageRun, SliceReply, SliceRequest, Stamp, TransactionPart};
use pagemesh_base::space::Extent;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Media, Recorder};
use pagemesh_store::geometry::Geometry;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::{Handle, StoreError};
use pagemesh_store::requests::{ExecuteOutcome, execute};
use pagemesh_store::session::{LegSession, Session, clear, write};
use pagemesh_store::slot::Slot;
use pagemesh_store::table::{PageTable, SlotLocation};
use pagemesh_store::test_api::ROOT_AT;
use pagemesh_store::transaction::transact;
use std::sync::Arc;
use uuid::Uuid;

const POOL_BYTES: usize = 8 << 20;
const SLICE: SliceId = SliceId(Uuid::from_u128(77));
const SIZE: u64 = 8 << 20;
const PAGE: u64 = PAGE_BYTES as u64;
const HEIGHT: u8 = 4;
/// One bit of each part of a slot: frame, hole, reserved, track, generation, check.
const BITS: [u32; 9] = [0, 9, 35, 36, 38, 41, 44, 55, 60];

struct FlippedSlotPool {
    media: Arc<Recorder>,
    /// The overlay with the slots on a file; otherwise the medium itself.
    overlay: Arc<Recorder>,
    pool: Pool<Recorder>,
    session: Session<Recorder>,
    handle: Handle,
    geometry: Geometry,
    ops: u64,
}

impl FlippedSlotPool {
    fn empty_pool(has_overlay: bool) -> FlippedSlotPool {
        let media = match has_overlay {
            true => Recorder::for_file(Image::filled(POOL_BYTES, 0)),
            false => Recorder::new(POOL_BYTES),
        };
        let media = Arc::new(media);
        format(&*media, Uuid::from_u128(1)).expect("a pool");
        let overlay = match has_overlay {
            true => Arc::new(media.overlay()),
            false => media.clone(),
        };
        let (mut pool, _) = Pool::open(media.clone(), overlay.clone()).expect("a sound pool");
        pool.create(SLICE, SIZE).expect("a slice");
        let number = pool.open_session(1, 1).expect("a session");
        FlippedSlotPool {
            session: Session::new(pool.mapping().clone(), number),
            handle: pool.handle(SLICE).expect("there"),
            geometry: *pool.mapping().geometry(),
            media,
            overlay,
            pool,
            ops: 0,
        }
    }

    /// A pool with some pages of two leaves; their slots are persistent.
    fn written_pool(has_overlay: bool) -> FlippedSlotPool {
        let mut case = FlippedSlotPool::empty_pool(has_overlay);
        for page in [0, 1, 2, 511, 700] {
            case.write_page(page, page as u8).expect("room");
        }
        case.pool.checkpoint().expect("a sound pool");
        case
    }

    fn stamp(&mut self) -> Stamp {
        self.ops += 1;
        Stamp {
            epoch: Epoch(1),
            op: self.ops,
            open_ops: 0,
        }
    }

    fn write_page(&mut self, page: u64, byte: u8) -> Result<(), StoreError> {
        self.write_bytes(page * PAGE, &[byte; PAGE_BYTES])
    }

    fn write_bytes(&mut self, offset: u64, data: &[u8]) -> Result<(), StoreError> {
        let stamp = self.stamp();
        let (session, handle) = (&mut self.session, self.handle);
        let written = write(&mut [LegSession { session, handle }], offset, data, stamp);
        written.map_err(|failure| failure.cause)
    }

    fn clear(&mut self, page: u64, count: u64) -> Result<(), StoreError> {
        let stamp = self.stamp();
        let (session, handle) = (&mut self.session, self.handle);
        let members = &mut [LegSession { session, handle }];
        clear(members, page * PAGE, count * PAGE, stamp).map_err(|failure| failure.cause)
    }

    fn ask(&mut self, request: SliceRequest) -> SliceReply {
        match execute(&mut self.session, self.handle, Epoch(9), request) {
            ExecuteOutcome::Done(Ok(reply)) => reply,
            other => panic!("{other:?}"),
        }
    }

    /// Walks from the root and returns the byte that fills a page.
    fn read_page(&mut self, page: u64) -> Result<u8, StoreError> {
        self.session.clear_leaf_cache();
        let mut found = [0; PAGE_BYTES];
        let (session, handle) = (&mut self.session, &self.handle);
        session.read(handle, page * PAGE, &mut found, Epoch(1))?;
        assert!(found.iter().all(|byte| *byte == found[0]), "torn");
        Ok(found[0])
    }

    /// The position of the slot of `level` above a page.
    fn slot_at(&self, level: u8, page: u64) -> usize {
        let root_at = self.geometry.objects.start as usize + ROOT_AT;
        let table = PageTable::new(
            &*self.overlay,
            root_at,
            HEIGHT,
            self.geometry.first_frames(),
        );
        match table.locate(level, PageNo(page)) {
            Ok(SlotLocation::At(at)) => at,
            other => panic!("level {level} above page {page}: {other:?}"),
        }
    }

    fn flip(&self, at: usize, mask: u64) {
        self.overlay.store(at, self.overlay.load(at) ^ mask);
    }

    /// Opens a new session, which has no cached leaves.
    fn open_new_session(&mut self) {
        let number = self.pool.open_session(1, 1).expect("a session");
        let new = Session::new(self.pool.mapping().clone(), number);
        let old = std::mem::replace(&mut self.session, new);
        self.pool.close_session(old.number()).expect("a sound pool");
    }

    /// Deletes the slice and frees all its frames.
    fn delete_slice(&mut self) {
        self.open_new_session();
        self.pool.delete(SLICE).expect("there");
        while self.pool.maintain().expect("a sound pool") {}
        self.pool.maintain().expect("a sound pool");
        self.pool
            .close_session(self.session.number())
            .expect("a sound pool");
        self.pool.checkpoint().expect("a sound pool");
    }

    fn used_bytes(&self) -> u64 {
        let usage = self.pool.usage();
        usage.capacity_bytes - usage.free_bytes
    }
}

/// Flips one bit of each slot above page 0, one at a time. `meet` must access the slot and correct
/// it.
fn each_upper_flip(has_overlay: bool, levels: &[u8], meet: impl Fn(&mut FlippedSlotPool)) {
    for &level in levels {
        for bit in BITS {
            let mut case = FlippedSlotPool::written_pool(has_overlay);
            let at = case.slot_at(level, 0);
            let before = case.overlay.load(at);
            case.flip(at, 1 << bit);
            meet(&mut case);
            assert_eq!(case.overlay.load(at), before, "level {level}, bit {bit}");
            assert_eq!(case.pool.corrected_slots(), 1, "level {level}, bit {bit}");
            for page in [1, 2, 511, 700] {
                assert_eq!(
                    case.read_page(page),
                    Ok(page as u8),
                    "level {level}, bit {bit}"
                );
            }
        }
    }
}

#[test]
fn reader_corrects_slots_above_page() {
    for has_overlay in [false, true] {
        each_upper_flip(has_overlay, &[1, 2, 3, 4], |case| {
            assert_eq!(case.read_page(0), Ok(0));
        });
    }
}

#[test]
fn writer_and_clear_correct_slots_above_page() {
    for has_overlay in [false, true] {
        each_upper_flip(has_overlay, &[1, 2, 3, 4], |case| {
            case.session.clear_leaf_cache();
            case.write_page(0, 9).expect("room");
        });
        each_upper_flip(has_overlay, &[1, 2, 3, 4], |case| {
            case.session.clear_leaf_cache();
            case.clear(0, 1).expect("room");
        });
    }
}

/// A new leaf is linked below damaged slots, and into an empty slot that is damaged itself.
#[test]
fn leaf_link_corrects_slots_above_leaf() {
    for has_overlay in [false, true] {
        each_upper_flip(has_overlay, &[2, 3, 4], |case| {
            case.write_page(1500, 7).expect("room");
            assert_eq!(case.read_page(1500), Ok(7));
        });
        for bit in 0..64 {
            let mut case = FlippedSlotPool::written_pool(has_overlay);
            let empty_at = case.slot_at(1, 1500);
            assert_eq!(case.overlay.load(empty_at), 0, "no leaf is linked");
            case.flip(empty_at, 1 << bit);
            assert_eq!(case.read_page(1500), Ok(0), "bit {bit}");
            case.flip(empty_at, 1 << bit);
            case.write_page(1500, 7).expect("room");
            assert_eq!(case.read_page(1500), Ok(7), "bit {bit}");
        }
    }
}

/// A checkpoint looks for slots that no session has flushed. On `file-sync` pools it walks the
/// tables of the file.
#[test]
fn checkpoint_corrects_slots_above_applied_pages() {
    for has_overlay in [false, true] {
        for level in [1, 2, 3, 4] {
            for bit in BITS {
                let mut case = FlippedSlotPool::written_pool(has_overlay);
                case.write_page(0, 9).expect("room");
                let at = case.slot_at(level, 0);
                let before = case.media.load(at);
                case.media.store(at, before ^ 1 << bit);
                case.pool.checkpoint().expect("a sound pool");
                assert_eq!(case.media.load(at), before, "level {level}, bit {bit}");
                assert_eq!(case.read_page(0), Ok(9));
            }
        }
    }
}

#[test]
fn slice_deletion_frees_frames_below_flipped_slot() {
    for level in [1, 2, 3, 4] {
        for bit in BITS {
            let mut case = FlippedSlotPool::written_pool(false);
            let at = case.slot_at(level, 0);
            case.flip(at, 1 << bit);
            case.delete_slice();
            assert_eq!(case.used_bytes(), 0, "level {level}, bit {bit}");
        }
    }
}

/// A new slice has an empty root even if the check bits cannot correct the old root.
#[test]
fn new_slice_starts_with_empty_root() {
    let mut case = FlippedSlotPool::written_pool(false);
    let root_at = case.slot_at(HEIGHT, 0);
    case.flip(root_at, 0b101 << 40);
    case.delete_slice();
    case.pool.create(SLICE, SIZE).expect("a slice");
    assert_eq!(case.pool.list().count(), 1);
    assert_eq!(case.overlay.load(root_at), 0);
    let number = case.pool.open_session(1, 1).expect("a session");
    case.session = Session::new(case.pool.mapping().clone(), number);
    case.handle = case.pool.handle(SLICE).expect("there");
    case.write_page(3, 3).expect("room");
    assert_eq!(case.read_page(3), Ok(3));
}

/// Two slots on one path lost a bit each, before and after a checkpoint has recorded their frames
/// in the bitmap.
#[test]
fn nested_flipped_slots_are_both_corrected() {
    for has_checkpoint in [false, true] {
        for (upper, lower) in [(4, 3), (4, 2), (3, 2), (2, 1)] {
            let mut case = FlippedSlotPool::empty_pool(false);
            case.write_page(0, 9).expect("room");
            if has_checkpoint {
                case.pool.checkpoint().expect("a sound pool");
            }
            for at in [upper, lower].map(|level| case.slot_at(level, 0)) {
                case.flip(at, 1 << 13);
            }
            assert_eq!(case.read_page(0), Ok(9), "levels {upper} and {lower}");
            assert_eq!(case.pool.corrected_slots(), 2, "levels {upper} and {lower}");
        }
    }
}

/// Three flipped bits may look like one flip of another slot, and so name another frame.
#[test]
fn slot_is_never_corrected_to_a_non_node() {
    type Make = fn(&FlippedSlotPool) -> Vec<u64>;
    let looks: [(&str, Make); 4] = [
        ("zeroes", |_| vec![0; 512]),
        ("ones", |_| vec![1; 512]),
        ("a node", |case| {
            let node_at = case.slot_at(0, 0) / PAGE_BYTES * PAGE_BYTES;
            (0..512)
                .map(|i| case.overlay.load(node_at + i * 8))
                .collect()
        }),
        ("a node with a flipped slot", |case| {
            let mut words = vec![0; 512];
            words[7] = case.overlay.load(case.slot_at(0, 0)) ^ 1 << 20;
            words
        }),
    ];
    for has_overlay in [false, true] {
        for (name, make) in looks {
            let mut case = FlippedSlotPool::written_pool(has_overlay);
            let bytes: Vec<u8> = make(&case).iter().flat_map(|it| it.to_le_bytes()).collect();
            case.write_bytes(3 * PAGE, &bytes).expect("room");
            case.pool.checkpoint().expect("a sound pool");
            let frame_of = |at| Slot::decode(case.overlay.load(at)).expect("sound").frame();
            let page = frame_of(case.slot_at(0, 3)).expect("mapped");
            let at = case.slot_at(2, 0);
            let other = Slot::decode(case.overlay.load(at))
                .expect("sound")
                .map(page);
            for bit in BITS {
                case.overlay.store(at, other.encode() ^ 1 << bit);
                assert_eq!(case.read_page(0), DAMAGED, "{name}, bit {bit}");
            }
            assert_eq!(case.pool.corrected_slots(), 0, "{name}");
        }
    }
}

/// A live slice has no holes above its leaves: its pages would read as zeroes.
#[test]
fn upper_slot_is_never_corrected_to_a_hole() {
    for level in [1, 2, 3, 4] {
        let mut case = FlippedSlotPool::written_pool(false);
        let at = case.slot_at(level, 0);
        let hole = Slot::decode(case.overlay.load(at))
            .expect("sound")
            .unmap(Epoch(1));
        for bit in BITS {
            case.overlay.store(at, hole.encode() ^ 1 << bit);
            assert_eq!(case.read_page(0), DAMAGED, "level {level}, bit {bit}");
        }
    }
}

const DAMAGED: Result<u8, StoreError> = Err(StoreError::Damaged { offset: 0 });

/// Flips each bit of the slot of page 0, and makes the page whole with `replace`.
fn each_leaf_flip(has_overlay: bool, replace: impl Fn(&mut FlippedSlotPool), then: u8) {
    for bit in 0..64 {
        let mut case = FlippedSlotPool::written_pool(has_overlay);
        let at = case.slot_at(0, 0);
        let before = case.overlay.load(at);
        case.flip(at, 1 << bit);
        assert_eq!(case.read_page(0), DAMAGED, "bit {bit}");
        // The slot is not corrected: a wrong guess could name another frame.
        assert_eq!(case.overlay.load(at), before ^ 1 << bit, "bit {bit}");
        replace(&mut case);
        assert_eq!(case.read_page(0), Ok(then), "bit {bit}");
        case.pool.checkpoint().expect("a sound pool");
        for page in [1, 2, 511, 700] {
            assert_eq!(case.read_page(page), Ok(page as u8), "bit {bit}");
        }
        case.delete_slice();
        // The old frame, which no slot names any more, stays used until a check of the pool.
        assert_eq!(case.used_bytes(), PAGE, "bit {bit}");
    }
}

#[test]
fn page_with_flipped_slot_can_be_rewritten() {
    for has_overlay in [false, true] {
        each_leaf_flip(has_overlay, |case| case.write_page(0, 8).expect("room"), 8);
        let transaction = |case: &mut FlippedSlotPool| {
            let data = vec![8; PAGE_BYTES].into();
            let parts = [TransactionPart::Write { offset: 0, data }];
            let stamp = case.stamp();
            let (session, handle) = (&mut case.session, case.handle);
            transact(&mut [LegSession { session, handle }], &parts, stamp).expect("room");
        };
        each_leaf_flip(has_overlay, transaction, 8);
    }
}

#[test]
fn page_with_flipped_slot_can_be_cleared() {
    for has_overlay in [false, true] {
        let clear = |case: &mut FlippedSlotPool| case.clear(0, 1).expect("room");
        each_leaf_flip(has_overlay, clear, 0);
        let transaction = |case: &mut FlippedSlotPool| {
            let (offset, len) = (0, PAGE);
            let stamp = case.stamp();
            let (session, handle) = (&mut case.session, case.handle);
            let parts = [TransactionPart::Clear { offset, len }];
            transact(&mut [LegSession { session, handle }], &parts, stamp).expect("room");
        };
        each_leaf_flip(has_overlay, transaction, 0);
    }
}

/// The rest of the page is unknown.
#[test]
fn partial_write_to_flipped_slot_is_refused() {
    let mut case = FlippedSlotPool::written_pool(false);
    let at = case.slot_at(0, 0);
    case.flip(at, 1 << 3);
    assert_eq!(case.write_bytes(512, &[1; 512]), DAMAGED.map(drop));
    let stamp = case.stamp();
    let (session, handle) = (&mut case.session, case.handle);
    let cleared = clear(&mut [LegSession { session, handle }], 512, 512, stamp);
    assert_eq!(cleared.map_err(|it| it.cause), DAMAGED.map(drop));
}

#[test]
fn page_with_flipped_slot_is_listed() {
    for bit in 0..64 {
        let mut case = FlippedSlotPool::written_pool(false);
        let at = case.slot_at(0, 1);
        case.flip(at, 1 << bit);
        let (offset, len) = (0, 4 * PAGE);
        let extents = case.ask(SliceRequest::Extents { offset, len });
        let extent = |pages, mapped| Extent {
            len: pages * PAGE,
            mapped,
        };
        let expected = vec![extent(3, true), extent(1, false)];
        assert_eq!(extents, SliceReply::Extents(expected), "bit {bit}");
        let (since, from) = (Epoch(2), PageNo(0));
        let dirty = case.ask(SliceRequest::Dirty { since, from });
        let (runs, next) = (
            vec![PageRun {
                page: PageNo(1),
                count: 1,
            }],
            None,
        );
        assert_eq!(dirty, SliceReply::Dirty { runs, next }, "bit {bit}");
    }
}

/// The slice's epoch can be raised in spite of a damaged slot of a page in flight.
#[test]
fn epoch_is_raised_despite_flipped_slot() {
    for bit in 0..64 {
        let mut case = FlippedSlotPool::empty_pool(false);
        for page in 0..4 {
            let (offset, data) = (page * PAGE, [1; PAGE_BYTES]);
            let stamp = Stamp {
                open_ops: page as u32,
                ..case.stamp()
            };
            let (session, handle) = (&mut case.session, case.handle);
            write(&mut [LegSession { session, handle }], offset, &data, stamp).expect("room");
        }
        let at = case.slot_at(0, 1);
        case.flip(at, 1 << bit);
        case.pool
            .raise_epoch(SLICE, Epoch(2))
            .expect("a sound pool");
        let listed = case.pool.in_flight(SLICE).expect("sound").expect("few");
        assert_eq!(listed.len(), 4, "bit {bit}");
    }
}
