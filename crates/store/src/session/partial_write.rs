//! Writes of parts of pages: in place by a patch ([`super::patch`]), or into a new frame with the
//! rest of the page merged from the old one.
//!
//! Invariant: the bytes of a page that stay are checked against its checksum before they are
//! merged.

use super::commit::{commit, encode_all, flush_pending_slots_all, stream_page};
use super::operation::{self, FirstSlots, OpRequirements, abort_all, unlock_and_end};
use super::partial_pages::{PageBytes, PageKey};
use super::{LegFailure, LegSession, Session, defects, patch};
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::{Handle, Reach};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};

/// Writes a part of a page, in place if possible.
pub(super) fn write_part<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    part: (usize, &[u8]),
    sources: usize,
    epoch: Epoch,
    stamp: &impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    let needs = OpRequirements {
        frames: 1,
        entry_lines: patch::entry_lines(part.1.len()),
    };
    patch::stage(legs, page, part);
    let slots = operation::begin_run(legs, page, needs, epoch)?;
    let early = defects::number_before_locks(stamp);
    operation::lock_run(legs, page, 1)?;
    if let Err(failure) = load_slots_all(legs, page, &slots) {
        legs.iter_mut().for_each(unlock_and_end);
        return Err(failure);
    }
    let run = (page, slots);
    let stamp = || early.unwrap_or_else(stamp);
    let is_alike = sources < legs.len();
    if patch::build_records(legs, part.1.len(), is_alike) {
        return write_patch(legs, run, stamp());
    }
    write_merged(legs, sources, run, part, stamp)
}

/// Loads each leg's slot of a page that is written in part. The caller holds the locks.
fn load_slots_all<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    slots: &FirstSlots,
) -> Result<(), LegFailure> {
    for (index, &slot) in (0..legs.len()).zip(slots) {
        let loaded = legs[index].session.load_slot(page, slot);
        loaded.map_err(|cause| LegFailure { leg: index, cause })?;
    }
    Ok(())
}

/// Commits the records that [`patch::build_records`] prepared.
fn write_patch<M: Media>(
    legs: &mut [LegSession<'_, M>],
    (page, slots): (PageNo, FirstSlots),
    stamp: Stamp,
) -> Result<(), LegFailure> {
    patch::begin(legs, page, stamp);
    flush_pending_slots_all(legs, &slots);
    commit(legs, page, slots, stamp, None)
}

/// Writes a page that changes in part into another frame. The rest comes from the pages of
/// `sources` legs: from each leg's own, or from the first leg's for all.
fn write_merged<M: Media>(
    legs: &mut [LegSession<'_, M>],
    sources: usize,
    (page, slots): (PageNo, FirstSlots),
    part: (usize, &[u8]),
    stamp: impl FnOnce() -> Stamp,
) -> Result<(), LegFailure> {
    // Everything that can fail comes before the seqs.
    let mut merged = [const { None }; 3];
    for ((index, bytes), &at) in merged.iter_mut().enumerate().take(sources).zip(&slots) {
        let LegSession { session, handle } = &mut legs[index];
        match session.merge_page(handle, (page, 0), at, part) {
            Ok(page) => *bytes = Some(page),
            Err(cause) => return abort_all(legs, index, cause),
        }
    }
    let stamp = stamp();
    encode_all(legs, page, 1, stamp, &slots);
    let all = merged.iter().flatten();
    let streamed = match sources {
        1 => all.map(|bytes| stream_page(legs, 0, bytes)).last(),
        _ => {
            let each = legs.iter_mut().zip(all);
            let streamed =
                each.map(|(leg, bytes)| stream_page(std::slice::from_mut(leg), 0, bytes));
            streamed.reduce(UnfencedStores::and)
        }
    };
    commit(legs, page, slots, stamp, streamed)?;
    for (LegSession { session, .. }, bytes) in legs.iter_mut().zip(merged.into_iter().flatten()) {
        session.partial_pages.put(&session.record, 0, bytes);
    }
    Ok(())
}

/// The first and the last page of a range of several pages, if they are written in part. They are
/// merged with the first leg's pages, with their slots from byte `at` on. The range begins at byte
/// `within` of its first page.
pub(super) fn merge_ends<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    at: usize,
    (within, data): (usize, &[u8]),
) -> Result<[Option<PageBytes>; 2], StoreError> {
    let LegSession { session, handle } = &mut legs[0];
    let last = (within + data.len()) / PAGE_BYTES;
    let behind = (within + data.len()) % PAGE_BYTES;
    let mut merge =
        |index: usize, part| session.merge_page(handle, (page, index), at + index * 8, part);
    let first = match within {
        0 => None,
        _ => Some(merge(0, (within, &data[..PAGE_BYTES - within]))?),
    };
    let last = match behind {
        0 => None,
        _ => Some(merge(last, (0, &data[data.len() - behind..]))?),
    };
    Ok([first, last])
}

/// Caches the pages that [`merge_ends`] merged into the committed record of `count` pages.
pub(super) fn cache_ends<M: Media>(
    legs: &mut [LegSession<'_, M>],
    merged: [Option<PageBytes>; 2],
    count: usize,
) {
    let session = &mut *legs[0].session;
    for (bytes, index) in merged.into_iter().zip([0, count - 1]) {
        if let Some(bytes) = bytes {
            session.partial_pages.put(&session.record, index, bytes);
        }
    }
}

impl<M: Media> Session<M> {
    /// Loads the slot of a page that is written in part. The caller holds the locks.
    pub(super) fn load_slot(&mut self, page: PageNo, at: usize) -> Result<(), StoreError> {
        self.load_changes(page, 1, at)
    }

    /// Page number `index` of the present record, with a part of it replaced. Its slot lies at byte
    /// `at`.
    fn merge_page(
        &mut self,
        handle: &Handle,
        (first, index): (PageNo, usize),
        at: usize,
        (within, part): (usize, &[u8]),
    ) -> Result<PageBytes, StoreError> {
        let page = PageNo(first.0 + index as u64);
        let (mut bytes, is_cached) = self.partial_pages.take(PageKey {
            object: handle.object,
            page,
            slot: self.record.changes[index].old,
            crc: self.checksum_before(index),
        });
        if !is_cached {
            self.mapping
                .read_slot(at, (handle.object, page), &mut bytes, Reach::All)?;
        }
        bytes[within..within + part.len()].copy_from_slice(part);
        Ok(bytes)
    }
}
