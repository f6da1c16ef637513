//! Locations of leaves: a small cache in front of the walk down a page table.
//!
//! Nodes move only when their object is deleted, or while the owner recalls the grants of all sessions. So the cache is
//! cleared before an object number is used again, and after each recall.

use pagemesh_base::ids::{ObjectId, PageNo};

/// Leaves in the cache: 1 GiB of an object.
const CACHED_LEAVES: usize = 512;
/// Slots in a leaf, and bytes of a slot.
const SLOTS: u64 = 512;
const SLOT_BYTES: usize = 8;

/// The cache: key of object and leaf, byte of the leaf's first slot.
pub(crate) struct LeafCache(Box<[(u64, usize); CACHED_LEAVES]>);

impl LeafCache {
    pub(crate) fn new() -> LeafCache {
        LeafCache(Box::new([(0, 0); CACHED_LEAVES]))
    }

    /// The byte of the page's slot; `walk` finds it if the cache does not have it.
    #[inline]
    pub(crate) fn slot_at<E>(
        &mut self,
        object: ObjectId,
        page: PageNo,
        walk: impl FnOnce() -> Result<Option<usize>, E>,
    ) -> Result<Option<usize>, E> {
        let leaf = page.0 / SLOTS;
        // Zero is no key: an empty entry matches nothing.
        let key = (u64::from(object.0) << 32 | leaf) + 1;
        let within = (page.0 % SLOTS) as usize * SLOT_BYTES;
        let entry = &mut self.0[leaf as usize % CACHED_LEAVES];
        if entry.0 == key {
            return Ok(Some(entry.1 + within));
        }
        let found = walk()?;
        if let Some(at) = found {
            *entry = (key, at - within);
        }
        Ok(found)
    }

    /// The byte of the page's slot, if the cache has it: a hint only.
    #[inline]
    pub(crate) fn cached_slot_at(&self, object: ObjectId, page: PageNo) -> Option<usize> {
        let leaf = page.0 / SLOTS;
        let (key, at) = self.0[leaf as usize % CACHED_LEAVES];
        let wanted = (u64::from(object.0) << 32 | leaf) + 1;
        (key == wanted).then_some(at + (page.0 % SLOTS) as usize * SLOT_BYTES)
    }

    pub(crate) fn clear(&mut self) {
        self.0.fill((0, 0));
    }
}
