//! What was acknowledged on legs that buffer and may be gone with them, of all
//! channels together: a flush on any channel covers what any was told, so it
//! must also say when that was lost.
//!
//! A column has lost what no flush covered when none of its in-sync legs
//! stayed connected from one view to the next. Every channel's next flush says
//! so once. One that joins later does not, unless nobody has said it yet:
//! whoever wrote may be gone, or come back as another channel.

use crate::hub::guard;
use crate::view::ColumnView;
use std::sync::Mutex;

#[derive(Debug, Default)]
struct Column {
    /// Acknowledged changes.
    acknowledged: u64,
    /// Those of them that a flush has covered, or that are lost.
    covered: u64,
    losses: u64,
    told: u64,
    /// The generation of the view that came with the last loss: answers of
    /// earlier ones are of legs that may have forgotten since.
    since: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Losses {
    columns: Mutex<Vec<Column>>,
}

impl Losses {
    fn with<T>(&self, column: usize, act: impl FnOnce(&mut Column) -> T) -> T {
        let mut columns = guard(&self.columns);
        if columns.len() <= column {
            columns.resize_with(column + 1, Column::default);
        }
        act(&mut columns[column])
    }

    /// A change was acknowledged by legs of which some buffer, in the view of
    /// this generation.
    pub(crate) fn acknowledged(&self, column: usize, generation: u64) {
        self.with(column, |it| {
            it.acknowledged += 1;
            if generation < it.since {
                it.losses += 1;
                it.covered = it.acknowledged;
            }
        });
    }

    /// What a flush that starts now covers once it is done.
    pub(crate) fn flush_starts(&self, column: usize) -> u64 {
        self.with(column, |it| it.acknowledged)
    }

    /// Every leg has flushed.
    pub(crate) fn flushed(&self, column: usize, covers: u64) {
        self.with(column, |it| it.covered = it.covered.max(covers));
    }

    /// The view changes. Called before anybody can have the new one, or while
    /// whoever wants it waits.
    pub(crate) fn view_changes(&self, old: &[ColumnView], new: &[ColumnView], generation: u64) {
        for (number, (old, new)) in old.iter().zip(new).enumerate() {
            if has_stayed(old, new) {
                continue;
            }
            self.with(number, |it| {
                it.since = generation;
                if it.acknowledged > it.covered {
                    it.losses += 1;
                    it.covered = it.acknowledged;
                }
            });
        }
    }

    /// Losses of all columns.
    pub(crate) fn all(&self) -> u64 {
        guard(&self.columns).iter().map(|it| it.losses).sum()
    }

    /// What a channel that joins need not tell.
    pub(crate) fn known(&self, column: usize) -> u64 {
        self.with(column, |it| it.losses)
    }

    /// Whether a flush must fail; `seen` is what its channel has told.
    pub(crate) fn must_tell(&self, column: usize, seen: &mut u64) -> bool {
        self.with(column, |it| {
            let must = *seen < it.losses || it.told < it.losses;
            (*seen, it.told) = (it.losses, it.losses);
            must
        })
    }
}

/// Whether an in-sync leg is still there with all that it was told.
fn has_stayed(old: &ColumnView, new: &ColumnView) -> bool {
    let (before, after) = (old.in_sync(), new.in_sync());
    before
        .and(after)
        .legs()
        .any(|leg| old.legs[leg].serial == new.legs[leg].serial)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Gate, LegView};
    use pagemesh_base::layout::{BrickId, LegState, SliceId};
    use uuid::Uuid;

    fn column(serials: [u64; 2]) -> [ColumnView; 1] {
        let leg = |serial| LegView {
            brick: BrickId(Uuid::nil()),
            slice: SliceId(Uuid::nil()),
            state: LegState::InSync,
            buffers: true,
            serial,
        };
        [ColumnView {
            legs: serials.map(leg).to_vec(),
            gate: Gate::Open,
            ship: 0,
        }]
    }

    #[test]
    fn a_loss_is_told_once_by_each_channel() {
        let losses = Losses::default();
        let (mut here, mut there) = (losses.known(0), losses.known(0));
        losses.acknowledged(0, 1);
        // One leg after the other may go.
        losses.view_changes(&column([1, 1]), &column([2, 1]), 2);
        losses.view_changes(&column([2, 1]), &column([2, 2]), 3);
        assert!(!losses.must_tell(0, &mut here));
        assert_eq!(losses.all(), 0);
        losses.view_changes(&column([2, 2]), &column([3, 3]), 4);
        assert_eq!(losses.all(), 1);
        assert!(losses.must_tell(0, &mut here) && losses.must_tell(0, &mut there));
        assert!(!losses.must_tell(0, &mut here) && !losses.must_tell(0, &mut there));
        let mut later = losses.known(0);
        assert!(!losses.must_tell(0, &mut later));
    }

    #[test]
    fn a_loss_that_nobody_told_is_told_by_who_joins() {
        let losses = Losses::default();
        losses.acknowledged(0, 1);
        losses.view_changes(&column([1, 1]), &column([2, 2]), 2);
        let mut later = losses.known(0);
        assert!(losses.must_tell(0, &mut later));
    }

    #[test]
    fn what_a_flush_covers_is_not_lost() {
        let losses = Losses::default();
        let mut seen = losses.known(0);
        losses.acknowledged(0, 1);
        let covers = losses.flush_starts(0);
        losses.flushed(0, covers);
        losses.view_changes(&column([1, 1]), &column([2, 2]), 2);
        assert!(!losses.must_tell(0, &mut seen));
        // This one came while the flush was under way.
        let covers = losses.flush_starts(0);
        losses.acknowledged(0, 2);
        losses.flushed(0, covers);
        losses.view_changes(&column([2, 2]), &column([3, 3]), 3);
        assert!(losses.must_tell(0, &mut seen));
    }

    #[test]
    fn an_acknowledgement_that_comes_late_is_of_the_legs_that_are_gone() {
        let losses = Losses::default();
        let mut seen = losses.known(0);
        losses.view_changes(&column([1, 1]), &column([2, 2]), 2);
        losses.acknowledged(0, 1);
        assert!(losses.must_tell(0, &mut seen));
        losses.acknowledged(0, 2);
        assert!(!losses.must_tell(0, &mut seen));
    }
}
