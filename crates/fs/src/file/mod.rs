//! Content of files.

pub(crate) mod allocate;
pub(crate) mod deferred_free;
pub(crate) mod extend;
pub(crate) mod free;
pub(crate) mod kernel_pages;
pub(crate) mod mmap_dirty;
pub(crate) mod redo_log;
pub(crate) mod share;
pub(crate) mod sync;
pub(crate) mod write;
