//! The server: accepts clients and runs a thread for each.
//!
//! Threads are joined, never detached: ended threads are joined when the next client comes, the
//! rest when the server stops. Only a thread that is stuck in the space beyond all limits is left
//! behind, and counted.

use crate::connection::EndReason;
use crate::exports::{Exports, lock};
use crate::handshake::Handshake;
use crate::limits::{ACCEPT_PAUSE, Limits};
use crate::listener::{Listen, Listener, ServerError};
use crate::stop_signal::{StopLevel, StopSignal};
use crate::wait::{Interest, wait};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time that connections get beyond the drain limit to notice the abandon signal.
const ABANDON_LIMIT: Duration = Duration::from_secs(2);

/// The counters of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections that exist now, handshakes included.
    pub connections: usize,
    /// Connections accepted since the start.
    pub accepted: u64,
    /// Connections closed at once because there were too many.
    pub refused: u64,
    /// Connections that chose an export.
    pub opened: u64,
    /// Connections ended because the client broke the protocol or stalled.
    pub violations: u64,
}

/// The result of stopping a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopReport {
    /// Connections with requests that had not ended at the drain limit.
    pub cut_off: usize,
    /// Threads that are stuck in their space and were left behind.
    pub abandoned: usize,
}

/// A server on one listening socket; clones are the same server.
#[derive(Clone)]
pub struct Server {
    inner: Arc<ServerState>,
}

struct ServerState {
    exports: Exports,
    limits: Limits,
    place: Listen,
    signal: StopSignal,
    listener: Mutex<Option<Arc<Listener>>>,
    table: Mutex<ConnectionTable>,
    connection_ended: Condvar,
    accepted: AtomicU64,
    refused: AtomicU64,
    opened: AtomicU64,
    violations: AtomicU64,
}

#[derive(Default)]
struct ConnectionTable {
    connections: HashMap<u64, ConnectionEntry>,
    finished_threads: Vec<JoinHandle<()>>,
    /// Calls of `serve` in progress.
    serve_calls: usize,
}

struct ConnectionEntry {
    signal: Arc<StopSignal>,
    thread: JoinHandle<()>,
}

impl Server {
    /// Listens; clients wait until [`Server::serve`] is called.
    ///
    /// # Errors
    /// If the address is in use or cannot be listened at.
    pub fn bind(listen: Listen, exports: Exports) -> Result<Self, ServerError> {
        Self::bind_with(listen, exports, Limits::default())
    }

    /// As [`Server::bind`], with other limits.
    ///
    /// # Errors
    /// As [`Server::bind`].
    pub fn bind_with(
        listen: Listen,
        exports: Exports,
        limits: Limits,
    ) -> Result<Self, ServerError> {
        let listener = Listener::bind(&listen)?;
        let place = listener.place().clone();
        let signal = StopSignal::new().map_err(|cause| ServerError::System {
            doing: "make a wake-up for",
            place: place.clone(),
            cause,
        })?;
        let inner = ServerState {
            exports,
            limits,
            place,
            signal,
            listener: Mutex::new(Some(Arc::new(listener))),
            table: Mutex::default(),
            connection_ended: Condvar::new(),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            violations: AtomicU64::new(0),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The address that it listens at; for TCP with the port in use.
    #[must_use]
    pub fn listen_address(&self) -> &Listen {
        &self.inner.place
    }

    /// Accepts clients until another thread calls [`Server::stop`].
    ///
    /// # Errors
    /// If the listening socket fails.
    pub fn serve(&self) -> Result<(), ServerError> {
        let inner = &self.inner;
        lock(&inner.table).serve_calls += 1;
        let result = inner.accept_all();
        lock(&inner.table).serve_calls -= 1;
        inner.connection_ended.notify_all();
        result.map_err(|errno| ServerError::System {
            doing: "accept connections on",
            place: inner.place.clone(),
            cause: errno.into(),
        })
    }

    /// Stops accepting, lets connections finish the requests in flight, ends them, joins their
    /// threads and removes the socket file. It takes little longer than the drain limit in any
    /// case.
    pub fn stop(&self) -> StopReport {
        let inner = &self.inner;
        inner.signal.raise(StopLevel::Drain);
        lock(&inner.listener).take();
        let cut_off = inner.end_all(StopLevel::Drain, inner.limits.drain);
        let abandoned = inner.end_all(StopLevel::Abandon, ABANDON_LIMIT);
        let finished = std::mem::take(&mut lock(&inner.table).finished_threads);
        join_threads(finished);
        StopReport { cut_off, abandoned }
    }

    /// The counters so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let inner = &self.inner;
        Counters {
            connections: lock(&inner.table).connections.len(),
            accepted: inner.accepted.load(Ordering::Relaxed),
            refused: inner.refused.load(Ordering::Relaxed),
            opened: inner.opened.load(Ordering::Relaxed),
            violations: inner.violations.load(Ordering::Relaxed),
        }
    }
}

impl ServerState {
    fn accept_all(self: &Arc<Self>) -> Result<(), Errno> {
        let Some(listener) = lock(&self.listener).clone() else {
            return Ok(());
        };
        while self.signal.level() == StopLevel::Running {
            self.accept(&listener)?;
        }
        Ok(())
    }

    /// Waits for a client or the signal, and accepts one client.
    fn accept(self: &Arc<Self>, listener: &Listener) -> Result<(), Errno> {
        let interest = Interest {
            readable: true,
            writable: false,
        };
        wait(&self.signal, listener.as_fd(), interest, &[], None)?;
        let finished = std::mem::take(&mut lock(&self.table).finished_threads);
        join_threads(finished);
        match listener.accept() {
            Ok(_) if self.signal.level() != StopLevel::Running => Ok(()),
            Ok(socket) => {
                self.accepted.fetch_add(1, Ordering::Relaxed);
                self.start_connection(socket);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(()),
            Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                tracing::warn!(place = %self.place, %errno, "cannot accept a connection now");
                std::thread::sleep(ACCEPT_PAUSE);
                Ok(())
            }
            Err(errno) => Err(errno),
        }
    }

    /// Starts a thread for a client, or closes its socket.
    fn start_connection(self: &Arc<Self>, socket: OwnedFd) {
        let id = self.accepted.load(Ordering::Relaxed);
        let mut table = lock(&self.table);
        if table.connections.len() >= self.limits.connections_max {
            drop(table);
            self.refused.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                place = %self.place,
                limit = self.limits.connections_max,
                "connection refused: too many already"
            );
            return;
        }
        // The table is locked until the entry is in it, so that the thread finds its entry when it
        // ends.
        match self.spawn_connection(id, socket) {
            Ok(entry) => {
                table.connections.insert(id, entry);
            }
            Err(error) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(place = %self.place, %error, "no thread for a connection");
            }
        }
    }

    fn spawn_connection(
        self: &Arc<Self>,
        id: u64,
        socket: OwnedFd,
    ) -> std::io::Result<ConnectionEntry> {
        let signal = Arc::new(StopSignal::new()?);
        let inner = Arc::clone(self);
        let own = Arc::clone(&signal);
        let thread = std::thread::Builder::new()
            .name(format!("nbd-{id}"))
            .spawn(move || {
                let _leave = ConnectionGuard { inner: &inner, id };
                let ended = inner.run_connection(id, socket, own);
                inner.record_end(id, &ended);
            })?;
        Ok(ConnectionEntry { signal, thread })
    }

    fn run_connection(&self, id: u64, socket: OwnedFd, signal: Arc<StopSignal>) -> EndReason {
        let exports = self.exports.clone();
        let handshake = Handshake::new(id, socket, signal, exports, self.limits);
        let served = match handshake.run() {
            Ok(served) => served,
            Err(ended) => return ended,
        };
        self.opened.fetch_add(1, Ordering::Relaxed);
        tracing::info!(
            connection = id,
            export = served.export.name,
            "client connected"
        );
        let ended = served.connection.serve();
        drop(served.membership);
        ended
    }

    fn record_end(&self, id: u64, ended: &EndReason) {
        match ended {
            EndReason::Disconnected | EndReason::Closed | EndReason::Stopped => {
                tracing::info!(connection = id, %ended, "connection ended");
                return;
            }
            EndReason::Violated(_) | EndReason::HandshakeTimeout | EndReason::ClientStalled => {
                self.violations.fetch_add(1, Ordering::Relaxed);
            }
            EndReason::ChannelFailed(_)
            | EndReason::DrainTimeout
            | EndReason::BrokenChannel
            | EndReason::Socket(_) => {}
        }
        tracing::warn!(connection = id, %ended, "connection ended");
    }

    /// Signals all connections to end, and waits for that and for the close of the listening
    /// socket. Returns the number of connections that have not ended.
    fn end_all(&self, level: StopLevel, limit: Duration) -> usize {
        let until = Instant::now() + limit;
        let mut table = lock(&self.table);
        for entry in table.connections.values() {
            entry.signal.raise(level);
        }
        while !table.connections.is_empty() || table.serve_calls > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            table = match self.connection_ended.wait_timeout(table, left) {
                Ok((table, _)) => table,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        table.connections.len()
    }
}

/// Removes a thread from the table when it ends, even by a panic.
struct ConnectionGuard<'a> {
    inner: &'a ServerState,
    id: u64,
}

impl Drop for ConnectionGuard<'_> {
    fn drop(&mut self) {
        let mut table = lock(&self.inner.table);
        if let Some(entry) = table.connections.remove(&self.id) {
            table.finished_threads.push(entry.thread);
        }
        self.inner.connection_ended.notify_all();
    }
}

/// Joins threads that are at their end. A panic was reported where it happened.
fn join_threads(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        let _ = thread.join();
    }
}
