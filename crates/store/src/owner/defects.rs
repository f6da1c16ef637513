//! Deliberate defects of the owner ([`crate::defect`]) that need more than a condition. Without the
//! feature `test-api` each hook is a constant.

use super::checkpoint::CheckpointPass;
use super::pool::Pool;
use crate::recovery::PoolError;
use pagemesh_pmem::Media;
#[cfg(feature = "test-api")]
use {
    super::checkpoint::CheckpointLimits,
    crate::defect::{self, Defect},
    std::cell::Cell,
};

#[cfg(feature = "test-api")]
thread_local! {
    /// For [`Defect::FrameReuse`]: frames that records below this seq freed are granted.
    static GRANTED: Cell<u64> = const { Cell::new(0) };
}

/// Prepares [`Defect::FrameReuse`] for another pool in this thread.
#[cfg(feature = "test-api")]
pub fn forget_granted_frames() {
    GRANTED.set(0);
}

impl<M: Media> Pool<M> {
    /// [`Defect::FrameReuse`](crate::defect::Defect::FrameReuse): in place of a checkpoint, releases
    /// the frames that committed records freed, and does not apply the records.
    #[cfg(feature = "test-api")]
    pub(super) fn release_frames_early(
        &mut self,
        pass: &mut CheckpointPass,
    ) -> Option<Result<(), PoolError>> {
        defect::is(Defect::FrameReuse).then(|| self.release_freed(pass))
    }

    #[cfg(not(feature = "test-api"))]
    #[inline(always)]
    pub(super) fn release_frames_early(
        &mut self,
        _pass: &mut CheckpointPass,
    ) -> Option<Result<(), PoolError>> {
        None
    }

    #[cfg(feature = "test-api")]
    fn release_freed(&mut self, pass: &mut CheckpointPass) -> Result<(), PoolError> {
        let limit = self.checkpoint_limit();
        let from = GRANTED.replace(limit.0);
        let reach = CheckpointLimits::full(limit);
        for number in 0..self.superblock.journals_end {
            let applied = self.sessions.session(number).applied_journal.clone();
            self.apply_journal(number, reach, pass)?;
            self.sessions.session(number).applied_journal = applied;
        }
        let fresh = pass.records.iter().filter(|record| record.seq.0 >= from);
        for change in fresh.flat_map(|record| &record.changes) {
            if let Some(frame) = change.old.frame()
                && change.new.frame() != Some(frame)
            {
                let _was_in_use = self.frame_allocator.release(frame.0);
            }
        }
        Ok(())
    }
}
