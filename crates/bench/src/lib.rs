//! Workloads, peers and reports: every published number comes from a command that runs this code.
//!
//! Invariants:
//! - All candidates of a comparison are measured in one alternating run: round by round, one after
//!   the other, so that load of the machine affects all equally. A report shows the median of the
//!   rounds; ratios are medians of the rounds' own ratios.
//! - A report names the durability class, the machine and the options of the command; a number
//!   without them is never printed.
//! - A failed request fails the run: no error is counted as an operation.
//! - A process started here does not outlive the value that holds it.
//!
//! This crate never sets up clusters or volumes: callers pass spaces and endpoints.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod amplification;
pub mod attached;
pub mod calls;
pub mod database;
pub mod disk;
pub mod distribution;
mod error;
pub mod everyday;
pub mod failover;
pub mod file_peers;
mod fio;
pub mod idle;
pub mod load;
pub mod many_files;
pub mod metadata;
pub mod mirror;
pub mod nfs;
pub mod peers;
pub mod plot;
mod process;
pub mod ramp;
pub mod recovery;
pub mod report;
mod round_trip;
pub mod session;
pub mod small_files;
pub mod snapshots;
pub mod source_trees;
pub mod sqlite;
pub mod stats;
pub mod sweep;
pub mod table;
pub mod xattrs;

pub use error::BenchError;
pub use process::process_cpu;
