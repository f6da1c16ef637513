//! Deterministic simulation of a whole cluster: the real state machines of bricks, volume and
//! manager over a fake clock, network and media. One seed is one history. RFD 003 lists the real
//! and the simulated parts.
//!
//! ```text
//!  scenario (workload, faults, checks)
//!   ├─ client ─────── volume::DrivenVolume ── TcpLeg ─┐
//!   ├─ manager_host ─ manage::Manager ─────── Remote ─┤ messages
//!   └─ cluster ────── network ◄───────────────────────┘
//!        └─ brick_host ── Exchange ── brick::Brick ── store::Pool ── Medium
//! ```
//!
//! Invariants: the simulation reads neither the system's clock nor its randomness. It drives
//! production code only through interfaces that production uses, too.

#![forbid(unsafe_code)]

mod any_medium;
mod brick_host;
mod checker;
mod client;
mod cluster;
mod cluster_disks;
mod coverage;
mod direct_clients;
mod disk;
mod disk_medium;
mod event_log;
mod faults;
mod files;
mod final_check;
mod manager_host;
mod medium;
mod mount;
mod network;
mod promotion;
mod read_oracle;
mod rng;
mod scenario;
mod sim_wire;
mod snapshots;
mod workload;

pub use scenario::{HistoryReport, run, run_direct_clients, run_disks, run_files, run_snapshots};
