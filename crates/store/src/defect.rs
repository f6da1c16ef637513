//! Deliberate defects: proof that the crash enumeration and the models can fail.
//!
//! Each is a way to break the commit protocol that a crash shows, or what threads
//! do at the same time. Tests switch one on for their thread and must see it
//! caught (`enumerate::defects`, `models`). Built for anything else, [`is`] is false at compile time and nothing is left.

#[cfg(test)]
use crate::{checkpoint::Pass, pool::Pool, recovery::PoolError};
#[cfg(test)]
use pagemesh_pmem::Media;
#[cfg(test)]
use std::cell::Cell;

/// A way to break the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Defect {
    /// A write is acknowledged without the fence that commits it.
    NoCommitFence,
    /// Slots are swapped before the fence.
    SwapBeforeFence,
    /// Locks are released before the fence.
    UnlockBeforeFence,
    /// Data is stored after the fence of the record that names it. Made by the
    /// medium of the tests.
    #[cfg(test)]
    DataAfterRecord,
    /// Recovery does not look at the data of the last record.
    SkippedCrc,
    /// A session does not flush the slots that it says are settled.
    SlotsNotSettled,
    /// A session says that the slots of its last record are settled, too.
    SettledTooFar,
    /// A checkpoint passes a record that is not published yet.
    PassOpenWindow,
    /// The seq that a dead session took stays a hole that nobody closes.
    HoleKept,
    /// The operation that a dead session had committed is left undone.
    DeadNotFinished,
    /// Recovery does not list operations in flight.
    InFlightLost,
    /// What a dead session had in flight is not listed.
    InFlightOfDeadLost,
    /// A lane gives up records that may be missing on another leg.
    HeadPastOpen,
    /// A new node holds what its frame held.
    NodeNotZeroed,
    /// A pad is not fenced before the record behind it.
    PadNotFenced,
    /// The tables are fenced together with the superblock that counts on them.
    TablesWithSuperblock,
    /// The checkpoint does not flush the checksums of frames.
    FrameTableNotFlushed,
    /// `file-sync`: freed frames are granted before the records that freed them
    /// are durable.
    #[cfg(test)]
    FrameReuse,
    /// Lane lines are used again without the superblock that gives them up.
    LaneReuse,
    /// A session's lane is used before the superblock names it.
    LaneNotNamed,
    /// An opening goes on under the number of the one before.
    IncarnationKept,
    /// An object changes without a fence for its record.
    ObjectNotFenced,
    /// `file-sync`: a checkpoint applies what is not durable yet.
    CheckpointNotSynced,
    /// `file-sync`: a flush returns before anything is durable.
    FlushNotSynced,
    /// `file-sync`: records are applied lane by lane, not by their seqs.
    AppliedOutOfOrder,
    /// `file-sync`: recovery applies what a dead process left in the page cache
    /// and the disk may not have.
    RecoveryNotSynced,
    /// `file-sync`: recovery stores slots before the frames they free are
    /// durably free.
    SlotsBeforeFrames,
    /// `file-sync`: a node whose zeroes were lost is used as it is.
    LostNodeKept,

    // Of what threads do at the same time: caught by the models.
    /// Who waits for a lock word sleeps without a mark on it.
    WaiterUnmarked,
    /// The lock words of a dead session stay taken.
    LocksKept,
    /// With a dead session's lock words all others are freed.
    LocksOfAllFreed,
    /// The lock words of a dead session are free before its operation is
    /// finished.
    LocksFreedFirst,
    /// A write does not take its lock words.
    NotLocked,
    /// Whether the owner sleeps is looked at before the bell is rung.
    BellUnheard,
    /// A session enters the window after it was revoked.
    RevokedEnters,
    /// A session enters the window after its grants were taken back.
    RecallUnseen,
    /// Grants are taken back from who entered the window meanwhile.
    RecallNotAwaited,
    /// A recall that is given up goes on for ever.
    GivenUpRecallKept,
    /// The floor is published after the seq was taken.
    FloorAfterSeq,
    /// A reader does not look whether the slot is still the same.
    SlotNotLookedAtAgain,
}

#[cfg(test)]
thread_local! {
    static PRESENT: Cell<Option<Defect>> = const { Cell::new(None) };
    /// Of [`Defect::FrameReuse`]: what records below this seq freed is granted.
    static GRANTED: Cell<u64> = const { Cell::new(0) };
}

/// Whether this thread's store has the defect.
#[cfg(test)]
pub(crate) fn is(defect: Defect) -> bool {
    PRESENT.get() == Some(defect)
}

/// Whether the store has the defect: never.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn is(_: Defect) -> bool {
    false
}

/// Gives the store of this thread a defect, or takes it away.
#[cfg(test)]
pub(crate) fn set(defect: Option<Defect>) {
    PRESENT.set(defect);
    GRANTED.set(0);
}

/// Runs something without the defect, if it is the one.
#[cfg(test)]
pub(crate) fn without<T>(defect: Defect, run: impl FnOnce() -> T) -> T {
    let present = PRESENT.get();
    PRESENT.set(present.filter(|&present| present != defect));
    let result = run();
    PRESENT.set(present);
    result
}

#[cfg(test)]
impl<M: Media> Pool<M> {
    /// [`Defect::FrameReuse`] in place of a checkpoint: frees what records
    /// freed, and leaves them as they are.
    pub(crate) fn release_early(&mut self, pass: &mut Pass) -> Result<(), PoolError> {
        let limit = self.limit();
        let from = GRANTED.replace(limit.0);
        for number in 0..self.block.lanes_end {
            let applied = self.lanes.book(number).applied.clone();
            self.apply_lane(number, limit, pass)?;
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

/// The defect of this thread's store.
#[cfg(test)]
pub(crate) fn present() -> Option<Defect> {
    PRESENT.get()
}
