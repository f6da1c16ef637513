//! The place where clients connect: a unix socket or a TCP address. The rules of
//! [`pagemesh_base::socket`] hold for unix sockets here.

use pagemesh_base::socket::{SocketError, UnixSocket};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// The address that a server listens at.
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
    /// Another process listens there already.
    #[error("{0} is in use by a running server; stop it or choose another place")]
    InUse(Listen),
    /// The path holds a file that is not a socket.
    #[error("{0} exists and is not a socket; remove it or choose another path")]
    NotASocket(PathBuf),
    /// The path does not fit into a socket address.
    #[error("the socket path {0} is too long; use at most 107 bytes")]
    PathTooLong(PathBuf),
    /// Any other error.
    #[error("cannot {doing} {place}: {cause}")]
    System {
        /// The failed action.
        doing: &'static str,
        /// The address.
        place: Listen,
        /// The cause.
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

    /// The address, with the port that the system chose.
    pub(crate) fn place(&self) -> &Listen {
        &self.place
    }

    /// The next client, if one waits.
    pub(crate) fn accept(&self) -> Result<OwnedFd, Errno> {
        let socket = accept_with(self.as_fd(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        if matches!(self.place, Listen::Tcp(_)) {
            // A failure here is no reason to lose the client.
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
