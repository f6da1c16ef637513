//! Replies to short calls that wait for the replies to the next queued calls: one system call sends all of a
//! connection. They wait for the calls of other threads, too, so a slow call may be among these: the supervisor
//! sends them then.

use crate::connection::Connection;
use crate::limits::UNSENT_REPLIES_MAX;
use std::sync::Arc;

/// The time to send the reply to a call that has ended.
pub(crate) enum SendTime {
    /// Now, with these.
    Now(UnsentReplies),
    /// With the replies to calls that run soon.
    Later,
}

/// See the module.
#[derive(Default)]
pub(crate) struct UnsentReplies {
    /// Connections with queued replies.
    connections: Vec<Arc<Connection>>,
    replies: usize,
}

impl UnsentReplies {
    pub(crate) fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// The time to send one more reply.
    pub(crate) fn send_time(&mut self, may_wait: bool) -> SendTime {
        if may_wait && self.replies + 1 < UNSENT_REPLIES_MAX {
            self.replies += 1;
            return SendTime::Later;
        }
        SendTime::Now(std::mem::take(self))
    }

    /// Adds a connection with a queued reply.
    pub(crate) fn add(&mut self, connection: Option<Arc<Connection>>) {
        if let Some(connection) = connection
            && !self.connections.iter().any(|it| it.id == connection.id)
        {
            self.connections.push(connection);
        }
    }

    pub(crate) fn send(&self) {
        for connection in &self.connections {
            connection.send_queued();
        }
    }
}
