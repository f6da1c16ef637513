//! The client's side: it asks for a session and gets the descriptors.

use super::wire::{GRANT_BYTES, GrantHeader, MapProtocolError, hello};
use crate::brick_client::BrickClient;
use crate::limits::{TEXT_BYTES_MAX, Timeouts};
use crate::message::reply::AttachReply;
use crate::stream::Stream;
use crate::tcp::TcpLeg;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::move_fd_high::move_fd_high;
use pagemesh_base::slice::SliceError;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

/// Descriptors of a grant: the pool and its control segment.
const GRANT_FDS: usize = 2;

/// A granted session of a pool, to be opened in this process.
#[derive(Debug)]
pub struct MapGrant {
    /// The pool's identity, as its brick stated it.
    pub brick: BrickId,
    /// The incarnation of the pool.
    pub incarnation: u32,
    /// The session's number.
    pub session: u32,
    /// The pool's file. Its lock is held while a copy of it is open.
    pub pool: OwnedFd,
    /// Bytes to map of the pool's file.
    pub pool_bytes: u64,
    /// The control segment.
    pub control: OwnedFd,
    /// Bytes to map of the control segment.
    pub control_bytes: u64,
    /// Whether the brick knows tier hints, and the marks that they leave in the control segment.
    pub knows_hints: bool,
}

/// The connection that carried a grant. The session ends with it.
pub struct MapLink {
    remote: BrickClient,
    timeouts: Timeouts,
}

#[derive(Debug, thiserror::Error)]
enum GrantError {
    #[error("{0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    NotUnderstood(#[from] MapProtocolError),
    #[error("it granted a session without its memory")]
    NoDescriptors,
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    NoSession(String),
}

/// Asks the brick behind a unix socket for a session.
///
/// # Errors
/// When no process listens there, the brick refuses, or it has another version.
pub fn connect(socket: &Path, timeouts: Timeouts) -> Result<(MapGrant, MapLink), SliceError> {
    try_connect(socket, timeouts).map_err(|cause| {
        let told = format!("the brick at {}: {cause}", socket.display());
        match cause {
            GrantError::Socket(_) => SliceError::Lost(told),
            GrantError::NoSession(_) => SliceError::NoSession(told),
            _ => SliceError::Refused(told),
        }
    })
}

fn try_connect(socket: &Path, timeouts: Timeouts) -> Result<(MapGrant, MapLink), GrantError> {
    let until = Instant::now() + timeouts.handshake;
    let stream = Stream::connect_unix(socket)?;
    stream.send_all(&hello(), until)?;
    let (bytes, fds) = receive_grant(&stream, until)?;
    let header = GrantHeader::decode(&bytes)?;
    if let Some(refusal) = header.refused {
        let reason = receive_reason(&stream, refusal.reason_bytes, until)?;
        return Err(match refusal.no_session {
            true => GrantError::NoSession(reason),
            false => GrantError::Refused(reason),
        });
    }
    let [pool, control] = fds.try_into().map_err(|_| GrantError::NoDescriptors)?;
    let grant = MapGrant {
        brick: header.brick,
        incarnation: header.incarnation,
        session: header.session,
        pool,
        pool_bytes: header.pool_bytes,
        control,
        control_bytes: header.control_bytes,
        knows_hints: header.knows_hints,
    };
    let remote = BrickClient::new(stream, header.brick, timeouts.call);
    let remote = remote
        .with_hints(header.knows_hints)
        .with_snapshots(header.knows_snapshots);
    Ok((grant, MapLink { remote, timeouts }))
}

fn receive_grant(
    stream: &Stream,
    until: Instant,
) -> Result<([u8; GRANT_BYTES], Vec<OwnedFd>), GrantError> {
    let mut bytes = [0; GRANT_BYTES];
    let mut fds = Vec::new();
    let mut at = 0;
    while at < GRANT_BYTES {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(GRANT_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes[at..])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match recvmsg(stream.as_fd(), &mut into, &mut ancillary, flags) {
            Ok(received) if received.bytes == 0 => {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            Ok(received) => at += received.bytes,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => {
                stream.wait(PollFlags::IN, until)?;
                continue;
            }
            Err(cause) => return Err(io::Error::from(cause).into()),
        }
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received.map(move_fd_high));
            }
        }
    }
    Ok((bytes, fds))
}

fn receive_reason(stream: &Stream, len: u32, until: Instant) -> io::Result<String> {
    let mut text = Vec::new();
    for _ in 0..(len as usize).min(TEXT_BYTES_MAX) {
        text.extend(stream.receive_exact::<1>(until)?);
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

impl MapLink {
    /// Attaches a slice. Returns its handle, which is the object's number in the pool; a leg for
    /// the requests that only the owner of the pool can answer; and a descriptor that hangs up when
    /// the owner is gone.
    ///
    /// # Errors
    /// When there is no such slice, it has a newer epoch, or the brick is lost.
    pub fn attach(
        self,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<(AttachReply, TcpLeg, OwnedFd), SliceError> {
        let life = self.remote.as_fd().try_clone_to_owned();
        let life = move_fd_high(life.map_err(|cause| SliceError::Lost(cause.to_string()))?);
        let attached = self.remote.attach(slice, epoch)?;
        let leg = TcpLeg::from_connection(self.remote, attached, self.timeouts);
        Ok((attached, leg, life))
    }
}
