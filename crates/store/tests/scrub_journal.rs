//! The owner's scrub and its checkpoints correct records and entries of the in-flight table while
//! the pool is used. After a crash all of them are present.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{InFlightOp, Stamp};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Media, Recorder};
use pagemesh_store::geometry::Geometry;
use pagemesh_store::journal::Journal;
use pagemesh_store::pool::{ObjectError, Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::record::RecordAddress;
use pagemesh_store::scrub::{ScrubCursor, ScrubReport};
use pagemesh_store::session::{LegSession, Session, write};
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

fn write_pages(session: &mut Session<Recorder>, handle: Handle, page: u64, pages: usize, op: u64) {
    let stamp = Stamp {
        epoch: Epoch(1),
        op,
        open_ops: 0,
    };
    let data = vec![byte_of(op); pages * PAGE_BYTES];
    let members = &mut [LegSession { session, handle }];
    write(members, page * PAGE_BYTES as u64, &data, stamp)
        .map_err(|failure| failure.cause)
        .expect("room");
}

struct JournalScrubPool {
    has_overlay: bool,
    media: Arc<Recorder>,
    pool: Pool<Recorder>,
    session: Session<Recorder>,
    handle: Handle,
    geometry: Geometry,
}

impl JournalScrubPool {
    fn new(has_overlay: bool) -> JournalScrubPool {
        let media = Arc::new(match has_overlay {
            true => Recorder::for_file(pagemesh_pmem::Image::filled(POOL_BYTES, 0)),
            false => Recorder::new(POOL_BYTES),
        });
        format(&*media, ID).expect("a pool");
        JournalScrubPool::open(media, has_overlay, |pool| {
            pool.create(SLICE, SIZE).expect("a slice");
            pool.create(OTHER, SIZE).expect("another");
        })
    }

    fn open(
        media: Arc<Recorder>,
        has_overlay: bool,
        prepare: impl FnOnce(&mut Pool<Recorder>),
    ) -> JournalScrubPool {
        let overlay = match has_overlay {
            true => Arc::new(media.overlay()),
            false => media.clone(),
        };
        let (mut pool, found) = Pool::open(media.clone(), overlay).expect("a sound pool");
        assert!(!found.is_damaged(), "{found:?}");
        prepare(&mut pool);
        let number = pool.open_session(1, 1).expect("a session");
        assert_eq!(number, 1);
        let session = Session::new(pool.mapping().clone(), number);
        let handle = pool.handle(SLICE).expect("there");
        let geometry = *pool.mapping().geometry();
        JournalScrubPool {
            has_overlay,
            media,
            pool,
            session,
            handle,
            geometry,
        }
    }

    /// Writes two applied records, of which the last may be missing on another leg. With
    /// `is_fresh`, also two records after the last checkpoint.
    fn write_records(&mut self, is_fresh: bool) {
        write_pages(&mut self.session, self.handle, 3, 1, 1);
        write_pages(&mut self.session, self.handle, 9, 4, 2);
        self.pool.checkpoint().expect("a checkpoint");
        if is_fresh {
            write_pages(&mut self.session, self.handle, 20, 1, 3);
            write_pages(&mut self.session, self.handle, 700, 5, 4);
        }
    }

    fn assert_records(&mut self, is_fresh: bool) {
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

    /// Positions of the records in the session's journal that recovery would read.
    fn live_record_bytes(&self) -> Vec<std::ops::Range<usize>> {
        let block = Pool::peek(&*self.media).expect("a superblock");
        let place = RecordAddress::new(ID, block.incarnation, 1, block.journal_heads[1]);
        let (start, length) = (self.geometry.journal_at(1), self.geometry.journal_lines());
        let mut journal = Journal::new(start, length, place);
        let scan = journal.recover(&*self.media).expect("whole");
        let place = |(position, entry): &(u64, pagemesh_store::record::JournalEntry)| {
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

    fn try_scrub(&mut self) -> Result<ScrubReport, ObjectError> {
        let (mut cursor, mut found) = (Some(ScrubCursor::default()), ScrubReport::default());
        for _ in 0..1000 {
            let Some(at) = cursor else {
                return Ok(found);
            };
            cursor = self.pool.scrub(at, &mut found)?;
        }
        panic!("the scrub does not end: {found:?}");
    }

    fn scrub(&mut self) -> ScrubReport {
        self.try_scrub().expect("a sound medium")
    }

    /// Kills all processes and opens the pool again.
    fn after_crash(&self) -> JournalScrubPool {
        let now = self.media.visible_image();
        let media = match self.has_overlay {
            true => Recorder::for_file(now),
            false => Recorder::from_image(now),
        };
        JournalScrubPool::open(Arc::new(media), self.has_overlay, |_| {})
    }

    fn ops_in_flight(&self, slice: SliceId) -> Option<Vec<u64>> {
        let found = self.pool.in_flight(slice).expect("a slice")?;
        let mut ops: Vec<u64> = found.iter().map(|it: &InFlightOp| it.op).collect();
        ops.sort_unstable();
        Some(ops)
    }
}

#[test]
fn flipped_bit_of_live_record_is_corrected() {
    for (has_overlay, is_fresh) in [(false, false), (false, true), (true, true)] {
        let mut case = JournalScrubPool::new(has_overlay);
        case.write_records(is_fresh);
        let before = case.media.visible_image().to_bytes();
        let live = case.live_record_bytes();
        // The node that the last write linked has a record, too.
        assert_eq!(live.len(), if is_fresh { 4 } else { 1 }, "{live:?}");
        for byte in live.into_iter().flatten().step_by(5) {
            case.flip(byte, byte % 8);
            let found = case.scrub();
            assert_eq!((found.records, found.corrected()), (1, 1), "byte {byte}");
            assert_eq!(found.damaged, 0, "byte {byte}");
            assert!(
                case.media.visible_image().to_bytes() == before,
                "byte {byte}"
            );
        }
        case.assert_records(is_fresh);
        let mut after = case.after_crash();
        after.assert_records(is_fresh);
        let last = if is_fresh { 4 } else { 2 };
        assert_eq!(after.ops_in_flight(SLICE), Some(vec![last]));
        assert_eq!(after.ops_in_flight(OTHER), Some(vec![]));
    }
}

/// The first reader of a record corrects it, whether or not it is a scrub.
#[test]
fn checkpoint_correction_is_counted_by_next_scrub() {
    for has_overlay in [false, true] {
        let mut case = JournalScrubPool::new(has_overlay);
        case.write_records(true);
        let live = case.live_record_bytes();
        for record in &live[1..] {
            case.flip(record.start + 21, 6);
        }
        case.pool.checkpoint().expect("every record is corrected");
        assert_eq!(case.pool.corrected_records(), 3);
        let found = case.scrub();
        assert_eq!((found.records, found.corrected()), (3, 3), "{found:?}");
        assert_eq!(case.scrub().corrected(), 0);
        case.assert_records(true);
        case.after_crash().assert_records(true);
        assert_eq!(case.pool.raise_epoch(SLICE, Epoch(2)).ok(), Some(()));
        assert_eq!(case.ops_in_flight(SLICE), Some(vec![4]));
    }
}

/// A barrier that lists operations in flight corrects their records, too.
#[test]
fn barrier_corrects_listed_records() {
    let mut case = JournalScrubPool::new(false);
    case.write_records(false);
    let live = case.live_record_bytes();
    case.flip(live[0].start + 56, 0);
    case.pool.raise_epoch(SLICE, Epoch(2)).expect("a barrier");
    assert_eq!(case.ops_in_flight(SLICE), Some(vec![2]));
    assert_eq!(case.scrub().records, 1);
}

#[test]
fn uncorrectable_applied_record_forces_slice_comparison() {
    for has_overlay in [false, true] {
        let mut case = JournalScrubPool::new(has_overlay);
        case.write_records(false);
        let live = case.live_record_bytes();
        case.flip(live[0].start + 30, 1);
        case.flip(live[0].start + 40, 2);
        let found = case.scrub();
        assert_eq!(
            (found.skipped_journals, found.corrected()),
            (1, 1),
            "{found:?}"
        );
        assert_eq!(
            case.live_record_bytes(),
            vec![],
            "recovery would read the record"
        );
        let again = case.scrub();
        assert_eq!((again.corrected(), again.damaged), (0, 0), "{again:?}");
        // The slice of the lost record is unknown.
        for slice in [SLICE, OTHER] {
            assert_eq!(case.ops_in_flight(slice), None, "{slice:?}");
            assert_eq!(case.after_crash().ops_in_flight(slice), None, "{slice:?}");
        }
        case.assert_records(false);
        case.after_crash().assert_records(false);
        // The session continues in its journal.
        write_pages(&mut case.session, case.handle, 20, 1, 3);
        write_pages(&mut case.session, case.handle, 700, 5, 4);
        case.pool.checkpoint().expect("a checkpoint");
        case.assert_records(true);
        case.after_crash().assert_records(true);
    }
}

#[test]
fn barrier_skips_unreadable_applied_records() {
    let mut case = JournalScrubPool::new(false);
    case.write_records(false);
    let live = case.live_record_bytes();
    case.flip(live[0].start + 30, 1);
    case.flip(live[0].start + 40, 2);
    case.pool.raise_epoch(SLICE, Epoch(2)).expect("a barrier");
    assert_eq!(case.ops_in_flight(SLICE), None);
    assert_eq!(case.scrub().corrected(), 0);
}

/// The changes of the record are unknown: the pool must fail.
#[test]
fn uncorrectable_unapplied_record_fails_pool() {
    let mut case = JournalScrubPool::new(false);
    case.write_records(true);
    let live = case.live_record_bytes();
    case.flip(live[1].start + 30, 1);
    case.flip(live[1].start + 40, 2);
    let failed = case.try_scrub().expect_err("the record is lost");
    assert!(failed.to_string().contains("journal 1"), "{failed}");
    assert!(case.pool.checkpoint().is_err());
}

#[test]
fn scrub_rewrites_damaged_in_flight_entry() {
    for has_overlay in [false, true] {
        let mut case = JournalScrubPool::new(has_overlay);
        case.write_records(false);
        case.pool.raise_epoch(SLICE, Epoch(2)).expect("a barrier");
        assert_eq!(case.ops_in_flight(SLICE), Some(vec![2]));
        let before = case.media.visible_image().to_bytes();
        let start = case.geometry.in_flight.start as usize;
        // Flips two bits of each byte: the rewrite does not depend on checksums.
        for byte in (start..start + 32).step_by(3) {
            case.flip(byte, 1);
            case.flip(byte, 6);
            let found = case.scrub();
            assert_eq!((found.in_flight, found.corrected()), (1, 1), "byte {byte}");
            assert!(
                case.media.visible_image().to_bytes() == before,
                "byte {byte}"
            );
        }
        // A free entry with enough flipped bits is taken for a damaged one.
        let free = start + 5 * 32;
        case.flip(free, 3);
        assert_eq!(case.scrub().corrected(), 0, "it counts as free");
        case.flip(free + 31, 3);
        assert_eq!(case.scrub().in_flight, 1);
        assert!(case.media.visible_image().to_bytes() == before);
        assert_eq!(case.after_crash().ops_in_flight(SLICE), Some(vec![2]));
    }
}

/// A record that its session is streaming lies behind the published end.
#[test]
fn scrub_ignores_record_being_written() {
    let mut case = JournalScrubPool::new(false);
    case.write_records(true);
    let checked = case.scrub().checked;
    let live = case.live_record_bytes();
    let end = live.last().expect("records").end;
    // The first line of a longer record, and later lines of another record.
    for at in (0..LINE_BYTES).step_by(8) {
        let word = case.media.load(live[0].start + at);
        case.media.store(end + at, word);
        case.media.store(end + 3 * LINE_BYTES + at, !word);
    }
    let before = case.media.visible_image().to_bytes();
    let found = case.scrub();
    assert_eq!((found.corrected(), found.damaged), (0, 0), "{found:?}");
    assert_eq!(found.checked, checked);
    assert!(case.media.visible_image().to_bytes() == before);
}

#[test]
fn scrub_finds_no_damage_in_journals_being_written() {
    let JournalScrubPool {
        mut pool,
        mut session,
        handle,
        ..
    } = JournalScrubPool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for op in 1..=3000 {
                write_pages(&mut session, handle, op * 37 % 500, 1 + op as usize % 7, op);
            }
        });
        let (mut cursor, mut found) = (ScrubCursor::default(), ScrubReport::default());
        while !writer.is_finished() {
            pool.maintain().expect("tended");
            let next = pool.scrub(cursor, &mut found).expect("sound");
            cursor = next.unwrap_or_default();
            assert_eq!((found.corrected(), found.damaged), (0, 0), "{found:?}");
        }
        assert!(found.checked > 0);
    });
}
