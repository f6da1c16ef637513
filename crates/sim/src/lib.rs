//! Deterministic simulation of a whole cluster: the real state machines of
//! bricks, volume and manager over a fake clock, network and media. One seed
//! is one history. RFD 003 tells what is real and what is not.
//!
//! ```text
//!  life (workload, faults, checks)
//!   ├─ client ── volume::Driven ── TcpLeg ─┐
//!   ├─ desk ──── manage::Manager ─ Remote ─┤ messages
//!   └─ cluster ─ network ◄─────────────────┘
//!        └─ house ── serve::Exchange ── brick::Brick ── store::Pool ── Medium
//! ```
//!
//! Invariants: nothing here reads the system's clock or its randomness; the
//! real code is driven only through what production uses, too.

#![forbid(unsafe_code)]

mod brick_host;
mod checker;
mod client;
mod cluster;
mod coverage;
mod direct_clients;
mod disk;
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
mod workload;

pub use scenario::{HistoryReport, run, run_direct_clients, run_files};
