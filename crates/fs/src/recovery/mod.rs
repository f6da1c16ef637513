//! Mounting, and what a crash left.

pub(crate) mod mount;
pub(crate) mod scan;
