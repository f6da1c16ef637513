//! The owner's table of sessions: which numbers are open, the frames granted to each session, and
//! the progress of applying its records.

use crate::format::journal::{Journal, journal_of};
use crate::format::superblock::Superblock;
use crate::owner::frame_allocator::{FrameAllocator, FrameClass};
use crate::shared::control::{FrameRun, GRANT_RUNS};
use crate::shared::pool_mapping::PoolMapping;
use pagemesh_pmem::Media;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// Frames granted to a session at a time, at most: its writes between two checkpoints, and 64 MiB.
const GRANT_MAX: u64 = 16 << 10;
/// A grant is at most this part of the free frames, so that idle sessions do
/// not starve a small pool.
const GRANT_PART: u64 = 16;
/// Frames of one run: more than the longest record, so that runs suffice.
const RUN_MAX: u64 = 4096;

/// One session number and its journal.
pub(crate) struct SessionState {
    pub(crate) is_open: bool,
    /// The reader of the journal; its end is the first line that is not applied.
    pub(crate) applied_journal: Journal,
    /// The line where the present session began. A session flushes the slots of its own records
    /// only.
    pub(crate) session_start: u64,
    /// The end of the journal when the pool was opened.
    opening_end: u64,
    /// The operations of records below this line are listed in the in-flight table.
    pub(crate) recorded_below: u64,
    /// The granted runs in the ring: each with the count of granted frames at its end.
    granted_runs: VecDeque<(u64, FrameRun)>,
}

/// All session numbers of a pool.
pub(crate) struct SessionTable(Vec<SessionState>);

impl SessionTable {
    pub(crate) fn new<M: Media>(mapping: &PoolMapping<M>, block: &Superblock) -> SessionTable {
        let session_state = |number| {
            let applied = journal_of(block, number);
            let cells = mapping.control.session_cells(number);
            cells.head().store(applied.end(), Ordering::Relaxed);
            cells.committed().store(applied.end(), Ordering::Relaxed);
            cells.settled().store(applied.end(), Ordering::Relaxed);
            cells.complete().store(applied.end(), Ordering::Relaxed);
            SessionState {
                is_open: false,
                session_start: applied.end(),
                opening_end: applied.end(),
                recorded_below: applied.end(),
                applied_journal: applied,
                granted_runs: VecDeque::new(),
            }
        };
        SessionTable((0..block.geometry.journals).map(session_state).collect())
    }

    pub(crate) fn open_count(&self) -> u32 {
        self.0.iter().filter(|book| book.is_open).count() as u32
    }

    pub(crate) fn open_numbers(&self) -> Vec<u32> {
        (0..)
            .zip(&self.0)
            .filter(|(_, book)| book.is_open)
            .map(|(number, _)| number)
            .collect()
    }

    pub(crate) fn free_number(&self) -> Option<u32> {
        (0..)
            .zip(&self.0)
            .find(|(_, book)| !book.is_open)
            .map(|(number, _)| number)
    }

    /// The journal lines and the frames that all sessions have written since the pool was opened,
    /// closed sessions included. A session stores its counts after its commit. They never wrap, but
    /// any process that maps the pool may have written any value there.
    pub(crate) fn lines_and_frames<M: Media>(&self, mapping: &PoolMapping<M>) -> (u64, u64) {
        let written = |(number, session_state): (u32, &SessionState)| {
            let cells = mapping.control.session_cells(number);
            let committed = cells.committed().load(Ordering::Acquire);
            let lines = committed.saturating_sub(session_state.opening_end);
            (lines, cells.consumed().load(Ordering::Acquire))
        };
        let all = (0..).zip(&self.0).map(written);
        all.fold((0, 0), |sum: (u64, u64), (lines, frames)| {
            (sum.0.saturating_add(lines), sum.1.saturating_add(frames))
        })
    }

    pub(crate) fn session(&mut self, number: u32) -> &mut SessionState {
        &mut self.0[number as usize]
    }

    pub(crate) fn open<M: Media>(
        &mut self,
        mapping: &PoolMapping<M>,
        number: u32,
        pid: u32,
        start_time: u64,
    ) {
        let session_state = self.session(number);
        assert!(!session_state.is_open, "session {number} is open");
        session_state.is_open = true;
        let cells = mapping.control.session_cells(number);
        session_state.session_start = cells.committed().load(Ordering::Acquire);
        cells.pid().store(pid, Ordering::Relaxed);
        cells.start_time().store(start_time, Ordering::Relaxed);
        cells.floor().store(u64::MAX, Ordering::Relaxed);
        cells.revoked().store(0, Ordering::Relaxed);
        let active = cells.active().load(Ordering::Relaxed);
        cells
            .active()
            .store(active.next_multiple_of(2), Ordering::Relaxed);
        cells.state().store(1, Ordering::Release);
    }
}

impl SessionState {
    /// Grants more frames, up to a target below `limit`, but so many as are wanted. `reserved` ones stay free.
    pub(crate) fn refill<M: Media>(
        &mut self,
        mapping: &PoolMapping<M>,
        number: u32,
        frames: &mut FrameAllocator,
        (wanted, limit): (u64, u64),
        reserved: u64,
    ) {
        let target = mapping.geometry().journal_lines().min(GRANT_MAX).min(limit);
        let free = frames.free_of(FrameClass::Memory).saturating_sub(reserved);
        let target = target
            .min(free / GRANT_PART)
            .max(wanted)
            .min(self.unused_frames(mapping, number) + free);
        self.grant(mapping, number, frames, target);
    }

    /// Granted frames that the session has not used.
    fn unused_frames<M: Media>(&self, mapping: &PoolMapping<M>, number: u32) -> u64 {
        let cells = mapping.control.session_cells(number);
        let granted = cells.granted().load(Ordering::Relaxed);
        granted.saturating_sub(cells.consumed().load(Ordering::Acquire))
    }

    /// Grants more frames, until `target` are granted and not used.
    pub(crate) fn grant<M: Media>(
        &mut self,
        mapping: &PoolMapping<M>,
        number: u32,
        frames: &mut FrameAllocator,
        target: u64,
    ) {
        let cells = mapping.control.session_cells(number);
        let consumed = cells.consumed().load(Ordering::Acquire);
        while self
            .granted_runs
            .front()
            .is_some_and(|&(end, _)| end <= consumed)
        {
            self.granted_runs.pop_front();
        }
        let mut granted = cells.granted().load(Ordering::Relaxed);
        let mut end = cells.ring_end().load(Ordering::Relaxed);
        while granted - consumed < target && (self.granted_runs.len() as u64) < GRANT_RUNS {
            let want = (target - (granted - consumed)).min(RUN_MAX);
            let Some(run) = frames.allocate(want) else {
                break;
            };
            granted += run.len;
            cells.set_run(end, run);
            end += 1;
            self.granted_runs.push_back((granted, run));
        }
        cells.granted().store(granted, Ordering::Release);
        cells.ring_end().store(end, Ordering::Release);
    }

    /// The count of consumed frames once the session has taken this frame. The session may have
    /// died before it stored that count. None if the frame is in no run.
    pub(crate) fn consumed_through(&self, frame: u64) -> Option<u64> {
        // The newest run counts: a frame is granted again only after the record of its last user
        // was published.
        let mut runs = self.granted_runs.iter().rev();
        let (end, run) = runs.find(|(_, run)| (run.start..run.start + run.len).contains(&frame))?;
        Some(end - (run.start + run.len - 1 - frame))
    }

    /// Takes the unused frames back. The session must have no operation in progress. It finds the
    /// recall before it begins another one.
    pub(crate) fn recall<M: Media>(
        &mut self,
        mapping: &PoolMapping<M>,
        number: u32,
        frames: &mut FrameAllocator,
    ) {
        let cells = mapping.control.session_cells(number);
        let consumed = cells.consumed().load(Ordering::Acquire);
        for (end, run) in self.granted_runs.drain(..) {
            let used = (consumed + run.len).saturating_sub(end).min(run.len);
            frames.return_unused(FrameRun {
                start: run.start + used,
                len: run.len - used,
            });
        }
        cells.granted().store(consumed, Ordering::Release);
        let end = cells.ring_end().load(Ordering::Relaxed);
        cells.ring_start().store(end, Ordering::Release);
    }
}
