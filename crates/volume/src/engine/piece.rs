//! A piece: the part of a request that lies in one column.

use super::EngineBackend;
use crate::locks::LockRange;
use crate::snapshot::{ColumnExtent, LegSet};
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{SliceError, SliceReply, TransactionPart};

pub(super) enum PieceOp {
    Read,
    Extents,
    Write(Bytes),
    Clear,
    /// Parts of one column in ascending order. The piece reaches from the first
    /// to the last, and has the locks of the parts alone.
    Transact(Vec<TransactionPart>),
    Flush,
    /// Rewrites a page on one leg, where it was found damaged, from another.
    Repair {
        bad: usize,
        data: Option<Bytes>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Waits for its range lock.
    Locking,
    /// Waits for its column, or behind an earlier change.
    Queued,
    Sent,
    /// A read that has its answer, which may show a change in flight: it waits
    /// for that to be everywhere.
    AwaitingChanges,
    /// Written everywhere; a flush makes it durable.
    Flushing,
}

pub(super) struct Piece {
    pub job: u32,
    pub op_kind: PieceOp,
    pub phase: Phase,
    pub durable: bool,
    pub column: usize,
    pub offset: u64,
    pub len: u64,
    /// Its first byte in the volume.
    pub volume_offset: u64,
    /// Of submission.
    pub order: u64,
    /// Range locks that it does not hold yet.
    pub pending_locks: u32,
    /// Zero until it is first sent.
    pub op: u64,
    pub epoch: Epoch,
    /// The column's version when it was last sent.
    pub version: u32,
    pub pending: LegSet,
    pub done: LegSet,
    /// Those that took it when it was sent before: they hold it, whatever they
    /// say to its being sent again.
    pub accepted: LegSet,
    pub failed: LegSet,
    pub error: Option<SliceError>,
    /// What a read was answered.
    pub answer: Option<SliceReply>,
    /// The window's number of the flush it waits for.
    pub flush_number: u64,
    /// What the volume knows this flush to cover.
    pub flush_covers: u64,
    /// Its place in the column's list of changes.
    pub change_index: usize,
}

impl Piece {
    pub(super) fn new(job: u32, place: ColumnExtent, act: PieceOp, durable: bool) -> Piece {
        Piece {
            job,
            op_kind: act,
            phase: Phase::Locking,
            durable,
            column: place.column,
            offset: place.offset,
            len: place.len,
            volume_offset: place.volume_offset,
            order: 0,
            pending_locks: 0,
            op: 0,
            epoch: Epoch(0),
            version: 0,
            pending: LegSet::NONE,
            done: LegSet::NONE,
            accepted: LegSet::NONE,
            failed: LegSet::NONE,
            error: None,
            answer: None,
            flush_number: 0,
            flush_covers: 0,
            change_index: usize::MAX,
        }
    }

    /// Whether it is sent again after a leg is lost, rather than elsewhere.
    pub(super) fn is_change(&self) -> bool {
        !matches!(self.op_kind, PieceOp::Read | PieceOp::Extents)
    }

    /// Gets in line for its range locks; how many it does not hold yet.
    pub(super) fn acquire(&self, slot: u32, out: &mut impl EngineBackend) -> u32 {
        match &self.op_kind {
            PieceOp::Write(_) | PieceOp::Clear | PieceOp::Repair { .. } => {
                u32::from(!out.acquire(self.lock_range(), slot))
            }
            PieceOp::Transact(parts) => out.acquire_all(&lock_ranges(self.column, parts), slot),
            PieceOp::Read | PieceOp::Extents | PieceOp::Flush => 0,
        }
    }

    /// Gives its range locks, or its places in their lines, back.
    pub(super) fn release(&self, slot: u32, out: &mut impl EngineBackend) {
        match &self.op_kind {
            PieceOp::Write(_) | PieceOp::Clear | PieceOp::Repair { .. } => {
                out.release(self.lock_range(), slot)
            }
            PieceOp::Transact(parts) => {
                for range in lock_ranges(self.column, parts) {
                    out.release(range, slot);
                }
            }
            PieceOp::Read | PieceOp::Extents | PieceOp::Flush => {}
        }
    }

    /// Whether it may only show what is on every leg.
    pub(super) fn needs_stable_data(&self) -> bool {
        matches!(self.op_kind, PieceOp::Read) && !defect::is(Defect::ReadNotDelayed)
    }

    /// It ends, and what it was to change may be changed on some legs only.
    pub(super) fn record_if_indeterminate(&self, out: &mut impl EngineBackend) {
        if self.op == 0 {
            return;
        }
        match &self.op_kind {
            PieceOp::Write(_) | PieceOp::Clear => out.record_indeterminate(self.lock_range()),
            PieceOp::Transact(parts) => {
                for range in lock_ranges(self.column, parts) {
                    out.record_indeterminate(range);
                }
            }
            // What a repair writes is what all others hold.
            PieceOp::Repair { .. } | PieceOp::Read | PieceOp::Extents | PieceOp::Flush => {}
        }
    }

    /// What it reads, as changes lock it.
    pub(super) fn lock_range(&self) -> LockRange {
        LockRange::new(self.column, self.offset, self.len)
    }

    pub(super) fn overlaps(&self, offset: u64, len: u64) -> bool {
        let end = offset + len;
        let meets = |from: u64, len: u64| from < end && offset < from + len;
        match &self.op_kind {
            PieceOp::Transact(parts) => parts.iter().any(|part| meets(part.offset(), part.len())),
            _ => meets(self.offset, self.len),
        }
    }

    pub(super) fn reset_answers(&mut self) {
        self.accepted = self.accepted.union(self.done);
        self.done = LegSet::NONE;
        self.failed = LegSet::NONE;
        self.error = None;
    }
}

/// The range locks of a transaction, in ascending order.
pub(super) fn lock_ranges(column: usize, parts: &[TransactionPart]) -> Vec<LockRange> {
    let locked = match defect::is(Defect::FirstPartLocked) {
        true => &parts[..1],
        false => parts,
    };
    let ranges = |part: &TransactionPart| LockRange::split(column, part.offset(), part.len());
    locked.iter().flat_map(ranges).collect()
}

/// Names a message: the slot, and enough of the order to know a late answer
/// to the slot's user before.
pub(super) fn tag_of(slot: u32, piece: &Piece) -> u64 {
    piece.order << 32 | u64::from(slot)
}
