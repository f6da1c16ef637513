//! Who is at the other end of a unix socket, by the kernel's word.

use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, geteuid};
use std::io;

/// A process, as it was when it connected or began to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// None: of a namespace of processes that is not seen from this one, as that of the
    /// machine is from a container.
    pub pid: Option<Pid>,
    /// Its user.
    pub uid: u32,
}

impl PeerCredentials {
    /// Whether it is of this process's user, or root: anybody can take any name of an address.
    #[must_use]
    pub fn is_trusted(&self) -> bool {
        self.uid == 0 || self.uid == geteuid().as_raw()
    }
}

/// Connects to who listens under a name of the abstract namespace, unix(7), if somebody does and
/// has room for it. The socket does not block.
///
/// # Errors
/// Else, and what the system says.
pub fn connect_abstract(kind: SocketType, name: &str) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    connect(&socket, &address)?;
    Ok(socket)
}

/// The process at the other end. `rustix` has the same, but for processes that have no
/// number here: its type has no room for them.
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
