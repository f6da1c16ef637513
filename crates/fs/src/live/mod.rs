//! State in memory of inodes in use: their locks, buffered pages and recorded times, and the parts
//! that the kernel and direct clients have.

pub(crate) mod file_lock;
pub(crate) mod inode;
pub(crate) mod kernel_hooks;
pub(crate) mod kernel_pages;
pub(crate) mod mmap_dirty;
pub(crate) mod read_times;
pub(crate) mod shared_file_map;
pub(crate) mod tail_pages;
pub(crate) mod unseen_writes;
pub(crate) mod xattr_indexes;
