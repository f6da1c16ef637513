//! The NBD server: exports spaces to clients of the network block device
//! protocol, over unix sockets and TCP.
//!
//! It speaks the fixed newstyle handshake and structured replies, and offers flush, FUA, trim,
//! zeroes, block status (`base:allocation`) and several connections to one export. A flush on one
//! connection covers the completed writes of all: the space guarantees that, and this server only
//! passes flushes on. It has no TLS: a TCP listener belongs on a trusted network.
//!
//! ```text
//! Server ── accept ── thread ── Handshake ── Negotiation
//!                                   └─ Connection ── Receiver, plan, InFlight, ReplyQueue,
//!                                          │         SpinPolicy
//!                                          └─ Channel of the Space
//! ```
//!
//! `negotiation`, `requests`, `spin` and the parsing half of `receiver` are pure;
//! `handshake` and `connection` are the I/O around them.
//!
//! A client never makes a thread panic, block without limit, or hold more than the `limits` allow.
//! This crate does not store, cache or reorder data, and retries no request: the space does.

#![deny(unsafe_code)]
#![warn(missing_docs)]

#[allow(missing_docs, reason = "only test_api exports parts of it")]
mod connection;
mod exports;
#[allow(missing_docs, reason = "only test_api exports parts of it")]
mod handshake;
mod limits;
mod listener;
#[allow(missing_docs, reason = "only test_api exports parts of it")]
mod negotiation;
mod outbox;
#[allow(missing_docs, reason = "only test_api exports parts of it")]
mod receiver;
#[allow(missing_docs, reason = "only test_api exports parts of it")]
mod requests;
mod server;
mod spin;
#[allow(missing_docs, reason = "only test_api exports parts of it")]
mod stop_signal;
#[cfg(feature = "test-api")]
#[doc(hidden)]
pub mod test_api;
mod wait;
#[allow(missing_docs, reason = "only test_api exports parts of it")]
mod wire;

pub use exports::{ExportError, ExportOptions, Exports};
pub use limits::{DESCRIPTION_BYTES_MAX, EXPORTS_MAX, Limits, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX};
pub use listener::{Listen, ServerError};
pub use server::{Counters, Server, StopReport};
