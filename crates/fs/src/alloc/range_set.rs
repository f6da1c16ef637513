//! A set of numbers that are mostly consecutive, such as free inode numbers. Its memory is
//! proportional to the runs, not to the numbers: a volume or an inode table may name any number.

use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Debug, Default)]
pub(crate) struct RangeSet {
    /// Disjoint runs that do not touch: first number, and end.
    ranges: BTreeMap<u64, u64>,
    /// Number of elements.
    count: u64,
}

impl RangeSet {
    /// Adds a range above all elements.
    pub(crate) fn append_range(&mut self, more: Range<u64>) {
        if more.is_empty() {
            return;
        }
        let last = self.ranges.last_entry();
        assert!(
            last.as_ref().is_none_or(|last| *last.get() <= more.start),
            "they come in order"
        );
        self.count += more.end - more.start;
        match last {
            Some(mut last) if *last.get() == more.start => *last.get_mut() = more.end,
            _ => drop(self.ranges.insert(more.start, more.end)),
        }
    }

    pub(crate) fn lowest(&self) -> Option<u64> {
        self.ranges.first_key_value().map(|(&first, _)| first)
    }

    /// Removes and returns the lowest number.
    pub(crate) fn pop_lowest(&mut self) -> Option<u64> {
        let (first, end) = self.ranges.pop_first()?;
        if first + 1 < end {
            self.ranges.insert(first + 1, end);
        }
        self.count -= 1;
        Some(first)
    }

    /// Adds a number; false if it was in the set.
    pub(crate) fn insert(&mut self, number: u64) -> bool {
        let (mut first, mut end) = (number, number + 1);
        if let Some((&before, &its_end)) = self.ranges.range(..=number).next_back() {
            if its_end > number {
                return false;
            }
            if its_end == number {
                first = before;
            }
        }
        if let Some(its_end) = self.ranges.remove(&end) {
            end = its_end;
        }
        self.ranges.insert(first, end);
        self.count += 1;
        true
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn range_set_matches_a_set_of_numbers(
            steps in prop::collection::vec(prop::option::weighted(0.6, 0u64..40), 1..200)
        ) {
            let mut runs = RangeSet::default();
            runs.append_range(3..5);
            runs.append_range(5..6);
            runs.append_range(9..10);
            let mut set = BTreeSet::from([3, 4, 5, 9]);
            for step in steps {
                match step {
                    Some(number) => prop_assert_eq!(runs.insert(number), set.insert(number)),
                    None => prop_assert_eq!(runs.pop_lowest(), set.pop_first()),
                }
                prop_assert_eq!(runs.lowest(), set.first().copied());
                prop_assert_eq!(runs.count(), set.len() as u64);
            }
        }
    }
}
