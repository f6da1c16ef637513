//! Shared definitions: ids, units, checksums, layouts, the traits between crates, and helpers for
//! sockets and processes.
//!
//! Invariants: the only randomness comes from a seed, and only waits read a clock. The only I/O is
//! reading a key file, binding and connecting unix sockets, keeping processors awake, reading the
//! mappings of processes and the list of mounts, passing a socket to a mount, waking threads by
//! event descriptors, and running a stopped process briefly. `unsafe` is in `wait`, `peer`,
//! `mount_connection` and `resume`. Numbers with different meanings have different types, so that a
//! page is never used as a frame, nor a seq as an epoch.

#![deny(unsafe_code)]

pub mod authority;
pub mod brick_name;
pub mod bytes;
pub mod checksum;
pub mod cpu_latency;
pub mod defect;
pub mod durability;
pub mod event_fd;
pub mod fd_limit;
pub mod ids;
pub mod key;
pub mod layout;
pub mod media_bytes;
pub mod mount_connection;
pub mod mounts;
pub mod move_fd_high;
pub mod peer;
pub mod poison;
pub mod proc_maps;
pub mod resume;
pub mod rng;
pub mod scrub;
pub mod slice;
pub mod socket;
pub mod space;
pub mod spin_lock;
pub mod spin_permit;
pub mod tier_hint;
pub mod units;
pub mod wait;
