//! Tests of a session that stands still inside an operation.

use crate::control::Range;
use crate::defect::{self, Defect};
use crate::object::State;
use crate::pool::{ObjectError, Pool, format};
use crate::session::{Member, Session, write};
use crate::view::{Handle, View};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, Recorder};
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
        open,
    };
    let (at, data) = (page * PAGE_BYTES as u64, [byte; PAGE_BYTES]);
    write(&mut [Member { session, handle }], at, &data, stamp).expect("room");
}

/// The byte that a page is full of, once everybody has died.
fn recovered(pool: &Pool<Recorder>, page: u64) -> u8 {
    let image = pool.view().data.now();
    let media = Arc::new(Recorder::from_image(image));
    let (mut pool, _) = Pool::open(media.clone(), media).expect("sound");
    let number = pool.open_session(1, 1).expect("a session");
    let handle = pool.handle(SLICE).expect("the object");
    let mut bytes = [0; PAGE_BYTES];
    let at = page * PAGE_BYTES as u64;
    Session::new(pool.view().clone(), number)
        .read(&handle, at, &mut bytes, Epoch(1))
        .expect("a sound page");
    bytes[0]
}

/// Whether the page is what was written last.
fn keeps_the_last_write() -> bool {
    let mut pool = pool(2 << 20, 4);
    let handle = pool.handle(SLICE).expect("the object");
    let numbers = [(); 3].map(|()| pool.open_session(1, 1).expect("a session"));
    let [mut one, mut two] = [0, 1].map(|at| Session::new(pool.view().clone(), numbers[at]));
    let view = pool.view().clone();
    let early = view.control.seq().load(Ordering::SeqCst);
    // It may be missing on another leg, so its record stays in the lane.
    put(&mut one, handle, 1, 1, 1, 0);
    put(&mut two, handle, 1, 2, 2, 0);
    put(&mut two, handle, 2, 3, 3, 0);
    pool.tend().expect("sound");
    // A thread that had read the counter before goes on.
    let cells = view.control.cells(numbers[2]);
    cells.active().fetch_add(1, Ordering::SeqCst);
    cells.floor().store(early, Ordering::SeqCst);
    view.control.seq().fetch_add(1, Ordering::SeqCst);
    // There is news for the superblock.
    two.note_complete(Stamp {
        epoch: Epoch(1),
        op: 4,
        open: 0,
    });
    pool.tend().expect("sound");
    recovered(&pool, 1) == 2
}

/// Its session took the seq late, so nothing below it is its own.
#[test]
fn a_floor_that_is_old_brings_nothing_back() {
    assert!(keeps_the_last_write());
    defect::set(Some(Defect::CheckpointGoesBack));
    assert!(!keeps_the_last_write());
    defect::set(None);
}

/// As a process leaves them that stops after it took its seq.
fn stand_still(view: &View<Recorder>, session: u32) {
    let cells = view.control.cells(session);
    cells.active().fetch_add(1, Ordering::SeqCst);
    let next = view.control.seq().fetch_add(1, Ordering::SeqCst);
    cells.floor().store(next, Ordering::SeqCst);
}

/// A pool with an object of so many pages, one that stands still, and another session.
fn beside_one_that_stands_still(pages: u64) -> (Pool<Recorder>, u32, Session<Recorder>) {
    let mut pool = pool(4 << 20, pages);
    let still = pool.open_session(1, 1).expect("a session");
    let busy = pool.open_session(1, 1).expect("a session");
    let session = Session::new(pool.view().clone(), busy);
    pool.tend().expect("grants");
    stand_still(pool.view(), still);
    (pool, still, session)
}

/// Overwriting frees a frame for each that it takes, once the record is applied: by a
/// bypass where a window stays open.
#[test]
fn who_writes_on_does_not_wait_for_an_operation_that_stands_still() {
    const WRITES: u64 = 5000;
    let (mut pool, still, mut session) = beside_one_that_stands_still(64);
    let handle = pool.handle(SLICE).expect("the object");
    let view = pool.view().clone();
    let writer = std::thread::spawn(move || {
        (0..WRITES).for_each(|at| put(&mut session, handle, at % 64, at as u8, at, 0));
    });
    while !writer.is_finished() {
        pool.tend().expect("nobody is waited for");
        std::thread::yield_now();
    }
    writer.join().expect("room all the time");
    assert_eq!(pool.inside(), [still], "nobody ended it");
    let frames = view.geometry.frame_numbers();
    assert!(
        WRITES > 4 * (frames.end - frames.start),
        "all were used again"
    );
    let last = |page: u64| (WRITES - 1 - (WRITES - 1 - page) % 64) as u8;
    for page in [0, 1, 63] {
        assert_eq!(recovered(&pool, page), last(page));
    }
}

/// Grants of one that stands still are all that is left: there is no other way to room.
#[test]
fn who_waits_for_the_last_frames_hears_of_an_operation_that_stands_still() {
    let (mut pool, still, mut session) = beside_one_that_stands_still(1000);
    let handle = pool.handle(SLICE).expect("the object");
    let view = pool.view().clone();
    let writer = std::thread::spawn(move || {
        let stamp = Stamp {
            epoch: Epoch(1),
            op: 1,
            open: 0,
        };
        (0..1000).find_map(|page| {
            let (at, data) = (page * PAGE_BYTES as u64, [1; PAGE_BYTES]);
            let session = &mut session;
            write(&mut [Member { session, handle }], at, &data, stamp).err()
        })
    });
    let told = loop {
        match pool.tend() {
            Ok(_) if writer.is_finished() => panic!("ended: {:?}", writer.join()),
            Ok(_) => {}
            Err(ObjectError::Stuck { session, .. }) => break session,
            Err(cause) => panic!("{cause}"),
        }
        std::thread::yield_now();
    };
    assert_eq!(told, still);
    // Its end, as the brick sees to it.
    view.control
        .cells(still)
        .active()
        .fetch_add(1, Ordering::SeqCst);
    pool.close_session(still).expect("sound");
    while !writer.is_finished() {
        pool.tend().expect("grants");
        std::thread::yield_now();
    }
    writer.join().expect("no panic");
}

/// One that goes on may store to a node of the object that was deleted: its
/// frames must stay until it has left.
#[test]
fn nothing_of_a_deleted_object_is_freed_while_a_session_is_inside() {
    let mut pool = pool(2 << 20, 1);
    let still = pool.open_session(1, 1).expect("a session");
    let (object, _) = pool.find(SLICE).expect("the slice");
    let view = pool.view().clone();
    let cells = view.control.cells(still);
    cells.active().fetch_add(1, Ordering::SeqCst);
    for _ in 0..2 {
        let stuck = pool.delete(SLICE);
        assert!(matches!(stuck, Err(ObjectError::Stuck { session, .. }) if session == still));
        while pool.tend().expect("sound") {}
        assert_eq!(pool.objects[&object].state, State::Deleting);
    }
    assert!(matches!(
        pool.create(SLICE, PAGE_BYTES as u64),
        Err(ObjectError::Exists(_))
    ));
    cells.active().fetch_add(1, Ordering::SeqCst);
    pool.delete(SLICE).expect("nobody is inside");
    while pool.tend().expect("sound") {}
    let entry = pool.objects.get(&object);
    assert!(entry.is_none_or(|entry| entry.state == State::Free));
    assert!(matches!(pool.delete(SLICE), Err(ObjectError::Unknown(_))));
}

/// A reader waits for it as a writer does, and has the owner end it.
#[test]
fn who_reads_a_page_that_one_stands_still_in_tells_of_it() {
    let (pool, still, mut session) = beside_one_that_stands_still(4);
    let handle = pool.handle(SLICE).expect("the object");
    put(&mut session, handle, 1, 7, 1, 0);
    let view = pool.view().clone();
    let at = session.slot_at(&handle, PageNo(1));
    let at = at.expect("sound").expect("a leaf");
    let slot = view.slot(at, PageNo(1)).expect("sound");
    let word = Range::of(handle.object, PageNo(1), 1);
    view.control.lock(&word, still).expect("free");
    view.meta.store(at, slot.changing().encode());
    let reader = std::thread::spawn(move || {
        let (at, mut bytes) = (PAGE_BYTES as u64, [0; PAGE_BYTES]);
        session
            .read(&handle, at, &mut bytes, Epoch(1))
            .map(|()| bytes)
    });
    let told = loop {
        assert!(!reader.is_finished(), "the page is being changed");
        let told = view.control.take_awaited();
        if !told.is_empty() {
            break told;
        }
        std::thread::yield_now();
    };
    assert_eq!(told, [still]);
    view.meta.store(at, slot.encode());
    view.control.unlock(&word);
    let read = reader.join().expect("no panic").expect("sound");
    assert_eq!(read, [7; PAGE_BYTES]);
}

/// It began behind the barrier, so that nobody waited for it before.
#[test]
fn a_round_is_not_stamped_past_one_that_stands_still_and_the_owner_hears_of_it() {
    let (mut pool, still, mut session) = beside_one_that_stands_still(4);
    let handle = pool.handle(SLICE).expect("the object");
    put(&mut session, handle, 1, 7, 1, 0);
    let view = pool.view().clone();
    let leave = || {
        view.control
            .cells(still)
            .active()
            .fetch_add(1, Ordering::SeqCst)
    };
    leave();
    let word = Range::of(handle.object, PageNo(1), 1);
    view.control.lock(&word, still).expect("free");
    let stuck = pool.raise_epoch(SLICE, Epoch(1), 3);
    assert!(
        matches!(stuck, Err(ObjectError::Stuck { session, .. }) if session == still),
        "{stuck:?}"
    );
    view.control.unlock(&word);
    pool.raise_epoch(SLICE, Epoch(1), 3).expect("called again");
    let at = session.slot_at(&handle, PageNo(1));
    let at = at.expect("sound").expect("a leaf");
    assert_eq!(view.slot(at, PageNo(1)).expect("sound").track(), 3);
}
