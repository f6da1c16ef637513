//! Which descriptors are on the direct path, and the open descriptions that they lead to.
//!
//! Invariants: the kernel serves a descriptor that is not in the table, which is always correct.
//! Nothing here allocates.

pub mod attributes;
pub mod open_description;
pub mod table;
