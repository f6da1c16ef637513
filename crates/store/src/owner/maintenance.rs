//! The owner's work for its sessions: it grants frames, recalls them, and answers waiting sessions.
//!
//! [`Pool::maintain`] takes these steps, when the doorbell of the control segment has woken the brick:
//!
//! 1. [`Pool::checkpoint`] applies the records below the lowest floor: it flushes frame-table lines and
//!    slots that their session has not flushed, and changes the bitmap. One fence; then the
//!    superblock with the new checkpoint and journal heads; only then are replaced frames free again.
//! 2. If a stalled operation holds the checkpoint back and journals are full,
//!    [`Pool::partial_checkpoint`] applies the records beyond it.
//! 3. [`Pool::reclaim`] frees frames of deleted objects, `Pool::refill` grants frames to
//!    sessions, and `Pool::answer_request` wakes those that wait.
//!
//! Invariant: the owner waits for an operation of a session only for a short time.

use super::error::ObjectError;
use super::frame_allocator::FrameClass;
use super::pool::{OWNER_SESSION, Pool};
use crate::defect::{self, Defect};
use crate::shared::error::StoreError;
use crate::shared::wait::{Backoff, Deadline};
use pagemesh_pmem::Media;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// The time for which the owner waits at once for a session to end its operation. An operation
/// takes microseconds, and a few milliseconds if its thread waits for a processor. After that time
/// the session may be dead, or may wait for a lock of a dead session, which only the owner
/// releases.
pub(super) const OP_END_WAIT: Duration = Duration::from_millis(20);

impl<M: Media> Pool<M> {
    /// Does the owner's work before sessions have to wait for it: a checkpoint, grants, freeing
    /// deleted objects. Then answers waiting sessions. True when there is more to do at once.
    ///
    /// # Errors
    /// When the pool failed.
    pub fn maintain(&mut self) -> Result<bool, ObjectError> {
        self.checkpoint()?;
        if self.is_journal_blocked() {
            self.partial_checkpoint()?;
        }
        let more = self.maintain_versions()? | self.reclaim()?;
        for number in self.sessions.open_numbers() {
            self.refill(number);
        }
        let mut stuck = None;
        for number in self.sessions.open_numbers() {
            match self.answer_request(number) {
                // Other sessions need not wait for the operation that this one waits for.
                Err(cause @ ObjectError::SessionStuck { .. }) => stuck = Some(cause),
                answered => answered?,
            }
        }
        stuck.map_or(Ok(more), Err)
    }

    /// Grants frames to a session.
    pub(crate) fn refill(&mut self, number: u32) {
        if number == OWNER_SESSION {
            // The owner moves no data, and so needs no frames.
            return;
        }
        self.refill_wanted(number, 0);
    }

    fn refill_wanted(&mut self, number: u32, wanted: u64) {
        let limit = self.grant_limit();
        let reserved = self.reserved_frames();
        let session_state = self.sessions.session(number);
        let (mapping, frames) = (&self.mapping, &mut self.frame_allocator);
        session_state.refill(mapping, number, frames, (wanted, limit), reserved);
    }

    /// Answers a waiting session.
    fn answer_request(&mut self, number: u32) -> Result<(), ObjectError> {
        let cells = self.mapping.control.session_cells(number);
        let asked = cells.asked().load(Ordering::Acquire);
        let (ticket, wanted) = (asked as u32, asked >> 32);
        if ticket == cells.answered().load(Ordering::Acquire) {
            return Ok(());
        }
        self.spill_in_flight_if_full(number)?;
        // A stalled operation keeps records from being applied, and the frames that they freed from
        // being used again.
        if self.lacks_frames(wanted) || self.is_journal_full(number) {
            self.partial_checkpoint()?;
        }
        if self.lacks_frames(wanted) {
            self.recall_grants(number);
        }
        if self.lacks_frames(wanted) && self.waits_for_demotion(number) {
            if self.is_demotion_late() {
                self.wait_for_ops()?;
                self.restart_demotion_limit();
            }
            return Ok(());
        }
        if self.lacks_frames(wanted) || self.is_journal_full(number) {
            // Everything that other sessions could return was recalled. Only operations in progress
            // can still free frames or journal lines: no other wait would end.
            self.wait_for_ops()?;
        }
        self.refill_wanted(number, wanted);
        self.mapping.control.session_cells(number).answer(ticket);
        self.restart_demotion_limit();
        Ok(())
    }

    fn lacks_frames(&self, wanted: u64) -> bool {
        let free = self.frame_allocator.free_of(FrameClass::Memory);
        free < wanted + self.reserved_frames()
    }

    /// Makes frames free that sessions hold, if the owner needs them for itself.
    pub(super) fn ensure_free_frames(&mut self, wanted: u64) -> Result<(), ObjectError> {
        if self.lacks_frames(wanted) {
            self.checkpoint()?;
            self.recall_grants(OWNER_SESSION);
        }
        match self.lacks_frames(wanted) {
            true => Err(StoreError::NoSpace.into()),
            false => Ok(()),
        }
    }

    /// Recalls grants from sessions that have no operation in progress.
    fn recall_grants(&mut self, asking: u32) {
        // One deadline for all: operations in progress may wait for the stalled one.
        let end = Deadline::after(OP_END_WAIT);
        for number in self.sessions.open_numbers() {
            if number == asking || number == OWNER_SESSION {
                continue;
            }
            let cells = self.mapping.control.session_cells(number);
            let active = cells.active().load(Ordering::SeqCst);
            if active % 2 == 1 && !self.wait_for_op_end(number, active, end) {
                // The operation takes too long: the session keeps its grants.
                continue;
            }
            // The recall comes first. A session that begins an operation after this sees it and
            // steps back until the recall has ended. If the recall is given up, its mark is undone.
            let before = cells.recalls().fetch_add(1, Ordering::SeqCst);
            let active = cells.active().load(Ordering::SeqCst);
            let is_inside = active % 2 == 1 && !defect::is(Defect::RecallNotAwaited);
            if is_inside && !self.wait_for_op_end(number, active, end) {
                let cells = self.mapping.control.session_cells(number);
                if !defect::is(Defect::GivenUpRecallKept) {
                    cells.recalls().store(before, Ordering::SeqCst);
                }
                continue;
            }
            let session_state = self.sessions.session(number);
            session_state.recall(&self.mapping, number, &mut self.frame_allocator);
            let cells = self.mapping.control.session_cells(number);
            cells.recalls().fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(super) fn wait_for_op_end(&self, number: u32, active: u64, end: Deadline) -> bool {
        let cells = self.mapping.control.session_cells(number);
        let mut backoff = Backoff::default();
        while cells.active().load(Ordering::SeqCst) == active {
            if end.is_over() {
                return false;
            }
            backoff.pause();
        }
        true
    }

    /// Waits until every operation in progress has ended, for a short time only. The caller tries
    /// again as often as it can wait.
    pub(crate) fn wait_for_ops(&self) -> Result<(), ObjectError> {
        // The caller's stores come before the loads of the operation counts. A session that begins
        // an operation stores its count first, and then loads.
        fence(Ordering::SeqCst);
        for session in self.sessions.open_numbers() {
            let cells = self.mapping.control.session_cells(session);
            let active = cells.active().load(Ordering::SeqCst);
            let end = Deadline::after(OP_END_WAIT);
            if active % 2 == 1 && !self.wait_for_op_end(session, active, end) {
                return Err(self.stuck_error(session, active));
            }
        }
        Ok(())
    }

    pub(super) fn stuck_error(&self, session: u32, operation: u64) -> ObjectError {
        let pid = self.process_id(session);
        ObjectError::SessionStuck {
            session,
            operation,
            pid,
        }
    }
}
