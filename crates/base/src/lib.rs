//! Words everything shares: ids, units and checksums; and listening sockets.
//!
//! Invariants: no I/O but reading a key file, binding a unix socket, keeping processors awake,
//! asking what processes map and what is mounted, and handing a socket to a mount, and running a stopped process for a moment; no clock but that
//! of a wait, no randomness; `unsafe` in `wait`, `peer`, `contact` and `resume`. Numbers that mean different things have different types, so
//! that a page is never used as a frame, nor a seq as an epoch.

#![deny(unsafe_code)]

pub mod aside;
pub mod awake;
pub mod bytes;
pub mod checksum;
pub mod contact;
pub mod defect;
pub mod ids;
pub mod key;
pub mod layout;
pub mod mapping;
pub mod mounts;
pub mod peer;
pub mod resume;
pub mod slice;
pub mod socket;
pub mod space;
pub mod spin;
pub mod units;
pub mod wait;
