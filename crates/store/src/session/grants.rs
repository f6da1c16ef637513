//! Grants of frames and journal room, and the waits for the owner of the pool that makes them.
//!
//! Invariant: a session waits for the owner only here, between two operations, and holds no lock
//! then.

use super::{DEMOTION_WAIT_MAX, Session};
use crate::shared::control::FrameRun;
use crate::shared::error::StoreError;
use crate::shared::wait::{self, Deadline};
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The session's position in its granted frames.
#[derive(Clone, Copy)]
pub(super) struct GrantCursor {
    pub(super) run: FrameRun,
    pub(super) next: u64,
    pub(super) consumed: u64,
    pub(super) recalls: u32,
}

impl<M: Media> Session<M> {
    /// Waits for the end of the recall in progress, and returns the number of recalls.
    #[cold]
    pub(super) fn wait_for_recall(&self) -> Result<u32, StoreError> {
        let cells = self.session_cells();
        let end = Deadline::after(self.owner_wait);
        loop {
            let recalls = cells.recalls().load(Ordering::Acquire);
            if recalls.is_multiple_of(2) {
                return Ok(recalls);
            }
            if self.mapping.is_owner_gone() {
                return Err(StoreError::OwnerGone);
            }
            if end.is_over() {
                return Err(StoreError::TimedOut);
            }
            wait::pause();
        }
    }

    /// The limit of a wait for frames. Demotions wait for a disk as long as it may be silent. A session with a limit of
    /// zero shares its thread with the owner.
    fn frames_wait(&self) -> Duration {
        let is_tiered = self.mapping.geometry().flash_start().is_some();
        match is_tiered && !self.owner_wait.is_zero() {
            true => self.owner_wait.max(DEMOTION_WAIT_MAX),
            false => self.owner_wait,
        }
    }

    /// Asks the owner for `frames` frames and for journal room, and waits for its answer.
    #[cold]
    pub(super) fn request_frames(&mut self, frames: u64) -> Result<(), StoreError> {
        self.ticket = self.ticket.wrapping_add(1);
        let cells = self.mapping.control.session_cells(self.number);
        cells
            .asked()
            .store(u64::from(self.ticket) | frames << 32, Ordering::SeqCst);
        match &self.owner_work {
            Some(maintain) => maintain(),
            None => {
                self.mapping.control.ring_doorbell();
                let control = &self.mapping.control;
                control.wait_for_answer(self.number, self.ticket, self.frames_wait());
            }
        }
        if self.mapping.is_owner_gone() {
            return Err(StoreError::OwnerGone);
        }
        if cells.answered().load(Ordering::Acquire) == self.ticket {
            Ok(())
        } else {
            Err(StoreError::TimedOut)
        }
    }
}
