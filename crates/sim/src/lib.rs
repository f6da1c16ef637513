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

mod checker;
mod client;
mod cluster;
mod desk;
mod dice;
mod disk;
mod faults;
mod files;
mod guests;
mod history;
mod house;
mod life;
mod medium;
mod mount;
mod network;
mod promotion;
mod rest;
mod tally;
mod wire;
mod witness;
mod workload;

pub use life::{Outcome, run, run_files, run_guests};
