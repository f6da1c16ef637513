//! A call on its way to a thread that runs it.

use super::write_order::WriteRange;
use crate::connection::{Connection, ConnectionId};
use crate::rpc::Reply;
use crate::service::CallRoute;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Instant;

/// See the module. Its drop removes the call from its connection, without a reply.
pub(crate) struct QueuedCall {
    pub(crate) connection: Arc<Connection>,
    pub(crate) record: Bytes,
    pub(crate) route: CallRoute,
    /// The time when the call was whole.
    pub(crate) received: Instant,
    /// A repetition that has waited for the end of the first call.
    pub(crate) is_released: bool,
    /// A WRITE that others may follow, see [`write_order`](super::write_order).
    pub(crate) is_in_order: bool,
    /// The bytes that its connection has admitted.
    admitted: Option<usize>,
}

impl QueuedCall {
    /// A call that its connection has admitted, with [`call_bytes`].
    pub(crate) fn new(connection: Arc<Connection>, record: Bytes, route: CallRoute) -> Self {
        let admitted = Some(call_bytes(&record, &route));
        Self {
            connection,
            record,
            route,
            received: Instant::now(),
            is_released: false,
            is_in_order: false,
            admitted,
        }
    }

    /// The bytes of the call and of the longest reply to it.
    pub(crate) fn bytes(&self) -> usize {
        call_bytes(&self.record, &self.route)
    }

    /// Queues the reply. Returns the connection if the caller must see to it that it is sent.
    pub(crate) fn queue_reply(mut self, reply: Reply) -> Option<Arc<Connection>> {
        let bytes = self.admitted.take()?;
        let connection = Arc::clone(&self.connection);
        connection.queue_reply(reply, bytes).then_some(connection)
    }

    /// Sends the reply.
    pub(crate) fn reply(self, reply: Reply) {
        if let Some(connection) = self.queue_reply(reply) {
            connection.send_queued();
        }
    }
}

impl Drop for QueuedCall {
    fn drop(&mut self) {
        if let Some(bytes) = self.admitted.take() {
            self.connection.drop_call(bytes);
        }
    }
}

/// A call that has run, as its queue knows it.
pub(crate) struct EndedWork {
    pub(crate) connection: ConnectionId,
    pub(crate) bytes: usize,
    /// The begin of its run.
    pub(crate) begun: Instant,
    /// The bytes of a WRITE that others may follow.
    pub(crate) write: Option<WriteRange>,
}

impl EndedWork {
    pub(crate) fn of(call: &QueuedCall) -> Self {
        Self {
            connection: call.connection.id,
            bytes: call.bytes(),
            begun: Instant::now(),
            write: call.route.write.filter(|_| call.is_in_order),
        }
    }
}

/// The bytes that a call and the reply to it may take.
pub(crate) fn call_bytes(record: &Bytes, route: &CallRoute) -> usize {
    record.len() + route.reply_bytes
}
