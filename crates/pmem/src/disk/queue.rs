//! The order in which a part of the cache evicts its pages: S3-FIFO (J. Yang and others, "FIFO Queues Are
//! All You Need for Cache Eviction", SOSP 2023).
//!
//! A new page enters a small queue. If it was used again when its turn comes, it moves to the main queue, else it
//! is evicted and remembered as a ghost. A page with a ghost enters the main queue at once. A page of the
//! main queue that was used gets another turn. So a scan passes through the small queue, and evicts no page that was
//! used twice.

use std::collections::{HashSet, VecDeque};

/// Uses that count: more do not give more turns.
const USES_MAX: u8 = 3;
/// The share of slots for the small queue.
const SMALL_SHARE: usize = 10;

/// The queues of slot numbers, with ghosts by page.
pub(super) struct EvictionQueue {
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    ghosts: VecDeque<usize>,
    ghost_set: HashSet<usize>,
    /// By slot number, from `first_slot` on.
    uses: Vec<u8>,
    first_slot: u32,
}

impl EvictionQueue {
    pub(super) fn new(first_slot: u32, slots: usize) -> EvictionQueue {
        EvictionQueue {
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghosts: VecDeque::new(),
            ghost_set: HashSet::new(),
            uses: vec![0; slots],
            first_slot,
        }
    }

    /// Counts a use of a slot's page.
    pub(super) fn touch(&mut self, slot: u32) {
        let uses = &mut self.uses[(slot - self.first_slot) as usize];
        *uses = (*uses + 1).min(USES_MAX);
    }

    /// Enters a slot with a new page.
    pub(super) fn push(&mut self, slot: u32, page: usize) {
        self.uses[(slot - self.first_slot) as usize] = 0;
        if self.ghost_set.remove(&page) {
            self.main.push_back(slot);
        } else {
            self.small.push_back(slot);
        }
    }

    /// Chooses the slot to evict, of those that `can_evict`. `page_of` names its page.
    pub(super) fn evict(
        &mut self,
        can_evict: impl Fn(u32) -> bool,
        page_of: impl Fn(u32) -> usize,
    ) -> Option<u32> {
        // Each turn uses up a use, moves a slot, or finds one that cannot go.
        let turns_max = (self.small.len() + self.main.len()) * (usize::from(USES_MAX) + 2);
        for _ in 0..turns_max {
            let small_max = (self.uses.len() / SMALL_SHARE).max(1);
            let is_small = self.small.len() >= small_max || self.main.is_empty();
            let slot = if is_small {
                self.small.pop_front()?
            } else {
                self.main.pop_front()?
            };
            let uses = &mut self.uses[(slot - self.first_slot) as usize];
            if *uses > 0 {
                *uses -= if is_small { *uses } else { 1 };
                self.main.push_back(slot);
            } else if !can_evict(slot) {
                // Dirty: a turn later the writer is done with it.
                self.main.push_back(slot);
            } else {
                if is_small {
                    self.remember(page_of(slot));
                }
                return Some(slot);
            }
        }
        None
    }

    fn remember(&mut self, page: usize) {
        if !self.ghost_set.insert(page) {
            return;
        }
        self.ghosts.push_back(page);
        while self.ghosts.len() > self.uses.len() {
            let Some(oldest) = self.ghosts.pop_front() else {
                return;
            };
            self.ghost_set.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::HashMap;

    /// A cache of clean pages on the queue. Returns the hits of the accesses.
    fn hits(slots: usize, accesses: impl Iterator<Item = usize>) -> Vec<bool> {
        let mut queue = EvictionQueue::new(0, slots);
        let pages = RefCell::new(vec![usize::MAX; slots]);
        let mut cached = HashMap::new();
        let access = |page| {
            if let Some(&slot) = cached.get(&page) {
                queue.touch(slot);
                return true;
            }
            let slot = if cached.len() < slots {
                cached.len() as u32
            } else {
                let page_of = |slot: u32| pages.borrow()[slot as usize];
                queue.evict(|_| true, page_of).expect("a clean slot")
            };
            cached.remove(&pages.borrow()[slot as usize]);
            pages.borrow_mut()[slot as usize] = page;
            cached.insert(page, slot);
            queue.push(slot, page);
            false
        };
        accesses.map(access).collect()
    }

    #[test]
    fn scan_evicts_no_page_that_was_used_twice() {
        let hot = || (0..50).chain(0..50);
        let scan = 1000..9000;
        let hits = hits(100, hot().chain(scan).chain(0..50));
        assert!(
            hits[hits.len() - 50..].iter().all(|&hit| hit),
            "the hot pages stayed"
        );
    }

    #[test]
    fn page_that_returns_soon_after_its_eviction_stays() {
        // Page 0 leaves the small queue, returns while it is a ghost, and then outlives a scan.
        let accesses = [0]
            .into_iter()
            .chain(100..190)
            .chain([0])
            .chain(200..280)
            .chain([0]);
        let hits = hits(50, accesses);
        assert_eq!((hits[91], hits[hits.len() - 1]), (false, true));
    }

    #[test]
    fn pages_that_cannot_go_are_passed_over() {
        let mut queue = EvictionQueue::new(0, 4);
        (0..4).for_each(|slot| queue.push(slot, slot as usize));
        let evicted = queue.evict(|slot| slot == 2, |slot| slot as usize);
        assert_eq!(evicted, Some(2));
        assert_eq!(queue.evict(|_| false, |slot| slot as usize), None);
    }
}
