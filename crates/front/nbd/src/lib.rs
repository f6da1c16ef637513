//! The NBD server: exports spaces to clients of the network block device
//! protocol, over unix sockets and TCP.
//!
//! It speaks the fixed newstyle handshake and structured replies, and offers
//! flush, FUA, trim, zeroes, block status (`base:has_allocation_context`) and several
//! connections to one export. A flush on one connection covers the completed
//! writes of all: that is the space's promise, which this server only passes
//! on. It has no TLS: a TCP listener belongs on a trusted network.
//!
//! ```text
//! Server ── accept ── thread ── Handshake ── Negotiation
//!                                   └─ Connection ── Receiver, plan, InFlight, Outbox, Spin
//!                                          └─ Channel of the Space
//! ```
//!
//! `check_negotiation`, `plan`, `in_flight`, `spin` and the parsing half of
//! `receiver` are pure; `handshake` and `connection` are the I/O around them.
//!
//! A client never makes a thread panic, block without limit, or hold more
//! than the `limits` allow. Nothing here stores, caches or reorders data, and
//! no request is tried again: that is the space's business.

#![deny(unsafe_code)]
#![warn(missing_docs)]

mod connection;
mod exports;
#[cfg(test)]
mod fuzz;
mod handshake;
mod in_flight;
mod limits;
mod listener;
mod negotiation;
mod outbox;
mod plan;
mod receiver;
mod server;
mod spin;
mod stop_signal;
mod wait;
mod wire;

pub use exports::{ExportError, ExportOptions, Exports};
pub use limits::{DESCRIPTION_BYTES_MAX, EXPORTS_MAX, Limits, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX};
pub use listener::{Listen, ServerError};
pub use server::{Counters, Server, StopReport};
