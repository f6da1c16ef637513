//! How guests are kept away, on the segment that ships: guests, one of which may die, the
//! mount that closes a file or the keeper that closes the segment, and who cleans up
//! behind the dead. What they do between their accesses is told again here, as
//! `pagemesh_direct` has it.

use crate::guests::{Place, Segment};
use crate::steps::step;
use pagemesh_base::defect::{self, Defect};
use pagemesh_models::{Model, finds, has_ended, pause_until, race};
use std::sync::atomic::{AtomicU64, Ordering};

const FILE: u64 = 7;
const MORTAL: usize = 0;
const THREADS: usize = 4;

/// A page on two legs, its lock word, and its file's board.
struct World {
    segment: Segment,
    closed: AtomicU64,
    /// Row and one.
    holder: AtomicU64,
    legs: [AtomicU64; 2],
}

impl World {
    fn new() -> World {
        World {
            segment: Segment::create(0).expect("memory"),
            closed: AtomicU64::new(0),
            holder: AtomicU64::new(0),
            legs: [0, 0].map(AtomicU64::new),
        }
    }

    fn leg(&self, leg: usize) -> &AtomicU64 {
        step(["first leg", "second leg"][leg]);
        &self.legs[leg]
    }

    fn board(&self) -> &AtomicU64 {
        step("board");
        &self.closed
    }

    fn lock_word(&self) -> &AtomicU64 {
        step("lock word");
        &self.holder
    }

    /// Whether this one took the lock word.
    fn lock(&self, number: usize) -> bool {
        let (free, own) = (0, number as u64 + 1);
        let swapped =
            self.lock_word()
                .compare_exchange(free, own, Ordering::SeqCst, Ordering::SeqCst);
        swapped.is_ok()
    }

    /// A guest overwrites the page, if it may.
    fn write(&self, number: usize) {
        let row = self.segment.row(number);
        let place = Place {
            file: FILE,
            offset: 0,
            len: 4096,
        };
        row.enter(place);
        let is_closed = || self.segment.is_closed() || self.board().load(Ordering::SeqCst) != 0;
        if defect::is(Defect::ClosedUnseen) || !is_closed() {
            pause_until(|| self.lock(number));
            for leg in 0..2 {
                self.leg(leg).store(number as u64 + 1, Ordering::SeqCst);
            }
            self.lock_word().store(0, Ordering::SeqCst);
        }
        row.leave();
    }

    /// Nobody else is at the page, and nobody left it unlike.
    fn has_it_alone(&self) {
        let found = self.leg(0).load(Ordering::SeqCst);
        let again = self.leg(1).load(Ordering::SeqCst);
        assert_eq!(found, again, "a guest is inside, or was");
    }

    /// A request of the kernel.
    fn serve(&self) {
        self.board().fetch_add(1, Ordering::SeqCst);
        let is_inside = || self.segment.active().any(|(_, place)| place.file == FILE);
        pause_until(|| !is_inside());
        self.has_it_alone();
        self.board().fetch_sub(1, Ordering::SeqCst);
    }

    /// The keeper compares the page.
    fn compare(&self) {
        self.segment.close();
        pause_until(|| self.segment.is_quiet());
        self.has_it_alone();
        self.segment.reopen();
    }

    /// Behind the guest that may die.
    fn clean_up(&self) {
        pause_until(|| has_ended(MORTAL));
        let row = self.segment.row(MORTAL);
        if row.place().is_none() {
            return;
        }
        let is_beside = defect::is(Defect::HealedBesideGuests);
        if !is_beside {
            self.segment.close();
        }
        // The bricks do that, whoever waits for what.
        let (own, free) = (MORTAL as u64 + 1, 0);
        let _of_another =
            self.lock_word()
                .compare_exchange(own, free, Ordering::SeqCst, Ordering::SeqCst);
        let is_out = |other: &usize| self.segment.row(*other).place().is_none();
        pause_until(|| is_beside || (MORTAL + 1..THREADS).all(|other| is_out(&other)));
        if defect::is(Defect::RowClearedFirst) {
            row.leave();
        }
        let read = self.leg(1).load(Ordering::SeqCst);
        self.leg(0).store(read, Ordering::SeqCst);
        if !defect::is(Defect::RowClearedFirst) {
            row.leave();
        }
        if !is_beside {
            self.segment.reopen();
        }
    }
}

/// Two guests, of whom the first may die, somebody who needs the page alone, and who
/// cleans up.
fn a_guest_dies(other: fn(&World)) {
    let world = World::new();
    race(vec![
        Box::new(|| world.write(MORTAL)),
        Box::new(|| world.write(1)),
        Box::new(|| other(&world)),
        Box::new(|| world.clean_up()),
    ]);
    assert!(world.segment.is_quiet(), "a row is active for ever");
    assert!(!world.segment.is_closed(), "guests are kept away for ever");
    world.has_it_alone();
}

fn beside_the_mount() {
    a_guest_dies(World::serve);
}

fn beside_the_keeper() {
    a_guest_dies(World::compare);
}

const DEFECTS: [Defect; 3] = [
    Defect::ClosedUnseen,
    Defect::RowClearedFirst,
    Defect::HealedBesideGuests,
];

#[test]
fn the_mount_has_a_file_alone_once_it_is_closed() {
    let model = Model::new("boards", 2).with_mortal(MORTAL);
    assert!(model.check(beside_the_mount).executions > 100);
    finds(&DEFECTS, model, beside_the_mount);
}

#[test]
fn the_keeper_has_all_alone_once_the_segment_is_closed() {
    let model = Model::new("direct segment", 2).with_mortal(MORTAL);
    assert!(model.check(beside_the_keeper).executions > 100);
    finds(&DEFECTS, model, beside_the_keeper);
}
