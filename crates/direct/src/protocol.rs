//! The messages between a direct client and a mount: packets, and the status of a mount as JSON.
//!
//! Invariants: a malformed packet is an error, and never a panic: lengths and counts are checked
//! before they are used. The process at the other end is checked elsewhere.

#[cfg(test)]
mod fuzz;
pub mod status;
pub mod wire;
