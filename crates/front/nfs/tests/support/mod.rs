//! A server over a space in memory, and clients of it.

#[allow(dead_code)]
pub mod client;
#[allow(dead_code)]
pub mod compounds;
#[allow(dead_code)]
pub mod decoder;
#[allow(dead_code)]
#[path = "../../../../fs/tests/support/memory.rs"]
pub mod memory;
#[allow(dead_code)]
pub mod session;
#[allow(dead_code)]
pub mod world;
