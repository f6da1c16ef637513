//! The tests of the NBD server are one program, because each program links the crate and its dependencies again.

#![allow(clippy::unwrap_used)]

mod clients;
mod handshake;
mod hostile;
mod server;
mod support;
mod transmission;
