//! Calls that make, duplicate, pass or close descriptors, and that use files in ways which the
//! engine does not do.
//!
//! Invariants: a descriptor leaves the table before a call that may end or replace it, and enters
//! it after a call that has surely made it.

pub mod close;
pub mod duplicate;
pub mod messages;
pub mod open;
