//! The engine's state of a column, and its transitions.

use super::piece::Phase;
use super::{Engine, EngineBackend, Piece};
use crate::engine::in_flight_window::InFlightWindow;
use crate::snapshot::{ColumnGate, ColumnSnapshot, LayoutSnapshot, LegSet};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::LEGS_MAX;
use slab::Slab;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlowState {
    Open,
    /// A written leg is not connected. The controller handles that.
    Blocked,
    /// The write set changed. The answers to old messages must come before changes are sent
    /// again.
    Draining,
    Failed,
}

#[derive(Debug)]
pub(super) struct ColumnState {
    flow: FlowState,
    /// Rises whenever the set of legs or their connections change.
    pub version: u32,
    /// The serials of the written legs' connections; 0 for the others.
    serials: [u64; LEGS_MAX],
    pub written: LegSet,
    pub in_sync: LegSet,
    buffering: LegSet,
    /// The written legs with a live connection.
    usable: LegSet,
    /// Changes in flight, including those that wait.
    pub changes: Vec<u32>,
    /// The number of change messages without an answer.
    pub pending_answers: u32,
    pub in_flight: InFlightWindow,
    /// Reads in flight, by leg.
    pub reads_by_leg: [u32; LEGS_MAX],
    /// Answers that no piece waits for: the legs, with the tags of reads that another leg
    /// answered first. They count as load of their legs.
    pub overdue_answers: Vec<(usize, u64)>,
    read_rotation: usize,
    /// Reads that wait for an earlier change of this channel.
    pub trailing_reads: Vec<u32>,
    /// Reads that wait for an in-sync leg.
    pub waiting_reads: Vec<u32>,
    pub background_flush: bool,
}

impl ColumnState {
    pub(super) fn new(view: &ColumnSnapshot, live: impl Fn(usize) -> bool) -> ColumnState {
        let mut column = ColumnState {
            flow: FlowState::Open,
            version: 0,
            serials: [0; LEGS_MAX],
            written: LegSet::NONE,
            in_sync: LegSet::NONE,
            buffering: LegSet::NONE,
            usable: LegSet::NONE,
            changes: vec![],
            pending_answers: 0,
            in_flight: InFlightWindow::default(),
            reads_by_leg: [0; LEGS_MAX],
            overdue_answers: vec![],
            read_rotation: 0,
            trailing_reads: vec![],
            waiting_reads: vec![],
            background_flush: false,
        };
        column.apply_snapshot(view, &live);
        column.flow = column.flow_for_gate(view, FlowState::Open);
        column
    }

    /// Adopts the legs of a snapshot.
    fn apply_snapshot(&mut self, view: &ColumnSnapshot, live: &dyn Fn(usize) -> bool) {
        self.written = view.written();
        self.in_sync = match defect::is(Defect::SyncingLegRead) {
            true => view.written(),
            false => view.in_sync(),
        };
        self.buffering = view.buffering();
        self.usable = LegSet::NONE;
        let written = self.written.legs();
        written
            .filter(|&leg| live(leg))
            .for_each(|leg| self.usable.add(leg));
        self.serials = [0; LEGS_MAX];
        let written = self.written.legs();
        written.for_each(|leg| self.serials[leg] = view.legs[leg].serial);
    }

    fn flow_for_gate(&self, view: &ColumnSnapshot, when_open: FlowState) -> FlowState {
        match view.gate {
            ColumnGate::Failed => FlowState::Failed,
            ColumnGate::Down => FlowState::Blocked,
            ColumnGate::Open if self.usable.is_superset(self.written) => when_open,
            ColumnGate::Open => FlowState::Blocked,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.flow == FlowState::Open
    }

    pub(super) fn is_failed(&self) -> bool {
        self.flow == FlowState::Failed
    }

    /// Whether a change may be decided by the answers so far. It may not while a written leg is
    /// lost.
    pub(super) fn is_answer_final(&self) -> bool {
        matches!(self.flow, FlowState::Open | FlowState::Draining)
            && self.usable.is_superset(self.written)
    }

    pub(super) fn readable_legs(&self) -> LegSet {
        self.in_sync.intersection(self.usable)
    }

    /// The written legs that buffer, and so need flushes.
    pub(super) fn flush_legs(&self) -> LegSet {
        self.written.intersection(self.buffering)
    }

    /// The readable leg with the fewest reads in flight; legs with equal load take turns.
    pub(super) fn choose_read_leg(&mut self, except: LegSet) -> Option<usize> {
        let candidates = self.readable_legs().difference(except);
        self.read_rotation += 1;
        let from = self.read_rotation % LEGS_MAX;
        (0..LEGS_MAX)
            .map(|step| (from + step) % LEGS_MAX)
            .filter(|&leg| candidates.contains(leg))
            .min_by_key(|&leg| self.reads_by_leg[leg])
    }

    pub(super) fn add_change(&mut self, piece: &mut Piece, slot: u32) {
        piece.change_index = self.changes.len();
        self.changes.push(slot);
    }

    pub(super) fn remove_change(&mut self, piece: &Piece, pieces: &mut Slab<Piece>) {
        self.changes.swap_remove(piece.change_index);
        if let Some(&moved) = self.changes.get(piece.change_index) {
            pieces[moved as usize].change_index = piece.change_index;
        }
    }

    pub(super) fn clear(&mut self) {
        self.changes.clear();
        self.trailing_reads.clear();
        self.waiting_reads.clear();
        self.pending_answers = 0;
        self.reads_by_leg = [0; LEGS_MAX];
        self.overdue_answers.clear();
    }

    /// Handles an answer that no piece waits for; true if it was overdue.
    pub(super) fn take_overdue(&mut self, leg: usize, tag: u64) -> bool {
        let at = self.overdue_answers.iter().position(|&it| it == (leg, tag));
        if let Some(at) = at {
            self.overdue_answers.swap_remove(at);
            self.reads_by_leg[leg] -= 1;
        }
        at.is_some()
    }
}

impl Engine {
    /// Drops the connection to a leg that is lost or unusable.
    pub(crate) fn lose_leg(
        &mut self,
        number: usize,
        leg: usize,
        why: String,
        out: &mut impl EngineBackend,
    ) {
        let column = &mut self.columns[number];
        if column.usable.contains(leg) {
            column.usable.remove(leg);
            if column.flow != FlowState::Failed {
                column.flow = FlowState::Blocked;
            }
            out.lose_connection(number, leg, why);
        }
        self.drop_pending_answers(number, LegSet::of(leg), out);
    }

    /// Stops expecting answers from these legs.
    fn drop_pending_answers(&mut self, number: usize, legs: LegSet, out: &mut impl EngineBackend) {
        let mut reads = vec![];
        let mut changes = vec![];
        let column = &mut self.columns[number];
        for (slot, piece) in &mut self.pieces {
            let gone = piece.pending.intersection(legs);
            if piece.column != number || gone.is_empty() {
                continue;
            }
            piece.pending = piece.pending.difference(legs);
            if piece.is_change() {
                column.pending_answers -= gone.len();
                changes.push(slot as u32);
            } else {
                gone.legs().for_each(|leg| column.reads_by_leg[leg] -= 1);
                if piece.pending.is_empty() {
                    reads.push(slot as u32);
                }
            }
        }
        let load = &mut column.reads_by_leg;
        column.overdue_answers.retain(|&(leg, _)| {
            let is_gone = legs.contains(leg);
            load[leg] -= u32::from(is_gone);
            !is_gone
        });
        for slot in changes {
            self.drop_if_repair(slot, out);
        }
        for slot in reads {
            self.send_read(slot, out);
        }
        self.resume_if_drained(number, out);
    }

    /// Adopts a new snapshot of the volume. `live` returns whether a leg has the connection
    /// that the snapshot names.
    pub(crate) fn adopt(
        &mut self,
        view: &Arc<LayoutSnapshot>,
        live: impl Fn(usize, usize) -> bool,
        out: &mut impl EngineBackend,
    ) {
        if view.fenced {
            return self.fence(out);
        }
        let epoch_rose = view.epoch != self.snapshot.epoch;
        self.snapshot = Arc::clone(view);
        for (number, column) in view.columns.iter().enumerate() {
            let live = |leg| live(number, leg);
            if number < self.columns.len() {
                self.adopt_column(number, column, epoch_rose, &live, out);
            } else {
                self.columns.push(ColumnState::new(column, live));
            }
        }
    }

    fn adopt_column(
        &mut self,
        number: usize,
        view: &ColumnSnapshot,
        epoch_rose: bool,
        live: &dyn Fn(usize) -> bool,
        out: &mut impl EngineBackend,
    ) {
        let column = &mut self.columns[number];
        let before = (column.written, column.in_sync, column.usable);
        let serials = column.serials;
        column.apply_snapshot(view, live);
        let replaced = LegSet::from_fn(|leg| column.serials[leg] != serials[leg]);
        let now = (column.written, column.in_sync, column.usable);
        let changed = before != now || !replaced.is_empty();
        if changed {
            column.version += 1;
        }
        let calm = column.flow == FlowState::Open && !changed && !epoch_rose;
        let open = if calm {
            FlowState::Open
        } else {
            FlowState::Draining
        };
        column.flow = column.flow_for_gate(view, open);
        let readable = column.readable_legs();
        let usable = column.usable;
        let gone = LegSet::from_fn(|leg| !usable.contains(leg) || replaced.contains(leg));
        // A leg that was connected anew may have lost or dropped the changes that it had
        // accepted.
        for &slot in &self.columns[number].changes {
            let piece = &mut self.pieces[slot as usize];
            piece.accepted = piece.accepted.difference(gone);
            piece.done = piece.done.difference(gone);
        }
        self.drop_pending_answers(number, gone, out);
        self.redirect_reads(number, readable, out);
        if self.columns[number].flow == FlowState::Failed {
            self.fail_column(number, out);
        }
        self.resume_if_drained(number, out);
    }

    /// Retries reads that wait. Reads in flight to a leg that no longer serves reads go to
    /// another leg.
    fn redirect_reads(&mut self, number: usize, readable: LegSet, out: &mut impl EngineBackend) {
        let mut again = std::mem::take(&mut self.columns[number].waiting_reads);
        let column = &mut self.columns[number];
        for (slot, piece) in &mut self.pieces {
            let astray = piece.pending.difference(readable);
            if piece.column == number && !piece.is_change() && !astray.is_empty() {
                astray.legs().for_each(|leg| column.reads_by_leg[leg] -= 1);
                piece.pending = piece.pending.difference(astray);
                if piece.pending.is_empty() {
                    again.push(slot as u32);
                }
            }
        }
        for slot in again {
            if let Some(piece) = self.pieces.get_mut(slot as usize) {
                piece.failed = LegSet::NONE;
                self.send_read(slot, out);
            }
        }
    }

    fn fail_column(&mut self, number: usize, out: &mut impl EngineBackend) {
        let column = &self.columns[number];
        let order = |&slot: &u32| (slot, self.pieces[slot as usize].order);
        for (slot, order) in column.changes.iter().map(order).collect::<Vec<_>>() {
            // A piece that waits for a range lock fails when it gets the lock.
            let piece = self.pieces.get(slot as usize);
            if piece.is_some_and(|p| p.order == order && p.phase != Phase::Locking) {
                self.fail_unavailable(slot, out);
            }
        }
    }

    /// Once every old message is answered, sends incomplete changes again in order, and resumes
    /// the pieces that waited.
    pub(super) fn resume_if_drained(&mut self, number: usize, out: &mut impl EngineBackend) {
        let column = &mut self.columns[number];
        if column.flow != FlowState::Draining || column.pending_answers > 0 {
            return;
        }
        column.flow = FlowState::Open;
        let mut again = vec![];
        for &slot in &column.changes {
            let piece = &self.pieces[slot as usize];
            if piece.phase != Phase::Locking {
                // Changes that were never sent come last, in order of submission.
                let op = if piece.op == 0 { u64::MAX } else { piece.op };
                again.push((op, piece.order, slot));
            }
        }
        again.sort_unstable();
        for (_, order, slot) in again {
            let alive = self
                .pieces
                .get(slot as usize)
                .is_some_and(|p| p.order == order);
            if !alive || !self.columns[number].is_open() || self.drop_if_repair(slot, out) {
                continue;
            }
            self.send_change(slot, out);
        }
    }
}
