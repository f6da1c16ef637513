//! What the engine knows of a column, and what happens when that changes.

use super::piece::Phase;
use super::{Engine, Outbox, Piece};
use crate::view::{ColumnView, Gate, Mask, View};
use crate::window::Window;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::COPIES_MAX;
use slab::Slab;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Open,
    /// A leg that must be written is not there: the keeper sees to it.
    Held,
    /// The write set changed: old messages are awaited before changes are
    /// sent again.
    Draining,
    Failed,
}

#[derive(Debug)]
pub(super) struct Column {
    flow: Flow,
    /// Rises whenever the set of legs or their connections change.
    pub version: u32,
    /// The connections of the written legs, 0 for the others.
    serials: [u64; COPIES_MAX],
    pub written: Mask,
    pub in_sync: Mask,
    buffering: Mask,
    /// Those written to that have a live connection.
    usable: Mask,
    /// Changes in flight, those that wait included.
    pub changes: Vec<u32>,
    /// Messages of changes on their way.
    pub pending: u32,
    pub window: Window,
    /// Reads on their way, by leg.
    pub load: [u32; COPIES_MAX],
    /// Answers that nobody waits for any more: the legs, with the tags of reads
    /// that another leg answered first. They are among the load.
    pub overdue: Vec<(usize, u64)>,
    turn: usize,
    /// Reads behind a change of this channel.
    pub trailing: Vec<u32>,
    /// Reads without an in-sync leg.
    pub waiting: Vec<u32>,
    pub background_flush: bool,
}

impl Column {
    pub(super) fn new(view: &ColumnView, live: impl Fn(usize) -> bool) -> Column {
        let mut column = Column {
            flow: Flow::Open,
            version: 0,
            serials: [0; COPIES_MAX],
            written: Mask::NONE,
            in_sync: Mask::NONE,
            buffering: Mask::NONE,
            usable: Mask::NONE,
            changes: vec![],
            pending: 0,
            window: Window::default(),
            load: [0; COPIES_MAX],
            overdue: vec![],
            turn: 0,
            trailing: vec![],
            waiting: vec![],
            background_flush: false,
        };
        column.look_at(view, &live);
        column.flow = column.flow_wanted(view, Flow::Open);
        column
    }

    /// Takes the legs over from the view.
    fn look_at(&mut self, view: &ColumnView, live: &dyn Fn(usize) -> bool) {
        self.written = view.written();
        self.in_sync = match defect::is(Defect::SyncingLegRead) {
            true => view.written(),
            false => view.in_sync(),
        };
        self.buffering = view.buffering();
        self.usable = Mask::NONE;
        let written = self.written.legs();
        written
            .filter(|&leg| live(leg))
            .for_each(|leg| self.usable.add(leg));
        self.serials = [0; COPIES_MAX];
        let written = self.written.legs();
        written.for_each(|leg| self.serials[leg] = view.legs[leg].serial);
    }

    fn flow_wanted(&self, view: &ColumnView, when_open: Flow) -> Flow {
        match view.gate {
            Gate::Failed => Flow::Failed,
            Gate::Down => Flow::Held,
            Gate::Open if self.usable.covers(self.written) => when_open,
            Gate::Open => Flow::Held,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.flow == Flow::Open
    }

    pub(super) fn is_failed(&self) -> bool {
        self.flow == Flow::Failed
    }

    /// Whether answers of all legs count as they come: not while one is lost.
    pub(super) fn is_complete(&self) -> bool {
        matches!(self.flow, Flow::Open | Flow::Draining) && self.usable.covers(self.written)
    }

    pub(super) fn readable(&self) -> Mask {
        self.in_sync.and(self.usable)
    }

    /// Legs on which a flush means something.
    pub(super) fn flushed(&self) -> Mask {
        self.written.and(self.buffering)
    }

    /// The readable leg with the least reads, in turns among equals.
    pub(super) fn choose(&mut self, except: Mask) -> Option<usize> {
        let candidates = self.readable().without(except);
        self.turn += 1;
        let from = self.turn % COPIES_MAX;
        (0..COPIES_MAX)
            .map(|step| (from + step) % COPIES_MAX)
            .filter(|&leg| candidates.has(leg))
            .min_by_key(|&leg| self.load[leg])
    }

    pub(super) fn list(&mut self, piece: &mut Piece, slot: u32) {
        piece.listed = self.changes.len();
        self.changes.push(slot);
    }

    pub(super) fn unlist(&mut self, piece: &Piece, pieces: &mut Slab<Piece>) {
        self.changes.swap_remove(piece.listed);
        if let Some(&moved) = self.changes.get(piece.listed) {
            pieces[moved as usize].listed = piece.listed;
        }
    }

    pub(super) fn forget(&mut self) {
        self.changes.clear();
        self.trailing.clear();
        self.waiting.clear();
        self.pending = 0;
        self.load = [0; COPIES_MAX];
        self.overdue.clear();
    }

    /// An answer came that no piece waits for. True if it was overdue.
    pub(super) fn note_overdue(&mut self, leg: usize, tag: u64) -> bool {
        let at = self.overdue.iter().position(|&it| it == (leg, tag));
        if let Some(at) = at {
            self.overdue.swap_remove(at);
            self.load[leg] -= 1;
        }
        at.is_some()
    }
}

impl Engine {
    /// The connection to a leg is gone, or of no use.
    pub(crate) fn lose_leg(
        &mut self,
        number: usize,
        leg: usize,
        why: String,
        out: &mut impl Outbox,
    ) {
        let column = &mut self.columns[number];
        if column.usable.has(leg) {
            column.usable.remove(leg);
            if column.flow != Flow::Failed {
                column.flow = Flow::Held;
            }
            out.lose(number, leg, why);
        }
        self.abandon(number, Mask::of(leg), out);
    }

    /// Expects no answers from these legs any more.
    fn abandon(&mut self, number: usize, legs: Mask, out: &mut impl Outbox) {
        let mut reads = vec![];
        let mut changes = vec![];
        let column = &mut self.columns[number];
        for (slot, piece) in &mut self.pieces {
            let gone = piece.pending.and(legs);
            if piece.column != number || gone.is_empty() {
                continue;
            }
            piece.pending = piece.pending.without(legs);
            if piece.is_change() {
                column.pending -= gone.len();
                changes.push(slot as u32);
            } else {
                gone.legs().for_each(|leg| column.load[leg] -= 1);
                if piece.pending.is_empty() {
                    reads.push(slot as u32);
                }
            }
        }
        let load = &mut column.load;
        column.overdue.retain(|&(leg, _)| {
            let is_gone = legs.has(leg);
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

    /// A new picture of the volume. `live` tells which legs are connected as
    /// the view has them.
    pub(crate) fn adopt(
        &mut self,
        view: &Arc<View>,
        live: impl Fn(usize, usize) -> bool,
        out: &mut impl Outbox,
    ) {
        if view.fenced {
            return self.fence(out);
        }
        let epoch_rose = view.epoch != self.view.epoch;
        self.view = Arc::clone(view);
        for (number, column) in view.columns.iter().enumerate() {
            let live = |leg| live(number, leg);
            if number < self.columns.len() {
                self.adopt_column(number, column, epoch_rose, &live, out);
            } else {
                self.columns.push(Column::new(column, live));
            }
        }
    }

    fn adopt_column(
        &mut self,
        number: usize,
        view: &ColumnView,
        epoch_rose: bool,
        live: &dyn Fn(usize) -> bool,
        out: &mut impl Outbox,
    ) {
        let column = &mut self.columns[number];
        let before = (column.written, column.in_sync, column.usable);
        let serials = column.serials;
        column.look_at(view, live);
        let replaced = Mask::where_leg(|leg| column.serials[leg] != serials[leg]);
        let now = (column.written, column.in_sync, column.usable);
        let changed = before != now || !replaced.is_empty();
        if changed {
            column.version += 1;
        }
        let calm = column.flow == Flow::Open && !changed && !epoch_rose;
        let open = if calm { Flow::Open } else { Flow::Draining };
        column.flow = column.flow_wanted(view, open);
        let readable = column.readable();
        let usable = column.usable;
        let gone = Mask::where_leg(|leg| !usable.has(leg) || replaced.has(leg));
        // What a leg held, its next life may have lost, or was made to forget.
        for &slot in &self.columns[number].changes {
            let piece = &mut self.pieces[slot as usize];
            piece.held = piece.held.without(gone);
            piece.done = piece.done.without(gone);
        }
        self.abandon(number, gone, out);
        self.redirect_reads(number, readable, out);
        if self.columns[number].flow == Flow::Failed {
            self.fail_column(number, out);
        }
        self.resume_if_drained(number, out);
    }

    /// Reads that wait get another try; those under way to a leg that no
    /// longer serves reads go elsewhere.
    fn redirect_reads(&mut self, number: usize, readable: Mask, out: &mut impl Outbox) {
        let mut again = std::mem::take(&mut self.columns[number].waiting);
        let column = &mut self.columns[number];
        for (slot, piece) in &mut self.pieces {
            let astray = piece.pending.without(readable);
            if piece.column == number && !piece.is_change() && !astray.is_empty() {
                astray.legs().for_each(|leg| column.load[leg] -= 1);
                piece.pending = piece.pending.without(astray);
                if piece.pending.is_empty() {
                    again.push(slot as u32);
                }
            }
        }
        for slot in again {
            if let Some(piece) = self.pieces.get_mut(slot as usize) {
                piece.failed = Mask::NONE;
                self.send_read(slot, out);
            }
        }
    }

    fn fail_column(&mut self, number: usize, out: &mut impl Outbox) {
        let column = &self.columns[number];
        let order = |&slot: &u32| (slot, self.pieces[slot as usize].order);
        for (slot, order) in column.changes.iter().map(order).collect::<Vec<_>>() {
            // One that waits for a range lock comes here when it gets it.
            let piece = self.pieces.get(slot as usize);
            if piece.is_some_and(|p| p.order == order && p.phase != Phase::Locking) {
                self.fail_unavailable(slot, out);
            }
        }
    }

    /// Once every old message is answered, what is not complete is sent again
    /// in order, and what was held goes on.
    pub(super) fn resume_if_drained(&mut self, number: usize, out: &mut impl Outbox) {
        let column = &mut self.columns[number];
        if column.flow != Flow::Draining || column.pending > 0 {
            return;
        }
        column.flow = Flow::Open;
        let mut again = vec![];
        for &slot in &column.changes {
            let piece = &self.pieces[slot as usize];
            if piece.phase != Phase::Locking {
                // Never sent ones come last, in order of submission.
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
