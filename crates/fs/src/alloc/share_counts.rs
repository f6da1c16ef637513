//! How many places name each shared span, in memory from the mount on.

use crate::hash::NumberMap;

/// Number of places that name a span as shared, by its first page.
#[derive(Debug, Default)]
pub(crate) struct ShareCounts(NumberMap<u64, i64>);

impl ShareCounts {
    pub(crate) fn new(shares: impl Iterator<Item = (u64, i64)>) -> ShareCounts {
        ShareCounts(shares.collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Additions and their undoing may come in any order.
    pub(crate) fn add(&mut self, page: u64, places: i64) {
        let count = self.0.entry(page).or_default();
        *count += places;
        if *count == 0 {
            self.0.remove(&page);
        }
    }

    pub(crate) fn count(&self, page: u64) -> i64 {
        self.0.get(&page).copied().unwrap_or(0)
    }
}
