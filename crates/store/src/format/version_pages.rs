//! The object with the versions of a slice: the frames that snapshots keep, with their pages and deaths.
//!
//! It is an object like any other, so journals, moves between devices and checks of the pool need nothing new. Its pages:
//!
//! ```text
//! page 0            the head: snapshots, blocks, flags
//! pages 1..64       the epochs of the snapshots, ascending, 1024 in each page
//! pages 64..        the directory: the newest block of each leaf of the slice, 1024 in each page
//! then groups of pages, each group begins at a multiple of 512:
//!   512 pages       entries of blocks, eight blocks in each page
//!   512 x 512 pages the frames of the versions, 64 for each block
//! ```
//!
//! A block belongs to one leaf of the slice. Its entry 0 names the leaf and the block before it; entries 1 to 63
//! describe the versions whose frames the pages of the same number name. An entry counts only if its page has a frame.
//! The birth of a version is in the frame table.
//!
//! ```text
//! head        0 magic 8, flags 4 (bit 0: a sweep is needed; bit 1: versions were given up), snapshots 4, next block 8,
//!             first free block + 1 4, leaves 4, the newest snapshot that may lack versions 4
//! entry 0     leaf 4 (all ones: the block is free), block before + 1 4
//! entry 1..63 page in its leaf 2, zero 2, death 4
//! ```

use crate::format::table::NODE_SLOTS;
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::units::PAGE_BYTES;

type Page = [u8; PAGE_BYTES];

const MAGIC: [u8; 8] = *b"pmversns";
const SWEEP_NEEDED: u32 = 1;
const VERSIONS_GIVEN_UP: u32 = 2;
pub(crate) const HEAD_PAGE: PageNo = PageNo(0);
const LIST_START: u64 = 1;
const DIRECTORY_START: u64 = 64;
/// Snapshots of one page of the list.
pub(crate) const PAGE_SNAPSHOTS: usize = PAGE_BYTES / 4;
/// Snapshots of one slice.
pub(crate) const SNAPSHOTS_MAX: usize = (DIRECTORY_START - LIST_START) as usize * PAGE_SNAPSHOTS;
/// Leaves of one page of the directory.
const PAGE_LEAVES: u64 = PAGE_BYTES as u64 / 4;
/// Entries of a block, the first included.
pub(crate) const BLOCK_ENTRIES: u64 = 64;
const ENTRY_BYTES: usize = 8;
/// Blocks of one page of entries.
const PAGE_BLOCKS: u64 = NODE_SLOTS / BLOCK_ENTRIES;
/// Blocks of a group.
const GROUP_BLOCKS: u64 = NODE_SLOTS * PAGE_BLOCKS;
/// Pages of a group.
const GROUP_PAGES: u64 = NODE_SLOTS * (1 + NODE_SLOTS);
/// Blocks of one object: what its page table reaches, with room for the other pages.
const BLOCKS_MAX: u64 = (1 << 17) * GROUP_BLOCKS;
const NO_LEAF: u32 = u32::MAX;

/// The number of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BlockNo(pub(crate) u64);

/// A page of this object with content that no version of the program writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a page that lists versions for snapshots is damaged")]
pub struct DamagedVersions;

/// The head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VersionsHead {
    /// The number of snapshots.
    pub(crate) snapshots: u32,
    /// Versions may be left that no snapshot sees.
    pub(crate) needs_sweep: bool,
    /// Blocks from here on were never used.
    pub(crate) next_block: u64,
    pub(crate) first_free: Option<BlockNo>,
    /// Leaves that the directory has room for.
    pub(crate) leaves: u32,
    /// Versions were given up, because a list of them is damaged: no snapshot can be read.
    pub(crate) is_damaged: bool,
    /// Lines of the log were lost: snapshots up to this one may lack versions. 0: none was.
    pub(crate) lost_until: Epoch,
}

impl VersionsHead {
    pub(crate) fn encode(&self) -> Page {
        let mut page = [0; PAGE_BYTES];
        put(&mut page, 0, MAGIC);
        let sweep = if self.needs_sweep { SWEEP_NEEDED } else { 0 };
        let given_up = if self.is_damaged {
            VERSIONS_GIVEN_UP
        } else {
            0
        };
        let flags = sweep | given_up;
        put(&mut page, 8, flags.to_le_bytes());
        put(&mut page, 12, self.snapshots.to_le_bytes());
        put(&mut page, 16, self.next_block.to_le_bytes());
        put(&mut page, 24, encode_block(self.first_free).to_le_bytes());
        put(&mut page, 28, self.leaves.to_le_bytes());
        put(&mut page, 32, self.lost_until.0.to_le_bytes());
        page
    }

    pub(crate) fn decode(page: &Page) -> Result<VersionsHead, DamagedVersions> {
        let head = VersionsHead {
            needs_sweep: get_u32(page, 8) & SWEEP_NEEDED != 0,
            snapshots: get_u32(page, 12),
            next_block: get_u64(page, 16),
            first_free: decode_block(get_u32(page, 24)),
            leaves: get_u32(page, 28),
            is_damaged: get_u32(page, 8) & VERSIONS_GIVEN_UP != 0,
            lost_until: Epoch(get_u32(page, 32)),
        };
        let is_sound = field(page, 0) == MAGIC
            && head.snapshots as usize <= SNAPSHOTS_MAX
            && head.next_block <= BLOCKS_MAX
            && head
                .first_free
                .is_none_or(|block| block.0 < head.next_block);
        is_sound.then_some(head).ok_or(DamagedVersions)
    }

    /// Where the pages of the blocks begin.
    fn groups_start(&self) -> u64 {
        let directory = u64::from(self.leaves).div_ceil(PAGE_LEAVES);
        (DIRECTORY_START + directory).next_multiple_of(NODE_SLOTS)
    }

    fn group_start(&self, block: BlockNo) -> u64 {
        self.groups_start() + block.0 / GROUP_BLOCKS * GROUP_PAGES
    }

    /// The page with the entries of a block, and the byte of the first one.
    pub(crate) fn entries_at(&self, block: BlockNo) -> (PageNo, usize) {
        let page = self.group_start(block) + block.0 % GROUP_BLOCKS / PAGE_BLOCKS;
        let byte = (block.0 % PAGE_BLOCKS * BLOCK_ENTRIES) as usize * ENTRY_BYTES;
        (PageNo(page), byte)
    }

    /// The first of the 64 pages with the frames of a block.
    pub(crate) fn frames_at(&self, block: BlockNo) -> PageNo {
        let first = block.0 % GROUP_BLOCKS * BLOCK_ENTRIES;
        PageNo(self.group_start(block) + NODE_SLOTS + first)
    }

    /// The page of the directory with the newest block of a leaf, and its byte.
    pub(crate) fn directory_at(&self, leaf: u64) -> (PageNo, usize) {
        assert!(
            leaf < u64::from(self.leaves),
            "leaf {leaf} has no place in a directory of {}",
            self.leaves
        );
        let page = DIRECTORY_START + leaf / PAGE_LEAVES;
        (PageNo(page), (leaf % PAGE_LEAVES) as usize * 4)
    }

    /// The bytes of an object with this many blocks.
    pub(crate) fn size_bytes(&self, blocks: u64) -> u64 {
        let groups = blocks.max(1).div_ceil(GROUP_BLOCKS);
        (self.groups_start() + groups * GROUP_PAGES) * PAGE_BYTES as u64
    }
}

/// The page of the list with a snapshot.
pub(crate) fn list_page(number: usize) -> PageNo {
    PageNo(LIST_START + (number / PAGE_SNAPSHOTS) as u64)
}

/// The page of the list that begins with these snapshots.
pub(crate) fn encode_list(snapshots: &[Epoch]) -> Page {
    let mut page = [0; PAGE_BYTES];
    for (snapshot, at) in snapshots.iter().take(PAGE_SNAPSHOTS).zip((0..).step_by(4)) {
        put(&mut page, at, snapshot.0.to_le_bytes());
    }
    page
}

/// The first `count` snapshots of a page of the list.
pub(crate) fn decode_list(page: &Page, count: usize) -> Result<Vec<Epoch>, DamagedVersions> {
    let epochs = page.as_chunks().0.iter().take(count);
    let list: Vec<Epoch> = epochs.map(|it| Epoch(u32::from_le_bytes(*it))).collect();
    let is_ascending = list.windows(2).all(|pair| pair[0] < pair[1]);
    is_ascending.then_some(list).ok_or(DamagedVersions)
}

fn encode_block(block: Option<BlockNo>) -> u32 {
    block.map_or(0, |block| block.0 as u32 + 1)
}

fn decode_block(word: u32) -> Option<BlockNo> {
    word.checked_sub(1).map(|block| BlockNo(block.into()))
}

/// The newest block of the leaf with this byte in a page of the directory.
pub(crate) fn get_directory(page: &Page, at: usize) -> Option<BlockNo> {
    decode_block(get_u32(page, at))
}

pub(crate) fn set_directory(page: &mut Page, at: usize, block: Option<BlockNo>) {
    put(page, at, encode_block(block).to_le_bytes());
}

/// The entries of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockEntries {
    /// The leaf; none: the block is free.
    pub(crate) leaf: Option<u64>,
    /// The block before it, of the leaf or of the free ones.
    pub(crate) before: Option<BlockNo>,
    /// The page in the leaf and the death of each version. Entry 0 is none.
    versions: [(u16, Epoch); BLOCK_ENTRIES as usize],
}

impl BlockEntries {
    pub(crate) fn new(leaf: Option<u64>, before: Option<BlockNo>) -> BlockEntries {
        BlockEntries {
            leaf,
            before,
            versions: [(0, Epoch(0)); BLOCK_ENTRIES as usize],
        }
    }

    /// The page in its leaf and the death of a version.
    pub(crate) fn version(&self, entry: usize) -> (u64, Epoch) {
        let (page, death) = self.versions[entry];
        (page.into(), death)
    }

    pub(crate) fn set_version(&mut self, entry: usize, page_in_leaf: u64, death: Epoch) {
        assert!(
            entry > 0 && page_in_leaf < NODE_SLOTS,
            "entry {entry} of page {page_in_leaf}"
        );
        self.versions[entry] = (page_in_leaf as u16, death);
    }

    /// Writes the entries into their page, from this byte on.
    pub(crate) fn encode(&self, page: &mut Page, at: usize) {
        let leaf = self.leaf.map_or(NO_LEAF, |leaf| leaf as u32);
        put(page, at, leaf.to_le_bytes());
        put(page, at + 4, encode_block(self.before).to_le_bytes());
        for (entry, (in_leaf, death)) in self.versions.iter().enumerate().skip(1) {
            let at = at + entry * ENTRY_BYTES;
            put(page, at, u32::from(*in_leaf).to_le_bytes());
            put(page, at + 4, death.0.to_le_bytes());
        }
    }

    /// Reads the entries from their page.
    pub(crate) fn decode(page: &Page, at: usize) -> Result<BlockEntries, DamagedVersions> {
        let leaf = Some(get_u32(page, at)).filter(|leaf| *leaf != NO_LEAF);
        let before = decode_block(get_u32(page, at + 4));
        let mut entries = BlockEntries::new(leaf.map(u64::from), before);
        for (entry, version) in entries.versions.iter_mut().enumerate().skip(1) {
            let at = at + entry * ENTRY_BYTES;
            let page_in_leaf = get_u32(page, at);
            if u64::from(page_in_leaf) >= NODE_SLOTS {
                return Err(DamagedVersions);
            }
            *version = (page_in_leaf as u16, Epoch(get_u32(page, at + 4)));
        }
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::object::HEIGHT;
    use crate::format::table::reach;
    use std::collections::HashSet;

    fn head(leaves: u32) -> VersionsHead {
        VersionsHead {
            snapshots: 3,
            needs_sweep: true,
            next_block: 9,
            first_free: Some(BlockNo(4)),
            leaves,
            is_damaged: leaves == 70,
            lost_until: Epoch(leaves),
        }
    }

    #[test]
    fn head_and_entries_round_trip() {
        assert_eq!(VersionsHead::decode(&head(70).encode()), Ok(head(70)));
        assert_eq!(VersionsHead::decode(&[0; PAGE_BYTES]), Err(DamagedVersions));
        let mut entries = BlockEntries::new(Some(5), Some(BlockNo(2)));
        entries.set_version(1, 511, Epoch(8));
        entries.set_version(63, 0, Epoch(9));
        let mut page = [0; PAGE_BYTES];
        let (_, at) = head(70).entries_at(BlockNo(3));
        entries.encode(&mut page, at);
        assert_eq!(BlockEntries::decode(&page, at), Ok(entries));
        assert_eq!(
            BlockEntries::decode(&[0xff; PAGE_BYTES], 0),
            Err(DamagedVersions)
        );
        let list = [Epoch(3), Epoch(4)];
        assert_eq!(decode_list(&encode_list(&list), 2), Ok(list.to_vec()));
        assert_eq!(decode_list(&[1; PAGE_BYTES], 2), Err(DamagedVersions));
    }

    #[test]
    fn pages_of_blocks_do_not_overlap() {
        for leaves in [1, 1 << 20, 1 << 25] {
            let head = head(leaves);
            let mut frames = HashSet::new();
            let mut entries = HashSet::new();
            let last_directory = head.directory_at(u64::from(leaves) - 1).0;
            for block in (0..3 * GROUP_BLOCKS).step_by(7).map(BlockNo) {
                assert!(entries.insert(head.entries_at(block)));
                let first = head.frames_at(block).0;
                assert!((first..first + BLOCK_ENTRIES).all(|page| frames.insert(page)));
                assert!(head.entries_at(block).0 > last_directory);
            }
            assert!(entries.iter().all(|(page, _)| !frames.contains(&page.0)));
            let end = head.size_bytes(3 * GROUP_BLOCKS) / PAGE_BYTES as u64;
            assert!(frames.iter().all(|&page| page < end));
            assert!(head.size_bytes(BLOCKS_MAX) / PAGE_BYTES as u64 <= reach(HEIGHT));
        }
    }
}
