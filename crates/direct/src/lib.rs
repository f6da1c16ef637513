//! The direct path: processes that read and write files of a mount by their own
//! threads, as guests (RFD 015), also behind the end (RFD 016).
//!
//! [`server`] is the mount's side, [`guest`] that of a process. Both map
//! [`pagemesh_volume::connections::DirectSegment`] and, for each file, a [`board`]; what else they
//! say to each other is in [`wire`].
//!
//! Invariants: a guest changes nothing but bytes that a file has, and what was lent behind
//! them; whatever it cannot do at once, and surely right, it leaves to the kernel. A mount
//! believes nothing of what a guest says but which file it means, and where that ends, within
//! what was lent; that guests keep to the protocol is trusted, as
//! with all who have a pool mapped.

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
