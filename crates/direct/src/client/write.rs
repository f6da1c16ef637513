//! One direct write, from the program's bytes to the record on each leg: plain, extending, or
//! appending (RFD 016).
//!
//! ```text
//!  DirectFile::write, append
//!    try_write                   a slot by DirectFile::operate; once more with append space
//!      Operation::write          chooses by the end of the file
//!        overwrite               below the last page, or no append space was granted
//!        write_tail              the last page, and behind the end, under the append lock
//!          write_tail_pages      whole pages composed with a footer, then the end
//!            write_record        overwrite_all: every leg, one fence
//!              write_replicated  the same, with a claim in the replication ring
//! ```
//!
//! Invariants: pages that may have a footer, or that the file map copies, are written under the
//! append lock, as whole pages in one record. The lock is taken inside of the row's operation, and
//! released before the operation ends.
//!
//! # One write
//!
//! A thread overwrites 4 KiB of a file. It has a slot with a row and with a session of each leg, and
//! the file map covers the bytes.
//!
//! 1. `DirectFile::write` → `DirectFile::operate` locks the thread's slot (`JoinedMount::take_slot`).
//! 2. `IoSlot::begin` marks the row active (`ClientRow::begin_op`), and then checks that the layout
//!    lease is current and that neither the segment nor the file map is closed.
//! 3. `Operation::write` → `Operation::overwrite`: `SharedFileMap::extent` gives the place of the bytes.
//! 4. `Operation::write_record` → `volume::legs::mapped::overwrite_all` → `store::session::write::write_numbered`. The
//!    store continues in `session::write::write`, and takes the number behind the lock words
//!    (`DirectSegment::next_op`).
//! 5. The row's operation ends (`ClientRow::end_op`), the slot is unlocked.

use super::file::DirectFile;
use super::io_slot::{Intent, LegResult, Operation, WriteOutcome};
use crate::shared::op_counters::Why;
use crate::shared::shared_file_map::{AppendGuard, SharedFileMap};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{AppendExtent, TailWrite};
use pagemesh_volume::replication_ring::{record_len, slots_of};
use pagemesh_volume::{DirectLeg, overwrite_all};
use std::cell::Cell;
use std::sync::atomic::Ordering;

const PAGE: u64 = PAGE_BYTES as u64;

/// The end of the bytes that may be overwritten without the append lock.
pub(super) fn lock_free_end(file_map: &SharedFileMap) -> u64 {
    let size = file_map.size();
    if file_map.append_extent().is_some() {
        // The end only rises.
        size / PAGE * PAGE
    } else {
        size
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
        let (_, written) = self.or_count_kernel(self.try_write(data, Some(offset)))?;
        Some(written)
    }

    /// Appends bytes at the current end of the file; none: the kernel does it. Returns the end
    /// behind them. See [`DirectFile::read`].
    #[must_use]
    pub fn append(&self, data: &[u8]) -> Option<u64> {
        let (end, _) = self.or_count_kernel(self.try_write(data, None))?;
        Some(end)
    }

    /// The end of the written bytes, and their number; only an overwrite may write fewer.
    fn try_write(&self, data: &[u8], offset: Option<u64>) -> Result<(u64, usize), Why> {
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
        let has_append_space = file_map.append_extent().is_some();
        match offset {
            Some(offset) if offset + data.len() as u64 <= lock_free_end(file_map) => {
                let written = self.overwrite(data, offset)?;
                Some(written.map(|()| WriteOutcome::Done(offset + data.len() as u64)))
            }
            Some(offset) if offset > size => Some(Ok(WriteOutcome::LeftToKernel)),
            _ if !has_append_space => Some(Ok(WriteOutcome::NoAppendSpace)),
            _ => self.write_tail(data, offset),
        }
    }

    /// Writes to the last page, or behind the end. Bytes below the last page are overwritten first;
    /// the rest is one record of whole pages. It takes the append lock, and releases it at its end.
    fn write_tail(&mut self, data: &[u8], offset: Option<u64>) -> LegResult<WriteOutcome> {
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

    /// Overwrites bytes below the end of the file. None: the map does not cover them, or there is
    /// no room for the record.
    #[inline]
    fn overwrite(&mut self, data: &[u8], offset: u64) -> LegResult<()> {
        let mut done = 0;
        // After the check for direct access: a replica that is attached from now on waits for the
        // row.
        let has_replica = self.segment.ring().has_replica();
        while done < data.len() {
            let at = offset + done as u64;
            let mut extent = self.file_map.extent(at, (data.len() - done) as u64)?;
            // Of several records some may be done when one fails.
            extent.len = if has_replica {
                record_len(extent.offset, extent.len)
            } else {
                let legs = self.io_slot.legs.iter();
                let each = legs.map(|leg| leg.record_len(extent.offset, extent.len));
                each.min()?
            };
            let part = &data[done..done + extent.len as usize];
            if let Err(error) = self.write_record(part, extent.offset)? {
                return Some(Err(error));
            }
            done += part.len();
            self.bytes_done = done;
        }
        Some(Ok(()))
    }

    /// Writes bytes to a place of the volume, as one record if there is an asynchronous replica.
    #[inline]
    fn write_record(&mut self, data: &[u8], offset: u64) -> LegResult<()> {
        self.row().set_range(offset, data.len() as u64);
        let segment = self.segment;
        if segment.ring().has_replica() {
            return self.write_replicated(data, offset);
        }
        let epoch = self.io_slot.lease.as_ref()?.epoch;
        let next = || segment.next_op();
        let legs = &mut self.io_slot.legs;
        Some(overwrite_all(legs, offset, data, epoch, next))
    }

    /// Writes one record, and publishes it in the replication ring. None: the ring has no room for
    /// it.
    fn write_replicated(&mut self, data: &[u8], offset: u64) -> LegResult<()> {
        let (segment, row) = (self.segment, self.row());
        let ring = segment.ring();
        let len = data.len() as u64;
        let io_slot = &mut *self.io_slot;
        if !ring.has_room(&mut io_slot.ring_places_taken) || record_len(offset, len) != len {
            return None;
        }
        let epoch = io_slot.lease.as_ref()?.epoch;
        let copied = io_slot.replication_buffer.get_mut(..data.len())?;
        copied.copy_from_slice(data);
        let places = slots_of(offset, len);
        let claimed = Cell::new(None);
        let written = overwrite_all(&mut io_slot.legs, offset, copied, epoch, || {
            debug_assert!(claimed.get().is_none(), "one record, one claim");
            let place = ring.claim(row, places);
            ring.prefetch_head(place);
            claimed.set(Some(place));
            segment.next_op()
        });
        self.must_wake_replicator |= match (&written, claimed.get()) {
            (Ok(()), Some(place)) => ring.fill(place, offset, copied),
            (Err(_), Some(place)) => ring.abandon_claim(place, places),
            (_, None) => false,
        };
        Some(written)
    }
}
