//! The memory that a mount shares with its direct clients, and the rules for it: the map of each
//! file, and the counters of each process. The segment with the rows belongs to the volume
//! ([`pagemesh_volume::direct_access`]).
//!
//! Invariants: nothing here starts a thread, opens a socket or waits for a process. A simulation of
//! direct clients uses this code as it is.

pub mod op_counters;
mod op_meter;
pub mod rows;
pub mod shared_file_map;
