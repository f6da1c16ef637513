//! Connections of a process to a mount.
//!
//! A process reaches a mount by the name of its socket. In another network namespace that name
//! is not there; then a file of the mount that the process has open is the way
//! ([`contact`](pagemesh_base::contact)). Further connections go by the first one, and sockets
//! of bricks come from the mount: a container sees neither.

use super::ANSWER_MAX;
use crate::owned;
use crate::wire::{self, Answer, Question};
use pagemesh_base::aside::aside;
use pagemesh_base::contact;
use pagemesh_base::mounts::{self, Known};
use pagemesh_base::peer::peer;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socketpair, sockopt};
use std::fs::File as SystemFile;
use std::io;
use std::time::Duration;

/// A connection to a mount.
pub(super) struct Link(OwnedFd);

/// How a process reaches a mount.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// By the name of the mount's socket.
    Name,
    /// By a file of the mount, and then by the first connection: neither the name nor the paths of
    /// bricks' sockets may be visible.
    File,
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        owned::remove(self.0.as_raw_fd());
    }
}

/// The process is being copied. Nothing that is asked of the system or a mount says so.
pub(super) const COPYING: Errno = Errno::BUSY;

pub(super) fn is_copying(cause: &io::Error) -> bool {
    cause.raw_os_error() == Some(COPYING.raw_os_error())
}

/// Whether nobody of this user or root listens under a mount's name in this network namespace.
fn is_hidden(cause: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
    matches!(
        cause.kind(),
        ConnectionRefused | NotFound | PermissionDenied
    )
}

/// Whether this user or root serves a mount of pagemesh with this device number. Another user's
/// process must not get at this one's memory.
fn is_trusted_mount(device: &str) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let is_it = |known: &Known| {
        let is_trusted = known.user.is_some_and(|user| user == 0 || user == own);
        known.device == device && is_trusted
    };
    mounts::all().unwrap_or_default().iter().any(is_it)
}

/// A mount that does not know the request, or lets no process reach its files, is as good as
/// none.
fn no_mount(cause: io::Error) -> io::Error {
    match cause.raw_os_error() == Some(Errno::NOTTY.raw_os_error()) {
        true => io::ErrorKind::ConnectionRefused.into(),
        false => cause,
    }
}

/// A socket of this process, and the other end of it.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (own, other) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
    let own = aside(own);
    sockopt::set_socket_timeout(&own, sockopt::Timeout::Send, Some(ANSWER_MAX))?;
    Ok((own, other))
}

impl Link {
    /// Not while the process is copied, which may last as long as a command of its: see
    /// [`is_copying`].
    pub(super) fn connect(device: u64, file: RawFd) -> io::Result<(Link, Way)> {
        let _making = owned::Making::begin().ok_or(COPYING)?;
        Link::reach(device, file)
    }

    /// The same in any case. A child that is copied just then keeps the connection.
    pub(super) fn reach(device: u64, file: RawFd) -> io::Result<(Link, Way)> {
        let name = device_name(device);
        match Link::by_name(&name) {
            Err(cause) if is_hidden(&cause) && is_trusted_mount(&name) => {
                let offer = |socket: BorrowedFd<'_>| contact::offer((file, device), socket);
                let link = Link::by(|socket| offer(socket).map_err(no_mount))?;
                Ok((link, Way::File))
            }
            reached => Ok((reached?, Way::Name)),
        }
    }

    pub(super) fn by_name(device: &str) -> io::Result<Link> {
        let socket = wire::socket()?;
        // A mount that accepts nobody is waited for as long as one that does not answer.
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(ANSWER_MAX))?;
        connect(&socket, &wire::address(device)?)?;
        // Anybody can listen under a name of this kind.
        if !peer(&socket)?.is_trusted() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Link::over(socket)
    }

    /// By a socket pair whose other end the mount gets.
    fn by(give: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<Link> {
        let (socket, other) = pair()?;
        give(other.as_fd())?;
        Link::over(socket)
    }

    /// Another connection to the mount of this one.
    pub(super) fn another(&self) -> io::Result<Link> {
        let question = Question::Connect.encode();
        Link::by(|socket| wire::send(self.0.as_fd(), &question, Some(socket)))
    }

    fn over(socket: OwnedFd) -> io::Result<Link> {
        owned::add(socket.as_raw_fd());
        let link = Link(socket);
        link.wait_for(Some(ANSWER_MAX))?;
        Ok(link)
    }

    /// How long an answer is waited for from now on; none: as long as the mount is there.
    pub(super) fn wait_for(&self, limit: Option<Duration>) -> io::Result<()> {
        Ok(sockopt::set_socket_timeout(
            &self.0,
            sockopt::Timeout::Recv,
            limit,
        )?)
    }

    pub(super) fn ask(&self, question: Question) -> io::Result<(Answer, Option<SystemFile>)> {
        wire::send(self.0.as_fd(), &question.encode(), None)?;
        self.answer()
    }

    pub(super) fn answer(&self) -> io::Result<(Answer, Option<SystemFile>)> {
        let answered = wire::receive(self.0.as_fd())?;
        let (bytes, memory) = answered.ok_or(io::ErrorKind::UnexpectedEof)?;
        let answer = Answer::decode(&bytes).map_err(io::Error::other)?;
        Ok((answer, memory.map(SystemFile::from)))
    }
}

pub(super) fn device_name(device: u64) -> String {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    format!("{major}:{minor}")
}
