//! The direct path: processes read and write files of a mount in their own threads, as direct
//! clients (RFD 015), also behind the end (RFD 016).
//!
//! [`server`] is the mount's side, [`client`] the side of a process. Both map
//! [`pagemesh_volume::direct_access::DirectSegment`] and the memory that [`shared`] describes.
//! [`protocol`] defines their messages. `client` and `server` do not use each other.
//!
//! Invariants: a direct client changes only bytes below the end of a file, and bytes of the append
//! space that the mount granted behind the end. Each operation that it cannot do at once, and
//! surely right, it leaves to the kernel. A mount takes from a client only the file that it means,
//! and the end of that file within the granted space. It trusts clients to keep to the protocol, as
//! all processes that have a pool mapped.

#![forbid(unsafe_code)]

pub mod client;
pub mod protocol;
pub mod server;
pub mod shared;

pub use client::{internal_fds, report};
pub use protocol::{status, wire};
pub use shared::{op_counters, rows, shared_file_map};
