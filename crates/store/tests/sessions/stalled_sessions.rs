//! Tests of a session that is stalled in an operation.

use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, Recorder};
use pagemesh_store::control::LockWords;
use pagemesh_store::object::ObjectState;
use pagemesh_store::pool::{ObjectError, Pool, format};
use pagemesh_store::pool_mapping::{Handle, PoolMapping};
use pagemesh_store::session::{LegSession, Session, write};
use pagemesh_store::test_api::{ControlInternals, MappingInternals, SessionInternals};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));

fn pool(bytes: usize, pages: u64) -> Pool<Recorder> {
    let media = Arc::new(Recorder::new(bytes));
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
    pool.create(SLICE, pages * PAGE_BYTES as u64).expect("room");
    pool
}

fn put(session: &mut Session<Recorder>, handle: Handle, page: u64, byte: u8, op: u64, open: u32) {
    let stamp = Stamp {
        epoch: Epoch(1),
        op,
        open_ops: open,
    };
    let (at, data) = (page * PAGE_BYTES as u64, [byte; PAGE_BYTES]);
    write(&mut [LegSession { session, handle }], at, &data, stamp).expect("room");
}

/// The byte that fills a page after all processes have died and the pool was recovered.
fn recovered(pool: &Pool<Recorder>, page: u64) -> u8 {
    let image = pool.mapping().media().visible_image();
    let media = Arc::new(Recorder::from_image(image));
    let (mut pool, _) = Pool::open(media.clone(), media).expect("sound");
    let number = pool.open_session(1, 1).expect("a session");
    let handle = pool.handle(SLICE).expect("the object");
    let mut bytes = [0; PAGE_BYTES];
    let at = page * PAGE_BYTES as u64;
    Session::new(pool.mapping().clone(), number)
        .read(&handle, at, &mut bytes, Epoch(1))
        .expect("a sound page");
    bytes[0]
}

/// Whether the last write to the page survives.
fn last_write_survives_stale_floor() -> bool {
    let mut pool = pool(2 << 20, 4);
    let handle = pool.handle(SLICE).expect("the object");
    let numbers = [(); 3].map(|()| pool.open_session(1, 1).expect("a session"));
    let [mut one, mut two] = [0, 1].map(|at| Session::new(pool.mapping().clone(), numbers[at]));
    let view = pool.mapping().clone();
    let early = view.control().seq().load(Ordering::SeqCst);
    // The write may be missing on another leg, so its record stays in the journal.
    put(&mut one, handle, 1, 1, 1, 0);
    put(&mut two, handle, 1, 2, 2, 0);
    put(&mut two, handle, 2, 3, 3, 0);
    pool.maintain().expect("sound");
    // A thread that read the counter earlier continues.
    let cells = view.control().session_cells(numbers[2]);
    cells.active().fetch_add(1, Ordering::SeqCst);
    cells.floor().store(early, Ordering::SeqCst);
    view.control().seq().fetch_add(1, Ordering::SeqCst);
    // The superblock has something to record.
    two.record_complete(Stamp {
        epoch: Epoch(1),
        op: 4,
        open_ops: 0,
    });
    pool.maintain().expect("sound");
    recovered(&pool, 1) == 2
}

/// The stalled session took its seq late, so no record below it belongs to it.
#[test]
fn stale_floor_restores_no_old_data() {
    assert!(last_write_survives_stale_floor());
    defect::set(Some(Defect::CheckpointGoesBack));
    assert!(!last_write_survives_stale_floor());
    defect::set(None);
}

/// The state that a process leaves if it stops after it took its seq.
fn stall_in_op(view: &PoolMapping<Recorder>, session: u32) {
    let cells = view.control().session_cells(session);
    cells.active().fetch_add(1, Ordering::SeqCst);
    let next = view.control().seq().fetch_add(1, Ordering::SeqCst);
    cells.floor().store(next, Ordering::SeqCst);
}

/// A pool with an object of `pages` pages, a stalled session, and another session.
fn pool_with_stalled_session(pages: u64) -> (Pool<Recorder>, u32, Session<Recorder>) {
    let mut pool = pool(4 << 20, pages);
    let stalled = pool.open_session(1, 1).expect("a session");
    let busy = pool.open_session(1, 1).expect("a session");
    let session = Session::new(pool.mapping().clone(), busy);
    pool.maintain().expect("grants");
    stall_in_op(pool.mapping(), stalled);
    (pool, stalled, session)
}

/// Each overwrite takes a frame and frees one, once its record is applied. A partial checkpoint
/// applies it while an operation stays in progress.
#[test]
fn writer_does_not_wait_for_stalled_operation() {
    const WRITES: u64 = 5000;
    let (mut pool, still, mut session) = pool_with_stalled_session(64);
    let handle = pool.handle(SLICE).expect("the object");
    let view = pool.mapping().clone();
    let writer = std::thread::spawn(move || {
        (0..WRITES).for_each(|at| put(&mut session, handle, at % 64, at as u8, at, 0));
    });
    while !writer.is_finished() {
        pool.maintain().expect("no wait for the stalled session");
        std::thread::yield_now();
    }
    writer.join().expect("room all the time");
    assert_eq!(pool.sessions_in_op(), [still], "the session was not ended");
    let frames = view.geometry().first_frames();
    assert!(
        WRITES > 4 * (frames.end - frames.start),
        "all were used again"
    );
    let last = |page: u64| (WRITES - 1 - (WRITES - 1 - page) % 64) as u8;
    for page in [0, 1, 63] {
        assert_eq!(recovered(&pool, page), last(page));
    }
}

/// Only the grants of the stalled session are left: the owner cannot free space in another way.
#[test]
fn waiter_for_last_frames_gets_stalled_session_reported() {
    let (mut pool, still, mut session) = pool_with_stalled_session(1000);
    let handle = pool.handle(SLICE).expect("the object");
    let view = pool.mapping().clone();
    let writer = std::thread::spawn(move || {
        let stamp = Stamp {
            epoch: Epoch(1),
            op: 1,
            open_ops: 0,
        };
        (0..1000).find_map(|page| {
            let (at, data) = (page * PAGE_BYTES as u64, [1; PAGE_BYTES]);
            let session = &mut session;
            write(&mut [LegSession { session, handle }], at, &data, stamp).err()
        })
    });
    let reported = loop {
        match pool.maintain() {
            Ok(_) if writer.is_finished() => panic!("ended: {:?}", writer.join()),
            Ok(_) => {}
            Err(ObjectError::SessionStuck { session, .. }) => break session,
            Err(cause) => panic!("{cause}"),
        }
        std::thread::yield_now();
    };
    assert_eq!(reported, still);
    // The end of the stalled session, as the brick carries it out.
    view.control()
        .session_cells(still)
        .active()
        .fetch_add(1, Ordering::SeqCst);
    pool.close_session(still).expect("sound");
    while !writer.is_finished() {
        pool.maintain().expect("grants");
        std::thread::yield_now();
    }
    writer.join().expect("no panic");
}

/// A stalled session that continues may store to a node of the deleted object. The frames of the
/// object must stay in use until the operation has ended.
#[test]
fn deleted_object_keeps_frames_while_operation_runs() {
    let mut pool = pool(2 << 20, 1);
    let stalled = pool.open_session(1, 1).expect("a session");
    let (object, _) = pool.find(SLICE).expect("the slice");
    let view = pool.mapping().clone();
    let cells = view.control().session_cells(stalled);
    cells.active().fetch_add(1, Ordering::SeqCst);
    for _ in 0..2 {
        let stuck = pool.delete(SLICE);
        assert!(
            matches!(stuck, Err(ObjectError::SessionStuck { session, .. }) if session == stalled)
        );
        while pool.maintain().expect("sound") {}
        assert_eq!(
            pool.object(object).expect("an entry").state,
            ObjectState::Deleting
        );
    }
    assert!(matches!(
        pool.create(SLICE, PAGE_BYTES as u64),
        Err(ObjectError::Exists(_))
    ));
    cells.active().fetch_add(1, Ordering::SeqCst);
    pool.delete(SLICE).expect("no operation in progress");
    while pool.maintain().expect("sound") {}
    let entry = pool.object(object);
    assert!(entry.is_none_or(|entry| entry.state == ObjectState::Free));
    assert!(matches!(pool.delete(SLICE), Err(ObjectError::Unknown(_))));
}

/// A reader waits for a stalled session as a writer does, and the owner learns which session it is.
#[test]
fn reader_of_changing_page_reports_stalled_session() {
    let (pool, still, mut session) = pool_with_stalled_session(4);
    let handle = pool.handle(SLICE).expect("the object");
    put(&mut session, handle, 1, 7, 1, 0);
    let view = pool.mapping().clone();
    let at = session.slot_at(&handle, PageNo(1));
    let at = at.expect("sound").expect("a leaf");
    let slot = view.slot(at, PageNo(1)).expect("sound");
    let word = LockWords::of(handle.object(), PageNo(1), 1);
    view.control().lock(&word, still).expect("free");
    view.media().store(at, slot.changing().encode());
    let reader = std::thread::spawn(move || {
        let (at, mut bytes) = (PAGE_BYTES as u64, [0; PAGE_BYTES]);
        session
            .read(&handle, at, &mut bytes, Epoch(1))
            .map(|()| bytes)
    });
    let reported = loop {
        assert!(!reader.is_finished(), "the page is being changed");
        let reported = view.control().take_blocking_sessions();
        if !reported.is_empty() {
            break reported;
        }
        std::thread::yield_now();
    };
    assert_eq!(reported, [still]);
    view.media().store(at, slot.encode());
    view.control().unlock(&word);
    let read = reader.join().expect("no panic").expect("sound");
    assert_eq!(read, [7; PAGE_BYTES]);
}
