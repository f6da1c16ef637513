//! The C library and the loader: the functions behind this library's, the binding of its own
//! imports, and the threads that the engine starts through them.
//!
//! Invariants: no call of this library uses a name that the program may define.

pub mod binding;
pub mod elf;
pub mod engine_threads;
pub mod environment;
pub mod real;
pub mod symbols;
