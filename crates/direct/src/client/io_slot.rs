//! A slot, and one operation in it, from the row's begin to its end, with the writes: no socket, no
//! thread, no clock. [`super::DirectFile`] gets a slot its resources; a simulation of direct clients uses legs
//! of its own. Other work of an operation is in `read`, `write_tail` and `write_atomic`.
//!
//! Invariants: an operation does its work only inside of the row's operation, after it has checked
//! that direct access is not disabled. If it fails, the kernel does all of it.

use crate::shared::shared_file_map::{FileExtent, SharedFileMap};
use arrayvec::ArrayVec;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::slice::SliceError;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{APPEND_PAGES_MAX, AppendExtent};
use pagemesh_store::consistent_read::CONSISTENT_READ_PAGES_MAX;
use pagemesh_volume::direct_access::{ClientRow, DirectSegment, FileRange, LayoutLease};
use pagemesh_volume::replication_ring::{RECORD_BYTES_MAX, record_len, slots_of};
use pagemesh_volume::{DirectLeg, overwrite_all};
use std::cell::Cell;

const PAGE: u64 = PAGE_BYTES as u64;

/// A row, and a session of each leg. It belongs to one thread at a time.
pub struct IoSlot<L> {
    row: usize,
    /// The consumer is known to have taken all ring slots below this number: the cache of
    /// `ReplicationRing::has_room`.
    pub(super) ring_places_taken: u64,
    /// The layout lease of the legs.
    pub(super) lease: Option<LayoutLease>,
    pub(super) legs: ArrayVec<L, LEGS_MAX>,
    /// Copy of the written bytes if the volume has an asynchronous replica: the program may change
    /// its buffer meanwhile.
    pub(super) replication_buffer: Vec<u8>,
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

/// Extents of a range of as many pages as change atomically; the shortest span has eight.
pub(super) type ExtentList<T> = ArrayVec<T, CONSISTENT_READ_PAGES_MAX>;

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
        if defect::is(Defect::FirstLegRead) {
            self.legs.first()
        } else {
            self.legs.last()
        }
    }

    #[inline]
    pub(super) fn read_leg_mut(&mut self) -> Option<&mut L> {
        if defect::is(Defect::FirstLegRead) {
            self.legs.first_mut()
        } else {
            self.legs.last_mut()
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
    pub(super) segment: &'a DirectSegment,
    pub(super) file_map: &'a SharedFileMap,
    pub(super) io_slot: &'a mut IoSlot<L>,
    op_guard: OpGuard<'a>,
    /// The sender of the replication ring must be woken before this ends.
    pub(super) must_wake_replicator: bool,
    /// Bytes that were overwritten, from the first on.
    pub(super) bytes_done: usize,
}

impl<'a, L: DirectLeg> Operation<'a, L> {
    /// Whether the caller must wake the sender of the replication ring before this ends.
    #[inline]
    #[must_use]
    pub fn must_wake_replicator(&self) -> bool {
        self.must_wake_replicator
    }

    /// The row of this operation.
    #[inline]
    pub(super) fn row(&self) -> ClientRow<'a> {
        self.op_guard.0
    }

    /// The leading bytes of this operation's first write that are on all legs, also if the
    /// operation failed. Others may have read them, and have overwritten them since.
    #[inline]
    #[must_use]
    pub fn bytes_done(&self) -> usize {
        self.bytes_done
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

    /// Overwrites bytes below the end of the file. None: the map does not cover them, or there is
    /// no room for the record.
    #[inline]
    pub(super) fn overwrite(&mut self, data: &[u8], offset: u64) -> LegResult<()> {
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
    pub(super) fn write_record(&mut self, data: &[u8], offset: u64) -> LegResult<()> {
        self.row().set_range(offset, data.len() as u64);
        let segment = self.segment;
        if segment.ring().has_replica() {
            return self.write_replicated(data, offset);
        }
        let epoch = self.io_slot.lease.as_ref()?.epoch;
        let next = || segment.next_stamp(epoch);
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
            // A change with a new stamp may have to wait, and a claimed place would hold up the queue meanwhile.
            let stamp = segment.next_stamp(epoch);
            let place = ring.claim(row, places);
            ring.prefetch_head(place);
            claimed.set(Some((place, stamp.0)));
            stamp
        });
        self.must_wake_replicator |= match (&written, claimed.get()) {
            (Ok(()), Some((place, born))) => ring.fill(place, offset, copied, born),
            (Err(_), Some((place, _))) => ring.abandon_claim(place, places),
            (_, None) => false,
        };
        Some(written)
    }
}
