//! A connected socket, TCP or unix: bytes in, bytes out, and waiting.
//!
//! Invariants: only calls with a deadline block, and not beyond it. A peer that is gone is an
//! error, never a signal.

use crate::limits::{KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES, USER_TIMEOUT_MS};
use crate::wire::ReceiveResult;
use pagemesh_base::move_fd_high::move_fd_high;
use pagemesh_base::wait::until_ready;
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType, recv, send, sendmsg, shutdown, socket_with, sockopt,
};
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

/// A connected socket.
#[derive(Debug)]
pub struct Stream {
    fd: OwnedFd,
}

/// The flags that poll reports when the peer sends no more. Only `RDHUP` must be requested; poll
/// reports the others in any case.
pub(crate) const HANGUP_FLAGS: PollFlags =
    PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR);

impl Stream {
    /// Wraps a TCP connection: no send delays, and a dead peer is detected.
    pub(crate) fn tcp(socket: TcpStream) -> io::Result<Stream> {
        socket.set_nonblocking(true)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_tcp_user_timeout(&socket, USER_TIMEOUT_MS)?;
        sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_PROBES)?;
        sockopt::set_socket_keepalive(&socket, true)?;
        Ok(Stream { fd: socket.into() })
    }

    /// Wraps a connected unix socket. The kernel reports the death of its peer.
    pub fn unix(fd: OwnedFd) -> Stream {
        Stream { fd }
    }

    /// Connects to a unix socket without blocking: a server with a full accept queue counts as unreachable.
    pub(crate) fn connect_unix(path: &Path) -> io::Result<Stream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let socket = move_fd_high(socket);
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Stream::unix(socket))
    }

    /// Receives once into the spare capacity of a vector.
    pub(crate) fn receive(&self, into: &mut Vec<u8>) -> io::Result<ReceiveResult> {
        let room = into.capacity() - into.len();
        debug_assert!(room > 0, "no room to receive into");
        loop {
            return match recv(&self.fd, spare_capacity(into), RecvFlags::DONTWAIT) {
                Ok((_, 0)) => Ok(ReceiveResult::End),
                Ok((_, len)) => Ok(ReceiveResult::Bytes {
                    drained: len < room,
                }),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Ok(ReceiveResult::WouldBlock),
                Err(cause) => Err(cause.into()),
            };
        }
    }

    /// Sends once; none if the socket is full.
    pub(crate) fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            let sent = match pieces {
                [one] => send(&self.fd, one, flags),
                _ => sendmsg(&self.fd, pieces, &mut SendAncillaryBuffer::default(), flags),
            };
            return match sent {
                Ok(len) => Ok(Some(len)),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Ok(None),
                Err(cause) => Err(cause.into()),
            };
        }
    }

    /// Receives exactly `N` bytes.
    pub(crate) fn receive_exact<const N: usize>(&self, until: Instant) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        let mut at = 0;
        while at < N {
            match recv(&self.fd, &mut bytes[at..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((len, _)) => at += len,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, until)?,
                Err(cause) => return Err(cause.into()),
            }
        }
        Ok(bytes)
    }

    /// Sends all bytes.
    pub(crate) fn send_all(&self, mut bytes: &[u8], until: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.send(&[IoSlice::new(bytes)])? {
                Some(len) => bytes = &bytes[len..],
                None => self.wait(PollFlags::OUT, until)?,
            }
        }
        Ok(())
    }

    /// Waits until the socket is ready for something.
    pub(crate) fn wait(&self, flags: PollFlags, until: Instant) -> io::Result<()> {
        let mut fds = [PollFd::new(&self.fd, flags)];
        if !until_ready(&mut fds, Some(until))? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }

    /// Whether the peer has closed its end.
    pub(crate) fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        // An error of poll, or a signal, proves nothing about the peer; the next receive does.
        let _ = until_ready(&mut fds, Some(Instant::now()));
        fds[0].revents().intersects(HANGUP_FLAGS)
    }

    /// Closes the connection in both directions. The socket resets the peer when it is dropped,
    /// which discards the bytes that the kernel has not sent yet. Otherwise a peer that reads again
    /// after a long time would execute them, and see only then that this end is gone.
    pub fn close(&self) {
        // A socket that does not support the option discards nothing.
        let _ = sockopt::set_socket_linger(&self.fd, Some(std::time::Duration::ZERO));
        // Fails only if the connection has ended already.
        let _ = shutdown(&self.fd, Shutdown::Both);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
