//! An operation on one to three pools: its resources, its begin, its lock words and its end.
//!
//! Invariants: the operation is in progress on all legs or on none. Locks are taken pool by pool in
//! the order of the pools' UUIDs, and in ascending order within a pool. No operation in progress
//! waits for the owner of a pool. The waits for the owner are in [`super::grants`].

use super::{LegFailure, LegSession, Session, defects};
use crate::defect::{self, Defect};
use crate::format::table::SlotLocation;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;

/// Waits for the owner before the session gives up. Other sessions may take the frames that an
/// answer freed.
const OWNER_WAITS_MAX: u32 = 3;

/// For each leg, the byte of the first slot of a run of pages.
pub(super) type FirstSlots = [usize; 3];

/// The resources that an operation needs on every leg before it begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpRequirements {
    /// Granted frames.
    pub(crate) frames: u64,
    /// Lines of the longest entry that it may append.
    pub(crate) entry_lines: usize,
}

/// Begins the operation on all legs for one run of pages, with the resources in `needs`. Returns
/// the run's first slot on each leg.
pub(super) fn begin_run<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    needs: OpRequirements,
    epoch: Epoch,
) -> Result<FirstSlots, LegFailure> {
    let mut slots = [0; 3];
    begin_all(legs, needs, epoch, |index, leg| {
        let at = leg.session.slot_at(&leg.handle, page)?;
        Ok(match at {
            Some(at) => {
                slots[index] = at;
                None
            }
            None => Some(page),
        })
    })?;
    Ok(slots)
}

/// Reserves the resources on every leg, begins the operation and calls `find` for each leg. If
/// `find` returns a page, that page lacks its leaf: the operation ends on all legs, the leaf is
/// linked, and everything begins anew.
pub(crate) fn begin_all<M: Media>(
    legs: &mut [LegSession<'_, M>],
    needs: OpRequirements,
    epoch: Epoch,
    mut find: impl FnMut(usize, &mut LegSession<'_, M>) -> Result<Option<PageNo>, StoreError>,
) -> Result<(), LegFailure> {
    assert!((1..=3).contains(&legs.len()), "{} legs", legs.len());
    'again: loop {
        for (index, leg) in legs.iter_mut().enumerate() {
            let prepared = leg
                .session
                .ensure_resources(needs.frames, needs.entry_lines);
            prepared.map_err(|cause| LegFailure { leg: index, cause })?;
        }
        for index in 0..legs.len() {
            let leg = &mut legs[index];
            let entered = leg.session.begin_op(&leg.handle, epoch).and_then(|()| {
                let found = find(index, leg);
                if found.is_err() {
                    leg.session.end_op();
                }
                found
            });
            match entered {
                Ok(None) => {}
                Ok(Some(page)) => {
                    legs[..=index]
                        .iter_mut()
                        .for_each(|leg| leg.session.end_op());
                    let leg = &mut legs[index];
                    let linked = leg.session.link_leaf(&leg.handle, page, epoch);
                    linked.map_err(|cause| LegFailure { leg: index, cause })?;
                    continue 'again;
                }
                Err(cause) => {
                    legs[..index]
                        .iter_mut()
                        .for_each(|leg| leg.session.end_op());
                    // The owner recalled the grants in between: begin again.
                    if cause == StoreError::TimedOut {
                        continue 'again;
                    }
                    return Err(LegFailure { leg: index, cause });
                }
            }
        }
        return Ok(());
    }
}

impl<M: Media> Session<M> {
    /// Ensures `frames` granted frames, and room for a record of `entry_lines`. Asks the owner for
    /// them if necessary.
    pub(crate) fn ensure_resources(
        &mut self,
        frames: u64,
        entry_lines: usize,
    ) -> Result<(), StoreError> {
        for tries in 0.. {
            if self.mapping.is_owner_gone() {
                return Err(StoreError::OwnerGone);
            }
            self.refresh_from_owner()?;
            let has_frames = frames == 0 || self.available_frames(frames) >= frames;
            if has_frames && self.journal.has_room(entry_lines).is_ok() {
                break;
            }
            if self.is_owner || tries == OWNER_WAITS_MAX {
                return Err(if has_frames {
                    StoreError::TimedOut
                } else {
                    StoreError::NoSpace
                });
            }
            self.request_frames(frames)?;
        }
        self.ring_doorbell_if_low();
        Ok(())
    }

    /// Loads the owner's changes. No operation may be in progress.
    pub(super) fn refresh_from_owner(&mut self) -> Result<(), StoreError> {
        let recalls = self.count_recalls()?;
        let cells = self.mapping.control.session_cells(self.number);
        let head = cells.head().load(Ordering::Acquire);
        self.journal.advance(head);
        if recalls != self.grants.recalls {
            self.grants.recalls = recalls;
            self.grants.run.len = 0;
            self.grants.next = cells.ring_start().load(Ordering::Acquire);
            // A failed operation took frames and did not publish them.
            self.grants.consumed = cells.consumed().load(Ordering::Acquire);
            // The owner may have moved leaves meanwhile.
            if !defect::is(Defect::MovedLeafCached) {
                self.leaf_cache.clear();
            }
        }
        Ok(())
    }

    /// The number of recalls so far, after the end of a recall in progress. During a recall
    /// `ring_start` still belongs to an earlier recall, and the runs there have other users by now.
    fn count_recalls(&self) -> Result<u32, StoreError> {
        let recalls = self.session_cells().recalls().load(Ordering::Acquire);
        if recalls.is_multiple_of(2) {
            Ok(recalls)
        } else {
            self.wait_for_recall()
        }
    }

    /// The number of granted frames, counted as far as `enough`.
    fn available_frames(&self, enough: u64) -> u64 {
        let mut sum = self.grants.run.len;
        if sum < enough {
            let cells = self.session_cells();
            let end = cells.ring_end().load(Ordering::Acquire);
            for index in self.grants.next..end {
                sum += cells.run(index).len;
                if sum >= enough {
                    break;
                }
            }
        }
        sum
    }

    /// Wakes the owner once when half of the journal or of the grants is used.
    fn ring_doorbell_if_low(&mut self) {
        let cells = self.mapping.control.session_cells(self.number);
        let granted = cells.granted().load(Ordering::Relaxed);
        let (head, used) = (
            self.journal.head(),
            self.journal.end() - self.journal.head(),
        );
        let half_a_journal = self.mapping.geometry().journal_lines() / 2;
        let low = used > half_a_journal || granted - self.grants.consumed < half_a_journal / 2;
        if low && self.doorbell_state != Some((head, granted)) && !self.is_owner {
            self.doorbell_state = Some((head, granted));
            self.mapping.control.ring_doorbell();
        }
    }

    /// Begins an operation, and checks that the session is admitted.
    pub(crate) fn begin_op(&mut self, handle: &Handle, epoch: Epoch) -> Result<(), StoreError> {
        let cells = self.mapping.control.session_cells(self.number);
        self.active += 1;
        cells.active().swap(self.active, Ordering::SeqCst);
        let admitted = self.check_admission(handle, epoch);
        if admitted.is_err() {
            self.end_op();
        }
        admitted
    }

    /// Checks that the session is not revoked, that the owner is there and has not recalled the
    /// grants, that the object is live, and that the epoch is not older than the object's.
    fn check_admission(&self, handle: &Handle, epoch: Epoch) -> Result<(), StoreError> {
        let cells = self.session_cells();
        if cells.revoked().load(Ordering::Acquire) != 0
            && !defect::is(Defect::RevokedBeginsOperation)
        {
            return Err(StoreError::Revoked);
        }
        if self.mapping.is_owner_gone() {
            return Err(StoreError::OwnerGone);
        }
        let recalls = cells.recalls().load(Ordering::Acquire);
        if recalls != self.grants.recalls && !defect::is(Defect::RecallIgnored) {
            return Err(StoreError::TimedOut);
        }
        let gate = self.mapping.gate(handle)?;
        if gate.epoch() > epoch && !defect::is(Defect::StaleEpochTaken) {
            Err(StoreError::StaleEpoch {
                current: gate.epoch(),
            })
        } else {
            Ok(())
        }
    }

    /// The byte of the page's slot; none when its leaf is not linked. Only within an operation.
    pub(crate) fn slot_at(
        &mut self,
        handle: &Handle,
        page: PageNo,
    ) -> Result<Option<usize>, StoreError> {
        let mapping = &*self.mapping;
        self.leaf_cache.slot_at(handle.object, page, || {
            Ok(match mapping.locate(handle.object, 0, page)? {
                SlotLocation::At(at) => Some(at),
                SlotLocation::Unlinked(_) => None,
            })
        })
    }
}

/// Takes the locks of the range in every pool; ends the operation on all legs if that fails.
pub(super) fn lock_run<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    count: u64,
) -> Result<(), LegFailure> {
    for leg in legs.iter_mut() {
        let object = leg.handle.object;
        leg.session.lock_words.set(object, page, count);
    }
    if defects::skips_locks() {
        return Ok(());
    }
    let locked = lock_all(legs, |_, session| &session.lock_words);
    if locked.is_err() {
        legs.iter_mut().for_each(|leg| leg.session.end_op());
    }
    locked
}

/// Takes the lock words of every leg, or none.
pub(crate) fn lock_all<'m, M: Media>(
    legs: &'m [LegSession<'_, M>],
    words: impl Fn(usize, &'m Session<M>) -> &'m [u16],
) -> Result<(), LegFailure> {
    let mut order = [0, 1, 2];
    let order = &mut order[..legs.len()];
    if order.len() > 1 {
        order.sort_unstable_by_key(|&index| legs[index].session.mapping.pool);
    }
    for (done, &index) in order.iter().enumerate() {
        let session = &*legs[index].session;
        let locked = session
            .mapping
            .control
            .lock(words(index, session), session.number);
        if locked.is_err() {
            for &index in &order[..done] {
                let session = &*legs[index].session;
                session.mapping.control.unlock(words(index, session));
            }
            return Err(LegFailure {
                leg: index,
                cause: StoreError::TimedOut,
            });
        }
    }
    Ok(())
}

/// Releases the lock words that [`lock_run`] took in the leg's pool, and ends the operation there.
pub(super) fn unlock_and_end<M: Media>(leg: &mut LegSession<'_, M>) {
    let session = &mut *leg.session;
    session.mapping.control.unlock(&session.lock_words);
    session.end_op();
}

/// Unlocks and ends the operation on all legs, because `leg` failed. Nothing has changed.
pub(super) fn abort_all<M: Media>(
    legs: &mut [LegSession<'_, M>],
    leg: usize,
    cause: StoreError,
) -> Result<(), LegFailure> {
    legs.iter_mut().for_each(unlock_and_end);
    Err(LegFailure { leg, cause })
}

impl<M: Media> Session<M> {
    /// Ends the operation.
    pub(crate) fn end_op(&mut self) {
        self.active += 1;
        self.mapping
            .control
            .session_cells(self.number)
            .active()
            .store(self.active, Ordering::Release);
    }

    /// Runs `read` within an operation.
    pub(crate) fn with_op<T>(
        &mut self,
        handle: &Handle,
        epoch: Epoch,
        read: impl FnOnce(&mut Self) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.refresh_from_owner()?;
        loop {
            match self.begin_op(handle, epoch) {
                Err(StoreError::TimedOut) => self.refresh_from_owner()?,
                Err(cause) => return Err(cause),
                Ok(_) => break,
            }
        }
        let result = read(self);
        self.end_op();
        result
    }
}
