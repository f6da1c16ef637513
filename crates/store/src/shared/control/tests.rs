//! Tests of the control segment.

use super::*;
use pagemesh_base::ids::{ObjectId, PageNo};
use std::cell::Cell;

#[test]
fn waits_end_when_owner_is_gone() {
    const LIMIT: Duration = Duration::from_secs(60);
    let control = Control::create(4, 0, Incarnation(1), Seq(1)).expect("a segment");
    let range = LockWords::of(ObjectId(1), PageNo(7), 1);
    control.lock(&range, 2).expect("the lock");
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| control.wait_for_answer(0, 1, LIMIT));
        let refused = scope.spawn(|| control.lock(&range, 1));
        control.mark_owner_gone();
        assert_eq!(refused.join().expect("no panic"), Err(LockTimeout));
    });
    assert!(began.elapsed() < LOCK_WAIT_MAX.min(LIMIT));
}

#[test]
fn locks_exclude_and_are_released_for_dead_holder() {
    let control = Control::create(4, 0, Incarnation(1), Seq(1)).expect("a segment");
    let range = LockWords::of(ObjectId(1), PageNo(7), 300);
    let counter = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for session in 0..2 {
            let (control, range, counter) = (&control, &range, &counter);
            scope.spawn(move || {
                for _ in 0..2000 {
                    control.lock(range, session).expect("the lock");
                    let seen = counter.load(Ordering::Relaxed);
                    counter.store(seen + 1, Ordering::Relaxed);
                    control.unlock(range);
                }
            });
        }
    });
    assert_eq!(counter.load(Ordering::Relaxed), 4000);
    control.lock(&range, 3).expect("free");
    control.release_all(3);
    control.lock(&range, 2).expect("free again");
    control.unlock(&range);
}

#[test]
fn owner_learns_holders_of_contended_locks() {
    let control = Control::create(JOURNALS_MAX, 0, Incarnation(1), Seq(1)).expect("a segment");
    let range = LockWords::of(ObjectId(1), PageNo(7), 1);
    for holder in [3, 64, JOURNALS_MAX - 1] {
        control.lock(&range, holder).expect("free");
        assert!(control.take_blocking_sessions().is_empty(), "no waiters");
        let rung = control.doorbell_count();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| control.lock(&range, 1));
            for _ in 0..2 {
                let told = std::iter::repeat_with(|| {
                    std::thread::yield_now();
                    control.take_blocking_sessions()
                });
                let mut told = told.skip_while(Vec::is_empty);
                assert_eq!(told.next(), Some(vec![holder]), "reported again and again");
            }
            control.unlock(&range);
            waiter.join().expect("no panic").expect("the lock");
        });
        assert!(control.doorbell_count() >= rung + 2);
        control.take_blocking_sessions();
        control.unlock(&range);
    }
}

#[test]
fn ring_right_after_the_check_ends_the_owner() {
    let control = Control::create(JOURNALS_MAX, 0, Incarnation(1), Seq(1)).expect("a segment");
    let asked = Cell::new(false);
    // The owner is ended at the worst moment: right after it has found that it may go on.
    let is_ending = || {
        if asked.replace(true) {
            return true;
        }
        control.ring_doorbell();
        false
    };
    let mut rounds = 0;
    control.serve_doorbell(is_ending, || {
        rounds += 1;
        None
    });
    assert_eq!(rounds, 1);
}

#[test]
fn lock_words_are_unique_and_ascending() {
    for (page, count) in [(0, 1), (15, 2), (3, 512), (1 << 35, 512)] {
        let range = LockWords::of(ObjectId(9), PageNo(page), count);
        assert!(range.is_sorted_by(|a, b| a < b), "{page} {count}");
    }
}
