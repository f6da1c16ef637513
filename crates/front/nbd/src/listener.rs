//! The place where clients connect: a unix socket or a TCP address. What
//! [`pagemesh_base::socket`] says of unix sockets holds here.

use pagemesh_base::socket::{SocketError, UnixSocket};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A unix socket at this path.
    Unix(PathBuf),
    /// A TCP address; port 0 lets the system choose one.
    Tcp(SocketAddr),
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix socket {}", path.display()),
            Self::Tcp(address) => write!(f, "address {address}"),
        }
    }
}

/// Why a server cannot listen or go on.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Somebody listens there already.
    #[error("{0} is in use by a running server; stop it or choose another place")]
    InUse(Listen),
    /// A file is in the way.
    #[error("{0} exists and is not a socket; remove it or choose another path")]
    NotASocket(PathBuf),
    /// The path does not fit into a socket address.
    #[error("the socket path {0} is too long; use at most 107 bytes")]
    PathTooLong(PathBuf),
    /// Anything else.
    #[error("cannot {doing} {place}: {cause}")]
    System {
        /// What failed.
        doing: &'static str,
        /// Where.
        place: Listen,
        /// Why.
        cause: std::io::Error,
    },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: ListenSocket,
    place: Listen,
}

#[derive(Debug)]
enum ListenSocket {
    Unix(UnixSocket),
    Tcp(TcpListener),
}

impl Listener {
    pub(crate) fn bind(place: &Listen) -> Result<Self, ServerError> {
        match place {
            Listen::Unix(path) => {
                let socket = UnixSocket::bind(path).map_err(|cause| bind_error(cause, place))?;
                Ok(Listener {
                    socket: ListenSocket::Unix(socket),
                    place: place.clone(),
                })
            }
            Listen::Tcp(address) => bind_tcp(*address, place),
        }
    }

    /// Where it listens, with the port that the system chose.
    pub(crate) fn place(&self) -> &Listen {
        &self.place
    }

    /// The next client, if one waits.
    pub(crate) fn accept(&self) -> Result<OwnedFd, Errno> {
        let socket = accept_with(self.as_fd(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        if matches!(self.place, Listen::Tcp(_)) {
            // Neither is worth losing the client for.
            let _ = sockopt::set_tcp_nodelay(&socket, true);
            let _ = sockopt::set_socket_keepalive(&socket, true);
        }
        Ok(socket)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            ListenSocket::Unix(socket) => socket.as_fd(),
            ListenSocket::Tcp(socket) => socket.as_fd(),
        }
    }
}

fn bind_error(cause: SocketError, place: &Listen) -> ServerError {
    match cause {
        SocketError::InUse(_) => ServerError::InUse(place.clone()),
        SocketError::NotASocket(path) => ServerError::NotASocket(path),
        SocketError::PathTooLong(path) => ServerError::PathTooLong(path),
        SocketError::System { doing, cause, .. } => ServerError::System {
            doing,
            place: place.clone(),
            cause,
        },
    }
}

fn bind_tcp(address: SocketAddr, place: &Listen) -> Result<Listener, ServerError> {
    let failed = |cause: std::io::Error| match cause.kind() {
        std::io::ErrorKind::AddrInUse => ServerError::InUse(place.clone()),
        _ => ServerError::System {
            doing: "listen on",
            place: place.clone(),
            cause,
        },
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok(Listener {
        socket: ListenSocket::Tcp(listener),
        place: Listen::Tcp(bound),
    })
}
