//! Wire messages, and the transports that carry them.
//!
//! [`message`] defines requests and replies, [`auth`] the authentication of both ends. [`tcp`]
//! carries messages between machines. [`map`] passes a pool's descriptors to a client on the same
//! machine and carries the few messages that only the brick can answer. A brick implements
//! [`service`] to be served. [`brick_client`] is a connection for blocking calls, [`serve`] the
//! brick's side of a connection, [`wire`] the abstraction of the byte stream.
//!
//! Invariants: this crate does not depend on pools or volumes. Every length, queue and wait has a
//! limit named in [`limits`]. No thread of a client blocks; a brick's connection thread may block
//! in its handler.

#![forbid(unsafe_code)]

pub mod auth;
pub mod brick_client;
pub mod limits;
pub mod map;
pub mod message;
pub mod serve;
pub mod service;
pub mod stop;
pub mod tcp;
pub mod wire;

mod acceptor;
mod connection_limiter;
mod receive_buffer;
mod send_queue;
mod spin_budget;
mod stream;
#[cfg(feature = "test-api")]
#[doc(hidden)]
pub mod test_api;
