//! Clears: whole pages are unmapped, and the parts of pages at the ends zeroed.

use super::commit::commit;
use super::operation::{lock_run, unlock_and_end};
use super::partial_write::write_part;
use super::{LegFailure, LegSession, Session};
use crate::defect::{self, Defect};
use crate::format::record::{Change, NO_SUMS, lines};
use crate::format::slot::Slot;
use crate::format::table::NODE_SLOTS;
use crate::shared::error::{StoreError, damaged_page_error};
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

/// Frees the whole pages of a range of each leg's object, and zeroes the parts of pages at its
/// ends.
///
/// # Errors
/// The first leg that failed.
pub fn clear<M: Media>(
    legs: &mut [LegSession<'_, M>],
    offset: u64,
    len: u64,
    stamp: Stamp,
) -> Result<(), LegFailure> {
    pub(super) const PAGE: u64 = PAGE_BYTES as u64;
    for (index, leg) in legs.iter_mut().enumerate() {
        let fail = |cause| LegFailure { leg: index, cause };
        leg.session
            .mapping
            .check_range(&leg.handle, offset, len)
            .map_err(fail)?;
        if len == 0 {
            leg.session.record_complete(stamp);
            continue;
        }
        let end = offset + len;
        let (first, last) = (offset.next_multiple_of(PAGE), end / PAGE * PAGE);
        let mut leg = [LegSession {
            session: &mut *leg.session,
            handle: leg.handle,
        }];
        if first > last {
            zero_part(&mut leg, offset, len, stamp).map_err(|f| fail(f.cause))?;
            continue;
        }
        zero_part(&mut leg, offset, first - offset, stamp).map_err(|f| fail(f.cause))?;
        zero_part(&mut leg, last, end - last, stamp).map_err(|f| fail(f.cause))?;
        let [leg] = &mut leg;
        let mut page = first / PAGE;
        while page < last / PAGE {
            page = clear_next_run(leg, PageNo(page), last / PAGE, stamp).map_err(fail)?;
        }
    }
    Ok(())
}

fn zero_part<M: Media>(
    leg: &mut [LegSession<'_, M>; 1],
    offset: u64,
    len: u64,
    stamp: Stamp,
) -> Result<(), LegFailure> {
    if len == 0 {
        return Ok(());
    }
    let page = PageNo(offset / PAGE_BYTES as u64);
    let [one] = leg;
    let holds_data = one.session.is_mapped(&one.handle, page, stamp.epoch);
    if !holds_data.map_err(|cause| LegFailure { leg: 0, cause })? {
        return Ok(());
    }
    let zeroes = [0; PAGE_BYTES];
    let within = (offset % PAGE_BYTES as u64) as usize;
    let part = (within, &zeroes[..len as usize]);
    write_part(leg, page, part, 1, stamp.epoch, &|| stamp)
}

/// Unmaps the next run of mapped pages and returns the page after it.
fn clear_next_run<M: Media>(
    leg: &mut LegSession<'_, M>,
    page: PageNo,
    end: u64,
    stamp: Stamp,
) -> Result<u64, StoreError> {
    let in_leaf = (page.0 / NODE_SLOTS + 1) * NODE_SLOTS;
    let end = end.min(in_leaf).min(page.0 + leg.session.pages_max());
    let count = end - page.0;
    let handle = leg.handle;
    let session = &mut *leg.session;
    session.ensure_resources(0, lines(count as usize))?;
    match session.begin_op(&handle, stamp.epoch) {
        Err(StoreError::TimedOut) => return Ok(page.0),
        entered => entered?,
    }
    let at = match session.slot_at(&handle, page) {
        Ok(Some(at)) => at,
        other => {
            session.end_op();
            // Nothing was ever written under this leaf.
            return other.map(|_| in_leaf);
        }
    };
    lock_run(std::slice::from_mut(leg), page, count).map_err(|failure| failure.cause)?;
    let session = &mut *leg.session;
    match session.load_unmap_changes(at, page, count, stamp.epoch) {
        Ok((skipped, 0)) => {
            unlock_and_end(leg);
            Ok(page.0 + skipped)
        }
        Ok((skipped, found)) => {
            let slots = [at + skipped as usize * 8; 3];
            let first = PageNo(page.0 + skipped);
            session.encode_record(&handle, 0, first, stamp, true);
            session.flush_pending_slots(slots[0]);
            let committed = commit(std::slice::from_mut(leg), first, slots, stamp, None);
            committed.map_err(|failure| failure.cause)?;
            Ok(first.0 + found)
        }
        Err(cause) => {
            unlock_and_end(leg);
            Err(cause)
        }
    }
}

/// Whether the slot is a hole that was born before this epoch. Such a hole is born anew: its clear may
/// have been in flight at the loss of a leg, and is sent again under the epoch of the loss. Without a
/// new birth the leg would keep its data.
fn is_older_hole(slot: Slot, birth: Epoch) -> bool {
    let is_older = slot.hole_birth().is_some_and(|before| before < birth);
    is_older && !defect::is(Defect::HoleKeepsBirth)
}

impl<M: Media> Session<M> {
    fn is_mapped(
        &mut self,
        handle: &Handle,
        page: PageNo,
        epoch: Epoch,
    ) -> Result<bool, StoreError> {
        self.with_op(handle, epoch, |session| {
            match session.slot_at(handle, page)? {
                Some(at) => Ok(session.mapping.slot(at, page)?.frame().is_some()),
                None => Ok(false),
            }
        })
    }

    /// Loads changes that make the first run of pages of a range holes of this birth: pages that are
    /// mapped, damaged, or holes of earlier epochs. Returns the number of pages before the run, and its length.
    pub(crate) fn load_unmap_changes(
        &mut self,
        at: usize,
        page: PageNo,
        count: u64,
        birth: Epoch,
    ) -> Result<(u64, u64), StoreError> {
        self.record.changes.clear();
        let mut skipped = 0;
        for i in 0..count {
            let page = PageNo(page.0 + i);
            // As for a write, the frame of a damaged slot is not needed.
            let at = at + i as usize * 8;
            let (old, is_damaged) = match Slot::decode(self.mapping.meta.load(at)) {
                Err(_) if defect::is(Defect::DamageNotCleared) => {
                    return Err(damaged_page_error(page));
                }
                Err(_) if self.mapping.is_unreadable(at) => return Err(damaged_page_error(page)),
                Err(_) => (Slot::EMPTY, true),
                Ok(slot) => (self.mapping.check_frame(slot, page)?, false),
            };
            if old.frame().is_some() || is_damaged || is_older_hole(old, birth) {
                let change = Change {
                    old,
                    new: old.unmap(birth),
                    sums: NO_SUMS,
                };
                self.record.changes.push(change);
            } else if self.record.changes.is_empty() {
                skipped += 1;
            } else {
                break;
            }
        }
        Ok((skipped, self.record.changes.len() as u64))
    }
}
