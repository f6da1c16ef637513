//! Free and used numbers, in memory only: spans, inode numbers, sharers, pages to be freed.

pub(crate) mod deferred_free;
pub(crate) mod inos;
pub(crate) mod range_set;
pub(crate) mod share_counts;
pub(crate) mod spans;
