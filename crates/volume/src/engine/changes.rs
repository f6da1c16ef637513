//! Changes: writes, clears, flushes and repairs. The engine sends them to every written leg,
//! and again when the write set changes.
//!
//! # One change on the asynchronous path
//!
//! [`Engine::start_change`] gets the operation's number under the range lock and enters it in the
//! [`InFlightWindow`](super::in_flight_window::InFlightWindow). [`transmit`] submits it to each leg
//! in turn. [`Engine::resolve_change`] completes it when all legs have answered.
//!
//! # One flush
//!
//! A flush is one piece per column, without a range lock. It asks only the written legs that buffer
//! ([`ColumnState::flush_legs`](super::ColumnState::flush_legs)). Legs of class `process`, `pmem`
//! and `eadr` do not: every acknowledged write has had its fence there.
//!
//! Legs of class `file-sync` buffer. [`Engine::send_flush`] numbers the flush and sends it to each
//! of them, always over `tcp`. When it completes, the operations that were acknowledged before it
//! began are complete
//! ([`InFlightWindow::flushed`](super::in_flight_window::InFlightWindow::flushed)). A durable change
//! (FUA) is one request to each of them ([`SliceRequest::Durable`]), and counts as a flush.
//!
//! - [`UNFLUSHED_MAX`] acknowledged operations start a flush in the background, because the
//!   journals must hold every operation that another leg may lack.
//! - A column that lost all its in-sync legs with unflushed writes fails its next flush.
//!
//! **Data loss:** the unflushed writes of that column may be lost.

use super::piece::{Phase, PieceOp, tag_of};
use super::request::Job;
use super::{Engine, EngineBackend, Piece};
use crate::limits::UNFLUSHED_MAX;
use crate::snapshot::{ColumnExtent, LegSet};
use crate::status::Count;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest, Stamp, TransactionPart};
use pagemesh_base::space::SpaceError;

impl Engine {
    /// Goes on with a change that holds its range lock.
    pub(super) fn start_change(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        piece.phase = Phase::Queued;
        let column = piece.column;
        if self.columns[column].is_open() {
            self.send_change(slot, out);
        } else if self.columns[column].is_failed() {
            self.fail_unavailable(slot, out);
        } else {
            self.drop_if_repair(slot, out);
        }
    }

    /// Sends a change to all its legs, for the first time or again.
    pub(super) fn send_change(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        match piece.op_kind {
            PieceOp::Flush => return self.send_flush(slot, out),
            PieceOp::Repair { bad, .. } => return self.send_repair(slot, bad, out),
            _ => {}
        }
        let column = &mut self.columns[piece.column];
        let legs = column.written;
        let is_again = piece.op != 0;
        let Some(stamp) = assign_stamp(piece, column, self.snapshot.epoch, out) else {
            return self.hold_change(slot);
        };
        let request = change_request(piece, is_again, stamp);
        match is_flushed_at_once(piece, column) {
            true => send_durable(piece, slot, column, request, out),
            false => send(piece, slot, column, legs, request, out),
        }
    }

    /// Lets a change wait until stamps are given out again.
    fn hold_change(&mut self, slot: u32) {
        let piece = &mut self.pieces[slot as usize];
        piece.phase = Phase::Queued;
        self.held.push((slot, piece.order));
    }

    /// Goes on with changes that waited for their stamp. False if there are none, or they wait on.
    pub(crate) fn resume_held(&mut self, out: &mut impl EngineBackend) -> bool {
        if self.held.is_empty() {
            return false;
        }
        let held = std::mem::take(&mut self.held);
        let before = held.len();
        for (slot, order) in held {
            let piece = self.pieces.get(slot as usize);
            // A new layout may have sent it already.
            if piece.is_some_and(|it| it.order == order && it.phase == Phase::Queued) {
                self.start_change(slot, out);
            }
        }
        self.held.len() < before
    }

    fn send_flush(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        let column = &mut self.columns[piece.column];
        let legs = column.flush_legs();
        let asked = self.jobs.get(piece.job as usize);
        let asked = asked.is_some_and(|job| job.token.is_some());
        if asked && out.must_report_loss(piece.column) {
            let why = "every copy was gone for a while; writes before this flush \
                       may be lost, write them again";
            let error = SpaceError::Unavailable(why.into());
            return self.finish_piece(slot, Err(error), out);
        }
        if legs.is_empty() {
            return self.finish_piece(slot, Ok(SliceReply::Done), out);
        }
        start_flush(piece, column, out);
        send(piece, slot, column, legs, SliceRequest::Flush, out);
    }

    pub(super) fn handle_change_answer(
        &mut self,
        slot: u32,
        leg: usize,
        result: Result<SliceReply, SliceError>,
        out: &mut impl EngineBackend,
    ) {
        let piece = &mut self.pieces[slot as usize];
        let column = piece.column;
        let is_flush = matches!(piece.op_kind, PieceOp::Flush);
        if let PieceOp::Repair { .. } = piece.op_kind {
            self.handle_repair_answer(slot, result, out);
        } else {
            match result {
                Ok(_) => piece.done.add(leg),
                Err(SliceError::StaleEpoch { current }) if current > piece.epoch => {
                    // The refusal comes from this client's own barrier. The change is sent
                    // again with the epoch of the next snapshot.
                }
                // The leg may be full by now. If this counted as a refusal, all legs might seem
                // to have refused a change that one of them holds.
                Err(_) if piece.accepted.contains(leg) && !is_flush => piece.done.add(leg),
                Err(error) => {
                    piece.failed.add(leg);
                    piece.error.get_or_insert(error);
                }
            }
            if piece.pending.is_empty() || defect::is(Defect::OneLegAcknowledged) {
                self.resolve_change(slot, out);
            }
        }
        self.resume_if_drained(column, out);
    }

    /// Decides a change after all legs have answered or are lost.
    pub(super) fn resolve_change(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        let column = &self.columns[piece.column];
        // While the set of legs changes, the change is sent again in any case.
        if piece.version != column.version || !column.is_answer_final() {
            return;
        }
        let is_flush = matches!(piece.op_kind, PieceOp::Flush);
        let wanted = if is_flush {
            column.flush_legs()
        } else {
            column.written
        };
        let is_short = defect::is(Defect::OneLegAcknowledged) && !piece.done.is_empty();
        if piece.done.is_superset(wanted) || is_short {
            self.complete_change(slot, out);
        } else if !piece.failed.is_empty() && wanted.is_superset(piece.failed) {
            let mut heard = piece.done;
            piece.failed.legs().for_each(|leg| heard.add(leg));
            if heard.is_superset(wanted) {
                self.fail_change(slot, out);
            }
        }
    }

    fn complete_change(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        let column = &mut self.columns[piece.column];
        if matches!(piece.op_kind, PieceOp::Flush) {
            end_flush(piece, column, out);
            return self.finish_piece(slot, Ok(SliceReply::Done), out);
        }
        let is_flushed = is_flushed_at_once(piece, column);
        let is_buffered = !is_flushed && !column.flush_legs().is_empty();
        column.in_flight.acknowledge(piece.op, is_buffered);
        if is_flushed {
            end_flush(piece, column, out);
        }
        let (epoch, op) = (piece.epoch, piece.op);
        let piece = &self.pieces[slot as usize];
        self.replicate(piece.column, out, || {
            change_request(
                piece,
                false,
                Stamp {
                    epoch,
                    op,
                    open_ops: 0,
                },
            )
        });
        let number = self.pieces[slot as usize].column;
        if is_buffered {
            out.record_acknowledged(number);
        }
        self.finish_piece(slot, Ok(SliceReply::Done), out);
        if is_buffered {
            self.flush_if_over_limit(number, out);
        }
    }

    /// Ends a change after every leg has answered, some with an error. If all in-sync legs
    /// refused it, nothing was changed on them, and the client gets the error. Otherwise the
    /// legs that refused it lack the change, and must leave.
    fn fail_change(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &self.pieces[slot as usize];
        let (number, done, failed) = (piece.column, piece.done, piece.failed);
        let in_sync = self.columns[number].in_sync;
        let error = piece.error.clone();
        let why = error.as_ref().map_or(String::new(), ToString::to_string);
        if !failed.is_superset(in_sync) {
            for leg in failed.legs() {
                self.lose_leg(number, leg, why.clone(), out);
            }
            return;
        }
        // A syncing leg made a change that the others refused. Its connection must end right
        // now: then its own records name the page when it returns.
        for leg in done.legs() {
            self.lose_leg(
                number,
                leg,
                format!("the others refused a write: {why}"),
                out,
            );
        }
        let Some(piece) = self.pieces.get(slot as usize) else {
            return;
        };
        if piece.op != 0 {
            self.columns[number].in_flight.remove(piece.op);
        }
        let error = self.space_error(slot, error);
        self.finish_piece(slot, Err(error), out);
    }

    fn flush_if_over_limit(&mut self, number: usize, out: &mut impl EngineBackend) {
        if self.columns[number].in_flight.unflushed_count() >= UNFLUSHED_MAX {
            self.flush_in_background(number, out);
        }
    }

    pub(super) fn flush_in_background(&mut self, number: usize, out: &mut impl EngineBackend) {
        let column = &mut self.columns[number];
        if std::mem::replace(&mut column.background_flush, true) {
            return;
        }
        let job = self.jobs.insert(Job::background_flush()) as u32;
        let place = ColumnExtent {
            column: number,
            offset: 0,
            len: 0,
            volume_offset: 0,
        };
        self.insert_piece(Piece::new(job, place, PieceOp::Flush, false), out);
        out.count(Count::BackgroundFlushes, 1);
    }

    pub(super) fn insert_piece(&mut self, mut piece: Piece, out: &mut impl EngineBackend) {
        self.last_order += 1;
        piece.order = self.last_order;
        let slot = self.pieces.insert(piece) as u32;
        self.start_piece(slot, out);
    }

    fn send_repair(&mut self, slot: u32, bad: usize, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        let column = &mut self.columns[piece.column];
        let (offset, len) = (piece.offset, piece.len as u32);
        let data = match &piece.op_kind {
            PieceOp::Repair { data, .. } => data.clone(),
            _ => None,
        };
        if let Some(data) = data {
            let Some(stamp) = assign_stamp(piece, column, self.snapshot.epoch, out) else {
                return self.hold_change(slot);
            };
            let request = SliceRequest::Write {
                offset,
                data,
                stamp,
            };
            return send(piece, slot, column, LegSet::of(bad), request, out);
        }
        let good = column
            .readable_legs()
            .difference(LegSet::of(bad))
            .legs()
            .next();
        match good {
            Some(leg) if column.readable_legs().contains(bad) => {
                let request = SliceRequest::Read { offset, len };
                send(piece, slot, column, LegSet::of(leg), request, out);
            }
            _ => self.end_repair(slot, false, out),
        }
    }

    fn handle_repair_answer(
        &mut self,
        slot: u32,
        result: Result<SliceReply, SliceError>,
        out: &mut impl EngineBackend,
    ) {
        let piece = &mut self.pieces[slot as usize];
        let current = self.columns[piece.column].version == piece.version
            && self.columns[piece.column].is_open();
        let PieceOp::Repair { data, .. } = &mut piece.op_kind else {
            return;
        };
        match result {
            Ok(SliceReply::Data(bytes)) if current && bytes.len() as u64 == piece.len => {
                *data = Some(bytes.into());
                self.send_change(slot, out);
            }
            Ok(SliceReply::Done) if data.is_some() => self.end_repair(slot, true, out),
            _ => self.end_repair(slot, false, out),
        }
    }

    /// Drops a repair, because it is not worth a retry over a change of legs; true if the piece
    /// is one.
    pub(super) fn drop_if_repair(&mut self, slot: u32, out: &mut impl EngineBackend) -> bool {
        let piece = &self.pieces[slot as usize];
        let repair = matches!(piece.op_kind, PieceOp::Repair { .. });
        if repair && piece.pending.is_empty() {
            self.end_repair(slot, false, out);
        }
        repair
    }

    fn end_repair(&mut self, slot: u32, done: bool, out: &mut impl EngineBackend) {
        let piece = &self.pieces[slot as usize];
        if piece.op != 0 {
            self.columns[piece.column].in_flight.remove(piece.op);
        }
        let what = if done {
            Count::PagesRepaired
        } else {
            Count::RepairsFailed
        };
        out.count(what, 1);
        self.finish_piece(slot, Ok(SliceReply::Done), out);
    }
}

/// The request for a change, as legs get it.
fn change_request(piece: &Piece, is_again: bool, stamp: Stamp) -> SliceRequest {
    let (offset, len) = (piece.offset, piece.len);
    match &piece.op_kind {
        PieceOp::Write(data) => SliceRequest::Write {
            offset,
            data: data.clone(),
            stamp,
        },
        PieceOp::Transact(parts) => SliceRequest::Transact {
            parts: parts_to_send(parts, is_again).to_vec(),
            stamp,
        },
        _ => SliceRequest::Clear { offset, len, stamp },
    }
}

/// The parts of a transaction: all of them, on every send.
fn parts_to_send(parts: &[TransactionPart], is_again: bool) -> &[TransactionPart] {
    match is_again && defect::is(Defect::FirstPartResent) {
        true => &parts[..1],
        false => parts,
    }
}

fn start_flush(piece: &mut Piece, column: &mut super::ColumnState, out: &mut impl EngineBackend) {
    piece.flush_number = column.in_flight.start_flush();
    piece.flush_covers = out.begin_flush(piece.column);
}

/// Records that every leg has flushed.
fn end_flush(piece: &Piece, column: &mut super::ColumnState, out: &mut impl EngineBackend) {
    column.in_flight.flushed(piece.flush_number);
    out.record_flushed(piece.column, piece.flush_covers);
}

/// Whether the legs that buffer flush the change before they answer.
fn is_flushed_at_once(piece: &Piece, column: &super::ColumnState) -> bool {
    piece.durable && !column.flush_legs().is_empty()
}

/// Sends a change, with a flush to the legs that buffer.
fn send_durable(
    piece: &mut Piece,
    slot: u32,
    column: &mut super::ColumnState,
    change: SliceRequest,
    out: &mut impl EngineBackend,
) {
    start_flush(piece, column, out);
    piece.phase = Phase::Sent;
    piece.reset_answers();
    piece.record_sent(out);
    let (legs, flushing) = (column.written, column.flush_legs());
    expect_answers(piece, column, legs);
    let tag = tag_of(slot, piece);
    let others = legs.difference(flushing);
    out.set_hint(piece.hint);
    if !others.is_empty() {
        out.send(piece.column, others, tag, change.clone());
    }
    let change = Box::new(change);
    out.send(
        piece.column,
        flushing,
        tag,
        SliceRequest::Durable { change },
    );
}

/// A change gets its number when it is first sent, under its lock. It keeps its epoch while the layout
/// stays: legs that have it already and those that get it again then agree on the birth of its pages. None: it waits.
fn assign_stamp(
    piece: &mut Piece,
    column: &mut super::ColumnState,
    layout: pagemesh_base::ids::Epoch,
    out: &mut impl EngineBackend,
) -> Option<Stamp> {
    if piece.op == 0 || piece.layout_epoch != layout {
        (piece.epoch, piece.layout_epoch) = (out.stamp_epoch(layout)?, layout);
    }
    if piece.op == 0 {
        piece.op = out.next_op();
        column.in_flight.insert(piece.op);
    }
    Some(Stamp {
        epoch: piece.epoch,
        op: piece.op,
        open_ops: column.in_flight.open_distance(piece.op),
    })
}

fn send(
    piece: &mut Piece,
    slot: u32,
    column: &mut super::ColumnState,
    legs: LegSet,
    request: SliceRequest,
    out: &mut impl EngineBackend,
) {
    piece.phase = Phase::Sent;
    piece.reset_answers();
    piece.record_sent(out);
    transmit(piece, slot, column, legs, request, out);
}

fn transmit(
    piece: &mut Piece,
    slot: u32,
    column: &mut super::ColumnState,
    legs: LegSet,
    request: SliceRequest,
    out: &mut impl EngineBackend,
) {
    expect_answers(piece, column, legs);
    out.set_hint(piece.hint);
    out.send(piece.column, legs, tag_of(slot, piece), request);
}

/// Sets up the piece to expect an answer from each of these legs.
pub(super) fn expect_answers(piece: &mut Piece, column: &mut super::ColumnState, legs: LegSet) {
    piece.version = column.version;
    piece.pending = legs;
    column.pending_answers += legs.len();
}
