//! The range locks of a volume: overlapping changes, of whatever channel, and
//! the copying of a resynchronisation take their turns here.
//!
//! Invariants: first come, first served among those that overlap; a range lies
//! within one region, so each holder has one lock and nothing can deadlock;
//! the mutexes are held for a look at a short list, never over I/O.

use crate::limits::{LOCK_SHARDS, REGION_BYTES};
use pagemesh_base::units::PAGE_BYTES;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Whose turn it is: a member of the hub, and its own name for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub member: u32,
    pub key: u32,
}

/// A range of a column, in whole pages: a page is what legs change as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockRange {
    column: u32,
    start: u64,
    end: u64,
}

impl LockRange {
    pub(crate) fn new(column: usize, offset: u64, len: u64) -> LockRange {
        let page = PAGE_BYTES as u64;
        let (start, end) = (offset / page * page, (offset + len).div_ceil(page) * page);
        debug_assert!(start < end && start / REGION_BYTES == (end - 1) / REGION_BYTES);
        LockRange {
            column: column as u32,
            start,
            end,
        }
    }

    fn overlaps(&self, other: &LockRange) -> bool {
        self.column == other.column && self.start < other.end && other.start < self.end
    }
}

struct Entry {
    range: LockRange,
    holder: Holder,
    waits: bool,
}

#[derive(Default)]
struct Shard {
    /// In order of arrival.
    entries: Vec<Entry>,
    waiting: usize,
}

pub(crate) struct RangeLocks {
    shards: Vec<Mutex<Shard>>,
}

impl RangeLocks {
    pub(crate) fn new() -> RangeLocks {
        RangeLocks {
            shards: (0..LOCK_SHARDS).map(|_| Mutex::default()).collect(),
        }
    }

    /// Takes a place in the line; true if it is held at once. If not, the
    /// holder is among those that some [`RangeLocks::release`] tells of.
    pub(crate) fn acquire(&self, range: LockRange, holder: Holder) -> bool {
        let mut shard = self.shard(&range);
        let waits = shard.entries.iter().any(|e| e.range.overlaps(&range));
        shard.waiting += usize::from(waits);
        shard.entries.push(Entry {
            range,
            holder,
            waits,
        });
        !waits
    }

    /// Takes a lock that nobody holds or waits for; else leaves no trace.
    pub(crate) fn try_acquire(&self, range: LockRange, holder: Holder) -> bool {
        let mut shard = self.shard(&range);
        if shard.entries.iter().any(|e| e.range.overlaps(&range)) {
            return false;
        }
        shard.entries.push(Entry {
            range,
            holder,
            waits: false,
        });
        true
    }

    /// Gives a lock, or the place in the line, back; `turns` gets those whose
    /// turn it is now.
    pub(crate) fn release(&self, range: LockRange, holder: Holder, turns: &mut Vec<Holder>) {
        let mut shard = self.shard(&range);
        let Some(at) = shard.entries.iter().position(|e| e.holder == holder) else {
            debug_assert!(false, "released what is not held");
            return;
        };
        let gone = shard.entries.remove(at);
        shard.waiting -= usize::from(gone.waits);
        if shard.waiting > 0 {
            shard.grant_from(at, &gone.range, turns);
        }
    }

    fn shard(&self, range: &LockRange) -> MutexGuard<'_, Shard> {
        let region = range.start / REGION_BYTES + u64::from(range.column) * 31;
        self.shards[(region % LOCK_SHARDS as u64) as usize]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn grant_from(&mut self, from: usize, gone: &LockRange, turns: &mut Vec<Holder>) {
        for at in from..self.entries.len() {
            let (before, rest) = self.entries.split_at_mut(at);
            let entry = &mut rest[0];
            let freed = entry.waits && entry.range.overlaps(gone);
            if freed && !before.iter().any(|e| e.range.overlaps(&entry.range)) {
                entry.waits = false;
                self.waiting -= 1;
                turns.push(entry.holder);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn holder(key: u32) -> Holder {
        Holder { member: 0, key }
    }

    #[test]
    fn those_who_overlap_take_turns_in_order() {
        let locks = RangeLocks::new();
        let range = |page: u64, pages: u64| LockRange::new(0, page * 4096, pages * 4096);
        assert!(locks.acquire(range(0, 4), holder(1)));
        assert!(!locks.acquire(range(2, 4), holder(2)));
        assert!(!locks.acquire(range(5, 1), holder(3)), "2 is before 3");
        assert!(locks.acquire(range(6, 1), holder(4)));
        assert!(locks.acquire(LockRange::new(1, 0, 4096), holder(5)));
        assert!(!locks.try_acquire(range(0, 1), holder(6)), "1 holds it");
        assert!(!locks.try_acquire(range(4, 1), holder(6)), "2 waits for it");
        assert!(locks.try_acquire(range(7, 1), holder(6)));
        let mut turns = vec![];
        locks.release(range(0, 4), holder(1), &mut turns);
        assert_eq!(turns, [holder(2)]);
        turns.clear();
        locks.release(range(2, 4), holder(2), &mut turns);
        assert_eq!(turns, [holder(3)]);
    }

    #[test]
    fn parts_of_one_page_are_one_range() {
        let locks = RangeLocks::new();
        assert!(locks.acquire(LockRange::new(0, 512, 512), holder(1)));
        assert!(!locks.acquire(LockRange::new(0, 1024, 512), holder(2)));
    }

    proptest! {
        /// Never two holders of one page, and nobody waits for ever.
        #[test]
        fn exclusive_and_fair(steps in prop::collection::vec((0u64..40, 1u64..8, any::<bool>()), 1..200)) {
            let locks = RangeLocks::new();
            let mut line: Vec<(LockRange, u32, bool)> = vec![];
            for (key, &(page, pages, release)) in steps.iter().enumerate() {
                if release {
                    let Some(at) = line.iter().position(|l| l.2) else { continue };
                    let (range, gone, _) = line.remove(at);
                    let mut turns = vec![];
                    locks.release(range, holder(gone), &mut turns);
                    for turn in turns {
                        line.iter_mut().find(|l| l.1 == turn.key).expect("waits").2 = true;
                    }
                } else {
                    let range = LockRange::new(0, page * 4096, pages * 4096);
                    let held = locks.acquire(range, holder(key as u32));
                    line.push((range, key as u32, held));
                }
                for (at, (range, _, held)) in line.iter().enumerate() {
                    let first = !line[..at].iter().any(|l| l.0.overlaps(range));
                    prop_assert_eq!(*held, first);
                }
            }
        }
    }
}
