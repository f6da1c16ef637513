//! Bits of page-table slots that flip in a pool at work. A slot above the leaves is
//! mended by whoever meets it; one of a page is an error to read until the page is
//! written or cleared as a whole, and keeps nothing else from its work.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{Part, Run, SliceReply, SliceRequest, Stamp};
use pagemesh_base::space::Extent;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Media, Recorder};
use pagemesh_store::geometry::Geometry;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::requests::{Executed, execute};
use pagemesh_store::session::{Member, Session, clear, write};
use pagemesh_store::slot::Slot;
use pagemesh_store::table::{Location, Table};
use pagemesh_store::transaction::transact;
use pagemesh_store::view::{Handle, StoreError};
use std::sync::Arc;
use uuid::Uuid;

const POOL_BYTES: usize = 8 << 20;
const SLICE: SliceId = SliceId(Uuid::from_u128(77));
const SIZE: u64 = 8 << 20;
const PAGE: u64 = PAGE_BYTES as u64;
const HEIGHT: u8 = 4;
/// Of each part of a slot one bit: frame, hole, reserved, track, generation, check.
const BITS: [u32; 9] = [0, 9, 35, 36, 38, 41, 44, 55, 60];

struct Case {
    media: Arc<Recorder>,
    /// The file's, where slots lie in an overlay.
    overlay: Arc<Recorder>,
    pool: Pool<Recorder>,
    session: Session<Recorder>,
    handle: Handle,
    geometry: Geometry,
    ops: u64,
}

impl Case {
    fn new(has_overlay: bool) -> Case {
        let media = match has_overlay {
            true => Recorder::of_file(Image::filled(POOL_BYTES, 0)),
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
        Case {
            session: Session::new(pool.view().clone(), number),
            handle: pool.handle(SLICE).expect("there"),
            geometry: *pool.view().geometry(),
            media,
            overlay,
            pool,
            ops: 0,
        }
    }

    /// A pool with some pages of two leaves; their slots are persistent.
    fn written(has_overlay: bool) -> Case {
        let mut case = Case::new(has_overlay);
        for page in [0, 1, 2, 511, 700] {
            case.put(page, page as u8).expect("room");
        }
        case.pool.checkpoint().expect("a sound pool");
        case
    }

    fn stamp(&mut self) -> Stamp {
        self.ops += 1;
        Stamp {
            epoch: Epoch(1),
            op: self.ops,
            open: 0,
        }
    }

    fn put(&mut self, page: u64, byte: u8) -> Result<(), StoreError> {
        self.put_part(page * PAGE, &[byte; PAGE_BYTES])
    }

    fn put_part(&mut self, offset: u64, data: &[u8]) -> Result<(), StoreError> {
        let stamp = self.stamp();
        let (session, handle) = (&mut self.session, self.handle);
        let written = write(&mut [Member { session, handle }], offset, data, stamp);
        written.map_err(|failure| failure.cause)
    }

    fn clear(&mut self, page: u64, count: u64) -> Result<(), StoreError> {
        let stamp = self.stamp();
        let (session, handle) = (&mut self.session, self.handle);
        let members = &mut [Member { session, handle }];
        clear(members, page * PAGE, count * PAGE, stamp).map_err(|failure| failure.cause)
    }

    fn ask(&mut self, request: SliceRequest) -> SliceReply {
        match execute(&mut self.session, self.handle, Epoch(9), request) {
            Executed::Done(Ok(reply)) => reply,
            other => panic!("{other:?}"),
        }
    }

    /// The byte that a page is full of, found by a walk from the root.
    fn get(&mut self, page: u64) -> Result<u8, StoreError> {
        self.session.forget_leaves();
        let mut found = [0; PAGE_BYTES];
        let (session, handle) = (&mut self.session, &self.handle);
        session.read(handle, page * PAGE, &mut found, Epoch(1))?;
        assert!(found.iter().all(|byte| *byte == found[0]), "torn");
        Ok(found[0])
    }

    /// Where the slot of `level` above a page lies.
    fn slot_at(&self, level: u8, page: u64) -> usize {
        let root_at = self.geometry.objects.start as usize + 64;
        let table = Table::new(
            &*self.overlay,
            root_at,
            HEIGHT,
            self.geometry.frame_numbers(),
        );
        match table.locate(level, PageNo(page)) {
            Ok(Location::At(at)) => at,
            other => panic!("level {level} above page {page}: {other:?}"),
        }
    }

    fn flip(&self, at: usize, mask: u64) {
        self.overlay.store(at, self.overlay.load(at) ^ mask);
    }

    /// A new session: it knows no leaves.
    fn reconnect(&mut self) {
        let number = self.pool.open_session(1, 1).expect("a session");
        let new = Session::new(self.pool.view().clone(), number);
        let old = std::mem::replace(&mut self.session, new);
        self.pool.close_session(old.number()).expect("a sound pool");
    }

    /// Deletes the slice and frees all its frames.
    fn empty(&mut self) {
        self.reconnect();
        self.pool.delete(SLICE).expect("there");
        while self.pool.tend().expect("a sound pool") {}
        self.pool.tend().expect("a sound pool");
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

/// Has a bit of each slot above page 0 flip, one after the other, and does
/// something that must meet and mend it.
fn each_upper_flip(has_overlay: bool, levels: &[u8], meet: impl Fn(&mut Case)) {
    for &level in levels {
        for bit in BITS {
            let mut case = Case::written(has_overlay);
            let at = case.slot_at(level, 0);
            let before = case.overlay.load(at);
            case.flip(at, 1 << bit);
            meet(&mut case);
            assert_eq!(case.overlay.load(at), before, "level {level}, bit {bit}");
            assert_eq!(case.pool.mended_slots(), 1, "level {level}, bit {bit}");
            for page in [1, 2, 511, 700] {
                assert_eq!(case.get(page), Ok(page as u8), "level {level}, bit {bit}");
            }
        }
    }
}

#[test]
fn who_reads_mends_what_is_above_the_page() {
    for has_overlay in [false, true] {
        each_upper_flip(has_overlay, &[1, 2, 3, 4], |case| {
            assert_eq!(case.get(0), Ok(0));
        });
    }
}

#[test]
fn who_writes_or_clears_mends_what_is_above_the_page() {
    for has_overlay in [false, true] {
        each_upper_flip(has_overlay, &[1, 2, 3, 4], |case| {
            case.session.forget_leaves();
            case.put(0, 9).expect("room");
        });
        each_upper_flip(has_overlay, &[1, 2, 3, 4], |case| {
            case.session.forget_leaves();
            case.clear(0, 1).expect("room");
        });
    }
}

/// A leaf that is not there yet is linked below what is damaged, and into an empty slot
/// that is.
#[test]
fn who_links_a_leaf_mends_what_is_above_it() {
    for has_overlay in [false, true] {
        each_upper_flip(has_overlay, &[2, 3, 4], |case| {
            case.put(1500, 7).expect("room");
            assert_eq!(case.get(1500), Ok(7));
        });
        for bit in 0..64 {
            let mut case = Case::written(has_overlay);
            let empty_at = case.slot_at(1, 1500);
            assert_eq!(case.overlay.load(empty_at), 0, "no leaf is linked");
            case.flip(empty_at, 1 << bit);
            assert_eq!(case.get(1500), Ok(0), "bit {bit}");
            case.flip(empty_at, 1 << bit);
            case.put(1500, 7).expect("room");
            assert_eq!(case.get(1500), Ok(7), "bit {bit}");
        }
    }
}

/// A checkpoint looks for slots that no session has flushed. On `file-sync` pools it
/// goes the ways of the file.
#[test]
fn a_checkpoint_mends_what_is_above_the_pages_it_applies() {
    for has_overlay in [false, true] {
        for level in [1, 2, 3, 4] {
            for bit in BITS {
                let mut case = Case::written(has_overlay);
                case.put(0, 9).expect("room");
                let at = case.slot_at(level, 0);
                let before = case.media.load(at);
                case.media.store(at, before ^ 1 << bit);
                case.pool.checkpoint().expect("a sound pool");
                assert_eq!(case.media.load(at), before, "level {level}, bit {bit}");
                assert_eq!(case.get(0), Ok(9));
            }
        }
    }
}

#[test]
fn the_end_of_a_slice_frees_what_is_below_a_flipped_slot() {
    for level in [1, 2, 3, 4] {
        for bit in BITS {
            let mut case = Case::written(false);
            let at = case.slot_at(level, 0);
            case.flip(at, 1 << bit);
            case.empty();
            assert_eq!(case.used_bytes(), 0, "level {level}, bit {bit}");
        }
    }
}

/// Also where no check bits tell what the root was.
#[test]
fn a_new_slice_finds_the_root_of_a_deleted_one_empty() {
    let mut case = Case::written(false);
    let root_at = case.slot_at(HEIGHT, 0);
    case.flip(root_at, 0b101 << 40);
    case.empty();
    case.pool.create(SLICE, SIZE).expect("a slice");
    assert_eq!(case.pool.list().count(), 1);
    assert_eq!(case.overlay.load(root_at), 0);
    let number = case.pool.open_session(1, 1).expect("a session");
    case.session = Session::new(case.pool.view().clone(), number);
    case.handle = case.pool.handle(SLICE).expect("there");
    case.put(3, 3).expect("room");
    assert_eq!(case.get(3), Ok(3));
}

/// Two slots of one way lost a bit each, before a checkpoint has the bitmap know of
/// their frames and after.
#[test]
fn a_flipped_slot_below_another_keeps_neither_from_being_mended() {
    for has_checkpoint in [false, true] {
        for (upper, lower) in [(4, 3), (4, 2), (3, 2), (2, 1)] {
            let mut case = Case::new(false);
            case.put(0, 9).expect("room");
            if has_checkpoint {
                case.pool.checkpoint().expect("a sound pool");
            }
            for at in [upper, lower].map(|level| case.slot_at(level, 0)) {
                case.flip(at, 1 << 13);
            }
            assert_eq!(case.get(0), Ok(9), "levels {upper} and {lower}");
            assert_eq!(case.pool.mended_slots(), 2, "levels {upper} and {lower}");
        }
    }
}

/// Three flipped bits may look like one in another place, and so name something else.
#[test]
fn no_slot_is_mended_to_name_what_is_no_node() {
    type Make = fn(&Case) -> Vec<u64>;
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
            let mut case = Case::written(has_overlay);
            let bytes: Vec<u8> = make(&case).iter().flat_map(|it| it.to_le_bytes()).collect();
            case.put_part(3 * PAGE, &bytes).expect("room");
            case.pool.checkpoint().expect("a sound pool");
            let frame_of = |at| Slot::decode(case.overlay.load(at)).expect("sound").frame();
            let page = frame_of(case.slot_at(0, 3)).expect("mapped");
            let at = case.slot_at(2, 0);
            let other = Slot::decode(case.overlay.load(at))
                .expect("sound")
                .map(page, 0);
            for bit in BITS {
                case.overlay.store(at, other.encode() ^ 1 << bit);
                assert_eq!(case.get(0), DAMAGED, "{name}, bit {bit}");
            }
            assert_eq!(case.pool.mended_slots(), 0, "{name}");
        }
    }
}

/// A live slice has none above its leaves: its pages would read as zeroes.
#[test]
fn no_slot_above_the_leaves_is_mended_to_a_hole() {
    for level in [1, 2, 3, 4] {
        let mut case = Case::written(false);
        let at = case.slot_at(level, 0);
        let hole = Slot::decode(case.overlay.load(at)).expect("sound").unmap(0);
        for bit in BITS {
            case.overlay.store(at, hole.encode() ^ 1 << bit);
            assert_eq!(case.get(0), DAMAGED, "level {level}, bit {bit}");
        }
    }
}

const DAMAGED: Result<u8, StoreError> = Err(StoreError::Damaged { offset: 0 });

/// Has a bit of the slot of page 0 flip, and does something that makes the page whole.
fn each_leaf_flip(has_overlay: bool, replace: impl Fn(&mut Case), then: u8) {
    for bit in 0..64 {
        let mut case = Case::written(has_overlay);
        let at = case.slot_at(0, 0);
        let before = case.overlay.load(at);
        case.flip(at, 1 << bit);
        assert_eq!(case.get(0), DAMAGED, "bit {bit}");
        // Its old frame would be named by a wrong guess, too.
        assert_eq!(case.overlay.load(at), before ^ 1 << bit, "bit {bit}");
        replace(&mut case);
        assert_eq!(case.get(0), Ok(then), "bit {bit}");
        case.pool.checkpoint().expect("a sound pool");
        for page in [1, 2, 511, 700] {
            assert_eq!(case.get(page), Ok(page as u8), "bit {bit}");
        }
        case.empty();
        // The frame that nobody names any more is found by a check of the pool.
        assert_eq!(case.used_bytes(), PAGE, "bit {bit}");
    }
}

#[test]
fn a_page_with_a_flipped_slot_is_written_anew() {
    for has_overlay in [false, true] {
        each_leaf_flip(has_overlay, |case| case.put(0, 8).expect("room"), 8);
        let transaction = |case: &mut Case| {
            let data = vec![8; PAGE_BYTES].into();
            let parts = [Part::Write { offset: 0, data }];
            let stamp = case.stamp();
            let (session, handle) = (&mut case.session, case.handle);
            transact(&mut [Member { session, handle }], &parts, stamp).expect("room");
        };
        each_leaf_flip(has_overlay, transaction, 8);
    }
}

#[test]
fn a_page_with_a_flipped_slot_is_cleared() {
    for has_overlay in [false, true] {
        let clear = |case: &mut Case| case.clear(0, 1).expect("room");
        each_leaf_flip(has_overlay, clear, 0);
        let transaction = |case: &mut Case| {
            let (offset, len) = (0, PAGE);
            let stamp = case.stamp();
            let (session, handle) = (&mut case.session, case.handle);
            let parts = [Part::Clear { offset, len }];
            transact(&mut [Member { session, handle }], &parts, stamp).expect("room");
        };
        each_leaf_flip(has_overlay, transaction, 0);
    }
}

/// Nobody knows what the rest of the page is.
#[test]
fn a_part_of_a_page_with_a_flipped_slot_is_not_written() {
    let mut case = Case::written(false);
    let at = case.slot_at(0, 0);
    case.flip(at, 1 << 3);
    assert_eq!(case.put_part(512, &[1; 512]), DAMAGED.map(drop));
    let stamp = case.stamp();
    let (session, handle) = (&mut case.session, case.handle);
    let cleared = clear(&mut [Member { session, handle }], 512, 512, stamp);
    assert_eq!(cleared.map_err(|it| it.cause), DAMAGED.map(drop));
}

#[test]
fn a_page_with_a_flipped_slot_is_listed_among_others() {
    for bit in 0..64 {
        let mut case = Case::written(false);
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
        let (round, from) = (3, PageNo(0));
        let dirty = case.ask(SliceRequest::Dirty { round, from });
        let (runs, next) = (
            vec![Run {
                page: PageNo(1),
                count: 1,
            }],
            None,
        );
        assert_eq!(dirty, SliceReply::Dirty { runs, next }, "bit {bit}");
    }
}

/// What was in flight when the round began is stamped, but for a page whose slot is
/// damaged: it is listed anyway, and keeps the epoch from no slice.
#[test]
fn a_round_begins_in_spite_of_a_flipped_slot() {
    for bit in 0..64 {
        let mut case = Case::new(false);
        for page in 0..4 {
            let (offset, data) = (page * PAGE, [1; PAGE_BYTES]);
            let stamp = Stamp {
                open: page as u32,
                ..case.stamp()
            };
            let (session, handle) = (&mut case.session, case.handle);
            write(&mut [Member { session, handle }], offset, &data, stamp).expect("room");
        }
        let at = case.slot_at(0, 1);
        case.flip(at, 1 << bit);
        case.pool
            .raise_epoch(SLICE, Epoch(2), 3)
            .expect("a sound pool");
        let (round, from) = (3, PageNo(0));
        let dirty = case.ask(SliceRequest::Dirty { round, from });
        let (runs, next) = (
            vec![Run {
                page: PageNo(0),
                count: 4,
            }],
            None,
        );
        assert_eq!(dirty, SliceReply::Dirty { runs, next }, "bit {bit}");
    }
}
