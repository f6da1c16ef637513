//! The lock words of the control segment.
//!
//! Property: a word has one holder; who waits gets it, without the nap's limit;
//! what a dead session held is free once, after it died.

use crate::control::{Control, Range};
use crate::defect::Defect;
use pagemesh_base::ids::{Incarnation, ObjectId, PageNo, Seq};
use pagemesh_models::{Access, Model, Thread, finds, has_ended, pause_until, race, step};
use std::sync::atomic::{AtomicU32, Ordering};

const OBJECT: ObjectId = ObjectId(1);
/// Two words, of which the second is the other range's, too.
const LONG: (u64, u64) = (0, 32);
const SHORT: (u64, u64) = (16, 16);

fn range((page, count): (u64, u64)) -> Range {
    Range::of(OBJECT, PageNo(page), count)
}

/// Who is where, beside the words.
struct Inside([AtomicU32; 2]);

impl Inside {
    const NOBODY: u32 = 99;

    fn new() -> Inside {
        Inside([Inside::NOBODY; 2].map(AtomicU32::new))
    }

    fn of((page, count): (u64, u64)) -> std::ops::Range<usize> {
        (page / 16) as usize..((page + count) / 16) as usize
    }

    fn change(&self, pages: (u64, u64), from: u32, to: u32) {
        for at in Inside::of(pages) {
            step("what is locked", at..at + 1, Access::Change);
            let found = self.0[at].swap(to, Ordering::SeqCst);
            assert_eq!(found, from, "two hold a lock");
        }
    }

    fn forget(&self, dead: u32) {
        for at in &self.0 {
            let _ = at.compare_exchange(dead, Inside::NOBODY, Ordering::SeqCst, Ordering::SeqCst);
        }
    }
}

fn hold(control: &Control, inside: &Inside, pages: (u64, u64), session: u32) {
    control.lock(&range(pages), session).expect("no limit");
    inside.change(pages, Inside::NOBODY, session);
    inside.change(pages, session, Inside::NOBODY);
    control.unlock(&range(pages));
}

fn three_take_turns() {
    let control = Control::create(4, Incarnation(1), Seq(1)).expect("a segment");
    let (control, inside) = (&control, &Inside::new());
    let thread =
        |pages, session| -> Thread<'_> { Box::new(move || hold(control, inside, pages, session)) };
    race(vec![thread(LONG, 0), thread(SHORT, 1), thread(LONG, 2)]);
    assert!(control.is_free(&range(LONG)), "a lock is left");
}

/// The first holder may die anywhere; the last thread buries it and takes its turn.
fn one_dies() {
    let control = Control::create(4, Incarnation(1), Seq(1)).expect("a segment");
    let (control, inside) = (&control, &Inside::new());
    race(vec![
        Box::new(|| hold(control, inside, LONG, 0)),
        Box::new(|| hold(control, inside, SHORT, 1)),
        Box::new(|| {
            pause_until(|| has_ended(0));
            inside.forget(0);
            control.release_all(0);
            hold(control, inside, SHORT, 2);
        }),
    ]);
    assert!(control.is_free(&range(LONG)), "a lock is left");
}

const TURNS: Model = Model::new("lock words", 2);
const DEATH: Model = Model::new("lock words of a dead session", 2).with_mortal(0);

#[test]
fn lock_words_have_one_holder_and_wake_who_waits() {
    assert!(TURNS.check(three_take_turns).executions > 1000);
    finds(&[Defect::WaiterUnmarked], TURNS, three_take_turns);
}

#[test]
fn lock_words_of_the_dead_are_free_once() {
    assert!(DEATH.check(one_dies).executions > 1000);
    let defects = [Defect::LocksKept, Defect::LocksOfAllFreed];
    finds(&defects, DEATH, one_dies);
}
