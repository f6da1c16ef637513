//! What a direct client and a mount send each other: packets, and the status of a mount as JSON.
//!
//! Invariants: nothing here opens, waits or decides. Both sides decode only what the bounds of the
//! packet allow.

#[cfg(test)]
mod fuzz;
pub mod status;
pub mod wire;
