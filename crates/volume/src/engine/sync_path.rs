//! The fast path of a write or a transaction: one piece that all legs make inside one call. It
//! needs no entry in any table.
//!
//! Invariants: it is used only when the piece would be sent at once and no leg buffers. If a
//! leg fails, or the volume's snapshot changes meanwhile, the change goes on as a piece that
//! was just sent, with the same lock and number. Its answers are then handled like the answers of
//! any piece.

use super::changes::expect_answers;
use super::piece::{Phase, Piece, lock_ranges, tag_of};
use super::request::{Job, NextPiece};
use super::{Engine, EngineBackend, acknowledge};
use crate::engine::locks::LockRange;
use crate::snapshot::{ColumnExtent, LegSet};
use bytes::Bytes;
use pagemesh_base::slice::{SliceRequest, Stamp};
use pagemesh_base::space::{Request, Token};

impl Engine {
    /// Makes the write on the fast path, or returns it for the normal path.
    pub(super) fn write_sync(
        &mut self,
        token: Token,
        request: Request,
        out: &mut impl EngineBackend,
    ) -> Option<Request> {
        let Request::Write {
            offset,
            data,
            durable,
        } = &request
        else {
            return Some(request);
        };
        let Some(place) = self.single_extent(*offset, data) else {
            return Some(request);
        };
        let Some(legs) = self.sync_legs(place, out) else {
            return Some(request);
        };
        // The lock belongs to the slot that a piece would get.
        let slot = self.pieces.vacant_key() as u32;
        let range = LockRange::new(place.column, place.offset, place.len);
        if !out.try_acquire(range, slot) {
            return Some(request);
        }
        let stamp = self.next_stamp(place.column, out);
        let answers = out.write_sync(place.column, legs, place.offset, data, stamp);
        if answers.iter().all(Result::is_ok) && out.is_snapshot_current() {
            self.replicate(place.column, out, || SliceRequest::Write {
                offset: place.offset,
                data: data.clone(),
                stamp,
            });
            out.release(range, slot);
            acknowledge(out, token, *durable);
            return None;
        }
        let job = Job::new(token, request, &self.snapshot);
        let job = job.unwrap_or_else(|_| unreachable!("it has a place in the volume"));
        let tag = self.insert_sent(job, stamp.op, slot);
        out.queue_answers(place.column, legs, tag, answers);
        None
    }

    /// Makes a transaction on the fast path, or returns the job for the normal path.
    pub(super) fn transact_sync(
        &mut self,
        token: Token,
        job: Job,
        out: &mut impl EngineBackend,
    ) -> Option<Job> {
        let Some((place, parts)) = job.transaction_parts() else {
            return Some(job);
        };
        let Some(legs) = self.sync_legs(place, out) else {
            return Some(job);
        };
        let slot = self.pieces.vacant_key() as u32;
        let ranges = lock_ranges(place.column, parts);
        if !out.try_acquire_all(&ranges, slot) {
            return Some(job);
        }
        let stamp = self.next_stamp(place.column, out);
        let answers = out.transact_sync(place.column, legs, parts, stamp);
        if answers.iter().all(Result::is_ok) && out.is_snapshot_current() {
            self.replicate(place.column, out, || SliceRequest::Transact {
                parts: parts.to_vec(),
                stamp,
            });
            for range in ranges {
                out.release(range, slot);
            }
            acknowledge(out, token, job.durable);
            return None;
        }
        let tag = self.insert_sent(job, stamp.op, slot);
        out.queue_answers(place.column, legs, tag, answers);
        None
    }

    /// The written legs, if the change can be sent at once, no leg buffers, and all legs make
    /// it inside one call.
    fn sync_legs(&self, place: ColumnExtent, out: &mut impl EngineBackend) -> Option<LegSet> {
        let column = &self.columns[place.column];
        let legs = column.written;
        let waits = !self.queue.is_empty() || !column.is_open() || !column.flush_legs().is_empty();
        (!waits && out.can_change_sync(place.column, legs, place.offset)).then_some(legs)
    }

    /// The caller holds the range lock.
    fn next_stamp(&self, column: usize, out: &mut impl EngineBackend) -> Stamp {
        let op = out.next_op();
        Stamp {
            epoch: self.snapshot.epoch,
            op,
            open_ops: self.columns[column].in_flight.open_distance(op),
        }
    }

    /// The place of a write that is one piece.
    fn single_extent(&self, offset: u64, data: &Bytes) -> Option<ColumnExtent> {
        let len = data.len() as u64;
        let place = self
            .snapshot
            .atomic_extent(offset, offset.checked_add(len)?)?;
        (place.len == len).then_some(place)
    }

    /// Inserts the piece of a change that was sent with this number. Returns its tag.
    fn insert_sent(&mut self, mut job: Job, op: u64, slot: u32) -> u64 {
        let NextPiece::Piece(place, act, true) = job.next_piece(&self.snapshot) else {
            unreachable!("it is one piece");
        };
        job.in_flight = 1;
        let durable = job.durable;
        let number = self.jobs.insert(job) as u32;
        let mut piece = Piece::new(number, place, act, durable);
        self.last_order += 1;
        piece.order = self.last_order;
        let column = &mut self.columns[place.column];
        column.add_change(&mut piece, slot);
        column.in_flight.insert(op);
        piece.op = op;
        piece.epoch = self.snapshot.epoch;
        piece.phase = Phase::Sent;
        let legs = column.written;
        expect_answers(&mut piece, column, legs);
        let tag = tag_of(slot, &piece);
        let inserted = self.pieces.insert(piece);
        assert_eq!(inserted, slot as usize, "nothing came in between");
        tag
    }
}
