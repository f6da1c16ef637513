//! The peer of a unix socket, as the kernel reports it.

use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, geteuid};
use std::io;

/// A process at the time when it connected or began to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// None: a process of a pid namespace that is not visible from this one, as the machine's is
    /// from a container.
    pub pid: Option<Pid>,
    /// The user of the process.
    pub uid: u32,
}

impl PeerCredentials {
    /// Whether the process belongs to this process's user, or to root: any process can bind any
    /// abstract name.
    #[must_use]
    pub fn is_trusted(&self) -> bool {
        self.uid == 0 || self.uid == geteuid().as_raw()
    }
}

/// Connects to the listener of a name in the abstract namespace, unix(7). The socket does not
/// block.
///
/// # Errors
/// When no process listens there or its queue is full, or the error of the system.
pub fn connect_abstract(kind: SocketType, name: &str) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    connect(&socket, &address)?;
    Ok(socket)
}

/// The process at the other end. `rustix` has the same function, but its type cannot represent a
/// process without a pid in this namespace.
///
/// # Errors
/// When it is no unix socket.
pub fn peer_credentials(socket: impl AsFd) -> io::Result<PeerCredentials> {
    let mut found = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is borrowed, and the kernel writes at most `len` bytes to
    // `found`, which may have any value.
    #[allow(unsafe_code)]
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(PeerCredentials {
        pid: Pid::from_raw(found.pid),
        uid: found.uid,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_pair_peer_is_this_process() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let found = peer_credentials(&one).expect("a peer");
        assert_eq!(found.pid, Some(rustix::process::getpid()));
        assert_eq!(found.uid, rustix::process::geteuid().as_raw());
        let file = tempfile::tempfile().expect("a file");
        assert!(peer_credentials(&file).is_err());
    }
}
