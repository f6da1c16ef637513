//! Writes, also behind the end of a file (RFD 016).
//!
//! Invariants: pages that may have a footer, or that the file map copies, are written under the
//! append lock, as whole pages in one record. The lock is taken inside of the row's operation, and
//! released before the operation ends.

use super::DirectFile;
use super::io_slot::{Intent, LegResult, Operation, WriteOutcome};
use crate::shared::op_counters::Why;
use crate::shared::shared_file_map::SharedFileMap;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::TailWrite;
use pagemesh_volume::DirectLeg;
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_BYTES as u64;

/// The end of the bytes that may be overwritten without the append lock.
pub(super) fn lock_free_end(file_map: &SharedFileMap) -> u64 {
    let size = file_map.size();
    match file_map.append_extent().is_some() {
        // The end only rises.
        true => size / PAGE * PAGE,
        false => size,
    }
}

impl DirectFile {
    /// Overwrites bytes of the file, or appends at its end; none: the kernel does all of it.
    /// Returns how many bytes were written, from the first on: the kernel does the rest. It must
    /// not repeat bytes that others may have seen. See [`DirectFile::read`].
    #[must_use]
    pub fn write(&self, data: &[u8], offset: u64) -> Option<usize> {
        // The range must not overflow.
        offset.checked_add(data.len() as u64)?;
        let (_, written) = self.or_count_kernel(self.write_or_append(data, Some(offset)))?;
        Some(written)
    }

    /// Appends bytes at the current end of the file; none: the kernel does it. Returns the end
    /// behind them. See [`DirectFile::read`].
    #[must_use]
    pub fn append(&self, data: &[u8]) -> Option<u64> {
        let (end, _) = self.or_count_kernel(self.write_or_append(data, None))?;
        Some(end)
    }

    /// The end of the written bytes, and their number; only an overwrite may write fewer.
    fn write_or_append(&self, data: &[u8], offset: Option<u64>) -> Result<(u64, usize), Why> {
        for is_last in [false, true] {
            let end = || self.file_map.get().map_or(0, |file_map| file_map.size());
            let place = (offset.unwrap_or_else(end), data.len(), Intent::Write);
            let mut done = 0;
            let is_done = |outcome: &WriteOutcome| matches!(outcome, WriteOutcome::Done(_));
            let outcome = self.operate(place, is_done, |operation| {
                let outcome = operation.write(data, offset);
                done = match outcome {
                    Some(Ok(WriteOutcome::Done(_))) => data.len(),
                    _ => operation.bytes_done(),
                };
                if done > 0 {
                    self.record_write_time();
                }
                outcome
            });
            match (outcome, offset) {
                (Ok(WriteOutcome::Done(end)), _) => return Ok((end, data.len())),
                (_, Some(offset)) if done > 0 => return Ok((offset + done as u64, done)),
                (Err(why), _) => return Err(why),
                (Ok(WriteOutcome::LeftToKernel), _) => return Err(Why::Growth),
                (Ok(WriteOutcome::NoAppendSpace), _) if is_last => return Err(Why::Growth),
                (Ok(WriteOutcome::NoAppendSpace), _) => {}
            }
            // The row is free here: the mount waits for it before it grants append space.
            self.wants_append_space.store(true, Ordering::Relaxed);
            self.refresh_file_map()?;
        }
        Err(Why::Growth)
    }
}

impl<L: DirectLeg> Operation<'_, L> {
    /// Overwrites bytes of the file, or appends at its end; without an offset, appends at the
    /// current end.
    #[inline]
    pub fn write(&mut self, data: &[u8], offset: Option<u64>) -> LegResult<WriteOutcome> {
        let file_map = self.file_map;
        let size = file_map.size();
        let is_lent = file_map.append_extent().is_some();
        match offset {
            Some(offset) if offset + data.len() as u64 <= lock_free_end(file_map) => {
                let written = self.overwrite(data, offset)?;
                Some(written.map(|()| WriteOutcome::Done(offset + data.len() as u64)))
            }
            Some(offset) if offset > size => Some(Ok(WriteOutcome::LeftToKernel)),
            _ if !is_lent => Some(Ok(WriteOutcome::NoAppendSpace)),
            _ => self.write_tail(data, offset),
        }
    }

    /// Writes to the last page, or behind the end.
    fn write_tail(&mut self, data: &[u8], offset: Option<u64>) -> LegResult<WriteOutcome> {
        let file_map = self.file_map;
        let guard = file_map.lock_append(self.io_slot.row())?;
        let append_extent = file_map.append_extent()?;
        let end = file_map.size();
        let offset = offset.unwrap_or(end);
        let first_byte = end / PAGE * PAGE;
        // Bytes below the last page are overwritten first.
        let below = first_byte.saturating_sub(offset).min(data.len() as u64) as usize;
        let (before, rest) = data.split_at(below);
        let at = offset + below as u64;
        let done = Some(Ok(WriteOutcome::Done(offset + data.len() as u64)));
        let planned = match rest.is_empty() {
            true => None,
            false => match TailWrite::plan(append_extent, end, at, rest.len()) {
                None => return Some(Ok(WriteOutcome::NoAppendSpace)),
                planned => planned,
            },
        };
        if !before.is_empty()
            && let Err(error) = self.overwrite(before, offset)?
        {
            return Some(Err(error));
        }
        let Some(composed) = planned else {
            return done;
        };
        let len = composed.page_count * PAGE_BYTES;
        let extent = file_map.extent(composed.first_page * PAGE, len as u64)?;
        let is_one = |leg: &L| leg.atomic_pages_max() >= composed.page_count as u64;
        if extent.len < len as u64 || !self.io_slot.legs.iter().all(is_one) {
            return Some(Ok(WriteOutcome::LeftToKernel));
        }
        let mut pages = std::mem::take(&mut self.io_slot.append_pages);
        // The client that wrote last has the page already.
        if self.io_slot.cached_tail.take() != Some((append_extent, guard.tail_writes())) {
            guard.copy_tail(end, &mut pages);
        }
        composed.fill(append_extent, &mut pages, end, at, rest);
        let put = self.write_record(&pages[..len], extent.offset);
        if let Some(Ok(())) = put {
            guard.publish(composed, &pages, (at - first_byte) as usize);
            let last = (composed.end / PAGE - composed.first_page) as usize * PAGE_BYTES;
            if last > 0 {
                pages.copy_within(last..last + (composed.end % PAGE) as usize, 0);
            }
            self.io_slot.cached_tail = Some((append_extent, guard.tail_writes()));
        }
        self.io_slot.append_pages = pages;
        match put? {
            Ok(()) => done,
            Err(error) => Some(Err(error)),
        }
    }
}
