//! The on-disk structures and their checks. Nothing here reads or writes the space, and nothing here
//! imports a room above.

pub(crate) mod acl;
pub(crate) mod append_footer;
pub(crate) mod directory_page;
pub(crate) mod file_id;
pub(crate) mod inode;
pub(crate) mod inode_check;
pub(crate) mod page_map;
pub(crate) mod redo_log;
pub(crate) mod superblock;
#[cfg(test)]
mod tests;
pub(crate) mod xattr_kinds;
pub(crate) mod xattr_list;

use pagemesh_base::units::PAGE_BYTES;

/// A page of the space.
pub(crate) type Page = [u8; PAGE_BYTES];
/// Bytes of a page.
pub(crate) const PAGE: u64 = PAGE_BYTES as u64;

/// Pages that begin below this byte.
pub(crate) fn page_count(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE)
}
