//! Models of blocking direct clients, on the product's segment. The threads are direct clients,
//! one of which may die, the mount that closes a file or the controller that closes the
//! segment, and the reconciliation after the death. The steps between their accesses are
//! written again here after `pagemesh_direct`.

use crate::{explore_product, step};
use pagemesh_base::defect::{self, Defect};
use pagemesh_models::{Model, assert_finds, has_ended, pause_until, run_threads};
use pagemesh_volume::direct_access::{DirectSegment, FileRange};
use std::sync::atomic::{AtomicU64, Ordering};

const FILE: u64 = 7;
const MORTAL: usize = 0;
const THREADS: usize = 4;

/// A page on two legs, its lock word, and the shared map of its file.
struct DirectAccessModel {
    segment: DirectSegment,
    file_closed: AtomicU64,
    /// The row number plus one.
    lock_holder: AtomicU64,
    legs: [AtomicU64; 2],
}

impl DirectAccessModel {
    fn new() -> DirectAccessModel {
        DirectAccessModel {
            segment: DirectSegment::create(0).expect("memory"),
            file_closed: AtomicU64::new(0),
            lock_holder: AtomicU64::new(0),
            legs: [0, 0].map(AtomicU64::new),
        }
    }

    fn leg(&self, leg: usize) -> &AtomicU64 {
        step(["first leg", "second leg"][leg]);
        &self.legs[leg]
    }

    fn file_closed_count(&self) -> &AtomicU64 {
        step("board");
        &self.file_closed
    }

    fn lock_word(&self) -> &AtomicU64 {
        step("lock word");
        &self.lock_holder
    }

    /// Takes the lock word; true if it was free.
    fn lock(&self, number: usize) -> bool {
        let (free, own) = (0, number as u64 + 1);
        let swapped =
            self.lock_word()
                .compare_exchange(free, own, Ordering::SeqCst, Ordering::SeqCst);
        swapped.is_ok()
    }

    /// A direct client overwrites the page, if it has access.
    fn write(&self, number: usize) {
        let row = self.segment.row(number);
        let place = FileRange {
            file: FILE,
            offset: 0,
            len: 4096,
        };
        row.begin_op(place);
        let is_closed =
            || self.segment.is_closed() || self.file_closed_count().load(Ordering::SeqCst) != 0;
        if defect::is(Defect::AccessDisabledIgnored) || !is_closed() {
            pause_until(|| self.lock(number));
            for leg in 0..2 {
                self.leg(leg).store(number as u64 + 1, Ordering::SeqCst);
            }
            self.lock_word().store(0, Ordering::SeqCst);
        }
        row.end_op();
    }

    /// Asserts that no other thread is writing the page, and that both legs are equal.
    fn assert_exclusive(&self) {
        let found = self.leg(0).load(Ordering::SeqCst);
        let again = self.leg(1).load(Ordering::SeqCst);
        assert_eq!(found, again, "a direct operation is in progress or torn");
    }

    /// Serves a request of the kernel.
    fn serve_kernel_request(&self) {
        self.file_closed_count().fetch_add(1, Ordering::SeqCst);
        let is_inside = || {
            self.segment
                .active_ops()
                .any(|(_, place)| place.file == FILE)
        };
        pause_until(|| !is_inside());
        self.assert_exclusive();
        self.file_closed_count().fetch_sub(1, Ordering::SeqCst);
    }

    /// The controller compares the page.
    fn compare(&self) {
        self.segment.close();
        pause_until(|| self.segment.is_idle());
        self.assert_exclusive();
        self.segment.reopen();
    }

    /// Reconciles after the mortal client's death.
    fn reconcile_dead_client(&self) {
        pause_until(|| has_ended(MORTAL));
        let row = self.segment.row(MORTAL);
        if row.active_range().is_none() {
            return;
        }
        let is_beside = defect::is(Defect::ReconciledDuringClientWrites);
        if !is_beside {
            self.segment.close();
        }
        // The bricks free the lock word, independently of all waiting threads.
        let (own, free) = (MORTAL as u64 + 1, 0);
        let _of_another =
            self.lock_word()
                .compare_exchange(own, free, Ordering::SeqCst, Ordering::SeqCst);
        let is_out = |other: &usize| self.segment.row(*other).active_range().is_none();
        pause_until(|| is_beside || (MORTAL + 1..THREADS).all(|other| is_out(&other)));
        if defect::is(Defect::RowClearedFirst) {
            row.end_op();
        }
        let read = self.leg(1).load(Ordering::SeqCst);
        self.leg(0).store(read, Ordering::SeqCst);
        if !defect::is(Defect::RowClearedFirst) {
            row.end_op();
        }
        if !is_beside {
            self.segment.reopen();
        }
    }
}

/// Runs two direct clients, of which the first may die, a thread that needs the page alone, and
/// the reconciliation.
fn check_client_death(other: fn(&DirectAccessModel)) {
    let world = DirectAccessModel::new();
    run_threads(vec![
        Box::new(|| world.write(MORTAL)),
        Box::new(|| world.write(1)),
        Box::new(|| other(&world)),
        Box::new(|| world.reconcile_dead_client()),
    ]);
    assert!(world.segment.is_idle(), "a row is active for ever");
    assert!(!world.segment.is_closed(), "access is blocked for ever");
    world.assert_exclusive();
}

fn check_against_mount() {
    check_client_death(DirectAccessModel::serve_kernel_request);
}

fn check_against_controller() {
    check_client_death(DirectAccessModel::compare);
}

const DEFECTS: [Defect; 3] = [
    Defect::AccessDisabledIgnored,
    Defect::RowClearedFirst,
    Defect::ReconciledDuringClientWrites,
];

#[test]
fn closed_file_excludes_direct_clients() {
    explore_product();
    let model = Model::new("boards", 2).with_mortal(MORTAL);
    assert!(model.check(check_against_mount).executions > 100);
    assert_finds(&DEFECTS, model, check_against_mount);
}

#[test]
fn closed_segment_excludes_direct_clients() {
    explore_product();
    let model = Model::new("direct segment", 2).with_mortal(MORTAL);
    assert!(model.check(check_against_controller).executions > 100);
    assert_finds(&DEFECTS, model, check_against_controller);
}
