//! Grant rings, their recall, and the bell.
//!
//! Properties: every frame has one user and none is lost, whenever grants are
//! taken back, and also when a recall is given up; who asks the owner is
//! answered, without the limit of the wait.

use super::medium::Streams;
use super::world::{World, before, put};
use crate::defect::Defect;
use crate::pool::ObjectError;
use crate::view::StoreError;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_models::{Access, Model, finds, has_ended, pause, race, step};
use std::sync::atomic::{AtomicBool, Ordering};

/// The owner takes back what a session was granted while it writes.
fn a_recall() {
    let mut world = World::new(2, Streams::AtOnce);
    let (pool, handle) = (&mut world.pool, world.handle);
    let [one, two] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    put(one, handle, 0, 1).expect("room");
    // The other one wants more than is free.
    let wanted = pool.usage().capacity_bytes / PAGE_BYTES as u64;
    World::ask(pool, two.number(), wanted);
    race(vec![
        Box::new(|| match put(one, handle, 1, 2) {
            Ok(()) => {}
            // It waited too long for the end of a recall.
            Err(failure) => assert_eq!(failure.cause, StoreError::Stalled),
        }),
        Box::new(|| {
            let mut tend = || match pool.tend() {
                // A session that does not leave in time would be ended.
                Ok(_) | Err(ObjectError::Stuck { .. }) => {}
                Err(cause) => panic!("{cause}"),
            };
            tend();
            // It may wait for an answer.
            while !has_ended(0) {
                pause();
                tend();
            }
        }),
    ]);
    pool.tend().expect("a sound pool");
    for (session, page) in [(one, 2), (two, 3)] {
        if World::left(pool, session.number()) > 0 {
            put(session, handle, page, 3).expect("room");
        }
    }
    let pages = [1, 2, 3].map(before);
    world.check(&[&[1], &[pages[0], 2], &[pages[1], 3], &[pages[2], 3]]);
}

/// A session that has no frames left asks for them; the owner sleeps on the
/// bell, as a housekeeper does.
fn a_question() {
    let mut world = World::new(1, Streams::AtOnce);
    let (pool, handle) = (&mut world.pool, world.handle);
    let [one] = &mut world.sessions[..] else {
        panic!("one session");
    };
    while World::left(pool, one.number()) > 0 {
        put(one, handle, 3, 9).expect("room");
    }
    pool.checkpoint().expect("a sound pool");
    // So few are free that nobody gets some without asking.
    let mut taken = Vec::new();
    while pool.frames.free() > 10 {
        taken.extend(pool.frames.take(pool.frames.free() - 10));
    }
    let view = pool.view().clone();
    let (control, is_over) = (view.control(), &AtomicBool::new(false));
    race(vec![
        Box::new(|| {
            put(one, handle, 0, 1).expect("room");
            step("the end", 0..1, Access::Change);
            is_over.store(true, Ordering::SeqCst);
            control.ring();
        }),
        Box::new(|| {
            loop {
                let seen = control.rung();
                while pool.tend().expect("a sound pool") {}
                step("the end", 0..1, Access::Load);
                if is_over.load(Ordering::SeqCst) {
                    break;
                }
                control.await_bell(seen, None);
            }
        }),
    ]);
    let frames = &mut world.pool.frames;
    taken.into_iter().for_each(|run| frames.give_back(run));
    world.check(&[&[1], &[before(1)], &[before(2)], &[9]]);
}

const QUESTION: Model = Model::new("questions to the owner", 2);
const RECALL: Model = Model::new("recall of grants", 2).with_time();

#[test]
fn no_recall_of_grants_uses_a_frame_twice() {
    assert!(RECALL.check(a_recall).executions > 1000);
    let defects = [
        Defect::RecallUnseen,
        Defect::RecallNotAwaited,
        Defect::GivenUpRecallKept,
    ];
    finds(&defects, RECALL, a_recall);
}

#[test]
fn who_asks_the_owner_is_answered() {
    assert!(QUESTION.check(a_question).executions > 1000);
    finds(&[Defect::BellUnheard], QUESTION, a_question);
}
