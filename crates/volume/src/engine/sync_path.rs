//! The engine's part of a change that all legs make inside the call of the client: whether it may
//! be sent at once, and the piece that it becomes if it could not be completed there.
//!
//! Invariants: a change is sent so only when the piece would be sent at once and no leg buffers. If
//! a leg fails, or the volume's snapshot changes meanwhile, the change goes on as a piece that was
//! just sent, with the same lock and number. The engine handles its answers as it does for any piece.

use super::changes::expect_answers;
use super::piece::{Phase, Piece, tag_of};
use super::request::{Job, NextPiece};
use super::{Engine, EngineBackend};
use crate::snapshot::{ColumnExtent, LegSet};
use pagemesh_base::slice::Stamp;
use pagemesh_base::space::{Request, Token};
use pagemesh_base::tier_hint::TierHint;

/// A change that may be sent at once.
#[derive(Clone, Copy)]
pub(crate) struct SyncChange {
    pub place: ColumnExtent,
    /// The legs that must have it.
    pub legs: LegSet,
    /// The slot that a piece would get. Range locks belong to it.
    pub slot: u32,
}

impl Engine {
    /// A write of these bytes of the volume. None if it is not one piece, or may not be sent at
    /// once.
    pub(crate) fn sync_write(&self, offset: u64, len: u64) -> Option<SyncChange> {
        let end = offset.checked_add(len)?;
        let place = self.snapshot.atomic_extent(offset, end)?;
        if place.len != len {
            return None;
        }
        self.sync_change(place)
    }

    /// A change at this place. None if it must wait, or if a leg buffers.
    pub(crate) fn sync_change(&self, place: ColumnExtent) -> Option<SyncChange> {
        if self.is_ended() {
            return None;
        }
        let column = &self.columns[place.column];
        let waits = !self.queue.is_empty() || !column.is_open() || !column.flush_legs().is_empty();
        (!waits).then(|| SyncChange {
            place,
            legs: column.written,
            slot: self.pieces.vacant_key() as u32,
        })
    }

    /// The stamp of a new operation, which holds its range lock. None: it must wait.
    pub(crate) fn stamp(&self, column: usize, out: &mut impl EngineBackend) -> Option<Stamp> {
        let epoch = out.stamp_epoch(self.snapshot.epoch)?;
        let op = out.next_op();
        Some(Stamp {
            epoch,
            op,
            open_ops: self.columns[column].in_flight.open_distance(op),
        })
    }

    /// Inserts the piece of a write that was sent with this stamp. Returns its tag.
    pub(crate) fn insert_sent_write(
        &mut self,
        token: Token,
        (request, hint): (Request, TierHint),
        stamp: Stamp,
        slot: u32,
    ) -> u64 {
        let job = Job::new(token, request, None, &self.snapshot);
        let mut job = job.unwrap_or_else(|_| unreachable!("it has a place in the volume"));
        job.hint = hint;
        self.insert_sent(job, stamp, slot)
    }

    /// Inserts the piece of a change that was sent with this stamp. Returns its tag.
    pub(crate) fn insert_sent(&mut self, mut job: Job, stamp: Stamp, slot: u32) -> u64 {
        let NextPiece::Piece(place, act, true) = job.next_piece(&self.snapshot) else {
            unreachable!("it is one piece");
        };
        job.in_flight = 1;
        let (durable, hint) = (job.durable, job.hint);
        let number = self.jobs.insert(job) as u32;
        let mut piece = Piece::new(number, place, act, durable);
        piece.hint = hint;
        self.last_order += 1;
        piece.order = self.last_order;
        let column = &mut self.columns[place.column];
        column.add_change(&mut piece, slot);
        column.in_flight.insert(stamp.op);
        (piece.op, piece.epoch) = (stamp.op, stamp.epoch);
        piece.layout_epoch = self.snapshot.epoch;
        piece.phase = Phase::Sent;
        let legs = column.written;
        expect_answers(&mut piece, column, legs);
        let tag = tag_of(slot, &piece);
        let inserted = self.pieces.insert(piece);
        assert_eq!(inserted, slot as usize, "nothing came in between");
        tag
    }
}
