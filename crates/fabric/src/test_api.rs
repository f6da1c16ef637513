//! Parts that this crate's own tests reach and no other crate needs.

pub use crate::receive_buffer::{Body, ReceiveBuffer};
pub use crate::stream::Stream;

use crate::brick_client::BrickClient;
use crate::limits::Timeouts;
use crate::message::reply::AttachReply;
use crate::serve::{Connection, ConnectionError, HandlerFactory};
use crate::stop::StopSignal;
use crate::tcp::TcpLeg;
use pagemesh_base::layout::BrickId;
use pagemesh_base::slice::BrickControl;
use std::time::Duration;

/// The bytes before the messages of a map connection.
pub mod map_wire {
    pub use crate::map::wire::{
        GRANT_BYTES, GrantHeader, HELLO_BYTES, MapProtocolError, Refusal, check_hello, hello,
    };
}

/// Serves a connection until the client ends it.
///
/// # Errors
/// When the connection ends in another way.
pub fn serve_connection<'a>(
    stream: &'a Stream,
    control: &'a dyn BrickControl,
    stop: &'a StopSignal,
    open: &'a mut HandlerFactory<'a>,
) -> Result<(), ConnectionError> {
    Connection::new(stream, control, stop, open, 0).run()
}

/// A client over a connection that is authenticated.
#[must_use]
pub fn brick_client(stream: Stream, brick: BrickId, limit: Duration) -> BrickClient {
    BrickClient::new(stream, brick, limit)
}

/// A leg over the connection of a client.
#[must_use]
pub fn tcp_leg(remote: BrickClient, attached: AttachReply, timeouts: Timeouts) -> TcpLeg {
    TcpLeg::from_connection(remote, attached, timeouts)
}
