//! Connections of a process to a mount.
//!
//! A process reaches a mount by the name of its socket. That name is not visible in another network
//! namespace; there a process connects through a file of the mount that it has open
//! ([`mount_connection`](pagemesh_base::mount_connection)). Further connections go through the
//! first one, and the mount passes the sockets of bricks: a container sees neither.

use super::internal_fds;
use crate::protocol::wire::{self, ClientRequest, MountReply};
use pagemesh_base::mount_connection;
use pagemesh_base::mounts::{self, MountEntry};
use pagemesh_base::move_fd_high::move_fd_high;
use pagemesh_base::peer::peer_credentials;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socketpair, sockopt};
use std::fs::File as SystemFile;
use std::io;
use std::time::Duration;

/// Longest wait for an answer of a mount; the kernel serves meanwhile.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to a mount.
pub(super) struct MountLink(OwnedFd);

/// How a process reaches a mount.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectMethod {
    /// By the name of the mount's socket.
    SocketName,
    /// Through a file of the mount, and then through the first connection: neither the name nor the
    /// paths of the bricks' sockets may be visible.
    OpenFile,
}

impl AsFd for MountLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for MountLink {
    fn drop(&mut self) {
        internal_fds::remove(self.0.as_raw_fd());
    }
}

/// The error of a fork in progress. No system call or mount returns it here.
pub(super) const FORK_IN_PROGRESS: Errno = Errno::BUSY;

pub(super) fn is_fork_in_progress(cause: &io::Error) -> bool {
    cause.raw_os_error() == Some(FORK_IN_PROGRESS.raw_os_error())
}

/// Whether no process of this user or root listens under a mount's name in this network namespace.
fn is_name_unreachable(cause: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
    matches!(
        cause.kind(),
        ConnectionRefused | NotFound | PermissionDenied
    )
}

/// Whether this user or root serves a pagemesh mount with this device number. Another user's
/// process must not get at this one's memory.
fn is_trusted_mount(device: &str) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let is_it = |known: &MountEntry| {
        let is_trusted = known.user.is_some_and(|user| user == 0 || user == own);
        known.device == device && is_trusted
    };
    mounts::list_mounts().unwrap_or_default().iter().any(is_it)
}

/// Maps the error of a mount that does not know the request, or admits no process, to the error
/// of a missing mount.
fn refused_as_no_mount(cause: io::Error) -> io::Error {
    if cause.raw_os_error() == Some(Errno::NOTTY.raw_os_error()) {
        io::ErrorKind::ConnectionRefused.into()
    } else {
        cause
    }
}

/// A socket of this process, and the other end of it.
fn new_socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (own, other) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
    let own = move_fd_high(own);
    sockopt::set_socket_timeout(&own, sockopt::Timeout::Send, Some(REPLY_TIMEOUT))?;
    Ok((own, other))
}

impl MountLink {
    /// Connects, except during a fork, which may last as long as the command that the program waits
    /// for: see [`is_fork_in_progress`].
    pub(super) fn connect(device: u64, file: RawFd) -> io::Result<(MountLink, ConnectMethod)> {
        let _making = internal_fds::FdCreation::begin().ok_or(FORK_IN_PROGRESS)?;
        MountLink::connect_regardless(device, file)
    }

    /// As [`MountLink::connect`], also during a fork. A child of that fork keeps the connection.
    pub(super) fn connect_regardless(
        device: u64,
        file: RawFd,
    ) -> io::Result<(MountLink, ConnectMethod)> {
        let name = device_name(device);
        match MountLink::connect_by_name(&name) {
            Err(cause) if is_name_unreachable(&cause) && is_trusted_mount(&name) => {
                let offer =
                    |socket: BorrowedFd<'_>| mount_connection::offer((file, device), socket);
                let link = MountLink::connect_by_socket_pair(|socket| {
                    offer(socket).map_err(refused_as_no_mount)
                })?;
                Ok((link, ConnectMethod::OpenFile))
            }
            reached => Ok((reached?, ConnectMethod::SocketName)),
        }
    }

    pub(super) fn connect_by_name(device: &str) -> io::Result<MountLink> {
        let socket = wire::new_socket()?;
        // A mount that does not accept has the same time-out as one that does not answer.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(REPLY_TIMEOUT))?;
        connect(&socket, &wire::socket_address(device)?)?;
        // Any process can listen under a name of this kind.
        if !peer_credentials(&socket)?.is_trusted() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        MountLink::from_socket(socket)
    }

    /// Connects by a socket pair, and gives the mount its other end.
    fn connect_by_socket_pair(
        give: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<MountLink> {
        let (socket, other) = new_socket_pair()?;
        give(other.as_fd())?;
        MountLink::from_socket(socket)
    }

    /// Another connection to the mount of this link.
    pub(super) fn connect_again(&self) -> io::Result<MountLink> {
        let request = ClientRequest::Connect.encode();
        MountLink::connect_by_socket_pair(|socket| {
            wire::send(self.0.as_fd(), &request, Some(socket))
        })
    }

    fn from_socket(socket: OwnedFd) -> io::Result<MountLink> {
        internal_fds::add(socket.as_raw_fd());
        let link = MountLink(socket);
        link.set_reply_timeout(Some(REPLY_TIMEOUT))?;
        Ok(link)
    }

    /// Sets how long a request waits for its answer; none: as long as the mount is there.
    pub(super) fn set_reply_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        Ok(sockopt::set_socket_timeout(
            &self.0,
            sockopt::Timeout::Recv,
            limit,
        )?)
    }

    pub(super) fn ask(
        &self,
        request: ClientRequest,
    ) -> io::Result<(MountReply, Option<SystemFile>)> {
        wire::send(self.0.as_fd(), &request.encode(), None)?;
        self.receive_reply()
    }

    pub(super) fn receive_reply(&self) -> io::Result<(MountReply, Option<SystemFile>)> {
        let received = wire::receive(self.0.as_fd())?;
        let (bytes, memory) = received.ok_or(io::ErrorKind::UnexpectedEof)?;
        let reply = MountReply::decode(&bytes).map_err(io::Error::other)?;
        Ok((reply, memory.map(SystemFile::from)))
    }
}

/// A device number as the kernel writes it: `major:minor`.
pub(super) fn device_name(device: u64) -> String {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    format!("{major}:{minor}")
}
