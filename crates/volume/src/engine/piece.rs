//! A piece: the part of a request that lies in one column.

use super::Outbox;
use crate::locks::LockRange;
use crate::view::{Mask, Place};
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{Part, SliceError, SliceReply};

pub(super) enum Act {
    Read,
    Extents,
    Write(Bytes),
    Clear,
    /// Parts of one column in ascending order. The piece reaches from the first
    /// to the last, and has the locks of the parts alone.
    Transact(Vec<Part>),
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
    Held,
    Sent,
    /// A read that has its answer, which may show a change in flight: it waits
    /// for that to be everywhere.
    Watching,
    /// Written everywhere; a flush makes it durable.
    Flushing,
}

pub(super) struct Piece {
    pub job: u32,
    pub act: Act,
    pub phase: Phase,
    pub durable: bool,
    pub column: usize,
    pub offset: u64,
    pub len: u64,
    /// Its first byte in the volume.
    pub at: u64,
    /// Of submission.
    pub order: u64,
    /// Range locks that it does not hold yet.
    pub awaited: u32,
    /// Zero until it is first sent.
    pub op: u64,
    pub epoch: Epoch,
    /// The column's version when it was last sent.
    pub version: u32,
    pub pending: Mask,
    pub done: Mask,
    /// Those that took it when it was sent before: they hold it, whatever they
    /// say to its being sent again.
    pub held: Mask,
    pub failed: Mask,
    pub error: Option<SliceError>,
    /// What a read was answered.
    pub answer: Option<SliceReply>,
    /// The window's number of the flush it waits for.
    pub flush: u64,
    /// What the volume knows this flush to cover.
    pub covers: u64,
    /// Its place in the column's list of changes.
    pub listed: usize,
}

impl Piece {
    pub(super) fn new(job: u32, place: Place, act: Act, durable: bool) -> Piece {
        Piece {
            job,
            act,
            phase: Phase::Locking,
            durable,
            column: place.column,
            offset: place.offset,
            len: place.len,
            at: place.at,
            order: 0,
            awaited: 0,
            op: 0,
            epoch: Epoch(0),
            version: 0,
            pending: Mask::NONE,
            done: Mask::NONE,
            held: Mask::NONE,
            failed: Mask::NONE,
            error: None,
            answer: None,
            flush: 0,
            covers: 0,
            listed: usize::MAX,
        }
    }

    /// Whether it is sent again after a leg is lost, rather than elsewhere.
    pub(super) fn is_change(&self) -> bool {
        !matches!(self.act, Act::Read | Act::Extents)
    }

    /// Gets in line for its range locks; how many it does not hold yet.
    pub(super) fn acquire(&self, slot: u32, out: &mut impl Outbox) -> u32 {
        match &self.act {
            Act::Write(_) | Act::Clear | Act::Repair { .. } => {
                u32::from(!out.acquire(self.extent(), slot))
            }
            Act::Transact(parts) => out.acquire_all(&lock_ranges(self.column, parts), slot),
            Act::Read | Act::Extents | Act::Flush => 0,
        }
    }

    /// Gives its range locks, or its places in their lines, back.
    pub(super) fn release(&self, slot: u32, out: &mut impl Outbox) {
        match &self.act {
            Act::Write(_) | Act::Clear | Act::Repair { .. } => out.release(self.extent(), slot),
            Act::Transact(parts) => {
                for range in lock_ranges(self.column, parts) {
                    out.release(range, slot);
                }
            }
            Act::Read | Act::Extents | Act::Flush => {}
        }
    }

    /// Whether it may only show what is on every leg.
    pub(super) fn is_held_back(&self) -> bool {
        matches!(self.act, Act::Read) && !defect::is(Defect::ReadNotHeld)
    }

    /// It ends, and what it was to change may be changed on some legs only.
    pub(super) fn note_if_undecided(&self, out: &mut impl Outbox) {
        if self.op == 0 {
            return;
        }
        match &self.act {
            Act::Write(_) | Act::Clear => out.note_undecided(self.extent()),
            Act::Transact(parts) => {
                for range in lock_ranges(self.column, parts) {
                    out.note_undecided(range);
                }
            }
            // What a repair writes is what all others hold.
            Act::Repair { .. } | Act::Read | Act::Extents | Act::Flush => {}
        }
    }

    /// What it reads, as changes lock it.
    pub(super) fn extent(&self) -> LockRange {
        LockRange::new(self.column, self.offset, self.len)
    }

    pub(super) fn overlaps(&self, offset: u64, len: u64) -> bool {
        let end = offset + len;
        let meets = |from: u64, len: u64| from < end && offset < from + len;
        match &self.act {
            Act::Transact(parts) => parts.iter().any(|part| meets(part.offset(), part.len())),
            _ => meets(self.offset, self.len),
        }
    }

    pub(super) fn forget_answers(&mut self) {
        self.held = self.held.or(self.done);
        self.done = Mask::NONE;
        self.failed = Mask::NONE;
        self.error = None;
    }
}

/// The range locks of a transaction, in ascending order.
pub(super) fn lock_ranges(column: usize, parts: &[Part]) -> Vec<LockRange> {
    let locked = match defect::is(Defect::FirstPartLocked) {
        true => &parts[..1],
        false => parts,
    };
    let ranges = |part: &Part| LockRange::split(column, part.offset(), part.len());
    locked.iter().flat_map(ranges).collect()
}

/// Names a message: the slot, and enough of the order to know a late answer
/// to the slot's user before.
pub(super) fn tag_of(slot: u32, piece: &Piece) -> u64 {
    piece.order << 32 | u64::from(slot)
}
