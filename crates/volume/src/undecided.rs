//! Ranges of changes that ended without anybody knowing how: sent, maybe done by
//! one leg and not by another, and not sent again, since their column failed. A
//! read of such a range fails. Shown what one leg has, it might be taken back when
//! the next view is made of another.
//!
//! A column is decided by the first view in which it is open again: either its
//! legs were settled, or what the others hold does not count any more. Invariants:
//! a range is noted before its lock is given back, and forgotten after the
//! generation of that view is in place. So whoever finds neither a change in
//! flight nor a note, and then sees its own view to be the newest, shows nothing
//! that may be taken back. A note that comes late, of a view before, is not taken.

use crate::hub::guard;
use crate::limits::UNDECIDED_MAX;
use crate::locks::LockRange;
use crate::steps;
use crate::view::{ColumnView, Gate};
use pagemesh_base::defect::{self, Defect};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

#[derive(Debug, Default)]
struct Column {
    /// The generation of the view that decided it last.
    decided: u64,
    ranges: Vec<LockRange>,
    /// There were too many ranges: all of it is undecided.
    is_whole: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Undecided {
    columns: Mutex<Vec<Column>>,
    /// Columns with notes; changed under the mutex.
    noted: AtomicUsize,
}

impl Undecided {
    /// A change of this range has failed, in the view of this generation.
    pub(crate) fn note(&self, range: LockRange, generation: u64) {
        let mut columns = self.columns();
        if columns.len() <= range.column() {
            columns.resize_with(range.column() + 1, Column::default);
        }
        let column = &mut columns[range.column()];
        let is_late = generation < column.decided && !defect::is(Defect::LateNoteTaken);
        if is_late || column.is_whole || column.ranges.contains(&range) {
            return;
        }
        match column.ranges.len() < UNDECIDED_MAX {
            true => column.ranges.push(range),
            false => (column.is_whole, column.ranges) = (true, vec![]),
        }
        self.count(&columns);
    }

    /// Whether what this range holds may be taken back.
    pub(crate) fn has(&self, range: &LockRange) -> bool {
        steps::step("undecided");
        if self.noted.load(Ordering::Acquire) == 0 {
            return false;
        }
        let columns = self.columns();
        let column = columns.get(range.column());
        column.is_some_and(|it| it.is_whole || it.ranges.iter().any(|at| at.overlaps(range)))
    }

    /// The view of this generation is in place.
    pub(crate) fn view_changes(&self, old: &[ColumnView], new: &[ColumnView], generation: u64) {
        let is_open = |view: &ColumnView| view.gate == Gate::Open;
        let opened = |number: &usize| {
            let was_open = old.get(*number).is_some_and(is_open);
            is_open(&new[*number]) && !was_open
        };
        let opened: Vec<usize> = (0..new.len()).filter(opened).collect();
        if opened.is_empty() {
            return;
        }
        let mut columns = self.columns();
        if columns.len() < new.len() {
            columns.resize_with(new.len(), Column::default);
        }
        for number in opened {
            columns[number] = Column {
                decided: generation,
                ..Column::default()
            };
        }
        self.count(&columns);
    }

    fn columns(&self) -> MutexGuard<'_, Vec<Column>> {
        steps::lock("undecided", &self.columns);
        guard(&self.columns)
    }

    fn count(&self, columns: &[Column]) {
        let noted = columns
            .iter()
            .filter(|it| it.is_whole || !it.ranges.is_empty());
        steps::step("undecided");
        self.noted.store(noted.count(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gates(gates: [Gate; 2]) -> Vec<ColumnView> {
        let column = |gate| ColumnView {
            legs: vec![],
            gate,
            ship: 0,
        };
        gates.map(column).to_vec()
    }

    fn pages(column: usize, page: u64, count: u64) -> LockRange {
        LockRange::new(column, page * 4096, count * 4096)
    }

    #[test]
    fn a_range_is_undecided_until_its_column_is_open_again() {
        let undecided = Undecided::default();
        let failed = gates([Gate::Failed, Gate::Failed]);
        let [first, second] = [0, 1].map(|column| pages(column, 3, 2));
        undecided.note(first, 5);
        undecided.note(second, 5);
        for (page, is_undecided) in [(2, false), (3, true), (4, true), (5, false)] {
            assert_eq!(undecided.has(&pages(0, page, 1)), is_undecided);
        }
        assert!(undecided.has(&pages(0, 0, 100)));
        // Views in which it is not open, or was before, decide nothing.
        undecided.view_changes(&gates([Gate::Open, Gate::Down]), &failed, 6);
        assert!(undecided.has(&first) && undecided.has(&second));
        undecided.view_changes(&failed, &gates([Gate::Failed, Gate::Open]), 7);
        assert!(undecided.has(&first) && !undecided.has(&second));
        undecided.view_changes(&failed, &gates([Gate::Open, Gate::Open]), 8);
        assert!(!undecided.has(&first));
    }

    #[test]
    fn a_note_of_a_view_before_comes_too_late() {
        let undecided = Undecided::default();
        let [failed, open] = [Gate::Failed, Gate::Open].map(|gate| gates([gate, Gate::Open]));
        undecided.view_changes(&failed, &open, 7);
        undecided.note(pages(0, 0, 1), 6);
        assert!(!undecided.has(&pages(0, 0, 1)));
        // It failed again since.
        undecided.view_changes(&open, &failed, 8);
        undecided.note(pages(0, 0, 1), 8);
        assert!(undecided.has(&pages(0, 0, 1)));
    }

    #[test]
    fn too_many_ranges_are_the_whole_column() {
        let undecided = Undecided::default();
        for page in 0..UNDECIDED_MAX as u64 {
            // What is noted already takes no place.
            undecided.note(pages(0, 2 * page, 1), 1);
            undecided.note(pages(0, 2 * page, 1), 1);
        }
        assert!(!undecided.has(&pages(0, 1, 1)));
        undecided.note(pages(0, 1_000_000, 1), 1);
        assert!(undecided.has(&pages(0, 1, 1)) && !undecided.has(&pages(1, 1, 1)));
        let [failed, open] = [Gate::Failed, Gate::Open].map(|gate| gates([gate, gate]));
        undecided.view_changes(&failed, &open, 2);
        assert!(!undecided.has(&pages(0, 0, 1)));
    }
}
