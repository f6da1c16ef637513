//! Reads and extents. One in-sync leg answers, and another one if the first cannot.
//!
//! An answer that may show a change in flight is held back until that change has ended.
//! Otherwise a later read could return older data, from a leg without the change or after the
//! loss of the leg with it. So the data of each read is on every leg. If the change ended as
//! indeterminate, the read fails. (Extents are hints, and neither wait nor fail.)
//!
//! A read takes no range lock. One load tells whether the lock shard of its range has any change in
//! flight. Only then a short list is scanned. The read waits for the changes that hold locks at
//! that time ([`Phase::AwaitingChanges`]), and for no later ones. It is repeated if its column
//! failed meanwhile or has other legs. So while a leg is lost and the manager does not answer,
//! reads of ranges with a change in flight wait, and all other reads proceed.

use super::piece::{Phase, PieceOp, tag_of};
use super::{ColumnState, Engine, EngineBackend, Piece};
use crate::limits::{PIECES_MAX, REPAIRS_MAX};
use crate::snapshot::{ColumnExtent, LegSet};
use crate::status::Count;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest};
use pagemesh_base::space::SpaceError;
use pagemesh_base::units::PAGE_BYTES;

impl Engine {
    pub(super) fn start_read(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        piece.phase = Phase::Queued;
        let column = piece.column;
        if self.is_behind_change(slot) && !defect::is(Defect::ReadOvertakes) {
            self.columns[column].trailing_reads.push(slot);
        } else {
            self.send_read(slot, out);
        }
    }

    /// Whether an earlier change of this channel that overlaps the read is in flight.
    fn is_behind_change(&self, slot: u32) -> bool {
        let read = &self.pieces[slot as usize];
        self.columns[read.column].changes.iter().any(|&change| {
            let change = &self.pieces[change as usize];
            change.order < read.order && change.overlaps(read.offset, read.len)
        })
    }

    pub(super) fn restart_trailing_reads(&mut self, column: usize, out: &mut impl EngineBackend) {
        for slot in std::mem::take(&mut self.columns[column].trailing_reads) {
            self.start_read(slot, out);
        }
    }

    /// Sends a read to the least loaded in-sync leg that has not failed it.
    pub(super) fn send_read(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        let column = &mut self.columns[piece.column];
        piece.phase = Phase::Queued;
        if let Some(leg) = column.choose_read_leg(piece.failed) {
            piece.phase = Phase::Sent;
            piece.epoch = self.snapshot.epoch;
            send_to_leg(piece, slot, column, leg, out);
        } else if column.is_failed() {
            self.fail_unavailable(slot, out);
        } else if !column.in_sync.is_empty() && piece.failed.is_superset(column.in_sync) {
            let error = piece.error.take();
            let error = self.space_error(slot, error);
            self.finish_piece(slot, Err(error), out);
        } else {
            column.waiting_reads.push(slot);
        }
    }

    /// Sends a late read to another leg, too.
    pub(crate) fn hedge(&mut self, tag: u64, out: &mut impl EngineBackend) {
        let slot = tag as u32;
        // A repair reads, too, but counts as a change. It must not read the page that it
        // repairs.
        let is_late_read =
            |it: &&mut Piece| tag_of(slot, it) == tag && it.phase == Phase::Sent && !it.is_change();
        let Some(piece) = self.pieces.get_mut(slot as usize).filter(is_late_read) else {
            return;
        };
        let column = &mut self.columns[piece.column];
        if let Some(leg) = column.choose_read_leg(piece.failed.union(piece.pending)) {
            out.count(Count::ReadsHedged, 1);
            send_to_leg(piece, slot, column, leg, out);
        }
    }

    pub(super) fn handle_read_answer(
        &mut self,
        slot: u32,
        leg: usize,
        result: Result<SliceReply, SliceError>,
        out: &mut impl EngineBackend,
    ) {
        let piece = &self.pieces[slot as usize];
        let is_whole = is_whole_answer(piece, &result);
        // The snapshot may have changed while the answer was on its way.
        if is_whole && self.columns[piece.column].in_sync.contains(leg) {
            self.accept_read_answer(slot, result, out);
        } else if piece.pending.is_empty() {
            self.retry_read(slot, leg, is_whole, result, out);
        } else {
            self.record_hedge_failure(slot, leg, is_whole, result);
        }
    }

    /// Takes the answer of an in-sync leg. It is delivered once no change of its range is in
    /// flight.
    fn accept_read_answer(
        &mut self,
        slot: u32,
        result: Result<SliceReply, SliceError>,
        out: &mut impl EngineBackend,
    ) {
        let piece = &mut self.pieces[slot as usize];
        let column = &mut self.columns[piece.column];
        // The range is checked after the answer came, so a change that the answer shows was
        // in flight or has ended by now.
        let tag = tag_of(slot, piece);
        let late = std::mem::replace(&mut piece.pending, LegSet::NONE);
        column
            .overdue_answers
            .extend(late.legs().map(|leg| (leg, tag)));
        piece.answer = result.ok();
        if piece.needs_stable_data() && !out.is_range_idle(piece.lock_range(), slot) {
            piece.phase = Phase::AwaitingChanges;
            piece.version = column.version;
            return out.count(Count::ReadsDelayed, 1);
        }
        self.deliver_if_determinate(slot, out);
    }

    /// Records the failure of one of two legs that were sent the read. The other one may still
    /// answer.
    fn record_hedge_failure(
        &mut self,
        slot: u32,
        leg: usize,
        is_whole: bool,
        result: Result<SliceReply, SliceError>,
    ) {
        let piece = &mut self.pieces[slot as usize];
        // Damage is recorded. Any other fault of this leg shows again when it is asked alone.
        // An answer to a question from before a barrier or a change of legs is no fault.
        let is_outdated = is_whole || matches!(result, Err(SliceError::StaleEpoch { .. }));
        if !is_outdated || defect::is(Defect::OutdatedLegFailed) {
            piece.failed.add(leg);
        }
        if let Err(error @ SliceError::Damaged { .. }) = result {
            piece.error = Some(error);
        }
    }

    /// Sends a read again that no leg can answer any more: to another leg, or with the next
    /// snapshot.
    fn retry_read(
        &mut self,
        slot: u32,
        leg: usize,
        is_whole: bool,
        result: Result<SliceReply, SliceError>,
        out: &mut impl EngineBackend,
    ) {
        let piece = &mut self.pieces[slot as usize];
        let number = piece.column;
        match result {
            Ok(_) if is_whole => {}
            Ok(_) => {
                piece.failed.add(leg);
                let error = SliceError::Refused("the answer does not fit the question".into());
                piece.error.get_or_insert(error);
            }
            // The read was sent before this client's own barrier. It is sent again, now or with
            // the snapshot that comes with the barrier.
            Err(SliceError::StaleEpoch { current }) if piece.epoch < current => {
                if self.snapshot.epoch < current {
                    piece.phase = Phase::Queued;
                    return self.columns[number].waiting_reads.push(slot);
                }
            }
            Err(SliceError::StaleEpoch { .. }) => {
                let why = "it refuses reads of its own client".to_owned();
                piece.phase = Phase::Queued;
                self.columns[number].waiting_reads.push(slot);
                return self.lose_leg(number, leg, why, out);
            }
            Err(error) => {
                piece.failed.add(leg);
                out.count(Count::ReadsRedirected, 1);
                // Damage can be repaired, so it takes precedence over other errors.
                if matches!(error, SliceError::Damaged { .. }) || piece.error.is_none() {
                    piece.error = Some(error);
                }
            }
        }
        self.send_read(slot, out);
    }

    /// Goes on with a read after the changes that were in flight at its answer have ended. If
    /// they failed with the column, the leg's data may be taken back.
    pub(super) fn resume_read(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        let column = &self.columns[piece.column];
        if piece.version == column.version && !column.is_failed() {
            return self.deliver_if_determinate(slot, out);
        }
        piece.answer = None;
        self.send_read(slot, out);
    }

    /// Delivers the answer unless its data may be taken back. None of its data is in flight.
    fn deliver_if_determinate(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        if !piece.needs_stable_data() || defect::is(Defect::IndeterminateRead) {
            return self.deliver_read(slot, out);
        }
        if out.is_indeterminate(piece.lock_range()) {
            return self.fail_indeterminate(slot, out);
        }
        // The range may have been resolved just now, against the leg that answered. The read is
        // sent again with the newest snapshot.
        if !out.is_snapshot_current() {
            piece.phase = Phase::Queued;
            piece.answer = None;
            return self.columns[piece.column].waiting_reads.push(slot);
        }
        self.deliver_read(slot, out);
    }

    /// Delivers the answer to the client.
    fn deliver_read(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &mut self.pieces[slot as usize];
        let (column, damaged) = (piece.column, piece.failed);
        let (answer, error) = (piece.answer.take(), piece.error.take());
        if let Some(SliceError::Damaged { offset }) = error {
            damaged
                .legs()
                .for_each(|bad| self.repair(column, offset, bad, out));
        }
        let Some(answer) = answer else {
            unreachable!("it was answered");
        };
        self.finish_piece(slot, Ok(answer), out);
    }

    fn repair(&mut self, column: usize, offset: u64, bad: usize, out: &mut impl EngineBackend) {
        if self.repairs_in_flight >= REPAIRS_MAX || self.pieces.len() >= PIECES_MAX {
            return;
        }
        // A direct operation in progress may be writing the page. In that case a scrub repairs
        // it later.
        if !out.try_block_direct_clients() {
            return;
        }
        self.repairs_in_flight += 1;
        let page = PAGE_BYTES as u64;
        let offset = offset / page * page;
        let place = ColumnExtent {
            column,
            offset,
            len: page,
            volume_offset: self.snapshot.volume_offset(column, offset),
        };
        let act = PieceOp::Repair { bad, data: None };
        self.insert_piece(Piece::new(u32::MAX, place, act, false), out);
    }

    fn fail_indeterminate(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &self.pieces[slot as usize];
        let error = SpaceError::Unavailable(format!(
            "a write to these bytes failed, and one copy may have it and another not; they \
             cannot be read until the manager decides which of the bricks {} count; make the \
             manager reachable",
            self.brick_names(piece.column)
        ));
        self.finish_piece(slot, Err(error), out);
    }

    /// The bricks with the legs of a column.
    fn brick_names(&self, column: usize) -> String {
        let legs = self.snapshot.columns[column].legs.iter();
        let label = |id| self.snapshot.names.label(id).to_string();
        let bricks: Vec<String> = legs.map(|leg| label(leg.brick)).collect();
        bricks.join(", ")
    }

    pub(super) fn fail_unavailable(&mut self, slot: u32, out: &mut impl EngineBackend) {
        let piece = &self.pieces[slot as usize];
        piece.record_if_indeterminate(out);
        let bricks = self.brick_names(piece.column);
        if piece.op != 0 {
            self.columns[piece.column].in_flight.remove(piece.op);
        }
        let error = SpaceError::Unavailable(format!(
            "no in-sync copy is reachable; start one of the bricks {bricks} again"
        ));
        if matches!(piece.op_kind, PieceOp::Repair { .. }) {
            self.fail_repair(slot, out);
        } else {
            self.finish_piece(slot, Err(error), out);
        }
    }

    fn fail_repair(&mut self, slot: u32, out: &mut impl EngineBackend) {
        out.count(Count::RepairsFailed, 1);
        self.finish_piece(slot, Ok(SliceReply::Done), out);
    }

    pub(super) fn space_error(&self, slot: u32, error: Option<SliceError>) -> SpaceError {
        let piece = &self.pieces[slot as usize];
        let place = || self.brick_names(piece.column);
        match error {
            Some(SliceError::NoSpace) => SpaceError::NoSpace(place()),
            Some(SliceError::Damaged { offset }) => SpaceError::Damaged {
                offset: self.snapshot.volume_offset(piece.column, offset),
                place: place(),
            },
            Some(SliceError::StaleEpoch { .. }) => SpaceError::Fenced,
            Some(other) => SpaceError::Unavailable(format!("bricks {}: {other}", place())),
            None => SpaceError::Unavailable(format!("bricks {} gave no answer", place())),
        }
    }
}

/// Whether a leg answered the piece with all that it was asked for.
fn is_whole_answer(piece: &Piece, result: &Result<SliceReply, SliceError>) -> bool {
    match result {
        Ok(SliceReply::Data(data)) => {
            matches!(piece.op_kind, PieceOp::Read) && data.len() as u64 == piece.len
        }
        Ok(SliceReply::Extents(_)) => matches!(piece.op_kind, PieceOp::Extents),
        _ => false,
    }
}

/// Sends a read to one more leg.
fn send_to_leg(
    piece: &mut Piece,
    slot: u32,
    column: &mut ColumnState,
    leg: usize,
    out: &mut impl EngineBackend,
) {
    piece.pending.add(leg);
    piece.record_sent(out);
    column.reads_by_leg[leg] += 1;
    let (offset, len) = (piece.offset, piece.len);
    let request = match piece.op_kind {
        PieceOp::Read => SliceRequest::Read {
            offset,
            len: len as u32,
        },
        _ => SliceRequest::Extents { offset, len },
    };
    out.set_hint(piece.hint);
    out.send(piece.column, LegSet::of(leg), tag_of(slot, piece), request);
}
