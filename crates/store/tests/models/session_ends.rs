//! Ends of sessions while others work.
//!
//! Properties: a session that dies anywhere leaves its write complete or undone, and no lock, floor
//! or frame behind. Its locks are freed once, when its write can change no more data. A live
//! session that was revoked begins no operation after the owner has looked.

use super::medium::StreamVisibility;
use super::model_pool::{ModelPool, initial_byte, write_page};
use pagemesh_base::defect::Defect;
use pagemesh_models::{Model, assert_finds, has_ended, pause, pause_until, run_threads};
use pagemesh_store::pool_mapping::StoreError;

/// Two sessions write the same page; the first one may die at any access.
fn session_death(streams: StreamVisibility) {
    let mut world = ModelPool::new(2, streams);
    let (pool, handle, medium) = (&mut world.pool, world.handle, world.medium.clone());
    let [mortal, other] = &mut world.sessions[..] else {
        panic!("two sessions");
    };
    let number = mortal.number();
    run_threads(vec![
        Box::new(|| write_page(mortal, handle, 0, 1).expect("room")),
        Box::new(|| write_page(other, handle, 0, 2).expect("room")),
        Box::new(|| {
            pause_until(|| has_ended(0));
            medium.publish_pending(0);
            pool.close_session(number).expect("a sound pool");
        }),
    ]);
    world.check(&[
        &[1, 2],
        &[initial_byte(1)],
        &[initial_byte(2)],
        &[initial_byte(3)],
    ]);
}

/// The owner ends a live session, as a stopping brick does.
fn session_revocation() {
    let mut world = ModelPool::new(2, StreamVisibility::Immediate);
    let (pool, handle) = (&mut world.pool, world.handle);
    let one = &mut world.sessions[0];
    let number = one.number();
    run_threads(vec![
        Box::new(|| match write_page(one, handle, 0, 1) {
            Ok(()) => {}
            // The owner does not answer an ended session.
            Err(failure) => {
                let expected = [StoreError::Revoked, StoreError::TimedOut];
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
    world.check(&[
        &[initial_byte(0), 1],
        &[initial_byte(1)],
        &[initial_byte(2)],
        &[initial_byte(3)],
    ]);
}

const DEATH: Model = Model::new("a session dies", 1).with_mortal(0);
const LATE: Model = Model::new("a session dies before its fence", 0).with_mortal(0);
const REVOCATION: Model = Model::new("a session is revoked", 3).with_time();

#[test]
fn dead_session_leaves_nothing_behind() {
    let defects = [
        Defect::LocksKept,
        Defect::LocksFreedFirst,
        Defect::SeqHoleKept,
        Defect::DeadNotRolledForward,
    ];
    check_deaths(DEATH, LATE, session_death, &defects);
}

/// Checks a scenario with a death at any access: with bytes that reach the medium at once, and with
/// bytes that reach it at the fence. The first must fail on each defect.
#[track_caller]
pub(super) fn check_deaths(
    at_once: Model,
    at_fence: Model,
    scenario: fn(StreamVisibility),
    defects: &[Defect],
) {
    let immediate = move || scenario(StreamVisibility::Immediate);
    assert!(at_once.check(immediate).executions > 1000);
    let late = at_fence.check(move || scenario(StreamVisibility::AtFence));
    assert!(late.executions > 100);
    assert_finds(defects, at_once, immediate);
}

#[test]
fn revoked_session_begins_no_operation() {
    assert!(REVOCATION.check(session_revocation).executions > 1000);
    assert_finds(
        &[Defect::RevokedBeginsOperation],
        REVOCATION,
        session_revocation,
    );
}
