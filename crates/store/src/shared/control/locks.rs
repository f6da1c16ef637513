//! Lock words: the locks of page ranges, and the reports about their holders.
//!
//! Invariant: words are taken in ascending order within a pool.

use super::{BLOCKING_SESSIONS_AT, Control, LOCKS_AT, SEQ_AT};
use crate::defect::{self, Defect};
use crate::shared::wait::{self, Deadline};
use pagemesh_base::ids::{ObjectId, PageNo};
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Lock words: collisions of unrelated ranges stay rare, and the table fits
/// into a second-level cache.
pub const LOCKS: usize = 1 << 14;
/// Pages under one lock word: 64 KiB.
const LOCK_PAGES_SHIFT: u32 = 4;
const WAITERS: u32 = 1 << 31;
/// Tries before a waiter yields its processor: operations last about 2 µs.
const SPINS: u32 = 200;
/// The limit of a wait for a lock. If the holder is dead or stalled, the pool's owner retires it
/// long before.
pub(crate) const LOCK_WAIT_MAX: Duration = Duration::from_secs(10);
/// The interval at which a waiter polls a lock. From the second poll on it reports the holder to
/// the pool's owner.
pub(crate) const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A lock that was not released in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockTimeout;

/// The lock words of a range of pages, ascending.
#[derive(Clone, Copy)]
pub struct LockWords {
    words: [u16; LockWords::MAX],
    count: usize,
}

impl LockWords {
    /// The words for the pages of the longest record, unaligned.
    pub(super) const MAX: usize = 33 + 1;

    /// The words of `count` pages from `page` on.
    ///
    /// # Panics
    /// With more pages than a record has.
    #[must_use]
    pub fn of(object: ObjectId, page: PageNo, count: u64) -> LockWords {
        let mut range = LockWords {
            words: [0; LockWords::MAX],
            count: 0,
        };
        range.set(object, page, count);
        range
    }

    /// Sets `self` to [`LockWords::of`], in place. A load that spans several recent stores waits
    /// until those stores have reached the cache.
    ///
    /// # Panics
    /// As [`LockWords::of`].
    #[inline]
    pub(crate) fn set(&mut self, object: ObjectId, page: PageNo, count: u64) {
        let first = page.0 >> LOCK_PAGES_SHIFT;
        let last = (page.0 + count - 1) >> LOCK_PAGES_SHIFT;
        self.words[0] = lock_word(object, first);
        self.count = 1;
        if first != last {
            self.set_unaligned(object, first, last);
        }
    }

    fn set_unaligned(&mut self, object: ObjectId, first: u64, last: u64) {
        self.count = (last - first + 1) as usize;
        assert!(
            self.count <= LockWords::MAX,
            "too many pages under one lock"
        );
        for (word, group) in self.words.iter_mut().zip(first..=last) {
            *word = lock_word(object, group);
        }
        let words = &mut self.words[..self.count];
        words.sort_unstable();
        let mut kept = 1;
        for i in 1..words.len() {
            if words[i] != words[kept - 1] {
                words[kept] = words[i];
                kept += 1;
            }
        }
        self.count = kept;
    }

    /// The word that serialises the linking of a node.
    #[must_use]
    pub fn of_node(object: ObjectId, level: u8, page: PageNo) -> LockWords {
        let mut range = LockWords {
            words: [0; LockWords::MAX],
            count: 1,
        };
        let node = page.0 >> (9 * u32::from(level));
        range.words[0] = lock_word(object, node | (u64::from(level) << 58));
        range
    }

    /// The words of several ranges, sorted and unique.
    pub(crate) fn of_all(ranges: impl Iterator<Item = LockWords>) -> Vec<u16> {
        let mut words = Vec::new();
        ranges.for_each(|range| words.extend_from_slice(&range));
        words.sort_unstable();
        words.dedup();
        words
    }
}

impl Deref for LockWords {
    type Target = [u16];

    #[inline]
    fn deref(&self) -> &[u16] {
        &self.words[..self.count]
    }
}

/// Fibonacci hashing: neighbours spread over the table.
fn lock_word(object: ObjectId, group: u64) -> u16 {
    let key = group ^ (u64::from(object.0) << 40);
    (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - LOCKS.trailing_zeros())) as u16
}

impl Control {
    /// Prepares a write of this page: prefetches the lines that all sessions share for it: the
    /// lines of its lock word and of the seq. Another core may have had them last.
    #[inline]
    pub(crate) fn prefetch(&self, object: ObjectId, page: PageNo) {
        let word = lock_word(object, page.0 >> LOCK_PAGES_SHIFT);
        self.shared.prefetch(LOCKS_AT + usize::from(word) * 4);
        self.shared.prefetch(SEQ_AT);
    }

    /// Takes every word of one [`LockWords`] or of several.
    ///
    /// # Errors
    /// When one is not released in time; none is then held.
    pub(crate) fn lock(&self, words: &[u16], session: u32) -> Result<(), LockTimeout> {
        self.lock_within(words, session, LOCK_WAIT_MAX)
    }

    /// As [`Control::lock`], with a limit for the wait for each word.
    pub(crate) fn lock_within(
        &self,
        words: &[u16],
        session: u32,
        limit: Duration,
    ) -> Result<(), LockTimeout> {
        for (i, &word) in words.iter().enumerate() {
            if let Err(stalled) = self.lock_word(word, session + 1, limit) {
                self.unlock(&words[..i]);
                return Err(stalled);
            }
        }
        Ok(())
    }

    pub(crate) fn unlock(&self, words: &[u16]) {
        words.iter().for_each(|&word| self.unlock_word(word));
    }

    fn lock_atomic(&self, word: u16) -> &AtomicU32 {
        self.half(LOCKS_AT + usize::from(word) * 4)
    }

    #[inline]
    fn lock_word(&self, word: u16, owner: u32, limit: Duration) -> Result<(), LockTimeout> {
        let taken =
            self.lock_atomic(word)
                .compare_exchange(0, owner, Ordering::AcqRel, Ordering::Relaxed);
        match taken {
            Ok(_) => Ok(()),
            Err(_) => self.wait_for_lock_word(word, owner, limit),
        }
    }

    #[cold]
    fn wait_for_lock_word(
        &self,
        word: u16,
        owner: u32,
        limit: Duration,
    ) -> Result<(), LockTimeout> {
        for _ in 0..wait::spins(SPINS) {
            std::hint::spin_loop();
            if self
                .lock_atomic(word)
                .compare_exchange(0, owner, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                return Ok(());
            }
        }
        let end = Deadline::after(limit);
        let late = Deadline::after(LOCK_POLL_INTERVAL);
        loop {
            let found = self.lock_atomic(word).load(Ordering::Relaxed);
            // A waiter that has slept takes the word with the waiters bit set, because others may
            // still sleep.
            if found & !WAITERS == 0 {
                if self
                    .lock_atomic(word)
                    .compare_exchange(found, owner | WAITERS, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
                {
                    return Ok(());
                }
                continue;
            }
            if end.is_over() || self.is_owner_gone() {
                return Err(LockTimeout);
            }
            if late.is_over() {
                self.report_blocking_session(found);
            }
            let marked = match defect::is(Defect::WaiterUnmarked) {
                true => found,
                false => found | WAITERS,
            };
            if found == marked
                || self
                    .lock_atomic(word)
                    .compare_exchange(found, marked, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            {
                let at = LOCKS_AT + usize::from(word) * 4;
                wait::sleep(
                    &self.shared,
                    at,
                    marked,
                    Some(LOCK_POLL_INTERVAL.min(limit)),
                );
            }
        }
    }

    #[inline]
    fn unlock_word(&self, word: u16) {
        if self.lock_atomic(word).swap(0, Ordering::AcqRel) & WAITERS != 0 {
            wait::wake(&self.shared, LOCKS_AT + usize::from(word) * 4);
        }
    }

    /// Whether no session holds a word of the range.
    pub(crate) fn is_unlocked(&self, range: &LockWords) -> bool {
        let found = |&word: &u16| self.lock_atomic(word).load(Ordering::Acquire);
        range.iter().all(|word| found(word) & !WAITERS == 0)
    }

    /// Releases all lock words of a dead session.
    pub(crate) fn release_all(&self, session: u32) {
        for word in 0..LOCKS as u16 {
            // No session takes a word in a dead session's name. So the time of this load changes
            // nothing, and the model tests need no step here.
            let half = self.shared.half_word(LOCKS_AT + usize::from(word) * 4);
            let holder = half.load(Ordering::Acquire) & !WAITERS;
            let is_due = holder == session + 1 || defect::is(Defect::LocksOfAllFreed);
            if is_due && !defect::is(Defect::LocksKept) {
                self.unlock_word(word);
            }
        }
    }

    /// Reports the holders of the range's words to the owner: a session waits for them.
    #[cold]
    pub(crate) fn report_lock_holders(&self, range: &LockWords) {
        for &word in range.iter() {
            self.report_blocking_session(self.lock_atomic(word).load(Ordering::Acquire));
        }
    }

    /// Reports the holder of a contended lock word to the owner: it may be stalled.
    #[cold]
    fn report_blocking_session(&self, holder: u32) {
        let session = (holder & !WAITERS).checked_sub(1);
        if let Some(session) = session.filter(|&session| session < self.session_count) {
            let (word, bit) = self.blocking_session_word(session);
            word.fetch_or(bit, Ordering::AcqRel);
            self.ring_doorbell();
        }
    }

    fn blocking_session_word(&self, session: u32) -> (&AtomicU64, u64) {
        let at = BLOCKING_SESSIONS_AT + session as usize / 64 * 8;
        (self.shared.word(at), 1 << (session % 64))
    }

    /// Takes the sessions that block others by their lock words, for the owner. Other sessions
    /// reported them, so some may hold no lock, or not be open.
    pub fn take_blocking_sessions(&self) -> Vec<u32> {
        let first = (0..self.session_count).step_by(64);
        let reported = first.flat_map(|first| {
            let (word, _) = self.blocking_session_word(first);
            // Nearly always there is none, and the line stays shared.
            let reported = match word.load(Ordering::Acquire) {
                0 => 0,
                _ => word.swap(0, Ordering::AcqRel),
            };
            let bits = (0..64).filter(move |bit| reported >> bit & 1 == 1);
            bits.map(move |bit| first + bit)
        });
        reported
            .filter(|&session| session < self.session_count)
            .collect()
    }
}
