//! The manager as a server: one thread for sockets, threads for blocking work, and a sweep task.
//!
//! Invariants: when [`serve`] returns, the manager answers requests at [`ManagerHandle::address`].
//! When [`ManagerHandle::stop`] returns, no thread runs any more and the store is closed, unless a
//! call to a brick outlasts `STOP_TIMEOUT`. An idle manager wakes for heartbeats, once per
//! `SWEEP_INTERVAL`, and when the next brick would count as dead, about as often.

use crate::access::{AllowedHosts, PeerAddress};
use crate::api::watch::WatchStreams;
use crate::api::{ApiState, REQUESTS_MAX};
use crate::clock::{Clock, SystemClock};
use crate::connection_slots::{ConnectionSlot, ConnectionSlots};
use crate::manager::{BrickConnector, Manager, ManagerSettings};
use crate::schedule_runner::SCHEDULE_INTERVAL;
use crate::store::{Store, StoreError};
use crate::sweep::SWEEP_INTERVAL;
use crate::tokens::{AdminTokenOutput, create_at_first_start};
use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
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
use tokio::sync::oneshot;

/// Maximum of concurrent connections: each client of a volume keeps one. A further one takes the place of an
/// unauthenticated one.
const CONNECTIONS_MAX: usize = 8192;
/// Maximum of those that have carried no valid credential: each may make the manager read a request's head and body.
const UNAUTHENTICATED_MAX: usize = 512;
/// Limit for the arrival of a request's head, counted from the end of the request before. It closes
/// idle and stuck connections.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of the largest request head, and of the read buffer.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// The kernel closes the connection of a peer that acknowledges no data for this long. A client
/// that stops reading must not occupy a connection.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a failed accept, as when file descriptors are used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Pause after changes were passed on: things that change often cost a message per pause.
const PUBLISH_PAUSE: Duration = Duration::from_millis(20);
/// Shortest pause between two sweeps; a brick that died is noticed this much later at most.
const SWEEP_PAUSE_MIN: Duration = Duration::from_millis(200);
/// Time that stopping waits for requests in progress.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The limits of connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Maximum of concurrent connections.
    pub connections_max: usize,
    /// Limit for the arrival of a request's head.
    pub head_timeout: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> ConnectionLimits {
        ConnectionLimits {
            connections_max: CONNECTIONS_MAX,
            head_timeout: HEAD_TIMEOUT,
        }
    }
}

/// The configuration of a manager.
pub struct ManagerConfig {
    /// The listen address, as `host:port`; port 0 takes a free one.
    pub listen: String,
    /// The file of the store; created if missing.
    pub store: PathBuf,
    /// The cluster's key.
    pub key: Key,
    /// The connector to bricks.
    pub bricks: Arc<dyn BrickConnector>,
    /// The names under which browsers may reach the manager, besides IP addresses and `localhost`.
    pub allowed_hosts: Vec<String>,
    /// The way of the first admin token to its owner.
    pub admin_token: AdminTokenOutput,
    /// The settings.
    pub settings: ManagerSettings,
    /// The source of time.
    pub clock: Arc<dyn Clock>,
    /// The limits of connections.
    pub limits: ConnectionLimits,
    /// Called once when the manager should end, because only the next process can use its store.
    pub on_end: Option<EndHook>,
}

/// See [`ManagerConfig::on_end`].
pub type EndHook = Box<dyn FnOnce() + Send>;

impl ManagerConfig {
    /// A manager with default settings.
    #[must_use]
    pub fn new(
        listen: &str,
        store: PathBuf,
        key: Key,
        bricks: Arc<dyn BrickConnector>,
    ) -> ManagerConfig {
        ManagerConfig {
            listen: listen.to_owned(),
            store,
            key,
            bricks,
            allowed_hosts: vec![],
            admin_token: AdminTokenOutput::default(),
            settings: ManagerSettings::default(),
            clock: Arc::new(SystemClock::new()),
            limits: ConnectionLimits::default(),
            on_end: None,
        }
    }
}

/// The reason why a manager does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address is invalid.
    #[error("cannot listen on '{listen}': {cause}; write host:port, as in 127.0.0.1:7070")]
    BadAddress {
        /// The configured address.
        listen: String,
        /// The error of the system.
        cause: io::Error,
    },
    /// Another process listens on the address.
    #[error("{0} is in use; stop what listens there, or choose another port with --listen")]
    InUse(SocketAddr),
    /// The address is not allowed, or belongs to another machine.
    #[error("cannot listen on {address}: {cause}; choose another address with --listen")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The error of the system.
        cause: io::Error,
    },
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The system gives no thread or no event queue.
    #[error("cannot start the manager: {0}")]
    Start(io::Error),
}

/// A running manager; dropping it stops it.
pub struct ManagerHandle {
    address: SocketAddr,
    manager: Arc<Manager>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ManagerHandle {
    /// The address that the server listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of the manager.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The manager behind the server, for calls without HTTP.
    #[must_use]
    pub fn manager(&self) -> &Manager {
        &self.manager
    }

    /// Stops the manager and waits for its end.
    pub fn stop(mut self) {
        self.stop_and_join();
    }

    fn stop_and_join(&mut self) {
        if let Some(stop) = self.stop.take() {
            // An error means that the thread has already ended.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the manager's thread panicked");
        }
    }
}

impl Drop for ManagerHandle {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}

/// Starts a manager.
///
/// # Errors
/// When the address or the store cannot be used.
pub fn serve(config: ManagerConfig) -> Result<ManagerHandle, ServeError> {
    let listener = bind(&config.listen)?;
    let address = listener.local_addr().map_err(ServeError::Start)?;
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "the API is not encrypted: an eavesdropper on its traffic can steal the token");
    }
    let store = Store::open(&config.store)?;
    let manager = Manager::new(store, config.bricks, config.clock, config.settings)?;
    let manager = Arc::new(manager);
    create_at_first_start(&manager, &config.store, config.admin_token);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Besides requests: the sweep, the publisher of changes, and the schedules.
        .max_blocking_threads(REQUESTS_MAX + 3)
        .thread_name("pagemesh-manager")
        .build()
        .map_err(ServeError::Start)?;
    let listener = {
        let _inside = runtime.enter();
        tokio::net::TcpListener::from_std(listener).map_err(ServeError::Start)?
    };
    let hosts = AllowedHosts::new(config.allowed_hosts);
    let (stop, stopped) = oneshot::channel();
    let api = ApiState::new(manager.clone(), config.key, hosts);
    let streams = api.watch_streams();
    let router = api.router();
    let housekeeper = manager.clone();
    let publisher = manager.clone();
    let scheduler = manager.clone();
    let thread = std::thread::Builder::new()
        .name("pagemesh-manager".into())
        .spawn(move || {
            runtime.spawn(publish_changes(publisher));
            runtime.spawn(run_maintenance(housekeeper, config.on_end));
            runtime.spawn(run_schedules(scheduler));
            runtime.block_on(accept_connections(
                listener,
                router,
                streams,
                config.limits,
                stopped,
            ));
            runtime.shutdown_timeout(STOP_TIMEOUT);
        })
        .map_err(ServeError::Start)?;
    Ok(ManagerHandle {
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

async fn accept_connections(
    listener: tokio::net::TcpListener,
    router: Router,
    streams: WatchStreams,
    limits: ConnectionLimits,
    mut stopped: oneshot::Receiver<()>,
) {
    let slots = ConnectionSlots::new(limits.connections_max, UNAUTHENTICATED_MAX);
    let graceful = GracefulShutdown::new();
    loop {
        let next = async {
            let (stream, peer) = listener.accept().await?;
            let peer = PeerAddress(peer.ip());
            Ok::<_, io::Error>((stream, peer, slots.take(peer).await))
        };
        let accepted = tokio::select! {
            _ = &mut stopped => break,
            accepted = next => accepted,
        };
        match accepted {
            Ok((stream, peer, Some(slot))) => {
                let head_timeout = limits.head_timeout;
                serve_connection(stream, peer, router.clone(), slot, head_timeout, &graceful);
            }
            Ok((_, _, None)) => break,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    streams.stop();
    let ended = tokio::time::timeout(STOP_TIMEOUT, graceful.shutdown());
    if ended.await.is_err() {
        tracing::warn!("requests in progress were cut off");
    }
}

fn serve_connection(
    stream: TcpStream,
    peer: PeerAddress,
    router: Router,
    slot: ConnectionSlot,
    head_timeout: Duration,
    graceful: &GracefulShutdown,
) {
    // Small answers must not wait for acknowledgements; a failure costs only time.
    let _ = stream.set_nodelay(true);
    if let Err(error) = SockRef::from(&stream).set_tcp_user_timeout(Some(SEND_TIMEOUT)) {
        tracing::debug!(%error, "cannot limit how long answers wait");
    }
    let router = TowerToHyperService::new(router);
    let of_requests = (slot.cut.clone(), slot.mark.clone());
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        let (cut, mark) = of_requests.clone();
        request.extensions_mut().insert(cut);
        request.extensions_mut().insert(mark);
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_timeout)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let connection = graceful.watch(connection);
    tokio::spawn(async move {
        tokio::select! {
            ended = connection => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a connection ended");
                }
            }
            () = slot.cut.wait() => tracing::debug!("a connection was cut"),
        }
        drop(slot);
    });
}

/// Passes changes on to watching clients. Without clients it sleeps.
async fn publish_changes(manager: Arc<Manager>) {
    loop {
        let changed = manager.feed.wake.notified();
        if manager.feed.is_watched() {
            let pause = manager.settings.watch.compare_every;
            let _ = tokio::time::timeout(pause, changed).await;
        } else {
            changed.await;
        }
        let publisher = manager.clone();
        let published = tokio::task::spawn_blocking(move || publisher.publish_changes());
        if let Err(error) = published.await {
            tracing::error!(%error, "changes were not passed on");
        }
        tokio::time::sleep(PUBLISH_PAUSE).await;
    }
}

/// Carries out schedules. A volume that is slow to cut delays others, and not the sweep.
async fn run_schedules(manager: Arc<Manager>) {
    loop {
        tokio::time::sleep(SCHEDULE_INTERVAL).await;
        let runner = manager.clone();
        let ran = tokio::task::spawn_blocking(move || runner.run_schedules());
        if let Err(error) = ran.await {
            tracing::error!(%error, "schedules were not carried out");
        }
    }
}

async fn run_maintenance(manager: Arc<Manager>, mut on_end: Option<EndHook>) {
    let mut pause = SWEEP_INTERVAL;
    loop {
        // This returns early only when a brick has returned.
        let returned = manager.brick_returned.notified();
        let _ = tokio::time::timeout(pause, returned).await;
        let sweeper = manager.clone();
        let swept = tokio::task::spawn_blocking(move || {
            sweeper.sweep();
            (sweeper.next_loss_in(), sweeper.store.can_reopen())
        });
        pause = match swept.await {
            Ok((loss, can_reopen)) => {
                if let Some(end) = on_end.take_if(|_| can_reopen) {
                    end();
                }
                loss.map_or(SWEEP_INTERVAL, |loss| {
                    loss.clamp(SWEEP_PAUSE_MIN, SWEEP_INTERVAL)
                })
            }
            Err(error) => {
                tracing::error!(%error, "maintenance was not finished");
                SWEEP_INTERVAL
            }
        };
    }
}
