//! Partial checkpoints, taken while an operation stays in progress.
//!
//! A checkpoint passes no operation in progress. While one stays in progress, journals fill up and
//! frames that records freed stay in use, for all pages of the pool. A **partial checkpoint**
//! applies the records that were committed meanwhile and leaves the checkpoint unchanged. Recovery
//! still begins before the operation in progress and replays the record that it may have committed.
//! Recovery must not replay the applied records, because their freed frames have new users by then.
//! So the owner removes all applied records from the journals. First it lists, in the in-flight
//! table, the operations that may be missing on other legs.
//!
//! Invariants:
//! - journals hold no applied record at or above the checkpoint;
//! - a record is applied only with all earlier records of its pages. The owner reads the seq first,
//!   and the ends of the journals then. A record below that seq that follows another one on a page
//!   took its seq after the other was published, so the owner finds the other;
//! - nothing that the operation in progress may still store to has another user: its granted
//!   frames, the lines of its journal, the pages that it has locked, and the frames that its record
//!   frees. Those stay in use until the record is applied.

use crate::defect::{self, Defect};
use crate::owner::checkpoint::CheckpointLimits;
use crate::owner::in_flight::JournalRetention;
use crate::owner::pool::{OWNER_SESSION, ObjectError, Pool};
use pagemesh_base::ids::Seq;
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;

/// A partial checkpoint pays if this part of a journal is committed and cannot be applied: a
/// quarter. Sessions wake the owner at a half.
const UNAPPLIED_PART: u64 = 4;

impl<M: Media> Pool<M> {
    /// Whether an operation in progress kept the last checkpoint from applying much of a journal.
    pub(crate) fn is_journal_blocked(&self) -> bool {
        self.checkpoint_pass.unapplied_lines
            >= self.mapping.geometry().journal_lines() / UNAPPLIED_PART
    }

    /// Applies committed records above operations in progress as well. Does nothing if that would
    /// cost other legs a comparison of whole slices, or if a journal is damaged.
    pub(crate) fn partial_checkpoint(&mut self) -> Result<(), ObjectError> {
        let mut reach = self.partial_limits();
        // On a file a record may need the leaf that the operation in progress links. Only threads
        // of the owner's process have such an operation, and they do not stall on their own.
        if reach.checkpoint == reach.applied || self.mapping.has_overlay() {
            return Ok(self.checkpoint()?);
        }
        if self.in_flight_lines() > self.in_flight.free() {
            return Ok(());
        }
        for number in self.sessions.open_numbers() {
            if number == OWNER_SESSION {
                continue;
            }
            let noted = match defect::is(Defect::PartialCheckpointListsNothing) {
                true => Some(self.committed_end(number)),
                false => self.collect_in_flight_of(number, None, JournalRetention::Retained)?,
            };
            let Some(noted) = noted else {
                return Ok(());
            };
            let session_state = self.sessions.session(number);
            session_state.recorded_below = noted.max(session_state.recorded_below);
        }
        if defect::is(Defect::PartialCheckpointReadsSeqLate) {
            reach.applied = self.partial_limits().applied;
        }
        if defect::is(Defect::PartialCheckpointPassesUnpublished) {
            reach.checkpoint = reach.applied;
        }
        // Listing the operations may have taken a checkpoint, which went further.
        reach.checkpoint = reach.checkpoint.max(self.superblock.checkpoint);
        Ok(self.checkpoint_to(reach)?)
    }

    fn partial_limits(&self) -> CheckpointLimits {
        let next = Seq(self.mapping.control.seq().load(Ordering::Acquire));
        // An operation that ends between the two loads lets the checkpoint go further. That is
        // harmless.
        CheckpointLimits {
            applied: next,
            checkpoint: self.checkpoint_limit().min(next),
            is_partial: true,
        }
    }

    /// Lines of records that may be missing on other legs. The number of records is at most this.
    fn in_flight_lines(&self) -> u64 {
        let of = |number: u32| {
            let complete = self.mapping.control.session_cells(number).complete();
            let complete = complete.load(Ordering::Acquire);
            let head = self.superblock.journal_heads[number as usize];
            self.committed_end(number)
                .saturating_sub(complete.max(head))
        };
        let open = self.sessions.open_numbers().into_iter();
        open.filter(|&number| number != OWNER_SESSION).map(of).sum()
    }
}
