//! Ranges of changes with an unknown outcome. They were sent, one leg may have made them and
//! another not, and their column failed before they could be sent again. A read of such a range
//! fails: if it returned the data of one leg, a later snapshot could be made from another leg,
//! and take that data back.
//!
//! The first snapshot in which the column is open again resolves its ranges. By then recovery
//! has made the legs equal, or the differing legs do not count any more.
//!
//! Invariants:
//! - A channel records a range before it releases the range's lock.
//! - The ranges are dropped after the generation of the resolving snapshot is in place.
//! - So a reader may return data if it finds neither a change in flight nor a range here, and
//!   then finds its own snapshot to be the newest. That data cannot be taken back.
//! - A late record from an older snapshot is ignored.

use crate::engine::locks::LockRange;
use crate::limits::INDETERMINATE_RANGES_MAX;
use crate::snapshot::{ColumnGate, ColumnSnapshot};
use crate::steps;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::poison;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

#[derive(Debug, Default)]
struct IndeterminateColumn {
    /// The generation of the snapshot that resolved the column last.
    resolved_generation: u64,
    ranges: Vec<LockRange>,
    /// There were too many ranges: the whole column is indeterminate.
    covers_whole_column: bool,
}

#[derive(Debug, Default)]
pub struct IndeterminateWrites {
    columns: Mutex<Vec<IndeterminateColumn>>,
    /// The number of columns with ranges. It changes under the mutex.
    columns_with_ranges: AtomicUsize,
}

impl IndeterminateWrites {
    /// Records that a change of this range has failed, in the snapshot of this generation.
    pub fn record(&self, range: LockRange, generation: u64) {
        let mut columns = self.columns();
        if columns.len() <= range.column() {
            columns.resize_with(range.column() + 1, IndeterminateColumn::default);
        }
        let column = &mut columns[range.column()];
        let is_late = generation < column.resolved_generation
            && !defect::is(Defect::LateIndeterminateRecorded);
        if is_late || column.covers_whole_column || column.ranges.contains(&range) {
            return;
        }
        match column.ranges.len() < INDETERMINATE_RANGES_MAX {
            true => column.ranges.push(range),
            false => (column.covers_whole_column, column.ranges) = (true, vec![]),
        }
        self.update_count(&columns);
    }

    /// Whether later snapshots may take back the data of this range.
    pub fn contains(&self, range: &LockRange) -> bool {
        steps::step("undecided");
        if self.columns_with_ranges.load(Ordering::Acquire) == 0 {
            return false;
        }
        let columns = self.columns();
        let column = columns.get(range.column());
        column.is_some_and(|it| {
            it.covers_whole_column || it.ranges.iter().any(|at| at.overlaps(range))
        })
    }

    /// Drops the ranges of the columns that this snapshot opens. Called when its generation is
    /// in place.
    pub fn snapshot_changed(
        &self,
        old: &[ColumnSnapshot],
        new: &[ColumnSnapshot],
        generation: u64,
    ) {
        let is_open = |view: &ColumnSnapshot| view.gate == ColumnGate::Open;
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
            columns.resize_with(new.len(), IndeterminateColumn::default);
        }
        for number in opened {
            columns[number] = IndeterminateColumn {
                resolved_generation: generation,
                ..IndeterminateColumn::default()
            };
        }
        self.update_count(&columns);
    }

    fn columns(&self) -> MutexGuard<'_, Vec<IndeterminateColumn>> {
        steps::lock("undecided", &self.columns);
        poison::lock(&self.columns)
    }

    fn update_count(&self, columns: &[IndeterminateColumn]) {
        let noted = columns
            .iter()
            .filter(|it| it.covers_whole_column || !it.ranges.is_empty());
        steps::step("undecided");
        self.columns_with_ranges
            .store(noted.count(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gates(gates: [ColumnGate; 2]) -> Vec<ColumnSnapshot> {
        let column = |gate| ColumnSnapshot {
            legs: vec![],
            gate,
            replica_serial: 0,
        };
        gates.map(column).to_vec()
    }

    fn pages(column: usize, page: u64, count: u64) -> LockRange {
        LockRange::new(column, page * 4096, count * 4096)
    }

    #[test]
    fn range_is_indeterminate_until_column_reopens() {
        let undecided = IndeterminateWrites::default();
        let failed = gates([ColumnGate::Failed, ColumnGate::Failed]);
        let [first, second] = [0, 1].map(|column| pages(column, 3, 2));
        undecided.record(first, 5);
        undecided.record(second, 5);
        for (page, is_undecided) in [(2, false), (3, true), (4, true), (5, false)] {
            assert_eq!(undecided.contains(&pages(0, page, 1)), is_undecided);
        }
        assert!(undecided.contains(&pages(0, 0, 100)));
        // A snapshot resolves a column only if the column opens with it.
        undecided.snapshot_changed(&gates([ColumnGate::Open, ColumnGate::Down]), &failed, 6);
        assert!(undecided.contains(&first) && undecided.contains(&second));
        undecided.snapshot_changed(&failed, &gates([ColumnGate::Failed, ColumnGate::Open]), 7);
        assert!(undecided.contains(&first) && !undecided.contains(&second));
        undecided.snapshot_changed(&failed, &gates([ColumnGate::Open, ColumnGate::Open]), 8);
        assert!(!undecided.contains(&first));
    }

    #[test]
    fn record_from_an_older_snapshot_is_ignored() {
        let undecided = IndeterminateWrites::default();
        let [failed, open] =
            [ColumnGate::Failed, ColumnGate::Open].map(|gate| gates([gate, ColumnGate::Open]));
        undecided.snapshot_changed(&failed, &open, 7);
        undecided.record(pages(0, 0, 1), 6);
        assert!(!undecided.contains(&pages(0, 0, 1)));
        // The column failed again since.
        undecided.snapshot_changed(&open, &failed, 8);
        undecided.record(pages(0, 0, 1), 8);
        assert!(undecided.contains(&pages(0, 0, 1)));
    }

    #[test]
    fn too_many_ranges_mark_whole_column() {
        let undecided = IndeterminateWrites::default();
        for page in 0..INDETERMINATE_RANGES_MAX as u64 {
            // A range that is recorded already takes no further entry.
            undecided.record(pages(0, 2 * page, 1), 1);
            undecided.record(pages(0, 2 * page, 1), 1);
        }
        assert!(!undecided.contains(&pages(0, 1, 1)));
        undecided.record(pages(0, 1_000_000, 1), 1);
        assert!(undecided.contains(&pages(0, 1, 1)) && !undecided.contains(&pages(1, 1, 1)));
        let [failed, open] = [ColumnGate::Failed, ColumnGate::Open].map(|gate| gates([gate, gate]));
        undecided.snapshot_changed(&failed, &open, 2);
        assert!(!undecided.contains(&pages(0, 0, 1)));
    }
}
