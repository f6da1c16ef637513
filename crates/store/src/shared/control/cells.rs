//! One session's cells in the control segment, with the ring of its grants.
//!
//! Invariant: each line has one writer, the session or the owner.

use crate::shared::wait;
use pagemesh_pmem::SharedSegment;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

pub(super) const SESSION_BYTES: usize = GRANT_RUNS_AT + GRANT_RUNS as usize * 8;
/// Runs in a grant ring. On a pool with scattered free frames a run is a frame or two, and a
/// session should need the owner only once in thousands of writes.
pub const GRANT_RUNS: u64 = 8160;
const GRANT_RUNS_AT: usize = 256;
/// In a session's cells: the half word on which a session sleeps while it waits for the owner.
pub(super) const ANSWERED_AT: usize = 68;
const _: () = assert!(SESSION_BYTES == 64 << 10, "sessions begin on pages");

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

/// One session's cells.
#[derive(Clone, Copy)]
pub struct SessionCells<'c> {
    pub(super) shared: &'c SharedSegment,
    pub(super) at: usize,
}

macro_rules! cells {
    ($($(#[$doc:meta])* $name:ident: $kind:ident $method:ident at $at:expr;)*) => {
        $($(#[$doc])* #[inline] pub fn $name(self) -> &'c $kind {
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
