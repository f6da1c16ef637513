//! The mount's side of the direct path: it admits direct clients, publishes file maps to them,
//! disables direct access, and cleans up after clients that are gone.
//!
//! Invariants: a row belongs to one connection, and another connection gets it only when the row is
//! not active. A row that its client left active is cleared only when its bytes are equal on all
//! legs. The mount admits only processes of its own user, or of root, as the kernel identifies
//! them.
//!
//! Each connection has a thread: [`accept`] admits it, [`requests`] answers it, and [`rows`] cleans
//! up after it.

mod accept;
mod connection;
mod file_maps;
mod operation_watch;
mod requests;
mod rows;
mod status;

pub use accept::serving_process;

use crate::protocol::wire;
use crate::shared::rows::DrainingFileMap;
use connection::ClientConnection;
use operation_watch::POLL_INTERVAL;
use pagemesh_base::fd_limit::raise_fd_limit;
use pagemesh_base::mount_connection;
use pagemesh_base::poison::lock;
use pagemesh_fs::{Fs, Ino};
use pagemesh_volume::Volume;
use pagemesh_volume::direct_access::{DirectSegment, ROWS};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{Shutdown, bind, listen, shutdown};
use status::ClientRegistry;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Connections that the kernel queues before the mount accepts them.
const BACKLOG: i32 = 64;
/// How long clients may take to leave their operations when the mount is unmounted.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

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
    pub(super) volume: Arc<Volume>,
    pub(super) fs: Weak<Fs>,
    pub(super) is_mounted: IsMounted,
    /// By row: the connection of the process that has it.
    pub(super) rows: Mutex<Vec<Option<Arc<ClientConnection>>>>,
    pub(super) file_maps: Mutex<HashMap<Ino, Weak<DrainingFileMap>>>,
    pub(super) connections: AtomicUsize,
    pub(super) is_stopping: AtomicBool,
    pub(super) clients: ClientRegistry,
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
        if let Err(cause) = raise_fd_limit() {
            tracing::debug!(%cause, "cannot raise the limit of descriptors; it is unchanged");
        }
        let listener = Arc::new(wire::new_socket()?);
        bind(&*listener, &wire::socket_address(device)?)?;
        listen(&*listener, BACKLOG)?;
        let clients = ClientRegistry::new(Arc::clone(volume.meters()));
        let shared = Arc::new(ServerShared {
            volume,
            fs: Arc::downgrade(fs),
            is_mounted,
            rows: Mutex::new(vec![None; ROWS]),
            file_maps: Mutex::default(),
            connections: AtomicUsize::new(0),
            is_stopping: AtomicBool::new(false),
            clients,
        });
        let (served, listened) = (Arc::clone(&shared), Arc::clone(&listener));
        let thread = std::thread::Builder::new().name("direct-accept".into());
        let accepts = thread.spawn(move || accept::accept_loop(&served, &listened))?;
        let mut server = DirectServer {
            shared,
            listener,
            threads: vec![accepts],
            watcher_stop: None,
        };
        let (watcher_stop, ended) = mpsc::channel();
        let watched = Arc::clone(&server.shared);
        let thread = std::thread::Builder::new().name("direct-late".into());
        let watches = thread.spawn(move || operation_watch::watch_operations(&watched, &ended))?;
        server.threads.push(watches);
        server.watcher_stop = Some(watcher_stop);
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
            accept::accept_connection(&shared, socket);
            Ok(())
        }
    }

    /// Counts the direct clients; none once the server has ended.
    pub fn client_counter(&self) -> impl Fn() -> usize + Send + Sync + use<> {
        let shared = Arc::downgrade(&self.shared);
        move || {
            let shared = shared.upgrade();
            shared.map_or(0, |shared| shared.clients.client_count())
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
        for connection in lock(&self.shared.rows).iter().flatten() {
            let _ = shutdown(&connection.socket, Shutdown::Both);
        }
    }
}

impl ServerShared {
    fn segment(&self) -> Option<&DirectSegment> {
        self.volume.enable_direct_access().ok()
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }
}
