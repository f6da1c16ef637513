//! Consistent reads of several pages, on a pool with reused frames.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{Stamp, TransactionPart};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, Recorder};
use pagemesh_store::consistent_read::{
    CONSISTENT_READ_CHANGES_MAX, CONSISTENT_READ_PAGES_MAX, ConsistentRead,
};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::session::{LegSession, Session, write};
use pagemesh_store::transaction::transact_numbered;
use std::sync::Arc;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(1));
const PAGE: u64 = PAGE_BYTES as u64;
const PAGES: u64 = 600;

struct ConsistentReadPool {
    media: Arc<Recorder>,
    pool: Pool<Recorder>,
    session: Session<Recorder>,
    op: u64,
}

impl ConsistentReadPool {
    /// A pool with first pages full of ones.
    fn new() -> ConsistentReadPool {
        let media = Arc::new(Recorder::new(4 << 20));
        format(&*media, Uuid::from_u128(9)).expect("a pool");
        let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
        pool.create(SLICE, PAGES * PAGE).expect("room");
        let number = pool.open_session(1, 1).expect("a session");
        let session = Session::new(pool.mapping().clone(), number);
        let mut world = ConsistentReadPool {
            media,
            pool,
            session,
            op: 0,
        };
        (0..80).for_each(|page| world.write_pages(page, 1, 1));
        world
    }

    fn write_pages(&mut self, page: u64, count: u64, byte: u8) {
        self.op += 1;
        let stamp = Stamp {
            epoch: Epoch(1),
            op: self.op,
            open_ops: 0,
        };
        let handle = self.pool.handle(SLICE).expect("the slice");
        let session = &mut self.session;
        let data = vec![byte; (count * PAGE) as usize];
        write(
            &mut [LegSession { session, handle }],
            page * PAGE,
            &data,
            stamp,
        )
        .expect("room");
        self.pool.maintain().expect("sound");
    }

    fn map_consistent(&mut self, ranges: &[(u64, u64)]) -> Option<Box<ConsistentRead<Recorder>>> {
        let handle = self.pool.handle(SLICE).expect("the slice");
        self.session
            .map_consistent(&handle, ranges, Epoch(1))
            .expect("sound")
    }

    fn bytes(&self, moment: &ConsistentRead<Recorder>) -> Vec<u8> {
        let byte = |at| {
            let mut page = [0; PAGE_BYTES];
            self.media.read(at, &mut page);
            assert!(page.iter().all(|&byte| byte == page[0]));
            page[0]
        };
        moment.page_offsets().map(byte).collect()
    }
}

#[test]
fn consistent_read_ends_when_page_changes() {
    let mut world = ConsistentReadPool::new();
    let moment = world.map_consistent(&[(5 * PAGE, 2 * PAGE), (70 * PAGE + 1, 1)]);
    let moment = moment.expect("they are there");
    assert_eq!(world.bytes(&moment), [1, 1, 1]);
    (7..17).for_each(|page| world.write_pages(page, 1, 2));
    assert!(moment.is_unchanged());
    world.write_pages(70, 1, 3);
    assert!(!moment.is_unchanged());
}

#[test]
fn consistent_read_ends_before_generation_wraps() {
    let mut world = ConsistentReadPool::new();
    let moment = world.map_consistent(&[(0, PAGE)]).expect("it is there");
    for _ in 0..CONSISTENT_READ_CHANGES_MAX {
        world.write_pages(1, 1, 4);
    }
    assert!(moment.is_unchanged() && world.bytes(&moment) == [1]);
    world.write_pages(1, 1, 5);
    assert!(!moment.is_unchanged());
}

#[test]
fn consistent_read_does_not_keep_pool_open() {
    let mut world = ConsistentReadPool::new();
    let moment = world.map_consistent(&[(0, PAGE)]).expect("it is there");
    world.pool.mapping().mark_owner_gone();
    assert!(!moment.is_unchanged(), "the owner is gone");
    drop((world.session, world.pool));
    assert!(!moment.is_unchanged(), "and so is the pool");
}

#[test]
fn holes_and_too_many_pages_are_not_mapped() {
    let mut world = ConsistentReadPool::new();
    let most = CONSISTENT_READ_PAGES_MAX as u64;
    assert!(world.map_consistent(&[(0, most * PAGE)]).is_some());
    assert!(world.map_consistent(&[(1, most * PAGE)]).is_none());
    assert!(
        world
            .map_consistent(&[(0, 40 * PAGE), (40 * PAGE, 40 * PAGE)])
            .is_none()
    );
    assert!(
        world.map_consistent(&[(79 * PAGE, 2 * PAGE)]).is_none(),
        "a hole"
    );
    assert!(
        world.map_consistent(&[(590 * PAGE, PAGE)]).is_none(),
        "no leaf"
    );
    let handle = world.pool.handle(SLICE).expect("the slice");
    let beyond = world
        .session
        .map_consistent(&handle, &[(PAGES * PAGE, 1)], Epoch(1));
    assert!(beyond.is_err());
}

#[test]
fn ranges_are_read_in_given_order() {
    let mut world = ConsistentReadPool::new();
    world.write_pages(3, 1, 7);
    world.write_pages(60, 1, 8);
    let handle = world.pool.handle(SLICE).expect("the slice");
    let (mut one, mut other) = ([0; PAGE_BYTES + 20], [0; 5]);
    let pieces = &mut [(4 * PAGE - 10, &mut one[..]), (60 * PAGE, &mut other[..])];
    let read = world.session.read_consistent(&handle, pieces, Epoch(1));
    assert!(read.expect("sound"));
    assert!(one[..10] == [7; 10] && one[10..] == [1; PAGE_BYTES + 10] && other == [8; 5]);
}

#[test]
fn damaged_page_is_an_error_in_consistent_read() {
    let mut world = ConsistentReadPool::new();
    let moment = world
        .map_consistent(&[(9 * PAGE, PAGE)])
        .expect("it is there");
    let at = moment.page_offsets().next().expect("one");
    world.media.store(at, !0);
    let handle = world.pool.handle(SLICE).expect("the slice");
    let shown = world
        .session
        .map_consistent(&handle, &[(8 * PAGE, 2 * PAGE)], Epoch(1));
    assert!(shown.is_err());
}

/// A transaction takes its number once, after all checks that may fail, and uses it for every
/// record.
#[test]
fn transaction_takes_its_number_last() {
    let mut world = ConsistentReadPool::new();
    let handle = world.pool.handle(SLICE).expect("the slice");
    let mut taken = 0;
    let mut transact = |world: &mut ConsistentReadPool, parts: &[TransactionPart]| {
        let stamp = || {
            taken += 1;
            Stamp {
                epoch: Epoch(1),
                op: 1000 + taken,
                open_ops: 0,
            }
        };
        let session = &mut world.session;
        transact_numbered(
            &mut [LegSession { session, handle }],
            parts,
            Epoch(1),
            stamp,
        )
    };
    let part = |offset, bytes: u64| TransactionPart::Write {
        offset,
        data: vec![6; bytes as usize].into(),
    };
    assert!(transact(&mut world, &[part(0, PAGE), part(0, PAGE)]).is_err());
    assert!(transact(&mut world, &[part(0, 5)]).is_err());
    transact(&mut world, &[part(0, PAGE), part(520 * PAGE, 2 * PAGE)]).expect("room");
    assert_eq!(taken, 1);
    // The last operation of a session is listed as in flight after the session is gone.
    let number = world.session.number();
    world.pool.close_session(number).expect("sound");
    let listed = world
        .pool
        .in_flight(SLICE)
        .expect("the slice")
        .expect("few");
    let own = listed.iter().filter(|entry| entry.op == 1001);
    assert_eq!(own.map(|entry| entry.count).sum::<u32>(), 3);
}
