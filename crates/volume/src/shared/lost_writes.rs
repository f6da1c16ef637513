//! Counts writes that buffering legs acknowledged and then may have lost, over all channels. A
//! flush on any channel covers the acknowledged writes of all channels. So it must also report
//! their loss.
//!
//! A column has lost its unflushed writes when none of its in-sync legs stayed connected from
//! one snapshot to the next. Every channel's next flush reports that once. A channel that joins
//! later reports it only if no channel has reported it yet: the writer may be gone, or may have
//! come back as another channel.

use crate::snapshot::ColumnSnapshot;
use pagemesh_base::poison;
use std::sync::Mutex;

#[derive(Debug, Default)]
struct ColumnLosses {
    /// Acknowledged changes.
    acknowledged: u64,
    /// The changes that a flush has covered, or that are lost.
    covered: u64,
    losses: u64,
    reported: u64,
    /// Whether a flush has covered what an earlier client of the volume may have left.
    has_flushed: bool,
    /// The generation of the snapshot of the last loss. An answer from an older snapshot comes
    /// from a leg that may have lost the write since.
    loss_generation: u64,
}

#[derive(Debug, Default)]
pub struct LostWrites {
    columns: Mutex<Vec<ColumnLosses>>,
}

impl LostWrites {
    fn with_column<T>(&self, column: usize, act: impl FnOnce(&mut ColumnLosses) -> T) -> T {
        let mut columns = poison::lock(&self.columns);
        if columns.len() <= column {
            columns.resize_with(column + 1, ColumnLosses::default);
        }
        act(&mut columns[column])
    }

    /// Records that legs, some of which buffer, acknowledged a change in the snapshot of this
    /// generation. The change counts as lost if the snapshot is older than the last loss.
    pub fn record_acknowledged(&self, column: usize, generation: u64) {
        self.with_column(column, |it| {
            it.acknowledged += 1;
            if generation < it.loss_generation {
                it.losses += 1;
                it.covered = it.acknowledged;
            }
        });
    }

    /// Returns the count of acknowledged changes, which a flush that starts now will cover.
    pub fn begin_flush(&self, column: usize) -> u64 {
        self.with_column(column, |it| it.acknowledged)
    }

    /// Whether some column of this many may hold an acknowledged change that no flush has covered: of this
    /// client, or of an earlier one.
    pub fn may_be_unflushed(&self, columns: usize) -> bool {
        let known = poison::lock(&self.columns);
        let is_clean = |it: &ColumnLosses| it.has_flushed && it.acknowledged <= it.covered;
        known.len() < columns || !known.iter().all(is_clean)
    }

    /// Records that every leg has flushed.
    pub fn record_flushed(&self, column: usize, covers: u64) {
        self.with_column(column, |it| {
            it.covered = it.covered.max(covers);
            it.has_flushed = true;
        });
    }

    /// Counts the losses of a snapshot change. Called before any channel can have the new
    /// snapshot, or while channels that want it wait.
    pub fn snapshot_changed(
        &self,
        old: &[ColumnSnapshot],
        new: &[ColumnSnapshot],
        generation: u64,
    ) {
        for (number, (old, new)) in old.iter().zip(new).enumerate() {
            if kept_an_in_sync_leg(old, new) {
                continue;
            }
            self.with_column(number, |it| {
                it.loss_generation = generation;
                if it.acknowledged > it.covered {
                    it.losses += 1;
                    it.covered = it.acknowledged;
                }
            });
        }
    }

    /// The losses of all columns.
    pub fn total(&self) -> u64 {
        poison::lock(&self.columns).iter().map(|it| it.losses).sum()
    }

    /// The losses so far, which a channel that joins does not report.
    pub fn count_of(&self, column: usize) -> u64 {
        self.with_column(column, |it| it.losses)
    }

    /// Whether a flush must fail. `seen` is the loss count that its channel has reported.
    pub fn must_report(&self, column: usize, seen: &mut u64) -> bool {
        self.with_column(column, |it| {
            let must = *seen < it.losses || it.reported < it.losses;
            (*seen, it.reported) = (it.losses, it.losses);
            must
        })
    }
}

/// Whether an in-sync leg stayed connected, with all its acknowledged writes.
fn kept_an_in_sync_leg(old: &ColumnSnapshot, new: &ColumnSnapshot) -> bool {
    let (before, after) = (old.in_sync(), new.in_sync());
    before
        .intersection(after)
        .legs()
        .any(|leg| old.legs[leg].serial == new.legs[leg].serial)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::{ColumnGate, LegSnapshot};
    use pagemesh_base::layout::{BrickId, LegState, SliceId};
    use uuid::Uuid;

    fn column(serials: [u64; 2]) -> [ColumnSnapshot; 1] {
        let leg = |serial| LegSnapshot {
            brick: BrickId(Uuid::nil()),
            slice: SliceId(Uuid::nil()),
            state: LegState::InSync,
            buffers: true,
            serial,
        };
        [ColumnSnapshot {
            legs: serials.map(leg).to_vec(),
            gate: ColumnGate::Open,
            replica_serial: 0,
        }]
    }

    #[test]
    fn loss_is_reported_once_per_channel() {
        let losses = LostWrites::default();
        let (mut here, mut there) = (losses.count_of(0), losses.count_of(0));
        losses.record_acknowledged(0, 1);
        // Legs may go one after the other without a loss.
        losses.snapshot_changed(&column([1, 1]), &column([2, 1]), 2);
        losses.snapshot_changed(&column([2, 1]), &column([2, 2]), 3);
        assert!(!losses.must_report(0, &mut here));
        assert_eq!(losses.total(), 0);
        losses.snapshot_changed(&column([2, 2]), &column([3, 3]), 4);
        assert_eq!(losses.total(), 1);
        assert!(losses.must_report(0, &mut here) && losses.must_report(0, &mut there));
        assert!(!losses.must_report(0, &mut here) && !losses.must_report(0, &mut there));
        let mut later = losses.count_of(0);
        assert!(!losses.must_report(0, &mut later));
    }

    #[test]
    fn unreported_loss_is_reported_to_new_channel() {
        let losses = LostWrites::default();
        losses.record_acknowledged(0, 1);
        losses.snapshot_changed(&column([1, 1]), &column([2, 2]), 2);
        let mut later = losses.count_of(0);
        assert!(losses.must_report(0, &mut later));
    }

    #[test]
    fn flushed_writes_are_not_lost() {
        let losses = LostWrites::default();
        let mut seen = losses.count_of(0);
        losses.record_acknowledged(0, 1);
        let covers = losses.begin_flush(0);
        losses.record_flushed(0, covers);
        losses.snapshot_changed(&column([1, 1]), &column([2, 2]), 2);
        assert!(!losses.must_report(0, &mut seen));
        // This change came while the flush was in progress.
        let covers = losses.begin_flush(0);
        losses.record_acknowledged(0, 2);
        losses.record_flushed(0, covers);
        losses.snapshot_changed(&column([2, 2]), &column([3, 3]), 3);
        assert!(losses.must_report(0, &mut seen));
    }

    #[test]
    fn column_is_clean_once_flush_covers_every_change() {
        let losses = LostWrites::default();
        assert!(losses.may_be_unflushed(1), "an earlier client's changes");
        let covers = losses.begin_flush(0);
        losses.record_flushed(0, covers);
        assert!(!losses.may_be_unflushed(1));
        assert!(losses.may_be_unflushed(2), "the other column");
        losses.record_acknowledged(0, 1);
        let covers = losses.begin_flush(0);
        losses.record_acknowledged(0, 1);
        losses.record_flushed(0, covers);
        assert!(losses.may_be_unflushed(1), "it came during the flush");
        let covers = losses.begin_flush(0);
        losses.record_flushed(0, covers);
        assert!(!losses.may_be_unflushed(1));
    }

    #[test]
    fn late_acknowledgement_counts_as_lost() {
        let losses = LostWrites::default();
        let mut seen = losses.count_of(0);
        losses.snapshot_changed(&column([1, 1]), &column([2, 2]), 2);
        losses.record_acknowledged(0, 1);
        assert!(losses.must_report(0, &mut seen));
        losses.record_acknowledged(0, 2);
        assert!(!losses.must_report(0, &mut seen));
    }
}
