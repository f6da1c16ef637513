//! Grant rings, their recall, and the doorbell.
//!
//! Properties: every frame has one user and none is lost, whenever grants are recalled, and also
//! when a recall is given up. The owner answers a session that asks, before the time limit of the
//! wait.

use super::medium::StreamVisibility;
use super::model_pool::{ModelPool, initial_byte, write_page};
use pagemesh_base::defect::Defect;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_models::{Access, Model, assert_finds, has_ended, pause, run_threads, step};
use pagemesh_store::pool::ObjectError;
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::test_api::PoolInternals;
use std::sync::atomic::{AtomicBool, Ordering};

/// The owner recalls a session's grants while the session writes.
fn grant_recall() {
    let mut world = ModelPool::new(2, StreamVisibility::Immediate);
    let (pool, handle) = (&mut world.pool, world.handle);
    let [one, two] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    write_page(one, handle, 0, 1).expect("room");
    // The second session wants more frames than are free.
    let wanted = pool.usage().capacity_bytes / PAGE_BYTES as u64;
    ModelPool::request_frames(pool, two.number(), wanted);
    run_threads(vec![
        Box::new(|| match write_page(one, handle, 1, 2) {
            Ok(()) => {}
            // The session waited too long for the end of a recall.
            Err(failure) => assert_eq!(failure.cause, StoreError::TimedOut),
        }),
        Box::new(|| {
            let mut tend = || match pool.maintain() {
                // The owner would end a session that does not leave in time.
                Ok(_) | Err(ObjectError::SessionStuck { .. }) => {}
                Err(cause) => panic!("{cause}"),
            };
            tend();
            // The writer may wait for an answer.
            while !has_ended(0) {
                pause();
                tend();
            }
        }),
    ]);
    pool.maintain().expect("a sound pool");
    for (session, page) in [(one, 2), (two, 3)] {
        if ModelPool::grants_left(pool, session.number()) > 0 {
            write_page(session, handle, page, 3).expect("room");
        }
    }
    let pages = [1, 2, 3].map(initial_byte);
    world.check(&[&[1], &[pages[0], 2], &[pages[1], 3], &[pages[2], 3]]);
}

/// A session without frames asks for them; the owner sleeps on the doorbell, as the maintenance
/// loop does.
fn frame_request() {
    let mut world = ModelPool::new(1, StreamVisibility::Immediate);
    let (pool, handle) = (&mut world.pool, world.handle);
    let [one] = &mut world.sessions[..] else {
        panic!("one session");
    };
    while ModelPool::grants_left(pool, one.number()) > 0 {
        write_page(one, handle, 3, 9).expect("room");
    }
    pool.checkpoint().expect("a sound pool");
    // With so few free frames a session gets none without asking.
    let mut taken = Vec::new();
    while pool.free_frames() > 10 {
        taken.extend(pool.allocate_frames(pool.free_frames() - 10));
    }
    let view = pool.mapping().clone();
    let (control, is_over) = (view.control(), &AtomicBool::new(false));
    run_threads(vec![
        Box::new(|| {
            write_page(one, handle, 0, 1).expect("room");
            step("the end", 0..1, Access::Change);
            is_over.store(true, Ordering::SeqCst);
            control.ring_doorbell();
        }),
        Box::new(|| {
            loop {
                let seen = control.doorbell_count();
                while pool.maintain().expect("a sound pool") {}
                step("the end", 0..1, Access::Load);
                if is_over.load(Ordering::SeqCst) {
                    break;
                }
                control.wait_for_doorbell(seen, None);
            }
        }),
    ]);
    for run in taken {
        world.pool.return_frames(run);
    }
    world.check(&[&[1], &[initial_byte(1)], &[initial_byte(2)], &[9]]);
}

const REQUEST: Model = Model::new("frame requests to the owner", 2);
const RECALL: Model = Model::new("recall of grants", 2).with_time();

#[test]
fn grant_recall_never_uses_frame_twice() {
    assert!(RECALL.check(grant_recall).executions > 1000);
    let defects = [
        Defect::RecallIgnored,
        Defect::RecallNotAwaited,
        Defect::GivenUpRecallKept,
    ];
    assert_finds(&defects, RECALL, grant_recall);
}

#[test]
fn frame_request_is_answered() {
    assert!(REQUEST.check(frame_request).executions > 1000);
    assert_finds(&[Defect::DoorbellMissed], REQUEST, frame_request);
}
