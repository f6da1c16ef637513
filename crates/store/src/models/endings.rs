//! Ends of sessions while others work.
//!
//! Properties: a session that dies anywhere leaves its write whole or not done,
//! and no lock, floor or frame behind; its locks are free once, when its write
//! cannot change anything any more; one that is revoked and alive begins nothing
//! after the owner has looked.

use super::medium::Streams;
use super::world::{World, before, put};
use crate::defect::Defect;
use crate::view::StoreError;
use pagemesh_models::{Model, finds, has_ended, pause, pause_until, race};

/// Two write the same page, and the first one may die at any access.
fn a_death(streams: Streams) {
    let mut world = World::new(2, streams);
    let (pool, handle, medium) = (&mut world.pool, world.handle, world.medium.clone());
    let [mortal, other] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    let number = mortal.number();
    race(vec![
        Box::new(|| put(mortal, handle, 0, 1).expect("room")),
        Box::new(|| put(other, handle, 0, 2).expect("room")),
        Box::new(|| {
            pause_until(|| has_ended(0));
            medium.drain(0);
            pool.close_session(number).expect("a sound pool");
        }),
    ]);
    world.check(&[&[1, 2], &[before(1)], &[before(2)], &[before(3)]]);
}

/// The owner ends a session that is alive, as a brick that stops does.
fn a_revocation() {
    let mut world = World::new(2, Streams::AtOnce);
    let (pool, handle) = (&mut world.pool, world.handle);
    let one = &mut world.sessions[0];
    let number = one.number();
    race(vec![
        Box::new(|| match put(one, handle, 0, 1) {
            Ok(()) => {}
            // Nobody answers one that is ended.
            Err(failure) => {
                let expected = [StoreError::Revoked, StoreError::Stalled];
                assert!(expected.contains(&failure.cause), "{failure}");
            }
        }),
        Box::new(|| {
            while pool.revoke(number) {
                pause();
            }
            pool.close_session(number).expect("a sound pool");
        }),
    ]);
    world.check(&[&[before(0), 1], &[before(1)], &[before(2)], &[before(3)]]);
}

const DEATH: Model = Model::new("a session dies", 1).with_mortal(0);
const LATE: Model = Model::new("a session dies before its fence", 0).with_mortal(0);
const REVOCATION: Model = Model::new("a session is revoked", 3).with_time();

#[test]
fn a_session_that_dies_leaves_nothing_behind() {
    assert!(DEATH.check(|| a_death(Streams::AtOnce)).executions > 1000);
    assert!(LATE.check(|| a_death(Streams::AtTheFence)).executions > 100);
    let defects = [
        Defect::LocksKept,
        Defect::LocksFreedFirst,
        Defect::HoleKept,
        Defect::DeadNotFinished,
    ];
    finds(&defects, DEATH, || a_death(Streams::AtOnce));
}

#[test]
fn a_session_that_is_revoked_begins_nothing() {
    assert!(REVOCATION.check(a_revocation).executions > 1000);
    finds(&[Defect::RevokedEnters], REVOCATION, a_revocation);
}
