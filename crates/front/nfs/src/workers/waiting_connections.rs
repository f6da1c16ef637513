//! Connections with a call that has no room, in the order of their calls.
//!
//! Invariant: a connection is there once. It looks for room at each sweep, and waits again if there is none.

use crate::connection::{Connection, ConnectionId};
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// See the module.
#[derive(Default)]
pub(crate) struct WaitingConnections {
    order: VecDeque<Arc<Connection>>,
    ids: HashSet<ConnectionId>,
}

impl WaitingConnections {
    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Adds a connection behind the others, unless it waits already.
    pub(crate) fn add(&mut self, connection: Arc<Connection>) {
        if self.ids.insert(connection.id) {
            self.order.push_back(connection);
        }
    }

    /// Removes the first connection.
    pub(crate) fn pop(&mut self) -> Option<Arc<Connection>> {
        let connection = self.order.pop_front()?;
        self.ids.remove(&connection.id);
        Some(connection)
    }

    /// Removes all connections.
    pub(crate) fn take(&mut self) -> Vec<Arc<Connection>> {
        self.ids.clear();
        std::mem::take(&mut self.order).into()
    }
}
