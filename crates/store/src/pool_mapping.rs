//! A pool as its sessions see it: the mapped media, the control segment, and
//! how to find and check a page.
//!
//! Invariants: every page is checked against its checksum before anyone sees
//! it; a copy counts only if its slot was the same before and after. A view
//! changes nothing but slots above the leaves that lost a bit, back to what they
//! were ([`crate::slot_repair`]).

use crate::control::{Control, LOCK_POLL_INTERVAL, LockWords};
use crate::defect::{self, Defect};
use crate::geometry::Geometry;
use crate::object::{GATE_AT, Gate, HEIGHT, ROOT_AT, SIZE_AT, SLICE_AT};
use crate::slot::Slot;
use crate::table::{BadTable, PageTable, SlotLocation};
use crate::wait::{Backoff, Deadline};
use pagemesh_base::ids::{Epoch, FrameNo, Incarnation, ObjectId, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use uuid::Uuid;

/// Slots in a node: pages under one leaf, which a record does not leave.
pub const NODE_SLOTS: u64 = 512;
/// How often a reader meets a page that changed under it before it gives up:
/// each time another write has completed.
const READ_TRIES_MAX: u32 = 1000;

/// Looks at a page that somebody is changing in place before the reader gives up its
/// processor: bytes are put there in a tenth of a microsecond. One in tests: the second is
/// like the first.
const CHANGE_SPINS: u32 = if cfg!(test) { 1 } else { 200 };
/// How long to wait for one: who is dead or stopped amid it is ended by the pool's owner,
/// and the change finished, long before. If it is not, nobody is changing the page.
const CHANGE_WAIT_MAX: Duration = Duration::from_secs(10);

/// Why the store refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The object has a newer epoch.
    #[error("the object is at epoch {current}; this client is fenced")]
    StaleEpoch {
        /// The object's epoch.
        current: Epoch,
    },
    /// No frame is free.
    #[error("the pool is full; delete or discard something")]
    NoSpace,
    /// A page or the table above it does not match its checksum.
    #[error("the page at byte {offset} is damaged")]
    Damaged {
        /// Its first byte in the object.
        offset: u64,
    },
    /// Deleted, or never there.
    #[error("there is no such object in the pool")]
    NoSuchObject,
    /// Beyond the object's end.
    #[error("bytes {offset}..{end} are beyond the object's end at {size_bytes}")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// After the last.
        end: u64,
        /// The object's size.
        size_bytes: u64,
    },
    /// Not what a transaction is made of.
    #[error("this is no transaction: {0}")]
    InvalidTransaction(&'static str),
    /// The pool's lanes are too short for it, whatever is freed.
    #[error(
        "a transaction that may take {lines} lines of the journal is too long for this pool, which takes {lines_max}; use a larger pool"
    )]
    TooLong {
        /// As many as it may take.
        lines: usize,
        /// As many as one may.
        lines_max: usize,
    },
    /// The owner of the pool ended this session.
    #[error("the session was ended by the pool's owner")]
    Revoked,
    /// The owner of the pool is gone.
    #[error("the pool's owner is gone")]
    OwnerGone,
    /// The owner did not answer, or a lock was not released, in time.
    #[error("the pool's owner did not answer in time")]
    TimedOut,
}

/// What every session of one opening of a pool shares.
pub struct PoolMapping<M> {
    /// Lanes and fresh frames, and everything the owner alone touches.
    pub(crate) data: Arc<M>,
    /// Slots, nodes, frame table and object table; on `file-sync` pools a
    /// private overlay, else the same as `data_state`.
    pub(crate) meta: Arc<M>,
    pub(crate) control: Control,
    pub(crate) geometry: Geometry,
    pub(crate) pool: Uuid,
    pub(crate) incarnation: Incarnation,
}

/// An object that a session works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    pub(crate) object: ObjectId,
    pub(crate) entry_at: usize,
    slice: [u64; 2],
}

impl Handle {
    /// The object's place in the table.
    #[must_use]
    pub fn object(&self) -> ObjectId {
        self.object
    }
}

impl<M: Media> PoolMapping<M> {
    /// The view of an opened pool.
    #[must_use]
    pub fn new(
        data: Arc<M>,
        meta: Arc<M>,
        control: Control,
        geometry: Geometry,
        pool: Uuid,
        incarnation: Incarnation,
    ) -> PoolMapping<M> {
        assert!(
            data.len_bytes() as u64 >= geometry.pool_bytes,
            "the whole pool is mapped"
        );
        tolerate_unreadable_frames(&*data, &geometry);
        tolerate_unreadable_frames(&*meta, &geometry);
        PoolMapping {
            data,
            meta,
            control,
            geometry,
            pool,
            incarnation,
        }
    }

    /// The pool's identity.
    #[must_use]
    pub fn pool(&self) -> Uuid {
        self.pool
    }

    /// The opening of the pool.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The pool's plan.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The control segment.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// The mapped pool.
    #[must_use]
    pub fn media(&self) -> &Arc<M> {
        &self.data
    }

    /// Refuses every further operation: the owner is gone.
    pub fn mark_owner_gone(&self) {
        self.control.mark_owner_gone();
    }

    /// Whether the owner is known to be gone.
    #[must_use]
    pub fn is_owner_gone(&self) -> bool {
        self.control.is_owner_gone()
    }

    /// Whether slots live in a private overlay.
    pub(crate) fn has_overlay(&self) -> bool {
        !Arc::ptr_eq(&self.data, &self.meta)
    }

    /// The object of this slice, as the owner told its number.
    ///
    /// # Errors
    /// When the number is out of range.
    pub fn handle(&self, object: ObjectId, slice: SliceId) -> Result<Handle, StoreError> {
        if object.0 >= self.geometry.object_count() {
            return Err(StoreError::NoSuchObject);
        }
        let (low, high) = slice.0.as_bytes().split_at(8);
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 of 16 bytes"));
        Ok(Handle {
            object,
            entry_at: self.entry_at(object),
            slice: [word(low), word(high)],
        })
    }

    pub(crate) fn entry_at(&self, object: ObjectId) -> usize {
        self.geometry.object_at(object)
    }

    /// The object's gate, if it is live and still the same.
    pub(crate) fn gate(&self, handle: &Handle) -> Result<Gate, StoreError> {
        let gate = Gate(self.meta.load(handle.entry_at + GATE_AT));
        let low = self.meta.load(handle.entry_at + SLICE_AT);
        let high = self.meta.load(handle.entry_at + SLICE_AT + 8);
        match gate.is_live() && [low, high] == handle.slice {
            true => Ok(gate),
            false => Err(StoreError::NoSuchObject),
        }
    }

    /// Whether the object is live, as its entry says.
    pub(crate) fn is_live(&self, object: ObjectId) -> bool {
        Gate(self.meta.load(self.entry_at(object) + GATE_AT)).is_live()
    }

    /// The object's size.
    #[must_use]
    pub fn size_bytes(&self, handle: &Handle) -> u64 {
        self.meta.load(handle.entry_at + SIZE_AT)
    }

    pub(crate) fn check_range(
        &self,
        handle: &Handle,
        offset: u64,
        len: u64,
    ) -> Result<(), StoreError> {
        let size_bytes = self.size_bytes(handle);
        match offset.checked_add(len) {
            Some(end) if end <= size_bytes => Ok(()),
            end => {
                // The size may be that of nothing, or of whose number it is by
                // now.
                self.gate(handle)?;
                Err(StoreError::OutOfRange {
                    offset,
                    end: end.unwrap_or(u64::MAX),
                    size_bytes,
                })
            }
        }
    }

    /// The object's page table on `media_pair`.
    pub(crate) fn table<'m>(&self, media: &'m M, object: ObjectId) -> PageTable<'m, M> {
        let root_at = self.entry_at(object) + ROOT_AT;
        PageTable::new(media, root_at, HEIGHT, self.geometry.frame_numbers())
    }

    /// Where the slot of `level` above `page` lies. Slots on the way that lost a
    /// bit are mended.
    pub(crate) fn locate(
        &self,
        object: ObjectId,
        level: u8,
        page: PageNo,
    ) -> Result<SlotLocation, StoreError> {
        self.locate_on(&self.meta, object, level, page)
            .map_err(damaged_table_error)
    }

    /// A data slot, checked.
    pub(crate) fn slot(&self, at: usize, page: PageNo) -> Result<Slot, StoreError> {
        let slot = Slot::decode(self.meta.load(at)).map_err(|_| damaged_page_error(page))?;
        self.check_frame(slot, page)
    }

    /// A data slot whose frame the pool has.
    pub(crate) fn check_frame(&self, slot: Slot, page: PageNo) -> Result<Slot, StoreError> {
        match slot.frame() {
            Some(frame) if !self.geometry.frame_numbers().contains(&frame.0) => {
                Err(damaged_page_error(page))
            }
            _ => Ok(slot),
        }
    }

    /// Copies a page out of its frame, and returns its checksum if that is as it should be.
    /// The caller looks at the slot once more, also behind damage: it may have changed.
    #[inline]
    pub(crate) fn copy_frame(
        &self,
        frame: FrameNo,
        page: PageNo,
        into: &mut [u8; PAGE_BYTES],
    ) -> Result<u32, StoreError> {
        let expected = self.meta.load(self.geometry.frame_entry_at(frame)) as u32;
        let found = self.data.read_page(frame_at(frame), into);
        if found == expected {
            return Ok(found);
        }
        // Before the slot is looked at again: who has changed it meanwhile frees the frame,
        // and has not read it.
        self.report_unreadable(frame);
        Err(damaged_page_error(page))
    }

    /// Copies the page of an object, behind the slot at `location_at`, out. Returns its checksum, or
    /// none when it is a hole.
    pub(crate) fn read_slot(
        &self,
        at: usize,
        (object, page): (ObjectId, PageNo),
        into: &mut [u8; PAGE_BYTES],
    ) -> Result<Option<u32>, StoreError> {
        let mut was_damaged = false;
        for _ in 0..READ_TRIES_MAX {
            let slot = self.slot(at, page)?;
            if slot.is_changing() {
                self.wait_for_change(at, (object, page))?;
                continue;
            }
            let Some(frame) = slot.frame() else {
                into.fill(0);
                return Ok(None);
            };
            let copied = self.copy_frame(frame, page, into);
            // The load of the slot must not move up before the copy.
            std::sync::atomic::fence(Ordering::Acquire);
            if self.meta.load(at) == slot.encode() || defect::is(Defect::SlotNotRechecked) {
                // A reader that lost its processor may miss so many changes that the slot
                // is the same again. What is damaged stays so.
                if copied.is_err() && !was_damaged {
                    was_damaged = true;
                    continue;
                }
                return copied.map(Some);
            }
        }
        Err(StoreError::TimedOut)
    }

    /// Waits until nobody is changing the page behind the slot at `location_at` in place. Who does
    /// holds its lock word, and may stand still.
    #[cold]
    fn wait_for_change(
        &self,
        at: usize,
        (object, page): (ObjectId, PageNo),
    ) -> Result<(), StoreError> {
        let is_changing = || Slot::decode(self.meta.load(at)).is_ok_and(Slot::is_changing);
        for _ in 0..CHANGE_SPINS {
            std::hint::spin_loop();
            if !is_changing() {
                return Ok(());
            }
        }
        let word = LockWords::of(object, page, 1);
        let end = Deadline::after(CHANGE_WAIT_MAX);
        let mut late = Deadline::after(LOCK_POLL_INTERVAL);
        let mut backoff = Backoff::default();
        while is_changing() {
            if self.is_owner_gone() {
                return Err(StoreError::OwnerGone);
            }
            if end.is_over() {
                return Err(match self.control.is_unlocked(&word) {
                    true => damaged_page_error(page),
                    false => StoreError::TimedOut,
                });
            }
            #[cfg(test)]
            if crate::enumerate::direct_clients::retire_dead() {
                continue;
            }
            if late.is_over() {
                self.control.report_lock_holders(&word);
                late = Deadline::after(LOCK_POLL_INTERVAL);
            }
            backoff.pause();
        }
        Ok(())
    }

    /// Whether the node that holds this slot could not be read. Nothing may be stored
    /// there, nor does a flush of it mean anything.
    pub(crate) fn is_unreadable(&self, at: usize) -> bool {
        self.meta.is_unreadable(at) || self.data.is_unreadable(at)
    }

    /// Tells the owner of a damaged page's frame if it could not be read: it must not be
    /// given to anybody again.
    #[cold]
    pub(crate) fn report_unreadable(&self, frame: FrameNo) {
        if self.data.is_unreadable(frame_at(frame)) {
            self.control.report_unreadable(frame);
        }
    }
}

/// Frames may be unreadable: whatever lies in one has a checksum. What lies before them
/// would be taken for something else: an end of the journal, a free frame.
pub(crate) fn tolerate_unreadable_frames<M: Media>(media: &M, geometry: &Geometry) {
    media.tolerate_unreadable(geometry.frames.start as usize);
}

/// The byte where a frame starts.
pub(crate) fn frame_at(frame: FrameNo) -> usize {
    frame.0 as usize * PAGE_BYTES
}

pub(crate) fn damaged_page_error(page: PageNo) -> StoreError {
    StoreError::Damaged {
        offset: page.0.saturating_mul(PAGE_BYTES as u64),
    }
}

pub(crate) fn damaged_table_error(cause: BadTable) -> StoreError {
    damaged_page_error(match cause {
        BadTable::Damaged { page, .. }
        | BadTable::NoSuchFrame { page, .. }
        | BadTable::OutOfReach { page, .. } => page,
    })
}
