//! The kernel, without the C library: system calls, a lock, and memory of the program that may not
//! be there.
//!
//! Invariants: nothing here allocates or uses another part of this library, and the C library only
//! gives the place of `errno`. So all of it may run in a signal handler and in a child of `vfork`.

pub mod buffer;
pub mod lock;
pub mod sys;
