//! Direct clients, one step at a time.

use super::mount::DeadRow;
use super::{DirectScenario, FILE_SECTORS, FILES, segment_of};
use crate::world::oracle::{PAGE_SECTORS, SECTOR, fill};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::poison;
use pagemesh_base::slice::Stamp;
use pagemesh_volume::direct_access::{FileRange, LayoutLease};
use pagemesh_volume::test_api::{DirectAccess, VolumeShared};
use std::ops::Range;
use std::sync::Arc;

/// The phase of a direct operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpPhase {
    /// The row is active.
    CheckAccess,
    Enter,
    Lock(usize),
    AssignOp,
    Record(usize, (Epoch, u64)),
    PublishSlots(usize),
    Leave,
    /// Reads this page next.
    Read(u64),
}

/// An operation of a direct client.
pub(super) struct ClientOp {
    pub(super) phase: OpPhase,
    pub(super) file: u64,
    pub(super) sectors: Range<u64>,
    pub(super) value: u64,
    /// Its order in the oracle; none if the result is not checked any more.
    pub(super) order: Option<u64>,
    pub(super) is_write: bool,
    pub(super) read: Vec<u8>,
}

/// A direct client.
pub(super) struct SimulatedClient {
    pub(super) hub: Arc<VolumeShared>,
    pub(super) row: usize,
    pub(super) channel: usize,
    pub(super) lease: Option<LayoutLease>,
    pub(super) legs: Vec<u64>,
    pub(super) op: Option<ClientOp>,
    /// Its mount is gone: it ends its operation, and then itself.
    pub(super) is_orphan: bool,
}

impl DirectScenario {
    /// Makes the client's next step. A new operation begins only if `may_begin` is set.
    pub(super) fn step_client(&mut self, at: usize, may_begin: bool) {
        match self.clients[at].op.take() {
            Some(work) => {
                if let Some(work) = self.step_op(at, work) {
                    self.clients[at].op = Some(work);
                }
            }
            None if self.clients[at].is_orphan => {
                let actor = self.clients.swap_remove(at);
                self.unmap(&actor.legs);
            }
            None => {
                if self.map_lease_legs(at) && may_begin {
                    self.begin_op(at);
                }
            }
        }
    }

    pub(super) fn unmap(&self, legs: &[u64]) {
        let mut bricks = poison::lock(&self.world.fabric.0);
        for &leg in legs {
            bricks.kill_mapped(leg);
            bricks.retire(leg);
        }
    }

    /// Whether the client has the legs of the present lease. Legs of another lease are dropped.
    pub(super) fn map_lease_legs(&mut self, at: usize) -> bool {
        let actor = &mut self.clients[at];
        let generation = segment_of(&actor.hub).generation();
        let is_ready = actor.lease.as_ref().map(|it| it.generation) == Some(generation);
        let is_lost = {
            let bricks = poison::lock(&self.world.fabric.0);
            actor.legs.iter().any(|&leg| bricks.is_lost(leg))
        };
        if is_ready && !is_lost {
            return true;
        }
        actor.lease = None;
        let legs = std::mem::take(&mut actor.legs);
        self.unmap(&legs);
        let actor = &mut self.clients[at];
        let Some(picture) = actor.hub.direct_access.get().and_then(DirectAccess::lease) else {
            return false;
        };
        let mut bricks = poison::lock(&self.world.fabric.0);
        for seat in &picture.legs {
            actor
                .legs
                .extend(bricks.map(seat.brick, seat.slice, picture.epoch));
        }
        drop(bricks);
        if actor.legs.len() == picture.legs.len() {
            actor.lease = Some(picture);
        }
        false
    }

    pub(super) fn random_range(&mut self) -> (u64, Range<u64>) {
        let file = self.world.rng.below(FILES);
        let start = self.world.rng.below(FILE_SECTORS);
        let len = match self.world.rng.one_in(2) {
            true => 1 + self.world.rng.below(7),
            false => PAGE_SECTORS * (1 + self.world.rng.below(2)),
        };
        let start = match len.is_multiple_of(PAGE_SECTORS) {
            true => start / PAGE_SECTORS * PAGE_SECTORS,
            false => start,
        };
        let end = (start + len).min(FILE_SECTORS);
        let first = file * FILE_SECTORS;
        (file, first + start..first + end)
    }

    pub(super) fn begin_op(&mut self, at: usize) {
        let (file, sectors) = self.random_range();
        self.next += 1;
        let (value, is_write) = (self.next, self.world.rng.below(3) > 0);
        let actor = &mut self.clients[at];
        let order = match is_write {
            true => self.oracle.begin(actor.channel, sectors.clone(), value),
            false => self.oracle.begin_read(sectors.clone()),
        };
        segment_of(&actor.hub).row(actor.row).begin_op(FileRange {
            file,
            offset: 0,
            len: 0,
        });
        actor.op = Some(ClientOp {
            phase: OpPhase::CheckAccess,
            file,
            sectors,
            value,
            order: Some(order),
            is_write,
            read: vec![],
        });
    }

    /// Passes the operation to the kernel. The oracle counts the kernel's request as another
    /// operation.
    pub(super) fn fall_back_to_kernel(&mut self, at: usize, work: &ClientOp) {
        let actor = &self.clients[at];
        segment_of(&actor.hub).row(actor.row).end_op();
        self.coverage.fallbacks += 1;
        match work.order {
            Some(order) if work.is_write => self.oracle.cancel(order),
            Some(order) => self.oracle.end_read(order, None).expect("nothing"),
            None => {}
        }
    }

    /// Makes one step of an operation; none once it has ended.
    pub(super) fn step_op(&mut self, at: usize, mut work: ClientOp) -> Option<ClientOp> {
        let actor = &self.clients[at];
        let (hub, legs) = (Arc::clone(&actor.hub), actor.legs.clone());
        let segment = segment_of(&hub);
        let row = segment.row(actor.row);
        let (offset, end) = (work.sectors.start * SECTOR, work.sectors.end * SECTOR);
        let epoch = actor.lease.as_ref().map(|picture| picture.epoch);
        let (Some(epoch), fabric) = (epoch, self.world.fabric.clone()) else {
            unreachable!("it began with a lease");
        };
        let mut bricks = poison::lock(&fabric.0);
        work.phase = match work.phase {
            OpPhase::CheckAccess => {
                let generation = actor.lease.as_ref().map(|picture| picture.generation);
                let is_board_open = self.closed_files[work.file as usize] == 0 || actor.is_orphan;
                let is_closed = segment.is_closed() && !defect::is(Defect::AccessDisabledIgnored);
                if generation != Some(segment.generation()) || is_closed || !is_board_open {
                    drop(bricks);
                    self.fall_back_to_kernel(at, &work);
                    return None;
                }
                row.set_range(offset, if work.is_write { end - offset } else { 0 });
                match work.is_write {
                    true => OpPhase::Enter,
                    false => OpPhase::Read(offset),
                }
            }
            OpPhase::Enter => {
                if !legs.iter().all(|&leg| bricks.enter_window(leg, epoch)) {
                    legs.iter().for_each(|&leg| bricks.leave_window(leg));
                    drop(bricks);
                    self.fall_back_to_kernel(at, &work);
                    return None;
                }
                OpPhase::Lock(0)
            }
            OpPhase::Lock(leg) => {
                let pages = offset / 4096..end.div_ceil(4096);
                match bricks.lock(legs[leg], &pages) {
                    true if leg + 1 < legs.len() => OpPhase::Lock(leg + 1),
                    true => OpPhase::AssignOp,
                    false => OpPhase::Lock(leg),
                }
            }
            OpPhase::AssignOp => {
                let can_merge = |leg: &u64| bricks.can_merge(*leg, offset, end - offset);
                if !legs.iter().all(can_merge) {
                    legs.iter().for_each(|&leg| bricks.leave_window(leg));
                    drop(bricks);
                    self.fall_back_to_kernel(at, &work);
                    return None;
                }
                OpPhase::Record(0, segment.next_stamp(epoch))
            }
            OpPhase::Record(leg, (stamped, op)) => {
                let data = fill(work.value, work.sectors.end - work.sectors.start);
                let stamp = Stamp {
                    epoch: stamped,
                    op,
                    open_ops: 0,
                };
                bricks.record(legs[leg], offset, data, stamp);
                match leg + 1 < legs.len() {
                    true => OpPhase::Record(leg + 1, (stamped, op)),
                    false => OpPhase::PublishSlots(0),
                }
            }
            OpPhase::PublishSlots(leg) => {
                bricks.publish_slots(legs[leg]);
                match leg + 1 < legs.len() {
                    true => OpPhase::PublishSlots(leg + 1),
                    false => OpPhase::Leave,
                }
            }
            OpPhase::Leave => {
                legs.iter().for_each(|&leg| bricks.leave_window(leg));
                row.end_op();
                self.coverage.writes += 1;
                work.order
                    .into_iter()
                    .for_each(|it| self.oracle.complete(it));
                return None;
            }
            OpPhase::Read(from) => {
                let to = end.min((from / 4096 + 1) * 4096);
                let leg = match defect::is(Defect::FirstLegRead) {
                    true => legs.first(),
                    false => legs.last(),
                };
                let leg = *leg.expect("a lease has legs");
                let Some(part) = bricks.read_mapped(leg, epoch, from, (to - from) as u32) else {
                    drop(bricks);
                    self.fall_back_to_kernel(at, &work);
                    return None;
                };
                work.read.extend(part);
                if to < end {
                    OpPhase::Read(to)
                } else {
                    row.end_op();
                    self.coverage.reads += 1;
                    if let Some(order) = work.order {
                        let read = self.oracle.end_read(order, Some(&work.read));
                        read.unwrap_or_else(|wrong| panic!("a direct client: {wrong}"));
                    }
                    return None;
                }
            }
        };
        Some(work)
    }

    /// Kills a direct client at any step.
    pub(super) fn kill_random_client(&mut self) {
        if !self.clients.is_empty() {
            let at = self.world.rng.below(self.clients.len() as u64) as usize;
            self.kill_client(at);
        }
    }

    /// Kills a direct client after its record is on one leg only. That leg's brick rolls the
    /// record forward at once, and dies a little later.
    pub(super) fn kill_client_after_first_leg(&mut self) {
        if self.world.rng.one_in(40)
            && let Some(number) = self.targeted_brick.take()
        {
            return poison::lock(&self.world.fabric.0).kill(number);
        }
        let is_between = |actor: &SimulatedClient| {
            let phase = actor.op.as_ref().map(|work| work.phase);
            matches!(phase, Some(OpPhase::Record(1, _)))
        };
        let Some(at) = self.clients.iter().position(is_between) else {
            return;
        };
        let leg = self.clients[at].legs[0];
        self.kill_client(at);
        let mut bricks = poison::lock(&self.world.fabric.0);
        self.targeted_brick = Some(bricks.mapped[&leg].brick);
        bricks.retire(leg);
    }

    pub(super) fn kill_client(&mut self, at: usize) {
        let actor = self.clients.swap_remove(at);
        let mut bricks = poison::lock(&self.world.fabric.0);
        actor.legs.iter().for_each(|&leg| bricks.kill_mapped(leg));
        drop(bricks);
        if let Some(ClientOp {
            order, is_write, ..
        }) = actor.op
        {
            match order {
                Some(order) if is_write => self.oracle.mark_indeterminate(order),
                Some(order) => self.oracle.end_read(order, None).expect("nothing"),
                None => {}
            }
            if !actor.is_orphan {
                self.coverage.deaths_in_op += 1;
                let row = segment_of(&actor.hub).row(actor.row);
                self.dead_rows.push(DeadRow {
                    row: actor.row,
                    range: row.active_range().expect("an operation is in progress"),
                    reconciled: None,
                });
            }
        }
        self.add_clients();
    }
}
