//! Clears: whole pages are unmapped, and the parts of pages at the ends zeroed.

use super::write::{commit, lock_all, unlock_and_end_op, write_part};
use super::{LegFailure, LegSession, Session};
use crate::format::record::lines;
use crate::format::table::NODE_SLOTS;
use crate::shared::error::StoreError;
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
    members: &mut [LegSession<'_, M>],
    offset: u64,
    len: u64,
    stamp: Stamp,
) -> Result<(), LegFailure> {
    pub(super) const PAGE: u64 = PAGE_BYTES as u64;
    for (index, member) in members.iter_mut().enumerate() {
        let fail = |cause| LegFailure { leg: index, cause };
        member
            .session
            .mapping
            .check_range(&member.handle, offset, len)
            .map_err(fail)?;
        if len == 0 {
            member.session.record_complete(stamp);
            continue;
        }
        let end = offset + len;
        let (first, last) = (offset.next_multiple_of(PAGE), end / PAGE * PAGE);
        let mut member = [LegSession {
            session: &mut *member.session,
            handle: member.handle,
        }];
        if first > last {
            zero_part(&mut member, offset, len, stamp).map_err(|f| fail(f.cause))?;
            continue;
        }
        zero_part(&mut member, offset, first - offset, stamp).map_err(|f| fail(f.cause))?;
        zero_part(&mut member, last, end - last, stamp).map_err(|f| fail(f.cause))?;
        let [member] = &mut member;
        let mut page = first / PAGE;
        while page < last / PAGE {
            page = clear_next_run(member, PageNo(page), last / PAGE, stamp).map_err(fail)?;
        }
    }
    Ok(())
}

fn zero_part<M: Media>(
    member: &mut [LegSession<'_, M>; 1],
    offset: u64,
    len: u64,
    stamp: Stamp,
) -> Result<(), LegFailure> {
    if len == 0 {
        return Ok(());
    }
    let page = PageNo(offset / PAGE_BYTES as u64);
    let [one] = member;
    let holds_data = one.session.is_mapped(&one.handle, page, stamp.epoch);
    if !holds_data.map_err(|cause| LegFailure { leg: 0, cause })? {
        return Ok(());
    }
    let zeroes = [0; PAGE_BYTES];
    let within = (offset % PAGE_BYTES as u64) as usize;
    let part = (within, &zeroes[..len as usize]);
    write_part(member, page, part, 1, stamp.epoch, &|| stamp)
}

/// Unmaps the next run of mapped pages and returns the page after it.
fn clear_next_run<M: Media>(
    member: &mut LegSession<'_, M>,
    page: PageNo,
    end: u64,
    stamp: Stamp,
) -> Result<u64, StoreError> {
    let in_leaf = (page.0 / NODE_SLOTS + 1) * NODE_SLOTS;
    let end = end.min(in_leaf).min(page.0 + member.session.pages_max());
    let count = end - page.0;
    let handle = member.handle;
    let session = &mut *member.session;
    session.ensure_resources(0, lines(count as usize))?;
    let gate = match session.begin_op(&handle, stamp.epoch) {
        Err(StoreError::TimedOut) => return Ok(page.0),
        entered => entered?,
    };
    let at = match session.slot_at(&handle, page) {
        Ok(Some(at)) => at,
        other => {
            session.end_op();
            // Nothing was ever written under this leaf.
            return other.map(|_| in_leaf);
        }
    };
    lock_all(std::slice::from_mut(member), page, count).map_err(|failure| failure.cause)?;
    let session = &mut *member.session;
    match session.load_unmap_changes(at, page, count, gate.round()) {
        Ok((skipped, 0)) => {
            unlock_and_end_op(member);
            Ok(page.0 + skipped)
        }
        Ok((skipped, found)) => {
            let places = [(at + skipped as usize * 8, 0); 3];
            let first = PageNo(page.0 + skipped);
            session.encode_record(&handle, 0, first, stamp, true);
            session.flush_pending_slots(places[0].0);
            let committed = commit(std::slice::from_mut(member), first, places, stamp, None);
            committed.map_err(|failure| failure.cause)?;
            Ok(first.0 + found)
        }
        Err(cause) => {
            unlock_and_end_op(member);
            Err(cause)
        }
    }
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
}
