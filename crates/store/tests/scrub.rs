//! The owner's scrub finds and corrects flipped bits in a pool's metadata while the pool is used,
//! and leaves sound bytes alone.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, Recorder};
use pagemesh_store::geometry::Geometry;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::{Handle, StoreError};
use pagemesh_store::recovery::read_superblock;
use pagemesh_store::scrub::{ScrubCursor, ScrubReport};
use pagemesh_store::session::{LegSession, Session, write};
use pagemesh_store::slot::Slot;
use std::sync::Arc;
use uuid::Uuid;

const POOL_BYTES: usize = 8 << 20;
const SLICE: SliceId = SliceId(Uuid::from_u128(77));
const SIZE: u64 = 8 << 20;
/// Pages written: in two leaves, under one node.
const PAGES: [u64; 4] = [0, 1, 511, 700];

fn byte_of(page: u64) -> u8 {
    (page % 250) as u8 + 1
}

struct ScrubPool {
    media: Arc<Recorder>,
    /// The overlay with the slots on a file; otherwise the medium itself.
    overlay: Arc<Recorder>,
    pool: Pool<Recorder>,
    session: Session<Recorder>,
    handle: Handle,
    geometry: Geometry,
}

impl ScrubPool {
    fn new(has_overlay: bool) -> ScrubPool {
        let media = match has_overlay {
            true => Recorder::for_file(pagemesh_pmem::Image::filled(POOL_BYTES, 0)),
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
        pool.create(SliceId(Uuid::from_u128(78)), SIZE)
            .expect("another");
        let number = pool.open_session(1, 1).expect("a session");
        let session = Session::new(pool.mapping().clone(), number);
        let handle = pool.handle(SLICE).expect("there");
        let geometry = *pool.mapping().geometry();
        let mut case = ScrubPool {
            media,
            overlay,
            pool,
            session,
            handle,
            geometry,
        };
        for (op, page) in (1..).zip(PAGES) {
            case.write_page(page, op);
        }
        case.pool.checkpoint().expect("a checkpoint");
        case
    }

    fn write_page(&mut self, page: u64, op: u64) {
        let stamp = Stamp {
            epoch: Epoch(1),
            op,
            open_ops: 0,
        };
        let (session, handle) = (&mut self.session, self.handle);
        let data = [byte_of(page); PAGE_BYTES];
        let members = &mut [LegSession { session, handle }];
        write(members, page * PAGE_BYTES as u64, &data, stamp)
            .map_err(|failure| failure.cause)
            .expect("room");
    }

    fn read(&mut self, page: u64) -> Result<u8, StoreError> {
        self.session.clear_leaf_cache();
        let mut found = [0; PAGE_BYTES];
        let offset = page * PAGE_BYTES as u64;
        self.session
            .read(&self.handle, offset, &mut found, Epoch(1))?;
        Ok(found[17])
    }

    fn assert_all_pages(&mut self) {
        for page in PAGES {
            assert_eq!(self.read(page), Ok(byte_of(page)), "page {page}");
        }
    }

    fn scrub(&mut self) -> ScrubReport {
        let (mut cursor, mut found) = (Some(ScrubCursor::default()), ScrubReport::default());
        for _ in 0..1000 {
            let Some(at) = cursor else {
                return found;
            };
            cursor = self.pool.scrub(at, &mut found).expect("a sound medium");
        }
        panic!("the scrub does not end: {found:?}");
    }

    /// Flips a bit of a byte.
    fn flip(&self, media: &Recorder, byte: usize, bit: usize) {
        let word = media.load(byte / 8 * 8);
        media.store(byte / 8 * 8, word ^ 1 << (byte % 8 * 8 + bit));
    }

    fn root_at(&self) -> usize {
        self.geometry.objects.start as usize + 128
    }

    /// Positions of the nonempty slots above the leaves.
    fn upper_slots(&self) -> Vec<usize> {
        let (mut all, mut nodes) = (vec![self.root_at()], vec![self.root_at()]);
        for _ in 2..=4 {
            let mut below = vec![];
            for at in nodes {
                let slot = Slot::decode(self.overlay.load(at)).expect("sound");
                let Some(frame) = slot.frame() else {
                    continue;
                };
                let start = frame.0 as usize * PAGE_BYTES;
                let slots = (start..start + PAGE_BYTES).step_by(8);
                below.extend(slots.filter(|at| self.overlay.load(*at) != 0));
            }
            all.extend(&below);
            nodes = below;
        }
        all
    }
}

#[test]
fn scrub_writes_nothing_to_sound_pool() {
    for has_overlay in [false, true] {
        let mut case = ScrubPool::new(has_overlay);
        let before = case.media.visible_image().to_bytes();
        let found = case.scrub();
        assert_eq!((found.corrected(), found.damaged), (0, 0), "{found:?}");
        assert!(found.checked > 6, "{found:?}");
        assert!(case.media.visible_image().to_bytes() == before);
    }
}

#[test]
fn scrub_finds_no_damage_during_writes() {
    let mut case = ScrubPool::new(false);
    let mut op = 100;
    for _ in 0..30 {
        let (mut cursor, mut found) = (Some(ScrubCursor::default()), ScrubReport::default());
        while let Some(at) = cursor {
            for page in 0..3 {
                op += 1;
                case.write_page((op * 37 + page) % 2048, op);
            }
            if op % 5 == 0 {
                case.pool.maintain().expect("tended");
            }
            cursor = case.pool.scrub(at, &mut found).expect("a sound medium");
        }
        assert_eq!((found.corrected(), found.damaged), (0, 0), "{found:?}");
    }
}

#[test]
fn scrub_rewrites_damaged_superblock() {
    for has_overlay in [false, true] {
        for bit in (0..2 * PAGE_BYTES * 8).step_by(1543) {
            let mut case = ScrubPool::new(has_overlay);
            case.flip(&case.media, bit / 8, bit % 8);
            let found = case.scrub();
            assert_eq!((found.superblocks, found.corrected()), (1, 1), "bit {bit}");
            assert_eq!(case.scrub().corrected(), 0, "bit {bit}");
            // If one superblock is lost now, the other one leads to all data.
            for other in [0, PAGE_BYTES] {
                case.flip(&case.media, other + 300, 3);
                let copy = Arc::new(Recorder::from_image(case.media.visible_image()));
                Pool::open(copy.clone(), copy).expect("one superblock is enough");
                case.flip(&case.media, other + 300, 3);
            }
            case.write_page(5, 99);
            case.assert_all_pages();
        }
    }
}

#[test]
fn scrub_rewrites_damaged_bitmap_line() {
    for has_overlay in [false, true] {
        let mut case = ScrubPool::new(has_overlay);
        let block = read_superblock(&*case.media).expect("a superblock");
        // Bytes of lines that were never used mean nothing.
        let lines = block.bitmap_ends.lines_of_first() as usize;
        let before = case.media.visible_image().to_bytes();
        for byte in (0..lines * 64).step_by(5) {
            let at = case.geometry.bitmap.start as usize + byte;
            case.flip(&case.media, at, byte % 8);
            let found = case.scrub();
            assert_eq!(
                (found.bitmap_lines, found.corrected()),
                (1, 1),
                "byte {byte}"
            );
            assert!(
                case.media.visible_image().to_bytes() == before,
                "byte {byte}"
            );
        }
    }
}

#[test]
fn scrub_rewrites_damaged_object_entry() {
    for has_overlay in [false, true] {
        let mut case = ScrubPool::new(has_overlay);
        let before = case.overlay.visible_image().to_bytes();
        // The first line and its copy; the root slot lies between them.
        for byte in (0..128).chain(144..256) {
            let at = case.geometry.objects.start as usize + byte;
            case.flip(&case.overlay, at, byte % 8);
            let found = case.scrub();
            assert_eq!((found.objects, found.corrected()), (1, 1), "byte {byte}");
            assert!(
                case.overlay.visible_image().to_bytes() == before,
                "byte {byte}"
            );
            if has_overlay {
                case.flip(&case.media, at, byte % 8);
                let found = case.scrub();
                assert_eq!((found.objects, found.corrected()), (1, 1), "byte {byte}");
                let file = case.media.visible_image().to_bytes()[at];
                assert_eq!(file, before[at], "byte {byte}");
            }
        }
        case.assert_all_pages();
    }
}

#[test]
fn scrub_corrects_one_flipped_bit_and_reports_more() {
    for has_overlay in [false, true] {
        let mut case = ScrubPool::new(has_overlay);
        let slots = case.upper_slots();
        // The root, one node of each level, and two leaves.
        assert_eq!(slots.len(), 5, "{slots:?}");
        for at in slots {
            let bits = case.overlay.load(at);
            for bit in 0..64 {
                case.overlay.store(at, bits ^ 1 << bit);
                case.session.clear_leaf_cache();
                let found = case.scrub();
                assert_eq!((found.slots, found.corrected()), (1, 1), "{at}, bit {bit}");
                assert_eq!(found.damaged, 0, "{at}, bit {bit}");
                assert_eq!(case.overlay.load(at), bits, "{at}, bit {bit}");
            }
            case.assert_all_pages();
            case.overlay.store(at, bits ^ 0b101 << 40);
            let found = case.scrub();
            assert_eq!((found.corrected(), found.damaged), (0, 1), "{at}");
            let lost = PAGES
                .iter()
                .filter(|page| case.read(**page).is_err())
                .count();
            assert!(lost > 0, "{at}");
            case.overlay.store(at, bits);
            case.assert_all_pages();
        }
    }
}

/// One more flipped bit may make a slot look like another one: the frame that it names must hold a
/// node.
#[test]
fn slot_is_never_corrected_to_data_frame() {
    let mut case = ScrubPool::new(false);
    let root = case.root_at();
    let bits = case.overlay.load(root);
    let sound = Slot::decode(bits).expect("sound");
    let frames = case.geometry.first_frames();
    let node = sound.frame().expect("a node").0;
    for frame in frames.filter(|frame| *frame != node) {
        // A similar slot that names another frame, with one flipped bit.
        let other = bits & !0xff00_000f_ffff_ffff | frame;
        let other = (0..=255).find_map(|check| Slot::decode(other | check << 56).ok());
        let other = other.expect("one of the check values fits").encode();
        let words = (0..512).map(|i| case.overlay.load(frame as usize * PAGE_BYTES + i * 8));
        let words: Vec<u64> = words.collect();
        let is_node = words.iter().all(|bits| Slot::decode(*bits).is_ok());
        if is_node && words.iter().any(|bits| *bits != 0) {
            continue;
        }
        case.overlay.store(root, other ^ 1 << 45);
        let found = case.scrub();
        assert_eq!((found.corrected(), found.damaged), (0, 1), "frame {frame}");
    }
    case.overlay.store(root, bits);
    case.assert_all_pages();
}
