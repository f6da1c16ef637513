//! Reading and writing of the two superblocks.
//!
//! Invariant: one of the two is valid at any time.

use super::error::PoolError;
use crate::format::superblock::{BadSuperblock, Superblock};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MapError, Media};
use uuid::Uuid;

/// Reads the valid superblock of the higher generation. The ranges of failed devices become absent.
///
/// # Errors
/// When there is none, or the medium is shorter than the pool.
pub fn read_superblock<M: Media>(media: &M) -> Result<Superblock, PoolError> {
    Ok(read_superblock_without(media, &[])?.0)
}

/// The same, with further devices that have failed. The flag is set if the superblock did not know one of them.
pub(super) fn read_superblock_without<M: Media>(
    media: &M,
    failed: &[Uuid],
) -> Result<(Superblock, bool), PoolError> {
    let mut block = read_superblock_of_first(media)?;
    let mut is_new = false;
    for &id in failed {
        is_new |= block.geometry.devices.fail(id);
    }
    for device in block.geometry.devices.failed() {
        media.attach_absent(device.bytes())?;
    }
    let (wanted, found) = (block.geometry.end_bytes(), media.len_bytes() as u64);
    match found < wanted {
        true => Err(PoolError::Truncated { wanted, found }),
        false => Ok((block, is_new)),
    }
}

/// The same for a medium that may end with the first device.
pub(crate) fn read_superblock_of_first<M: Media>(media: &M) -> Result<Superblock, PoolError> {
    let found = media.len_bytes() as u64;
    if found < 2 * PAGE_BYTES as u64 {
        return Err(BadSuperblock::NotAPool.into());
    }
    let block = Superblock::newer(superblock_copies(media))?;
    let wanted = block.geometry.pool_bytes;
    match found < wanted {
        true => Err(PoolError::Truncated { wanted, found }),
        false => Ok(block),
    }
}

/// The two superblocks of a medium.
pub(crate) fn superblock_copies<M: Media>(media: &M) -> [Result<Superblock, BadSuperblock>; 2] {
    superblock_pages(media).map(|page| {
        let mut block = Superblock::decode(&page)?;
        // A wrong size in a sound superblock is reported by the caller.
        let is_whole = block.geometry.pool_bytes <= media.len_bytes() as u64;
        if is_whole {
            block.load_more_heads(&page, |at, into| media.read(at, into))?;
        }
        Ok(block)
    })
}

/// The pages of the two superblocks of a medium.
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

/// Streams a superblock and its further heads to their pages, and makes them durable. Only a superblock whose parts
/// have all arrived is valid, so they need no order.
pub(crate) fn write_superblock<M: Media>(media: &M, block: &Superblock) -> Result<(), MapError> {
    let (_, mut stores) = M::stream_page(&[(media, block.offset())], &block.encode());
    let heads = block.encode_more_heads();
    for (number, bytes) in heads.chunks(PAGE_BYTES).enumerate() {
        let mut page = [0; PAGE_BYTES];
        page[..bytes.len()].copy_from_slice(bytes);
        let at = block.heads_at() + number * PAGE_BYTES;
        let (_, streamed) = M::stream_page(&[(media, at)], &page);
        stores = streamed.after(Some(stores));
    }
    let _fenced = media.fence(stores);
    media.sync()
}
