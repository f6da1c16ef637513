//! The owner's scrub, and its checkpoints, mend records and entries of the
//! in-flight table while the pool is used; after a crash everything is there.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{InFlight, Stamp};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Media, Recorder};
use pagemesh_store::geometry::Geometry;
use pagemesh_store::lane::Lane;
use pagemesh_store::pool::{ObjectError, Pool, format};
use pagemesh_store::record::Place;
use pagemesh_store::scrub::{Cursor, Scrubbed};
use pagemesh_store::session::{Member, Session, write};
use pagemesh_store::view::Handle;
use std::sync::Arc;
use uuid::Uuid;

const POOL_BYTES: usize = 8 << 20;
const ID: Uuid = Uuid::from_u128(1);
const SLICE: SliceId = SliceId(Uuid::from_u128(77));
const OTHER: SliceId = SliceId(Uuid::from_u128(78));
const SIZE: u64 = 8 << 20;

fn byte_of(op: u64) -> u8 {
    (op % 250) as u8 + 1
}

fn put(session: &mut Session<Recorder>, handle: Handle, page: u64, pages: usize, op: u64) {
    let stamp = Stamp {
        epoch: Epoch(1),
        op,
        open: 0,
    };
    let data = vec![byte_of(op); pages * PAGE_BYTES];
    let members = &mut [Member { session, handle }];
    write(members, page * PAGE_BYTES as u64, &data, stamp)
        .map_err(|failure| failure.cause)
        .expect("room");
}

struct Case {
    has_overlay: bool,
    media: Arc<Recorder>,
    pool: Pool<Recorder>,
    session: Session<Recorder>,
    handle: Handle,
    geometry: Geometry,
}

impl Case {
    fn new(has_overlay: bool) -> Case {
        let media = Arc::new(match has_overlay {
            true => Recorder::of_file(pagemesh_pmem::Image::filled(POOL_BYTES, 0)),
            false => Recorder::new(POOL_BYTES),
        });
        format(&*media, ID).expect("a pool");
        Case::open(media, has_overlay, |pool| {
            pool.create(SLICE, SIZE).expect("a slice");
            pool.create(OTHER, SIZE).expect("another");
        })
    }

    fn open(
        media: Arc<Recorder>,
        has_overlay: bool,
        prepare: impl FnOnce(&mut Pool<Recorder>),
    ) -> Case {
        let overlay = match has_overlay {
            true => Arc::new(media.overlay()),
            false => media.clone(),
        };
        let (mut pool, found) = Pool::open(media.clone(), overlay).expect("a sound pool");
        assert!(!found.is_damaged(), "{found:?}");
        prepare(&mut pool);
        let number = pool.open_session(1, 1).expect("a session");
        assert_eq!(number, 1);
        let session = Session::new(pool.view().clone(), number);
        let handle = pool.handle(SLICE).expect("there");
        let geometry = *pool.view().geometry();
        Case {
            has_overlay,
            media,
            pool,
            session,
            handle,
            geometry,
        }
    }

    /// Two records that are applied, of which the last may be missing elsewhere,
    /// and if that is asked for two that no checkpoint has seen.
    fn write(&mut self, is_fresh: bool) {
        put(&mut self.session, self.handle, 3, 1, 1);
        put(&mut self.session, self.handle, 9, 4, 2);
        self.pool.checkpoint().expect("a checkpoint");
        if is_fresh {
            put(&mut self.session, self.handle, 20, 1, 3);
            put(&mut self.session, self.handle, 700, 5, 4);
        }
    }

    fn holds(&mut self, is_fresh: bool) {
        let written = [(3, 1, 1), (9, 4, 2), (20, 1, 3), (700, 5, 4)];
        let count = if is_fresh { 4 } else { 2 };
        for (page, pages, op) in written.into_iter().take(count) {
            let mut found = vec![0; pages * PAGE_BYTES];
            let offset = page * PAGE_BYTES as u64;
            self.session
                .read(&self.handle, offset, &mut found, Epoch(1))
                .expect("whole");
            assert!(found.iter().all(|byte| *byte == byte_of(op)), "{op}");
        }
    }

    /// Where the bytes of the records lie that recovery would read of the
    /// session's lane.
    fn live(&self) -> Vec<std::ops::Range<usize>> {
        let block = Pool::peek(&*self.media).expect("a superblock");
        let place = Place::new(ID, block.incarnation, 1, block.heads[1]);
        let (start, length) = (self.geometry.lane_at(1), self.geometry.lane_lines());
        let mut lane = Lane::new(start, length, place);
        let scan = lane.recover(&*self.media).expect("whole");
        let place = |(position, entry): &(u64, pagemesh_store::record::Entry)| {
            let at = start + (position % length) as usize * LINE_BYTES;
            at..at + entry.lines() * LINE_BYTES
        };
        scan.entries.iter().map(place).collect()
    }

    fn flip(&self, byte: usize, bit: usize) {
        let word = self.media.load(byte / 8 * 8);
        self.media
            .store(byte / 8 * 8, word ^ 1 << (byte % 8 * 8 + bit));
    }

    fn try_scrub(&mut self) -> Result<Scrubbed, ObjectError> {
        let (mut cursor, mut found) = (Some(Cursor::default()), Scrubbed::default());
        for _ in 0..1000 {
            let Some(at) = cursor else {
                return Ok(found);
            };
            cursor = self.pool.scrub(at, &mut found)?;
        }
        panic!("a scrub does not end: {found:?}");
    }

    fn scrub(&mut self) -> Scrubbed {
        self.try_scrub().expect("a sound medium")
    }

    /// Kills everybody; what the next opening finds.
    fn crashed(&self) -> Case {
        let now = self.media.now();
        let media = match self.has_overlay {
            true => Recorder::of_file(now),
            false => Recorder::from_image(now),
        };
        Case::open(Arc::new(media), self.has_overlay, |_| {})
    }

    fn ops_in_flight(&self, slice: SliceId) -> Option<Vec<u64>> {
        let found = self.pool.in_flight(slice).expect("a slice")?;
        let mut ops: Vec<u64> = found.iter().map(|it: &InFlight| it.op).collect();
        ops.sort_unstable();
        Some(ops)
    }
}

#[test]
fn a_flipped_bit_of_a_live_record_is_mended() {
    for (has_overlay, is_fresh) in [(false, false), (false, true), (true, true)] {
        let mut case = Case::new(has_overlay);
        case.write(is_fresh);
        let before = case.media.now().to_bytes();
        let live = case.live();
        // The node that the last write linked has a record, too.
        assert_eq!(live.len(), if is_fresh { 4 } else { 1 }, "{live:?}");
        for byte in live.into_iter().flatten().step_by(5) {
            case.flip(byte, byte % 8);
            let found = case.scrub();
            assert_eq!((found.records, found.mended()), (1, 1), "byte {byte}");
            assert_eq!(found.damaged, 0, "byte {byte}");
            assert!(case.media.now().to_bytes() == before, "byte {byte}");
        }
        case.holds(is_fresh);
        let mut after = case.crashed();
        after.holds(is_fresh);
        let last = if is_fresh { 4 } else { 2 };
        assert_eq!(after.ops_in_flight(SLICE), Some(vec![last]));
        assert_eq!(after.ops_in_flight(OTHER), Some(vec![]));
    }
}

/// Whoever reads a record first mends it, also if that is no scrub.
#[test]
fn a_checkpoint_mends_what_it_applies_and_the_next_scrub_counts_it() {
    for has_overlay in [false, true] {
        let mut case = Case::new(has_overlay);
        case.write(true);
        let live = case.live();
        for record in &live[1..] {
            case.flip(record.start + 21, 6);
        }
        case.pool.checkpoint().expect("every record is mended");
        assert_eq!(case.pool.mended_records(), 3);
        let found = case.scrub();
        assert_eq!((found.records, found.mended()), (3, 3), "{found:?}");
        assert_eq!(case.scrub().mended(), 0);
        case.holds(true);
        case.crashed().holds(true);
        assert_eq!(case.pool.raise_epoch(SLICE, Epoch(2), 0).ok(), Some(()));
        assert_eq!(case.ops_in_flight(SLICE), Some(vec![4]));
    }
}

/// So does a barrier that lists what may be missing elsewhere.
#[test]
fn a_barrier_mends_what_it_lists() {
    let mut case = Case::new(false);
    case.write(false);
    let live = case.live();
    case.flip(live[0].start + 56, 0);
    case.pool
        .raise_epoch(SLICE, Epoch(2), 0)
        .expect("a barrier");
    assert_eq!(case.ops_in_flight(SLICE), Some(vec![2]));
    assert_eq!(case.scrub().records, 1);
}

#[test]
fn an_applied_record_beyond_mending_is_left_behind_and_slices_are_compared() {
    for has_overlay in [false, true] {
        let mut case = Case::new(has_overlay);
        case.write(false);
        let live = case.live();
        case.flip(live[0].start + 30, 1);
        case.flip(live[0].start + 40, 2);
        let found = case.scrub();
        assert_eq!((found.left_behind, found.mended()), (1, 1), "{found:?}");
        assert_eq!(case.live(), vec![], "recovery reads it still");
        let again = case.scrub();
        assert_eq!((again.mended(), again.damaged), (0, 0), "{again:?}");
        // Nobody knows of which slice it was.
        for slice in [SLICE, OTHER] {
            assert_eq!(case.ops_in_flight(slice), None, "{slice:?}");
            assert_eq!(case.crashed().ops_in_flight(slice), None, "{slice:?}");
        }
        case.holds(false);
        case.crashed().holds(false);
        // The session goes on in its lane.
        put(&mut case.session, case.handle, 20, 1, 3);
        put(&mut case.session, case.handle, 700, 5, 4);
        case.pool.checkpoint().expect("a checkpoint");
        case.holds(true);
        case.crashed().holds(true);
    }
}

#[test]
fn a_barrier_leaves_behind_what_it_cannot_list() {
    let mut case = Case::new(false);
    case.write(false);
    let live = case.live();
    case.flip(live[0].start + 30, 1);
    case.flip(live[0].start + 40, 2);
    case.pool
        .raise_epoch(SLICE, Epoch(2), 0)
        .expect("a barrier");
    assert_eq!(case.ops_in_flight(SLICE), None);
    assert_eq!(case.scrub().mended(), 0);
}

/// Nobody can say what the record changed: the pool must not go on.
#[test]
fn a_record_beyond_mending_that_is_not_applied_fails_the_pool() {
    let mut case = Case::new(false);
    case.write(true);
    let live = case.live();
    case.flip(live[1].start + 30, 1);
    case.flip(live[1].start + 40, 2);
    let failed = case.try_scrub().expect_err("the record is lost");
    assert!(failed.to_string().contains("lane 1"), "{failed}");
    assert!(case.pool.checkpoint().is_err());
}

#[test]
fn a_damaged_entry_of_the_in_flight_table_is_written_anew() {
    for has_overlay in [false, true] {
        let mut case = Case::new(has_overlay);
        case.write(false);
        case.pool
            .raise_epoch(SLICE, Epoch(2), 0)
            .expect("a barrier");
        assert_eq!(case.ops_in_flight(SLICE), Some(vec![2]));
        let before = case.media.now().to_bytes();
        let start = case.geometry.in_flight.start as usize;
        // Two bits of each byte: this does not depend on checksums.
        for byte in (start..start + 32).step_by(3) {
            case.flip(byte, 1);
            case.flip(byte, 6);
            let found = case.scrub();
            assert_eq!((found.in_flight, found.mended()), (1, 1), "byte {byte}");
            assert!(case.media.now().to_bytes() == before, "byte {byte}");
        }
        // One that is free, and would be taken for a damaged one.
        let free = start + 5 * 32;
        case.flip(free, 3);
        assert_eq!(case.scrub().mended(), 0, "it counts as free");
        case.flip(free + 31, 3);
        assert_eq!(case.scrub().in_flight, 1);
        assert!(case.media.now().to_bytes() == before);
        assert_eq!(case.crashed().ops_in_flight(SLICE), Some(vec![2]));
    }
}

/// A record that its session is just streaming lies behind what was published.
#[test]
fn a_record_that_is_being_written_is_not_looked_at() {
    let mut case = Case::new(false);
    case.write(true);
    let checked = case.scrub().checked;
    let live = case.live();
    let end = live.last().expect("records").end;
    // The first line of a longer record, and later lines of another.
    for at in (0..LINE_BYTES).step_by(8) {
        let word = case.media.load(live[0].start + at);
        case.media.store(end + at, word);
        case.media.store(end + 3 * LINE_BYTES + at, !word);
    }
    let before = case.media.now().to_bytes();
    let found = case.scrub();
    assert_eq!((found.mended(), found.damaged), (0, 0), "{found:?}");
    assert_eq!(found.checked, checked);
    assert!(case.media.now().to_bytes() == before);
}

#[test]
fn lanes_that_others_write_at_the_same_time_are_sound() {
    let Case {
        mut pool,
        mut session,
        handle,
        ..
    } = Case::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for op in 1..=3000 {
                put(&mut session, handle, op * 37 % 500, 1 + op as usize % 7, op);
            }
        });
        let (mut cursor, mut found) = (Cursor::default(), Scrubbed::default());
        while !writer.is_finished() {
            pool.tend().expect("tended");
            let next = pool.scrub(cursor, &mut found).expect("sound");
            cursor = next.unwrap_or_default();
            assert_eq!((found.mended(), found.damaged), (0, 0), "{found:?}");
        }
        assert!(found.checked > 0);
    });
}
