//! A pool as its sessions map it: the media, the control segment, and the search and check of a
//! page.
//!
//! Invariants: every page is checked against its checksum before any caller gets it. A copy counts
//! only if its slot was the same before and after. A mapping changes nothing but slots above the
//! leaves that lost a bit: it corrects them to their former value ([`crate::shared::slot_repair`]).

use crate::defect::{self, Defect};
use crate::format::frame_word::{FrameWord, PageBirth};
use crate::format::geometry::{Geometry, frame_at, tolerate_unreadable_frames};
use crate::format::object::{
    CLONE_WORD_AT, CloneBounds, GATE_AT, Gate, HEIGHT, ROOT_AT, SHARED_WORD_AT, SIZE_AT, SLICE_AT,
    TIER_AT, TierPolicy,
};
use crate::format::slot::Slot;
pub use crate::format::table::NODE_SLOTS;
use crate::format::table::{PageTable, SlotLocation};
use crate::shared::control::{Control, LOCK_POLL_INTERVAL, LockWords};
pub use crate::shared::error::StoreError;
use crate::shared::error::{damaged_page_error, damaged_table_error};
use crate::shared::wait::{Backoff, Deadline, spins};
use pagemesh_base::ids::{Epoch, FrameNo, Incarnation, ObjectId, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use uuid::Uuid;

/// Attempts of a reader to copy a page that changes meanwhile. Each time another write has
/// completed.
const READ_TRIES_MAX: u32 = 1000;

/// Plans of a pool since its opening: one more with each device that joins or leaves.
const GEOMETRIES_MAX: usize = 64;

/// Polls of a page that is being changed in place, before the reader yields its processor. Copying
/// the bytes takes a tenth of a microsecond.
const CHANGE_SPINS: u32 = 200;
/// The limit of a wait for a change in place. If its session is dead or stalled, the pool's owner
/// ends the session and finishes the change long before. Past this limit no session is changing the
/// page.
const CHANGE_WAIT_MAX: Duration = Duration::from_secs(10);

/// The mapping of an opened pool, which all sessions of a process share.
pub struct PoolMapping<M> {
    /// Journals and newly allocated frames, and every byte that the owner alone accesses.
    pub(crate) data: Arc<M>,
    /// Slots, nodes, frame table and object table. On `file-sync` pools this is a private overlay,
    /// else the same medium as `data`.
    pub(crate) meta: Arc<M>,
    pub(crate) control: Control,
    geometry: GeometryVersions,
    pub(crate) pool: Uuid,
    pub(crate) incarnation: Incarnation,
    /// The mapping belongs to a client, and ends with the first device.
    has_first_device_only: bool,
}

/// The plans of a pool since its opening, the current one last. Sessions use them without a lock, so none is dropped.
struct GeometryVersions {
    versions: [OnceLock<Box<Geometry>>; GEOMETRIES_MAX],
    last: AtomicUsize,
}

impl GeometryVersions {
    fn new(first: Geometry) -> GeometryVersions {
        let versions = [const { OnceLock::new() }; GEOMETRIES_MAX];
        let new = GeometryVersions {
            versions,
            last: AtomicUsize::new(0),
        };
        new.versions[0].get_or_init(|| Box::new(first));
        new
    }

    #[inline]
    fn current(&self) -> &Geometry {
        let current = self.versions[self.last.load(Ordering::Acquire)].get();
        current.expect("a plan is stored before its number")
    }

    /// For one thread at a time.
    fn push(&self, geometry: Geometry) -> bool {
        let next = self.last.load(Ordering::Relaxed) + 1;
        let stored = self
            .versions
            .get(next)
            .is_some_and(|version| version.set(Box::new(geometry)).is_ok());
        if stored {
            self.last.store(next, Ordering::Release);
        }
        stored
    }
}

/// The frames that a read may use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// All that the process reaches. A frame on flash is read from its device.
    All,
    /// Those in memory. Others are refused with [`StoreError::OnFlash`].
    Memory,
}

/// The frame that a page was read from.
#[derive(Clone, Copy)]
pub(crate) struct PageSource {
    pub(crate) frame: FrameNo,
    pub(crate) crc: u32,
}

/// An object that a session works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    pub(crate) object: ObjectId,
    pub(crate) entry_at: usize,
    slice: [u64; 2],
}

impl Handle {
    /// The object's number in the object table.
    #[must_use]
    pub fn object(&self) -> ObjectId {
        self.object
    }
}

impl<M: Media> PoolMapping<M> {
    /// The mapping of an opened pool.
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
            geometry: GeometryVersions::new(geometry),
            pool,
            incarnation,
            has_first_device_only: false,
        }
    }

    /// The same for a client, which maps the first device only.
    #[must_use]
    pub fn of_first_device(self) -> PoolMapping<M> {
        PoolMapping {
            has_first_device_only: true,
            ..self
        }
    }

    /// Whether this process reaches the frame.
    #[inline]
    pub(crate) fn reaches(&self, frame: FrameNo) -> bool {
        !self.has_first_device_only || frame_at(frame) < self.geometry().pool_bytes as usize
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
    #[inline]
    pub fn geometry(&self) -> &Geometry {
        self.geometry.current()
    }

    /// Replaces the pool's plan: a device has joined or changed. False if that was done too often since the opening.
    pub(crate) fn set_geometry(&self, geometry: Geometry) -> bool {
        self.geometry.push(geometry)
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

    /// Rises before a frame gets free that a [`VersionLeaf`](crate::versions::VersionLeaf) may name. 0: the owner is of an
    /// earlier release, and it does not rise.
    #[must_use]
    pub fn version_generation(&self) -> u64 {
        self.control.version_generation()
    }

    pub(crate) fn end_version_generation(&self) {
        self.control.end_version_generation();
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

    /// Whether slots are in a private overlay.
    pub(crate) fn has_overlay(&self) -> bool {
        !Arc::ptr_eq(&self.data, &self.meta)
    }

    /// The handle of this slice's object; the owner reported the object's number.
    ///
    /// # Errors
    /// When the number is out of range.
    pub fn handle(&self, object: ObjectId, slice: SliceId) -> Result<Handle, StoreError> {
        if object.0 >= self.geometry().object_count() {
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
        self.geometry().object_at(object)
    }

    /// The object's gate, if the object is live and still belongs to the slice.
    pub(crate) fn gate(&self, handle: &Handle) -> Result<Gate, StoreError> {
        let gate = Gate(self.meta.load(handle.entry_at + GATE_AT));
        let low = self.meta.load(handle.entry_at + SLICE_AT);
        let high = self.meta.load(handle.entry_at + SLICE_AT + 8);
        match gate.is_live() && [low, high] == handle.slice {
            true => Ok(gate),
            false => Err(StoreError::NoSuchObject),
        }
    }

    /// Whether the object is live by its entry.
    pub(crate) fn is_live(&self, object: ObjectId) -> bool {
        Gate(self.meta.load(self.entry_at(object) + GATE_AT)).is_live()
    }

    /// The object's size.
    #[must_use]
    pub fn size_bytes(&self, handle: &Handle) -> u64 {
        self.meta.load(handle.entry_at + SIZE_AT)
    }

    /// Where the object's pages lie. Automatic if its entry is damaged.
    #[must_use]
    pub fn tier_policy(&self, handle: &Handle) -> TierPolicy {
        let word = self.meta.load(handle.entry_at + TIER_AT);
        TierPolicy::decode(word as u8).unwrap_or_default()
    }

    /// Pages of the object that were born before this epoch are not changed in place; 0: there are none.
    #[inline]
    pub(crate) fn shared_below(&self, handle: &Handle) -> Epoch {
        let word = self.meta.load(handle.entry_at + SHARED_WORD_AT);
        Epoch((word >> 32) as u32)
    }

    /// The births that tell which frames of the object other objects share.
    pub(crate) fn clone_bounds(&self, handle: &Handle) -> CloneBounds {
        CloneBounds::of_word(self.meta.load(handle.entry_at + CLONE_WORD_AT))
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
                // The number may be free, or belong to another slice by now, and the size with it.
                self.gate(handle)?;
                Err(StoreError::OutOfRange {
                    offset,
                    end: end.unwrap_or(u64::MAX),
                    size_bytes,
                })
            }
        }
    }

    /// The object's page table on `media`.
    pub(crate) fn table<'m>(&'m self, media: &'m M, object: ObjectId) -> PageTable<'m, M> {
        let root_at = self.entry_at(object) + ROOT_AT;
        PageTable::new(media, root_at, HEIGHT, self.geometry().frame_numbers())
    }

    /// The location of the slot of `level` above `page`. Slots on the way that lost a bit are
    /// corrected.
    pub(crate) fn locate(
        &self,
        object: ObjectId,
        level: u8,
        page: PageNo,
    ) -> Result<SlotLocation, StoreError> {
        self.locate_on(&self.meta, object, level, page)
            .map_err(damaged_table_error)
    }

    /// A data slot, after the check of its bits and frame.
    pub(crate) fn slot(&self, at: usize, page: PageNo) -> Result<Slot, StoreError> {
        let slot = Slot::decode(self.meta.load(at)).map_err(|_| damaged_page_error(page))?;
        self.check_frame(slot, page)
    }

    /// The slot, if it names no frame outside the pool.
    pub(crate) fn check_frame(&self, slot: Slot, page: PageNo) -> Result<Slot, StoreError> {
        match slot.frame() {
            Some(frame) if !self.geometry().frame_numbers().contains(frame) => {
                // A device may have joined since this process mapped the pool. The owner knows.
                Err(match self.reaches(frame) {
                    true => damaged_page_error(page),
                    false => StoreError::OnFlash,
                })
            }
            _ => Ok(slot),
        }
    }

    /// The word of a frame in its frame table. Zero if this process does not reach the frame.
    #[inline]
    pub(crate) fn frame_word(&self, frame: FrameNo) -> FrameWord {
        FrameWord::from_bits(match self.reaches(frame) {
            true => self.meta.load(self.geometry().frame_entry_at(frame)),
            false => 0,
        })
    }

    /// The birth of the page with its slot at byte `at`. It is unknown if the medium damaged the slot
    /// or the word of the frame, and while the page changes.
    pub(crate) fn birth(&self, at: usize, page: PageNo) -> PageBirth {
        let found = self.slot_with_birth(at, page);
        found.map_or(PageBirth::Unknown, |(_, birth)| birth)
    }

    /// The slot at byte `at` and the birth of its page. A known birth belongs to this slot.
    pub(crate) fn slot_with_birth(
        &self,
        at: usize,
        page: PageNo,
    ) -> Result<(Slot, PageBirth), StoreError> {
        let slot = self.slot(at, page)?;
        let birth = match slot.frame() {
            Some(frame) => self.frame_word(frame).birth(),
            None if slot == Slot::EMPTY => return Ok((slot, PageBirth::NeverWritten)),
            None => slot.hole_birth(),
        };
        // The frame may have another page by now. Then the slot is another one, too.
        fence(Ordering::Acquire);
        let is_same = !slot.is_changing() && self.meta.load(at) == slot.encode();
        Ok(match birth {
            Some(birth) if is_same => (slot, PageBirth::At(birth)),
            _ => (slot, PageBirth::Unknown),
        })
    }

    /// Copies a page out of its frame, and returns its checksum if that is right. The caller loads
    /// the slot once more, even after an error: the page may have changed.
    #[inline]
    pub(crate) fn copy_frame(
        &self,
        frame: FrameNo,
        page: PageNo,
        into: &mut [u8; PAGE_BYTES],
    ) -> Result<u32, StoreError> {
        if !self.reaches(frame) {
            return Err(StoreError::OnFlash);
        }
        let expected = self.frame_word(frame).crc();
        let found = self.data.read_page(frame_at(frame), into);
        if found == expected {
            return Ok(found);
        }
        // Report before the slot is loaded again. A session that has changed the slot meanwhile
        // frees the frame without reading it.
        self.report_unreadable(frame);
        Err(damaged_page_error(page))
    }

    /// Copies a page of an object; its slot lies at byte `at`. Returns none when the page is a hole.
    pub(crate) fn read_slot(
        &self,
        at: usize,
        (object, page): (ObjectId, PageNo),
        into: &mut [u8; PAGE_BYTES],
        reach: Reach,
    ) -> Result<Option<PageSource>, StoreError> {
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
            if reach == Reach::Memory && self.geometry().is_on_flash(frame) {
                return Err(StoreError::OnFlash);
            }
            let copied = self.copy_frame(frame, page, into);
            // The load of the slot must not move up before the copy.
            std::sync::atomic::fence(Ordering::Acquire);
            if self.meta.load(at) == slot.encode() || defect::is(Defect::SlotNotRechecked) {
                // A reader that lost its processor may miss so many changes that the slot is the
                // same again. A page that is really damaged fails a second time.
                if copied.is_err() && !was_damaged {
                    was_damaged = true;
                    continue;
                }
                return copied.map(|crc| Some(PageSource { frame, crc }));
            }
        }
        Err(StoreError::TimedOut)
    }

    /// Waits until the page of the slot at byte `at` is no longer changed in place. The session
    /// that changes it holds its lock word, and may be stalled.
    #[cold]
    fn wait_for_change(
        &self,
        at: usize,
        (object, page): (ObjectId, PageNo),
    ) -> Result<(), StoreError> {
        let is_changing = || Slot::decode(self.meta.load(at)).is_ok_and(Slot::is_changing);
        for _ in 0..spins(CHANGE_SPINS) {
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
            if late.is_over() {
                self.control.report_lock_holders(&word);
                late = Deadline::after(LOCK_POLL_INTERVAL);
            }
            backoff.pause();
        }
        Ok(())
    }

    /// Whether the node with this slot could not be read. Nothing may be stored there, and a flush
    /// of it has no effect.
    pub(crate) fn is_unreadable(&self, at: usize) -> bool {
        self.meta.is_unreadable(at) || self.data.is_unreadable(at)
    }

    /// Reports the frame of a damaged page to the owner if it could not be read. The owner must not
    /// grant it again.
    #[cold]
    pub(crate) fn report_unreadable(&self, frame: FrameNo) {
        if self.data.is_unreadable(frame_at(frame)) {
            self.control.report_unreadable(frame);
        }
    }
}
