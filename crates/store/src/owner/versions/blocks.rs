//! The blocks of the versions of one leaf.

use super::super::error::ObjectError;
use super::super::pool::Pool;
use super::pages::PageEdits;
use crate::format::slot::Slot;
use crate::format::version_pages::{
    BLOCK_ENTRIES, BlockEntries, BlockNo, DamagedVersions, VersionsHead, get_directory,
    set_directory,
};
use pagemesh_base::ids::{Epoch, FrameNo, ObjectId};
use pagemesh_pmem::Media;

/// A block with its entries and slots.
pub(super) struct Block {
    pub(super) number: BlockNo,
    pub(super) entries: BlockEntries,
    /// Of all its entries. That of entry 0 is empty.
    pub(super) slots: Vec<Slot>,
}

impl Block {
    /// Entries that a version can take.
    pub(super) fn free_entries(&self) -> Vec<usize> {
        let free = |&entry: &usize| self.slots[entry].frame().is_none();
        (1..BLOCK_ENTRIES as usize).filter(free).collect()
    }

    /// Its versions: entry, page in the leaf, frame, death.
    pub(super) fn versions(&self) -> impl Iterator<Item = (usize, u64, FrameNo, Epoch)> + '_ {
        (1..BLOCK_ENTRIES as usize).filter_map(|entry| {
            let frame = self.slots[entry].frame()?;
            let (page, death) = self.entries.version(entry);
            Some((entry, page, frame, death))
        })
    }
}

/// The object of versions that a change is about, with its head and edits so far.
pub(super) struct EditedVersions {
    pub(super) object: ObjectId,
    pub(super) head: VersionsHead,
    pub(super) edits: PageEdits,
}

impl<M: Media> Pool<M> {
    /// The object of a slice's versions, for changes.
    pub(super) fn edited_versions(&self, origin: ObjectId) -> EditedVersions {
        let slice = &self.versions.slices[&origin];
        EditedVersions {
            object: slice.object,
            head: slice.head,
            edits: PageEdits::default(),
        }
    }

    /// The newest block of a leaf.
    pub(super) fn newest_block(
        &mut self,
        versions: &EditedVersions,
        leaf: u64,
    ) -> Result<Option<BlockNo>, ObjectError> {
        let (page, at) = versions.head.directory_at(leaf);
        let page = self.page_with_edits(versions.object, page, &versions.edits)?;
        Ok(get_directory(&page, at))
    }

    pub(super) fn set_newest_block(
        &mut self,
        versions: &mut EditedVersions,
        leaf: u64,
        block: Option<BlockNo>,
    ) -> Result<(), ObjectError> {
        let (page, at) = versions.head.directory_at(leaf);
        let mut bytes = self.page_with_edits(versions.object, page, &versions.edits)?;
        set_directory(&mut bytes, at, block);
        versions.edits.set(page, *bytes);
        Ok(())
    }

    pub(super) fn read_block(
        &mut self,
        versions: &EditedVersions,
        number: BlockNo,
    ) -> Result<Block, ObjectError> {
        let (page, at) = versions.head.entries_at(number);
        let page = self.page_with_edits(versions.object, page, &versions.edits)?;
        let entries = BlockEntries::decode(&page, at)?;
        let first = versions.head.frames_at(number);
        let slots = self.version_slots(versions.object, first, BLOCK_ENTRIES)?;
        Ok(Block {
            number,
            entries,
            slots,
        })
    }

    pub(super) fn set_entries(
        &mut self,
        versions: &mut EditedVersions,
        number: BlockNo,
        entries: &BlockEntries,
    ) -> Result<(), ObjectError> {
        let (page, at) = versions.head.entries_at(number);
        let mut bytes = self.page_with_edits(versions.object, page, &versions.edits)?;
        entries.encode(&mut bytes, at);
        versions.edits.set(page, *bytes);
        Ok(())
    }

    /// All blocks of a leaf, the newest first.
    pub(super) fn blocks_of(
        &mut self,
        versions: &EditedVersions,
        leaf: u64,
    ) -> Result<Vec<Block>, ObjectError> {
        let mut blocks = Vec::new();
        let mut next = self.newest_block(versions, leaf)?;
        while let Some(number) = next {
            let is_known = number.0 < versions.head.next_block;
            if !is_known || blocks.len() as u64 >= versions.head.next_block {
                return Err(DamagedVersions.into());
            }
            let block = self.read_block(versions, number)?;
            if block.entries.leaf != Some(leaf) {
                return Err(DamagedVersions.into());
            }
            next = block.entries.before;
            blocks.push(block);
        }
        Ok(blocks)
    }

    /// Takes a block for a leaf. The block becomes its newest.
    pub(super) fn add_block(
        &mut self,
        versions: &mut EditedVersions,
        leaf: u64,
    ) -> Result<Block, ObjectError> {
        let before = self.newest_block(versions, leaf)?;
        let number = match versions.head.first_free {
            Some(free) => {
                let block = self.read_block(versions, free)?;
                versions.head.first_free = block.entries.before;
                free
            }
            None => {
                versions.head.next_block += 1;
                BlockNo(versions.head.next_block - 1)
            }
        };
        let entries = BlockEntries::new(Some(leaf), before);
        self.set_entries(versions, number, &entries)?;
        self.set_newest_block(versions, leaf, Some(number))?;
        self.read_block(versions, number)
    }
}
