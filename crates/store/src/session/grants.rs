//! The session's side of its grants: frames and journal room, taken or asked for between two
//! operations.
//!
//! Invariant: a session waits for the owner only here, and holds no lock then.

use super::Session;
use crate::shared::control::FrameRun;
use crate::shared::error::StoreError;
use crate::shared::wait::{self, Deadline};
use pagemesh_base::ids::FrameNo;
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;

/// Waits for the owner before the session gives up. Other sessions may take the frames that an
/// answer freed.
const OWNER_WAITS_MAX: u32 = 3;

/// The session's position in its granted frames.
#[derive(Clone, Copy)]
pub(super) struct GrantCursor {
    pub(super) run: FrameRun,
    pub(super) next: u64,
    pub(super) consumed: u64,
    pub(super) recalls: u32,
}

impl<M: Media> Session<M> {
    /// Ensures `frames` granted frames, and room for a record of `entry_lines`. Asks the owner for
    /// them if necessary.
    pub(crate) fn ensure_resources(
        &mut self,
        frames: u64,
        entry_lines: usize,
    ) -> Result<(), StoreError> {
        for tries in 0.. {
            if self.mapping.is_owner_gone() {
                return Err(StoreError::OwnerGone);
            }
            self.refresh_from_owner()?;
            let has_frames = frames == 0 || self.available_frames(frames) >= frames;
            if has_frames && self.journal.has_room(entry_lines).is_ok() {
                break;
            }
            if self.is_owner || tries == OWNER_WAITS_MAX {
                return Err(if has_frames {
                    StoreError::TimedOut
                } else {
                    StoreError::NoSpace
                });
            }
            self.request_frames(frames)?;
        }
        self.ring_doorbell_if_low();
        Ok(())
    }

    /// Loads the owner's changes. No operation may be in progress.
    pub(super) fn refresh_from_owner(&mut self) -> Result<(), StoreError> {
        let recalls = self.wait_for_recall()?;
        let cells = self.mapping.control.session_cells(self.number);
        let head = cells.head().load(Ordering::Acquire);
        self.journal.advance(head);
        if recalls != self.grants.recalls {
            self.grants.recalls = recalls;
            self.grants.run.len = 0;
            self.grants.next = cells.ring_start().load(Ordering::Acquire);
            // A failed operation took frames and did not publish them.
            self.grants.consumed = cells.consumed().load(Ordering::Acquire);
        }
        Ok(())
    }

    /// The number of recalls so far. During a recall the ring's start is from an earlier one,
    /// and the runs behind it have other users by now.
    fn wait_for_recall(&self) -> Result<u32, StoreError> {
        let cells = self.session_cells();
        let recalls = cells.recalls().load(Ordering::Acquire);
        if recalls.is_multiple_of(2) {
            return Ok(recalls);
        }
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

    /// The number of granted frames, counted as far as `enough`.
    fn available_frames(&self, enough: u64) -> u64 {
        let mut sum = self.grants.run.len;
        if sum < enough {
            let cells = self.session_cells();
            let end = cells.ring_end().load(Ordering::Acquire);
            for index in self.grants.next..end {
                sum += cells.run(index).len;
                if sum >= enough {
                    break;
                }
            }
        }
        sum
    }

    #[cold]
    fn request_frames(&mut self, frames: u64) -> Result<(), StoreError> {
        self.ticket = self.ticket.wrapping_add(1);
        let cells = self.mapping.control.session_cells(self.number);
        cells
            .asked()
            .store(u64::from(self.ticket) | frames << 32, Ordering::SeqCst);
        match &self.owner_work {
            Some(tend) => tend(),
            None => {
                self.mapping.control.ring_doorbell();
                let control = &self.mapping.control;
                control.wait_for_answer(self.number, self.ticket, self.owner_wait);
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

    /// Wakes the owner once when half of the journal or of the grants is used.
    fn ring_doorbell_if_low(&mut self) {
        let cells = self.mapping.control.session_cells(self.number);
        let granted = cells.granted().load(Ordering::Relaxed);
        let (head, used) = (
            self.journal.head(),
            self.journal.end() - self.journal.head(),
        );
        let half_a_journal = self.mapping.geometry.journal_lines() / 2;
        let low = used > half_a_journal || granted - self.grants.consumed < half_a_journal / 2;
        if low && self.doorbell_state != Some((head, granted)) && !self.is_owner {
            self.doorbell_state = Some((head, granted));
            self.mapping.control.ring_doorbell();
        }
    }

    /// Takes `count` granted frames. `ensure_resources` has ensured them.
    pub(crate) fn take_frames(&mut self, count: u64) {
        self.frames.clear();
        while (self.frames.len() as u64) < count {
            if self.grants.run.len == 0 {
                let cells = self.mapping.control.session_cells(self.number);
                let end = cells.ring_end().load(Ordering::Acquire);
                assert!(
                    self.grants.next < end,
                    "ensure_resources granted the frames"
                );
                self.grants.run = cells.run(self.grants.next);
                self.grants.next += 1;
                let numbers = self.mapping.geometry.frame_numbers();
                let FrameRun { start, len } = self.grants.run;
                assert!(
                    numbers.start <= start && start + len <= numbers.end,
                    "granted frames"
                );
            }
            let taken = self.grants.run.len.min(count - self.frames.len() as u64);
            let start = self.grants.run.start;
            self.frames.extend((start..start + taken).map(FrameNo));
            self.grants.run.start += taken;
            self.grants.run.len -= taken;
        }
        self.grants.consumed += count;
    }
}
