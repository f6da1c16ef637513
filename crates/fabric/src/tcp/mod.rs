//! The `tcp` transport: the brick runs the session for the client.
//!
//! A connection starts with the handshake of [`crate::auth`]; then both ends exchange the messages
//! of [`crate::message`]. A leg is one connection, attached to one slice. A manager's calls have a
//! connection of their own.
//!
//! # One request over `tcp`
//!
//! 1. [`TcpLeg`] checks the request's limits and takes a place in the [`pending::PendingTable`]. It
//!    encodes a header of 64 bytes with a CRC of header and body, and pushes it to the
//!    [`SendQueue`](crate::send_queue::SendQueue). The payload is sent from where it is.
//! 2. The brick's thread of the connection ([`crate::serve`]) polls for as long as its
//!    [`SpinBudget`](crate::spin_budget::SpinBudget) allows, then sleeps.
//!    [`ReceiveBuffer`](crate::receive_buffer::ReceiveBuffer) checks the header before it makes
//!    room for the body. [`Request::decode`](crate::message::request::Request::decode) checks the
//!    body's CRC. [`share`](crate::receive_buffer::ReceiveBuffer::share) returns the body without a
//!    copy.
//! 3. [`Exchange::advance`](crate::serve::Exchange::advance) gives the request to the brick's
//!    [`Handler`](crate::service::Handler): its `Worker` runs the store's session for the client,
//!    as a mapped leg does for one pool. One fence commits a change.
//! 4. The replies of a batch leave with one send, after
//!    [`Handler::end_batch`](crate::service::Handler::end_batch).
//! 5. The client's thread waits on the descriptors of all its legs. After a wake-up the leg's
//!    `reap` takes the replies.
//!
//! The brick computes two checksums of the data: one to check the message, one while it copies the
//! page. It does not use the first as the page's checksum.

mod connect;
mod leg;
mod pending;
mod server;

pub use connect::{Endpoint, resolve};
pub use leg::TcpLeg;
pub use server::{BindError, LocalSocketError, ServerOptions, StopTimeout, TcpServer};
