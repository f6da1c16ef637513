//! Content of files, and the use of inodes.

pub(crate) mod allocate;
pub(crate) mod atomic;
pub(crate) mod attr;
pub(crate) mod copy;
pub(crate) mod creation;
pub(crate) mod deferred_free;
pub(crate) mod extend;
pub(crate) mod extents;
pub(crate) mod forget;
pub(crate) mod free;
pub(crate) mod kernel_pages;
pub(crate) mod lifetime;
pub(crate) mod mmap_dirty;
pub(crate) mod privileges;
pub(crate) mod read;
pub(crate) mod redo_log;
pub(crate) mod resize;
pub(crate) mod seek;
pub(crate) mod share;
pub(crate) mod stored_pages;
pub(crate) mod sync;
pub(crate) mod times;
pub(crate) mod write;
