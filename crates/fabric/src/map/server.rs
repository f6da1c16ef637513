//! The brick's side: a listening unix socket, and one thread per session.

use super::wire::{GrantHeader, HELLO_BYTES, MapProtocolError, Refusal, check_hello};
use crate::acceptor::{AcceptedConnections, Acceptor};
use crate::connection_limiter::{ConnectionLimiter, ConnectionSlot};
use crate::limits::{HANDSHAKE_LIMIT, MAP_HANDSHAKES_MAX, MAP_SESSIONS_MAX};
use crate::message::reply::truncate_text;
use crate::serve::Connection;
use crate::service::Handler;
use crate::stream::Stream;
use pagemesh_base::layout::BrickId;
use pagemesh_base::peer::peer_credentials;
use pagemesh_base::slice::{BrickControl, SliceError};
use pagemesh_base::socket::UnixSocket;
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, acceptfrom_with, sendmsg,
};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// The process at the other end, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapPeer {
    /// Its process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
}

/// A session that was opened for a client.
pub struct MapSession {
    /// The number of the session.
    pub session: u32,
    /// The incarnation of the pool.
    pub incarnation: u32,
    /// The pool's file, locked.
    pub pool: OwnedFd,
    /// Bytes to map of the pool's file.
    pub pool_bytes: u64,
    /// The control segment.
    pub control: OwnedFd,
    /// Bytes to map of the control segment.
    pub control_bytes: u64,
    /// Answers the requests that only the pool's owner can; dropping it ends the session.
    pub handler: Box<dyn Handler>,
}

/// The interface of a brick to its map socket.
pub trait MapService: Send + Sync {
    /// The brick's identity.
    fn brick(&self) -> BrickId;

    /// Opens a session for a process.
    ///
    /// # Errors
    /// When all sessions are in use, or the pool cannot be shared. The client gets the reason.
    fn grant(&self, peer: MapPeer) -> Result<MapSession, SliceError>;

    /// The control interface, for managers.
    fn control(&self) -> &dyn BrickControl;
}

/// Why a map socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum MapSocketError {
    /// The path cannot be used.
    #[error("cannot serve the map transport (--map): {0}")]
    Socket(#[from] pagemesh_base::socket::SocketError),
    /// The system refused another resource that the server needs.
    #[error("cannot serve the map transport: {0}")]
    System(#[from] io::Error),
}

/// A brick's map socket. It is removed when dropped, unless another server has taken its path.
pub struct MapServer {
    path: PathBuf,
    acceptor: Acceptor,
}

struct MapServerState {
    service: Arc<dyn MapService>,
    uid: u32,
    limiter: Arc<ConnectionLimiter>,
}

#[derive(Debug, thiserror::Error)]
enum MapHandshakeError {
    #[error("the socket failed: {0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    NotUnderstood(#[from] MapProtocolError),
    #[error("{0}")]
    Refused(SliceError),
}

impl MapServer {
    /// Serves a unix socket; one without a server is replaced.
    ///
    /// # Errors
    /// When another process serves it, or the system refuses.
    pub fn bind(path: &Path, service: Arc<dyn MapService>) -> Result<MapServer, MapSocketError> {
        let socket = UnixSocket::bind(path)?;
        let limiter = ConnectionLimiter::new(MAP_HANDSHAKES_MAX, MAP_SESSIONS_MAX)?;
        let state = MapServerState {
            service,
            uid: rustix::process::geteuid().as_raw(),
            limiter: Arc::new(limiter),
        };
        let limiter = state.limiter.clone();
        Ok(MapServer {
            path: path.into(),
            acceptor: Acceptor::start("map-accept", socket, &limiter, Arc::new(state))?,
        })
    }

    /// The path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for MapServer {
    fn drop(&mut self) {
        let left = self.acceptor.stop();
        if left > 0 {
            tracing::warn!(left, "map connections did not end in time");
        }
    }
}

impl AcceptedConnections for MapServerState {
    type Listener = UnixSocket;
    type Connection = OwnedFd;

    fn accept(&self, socket: &UnixSocket) -> io::Result<(OwnedFd, String)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Ok((acceptfrom_with(socket, flags)?.0, "map".into()))
    }

    fn serve(&self, socket: OwnedFd, mut slot: ConnectionSlot) {
        if let Err(cause) = self.serve_client(socket, &mut slot) {
            tracing::debug!(%cause, "refused a map connection");
        }
    }
}

impl MapServerState {
    fn serve_client(
        &self,
        socket: OwnedFd,
        slot: &mut ConnectionSlot,
    ) -> Result<(), MapHandshakeError> {
        let until = Instant::now() + HANDSHAKE_LIMIT;
        let found = peer_credentials(&socket)?;
        // The brick needs the pid to clean up after the session.
        let pid = found.pid.ok_or(io::ErrorKind::PermissionDenied);
        let peer = MapPeer {
            pid: pid.map_err(io::Error::from)?.as_raw_pid().cast_unsigned(),
            uid: found.uid,
        };
        let stream = Stream::unix(socket);
        let hello: [u8; HELLO_BYTES] = stream.receive_exact(until)?;
        let granted = check_hello(&hello)
            .map_err(MapHandshakeError::from)
            .and_then(|()| self.grant(peer, slot).map_err(MapHandshakeError::Refused));
        match granted {
            Ok(granted) => {
                send_grant(&stream, self.service.brick(), &granted)?;
                self.serve_session(&stream, granted.handler, peer);
                Ok(())
            }
            Err(cause) => {
                self.refuse(&stream, &cause, until)?;
                Err(cause)
            }
        }
    }

    fn grant(&self, peer: MapPeer, slot: &mut ConnectionSlot) -> Result<MapSession, SliceError> {
        if peer.uid != self.uid && peer.uid != 0 {
            return Err(SliceError::Refused(format!(
                "user {} may not map this pool; run as user {}, or use the tcp transport",
                peer.uid, self.uid
            )));
        }
        if !slot.promote() {
            return Err(SliceError::NoSession(format!(
                "all {MAP_SESSIONS_MAX} map connections are in use; close some"
            )));
        }
        self.service.grant(peer)
    }

    fn refuse(&self, stream: &Stream, cause: &MapHandshakeError, until: Instant) -> io::Result<()> {
        let text = cause.to_string();
        let reason = truncate_text(&text);
        let header = GrantHeader {
            refused: Some(Refusal {
                no_session: matches!(cause, MapHandshakeError::Refused(SliceError::NoSession(_))),
                reason_bytes: reason.len() as u32,
            }),
            session: 0,
            incarnation: 0,
            brick: self.service.brick(),
            pool_bytes: 0,
            control_bytes: 0,
            knows_hints: true,
            knows_snapshots: true,
        };
        stream.send_all(&header.encode(), until)?;
        stream.send_all(reason.as_bytes(), until)
    }

    fn serve_session(&self, stream: &Stream, handler: Box<dyn Handler>, peer: MapPeer) {
        let control = self.service.control();
        let mut never = || -> Result<Box<dyn Handler>, SliceError> {
            Err(SliceError::Refused(
                "a map connection has one session".into(),
            ))
        };
        // Its messages are rare, so polling for them does not pay.
        let connection = Connection::new(stream, control, self.limiter.stop(), &mut never, 0);
        if let Err(cause) = connection.with_handler(handler).run() {
            tracing::warn!(pid = peer.pid, %cause, "a map connection broke");
        }
    }
}

/// Sends the grant and its descriptors; a new socket always has room for these few bytes.
fn send_grant(stream: &Stream, brick: BrickId, granted: &MapSession) -> io::Result<()> {
    let header = GrantHeader {
        refused: None,
        session: granted.session,
        incarnation: granted.incarnation,
        brick,
        pool_bytes: granted.pool_bytes,
        control_bytes: granted.control_bytes,
        knows_hints: true,
        knows_snapshots: true,
    };
    let bytes = header.encode();
    let fds = [granted.pool.as_fd(), granted.control.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for two descriptors"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = sendmsg(
        stream.as_fd(),
        &[IoSlice::new(&bytes)],
        &mut ancillary,
        flags,
    )?;
    if sent != bytes.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    Ok(())
}
