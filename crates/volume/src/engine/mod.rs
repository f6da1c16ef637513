//! One channel's requests in flight: splits them into pieces, sends pieces to
//! legs, and puts the answers together.
//!
//! Invariants: events in, calls to the [`Outbox`] out; no I/O, clock, thread
//! or randomness. A change completes only when all legs that the present view
//! writes to have it. A read is only ever sent to an in-sync leg. After the
//! write set of a column changed, every change that is not complete is sent
//! again, in order of its operation, once the old messages are answered.
//! What was submitted is answered exactly once.

mod changes;
mod columns;
mod direct;
mod piece;
mod reads;
mod request;

use crate::limits::{PIECES_MAX, REQUEST_PIECES_MAX};
use crate::locks::LockRange;
use crate::status::Count;
use crate::view::{Mask, View};
use arrayvec::ArrayVec;
use bytes::Bytes;
use columns::Column;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::COPIES_MAX;
use pagemesh_base::slice::{Part, SliceError, SliceReply, SliceRequest, Stamp};
use pagemesh_base::space::{Completion, Request, SpaceError, Token};
use piece::{Act, Phase, Piece, tag_of};
use request::{Job, Next};
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;

/// Unfinished requests in line that are looked at for what may go on: those
/// behind only wait longer.
const LINE_LOOK_MAX: usize = 16;

/// Answers of legs, in the order of their numbers.
pub(crate) type Answers = ArrayVec<Result<SliceReply, SliceError>, COPIES_MAX>;

/// What an acknowledgement waits for where a leg follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    Nothing,
    /// That it is not too far behind.
    Lag,
    /// That it has all that was changed before.
    Everything,
}

/// What the engine asks of the world around it.
pub(crate) trait Outbox {
    /// Whether each of these legs does a write inside the call. A write of
    /// this place is about to come.
    fn do_at_once(&mut self, column: usize, legs: Mask, offset: u64) -> bool;
    /// Writes to all these legs at once; only after they said they would.
    fn write_at_once(
        &mut self,
        column: usize,
        legs: Mask,
        offset: u64,
        data: &Bytes,
        stamp: Stamp,
    ) -> Answers;
    /// The same for a transaction.
    fn transact_at_once(
        &mut self,
        column: usize,
        legs: Mask,
        parts: &[Part],
        stamp: Stamp,
    ) -> Answers;
    /// Hands these answers in again, as those to a message with this tag.
    fn answer(&mut self, column: usize, legs: Mask, tag: u64, answers: Answers);
    /// Whether the view is still the newest: if not, a leg whose answer came
    /// just now may have been left out before.
    fn is_current(&self) -> bool;
    /// Takes a range lock if that needs no waiting.
    fn try_acquire(&mut self, range: LockRange, key: u32) -> bool;
    /// The same of several: all of them or none.
    fn try_acquire_all(&mut self, ranges: &[LockRange], key: u32) -> bool;

    /// One message to each of these legs.
    fn send(&mut self, column: usize, legs: Mask, tag: u64, request: SliceRequest);
    /// True if held at once; else [`Engine::granted`] follows.
    fn acquire(&mut self, range: LockRange, key: u32) -> bool;
    /// Of several at one moment; how many are not held yet. For each of them
    /// [`Engine::granted`] follows.
    fn acquire_all(&mut self, ranges: &[LockRange], key: u32) -> u32;
    fn release(&mut self, range: LockRange, key: u32);
    /// Whether no change of this range is in flight on any channel; else
    /// [`Engine::granted`] follows once those that are have ended.
    fn is_still(&mut self, range: LockRange, key: u32) -> bool;
    /// A change of this range ends, and some legs may have it and others not.
    fn note_undecided(&mut self, range: LockRange);
    /// Keeps guests, who know no range locks, away; false, and they are not, if one is
    /// inside of an operation.
    fn keep_guests_out(&mut self) -> bool;
    fn let_guests_in(&mut self);
    /// Whether such a change of this range has not been decided since.
    fn is_undecided(&self, range: LockRange) -> bool;
    /// The volume's next operation number.
    fn next_op(&mut self) -> u64;
    fn complete(&mut self, completion: Completion, after: After);
    /// A change is on all legs that are written, and its range still locked. The leg
    /// that follows gets it over the connection of this serial.
    fn ship(&mut self, serial: u64, change: SliceRequest);
    /// The connection is of no more use; the keeper must see to the leg.
    fn lose(&mut self, column: usize, leg: usize, why: String);
    /// The highest epoch that this client holds.
    fn held_epoch(&self) -> Epoch;
    /// Nothing is sent any more: a newer client has attached, or there is no session for
    /// this one.
    fn end(&mut self, why: &SpaceError);
    fn count(&mut self, what: Count, by: u64);
    /// A change is on all legs of the column, some of which buffer.
    fn acknowledged(&mut self, column: usize);
    /// What a flush of the column covers that starts now.
    fn flush_starts(&mut self, column: usize) -> u64;
    /// The column's legs have flushed.
    fn flushed(&mut self, column: usize, covers: u64);
    /// Whether a flush must say that what was acknowledged may be gone.
    fn must_tell_loss(&mut self, column: usize) -> bool;
}

pub(crate) struct Engine {
    view: Arc<View>,
    columns: Vec<Column>,
    jobs: Slab<Job>,
    pieces: Slab<Piece>,
    /// Requests with pieces not yet made, in order of submission.
    line: VecDeque<u32>,
    /// Counts pieces: orders them, and tells a slot's users apart.
    order: u64,
    repairs: usize,
    /// Why nothing is sent any more.
    ended: Option<SpaceError>,
}

impl Engine {
    /// An engine that has yet to adopt a view.
    pub(crate) fn new() -> Engine {
        Engine {
            view: Arc::new(View::empty()),
            columns: Vec::new(),
            jobs: Slab::new(),
            pieces: Slab::new(),
            line: VecDeque::new(),
            order: 0,
            repairs: 0,
            ended: None,
        }
    }

    /// Whether nothing is sent any more.
    pub(crate) fn is_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Why nothing is sent any more; none while the engine serves.
    pub(crate) fn why_ended(&self) -> Option<&SpaceError> {
        self.ended.as_ref()
    }

    /// Whether a change is under way that must not be abandoned.
    pub(crate) fn is_changing(&self) -> bool {
        self.columns.iter().any(|column| !column.changes.is_empty())
    }

    /// Whether every change is complete on all legs, flushed where they buffer.
    pub(crate) fn is_complete(&self) -> bool {
        self.columns.iter().all(|column| column.window.is_empty())
    }

    /// Flushes what is not, of its own accord; once fenced, there is nobody to
    /// ask, and the next client has made the legs equal.
    pub(crate) fn flush_rest(&mut self, out: &mut impl Outbox) {
        if self.is_ended() {
            return;
        }
        for column in 0..self.columns.len() {
            if self.columns[column].window.unflushed() > 0 {
                self.flush_in_background(column, out);
            }
        }
    }

    pub(crate) fn submit(&mut self, token: Token, request: Request, out: &mut impl Outbox) {
        if let Some(why) = &self.ended {
            return answer(out, token, Err(why.clone()));
        }
        let Some(request) = self.write_at_once(token, request, out) else {
            return;
        };
        let job = match Job::new(token, request, &self.view) {
            Ok(job) => job,
            Err(result) => return answer(out, token, result),
        };
        let Some(job) = self.transact_at_once(token, job, out) else {
            return;
        };
        let number = self.jobs.insert(job) as u32;
        if !self.line.is_empty() || !self.issue(number, out) {
            self.line.push_back(number);
            self.advance_line(out);
        }
    }

    /// An answer of a leg.
    pub(crate) fn answered(
        &mut self,
        column: usize,
        leg: usize,
        tag: u64,
        result: Result<SliceReply, SliceError>,
        out: &mut impl Outbox,
    ) {
        let slot = tag as u32;
        let piece = self.pieces.get_mut(slot as usize);
        let Some(piece) = piece.filter(|it| tag_of(slot, it) == tag && it.pending.has(leg)) else {
            if self.columns.len() > column
                && self.columns[column].note_overdue(leg, tag)
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
            self.columns[column].pending -= 1;
            self.change_answered(slot, leg, result, out);
        } else {
            self.columns[column].load[leg] -= 1;
            self.read_answered(slot, leg, result, out);
        }
    }

    /// A range lock that had to wait is held now, or the changes that a read
    /// found in flight have ended.
    pub(crate) fn granted(&mut self, key: u32, out: &mut impl Outbox) {
        let Some(piece) = self.pieces.get_mut(key as usize) else {
            return;
        };
        match piece.phase {
            Phase::Locking => {
                piece.awaited -= 1;
                if piece.awaited == 0 {
                    self.start_change(key, out);
                }
            }
            Phase::Watching => self.pass_read(key, out),
            _ => {}
        }
    }

    /// Another client attached: everything fails.
    pub(crate) fn fence(&mut self, out: &mut impl Outbox) {
        self.end(SpaceError::Fenced, out);
    }

    /// Everything fails, from now on.
    pub(crate) fn end(&mut self, why: SpaceError, out: &mut impl Outbox) {
        if self.is_ended() {
            return;
        }
        for (slot, piece) in &self.pieces {
            piece.note_if_undecided(out);
            piece.release(slot as u32, out);
        }
        self.pieces.clear();
        self.line.clear();
        for column in &mut self.columns {
            column.forget();
        }
        for job in self.jobs.drain() {
            if let Some(token) = job.token {
                answer(out, token, Err(why.clone()));
            }
        }
        out.end(&why);
        self.ended = Some(why);
    }

    /// Makes pieces of a request; false if some are left for later.
    fn issue(&mut self, number: u32, out: &mut impl Outbox) -> bool {
        // Pieces may complete while later ones are made.
        self.jobs[number as usize].issuing = true;
        let all = self.issue_pieces(number, out);
        if let Some(job) = self.jobs.get_mut(number as usize) {
            job.issuing = false;
            if all && job.flying == 0 {
                self.finish_job(number, out);
            }
        }
        all
    }

    fn issue_pieces(&mut self, number: u32, out: &mut impl Outbox) -> bool {
        loop {
            let full = self.pieces.len() >= PIECES_MAX;
            // A newer client may have been noticed meanwhile.
            let Some(job) = self.jobs.get_mut(number as usize) else {
                return true;
            };
            if full || job.flying >= REQUEST_PIECES_MAX {
                return job.is_issued();
            }
            let Next::Piece(place, act, last) = job.next(&self.view) else {
                return true;
            };
            job.flying += 1;
            let mut piece = Piece::new(number, place, act, job.durable);
            self.order += 1;
            piece.order = self.order;
            let slot = self.pieces.insert(piece) as u32;
            self.start(slot, out);
            if last {
                return true;
            }
        }
    }

    fn start(&mut self, slot: u32, out: &mut impl Outbox) {
        let piece = &self.pieces[slot as usize];
        if !piece.is_change() {
            return self.start_read(slot, out);
        }
        let (column, awaited) = (piece.column, piece.acquire(slot, out));
        let piece = &mut self.pieces[slot as usize];
        piece.awaited = awaited;
        self.columns[column].list(piece, slot);
        if awaited == 0 {
            self.start_change(slot, out);
        }
    }

    /// Lets requests in line go on, those first that came first; what overlaps
    /// an earlier one waits for it.
    fn advance_line(&mut self, out: &mut impl Outbox) {
        let mut at = 0;
        while at < self.line.len().min(LINE_LOOK_MAX) && self.pieces.len() < PIECES_MAX {
            let number = self.line[at];
            let job = &self.jobs[number as usize];
            let mut earlier = self.line.iter().take(at);
            if earlier.any(|&other| self.jobs[other as usize].conflicts(job)) {
                at += 1;
                continue;
            }
            if self.issue(number, out) {
                self.line.retain(|&other| other != number);
            } else {
                at += 1;
            }
        }
    }

    /// A piece has come to its end.
    fn finish(&mut self, slot: u32, result: Result<SliceReply, SpaceError>, out: &mut impl Outbox) {
        let piece = self.pieces.remove(slot as usize);
        if piece.is_change() {
            self.columns[piece.column].pending -= piece.pending.len();
            self.columns[piece.column].unlist(&piece, &mut self.pieces);
            piece.release(slot, out);
        }
        let column = piece.column;
        let was_change = piece.is_change();
        if let Act::Repair { .. } = piece.act {
            self.repairs -= 1;
            out.let_guests_in();
        } else if let Some(job) = self.jobs.get_mut(piece.job as usize) {
            job.flying -= 1;
            if job.token.is_none() {
                self.columns[column].background_flush = false;
            }
            match result {
                Ok(reply) => job.keep(&piece, reply),
                Err(error) => job.fail(error),
            }
            if job.flying == 0 && !job.issuing && job.is_issued() {
                self.finish_job(piece.job, out);
            }
        }
        if was_change && !self.columns[column].trailing.is_empty() {
            self.retry_trailing(column, out);
        }
        if !self.line.is_empty() {
            self.advance_line(out);
        }
    }

    fn finish_job(&mut self, number: u32, out: &mut impl Outbox) {
        self.line.retain(|&other| other != number);
        let job = self.jobs.remove(number as usize);
        if let Some(token) = job.token {
            let after = job.after();
            let result = job.into_result();
            let after = match result {
                Ok(_) => after,
                Err(_) => After::Nothing,
            };
            out.complete(Completion { token, result }, after);
        }
    }

    /// Has the leg that follows, if there is one, get a change later.
    fn ship(&self, column: usize, out: &mut impl Outbox, change: impl FnOnce() -> SliceRequest) {
        match self.view.columns[column].ship {
            0 => {}
            serial => out.ship(serial, change()),
        }
    }
}

fn answer(
    out: &mut impl Outbox,
    token: Token,
    result: Result<pagemesh_base::space::Reply, SpaceError>,
) {
    out.complete(Completion { token, result }, After::Nothing);
}

/// A change of one piece is done.
fn acknowledge(out: &mut impl Outbox, token: Token, durable: bool) {
    let result = Ok(pagemesh_base::space::Reply::Done);
    out.complete(Completion { token, result }, after_change(durable));
}

fn after_change(durable: bool) -> After {
    match durable {
        true => After::Everything,
        false => After::Lag,
    }
}
