//! The brick: the daemon that owns a pool.
//!
//! [`mod@file`] finds and locks the pool, [`brick`] runs the maintenance loop, [`worker`] is one
//! connection's session, [`service`] connects them to the fabric. Nothing here depends on volumes.

#![forbid(unsafe_code)]

mod block_device;
pub mod brick;
mod device_error;
pub mod device_file;
mod device_requests;
pub mod disk_file;
mod error_hints;
pub mod file;
mod file_error;
pub mod further_devices;
mod new_file;
pub mod offline;
pub mod process;
pub mod resource_limits;
pub mod scrub;
pub mod service;
mod stalled_sessions;
pub mod worker;

pub use brick::{pool_devices, tier};
