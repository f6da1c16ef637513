//! Guests, one step at a time.

use super::mount::Dead;
use super::{FILE_SECTORS, FILES, Life, PAGE_SECTORS, segment_of};
use crate::guests::{Guests, Picture, Place};
use crate::hub::{Hub, guard};
use crate::testing::oracle::{SECTOR, fill};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::slice::Stamp;
use std::ops::Range;
use std::sync::Arc;

/// Where a guest is in its operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The row is active.
    Look,
    Enter,
    Lock(usize),
    Number,
    Record(usize, u64),
    Show(usize),
    Leave,
    /// The next page of a read.
    Read(u64),
}

/// An operation of a guest.
pub(super) struct Work {
    pub(super) phase: Phase,
    pub(super) file: u64,
    pub(super) sectors: Range<u64>,
    pub(super) value: u64,
    /// As the oracle knows it; none: nobody asks any more.
    pub(super) order: Option<u64>,
    pub(super) is_write: bool,
    pub(super) read: Vec<u8>,
}

/// A guest.
pub(super) struct Actor {
    pub(super) hub: Arc<Hub>,
    pub(super) row: usize,
    pub(super) channel: usize,
    pub(super) picture: Option<Picture>,
    pub(super) legs: Vec<u64>,
    pub(super) work: Option<Work>,
    /// Its mount is gone: it ends what it has begun, and itself.
    pub(super) is_orphan: bool,
}

impl Life {
    /// A guest's next step; it begins something only if it may.
    pub(super) fn act(&mut self, at: usize, may_begin: bool) {
        match self.actors[at].work.take() {
            Some(work) => {
                if let Some(work) = self.go_on(at, work) {
                    self.actors[at].work = Some(work);
                }
            }
            None if self.actors[at].is_orphan => {
                let actor = self.actors.swap_remove(at);
                self.unmap(&actor.legs);
            }
            None => {
                if self.equip(at) && may_begin {
                    self.begin(at);
                }
            }
        }
    }

    pub(super) fn unmap(&self, legs: &[u64]) {
        let mut bricks = guard(&self.fabric.0);
        for &leg in legs {
            bricks.end_mapped(leg);
            bricks.bury(leg);
        }
    }

    /// Whether it has the legs of the present picture; drops those of another one.
    pub(super) fn equip(&mut self, at: usize) -> bool {
        let actor = &mut self.actors[at];
        let generation = segment_of(&actor.hub).generation();
        let is_ready = actor.picture.as_ref().map(|it| it.generation) == Some(generation);
        let is_lost = {
            let bricks = guard(&self.fabric.0);
            actor.legs.iter().any(|&leg| bricks.is_lost(leg))
        };
        if is_ready && !is_lost {
            return true;
        }
        actor.picture = None;
        let legs = std::mem::take(&mut actor.legs);
        self.unmap(&legs);
        let actor = &mut self.actors[at];
        let Some(picture) = actor.hub.guests.get().and_then(Guests::picture) else {
            return false;
        };
        let mut bricks = guard(&self.fabric.0);
        for seat in &picture.seats {
            actor
                .legs
                .extend(bricks.map(seat.brick, seat.slice, picture.epoch));
        }
        drop(bricks);
        if actor.legs.len() == picture.seats.len() {
            actor.picture = Some(picture);
        }
        false
    }

    pub(super) fn range(&mut self) -> (u64, Range<u64>) {
        let file = self.dice.roll(FILES);
        let start = self.dice.roll(FILE_SECTORS);
        let len = match self.dice.one_in(2) {
            true => 1 + self.dice.roll(7),
            false => PAGE_SECTORS * (1 + self.dice.roll(2)),
        };
        let start = match len.is_multiple_of(PAGE_SECTORS) {
            true => start / PAGE_SECTORS * PAGE_SECTORS,
            false => start,
        };
        let end = (start + len).min(FILE_SECTORS);
        let first = file * FILE_SECTORS;
        (file, first + start..first + end)
    }

    pub(super) fn begin(&mut self, at: usize) {
        let (file, sectors) = self.range();
        self.next += 1;
        let (value, is_write) = (self.next, self.dice.roll(3) > 0);
        let actor = &mut self.actors[at];
        let order = match is_write {
            true => self.oracle.begin(actor.channel, sectors.clone(), value),
            false => self.oracle.begin_read(sectors.clone()),
        };
        segment_of(&actor.hub).row(actor.row).enter(Place {
            file,
            offset: 0,
            len: 0,
        });
        actor.work = Some(Work {
            phase: Phase::Look,
            file,
            sectors,
            value,
            order: Some(order),
            is_write,
            read: vec![],
        });
    }

    /// The kernel does it, and what it does is another operation.
    pub(super) fn turn_away(&mut self, at: usize, work: &Work) {
        let actor = &self.actors[at];
        segment_of(&actor.hub).row(actor.row).leave();
        self.tally.turned_away += 1;
        match work.order {
            Some(order) if work.is_write => self.oracle.refuse(order),
            Some(order) => self.oracle.end_read(order, None).expect("nothing"),
            None => {}
        }
    }

    /// One step of an operation; none once it has ended.
    pub(super) fn go_on(&mut self, at: usize, mut work: Work) -> Option<Work> {
        let actor = &self.actors[at];
        let (hub, legs) = (Arc::clone(&actor.hub), actor.legs.clone());
        let segment = segment_of(&hub);
        let row = segment.row(actor.row);
        let (offset, end) = (work.sectors.start * SECTOR, work.sectors.end * SECTOR);
        let epoch = actor.picture.as_ref().map(|picture| picture.epoch);
        let (Some(epoch), fabric) = (epoch, self.fabric.clone()) else {
            unreachable!("it began with a picture");
        };
        let mut bricks = guard(&fabric.0);
        work.phase = match work.phase {
            Phase::Look => {
                let generation = actor.picture.as_ref().map(|picture| picture.generation);
                let is_board_open = self.boards[work.file as usize] == 0 || actor.is_orphan;
                let is_closed = segment.is_closed() && !defect::is(Defect::ClosedUnseen);
                if generation != Some(segment.generation()) || is_closed || !is_board_open {
                    drop(bricks);
                    self.turn_away(at, &work);
                    return None;
                }
                row.say(offset, if work.is_write { end - offset } else { 0 });
                match work.is_write {
                    true => Phase::Enter,
                    false => Phase::Read(offset),
                }
            }
            Phase::Enter => {
                if !legs.iter().all(|&leg| bricks.enter(leg, epoch)) {
                    legs.iter().for_each(|&leg| bricks.leave(leg));
                    drop(bricks);
                    self.turn_away(at, &work);
                    return None;
                }
                Phase::Lock(0)
            }
            Phase::Lock(leg) => {
                let pages = offset / 4096..end.div_ceil(4096);
                match bricks.lock(legs[leg], &pages) {
                    true if leg + 1 < legs.len() => Phase::Lock(leg + 1),
                    true => Phase::Number,
                    false => Phase::Lock(leg),
                }
            }
            Phase::Number => {
                let can_merge = |leg: &u64| bricks.can_merge(*leg, offset, end - offset);
                if !legs.iter().all(can_merge) {
                    legs.iter().for_each(|&leg| bricks.leave(leg));
                    drop(bricks);
                    self.turn_away(at, &work);
                    return None;
                }
                Phase::Record(0, segment.next_op())
            }
            Phase::Record(leg, op) => {
                let data = fill(work.value, work.sectors.end - work.sectors.start);
                let stamp = Stamp { epoch, op, open: 0 };
                bricks.record(legs[leg], offset, data, stamp);
                match leg + 1 < legs.len() {
                    true => Phase::Record(leg + 1, op),
                    false => Phase::Show(0),
                }
            }
            Phase::Show(leg) => {
                bricks.show(legs[leg]);
                match leg + 1 < legs.len() {
                    true => Phase::Show(leg + 1),
                    false => Phase::Leave,
                }
            }
            Phase::Leave => {
                legs.iter().for_each(|&leg| bricks.leave(leg));
                row.leave();
                self.tally.writes += 1;
                work.order
                    .into_iter()
                    .for_each(|it| self.oracle.complete(it));
                return None;
            }
            Phase::Read(from) => {
                let to = end.min((from / 4096 + 1) * 4096);
                let leg = match defect::is(Defect::FirstLegRead) {
                    true => legs.first(),
                    false => legs.last(),
                };
                let leg = *leg.expect("a picture has legs");
                let Some(part) = bricks.read_mapped(leg, epoch, from, (to - from) as u32) else {
                    drop(bricks);
                    self.turn_away(at, &work);
                    return None;
                };
                work.read.extend(part);
                if to < end {
                    Phase::Read(to)
                } else {
                    row.leave();
                    self.tally.reads += 1;
                    if let Some(order) = work.order {
                        let read = self.oracle.end_read(order, Some(&work.read));
                        read.unwrap_or_else(|wrong| panic!("a guest: {wrong}"));
                    }
                    return None;
                }
            }
        };
        Some(work)
    }

    /// A guest dies, wherever it is.
    pub(super) fn die(&mut self) {
        if !self.actors.is_empty() {
            let at = self.dice.roll(self.actors.len() as u64) as usize;
            self.die_at(at);
        }
    }

    /// A guest dies with its record on one leg alone, whose brick finishes that at once.
    /// A little later it dies, too.
    pub(super) fn ambush(&mut self) {
        if self.dice.one_in(40)
            && let Some(number) = self.ambushed.take()
        {
            return guard(&self.fabric.0).kill(number);
        }
        let is_between = |actor: &Actor| {
            let phase = actor.work.as_ref().map(|work| work.phase);
            matches!(phase, Some(Phase::Record(1, _)))
        };
        let Some(at) = self.actors.iter().position(is_between) else {
            return;
        };
        let leg = self.actors[at].legs[0];
        self.die_at(at);
        let mut bricks = guard(&self.fabric.0);
        self.ambushed = Some(bricks.mapped[&leg].brick);
        bricks.bury(leg);
    }

    pub(super) fn die_at(&mut self, at: usize) {
        let actor = self.actors.swap_remove(at);
        let mut bricks = guard(&self.fabric.0);
        actor.legs.iter().for_each(|&leg| bricks.end_mapped(leg));
        drop(bricks);
        if let Some(Work {
            order, is_write, ..
        }) = actor.work
        {
            match order {
                Some(order) if is_write => self.oracle.forget(order),
                Some(order) => self.oracle.end_read(order, None).expect("nothing"),
                None => {}
            }
            if !actor.is_orphan {
                self.tally.deaths_inside += 1;
                let row = segment_of(&actor.hub).row(actor.row);
                self.dead.push(Dead {
                    row: actor.row,
                    place: row.place().expect("it was inside"),
                    healed: None,
                });
            }
        }
        self.admit();
    }
}
