//! Writes of pages, over one to three pools at once.
//!
//! [`write_pages`] takes the six steps of a write: begin, lock, load, encode, stream, commit. A part
//! of a page takes them in [`super::partial_write`].
//!
//! Invariant: nothing fails after the load of the old slots, except the swap of a damaged slot. Its
//! record is committed by then.

use super::commit::{commit, encode_all, stream_page};
use super::operation::{FirstSlots, OpRequirements, abort_all, begin_run, lock_run};
use super::partial_pages::PageBytes;
use super::partial_write::{cache_ends, merge_ends, write_part};
use super::{LegFailure, LegSession, RECORD_PAGES_MAX, Session, defects};
use crate::format::record::{Change, NO_SUMS, lines};
use crate::format::slot::Slot;
use crate::format::table::NODE_SLOTS;
use crate::shared::error::{StoreError, damaged_page_error};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, UnfencedStores};

/// Writes bytes at the same offset of each leg's object, every page as a whole or not at all. The
/// legs' media are of one kind.
///
/// # Errors
/// The first leg that failed.
pub fn write<M: Media>(
    legs: &mut [LegSession<'_, M>],
    offset: u64,
    data: &[u8],
    stamp: Stamp,
) -> Result<(), LegFailure> {
    let merging = MergeSource::EachLeg;
    write_merging(legs, offset, data, merging, stamp.epoch, &|| stamp)
}

/// As [`write()`], for a client that shares pages with others and takes no locks of its own. Each
/// record gets the result of `stamp`, a stamp of `epoch` or a newer one, which is called after its pages
/// are locked. So the numbers of a page's records have the order of its slots. Records are written in
/// the order of the legs, so a dead session's record on the last leg is on all of them. The legs
/// hold the same data: a page that is written in part is read from the first leg.
///
/// # Errors
/// As [`write()`].
pub fn write_numbered<M: Media>(
    legs: &mut [LegSession<'_, M>],
    offset: u64,
    data: &[u8],
    epoch: Epoch,
    stamp: impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    write_merging(legs, offset, data, MergeSource::FirstLeg, epoch, &stamp)
}

/// The source of the rest of a page that is written in part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MergeSource {
    /// Each leg's own page: a leg may lack bytes that must still be resynced.
    EachLeg,
    /// The first leg's page: all legs hold the same data.
    FirstLeg,
}

fn write_merging<M: Media>(
    legs: &mut [LegSession<'_, M>],
    offset: u64,
    data: &[u8],
    merging: MergeSource,
    epoch: Epoch,
    stamp: &impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    for (index, leg) in legs.iter().enumerate() {
        let checked = leg
            .session
            .mapping
            .check_range(&leg.handle, offset, data.len() as u64);
        checked.map_err(|cause| LegFailure { leg: index, cause })?;
    }
    let sources = match merging {
        MergeSource::FirstLeg => 1,
        MergeSource::EachLeg => legs.len(),
    };
    let pages_max = legs.iter().map(|leg| leg.session.pages_max());
    let pages_max = pages_max.min().unwrap_or_default();
    let mut at = offset;
    let mut rest = data;
    while !rest.is_empty() {
        let page = PageNo(at / PAGE_BYTES as u64);
        let within = (at % PAGE_BYTES as u64) as usize;
        let len = record_len(pages_max, merging, at, rest.len() as u64) as usize;
        let part = (within, &rest[..len]);
        if within + len <= PAGE_BYTES && len < PAGE_BYTES {
            write_part(legs, page, part, sources, epoch, stamp)?;
        } else {
            write_pages(legs, page, part, epoch, stamp)?;
        }
        at += len as u64;
        rest = &rest[len..];
    }
    Ok(())
}

/// The rule that cuts a write into records: the number of the `len` bytes from `offset` on that one
/// record covers, of at most `pages_max` pages of one leaf.
///
/// If all legs hold the same data, the record may begin and end with parts of pages. A leg that may
/// lack bytes may patch partly written pages, so each of those gets a record of its own.
#[inline]
fn record_len(pages_max: u64, merging: MergeSource, offset: u64, len: u64) -> u64 {
    const PAGE: u64 = PAGE_BYTES as u64;
    let within = offset % PAGE;
    let in_leaf = NODE_SLOTS - offset / PAGE % NODE_SLOTS;
    let run = len.min(in_leaf.min(pages_max) * PAGE - within);
    match merging {
        MergeSource::FirstLeg => run,
        MergeSource::EachLeg if within != 0 || len < PAGE => len.min(PAGE - within),
        MergeSource::EachLeg => run / PAGE * PAGE,
    }
}

impl<M: Media> Session<M> {
    /// Pages of one record, by the length of the journal.
    #[must_use]
    pub fn pages_max(&self) -> u64 {
        let by_journal = (self.mapping.geometry().journal_lines() / 4 - 1) * 3;
        by_journal.min(RECORD_PAGES_MAX)
    }

    /// The number of the `len` bytes from `offset` on that one record of [`write_numbered`] covers.
    #[inline]
    #[must_use]
    pub fn record_len_max(&self, offset: u64, len: u64) -> u64 {
        record_len(self.pages_max(), MergeSource::FirstLeg, offset, len)
    }
}

/// Writes pages in one record: the six steps of a write. The first and the last page may be written
/// in part; the rest of them is then merged from the first leg's page for all legs.
fn write_pages<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    (within, data): (usize, &[u8]),
    epoch: Epoch,
    stamp: &impl Fn() -> Stamp,
) -> Result<(), LegFailure> {
    let count = (within + data.len()).div_ceil(PAGE_BYTES);
    let needs = OpRequirements {
        frames: count as u64,
        entry_lines: lines(count),
    };
    let slots = begin_run(legs, page, needs, epoch)?;
    let early = defects::number_before_locks(stamp);
    lock_run(legs, page, count as u64)?;
    load_changes_all(legs, page, count, &slots)?;
    let merged = match merge_ends(legs, page, slots[0], (within, data)) {
        Ok(merged) => merged,
        Err(cause) => return abort_all(legs, 0, cause),
    };
    // Locked instructions wait for streamed bytes, so all of them come first: locks, number, seqs.
    // From here on only the swap of a damaged slot fails, and its record is committed by then.
    let stamp = early.unwrap_or_else(stamp);
    encode_all(legs, page, count, stamp, &slots);
    let stores = stream_pages(legs, &merged, (within, data));
    commit(legs, page, slots, stamp, stores)?;
    cache_ends(legs, merged, count);
    Ok(())
}

/// Loads each leg's slots of pages that are written as a whole; aborts the operation on all legs if
/// that fails. The caller holds the locks.
pub(super) fn load_changes_all<M: Media>(
    legs: &mut [LegSession<'_, M>],
    page: PageNo,
    count: usize,
    slots: &FirstSlots,
) -> Result<(), LegFailure> {
    for index in 0..legs.len() {
        if let Err(cause) = legs[index].session.load_changes(page, count, slots[index]) {
            return abort_all(legs, index, cause);
        }
    }
    Ok(())
}

impl<M: Media> Session<M> {
    /// Loads the slots that a write of whole pages replaces. The caller holds the locks.
    pub(crate) fn load_changes(
        &mut self,
        page: PageNo,
        count: usize,
        at: usize,
    ) -> Result<(), StoreError> {
        self.record.changes.clear();
        for i in 0..count {
            let at = at + i * 8;
            // The frame of a damaged slot is unknown. The page is written as a whole, so the frame
            // is not needed. It stays in use, and a check of the pool finds it. No frame is freed
            // by a damaged slot.
            let old = match Slot::decode(self.mapping.meta.load(at)) {
                Err(_) if self.mapping.is_unreadable(at) => {
                    return Err(damaged_page_error(PageNo(page.0 + i as u64)));
                }
                Err(_) => Slot::EMPTY,
                Ok(slot) => self.mapping.check_frame(slot, PageNo(page.0 + i as u64))?,
            };
            self.record.changes.push(Change {
                old,
                new: old,
                sums: NO_SUMS,
            });
        }
        Ok(())
    }
}

/// Streams the merged ends of a range and the whole pages between them into the frames of all legs.
fn stream_pages<M: Media>(
    legs: &mut [LegSession<'_, M>],
    [first, last]: &[Option<PageBytes>; 2],
    (within, data): (usize, &[u8]),
) -> Option<UnfencedStores> {
    let whole = &data[first.as_ref().map_or(0, |_| PAGE_BYTES - within)..];
    let first = first.as_deref().into_iter();
    let pages = first.chain(whole.as_chunks().0).chain(last.as_deref());
    let mut stores = None;
    for (i, bytes) in pages.enumerate() {
        stores = Some(stream_page(legs, i, bytes));
    }
    stores
}
