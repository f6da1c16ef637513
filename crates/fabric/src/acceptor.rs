//! The thread that accepts a server's connections, and a thread for each of them.
//!
//! Invariants: a connection has a slot before it has a thread. A stop closes the listener, ends all
//! connections and waits, for a limited time, until their threads have dropped them.

use crate::connection_limiter::{ConnectionLimiter, ConnectionSlot};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

/// The accepting thread of a server.
pub(crate) struct Acceptor {
    limiter: Arc<ConnectionLimiter>,
    thread: Option<JoinHandle<()>>,
}

/// The connections that a server accepts and serves.
pub(crate) trait AcceptedConnections: Send + Sync + 'static {
    /// A non-blocking listener.
    type Listener: AsFd + Send + 'static;
    /// A connection.
    type Connection: Send + 'static;

    /// Accepts a connection, and names its thread.
    fn accept(&self, listener: &Self::Listener) -> io::Result<(Self::Connection, String)>;

    /// Authenticates a connection and serves it until it ends.
    fn serve(&self, connection: Self::Connection, slot: ConnectionSlot);
}

impl Acceptor {
    /// Starts to accept.
    pub(crate) fn start<C: AcceptedConnections>(
        name: &str,
        listener: C::Listener,
        limiter: &Arc<ConnectionLimiter>,
        connections: Arc<C>,
    ) -> io::Result<Acceptor> {
        let shared = Arc::clone(limiter);
        let thread = thread::Builder::new().name(name.into());
        let thread = thread.spawn(move || {
            let accept = || connections.accept(&listener);
            shared.accept_all(&listener, accept, |(connection, name)| {
                admit(&shared, &connections, connection, name);
            });
        })?;
        Ok(Acceptor {
            limiter: Arc::clone(limiter),
            thread: Some(thread),
        })
    }

    /// Ends the thread and all connections. Returns how many connections did not end in time.
    pub(crate) fn stop(&mut self) -> usize {
        let Some(thread) = self.thread.take() else {
            return 0;
        };
        self.limiter.stop().signal();
        if thread.join().is_err() {
            tracing::error!("the accepting thread panicked");
        }
        self.limiter.wait_until_empty()
    }
}

fn admit<C: AcceptedConnections>(
    limiter: &Arc<ConnectionLimiter>,
    connections: &Arc<C>,
    connection: C::Connection,
    name: String,
) {
    let Some(slot) = limiter.acquire_slot() else {
        tracing::warn!(connection = %name, "too many unauthenticated connections; closing the new one");
        return;
    };
    let connections = Arc::clone(connections);
    let thread = thread::Builder::new().name(name.clone());
    if let Err(cause) = thread.spawn(move || connections.serve(connection, slot)) {
        tracing::warn!(connection = %name, %cause, "no thread for a connection");
    }
}
