//! Snapshots: each one is a read of the whole volume at one moment, which lies between its order and its end.
//!
//! That moment is later than the beginning of each change that the snapshot has. So the search lets the read begin there: a
//! snapshot that has a change, and lacks one that was acknowledged before, is not linearizable. Nor has a snapshot a
//! part of a transaction.

use super::{Event, HistoryChecker, OpKind, OpOutcome};
use std::collections::BTreeMap;

/// The channel of a snapshot's read: no channel of a client has this number.
const SNAPSHOT_CHANNEL: u32 = u32::MAX;

/// The event indexes before which the reads of snapshots begin, where that is not the event of their beginning.
#[derive(Default)]
pub(super) struct SnapshotMoments(BTreeMap<usize, usize>);

impl SnapshotMoments {
    /// Whether a read begins later than its event says.
    pub(super) fn is_later(&self, number: usize) -> bool {
        self.0.contains_key(&number)
    }

    /// The reads that begin before the event of this index.
    pub(super) fn begins_at(&self, at: usize) -> impl Iterator<Item = Event> {
        let here = self.0.iter().filter(move |(_, moment)| **moment == at);
        here.map(|(number, _)| Event::Begin(*number))
    }
}

impl HistoryChecker {
    /// Records that a client, or the manager, begins to cut a snapshot; returns the number of its read.
    pub(crate) fn begin_snapshot(&mut self, attachment: u32, sectors: u64) -> usize {
        let kind = OpKind::Read(vec![]);
        let number = self.begin(attachment, SNAPSHOT_CHANNEL, 0..sectors, kind);
        self.snapshots.insert(number);
        number
    }

    /// Records that the snapshot is cut: it has no change that begins later.
    pub(crate) fn end_snapshot(&mut self, number: usize) -> Result<(), String> {
        self.end(number, OpOutcome::Done)
    }

    /// Takes the values of all sectors of a committed snapshot.
    pub(crate) fn set_snapshot_values(&mut self, number: usize, values: Vec<u64>) {
        let operation = &mut self.operations[number];
        operation.kind = OpKind::Read(values);
        operation.is_known = true;
    }

    /// When the reads of snapshots begin, by the changes that they have.
    pub(super) fn snapshot_moments(&self) -> Result<SnapshotMoments, String> {
        let mut moments = SnapshotMoments::default();
        let writers = self.writers();
        for &number in &self.snapshots {
            let read = &self.operations[number];
            let OpKind::Read(values) = &read.kind else {
                continue;
            };
            let held = values.iter().filter_map(|value| writers.get(value));
            let Some(&last) = held.max_by_key(|writer| self.operations[**writer].began_at) else {
                continue;
            };
            let began_at = self.operations[last].began_at;
            if read.acknowledged_at.is_some_and(|end| began_at > end) {
                let (snapshot, change) = (self.describe(number), self.describe(last));
                return Err(format!(
                    "{snapshot} has a later change: {change} began after the cut"
                ));
            }
            if began_at > read.began_at {
                moments.0.insert(number, began_at + 1);
            }
            // Without a flush a loss of power may take a part of a transaction.
            if !self.has_lost_power {
                self.check_whole_transactions(number, values, &writers)?;
            }
        }
        Ok(moments)
    }

    /// The changes by the values that they write.
    fn writers(&self) -> BTreeMap<u64, usize> {
        let mut writers = BTreeMap::new();
        for (number, operation) in self.operations.iter().enumerate() {
            match &operation.kind {
                OpKind::Write(value) => drop(writers.insert(*value, number)),
                OpKind::Transact(parts) => {
                    writers.extend(parts.iter().map(|(_, value)| (*value, number)));
                }
                OpKind::Read(_) => {}
            }
        }
        writers.remove(&0);
        writers
    }

    /// Checks that a snapshot has no part of a transaction next to a value from before it.
    fn check_whole_transactions(
        &self,
        number: usize,
        values: &[u64],
        writers: &BTreeMap<u64, usize>,
    ) -> Result<(), String> {
        let held = values.iter().filter_map(|value| writers.get(value));
        let mut transactions: Vec<usize> = held.copied().collect();
        transactions.retain(|it| matches!(self.operations[*it].kind, OpKind::Transact(_)));
        transactions.dedup();
        for transaction in transactions {
            let OpKind::Transact(parts) = &self.operations[transaction].kind else {
                continue;
            };
            let sectors = parts.iter().flat_map(|(sectors, _)| sectors.clone());
            for sector in sectors {
                let Some(writer) = writers.get(&values[sector as usize]) else {
                    continue;
                };
                let ended_at = self.operations[*writer].acknowledged_at;
                let began_at = self.operations[transaction].began_at;
                if ended_at.is_some_and(|at| at < began_at) {
                    let (snapshot, change) = (self.describe(number), self.describe(transaction));
                    return Err(format!(
                        "{snapshot} has half of a transaction: {change} is missing in sector {sector}"
                    ));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::SECTOR;
    use super::*;
    use crate::checker::fill;

    /// A snapshot with these values of two sectors, after a write to each: both were acknowledged, one after the other.
    fn check(values: [u64; 2]) -> Result<(), String> {
        let mut checker = HistoryChecker::default();
        checker.record_attach(1, false);
        let snapshot = checker.begin_snapshot(1, 2);
        for (sector, value) in [(0, 11), (1, 12)] {
            let write = checker.begin(1, 0, sector..sector + 1, OpKind::Write(value));
            checker.end(write, OpOutcome::Done)?;
        }
        checker.end_snapshot(snapshot)?;
        let late = checker.begin(1, 0, 0..1, OpKind::Write(13));
        checker.end(late, OpOutcome::Done)?;
        checker.set_snapshot_values(snapshot, values.to_vec());
        let read = checker.begin(1, 0, 0..1, OpKind::Read(vec![]));
        assert_eq!(fill(13, 1).len(), SECTOR as usize);
        checker.read(read, &fill(13, 1))?;
        checker.check(2).map(drop)
    }

    #[test]
    fn snapshot_holds_a_prefix_of_the_writes() {
        for whole in [[0, 0], [11, 0], [11, 12]] {
            check(whole).expect("a prefix");
        }
        let error = check([0, 12]).expect_err("it lacks the first write");
        assert!(error.contains(" is not linearizable"), "{error}");
        let error = check([13, 12]).expect_err("it has a write from after the cut");
        assert!(error.contains(" has a later change"), "{error}");
    }

    #[test]
    fn snapshot_holds_whole_transactions() {
        let mut checker = HistoryChecker::default();
        checker.record_attach(1, false);
        let write = checker.begin(1, 0, 0..2, OpKind::Write(10));
        checker.end(write, OpOutcome::Done).expect("a write");
        let parts = vec![(0..1, 11), (1..2, 12)];
        let transaction = checker.begin(1, 0, 0..2, OpKind::Transact(parts));
        let snapshot = checker.begin_snapshot(1, 2);
        checker.end_snapshot(snapshot).expect("a snapshot");
        checker.set_snapshot_values(snapshot, vec![10, 10]);
        checker.check(2).expect("none of it");
        checker.set_snapshot_values(snapshot, vec![11, 12]);
        checker.check(2).expect("all of it");
        checker.set_snapshot_values(snapshot, vec![11, 10]);
        let error = checker.check(2).expect_err("half of it");
        assert!(error.contains("half of a transaction"), "{error}");
        assert_eq!(checker.operations[transaction].acknowledged_at, None);
    }
}
