//! The on-disk structures.

pub(crate) mod directory_page;
pub(crate) mod inode;
