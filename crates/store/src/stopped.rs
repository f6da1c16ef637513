//! Tests of a session that stands still inside an operation.

use crate::pool::{ObjectError, Pool, format};
use crate::session::{Member, Session, write};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Recorder;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));

/// Overwriting frees a frame for each that it takes, once the record is
/// checkpointed; which it is not beyond a window that stays open.
#[test]
fn who_waits_for_frames_hears_of_an_operation_that_stands_still() {
    let media = Arc::new(Recorder::new(4 << 20));
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
    pool.create(SLICE, 64 * PAGE_BYTES as u64).expect("room");
    let handle = pool.handle(SLICE).expect("the object");
    let still = pool.open_session(1, 1).expect("a session");
    let busy = pool.open_session(1, 1).expect("a session");
    let mut session = Session::new(pool.view().clone(), busy);
    pool.tend().expect("grants");
    // As a process leaves them that stops after it took its seq.
    let view = pool.view().clone();
    let cells = view.control.cells(still);
    let floor = view.control.seq().load(Ordering::SeqCst);
    cells.floor().store(floor, Ordering::SeqCst);
    cells.active().fetch_add(1, Ordering::SeqCst);
    let writer = std::thread::spawn(move || {
        let stamp = Stamp {
            epoch: Epoch(1),
            op: 0,
            open: 0,
        };
        (0..2000u64).try_for_each(|at| {
            let (at, data) = (at % 64 * PAGE_BYTES as u64, [at as u8; PAGE_BYTES]);
            let session = &mut session;
            write(&mut [Member { session, handle }], at, &data, stamp)
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
    assert_eq!(pool.inside(), [still]);
    // Its end, as the brick sees to it.
    cells.active().fetch_add(1, Ordering::SeqCst);
    pool.close_session(still).expect("sound");
    while !writer.is_finished() {
        pool.tend().expect("grants");
        std::thread::yield_now();
    }
    writer.join().expect("no panic").expect("room again");
}
