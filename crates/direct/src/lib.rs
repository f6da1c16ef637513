//! The direct path: processes read and write files of a mount in their own threads, as direct
//! clients (RFD 015), also behind the end (RFD 016).
//!
//! [`server`] is the mount's side, [`client`] that of a process. Both map
//! [`pagemesh_volume::direct_access::DirectSegment`] and, for each file, a [`shared_file_map`];
//! [`wire`] defines their messages.
//!
//! Invariants: a direct client changes only bytes below the end of a file, and bytes of the append
//! space that the mount granted behind the end. Each operation that it cannot do at once, and
//! surely right, it leaves to the kernel. A mount takes from a client only the file that it means,
//! and the end of that file within the granted space. It trusts clients to keep to the protocol, as
//! all processes that have a pool mapped.

#![forbid(unsafe_code)]

pub mod client;
#[cfg(test)]
mod fuzz;
pub mod internal_fds;
pub mod op_counters;
pub mod report;
pub mod rows;
pub mod server;
pub mod shared_file_map;
pub mod status;
pub mod wire;
