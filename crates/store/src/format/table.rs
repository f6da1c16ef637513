//! The persistent page table of one object: a radix tree of 512 slots per node. Its root slot lies
//! in the object's entry.
//!
//! A slot of level 0 maps a data page; a slot of level n maps a node with slots of level n - 1. The
//! root slot's level is the tree's height, so every slot has an address (level, page) that records
//! can name.
//!
//! Invariants: a walk follows only slots that check and that name a frame of the pool. It loads at
//! most one slot per level. The tree never allocates and never stores: a record links a node, as it
//! does any other change.

use crate::format::devices::FrameNumbers;
use crate::format::record::LEVELS_MAX;
use crate::format::slot::{DamagedSlot, Slot};
use pagemesh_base::ids::{FrameNo, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

/// log2 of the slots in a node.
const NODE_SHIFT: u32 = 9;
const SLOT_BYTES: usize = 8;
/// Slots in a node, and so pages under one leaf. A record never spans two leaves.
pub const NODE_SLOTS: u64 = 512;
const _: () = assert!(SLOT_BYTES << NODE_SHIFT == PAGE_BYTES, "a node is a frame");
const _: () = assert!(NODE_SLOTS == 1 << NODE_SHIFT);

/// One object's page table on a medium.
pub struct PageTable<'m, M> {
    media: &'m M,
    root_at: usize,
    height: u8,
    frames: FrameNumbers<'m>,
}

/// The location of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotLocation {
    /// At this byte of the pool.
    At(usize),
    /// Nowhere yet: a node must be linked at this level first.
    Unlinked(u8),
}

/// Why a page table cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadTable {
    /// A slot's check bits are wrong.
    #[error("the page table is damaged at level {level} above page {page}: {cause}")]
    Damaged {
        /// The slot's level.
        level: u8,
        /// The requested page.
        page: PageNo,
        /// The slot.
        cause: DamagedSlot,
    },
    /// A slot checks but names a frame that the pool does not have.
    #[error(
        "the page table names frame {frame} at level {level} above page {page}; the pool has no such frame"
    )]
    NoSuchFrame {
        /// The slot's level.
        level: u8,
        /// The requested page.
        page: PageNo,
        /// The frame named.
        frame: FrameNo,
    },
    /// The object's table does not reach the page.
    #[error("page {page} is beyond the {pages} pages of the object's table")]
    OutOfReach {
        /// The requested page.
        page: PageNo,
        /// How many pages the table reaches.
        pages: u64,
    },
}

/// Pages that a table of this height reaches.
///
/// # Panics
/// When no table is so high.
#[must_use]
pub fn reach(height: u8) -> u64 {
    assert!(height <= LEVELS_MAX, "a table of height {height}");
    1 << (NODE_SHIFT * u32::from(height))
}

/// The slots of a frame that may be a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeSlots {
    /// Sound slots that are not empty.
    pub(crate) in_use: usize,
    /// The last of those, corrected.
    pub(crate) damaged: usize,
    /// The last of those, corrected.
    pub(crate) corrected: Option<Slot>,
}

impl NodeSlots {
    /// Counts the slots of a node. None if the frame is no node: if some word is no slot or names
    /// no frame in `frames`, or if too many words are one bit away from an empty slot.
    pub(crate) fn of<M: Media>(
        media: &M,
        node: FrameNo,
        frames: FrameNumbers<'_>,
    ) -> Option<NodeSlots> {
        let is_ours = |slot: &Slot| slot.frame().is_none_or(|it| frames.contains(it));
        if !frames.contains(node) {
            return None;
        }
        let (mut found, mut strays) = (NodeSlots::default(), 0);
        for slot in 0..1 << NODE_SHIFT {
            let bits = media.load(node.0 as usize * PAGE_BYTES + slot * SLOT_BYTES);
            match Slot::decode(bits) {
                Ok(slot) if is_ours(&slot) => found.in_use += usize::from(bits != 0),
                Ok(_) => return None,
                Err(_) => match Slot::correct(bits).filter(is_ours)? {
                    Slot::EMPTY => strays += 1,
                    slot => {
                        found.damaged += 1;
                        found.corrected = Some(slot);
                    }
                },
            }
        }
        (strays <= found.in_use + found.damaged).then_some(found)
    }
}

impl<'m, M: Media> PageTable<'m, M> {
    /// The table of `height` with its root slot at byte `root_at`, in a pool with the frames
    /// `frames`.
    ///
    /// # Panics
    /// When the height is beyond the highest.
    pub fn new(
        media: &'m M,
        root_at: usize,
        height: u8,
        frames: impl Into<FrameNumbers<'m>>,
    ) -> PageTable<'m, M> {
        assert!(height <= LEVELS_MAX, "a table of height {height}");
        PageTable {
            media,
            root_at,
            height,
            frames: frames.into(),
        }
    }

    /// The location of the slot of `level` above `page`.
    ///
    /// # Errors
    /// When the table is damaged on the way, or does not reach the page.
    ///
    /// # Panics
    /// When the level is above the table's height.
    pub fn locate(&self, level: u8, page: PageNo) -> Result<SlotLocation, BadTable> {
        assert!(
            level <= self.height,
            "level {level} of height {}",
            self.height
        );
        let pages = reach(self.height);
        if page.0 >= pages {
            return Err(BadTable::OutOfReach { page, pages });
        }
        let mut at = self.root_at;
        for above in (level + 1..=self.height).rev() {
            let Some(node) = self.load(at, above, page)?.frame() else {
                return Ok(SlotLocation::Unlinked(above));
            };
            at = slot_at(node, above - 1, page);
        }
        Ok(SlotLocation::At(at))
    }

    /// The slot of a data page. A page without a leaf was never written.
    ///
    /// # Errors
    /// When the table is damaged on the way, or does not reach the page.
    pub fn lookup(&self, page: PageNo) -> Result<Slot, BadTable> {
        match self.locate(0, page)? {
            SlotLocation::At(at) => self.load(at, 0, page),
            SlotLocation::Unlinked(_) => Ok(Slot::EMPTY),
        }
    }

    fn load(&self, at: usize, level: u8, page: PageNo) -> Result<Slot, BadTable> {
        let slot = Slot::decode(self.media.load(at)).map_err(|cause| BadTable::Damaged {
            level,
            page,
            cause,
        })?;
        match slot.frame() {
            Some(frame) if !self.frames.contains(frame) => {
                Err(BadTable::NoSuchFrame { level, page, frame })
            }
            _ => Ok(slot),
        }
    }
}

/// The byte of the slot of `level` above `page`, in the node that holds it.
fn slot_at(node: FrameNo, level: u8, page: PageNo) -> usize {
    let index = page.0 >> (NODE_SHIFT * u32::from(level)) & ((1 << NODE_SHIFT) - 1);
    node.0 as usize * PAGE_BYTES + index as usize * SLOT_BYTES
}
