//! Tests that each slot is flushed, by its session with the next record or by the owner's
//! checkpoint. Neither may assume that the other did it.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Recorder;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::{LegSession, Session, write};
use pagemesh_store::test_api::ControlInternals;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));
const PAGES: u64 = 512;

fn open(media: &Arc<Recorder>) -> Pool<Recorder> {
    Pool::open(media.clone(), media.clone()).expect("sound").0
}

fn session(pool: &mut Pool<Recorder>) -> Session<Recorder> {
    let number = pool.open_session(1, 1).expect("a session");
    Session::new(pool.mapping().clone(), number)
}

fn put(session: &mut Session<Recorder>, handle: Handle, page: u64, byte: u8) {
    let stamp = Stamp {
        epoch: Epoch(1),
        op: 0,
        open_ops: 0,
    };
    let (at, data) = (page * PAGE_BYTES as u64, [byte; PAGE_BYTES]);
    write(&mut [LegSession { session, handle }], at, &data, stamp).expect("room");
}

/// The first byte of a page after a crash that loses everything unfenced.
fn after_crash(media: &Recorder, page: u64) -> u8 {
    let points = media.crash_points();
    let image = points.last().expect("now").image(0);
    let mut pool = open(&Arc::new(Recorder::from_image(image)));
    let handle = pool.handle(SLICE).expect("the object");
    let mut bytes = [0; 1];
    let mut reader = session(&mut pool);
    let at = page * PAGE_BYTES as u64;
    reader
        .read(&handle, at, &mut bytes, Epoch(1))
        .expect("sound");
    bytes[0]
}

fn pool() -> (Arc<Recorder>, Pool<Recorder>, Handle) {
    let media = Arc::new(Recorder::new(4 << 20));
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let mut pool = open(&media);
    pool.create(SLICE, PAGES * PAGE_BYTES as u64).expect("room");
    let handle = pool.handle(SLICE).expect("the object");
    (media, pool, handle)
}

#[test]
fn checkpoint_flushes_last_record_of_session() {
    for count in [1, 2, 3, 9, 19] {
        let (media, mut pool, handle) = pool();
        let mut writer = session(&mut pool);
        // Eight slots share a line: some are flushed at once, some late.
        let pages: Vec<u64> = (0..count).map(|i| i * i * 3 % PAGES).collect();
        for (&page, byte) in pages.iter().zip(1..) {
            put(&mut writer, handle, page, byte);
        }
        pool.checkpoint().expect("sound");
        for (&page, byte) in pages.iter().zip(1..) {
            let newest = pages.iter().rposition(|&other| other == page);
            let expected = newest.map_or(byte, |at| at as u8 + 1);
            assert_eq!(
                after_crash(&media, page),
                expected,
                "page {page} of {count}"
            );
        }
    }
}

#[test]
fn session_never_flushes_records_of_former_session() {
    let (media, mut pool, handle) = pool();
    let mut first = session(&mut pool);
    let slow = session(&mut pool);
    put(&mut first, handle, 0, 1);
    pool.checkpoint().expect("sound");

    // An operation that does not end keeps later records from being applied.
    let control = pool.mapping().control();
    let floor = control.seq().load(Ordering::Acquire);
    let cells = control.session_cells(slow.number());
    cells.floor().store(floor, Ordering::SeqCst);
    put(&mut first, handle, 0, 2);
    let journal = first.number();
    drop(first);
    pool.close_session(journal).expect("sound");

    let mut second = session(&mut pool);
    assert_eq!(second.number(), journal, "the journal is used again");
    put(&mut second, handle, 100, 3);
    put(&mut second, handle, 200, 4);
    let control = pool.mapping().control();
    let cells = control.session_cells(slow.number());
    cells.floor().store(u64::MAX, Ordering::SeqCst);
    pool.checkpoint().expect("sound");
    let found = [0, 100, 200].map(|page| after_crash(&media, page));
    assert_eq!(found, [2, 3, 4]);
}
