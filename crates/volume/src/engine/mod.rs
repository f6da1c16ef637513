//! One channel's requests in flight: splits them into pieces, sends pieces to
//! legs, and puts the answers together.
//!
//! Invariants: events in, calls to the [`EngineBackend`] out; no I/O, clock, thread
//! or randomness. A change completes only when all legs that the present view
//! writes to have it. A read is only ever sent to an in-sync leg. After the
//! write set of a column changed, every change that is not complete is sent
//! again, in order of its operation, once the old messages are answered.
//! What was submitted is answered exactly once.

mod changes;
mod columns;
mod piece;
mod reads;
mod request;
mod sync_path;

use crate::limits::{PIECES_MAX, REQUEST_PIECES_MAX};
use crate::locks::LockRange;
use crate::snapshot::{LayoutSnapshot, LegSet};
use crate::status::Count;
use arrayvec::ArrayVec;
use bytes::Bytes;
use columns::ColumnState;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest, Stamp, TransactionPart};
use pagemesh_base::space::{Completion, Request, SpaceError, Token};
use piece::{Phase, Piece, PieceOp, tag_of};
use request::{Job, NextPiece};
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;

/// Unfinished requests in line that are looked at for what may go on: those
/// behind only wait longer.
const QUEUE_SCAN_MAX: usize = 16;

/// Answers of legs, in the order of their numbers.
pub(crate) type LegAnswers = ArrayVec<Result<SliceReply, SliceError>, LEGS_MAX>;

/// What an acknowledgement waits for where a leg follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AckDependency {
    NoReplication,
    /// That it is not too far behind.
    BoundedLag,
    /// That it has all that was changed before.
    FullReplication,
}

/// What the engine asks of the world around it.
pub(crate) trait EngineBackend {
    /// Whether each of these legs does a write inside the call. A write of
    /// this place is about to come.
    fn can_change_sync(&mut self, column: usize, legs: LegSet, offset: u64) -> bool;
    /// Writes to all these legs at once; only after they said they would.
    fn write_sync(
        &mut self,
        column: usize,
        legs: LegSet,
        offset: u64,
        data: &Bytes,
        stamp: Stamp,
    ) -> LegAnswers;
    /// The same for a transaction.
    fn transact_sync(
        &mut self,
        column: usize,
        legs: LegSet,
        parts: &[TransactionPart],
        stamp: Stamp,
    ) -> LegAnswers;
    /// Hands these answers in again, as those to a message with this tag.
    fn queue_answers(&mut self, column: usize, legs: LegSet, tag: u64, answers: LegAnswers);
    /// Whether the view is still the newest: if not, a leg whose answer came
    /// just now may have been left out before.
    fn is_snapshot_current(&self) -> bool;
    /// Takes a range lock if that needs no waiting.
    fn try_acquire(&mut self, range: LockRange, key: u32) -> bool;
    /// The same of several: all of them or none.
    fn try_acquire_all(&mut self, ranges: &[LockRange], key: u32) -> bool;

    /// One message to each of these legs.
    fn send(&mut self, column: usize, legs: LegSet, tag: u64, request: SliceRequest);
    /// True if held at once; else [`Engine::handle_grant`] follows.
    fn acquire(&mut self, range: LockRange, key: u32) -> bool;
    /// Of several at one moment; how many are not held yet. For each of them
    /// [`Engine::handle_grant`] follows.
    fn acquire_all(&mut self, ranges: &[LockRange], key: u32) -> u32;
    fn release(&mut self, range: LockRange, key: u32);
    /// Whether no change of this range is in flight on any channel; else
    /// [`Engine::handle_grant`] follows once those that are have ended.
    fn is_range_idle(&mut self, range: LockRange, key: u32) -> bool;
    /// A change of this range ends, and some legs may have it and others not.
    fn record_indeterminate(&mut self, range: LockRange);
    /// Keeps guests, who know no range locks, away; false, and they are not, if one is
    /// inside of an operation.
    fn try_block_direct_clients(&mut self) -> bool;
    fn unblock_direct_clients(&mut self);
    /// Whether such a change of this range has not been decided since.
    fn is_indeterminate(&self, range: LockRange) -> bool;
    /// The volume's next operation number.
    fn next_op(&mut self) -> u64;
    fn complete(&mut self, completion: Completion, after: AckDependency);
    /// A change is on all legs that are written, and its range still locked. The leg
    /// that follows gets it over the connection of this serial.
    fn replicate(&mut self, serial: u64, change: SliceRequest);
    /// The connection is of no more use; the keeper must see to the leg.
    fn lose_connection(&mut self, column: usize, leg: usize, why: String);
    /// The highest epoch that this client holds.
    fn held_epoch(&self) -> Epoch;
    /// Nothing is sent any more: a newer client has attached, or there is no session for
    /// this one.
    fn end_all(&mut self, why: &SpaceError);
    fn count(&mut self, what: Count, by: u64);
    /// A change is on all legs of the column, some of which buffer.
    fn record_acknowledged(&mut self, column: usize);
    /// What a flush of the column covers that starts now.
    fn begin_flush(&mut self, column: usize) -> u64;
    /// The column's legs have flushed.
    fn record_flushed(&mut self, column: usize, covers: u64);
    /// Whether a flush must say that what was acknowledged may be gone.
    fn must_report_loss(&mut self, column: usize) -> bool;
}

pub(crate) struct Engine {
    snapshot: Arc<LayoutSnapshot>,
    columns: Vec<ColumnState>,
    jobs: Slab<Job>,
    pieces: Slab<Piece>,
    /// Requests with pieces not yet made, in order of submission.
    queue: VecDeque<u32>,
    /// Counts pieces: orders them, and tells a slot's users apart.
    last_order: u64,
    repairs_in_flight: usize,
    /// Why nothing is sent any more.
    end_cause: Option<SpaceError>,
}

impl Engine {
    /// An engine that has yet to adopt a view.
    pub(crate) fn new() -> Engine {
        Engine {
            snapshot: Arc::new(LayoutSnapshot::empty()),
            columns: Vec::new(),
            jobs: Slab::new(),
            pieces: Slab::new(),
            queue: VecDeque::new(),
            last_order: 0,
            repairs_in_flight: 0,
            end_cause: None,
        }
    }

    /// Whether nothing is sent any more.
    pub(crate) fn is_ended(&self) -> bool {
        self.end_cause.is_some()
    }

    /// Why nothing is sent any more; none while the engine serves.
    pub(crate) fn end_cause(&self) -> Option<&SpaceError> {
        self.end_cause.as_ref()
    }

    /// Whether a change is under way that must not be abandoned.
    pub(crate) fn has_changes(&self) -> bool {
        self.columns.iter().any(|column| !column.changes.is_empty())
    }

    /// Whether every change is complete on all legs, flushed where they buffer.
    pub(crate) fn has_no_incomplete_ops(&self) -> bool {
        self.columns
            .iter()
            .all(|column| column.in_flight.is_empty())
    }

    /// Flushes what is not, of its own accord; once fenced, there is nobody to
    /// ask, and the next client has made the legs equal.
    pub(crate) fn flush_unflushed(&mut self, out: &mut impl EngineBackend) {
        if self.is_ended() {
            return;
        }
        for column in 0..self.columns.len() {
            if self.columns[column].in_flight.unflushed_count() > 0 {
                self.flush_in_background(column, out);
            }
        }
    }

    pub(crate) fn submit(&mut self, token: Token, request: Request, out: &mut impl EngineBackend) {
        if let Some(why) = &self.end_cause {
            return complete_request(out, token, Err(why.clone()));
        }
        let Some(request) = self.write_sync(token, request, out) else {
            return;
        };
        let job = match Job::new(token, request, &self.snapshot) {
            Ok(job) => job,
            Err(result) => return complete_request(out, token, result),
        };
        let Some(job) = self.transact_sync(token, job, out) else {
            return;
        };
        let number = self.jobs.insert(job) as u32;
        if !self.queue.is_empty() || !self.issue(number, out) {
            self.queue.push_back(number);
            self.advance_queue(out);
        }
    }

    /// An answer of a leg.
    pub(crate) fn handle_answer(
        &mut self,
        column: usize,
        leg: usize,
        tag: u64,
        result: Result<SliceReply, SliceError>,
        out: &mut impl EngineBackend,
    ) {
        let slot = tag as u32;
        let piece = self.pieces.get_mut(slot as usize);
        let Some(piece) = piece.filter(|it| tag_of(slot, it) == tag && it.pending.contains(leg))
        else {
            if self.columns.len() > column
                && self.columns[column].take_overdue(leg, tag)
                && let Err(error @ SliceError::Lost(_)) = &result
            {
                self.lose_leg(column, leg, error.to_string(), out);
            }
            return;
        };
        piece.pending.remove(leg);
        if let Err(error @ SliceError::Lost(_)) = &result {
            // Counted as pending no more, whatever it was.
            let why = error.to_string();
            piece.pending.add(leg);
            return self.lose_leg(column, leg, why, out);
        }
        if let Err(SliceError::StaleEpoch { current }) = &result
            && *current > out.held_epoch()
        {
            return self.fence(out);
        }
        if piece.is_change() {
            self.columns[column].pending_answers -= 1;
            self.handle_change_answer(slot, leg, result, out);
        } else {
            self.columns[column].reads_by_leg[leg] -= 1;
            self.handle_read_answer(slot, leg, result, out);
        }
    }

    /// A range lock that had to wait is held now, or the changes that a read
    /// found in flight have ended.
    pub(crate) fn handle_grant(&mut self, key: u32, out: &mut impl EngineBackend) {
        let Some(piece) = self.pieces.get_mut(key as usize) else {
            return;
        };
        match piece.phase {
            Phase::Locking => {
                piece.pending_locks -= 1;
                if piece.pending_locks == 0 {
                    self.start_change(key, out);
                }
            }
            Phase::AwaitingChanges => self.resume_read(key, out),
            _ => {}
        }
    }

    /// Another client attached: everything fails.
    pub(crate) fn fence(&mut self, out: &mut impl EngineBackend) {
        self.end(SpaceError::Fenced, out);
    }

    /// Everything fails, from now on.
    pub(crate) fn end(&mut self, why: SpaceError, out: &mut impl EngineBackend) {
        if self.is_ended() {
            return;
        }
        for (slot, piece) in &self.pieces {
            piece.record_if_indeterminate(out);
            piece.release(slot as u32, out);
        }
        self.pieces.clear();
        self.queue.clear();
        for column in &mut self.columns {
            column.clear();
        }
        for job in self.jobs.drain() {
            if let Some(token) = job.token {
                complete_request(out, token, Err(why.clone()));
            }
        }
        out.end_all(&why);
        self.end_cause = Some(why);
    }

    /// Makes pieces of a request; false if some are left for later.
    fn issue(&mut self, number: u32, out: &mut impl EngineBackend) -> bool {
        // Pieces may complete while later ones are made.
        self.jobs[number as usize].is_issuing = true;
        let all = self.issue_pieces(number, out);
        if let Some(job) = self.jobs.get_mut(number as usize) {
            job.is_issuing = false;
            if all && job.in_flight == 0 {
                self.finish_job(number, out);
            }
        }
        all
    }

    fn issue_pieces(&mut self, number: u32, out: &mut impl EngineBackend) -> bool {
        loop {
            let full = self.pieces.len() >= PIECES_MAX;
            // A newer client may have been noticed meanwhile.
            let Some(job) = self.jobs.get_mut(number as usize) else {
                return true;
            };
            if full || job.in_flight >= REQUEST_PIECES_MAX {
                return job.is_issued();
            }
            let NextPiece::Piece(place, act, last) = job.next_piece(&self.snapshot) else {
                return true;
            };
            job.in_flight += 1;
            let mut piece = Piece::new(number, place, act, job.durable);
            self.last_order += 1;
            piece.order = self.last_order;
            let slot = self.pieces.insert(piece) as u32;
            self.start_piece(slot, out);
            if last {
                return true;
            }
        }
    }

    fn start_piece(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &self.pieces[slot as usize];
        if !piece.is_change() {
            return self.start_read(slot, out);
        }
        let (column, awaited) = (piece.column, piece.acquire(slot, out));
        let piece = &mut self.pieces[slot as usize];
        piece.pending_locks = awaited;
        self.columns[column].add_change(piece, slot);
        if awaited == 0 {
            self.start_change(slot, out);
        }
    }

    /// Lets requests in line go on, those first that came first; what overlaps
    /// an earlier one waits for it.
    fn advance_queue(&mut self, out: &mut impl EngineBackend) {
        let mut at = 0;
        while at < self.queue.len().min(QUEUE_SCAN_MAX) && self.pieces.len() < PIECES_MAX {
            let number = self.queue[at];
            let job = &self.jobs[number as usize];
            let mut earlier = self.queue.iter().take(at);
            if earlier.any(|&other| self.jobs[other as usize].conflicts(job)) {
                at += 1;
                continue;
            }
            if self.issue(number, out) {
                self.queue.retain(|&other| other != number);
            } else {
                at += 1;
            }
        }
    }

    /// A piece has come to its end.
    fn finish_piece(
        &mut self,
        slot: u32,
        result: Result<SliceReply, SpaceError>,
        out: &mut impl EngineBackend,
    ) {
        let piece = self.pieces.remove(slot as usize);
        if piece.is_change() {
            self.columns[piece.column].pending_answers -= piece.pending.len();
            self.columns[piece.column].remove_change(&piece, &mut self.pieces);
            piece.release(slot, out);
        }
        let column = piece.column;
        let was_change = piece.is_change();
        if let PieceOp::Repair { .. } = piece.op_kind {
            self.repairs_in_flight -= 1;
            out.unblock_direct_clients();
        } else if let Some(job) = self.jobs.get_mut(piece.job as usize) {
            job.in_flight -= 1;
            if job.token.is_none() {
                self.columns[column].background_flush = false;
            }
            match result {
                Ok(reply) => job.add_reply(&piece, reply),
                Err(error) => job.fail(error),
            }
            if job.in_flight == 0 && !job.is_issuing && job.is_issued() {
                self.finish_job(piece.job, out);
            }
        }
        if was_change && !self.columns[column].trailing_reads.is_empty() {
            self.restart_trailing_reads(column, out);
        }
        if !self.queue.is_empty() {
            self.advance_queue(out);
        }
    }

    fn finish_job(&mut self, number: u32, out: &mut impl EngineBackend) {
        self.queue.retain(|&other| other != number);
        let job = self.jobs.remove(number as usize);
        if let Some(token) = job.token {
            let after = job.ack_dependency();
            let result = job.into_result();
            let after = match result {
                Ok(_) => after,
                Err(_) => AckDependency::NoReplication,
            };
            out.complete(Completion { token, result }, after);
        }
    }

    /// Has the leg that follows, if there is one, get a change later.
    fn replicate(
        &self,
        column: usize,
        out: &mut impl EngineBackend,
        change: impl FnOnce() -> SliceRequest,
    ) {
        match self.snapshot.columns[column].replica_serial {
            0 => {}
            serial => out.replicate(serial, change()),
        }
    }
}

fn complete_request(
    out: &mut impl EngineBackend,
    token: Token,
    result: Result<pagemesh_base::space::Reply, SpaceError>,
) {
    out.complete(Completion { token, result }, AckDependency::NoReplication);
}

/// A change of one piece is done.
fn acknowledge(out: &mut impl EngineBackend, token: Token, durable: bool) {
    let result = Ok(pagemesh_base::space::Reply::Done);
    out.complete(Completion { token, result }, change_dependency(durable));
}

fn change_dependency(durable: bool) -> AckDependency {
    match durable {
        true => AckDependency::FullReplication,
        false => AckDependency::BoundedLag,
    }
}
