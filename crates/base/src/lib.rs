//! Words everything shares: ids, units and checksums; and listening sockets.
//!
//! Invariants: no I/O but reading a key file, binding a unix socket, keeping processors awake,
//! asking what processes map and what is mounted, and handing a socket to a mount, and running a stopped process for a moment; no clock but that
//! of a wait, no randomness; `unsafe` in `wait`, `peer_credentials`, `mount_connection` and `resume`. Numbers that mean different things have different types, so
//! that a page is never used as a frame, nor a seq as an epoch.

#![deny(unsafe_code)]

pub mod bytes;
pub mod checksum;
pub mod cpu_latency;
pub mod defect;
pub mod ids;
pub mod key;
pub mod layout;
pub mod mount_connection;
pub mod mounts;
pub mod move_fd_high;
pub mod peer;
pub mod proc_maps;
pub mod resume;
pub mod slice;
pub mod socket;
pub mod space;
pub mod spin_lock;
pub mod units;
pub mod wait;
