//! Models of what the channels of a volume share: every interleaving of a few
//! operations, up to a bound, on the code that ships ([`pagemesh_models`],
//! docs/rfd/008-concurrency-models.md), and shown to fail on deliberate defects.

use crate::hub::KEEPER;
use crate::locks::{Holder, LockRange, RangeLocks};
use crate::steps::step;
use crate::undecided::Undecided;
use crate::view::{ColumnView, Gate};
use crate::wake::Wake;
use pagemesh_base::defect::Defect;
use pagemesh_models::{Model, Thread, finds, pause_until, race};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const fn holder(key: u32) -> Holder {
    Holder {
        member: KEEPER + 1,
        key,
    }
}

/// A column of two legs, and who was told that its turn has come.
struct World {
    locks: RangeLocks,
    ops: AtomicU64,
    legs: [AtomicU64; 2],
    told: Mutex<Vec<Holder>>,
}

impl World {
    fn new() -> World {
        World {
            locks: RangeLocks::new(),
            ops: AtomicU64::new(0),
            legs: [0, 0].map(AtomicU64::new),
            told: Mutex::default(),
        }
    }

    fn was_told(&self, who: Holder) -> usize {
        let told = self.told.lock().expect("no panic");
        told.iter().filter(|told| **told == who).count()
    }

    fn leg(&self, leg: usize) -> u64 {
        step(["first leg", "second leg"][leg]);
        self.legs[leg].load(Ordering::SeqCst)
    }

    /// A change as a channel makes it: on the short way if nobody is ahead.
    fn change(&self, range: LockRange, key: u32) {
        let me = holder(key);
        if !self.locks.try_acquire(range, me) && !self.locks.acquire(range, me) {
            pause_until(|| self.was_told(me) > 0);
        }
        let op = self.ops.fetch_add(1, Ordering::SeqCst) + 1;
        for (leg, what) in self.legs.iter().zip(["first leg", "second leg"]) {
            step(what);
            let before = leg.swap(op, Ordering::SeqCst);
            assert!(before < op, "changes overtake each other");
        }
        let mut turns = Vec::new();
        self.locks.release(range, me, &mut turns);
        step("turns");
        self.told.lock().expect("no panic").extend(turns);
    }

    /// A read of one leg, and a later one of the other.
    fn read(&self, range: LockRange, key: u32) {
        let me = holder(key);
        let shown = self.leg(0);
        if !self.locks.is_still(range, me) {
            pause_until(|| self.was_told(me) > 0);
        }
        assert!(self.leg(1) >= shown, "a change was shown too early");
    }
}

fn changes_and_a_read() {
    let world = World::new();
    let pages = |page: u64, count: u64| LockRange::new(0, page * 4096, count * 4096);
    let change = |range, key| -> Thread<'_> {
        let world = &world;
        Box::new(move || world.change(range, key))
    };
    race(vec![
        change(pages(0, 2), 1),
        change(pages(1, 2), 2),
        Box::new(|| world.read(pages(1, 1), 3)),
    ]);
    let [one, two] = [0, 1].map(|leg| world.leg(leg));
    assert_eq!((one, two), (2, 2), "a change is lost");
    assert!((1..=3).all(|key| world.was_told(holder(key)) <= 1), "twice");
    let mut free = (0..3).map(|page| world.locks.try_acquire(pages(page, 1), holder(9)));
    assert!(free.all(|is_free| is_free), "a lock is left");
}

#[test]
fn changes_take_turns_and_no_read_shows_one_too_early() {
    let model = Model::new("range locks", 3);
    assert!(model.check(changes_and_a_read).executions > 1000);
    let defects = [
        Defect::ChangeNotCounted,
        Defect::NoTurns,
        Defect::ReadersNotTold,
        Defect::FirstChangeNotAwaited,
    ];
    finds(&defects, model, changes_and_a_read);
}

fn column(gate: Gate) -> [ColumnView; 1] {
    let legs = vec![];
    [ColumnView {
        legs,
        gate,
        ship: 0,
    }]
}

/// A change that the first leg has ends undecided, the keeper shows a view in which
/// the second leg alone counts, and another channel reads.
fn a_change_fails_and_is_decided() {
    const FAILED: u64 = 1;
    const DECIDED: u64 = 2;
    let (world, undecided) = (World::new(), Undecided::default());
    let (newest, range) = (AtomicU64::new(FAILED), LockRange::new(0, 0, 4096));
    let generation = || {
        step("generation");
        newest.load(Ordering::SeqCst)
    };
    let (change, reader) = (holder(1), holder(2));
    assert!(world.locks.acquire(range, change));
    world.legs[0].store(1, Ordering::SeqCst);
    race(vec![
        Box::new(|| {
            undecided.note(range, FAILED);
            let mut turns = Vec::new();
            world.locks.release(range, change, &mut turns);
            step("turns");
            world.told.lock().expect("no panic").extend(turns);
        }),
        Box::new(|| {
            step("generation");
            newest.store(DECIDED, Ordering::SeqCst);
            undecided.view_changes(&column(Gate::Failed), &column(Gate::Open), DECIDED);
        }),
        Box::new(|| {
            if generation() == DECIDED {
                return;
            }
            let shown = world.leg(0);
            if !world.locks.is_still(range, reader) {
                pause_until(|| world.was_told(reader) > 0);
            }
            if undecided.has(&range) || generation() == DECIDED {
                return;
            }
            assert_eq!(shown, 0, "what is taken back was shown");
        }),
    ]);
    assert!(!undecided.has(&range), "a note is kept for ever");
}

#[test]
fn what_is_taken_back_was_not_shown() {
    let model = Model::new("undecided", 3);
    assert!(model.check(a_change_fails_and_is_decided).executions > 100);
    let defects = [Defect::LateNoteTaken, Defect::FirstChangeNotAwaited];
    finds(&defects, model, a_change_fails_and_is_decided);
}

fn is_readable(wake: &Wake) -> bool {
    step("descriptor");
    wake.is_readable()
}

fn two_raise_often_and_one_sleeps() {
    let (wake, news) = (Wake::new().expect("a descriptor"), AtomicU64::new(0));
    let tell = || {
        step("news");
        news.fetch_add(1, Ordering::SeqCst);
        wake.raise();
    };
    race(vec![
        Box::new(|| (0..2).for_each(|_| tell())),
        Box::new(tell),
        Box::new(|| {
            let mut seen = 0;
            while seen < 3 {
                pause_until(|| is_readable(&wake));
                if wake.take() {
                    step("news");
                    seen = news.load(Ordering::SeqCst);
                }
            }
        }),
    ]);
    wake.take();
    assert!(!is_readable(&wake), "its sleeper would stay awake");
}

#[test]
fn who_is_woken_sleeps_on_no_news() {
    let model = Model::new("wake-ups", 3);
    assert!(model.check(two_raise_often_and_one_sleeps).executions > 1000);
    let defects = [Defect::WakeClearedFirst];
    finds(&defects, model, two_raise_often_and_one_sleeps);
}
