//! Words everything shares: ids, units and checksums; and listening sockets.
//!
//! Invariants: no I/O but reading a key file, binding a unix socket, keeping processors awake and
//! asking what processes map, no clock but that of a wait, no randomness; one `unsafe` each in `wait` and `peer`. Numbers that mean different things have different types, so
//! that a page is never used as a frame, nor a seq as an epoch.

#![deny(unsafe_code)]

pub mod aside;
pub mod awake;
pub mod bytes;
pub mod checksum;
pub mod defect;
pub mod ids;
pub mod key;
pub mod layout;
pub mod mapping;
pub mod peer;
pub mod slice;
pub mod socket;
pub mod space;
pub mod spin;
pub mod units;
pub mod wait;
