//! Hits and misses of reads: each connection has counts of its own, so that none shares a cache line with another.

use pagemesh_base::poison::lock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Pages that the reads of one connection found in memory, and on disks behind it. One thread adds.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct ReadCounts {
    hits: AtomicU64,
    misses: AtomicU64,
}

impl ReadCounts {
    /// Adds pages. For the connection's thread.
    #[inline]
    pub(crate) fn add(&self, hits: u64, misses: u64) {
        let add = |count: &AtomicU64, more| {
            count.store(count.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        };
        add(&self.hits, hits);
        add(&self.misses, misses);
    }

    pub(crate) fn get(&self) -> (u64, u64) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (load(&self.hits), load(&self.misses))
    }
}

/// The counts of all connections since the brick's start.
#[derive(Default)]
pub(crate) struct ReadCounters(Mutex<AllCounts>);

#[derive(Default)]
struct AllCounts {
    open: Vec<Arc<ReadCounts>>,
    /// The sum of connections that have ended.
    ended: (u64, u64),
}

impl ReadCounters {
    pub(crate) fn open(&self) -> Arc<ReadCounts> {
        let counts = Arc::new(ReadCounts::default());
        let mut all = lock(&self.0);
        all.fold_ended();
        all.open.push(counts.clone());
        counts
    }

    /// Hits and misses.
    pub(crate) fn sum(&self) -> (u64, u64) {
        let mut all = lock(&self.0);
        all.fold_ended();
        let counts = all.open.iter().map(|it| it.get());
        counts.fold(all.ended, add_both)
    }
}

impl AllCounts {
    fn fold_ended(&mut self) {
        let ended = self.open.extract_if(.., |it| Arc::strong_count(it) == 1);
        self.ended = ended.map(|it| it.get()).fold(self.ended, add_both);
    }
}

fn add_both(a: (u64, u64), b: (u64, u64)) -> (u64, u64) {
    (a.0 + b.0, a.1 + b.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_holds_counts_of_ended_connections() {
        let counters = ReadCounters::default();
        let (one, two) = (counters.open(), counters.open());
        one.add(3, 1);
        two.add(10, 0);
        drop(one);
        assert_eq!(counters.sum(), (13, 1));
        assert_eq!(counters.sum(), (13, 1));
        two.add(0, 5);
        drop(two);
        let _third = counters.open();
        assert_eq!(counters.sum(), (13, 6));
    }
}
