//! The control segment: the state that the sessions of one opening of a pool share, apart from the
//! pool itself. It is volatile and holds offsets only, never pointers.
//!
//! ```text
//!     0  magic 8, version 4, sessions 4, incarnation 4
//!    64  next seq 8                               (shared by every writer)
//!   128  doorbell 4, sleeping 4                   (wakes the owner)
//!   136  corrected slots 8                        (by any session)
//!   144  a bit for each session that blocks others by its lock words, 32
//!                                                 (by waiting sessions)
//!   192  64 unreadable frames of 8, number + 1    (by any session)
//!  4096  16 384 lock words of 4 bytes             (owner + 1, waiters bit 31)
//! 69632  sessions of 64 KiB:
//!     0  active 8, floor 8, committed 8, complete 8, consumed 8, asked 8,
//!        settled 8
//!    64  revoked 4, answered 4, recalls 4, state 4, head 8, granted 8, ring end 8,
//!        ring start 8
//!   128  pid 4, zero 4, start time 8
//!   256  grant ring: 8160 runs of 8 (start 40 bits, length 24 bits)
//! ```
//! The session writes the first line of its cells, and the owner of the pool the second line and
//! the ring. So each line has one writer, and moves between caches only when its content changes.
//!
//! Invariants: lock words are taken in ascending order within a pool, and pools in the order of
//! their UUIDs. A session holds no lock while it waits for the owner. Recovery trusts nothing in
//! the segment.

use crate::defect::{self, Defect};
use crate::format::geometry::JOURNALS_MAX;
use crate::format::in_flight::JournaledOp;
use crate::shared::wait::{self, Deadline};
use pagemesh_base::ids::{FrameNo, Incarnation, ObjectId, PageNo, Seq};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::unreadable::PAGES_MAX;
use pagemesh_pmem::{MapError, SharedSegment};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

const MAGIC: u64 = u64::from_le_bytes(*b"pmcntrl\0");
/// 1: pages may be changed in place. A program that does not know that would report them as
/// damaged.
const VERSION: u32 = 1;
const SEQ_AT: usize = 64;
const DOORBELL_AT: usize = 128;
const OWNER_SLEEPING_AT: usize = 132;
const CORRECTED_AT: usize = 136;
const BLOCKING_SESSIONS_AT: usize = 144;
const UNREADABLE_AT: usize = 192;
const _: () = assert!(BLOCKING_SESSIONS_AT + JOURNALS_MAX as usize / 8 <= UNREADABLE_AT);
const LOCKS_AT: usize = PAGE_BYTES;
/// Lock words: collisions of unrelated ranges stay rare, and the table fits
/// into a second-level cache.
pub const LOCKS: usize = 1 << 14;
const SESSIONS_AT: usize = LOCKS_AT + LOCKS * 4;
const SESSION_BYTES: usize = GRANT_RUNS_AT + GRANT_RUNS as usize * 8;
/// Runs in a grant ring. On a pool with scattered free frames a run is a frame or two, and a
/// session should need the owner only once in thousands of writes.
pub const GRANT_RUNS: u64 = 8160;
const GRANT_RUNS_AT: usize = 256;
/// In a session's cells: the half word on which a session sleeps while it waits for the owner.
const ANSWERED_AT: usize = 68;
const _: () = assert!(SESSION_BYTES == 64 << 10, "sessions begin on pages");
/// Pages under one lock word: 64 KiB.
const LOCK_PAGES_SHIFT: u32 = 4;
const WAITERS: u32 = 1 << 31;
/// Tries before a waiter yields its processor: operations last about 2 µs. Tests try once, because
/// a second try adds nothing.
const SPINS: u32 = if cfg!(test) { 1 } else { 200 };
/// The limit of a wait for a lock. If the holder is dead or stalled, the pool's owner retires it
/// long before.
pub(crate) const LOCK_WAIT_MAX: Duration = Duration::from_secs(10);
/// The interval at which a waiter polls a lock. From the second poll on it reports the holder to
/// the pool's owner.
pub(crate) const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The interval at which a session that waits for the owner checks whether the owner is gone. It is
/// far shorter than the time for which a new owner would wait for the session.
const ANSWER_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Frames granted to a session: consecutive numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameRun {
    /// The first frame's number.
    pub start: u64,
    /// The number of frames.
    pub len: u64,
}

impl FrameRun {
    /// The longest run that a grant can name.
    pub const LEN_MAX: u64 = (1 << 24) - 1;

    fn encode(self) -> u64 {
        assert!(
            self.start < 1 << 40 && self.len <= FrameRun::LEN_MAX,
            "{self:?}"
        );
        self.start | self.len << 40
    }

    fn decode(word: u64) -> FrameRun {
        FrameRun {
            start: word & ((1 << 40) - 1),
            len: word >> 40,
        }
    }
}

/// A mapped control segment.
pub struct Control {
    shared: SharedSegment,
    session_count: u32,
    /// Whether the owner is known to be gone. Then no thread of this process waits any longer. No
    /// lock is released and no answer comes, and the pool must be unmapped before another owner can
    /// have it.
    is_owner_gone: AtomicBool,
}

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
    const MAX: usize = 33 + 1;

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
    /// Bytes of a segment for this many sessions.
    #[must_use]
    pub fn len_for(session_count: u32) -> usize {
        (SESSIONS_AT + session_count as usize * SESSION_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Makes a new segment.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn create(
        session_count: u32,
        incarnation: Incarnation,
        next: Seq,
    ) -> Result<Control, MapError> {
        let shared = SharedSegment::create(Control::len_for(session_count))?;
        shared.half_word(8).store(VERSION, Ordering::Relaxed);
        shared.half_word(12).store(session_count, Ordering::Relaxed);
        shared.half_word(16).store(incarnation.0, Ordering::Relaxed);
        shared.word(SEQ_AT).store(next.0, Ordering::Relaxed);
        for session in 0..session_count {
            let cells = SessionCells {
                shared: &shared,
                at: SESSIONS_AT + session as usize * SESSION_BYTES,
            };
            cells.floor().store(u64::MAX, Ordering::Relaxed);
        }
        shared.word(0).store(MAGIC, Ordering::Release);
        Ok(Control {
            shared,
            session_count,
            is_owner_gone: AtomicBool::new(false),
        })
    }

    /// Opens a segment that another process made.
    ///
    /// # Errors
    /// A sentence that names the mismatch.
    pub fn open(
        shared: SharedSegment,
        session_count: u32,
        incarnation: Incarnation,
    ) -> Result<Control, &'static str> {
        if shared.len_bytes() != Control::len_for(session_count) {
            return Err("the control segment has an unexpected length");
        }
        if shared.word(0).load(Ordering::Acquire) != MAGIC {
            return Err("the shared memory is not a control segment");
        }
        if shared.half_word(8).load(Ordering::Relaxed) != VERSION {
            return Err("the control segment has another version; use the brick's version");
        }
        let found = (
            shared.half_word(12).load(Ordering::Relaxed),
            shared.half_word(16).load(Ordering::Relaxed),
        );
        if found != (session_count, incarnation.0) {
            return Err("the control segment belongs to another opening of the pool");
        }
        Ok(Control {
            shared,
            session_count,
            is_owner_gone: AtomicBool::new(false),
        })
    }

    /// The memory of the segment, to be passed to other processes.
    #[must_use]
    pub fn shared(&self) -> &SharedSegment {
        &self.shared
    }

    pub(crate) fn seq(&self) -> &AtomicU64 {
        wait::step(SEQ_AT);
        self.shared.word(SEQ_AT)
    }

    /// Slots of page tables that the owner or a session corrected since the opening.
    pub(crate) fn corrected_slots(&self) -> &AtomicU64 {
        self.shared.word(CORRECTED_AT)
    }

    fn unreadable_words(&self) -> impl Iterator<Item = &AtomicU64> {
        (0..PAGES_MAX).map(|index| self.shared.word(UNREADABLE_AT + index * 8))
    }

    /// Reports a frame that could not be read to the owner. Drops the report if the table of
    /// unreadable frames is full.
    #[cold]
    pub(crate) fn report_unreadable(&self, frame: FrameNo) {
        let told = frame.0 + 1;
        let _full = self.unreadable_words().find(|word| {
            let swapped = word.compare_exchange(0, told, Ordering::AcqRel, Ordering::Acquire);
            swapped.map_or_else(|found| found == told, |_| true)
        });
    }

    /// Takes the reports of unreadable frames, for the owner.
    pub(crate) fn take_unreadable(&self) -> impl Iterator<Item = FrameNo> {
        let reported = self.unreadable_words().filter_map(|word| {
            // Nearly always there is none, and the line stays shared.
            let is_told = word.load(Ordering::Acquire) > 0;
            is_told.then(|| word.swap(0, Ordering::AcqRel))
        });
        reported.filter_map(|told| Some(FrameNo(told.checked_sub(1)?)))
    }

    fn blocking_session_word(&self, session: u32) -> (&AtomicU64, u64) {
        let at = BLOCKING_SESSIONS_AT + session as usize / 64 * 8;
        (self.shared.word(at), 1 << (session % 64))
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

    /// Reports the holders of the range's words to the owner: a session waits for them.
    #[cold]
    pub(crate) fn report_lock_holders(&self, range: &LockWords) {
        for &word in range.iter() {
            self.report_blocking_session(self.lock_atomic(word).load(Ordering::Acquire));
        }
    }

    /// A session that holds a word of the range, and the count of its operations.
    pub(crate) fn lock_holder(&self, range: &LockWords) -> Option<(u32, u64)> {
        let session = range.iter().find_map(|&word| {
            let held = self.lock_atomic(word).load(Ordering::Acquire) & !WAITERS;
            held.checked_sub(1)
                .filter(|&session| session < self.session_count)
        })?;
        Some((
            session,
            self.session_cells(session).active().load(Ordering::SeqCst),
        ))
    }

    /// The number of the operation that a session has in progress, by the session's own count.
    #[must_use]
    pub fn op_in_progress(&self, session: u32) -> Option<u64> {
        let active = self.session_cells(session).active().load(Ordering::SeqCst);
        (active % 2 == 1).then_some(active)
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

    fn half(&self, at: usize) -> &AtomicU32 {
        wait::step(at);
        self.shared.half_word(at)
    }

    /// Sessions of the pool that no process has at present.
    #[must_use]
    pub fn free_sessions(&self) -> u32 {
        let free =
            |session: &u32| self.session_cells(*session).state().load(Ordering::Relaxed) == 0;
        (0..self.session_count).filter(free).count() as u32
    }

    /// Sessions of the pool, the owner's included.
    #[must_use]
    pub fn session_count(&self) -> u32 {
        self.session_count
    }

    pub(crate) fn session_cells(&self, session: u32) -> SessionCells<'_> {
        assert!(
            session < self.session_count,
            "session {session} of {}",
            self.session_count
        );
        SessionCells {
            shared: &self.shared,
            at: SESSIONS_AT + session as usize * SESSION_BYTES,
        }
    }

    /// Whether a living session has reported that this operation is complete.
    pub(crate) fn is_complete(&self, noted: JournaledOp) -> bool {
        let complete = self.session_cells(noted.session).complete();
        noted.position < complete.load(Ordering::Acquire)
    }

    /// Wakes the owner, if it sleeps.
    pub fn ring_doorbell(&self) {
        if defect::is(Defect::DoorbellMissed)
            && self.half(OWNER_SLEEPING_AT).load(Ordering::SeqCst) == 0
        {
            self.half(DOORBELL_AT).fetch_add(1, Ordering::SeqCst);
            return;
        }
        self.half(DOORBELL_AT).fetch_add(1, Ordering::SeqCst);
        if self.half(OWNER_SLEEPING_AT).load(Ordering::SeqCst) != 0 {
            wait::wake(&self.shared, DOORBELL_AT);
        }
    }

    /// Ends all waits in this process, soon.
    pub(crate) fn mark_owner_gone(&self) {
        self.is_owner_gone.store(true, Ordering::Release);
    }

    pub(crate) fn is_owner_gone(&self) -> bool {
        self.is_owner_gone.load(Ordering::Relaxed)
    }

    /// Sleeps until the owner has answered a session's `ticket`, or is gone.
    pub(crate) fn wait_for_answer(&self, session: u32, ticket: u32, limit: Duration) {
        let cells = self.session_cells(session);
        let end = Deadline::after(limit);
        loop {
            let answered = cells.answered().load(Ordering::Acquire);
            if answered == ticket || end.is_over() || self.is_owner_gone() {
                return;
            }
            #[cfg(test)]
            if crate::enumerate::owner::maintain_current() {
                continue;
            }
            // A dead owner wakes no session.
            let poll_interval = end.remaining().min(ANSWER_POLL_INTERVAL);
            wait::sleep(
                &self.shared,
                cells.at + ANSWERED_AT,
                answered,
                Some(poll_interval),
            );
        }
    }

    /// The number of times that the doorbell was rung.
    #[must_use]
    pub fn doorbell_count(&self) -> u32 {
        self.half(DOORBELL_AT).load(Ordering::SeqCst)
    }

    /// Sleeps until the doorbell count differs from `seen`. For the owner.
    pub fn wait_for_doorbell(&self, seen: u32, limit: Option<Duration>) {
        self.half(OWNER_SLEEPING_AT).store(1, Ordering::SeqCst);
        if self.doorbell_count() == seen {
            wait::sleep(&self.shared, DOORBELL_AT, seen, limit);
        }
        self.half(OWNER_SLEEPING_AT).store(0, Ordering::SeqCst);
    }

    /// Prepares a write of this page: prefetches the lines that all sessions share for it, those of
    /// its lock word and of the seq. Another core may have had them last.
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
        for _ in 0..SPINS {
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
            #[cfg(test)]
            if crate::enumerate::direct_clients::retire_dead() {
                continue;
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
}

/// One session's cells.
#[derive(Clone, Copy)]
pub(crate) struct SessionCells<'c> {
    shared: &'c SharedSegment,
    at: usize,
}

macro_rules! cells {
    ($($(#[$doc:meta])* $name:ident: $kind:ident $method:ident at $at:expr;)*) => {
        $($(#[$doc])* #[inline] pub(crate) fn $name(self) -> &'c $kind {
            wait::step(self.at + $at);
            self.shared.$method(self.at + $at)
        })*
    };
}

impl<'c> SessionCells<'c> {
    cells! {
        /// Odd while an operation is in progress.
        active: AtomicU64 word at 0;
        /// No record that is not published yet has a lower seq. All ones while no operation is in
        /// progress.
        floor: AtomicU64 word at 8;
        /// The end of the journal's fenced records.
        committed: AtomicU64 word at 16;
        /// The journal position below which every operation is on all legs.
        complete: AtomicU64 word at 24;
        /// Frames taken from grants by committed records, since the opening.
        consumed: AtomicU64 word at 32;
        /// Ticket of the last wait for the owner (low half), and the frames requested (high half).
        asked: AtomicU64 word at 40;
        /// The journal position below which the slots that records swapped are flushed and fenced.
        settled: AtomicU64 word at 48;
        /// Not 0: the session may begin no new operation.
        revoked: AtomicU32 half_word at 64;
        /// The ticket that the owner answered last.
        answered: AtomicU32 half_word at ANSWERED_AT;
        /// Twice the number of recalls of grants; odd during a recall.
        recalls: AtomicU32 half_word at 72;
        /// 0 free, 1 open.
        state: AtomicU32 half_word at 76;
        /// The journal's head.
        head: AtomicU64 word at 80;
        /// Frames granted since the opening.
        granted: AtomicU64 word at 88;
        /// Runs put into the ring since the opening.
        ring_end: AtomicU64 word at 96;
        /// The start of the ring after the last recall.
        ring_start: AtomicU64 word at 104;
        /// The process.
        pid: AtomicU32 half_word at 128;
        /// The start time of the process.
        start_time: AtomicU64 word at 136;
    }

    pub(crate) fn run(self, index: u64) -> FrameRun {
        FrameRun::decode(self.run_word(index).load(Ordering::Acquire))
    }

    pub(crate) fn set_run(self, index: u64, run: FrameRun) {
        self.run_word(index).store(run.encode(), Ordering::Release);
    }

    fn run_word(self, index: u64) -> &'c AtomicU64 {
        let at = self.at + GRANT_RUNS_AT + (index % GRANT_RUNS) as usize * 8;
        wait::step(at);
        self.shared.word(at)
    }

    /// Answers `ticket` and wakes the session.
    pub(crate) fn answer(self, ticket: u32) {
        self.answered().store(ticket, Ordering::Release);
        wait::wake(self.shared, self.at + ANSWERED_AT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_end_when_owner_is_gone() {
        const LIMIT: Duration = Duration::from_secs(60);
        let control = Control::create(4, Incarnation(1), Seq(1)).expect("a segment");
        let range = LockWords::of(ObjectId(1), PageNo(7), 1);
        control.lock(&range, 2).expect("the lock");
        let began = std::time::Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| control.wait_for_answer(0, 1, LIMIT));
            let refused = scope.spawn(|| control.lock(&range, 1));
            control.mark_owner_gone();
            assert_eq!(refused.join().expect("no panic"), Err(LockTimeout));
        });
        assert!(began.elapsed() < LOCK_WAIT_MAX.min(LIMIT));
    }

    #[test]
    fn locks_exclude_and_are_released_for_dead_holder() {
        let control = Control::create(4, Incarnation(1), Seq(1)).expect("a segment");
        let range = LockWords::of(ObjectId(1), PageNo(7), 300);
        let counter = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for session in 0..2 {
                let (control, range, counter) = (&control, &range, &counter);
                scope.spawn(move || {
                    for _ in 0..2000 {
                        control.lock(range, session).expect("the lock");
                        let seen = counter.load(Ordering::Relaxed);
                        counter.store(seen + 1, Ordering::Relaxed);
                        control.unlock(range);
                    }
                });
            }
        });
        assert_eq!(counter.load(Ordering::Relaxed), 4000);
        control.lock(&range, 3).expect("free");
        control.release_all(3);
        control.lock(&range, 2).expect("free again");
        control.unlock(&range);
    }

    #[test]
    fn owner_learns_holders_of_contended_locks() {
        let control = Control::create(JOURNALS_MAX, Incarnation(1), Seq(1)).expect("a segment");
        let range = LockWords::of(ObjectId(1), PageNo(7), 1);
        for holder in [3, 64, JOURNALS_MAX - 1] {
            control.lock(&range, holder).expect("free");
            assert!(control.take_blocking_sessions().is_empty(), "no waiters");
            let rung = control.doorbell_count();
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| control.lock(&range, 1));
                for _ in 0..2 {
                    let told = std::iter::repeat_with(|| {
                        std::thread::yield_now();
                        control.take_blocking_sessions()
                    });
                    let mut told = told.skip_while(Vec::is_empty);
                    assert_eq!(told.next(), Some(vec![holder]), "reported again and again");
                }
                control.unlock(&range);
                waiter.join().expect("no panic").expect("the lock");
            });
            assert!(control.doorbell_count() >= rung + 2);
            control.take_blocking_sessions();
            control.unlock(&range);
        }
    }

    #[test]
    fn lock_words_are_unique_and_ascending() {
        for (page, count) in [(0, 1), (15, 2), (3, 512), (1 << 35, 512)] {
            let range = LockWords::of(ObjectId(9), PageNo(page), count);
            assert!(range.is_sorted_by(|a, b| a < b), "{page} {count}");
        }
    }
}
