//! Guests' sessions of the bricks: what `store::session::write_with_number` does to each
//! pool, one step at a time.

use super::brick::{Bricks, PAGE};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::Stamp;
use std::ops::Range;

/// A session of a guest.
pub(crate) struct MappedSession {
    pub brick: BrickId,
    slice: SliceId,
    /// Its guest is dead: it does nothing any more, and the brick cleans up some time.
    is_dead: bool,
    /// Its brick is: what goes on in the pool counts, and nothing new begins.
    is_lost: bool,
    is_in_op: bool,
    locked_pages: Range<u64>,
    /// A record that is whole, and not shown yet.
    record: Option<(u64, Vec<u8>, Stamp)>,
}

impl Bricks {
    /// A guest maps a pool.
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

    /// Enters the window, if the slice is of this epoch and the brick there.
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

    /// Whether somebody is at this page.
    pub(crate) fn is_locked(&self, slice: SliceId, page: u64) -> bool {
        let mut own = self.mapped.values().filter(|it| it.slice == slice);
        own.any(|it| it.locked_pages.contains(&page))
    }

    /// Whether the pages at the ends of a range, of which a part stays, can be read.
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

    /// Swaps the slots of the record.
    pub(crate) fn publish_slots(&mut self, number: u64) {
        let MappedSession { brick, slice, .. } = self.mapped[&number];
        let Some((offset, data, stamp)) = self.session(number).record.take() else {
            return;
        };
        let len = data.len() as u64;
        let slice = self.slice_mut(brick, slice);
        let done = slice.change(number, &mut { u64::MAX }, offset, len, Some(&data), stamp);
        done.expect("it was looked at before the record");
    }

    /// Frees the lock words and leaves the window.
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

    /// Its guest dies, wherever it is.
    pub(crate) fn kill_mapped(&mut self, number: u64) {
        self.session(number).is_dead = true;
    }

    /// Dead ones that no brick has cleaned up behind.
    pub(crate) fn dead_sessions(&self) -> Vec<u64> {
        let dead = self.mapped.iter().filter(|(_, it)| it.is_dead);
        dead.map(|(number, _)| *number).collect()
    }

    /// The brick finishes what is whole, and drops what is not.
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

    /// What a barrier waits for: the dead are cleaned up behind, the living leave.
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

    /// A brick takes up its pool again, unless guests that live have it.
    pub(crate) fn recover_mapped(&mut self, brick: BrickId) -> bool {
        let has_it = |it: &MappedSession| it.brick == brick && !it.is_dead;
        if self.mapped.values().any(has_it) {
            return false;
        }
        self.retire_where(|it| it.brick == brick);
        true
    }
}
