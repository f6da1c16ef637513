//! Tests of a session that died between its commit and the swap of its slots, with a slot that the
//! medium damaged meanwhile: the owner that retires the session publishes its operation all the
//! same.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, Recorder};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::{LegSession, Session, write};
use pagemesh_store::slot::Slot;
use pagemesh_store::table::SlotLocation;
use pagemesh_store::test_api::{ControlInternals, MappingInternals};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));

fn put(session: &mut Session<Recorder>, handle: Handle, page: u64, byte: u8) {
    let stamp = Stamp {
        epoch: Epoch(1),
        op: u64::from(byte),
        open_ops: 0,
    };
    let (at, data) = (page * PAGE_BYTES as u64, [byte; PAGE_BYTES]);
    write(&mut [LegSession { session, handle }], at, &data, stamp).expect("room");
}

fn session(pool: &mut Pool<Recorder>) -> Session<Recorder> {
    let number = pool.open_session(1, 1).expect("a session");
    Session::new(pool.mapping().clone(), number)
}

/// Checks with a session that dies while this bit of the slot of `level` above page 3 is flipped.
#[track_caller]
fn check_retirement(level: u8, bit: u32, is_swapped: bool) {
    let media = Arc::new(Recorder::new(4 << 20));
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let mut pool = Pool::open(media.clone(), media.clone()).expect("sound").0;
    pool.create(SLICE, 512 * PAGE_BYTES as u64).expect("room");
    let handle = pool.handle(SLICE).expect("the object");
    let view = pool.mapping().clone();
    let slot_at = |level| match view.locate(handle.object(), level, PageNo(3)) {
        Ok(SlotLocation::At(at)) => at,
        other => panic!("{other:?}"),
    };
    let mut dead = session(&mut pool);
    put(&mut dead, handle, 3, 1);
    put(&mut dead, handle, 4, 1);
    let (page_at, damaged_at) = (slot_at(0), slot_at(level));
    let before = media.load(page_at);
    let cells = view.control().session_cells(dead.number());
    let committed = cells.committed().load(Ordering::SeqCst);
    put(&mut dead, handle, 3, 2);
    // The state before the record is published: the operation is in progress.
    cells.committed().store(committed, Ordering::SeqCst);
    cells.active().fetch_sub(1, Ordering::SeqCst);
    if !is_swapped {
        media.store(page_at, before);
    }
    media.store(damaged_at, media.load(damaged_at) ^ 1 << bit);
    pool.close_session(dead.number()).expect("a sound pool");
    let mut reader = session(&mut pool);
    for (page, byte) in [(3, 2), (4, 1)] {
        let mut found = [0; PAGE_BYTES];
        let read = reader.read(&handle, page * PAGE_BYTES as u64, &mut found, Epoch(1));
        assert_eq!(read, Ok(()), "level {level}, bit {bit}");
        assert_eq!(found, [byte; PAGE_BYTES], "level {level}, bit {bit}");
    }
    assert!(Slot::decode(media.load(damaged_at)).is_ok());
}

#[test]
fn dead_session_with_flipped_slot_is_retired() {
    for level in 0..=4 {
        for bit in [0, 9, 36, 41, 44, 60] {
            check_retirement(level, bit, false);
            check_retirement(level, bit, true);
        }
    }
}
