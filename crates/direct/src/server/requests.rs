//! Answers the requests of a connection, one after the other.
//!
//! Invariants: an answer is sent before the next request is read. A mount that is gone answers
//! nothing: another mount may have its device number, and the client means that one.

use super::ServerShared;
use super::accept::accept_connection;
use super::connection::ClientConnection;
use super::status::RefusalReason;
use crate::protocol::wire::{self, ClientRequest, MountReply};
use pagemesh_base::poison::lock;
use pagemesh_fs::Ino;
use pagemesh_volume::direct_access::DirectSegment;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;

/// Answers requests until the connection ends. `row` is the row that the client has.
pub(super) fn answer_requests(
    shared: &Arc<ServerShared>,
    connection: &Arc<ClientConnection>,
    row: &mut Option<usize>,
) -> io::Result<()> {
    while let Some((bytes, memory)) = wire::receive(connection.socket.as_fd())? {
        let request = ClientRequest::decode(&bytes).map_err(io::Error::other)?;
        if !(shared.is_mounted)() {
            return Ok(());
        }
        match request {
            ClientRequest::Join => shared.answer_join(connection, row)?,
            ClientRequest::GetLayout => connection.answer(&shared.join_reply(*row).0, None)?,
            ClientRequest::GetFileMap(ino) => {
                shared.answer_file_map(connection, Ino(ino), false)?;
            }
            ClientRequest::GetFileMapForAppend(ino) => {
                shared.answer_file_map(connection, Ino(ino), true)?;
            }
            ClientRequest::WakeReplicator => shared.volume.wake_replication(),
            ClientRequest::WriteAtomic(ino) => {
                let reply = shared.write_atomic(connection, Ino(ino), memory)?;
                connection.answer(&reply, None)?;
            }
            ClientRequest::ReleaseRow => {
                if let Some(number) = row.take() {
                    shared.clean_up(number, connection);
                }
            }
            ClientRequest::Connect => {
                if let Some(socket) = memory {
                    accept_connection(shared, socket);
                }
            }
            ClientRequest::GetBrickSocket(leg) => {
                let (reply, socket) = shared.brick_socket(leg);
                connection.answer(&reply, socket.as_ref().map(AsFd::as_fd))?;
            }
            ClientRequest::GetCounters => connection.answer_counters()?,
            ClientRequest::GetStatus => {
                let memory = shared.status()?;
                connection.answer(&MountReply::Success, Some(memory.as_fd()))?;
            }
        }
    }
    Ok(())
}

impl ClientConnection {
    fn answer(&self, reply: &MountReply, memory: Option<BorrowedFd<'_>>) -> io::Result<()> {
        wire::send(self.socket.as_fd(), &reply.encode(), memory)
    }

    fn answer_counters(&self) -> io::Result<()> {
        let counters = self.record.counters();
        let memory = counters.map(|counters| counters.file().as_fd());
        let reply = memory.map_or(MountReply::Unavailable, |_| MountReply::Success);
        self.answer(&reply, memory)
    }
}

impl ServerShared {
    /// Gives a row to a client that has none, if one is free.
    fn answer_join(
        &self,
        connection: &Arc<ClientConnection>,
        row: &mut Option<usize>,
    ) -> io::Result<()> {
        if row.is_none() {
            *row = self.assign_row(connection);
            if row.is_none() {
                self.clients.count_refusal(RefusalReason::NoFreeRow);
            }
        }
        let (reply, segment) = self.join_reply(*row);
        connection.answer(&reply, segment.map(|segment| segment.file().as_fd()))
    }

    fn join_reply(&self, row: Option<usize>) -> (MountReply, Option<&DirectSegment>) {
        match row.zip(self.segment()) {
            Some((row, segment)) => {
                let lease = self.volume.layout_lease();
                (MountReply::Joined(row as u32, lease), Some(segment))
            }
            // It may be given one later.
            None => (MountReply::Unavailable, self.segment()),
        }
    }

    fn answer_file_map(
        self: &Arc<ServerShared>,
        connection: &ClientConnection,
        ino: Ino,
        grows: bool,
    ) -> io::Result<()> {
        let (reply, file_map) = self.publish_file_map(ino, grows);
        let memory = file_map
            .as_ref()
            .map(|file_map| file_map.file_map().file().as_fd());
        connection.answer(&reply, memory)
    }

    /// The socket of the brick of a leg. The client connects to it itself, so that the brick knows
    /// its process.
    fn brick_socket(&self, leg: u64) -> (MountReply, Option<OwnedFd>) {
        let found = || {
            let lease = self.volume.layout_lease()?;
            let lease_leg = lease.legs.get(usize::try_from(leg).ok()?)?;
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            rustix::fs::open(&lease_leg.socket, flags, Mode::empty()).ok()
        };
        match found() {
            Some(socket) => (MountReply::Success, Some(socket)),
            None => (MountReply::Unavailable, None),
        }
    }

    /// The status that `pagemesh mount status` shows, as JSON.
    fn status(&self) -> io::Result<File> {
        let files = {
            let file_maps = lock(&self.file_maps);
            let published = file_maps.iter().filter_map(|(ino, file_map)| {
                let file_map = file_map.upgrade()?;
                (!file_map.file_map().is_outdated()).then_some(ino.0)
            });
            published.collect()
        };
        let rows = lock(&self.rows).iter().flatten().count();
        let hindrance = self.segment().and_then(DirectSegment::disabled_reason);
        let status = self.clients.status(hindrance, rows, files);
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let mut memory = File::from(rustix::fs::memfd_create("pagemesh-status", flags)?);
        memory.write_all(&serde_json::to_vec(&status)?)?;
        Ok(memory)
    }

    /// Overwrites parts of a file together for a client that cannot do so itself. It does nothing
    /// once the client has exited.
    ///
    /// **Lost update:** a process that saw the client end may have changed the file since. A late
    /// write must not overwrite that.
    fn write_atomic(
        &self,
        connection: &ClientConnection,
        ino: Ino,
        memory: Option<OwnedFd>,
    ) -> io::Result<MountReply> {
        let (Some(fs), Some(memory)) = (self.fs.upgrade(), memory) else {
            return Ok(MountReply::Failed(Errno::OPNOTSUPP.raw_os_error()));
        };
        let mut bytes = Vec::new();
        let mut memory = File::from(memory).take(wire::PARTS_BYTES_MAX as u64 + 1);
        memory.read_to_end(&mut bytes)?;
        let parts = wire::decode_parts(&bytes.into()).map_err(io::Error::other)?;
        let written = fs.borrow_channel().and_then(|mut port| {
            fs.write_atomic(&mut port, ino, &parts, || connection.awaits_reply())
        });
        Ok(match written {
            Ok(()) => MountReply::Success,
            Err(cause) => {
                tracing::debug!(%cause, ino = ino.0, "parts of a file were not written together");
                MountReply::Failed(cause.errno().raw_os_error())
            }
        })
    }
}
