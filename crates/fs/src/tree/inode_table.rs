//! Allocation of inode numbers, which extends the inode table.

use crate::error::Result;
use crate::format::inode::{Ino, inode_at};
use crate::format::page_map;
use crate::tree::map_update;
use crate::txn::tx::Tx;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;

/// Allocates a number and its generation for a new inode, and extends the table if necessary.
pub(crate) fn allocate_ino(tx: &mut Tx<'_>) -> Result<(Ino, u32)> {
    let ino = tx.take_free_ino();
    let (index, _) = inode_at(ino);
    let mut table = tx.inode_table().clone();
    if page_map::find(&table.map, index, &mut |page| tx.page(page))?.is_none() {
        let run = map_update::find_or_allocate(tx, &mut table, index)?;
        // The whole span is added to the table: its unwritten pages read as free inodes.
        let (end, pages) = (index + run.len, table.pages);
        table.size = table.size.max(end * PAGE_BYTES as u64);
        table.pages += run.len;
        tx.count_pages((table.pages - pages).cast_signed());
        tx.set_inode_table(table)?;
    }
    let place = tx.locate_inode(ino)?.ok_or(Errno::STALE)?;
    let before = tx.stored_inode(ino, place)?;
    Ok((ino, before.generation.wrapping_add(1)))
}
