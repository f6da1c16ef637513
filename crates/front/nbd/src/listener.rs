//! The place where clients connect: a unix socket or a TCP address.
//!
//! A unix socket is only for its owner (mode 0600) from its first connection
//! on. A socket file that nobody listens on is replaced; one that is alive,
//! and anything that is not a socket, is left alone and refused. When the
//! listener is dropped its socket file is removed, unless the path has become
//! somebody else's.

use crate::limits::{BACKLOG, PROBE_PAUSE, PROBES};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, RenameFlags, Stat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with, sockopt,
};
use std::ffi::OsString;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

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
    socket: OwnedFd,
    place: Listen,
    /// The socket file.
    file: Option<Identity>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    created: (i64, u64),
}

impl Listener {
    pub(crate) fn bind(place: &Listen) -> Result<Self, ServerError> {
        match place {
            Listen::Unix(path) => bind_unix(path, place),
            Listen::Tcp(address) => bind_tcp(*address, place),
        }
    }

    /// Where it listens, with the port that the system chose.
    pub(crate) fn place(&self) -> &Listen {
        &self.place
    }

    /// The next client, if one waits.
    pub(crate) fn accept(&self) -> Result<OwnedFd, Errno> {
        let socket = accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
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
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let (Listen::Unix(path), Some(file)) = (&self.place, self.file)
            && rustix::fs::lstat(path).is_ok_and(|found| identity(&found) == file)
        {
            let _ = rustix::fs::unlink(path);
        }
    }
}

/// Inode numbers are given out again at once, so the time of creation
/// belongs to the identity; neither a rename nor a change of mode touches it.
fn identity(stat: &Stat) -> Identity {
    Identity {
        device: stat.st_dev,
        inode: stat.st_ino,
        created: (stat.st_mtime, stat.st_mtime_nsec),
    }
}

fn failed(doing: &'static str, place: &Listen) -> impl FnOnce(Errno) -> ServerError {
    let place = place.clone();
    move |errno| ServerError::System {
        doing,
        place,
        cause: errno.into(),
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
        socket: listener.into(),
        place: Listen::Tcp(bound),
        file: None,
    })
}

fn bind_unix(path: &Path, place: &Listen) -> Result<Listener, ServerError> {
    let address =
        SocketAddrUnix::new(path).map_err(|_| ServerError::PathTooLong(path.to_path_buf()))?;
    let socket = unix_socket().map_err(failed("open a socket for", place))?;
    match bind(&socket, &address) {
        Err(Errno::ADDRINUSE) => {
            remove_stale(path, &address, place)?;
            bind(&socket, &address).map_err(|errno| match errno {
                Errno::ADDRINUSE => ServerError::InUse(place.clone()),
                errno => failed("listen on", place)(errno),
            })?;
        }
        bound => bound.map_err(failed("listen on", place))?,
    }
    // Nobody can connect before `listen`, so nobody gets in before this.
    let file = rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)
        .and_then(|()| rustix::fs::lstat(path))
        .map_err(failed("set the mode of", place))?;
    let listener = Listener {
        socket,
        place: place.clone(),
        file: Some(identity(&file)),
    };
    listen(&listener.socket, BACKLOG).map_err(failed("listen on", place))?;
    Ok(listener)
}

fn unix_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes a socket file that nobody listens on.
fn remove_stale(path: &Path, address: &SocketAddrUnix, place: &Listen) -> Result<(), ServerError> {
    let found = match rustix::fs::lstat(path) {
        Err(Errno::NOENT) => return Ok(()),
        found => found.map_err(failed("look at", place))?,
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(ServerError::NotASocket(path.to_path_buf()));
    }
    for probe in 0..PROBES {
        if probe > 0 {
            std::thread::sleep(PROBE_PAUSE);
        }
        let socket = unix_socket().map_err(failed("open a socket for", place))?;
        match connect(&socket, address) {
            Err(Errno::CONNREFUSED) => {}
            Err(Errno::NOENT) => return Ok(()),
            Ok(()) | Err(Errno::AGAIN) => return Err(ServerError::InUse(place.clone())),
            Err(errno) => return Err(failed("find out who listens on", place)(errno)),
        }
    }
    displace(path, &found, place)
}

/// Removes exactly the file that was found dead. Another server may be
/// replacing it too: what is moved aside is put back if it is another.
fn displace(path: &Path, found: &Stat, place: &Listen) -> Result<(), ServerError> {
    let mut aside: OsString = path.into();
    aside.push(format!(".stale-{}", std::process::id()));
    match rustix::fs::rename(path, &aside) {
        Err(Errno::NOENT) => return Ok(()),
        renamed => renamed.map_err(failed("replace the dead", place))?,
    }
    let moved = rustix::fs::lstat(&aside).map_err(failed("look at", place))?;
    if identity(&moved) == identity(found) {
        return rustix::fs::unlink(&aside).map_err(failed("replace the dead", place));
    }
    let cwd = rustix::fs::CWD;
    let _ = rustix::fs::renameat_with(cwd, &aside, cwd, path, RenameFlags::NOREPLACE);
    Err(ServerError::InUse(place.clone()))
}
