//! The births of pages: the epochs of the records that wrote them.
//!
//! Invariant: a page of unknown birth counts as born now. A list of such pages may name too many, and
//! never too few. One operation examines one leaf: the words of its frames may have to be read from a disk,
//! and barriers of all sessions wait for an operation.

use super::Session;
use crate::defect::{self, Defect};
use crate::format::frame_word::PageBirth;
use crate::format::table::NODE_SLOTS;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{EPOCH_MAX, Epoch, PageNo};
use pagemesh_base::slice::{LIST_ENTRIES_MAX, PageRun};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::ops::Range;

const PAGE: u64 = PAGE_BYTES as u64;
/// Pages that one request for dirty pages examines: 16 GiB.
const DIRTY_SCAN_MAX: u64 = 1 << 22;

impl<M: Media> Session<M> {
    /// The birth of each page of a run, holes included. It is 0 where it is unknown, and for a page
    /// that was never written.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub fn births(
        &mut self,
        handle: &Handle,
        page: PageNo,
        count: u32,
        epoch: Epoch,
    ) -> Result<Vec<Epoch>, StoreError> {
        let (offset, len) = (page.0.saturating_mul(PAGE), u64::from(count) * PAGE);
        self.mapping.check_range(handle, offset, len)?;
        let mut births = Vec::with_capacity(count as usize);
        let pages = page.0..page.0 + u64::from(count);
        self.visit_births(handle, pages, epoch, |_, count, birth| {
            let birth = match birth {
                PageBirth::At(birth) => birth,
                PageBirth::NeverWritten | PageBirth::Unknown => Epoch(0),
            };
            births.resize(births.len() + count as usize, birth);
            true
        })?;
        Ok(births)
    }

    /// The runs of pages from `from` on that were born at `since` or later, and the page to continue
    /// with. It walks leaves, and the words of their frames.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub(crate) fn dirty(
        &mut self,
        handle: &Handle,
        since: Epoch,
        from: PageNo,
        epoch: Epoch,
    ) -> Result<(Vec<PageRun>, Option<PageNo>), StoreError> {
        // A birth beyond the highest epoch is stored as the highest.
        let since = Epoch(since.0.min(EPOCH_MAX));
        let pages = self.mapping.size_bytes(handle) / PAGE;
        let end = pages.min(from.0.saturating_add(DIRTY_SCAN_MAX));
        let start = from.0.min(end);
        let mut runs: Vec<PageRun> = Vec::new();
        let stop = self.visit_births(handle, start..end, epoch, |page, count, birth| {
            if !is_born_since(birth, since) {
                return true;
            }
            let is_full = runs.len() == LIST_ENTRIES_MAX;
            match runs.last_mut() {
                Some(last) if last.page.0 + last.count == page.0 => last.count += count,
                _ if is_full => return false,
                _ => runs.push(PageRun { page, count }),
            }
            true
        })?;
        Ok((runs, (stop < pages).then_some(PageNo(stop))))
    }

    /// Calls `visit` with runs of pages of a range and their births. A leaf that is not linked is one
    /// run. Stops when `visit` returns false, and returns the page after the last one visited.
    fn visit_births(
        &mut self,
        handle: &Handle,
        pages: Range<u64>,
        epoch: Epoch,
        mut visit: impl FnMut(PageNo, u64, PageBirth) -> bool,
    ) -> Result<u64, StoreError> {
        let mut page = pages.start;
        while page < pages.end {
            let end = ((page / NODE_SLOTS + 1) * NODE_SLOTS).min(pages.end);
            let in_leaf = page..end;
            page = self.with_op(handle, epoch, |session| {
                session.visit_births_of_leaf(handle, in_leaf, &mut visit)
            })?;
            if page < end {
                break;
            }
        }
        Ok(page)
    }

    /// The same for pages of one leaf, within an operation.
    fn visit_births_of_leaf(
        &mut self,
        handle: &Handle,
        pages: Range<u64>,
        visit: &mut impl FnMut(PageNo, u64, PageBirth) -> bool,
    ) -> Result<u64, StoreError> {
        let mut page = pages.start;
        while page < pages.end {
            let (count, birth) = match self.slot_at(handle, PageNo(page))? {
                None => (pages.end - page, PageBirth::NeverWritten),
                Some(at) => (1, self.mapping.birth(at, PageNo(page))),
            };
            if !visit(PageNo(page), count, birth) {
                break;
            }
            page += count;
        }
        Ok(page)
    }
}

fn is_born_since(birth: PageBirth, since: Epoch) -> bool {
    match birth {
        PageBirth::NeverWritten => false,
        PageBirth::Unknown => true,
        PageBirth::At(birth) if defect::is(Defect::DirtyAfterLossOnly) => birth > since,
        PageBirth::At(birth) => birth >= since,
    }
}
