//! One channel's requests in flight. The engine splits them into pieces, sends the pieces to
//! legs, and combines the answers.
//!
//! Invariants:
//! - Events come in, calls to the [`EngineBackend`] go out. The engine has no I/O, clock,
//!   thread or randomness.
//! - A change completes only when all written legs of the present snapshot have it.
//! - A read is only ever sent to an in-sync leg.
//! - After the write set of a column changed, every incomplete change is sent again, in order
//!   of its operation, once the old messages are answered.
//! - Every submitted request is answered exactly once.

mod changes;
mod columns;
pub(crate) mod hedge;
mod in_flight_window;
pub(crate) mod locks;
mod piece;
mod reads;
mod request;
mod sync_path;
pub(crate) mod timing;

use crate::engine::locks::LockRange;
use crate::limits::{PIECES_MAX, REQUEST_PIECES_MAX};
use crate::snapshot::{LayoutSnapshot, LegSet};
use crate::status::Count;
use arrayvec::ArrayVec;
use columns::ColumnState;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::slice::{ServiceTime, SliceError, SliceReply, SliceRequest};
use pagemesh_base::space::{Completion, Request, SpaceError, Token};
use pagemesh_base::tier_hint::TierHint;
pub(crate) use piece::lock_ranges;
use piece::{Phase, Piece, PieceOp, tag_of};
use request::NextPiece;
pub(crate) use request::{Job, join_extents, written_bytes};
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
pub(crate) use sync_path::SyncChange;
use timing::{OpRecord, OpTimes, PieceTimes};

/// The number of unfinished requests at the head of the queue that are checked for progress.
/// Later ones only wait longer.
const QUEUE_SCAN_MAX: usize = 16;

/// Answers of legs, in the order of the leg numbers.
pub(crate) type LegAnswers = ArrayVec<Result<SliceReply, SliceError>, LEGS_MAX>;

/// The condition for an acknowledgement if there is an asynchronous replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AckDependency {
    NoReplication,
    /// The replica is not too far behind.
    BoundedLag,
    /// The replica has all earlier changes.
    FullReplication,
}

/// The calls of the engine to its environment.
pub(crate) trait EngineBackend {
    /// Whether the engine's snapshot is still the newest. If not, the leg of the last answer
    /// may have been left out before it answered.
    fn is_snapshot_current(&self) -> bool;
    /// The hint of the messages that follow.
    fn set_hint(&mut self, hint: TierHint);
    /// Sends one message to each of these legs.
    fn send(&mut self, column: usize, legs: LegSet, tag: u64, request: SliceRequest);
    /// Queues for a range lock; true if it is held at once. If not, a call of
    /// [`Engine::handle_grant`] comes later.
    fn acquire(&mut self, range: LockRange, key: u32) -> bool;
    /// Queues for several range locks atomically. Returns the number of locks that are not held
    /// yet. A call of [`Engine::handle_grant`] comes later for each of them.
    fn acquire_all(&mut self, ranges: &[LockRange], key: u32) -> u32;
    fn release(&mut self, range: LockRange, key: u32);
    /// Whether no change of this range is in flight on any channel. If one is, a call of
    /// [`Engine::handle_grant`] comes once all present changes have ended.
    fn is_range_idle(&mut self, range: LockRange, key: u32) -> bool;
    /// Records that a change of this range ends, and that some legs may have it and others not.
    fn record_indeterminate(&mut self, range: LockRange);
    /// Blocks direct clients, because they take no range locks. False, without blocking them,
    /// if a direct operation is in progress.
    fn try_block_direct_clients(&mut self) -> bool;
    fn unblock_direct_clients(&mut self);
    /// Whether this range overlaps an indeterminate change.
    fn is_indeterminate(&self, range: LockRange) -> bool;
    /// The volume's next operation number.
    fn next_op(&mut self) -> u64;
    /// The epoch of a change under a layout of this epoch. The caller holds its range lock. None: the change waits for
    /// [`Engine::resume_held`].
    fn stamp_epoch(&self, layout: Epoch) -> Option<Epoch>;
    /// Completes a request. The record is for the channel's meter; none for a request that was
    /// never started, or is not counted.
    fn complete(&mut self, completion: Completion, after: AckDependency, record: Option<OpRecord>);
    /// The time by the channel's clock. Only requests with [`OpTimes`] need it.
    fn now(&mut self) -> Instant;
    /// Queues a change for the asynchronous replica with this connection serial. The change is
    /// on all written legs, and its range is still locked.
    fn replicate(&mut self, serial: u64, change: SliceRequest);
    /// Drops a connection that is of no more use. The controller must handle the leg.
    fn lose_connection(&mut self, column: usize, leg: usize, why: String);
    /// The highest epoch that this client holds.
    fn held_epoch(&self) -> Epoch;
    /// Ends the channel: nothing is sent any more. Another client has attached, or there is no
    /// session for this channel.
    fn end_all(&mut self, why: &SpaceError);
    fn count(&mut self, what: Count, by: u64);
    /// Records that a change is on all legs of the column, some of which buffer.
    fn record_acknowledged(&mut self, column: usize);
    /// Returns the number of acknowledged changes that a flush of the column covers if it
    /// starts now.
    fn begin_flush(&mut self, column: usize) -> u64;
    /// Records that the column's legs have flushed.
    fn record_flushed(&mut self, column: usize, covers: u64);
    /// Whether a flush must report that acknowledged writes may be lost.
    fn must_report_loss(&mut self, column: usize) -> bool;
}

pub(crate) struct Engine {
    snapshot: Arc<LayoutSnapshot>,
    columns: Vec<ColumnState>,
    jobs: Slab<Job>,
    pieces: Slab<Piece>,
    /// Requests with pieces that are not made yet, in order of submission.
    queue: VecDeque<u32>,
    /// Changes that wait for their stamp, with their order: at most [`PIECES_MAX`], and each once more after each change of
    /// the layout meanwhile.
    held: Vec<(u32, u64)>,
    /// Counts pieces. It orders them, and distinguishes successive pieces in one slot.
    last_order: u64,
    repairs_in_flight: usize,
    /// The reason for which nothing is sent any more.
    end_cause: Option<SpaceError>,
}

impl Engine {
    /// An engine without a snapshot.
    pub(crate) fn new() -> Engine {
        Engine {
            snapshot: Arc::new(LayoutSnapshot::empty()),
            columns: Vec::new(),
            jobs: Slab::new(),
            pieces: Slab::new(),
            queue: VecDeque::new(),
            held: Vec::new(),
            last_order: 0,
            repairs_in_flight: 0,
            end_cause: None,
        }
    }

    /// Whether nothing is sent any more.
    pub(crate) fn is_ended(&self) -> bool {
        self.end_cause.is_some()
    }

    /// The reason for which nothing is sent any more; none while the engine serves.
    pub(crate) fn end_cause(&self) -> Option<&SpaceError> {
        self.end_cause.as_ref()
    }

    /// Whether a change is in flight that must not be abandoned.
    pub(crate) fn has_changes(&self) -> bool {
        self.columns.iter().any(|column| !column.changes.is_empty())
    }

    /// Whether every change is complete on all legs, flushed where they buffer.
    pub(crate) fn has_no_incomplete_ops(&self) -> bool {
        self.columns
            .iter()
            .all(|column| column.in_flight.is_empty())
    }

    /// Whether a change of an epoch before this one was sent, and has not ended on all legs.
    pub(crate) fn has_changes_before(&self, epoch: Epoch) -> bool {
        let slots = self.columns.iter().flat_map(|column| &column.changes);
        let mut pieces = slots.map(|&slot| &self.pieces[slot as usize]);
        pieces.any(|piece| piece.op != 0 && piece.epoch < epoch)
    }

    /// Whether a change was sent under another layout than the one of this epoch, and not under this one.
    pub(crate) fn has_changes_of_other_layout(&self, layout: Epoch) -> bool {
        let slots = self.columns.iter().flat_map(|column| &column.changes);
        let mut pieces = slots.map(|&slot| &self.pieces[slot as usize]);
        pieces.any(|piece| piece.op != 0 && piece.layout_epoch != layout)
    }

    /// Flushes unflushed changes without a request of the client. A fenced engine does nothing:
    /// the next client has made the legs equal.
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

    /// Checks a request. None: it is complete, because it failed or has nothing to do.
    pub(crate) fn new_job(
        &self,
        token: Token,
        request: Request,
        times: Option<OpTimes>,
        out: &mut impl EngineBackend,
    ) -> Option<Job> {
        if let Some(why) = &self.end_cause {
            complete_request(out, token, Err(why.clone()));
            return None;
        }
        match Job::new(token, request, times, &self.snapshot) {
            Ok(job) => Some(job),
            Err(result) => {
                complete_request(out, token, result);
                None
            }
        }
    }

    /// Makes the pieces of a job, now or after earlier jobs that it overlaps.
    pub(crate) fn start_job(&mut self, job: Job, out: &mut impl EngineBackend) {
        let number = self.jobs.insert(job) as u32;
        if !self.queue.is_empty() || !self.issue(number, out) {
            self.queue.push_back(number);
            self.advance_queue(out);
        }
    }

    /// Handles an answer of a leg.
    pub(crate) fn handle_answer(
        &mut self,
        column: usize,
        leg: usize,
        tag: u64,
        result: Result<SliceReply, SliceError>,
        service: ServiceTime,
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
            // `lose_leg` removes pending answers from the counts, so this one must be pending
            // again.
            let why = error.to_string();
            piece.pending.add(leg);
            return self.lose_leg(column, leg, why, out);
        }
        if let Err(SliceError::StaleEpoch { current }) = &result
            && *current > out.held_epoch()
        {
            return self.fence(out);
        }
        piece.record_answer(service, out);
        if piece.is_change() {
            self.columns[column].pending_answers -= 1;
            self.handle_change_answer(slot, leg, result, out);
        } else {
            self.columns[column].reads_by_leg[leg] -= 1;
            self.handle_read_answer(slot, leg, result, out);
        }
    }

    /// Goes on with a piece after one of its range locks was granted, or after the changes that
    /// its read found in flight have ended.
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

    /// Fails all requests, because another client has attached.
    pub(crate) fn fence(&mut self, out: &mut impl EngineBackend) {
        self.end(SpaceError::Fenced, out);
    }

    /// Fails all requests, from now on.
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
        self.held.clear();
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
            // The engine may have been fenced meanwhile.
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
            let times = job.times.map(|_| PieceTimes::new(out.now()));
            let mut piece = Piece::new(number, place, act, job.durable);
            piece.times = times;
            piece.hint = job.hint;
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

    /// Makes pieces of queued requests in order. A request waits for earlier ones that it
    /// overlaps.
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

    /// Ends a piece.
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
            if let Some(times) = &mut job.times {
                times.last_piece = piece.times;
            }
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
            let record = job.record();
            let result = job.into_result();
            let after = match result {
                Ok(_) => after,
                Err(_) => AckDependency::NoReplication,
            };
            out.complete(Completion { token, result }, after, record);
        }
    }

    /// Queues a change for the asynchronous replica, if there is one.
    pub(crate) fn replicate(
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
    out.complete(
        Completion { token, result },
        AckDependency::NoReplication,
        None,
    );
}

/// Acknowledges a change of one piece.
pub(crate) fn acknowledge(
    out: &mut impl EngineBackend,
    token: Token,
    durable: bool,
    record: OpRecord,
) {
    let result = Ok(pagemesh_base::space::Reply::Done);
    let completion = Completion { token, result };
    out.complete(completion, change_dependency(durable), Some(record));
}

fn change_dependency(durable: bool) -> AckDependency {
    if durable {
        AckDependency::FullReplication
    } else {
        AckDependency::BoundedLag
    }
}
