//! Allocators of spans and inode numbers.

pub(crate) mod inos;
pub(crate) mod range_set;
pub(crate) mod spans;
