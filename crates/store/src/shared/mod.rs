//! The part of an opened pool that its owner and its sessions share: the mapped media, the control
//! segment in volatile memory, and the waits for each other.
//!
//! Invariant: this code is the same for the owner and for sessions, so it knows neither.

pub mod control;
pub(crate) mod error;
pub mod pool_mapping;
pub(crate) mod slot_repair;
pub mod wait;
