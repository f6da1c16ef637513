//! The writes of an open file between its syncs.
//!
//! Databases sync a log after each record: so many writes, one sync, again and again. A write that a sync will follow is
//! made durable at once, and the sync then finds nothing to do: one request to the copies in place of two.
//!
//! A wrong guess costs one additional flush. A file whose syncs stop costs at most one.

use std::sync::atomic::{AtomicU32, Ordering};

/// See the module. Threads may share it: a lost count is a wrong guess.
#[derive(Default)]
pub(crate) struct SyncPattern {
    /// Writes since the last sync.
    writes: AtomicU32,
    /// Writes before the last sync.
    last: AtomicU32,
    /// Writes before each of the last two syncs; 0 if they differ.
    expected: AtomicU32,
}

impl SyncPattern {
    /// Whether a sync will probably follow the next write.
    pub(crate) fn expects_sync_after_write(&self) -> bool {
        let next = self.writes.load(Ordering::Relaxed).saturating_add(1);
        next == self.expected.load(Ordering::Relaxed)
    }

    pub(crate) fn record_write(&self) {
        self.writes.fetch_add(1, Ordering::Relaxed);
    }

    /// A sync that also stores times is a change of its own, which flushes the writes before it: none is to be
    /// flushed before.
    pub(crate) fn record_sync(&self, is_data_only: bool) {
        let writes = self.writes.swap(0, Ordering::Relaxed);
        let last = self.last.swap(writes, Ordering::Relaxed);
        let is_repeated = is_data_only && writes == last;
        let expected = if is_repeated { writes } else { 0 };
        self.expected.store(expected, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes and then syncs. Returns the writes before which a sync was expected after them.
    fn run(pattern: &SyncPattern, writes: u32) -> Vec<u32> {
        let mut expected = Vec::new();
        for number in 1..=writes {
            if pattern.expects_sync_after_write() {
                expected.push(number);
            }
            pattern.record_write();
        }
        pattern.record_sync(true);
        expected
    }

    #[test]
    fn repeated_pattern_predicts_its_last_write() {
        for count in [1, 2, 5] {
            let pattern = SyncPattern::default();
            assert_eq!(run(&pattern, count), []);
            assert_eq!(run(&pattern, count), []);
            assert_eq!(run(&pattern, count), [count]);
            assert_eq!(run(&pattern, count), [count]);
        }
    }

    #[test]
    fn changed_pattern_predicts_nothing() {
        let pattern = SyncPattern::default();
        for count in [2, 2, 3] {
            run(&pattern, count);
        }
        assert_eq!(run(&pattern, 3), []);
        assert_eq!(run(&pattern, 3), [3]);
    }

    #[test]
    fn file_without_further_syncs_gets_one_wrong_guess() {
        let pattern = SyncPattern::default();
        run(&pattern, 1);
        run(&pattern, 1);
        assert_eq!(run(&pattern, 1000), [1]);
        assert_eq!(run(&pattern, 1000), []);
    }

    #[test]
    fn sync_of_times_predicts_nothing() {
        let pattern = SyncPattern::default();
        for _ in 0..3 {
            pattern.record_write();
            pattern.record_sync(false);
        }
        assert_eq!(run(&pattern, 1), []);
        assert_eq!(run(&pattern, 1), [1]);
    }

    #[test]
    fn syncs_without_writes_predict_nothing() {
        let pattern = SyncPattern::default();
        for _ in 0..3 {
            assert_eq!(run(&pattern, 0), []);
        }
        assert_eq!(run(&pattern, 1), []);
    }
}
