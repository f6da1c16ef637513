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

pub mod bar;
mod call_table;
mod calls;
pub mod compare;
pub mod connections;
pub mod file_set;
pub mod ganesha;
pub mod generator;
pub mod idle_opens;
mod memory;
pub mod mix;
pub mod overload;
mod pacing;
pub mod point;
pub mod priority;
pub mod rates;
mod record_scanner;
mod rows;
pub mod schedule;
pub mod search;
pub mod sequential;
pub mod setup;
pub mod sizes;
pub mod stalled;
pub mod worker_numbers;
pub mod workload;

/// Tells how far a run is. It takes minutes, and the report comes last.
pub(crate) fn progress(text: &str) {
    eprintln!("{text}");
}
