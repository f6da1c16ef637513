//! The deliberate defects of the store ([`pagemesh_base::defect`]), and the one
//! that needs more than a condition.

pub(crate) use pagemesh_base::defect::{Defect, is};
#[cfg(test)]
pub(crate) use pagemesh_base::defect::{present, without};

#[cfg(test)]
use crate::{
    checkpoint::{Pass, Reach},
    pool::Pool,
    recovery::PoolError,
};
#[cfg(test)]
use pagemesh_pmem::Media;
#[cfg(test)]
use std::cell::Cell;

#[cfg(test)]
thread_local! {
    /// Of [`Defect::FrameReuse`]: what records below this seq freed is granted.
    static GRANTED: Cell<u64> = const { Cell::new(0) };
}

/// Gives the store of this thread a defect, or takes it away.
#[cfg(test)]
pub(crate) fn set(defect: Option<Defect>) {
    pagemesh_base::defect::set(defect);
    GRANTED.set(0);
}

#[cfg(test)]
impl<M: Media> Pool<M> {
    /// [`Defect::FrameReuse`] in place of a checkpoint: frees what records
    /// freed, and leaves them as they are.
    pub(crate) fn release_early(&mut self, pass: &mut Pass) -> Result<(), PoolError> {
        let limit = self.limit();
        let from = GRANTED.replace(limit.0);
        let reach = Reach::checkpoint(limit);
        for number in 0..self.block.lanes_end {
            let applied = self.lanes.book(number).applied.clone();
            self.apply_lane(number, reach, pass)?;
            self.lanes.book(number).applied = applied;
        }
        let fresh = pass.records.iter().filter(|record| record.seq.0 >= from);
        for change in fresh.flat_map(|record| &record.changes) {
            if let Some(frame) = change.old.frame()
                && change.new.frame() != Some(frame)
            {
                let _was_in_use = self.frames.release(frame.0);
            }
        }
        Ok(())
    }
}
