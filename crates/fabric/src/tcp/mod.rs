//! The `tcp` transport: the brick runs the session for the client.
//!
//! A connection starts with the handshake of [`crate::auth`]; then both ends exchange the messages
//! of [`crate::message`]. A leg is one connection, attached to one slice. A manager's calls have a
//! connection of their own.

mod connect;
mod leg;
mod pending;
mod server;

pub use connect::resolve;
pub use leg::TcpLeg;
pub use server::{BindError, ServerOptions, StopTimeout, TcpServer};
