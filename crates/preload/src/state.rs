//! The state of this process and of the calling thread, in words that every other part reads.
//!
//! Invariants: nothing here allocates or takes a lock. So all of it may run in a signal handler and
//! in a child of `vfork`.

pub mod log;
pub mod thread;
pub mod withdrawal;
