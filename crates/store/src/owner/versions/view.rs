//! The pages that a snapshot sees.

use super::super::error::ObjectError;
use super::super::pool::Pool;
use super::LEAF_PAGES;
use crate::format::frame_word::PageBirth;
use crate::format::geometry::frame_at;
use crate::format::slot::Slot;
use crate::format::table::SlotLocation;
use crate::format::version_log::Version;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::PoolMapping;
use pagemesh_base::ids::{Epoch, FrameNo, ObjectId, PageNo, Seq};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::sync::atomic::Ordering;

/// The frames of the 512 pages of a leaf that a snapshot sees, and their births. They stay as long as the snapshot, unless
/// the pool moves pages between its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionLeaf {
    /// The number of the frame + 1; 0: a hole.
    frames: Box<[u64; LEAF_PAGES as usize]>,
    /// The births of pages and holes. 0: a page that was never written; [`UNKNOWN_BIRTH`]: not known.
    births: Box<[u32; LEAF_PAGES as usize]>,
    /// Versions of the leaf may be lost.
    may_lack_versions: bool,
}

/// A birth that is not known. It is above all epochs, so such a page counts as changed.
const UNKNOWN_BIRTH: u32 = u32::MAX;

impl VersionLeaf {
    fn new() -> VersionLeaf {
        VersionLeaf {
            frames: Box::new([0; LEAF_PAGES as usize]),
            births: Box::new([0; LEAF_PAGES as usize]),
            may_lack_versions: false,
        }
    }

    /// Whether the medium may have lost the page: it changed since the snapshot, and no version is known.
    #[must_use]
    pub fn is_lost(&self, index: usize) -> bool {
        let is_unknown = self.frames[index] == 0 && self.births[index] == UNKNOWN_BIRTH;
        self.may_lack_versions && is_unknown
    }

    /// Whether [`VersionLeaf::is_lost`] is true for a page.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        (0..LEAF_PAGES as usize).any(|index| self.is_lost(index))
    }

    /// The frame of a page of the leaf; none: a hole.
    #[must_use]
    pub fn frame(&self, index: usize) -> Option<FrameNo> {
        self.frames[index].checked_sub(1).map(FrameNo)
    }

    /// Whether the page, or the hole, may have been born at this epoch or later. Of a hole that was written since the
    /// snapshot the birth is not known, and the answer is yes.
    #[must_use]
    pub fn may_be_born_since(&self, index: usize, epoch: Epoch) -> bool {
        self.births[index] >= epoch.0
    }

    fn set(&mut self, index: usize, frame: FrameNo, birth: Option<Epoch>) {
        self.frames[index] = frame.0 + 1;
        self.set_birth(index, birth);
    }

    fn set_birth(&mut self, index: usize, birth: Option<Epoch>) {
        self.births[index] = birth.map_or(UNKNOWN_BIRTH, |birth| birth.0);
    }
}

impl<M: Media> Pool<M> {
    /// The frames that a snapshot sees in a leaf of a slice: in pages `leaf * 512` to `leaf * 512 + 511`. All changes
    /// below the snapshot's epoch must have ended.
    ///
    /// # Errors
    /// When there is no such slice or snapshot, or a session is stuck: the caller tries again.
    pub fn version_leaf(
        &mut self,
        slice: SliceId,
        snapshot: Epoch,
        leaf: u64,
    ) -> Result<VersionLeaf, ObjectError> {
        let (object, _) = self.find(slice)?;
        let known = self.versions.of(object);
        if !known.is_some_and(|versions| versions.has_snapshot(snapshot)) {
            return Err(ObjectError::UnknownSnapshot { slice, snapshot });
        }
        self.check_versions(object)?;
        let mut frames = VersionLeaf::new();
        frames.may_lack_versions = self.may_lack_versions(object, snapshot);
        if self.add_live_pages(object, snapshot, leaf, &mut frames)? {
            // The records that replaced them may not be applied. Operations in progress may hold back a checkpoint.
            let committed = self.mapping.control.seq().load(Ordering::Acquire);
            self.wait_for_ops()?;
            self.checkpoint_versions(Seq(committed))?;
            // A merge may have found damage, and have given lines up.
            self.check_versions(object)?;
            self.add_kept_pages(object, snapshot, leaf, &mut frames)?;
        }
        Ok(frames)
    }

    /// Applies all records below a seq, so that each version that they replaced is known.
    pub(in crate::owner) fn checkpoint_versions(&mut self, below: Seq) -> Result<(), ObjectError> {
        loop {
            let before = self.superblock.checkpoint;
            self.checkpoint()?;
            if self.superblock.checkpoint >= below || self.is_passed(below) {
                return Ok(());
            }
            if self.superblock.checkpoint == before && self.is_log_merged() {
                return Err(StoreError::TimedOut.into());
            }
            // The log has no room for more versions.
            self.merge_all_soon();
            while self.versions.batch.is_some() {
                self.maintain_versions()?;
                if self.versions.is_out_of_room {
                    return Err(StoreError::NoSpace.into());
                }
            }
        }
    }

    /// Whether all records below a seq are applied. A checkpoint without records writes no superblock.
    fn is_passed(&self, below: Seq) -> bool {
        self.checkpoint_limit() >= below && !self.versions.is_checkpoint_limited
    }

    /// Adds the pages of the slice that the snapshot sees. True if the slice has later ones.
    fn add_live_pages(
        &mut self,
        object: ObjectId,
        snapshot: Epoch,
        leaf: u64,
        frames: &mut VersionLeaf,
    ) -> Result<bool, ObjectError> {
        let first = PageNo(leaf * LEAF_PAGES);
        let SlotLocation::At(at) = self.mapping.locate(object, 0, first)? else {
            return Ok(false);
        };
        let mut has_later = false;
        for index in 0..LEAF_PAGES as usize {
            let (at, page) = (at + index * 8, PageNo(first.0 + index as u64));
            let (slot, birth) = self.mapping.slot_with_birth(at, page)?;
            let (birth, is_same) = match birth {
                PageBirth::NeverWritten => continue,
                PageBirth::At(birth) if birth >= snapshot => {
                    frames.set_birth(index, None);
                    has_later = true;
                    continue;
                }
                PageBirth::At(birth) => (Some(birth), true),
                // A page of unknown birth is older than each snapshot, as for the checkpoint, unless it changes.
                PageBirth::Unknown => (None, self.is_still(at, slot)),
            };
            match slot.frame().filter(|_| is_same) {
                Some(frame) => frames.set(index, frame, birth),
                None => {
                    frames.set_birth(index, birth.filter(|_| is_same));
                    has_later = true;
                }
            }
        }
        Ok(has_later)
    }

    /// Whether the slot is the same, and is not being changed: a page that changes is later than the snapshot.
    fn is_still(&self, at: usize, slot: Slot) -> bool {
        !slot.is_changing() && self.mapping.meta.load(at) == slot.encode()
    }

    /// Adds the versions that the snapshot sees.
    fn add_kept_pages(
        &mut self,
        object: ObjectId,
        snapshot: Epoch,
        leaf: u64,
        frames: &mut VersionLeaf,
    ) -> Result<(), ObjectError> {
        let pending = self.versions.pending.get(&(object, leaf));
        for line in pending.into_iter().flatten() {
            if line.version.is_seen_by(snapshot) {
                let Version {
                    page, frame, birth, ..
                } = line.version;
                let birth = Some(birth).filter(|birth| birth.0 > 0);
                frames.set((page.0 % LEAF_PAGES) as usize, frame, birth);
            }
        }
        let versions = self.edited_versions(object);
        for block in self.blocks_of(&versions, leaf)? {
            for (_, page, frame, death) in block.versions() {
                let birth = self.mapping.frame_word(frame).birth();
                if birth.unwrap_or(Epoch(0)) < snapshot && snapshot <= death {
                    frames.set(page as usize, frame, birth);
                }
            }
        }
        Ok(())
    }
}

impl<M: Media> PoolMapping<M> {
    /// Copies a page that a snapshot sees, after the check of its bytes.
    ///
    /// # Errors
    /// When the page is damaged, or this process does not reach its frame.
    pub fn read_version(
        &self,
        frame: FrameNo,
        page: PageNo,
        into: &mut [u8; PAGE_BYTES],
    ) -> Result<(), StoreError> {
        self.copy_frame(frame, page, into).map(drop)
    }

    /// The same for a reader that may come too late: the frame may have another page by now. False if the bytes do not match
    /// their checksum, or the frame is not in the first device.
    pub(crate) fn copy_version(&self, frame: FrameNo, into: &mut [u8; PAGE_BYTES]) -> bool {
        let is_mapped = self.geometry().first_frames().contains(&frame.0);
        is_mapped && self.data.read_page(frame_at(frame), into) == self.frame_word(frame).crc()
    }
}
