//! Sessions of direct clients at the bricks. They do the steps of
//! `pagemesh_store::session::write_numbered` on each pool, one at a time.

use crate::world::bricks::{Bricks, PAGE};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::Stamp;
use std::ops::Range;

/// A session of a direct client.
pub(crate) struct MappedSession {
    pub brick: BrickId,
    slice: SliceId,
    /// The client is dead: it makes no more steps, and the brick retires the session some time
    /// later.
    is_dead: bool,
    /// The brick is dead: an operation in progress still counts in the pool, and no new one
    /// begins.
    is_lost: bool,
    is_in_op: bool,
    locked_pages: Range<u64>,
    /// A complete record with slots that are not published yet.
    record: Option<(u64, Vec<u8>, Stamp)>,
}

impl Bricks {
    /// A direct client maps a pool.
    pub(crate) fn map(&mut self, brick: BrickId, slice: SliceId, epoch: Epoch) -> Option<u64> {
        if !self.bricks.get(&brick)?.up || self.slice(brick, slice).epoch() > epoch.0 {
            return None;
        }
        self.next += 1;
        let mapped = MappedSession {
            brick,
            slice,
            is_dead: false,
            is_lost: false,
            is_in_op: false,
            locked_pages: 0..0,
            record: None,
        };
        self.mapped.insert(self.next, mapped);
        Some(self.next)
    }

    fn session(&mut self, number: u64) -> &mut MappedSession {
        self.mapped.get_mut(&number).expect("a session")
    }

    pub(crate) fn is_lost(&self, number: u64) -> bool {
        self.mapped[&number].is_lost
    }

    /// Begins an operation, if the slice has this epoch and the brick is up.
    pub(crate) fn enter_window(&mut self, number: u64, epoch: Epoch) -> bool {
        let MappedSession { brick, slice, .. } = self.mapped[&number];
        let is_new = epoch.0 >= self.slice(brick, slice).epoch();
        let session = self.session(number);
        session.is_in_op = is_new && !session.is_lost;
        session.is_in_op
    }

    /// Takes the lock words of these pages, if they are free.
    pub(crate) fn lock(&mut self, number: u64, pages: &Range<u64>) -> bool {
        let slice = self.mapped[&number].slice;
        let is_free = |(other, it): (&u64, &MappedSession)| {
            let is_beside =
                it.locked_pages.end <= pages.start || pages.end <= it.locked_pages.start;
            *other == number || it.slice != slice || is_beside
        };
        let is_free = self.mapped.iter().all(is_free);
        if is_free {
            self.session(number).locked_pages = pages.clone();
        }
        is_free
    }

    /// Whether a session holds the lock word of this page.
    pub(crate) fn is_locked(&self, slice: SliceId, page: u64) -> bool {
        let mut own = self.mapped.values().filter(|it| it.slice == slice);
        own.any(|it| it.locked_pages.contains(&page))
    }

    /// Whether the partly written pages at the ends of a range can be read.
    pub(crate) fn can_merge(&self, number: u64, offset: u64, len: u64) -> bool {
        let MappedSession { brick, slice, .. } = self.mapped[&number];
        let damaged = &self.slice(brick, slice).damaged;
        let end = offset + len;
        let is_part = |at: &u64| !at.is_multiple_of(PAGE);
        let mut parts = [offset, end].into_iter().filter(is_part);
        parts.all(|at| !damaged.contains(&(at / PAGE)))
    }

    pub(crate) fn record(&mut self, number: u64, offset: u64, data: Vec<u8>, stamp: Stamp) {
        self.session(number).record = Some((offset, data, stamp));
    }

    /// Publishes the slots of the record.
    pub(crate) fn publish_slots(&mut self, number: u64) {
        let MappedSession { brick, slice, .. } = self.mapped[&number];
        let Some((offset, data, stamp)) = self.session(number).record.take() else {
            return;
        };
        let len = data.len() as u64;
        let slice = self.slice_mut(brick, slice);
        let done = slice.change(number, &mut { u64::MAX }, offset, len, Some(&data), stamp);
        done.expect("the pages were checked before the record");
    }

    /// Frees the lock words and ends the operation.
    pub(crate) fn leave_window(&mut self, number: u64) {
        let session = self.session(number);
        (session.locked_pages, session.is_in_op) = (0..0, false);
    }

    pub(crate) fn read_mapped(
        &mut self,
        number: u64,
        epoch: Epoch,
        offset: u64,
        len: u32,
    ) -> Option<Vec<u8>> {
        use pagemesh_base::slice::SliceReply;
        let MappedSession { brick, slice, .. } = self.mapped[&number];
        if self.is_lost(number) || self.slice(brick, slice).epoch() > epoch.0 {
            return None;
        }
        match self.slice_mut(brick, slice).read(offset, len) {
            Ok(SliceReply::Data(data)) => Some(data),
            _ => None,
        }
    }

    /// The client dies, at any step.
    pub(crate) fn kill_mapped(&mut self, number: u64) {
        self.session(number).is_dead = true;
    }

    /// Sessions of dead clients that no brick has retired.
    pub(crate) fn dead_sessions(&self) -> Vec<u64> {
        let dead = self.mapped.iter().filter(|(_, it)| it.is_dead);
        dead.map(|(number, _)| *number).collect()
    }

    /// Retires a session: the brick rolls a complete record forward, and drops an incomplete
    /// one.
    pub(crate) fn retire(&mut self, number: u64) {
        self.publish_slots(number);
        let session = self.mapped.remove(&number).expect("a session");
        self.slice_mut(session.brick, session.slice)
            .end_session(number);
    }

    fn retire_where(&mut self, is_meant: impl Fn(&MappedSession) -> bool) {
        let dead = self.mapped.iter().filter(|(_, it)| it.is_dead);
        let dead = dead.filter(|(_, it)| is_meant(it));
        let dead: Vec<u64> = dead.map(|(number, _)| *number).collect();
        dead.into_iter().for_each(|number| self.retire(number));
    }

    /// Prepares a barrier: retires dead sessions; true if no live session has an operation in
    /// progress.
    pub(crate) fn drain_mapped(&mut self, slice: SliceId) -> bool {
        self.retire_where(|it| it.slice == slice);
        !self
            .mapped
            .values()
            .any(|it| it.slice == slice && it.is_in_op)
    }

    pub(crate) fn lose_mapped(&mut self, brick: BrickId) {
        let own = self.mapped.values_mut().filter(|it| it.brick == brick);
        own.for_each(|it| it.is_lost = true);
    }

    /// A brick opens its pool again; false while a live direct client maps it.
    pub(crate) fn recover_mapped(&mut self, brick: BrickId) -> bool {
        let has_it = |it: &MappedSession| it.brick == brick && !it.is_dead;
        if self.mapped.values().any(has_it) {
            return false;
        }
        self.retire_where(|it| it.brick == brick);
        true
    }
}
