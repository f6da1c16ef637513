//! Wire messages, and the transports that carry them.
//!
//! [`message`] says what is asked and answered, [`auth`] who may ask. [`tcp`]
//! carries messages between machines; [`map`] hands a pool's descriptors to a
//! client on the same machine and carries the few messages that only the
//! brick can answer. [`service`] is what a brick implements to be served,
//! [`brick_client`] a connection for blocking calls. [`serve`] is a brick's side of a
//! connection, [`wire`] what carries its bytes.
//!
//! Invariants: nothing here knows of pools or volumes. Every length, queue and
//! wait has a limit named in [`limits`]. No thread of a client blocks; a brick's
//! thread of a connection may, in what its handler does.

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

mod connection_limiter;
#[cfg(test)]
mod fuzz;
mod receive_buffer;
mod send_queue;
mod spin_budget;
mod stream;
