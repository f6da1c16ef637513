//! The server's side: a listener, and a thread for each connection.
//!
//! Invariants: connections are counted. Unauthenticated ones, which have not proven the key, are
//! counted separately and have a time limit. A stop closes the listener, ends all connections and
//! waits, for a limited time, until their handlers are dropped.

use super::connect::nonce;
use crate::acceptor::{AcceptedConnections, Acceptor};
use crate::auth::{self, AuthError, HandshakeResult, HelloResponse, Purpose, Versions};
use crate::connection_limiter::{ConnectionLimiter, ConnectionSlot};
use crate::limits::{
    CONNECTIONS_MAX, CONTROL_CONNECTIONS_MAX, HANDSHAKE_LIMIT, SPIN_US_MAX, STOP_LIMIT,
    UNAUTHENTICATED_MAX,
};
use crate::serve::Connection;
use crate::service::{PeerInfo, Service};
use crate::stream::Stream;
use pagemesh_base::key::Key;
use pagemesh_base::slice::SliceError;
use pagemesh_base::socket::{SocketError, UnixSocket};
use rustix::net::{SocketFlags, acceptfrom_with};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Options of a server.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// The most authenticated connections at once.
    pub connections_max: usize,
    /// Microseconds that a thread polls for the next request before it sleeps, if polling has paid
    /// lately; zero for never.
    pub spin_us_max: u32,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            connections_max: CONNECTIONS_MAX,
            spin_us_max: SPIN_US_MAX,
        }
    }
}

impl ServerOptions {
    /// Options for a pool with so many sessions: each can have a connection.
    #[must_use]
    pub fn for_sessions(sessions: u32) -> ServerOptions {
        let wanted = sessions as usize + CONTROL_CONNECTIONS_MAX;
        ServerOptions {
            connections_max: wanted.max(CONNECTIONS_MAX),
            ..ServerOptions::default()
        }
    }
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {cause}; choose another address with --listen")]
pub struct BindError {
    /// The address.
    pub address: SocketAddr,
    /// The error of the system.
    pub cause: io::Error,
}

/// A stop that did not end everything in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} connections did not end within {limit} s; they end with the process",
    limit = STOP_LIMIT.as_secs())]
pub struct StopTimeout(
    /// The number of connections.
    pub usize,
);

/// A brick's listener; stopped when dropped.
pub struct TcpServer {
    address: SocketAddr,
    limiter: Arc<ConnectionLimiter>,
    state: Arc<ServerState>,
    acceptor: Acceptor,
    /// Accepts at a unix socket, for clients on this machine.
    local_acceptor: Option<Acceptor>,
}

/// Why a server does not serve a unix socket.
#[derive(Debug, thiserror::Error)]
pub enum LocalSocketError {
    /// The path cannot be used.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The system refused another resource.
    #[error("no thread accepts connections of a unix socket: {0}")]
    System(#[from] io::Error),
}

/// The state that all threads of a server share.
struct ServerState {
    key: Key,
    service: Arc<dyn Service>,
    options: ServerOptions,
    limiter: Arc<ConnectionLimiter>,
}

/// Why a connection was not authenticated.
#[derive(Debug, thiserror::Error)]
enum HandshakeError {
    #[error("the socket failed: {0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Auth(#[from] AuthError),
}

impl TcpServer {
    /// Listens on an address; port 0 takes a free one.
    ///
    /// # Errors
    /// When the address is in use or not of this machine.
    pub fn bind(
        address: SocketAddr,
        key: Key,
        service: Arc<dyn Service>,
        options: ServerOptions,
    ) -> Result<TcpServer, BindError> {
        let failed = |cause| BindError { address, cause };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let local = listener.local_addr().map_err(failed)?;
        let limiter =
            ConnectionLimiter::new(UNAUTHENTICATED_MAX, options.connections_max).map_err(failed)?;
        let limiter = Arc::new(limiter);
        let state = ServerState {
            key,
            service,
            options,
            limiter: limiter.clone(),
        };
        let state = Arc::new(state);
        let acceptor = Acceptor::start("accept", listener, &limiter, state.clone());
        Ok(TcpServer {
            address: local,
            acceptor: acceptor.map_err(failed)?,
            limiter,
            state,
            local_acceptor: None,
        })
    }

    /// Serves the same at a unix socket, with the same proof of the key. A client on this machine needs less time for
    /// each request, and a quarter of the time for large ones.
    ///
    /// # Errors
    /// When another process serves it, or the system refuses.
    pub fn serve_local(&mut self, path: &Path) -> Result<(), LocalSocketError> {
        let socket = UnixSocket::bind(path)?;
        let local = Arc::new(LocalConnections(self.state.clone()));
        let acceptor = Acceptor::start("accept-local", socket, &self.limiter, local)?;
        self.local_acceptor = Some(acceptor);
        Ok(())
    }

    /// The address that it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The number of authenticated connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.limiter.authenticated()
    }

    /// Ends all connections. Their clients get no reply to requests in flight.
    ///
    /// # Errors
    /// When some did not end in time.
    pub fn stop(mut self) -> Result<(), StopTimeout> {
        self.end()
    }

    fn end(&mut self) -> Result<(), StopTimeout> {
        // One stop ends the connections of both.
        let left = self.acceptor.stop();
        let of_local = self.local_acceptor.as_mut().map_or(0, Acceptor::stop);
        match left.max(of_local) {
            0 => Ok(()),
            left => Err(StopTimeout(left)),
        }
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        if let Err(cause) = self.end() {
            tracing::warn!(%cause, "a server was dropped");
        }
    }
}

impl AcceptedConnections for ServerState {
    type Listener = TcpListener;
    type Connection = (TcpStream, SocketAddr);

    fn accept(&self, listener: &TcpListener) -> io::Result<((TcpStream, SocketAddr), String)> {
        let (socket, address) = listener.accept()?;
        Ok(((socket, address), format!("tcp {address}")))
    }

    fn serve(&self, (socket, address): (TcpStream, SocketAddr), slot: ConnectionSlot) {
        match Stream::tcp(socket) {
            Ok(stream) => self.serve_stream(slot, stream, Some(address)),
            Err(cause) => tracing::debug!(%address, %cause, "turned away"),
        }
    }
}

/// The connections of a server's unix socket.
struct LocalConnections(Arc<ServerState>);

impl AcceptedConnections for LocalConnections {
    type Listener = UnixSocket;
    type Connection = OwnedFd;

    fn accept(&self, socket: &UnixSocket) -> io::Result<(OwnedFd, String)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Ok((acceptfrom_with(socket, flags)?.0, "local".into()))
    }

    fn serve(&self, socket: OwnedFd, slot: ConnectionSlot) {
        self.0.serve_stream(slot, Stream::unix(socket), None);
    }
}

impl ServerState {
    /// The stream is closed before the slot is free: a stop waits for free slots, and promises closed connections.
    fn serve_stream(&self, mut slot: ConnectionSlot, stream: Stream, address: Option<SocketAddr>) {
        match self.handshake(&stream, &mut slot) {
            Ok(agreed) => self.serve_requests(&stream, agreed, address),
            Err(cause) => tracing::debug!(?address, %cause, "turned away"),
        }
        drop(stream);
        drop(slot);
    }

    /// The server's side of the handshake.
    fn handshake(
        &self,
        stream: &Stream,
        slot: &mut ConnectionSlot,
    ) -> Result<HandshakeResult, HandshakeError> {
        let until = Instant::now() + HANDSHAKE_LIMIT;
        let hello = stream.receive_exact(until)?;
        let identity = self.service.brick().0;
        let welcome = auth::ServerHandshake::accept_hello(
            &self.key,
            Versions::OURS,
            identity,
            nonce()?,
            &hello,
        )?;
        let server = match welcome {
            HelloResponse::Challenge(server, challenge) => {
                stream.send_all(&challenge, until)?;
                server
            }
            HelloResponse::Refuse(refusal, cause) => {
                stream.send_all(&refusal, until)?;
                return Err(cause.into());
            }
        };
        let proof = stream.receive_exact(until)?;
        let admitted = server
            .check(&proof)
            .and_then(|agreed| slot.promote().then_some(agreed).ok_or(AuthError::Busy));
        let verdict = auth::verdict(admitted.as_ref().map(drop));
        stream.send_all(&verdict, until)?;
        Ok(admitted?)
    }

    fn serve_requests(
        &self,
        stream: &Stream,
        agreed: HandshakeResult,
        address: Option<SocketAddr>,
    ) {
        let peer = PeerInfo {
            address,
            identity: agreed.identity,
        };
        let mut open = || match agreed.purpose {
            Purpose::Session => self.service.open(peer),
            Purpose::Control => Err(SliceError::Refused(
                "a control connection has no session; connect a leg".into(),
            )),
        };
        let control = self.service.control();
        let spin_us_max = self.options.spin_us_max;
        let connection =
            Connection::new(stream, control, self.limiter.stop(), &mut open, spin_us_max);
        if let Err(cause) = connection.run() {
            tracing::warn!(?address, %cause, "a connection broke");
        }
    }
}
