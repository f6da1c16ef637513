//! Sums with a label for the busiest subjects, and one sum for all others.
//!
//! Invariants:
//! - at most `limit` subjects have a label, so the number of series does not grow with the subjects;
//! - the sums only grow. An operation counts for its subject if that has a label when the operation is reported,
//!   otherwise for the others. So a subject that gains a label starts at zero, and takes nothing from the others;
//! - a label moves at most once per [`REVIEW_INTERVAL`], and only to a subject that is twice as busy.

use super::op_sums::OpSums;
use pagemesh_telemetry::Report;
use std::collections::BTreeMap;
use std::time::Duration;

/// The time between two comparisons of subjects. Short enough for a new load, long enough that a series lasts for
/// several scrapes.
const REVIEW_INTERVAL: Duration = Duration::from_secs(60);

/// Sums of the operations of many subjects.
#[derive(Debug)]
pub struct BusiestSeries<K> {
    limit: usize,
    labelled: BTreeMap<K, OpSums>,
    others: OpSums,
    /// Operations of each subject; half of them are forgotten at each review.
    activity: BTreeMap<K, u64>,
    reviewed_at: Duration,
}

impl<K: Ord + Clone> BusiestSeries<K> {
    /// Sums without operations, with at most this many labels.
    #[must_use]
    pub fn new(limit: usize) -> BusiestSeries<K> {
        BusiestSeries {
            limit,
            labelled: BTreeMap::new(),
            others: OpSums::default(),
            activity: BTreeMap::new(),
            reviewed_at: Duration::ZERO,
        }
    }

    /// Adds a report that was checked. `now` never goes back.
    pub fn add(&mut self, key: &K, now: Duration, report: &Report) {
        if self.limit == 0 {
            return;
        }
        if now.saturating_sub(self.reviewed_at) >= REVIEW_INTERVAL {
            self.reviewed_at = now;
            self.review();
        }
        let ops = report
            .kinds
            .iter()
            .fold(0, |sum: u64, kind| sum.saturating_add(kind.ops));
        let activity = self.activity.entry(key.clone()).or_default();
        *activity = activity.saturating_add(ops);
        if self.labelled.len() < self.limit {
            self.labelled.entry(key.clone()).or_default();
        }
        self.labelled
            .get_mut(key)
            .unwrap_or(&mut self.others)
            .add(report);
    }

    /// Forgets a subject that no longer exists.
    pub fn remove(&mut self, key: &K) {
        self.labelled.remove(key);
        self.activity.remove(key);
    }

    /// The most labels.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// The subjects with a label.
    pub fn labelled(&self) -> impl Iterator<Item = (&K, &OpSums)> {
        self.labelled.iter()
    }

    /// The operations that count for no label.
    #[must_use]
    pub fn others(&self) -> &OpSums {
        &self.others
    }

    /// Gives the labels of quiet subjects to subjects that are twice as busy.
    fn review(&mut self) {
        let (mut quiet, mut busy): (Vec<_>, Vec<_>) = self
            .activity
            .iter()
            .map(|(key, ops)| (*ops, key.clone()))
            .partition(|(_, key)| self.labelled.contains_key(key));
        quiet.sort_unstable_by_key(|(ops, _)| *ops);
        busy.sort_unstable_by_key(|(ops, _)| std::cmp::Reverse(*ops));
        let pairs = quiet.into_iter().zip(busy);
        for ((_, loser), (_, winner)) in pairs.take_while(|(loser, winner)| winner.0 / 2 > loser.0)
        {
            if let Some(sums) = self.labelled.remove(&loser) {
                self.others.merge(&sums);
            }
            self.labelled.insert(winner, OpSums::default());
        }
        self.activity.retain(|key, ops| {
            *ops /= 2;
            *ops > 0 || self.labelled.contains_key(key)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_telemetry::OpKind;
    use proptest::prelude::*;

    fn reads(ops: u64) -> Report {
        let mut report = Report::default();
        report.kinds[OpKind::Read as usize].ops = ops;
        report
    }

    fn ops(sums: &OpSums) -> u64 {
        sums.of(OpKind::Read).ops
    }

    fn labels(series: &BusiestSeries<u8>) -> Vec<(u8, u64)> {
        series
            .labelled()
            .map(|(key, sums)| (*key, ops(sums)))
            .collect()
    }

    #[test]
    fn label_moves_to_a_subject_that_is_twice_as_busy() {
        let mut series = BusiestSeries::new(2);
        let at = Duration::from_secs;
        for (key, count) in [(1, 100), (2, 10), (3, 19)] {
            series.add(&key, at(1), &reads(count));
        }
        assert_eq!(
            (labels(&series), ops(series.others())),
            (vec![(1, 100), (2, 10)], 19)
        );
        series.add(&3, at(61), &reads(5));
        assert_eq!(labels(&series), [(1, 100), (2, 10)], "19 is no twice 10");
        series.add(&3, at(62), &reads(100));
        series.add(&3, at(121), &reads(7));
        assert_eq!(labels(&series), [(1, 100), (3, 7)]);
        assert_eq!(ops(series.others()), 134, "with the 10 of subject 2");
        series.remove(&1);
        series.add(&2, at(122), &reads(1));
        assert_eq!(labels(&series), [(2, 1), (3, 7)]);
    }

    proptest! {
        #[test]
        fn no_operation_is_lost_or_counted_twice(limit in 1usize..4, all in prop::collection::vec((0u8..8, 0u64..100), 0..300)) {
            let mut series = BusiestSeries::new(limit);
            let mut total = 0;
            for (at, (key, count)) in all.iter().enumerate() {
                let others = ops(series.others());
                series.add(key, Duration::from_secs(at as u64 * 7), &reads(*count));
                total += count;
                prop_assert!(labels(&series).len() <= limit);
                prop_assert!(ops(series.others()) >= others);
            }
            let held: u64 = labels(&series).iter().map(|it| it.1).sum();
            prop_assert_eq!(held + ops(series.others()), total);
        }
    }
}
