//! Structures in pages of the space, changed within an operation: maps of files, directories, the inode
//! table, extended attributes.

pub(crate) mod acl_xattrs;
pub(crate) mod directory;
pub(crate) mod inode_table;
pub(crate) mod map_update;
pub(crate) mod new_inode;
pub(crate) mod tier;
pub(crate) mod xattr_list;
