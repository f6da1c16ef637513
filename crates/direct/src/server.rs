//! The mount's side of the direct path: it admits direct clients, publishes file maps to them,
//! disables direct access, and cleans up after clients that are gone.
//!
//! Invariants: a row belongs to one connection, and another connection gets it only when the row is
//! not active. A row that its client left active is cleared only when its bytes are equal on all
//! legs. The mount admits only processes of its own user, or of root, as the kernel identifies
//! them.

pub mod status;

use crate::protocol::wire::{self, ClientRequest, FileRefusal, MountReply};
use crate::server::status::{ClientRecord, ClientRegistry, RefusalReason};
use crate::shared::rows::{self, DrainingFileMap};
use crate::shared::shared_file_map;
use pagemesh_base::mount_connection;
use pagemesh_base::peer::{PeerCredentials, connect_abstract, peer_credentials};
use pagemesh_base::proc_maps::has_mapped;
use pagemesh_base::resume::{self, StopReason};
use pagemesh_fs::{Fs, Ino, SharedFileMap};
use pagemesh_volume::Volume;
use pagemesh_volume::direct_access::{DirectSegment, ROWS, TornOp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, SocketType, accept_with, bind, listen, shutdown};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, pidfd_open, pidfd_send_signal, setrlimit,
};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Connections that the kernel queues before the mount accepts them.
const BACKLOG: i32 = 64;
/// Concurrent connections: each process has one for requests, and one for each row. More processes
/// connect than there are rows, since each program that maps a file must report it.
const CONNECTIONS_MAX: usize = 16 * ROWS;
/// Files with maps, each of which takes a descriptor; the kernel serves further ones.
const FILE_MAPS_MAX: usize = 4096;
/// Polls of a client in an operation before the thread yields its processor: operations take a
/// microsecond or two.
const SPINS: u32 = 200;
/// Delay between later polls.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// How long a client that a signal stopped may stay in an operation that another process waits for.
/// Then the mount lets it run until it has left the operation.
const RESUME_AFTER: Duration = Duration::from_millis(100);
/// How long the mount waits for the end of a process that it killed.
const KILL_WAIT_MAX: Duration = Duration::from_secs(2);
/// How long a client that runs, or that a debugger stopped, may stay in an operation; then the
/// mount kills it. It is longer than a client waits for a brick, or for the lock of a stopped
/// client, before it gives up.
const OPERATION_TIME_MAX: Duration = Duration::from_secs(15);

/// How long clients may take to leave their operations when the mount is unmounted.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);
/// Delay between attempts to accept where the system lacks resources.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Delay between two checks for clients that the volume or the replication ring waits for.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Admits direct clients of a mount, until it is dropped.
pub struct DirectServer {
    shared: Arc<ServerShared>,
    listener: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
    /// Dropping it stops the thread that watches operations.
    watcher_stop: Option<Sender<()>>,
}

/// Whether the mount is still there. Afterwards another mount may have its device number, and a
/// client that connects here means that one.
pub type IsMounted = Arc<dyn Fn() -> bool + Send + Sync>;

/// State that all connections share.
struct ServerShared {
    volume: Arc<Volume>,
    fs: Weak<Fs>,
    is_mounted: IsMounted,
    /// By row: the connection of the process that has it.
    rows: Mutex<Vec<Option<Arc<ClientConnection>>>>,
    file_maps: Mutex<HashMap<Ino, Weak<DrainingFileMap>>>,
    connections: AtomicUsize,
    is_stopping: AtomicBool,
    clients: ClientRegistry,
}

/// A process at the other end of a connection.
struct ClientConnection {
    process: OwnedFd,
    pid: Pid,
    socket: OwnedFd,
    record: Arc<ClientRecord>,
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DirectServer {
    /// Listens for direct clients of the mount with this device number (`major:minor`).
    ///
    /// # Errors
    /// When the system has no socket, memory or thread for it.
    pub fn start(
        volume: Arc<Volume>,
        fs: &Arc<Fs>,
        device: &str,
        is_mounted: IsMounted,
    ) -> io::Result<DirectServer> {
        volume.enable_direct_access().map_err(io::Error::other)?;
        raise_fd_limit();
        let listener = Arc::new(wire::new_socket()?);
        bind(&*listener, &wire::socket_address(device)?)?;
        listen(&*listener, BACKLOG)?;
        let shared = Arc::new(ServerShared {
            volume,
            fs: Arc::downgrade(fs),
            is_mounted,
            rows: Mutex::new(vec![None; ROWS]),
            file_maps: Mutex::default(),
            connections: AtomicUsize::new(0),
            is_stopping: AtomicBool::new(false),
            clients: ClientRegistry::default(),
        });
        let (served, listened) = (Arc::clone(&shared), Arc::clone(&listener));
        let thread = std::thread::Builder::new().name("guests".into());
        let accepts = thread.spawn(move || accept_loop(&served, &listened))?;
        let mut server = DirectServer {
            shared,
            listener,
            threads: vec![accepts],
            watcher_stop: None,
        };
        let (looking, ended) = mpsc::channel();
        let looked_after = Arc::clone(&server.shared);
        let thread = std::thread::Builder::new().name("guests-late".into());
        let looks = thread.spawn(move || watch_operations(&looked_after, &ended))?;
        server.threads.push(looks);
        server.watcher_stop = Some(looking);
        let weak_shared = Arc::downgrade(&server.shared);
        fs.set_open_hook(move |thread| {
            if let Some(shared) = weak_shared.upgrade() {
                shared.record_untracked_open(thread);
            }
        });
        Ok(server)
    }

    /// Admits a process by the socket that one of its threads offers, see [`mount_connection`].
    pub fn connector(&self) -> impl Fn(u32, &[u8]) -> Result<(), Errno> + Send + Sync + use<> {
        let shared = Arc::downgrade(&self.shared);
        move |thread, argument| {
            let shared = shared.upgrade().filter(|shared| !shared.is_stopping());
            let shared = shared.ok_or(Errno::NOSYS)?;
            let socket = mount_connection::accept(thread, argument).inspect_err(
                |cause| tracing::debug!(thread, %cause, "an offered socket was not taken"),
            )?;
            accept_connection(&shared, socket);
            Ok(())
        }
    }

    /// Stops waiting for clients, as the mount is being unmounted. Its files may be served for a
    /// while yet, so direct access is closed for good, and clients leave their operations first.
    pub fn stop(&self) {
        if !self.shared.is_stopping.load(Ordering::Acquire)
            && let Some(segment) = self.shared.segment()
        {
            segment.close();
            let began = Instant::now();
            while !segment.is_idle() && began.elapsed() < DRAIN_TIME_MAX {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        self.shared.is_stopping.store(true, Ordering::Release);
    }
}

impl Drop for DirectServer {
    fn drop(&mut self) {
        self.stop();
        // Wakes the accepting thread; it fails only for a socket that does not listen.
        let _ = shutdown(&*self.listener, Shutdown::Both);
        self.watcher_stop = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        for connection in guard(&self.shared.rows).iter().flatten() {
            let _ = shutdown(&connection.socket, Shutdown::Both);
        }
    }
}

/// Raises the limit of descriptors: file maps and connections take more than the default.
fn raise_fd_limit() {
    let limits = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limits.maximum,
        ..limits
    };
    if let Err(cause) = setrlimit(Resource::Nofile, wanted) {
        tracing::debug!(%cause, "cannot raise the limit of descriptors; it is unchanged");
    }
}

/// Resumes or kills clients that do not leave an operation, while the volume controller or the
/// asynchronous replica waits for them.
fn watch_operations(shared: &ServerShared, ended: &Receiver<()>) {
    let mut inside: HashMap<usize, (u64, Instant)> = HashMap::new();
    while ended.recv_timeout(WATCH_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let Some(segment) = shared.segment() else {
            return;
        };
        let active: Vec<usize> = segment.active_ops().map(|(number, _)| number).collect();
        inside.retain(|number, _| active.contains(number));
        let is_awaited = segment.is_closed() || segment.ring().next_unfilled().is_some();
        for number in active {
            let now = (segment.row(number).op_sequence(), Instant::now());
            let since = inside.entry(number).or_insert(now);
            if since.0 != now.0 || !is_awaited {
                *since = now;
            }
            let waited = since.1.elapsed();
            if waited >= OPERATION_TIME_MAX {
                shared.kill(number, "it did not leave an operation");
            } else if waited >= RESUME_AFTER {
                shared.resume(segment, number);
            }
        }
    }
}

fn accept_loop(shared: &Arc<ServerShared>, listener: &OwnedFd) {
    while !shared.is_stopping.load(Ordering::Acquire) {
        let socket = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => continue,
            Err(_) if shared.is_stopping.load(Ordering::Acquire) => return,
            Err(cause) => {
                // Without a retry a client would wait for ever to be admitted.
                tracing::warn!(%cause, "cannot accept direct clients of the mount; trying again");
                std::thread::sleep(ACCEPT_RETRY);
                continue;
            }
        };
        accept_connection(shared, socket);
    }
}

/// Serves a connection on a thread of its own. The kernel serves a process that is refused.
fn accept_connection(shared: &Arc<ServerShared>, socket: OwnedFd) {
    if shared.connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
        shared.connections.fetch_sub(1, Ordering::AcqRel);
        shared
            .clients
            .count_refusal(RefusalReason::TooManyConnections);
        return;
    }
    let served = Arc::clone(shared);
    let thread = std::thread::Builder::new().name("guest".into());
    let spawned = thread.spawn(move || {
        serve_connection(&served, socket);
        served.connections.fetch_sub(1, Ordering::AcqRel);
    });
    if let Err(cause) = spawned {
        shared.connections.fetch_sub(1, Ordering::AcqRel);
        tracing::warn!(%cause, "cannot serve a direct client; the kernel serves it");
    }
}

/// The process that admits direct clients for a device.
///
/// # Errors
/// If no process does.
pub fn serving_process(device: &str) -> io::Result<PeerCredentials> {
    peer_credentials(connect_abstract(
        SocketType::SEQPACKET,
        &wire::socket_name(device),
    )?)
}

/// The process at the other end, if it may be admitted.
fn admit(shared: &ServerShared, socket: OwnedFd) -> io::Result<ClientConnection> {
    let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
    let peer = peer_credentials(&socket)?;
    if !peer.is_trusted() {
        shared.clients.count_refusal(RefusalReason::OtherUser);
        return Err(refused());
    }
    // A process that the mount cannot watch is not admitted.
    let pid = peer.pid.ok_or_else(|| {
        shared.clients.count_refusal(RefusalReason::UnseenProcess);
        refused()
    })?;
    Ok(ClientConnection {
        process: pidfd_open(pid, PidfdFlags::empty())?,
        pid,
        socket,
        record: shared.clients.find_or_add(pid),
    })
}

fn serve_connection(shared: &Arc<ServerShared>, socket: OwnedFd) {
    let connection = match admit(shared, socket) {
        Ok(connection) => Arc::new(connection),
        Err(cause) => return tracing::debug!(%cause, "a direct client was refused"),
    };
    let mut row = None;
    if let Err(cause) = answer_requests(shared, &connection, &mut row) {
        tracing::debug!(%cause, pid = connection.pid.as_raw_pid(), "a direct client's connection ended");
    }
    if let Some(number) = row {
        // The process may go on and use the row, if its connection was closed by accident.
        loop {
            let is_ending = shared.is_stopping.load(Ordering::Acquire);
            if is_ending
                || shared.is_detached(&connection)
                || connection.exits_within(WATCH_INTERVAL)
            {
                break;
            }
        }
        shared.clean_up(number, &connection);
    }
}

fn answer_requests(
    shared: &Arc<ServerShared>,
    connection: &Arc<ClientConnection>,
    row: &mut Option<usize>,
) -> io::Result<()> {
    let socket = connection.socket.as_fd();
    while let Some((bytes, memory)) = wire::receive(socket)? {
        let request = ClientRequest::decode(&bytes).map_err(io::Error::other)?;
        if !(shared.is_mounted)() {
            return Ok(());
        }
        match request {
            ClientRequest::Join => {
                if row.is_none() {
                    *row = shared.assign_row(connection);
                    if row.is_none() {
                        shared.clients.count_refusal(RefusalReason::NoFreeRow);
                    }
                }
                let (reply, segment) = shared.join_reply(*row);
                let memory = segment.map(|segment| segment.file().as_fd());
                wire::send(socket, &reply.encode(), memory)?;
            }
            ClientRequest::WakeReplicator => shared.volume.wake_replication(),
            ClientRequest::ReleaseRow => {
                if let Some(number) = row.take() {
                    shared.clean_up(number, connection);
                }
            }
            ClientRequest::GetLayout => {
                wire::send(socket, &shared.join_reply(*row).0.encode(), None)?
            }
            ClientRequest::WriteAtomic(ino) => {
                let reply = shared.write_atomic(connection, Ino(ino), memory)?;
                wire::send(socket, &reply.encode(), None)?;
            }
            ClientRequest::GetCounters => {
                let counters = connection.record.counters();
                let memory = counters.map(|counters| counters.file().as_fd());
                let reply = memory.map_or(MountReply::Unavailable, |_| MountReply::Success);
                wire::send(socket, &reply.encode(), memory)?;
            }
            ClientRequest::GetStatus => {
                let memory = shared.status()?;
                wire::send(socket, &MountReply::Success.encode(), Some(memory.as_fd()))?;
            }
            ClientRequest::Connect => {
                if let Some(socket) = memory {
                    accept_connection(shared, socket);
                }
            }
            ClientRequest::GetBrickSocket(leg) => {
                let (reply, found) = shared.brick_socket(leg);
                wire::send(socket, &reply.encode(), found.as_ref().map(AsFd::as_fd))?;
            }
            ClientRequest::GetFileMap(ino) | ClientRequest::GetFileMapForAppend(ino) => {
                let grows = matches!(request, ClientRequest::GetFileMapForAppend(_));
                let (reply, file_map) = shared.publish_file_map(Ino(ino), grows);
                let memory = file_map
                    .as_ref()
                    .map(|file_map| file_map.file_map().file().as_fd());
                wire::send(socket, &reply.encode(), memory)?;
            }
        }
    }
    Ok(())
}

impl ServerShared {
    fn segment(&self) -> Option<&DirectSegment> {
        self.volume.enable_direct_access().ok()
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// The socket of the brick of a leg. The client connects to it itself, so that the brick knows
    /// its process.
    fn brick_socket(&self, leg: u64) -> (MountReply, Option<OwnedFd>) {
        let found = || {
            let lease = self.volume.layout_lease()?;
            let lease_leg = lease.legs.get(usize::try_from(leg).ok()?)?;
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            rustix::fs::open(&lease_leg.socket, flags, Mode::empty()).ok()
        };
        match found() {
            Some(socket) => (MountReply::Success, Some(socket)),
            None => (MountReply::Unavailable, None),
        }
    }

    /// Records that a thread opens a file, and not through the preload library. If the thread
    /// belongs to a direct client, a descriptor number may lead to that file before the mount
    /// learns that the number was closed.
    fn record_untracked_open(&self, thread: u32) {
        if self.connections.load(Ordering::Acquire) == 0 {
            return;
        }
        let rows = guard(&self.rows);
        let mut clients: Vec<Pid> = rows
            .iter()
            .flatten()
            .map(|connection| connection.pid)
            .collect();
        drop(rows);
        clients.dedup();
        if is_thread_of_any(&clients, thread)
            && let Some(segment) = self.segment()
        {
            segment.record_untracked_open();
        }
    }

    fn assign_row(&self, connection: &Arc<ClientConnection>) -> Option<usize> {
        let mut rows = guard(&self.rows);
        let number = rows.iter().position(Option::is_none)?;
        rows[number] = Some(Arc::clone(connection));
        Some(number)
    }

    fn join_reply(&self, row: Option<usize>) -> (MountReply, Option<&DirectSegment>) {
        match row.zip(self.segment()) {
            Some((row, segment)) => {
                let lease = self.volume.layout_lease();
                (MountReply::Joined(row as u32, lease), Some(segment))
            }
            // It may be given one later.
            None => (MountReply::Unavailable, self.segment()),
        }
    }

    /// The current map of a file, with space behind its end if the client wants to append.
    fn publish_file_map(
        self: &Arc<ServerShared>,
        ino: Ino,
        grows: bool,
    ) -> (MountReply, Option<Arc<DrainingFileMap>>) {
        let Some(fs) = self.fs.upgrade() else {
            return (MountReply::Unavailable, None);
        };
        let make = || {
            let mut file_maps = guard(&self.file_maps);
            file_maps.retain(|_, file_map| file_map.strong_count() > 0);
            if file_maps.len() >= FILE_MAPS_MAX {
                return None;
            }
            let file_map = match shared_file_map::SharedFileMap::create() {
                Ok(file_map) => file_map,
                Err(cause) => {
                    tracing::warn!(%cause, "no memory for a file map; the kernel serves the file");
                    return None;
                }
            };
            let shared = Arc::clone(self);
            let made = Arc::new(DrainingFileMap::new(Arc::new(file_map), move || {
                shared.drain_file(ino);
            }));
            file_maps.insert(ino, Arc::downgrade(&made));
            Some(made as Arc<dyn SharedFileMap>)
        };
        let shown = match grows {
            true => fs.publish_file_map_for_append(ino, make),
            false => fs.publish_file_map(ino, make),
        };
        match shown {
            Ok(Some(_)) => {
                let file_map = guard(&self.file_maps).get(&ino).and_then(Weak::upgrade);
                match file_map {
                    Some(file_map) => (MountReply::Success, Some(file_map)),
                    None => (MountReply::Unavailable, None),
                }
            }
            Ok(None) => (MountReply::FileRefused(self.refusal_of(&fs, ino)), None),
            Err(cause) => {
                tracing::debug!(%cause, ino = ino.0, "cannot publish a file map; the kernel serves the file");
                (MountReply::Unavailable, None)
            }
        }
    }

    /// Why a file cannot be on the direct path.
    fn refusal_of(&self, fs: &Fs, ino: Ino) -> FileRefusal {
        let is_full = || guard(&self.file_maps).len() >= FILE_MAPS_MAX;
        let (refusal, refused) = match () {
            () if fs.is_mmapped(ino) => (FileRefusal::Mapped, RefusalReason::FileMapped),
            () if fs.is_cached(ino) => (FileRefusal::Cached, RefusalReason::FileCached),
            () if is_full() => (FileRefusal::TooManyFiles, RefusalReason::TooManyFiles),
            () => (FileRefusal::Unsupported, RefusalReason::FileUnsupported),
        };
        self.clients.count_refusal(refused);
        refusal
    }

    /// The status that `pagemesh mount status` shows, as JSON.
    fn status(&self) -> io::Result<File> {
        let files = {
            let file_maps = guard(&self.file_maps);
            let shown = file_maps.iter().filter_map(|(ino, file_map)| {
                let file_map = file_map.upgrade()?;
                (!file_map.file_map().is_outdated()).then_some(ino.0)
            });
            shown.collect()
        };
        let rows = guard(&self.rows).iter().flatten().count();
        let hindrance = self.segment().and_then(DirectSegment::disabled_reason);
        let status = self.clients.status(hindrance, rows, files);
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let mut memory = File::from(rustix::fs::memfd_create("pagemesh-status", flags)?);
        memory.write_all(&serde_json::to_vec(&status)?)?;
        Ok(memory)
    }

    /// Overwrites parts of a file together for a client that cannot do so itself. It does nothing
    /// once the client has exited.
    ///
    /// **Lost update:** a process that saw the client end may have changed the file since. A late
    /// write must not overwrite that.
    fn write_atomic(
        &self,
        connection: &ClientConnection,
        ino: Ino,
        memory: Option<OwnedFd>,
    ) -> io::Result<MountReply> {
        let (Some(fs), Some(memory)) = (self.fs.upgrade(), memory) else {
            return Ok(MountReply::Failed(Errno::OPNOTSUPP.raw_os_error()));
        };
        let mut bytes = Vec::new();
        let mut memory = File::from(memory).take(wire::PARTS_BYTES_MAX as u64 + 1);
        memory.read_to_end(&mut bytes)?;
        let parts = wire::decode_parts(&bytes.into()).map_err(io::Error::other)?;
        let written = fs.borrow_channel().and_then(|mut port| {
            fs.write_atomic(&mut port, ino, &parts, || connection.awaits_reply())
        });
        Ok(match written {
            Ok(()) => MountReply::Success,
            Err(cause) => {
                tracing::debug!(%cause, ino = ino.0, "parts of a file were not written together");
                MountReply::Failed(cause.errno().raw_os_error())
            }
        })
    }

    /// Waits until no client is in an operation on a file.
    fn drain_file(&self, ino: Ino) {
        let Some(segment) = self.segment() else {
            return;
        };
        let (mut spins, mut last_look) = (0, None);
        rows::drain_file(segment, ino, |number| {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
                return true;
            }
            let since = *last_look.get_or_insert_with(Instant::now);
            self.await_row(segment, number);
            // The thread that cleans up after a dead client waits for the others, too.
            if since.elapsed() >= RESUME_AFTER {
                last_look = Some(Instant::now());
                self.resume_stopped(segment);
            }
            !self.is_stopping.load(Ordering::Acquire)
        });
    }

    /// Waits until a client has left its operation or is gone. It lets a stopped client run until
    /// it has left. The thread of its connection cleans up after a client that is gone.
    fn await_row(&self, segment: &DirectSegment, number: usize) {
        let row = segment.row(number);
        let inside = row.op_sequence();
        let began = Instant::now();
        let mut last_look = Duration::ZERO;
        while row.op_sequence() == inside && inside % 2 == 1 {
            let waited = began.elapsed();
            if self.is_stopping.load(Ordering::Acquire) {
                return;
            }
            let connection = self.connection(number);
            if connection.is_none_or(|connection| connection.has_ended()) {
                return std::thread::sleep(POLL_INTERVAL);
            }
            if waited >= OPERATION_TIME_MAX {
                self.kill(number, "it did not leave an operation");
                return std::thread::sleep(POLL_INTERVAL);
            }
            // The client may only wait for the lock of another client, which is stopped.
            if waited >= last_look + RESUME_AFTER {
                last_look = waited;
                self.resume_stopped(segment);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Lets clients that a signal stopped in an operation run until they have left it.
    fn resume_stopped(&self, segment: &DirectSegment) {
        segment
            .active_ops()
            .for_each(|(number, _)| self.resume(segment, number));
    }

    fn resume(&self, segment: &DirectSegment, number: usize) {
        let Some(connection) = self.connection(number) else {
            return;
        };
        let pid = connection.pid.as_raw_pid().cast_unsigned();
        if resume::stop_reason(pid) != Some(StopReason::Signal) {
            return;
        }
        let is_outside = || segment.row(number).active_range().is_none();
        let is_out = resume::run_until_outside(pid, &is_outside);
        let name = connection.record.name();
        tracing::info!(
            pid,
            name,
            is_out,
            "a stopped client ran until it left its operation"
        );
    }

    /// Whether nothing of a client is left that could use its row: its process has ended, or
    /// executed another program.
    fn is_detached(&self, connection: &ClientConnection) -> bool {
        let maps = || {
            let found = self.segment()?.file().metadata().ok()?;
            let pid = connection.pid.as_raw_pid().cast_unsigned();
            has_mapped(pid, found.dev(), found.ino())
        };
        connection.exits_within(Duration::ZERO) || maps() == Some(false)
    }

    fn connection(&self, row: usize) -> Option<Arc<ClientConnection>> {
        guard(&self.rows)[row].clone()
    }

    fn kill(&self, row: usize, why: &str) {
        if let Some(connection) = self.connection(row) {
            connection.kill(why);
        }
    }

    /// Frees the row of a client's connection that has ended.
    fn clean_up(&self, number: usize, connection: &ClientConnection) {
        let Some(segment) = self.segment() else {
            return;
        };
        let row = segment.row(number);
        if row.active_range().is_some() {
            // The client may have closed the connection by accident, and go on.
            if !self.is_detached(connection) {
                self.await_row(segment, number);
            }
            if let Some(place) = row.active_range() {
                if !self.is_detached(connection) {
                    connection.kill("it was in an operation when its connection ended");
                    connection.exits_within(KILL_WAIT_MAX);
                }
                self.reconcile(segment, number, connection);
                let file_map = guard(&self.file_maps).get(&Ino(place.file)).cloned();
                let file_map = file_map.and_then(|file_map| file_map.upgrade());
                rows::clear_row(
                    segment,
                    number,
                    file_map.as_ref().map(|file_map| file_map.file_map()),
                );
            }
        }
        guard(&self.rows)[number] = None;
    }
}

impl ServerShared {
    /// Reconciles the legs where a client died in an operation.
    fn reconcile(&self, segment: &DirectSegment, number: usize, connection: &ClientConnection) {
        let Some(torn_op) = TornOp::of_row(segment.row(number)) else {
            return;
        };
        tracing::info!(
            pid = connection.pid.as_raw_pid(),
            ?torn_op,
            "a direct client died in an operation; reconciling the copies there"
        );
        self.volume.reconcile(number, torn_op);
    }
}

impl ClientConnection {
    /// Whether its process ends within this time.
    fn exits_within(&self, wait: Duration) -> bool {
        let until = Timespec::try_from(wait).unwrap_or_default();
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        matches!(poll(&mut polled, Some(&until)), Ok(ended) if ended > 0)
    }

    /// Whether its process is gone. It then shuts the connection down, so that the connection's
    /// thread notices: a child that it forked may still have the connection.
    fn has_ended(&self) -> bool {
        let is_gone = self.exits_within(Duration::ZERO);
        if is_gone {
            // It may be shut down already.
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
        is_gone
    }

    /// Whether the client waits for a reply, and has not begun to exit. That check comes before the
    /// exit closes or gives back anything that another process may notice.
    fn awaits_reply(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let is_there = matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0));
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid.as_raw_pid()));
        let mut tasks = tasks.into_iter().flatten().flatten();
        is_there && tasks.any(|task| !is_exiting(&task.path().join("stat")))
    }

    fn kill(&self, why: &str) {
        if !self.has_ended() {
            let (pid, name) = (self.pid.as_raw_pid(), self.record.name());
            let why = &match resume::stop_reason(pid.cast_unsigned()) {
                Some(StopReason::Tracer(tracer)) => {
                    let tracer_name = resume::process_name(tracer);
                    format!("{why}; process {tracer} ({tracer_name}) had stopped it, see ptrace(2)")
                }
                Some(StopReason::Signal) => {
                    format!("{why}; it was stopped, and did not leave it when it ran")
                }
                None => why.to_owned(),
            };
            tracing::warn!(pid, name, why, "a direct client is killed");
            self.record.record_kill(why);
            // It may have ended by itself meanwhile.
            let _ = pidfd_send_signal(&self.process, Signal::KILL);
        }
    }
}

/// Whether a thread belongs to one of these processes. The kernel gives 0 for a thread in a PID
/// namespace that this process does not see: such a thread may belong to any process.
fn is_thread_of_any(processes: &[Pid], thread: u32) -> bool {
    let Some(pid) = Pid::from_raw(thread.cast_signed()) else {
        return !processes.is_empty();
    };
    if processes.is_empty() || processes.contains(&pid) {
        return !processes.is_empty();
    }
    // The kernel gives a descriptor only for the first thread of a process.
    if pidfd_open(pid, PidfdFlags::empty()).is_ok() {
        return false;
    }
    let is_of = |process: &Pid| {
        let process = process.as_raw_pid();
        Path::new(&format!("/proc/{process}/task/{thread}")).exists()
    };
    processes.iter().any(is_of)
}

/// A field of a process's or thread's status, counted from its state on, proc(5).
fn proc_stat_field(path: &Path, index: usize) -> Option<String> {
    let stat = std::fs::read_to_string(path).ok()?;
    // The name, in parentheses, may hold any characters.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(index).map(str::to_owned)
}

/// Whether a thread is exiting or has exited.
fn is_exiting(path: &Path) -> bool {
    /// `flags`, behind the state and five numbers.
    const FLAGS: usize = 6;
    /// `PF_EXITING` (Linux, `include/linux/sched.h`)
    const EXITING: u32 = 4;
    let flags = proc_stat_field(path, FLAGS).and_then(|flags| flags.parse::<u32>().ok());
    flags.is_none_or(|flags| flags & EXITING != 0)
}
