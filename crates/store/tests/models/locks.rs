//! The lock words of the control segment.
//!
//! Property: a word has one holder. A waiter gets it without the time limit of its sleep. The words
//! of a dead session are freed once, after its death.

use pagemesh_base::defect::Defect;
use pagemesh_base::ids::{Incarnation, ObjectId, PageNo, Seq};
use pagemesh_models::{
    Access, Model, Thread, assert_finds, has_ended, pause_until, run_threads, step,
};
use pagemesh_store::control::{Control, LockWords};
use pagemesh_store::test_api::ControlInternals;
use std::sync::atomic::{AtomicU32, Ordering};

const OBJECT: ObjectId = ObjectId(1);
/// Two words; the second one is in the other range as well.
const LONG: (u64, u64) = (0, 32);
const SHORT: (u64, u64) = (16, 16);

fn range((page, count): (u64, u64)) -> LockWords {
    LockWords::of(OBJECT, PageNo(page), count)
}

/// The holder of each lock word, tracked outside of the words.
struct LockHolders([AtomicU32; 2]);

impl LockHolders {
    const NOBODY: u32 = 99;

    fn new() -> LockHolders {
        LockHolders([LockHolders::NOBODY; 2].map(AtomicU32::new))
    }

    fn of((page, count): (u64, u64)) -> std::ops::Range<usize> {
        (page / 16) as usize..((page + count) / 16) as usize
    }

    fn change(&self, pages: (u64, u64), from: u32, to: u32) {
        for at in LockHolders::of(pages) {
            step("what is locked", at..at + 1, Access::Change);
            let found = self.0[at].swap(to, Ordering::SeqCst);
            assert_eq!(found, from, "two sessions hold a lock");
        }
    }

    fn forget(&self, dead: u32) {
        for at in &self.0 {
            let _ = at.compare_exchange(
                dead,
                LockHolders::NOBODY,
                Ordering::SeqCst,
                Ordering::SeqCst,
            );
        }
    }
}

fn segment() -> Control {
    super::explore_product();
    Control::create(4, 0, Incarnation(1), Seq(1)).expect("a segment")
}

fn lock_and_unlock(control: &Control, inside: &LockHolders, pages: (u64, u64), session: u32) {
    control.lock(&range(pages), session).expect("no limit");
    inside.change(pages, LockHolders::NOBODY, session);
    inside.change(pages, session, LockHolders::NOBODY);
    control.unlock(&range(pages));
}

fn three_sessions_lock() {
    let control = segment();
    let (control, inside) = (&control, &LockHolders::new());
    let thread = |pages, session| -> Thread<'_> {
        Box::new(move || lock_and_unlock(control, inside, pages, session))
    };
    run_threads(vec![thread(LONG, 0), thread(SHORT, 1), thread(LONG, 2)]);
    assert!(control.is_unlocked(&range(LONG)), "a lock is left");
}

/// The first holder may die at any access; the last thread retires it and takes its turn.
fn lock_holder_dies() {
    let control = segment();
    let (control, inside) = (&control, &LockHolders::new());
    run_threads(vec![
        Box::new(|| lock_and_unlock(control, inside, LONG, 0)),
        Box::new(|| lock_and_unlock(control, inside, SHORT, 1)),
        Box::new(|| {
            pause_until(|| has_ended(0));
            inside.forget(0);
            control.release_all(0);
            lock_and_unlock(control, inside, SHORT, 2);
        }),
    ]);
    assert!(control.is_unlocked(&range(LONG)), "a lock is left");
}

const LOCKS: Model = Model::new("lock words", 2);
const DEATH: Model = Model::new("lock words of a dead session", 2).with_mortal(0);

#[test]
fn lock_words_have_one_holder_and_wake_waiters() {
    assert!(LOCKS.check(three_sessions_lock).executions > 1000);
    assert_finds(&[Defect::WaiterUnmarked], LOCKS, three_sessions_lock);
}

#[test]
fn lock_words_of_dead_holder_are_freed_once() {
    assert!(DEATH.check(lock_holder_dies).executions > 1000);
    let defects = [Defect::LocksKept, Defect::LocksOfAllFreed];
    assert_finds(&defects, DEATH, lock_holder_dies);
}
