//! The server: accepts clients, and owns all threads.
//!
//! | threads | number | duty |
//! |---|---|---|
//! | `nfs-accept` | 1 | accepts clients |
//! | `nfs-poll` | by processors | see [`Poller`] |
//! | `nfs-care` | 1 | see [`Supervisor`] |
//! | `nfs-work` | by load, see [`workers`](crate::workers) | runs calls of one export |
//!
//! Threads are joined, never detached: ended workers are joined by the supervisor, the rest when the
//! server stops. Only a thread that is stuck in a file system beyond all limits is left behind, and
//! counted.

use crate::connections::{ClientFigures, Connections};
use crate::counters::{Counters, count};
use crate::dispatcher::Dispatcher;
use crate::export::ErrorHook;
use crate::export_table::{ExportedPath, Exports};
use crate::limits::{ABANDON_LIMIT, ACCEPT_PAUSE, Limits, POLLERS_MAX, POLLERS_MIN};
use crate::listener::BoundAddress;
use crate::nfs4::state::{ClientId, ExpiredState};
use crate::poller::{END_EVENT, Poller};
use crate::service::Service;
use crate::service::nfs4::{ExpiryProgress, Nfs4ClientStatus, Nfs4Options, Nfs4Status};
use crate::stop_signal::StopSignal;
use crate::supervisor::Supervisor;
use crate::workers::figures::Figures;
use crate::workers::{Work, processors};
use pagemesh_base::fd_limit::raise_fd_limit;
use pagemesh_base::poison;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::AsFd;
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
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
    /// Connections with calls or replies that had not ended at the drain limit.
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
    dispatcher: Dispatcher,
    limits: Limits,
    /// Ends the thread that accepts.
    signal: StopSignal,
    /// Ends polling threads.
    end: StopSignal,
    threads: Mutex<ThreadTable>,
    thread_ended: Condvar,
}

#[derive(Default)]
struct ThreadTable {
    next_id: u64,
    running: HashMap<u64, JoinHandle<()>>,
    finished: Vec<JoinHandle<()>>,
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
        let bound = listen.iter().map(|address| BoundAddress::bind(*address));
        let bound: Result<Vec<_>, _> = bound.collect();
        Self::start_bound(bound?, exports, on_error, limits, nfs4)
    }

    /// As [`Server::start_nfs4`], at addresses that are bound already.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_bound(
        bound: Vec<BoundAddress>,
        exports: Exports,
        on_error: ErrorHook,
        limits: Limits,
        nfs4: &Nfs4Options,
    ) -> Result<Self, ServerError> {
        if bound.is_empty() {
            return Err(ServerError::NoAddress);
        }
        let local_addrs = bound.iter().map(BoundAddress::address).collect();
        if let Err(cause) = raise_fd_limit() {
            tracing::warn!(%cause, "cannot raise the limit of descriptors; few NFS clients can connect");
        }
        let pollers = (processors::count() + 2).clamp(POLLERS_MIN, POLLERS_MAX);
        // It reads the lists of clients. Until then a check of the port finds no server.
        let service = Service::new(exports.clone(), on_error, nfs4);
        let listeners: Result<Vec<_>, _> = bound.into_iter().map(BoundAddress::open).collect();
        let listeners = listeners?;
        let counters = Arc::clone(&service.counters);
        let connections = Arc::new(Connections::new(limits, counters, exports)?);
        let state = Arc::new(ServerState {
            dispatcher: Dispatcher::new(service, connections, pollers),
            limits,
            signal: StopSignal::new()?,
            end: StopSignal::new()?,
            threads: Mutex::default(),
            thread_ended: Condvar::new(),
        });
        // From here on, a failure drops the server, which ends its threads.
        let server = Self { state, local_addrs };
        let state = &server.state;
        let epoll = &state.dispatcher.connections.epoll;
        let data = EventData::new_u64(END_EVENT);
        let added = epoll::add(epoll, state.end.as_fd(), data, EventFlags::IN);
        added.map_err(io::Error::from)?;
        for number in 0..pollers {
            state.spawn("nfs-poll".into(), move |state| state.poll(number))?;
        }
        state.spawn("nfs-care".into(), ServerState::supervise)?;
        state.spawn("nfs-accept".into(), move |state| {
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
        let dispatcher = &self.state.dispatcher;
        let connections = dispatcher.connections.count();
        dispatcher.service.counters.read(connections)
    }

    /// The figures of exports and connections.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.state.dispatcher.figures()
    }

    /// The grace period, the stable lists and the counts of NFSv4.1.
    #[must_use]
    pub fn nfs4_status(&self) -> Nfs4Status {
        self.state.dispatcher.service.nfs4.status()
    }

    /// The clients of NFSv4.1, by id.
    #[must_use]
    pub fn nfs4_clients(&self) -> Vec<Nfs4ClientStatus> {
        self.state.dispatcher.service.nfs4.clients()
    }

    /// Begins to expire a client of NFSv4.1: it loses its sessions at once, and its opens and locks after its requests in progress. None if
    /// there is no such client. It does not wait; [`Server::expiry_progress`] tells of the end.
    #[must_use]
    pub fn expire_client(&self, client: ClientId) -> Option<ExpiredState> {
        self.state.dispatcher.service.nfs4.expire(client)
    }

    /// The progress of an expiry, with the file systems of its [`ExpiredState`]. Records are durable a few seconds after the client has lost its state, if its file systems take writes.
    #[must_use]
    pub fn expiry_progress(&self, client: ClientId, file_systems: &[u32]) -> ExpiryProgress {
        let nfs4 = &self.state.dispatcher.service.nfs4;
        nfs4.expiry_progress(client, file_systems)
    }

    /// The clients with connections, the one with the most calls first.
    #[must_use]
    pub fn clients(&self) -> Vec<ClientFigures> {
        let connections = &self.state.dispatcher.connections;
        connections.clients(Instant::now())
    }

    /// The paths that clients mount now, in the order of the exports file.
    #[must_use]
    pub fn paths(&self) -> Vec<ExportedPath> {
        let exports = &self.state.dispatcher.service.exports;
        let table = exports.table();
        table.iter().map(|export| export.described()).collect()
    }

    /// Another host has the volume of the file system with this name. Its calls get NFS3ERR_JUKEBOX from now on; no replies if no other
    /// file system is served.
    pub fn fence(&self, name: &str) {
        self.state.dispatcher.service.exports.fence(name);
    }

    /// Stops accepting, lets connections finish the calls in progress, ends them, joins all
    /// threads, and drops the pins of files. It takes little longer than the drain limit, unless
    /// the drop of a pin waits for its volume. Call it before the last sync of the file systems.
    pub fn stop(&self) -> StopReport {
        let state = &self.state;
        let connections = &state.dispatcher.connections;
        state.signal.raise();
        connections.stop();
        let cut_off = connections.wait_for_end(state.limits.drain);
        connections.close_all();
        state.dispatcher.stop();
        state.dispatcher.nudge.stop();
        state.end.raise();
        let abandoned = state.wait_for_threads(ABANDON_LIMIT);
        state.join_finished();
        if abandoned == 0 {
            state.dispatcher.service.nfs4.close();
            for fs in state.dispatcher.service.exports.file_systems() {
                fs.drop_unused_pins();
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

impl ServerState {
    /// Starts a thread of the server.
    fn spawn(
        self: &Arc<Self>,
        name: String,
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
        table.running.insert(id, thread);
        Ok(())
    }

    fn accept_all(&self, listeners: &[TcpListener]) {
        while !self.signal.is_raised() {
            let sockets = listeners.iter().map(AsFd::as_fd);
            if let Err(errno) = self.signal.wait(sockets, None) {
                tracing::warn!(%errno, "cannot wait for NFS clients now");
                self.pause(ACCEPT_PAUSE);
            }
            for listener in listeners {
                while !self.signal.is_raised() && self.accept(listener) {}
            }
        }
    }

    /// Accepts one client, if one waits. Returns whether another one may wait.
    fn accept(&self, listener: &TcpListener) -> bool {
        let counters = &self.dispatcher.service.counters;
        match listener.accept() {
            Ok((socket, peer)) => {
                count(&counters.accepted);
                if let Err(error) = self.dispatcher.connections.add(socket, peer) {
                    count(&counters.refused);
                    tracing::warn!(%peer, %error, "NFS connection refused");
                }
                true
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => false,
                io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => true,
                _ => {
                    tracing::warn!(%error, "cannot accept an NFS connection now");
                    self.dispatcher.connections.make_room();
                    self.pause(ACCEPT_PAUSE);
                    false
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

    fn poll(&self, number: usize) {
        let mut poller = Poller::new(&self.dispatcher, number);
        while let Err(errno) = poller.run() {
            tracing::warn!(%errno, "cannot wait for NFS calls now");
            std::thread::sleep(ACCEPT_PAUSE);
        }
    }

    fn supervise(self: &Arc<Self>) {
        let supervisor = Supervisor {
            dispatcher: &self.dispatcher,
            start_worker: &|export, slot| {
                let started = self.spawn("nfs-work".into(), move |state| state.work(export, slot));
                if let Err(error) = &started {
                    tracing::warn!(%error, "cannot start an NFS worker");
                }
                started.is_ok()
            },
            tidy: &|| self.join_finished(),
        };
        supervisor.run();
    }

    /// Runs calls of an export, in a slot of its workers.
    fn work(&self, export: usize, slot: usize) {
        let dispatcher = &self.dispatcher;
        let Some(workers) = dispatcher.workers(export) else {
            return;
        };
        workers.begin_worker(slot);
        let thread = workers.thread_of_worker(slot);
        loop {
            match workers.next_work(slot) {
                (Work::Call(call), _) => dispatcher.run(call, thread, None),
                (Work::SendReplies(unsent), _) => {
                    unsent.send();
                    continue;
                }
                (Work::SweepPins, _) => {
                    if let Some(fs) = dispatcher.service.exports.file_systems().nth(export) {
                        fs.drop_unused_pins();
                        fs.pins.drop_idle(Instant::now());
                        dispatcher.service.nfs4.write_records(export);
                    }
                    workers.end_sweep();
                }
                (Work::End, is_counted) => {
                    workers.end_worker(slot, !is_counted);
                    return;
                }
            }
            workers.leave_call(slot);
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
            table.finished.push(ended);
        }
        self.state.thread_ended.notify_all();
    }
}
