//! Reads: into a buffer, or at their place in a pool.
//!
//! Invariants: one leg is read, the one that gets each record last. Each group of pages that change
//! atomically is read as one consistent state.

use super::file::DirectFile;
use super::io_slot::{ExtentList, Intent, LegResult, Operation, extents};
use super::read_mapping::ConsistentMapping;
use crate::shared::op_counters::Why;
use crate::shared::shared_file_map::FileExtent;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_store::consistent_read::{CONSISTENT_READ_PAGES_MAX, ConsistentRead};
use pagemesh_volume::DirectLeg;

/// A consistent read, and the extents of its bytes.
type ConsistentExtents<L> = (
    Box<ConsistentRead<<L as DirectLeg>::Media>>,
    ExtentList<FileExtent>,
);

impl DirectFile {
    /// Reads bytes, fewer at the end of the file; none: the kernel must do it. It may allocate, and
    /// wait for the mount and for bricks. Each group of pages that writes change atomically is read
    /// as one consistent state.
    #[must_use]
    pub fn read(&self, into: &mut [u8], offset: u64) -> Option<usize> {
        let place = (offset, into.len(), Intent::Read);
        let read = self.operate(
            place,
            |bytes| Some(*bytes),
            |operation| operation.read(into, offset),
        );
        self.or_count_kernel(read)
    }

    /// Maps bytes in place, fewer at the end of the file, as one consistent state; none: the bytes
    /// can only be read. At most [`CONSISTENT_READ_PAGES_MAX`] pages.
    ///
    /// [`CONSISTENT_READ_PAGES_MAX`]: pagemesh_store::consistent_read::CONSISTENT_READ_PAGES_MAX
    #[must_use]
    pub fn map_consistent(&self, offset: u64, len: usize) -> Option<ConsistentMapping> {
        let mount = self.or_count_kernel(self.mount())?;
        let place = (offset, len, Intent::Read);
        let bytes_mapped = |mapped: &Option<_>| mapped.as_ref().map(|_| len);
        let mapped = self.operate(place, bytes_mapped, |operation| {
            operation.map_consistent(offset, len, |leg| mount.read_mappings.of_pool(leg.view()))
        });
        let mapped = mapped.and_then(|mapped| mapped.ok_or(Why::Busy));
        let ((consistent_read, extents), mapping) = self.or_count_kernel(mapped)?;
        Some(ConsistentMapping {
            consistent_read,
            mapping,
            extents: extents.to_vec(),
        })
    }
}

impl<L: DirectLeg> Operation<'_, L> {
    /// Reads bytes, fewer at the end of the file. Each group of as many pages as change atomically
    /// is read as one consistent state.
    #[inline]
    pub fn read(&mut self, into: &mut [u8], offset: u64) -> LegResult<usize> {
        let rest = self.file_map.size().saturating_sub(offset);
        let len = usize::try_from(rest.min(into.len() as u64)).ok()?;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let most = CONSISTENT_READ_PAGES_MAX * PAGE_BYTES - at as usize % PAGE_BYTES;
            let part = &mut into[done..len.min(done + most)];
            done += part.len();
            match self.read_consistent(at, part)? {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        Some(Ok(done))
    }

    /// Reads at most as many pages as change atomically. False: no consistent state could be read.
    #[inline]
    fn read_consistent(&mut self, offset: u64, into: &mut [u8]) -> LegResult<bool> {
        let epoch = self.io_slot.lease.as_ref()?.epoch;
        let leg = self.io_slot.read_leg_mut()?;
        let extents = extents(self.file_map, offset, into.len() as u64)?;
        let is_one_page = offset as usize % PAGE_BYTES + into.len() <= PAGE_BYTES;
        if is_one_page && let [run] = extents[..] {
            return Some(leg.read_into(run.offset, into, epoch).map(|()| true));
        }
        let mut pieces = ExtentList::new();
        let mut rest = into;
        for extent in extents {
            let (part, after) = rest.split_at_mut_checked(extent.len as usize)?;
            pieces.push((extent.offset, part));
            rest = after;
        }
        Some(leg.read_consistent(&mut pieces, epoch))
    }

    /// Maps bytes, fewer at the end of the file, as one consistent state, with the value that
    /// `with` gets from the leg. The inner none: no consistent state could be mapped.
    pub fn map_consistent<T>(
        &mut self,
        offset: u64,
        len: usize,
        with: impl FnOnce(&L) -> Option<T>,
    ) -> LegResult<Option<(ConsistentExtents<L>, T)>> {
        let len = self.file_map.size().saturating_sub(offset).min(len as u64);
        let extents = extents(self.file_map, offset, len)?;
        let ranges: ExtentList<(u64, u64)> = extents
            .iter()
            .map(|extent| (extent.offset, extent.len))
            .collect();
        let epoch = self.io_slot.lease.as_ref()?.epoch;
        let leg = self.io_slot.read_leg_mut()?;
        let with = with(leg)?;
        let consistent_read = leg.map_consistent(&ranges, epoch);
        Some(consistent_read.map(|consistent_read| Some(((consistent_read?, extents), with))))
    }
}
