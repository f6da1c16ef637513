//! The control segment: the state that the sessions of one opening of a pool share, apart from the
//! pool itself. It is volatile and holds offsets only, never pointers.
//!
//! ```text
//!     0  magic 8, version 4, sessions 4, incarnation 4, zero 4, frames with heat 8
//!    64  next seq 8                               (shared by every writer)
//!   128  doorbell 4, sleeping 4                   (wakes the owner)
//!   136  corrected slots 8                        (by any session)
//!   192  64 unreadable frames of 8, number + 1    (by any session)
//!  1024  a bit for each session that blocks others by its lock words, 512
//!                                                 (by waiting sessions)
//!  1536  generation of versions 8; 0: not kept    (read by readers of snapshots)
//!  4096  16 384 lock words of 4 bytes             (owner + 1, waiters bit 31)
//! 69632  sessions of 64 KiB:
//!     0  active 8, floor 8, committed 8, complete 8, consumed 8, asked 8,
//!        settled 8
//!    64  revoked 4, answered 4, recalls 4, state 4, head 8, granted 8, ring end 8,
//!        ring start 8
//!   128  pid 4, zero 4, start time 8
//!   256  grant ring: 8160 runs of 8 (start 40 bits, length 24 bits)
//!   then a byte of heat for each frame            (by any session)
//! ```
//! The session writes the first line of its cells, and the owner of the pool the second line and
//! the ring. So each line has one writer, and moves between caches only when its content changes.
//!
//! Invariants: lock words are taken in ascending order within a pool, and pools in the order of
//! their UUIDs. A session holds no lock while it waits for the owner. Recovery trusts nothing in
//! the segment.

pub(crate) mod cells;
mod heat;
mod locks;
#[cfg(test)]
mod tests;

use crate::defect::{self, Defect};
use crate::format::geometry::JOURNALS_MAX;
use crate::format::in_flight::JournaledOp;
use crate::shared::wait::{self, Deadline};
pub(crate) use cells::SessionCells;
use cells::{ANSWERED_AT, SESSION_BYTES};
pub use cells::{FrameRun, GRANT_RUNS};
pub use heat::HEAT_MAX;
pub(crate) use locks::LOCK_POLL_INTERVAL;
#[cfg(test)]
pub(crate) use locks::LOCK_WAIT_MAX;
pub use locks::{LOCKS, LockTimeout, LockWords};
use pagemesh_base::ids::{FrameNo, Incarnation, Seq};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::unreadable::PAGES_MAX;
use pagemesh_pmem::{MapError, SharedSegment};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

const MAGIC: u64 = u64::from_le_bytes(*b"pmcntrl\0");
/// 1: pages may be changed in place. A program that does not know that would report them as
/// damaged. 2: up to 4096 sessions. 3: the heat of frames.
const VERSION: u32 = 3;
const HEAT_FRAMES_AT: usize = 24;
const SEQ_AT: usize = 64;
const DOORBELL_AT: usize = 128;
const OWNER_SLEEPING_AT: usize = 132;
const CORRECTED_AT: usize = 136;
const UNREADABLE_AT: usize = 192;
const BLOCKING_SESSIONS_AT: usize = 1024;
const _: () = assert!(UNREADABLE_AT + PAGES_MAX * 8 <= BLOCKING_SESSIONS_AT);
const LOCKS_AT: usize = PAGE_BYTES;
/// A line of its own: readers of snapshots load it for each page.
const VERSION_GENERATION_AT: usize = 1536;
const _: () = assert!(BLOCKING_SESSIONS_AT + JOURNALS_MAX as usize / 8 <= VERSION_GENERATION_AT);
const _: () = assert!(VERSION_GENERATION_AT + 64 <= LOCKS_AT);
const SESSIONS_AT: usize = LOCKS_AT + LOCKS * 4;
/// Frames that a slot can number.
const FRAMES_MAX: u64 = 1 << 40;
/// The interval at which a session that waits for the owner checks whether the owner is gone. It is
/// far shorter than the time for which a new owner would wait for the session.
const ANSWER_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The byte of the first frame's heat.
fn heat_at(session_count: u32) -> usize {
    SESSIONS_AT + session_count as usize * SESSION_BYTES
}

/// A mapped control segment.
pub struct Control {
    shared: SharedSegment,
    session_count: u32,
    /// The frames with a heat: those of the memory in front of disks. 0 without a tier.
    heat_frames: u64,
    /// Whether the owner is known to be gone. Then no thread of this process waits any longer. No
    /// lock is released and no answer comes, and the pool must be unmapped before another owner can
    /// have it.
    is_owner_gone: AtomicBool,
}

impl Control {
    /// Bytes of a segment for this many sessions and frames with a heat.
    #[must_use]
    pub fn len_for(session_count: u32, heat_frames: u64) -> usize {
        (heat_at(session_count) + heat_frames as usize).next_multiple_of(PAGE_BYTES)
    }

    /// Makes a new segment, with the heat of the first `heat_frames` frames of the pool.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn create(
        session_count: u32,
        heat_frames: u64,
        incarnation: Incarnation,
        next: Seq,
    ) -> Result<Control, MapError> {
        let shared = SharedSegment::create(Control::len_for(session_count, heat_frames))?;
        shared.half_word(8).store(VERSION, Ordering::Relaxed);
        shared.half_word(12).store(session_count, Ordering::Relaxed);
        shared.half_word(16).store(incarnation.0, Ordering::Relaxed);
        shared
            .word(HEAT_FRAMES_AT)
            .store(heat_frames, Ordering::Relaxed);
        shared.word(SEQ_AT).store(next.0, Ordering::Relaxed);
        shared
            .word(VERSION_GENERATION_AT)
            .store(1, Ordering::Relaxed);
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
            heat_frames,
            is_owner_gone: AtomicBool::new(false),
        })
    }

    /// The generation of versions; 0: an owner of an earlier release keeps none.
    pub(crate) fn version_generation(&self) -> u64 {
        self.shared
            .word(VERSION_GENERATION_AT)
            .load(Ordering::Acquire)
    }

    pub(crate) fn end_version_generation(&self) {
        self.shared
            .word(VERSION_GENERATION_AT)
            .fetch_add(1, Ordering::AcqRel);
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
        // Before any other access: a segment has a page at least.
        if shared.word(0).load(Ordering::Acquire) != MAGIC {
            return Err("the shared memory is not a control segment");
        }
        if shared.half_word(8).load(Ordering::Relaxed) != VERSION {
            return Err("the control segment has another version; use the brick's version");
        }
        let heat_frames = shared.word(HEAT_FRAMES_AT).load(Ordering::Relaxed);
        if heat_frames > FRAMES_MAX
            || shared.len_bytes() != Control::len_for(session_count, heat_frames)
        {
            return Err("the control segment has an unexpected length");
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
            heat_frames,
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

    fn half(&self, at: usize) -> &AtomicU32 {
        wait::step(at);
        self.shared.half_word(at)
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

    /// Sessions of the pool that no process has at present.
    #[must_use]
    pub fn free_sessions(&self) -> u32 {
        let free =
            |session: &u32| self.session_cells(*session).state().load(Ordering::Relaxed) == 0;
        (0..self.session_count).filter(free).count() as u32
    }

    /// The number of the operation that a session has in progress, by the session's own count.
    #[must_use]
    pub fn op_in_progress(&self, session: u32) -> Option<u64> {
        let active = self.session_cells(session).active().load(Ordering::SeqCst);
        (active % 2 == 1).then_some(active)
    }

    /// Whether a living session has reported that this operation is complete.
    pub(crate) fn is_complete(&self, noted: JournaledOp) -> bool {
        let complete = self.session_cells(noted.session).complete();
        noted.position < complete.load(Ordering::Acquire)
    }

    fn unreadable_words(&self) -> impl Iterator<Item = &AtomicU64> {
        (0..PAGES_MAX).map(|index| self.shared.word(UNREADABLE_AT + index * 8))
    }

    /// Reports a frame that could not be read to the owner. Drops the report if the table of
    /// unreadable frames is full.
    #[cold]
    pub(crate) fn report_unreadable(&self, frame: FrameNo) {
        let report = frame.0 + 1;
        let _full = self.unreadable_words().find(|word| {
            let swapped = word.compare_exchange(0, report, Ordering::AcqRel, Ordering::Acquire);
            swapped.map_or_else(|found| found == report, |_| true)
        });
    }

    /// Takes the reports of unreadable frames, for the owner.
    pub(crate) fn take_unreadable(&self) -> impl Iterator<Item = FrameNo> {
        let reported = self.unreadable_words().filter_map(|word| {
            // Nearly always there is none, and the line stays shared.
            let is_reported = word.load(Ordering::Acquire) > 0;
            is_reported.then(|| word.swap(0, Ordering::AcqRel))
        });
        reported.filter_map(|report| Some(FrameNo(report.checked_sub(1)?)))
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

    /// The number of times that the doorbell was rung.
    #[must_use]
    pub fn doorbell_count(&self) -> u32 {
        self.half(DOORBELL_AT).load(Ordering::SeqCst)
    }

    /// Calls `round` at once and then after each ring of the doorbell, until `is_ending`. For the owner. A
    /// round returns the longest wait until the next one; none is without a limit. A thread that ends the
    /// owner first makes `is_ending` true, and then rings.
    pub fn serve_doorbell(
        &self,
        is_ending: impl Fn() -> bool,
        mut round: impl FnMut() -> Option<Duration>,
    ) {
        loop {
            // Before the question, so that a ring after the answer ends the wait.
            let seen = self.doorbell_count();
            if is_ending() {
                return;
            }
            let wait = round();
            if wait != Some(Duration::ZERO) {
                self.wait_for_doorbell(seen, wait);
            }
        }
    }

    /// Sleeps until the doorbell count differs from `seen`. For the owner.
    pub fn wait_for_doorbell(&self, seen: u32, limit: Option<Duration>) {
        self.half(OWNER_SLEEPING_AT).store(1, Ordering::SeqCst);
        if self.doorbell_count() == seen {
            wait::sleep(&self.shared, DOORBELL_AT, seen, limit);
        }
        self.half(OWNER_SLEEPING_AT).store(0, Ordering::SeqCst);
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
}
