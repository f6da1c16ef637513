//! The manager as a server: one thread for sockets, threads for blocking work,
//! housekeeping beside them.
//!
//! Invariants: when [`serve`] returns, requests are answered at
//! [`FileHandle::address`]; when [`FileHandle::stop`] returns, nothing runs any more
//! and the store is closed, unless a call to a brick outlasts
//! `STOP_TIMEOUT`. Idle, it wakes for heartbeats and once per
//! `SWEEP_INTERVAL`.

use crate::api::{Api, REQUESTS_MAX};
use crate::clock::{Clock, SystemClock};
use crate::manager::{Bricks, Manager, Settings};
use crate::store::{Store, StoreError};
use crate::sweep::SWEEP_INTERVAL;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use pagemesh_base::key::Key;
use socket2::SockRef;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Connections at once; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 512;
/// A request's head must arrive in this time, counted from the end of the one
/// before: ends idle and stuck connections.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a request's head, and of what is read ahead.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Ends the connection of a peer that takes none of its answers for so long:
/// whoever stops reading must not keep a place.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(30);
/// After a failed accept, as when file descriptors are used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long stopping waits for requests under way.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// What a manager needs to run.
pub struct Config {
    /// Where to listen, as `host:port`; port 0 takes a free one.
    pub listen: String,
    /// The file of its store; made if it is not there.
    pub store: PathBuf,
    /// The cluster's key.
    pub key: Key,
    /// How to reach bricks.
    pub bricks: Arc<dyn Bricks>,
    /// What can be set.
    pub settings: Settings,
    /// Where to read time.
    pub clock: Arc<dyn Clock>,
}

impl Config {
    /// A manager with usual settings.
    #[must_use]
    pub fn new(listen: &str, store: PathBuf, key: Key, bricks: Arc<dyn Bricks>) -> Config {
        Config {
            listen: listen.to_owned(),
            store,
            key,
            bricks,
            settings: Settings::default(),
            clock: Arc::new(SystemClock::new()),
        }
    }
}

/// Why a manager does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// No such address.
    #[error("cannot listen on '{listen}': {cause}; write host:port, as in 127.0.0.1:7070")]
    BadAddress {
        /// What was asked for.
        listen: String,
        /// What the system said.
        cause: io::Error,
    },
    /// Somebody listens there already.
    #[error("{0} is in use; stop what listens there, or choose another port with --listen")]
    InUse(SocketAddr),
    /// Not allowed, or not an address of this machine.
    #[error("cannot listen on {address}: {cause}; choose another address with --listen")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// What the system said.
        cause: io::Error,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No thread, no event queue.
    #[error("cannot start the manager: {0}")]
    Start(io::Error),
}

/// A running manager; dropping it stops it.
pub struct Handle {
    address: SocketAddr,
    manager: Arc<Manager>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same, as clients want it.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The manager behind the server, for calls without HTTP.
    #[must_use]
    pub fn manager(&self) -> &Manager {
        &self.manager
    }

    /// Stops it and waits for that.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if let Some(stop) = self.stop.take() {
            // An error means that the thread has ended, which is the aim.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the manager's thread panicked");
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts a manager.
///
/// # Errors
/// When its address or store cannot be used.
pub fn serve(config: Config) -> Result<Handle, ServeError> {
    let listener = bind(&config.listen)?;
    let address = listener.local_addr().map_err(ServeError::Start)?;
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "the API is not encrypted: whoever sees its traffic can take its token");
    }
    let store = Store::open(&config.store)?;
    let manager = Manager::new(store, config.bricks, config.clock, config.settings)?;
    let manager = Arc::new(manager);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(REQUESTS_MAX + 1)
        .thread_name("pagemesh-manager")
        .build()
        .map_err(ServeError::Start)?;
    let listener = {
        let _inside = runtime.enter();
        tokio::net::TcpListener::from_std(listener).map_err(ServeError::Start)?
    };
    let (stop, stopped) = oneshot::channel();
    let router = Api::new(manager.clone(), config.key).router();
    let housekeeper = manager.clone();
    let thread = std::thread::Builder::new()
        .name("pagemesh-manager".into())
        .spawn(move || {
            runtime.spawn(keep_house(housekeeper));
            runtime.block_on(accept(listener, router, stopped));
            runtime.shutdown_timeout(STOP_TIMEOUT);
        })
        .map_err(ServeError::Start)?;
    Ok(Handle {
        address,
        manager,
        stop: Some(stop),
        thread: Some(thread),
    })
}

fn bind(listen: &str) -> Result<TcpListener, ServeError> {
    let bad = |cause| ServeError::BadAddress {
        listen: listen.to_owned(),
        cause,
    };
    let mut addresses = listen.to_socket_addrs().map_err(bad)?;
    let nothing = || bad(io::Error::other("the name has no address"));
    let address = addresses.next().ok_or_else(nothing)?;
    let listener = TcpListener::bind(address).map_err(|cause| match cause.kind() {
        io::ErrorKind::AddrInUse => ServeError::InUse(address),
        _ => ServeError::Bind { address, cause },
    })?;
    listener.set_nonblocking(true).map_err(ServeError::Start)?;
    Ok(listener)
}

async fn accept(
    listener: tokio::net::TcpListener,
    router: Router,
    mut stopped: oneshot::Receiver<()>,
) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let graceful = GracefulShutdown::new();
    loop {
        let permit = connections.clone().acquire_owned();
        let next = async { (permit.await, listener.accept().await) };
        let (permit, accepted) = tokio::select! {
            _ = &mut stopped => break,
            next = next => next,
        };
        match (permit, accepted) {
            (Ok(permit), Ok((stream, _))) => attend(stream, router.clone(), permit, &graceful),
            (_, Err(error)) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            (Err(_), _) => break,
        }
    }
    drop(listener);
    let ended = tokio::time::timeout(STOP_TIMEOUT, graceful.shutdown());
    if ended.await.is_err() {
        tracing::warn!("requests under way were cut off");
    }
}

fn attend(
    stream: TcpStream,
    router: Router,
    permit: OwnedSemaphorePermit,
    graceful: &GracefulShutdown,
) {
    // Small answers must not wait for acknowledgements; failing costs time only.
    let _ = stream.set_nodelay(true);
    if let Err(error) = SockRef::from(&stream).set_tcp_user_timeout(Some(UNREAD_TIMEOUT)) {
        tracing::debug!(%error, "cannot limit how long answers wait");
    }
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let connection = graceful.watch(connection);
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection ended");
        }
        drop(permit);
    });
}

async fn keep_house(manager: Arc<Manager>) {
    loop {
        // Early only when a brick has returned.
        let returned = manager.returned.notified();
        let _ = tokio::time::timeout(SWEEP_INTERVAL, returned).await;
        let sweeper = manager.clone();
        let swept = tokio::task::spawn_blocking(move || sweeper.sweep());
        if let Err(error) = swept.await {
            tracing::error!(%error, "housekeeping was not finished");
        }
    }
}
