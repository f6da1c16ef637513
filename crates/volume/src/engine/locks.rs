//! The range locks of a volume. They serialize overlapping changes of all channels, and the
//! copies of a resync.
//!
//! Invariants:
//! - Overlapping requests get the lock first come, first served. A range lies within one
//!   region.
//! - A holder that needs several ranges enters all their queues atomically. So each waits
//!   only for earlier holders, and no deadlock is possible.
//! - The mutexes are held for a look at short lists, never over I/O.
//! - Readers take no lock and delay no holder. They wait for the changes that hold a lock at
//!   the time of the read, and for no later ones.

use crate::limits::{LOCK_SHARDS, REGION_BYTES};
use crate::steps;
use arrayvec::ArrayVec;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::poison;
use pagemesh_base::units::PAGE_BYTES;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// The controller's number among the members of a volume.
pub const CONTROLLER: u32 = 0;

/// The holder of a lock: a member of the volume, and that member's key for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockHolder {
    pub member: u32,
    pub key: u32,
}

/// A range of a column in whole pages, since a page is the unit that legs change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRange {
    column: u32,
    start: u64,
    end: u64,
}

impl LockRange {
    pub fn new(column: usize, offset: u64, len: u64) -> LockRange {
        let page = PAGE_BYTES as u64;
        let (start, end) = (offset / page * page, (offset + len).div_ceil(page) * page);
        debug_assert!(start < end && start / REGION_BYTES == (end - 1) / REGION_BYTES);
        LockRange {
            column: column as u32,
            start,
            end,
        }
    }

    /// Splits a range at region borders, in ascending order.
    pub fn split(column: usize, offset: u64, len: u64) -> impl Iterator<Item = LockRange> {
        let end = offset + len;
        let mut at = offset;
        std::iter::from_fn(move || {
            let len = (end - at).min(REGION_BYTES - at % REGION_BYTES);
            let range = (len > 0).then(|| LockRange::new(column, at, len));
            at += len;
            range
        })
    }

    pub fn column(&self) -> usize {
        self.column as usize
    }

    pub fn overlaps(&self, other: &LockRange) -> bool {
        self.column == other.column && self.start < other.end && other.start < self.end
    }
}

struct LockEntry {
    range: LockRange,
    holder: LockHolder,
    is_waiting: bool,
}

/// A reader that found changes in flight, and the changes that have not ended yet.
struct ReadWaiter {
    reader: LockHolder,
    pending_changes: Vec<LockHolder>,
}

#[derive(Default)]
struct LockQueue {
    /// In order of arrival.
    entries: Vec<LockEntry>,
    waiting_count: usize,
    read_waiters: Vec<ReadWaiter>,
}

#[derive(Default)]
struct LockShard {
    queue: Mutex<LockQueue>,
    /// The number of entries in the queue. It changes under the queue's mutex, before the lock
    /// holder sends anything. So a reader that saw the effect of a change sees its entry, too.
    entry_count: AtomicUsize,
}

pub struct RangeLocks {
    shards: Vec<LockShard>,
}

impl Default for RangeLocks {
    fn default() -> RangeLocks {
        RangeLocks {
            shards: (0..LOCK_SHARDS).map(|_| LockShard::default()).collect(),
        }
    }
}

impl RangeLocks {
    /// Enters the queue; true if the lock is held at once. If not, a later
    /// [`RangeLocks::release`] returns the holder once it has the lock.
    pub fn acquire(&self, range: LockRange, holder: LockHolder) -> bool {
        let shard = self.shard(&range);
        let mut line = shard.lock_queue();
        let held = line.enqueue(range, holder);
        shard.update_entry_count(&line);
        held
    }

    /// Enters the queues of these ranges, which do not overlap, atomically. Returns the number
    /// of locks that are not held yet. A later [`RangeLocks::release`] returns the holder once
    /// for each of them.
    pub fn acquire_all(&self, ranges: &[LockRange], holder: LockHolder) -> u32 {
        let mut lines = self.lock_queues(ranges);
        let mut awaited = 0;
        for range in ranges {
            let (shard, line) = queue_of_shard(self.shard_number(range), &mut lines);
            awaited += u32::from(!line.enqueue(*range, holder));
            self.shards[shard].update_entry_count(line);
        }
        awaited
    }

    /// Takes these locks if none of them is held or waited for. If not, it changes nothing.
    pub fn try_acquire_all(&self, ranges: &[LockRange], holder: LockHolder) -> bool {
        let mut lines = self.lock_queues(ranges);
        let is_free = |range: &LockRange| {
            let (_, line) = queue_of_shard(self.shard_number(range), &mut lines);
            !line.entries.iter().any(|e| e.range.overlaps(range))
        };
        if !ranges.iter().all(is_free) {
            return false;
        }
        for range in ranges {
            let (shard, line) = queue_of_shard(self.shard_number(range), &mut lines);
            line.enqueue(*range, holder);
            self.shards[shard].update_entry_count(line);
        }
        true
    }

    /// Takes a lock if it is neither held nor waited for. If not, it changes nothing.
    pub fn try_acquire(&self, range: LockRange, holder: LockHolder) -> bool {
        let shard = self.shard(&range);
        let mut line = shard.lock_queue();
        if line.entries.iter().any(|e| e.range.overlaps(&range)) {
            return false;
        }
        line.entries.push(LockEntry {
            range,
            holder,
            is_waiting: false,
        });
        if !defect::is(Defect::ChangeNotCounted) {
            shard.update_entry_count(&line);
        }
        true
    }

    /// Whether no change of a range is in flight. If one is, a later [`RangeLocks::release`]
    /// returns the reader once all present changes have ended. The locks of the controller do
    /// not count: it copies data that is there already.
    pub fn is_range_idle(&self, range: LockRange, reader: LockHolder) -> bool {
        let shard = self.shard(&range);
        steps::step("range locks");
        if shard.entry_count.load(Ordering::Acquire) == 0 {
            return true;
        }
        let mut line = shard.lock_queue();
        let held = line.entries.iter();
        let held = held.filter(|e| !e.is_waiting && e.holder.member != CONTROLLER);
        let over = held.filter(|e| e.range.overlaps(&range));
        let skipped = usize::from(defect::is(Defect::FirstChangeNotAwaited));
        let awaited: Vec<LockHolder> = over.map(|e| e.holder).skip(skipped).collect();
        let is_still = awaited.is_empty();
        if !is_still {
            line.read_waiters.push(ReadWaiter {
                reader,
                pending_changes: awaited,
            });
        }
        is_still
    }

    /// Releases a lock, or leaves its queue. `turns` gets the holders that have their lock now,
    /// and the readers that waited only for this change.
    pub fn release(&self, range: LockRange, holder: LockHolder, turns: &mut Vec<LockHolder>) {
        let shard = self.shard(&range);
        let mut line = shard.lock_queue();
        let own = |e: &LockEntry| e.holder == holder && e.range == range;
        let Some(at) = line.entries.iter().position(own) else {
            debug_assert!(false, "released what is not held");
            return;
        };
        let gone = line.entries.remove(at);
        shard.update_entry_count(&line);
        line.waiting_count -= usize::from(gone.is_waiting);
        if line.waiting_count > 0 {
            line.grant_from(at, &gone.range, turns);
        }
        if !line.read_waiters.is_empty() && !defect::is(Defect::ReadersNotWoken) {
            line.notify_readers(holder, turns);
        }
    }

    fn shard(&self, range: &LockRange) -> &LockShard {
        &self.shards[self.shard_number(range)]
    }

    fn shard_number(&self, range: &LockRange) -> usize {
        let region = range.start / REGION_BYTES + u64::from(range.column) * 31;
        (region % LOCK_SHARDS as u64) as usize
    }

    /// Locks the queues of these ranges together. They are locked in the order of their shards,
    /// so two callers cannot deadlock.
    fn lock_queues(&self, ranges: &[LockRange]) -> LockedQueues<'_> {
        let wanted = ranges.iter().map(|range| 1u64 << self.shard_number(range));
        let wanted = wanted.fold(0, |all, one| all | one);
        let numbers = (0..LOCK_SHARDS).filter(|number| wanted & (1 << number) != 0);
        numbers
            .map(|number| (number, self.shards[number].lock_queue()))
            .collect()
    }
}

type LockedQueues<'a> = ArrayVec<(usize, MutexGuard<'a, LockQueue>), LOCK_SHARDS>;
const _: () = assert!(LOCK_SHARDS <= u64::BITS as usize);

fn queue_of_shard<'a>(shard: usize, lines: &'a mut LockedQueues<'_>) -> (usize, &'a mut LockQueue) {
    let found = lines.iter_mut().find(|(number, _)| *number == shard);
    let Some((number, line)) = found else {
        unreachable!("every shard of the ranges was taken");
    };
    (*number, line)
}

impl LockShard {
    fn lock_queue(&self) -> MutexGuard<'_, LockQueue> {
        steps::lock("range locks", &self.queue);
        poison::lock(&self.queue)
    }

    fn update_entry_count(&self, line: &LockQueue) {
        steps::step("range locks");
        self.entry_count
            .store(line.entries.len(), Ordering::Release);
    }
}

impl LockQueue {
    /// Enters the queue; true if the lock is held at once.
    fn enqueue(&mut self, range: LockRange, holder: LockHolder) -> bool {
        let mut waits = self.entries.iter().any(|e| e.range.overlaps(&range));
        waits &= !defect::is(Defect::OverlapsNotSerialized);
        self.waiting_count += usize::from(waits);
        self.entries.push(LockEntry {
            range,
            holder,
            is_waiting: waits,
        });
        !waits
    }

    fn grant_from(&mut self, from: usize, gone: &LockRange, turns: &mut Vec<LockHolder>) {
        for at in from..self.entries.len() {
            let (before, rest) = self.entries.split_at_mut(at);
            let entry = &mut rest[0];
            let freed = entry.is_waiting && entry.range.overlaps(gone);
            if freed && !before.iter().any(|e| e.range.overlaps(&entry.range)) {
                entry.is_waiting = false;
                self.waiting_count -= 1;
                turns.push(entry.holder);
            }
        }
    }

    fn notify_readers(&mut self, gone: LockHolder, turns: &mut Vec<LockHolder>) {
        self.read_waiters.retain_mut(|watch| {
            watch.pending_changes.retain(|holder| *holder != gone);
            let is_over = watch.pending_changes.is_empty();
            if is_over {
                turns.push(watch.reader);
            }
            !is_over
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn holder(key: u32) -> LockHolder {
        LockHolder {
            member: CONTROLLER + 1,
            key,
        }
    }

    #[test]
    fn overlapping_locks_are_granted_in_order() {
        let locks = RangeLocks::default();
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
    fn multi_range_lock_waits_only_for_earlier_holders() {
        let locks = RangeLocks::default();
        let page = |page: u64| LockRange::new(0, page * 4096, 4096);
        let far = LockRange::new(0, 3 * REGION_BYTES, 4096);
        let mut turns = vec![];
        assert!(locks.acquire(page(5), holder(1)));
        assert_eq!(locks.acquire_all(&[page(0), page(5), far], holder(2)), 1);
        // Two holders with crossing ranges: the one that queued first goes first on every
        // range.
        assert_eq!(locks.acquire_all(&[page(0), far], holder(3)), 2);
        assert!(!locks.acquire(page(5), holder(4)));
        assert!(!locks.try_acquire_all(&[page(9), far], holder(5)));
        assert!(locks.try_acquire(page(9), holder(5)), "it left no trace");
        assert!(!locks.is_range_idle(far, holder(9)), "2 is in line before");
        locks.release(page(5), holder(1), &mut turns);
        assert_eq!(turns, [holder(2)]);
        turns.clear();
        locks.release(page(0), holder(2), &mut turns);
        locks.release(page(5), holder(2), &mut turns);
        assert_eq!(turns, [holder(3), holder(4)]);
        turns.clear();
        locks.release(far, holder(2), &mut turns);
        assert_eq!(turns, [holder(3), holder(9)]);
    }

    #[test]
    fn range_is_split_at_region_borders() {
        let split = |offset, len| LockRange::split(0, offset, len).collect::<Vec<_>>();
        let range = |offset, len| LockRange::new(0, offset, len);
        assert_eq!(split(4096, 8192), [range(4096, 8192)]);
        let below = REGION_BYTES - 4096;
        assert_eq!(
            split(below, 12_288),
            [range(below, 4096), range(REGION_BYTES, 8192)]
        );
    }

    #[test]
    fn readers_wait_only_for_held_locks() {
        let locks = RangeLocks::default();
        let range = |page: u64, pages: u64| LockRange::new(0, page * 4096, pages * 4096);
        assert!(locks.is_range_idle(range(0, 4), holder(9)));
        assert!(locks.acquire(range(0, 1), holder(1)));
        assert!(locks.acquire(range(3, 1), holder(2)));
        assert!(locks.is_range_idle(range(1, 2), holder(9)));
        assert!(!locks.is_range_idle(range(0, 4), holder(9)));
        assert!(!locks.acquire(range(0, 2), holder(3)), "1 holds it");
        assert!(locks.is_range_idle(range(1, 1), holder(8)), "3 only waits");
        let mut turns = vec![];
        locks.release(range(0, 1), holder(1), &mut turns);
        assert_eq!(turns, [holder(3)], "a reader blocks no holder");
        turns.clear();
        locks.release(range(0, 2), holder(3), &mut turns);
        assert_eq!(turns, [], "2 is still in flight");
        locks.release(range(3, 1), holder(2), &mut turns);
        assert_eq!(turns, [holder(9)]);
    }

    #[test]
    fn readers_ignore_controller_locks() {
        let locks = RangeLocks::default();
        let range = LockRange::new(0, 0, 4096);
        let member = CONTROLLER;
        assert!(locks.acquire(range, LockHolder { member, key: 1 }));
        assert!(locks.is_range_idle(range, holder(2)));
    }

    #[test]
    fn ranges_within_one_page_conflict() {
        let locks = RangeLocks::default();
        assert!(locks.acquire(LockRange::new(0, 512, 512), holder(1)));
        assert!(!locks.acquire(LockRange::new(0, 1024, 512), holder(2)));
    }

    proptest! {
        /// A page never has two holders, and no holder waits for ever.
        #[test]
        fn exclusive_and_fair(steps in prop::collection::vec((0u64..40, 1u64..8, any::<bool>()), 1..200)) {
            let locks = RangeLocks::default();
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
