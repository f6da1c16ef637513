//! One operation of a direct client, from the row's begin to its end: no socket, no thread, no
//! clock. [`super::DirectFile`] gets a slot its resources; a simulation of direct clients uses legs
//! of its own.
//!
//! Invariants: an operation does its work only inside of the row's operation, after it has checked
//! that direct access is not disabled. If it fails, the kernel does all of it.

use super::write;
use crate::shared::shared_file_map::{FileExtent, SharedFileMap};
use arrayvec::ArrayVec;
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::PageNo;
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::slice::{PageRun, SliceError, TransactionPart, check_parts};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{APPEND_PAGES_MAX, AppendExtent};
use pagemesh_store::consistent_read::{CONSISTENT_READ_PAGES_MAX, ConsistentRead};
use pagemesh_volume::direct_access::{ClientRow, DirectSegment, FileRange, LayoutLease, RUNS_MAX};
use pagemesh_volume::replication_ring::{RECORD_BYTES_MAX, record_len, slots_of};
use pagemesh_volume::{DirectLeg, overwrite_all, overwrite_atomically};
use std::cell::Cell;

/// A row, and a session of each leg. It belongs to one thread at a time.
pub struct IoSlot<L> {
    row: usize,
    /// The consumer is known to have taken all ring slots below this number: the cache of
    /// `ReplicationRing::has_room`.
    ring_places_taken: u64,
    /// The layout lease of the legs.
    pub(super) lease: Option<LayoutLease>,
    pub(super) legs: ArrayVec<L, LEGS_MAX>,
    /// Copy of the written bytes if the volume has an asynchronous replica: the program may change
    /// its buffer meanwhile.
    replication_buffer: Vec<u8>,
    /// Where tail pages are composed. It begins with the last page of the file that `cached_tail`
    /// identifies.
    pub(super) append_pages: Vec<u8>,
    /// Its append extent and its count of tail writes.
    pub(super) cached_tail: Option<(AppendExtent, u64)>,
}

impl<L> Default for IoSlot<L> {
    fn default() -> IoSlot<L> {
        IoSlot {
            row: 0,
            ring_places_taken: 0,
            lease: None,
            legs: ArrayVec::new(),
            replication_buffer: Vec::new(),
            append_pages: Vec::new(),
            cached_tail: None,
        }
    }
}

/// The kind of an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// It reads.
    Read,
    /// It writes.
    Write,
}

/// The outcome of an attempt to write, except failures of a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The bytes are written, up to this byte of the file.
    Done(u64),
    /// The kernel has to do it.
    LeftToKernel,
    /// The append extent has no space for it; the mount may grant more.
    NoAppendSpace,
}

/// The result of a leg; none: the kernel has to do it.
pub type LegResult<T> = Option<Result<T, SliceError>>;

/// A consistent read, and the extents of its bytes.
type ConsistentExtents<L> = (
    Box<ConsistentRead<<L as DirectLeg>::Media>>,
    ExtentList<FileExtent>,
);

/// Extents of a range of as many pages as change atomically; the shortest span has eight.
pub(super) type ExtentList<T> = ArrayVec<T, CONSISTENT_READ_PAGES_MAX>;

pub(super) fn extents(
    file_map: &SharedFileMap,
    offset: u64,
    len: u64,
) -> Option<ExtentList<FileExtent>> {
    let (mut at, end) = (offset, offset.checked_add(len)?);
    let mut extents = ExtentList::new();
    while at < end {
        let extent = file_map.extent(at, end - at)?;
        at += extent.len;
        extents.try_push(extent).ok()?;
    }
    Some(extents)
}

/// An operation of the row, until it is dropped.
struct OpGuard<'m>(ClientRow<'m>);

impl Drop for OpGuard<'_> {
    fn drop(&mut self) {
        // A client that panics in an operation has done a part of it. The mount reconciles the legs
        // when this process has ended.
        if !std::thread::panicking() {
            self.0.end_op();
        }
    }
}

impl<L: DirectLeg> IoSlot<L> {
    /// Uses these legs and this layout lease from now on.
    pub fn set_legs(&mut self, lease: LayoutLease, legs: ArrayVec<L, LEGS_MAX>) {
        self.replication_buffer.resize(RECORD_BYTES_MAX, 0);
        self.append_pages.resize(APPEND_PAGES_MAX * PAGE_BYTES, 0);
        self.legs = legs;
        self.lease = Some(lease);
    }

    /// Sets the row that the mount gave.
    pub fn set_row(&mut self, row: usize) {
        self.row = row;
        self.ring_places_taken = 0;
    }

    /// Its row, once the mount gave one.
    pub fn row(&self) -> usize {
        self.row
    }

    /// Gives the legs back.
    pub fn release_legs(&mut self) {
        self.lease = None;
        self.legs.clear();
    }

    /// Its legs.
    pub fn legs(&self) -> &[L] {
        &self.legs
    }

    /// Its legs, mutable.
    pub fn legs_mut(&mut self) -> impl Iterator<Item = &mut L> {
        self.legs.iter_mut()
    }

    /// Whether its layout lease is the current one.
    #[inline]
    #[must_use]
    pub fn is_ready(&self, segment: &DirectSegment) -> bool {
        let generation = segment.generation();
        let has = self.lease.as_ref().map(|lease| lease.generation);
        generation != 0 && has == Some(generation)
    }

    /// The leg that gets its record last. Any other leg might return bytes that a dead client left
    /// on that leg alone, and they would be lost with it.
    #[inline]
    fn read_leg(&self) -> Option<&L> {
        match defect::is(Defect::FirstLegRead) {
            true => self.legs.first(),
            false => self.legs.last(),
        }
    }

    #[inline]
    fn read_leg_mut(&mut self) -> Option<&mut L> {
        match defect::is(Defect::FirstLegRead) {
            true => self.legs.first_mut(),
            false => self.legs.last_mut(),
        }
    }

    /// Begins an operation on a file, if direct access is allowed.
    #[inline]
    pub fn begin<'a>(
        &'a mut self,
        segment: &'a DirectSegment,
        file_map: &'a SharedFileMap,
        ino: u64,
        (offset, len, intent): (u64, u64, Intent),
    ) -> Option<Operation<'a, L>> {
        let extent = file_map.extent(offset, len);
        match (intent, extent) {
            (Intent::Write, Some(run)) => {
                // Prefetches the cache lines that other cores wrote last.
                segment.prefetch_op();
                self.legs
                    .iter()
                    .for_each(|leg| leg.prefetch_write(run.offset));
            }
            (Intent::Read, Some(run)) => {
                self.read_leg().inspect(|leg| leg.prefetch_read(run.offset));
            }
            (_, None) => {}
        }
        let row = segment.row(self.row);
        row.begin_op(FileRange {
            file: ino,
            offset: 0,
            len: 0,
        });
        let inside = OpGuard(row);
        if let (Intent::Read, Some(run)) = (intent, extent) {
            self.read_leg().inspect(|leg| leg.prefetch_page(run.offset));
        }
        // Only now: a thread that disables access sees the row, or this check sees it.
        let is_closed = segment.is_closed() || file_map.is_closed();
        let may = self.is_ready(segment)
            && (!is_closed || defect::is(Defect::AccessDisabledIgnored))
            && !file_map.is_outdated();
        may.then_some(Operation {
            segment,
            file_map,
            io_slot: self,
            op_guard: inside,
            must_wake_replicator: false,
            bytes_done: 0,
        })
    }
}

/// An operation in progress. Dropping it ends it.
pub struct Operation<'a, L> {
    segment: &'a DirectSegment,
    pub(super) file_map: &'a SharedFileMap,
    pub(super) io_slot: &'a mut IoSlot<L>,
    op_guard: OpGuard<'a>,
    /// The sender of the replication ring must be woken before this ends.
    must_wake_replicator: bool,
    /// Bytes that were overwritten, from the first on.
    bytes_done: usize,
}

impl<L: DirectLeg> Operation<'_, L> {
    /// Whether the caller must wake the sender of the replication ring before this ends.
    #[inline]
    #[must_use]
    pub fn must_wake_replicator(&self) -> bool {
        self.must_wake_replicator
    }

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

    /// Overwrites whole pages of several places, all of them or none.
    pub fn write_atomic(&mut self, parts: &[(u64, &[u8])]) -> LegResult<()> {
        // The ring takes records of a few pages only. This check comes after the check for direct
        // access.
        if self.segment.ring().has_replica() {
            return None;
        }
        let (page, kept) = (PAGE_BYTES as u64, write::lock_free_end(self.file_map));
        let (mut changes, mut pages) = (Vec::new(), Vec::new());
        for (offset, data) in parts {
            let end = offset.checked_add(data.len() as u64)?;
            let is_whole = offset.is_multiple_of(page) && end.is_multiple_of(page);
            if !is_whole || end > kept {
                return None;
            }
            let mut rest = *data;
            for extent in extents(self.file_map, *offset, data.len() as u64)? {
                let (own, after) = rest.split_at_checked(extent.len as usize)?;
                rest = after;
                changes.push(TransactionPart::Write {
                    offset: extent.offset,
                    data: Bytes::copy_from_slice(own),
                });
                pages.push(PageRun {
                    page: PageNo(extent.offset / page),
                    count: extent.len / page,
                });
            }
        }
        if pages.len() > RUNS_MAX || check_parts(&changes, u64::MAX).is_err() {
            return None;
        }
        self.op_guard.0.set_runs(&pages);
        let epoch = self.io_slot.lease.as_ref()?.epoch;
        let next = || self.segment.next_op();
        let legs = &mut self.io_slot.legs;
        Some(overwrite_atomically(legs, &changes, epoch, next))
    }

    /// The leading bytes of this operation's first write that are on all legs, also if the
    /// operation failed. Others may have read them, and have overwritten them since.
    #[inline]
    #[must_use]
    pub fn bytes_done(&self) -> usize {
        self.bytes_done
    }

    /// Overwrites bytes below the end of the file. None: the map does not cover them, or there is
    /// no room for the record.
    #[inline]
    pub(super) fn overwrite(&mut self, data: &[u8], offset: u64) -> LegResult<()> {
        let mut done = 0;
        // After the check for direct access: a replica that is attached from now on waits for the
        // row.
        let is_followed = self.segment.ring().has_replica();
        while done < data.len() {
            let at = offset + done as u64;
            let mut extent = self.file_map.extent(at, (data.len() - done) as u64)?;
            // Of several records some may be done when one fails.
            extent.len = match is_followed {
                true => record_len(extent.offset, extent.len),
                false => {
                    let legs = self.io_slot.legs.iter();
                    let each = legs.map(|leg| leg.record_len(extent.offset, extent.len));
                    each.min()?
                }
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
    pub(super) fn write_record(&mut self, data: &[u8], offset: u64) -> LegResult<()> {
        self.op_guard.0.set_range(offset, data.len() as u64);
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
        let (segment, row) = (self.segment, self.op_guard.0);
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
