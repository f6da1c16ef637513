//! Reading and writing of the two superblocks.
//!
//! Invariant: one of the two is valid at any time.

use super::error::PoolError;
use crate::format::superblock::{BadSuperblock, Superblock};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MapError, Media};

/// Reads the valid superblock of the higher generation.
///
/// # Errors
/// When there is none, or the medium is shorter than the pool.
pub fn read_superblock<M: Media>(media: &M) -> Result<Superblock, PoolError> {
    let found = media.len_bytes() as u64;
    if found < 2 * PAGE_BYTES as u64 {
        return Err(BadSuperblock::NotAPool.into());
    }
    let pages = superblock_pages(media);
    let block = Superblock::choose([&pages[0], &pages[1]])?;
    let wanted = block.geometry.pool_bytes;
    if found < wanted {
        return Err(PoolError::Truncated { wanted, found });
    }
    Ok(block)
}

/// The two superblock pages of a medium.
pub(crate) fn superblock_pages<M: Media>(media: &M) -> [[u8; PAGE_BYTES]; 2] {
    let mut pages = [[0; PAGE_BYTES]; 2];
    media.read(0, &mut pages[0]);
    media.read(PAGE_BYTES, &mut pages[1]);
    pages
}

/// Streams a superblock to both pages, one after the other.
pub(crate) fn write_superblocks<M: Media>(
    media: &M,
    block: &mut Superblock,
) -> Result<(), MapError> {
    for _ in 0..2 {
        block.generation += 1;
        write_superblock(media, block)?;
    }
    Ok(())
}

/// Streams a superblock to its page and makes it durable.
pub(crate) fn write_superblock<M: Media>(media: &M, block: &Superblock) -> Result<(), MapError> {
    let (_, stores) = M::stream_page(&[(media, block.offset())], &block.encode());
    let _fenced = media.fence(stores);
    media.sync()
}
