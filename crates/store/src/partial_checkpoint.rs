//! Checkpoints beside windows that stay open.
//!
//! A checkpoint passes no open window. Behind one that stays open lanes fill up, and frames
//! that records freed stay in use, whatever pages those records are of. A **bypass** applies
//! what was committed meanwhile all the same and leaves the checkpoint where it is: recovery
//! still begins before the window, and replays what the one inside may have committed. What
//! was applied it must not replay, as the frames are others' by then; so lanes give up all
//! that is applied, and what may be missing on other legs is noted in the table first.
//!
//! Invariants:
//! - of what is applied, lanes keep no record at or above the checkpoint;
//! - a record is applied only with all records of its pages before it. The seq is read
//!   first, then the ends of lanes: a record below it that follows another on a page took
//!   its seq after the other was published, so that the other is found;
//! - what the one inside may still store to is not used by others: its granted frames, the
//!   lines of its lane, the pages whose lock words it holds, and the frames that its record
//!   frees, which stay in use until that is applied.

use crate::checkpoint::{CheckpointLimits, JournalRetention};
use crate::defect::{self, Defect};
use crate::pool::{OWNER_SESSION, ObjectError, Pool};
use pagemesh_base::ids::Seq;
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;

/// A part of a lane: so much that was committed and cannot be applied makes a bypass worth
/// its while. Sessions wake the owner at a half.
const UNAPPLIED_PART: u64 = 4;

impl<M: Media> Pool<M> {
    /// Whether the last checkpoint left much of a lane behind because of an open window.
    pub(crate) fn is_journal_blocked(&self) -> bool {
        self.checkpoint_pass.unapplied_lines
            >= self.mapping.geometry.journal_lines() / UNAPPLIED_PART
    }

    /// Applies what was committed behind windows that are open, too. It may not come to it:
    /// where that would cost other legs a comparison of whole slices, or a lane is damaged.
    pub(crate) fn partial_checkpoint(&mut self) -> Result<(), ObjectError> {
        let mut reach = self.partial_limits();
        // On a file a record may need the leaf that the one inside is linking; nobody but the
        // owner's threads is inside there, and they are not stopped alone.
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
        // Noting them may have taken a checkpoint, which went further.
        reach.checkpoint = reach.checkpoint.max(self.superblock.checkpoint);
        Ok(self.checkpoint_to(reach)?)
    }

    fn partial_limits(&self) -> CheckpointLimits {
        let next = Seq(self.mapping.control.seq().load(Ordering::Acquire));
        // Windows that are closed between the two let it go further, which is no harm.
        CheckpointLimits {
            applied: next,
            checkpoint: self.checkpoint_limit().min(next),
            is_partial: true,
        }
    }

    /// Lines of records that may be missing on other legs: the records are as many at most.
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
