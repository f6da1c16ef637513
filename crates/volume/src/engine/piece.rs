//! A piece: the part of a request that lies in one column.

use super::EngineBackend;
use super::timing::PieceTimes;
use crate::engine::locks::LockRange;
use crate::snapshot::{ColumnExtent, LegSet};
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{ServiceTime, SliceError, SliceReply, TransactionPart};
use pagemesh_base::tier_hint::TierHint;

pub(super) enum PieceOp {
    Read,
    Extents,
    Write(Bytes),
    Clear,
    /// Parts of one column in ascending order. The piece spans from the first part to the last,
    /// and locks only the parts.
    Transact(Vec<TransactionPart>),
    Flush,
    /// Rewrites a damaged page on one leg, with the data of another leg.
    Repair {
        bad: usize,
        data: Option<Bytes>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Waits for its range locks.
    Locking,
    /// Waits for its column, or for an earlier change.
    Queued,
    Sent,
    /// A read with an answer that may show a change in flight. It waits until that change has
    /// ended on all legs.
    AwaitingChanges,
}

pub(super) struct Piece {
    pub job: u32,
    pub op_kind: PieceOp,
    pub phase: Phase,
    pub durable: bool,
    pub hint: TierHint,
    pub column: usize,
    pub offset: u64,
    pub len: u64,
    /// The piece's first byte in the volume.
    pub volume_offset: u64,
    /// The order of submission.
    pub order: u64,
    /// The number of range locks that it does not hold yet.
    pub pending_locks: u32,
    /// The operation number; zero until it is first sent.
    pub op: u64,
    /// The epoch of its stamp.
    pub epoch: Epoch,
    /// The epoch of the layout under which it was last sent.
    pub layout_epoch: Epoch,
    /// The column's version when it was last sent.
    pub version: u32,
    pub pending: LegSet,
    pub done: LegSet,
    /// The legs that accepted it on an earlier send. They hold it, whether or not they accept
    /// it again.
    pub accepted: LegSet,
    pub failed: LegSet,
    pub error: Option<SliceError>,
    /// The answer to a read.
    pub answer: Option<SliceReply>,
    /// The number of its flush in the in-flight window.
    pub flush_number: u64,
    /// The number of acknowledged changes that its flush covers.
    pub flush_covers: u64,
    /// Its index in the column's list of changes.
    pub change_index: usize,
    /// None if the request is not timed.
    pub times: Option<PieceTimes>,
}

impl Piece {
    pub(super) fn new(job: u32, place: ColumnExtent, act: PieceOp, durable: bool) -> Piece {
        Piece {
            job,
            op_kind: act,
            phase: Phase::Locking,
            durable,
            hint: TierHint::None,
            column: place.column,
            offset: place.offset,
            len: place.len,
            volume_offset: place.volume_offset,
            order: 0,
            pending_locks: 0,
            op: 0,
            epoch: Epoch(0),
            layout_epoch: Epoch(0),
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
            times: None,
        }
    }

    pub(super) fn record_sent(&mut self, out: &mut impl EngineBackend) {
        if let Some(times) = &mut self.times {
            times.record_sent(out.now());
        }
    }

    /// Records an answer that the piece waited for: any answer of a read, the last one of a change.
    pub(super) fn record_answer(&mut self, service: ServiceTime, out: &mut impl EngineBackend) {
        let is_last = self.pending.is_empty() || !self.is_change();
        if let Some(times) = self.times.as_mut().filter(|_| is_last) {
            times.record_answer(out.now(), service);
        }
    }

    /// Whether it is a change. A change is sent again after a leg is lost; a read goes to
    /// another leg.
    pub(super) fn is_change(&self) -> bool {
        !matches!(self.op_kind, PieceOp::Read | PieceOp::Extents)
    }

    /// Queues for its range locks. Returns the number of locks that it does not hold yet.
    pub(super) fn acquire(&self, slot: u32, out: &mut impl EngineBackend) -> u32 {
        match &self.op_kind {
            PieceOp::Write(_) | PieceOp::Clear | PieceOp::Repair { .. } => {
                u32::from(!out.acquire(self.lock_range(), slot))
            }
            PieceOp::Transact(parts) => out.acquire_all(&lock_ranges(self.column, parts), slot),
            PieceOp::Read | PieceOp::Extents | PieceOp::Flush => 0,
        }
    }

    /// Releases its range locks, or leaves their queues.
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

    /// Whether its answer may only contain data that is on every leg.
    pub(super) fn needs_stable_data(&self) -> bool {
        matches!(self.op_kind, PieceOp::Read) && !defect::is(Defect::ReadNotDelayed)
    }

    /// Records the range as indeterminate, because the piece ends and only some legs may have
    /// its change.
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
            // A repair writes the same data that the other legs hold.
            PieceOp::Repair { .. } | PieceOp::Read | PieceOp::Extents | PieceOp::Flush => {}
        }
    }

    /// The range that it reads, in the pages that changes lock.
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
pub(crate) fn lock_ranges(column: usize, parts: &[TransactionPart]) -> Vec<LockRange> {
    let locked = if defect::is(Defect::FirstPartLocked) {
        &parts[..1]
    } else {
        parts
    };
    let ranges = |part: &TransactionPart| LockRange::split(column, part.offset(), part.len());
    locked.iter().flat_map(ranges).collect()
}

/// The tag of a piece's messages: the slot, and enough of the order to detect a late answer to
/// an earlier piece in the slot.
pub(super) fn tag_of(slot: u32, piece: &Piece) -> u64 {
    piece.order << 32 | u64::from(slot)
}
