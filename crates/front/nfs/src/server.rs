//! The server: accepts clients and runs a thread for each.
//!
//! Threads are joined, never detached: ended threads are joined when the next client comes, the
//! rest when the server stops. Only a thread that is stuck in a file system beyond all limits is left
//! behind, and counted.

use crate::connection::{Connection, EndReason, prepare};
use crate::counters::{Counters, count};
use crate::export::ErrorHook;
use crate::export_table::Exports;
use crate::limits::{ABANDON_LIMIT, ACCEPT_PAUSE, Limits, PIN_SWEEP_PAUSE};
use crate::service::Service;
use crate::service::nfs4::Nfs4Options;
use crate::stop_signal::StopSignal;
use pagemesh_base::poison;
use rustix::fd::AsFd;
use std::collections::HashMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No address was given.
    #[error("there is no address to listen at; give at least one")]
    NoAddress,
    /// The address cannot be used.
    #[error("cannot listen at {address}: {cause}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        cause: io::Error,
    },
    /// The system has no threads or descriptors.
    #[error("cannot start the NFS server: {0}")]
    System(#[from] io::Error),
}

/// The result of stopping a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StopReport {
    /// Threads with calls or replies that had not ended at the drain limit.
    pub cut_off: usize,
    /// Threads that are stuck in a file system and were left behind.
    pub abandoned: usize,
}

/// A server of MOUNT and NFSv3. The drop stops it, too.
pub struct Server {
    state: Arc<ServerState>,
    local_addrs: Vec<SocketAddr>,
}

struct ServerState {
    service: Service,
    limits: Limits,
    signal: StopSignal,
    threads: Mutex<ThreadTable>,
    thread_ended: Condvar,
}

#[derive(Default)]
struct ThreadTable {
    next_id: u64,
    running: HashMap<u64, RunningThread>,
    connections: usize,
    finished: Vec<JoinHandle<()>>,
}

struct RunningThread {
    thread: JoinHandle<()>,
    /// The socket of a connection.
    socket: Option<Arc<TcpStream>>,
}

impl Server {
    /// Listens at these addresses, and serves clients until [`Server::stop`]. Port 0 lets the system
    /// choose one.
    ///
    /// # Errors
    /// If an address is in use or cannot be listened at, or the system has no thread.
    pub fn start(
        listen: &[SocketAddr],
        exports: Exports,
        on_error: ErrorHook,
    ) -> Result<Self, ServerError> {
        Self::start_with(listen, exports, on_error, Limits::default())
    }

    /// As [`Server::start`], with other limits.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_with(
        listen: &[SocketAddr],
        exports: Exports,
        on_error: ErrorHook,
        limits: Limits,
    ) -> Result<Self, ServerError> {
        Self::start_nfs4(listen, exports, on_error, limits, &Nfs4Options::default())
    }

    /// As [`Server::start_with`], with options of NFSv4.1.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_nfs4(
        listen: &[SocketAddr],
        exports: Exports,
        on_error: ErrorHook,
        limits: Limits,
        nfs4: &Nfs4Options,
    ) -> Result<Self, ServerError> {
        if listen.is_empty() {
            return Err(ServerError::NoAddress);
        }
        let bound: Result<Vec<_>, _> = listen.iter().map(|address| bind(*address)).collect();
        let (listeners, local_addrs): (Vec<_>, Vec<_>) = bound?.into_iter().unzip();
        let state = Arc::new(ServerState {
            service: Service::new(exports, on_error, nfs4),
            limits,
            signal: StopSignal::new()?,
            threads: Mutex::default(),
            thread_ended: Condvar::new(),
        });
        // From here on, a failure drops the server, which ends its threads.
        let server = Self { state, local_addrs };
        let state = &server.state;
        state.spawn("nfs-pins".into(), None, |state| state.sweep_pins())?;
        state.spawn("nfs-accept".into(), None, move |state| {
            state.accept_all(&listeners);
        })?;
        Ok(server)
    }

    /// The addresses that it listens at, with the ports in use.
    #[must_use]
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.local_addrs
    }

    /// The counters so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let connections = poison::lock(&self.state.threads).connections;
        self.state.service.counters.read(connections)
    }

    /// Stops accepting, lets connections finish the calls in progress, ends them, joins their
    /// threads, and drops the pins of files. It takes little longer than the drain limit, unless
    /// the drop of a pin waits for its volume. Call it before the last sync of the file systems.
    pub fn stop(&self) -> StopReport {
        let state = &self.state;
        state.signal.raise();
        let cut_off = state.wait_for_threads(state.limits.drain);
        if cut_off > 0 {
            state.shut_sockets_down();
        }
        let abandoned = match cut_off {
            0 => 0,
            _ => state.wait_for_threads(ABANDON_LIMIT),
        };
        state.join_finished();
        if abandoned == 0 {
            state.service.nfs4.close();
            for fs in state.service.exports.file_systems() {
                fs.pins.close();
            }
        }
        StopReport { cut_off, abandoned }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ServerError> {
    let failed = |cause| ServerError::Listen { address, cause };
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

impl ServerState {
    /// Starts a thread of the server.
    fn spawn(
        self: &Arc<Self>,
        name: String,
        socket: Option<Arc<TcpStream>>,
        run: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) -> io::Result<()> {
        // The table is locked until the entry is in it, so that the thread finds its entry when it
        // ends.
        let mut table = poison::lock(&self.threads);
        let id = table.next_id;
        let state = Arc::clone(self);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let _guard = ThreadGuard { state: &state, id };
            run(&state);
        })?;
        table.next_id += 1;
        table.connections += usize::from(socket.is_some());
        table.running.insert(id, RunningThread { thread, socket });
        Ok(())
    }

    fn accept_all(self: &Arc<Self>, listeners: &[TcpListener]) {
        while !self.signal.is_raised() {
            let sockets = listeners.iter().map(AsFd::as_fd);
            if let Err(errno) = self.signal.wait(sockets, None) {
                tracing::warn!(%errno, "cannot wait for NFS clients now");
                self.pause(ACCEPT_PAUSE);
            }
            self.join_finished();
            for listener in listeners {
                self.accept(listener);
            }
        }
    }

    /// Accepts one client, if one waits.
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        if self.signal.is_raised() {
            return;
        }
        match listener.accept() {
            Ok((socket, peer)) => {
                count(&self.service.counters.accepted);
                if let Err(error) = self.start_connection(socket, peer) {
                    count(&self.service.counters.refused);
                    tracing::warn!(%peer, %error, "NFS connection refused");
                }
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::Interrupted
                | io::ErrorKind::ConnectionAborted => {}
                _ => {
                    tracing::warn!(%error, "cannot accept an NFS connection now");
                    self.pause(ACCEPT_PAUSE);
                }
            },
        }
    }

    /// Waits for the signal, at most this long.
    fn pause(&self, pause: Duration) {
        if self.signal.wait([], Some(Instant::now() + pause)).is_err() {
            std::thread::sleep(pause);
        }
    }

    /// Starts a thread for a client.
    fn start_connection(self: &Arc<Self>, socket: TcpStream, peer: SocketAddr) -> io::Result<()> {
        // Only the thread that accepts adds connections.
        if poison::lock(&self.threads).connections >= self.limits.connections_max {
            return Err(io::Error::other("there are too many connections"));
        }
        let socket = prepare(socket)?;
        let own = Arc::clone(&socket);
        self.spawn(format!("nfs-{}", peer.port()), Some(socket), move |state| {
            tracing::info!(%peer, "NFS client connected");
            let connection =
                Connection::new((&own, peer), &state.signal, &state.service, state.limits);
            state.record_end(peer, &connection.serve());
        })
    }

    fn record_end(&self, peer: SocketAddr, reason: &EndReason) {
        if reason.is_violation() {
            self.service
                .counters
                .violations
                .fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%peer, %reason, "NFS connection ended");
        } else {
            tracing::info!(%peer, %reason, "NFS connection ended");
        }
    }

    /// Drops unused pins from time to time, also without calls.
    fn sweep_pins(&self) {
        while !self.signal.is_raised() {
            self.pause(PIN_SWEEP_PAUSE);
            for fs in self.service.exports.file_systems() {
                fs.pins.drop_idle(Instant::now());
            }
            self.service.nfs4.tick();
        }
    }

    /// Waits until all threads have ended. Returns the number of those that have not.
    fn wait_for_threads(&self, limit: Duration) -> usize {
        let until = Instant::now() + limit;
        let mut table = poison::lock(&self.threads);
        while !table.running.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            table = poison::recover(self.thread_ended.wait_timeout(table, left)).0;
        }
        table.running.len()
    }

    fn shut_sockets_down(&self) {
        let table = poison::lock(&self.threads);
        for socket in table.running.values().filter_map(|it| it.socket.as_ref()) {
            // It fails if the client has closed the connection.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Joins threads that are at their end. A panic was reported where it happened.
    fn join_finished(&self) {
        let finished = std::mem::take(&mut poison::lock(&self.threads).finished);
        for thread in finished {
            let _ = thread.join();
        }
    }
}

/// Removes a thread from the table when it ends, even by a panic.
struct ThreadGuard<'a> {
    state: &'a ServerState,
    id: u64,
}

impl Drop for ThreadGuard<'_> {
    fn drop(&mut self) {
        let mut table = poison::lock(&self.state.threads);
        if let Some(ended) = table.running.remove(&self.id) {
            table.connections -= usize::from(ended.socket.is_some());
            table.finished.push(ended.thread);
        }
        self.state.thread_ended.notify_all();
    }
}
