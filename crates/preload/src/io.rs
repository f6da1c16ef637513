//! The data path: calls that the engine does in place of the kernel.
//!
//! Invariants: a call that the engine does not do, or is not sure of, goes to the kernel as the
//! program made it. No lock is held while the real function runs.

pub mod offset;
pub mod transfer;
pub mod vector;
