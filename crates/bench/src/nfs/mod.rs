//! Load on NFS servers: an open loop of NFSv3 calls at a fixed schedule, with the operation mix of SPEC SFS97_R1.
//!
//! ```text
//! schedule ─ due time ─┐
//! workload ─ request ──┴─ generator ── calls ══ server
//!                            │  └─ record_scanner ══┘
//!                            └─ point (latencies from due times, void rule)
//! ```
//!
//! A latency counts from the time at which the call was due, so a server that stalls is measured with all calls that it delays.

mod call_table;
mod calls;
pub mod compare;
pub mod connections;
pub mod file_set;
pub mod ganesha;
pub mod generator;
pub mod mix;
pub mod overload;
pub mod point;
mod record_scanner;
pub mod schedule;
pub mod search;
pub mod sequential;
pub mod setup;
pub mod sizes;
pub mod workload;
