//! The tail of a direct write: bytes of the last page, and behind the end (RFD 016).
//!
//! ```text
//!  Operation::write_tail   the last page, and behind the end, under the append lock
//!    overwrite             bytes below the last page
//!    write_tail_pages      whole pages composed with a footer, then the end
//!      write_record        every leg, one fence
//! ```
//!
//! Invariants: pages that may have a footer, or that the file map copies, are written under the
//! append lock, as whole pages in one record. The lock is taken inside of the row's operation, and
//! released before the operation ends.

use super::io_slot::{LegResult, Operation, WriteOutcome};
use crate::shared::shared_file_map::AppendGuard;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{AppendExtent, TailWrite};
use pagemesh_volume::DirectLeg;

const PAGE: u64 = PAGE_BYTES as u64;

impl<L: DirectLeg> Operation<'_, L> {
    /// Writes to the last page, or behind the end. Bytes below the last page are overwritten first;
    /// the rest is one record of whole pages. It takes the append lock, and releases it at its end.
    pub(super) fn write_tail(
        &mut self,
        data: &[u8],
        offset: Option<u64>,
    ) -> LegResult<WriteOutcome> {
        let file_map = self.file_map;
        let guard = file_map.lock_append(self.io_slot.row())?;
        let append_extent = file_map.append_extent()?;
        let end = file_map.size();
        let offset = offset.unwrap_or(end);
        let tail_start = end / PAGE * PAGE;
        let below = tail_start.saturating_sub(offset).min(data.len() as u64) as usize;
        let (before, rest) = data.split_at(below);
        let at = offset + below as u64;
        let planned = if rest.is_empty() {
            None
        } else {
            let planned = TailWrite::plan(append_extent, end, at, rest.len());
            if planned.is_none() {
                return Some(Ok(WriteOutcome::NoAppendSpace));
            }
            planned
        };
        if !before.is_empty()
            && let Err(error) = self.overwrite(before, offset)?
        {
            return Some(Err(error));
        }
        let Some(composed) = planned else {
            return Some(Ok(WriteOutcome::Done(offset + data.len() as u64)));
        };
        let Some(place) = self.tail_place(composed)? else {
            return Some(Ok(WriteOutcome::LeftToKernel));
        };
        let written =
            self.write_tail_pages(&guard, (append_extent, end), composed, (at, rest), place)?;
        Some(written.map(|()| WriteOutcome::Done(offset + data.len() as u64)))
    }

    /// The place of composed pages in the volume. The inner none: they are not contiguous, or a leg
    /// cannot change them atomically.
    fn tail_place(&self, composed: TailWrite) -> Option<Option<u64>> {
        let len = (composed.page_count * PAGE_BYTES) as u64;
        let extent = self.file_map.extent(composed.first_page * PAGE, len)?;
        let is_one = |leg: &L| leg.atomic_pages_max() >= composed.page_count as u64;
        let is_atomic = extent.len >= len && self.io_slot.legs.iter().all(is_one);
        Some(is_atomic.then_some(extent.offset))
    }

    /// Composes the pages from the last page and the bytes, writes them as one record, and then
    /// publishes the end.
    fn write_tail_pages(
        &mut self,
        guard: &AppendGuard<'_>,
        (append_extent, end): (AppendExtent, u64),
        composed: TailWrite,
        (at, data): (u64, &[u8]),
        place: u64,
    ) -> LegResult<()> {
        let mut pages = std::mem::take(&mut self.io_slot.append_pages);
        // The client that wrote last has the page already.
        if self.io_slot.cached_tail.take() != Some((append_extent, guard.tail_writes())) {
            guard.copy_tail(end, &mut pages);
        }
        composed.fill(append_extent, &mut pages, end, at, data);
        let written = self.write_record(&pages[..composed.page_count * PAGE_BYTES], place);
        if let Some(Ok(())) = written {
            guard.publish(composed, &pages, (at - end / PAGE * PAGE) as usize);
            let last = (composed.end / PAGE - composed.first_page) as usize * PAGE_BYTES;
            if last > 0 {
                pages.copy_within(last..last + (composed.end % PAGE) as usize, 0);
            }
            self.io_slot.cached_tail = Some((append_extent, guard.tail_writes()));
        }
        self.io_slot.append_pages = pages;
        written
    }
}
