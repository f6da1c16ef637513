//! The deliberate defects of the store ([`pagemesh_base::defect`]), and the code of
//! [`Defect::FrameReuse`], which needs more than a condition.

pub(crate) use pagemesh_base::defect::{Defect, is};
#[cfg(test)]
pub(crate) use pagemesh_base::defect::{present, without};

#[cfg(test)]
use crate::{
    owner::checkpoint::{CheckpointLimits, CheckpointPass},
    owner::pool::Pool,
    recovery::PoolError,
};
#[cfg(test)]
use pagemesh_pmem::Media;
#[cfg(test)]
use std::cell::Cell;

#[cfg(test)]
thread_local! {
    /// For [`Defect::FrameReuse`]: frames that records below this seq freed are granted.
    static GRANTED: Cell<u64> = const { Cell::new(0) };
}

/// Sets the defect of the store in this thread, or clears it.
#[cfg(test)]
pub(crate) fn set(defect: Option<Defect>) {
    pagemesh_base::defect::set(defect);
    GRANTED.set(0);
}

#[cfg(test)]
impl<M: Media> Pool<M> {
    /// [`Defect::FrameReuse`]: in place of a checkpoint, releases the frames that committed records
    /// freed, and does not apply the records.
    pub(crate) fn release_early(&mut self, pass: &mut CheckpointPass) -> Result<(), PoolError> {
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
