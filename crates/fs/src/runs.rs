//! A set of numbers that mostly come one after the other, such as what is free: memory
//! follows the runs, not the numbers, of which a volume or an inode table may name any.

use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Debug, Default)]
pub(crate) struct Runs {
    /// Runs that do not touch: the first number, and the one behind the last.
    runs: BTreeMap<u64, u64>,
    /// Numbers of all runs together.
    count: u64,
}

impl Runs {
    /// Adds numbers above all that are there.
    pub(crate) fn append(&mut self, more: Range<u64>) {
        if more.is_empty() {
            return;
        }
        let last = self.runs.last_entry();
        assert!(
            last.as_ref().is_none_or(|last| *last.get() <= more.start),
            "they come in order"
        );
        self.count += more.end - more.start;
        match last {
            Some(mut last) if *last.get() == more.start => *last.get_mut() = more.end,
            _ => drop(self.runs.insert(more.start, more.end)),
        }
    }

    pub(crate) fn lowest(&self) -> Option<u64> {
        self.runs.first_key_value().map(|(&first, _)| first)
    }

    /// Takes the lowest number out.
    pub(crate) fn take(&mut self) -> Option<u64> {
        let (first, end) = self.runs.pop_first()?;
        if first + 1 < end {
            self.runs.insert(first + 1, end);
        }
        self.count -= 1;
        Some(first)
    }

    /// Puts a number in; false: it was there.
    pub(crate) fn give(&mut self, number: u64) -> bool {
        let (mut first, mut end) = (number, number + 1);
        if let Some((&before, &its_end)) = self.runs.range(..=number).next_back() {
            if its_end > number {
                return false;
            }
            if its_end == number {
                first = before;
            }
        }
        if let Some(its_end) = self.runs.remove(&end) {
            end = its_end;
        }
        self.runs.insert(first, end);
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
        fn runs_hold_what_a_set_of_numbers_holds(
            steps in prop::collection::vec(prop::option::weighted(0.6, 0u64..40), 1..200)
        ) {
            let mut runs = Runs::default();
            runs.append(3..5);
            runs.append(5..6);
            runs.append(9..10);
            let mut set = BTreeSet::from([3, 4, 5, 9]);
            for step in steps {
                match step {
                    Some(number) => prop_assert_eq!(runs.give(number), set.insert(number)),
                    None => prop_assert_eq!(runs.take(), set.pop_first()),
                }
                prop_assert_eq!(runs.lowest(), set.first().copied());
                prop_assert_eq!(runs.count(), set.len() as u64);
            }
        }
    }
}
